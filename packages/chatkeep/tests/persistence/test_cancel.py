"""Cancelling a run from outside, whoever drives it and whether it waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ag_ui.core import RunFinishedEvent

from chatkeep.compose import compose_persistence
from chatkeep.engine.interrupts import resume_approve
from chatkeep.errors import CompositionError
from chatkeep.memory import memory_persistence
from chatkeep.persistence import cancel_run, hydrate_thread
from chatkeep.records import InterruptRecord, RunPatch
from chatkeep.testkit.faults import with_faults

pytestmark = pytest.mark.anyio

PAY = [("c1", "pay", {"n": 1})]
YES = resume_approve("approval_c1")


async def test_a_paused_run_ends_with_its_questions_in_one_commit(lab: Any, kit: Any) -> None:
    await lab.pause([*PAY, ("c2", "locate", {"n": 2})])
    commits = lab.faults.calls["commit_turn"]
    assert await cancel_run(lab.persistence, "t1", "r1") == "cancelled"
    assert lab.faults.calls["commit_turn"] == commits + 1
    run = await lab.run("r1")
    assert run.status == "aborted"
    assert run.finished_at is not None
    assert run.usage["totalTokens"] == 3
    assert {status for status, _ in (await lab.settled()).values()} == {"cancelled"}
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == (None, None)


async def test_a_thread_whose_paused_run_was_cancelled_takes_new_input(lab: Any, kit: Any) -> None:
    """The model is told that the open call has no result."""
    await lab.pause(PAY)
    await cancel_run(lab.persistence, "t1", "r1")
    model = kit.Paced(waits=False)
    end = kit.terminal(await lab.turn(kit.user("u2"), adapter=model))
    assert isinstance(end, RunFinishedEvent)
    assert [m["role"] for m in model.requests[0].messages] == ["user", "assistant", "tool", "user"]
    late = await lab.resume(YES, parent_run_id="r1")
    assert late.code == "unknown-interrupt"
    assert lab.bank.paid == []


async def test_a_paused_run_leaves_the_questions_of_others_alone(lab: Any) -> None:
    await lab.pause(PAY)
    for run_id, payload in (
        ("other", {"id": "x", "reason": "theirs", "message": "?"}),
        ("r9", {"opaque": 1}),
    ):
        record = InterruptRecord(
            interrupt_id="x", run_id=run_id, thread_id="t1", requested_at=1, payload=payload
        )
        await lab.persistence.stores.interrupts.create(record)
    assert await cancel_run(lab.persistence, "t1", "r1") == "cancelled"
    assert await lab.waiting() == ["x", "x"]


async def test_a_running_run_is_told_and_ends_as_aborted(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    keep = lab.middleware(lease_ms=30)
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.began.wait()
    assert await cancel_run(lab.persistence, "t1", "r1") == "requested"
    assert kit.terminal(await task).outcome.type == "cancelled"
    run = await lab.run("r1")
    assert (run.status, run.cancel_requested) == ("aborted", True)
    assert await cancel_run(lab.persistence, "t1", "r1") == "ended"


@pytest.mark.parametrize("run_id", ["r1", "r2"])
async def test_a_continuation_is_told_and_its_question_is_free_again(
    lab: Any, kit: Any, run_id: str
) -> None:
    """Also one under the paused run's own id, which keeps the word interrupted."""
    await lab.pause(PAY)
    lab.bank.gate.clear()
    keep = lab.middleware(lease_ms=30)
    task = asyncio.create_task(lab.resume(YES, run_id=run_id, middleware=keep))
    await lab.bank.paying.wait()
    if run_id == "r2":
        assert await cancel_run(lab.persistence, "t1", "r1") == "continued"
        assert await lab.waiting() == ["approval_c1"]
    assert await cancel_run(lab.persistence, "t1", run_id) == "requested"
    assert (await task).outcome.type == "cancelled"
    assert (await lab.run(run_id)).status == "aborted"
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1"]


async def test_a_run_that_has_ended_or_went_on_or_is_not_there_stays_as_it_is(
    lab: Any, kit: Any
) -> None:
    await lab.pause(PAY)
    await lab.resume(YES)
    await lab.turn(kit.user("x"), thread_id="t2", run_id="elsewhere")
    before = await lab.everything()
    for run_id, word in (
        ("r1", "continued"),
        ("r2", "ended"),
        ("nobody", "unknown"),
        ("elsewhere", "unknown"),
    ):
        assert await cancel_run(lab.persistence, "t1", run_id) == word
    assert await lab.everything() == before


async def test_of_a_cancellation_and_an_answer_at_once_one_counts(lab: Any) -> None:
    for number in range(6):
        thread, call = f"x{number}", f"c{number}"
        await lab.pause([(call, "pay", {"n": number})], thread_id=thread, run_id=f"p{number}")
        entry = resume_approve(f"approval_{call}")
        word, end = await asyncio.gather(
            cancel_run(lab.persistence, thread, f"p{number}"),
            lab.resume(
                entry, thread_id=thread, run_id=f"q{number}", turns=[[(call, "pay", {"n": number})]]
            ),
        )
        done = isinstance(end, RunFinishedEvent)
        assert word == ("continued" if done else "cancelled")
        assert (number in lab.bank.paid) == done


@pytest.mark.parametrize("key", ["interrupts", "runs", "messages"])
async def test_a_paused_run_is_cancelled_across_backends(kit: Any, key: str) -> None:
    other, _ = with_faults(memory_persistence())
    lab = kit.Lab(memory_persistence())
    lab.persistence = compose_persistence(
        lab.persistence, overrides={key: getattr(other.stores, key)}
    )
    await lab.pause(PAY)
    assert await cancel_run(lab.persistence, "t1", "r1") == "cancelled"
    assert (await lab.persistence.stores.runs.get("r1")).status == "aborted"
    assert await lab.waiting() == []


async def test_without_runs_nothing_can_be_cancelled() -> None:
    base = memory_persistence()
    bare = compose_persistence(base, overrides={"runs": False, "interrupts": False})
    with pytest.raises(CompositionError, match="runs"):
        await cancel_run(bare, "t1", "r1")


async def test_a_run_whose_process_died_is_left_to_the_sweep(lab: Any) -> None:
    """It is marked, and the sweep ends it as it ends every lost run."""
    runs = lab.persistence.stores.runs
    await runs.create_or_resume("r1", "t1", started_at=1, lease_token="x", lease_ms=-1)
    assert await cancel_run(lab.persistence, "t1", "r1") == "requested"
    (lost,) = await lab.persistence.maintenance().sweep()
    assert (lost.run.status, lost.run.error.code) == ("failed", "worker_lost")
    assert lost.run.cancel_requested is True


async def test_a_wish_to_cancel_stays_with_a_run_that_was_ended_meanwhile(lab: Any) -> None:
    """Between the look at the run and the mark it may end: its end is not touched."""
    runs = lab.persistence.stores.runs
    await runs.create_or_resume("r1", "t1", started_at=1)
    await runs.update("r1", RunPatch(status="completed", finished_at=2))
    await runs.update("r1", RunPatch(cancel_requested=True), thread_id="t1")
    run = await lab.run("r1")
    assert (run.status, run.finished_at) == ("completed", 2)
