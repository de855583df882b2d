"""Pauses and answers on stores that fail, lose replies or lose their process at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

import chatkeep.persistence.committer as committer
from chatkeep.compose import compose_persistence
from chatkeep.engine.interrupts import resume_approve
from chatkeep.memory import memory_persistence
from chatkeep.persistence import hydrate_thread
from chatkeep.testkit.faults import Crashed, FaultyBackend

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg")

PAY = [("c1", "pay", {"n": 1})]
AGAIN = [PAY, [("c2", "pay", {"n": 2})]]
YES = resume_approve("approval_c1")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "OUTAGE_PAUSES", (0.0, 0.0))


async def dies(call: Any, *faults: Any) -> bool:
    """Whether the process was gone before the call ended; then its leases run out."""
    task = asyncio.ensure_future(call)
    await asyncio.gather(task, return_exceptions=True)
    died = any(f.crashed for f in faults)
    for other in asyncio.all_tasks():
        if other.get_name().startswith("chatkeep"):
            other.cancel()
    for f in faults:
        f.heal()
    if died:
        await asyncio.sleep(0.06)
    return died


async def is_whole(lab: Any) -> None:
    """Questions, transcript and the status of runs tell one story."""
    await lab.persistence.maintenance().sweep()
    runs = {r.run_id: r for r in await lab.persistence.stores.runs.list_by_thread("t1")}
    rows = await lab.stored()
    results = {m["toolCallId"] for m in rows if m["role"] == "tool"}
    for record in await lab.persistence.stores.interrupts.list("t1"):
        assert runs[record.run_id].status in ("interrupted", "completed")
        call = record.payload["toolCallId"]
        assert any(c["id"] == call for m in rows for c in m.get("toolCalls") or ())
        assert record.status == "pending" or call in results
    assert all(run.status != "running" for run in runs.values())
    assert (await hydrate_thread(lab.persistence, "t1"))["activeRun"] is None


@pytest.mark.parametrize("at", range(4))
async def test_a_process_that_dies_after_any_write_of_a_pause(lab: Any, at: int) -> None:
    lab.faults.crash_after(at, "commit_turn")
    died = await dies(lab.pause(PAY, middleware=lab.middleware(lease_ms=40)), lab.faults)
    assert died == (at <= 2)
    await is_whole(lab)
    assert await lab.waiting() == (["approval_c1"] if at >= 2 else [])
    if at >= 2:
        assert isinstance(await lab.resume(YES, parent_run_id="r1"), RunFinishedEvent)
        assert lab.bank.paid == [1]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("turns", [[PAY], AGAIN], ids=["finishes", "pauses"])
async def test_a_process_that_dies_after_any_write_of_a_continuation(
    lab: Any, at: int, turns: Any
) -> None:
    """The answer is given, or it can be given again; a second pause is there, or it is not."""
    await lab.pause(*turns)
    lab.faults.crash_after(at, "commit_turn")
    keep = lab.middleware(lease_ms=40)
    died = await dies(lab.resume(YES, turns=turns, middleware=keep), lab.faults)
    assert died == (at <= 2)
    await is_whole(lab)
    given = at >= 2
    assert (await lab.settled() != {}) == given
    expected = ["approval_c2"] if turns is AGAIN else []
    assert await lab.waiting() == (expected if given else ["approval_c1"])
    if not given:
        await lab.resume(YES, parent_run_id="r1", turns=turns)
        assert await lab.waiting() == expected
        await is_whole(lab)


@pytest.mark.parametrize("lost", range(1, 9))
async def test_lost_replies_ask_once_execute_once_and_settle_once(lab: Any, lost: int) -> None:
    lab.faults.lose_reply("commit_turn", times=lost)
    await lab.pause(*AGAIN)
    lab.faults.lose_reply("commit_turn", times=lost)
    await lab.resume(YES, turns=AGAIN)
    lab.faults.heal()
    await is_whole(lab)
    assert lab.bank.paid in ([1], [])
    if lab.bank.paid:
        assert [m["role"] for m in await lab.stored()].count("tool") == 1


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_few_lost_replies_are_not_even_noticed(lab: Any, lost: int) -> None:
    lab.faults.lose_reply("commit_turn", times=lost)
    await lab.pause(*AGAIN)
    lab.faults.lose_reply("commit_turn", times=lost)
    assert isinstance(await lab.resume(YES, turns=AGAIN), RunFinishedEvent)
    lab.faults.lose_reply("commit_turn", times=lost)
    end = await lab.resume(resume_approve("approval_c2"), turns=AGAIN)
    assert isinstance(end, RunFinishedEvent)
    assert lab.bank.paid == [1, 2]
    assert {status for status, _ in (await lab.settled()).values()} == {"resolved"}


async def test_a_pause_that_was_stored_but_never_heard_of_is_a_pause(lab: Any) -> None:
    lab.faults.lose_reply("commit_turn", times=12, after=1)
    end = await lab.pause(PAY)
    assert isinstance(end, RunFinishedEvent)
    assert end.outcome.type == "interrupt"
    assert (await lab.run("r1")).status == "interrupted"


@pytest.mark.parametrize("at", ["start", "finish", "pause"])
async def test_a_continuation_on_a_store_that_is_down_consumes_nothing(lab: Any, at: str) -> None:
    await lab.pause(*AGAIN)
    lab.faults.refuse("commit_turn", times=100, after=0 if at == "start" else 1)
    turns = AGAIN if at == "pause" else [PAY]
    end = await lab.resume(YES, turns=turns, middleware=lab.middleware(lease_ms=40))
    lab.faults.heal()
    assert isinstance(end, RunErrorEvent)
    assert end.code == "backend-unavailable"
    assert lab.bank.paid == ([] if at == "start" else [1])
    await asyncio.sleep(0.06)
    await lab.persistence.maintenance().sweep()
    assert await lab.waiting() == ["approval_c1"]
    assert await lab.settled() == {}
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1"]
    assert isinstance(await lab.resume(YES, turns=AGAIN, parent_run_id="r1"), RunFinishedEvent)


@pytest.mark.parametrize("key", ["interrupts", "runs", "messages"])
@pytest.mark.parametrize("at", range(8))
async def test_a_process_that_dies_between_the_writes_of_two_backends(
    kit: Any, key: str, at: int
) -> None:
    """What is there keeps the promised order: an answer only with its transcript, an end only
    with its answer. The batch can be given again unless it was taken."""
    lab = kit.Lab(memory_persistence())
    (inner,) = memory_persistence().backends
    other = FaultyBackend(inner, lab.faults).persistence()
    lab.persistence = compose_persistence(
        lab.persistence, overrides={key: getattr(other.stores, key)}
    )
    await lab.pause(PAY)
    lab.faults.crash_after(at, "commit_turn")
    keep = lab.middleware(lease_ms=40)
    died = await dies(lab.resume(YES, run_id="tab0", middleware=keep), lab.faults)
    assert died or at > 3
    await lab.persistence.maintenance().sweep()
    rows = [m["role"] for m in await lab.stored()]
    run = await lab.persistence.stores.runs.get("tab0")
    answered = bool(await lab.settled())
    if run is not None and run.status == "completed":
        assert answered
    if answered:
        assert rows == ["user", "assistant", "tool", "assistant"]
        late = await lab.resume(YES, run_id="tab1", parent_run_id="r1")
        assert late.code == "unknown-interrupt"
    else:
        end = await lab.resume(YES, run_id="tab1", parent_run_id="r1")
        assert isinstance(end, RunFinishedEvent), end
        assert await lab.waiting() == []
    assert lab.bank.paid in ([1], [1, 1])
    assert [m["role"] for m in await lab.stored()].count("tool") == 1


@pytest.mark.sqlite
async def test_a_pause_on_one_process_is_answered_on_another(kit: Any, tmp_path: Path) -> None:
    """Everything that the answer needs is in the store."""
    from chatkeep_sql import sqlite_persistence

    for number, call in enumerate((None, "approval_c1", "approval_c2")):
        async with sqlite_persistence(tmp_path / "chatkeep.db") as persistence:
            lab = kit.Lab(persistence)
            run_id = f"r{number}"
            if call is None:
                end = await lab.pause(*AGAIN, run_id=run_id)
            else:
                body = await hydrate_thread(persistence, "t1")
                assert [p["id"] for p in body["interrupts"]["pending"]] == [call]
                end = await lab.resume(resume_approve(call), turns=AGAIN, run_id=run_id)
                assert lab.bank.paid == [number]
            assert isinstance(end, RunFinishedEvent)
    async with sqlite_persistence(tmp_path / "chatkeep.db") as persistence:
        assert (await hydrate_thread(persistence, "t1"))["interrupts"] is None


def test_a_crash_is_no_exception_that_a_run_could_survive() -> None:
    assert not issubclass(Crashed, Exception)
