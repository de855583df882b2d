"""Recorded conversations of the browser client, posted again: each is answered as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Exchange, Tab
from e2e.server import ChatServer

pytestmark = pytest.mark.anyio

REQUESTS = sorted((Path(__file__).parent / "data" / "requests").glob("*.json"))
TALKS = {
    name: list(paths) for name, paths in groupby(REQUESTS, lambda path: path.stem.rsplit("-", 1)[0])
}
OUTCOMES = {
    "error": ["error", "success", "success"],
    "pending-blocks-input": ["interrupt", "error"],
    "http-resume-empty": ["interrupt"],
}
"""How the runs of a talk ended where not every one was a success or a pause."""


def actual_ids(body: dict[str, Any], page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Recorded ids of assistants, calls and generic questions, and those that this server gave
    them: what stands in one place is the same."""
    shown = [m for m in page["messages"] if m["role"] != "activity"]
    anchors = [
        row
        for row in body["messages"]
        if row["role"] == "user" or "content" in row or "toolCalls" in row
        if row["role"] in ("user", "assistant")
    ]
    for row, message in zip(anchors, shown, strict=False):
        if row["role"] != "assistant" or message["role"] != "assistant":
            continue
        yield row["id"], message["id"]
        calls = [p for p in message["parts"] if p["type"] == "tool-call"]
        for call, part in zip(row.get("toolCalls", ()), calls, strict=False):
            yield call["id"], part["id"]
    waiting = (page["interrupts"] or {}).get("pending", ())
    for entry, descriptor in zip(body.get("resume", ()), waiting, strict=False):
        if entry["interruptId"].startswith("interrupt-"):
            yield entry["interruptId"], descriptor["id"]


async def post(tab: Tab, record: dict[str, Any]) -> Exchange:
    """One recorded request, with the ids of this server in place of the recorded ones."""
    text = json.dumps(record["body"])
    for recorded, actual in actual_ids(record["body"], await tab.load()):
        text = text.replace(recorded, actual)
    body = {**json.loads(text), "threadId": tab.thread_id}
    return [exchange async for exchange in tab.stream(body)][-1]


@pytest.mark.parametrize("name", TALKS)
async def test_a_recorded_talk_is_answered_as_it_was(server: ChatServer, name: str) -> None:
    """Placeholders, failed rows, windows, lost ids, resume entries and all: no request is refused
    that was not, what paused pauses, and the model always gets a whole history."""
    outcomes: list[str | None] = []
    async with httpx.AsyncClient(timeout=30) as http:
        tab = Tab(http, server.url, f"replayed-{name}")
        for path in TALKS[name]:
            record = json.loads(path.read_text(encoding="utf-8"))
            if "last-event-id" in record["headers"]:
                continue  # a reconnect names an event of the server that was recorded
            exchange = await post(tab, record)
            assert exchange.status == 200, exchange.refusal
            check_events(exchange.events)
            outcomes.append(exchange.outcome)
            if "SCENARIO:inspect" in json.dumps(record["body"]["messages"][-1:]):
                whole(json.loads(said(exchange)))
        page = await tab.load()
    expected = OUTCOMES.get(name) or ["success"] * len(outcomes)
    if name not in OUTCOMES and re.match("approval|client-tool|generic|ui-resource$", name):
        expected[0] = "interrupt"
    assert outcomes == expected
    assert page["activeRun"] is None
    assert (page["interrupts"] is not None) == (
        name in ("pending-blocks-input", "http-resume-empty")
    )


def said(exchange: Exchange) -> str:
    return "".join(e["delta"] for e in exchange.events if e["type"] == "TEXT_MESSAGE_CONTENT")


def whole(rows: list[dict[str, Any]]) -> None:
    """Every call that the model is shown has its one result."""
    calls = [call for row in rows for call in row.get("toolCalls", ())]
    results = [row["toolCallId"] for row in rows if row["role"] == "tool"]
    assert sorted(calls) == sorted(results)
    assert len({*calls}) == len(calls)
