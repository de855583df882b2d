"""Executions: the runs store and its tiers."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InvalidValue, RunConflict
from chatkeep.records import RUN_STATUSES, Lease, RunError, RunPatch, RunRecord, RunStatus
from chatkeep.stores import ReclaimableRuns, RunHistory, RunStore, RunTree
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    exact,
    gather,
    now_ms,
    outcomes,
)

__all__ = ["TestReclaimableRuns", "TestRunHistory", "TestRunTree", "TestRuns"]

_T0 = 1_700_000_000_000


class TestRuns(ConformanceCase):
    """The runs store: R1, R2, R4, R6 and what upstream does not ask."""

    async def test_r1_an_unknown_run_is_none(self, runs: RunStore, ids: Ids) -> None:
        """Get of an id that nobody created answers None."""
        assert await runs.get(ids.run()) is None
        assert await runs.get(ids.run(), thread_id=ids.thread()) is None

    async def test_r1_a_new_run_is_running(self, runs: RunStore, ids: Ids) -> None:
        """The default status is running; optional fields are absent."""
        run, thread = ids.run(), ids.thread()
        made = await runs.create_or_resume(run, thread, started_at=_T0)
        assert (made.run_id, made.thread_id, made.status) == (run, thread, "running")
        assert made.started_at == _T0
        assert made.to_json() == {
            "runId": run,
            "threadId": thread,
            "status": "running",
            "startedAt": _T0,
        }
        assert await runs.get(run) == made
        assert await runs.get(run, thread_id=thread) == made
        assert await runs.get(run, thread_id=ids.thread()) is None

    async def test_r1_a_second_create_returns_the_stored_run(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """create_or_resume is idempotent: other inputs of the second call are ignored."""
        run, thread = ids.run(), ids.thread()
        made = await runs.create_or_resume(run, thread, started_at=_T0)
        again = await runs.create_or_resume(
            run,
            thread,
            started_at=_T0 + 5,
            status="interrupted",
            parent_run_id="p",
            name="other",
            extra={"kind": "x"},
        )
        assert again == made
        assert await runs.get(run) == made

    async def test_r1_an_update_patches_status_time_and_usage(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """A patch sets what it names and leaves the rest; a later create returns it all."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0)
        usage = {"promptTokens": 10, "completionTokens": 5, "cost": 0.1, "details": {"cached": 0}}
        await runs.update(
            run, RunPatch(status="completed", finished_at=_T0 + 9, usage=usage), thread_id=thread
        )
        found = await runs.get(run)
        assert found is not None
        assert (found.status, found.finished_at) == ("completed", _T0 + 9)
        assert exact(found.usage) == exact(usage)
        assert found.started_at == _T0
        assert await runs.create_or_resume(run, thread, started_at=_T0 + 99) == found

    async def test_r1_an_error_keeps_its_code(self, runs: RunStore, ids: Ids) -> None:
        """Message and code of an error round-trip; without a code there is none."""
        for error in (RunError(message="rate", code="429"), RunError(message="boom")):
            run = ids.run()
            await runs.create_or_resume(run, ids.thread(), started_at=_T0)
            await runs.update(run, RunPatch(status="failed", finished_at=_T0, error=error))
            found = await runs.get(run)
            assert found is not None
            assert found.error == error
            assert found.to_json()["error"] == error.to_json()

    async def test_r1_an_update_of_an_unknown_run_creates_nothing(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """Update of an unknown id is a silent no-op."""
        run = ids.run()
        await runs.update(run, RunPatch(status="completed"))
        await runs.update(run, RunPatch(status="completed"), thread_id=ids.thread())
        assert await runs.get(run) is None

    @pytest.mark.parametrize("status", ["completed", "failed", "aborted"])
    async def test_r2_create_never_revives_an_ended_run(
        self, runs: RunStore, ids: Ids, status: RunStatus
    ) -> None:
        """Status, start and end of an ended run stay, whatever a later create asks for."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0)
        await runs.update(run, RunPatch(status=status, finished_at=_T0 + 1))
        again = await runs.create_or_resume(
            run, thread, started_at=_T0 + 7, status="running", lease_token="mine"
        )
        found = await runs.get(run)
        assert again == found
        assert (again.status, again.started_at, again.finished_at) == (status, _T0, _T0 + 1)
        assert again.lease is None

    async def test_r3_links_are_absent_unless_given(self, runs: RunStore, ids: Ids) -> None:
        """A parent has no links, a child keeps its own, a resume changes none."""
        parent, child, thread = ids.run(), ids.run(), ids.thread()
        made = await runs.create_or_resume(parent, thread, started_at=_T0)
        assert (made.parent_run_id, made.subagent_run_id, made.name) == (None, None, None)
        kid = await runs.create_or_resume(
            child,
            f"subagent:{child}",
            started_at=_T0,
            parent_run_id=parent,
            subagent_run_id=child,
            name="helper",
        )
        again = await runs.create_or_resume(
            child, f"subagent:{child}", started_at=_T0, parent_run_id=ids.run(), name="other"
        )
        assert again == kid == await runs.get(child)
        assert (kid.parent_run_id, kid.subagent_run_id, kid.name) == (parent, child, "helper")

    async def test_an_empty_link_is_refused(self, runs: RunStore, ids: Ids) -> None:
        """An empty text is no link: refused, and no run is made."""
        for name in ("parent_run_id", "subagent_run_id", "name"):
            run = ids.run()
            link: dict[str, Any] = {name: ""}
            with pytest.raises(InvalidValue):
                await runs.create_or_resume(run, ids.thread(), started_at=_T0, **link)
            assert await runs.get(run) is None

    async def test_r4_the_newest_running_run_is_active(self, runs: RunStore, ids: Ids) -> None:
        """None when idle; the newest running run wins; other threads do not count."""
        thread, old, new = ids.thread(), ids.run(), ids.run()
        assert await runs.find_active_run(thread) is None
        await runs.create_or_resume(old, thread, started_at=_T0)
        await runs.create_or_resume(new, thread, started_at=_T0 + 10)
        await runs.create_or_resume(ids.run(), ids.thread(), started_at=_T0 + 99)
        assert (await _active(runs, thread)) == new
        await runs.update(new, RunPatch(status="completed", finished_at=_T0 + 11))
        assert (await _active(runs, thread)) == old
        await runs.update(old, RunPatch(status="failed", finished_at=_T0 + 12))
        assert await runs.find_active_run(thread) is None

    async def test_of_runs_started_together_the_last_created_is_active(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """Equal start times: the order of creation decides, always the same way."""
        thread = ids.thread()
        made = [f"{c}-{ids.run()}" for c in "mzacb"]
        for run in made:
            await runs.create_or_resume(run, thread, started_at=_T0)
        for _ in range(3):
            assert (await _active(runs, thread)) == made[-1]

    async def test_a_parked_run_is_not_active_a_detached_one_is(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """Interrupted does not count as active; running without viewers does."""
        thread, run, parked = ids.thread(), ids.run(), ids.run()
        await runs.create_or_resume(run, thread, started_at=_T0)
        await runs.create_or_resume(parked, thread, started_at=_T0 + 5)
        await runs.update(parked, RunPatch(status="interrupted"))
        await runs.update(run, RunPatch(detached_since=_T0 + 6))
        assert (await _active(runs, thread)) == run

    async def test_a_run_whose_lease_ran_out_is_not_active(self, runs: RunStore, ids: Ids) -> None:
        """A run that nobody can be driving is not reported as active."""
        thread, run = ids.thread(), ids.run()
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="gone", lease_ms=-1)
        assert await runs.find_active_run(thread) is None
        found = await runs.get(run)
        assert found is not None
        assert found.status == "running"

    async def test_a_lease_counts_from_the_stores_clock(self, runs: RunStore, ids: Ids) -> None:
        """A run created with a lease token has that lease, about lease_ms ahead."""
        run = ids.run()
        made = await runs.create_or_resume(
            run, ids.thread(), started_at=_T0, lease_token="mine", lease_ms=50_000
        )
        assert made.lease is not None
        assert made.lease.token == "mine"
        assert abs(made.lease.until - now_ms() - 50_000) < 20_000
        assert await runs.get(run) == made

    async def test_a_live_lease_is_not_taken(self, runs: RunStore, ids: Ids) -> None:
        """create_or_resume on a run that is being driven returns it unchanged."""
        run, thread = ids.run(), ids.thread()
        made = await runs.create_or_resume(run, thread, started_at=_T0, lease_token="one")
        again = await runs.create_or_resume(run, thread, started_at=_T0, lease_token="two")
        assert again == made

    async def test_an_expired_lease_is_taken_over(self, runs: RunStore, ids: Ids) -> None:
        """A new driver gets the run with its own token; nothing else changes."""
        run, thread = ids.run(), ids.thread()
        made = await runs.create_or_resume(
            run, thread, started_at=_T0, name="n", lease_token="one", lease_ms=-1
        )
        mine = await runs.create_or_resume(run, thread, started_at=_T0 + 5, lease_token="two")
        assert mine.lease is not None
        assert mine.lease.token == "two"
        assert mine.model_copy(update={"lease": None}) == made.model_copy(update={"lease": None})
        with pytest.raises(RunConflict) as caught:
            await runs.update(run, RunPatch(status="completed"), lease_token="one")
        assert caught.value.reason == "lease-lost"
        await runs.update(run, RunPatch(status="completed"), lease_token="two")

    async def test_an_update_with_a_wrong_token_writes_nothing(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """A driver that lost its lease gets RunConflict("lease-lost")."""
        run, thread = ids.run(), ids.thread()
        made = await runs.create_or_resume(run, thread, started_at=_T0, lease_token="mine")
        with pytest.raises(RunConflict) as caught:
            await runs.update(run, RunPatch(usage={"x": 1}), thread_id=thread, lease_token="theirs")
        assert caught.value.reason == "lease-lost"
        assert await runs.get(run) == made

    async def test_a_run_id_of_another_thread_is_a_conflict(self, runs: RunStore, ids: Ids) -> None:
        """A run id is unique over all threads of a scope; the second thread is refused."""
        run, thread = ids.run(), ids.thread()
        made = await runs.create_or_resume(run, thread, started_at=_T0)
        with pytest.raises(RunConflict) as caught:
            await runs.create_or_resume(run, ids.thread(), started_at=_T0 + 1)
        assert (caught.value.reason, caught.value.run_id) == ("foreign-thread", run)
        assert await runs.get(run) == made

    @pytest.mark.parametrize("before", sorted(RUN_STATUSES))
    @pytest.mark.parametrize("after", sorted(RUN_STATUSES))
    async def test_statuses_change_as_the_state_machine_says(
        self, runs: RunStore, ids: Ids, before: RunStatus, after: RunStatus
    ) -> None:
        """An ended run keeps its status, a parked one does not run again, the rest is free."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0, status=before)
        allowed = before == after or before == "running"
        allowed = allowed or (before == "interrupted" and after != "running")
        if allowed:
            await runs.update(run, RunPatch(status=after, usage={"n": 1}))
        else:
            with pytest.raises(RunConflict) as caught:
                await runs.update(run, RunPatch(status=after, usage={"n": 1}))
            assert caught.value.reason == "transition"
        found = await runs.get(run)
        assert found is not None
        assert found.status == (after if allowed else before)
        assert found.usage == ({"n": 1} if allowed else None)

    async def test_a_late_worker_may_end_a_run_that_was_given_up(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """Failed with worker_lost is not final for who still holds the lease token."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0, lease_token="w", lease_ms=-1)
        lost = RunError(message="lost", code="worker_lost")
        await runs.update(run, RunPatch(status="failed", finished_at=_T0 + 1, error=lost))
        with pytest.raises(RunConflict):
            await runs.update(run, RunPatch(status="completed", finished_at=_T0 + 2))
        await runs.update(
            run, RunPatch(status="completed", finished_at=_T0 + 3, error=None), lease_token="w"
        )
        found = await runs.get(run)
        assert found is not None
        assert (found.status, found.finished_at, found.error) == ("completed", _T0 + 3, None)

    async def test_absent_leaves_and_none_clears(self, runs: RunStore, ids: Ids) -> None:
        """A field that a patch does not name stays; None removes it, no sibling with it."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(
            run, thread, started_at=_T0, name="n", parent_run_id="p", extra={"kind": "k"}
        )
        full: dict[str, Any] = {
            "error": RunError(message="m", code="c"),
            "usage": {"t": 1},
            "cancel_requested": False,
            "detached_since": _T0 + 1,
            "sandbox_key": "box",
            "driver_epoch": 3,
            "hide_from": 4,
            "detached": True,
        }
        await runs.update(run, RunPatch(**full))
        for cleared in full:
            clear: dict[str, Any] = {cleared: None}
            await runs.update(run, RunPatch(**clear))
            left = await runs.get(run)
            assert left is not None
            for name, value in full.items():
                assert getattr(left, name) == (None if name == cleared else value), name
            assert (left.name, left.parent_run_id) == ("n", "p")
            assert (left.model_extra or {}).get("kind") == "k"
            await runs.update(run, RunPatch(**{cleared: full[cleared]}))
        await runs.update(run, RunPatch(status="failed", finished_at=_T0 + 9))
        await runs.update(run, RunPatch(usage={"t": 2}))
        found = await runs.get(run)
        assert found is not None
        assert (found.finished_at, found.usage, found.error) == (
            _T0 + 9,
            {"t": 2},
            full["error"],
        )

    async def test_cancel_requested_has_three_states(self, runs: RunStore, ids: Ids) -> None:
        """Never set is absent, false is false, true is true."""
        run = ids.run()
        await runs.create_or_resume(run, ids.thread(), started_at=_T0)
        for value in (None, False, True, None):
            if value is not None:
                await runs.update(run, RunPatch(cancel_requested=value))
            else:
                await runs.update(run, RunPatch(cancel_requested=None))
            found = await runs.get(run)
            assert found is not None
            assert found.cancel_requested is value
            assert found.to_json().get("cancelRequested", "absent") == (
                "absent" if value is None else value
            )

    async def test_fields_that_have_no_name_here_are_kept(self, runs: RunStore, ids: Ids) -> None:
        """Extra on insert and in patches round-trips; None takes a field away."""
        run = ids.run()
        await runs.create_or_resume(
            run, ids.thread(), started_at=_T0, extra={"kind": "agent", "deep": {"a.b": [1, 1.0]}}
        )
        await runs.update(run, RunPatch(extra={"artifacts": [], "kind": None}))
        found = await runs.get(run)
        assert found is not None
        assert exact(found.model_extra) == exact({"deep": {"a.b": [1, 1.0]}, "artifacts": []})

    async def test_times_are_what_was_given(self, runs: RunStore, ids: Ids) -> None:
        """Epoch milliseconds come back digit for digit: no zone, no rounding."""
        for start in (0, 1, 1_711_846_799_999, 1_711_846_800_000, 253_402_300_799_999):
            run = ids.run()
            await runs.create_or_resume(run, ids.thread(), started_at=start)
            await runs.update(run, RunPatch(status="aborted", finished_at=start + 1))
            found = await runs.get(run)
            assert found is not None
            assert (found.started_at, found.finished_at) == (start, start + 1)
            assert type(found.started_at) is int

    async def test_a_long_error_text_does_not_lose_the_status(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """100 000 characters with quotes, emoji and NUL are stored with the code."""
        run = ids.run()
        text = '"\\😀\x00' * 20_000
        await runs.create_or_resume(run, ids.thread(), started_at=_T0)
        await runs.update(
            run,
            RunPatch(status="failed", finished_at=_T0, error=RunError(message=text, code="x")),
        )
        found = await runs.get(run)
        assert found is not None
        assert found.error is not None
        assert (found.error.message, found.error.code) == (text, "x")

    async def test_usage_keeps_its_types(self, runs: RunStore, ids: Ids) -> None:
        """Integers stay integers and floats floats, also beyond 64 bits."""
        run = ids.run()
        usage: dict[str, Any] = {
            "i": 1,
            "f": 1.0,
            "g": 0.1,
            "big": 2**53 + 1,
            "huge": 2**70,
            "t": True,
            "l": [],
        }
        await runs.create_or_resume(run, ids.thread(), started_at=_T0)
        await runs.update(run, RunPatch(usage=usage))
        found = await runs.get(run)
        assert found is not None
        assert exact(found.usage) == exact(usage)

    async def test_a_value_that_cannot_be_stored_changes_nothing(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """InvalidValue in a patch leaves the run as it was, the other fields too."""
        run = ids.run()
        made = await runs.create_or_resume(run, ids.thread(), started_at=_T0)
        with pytest.raises(InvalidValue):
            await runs.update(run, RunPatch(cancel_requested=True, usage={"x": float("nan")}))
        assert await runs.get(run) == made

    async def test_patches_of_different_fields_at_once_lose_none(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """A patch is atomic: concurrent patches of different fields all stay."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0)
        patches = [
            RunPatch(usage={"a": 1}),
            RunPatch(cancel_requested=True),
            RunPatch(sandbox_key="box"),
            RunPatch(driver_epoch=7),
            RunPatch(detached_since=_T0),
            RunPatch(extra={"x1": 1}),
            RunPatch(extra={"x2": 2}),
        ]
        await gather([runs.update(run, patch, thread_id=thread) for patch in patches])
        found = await runs.get(run)
        assert found is not None
        assert (found.usage, found.cancel_requested, found.sandbox_key) == ({"a": 1}, True, "box")
        assert (found.driver_epoch, found.detached_since) == (7, _T0)
        assert found.model_extra == {"x1": 1, "x2": 2}

    async def test_of_concurrent_creates_one_row_is_what_all_get(
        self, runs: RunStore, ids: Ids
    ) -> None:
        """Twenty callers, one id: one winner's values, and nobody sees their own instead."""
        run, thread = ids.run(), ids.thread()
        made = await gather(
            [
                runs.create_or_resume(run, thread, started_at=_T0 + n, name=f"n{n}")
                for n in range(20)
            ]
        )
        stored = await runs.get(run)
        assert stored is not None
        assert made == [stored] * 20
        assert stored.name == f"n{stored.started_at - _T0}"

    async def test_two_threads_never_own_one_run_id(self, runs: RunStore, ids: Ids) -> None:
        """Racing for one run id from six threads: one gets it, the others a conflict."""
        run = ids.run()
        threads = [ids.thread() for _ in range(6)]
        won, lost = await outcomes(
            [runs.create_or_resume(run, thread, started_at=_T0) for thread in threads]
        )
        assert len(won) == 1
        assert [type(e) for e in lost] == [RunConflict] * 5
        assert await runs.get(run) == won[0]

    async def test_of_two_terminal_writes_one_wins(self, runs: RunStore, ids: Ids) -> None:
        """A run ends once: complete against abort leaves one status, the other is refused."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=_T0)
        won, lost = await outcomes(
            [
                runs.update(run, RunPatch(status="completed", finished_at=_T0 + 1)),
                runs.update(run, RunPatch(status="aborted", finished_at=_T0 + 2)),
            ]
        )
        assert (len(won), [type(e) for e in lost]) == (1, [RunConflict])
        found = await runs.get(run)
        assert found is not None
        assert (found.status, found.finished_at) in (
            ("completed", _T0 + 1),
            ("aborted", _T0 + 2),
        )

    async def test_run_and_thread_ids_are_never_joined(self, runs: RunStore, ids: Ids) -> None:
        """Ids with separators in them do not meet: ("t:1", "r") is not ("t", "1:r")."""
        tag = ids("x")
        pairs = [(f"t{tag}:1", "r"), (f"t{tag}", "1:r"), (f"t{tag}#1", "r#"), (f"t{tag}", "#1r#")]
        pairs = [(thread, f"{run}{tag}") for thread, run in pairs]
        for n, (thread, run) in enumerate(pairs):
            await runs.create_or_resume(run, thread, started_at=_T0 + n)
        for n, (thread, run) in enumerate(pairs):
            found = await runs.get(run, thread_id=thread)
            assert found is not None
            assert (found.thread_id, found.started_at) == (thread, _T0 + n)

    async def test_a_patched_lease_is_stored(self, runs: RunStore, ids: Ids) -> None:
        """A patch may give a lease and take it away again."""
        run = ids.run()
        await runs.create_or_resume(run, ids.thread(), started_at=_T0)
        lease = Lease(token="mine", until=now_ms() + 60_000)
        await runs.update(run, RunPatch(lease=lease))
        found = await runs.get(run)
        assert found is not None
        assert found.lease == lease
        await runs.update(run, RunPatch(lease=None))
        found = await runs.get(run)
        assert found is not None
        assert found.lease is None

    @pytest.mark.parametrize("bad", ["", "a\x00b", "\ud800", "x" * 1025])
    async def test_an_id_that_is_none_is_refused(self, runs: RunStore, ids: Ids, bad: str) -> None:
        """Run and thread ids are checked before anything is read or written."""
        with pytest.raises(InvalidValue):
            await runs.get(bad)
        with pytest.raises(InvalidValue):
            await runs.create_or_resume(bad, ids.thread(), started_at=_T0)
        with pytest.raises(InvalidValue):
            await runs.create_or_resume(ids.run(), bad, started_at=_T0)
        with pytest.raises(InvalidValue):
            await runs.find_active_run(bad)


class TestRunHistory(ConformanceCase):
    """Tier RunHistory: R5, R6."""

    async def test_r5_runs_are_listed_by_start(
        self, runs: RunStore, history: RunHistory, ids: Ids
    ) -> None:
        """Ascending by started_at, also when inserted the other way round."""
        thread = ids.thread()
        made = [ids.run() for _ in range(4)]
        for n, run in reversed(list(enumerate(made))):
            await runs.create_or_resume(run, thread, started_at=_T0 + n)
        await runs.create_or_resume(ids.run(), ids.thread(), started_at=_T0)
        assert [r.run_id for r in await history.list_by_thread(thread)] == made
        assert await history.list_by_thread(ids.thread()) == []

    async def test_runs_started_together_keep_the_order_of_creation(
        self, runs: RunStore, history: RunHistory, ids: Ids
    ) -> None:
        """Equal times: first created first, also after an update moved a row."""
        thread = ids.thread()
        made = [f"{c}{ids.run()}" for c in "mzacb"]
        for run in made:
            await runs.create_or_resume(run, thread, started_at=_T0)
        await runs.update(made[1], RunPatch(usage={"n": 1}))
        assert [r.run_id for r in await history.list_by_thread(thread)] == made

    async def test_r6_the_list_shows_the_current_state(
        self, runs: RunStore, history: RunHistory, ids: Ids
    ) -> None:
        """Records in the list are the records that get gives."""
        thread, run = ids.thread(), ids.run()
        await runs.create_or_resume(run, thread, started_at=_T0, name="n")
        await runs.update(run, RunPatch(status="completed", finished_at=_T0 + 5, usage={"n": 1}))
        listed = await history.list_by_thread(thread)
        assert listed == [await runs.get(run)]
        assert (listed[0].status, listed[0].finished_at) == ("completed", _T0 + 5)


class TestRunTree(ConformanceCase):
    """Tier RunTree: R7."""

    async def test_r7_children_are_those_of_one_parent(
        self, runs: RunStore, tree: RunTree, ids: Ids
    ) -> None:
        """Only that parent's children, ascending by start, names kept."""
        parent, other = ids.run(), ids.run()
        kids = [ids.run() for _ in range(3)]
        for n, kid in reversed(list(enumerate(kids))):
            await _child(runs, kid, parent, _T0 + n, name=f"n{n}")
        await _child(runs, ids.run(), other, _T0)
        await _child(runs, ids.run(), kids[0], _T0)
        found = await tree.list_by_parent_run(parent)
        assert [r.run_id for r in found] == kids
        assert [r.name for r in found] == ["n0", "n1", "n2"]
        assert found[0] == await runs.get(kids[0])

    async def test_r7_an_unknown_parent_has_no_children(self, tree: RunTree, ids: Ids) -> None:
        """Empty for an unknown parent, and for a run without children."""
        assert await tree.list_by_parent_run(ids.run()) == []

    async def test_children_started_together_keep_the_order_of_creation(
        self, runs: RunStore, tree: RunTree, ids: Ids
    ) -> None:
        """Equal times: first created first."""
        parent = ids.run()
        kids = [f"{c}{ids.run()}" for c in "mzacb"]
        for kid in kids:
            await _child(runs, kid, parent, _T0)
        assert [r.run_id for r in await tree.list_by_parent_run(parent)] == kids

    async def test_many_parents_are_asked_at_once(
        self, runs: RunStore, tree: RunTree, ids: Ids
    ) -> None:
        """Every asked parent is a key of the answer, one without children too."""
        one, two, none = ids.run(), ids.run(), ids.run()
        kids = [ids.run() for _ in range(3)]
        await _child(runs, kids[1], one, _T0 + 1)
        await _child(runs, kids[0], one, _T0)
        await _child(runs, kids[2], two, _T0)
        found = await tree.list_by_parent_runs([one, two, none])
        assert {parent: [r.run_id for r in rows] for parent, rows in found.items()} == {
            one: kids[:2],
            two: [kids[2]],
            none: [],
        }
        assert await tree.list_by_parent_runs([]) == {}

    async def test_the_current_state_of_children_is_shown(
        self, runs: RunStore, tree: RunTree, ids: Ids
    ) -> None:
        """A look-up by parent gives the run as it is now."""
        parent, kid = ids.run(), ids.run()
        await _child(runs, kid, parent, _T0)
        await runs.update(kid, RunPatch(status="failed", finished_at=_T0 + 1))
        assert await tree.list_by_parent_run(parent) == [await runs.get(kid)]


class TestReclaimableRuns(ConformanceCase):
    """Tier ReclaimableRuns: R8."""

    async def test_r8_detached_runs_past_the_cutoff_are_listed(
        self, runs: RunStore, reclaimable: ReclaimableRuns, ids: Ids
    ) -> None:
        """In: before the cutoff and exactly at it. Out: newer, ended, parked, never detached."""
        now, ttl = _T0 + 100_000, 1_000
        since = {"past": now - ttl - 1, "at": now - ttl, "newer": now - ttl + 1}
        made = {word: ids.run() for word in since}
        for word, run in made.items():
            await _detached(runs, ids, run, since[word])
        never = ids.run()
        await runs.create_or_resume(never, ids.thread(), started_at=_T0)
        ended: list[str] = []
        for status in ("completed", "failed", "aborted", "interrupted"):
            run = ids.run()
            ended.append(run)
            await _detached(runs, ids, run, since["past"])
            await runs.update(run, RunPatch(status=status))
        back = ids.run()
        await _detached(runs, ids, back, since["past"])
        await runs.update(back, RunPatch(detached_since=None))
        mine = {*made.values(), never, back, *ended}
        found = [
            r.run_id
            for r in await reclaimable.list_reclaimable(now=now, ttl_ms=ttl, limit=10_000)
            if r.run_id in mine
        ]
        assert found == [made["past"], made["at"]]
        found = [
            r.run_id
            for r in await reclaimable.list_reclaimable(now=since["newer"], ttl_ms=0, limit=10_000)
            if r.run_id in mine
        ]
        assert found == [made["past"], made["at"], made["newer"]]

    async def test_the_oldest_come_first_up_to_the_limit(
        self, runs: RunStore, reclaimable: ReclaimableRuns, ids: Ids
    ) -> None:
        """A limit takes the runs that were left first."""
        made = [ids.run() for _ in range(5)]
        for n, run in reversed(list(enumerate(made))):
            await _detached(runs, ids, run, n + 1)
        try:
            found = await reclaimable.list_reclaimable(now=10, ttl_ms=0, limit=3)
            assert [r.run_id for r in found] == made[:3]
            assert found[0] == await runs.get(made[0])
        finally:
            for run in made:
                await runs.update(run, RunPatch(status="aborted", finished_at=_T0))
        assert await reclaimable.list_reclaimable(now=10, ttl_ms=0, limit=3) == []


async def _active(runs: RunStore, thread: str) -> str | None:
    found = await runs.find_active_run(thread)
    return found.run_id if found is not None else None


async def _child(
    runs: RunStore, run: str, parent: str, at: int, name: str | None = None
) -> RunRecord:
    return await runs.create_or_resume(
        run,
        f"subagent:{run}",
        started_at=at,
        parent_run_id=parent,
        subagent_run_id=run,
        name=name,
    )


async def _detached(runs: RunStore, ids: Ids, run: str, since: int) -> None:
    await runs.create_or_resume(run, ids.thread(), started_at=_T0)
    await runs.update(run, RunPatch(detached_since=since))
