"""Who drives a run, and what it has streamed so far."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InvalidValue, RunConflict
from chatkeep.records import RunError, RunPatch, RunStatus
from chatkeep.stores import RunStart, Splice, TurnBackend, ViewQuery
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    interrupt,
    message_ids,
    outcomes,
    user,
)
from chatkeep.testkit.conformance._turnkit import T0, see, start_turn, still, turn

__all__ = ["TestDrafts", "TestLeases"]


class TestLeases(ConformanceCase):
    """Tier TurnBackend: starts, takeovers, renewals and lost leases."""

    @pytest.mark.parametrize(
        ("status", "lease_ms", "reason"),
        [
            ("running", 60_000, "running"),
            ("running", -1, None),
            ("interrupted", 60_000, None),
            ("completed", 60_000, "terminal"),
            ("failed", -1, "terminal"),
            ("aborted", 60_000, "terminal"),
        ],
    )
    async def test_who_may_start_a_known_run(
        self, backend: TurnBackend, ids: Ids, status: RunStatus, lease_ms: int, reason: str | None
    ) -> None:
        """Driven or ended: refused. Lease ran out: taken over. Parked: leased, still parked."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "one", lease_ms)
        if status != "running":
            await backend.commit_turn(
                turn(thread, run_id=run, lease_token="one", run=RunPatch(status=status))
            )
        start = RunStart(run_id=run, started_at=T0 + 9, lease_token="two", name="ignored")
        commit = turn(thread, run_id=run, run=start)
        if reason is not None:
            with pytest.raises(RunConflict) as caught:
                await backend.commit_turn(commit)
            assert caught.value.reason == reason
            return
        receipt = await backend.commit_turn(commit)
        assert receipt.run is not None
        assert not receipt.created_run
        assert (receipt.run.status, receipt.run.started_at) == (status, T0)
        assert receipt.run.name is None
        assert receipt.run.lease is not None
        assert receipt.run.lease.token == "two"
        assert (await see(backend, thread, run)).run == receipt.run

    async def test_a_run_without_a_lease_never_expires(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Runs that users drive themselves are not taken over."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run)
        with pytest.raises(RunConflict) as caught:
            await backend.commit_turn(
                turn(thread, run_id=run, run=RunStart(run_id=run, started_at=T0, lease_token="x"))
            )
        assert caught.value.reason == "running"

    async def test_of_two_takeovers_one_wins(self, backend: TurnBackend, ids: Ids) -> None:
        """An expired lease is taken by exactly one of the drivers that race for it."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "gone", -1)
        won, lost = await outcomes(
            [
                backend.commit_turn(
                    turn(
                        thread,
                        run_id=run,
                        run=RunStart(run_id=run, started_at=T0, lease_token=f"d{n}"),
                    )
                )
                for n in range(4)
            ]
        )
        assert len(won) == 1
        assert all(isinstance(e, RunConflict) for e in lost)
        assert won[0].run == (await see(backend, thread, run)).run

    async def test_a_driver_that_lost_its_lease_writes_nothing(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """After a takeover the old token is refused in commits, drafts and renewals."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "old", -1)
        await backend.commit_turn(
            turn(thread, run_id=run, run=RunStart(run_id=run, started_at=T0, lease_token="new"))
        )
        before = still(await see(backend, thread, run))
        writes: list[dict[str, Any]] = [
            {"run": RunPatch(status="completed")},
            {"splice": Splice(keep_through=0, tail=[user("x")])},
            {"interrupts": [interrupt(thread, run, "i")]},
        ]
        for parts in writes:
            with pytest.raises(RunConflict) as caught:
                await backend.commit_turn(turn(thread, run_id=run, lease_token="old", **parts))
            assert caught.value.reason == "lease-lost"
        with pytest.raises(RunConflict):
            await backend.save_draft(thread, run, [assistant("x")], lease_token="old")
        with pytest.raises(RunConflict):
            await backend.renew_lease(thread, run, "old", 1000)
        assert still(await see(backend, thread, run)) == before

    async def test_an_expired_lease_that_nobody_took_still_counts(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A slow driver may go on as long as nobody took over."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "slow", -1)
        receipt = await backend.commit_turn(
            turn(thread, run_id=run, lease_token="slow", run=RunPatch(usage={"n": 1}))
        )
        assert receipt.run is not None
        renewed = await backend.renew_lease(thread, run, "slow", 60_000)
        assert renewed.live((await see(backend, thread)).now)

    async def test_a_token_for_a_run_without_lease_is_lost(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A lease token must be the run's: none is not a match, nor is an unknown run."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run)
        for name in (run, ids.run()):
            with pytest.raises(RunConflict) as caught:
                await backend.commit_turn(
                    turn(
                        thread,
                        run_id=name,
                        lease_token="x",
                        splice=Splice(keep_through=0, tail=[user("z")]),
                    )
                )
            assert caught.value.reason == "lease-lost"

    async def test_a_patch_of_an_unknown_run_is_a_conflict(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A commit never creates a run by patching it."""
        thread, run = ids.thread(), ids.run()
        with pytest.raises(RunConflict) as caught:
            await backend.commit_turn(turn(thread, run_id=run, run=RunPatch(status="completed")))
        assert caught.value.reason == "unknown"
        assert (await see(backend, thread, run)).run is None

    async def test_renewing_extends_the_lease_from_the_stores_clock(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """The record comes back, with cancel_requested in it."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "t", 1000)
        await backend.commit_turn(turn(thread, run_id=run, run=RunPatch(cancel_requested=True)))
        renewed = await backend.renew_lease(thread, run, "t", 500_000)
        assert renewed.cancel_requested is True
        assert renewed.lease is not None
        view = await see(backend, thread, run)
        assert abs(renewed.lease.until - view.now - 500_000) < 60_000
        assert view.run == renewed

    async def test_who_may_not_renew(self, backend: TurnBackend, ids: Ids) -> None:
        """Unknown, ended, or another's: each its own reason."""
        thread, run, ended = ids.thread(), ids.run(), ids.run()
        await start_turn(backend, thread, run, "t")
        await backend.commit_turn(
            turn(thread, run_id=ended, run=RunStart(run_id=ended, started_at=T0, lease_token="t"))
        )
        await backend.commit_turn(turn(thread, run_id=ended, run=RunPatch(status="completed")))
        for name, token, reason in (
            (ids.run(), "t", "unknown"),
            (ended, "t", "terminal"),
            (run, "x", "lease-lost"),
        ):
            with pytest.raises(RunConflict) as caught:
                await backend.renew_lease(thread, name, token, 1000)
            assert caught.value.reason == reason
        with pytest.raises(RunConflict):
            await backend.renew_lease(ids.thread(), run, "t", 1000)

    async def test_a_sweep_commit_demands_an_expired_lease(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """lease_expired refuses while the lease lives, also right after a renewal."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "t", -1)
        await backend.renew_lease(thread, run, "t", 60_000)
        lost = RunPatch(status="failed", error=RunError(message="x", code="worker_lost"))
        sweep = turn(thread, run_id=run, lease_token="t", lease_expired=True, run=lost)
        with pytest.raises(RunConflict):
            await backend.commit_turn(sweep)
        await backend.renew_lease(thread, run, "t", -1)
        receipt = await backend.commit_turn(sweep)
        assert receipt.run is not None
        assert receipt.run.status == "failed"
        assert receipt.run.lease is not None

    async def test_hide_from_is_stored_with_the_run(self, backend: TurnBackend, ids: Ids) -> None:
        """A regenerate hides, it cuts nothing: the entries stay in the transcript."""
        thread, run, again = ids.thread(), ids.run(), ids.run()
        first = await start_turn(backend, thread, run)
        await backend.commit_turn(turn(thread, run_id=run, run=RunPatch(status="completed")))
        receipt = await backend.commit_turn(
            turn(
                thread,
                run_id=again,
                run=RunStart(
                    run_id=again, started_at=T0 + 1, lease_token="t", hide_from=first.newest
                ),
            )
        )
        assert receipt.run is not None
        assert receipt.run.hide_from == first.newest
        view = await see(backend, thread, again)
        assert view.run == receipt.run
        assert message_ids(view.messages) == ["q1"]
        await backend.commit_turn(turn(thread, run_id=again, run=RunPatch(hide_from=None)))
        after = await see(backend, thread, again)
        assert after.run is not None
        assert after.run.hide_from is None

    async def test_two_threads_never_start_one_run_id(self, backend: TurnBackend, ids: Ids) -> None:
        """Racing from two threads: one starts, the other writes nothing at all."""
        for _ in range(5):
            run, threads = ids.run(), [ids.thread(), ids.thread()]
            won, lost = await outcomes([start_turn(backend, thread, run) for thread in threads])
            assert (len(won), [type(e) for e in lost]) == (1, [RunConflict])
            views = [await see(backend, thread, run) for thread in threads]
            assert sorted(len(view.messages) for view in views) == [0, 1]
            assert sorted(view.exists for view in views) == [False, True]


class TestDrafts(ConformanceCase):
    """Tier TurnBackend: the draft slot of a run."""

    async def test_a_draft_lies_beside_the_transcript(self, backend: TurnBackend, ids: Ids) -> None:
        """Saved again and again, it changes neither revision, numbers nor cuts."""
        thread, run = ids.thread(), ids.run()
        first = await start_turn(backend, thread, run, "t")
        for n in range(5):
            await backend.save_draft(
                thread, run, [assistant("x" * n, "a1", x_new={"n": 1.0})], lease_token="t"
            )
        view = await see(backend, thread)
        assert (view.revision, view.newest) == (first.revision, first.newest)
        assert message_ids(view.messages) == ["q1"]
        (draft,) = view.drafts
        assert (draft.thread_id, draft.run_id) == (thread, run)
        assert draft.messages == [assistant("xxxx", "a1", x_new={"n": 1.0})]
        assert abs(draft.updated_at - view.now) < 60_000
        assert (await backend.read_view(thread, ViewQuery())).drafts == []

    async def test_a_draft_does_not_conflict_with_a_commit(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A commit that expects the revision from before the drafts still applies."""
        thread, run = ids.thread(), ids.run()
        first = await start_turn(backend, thread, run, "t")
        await backend.save_draft(thread, run, [assistant("a", "a1")], lease_token="t")
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                lease_token="t",
                splice=Splice(
                    keep_through=first.newest,
                    tail=[assistant("ab", "a1")],
                    expected=first.revision,
                ),
                run=RunPatch(status="completed"),
                drop_draft=True,
            )
        )
        view = await see(backend, thread)
        assert message_ids(view.messages) == ["q1", "a1"]
        assert view.drafts == []

    async def test_each_run_has_its_own_draft(self, backend: TurnBackend, ids: Ids) -> None:
        """drop_draft removes the draft of the committing run only."""
        thread, one, two = ids.thread(), ids.run(), ids.run()
        for n, run in enumerate((one, two)):
            await backend.commit_turn(
                turn(thread, run_id=run, run=RunStart(run_id=run, started_at=T0 + n))
            )
            await backend.save_draft(thread, run, [assistant(run, "a1")])
        assert {d.run_id for d in (await see(backend, thread)).drafts} == {one, two}
        await backend.commit_turn(
            turn(thread, run_id=one, run=RunPatch(status="aborted"), drop_draft=True)
        )
        (left,) = (await see(backend, thread)).drafts
        assert (left.run_id, left.messages) == (two, [assistant(two, "a1")])

    @pytest.mark.parametrize("status", ["completed", "failed", "aborted", "interrupted"])
    async def test_an_ended_run_has_no_draft(
        self, backend: TurnBackend, ids: Ids, status: RunStatus
    ) -> None:
        """A draft that nobody dropped is not shown once its run has ended; a parked run's is."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run)
        await backend.save_draft(thread, run, [assistant("x", "a1")])
        await backend.commit_turn(turn(thread, run_id=run, run=RunPatch(status=status)))
        shown = [d.run_id for d in (await see(backend, thread)).drafts]
        assert shown == ([run] if status == "interrupted" else [])

    async def test_who_may_not_save_a_draft(self, backend: TurnBackend, ids: Ids) -> None:
        """Unknown and ended runs, and a lost lease, are refused; no draft appears."""
        thread, run, ended = ids.thread(), ids.run(), ids.run()
        await start_turn(backend, thread, run, "t")
        await backend.commit_turn(
            turn(thread, run_id=ended, run=RunStart(run_id=ended, started_at=T0))
        )
        await backend.commit_turn(turn(thread, run_id=ended, run=RunPatch(status="failed")))
        for name, token, reason in (
            (ids.run(), None, "unknown"),
            (ended, None, "terminal"),
            (run, "x", "lease-lost"),
        ):
            with pytest.raises(RunConflict) as caught:
                await backend.save_draft(thread, name, [assistant("x")], lease_token=token)
            assert caught.value.reason == reason
        with pytest.raises(InvalidValue):
            await backend.save_draft(
                thread, run, [assistant("x", metadata={"n": float("nan")})], lease_token="t"
            )
        assert (await see(backend, thread)).drafts == []
