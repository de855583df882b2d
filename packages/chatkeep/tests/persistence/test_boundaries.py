"""The interrupt boundary, scopes, and readers that leave: hooks driven one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    Interrupt,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
)

from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.engine.middleware import AbortInfo, ChatConfig, ChatContext, ErrorInfo, FinishInfo
from chatkeep.errors import BackendUnavailable
from chatkeep.persistence import PERSISTENCE_COMPLETION, hydrate_thread
from chatkeep.scope import Scope

pytestmark = pytest.mark.anyio


async def begun(lab: Any, middleware: Any, *messages: Any, run_id: str = "r1") -> ChatContext:
    """A run that has passed its start boundary."""
    ctx = ChatContext(thread_id="t1", run_id=run_id)
    await middleware.setup(ctx)
    patch = await middleware.on_config(ctx, config_of(*messages))
    ctx.messages = list(patch["messages"])
    await middleware.on_start(ctx)
    return ctx


def config_of(*messages: Any) -> ChatConfig:
    return ChatConfig(
        messages=list(messages),
        provider_messages=[],
        system_prompts=[],
        tools=[],
        resume=[],
        resume_tool_state=None,
        metadata={},
        model_options={},
        activities=[],
    )


def pause(*names: str) -> RunFinishedEvent:
    return RunFinishedEvent(
        thread_id="t1",
        run_id="r1",
        outcome=RunFinishedInterruptOutcome(
            type="interrupt",
            interrupts=[
                Interrupt(id=name, reason="approval", message="ok?", tool_call_id=f"c-{name}")
                for name in names
            ],
        ),
    )


async def ended(ctx: ChatContext) -> None:
    await asyncio.gather(*ctx.deferred)


async def test_a_pause_is_one_commit_of_questions_transcript_and_status(lab: Any, kit: Any) -> None:
    middleware = lab.middleware()
    ctx = await begun(lab, middleware, kit.user("u1"))
    await middleware.on_usage(ctx, {"totalTokens": 7})
    ctx.messages.append(kit.assistant("a1", "calling"))
    await middleware.on_interrupt(ctx, pause("i1", "i2"))
    await ended(ctx)
    assert lab.faults.log == ["read_view", "commit_turn", "commit_turn"]
    assert await lab.ids() == ["u1", "a1"]
    run = await lab.run("r1")
    assert (run.status, run.finished_at, run.usage) == ("interrupted", None, {"totalTokens": 7})
    assert run.lease is None
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["i1", "i2"]
    assert body["activeRun"] is None
    assert await ctx.get(PERSISTENCE_COMPLETION).wait() == "interrupted"


async def test_a_pause_that_cannot_be_stored_is_raised_and_the_run_failed(
    lab: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chatkeep.persistence.committer as committer

    monkeypatch.setattr(committer, "OUTAGE_PAUSES", ())
    middleware = lab.middleware()
    ctx = await begun(lab, middleware, kit.user("u1"))
    lab.faults.refuse("commit_turn", times=4)
    with pytest.raises(BackendUnavailable) as caught:
        await middleware.on_interrupt(ctx, pause("i1"))
    error = caught.value
    info = ErrorInfo(error=error, message=str(error), code=error.code, duration_ms=1)
    await middleware.on_error(ctx, info)
    await ended(ctx)
    assert (await lab.run("r1")).status == "failed"
    assert await lab.persistence.stores.interrupts.list("t1") == []


async def test_an_interrupt_id_that_is_taken_fails_the_boundary(lab: Any, kit: Any) -> None:
    from chatkeep.errors import InterruptConflict
    from chatkeep.records import InterruptRecord

    middleware = lab.middleware()
    ctx = await begun(lab, middleware, kit.user("u1"))
    record = InterruptRecord(
        interrupt_id="i1", run_id="r1", thread_id="t1", requested_at=1, payload={"other": 1}
    )
    await lab.persistence.stores.interrupts.create(record)
    with pytest.raises(InterruptConflict):
        await middleware.on_interrupt(ctx, pause("i1"))
    assert (await lab.run("r1")).status == "running"
    info = ErrorInfo(error=RuntimeError(), message="x", code=None, duration_ms=1)
    await middleware.on_error(ctx, info)
    await ended(ctx)
    assert (await lab.run("r1")).status == "failed"


@pytest.mark.parametrize("hook", ["on_start", "on_finish", "on_error", "on_abort"])
async def test_a_hook_that_is_cancelled_ends_its_commit_first(
    lab: Any, kit: Any, hook: str
) -> None:
    middleware = lab.middleware()
    ctx = await begun(lab, middleware, kit.user("u1"))
    if hook == "on_start":
        ctx = ChatContext(thread_id="t1", run_id="r2")
        await middleware.setup(ctx)
        await middleware.on_config(ctx, config_of(kit.user("u2")))
        ctx.messages = [*await lab.stored(), kit.user("u2")]
    ctx.messages.append(kit.assistant("a1"))
    infos: dict[str, Any] = {
        "on_finish": FinishInfo(finish_reason="stop", duration_ms=1, content="", usage=None),
        "on_error": ErrorInfo(error=RuntimeError(), message="x", code=None, duration_ms=1),
        "on_abort": AbortInfo(reason=None, cancel_requested=False, duration_ms=1),
    }
    lab.faults.stall("commit_turn", seconds=0.05)
    commits = lab.faults.applied["commit_turn"]
    task = asyncio.create_task(
        getattr(middleware, hook)(ctx, *([infos[hook]] if hook in infos else []))
    )
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # impatient
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lab.faults.applied["commit_turn"] == commits + 1
    run = await lab.run(ctx.run_id)
    statuses = {"on_start": "running", "on_finish": "completed", "on_error": "failed"}
    assert run.status == statuses.get(hook, "aborted")
    if hook == "on_start":
        info = infos["on_abort"]
        await middleware.on_abort(ctx, info)
    await ended(ctx)


async def test_threads_and_run_ids_of_two_tenants_never_meet(lab: Any, kit: Any) -> None:
    from chatkeep.engine import chat
    from chatkeep.persistence import with_persistence
    from chatkeep.testkit.scripted import ScriptedModel

    for tenant in ("a", "b"):
        scoped = lab.persistence.scoped(Scope(tenant_id=tenant))
        stream = chat(
            adapter=ScriptedModel(),
            messages=[kit.user("u1", f"of {tenant}")],
            thread_id="t1",
            run_id="r1",
            middleware=[with_persistence(scoped)],
        )
        assert isinstance(kit.terminal([event async for event in stream]), RunFinishedEvent)
    assert lab.faults.log == ["read_view", "commit_turn", "commit_turn"] * 2
    for tenant in ("a", "b"):
        scoped = lab.persistence.scoped(Scope(tenant_id=tenant))
        body = await hydrate_thread(scoped, "t1")
        assert body["messages"][0]["parts"][0]["content"] == f"of {tenant}"
        assert len(body["messages"]) == 2
    assert (await hydrate_thread(lab.persistence, "t1"))["messages"] == []


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("snapshots", [False, True])
async def test_a_run_that_is_stopped_at_any_event_of_its_model_ends_as_aborted(
    lab: Any, kit: Any, at: int, snapshots: bool
) -> None:
    class Halts:
        provider = model = "halts"
        there = asyncio.Event()

        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            identity = request.message_id
            events: list[BaseEvent] = [
                TextMessageStartEvent(message_id=identity),
                TextMessageContentEvent(message_id=identity, delta="a"),
                TextMessageContentEvent(message_id=identity, delta="b"),
                TextMessageEndEvent(message_id=identity),
                model_finished(request, "stop"),
            ]
            for number, event in enumerate(events):
                if number == at:
                    self.there.set()
                    await asyncio.Event().wait()
                yield event

    model = Halts()
    middleware = lab.middleware(snapshot_streaming=snapshots, snapshot_interval_ms=0)
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.there.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = await lab.run("r1")
    assert run.status == "aborted"
    assert run.finished_at is not None
    text = "ab"[: max(0, at - 1)] if snapshots else ""
    assert await lab.said() == ["user: hello", *([f"assistant: {text}"] if text else [])]
    running = [t for t in asyncio.all_tasks() if t.get_name().startswith("chatkeep")]
    assert running == []


async def test_a_chat_is_kept_once(lab: Any, kit: Any) -> None:
    events = await lab.turn(kit.user("u1"), middleware=[lab.middleware(), lab.middleware()])
    end = kit.terminal(events)
    assert (end.type, end.code) == ("RUN_ERROR", "composition-error")
    assert await lab.stored() == []
