"""Tools of the browser, generic questions and mixed batches over HTTP, on every store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep.testkit.scripted import browser_tools
from e2e.checks import NewTab, kept, model_input, paused, refused, reloaded, well_formed
from e2e.server import ChatServer

pytestmark = pytest.mark.anyio

CANCELLED = '{"error":"Tool execution cancelled"}'
SENT = '{"sent":true,"to":"ada@example.com"}'


@pytest.mark.parametrize("where", ["live", "reloaded"])
async def test_the_output_of_a_tool_of_the_browser_is_its_result(
    new_tab: NewTab, where: str
) -> None:
    """Streamed, stored and told to the model under the call's own row."""
    live = new_tab(tools=browser_tools())
    exchange = await live.send("SCENARIO:client-tool")
    loaded = await paused(new_tab, live, exchange)
    (descriptor,) = exchange.interrupts
    assert descriptor["responseSchema"]["required"] == ["city"]
    assert descriptor["metadata"]["tanstack:interruptBinding"]["outputSchemaHash"] == (
        "sha256:5f118feb63f080e5bd34bc71f32b2e9efba28cc852774cb88f549245301bb7b7"
    )
    tab = live if where == "live" else loaded
    tab.output(value={"city": "Berlin"})
    answered = await tab.resume()
    well_formed(answered)
    (result,) = [e for e in answered.events if e["type"] == "TOOL_CALL_RESULT"]
    assert result["toolCallId"] == descriptor["toolCallId"]
    assert tab.text == 'Location outcome: {"city":"Berlin"}'
    fresh = await reloaded(new_tab, tab)
    await model_input(fresh)


@pytest.mark.parametrize("marked", [False, True], ids=["row", "marker"])
async def test_a_tool_of_the_browser_that_fails_stays_failed(new_tab: NewTab, marked: bool) -> None:
    """Said by the posted row (client 0.33) or by the entry's marker: the output schema is not
    asked, and stream, store, reload and model all have the failure."""
    tab = new_tab(tools=browser_tools())
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:client-tool"))
    tab.fail(text="permission denied", marked=marked)
    exchange = await (tab.resume(messages=[]) if marked else tab.resume())
    well_formed(exchange)
    (result,) = [e for e in exchange.events if e["type"] == "TOOL_CALL_RESULT"]
    assert result["metadata"]["tanstack"]["state"] == "output-error"
    assert tab.text == 'Location outcome: {"error":"permission denied"}'
    fresh = await reloaded(new_tab, tab)
    (part,) = [p for m in fresh.messages for p in m["parts"] if p["type"] == "tool-result"]
    assert (part["state"], part["error"]) == ("error", "permission denied")
    (row,) = [row for row in await model_input(fresh) if row["role"] == "tool"]
    assert (row["text"], row["error"]) == ('{"error":"permission denied"}', "permission denied")
    await reloaded(new_tab, fresh)


async def test_a_success_that_looks_like_a_failure_is_a_success(new_tab: NewTab) -> None:
    """``{"error": …}`` without marker or error row is what the tool returned."""
    tab = new_tab(tools=browser_tools())
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:client-tool-noschema"))
    tab.output(value={"error": "is just a word"})
    assert (await tab.resume()).outcome == "success"
    assert tab.text == 'Color outcome: {"error":"is just a word"}'
    fresh = await reloaded(new_tab, tab)
    (part,) = [p for m in fresh.messages for p in m["parts"] if p["type"] == "tool-result"]
    assert part["state"] == "complete"


async def test_a_large_output_comes_back_whole(new_tab: NewTab) -> None:
    """A megabyte of text is an answer like any other."""
    tab = new_tab(tools=browser_tools())
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:client-tool-noschema"))
    large = "\u00e9\n" * (1 << 19)
    tab.output(value=large)
    assert (await tab.resume()).outcome == "success"
    assert tab.text == f"Color outcome: {large}"
    await reloaded(new_tab, tab)


async def test_an_output_that_the_schema_refuses_is_refused(
    server: ChatServer, new_tab: NewTab
) -> None:
    """Nothing is written, the question waits on, and a right answer is still taken."""
    tab = new_tab(tools=browser_tools())
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:client-tool"))
    before = await kept(server, new_tab, tab.thread_id)
    tab.output(value={"town": 7})
    refused(await tab.resume(), "invalid-tool-output", "item-validation-failed")
    assert await kept(server, new_tab, tab.thread_id) == before
    again = new_tab(tab.thread_id)
    await again.load()
    again.output(value={"city": "Oslo"})
    assert (await again.resume()).outcome == "success"
    assert again.text == 'Location outcome: {"city":"Oslo"}'


