"""Widgets, structured answers and activities over HTTP: what streams comes back, in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.scripted import WIDGET, browser_tools
from chatkeep.testkit.tab import Tab, user_message
from e2e.checks import NewTab, model_input, paused, reloaded, well_formed
from e2e.server import ChatServer, until

pytestmark = pytest.mark.anyio


def parts(tab: Tab, kind: str) -> list[dict[str, Any]]:
    return [part for message in tab.messages for part in message["parts"] if part["type"] == kind]


# -------------------------------------------------------------------------------- widgets


@pytest.mark.parametrize("source", ["tool", "model"])
async def test_a_widget_comes_back_with_its_message_once(new_tab: NewTab, source: str) -> None:
    """Emitted by a tool, or in the model's stream as well; the model never sees it."""
    tab = new_tab()
    exchange = await tab.send(f'SCENARIO:ui-resource-plain {{"widgetFrom": "{source}"}}')
    well_formed(exchange)
    assert exchange.outcome == "success"
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    (widget,) = parts(fresh, "ui-resource")
    (call,) = parts(fresh, "tool-call")
    assert widget == {"type": "ui-resource", **WIDGET, "toolCallId": call["id"]}
    assert any(widget in m["parts"] and call in m["parts"] for m in fresh.messages)
    if source == "tool":
        assert comparable(fresh.messages) == comparable(tab.messages)
    rows = await model_input(fresh)
    assert "fireflies</p>" not in json.dumps(rows)
    again = await reloaded(new_tab, fresh)
    assert parts(again, "ui-resource") == [widget]


@pytest.mark.parametrize("scenario", ["ui-resource", "ui-resource-parallel"])
async def test_a_widget_is_in_the_snapshot_of_the_pause(new_tab: NewTab, scenario: str) -> None:
    """The snapshot replaces what the page shows, so it has to carry what was just emitted; the
    continuation keeps it."""
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send(f"SCENARIO:{scenario}")
    assert exchange.types.count("CUSTOM") == 1
    snapshot = next(e for e in exchange.events if e["type"] == "MESSAGES_SNAPSHOT")
    carried = [
        resource
        for row in snapshot["messages"]
        for resource in row.get("metadata", {}).get("tanstack", {}).get("uiResources", ())
    ]
    fresh = await paused(new_tab, tab, exchange)
    assert carried == parts(fresh, "ui-resource") == parts(tab, "ui-resource")
    assert len(carried) == 1
    fresh.output("await_widget_result", {"clicked": True})
    answered = await fresh.resume()
    well_formed(answered)
    assert fresh.text == 'Widget outcome: widget shown | {"clicked":true}'
    again = await reloaded(new_tab, fresh)
    assert parts(again, "ui-resource") == carried
    await model_input(again)
    assert parts(await reloaded(new_tab, again), "ui-resource") == carried


# --------------------------------------------------------------------------- structured


RECORD = {"name": "Ada", "age": 36}
RAW = '{"name":"Ada","age":36}'


@pytest.mark.parametrize("tool", [False, True], ids=["", "tool"])
@pytest.mark.parametrize("how", ["native", "separate", "event"])
async def test_a_structured_answer_comes_back_as_one(new_tab: NewTab, how: str, tool: bool) -> None:
    """However the model makes it: the part is complete, the next turn posts it as text and does
    not wipe it, and the model is told its raw text."""
    tab = new_tab()
    exchange = await tab.send(f"SCENARIO:structured {json.dumps({'as': how, 'tool': tool})}")
    well_formed(exchange)
    assert exchange.outcome == "success"
    fresh = await reloaded(new_tab, tab)
    (part,) = parts(fresh, "structured-output")
    assert (part["status"], part["data"], part["raw"]) == ("complete", RECORD, RAW)
    rows = await model_input(fresh)
    assert any(RAW in row.get("text", "") for row in rows if row["role"] == "assistant")
    posting = await reloaded(new_tab, fresh)
    assert parts(posting, "structured-output") == [part]


@pytest.mark.parametrize(
    ("raw", "code"),
    [("", "structured-output-missing-result"), ("{nope", "structured-output-parse-failed")],
)
async def test_an_answer_that_is_not_the_record_is_an_error(
    new_tab: NewTab, raw: str, code: str
) -> None:
    """The run fails with a code; the next turn works."""
    tab = new_tab()
    exchange = await tab.send(f"SCENARIO:structured {json.dumps({'raw': raw})}")
    well_formed(exchange)
    assert exchange.outcome == "error"
    assert exchange.terminal is not None
    assert exchange.terminal["code"] == code
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert fresh.messages[0]["id"] == tab.messages[0]["id"]
    assert (await fresh.send("SCENARIO:text")).outcome == "success"


