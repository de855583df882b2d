"""What must hold of every answer and of every page load."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from chatkeep import open_persistence
from chatkeep.testkit.client import comparable
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Exchange, Tab
from e2e.server import ChatServer

__all__ = [
    "NewTab",
    "broken_off",
    "kept",
    "model_input",
    "nulls",
    "paused",
    "refused",
    "reloaded",
    "well_formed",
]

NewTab = Callable[..., Tab]


def nulls(value: Any, path: str = "$") -> list[str]:
    """Where an object has a null."""
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in nulls(v, f"{path}.{k}")] + [
            f"{path}.{k}" for k, v in value.items() if v is None
        ]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in nulls(v, f"{path}[{i}]")]
    return []


def well_formed(exchange: Exchange) -> None:
    """Framing, ids and order of one answer."""
    assert exchange.status == 200
    assert exchange.headers["content-type"] == "text/event-stream"
    assert exchange.headers["cache-control"].startswith("no-cache")
    assert exchange.headers["x-accel-buffering"] == "no"
    assert None not in exchange.offsets
    assert len(set(exchange.offsets)) == len(exchange.offsets)
    check_events(exchange.events)
    assert not [p for e in exchange.events if e["type"] != "CUSTOM" for p in nulls(e)]
    for event in exchange.events:
        assert event.get("threadId", "same") in (
            "same",
            exchange.body and exchange.body["threadId"],
        )
        assert event.get("runId", exchange.run_id) == exchange.run_id


async def reloaded(new_tab: NewTab, tab: Tab) -> Tab:
    """A fresh page on the same thread shows the same, and nothing waits or runs."""
    fresh = new_tab(tab.thread_id, tools=tab.tools)
    await fresh.load()
    assert comparable(fresh.messages) == comparable(tab.messages)
    assert fresh.hydrated["activeRun"] is None
    assert fresh.hydrated["interrupts"] is None
    assert not nulls(fresh.messages)
    return fresh


async def paused(new_tab: NewTab, tab: Tab, exchange: Exchange, *, count: int = 1) -> Tab:
    """The run paused with ``count`` questions, visible only once they were stored: a fresh page
    shows the same messages, and the same descriptors bound to this run."""
    well_formed(exchange)
    assert exchange.outcome == "interrupt"
    assert exchange.types[-3:] == ["MESSAGES_SNAPSHOT", "STATE_SNAPSHOT", "RUN_FINISHED"]
    assert exchange.terminal is not None
    assert "finishReason" not in exchange.terminal["metadata"]["tanstack"]
    assert len(exchange.interrupts) == count
    for descriptor in exchange.interrupts:
        binding = descriptor["metadata"]["tanstack:interruptBinding"]
        assert binding["interruptedRunId"] == exchange.run_id
        assert binding["interruptId"] == descriptor["id"]
    fresh = new_tab(tab.thread_id, tools=tab.tools)
    await fresh.load()
    assert comparable(fresh.messages) == comparable(tab.messages)
    assert not nulls(fresh.hydrated["messages"])
    assert fresh.hydrated["activeRun"] is None
    waiting = fresh.hydrated["interrupts"]
    assert waiting["runId"] == exchange.run_id
    assert waiting["pending"] == [{**d, "owner": True} for d in exchange.interrupts]
    return fresh


def refused(exchange: Exchange, item: str | None, batch: str, *, parent: str | None = None) -> None:
    """The answer is a refusal that the browser client recognises as its own: a RUN_STARTED and a
    RUN_ERROR whose errors name the thread, the run that was continued and what was sent."""
    well_formed(exchange)
    assert exchange.types == ["RUN_STARTED", "RUN_ERROR"]
    assert exchange.terminal is not None
    assert exchange.body is not None
    errors = exchange.interrupt_errors
    named = parent or exchange.body.get("parentRunId")
    sent = sorted({entry["interruptId"] for entry in exchange.body.get("resume", ())})
    for error in errors:
        assert error["threadId"] == exchange.body["threadId"]
        assert error["generation"] == 0
        assert error["retryable"] is False
        assert error["message"]
        if named is not None:
            assert error["interruptedRunId"] == named
    items = [e for e in errors if e["scope"] == "item"]
    batches = [e for e in errors if e["scope"] == "batch"]
    assert errors == [*items, *batches]
    assert batches
    assert all(sorted({*e["interruptIds"]}) == sent for e in batches)
    assert batch in [e["code"] for e in batches]
    if item is not None:
        assert item in [e["code"] for e in items]
    assert exchange.terminal["code"] == errors[0]["code"]


async def kept(server: ChatServer, new_tab: NewTab, thread_id: str) -> dict[str, Any]:
    """All that is there of a thread: its page load, and in a database everything else."""
    found: dict[str, Any] = {"page": await new_tab(thread_id).load()}
    if not server.store.startswith("memory"):
        async with open_persistence(server.store) as persistence:
            found["stored"] = await persistence.export_thread(thread_id)
    return found


async def model_input(tab: Tab) -> list[dict[str, Any]]:
    """What the model is given in the next turn: every call has its one result."""
    await tab.send("SCENARIO:inspect")
    rows: list[dict[str, Any]] = json.loads(tab.text)
    calls = [call for row in rows for call in row.get("toolCalls", ())]
    results = [row["toolCallId"] for row in rows if row["role"] == "tool"]
    assert sorted(calls) == sorted(results)
    assert len(set(calls)) == len(calls)
    return rows


async def broken_off(answer: Awaitable[object]) -> None:
    """Wait for an answer whose server dies."""
    try:
        await answer
    except httpx.TransportError:
        return
