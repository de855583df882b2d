"""One consistent read, one atomic write: what a TurnBackend promises."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InvalidValue
from chatkeep.records import RunPatch
from chatkeep.stores import (
    NO_THREAD,
    ActivitiesWrite,
    CutAppend,
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    TurnBackend,
    TurnCommit,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    assistant,
    interrupt,
    message_ids,
    now_ms,
    user,
)
from chatkeep.testkit.conformance._turnkit import T0, see, start_turn, turn

__all__ = ["TestTurnBackend"]


class TestTurnBackend(ConformanceCase):
    """Tier TurnBackend: reading a thread, and what one commit does."""

    # -- reading -------------------------------------------------------------------------

    async def test_a_thread_that_does_not_exist_is_an_empty_view(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Nothing is there, and reading creates nothing."""
        thread = ids.thread()
        for _ in range(2):
            view = await see(backend, thread, ids.run())
            assert not view.exists
            assert (view.thread_id, view.revision, view.newest) == (thread, NO_THREAD, 0)
            assert (view.messages, view.numbers, view.runs, view.interrupts) == ([], [], [], [])
            assert (view.activities, view.drafts, view.run) == ([], [], None)
            assert (view.truncated, view.foreign_run) == (False, False)
            assert abs(view.now - now_ms()) < 60_000

    async def test_a_view_brings_what_was_asked_for(self, backend: TurnBackend, ids: Ids) -> None:
        """none, bodies, numbers and digests; limit and before; newest and truncated."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(5)]
        receipt = await backend.commit_turn(turn(thread, splice=Splice(keep_through=0, tail=rows)))
        numbers = receipt.numbers
        none = await backend.read_view(thread, ViewQuery(messages="none"))
        assert (none.messages, none.numbers, none.exists) == ([], [], True)
        assert (none.revision, none.newest) == (receipt.revision, numbers[-1])
        only = await backend.read_view(thread, ViewQuery(messages="numbers"))
        assert (only.messages, only.numbers) == ([], numbers)
        digests = await backend.read_view(thread, ViewQuery(messages="digests"))
        assert (digests.messages, digests.numbers) == ([], numbers)
        assert len({bytes(d) for d in digests.digests}) == 5
        last = await backend.read_view(thread, ViewQuery(limit=2))
        assert (last.messages, last.numbers) == (rows[3:], numbers[3:])
        assert (last.truncated, last.newest) == (True, numbers[-1])
        older = await backend.read_view(thread, ViewQuery(limit=3, before=numbers[3]))
        assert (older.messages, older.truncated) == (rows[:3], False)
        assert older.newest == numbers[-1]

    async def test_equal_messages_have_equal_digests(self, backend: TurnBackend, ids: Ids) -> None:
        """A digest tells whether a stored body equals another one, in any thread."""
        views: list[list[bytes]] = []
        for _ in range(2):
            thread = ids.thread()
            rows = [user("a", "m1"), user("a", "m1"), user("a", "m2")]
            await backend.commit_turn(turn(thread, splice=Splice(keep_through=0, tail=rows)))
            views.append((await backend.read_view(thread, ViewQuery(messages="digests"))).digests)
        assert views[0] == views[1]
        assert views[0][0] == views[0][1] != views[0][2]

    async def test_a_view_shows_the_asked_run_and_only_in_its_thread(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Run is the thread's own; one of another thread is only reported as foreign."""
        thread, other, run = ids.thread(), ids.thread(), ids.run()
        await start_turn(backend, thread, run)
        mine = await see(backend, thread, run)
        assert mine.run is not None
        assert (mine.run.run_id, mine.foreign_run) == (run, False)
        foreign = await see(backend, other, run)
        assert (foreign.run, foreign.foreign_run, foreign.exists) == (None, True, False)

    async def test_active_runs_are_the_running_ones_with_a_live_lease(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Ascending by start; parked, ended and expired runs are not among them."""
        thread, names = ids.thread(), {w: ids.run() for w in ("old", "new", "gone", "parked")}
        for n, word in enumerate(("new", "old", "gone", "parked")):
            await backend.commit_turn(
                turn(
                    thread,
                    run_id=names[word],
                    run=RunStart(
                        run_id=names[word],
                        started_at=T0 + (5 if word == "new" else n),
                        status="interrupted" if word == "parked" else "running",
                        lease_token="t",
                        lease_ms=-1 if word == "gone" else 60_000,
                    ),
                )
            )
        view = await backend.read_view(thread, ViewQuery())
        assert [r.run_id for r in view.runs] == [names["old"], names["new"]]
        every = await backend.read_view(thread, ViewQuery(runs="all"))
        assert {r.run_id for r in every.runs} == set(names.values())
        none = await backend.read_view(thread, ViewQuery(runs="none"))
        assert none.runs == []

    async def test_a_limit_below_one_is_refused(self, backend: TurnBackend, ids: Ids) -> None:
        """A window has at least one place."""
        with pytest.raises(InvalidValue):
            await backend.read_view(ids.thread(), ViewQuery(limit=0))

    # -- one commit ----------------------------------------------------------------------

    async def test_a_commit_applies_everything_in_it(self, backend: TurnBackend, ids: Ids) -> None:
        """Transcript, answers, new interrupts, run, activities and draft: one boundary."""
        thread, run, paused = ids.thread(), ids.run(), ids.run()
        await start_turn(backend, thread, paused)
        await backend.commit_turn(
            turn(
                thread,
                run_id=paused,
                interrupts=[interrupt(thread, paused, "i1")],
                run=RunPatch(status="interrupted"),
            )
        )
        await backend.commit_turn(
            turn(thread, run_id=run, run=RunStart(run_id=run, started_at=T0 + 1))
        )
        await backend.save_draft(thread, run, [assistant("par", "a1")])
        before = await see(backend, thread)
        receipt = await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                splice=Splice(
                    keep_through=before.newest,
                    tail=[assistant("partial no more", "a1")],
                    expected=before.revision,
                ),
                answers=[InterruptAnswer(interrupt_id="i1", response=False, run_id=paused)],
                interrupts=[interrupt(thread, run, "i2")],
                run=RunPatch(status="interrupted", usage={"n": 1}),
                activities=ActivitiesWrite(puts={0: activity("card", 0)}, length=1),
                drop_draft=True,
            )
        )
        view = await see(backend, thread, run)
        assert message_ids(view.messages) == ["q1", "a1"]
        assert (view.revision, view.newest) == (receipt.revision, receipt.newest)
        assert view.numbers[1:] == receipt.numbers
        assert [(r.interrupt_id, r.status) for r in view.interrupts] == [
            ("i1", "resolved"),
            ("i2", "pending"),
        ]
        assert view.interrupts[0].response is False
        assert view.run is not None
        assert (view.run.status, view.run.usage) == ("interrupted", {"n": 1})
        assert receipt.run == view.run
        assert not receipt.created_run
        assert view.activities == [activity("card", 0)]
        assert view.drafts == []

    async def test_a_first_commit_creates_thread_and_run(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """The receipt says that the run was created, and holds its record."""
        thread, run = ids.thread(), ids.run()
        receipt = await start_turn(backend, thread, run, "tok")
        assert receipt.created_run
        assert receipt.run is not None
        assert (receipt.run.run_id, receipt.run.thread_id) == (run, thread)
        assert receipt.run.lease is not None
        assert receipt.run.lease.token == "tok"
        assert (receipt.replayed, receipt.cut_id) == (False, None)
        assert receipt.numbers == [receipt.newest]
        view = await see(backend, thread, run)
        assert (view.exists, view.run, view.revision) == (True, receipt.run, receipt.revision)

    async def test_a_run_alone_moves_no_revision(self, backend: TurnBackend, ids: Ids) -> None:
        """The revision is the transcript's: runs, interrupts, activities leave it alone."""
        thread, run = ids.thread(), ids.run()
        start = RunStart(run_id=run, started_at=T0)
        first = await backend.commit_turn(turn(thread, run_id=run, run=start))
        assert (first.revision, first.newest, first.numbers) == (NO_THREAD, 0, [])
        done = await backend.commit_turn(
            turn(thread, splice=Splice(keep_through=0, tail=[user("a")], expected=NO_THREAD))
        )
        parts_of: list[dict[str, Any]] = [
            {"run_id": run, "run": RunPatch(usage={"n": 1})},
            {"interrupts": [interrupt(thread, run, "i1")]},
            {"answers": [InterruptAnswer(interrupt_id="i1")]},
            {"activities": ActivitiesWrite(puts={0: activity("x")}, length=1)},
        ]
        for parts in parts_of:
            receipt = await backend.commit_turn(turn(thread, **parts))
            assert (receipt.revision, receipt.newest) == (done.revision, done.newest)
        await backend.save_draft(thread, run, [assistant("x")])
        assert (await see(backend, thread)).revision == done.revision

    async def test_a_splice_without_an_expected_revision_always_applies(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Expected None: whatever the thread is at."""
        thread = ids.thread()
        one = await backend.commit_turn(
            turn(thread, splice=Splice(keep_through=0, tail=[user("a", "a")]))
        )
        await backend.commit_turn(
            turn(thread, splice=Splice(keep_through=one.newest, tail=[user("b", "b")]))
        )
        view = await see(backend, thread)
        assert message_ids(view.messages) == ["a", "b"]

    async def test_a_cut_in_a_commit_is_archived_with_its_run(self, backend: Any, ids: Ids) -> None:
        """The receipt names the cut; the record knows which run made it."""
        thread, run = ids.thread(), ids.run()
        first = await start_turn(backend, thread, run)
        more = await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                splice=Splice(keep_through=first.newest, tail=[assistant("a", "a1")]),
            )
        )
        done = await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                splice=Splice(
                    keep_through=first.newest,
                    tail=[assistant("b", "b1")],
                    expected=more.revision,
                ),
            )
        )
        (cut,) = await backend.list_cuts(thread)
        assert (cut.cut_id, cut.run_id, cut.numbers) == (done.cut_id, run, more.numbers)

    async def test_a_splice_that_changes_nothing_is_no_change(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Keep all, add nothing: same revision, no cut."""
        thread = ids.thread()
        one = await backend.commit_turn(
            turn(thread, splice=Splice(keep_through=0, tail=[user("a")]))
        )
        two = await backend.commit_turn(
            turn(thread, splice=Splice(keep_through=one.newest, tail=[]))
        )
        assert (two.revision, two.newest, two.numbers) == (one.revision, one.newest, [])
        assert two.cut_id is None

    # -- cuts ----------------------------------------------------------------------------

    async def test_a_detached_result_goes_to_the_cut_of_its_turn(
        self, backend: Any, ids: Ids
    ) -> None:
        """cut_append adds messages to a cut record; the transcript is not touched."""
        thread, run = ids.thread(), ids.run()
        first = await start_turn(backend, thread, run, "t")
        await backend.commit_turn(
            turn(
                thread,
                splice=Splice(keep_through=0, tail=[user("other", "q2")], expected=first.revision),
            )
        )
        (cut,) = await backend.list_cuts(thread)
        before = await see(backend, thread)
        from_run = _cut_append(thread, run, cut.cut_id, [assistant("late", "a1")])
        receipt = await backend.commit_turn(from_run)
        assert (await backend.commit_turn(from_run)).replayed
        view = await see(backend, thread, run)
        assert (view.messages, view.revision) == (before.messages, before.revision)
        assert receipt.revision == before.revision
        assert view.run is not None
        assert (view.run.status, view.run.detached) == ("completed", True)
        (grown,) = await backend.list_cuts(thread)
        assert grown.extra == 1
        assert message_ids(await backend.load_cut(thread, cut.cut_id)) == ["q1", "a1"]

    async def test_a_restored_cut_brings_what_was_appended(self, backend: Any, ids: Ids) -> None:
        """Restoring puts the cut turn back together with its late result."""
        thread, run = ids.thread(), ids.run()
        first = await start_turn(backend, thread, run, "t")
        await backend.commit_turn(
            turn(
                thread,
                splice=Splice(keep_through=0, tail=[user("b", "q2")], expected=first.revision),
            )
        )
        (cut,) = await backend.list_cuts(thread)
        await backend.commit_turn(_cut_append(thread, run, cut.cut_id, [assistant("l", "a1")]))
        view = await see(backend, thread)
        await backend.commit_turn(turn(thread, restore=cut.cut_id, restore_expected=view.revision))
        view = await see(backend, thread)
        assert message_ids(view.messages) == ["q1", "a1"]
        assert view.numbers == sorted(set(view.numbers))

    async def test_a_restore_beside_a_splice_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A commit changes the transcript in one way."""
        with pytest.raises(InvalidValue):
            await backend.commit_turn(
                turn(ids.thread(), splice=Splice(keep_through=0), restore="c", restore_expected="")
            )

    # -- activities ----------------------------------------------------------------------

    async def test_activities_are_written_by_position(self, backend: TurnBackend, ids: Ids) -> None:
        """Puts replace or add, length cuts off: only changed rows are sent."""
        thread = ids.thread()
        rows = [activity(f"a{i}", i) for i in range(4)]

        async def write(puts: dict[int, Any], length: int) -> list[Any]:
            await backend.commit_turn(
                turn(thread, activities=ActivitiesWrite(puts=puts, length=length))
            )
            return (await see(backend, thread)).activities

        assert await write(dict(enumerate(rows)), 4) == rows
        changed = activity("a1", 1, content={"new": True})
        assert await write({1: changed}, 4) == [rows[0], changed, *rows[2:]]
        assert await write({2: activity("z", 2)}, 3) == [rows[0], changed, activity("z", 2)]
        assert await write({}, 1) == [rows[0]]
        assert await write({1: rows[2]}, 2) == [rows[0], rows[2]]
        assert await write({}, 0) == []

    # -- bad input -----------------------------------------------------------------------

    async def test_a_commit_that_makes_no_sense_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Patch or claim without a run, a foreign thread's interrupt, one twice, an odd id."""
        thread, run = ids.thread(), ids.run()
        parts_of: list[dict[str, Any]] = [
            {"run": RunPatch(status="completed")},
            {"claims": [InterruptRef(interrupt_id="i")]},
            {"interrupts": [interrupt(ids.thread(), run, "i")]},
            {"interrupts": [interrupt(thread, run, "i"), interrupt(thread, run, "i")]},
            {"splice": Splice(keep_through=-1)},
            {"run_id": "a\x00"},
        ]
        for parts in parts_of:
            with pytest.raises(InvalidValue):
                await backend.commit_turn(turn(thread, **parts))
        with pytest.raises(InvalidValue):
            await backend.commit_turn(turn(thread, "x\x00"))
        assert not (await see(backend, thread)).exists


def _cut_append(thread: str, run: str, cut_id: str, messages: list[Any]) -> TurnCommit:
    return turn(
        thread,
        run_id=run,
        lease_token="t",
        cut_append=CutAppend(cut_id=cut_id, messages=messages),
        run=RunPatch(status="completed", detached=True),
    )
