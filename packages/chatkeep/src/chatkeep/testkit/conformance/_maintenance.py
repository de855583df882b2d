"""What runs beside the chats: lost runs and retention, over all scopes."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import RunConflict
from chatkeep.records import RunError, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.scope import Scope
from chatkeep.stores import InterruptRef, RunStart, Splice, TurnBackend, TurnCommit, ViewQuery
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    gather,
    interrupt,
    message_ids,
    user,
)

__all__ = ["TestMaintenance"]

_T0 = 1_700_000_000_000
_ALL = 1000


class TestMaintenance(ConformanceCase):
    """``persistence.maintenance()``. Its calls see every run of the backend: these cases
    look at runs of their own and leave whole-database purges alone."""

    @pytest.fixture
    def maintenance(self, persistence: Any, runs: Any, declared: frozenset[str]) -> Any:
        """Where the runs are a backend's: only such runs have leases."""
        if "Maintenance" in declared:
            pytest.skip("declared: no Maintenance")
        if not isinstance(getattr(runs, "backend", None), TurnBackend):
            pytest.skip("tier Maintenance is absent: the run store keeps no leases")
        return persistence.maintenance()

    @pytest.fixture
    def backend(self, runs: Any) -> TurnBackend:
        """The backend of the runs."""
        backend: TurnBackend = runs.backend
        return backend

    async def test_a_run_whose_lease_ran_out_is_ended(
        self, maintenance: Any, runs: Any, ids: Ids
    ) -> None:
        """Sweep marks it failed with worker_lost, and returns it with its scope."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="t", lease_ms=-1)
        (ended,) = [row for row in await maintenance.sweep(limit=_ALL) if row.run.run_id == run]
        found = await runs.get(run)
        assert ended.run == found
        assert ended.scope == runs.backend.scope
        assert (found.status, found.error.code) == ("failed", "worker_lost")
        assert found.finished_at is not None
        assert found.lease.token == "t"
        again = await maintenance.sweep(limit=_ALL)
        assert run not in [row.run.run_id for row in again]

    async def test_runs_that_are_driven_parked_or_unleased_are_left_alone(
        self, maintenance: Any, runs: Any, ids: Ids
    ) -> None:
        """Only running runs with an expired lease are lost."""
        thread = ids.thread()
        driven, own, parked, ended = (ids.run() for _ in range(4))
        await runs.create_or_resume(driven, thread, started_at=_T0, lease_token="t")
        await runs.create_or_resume(own, thread, started_at=_T0)
        await runs.create_or_resume(
            parked, thread, started_at=_T0, status="interrupted", lease_token="t", lease_ms=-1
        )
        await runs.create_or_resume(ended, thread, started_at=_T0, lease_token="t", lease_ms=-1)
        await runs.update(ended, RunPatch(status="completed", finished_at=_T0))
        before = [await runs.get(run) for run in (driven, own, parked, ended)]
        await maintenance.sweep(limit=_ALL)
        assert [await runs.get(run) for run in (driven, own, parked, ended)] == before

    async def test_a_lost_runs_draft_becomes_a_message(
        self, maintenance: Any, persistence: Any, messages: Any, runs: Any, ids: Ids
    ) -> None:
        """What was streamed is not lost: it ends the transcript, marked with a stop reason."""
        run, thread = ids.run(), ids.thread()
        await messages.save_thread(thread, [user("q", "m1")])
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="t", lease_ms=-1)
        await runs.backend.save_draft(
            thread, run, [assistant("half an ans", "m2")], lease_token="t"
        )
        await maintenance.sweep(limit=_ALL)
        found = await messages.load_thread(thread)
        assert message_ids(found) == ["m1", "m2"]
        assert found[1]["content"] == "half an ans"
        assert found[1]["metadata"]["tanstack"]["stopReason"] == "error"
        view = await runs.backend.read_view(thread, ViewQuery(drafts=True))
        assert view.drafts == []

    async def test_a_lost_regenerate_leaves_the_old_answer(
        self, maintenance: Any, messages: Any, runs: Any, backend: TurnBackend, ids: Ids
    ) -> None:
        """A run that only hid entries and died changed nothing: its draft goes."""
        run, thread = ids.run(), ids.thread()
        rows = [user("q", "m1"), assistant("old", "m2")]
        await messages.save_thread(thread, rows)
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                run=RunStart(run_id=run, started_at=_T0, lease_token="t", lease_ms=-1, hide_from=2),
            )
        )
        await backend.save_draft(thread, run, [assistant("new", "m3")], lease_token="t")
        await maintenance.sweep(limit=_ALL)
        assert await messages.load_thread(thread) == rows
        assert (await runs.get(run)).status == "failed"

    async def test_a_late_worker_may_still_complete(
        self, maintenance: Any, runs: Any, backend: TurnBackend, ids: Ids
    ) -> None:
        """The token stays on a swept run: who holds it ends the run properly."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="t", lease_ms=-1)
        await maintenance.sweep(limit=_ALL)
        receipt = await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                lease_token="t",
                run=RunPatch(status="completed", finished_at=_T0 + 9, error=None),
            )
        )
        assert receipt.run is not None
        assert (receipt.run.status, receipt.run.error) == ("completed", None)
        await maintenance.sweep(limit=_ALL)
        assert await runs.get(run) == receipt.run

    async def test_a_worker_that_lost_the_run_to_another_may_not(
        self, maintenance: Any, runs: Any, ids: Ids
    ) -> None:
        """After a takeover the first token is refused, swept or not."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="one", lease_ms=-1)
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="two", lease_ms=-1)
        await maintenance.sweep(limit=_ALL)
        with pytest.raises(RunConflict) as caught:
            await runs.update(run, RunPatch(status="completed"), lease_token="one")
        assert caught.value.reason == "lease-lost"
        assert (await runs.get(run)).error == RunError(
            message=(await runs.get(run)).error.message, code="worker_lost"
        )

    async def test_a_swept_claim_is_free(
        self, maintenance: Any, runs: Any, backend: TurnBackend, ids: Ids
    ) -> None:
        """The question that a lost continuation had claimed can be answered again."""
        run, thread, paused = ids.run(), ids.thread(), ids.run()
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                interrupts=[interrupt(thread, paused, "i1")],
            )
        )
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                claims=[InterruptRef(interrupt_id="i1")],
                run=RunStart(run_id=run, started_at=_T0, lease_token="t", lease_ms=-1),
            )
        )
        await maintenance.sweep(limit=_ALL)
        (record,) = (await backend.read_view(thread, ViewQuery())).interrupts
        assert (record.status, record.claimed_by) == ("pending", None)

    async def test_sweeps_at_once_end_a_run_once(
        self, maintenance: Any, messages: Any, runs: Any, ids: Ids
    ) -> None:
        """Several processes may sweep: the draft is appended once, one of them ended the run."""
        run, thread = ids.run(), ids.thread()
        await messages.save_thread(thread, [user("q", "m1")])
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="t", lease_ms=-1)
        await runs.backend.save_draft(thread, run, [assistant("x", "m2")], lease_token="t")
        swept = await gather([maintenance.sweep(limit=_ALL) for _ in range(3)])
        assert [row.run.run_id for rows in swept for row in rows].count(run) == 1
        assert message_ids(await messages.load_thread(thread)) == ["m1", "m2"]

    async def test_a_sweep_reaches_every_scope(
        self, maintenance: Any, scoped: Any, ids: Ids
    ) -> None:
        """Maintenance crosses scopes; each row says whose it is, and is ended there."""
        run, thread = ids.run(), ids.thread()
        scope = Scope(tenant_id=ids("s"), user_id="u")
        stores = scoped(scope).stores
        await stores.messages.save_thread(thread, [user("q", "m1")])
        await stores.runs.create_or_resume(
            run, thread, started_at=_T0, lease_token="t", lease_ms=-1
        )
        await stores.runs.backend.save_draft(thread, run, [assistant("x", "m2")], lease_token="t")
        (ended,) = [row for row in await maintenance.sweep(limit=_ALL) if row.run.run_id == run]
        assert ended.scope == scope
        assert (await stores.runs.get(run)).status == "failed"
        assert message_ids(await stores.messages.load_thread(thread)) == ["m1", "m2"]

    async def test_detached_runs_of_every_scope_can_be_reclaimed(
        self, maintenance: Any, runs: Any, scoped: Any, ids: Ids
    ) -> None:
        """list_reclaimable of maintenance returns each row's scope."""
        scope = Scope(tenant_id=ids("s"))
        names = [ids.run(), ids.run()]
        for store, name in zip((runs, scoped(scope).stores.runs), names, strict=True):
            await store.create_or_resume(name, ids.thread(), started_at=_T0)
            await store.update(name, RunPatch(detached_since=7))
        found = await maintenance.list_reclaimable(ttl_ms=0, now=7, limit=_ALL)
        mine = {row.run.run_id: row.scope for row in found if row.run.run_id in names}
        assert mine == {names[0]: runs.backend.scope, names[1]: scope}
        for store, name in zip((runs, scoped(scope).stores.runs), names, strict=True):
            await store.update(name, RunPatch(status="aborted"))

    async def test_nothing_is_purged_that_is_not_old(
        self, maintenance: Any, messages: Any, ids: Ids
    ) -> None:
        """Retention with a far limit leaves fresh threads and cuts."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a", "m1")])
        await messages.save_thread(thread, [user("b", "m2")])
        century = 100 * 365 * 24 * 3600 * 1000
        assert thread not in [row[1] for row in await maintenance.purge_threads(idle_ms=century)]
        assert thread not in [row[1] for row in await maintenance.purge_cuts(before=_T0)]
        assert await messages.load_thread(thread) == [user("b", "m2")]
        if hasattr(messages, "list_cuts"):
            assert len(await messages.list_cuts(thread)) == 1

    async def test_a_sweep_does_not_undo_a_finished_turn(
        self, maintenance: Any, runs: Any, messages: Any, backend: TurnBackend, ids: Ids
    ) -> None:
        """A slow worker's commit after its lease ran out beats a later sweep."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="t", lease_ms=-1)
        splice = Splice(keep_through=0, tail=[user("q", "m1"), assistant("a", "m2")])
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                lease_token="t",
                splice=splice if getattr(messages, "backend", None) is backend else None,
                run=RunPatch(status="completed", finished_at=_T0 + 1),
            )
        )
        await maintenance.sweep(limit=_ALL)
        assert (await runs.get(run)).status == "completed"