# ---------------------------------------------------------------------------- activities

FOUND = {"query": "fireflies", "found": 3, "done": True}


async def test_an_activity_comes_back_in_its_place(new_tab: NewTab) -> None:
    """Between the question and the answer, patched, over later turns, never to the model; a
    client that posts it back as an empty assistant changes nothing."""
    tab = new_tab()
    exchange = await tab.send("SCENARIO:activity")
    well_formed(exchange)
    assert {"ACTIVITY_SNAPSHOT", "ACTIVITY_DELTA"} < {*exchange.types}
    fresh = await reloaded(new_tab, tab)
    assert [m["role"] for m in fresh.messages] == ["user", "activity", "assistant"]
    (part,) = parts(fresh, "activity")
    assert part == {"type": "activity", "activityType": "search", "content": FOUND}
    rows = await model_input(fresh)
    assert [row["role"] for row in rows] == ["user", "assistant", "user"]
    again = await reloaded(new_tab, fresh)
    assert [m["role"] for m in again.messages] == [
        "user", "activity", "assistant", "user", "assistant",
    ]  # fmt: skip
    await again.send("SCENARIO:activity")
    last = await reloaded(new_tab, again)
    assert [m["role"] for m in last.messages][-3:] == ["user", "activity", "assistant"]
    assert len(parts(last, "activity")) == 2


async def test_an_activity_of_a_failed_run_is_kept(new_tab: NewTab) -> None:
    """The row was on the page; a reload has it, and the next turn goes behind it."""
    tab = new_tab()
    exchange = await tab.send('SCENARIO:activity {"then": "error"}')
    assert exchange.outcome == "error"
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert [m["role"] for m in fresh.messages] == ["user", "activity"]
    assert parts(fresh, "activity")[0]["content"] == FOUND
    await fresh.send("SCENARIO:text")
    await reloaded(new_tab, fresh)


async def test_an_activity_of_a_stopped_run_is_kept(server: ChatServer, new_tab: NewTab) -> None:
    """Cancelled in the middle of its answer; the row was on the page, and a reload has it."""
    import asyncio

    tab = new_tab()
    tab.messages.append(
        user_message('SCENARIO:activity {"then": "slow", "chunks": 400, "delayMs": 20}')
    )
    body = tab.body()

    async def watch() -> None:
        async for _ in tab.stream(body):
            pass

    running = asyncio.ensure_future(watch())
    await until(lambda: "w2 " in tab.text)
    assert (await tab.cancel_run(body["runId"])).status_code == 200
    await running
    assert [m["role"] for m in tab.messages] == ["user", "activity", "assistant"]
    fresh = new_tab(tab.thread_id)
    assert (await fresh.load())["activeRun"] is None
    assert [m["role"] for m in fresh.messages] == ["user", "activity"]
    assert parts(fresh, "activity")[0]["content"] == FOUND


async def test_regenerating_takes_the_activities_of_the_old_answer(new_tab: NewTab) -> None:
    """They are cut together with it; what stood before it stays; a regenerate that fails without
    output takes neither."""
    tab = new_tab()
    await tab.send("SCENARIO:activity")
    await tab.send("SCENARIO:activity")
    old = [m["id"] for m in tab.messages]
    await tab.regenerate()
    fresh = await reloaded(new_tab, tab)
    roles = [m["role"] for m in fresh.messages]
    assert roles == ["user", "activity", "assistant"] * 2
    ids = [m["id"] for m in fresh.messages]
    assert ids[:4] == old[:4]
    assert not set(ids[4:]) & set(old)


async def test_an_activity_survives_a_pause_and_its_answer(new_tab: NewTab) -> None:
    """Rows of earlier turns are not in a model's snapshot; the page keeps them in their place."""
    tab = new_tab(tools=browser_tools())
    await tab.send("SCENARIO:activity")
    exchange = await tab.send("SCENARIO:approval")
    fresh = await paused(new_tab, tab, exchange)
    assert [m["role"] for m in fresh.messages] == [
        "user", "activity", "assistant", "user", "assistant",
    ]  # fmt: skip
    fresh.approve()
    assert (await fresh.resume()).outcome == "success"
    again = await reloaded(new_tab, fresh)
    assert [m["role"] for m in again.messages].count("activity") == 1
