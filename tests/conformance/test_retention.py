"""Retention over all scopes of a backend: what is purged, and what stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence, memory_persistence
from chatkeep.compose import compose_persistence
from chatkeep.errors import InterruptConflict
from chatkeep.records import RunPatch
from chatkeep.scope import Scope
from chatkeep.stores import InterruptAnswer
from chatkeep.testkit.conformance._base import assistant, interrupt, message_ids, user
from conformance.columns import fresh  # noqa: F401

pytestmark = pytest.mark.anyio

_IDLE = 300


async def test_idle_threads_are_deleted_in_every_scope(fresh: Persistence) -> None:  # noqa: F811
    """purge_threads takes what nothing was written to for so long, subagents' threads with it."""
    tenant = fresh.scoped(Scope(tenant_id="acme"))
    stores: Any = fresh.stores
    theirs: Any = tenant.stores
    await stores.messages.save_thread("old", [user("a")])
    await stores.runs.create_or_resume("r1", "old", started_at=1, status="completed")
    await stores.runs.create_or_resume(
        "r2", "subagent:r2", started_at=1, status="completed", parent_run_id="r1"
    )
    await theirs.messages.save_thread("old", [user("b")])
    await asyncio.sleep(2 * _IDLE / 1000)
    await stores.messages.save_thread("new", [user("c")])
    purged = await fresh.maintenance().purge_threads(idle_ms=_IDLE)
    assert set(purged) == {(Scope(), "old"), (Scope(tenant_id="acme"), "old")}
    assert await stores.messages.load_thread("old") == []
    assert await stores.runs.get("r2") is None
    assert await theirs.messages.load_thread("old") == []
    assert await stores.messages.load_thread("new") == [user("c")]
    # Written again: on a slow server the calls above take as long as a thread may be idle.
    await stores.messages.save_thread("new", [user("d")])
    assert await fresh.maintenance().purge_threads(idle_ms=_IDLE) == []


async def test_a_question_that_nobody_answers_keeps_no_thread(fresh: Persistence) -> None:  # noqa: F811
    """What a dead process left pending stops neither retention nor a delete; list, load and
    answer agree that it is gone."""
    stores: Any = fresh.stores
    for thread in ("idle", "deleted"):
        await stores.messages.save_thread(thread, [user("a")])
        await stores.runs.create_or_resume(f"r-{thread}", thread, started_at=1)
        await stores.runs.update(f"r-{thread}", RunPatch(status="interrupted"))
        await stores.interrupts.create(interrupt(thread, f"r-{thread}", "i1"))
    assert await fresh.delete_thread("deleted") is True
    await asyncio.sleep(2 * _IDLE / 1000)
    assert await fresh.maintenance().purge_threads(idle_ms=_IDLE) == [(Scope(), "idle")]
    assert (await fresh.list_threads()).threads == []
    for thread in ("idle", "deleted"):
        assert await stores.messages.load_thread(thread) == []
        assert await stores.interrupts.list_pending(thread) == []
        assert await stores.runs.get(f"r-{thread}") is None
        with pytest.raises(InterruptConflict):
            await stores.interrupts.commit_batch(
                thread, [InterruptAnswer(interrupt_id="i1", run_id=f"r-{thread}")]
            )
    assert (await fresh.list_threads()).threads == []


async def test_stale_questions_are_cancelled_together(fresh: Persistence) -> None:  # noqa: F811
    """A way out for a thread that waits for answers of runs which will never go on."""
    stores: Any = fresh.stores
    for number in range(5):
        await stores.interrupts.create(interrupt("t", f"r{number}", "i"))
    waiting = await stores.interrupts.list_pending("t")
    await stores.interrupts.commit_batch(
        "t",
        [
            InterruptAnswer(interrupt_id=r.interrupt_id, run_id=r.run_id, status="cancelled")
            for r in waiting
        ],
    )
    assert await stores.interrupts.list_pending("t") == []
    assert {r.status for r in await stores.interrupts.list("t")} == {"cancelled"}


async def test_a_thread_with_a_driven_run_is_not_idle(fresh: Persistence) -> None:  # noqa: F811
    """A run that may still be streaming keeps its thread."""
    stores: Any = fresh.stores
    await stores.runs.create_or_resume("r1", "t", started_at=1, lease_token="t")
    await asyncio.sleep(2 * _IDLE / 1000)
    assert await fresh.maintenance().purge_threads(idle_ms=_IDLE) == []
    assert await stores.runs.get("r1") is not None


async def test_old_cuts_are_erased_in_every_scope(fresh: Persistence) -> None:  # noqa: F811
    """purge_cuts takes archived messages by the time of their cut; the transcripts stay."""
    tenant = fresh.scoped(Scope(tenant_id="acme", user_id="ann"))
    bags: list[Any] = [fresh.stores, tenant.stores]
    for stores in bags:
        await stores.messages.save_thread("t", [user("q", "m1"), assistant("a", "m2")])
        await stores.messages.save_thread("t", [user("q", "m1"), assistant("b", "m3")])
    (cut,) = await bags[1].messages.list_cuts("t")
    purged = await fresh.maintenance().purge_cuts(before=cut.cut_at + 60_000)
    assert {(scope.tenant_id, thread, count) for scope, thread, count in purged} == {
        (None, "t", 1),
        ("acme", "t", 1),
    }
    for stores in bags:
        assert await stores.messages.list_cuts("t") == []
        assert message_ids(await stores.messages.load_thread("t")) == ["m1", "m3"]
    assert await fresh.maintenance().purge_cuts(before=cut.cut_at + 60_000) == []


async def test_a_sweep_of_a_composed_bag_writes_to_both_backends(
    fresh: Persistence,  # noqa: F811
) -> None:
    """Runs here, messages there: the lost run's draft ends the transcript, then the run."""
    async with memory_persistence() as other:
        bag = compose_persistence(fresh, overrides={"messages": other.stores.messages})
        stores: Any = bag.stores
        await stores.messages.save_thread("t", [user("q", "m1")])
        await stores.runs.create_or_resume("r1", "t", started_at=1, lease_token="t", lease_ms=-1)
        await stores.runs.backend.save_draft("t", "r1", [assistant("x", "m2")], lease_token="t")
        (ended,) = await bag.maintenance().sweep()
        assert ended.run.status == "failed"
        assert message_ids(await stores.messages.load_thread("t")) == ["m1", "m2"]
        fresh_messages: Any = fresh.stores.messages
        assert await fresh_messages.load_thread("t") == []