async def test_a_cancelled_tool_of_the_browser_has_a_cancelled_result(new_tab: NewTab) -> None:
    tab = new_tab(tools=browser_tools())
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:client-tool"))
    tab.cancel()
    assert (await tab.resume()).outcome == "success"
    assert tab.text == f"Location outcome: {CANCELLED}"
    await reloaded(new_tab, tab)


async def test_a_tool_that_only_the_request_knows(new_tab: NewTab) -> None:
    """Offered by the page, called by the model, answered by the page; the page must offer it
    again, or the answer is stale."""
    tab = new_tab(tools=browser_tools("adhoc_client_tool"))
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:client-tool-adhoc"))
    tab.output(value={"a": 2})
    refused(await tab.resume(tools=[]), "stale", "item-validation-failed")
    await tab.load()
    tab.output(value={"a": 2})
    assert (await tab.resume()).outcome == "success"
    assert tab.text == 'Adhoc outcome: {"a":2}'
    await reloaded(new_tab, tab)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"approved": True}, '{"approved":true}'),
        ({"approved": False}, '{"approved":false}'),
        (None, '{"status":"cancelled"}'),
    ],
)
async def test_a_generic_question_is_asked_and_answered(
    new_tab: NewTab, answer: dict[str, Any] | None, said: str
) -> None:
    """Before the model: the question is all that the pause shows; the answer reaches it."""
    tab = new_tab()
    exchange = await tab.send("SCENARIO:generic")
    assert "TEXT_MESSAGE_START" not in exchange.types
    tab = await paused(new_tab, tab, exchange)
    (descriptor,) = exchange.interrupts
    binding = descriptor["metadata"]["tanstack:interruptBinding"]
    assert (binding["definitionId"], binding["key"], binding["batchIndex"]) == (
        "review-plan",
        "initial-plan",
        0,
    )
    assert binding["responseSchemaHash"] == (
        "sha256:f111104f51bda2c26e17d6938191c0b2bceec42124a9a748e12ae697ffce8190"
    )
    assert binding["payloadSchemaHash"] == (
        "sha256:c0f00621ba42dc1169cada464288b7e72467105c72f48a996833673ce4435390"
    )
    assert descriptor["metadata"]["tanstack:interruptPayload"] == {"title": "Release plan"}
    if answer is None:
        tab.cancel()
    else:
        tab.answer(response=answer)
    answered = await tab.resume()
    well_formed(answered)
    assert answered.outcome == "success"
    assert tab.text == f"Generic outcome: {said}"
    await reloaded(new_tab, tab)


@pytest.mark.parametrize(
    ("boundary", "names"),
    [
        ("afterModel", ["review-plan"]),
        ("beforeTools", ["send_email", "get_location", "review-plan"]),
        ("afterTools", ["send_email", "get_location", "review-plan"]),
    ],
)
async def test_a_generic_question_at_every_boundary(
    server: ChatServer, new_tab: NewTab, boundary: str, names: list[str]
) -> None:
    """Around the tools it shares a batch with what the tools ask; what is left open of the
    browser's tools is asked again by the continuation."""
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send(f'SCENARIO:mixed {{"pause": ["{boundary}"]}}')
    tab = await paused(new_tab, tab, exchange, count=len(names))
    asked = [
        d["metadata"].get("toolName") or d["metadata"]["tanstack:interruptBinding"]["definitionId"]
        for d in exchange.interrupts
    ]
    assert asked == names
    tab.answer(response={"approved": True})
    if "send_email" in names:
        tab.approve()
    second = await tab.resume()
    tab = await paused(new_tab, tab, second, count=1 if "send_email" in names else 2)
    assert "get_location" in [d["metadata"]["toolName"] for d in second.interrupts]
    tab.output("get_location", {"city": "Rome"})
    if "send_email" not in names:
        tab.approve()
    assert (await tab.resume()).outcome == "success"
    assert tab.text == f'Mixed outcome: {SENT} | {{"city":"Rome"}}'
    assert len(server.executed(tab.thread_id)) == 1
    await reloaded(new_tab, tab)


@pytest.mark.parametrize(
    ("policy", "text", "outcome"),
    [("cancel", f"Mixed outcome: {CANCELLED} | {CANCELLED}", "success"), ("stop", "", "success")],
)
async def test_what_the_answer_leads_to_is_the_middlewares_word(
    server: ChatServer, new_tab: NewTab, policy: str, text: str, outcome: str
) -> None:
    """``cancel`` gives every open call a cancelled result, ``stop`` ends the run at once; either
    way nothing is executed and nothing waits any more."""
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send(f'SCENARIO:mixed {{"pause": ["beforeTools"], "policy": "{policy}"}}')
    tab = await paused(new_tab, tab, exchange, count=3)
    tab.answer(response={"approved": False})
    tab.approve()
    tab.output("get_location", {"city": "Rome"})
    answered = await tab.resume()
    well_formed(answered)
    assert answered.outcome == outcome
    assert tab.text == text
    assert server.executed(tab.thread_id) == []
    fresh = new_tab(tab.thread_id)
    assert (await fresh.load())["interrupts"] is None
    await model_input(fresh)


