"""Faults between the stores and their backend: nothing half-written, nothing applied twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import BackendUnavailable, ThreadConflict
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.scope import Scope
from chatkeep.stores import (
    ActivitiesWrite,
    InterruptAnswer,
    RunStart,
    Splice,
    ThreadView,
    TurnCommit,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import assistant, message_ids, user
from chatkeep.testkit.faults import WRITES, Crashed, Faults, FaultyBackend, with_faults
from conformance.columns import fresh  # noqa: F401

pytestmark = pytest.mark.anyio

_ALL = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)


async def turn(backend: FaultyBackend, thread: str = "t") -> None:
    """One whole turn with an interrupt that is answered: start, draft, pause, answer, finish."""
    first = await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run_id="r1",
            splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=""),
            run=RunStart(run_id="r1", started_at=1, lease_token="t"),
        )
    )
    await backend.save_draft(thread, "r1", [assistant("dra", "a1")], lease_token="t")
    paused = await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run_id="r1",
            lease_token="t",
            splice=Splice(
                keep_through=first.newest, tail=[assistant("may I?", "a1")], expected=first.revision
            ),
            interrupts=[
                InterruptRecord(
                    interrupt_id="i1", run_id="r1", thread_id=thread, requested_at=2, payload={}
                )
            ],
            run=RunPatch(status="interrupted"),
            activities=ActivitiesWrite(
                puts={0: ActivityRecord(id="a", activity_type="card", content={}, index=0)},
                length=1,
            ),
            drop_draft=True,
        )
    )
    await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run_id="r1",
            lease_token="t",
            splice=Splice(
                keep_through=paused.newest, tail=[assistant("done", "a2")], expected=paused.revision
            ),
            answers=[InterruptAnswer(interrupt_id="i1", response=True)],
            run=RunPatch(status="completed", finished_at=3),
        )
    )


def state(view: ThreadView) -> tuple[Any, ...]:
    """What of a turn is stored."""
    return (
        message_ids(view.messages),
        [r.status for r in view.runs],
        [r.status for r in view.interrupts],
        len(view.activities),
        [d.run_id for d in view.drafts],
    )


STATES = [
    ([], [], [], 0, []),
    (["q1"], ["running"], [], 0, []),
    (["q1"], ["running"], [], 0, ["r1"]),
    (["q1", "a1"], ["interrupted"], ["pending"], 1, []),
    (["q1", "a1", "a2"], ["completed"], ["resolved"], 1, []),
]
"""After each write of :func:`turn`: whole boundaries, never a mixture."""


def faulty(persistence: Persistence, **options: Any) -> tuple[FaultyBackend, Faults]:
    bag, faults = with_faults(persistence, **options)
    (backend,) = bag.backends
    assert isinstance(backend, FaultyBackend)
    return backend, faults


@pytest.mark.parametrize("count", range(5))
async def test_a_crash_after_each_write_leaves_whole_boundaries(
    fresh: Persistence,  # noqa: F811
    count: int,
) -> None:
    """Kill the process after the k-th write: what is stored is k boundaries, all or nothing."""
    backend, faults = faulty(fresh)
    faults.crash_after(count)
    with pytest.raises(Crashed):
        await turn(backend)
    with pytest.raises(Crashed):
        await backend.read_view("t", _ALL)
    assert state(await fresh.backends[0].read_view("t", _ALL)) == STATES[count]


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_lost_reply_is_sent_again_and_applied_once(
    fresh: Persistence,  # noqa: F811
    lost: int,
) -> None:
    """The k-th commit is applied, its reply lost: the turn ends as if nothing had happened."""
    backend, faults = faulty(fresh)
    faults.lose_reply("commit_turn", after=lost - 1)
    await turn(backend)
    assert (faults.calls["commit_turn"], faults.applied["commit_turn"]) == (4, 4)
    assert state(await fresh.backends[0].read_view("t", _ALL)) == STATES[4]


async def test_a_refused_commit_is_tried_again(fresh: Persistence) -> None:  # noqa: F811
    """The database was away for two attempts: the third one is applied."""
    backend, faults = faulty(fresh)
    faults.refuse("commit_turn", times=2)
    await turn(backend)
    assert (faults.calls["commit_turn"], faults.applied["commit_turn"]) == (5, 3)
    assert state(await fresh.backends[0].read_view("t", _ALL)) == STATES[4]


async def test_a_database_that_stays_away_is_a_typed_error(
    fresh: Persistence,  # noqa: F811
) -> None:
    """After its retries a commit raises BackendUnavailable; nothing was written."""
    backend, faults = faulty(fresh)
    faults.refuse(WRITES, times=100)
    with pytest.raises(BackendUnavailable):
        await turn(backend)
    assert faults.calls["commit_turn"] == 1 + backend.commit_retries
    assert state(await fresh.backends[0].read_view("t", _ALL)) == STATES[0]
    faults.heal()
    await turn(backend)
    assert state(await fresh.backends[0].read_view("t", _ALL)) == STATES[4]


async def test_a_stalled_call_times_out_and_can_be_sent_again(
    fresh: Persistence,  # noqa: F811
) -> None:
    """A call that hangs ends as BackendUnavailable, outcome unknown; the commit id still helps."""
    await fresh.ping()
    backend, faults = faulty(fresh, timeout=0.5)
    await backend.ping()
    commit = TurnCommit(
        commit_id=new_commit_id(),
        thread_id="t",
        splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=""),
    )
    faults.stall("commit_turn", seconds=5)
    with pytest.raises(BackendUnavailable) as caught:
        await backend.commit_turn(commit)
    assert caught.value.outcome_unknown
    backend._timeout = 30
    await backend.commit_turn(commit)
    await backend.commit_turn(commit)
    view = await fresh.backends[0].read_view("t", _ALL)
    assert message_ids(view.messages) == ["q1"]


async def test_a_cancelled_caller_waits_for_its_call(fresh: Persistence) -> None:  # noqa: F811
    """Cancelled while the write stalls: the write is finished before the caller goes on."""
    backend, faults = faulty(fresh)
    faults.stall("commit_turn", seconds=0.1)
    stores: Any = backend.persistence().stores
    task = asyncio.ensure_future(stores.messages.save_thread("t", [user("q", "q1")]))
    while not faults.calls["commit_turn"]:  # noqa: ASYNC110  (a counter, not an event)
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert faults.applied["commit_turn"] == 1
    assert message_ids(await stores.messages.load_thread("t")) == ["q1"]


async def test_saving_what_is_stored_writes_nothing(fresh: Persistence) -> None:  # noqa: F811
    """An identical list is at most one read and no write; a longer one is one write more."""
    bag, faults = with_faults(fresh)
    stores: Any = bag.stores
    rows = [user(f"n{i}", f"m{i}") for i in range(30)]
    await stores.messages.save_thread("t", rows)
    faults.calls.clear()
    await stores.messages.save_thread("t", rows)
    assert faults.calls["commit_turn"] == 0
    assert faults.calls.total() <= 1
    faults.calls.clear()
    await stores.messages.save_thread("t", [*rows, user("new", "new")])
    assert faults.calls["commit_turn"] == 1
    assert faults.calls.total() <= 2


async def test_a_turn_costs_one_call_a_boundary(fresh: Persistence) -> None:  # noqa: F811
    """Three boundaries and a draft are four writes, whatever the length of the thread."""
    backend, faults = faulty(fresh)
    await turn(backend)
    assert faults.calls == {"commit_turn": 3, "save_draft": 1}


async def test_saves_that_conflict_are_tried_until_they_fit(
    fresh: Persistence,  # noqa: F811
) -> None:
    """save_thread is a loop: refused by another writer's revision, it reads and tries again."""
    bag, faults = with_faults(fresh)
    stores: Any = bag.stores
    faults.refuse("commit_turn", times=3, error=ThreadConflict("t"))
    await stores.messages.save_thread("t", [user("q", "q1")])
    assert faults.calls == {"read_view": 4, "commit_turn": 4}
    assert message_ids(await stores.messages.load_thread("t")) == ["q1"]


async def test_faults_reach_scoped_handles(fresh: Persistence) -> None:  # noqa: F811
    """A scoped handle shares the faults, and its rows are in its scope."""
    bag, faults = with_faults(fresh)
    scoped: Any = bag.scoped(Scope(tenant_id="a")).stores
    await scoped.messages.save_thread("t", [user("q", "q1")])
    assert faults.calls["commit_turn"] == 1
    stores: Any = fresh.stores
    assert await stores.messages.load_thread("t") == []
    faults.refuse("read_view")
    with pytest.raises(BackendUnavailable):
        await scoped.messages.load_thread("t")


async def test_a_fault_for_an_unknown_call_is_refused() -> None:
    """A misspelt name would be a fault that never strikes."""
    with pytest.raises(ValueError, match="no such primitive"):
        Faults().refuse("commit_trun")
