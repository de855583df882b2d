"""Aborts, cancellations and disconnects; how each end is told to those who wait for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.engine import CANCEL_REQUESTED, ChatContext, ChatMiddleware
from chatkeep.engine.interrupts import resume_approve
from chatkeep.errors import CompositionError
from chatkeep.persistence import (
    DETACHABLE,
    INTERRUPTS,
    METADATA,
    PERSISTENCE,
    PERSISTENCE_COMPLETION,
    hydrate_thread,
)
from chatkeep.records import RunPatch

pytestmark = pytest.mark.anyio

PAY = [("c1", "pay", {"n": 1})]
YES = resume_approve("approval_c1")


class Detaches(ChatMiddleware):
    """Says that the run goes on elsewhere when its viewer leaves."""

    name = "detaches"
    provides = (DETACHABLE,)

    def __init__(self, value: bool = True) -> None:
        self.value = value

    async def setup(self, ctx: ChatContext) -> None:
        ctx.provide(DETACHABLE, self.value)


class Waits(ChatMiddleware):
    """Takes the completions of runs, as middleware behind persistence may."""

    name = "waits"
    requires = (PERSISTENCE_COMPLETION,)

    def __init__(self) -> None:
        self.completions: dict[str, Any] = {}

    async def setup(self, ctx: ChatContext) -> None:
        self.completions[ctx.run_id] = ctx.get(PERSISTENCE_COMPLETION)


async def stopped(
    lab: Any, kit: Any, *, reason: str | None, detachable: bool | None, flag: bool = False
) -> Any:
    """A run that is stopped while its model speaks; its record and its completion."""
    model, waits = kit.Paced(), Waits()
    middleware = [lab.middleware(), waits]
    if detachable is not None:
        middleware.insert(0, Detaches(detachable))
    from chatkeep.engine import chat

    stream = chat(
        adapter=model,
        messages=[kit.user("u1")],
        thread_id="t1",
        run_id="r1",
        middleware=middleware,
    )

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await model.said.wait()
    if flag:
        runs = lab.persistence.stores.runs
        await runs.update("r1", RunPatch(cancel_requested=True), thread_id="t1")
    stream.abort(reason)
    await task
    return await lab.run("r1"), waits.completions["r1"]


async def test_a_plain_disconnect_ends_an_ordinary_run(lab: Any, kit: Any) -> None:
    for detachable in (None, False):
        run, completion = await stopped(lab, kit, reason="disconnected", detachable=detachable)
        assert run.status == "aborted"
        assert run.finished_at is not None
        assert completion.outcome == "aborted"
        await lab.persistence.delete_thread("t1")


async def test_a_plain_disconnect_leaves_a_detachable_run_running_and_writes_nothing(
    lab: Any, kit: Any
) -> None:
    run, completion = await stopped(lab, kit, reason="disconnected", detachable=True)
    assert (run.status, run.finished_at, run.error) == ("running", None, None)
    assert lab.faults.calls["commit_turn"] == 1  # its start
    assert completion.outcome == "detached"
    assert completion.error is None
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["activeRun"] == {"runId": "r1"}


async def test_a_cancel_in_process_ends_a_detachable_run(lab: Any, kit: Any) -> None:
    run, completion = await stopped(lab, kit, reason=CANCEL_REQUESTED, detachable=True)
    assert (run.status, run.detached_since) == ("aborted", None)
    assert completion.outcome == "aborted"


async def test_a_cancel_that_is_recorded_ends_a_detachable_run(lab: Any, kit: Any) -> None:
    """The connection says nothing; the record does."""
    run, completion = await stopped(lab, kit, reason="disconnected", detachable=True, flag=True)
    assert run.status == "aborted"
    assert completion.outcome == "aborted"


async def test_a_record_that_cannot_be_read_leaves_a_detachable_run_running(
    lab: Any, kit: Any
) -> None:
    told: list[str] = []
    keep = lab.middleware(on_persistence_error=lambda phase, _: told.append(phase))
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=[Detaches(), keep])
    await model.said.wait()
    lab.faults.refuse("read_view", times=2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told == ["cancel-read"]
    assert (await lab.run("r1")).status == "running"


async def test_a_disconnect_behind_a_pause_leaves_it_paused(lab: Any, kit: Any) -> None:
    """The run has ended here; whoever leaves now leaves a question."""
    from chatkeep.engine import chat

    waits = Waits()
    stream = chat(
        adapter=kit.Calls([PAY]),
        messages=[kit.user("u1")],
        thread_id="t1",
        run_id="r1",
        tools=lab.bank.tools(),
        middleware=[lab.middleware(), waits],
    )
    async for event in stream:
        if isinstance(event, RunFinishedEvent):
            stream.abort("disconnected")
    await stream.aclose()
    assert waits.completions["r1"].outcome == "interrupted"
    run = await lab.run("r1")
    assert (run.status, run.finished_at) == ("interrupted", None)
    assert await lab.waiting() == ["approval_c1"]


@pytest.mark.parametrize("under", ["r1", "r2"])
async def test_a_detached_continuation_keeps_its_claim_while_it_lives(
    lab: Any, kit: Any, under: str
) -> None:
    await lab.pause(PAY)
    lab.bank.gate.clear()
    task = asyncio.create_task(
        lab.resume(YES, run_id=under, middleware=[Detaches(), lab.middleware()])
    )
    await lab.bank.paying.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    late = await lab.resume(YES, run_id="late")
    assert late.code == "conflict"
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == ({"runId": under}, None)


async def test_a_detached_run_that_is_taken_up_again_is_no_detached_one_when_it_ends(
    lab: Any, kit: Any
) -> None:
    runs = lab.persistence.stores.runs
    await runs.create_or_resume("r1", "t1", started_at=1, lease_token="old", lease_ms=-1)
    await runs.update("r1", RunPatch(detached_since=7))
    assert isinstance(kit.terminal(await lab.turn(kit.user("u1"))), RunFinishedEvent)
    run = await lab.run("r1")
    assert (run.status, run.detached_since) == ("completed", None)


# ------------------------------------------------------------------------------ completion


async def test_every_end_is_told_with_its_word(lab: Any, kit: Any) -> None:
    waits = Waits()

    def middleware() -> list[Any]:
        return [lab.middleware(), waits]

    await lab.turn(kit.user("u1"), run_id="done", middleware=middleware())
    error = RuntimeError("scripted")
    model = kit.Paced(waits=False, error=error)
    await lab.turn(kit.user("u2"), run_id="failed", adapter=model, middleware=middleware())
    await lab.pause(PAY, messages=[kit.user("u3")], run_id="paused", middleware=middleware())
    await lab.resume(resume_approve("nothing"), run_id="refused", middleware=middleware())
    await lab.resume(YES, run_id="answered", middleware=middleware())
    await lab.turn(kit.user("u4"), run_id="done", middleware=middleware())
    words = {name: c.outcome for name, c in waits.completions.items()}
    assert words == {
        "done": "failed",  # the second time, under an id that had ended
        "failed": "failed",
        "paused": "interrupted",
        "refused": "failed",
        "answered": "completed",
    }
    assert waits.completions["failed"].error is error
    assert waits.completions["done"].error.code == "run-conflict"
    assert waits.completions["refused"].error.code == "interrupt-resume"


async def test_a_completion_settles_after_the_last_write(lab: Any, kit: Any) -> None:
    waits = Waits()
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=[lab.middleware(), waits])
    await model.began.wait()
    waiting = [asyncio.create_task(waits.completions["r1"].wait()) for _ in range(3)]
    lab.faults.stall("commit_turn", seconds=0.02)
    model.go.set()
    assert await asyncio.gather(*waiting) == ["completed"] * 3
    assert (await lab.run("r1")).status == "completed"
    await task


async def test_a_pause_settles_its_completion_once_it_is_stored(lab: Any, kit: Any) -> None:
    waits = Waits()
    lab.faults.stall("commit_turn", seconds=0.02, after=1)
    task = asyncio.create_task(lab.pause(PAY, middleware=[lab.middleware(), waits]))
    await lab.until(lambda: "r1" in waits.completions)
    assert await waits.completions["r1"].wait() == "interrupted"
    assert await lab.waiting() == ["approval_c1"]
    await task


async def test_the_failure_of_the_run_is_told_also_when_its_record_cannot_be_written(
    lab: Any, kit: Any
) -> None:
    waits, error = Waits(), RuntimeError("scripted")
    model = kit.Paced(error=error)
    task = lab.start(kit.user("u1"), adapter=model, middleware=[lab.middleware(), waits])
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=50)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunErrorEvent)
    completion = waits.completions["r1"]
    assert (completion.outcome, completion.error) == ("failed", error)


# ------------------------------------------------------------- what other middleware can have


async def test_other_middleware_reads_the_stores_and_answers_of_the_run(lab: Any, kit: Any) -> None:
    seen: dict[str, list[str]] = {}

    class Reads(ChatMiddleware):
        name = "reads"
        requires = (PERSISTENCE, INTERRUPTS, METADATA)

        async def on_start(self, ctx: ChatContext) -> None:
            await ctx.get(METADATA).set("notes", ctx.thread_id, ctx.run_id)
            waiting = await ctx.get(INTERRUPTS).list_pending(ctx.thread_id)
            seen[ctx.run_id] = [record.interrupt_id for record in waiting]
            assert ctx.get(PERSISTENCE).stores.messages is not None

    reads = Reads()
    await lab.pause(PAY, middleware=[lab.middleware(), reads])
    await lab.resume(YES, middleware=[lab.middleware(), reads])
    assert seen == {"r1": [], "r2": ["approval_c1"]}
    assert await lab.persistence.stores.metadata.get("notes", "t1") == "r2"


async def test_slow_work_of_a_middleware_behind_persistence_finds_the_question_stored(
    lab: Any, kit: Any
) -> None:
    """A reload shows the question while, say, a sandbox is made; an empty post loses nothing."""
    seen: list[list[str]] = []

    class Slow(ChatMiddleware):
        name = "slow"

        async def on_start(self, ctx: ChatContext) -> None:
            body = await hydrate_thread(lab.persistence, ctx.thread_id)
            seen.append([m["id"] for m in body["messages"]])

    for posted in ([kit.user("u1")], []):
        await lab.turn(*posted, middleware=[lab.middleware(), Slow()])
    answer = (await lab.ids())[1]
    assert seen == [["u1"], ["u1", answer]]


async def test_a_middleware_that_asks_before_persistence_is_told_what_to_change(
    lab: Any, kit: Any
) -> None:
    waits = Waits()
    end = kit.terminal(await lab.turn(kit.user("u1"), middleware=[waits, lab.middleware()]))
    assert end.code == "composition-error"
    assert "persistence-completion" in end.message
    assert "put it before" in end.message
    with pytest.raises(CompositionError, match="persistence-completion"):
        await lab.turn(kit.user("u1"), middleware=[waits])


# ---------------------------------------------------------------------- a process that dies


async def test_a_process_that_died_in_a_tool_leaves_a_thread_that_works(kit: Any) -> None:
    """Of the run the question is there; nothing of a call that nobody finished."""
    from chatkeep.memory import memory_persistence
    from chatkeep.testkit.faults import Crashed

    lab = kit.Lab(memory_persistence())
    keep = lab.middleware(lease_ms=40)
    began = asyncio.Event()

    async def hangs(_: Any) -> Any:
        began.set()
        await asyncio.Event().wait()

    from chatkeep.engine import define_tool

    tool = define_tool(name="hang", description="", input_schema={}, execute=hangs)
    model = kit.Calls([[("c1", "hang", {})]])
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep, tools=[tool])
    await began.wait()
    lab.faults.crash_after(0)
    task.cancel()
    with pytest.raises((Crashed, asyncio.CancelledError)):
        await task
    lab.faults.heal()
    await asyncio.sleep(0.05)
    await lab.persistence.maintenance().sweep()
    after = kit.Paced(waits=False)
    end = kit.terminal(await lab.turn(kit.user("u2"), adapter=after, run_id="r2"))
    assert isinstance(end, RunFinishedEvent)
    assert [m["role"] for m in after.requests[0].messages] == ["user", "user"]
    assert (await lab.run("r1")).error.code == "worker_lost"


async def test_a_process_that_died_in_an_approved_tool_leaves_its_question(kit: Any) -> None:
    """The same answer can be given again; so can a cancellation, if the tool must not run twice."""
    from chatkeep.memory import memory_persistence
    from chatkeep.testkit.faults import Crashed

    lab = kit.Lab(memory_persistence())
    await lab.pause(PAY)
    lab.bank.gate.clear()
    task = asyncio.create_task(lab.resume(YES, middleware=lab.middleware(lease_ms=40)))
    await lab.bank.paying.wait()
    lab.faults.crash_after(0)
    task.cancel()
    with pytest.raises((Crashed, asyncio.CancelledError)):
        await task
    lab.faults.heal()
    lab.bank.gate.set()
    await asyncio.sleep(0.05)
    await lab.persistence.maintenance().sweep()
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["activeRun"] is None
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1"]
    assert isinstance(await lab.resume(YES, parent_run_id="r1"), RunFinishedEvent)
    assert (await lab.run("r2")).error.code == "worker_lost"
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool", "assistant"]
