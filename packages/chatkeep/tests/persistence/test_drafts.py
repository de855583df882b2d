"""Streaming snapshots: in the draft slot, shown by a reload, settled by the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    RunErrorEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import ChatMiddleware
from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.engine.middleware import ChatContext
from chatkeep.errors import CompositionError
from chatkeep.persistence import hydrate_thread, with_persistence
from chatkeep.stores import ViewQuery

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg")


async def drafts(lab: Any) -> list[Any]:
    (backend,) = lab.persistence.backends
    return (await backend.read_view("t1", ViewQuery(messages="none", drafts=True))).drafts


async def settled(lab: Any, count: int = 1) -> None:
    """Until ``count`` drafts are written."""
    await lab.until(lambda: lab.faults.applied["save_draft"] >= count)


async def test_without_the_option_nothing_is_drafted(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1", 'SCENARIO:slow {"chunks": 3, "delayMs": 1}'))
    assert lab.faults.calls["save_draft"] == 0


async def test_the_first_text_is_drafted_at_once_and_outside_the_transcript(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced()
    middleware = lab.middleware(snapshot_streaming=True)
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await settled(lab)
    (draft,) = await drafts(lab)
    (row,) = draft.messages
    assert row["content"] == "one "
    assert row["createdAt"]
    assert row["metadata"]["tanstack"]["run"] == {"id": "r1"}
    assert await lab.ids() == ["u1"]
    model.go.set()
    await task
    assert await drafts(lab) == []
    assert (await lab.stored())[1]["id"] == row["id"]
    assert middleware.counters["drafts_saved"] == 1


async def test_drafts_are_throttled(lab: Any, kit: Any) -> None:
    middleware = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=10_000)
    await lab.turn(
        kit.user("u1", 'SCENARIO:slow {"chunks": 30, "delayMs": 1}'), middleware=middleware
    )
    assert lab.faults.calls["save_draft"] == 1


async def test_a_slow_store_has_one_draft_on_its_way_and_slows_no_stream(
    lab: Any, kit: Any
) -> None:
    lab.faults.stall("save_draft", seconds=3.0, times=99)
    middleware = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    task = lab.start(
        kit.user("u1", 'SCENARIO:slow {"chunks": 10, "delayMs": 2}'), middleware=middleware
    )
    await lab.until(lambda: lab.faults.applied["commit_turn"] == 2)
    assert lab.faults.applied["save_draft"] == 0
    await task
    assert lab.faults.calls["save_draft"] == 1
    assert await drafts(lab) == []
    assert (await lab.said())[1].startswith("assistant: w0 w1")
    assert middleware.counters["draft_failures"] == 0


async def test_a_draft_that_comes_after_the_finish_replaces_nothing(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    lab.faults.stall("save_draft", seconds=0.1)
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await model.said.wait()
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert await drafts(lab) == []


@pytest.mark.parametrize(("how", "reason"), [("error", "error"), ("abort", "aborted")])
async def test_an_unfinished_answer_is_kept_with_its_stop_reason(
    lab: Any, kit: Any, how: str, reason: str
) -> None:
    model = kit.Paced(
        before=("Hello ", "wor"),
        after=(),
        error=RuntimeError("provider down") if how == "error" else None,
    )
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await settled(lab)
    (draft,) = await drafts(lab)
    if how == "error":
        model.go.set()
        await task
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    _, answer = await lab.stored()
    assert answer["content"] == "Hello wor"
    assert answer["id"] == draft.messages[0]["id"]
    assert answer["metadata"]["tanstack"]["stopReason"] == reason
    assert await drafts(lab) == []
    # The next turn works, and the model is not shown the torn answer.
    model = kit.Paced(waits=False)
    await lab.turn(kit.user("u2"), adapter=model)
    assert [m["role"] for m in model.requests[0].messages] == ["user", "user"]


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("moment", ["on_chunk", "on_interrupt_boundary"])
@pytest.mark.parametrize("in_front", [True, False])
async def test_an_answer_that_a_hook_refuses_is_not_kept_not_even_in_part(
    lab: Any, kit: Any, snapshots: bool, moment: str, in_front: bool
) -> None:
    """What the tools did before it stays."""

    class Leaks(Talks):
        def script(self, request: ModelRequest) -> list[BaseEvent]:
            if len(self.requests) == 1:
                return [
                    *says(request, "Looking up. "),
                    *calls(request, "get_weather", '{"city":"Paris"}'),
                    model_finished(request, "tool_calls"),
                ]
            return [*says(request, "the secret"), model_finished(request, "stop")]

    class Guard(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: BaseEvent) -> None:
            if moment == "on_chunk" and isinstance(event, RunFinishedEvent):
                self.judge(ctx)

        async def on_interrupt_boundary(self, ctx: ChatContext, boundary: str) -> None:
            if moment == "on_interrupt_boundary" and boundary == "afterModel":
                self.judge(ctx)

        def judge(self, ctx: ChatContext) -> None:
            if "secret" in ctx.accumulated_content:
                raise RuntimeError("the answer was rejected")

    keep = lab.middleware(snapshot_streaming=snapshots, snapshot_interval_ms=0)
    chain = [Guard(), keep] if in_front else [keep, Guard()]
    events = await lab.turn(kit.user("u1"), adapter=Leaks(), middleware=chain)
    assert isinstance(kit.terminal(events), RunErrorEvent)
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool"]
    body = await hydrate_thread(lab.persistence, "t1", include_runs=True)
    exported = await lab.persistence.export_thread("t1")
    assert "secret" not in f"{body} {exported}"
    run = await lab.run("r1")
    assert (run.status, run.error.message) == ("failed", "the answer was rejected")


async def test_without_snapshots_an_unfinished_answer_leaves_no_trace(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1", "SCENARIO:error"))
    assert await lab.ids() == ["u1"]


async def test_a_regenerate_that_fails_drops_its_draft(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("old"))
    model = kit.Paced(error=RuntimeError("no"))
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await settled(lab)
    model.go.set()
    await task
    assert await lab.ids() == ["u1", "old"]
    assert await drafts(lab) == []


async def test_finished_messages_of_a_failed_run_are_kept_without_a_stop_reason(
    lab: Any, kit: Any
) -> None:
    class Fails(Talks):
        def script(self, request: ModelRequest) -> list[BaseEvent]:
            if len(self.requests) == 1:
                return [
                    *says(request, "Looking up. "),
                    *calls(request, "get_weather", '{"city":"Paris"}'),
                    model_finished(request, "tool_calls"),
                ]
            return says(request, "half")[:-1]

    lab_middleware = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    await lab.turn(kit.user("u1"), adapter=Fails(), middleware=lab_middleware)
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant", "tool", "assistant"]
    bags = [m.get("metadata", {}).get("tanstack", {}) for m in rows]
    assert [bag.get("stopReason") for bag in bags] == [None, None, None, "error"]


async def test_a_draft_keeps_the_call_metadata_of_a_finished_message_and_no_other(
    lab: Any, kit: Any
) -> None:
    source = {"provider": "p", "api": "a", "model": "m"}
    noise = {"sessionId": "s", "index": 3, "source": source, "responseId": "resp", "model": "m"}

    class Noisy(Talks):
        hold = asyncio.Event()

        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            identity = request.message_id
            yield TextMessageStartEvent(message_id=identity, metadata={"tanstack": noise})
            yield TextMessageContentEvent(message_id=identity, delta="x")
            await self.hold.wait()

    model = Noisy()
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await settled(lab)
    (draft,) = await drafts(lab)
    bag = dict(draft.messages[0]["metadata"]["tanstack"])
    assert bag.pop("run") == {"id": "r1"}
    assert bag == {"source": source, "responseId": "resp", "model": "m"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_turn_without_a_text_id_uses_the_parent_of_its_calls(lab: Any, kit: Any) -> None:
    class Odd(Talks):
        def script(self, request: ModelRequest) -> list[BaseEvent]:
            if len(self.requests) == 1:
                return [
                    *calls(request, "get_weather", '{"city":"Paris"}', parent="parent-1"),
                    TextMessageStartEvent(message_id=""),
                    TextMessageContentEvent(message_id="", delta="text"),
                    TextMessageEndEvent(message_id=""),
                    model_finished(request, "tool_calls"),
                ]
            return [*says(request, "done"), model_finished(request, "stop")]

    await lab.turn(
        kit.user("u1"), adapter=Odd(), middleware=lab.middleware(snapshot_streaming=True)
    )
    ids = await lab.ids()
    assert ids[1] == "parent-1"
    assert len(set(ids)) == 4


async def test_a_draft_that_cannot_be_written_is_reported_and_the_run_goes_on(
    lab: Any, kit: Any
) -> None:
    told: list[str] = []
    middleware = lab.middleware(
        snapshot_streaming=True, on_persistence_error=lambda phase, _: told.append(phase)
    )
    lab.faults.refuse("save_draft", times=9)
    events = await lab.turn(kit.user("u1"), middleware=middleware)
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert told in ([], ["draft"])  # the run may end before the draft fails
    model = kit.Paced()
    task = lab.start(kit.user("u2"), adapter=model, middleware=middleware)
    await lab.until(lambda: middleware.counters["draft_failures"] > 0)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert "draft" in told


async def test_a_draft_store_with_a_bug_breaks_no_run(lab: Any, kit: Any) -> None:
    middleware = lab.middleware(snapshot_streaming=True)
    lab.faults.refuse("save_draft", error=ValueError("a bug"))
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await lab.until(lambda: middleware.counters["draft_failures"] > 0)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)


async def test_a_lost_run_is_settled_from_its_draft_by_the_sweep(kit: Any) -> None:
    from chatkeep.memory import memory_persistence

    now = 1_000_000
    lab = kit.Lab(memory_persistence(clock=lambda: now))
    model = kit.Paced()
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await settled(lab)
    now += 30_001
    shown = await hydrate_thread(lab.persistence, "t1")
    assert shown["activeRun"] is None
    assert [m["role"] for m in shown["messages"]] == ["user", "assistant"]
    await lab.persistence.maintenance().sweep()
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]
    # The worker was only slow: what it brings takes the place of what the sweep kept.
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert (await lab.run("r1")).status == "completed"


async def test_drafts_need_a_runs_store_that_has_them() -> None:
    from chatkeep.compose import compose_persistence
    from chatkeep.memory import memory_persistence

    bare = compose_persistence(memory_persistence(), overrides={"runs": False, "interrupts": False})
    with pytest.raises(CompositionError, match="snapshot_streaming"):
        with_persistence(bare, snapshot_streaming=True)


# ------------------------------------------------------------------------------ models


class Talks:
    """Plays what ``script`` returns; a call without its end fails afterwards."""

    provider = "talks"
    model = "talks-1"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    def script(self, request: ModelRequest) -> list[BaseEvent]:
        raise NotImplementedError

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        self.requests.append(request)
        events = self.script(request)
        for event in events:
            yield event
            await asyncio.sleep(0)
        if not isinstance(events[-1], RunFinishedEvent):
            raise RuntimeError("the stream broke off")


def says(request: ModelRequest, text: str) -> list[BaseEvent]:
    identity = request.message_id
    return [
        TextMessageStartEvent(message_id=identity),
        TextMessageContentEvent(message_id=identity, delta=text),
        TextMessageEndEvent(message_id=identity),
    ]


def calls(
    request: ModelRequest, name: str, arguments: str, *, parent: str | None = None
) -> list[BaseEvent]:
    return [
        ToolCallStartEvent(
            tool_call_id="c1",
            tool_call_name=name,
            parent_message_id=parent or request.message_id,
        ),
        ToolCallArgsEvent(tool_call_id="c1", delta=arguments),
        ToolCallEndEvent(tool_call_id="c1"),
    ]


async def test_half_a_character_is_in_no_draft(lab: Any, kit: Any) -> None:
    """The next piece brings the other half: until then neither the draft nor a reload has it."""
    model = kit.Paced(before=("ok ", "\ud83d"), after=("\ude00", "!"))
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.said.wait()
    await settled(lab)
    (draft,) = await drafts(lab)
    assert draft.messages[0]["content"] == "ok "
    model.go.set()
    await task
    assert await lab.said() == ["user: hello", "assistant: ok \U0001f600!"]