async def test_a_mixed_batch_runs_everything_in_the_order_of_the_calls(
    server: ChatServer, new_tab: NewTab
) -> None:
    """A server tool, an approval and a tool of the browser in one turn: nothing runs before the
    approval is decided, then all results come, in call order."""
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send("SCENARIO:mixed-server")
    assert "TOOL_CALL_RESULT" not in exchange.types
    tab = await paused(new_tab, tab, exchange, count=2)
    assert server.executed(tab.thread_id) == []
    tab.approve()
    tab.output("get_location", {"city": "Rome"})
    answered = await tab.resume()
    results = [e["content"] for e in answered.events if e["type"] == "TOOL_CALL_RESULT"]
    assert results == ['{"city":"Paris","tempC":21}', SENT, '{"city":"Rome"}']
    assert tab.text == "Mixed outcome: " + " | ".join(results)
    assert sorted(c["tool"] for c in server.executed(tab.thread_id)) == [
        "get_weather",
        "send_email",
    ]
    await reloaded(new_tab, tab)


async def test_an_expired_question_can_only_be_cancelled(
    server: ChatServer, new_tab: NewTab
) -> None:
    """The page shows when it expires; then answers are refused, and cancelling frees the
    thread."""
    tab = new_tab()
    exchange = await tab.send('SCENARIO:generic {"expiresInMs": 50}')
    tab = await paused(new_tab, tab, exchange)
    assert exchange.interrupts[0]["expiresAt"]
    await asyncio.sleep(0.1)
    before = await kept(server, new_tab, tab.thread_id)
    tab.answer(response={"approved": True})
    refused(await tab.resume(), "expired", "item-validation-failed")
    assert await kept(server, new_tab, tab.thread_id) == before
    await tab.load()
    tab.cancel()
    assert (await tab.resume()).outcome == "success"
    assert tab.text == 'Generic outcome: {"status":"cancelled"}'
    await reloaded(new_tab, tab)


async def test_two_tabs_that_pause_at_once_are_answered_one_after_the_other(
    new_tab: NewTab,
) -> None:
    """Both questions wait, of each run its own; a page shows those of one run, then those of the
    other, and both turns are whole in the end."""
    one = new_tab()
    two = new_tab(one.thread_id)
    text = 'SCENARIO:slow {"chunks": 3, "delayMs": 150, "pause": ["afterModel"]}'
    first, second = await asyncio.gather(one.send(text), two.send(text))
    assert (first.outcome, second.outcome) == ("interrupt", "interrupt")
    answered: list[str | None] = []
    for _ in range(2):
        page = new_tab(one.thread_id)
        await page.load()
        answered.append(page.view.paused_run)
        assert len(page.pending) == 1
        page.answer(response={"approved": True})
        assert (await page.resume()).outcome == "success"
    assert {*answered} == {first.run_id, second.run_id}
    last = new_tab(one.thread_id)
    assert (await last.load())["interrupts"] is None
    shown = [m["id"] for m in last.messages]
    for tab in (one, two):
        question, answer = (m["id"] for m in tab.messages[-2:])
        assert shown.index(answer) == shown.index(question) + 1
    roles = [m["role"] for m in last.messages]
    assert roles == ["user", "assistant", "assistant"] * 2
    await model_input(last)


async def test_a_continuation_that_fails_gives_the_question_back(
    server: ChatServer, new_tab: NewTab
) -> None:
    """The answer counts only with a boundary that stored what came of it; after an error the
    same question waits. What its tool had done by then is stored, and not done again."""
    tab = new_tab(tools=browser_tools())
    doomed = f"doomed-{tab.thread_id}"
    exchange = await tab.send(f'SCENARIO:approval {{"failsIn": "{doomed}"}}')
    tab = await paused(new_tab, tab, exchange)
    tab.approve()
    failed = await tab.resume(runId=doomed)
    assert failed.outcome == "error"
    again = new_tab(tab.thread_id, tools=browser_tools())
    body = await again.load()
    assert body["activeRun"] is None
    assert [d["id"] for d in body["interrupts"]["pending"]] == [exchange.interrupts[0]["id"]]
    again.approve()
    assert (await again.resume()).outcome == "success"
    assert again.text == f"Email outcome: {SENT}"
    await reloaded(new_tab, again)
    assert len(server.executed(tab.thread_id)) == 1
