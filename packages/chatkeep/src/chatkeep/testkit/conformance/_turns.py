"""One turn, one commit: what a TurnBackend promises."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InterruptConflict, InvalidValue, RunConflict, StoreError, ThreadConflict
from chatkeep.records import UNSET, RunError, RunPatch, RunStatus
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    NO_THREAD,
    ActivitiesWrite,
    CutAppend,
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    ThreadView,
    TurnBackend,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    assistant,
    gather,
    interrupt,
    message_ids,
    now_ms,
    outcomes,
    user,
)

__all__ = ["TestTurnBackend"]

_T0 = 1_700_000_000_000
_EVERYTHING = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)


def _commit(thread: str, commit_id: str | None = None, **parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=commit_id or new_commit_id(), thread_id=thread, **parts)


async def _see(backend: TurnBackend, thread: str, run: str | None = None) -> ThreadView:
    query = _EVERYTHING
    if run is not None:
        query = ViewQuery(
            runs="all", interrupts="all", activities=True, drafts=True, run_id=run
        )
    return await backend.read_view(thread, query)


def _still(view: ThreadView) -> ThreadView:
    """A view without the clock: to compare two."""
    return ThreadView(**{n: getattr(view, n) for n in ThreadView.__slots__} | {"now": 0})


async def _start(
    backend: TurnBackend, thread: str, run: str, token: str | None = None, lease_ms: int = 60_000
) -> TurnReceipt:
    """Run ``run`` with one user message."""
    return await backend.commit_turn(
        _commit(
            thread,
            run_id=run,
            splice=Splice(keep_through=0, tail=[user("q", "q1")]),
            run=RunStart(run_id=run, started_at=_T0, lease_token=token, lease_ms=lease_ms),
        )
    )


class TestTurnBackend(ConformanceCase):
    """Tier TurnBackend: one consistent read, one atomic write."""

    # -- reading ------------------------------------------------------------------------

    async def test_a_thread_that_does_not_exist_is_an_empty_view(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Nothing is there, and reading creates nothing."""
        thread = ids.thread()
        for _ in range(2):
            view = await _see(backend, thread, ids.run())
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
        receipt = await backend.commit_turn(
            _commit(thread, splice=Splice(keep_through=0, tail=rows))
        )
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
        views = []
        for _ in range(2):
            thread = ids.thread()
            rows = [user("a", "m1"), user("a", "m1"), user("a", "m2")]
            await backend.commit_turn(_commit(thread, splice=Splice(keep_through=0, tail=rows)))
            views.append((await backend.read_view(thread, ViewQuery(messages="digests"))).digests)
        assert views[0] == views[1]
        assert views[0][0] == views[0][1] != views[0][2]

    async def test_a_view_shows_the_asked_run_and_only_in_its_thread(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """run is the thread's own; one of another thread is only reported as foreign."""
        thread, other, run = ids.thread(), ids.thread(), ids.run()
        await _start(backend, thread, run)
        mine = await _see(backend, thread, run)
        assert mine.run is not None
        assert (mine.run.run_id, mine.foreign_run) == (run, False)
        foreign = await _see(backend, other, run)
        assert (foreign.run, foreign.foreign_run, foreign.exists) == (None, True, False)

    async def test_active_runs_are_the_running_ones_with_a_live_lease(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Ascending by start; parked, ended and expired runs are not among them."""
        thread, names = ids.thread(), {w: ids.run() for w in ("old", "new", "gone", "parked")}
        for n, word in enumerate(("new", "old", "gone", "parked")):
            await backend.commit_turn(
                _commit(
                    thread,
                    run_id=names[word],
                    run=RunStart(
                        run_id=names[word],
                        started_at=_T0 + (5 if word == "new" else n),
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

    # -- one commit ---------------------------------------------------------------------

    async def test_a_commit_applies_everything_in_it(self, backend: TurnBackend, ids: Ids) -> None:
        """Transcript, answers, new interrupts, run, activities and draft: one boundary."""
        thread, run, paused = ids.thread(), ids.run(), ids.run()
        await _start(backend, thread, paused)
        await backend.commit_turn(
            _commit(
                thread,
                run_id=paused,
                interrupts=[interrupt(thread, paused, "i1")],
                run=RunPatch(status="interrupted"),
            )
        )
        await backend.commit_turn(
            _commit(thread, run_id=run, run=RunStart(run_id=run, started_at=_T0 + 1))
        )
        await backend.save_draft(thread, run, [assistant("par", "a1")])
        before = await _see(backend, thread)
        receipt = await backend.commit_turn(
            _commit(
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
        view = await _see(backend, thread, run)
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
        receipt = await _start(backend, thread, run, "tok")
        assert receipt.created_run
        assert receipt.run is not None
        assert (receipt.run.run_id, receipt.run.thread_id) == (run, thread)
        assert receipt.run.lease is not None
        assert receipt.run.lease.token == "tok"
        assert (receipt.replayed, receipt.cut_id) == (False, None)
        assert receipt.numbers == [receipt.newest]
        view = await _see(backend, thread, run)
        assert (view.exists, view.run, view.revision) == (True, receipt.run, receipt.revision)

    async def test_a_run_alone_moves_no_revision(self, backend: TurnBackend, ids: Ids) -> None:
        """The revision is the transcript's: runs, interrupts, activities leave it alone."""
        thread, run = ids.thread(), ids.run()
        start = RunStart(run_id=run, started_at=_T0)
        first = await backend.commit_turn(_commit(thread, run_id=run, run=start))
        assert (first.revision, first.newest, first.numbers) == (NO_THREAD, 0, [])
        done = await backend.commit_turn(
            _commit(thread, splice=Splice(keep_through=0, tail=[user("a")], expected=NO_THREAD))
        )
        for parts in (
            {"run_id": run, "run": RunPatch(usage={"n": 1})},
            {"interrupts": [interrupt(thread, run, "i1")]},
            {"answers": [InterruptAnswer(interrupt_id="i1")]},
            {"activities": ActivitiesWrite(puts={0: activity("x")}, length=1)},
        ):
            receipt = await backend.commit_turn(_commit(thread, **parts))
            assert (receipt.revision, receipt.newest) == (done.revision, done.newest)
        await backend.save_draft(thread, run, [assistant("x")])
        assert (await _see(backend, thread)).revision == done.revision

    async def test_a_splice_without_an_expected_revision_always_applies(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """expected None: whatever the thread is at."""
        thread = ids.thread()
        one = await backend.commit_turn(
            _commit(thread, splice=Splice(keep_through=0, tail=[user("a", "a")]))
        )
        await backend.commit_turn(
            _commit(thread, splice=Splice(keep_through=one.newest, tail=[user("b", "b")]))
        )
        view = await _see(backend, thread)
        assert message_ids(view.messages) == ["a", "b"]

    async def test_a_cut_in_a_commit_is_archived_with_its_run(
        self, backend: Any, ids: Ids
    ) -> None:
        """The receipt names the cut; the record knows which run made it."""
        thread, run = ids.thread(), ids.run()
        first = await _start(backend, thread, run)
        more = await backend.commit_turn(
            _commit(
                thread,
                run_id=run,
                splice=Splice(keep_through=first.newest, tail=[assistant("a", "a1")]),
            )
        )
        done = await backend.commit_turn(
            _commit(
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
            _commit(thread, splice=Splice(keep_through=0, tail=[user("a")]))
        )
        two = await backend.commit_turn(
            _commit(thread, splice=Splice(keep_through=one.newest, tail=[]))
        )
        assert (two.revision, two.newest, two.numbers) == (one.revision, one.newest, [])
        assert two.cut_id is None

    # -- commit ids ---------------------------------------------------------------------

    async def test_a_commit_sent_again_is_applied_once(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A known commit id gives the same result and writes nothing."""
        thread, run = ids.thread(), ids.run()
        commit = _commit(
            thread,
            run_id=run,
            splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=NO_THREAD),
            interrupts=[interrupt(thread, run, "i1")],
            run=RunStart(run_id=run, started_at=_T0, lease_token="t"),
            activities=ActivitiesWrite(puts={0: activity("a")}, length=1),
        )
        first = await backend.commit_turn(commit)
        before = _still(await _see(backend, thread, run))
        again = await backend.commit_turn(commit)
        assert (first.replayed, again.replayed) == (False, True)
        assert (again.revision, again.newest, again.numbers) == (
            first.revision,
            first.newest,
            first.numbers,
        )
        assert again.run == first.run
        assert _still(await _see(backend, thread, run)) == before

    async def test_a_commit_is_known_after_fifteen_others(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """The head remembers sixteen commits: other tabs in between change nothing."""
        thread, run = ids.thread(), ids.run()
        commit = _commit(
            thread,
            run_id=run,
            splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=NO_THREAD),
            run=RunStart(run_id=run, started_at=_T0),
        )
        first = await backend.commit_turn(commit)
        newest = first.newest
        for n in range(15):
            done = await backend.commit_turn(
                _commit(thread, splice=Splice(keep_through=newest, tail=[user(f"n{n}")]))
                if n % 2
                else _commit(thread, run_id=run, run=RunPatch(usage={"n": n}))
            )
            newest = done.newest
        before = _still(await _see(backend, thread))
        again = await backend.commit_turn(commit)
        assert again.replayed
        assert (again.revision, again.newest, again.numbers) == (
            first.revision,
            first.newest,
            first.numbers,
        )
        assert _still(await _see(backend, thread)) == before

    async def test_the_calls_of_the_stores_go_through_the_head_too(
        self, backend: Any, ids: Ids
    ) -> None:
        """Sixteen later commits of any kind push a commit id out: then its guards decide."""
        thread, run = ids.thread(), ids.run()
        commit = _commit(
            thread, splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=NO_THREAD)
        )
        await backend.commit_turn(commit)
        await backend.commit_turn(
            _commit(thread, run_id=run, run=RunStart(run_id=run, started_at=_T0))
        )
        for n in range(16):
            await backend.commit_turn(_commit(thread, run_id=run, run=RunPatch(usage={"n": n})))
        with pytest.raises(ThreadConflict):
            await backend.commit_turn(commit)

    async def test_a_known_commit_id_comes_before_every_refusal(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Sent again after its run ended and its answer is settled: still a success."""
        thread, paused, run = ids.thread(), ids.run(), ids.run()
        await _start(backend, thread, paused)
        await backend.commit_turn(
            _commit(thread, run_id=paused, interrupts=[interrupt(thread, paused, "i1")])
        )
        view = await _see(backend, thread)
        await backend.commit_turn(
            _commit(
                thread,
                run_id=run,
                run=RunStart(run_id=run, started_at=_T0 + 1, lease_token="t"),
            )
        )
        commit = _commit(
            thread,
            run_id=run,
            lease_token="t",
            splice=Splice(
                keep_through=view.newest, tail=[assistant("a", "a1")], expected=view.revision
            ),
            answers=[InterruptAnswer(interrupt_id="i1")],
            run=RunPatch(status="completed", finished_at=_T0 + 2),
        )
        first = await backend.commit_turn(commit)
        assert first.run is not None
        again = await backend.commit_turn(commit)
        assert again.replayed
        assert again.numbers == first.numbers
        assert again.run is not None
        assert again.run.status == "completed"

    async def test_a_commit_sent_twice_at_once_is_applied_once(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """The check stands in the same guard as the revision, never in a read before."""
        for _ in range(3):
            thread = ids.thread()
            one = await backend.commit_turn(
                _commit(thread, splice=Splice(keep_through=0, tail=[user("a", "a")]))
            )
            commit = _commit(
                thread,
                splice=Splice(
                    keep_through=one.newest, tail=[user("b", "b")], expected=one.revision
                ),
            )
            receipts = await gather([backend.commit_turn(commit) for _ in range(4)])
            assert sorted(r.replayed for r in receipts) == [False, True, True, True]
            assert len({(r.revision, tuple(r.numbers)) for r in receipts}) == 1
            assert message_ids((await _see(backend, thread)).messages) == ["a", "b"]

    async def test_a_commit_id_belongs_to_its_thread(self, backend: TurnBackend, ids: Ids) -> None:
        """The same commit id in another thread is another commit."""
        commit_id = new_commit_id()
        for _ in range(2):
            thread = ids.thread()
            receipt = await backend.commit_turn(
                _commit(thread, commit_id, splice=Splice(keep_through=0, tail=[user("a")]))
            )
            assert not receipt.replayed
            assert len((await _see(backend, thread)).messages) == 1

    # -- all or nothing -----------------------------------------------------------------

    @pytest.mark.parametrize(
        "fault",
        [
            "revision",
            "foreign run",
            "running run",
            "terminal run",
            "lost lease",
            "transition",
            "taken interrupt",
            "settled answer",
            "unknown answer",
            "claimed answer",
            "settled claim",
            "invalid message",
            "invalid activity",
            "invalid response",
            "unknown cut",
        ],
    )
    async def test_a_refused_commit_writes_nothing(
        self, backend: TurnBackend, ids: Ids, fault: str
    ) -> None:
        """Whatever part is refused, no other part is applied, and its id is not remembered."""
        thread, other = ids.thread(), ids.thread()
        run, busy, ended, abroad = ids.run(), ids.run(), ids.run(), ids.run()
        await _start(backend, other, abroad)
        await _start(backend, thread, busy, "busy")
        await backend.commit_turn(
            _commit(thread, run_id=ended, run=RunStart(run_id=ended, started_at=_T0))
        )
        await backend.commit_turn(
            _commit(
                thread,
                run_id=ended,
                interrupts=[interrupt(thread, ended, f"i{n}", at=_T0 + n) for n in range(4)],
                answers=[],
                run=RunPatch(status="completed"),
            )
        )
        await backend.commit_turn(
            _commit(thread, answers=[InterruptAnswer(interrupt_id="i1", response=1)])
        )
        await backend.commit_turn(
            _commit(thread, run_id=busy, lease_token="busy", claims=[InterruptRef(interrupt_id="i2")])
        )
        await backend.commit_turn(
            _commit(thread, run_id=run, run=RunStart(run_id=run, started_at=_T0, lease_token="t"))
        )
        await backend.save_draft(thread, run, [assistant("draft", "d")], lease_token="t")
        view = await _see(backend, thread, run)
        nan = float("nan")
        good: dict[str, Any] = {
            "run_id": run,
            "lease_token": "t",
            "splice": Splice(
                keep_through=0, tail=[user("new", "n1")], expected=view.revision
            ),
            "answers": [InterruptAnswer(interrupt_id="i0", response="x")],
            "claims": [InterruptRef(interrupt_id="i3")],
            "interrupts": [interrupt(thread, run, "fresh")],
            "run": RunPatch(status="completed", finished_at=_T0 + 9),
            "activities": ActivitiesWrite(puts={0: activity("a")}, length=1),
            "drop_draft": True,
        }
        bad: dict[str, tuple[dict[str, Any], type[Exception]]] = {
            "revision": (
                {"splice": Splice(keep_through=0, tail=[user("n")], expected="1.x")},
                ThreadConflict,
            ),
            "foreign run": (
                {"run": RunStart(run_id=abroad, started_at=_T0), "run_id": abroad},
                RunConflict,
            ),
            "running run": (
                {"run": RunStart(run_id=busy, started_at=_T0, lease_token="n"), "run_id": busy},
                RunConflict,
            ),
            "terminal run": (
                {"run": RunStart(run_id=ended, started_at=_T0), "run_id": ended},
                RunConflict,
            ),
            "lost lease": ({"lease_token": "other"}, RunConflict),
            "transition": (
                {"run_id": ended, "lease_token": None, "run": RunPatch(status="aborted")},
                RunConflict,
            ),
            "taken interrupt": ({"interrupts": [interrupt(thread, ended, "i0")]}, InterruptConflict),
            "settled answer": ({"answers": [InterruptAnswer(interrupt_id="i1")]}, InterruptConflict),
            "unknown answer": ({"answers": [InterruptAnswer(interrupt_id="i9")]}, InterruptConflict),
            "claimed answer": ({"answers": [InterruptAnswer(interrupt_id="i2")]}, InterruptConflict),
            "settled claim": ({"claims": [InterruptRef(interrupt_id="i1")]}, InterruptConflict),
            "invalid message": (
                {"splice": Splice(keep_through=0, tail=[user("n", metadata={"x": nan})])},
                InvalidValue,
            ),
            "invalid activity": (
                {
                    "activities": ActivitiesWrite(
                        puts={0: activity("a", content={"x": nan})}, length=1
                    )
                },
                InvalidValue,
            ),
            "invalid response": (
                {"answers": [InterruptAnswer(interrupt_id="i0", response=nan)]},
                InvalidValue,
            ),
            "unknown cut": (
                {"splice": None, "restore": "none", "restore_expected": view.revision},
                ThreadConflict,
            ),
        }
        change, error = bad[fault]
        parts = good | change
        if isinstance(parts["run"], RunStart):
            parts["lease_token"] = None
            parts["drop_draft"] = False
        commit = _commit(thread, **parts)
        for _ in range(2):
            with pytest.raises(error):
                await backend.commit_turn(commit)
            assert _still(await _see(backend, thread, run)) == _still(view)
        receipt = await backend.commit_turn(_commit(thread, **good))
        assert not receipt.replayed

    async def test_refusals_come_in_the_order_promised(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """RunConflict before InterruptConflict before ThreadConflict."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run, "t")
        stale = Splice(keep_through=0, tail=[user("x")], expected="1.x")
        answers = [InterruptAnswer(interrupt_id="i9")]
        with pytest.raises(RunConflict):
            await backend.commit_turn(
                _commit(thread, run_id=run, lease_token="no", splice=stale, answers=answers)
            )
        with pytest.raises(InterruptConflict):
            await backend.commit_turn(
                _commit(thread, run_id=run, lease_token="t", splice=stale, answers=answers)
            )
        with pytest.raises(InterruptConflict):
            await backend.commit_turn(
                _commit(
                    thread,
                    run_id=run,
                    lease_token="t",
                    splice=stale,
                    claims=[InterruptRef(interrupt_id="i9")],
                )
            )
        with pytest.raises(ThreadConflict):
            await backend.commit_turn(
                _commit(thread, run_id=run, lease_token="t", splice=stale)
            )

    # -- runs and leases ------------------------------------------------------------------

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
        await _start(backend, thread, run, "one", lease_ms)
        if status != "running":
            await backend.commit_turn(
                _commit(thread, run_id=run, lease_token="one", run=RunPatch(status=status))
            )
        start = RunStart(run_id=run, started_at=_T0 + 9, lease_token="two", name="ignored")
        commit = _commit(thread, run_id=run, run=start)
        if reason is not None:
            with pytest.raises(RunConflict) as caught:
                await backend.commit_turn(commit)
            assert caught.value.reason == reason
            return
        receipt = await backend.commit_turn(commit)
        assert receipt.run is not None
        assert not receipt.created_run
        assert (receipt.run.status, receipt.run.started_at) == (status, _T0)
        assert receipt.run.name is None
        assert receipt.run.lease is not None
        assert receipt.run.lease.token == "two"
        assert (await _see(backend, thread, run)).run == receipt.run

    async def test_a_run_without_a_lease_never_expires(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Runs that users drive themselves are not taken over."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run)
        with pytest.raises(RunConflict) as caught:
            await backend.commit_turn(
                _commit(
                    thread, run_id=run, run=RunStart(run_id=run, started_at=_T0, lease_token="x")
                )
            )
        assert caught.value.reason == "running"

    async def test_of_two_takeovers_one_wins(self, backend: TurnBackend, ids: Ids) -> None:
        """An expired lease is taken by exactly one of the drivers that race for it."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run, "gone", -1)
        won, lost = await outcomes(
            [
                backend.commit_turn(
                    _commit(
                        thread,
                        run_id=run,
                        run=RunStart(run_id=run, started_at=_T0, lease_token=f"d{n}"),
                    )
                )
                for n in range(4)
            ]
        )
        assert len(won) == 1
        assert all(isinstance(e, RunConflict) for e in lost)
        assert won[0].run == (await _see(backend, thread, run)).run

    async def test_a_driver_that_lost_its_lease_writes_nothing(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """After a takeover the old token is refused in commits, drafts and renewals."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run, "old", -1)
        await backend.commit_turn(
            _commit(
                thread, run_id=run, run=RunStart(run_id=run, started_at=_T0, lease_token="new")
            )
        )
        before = _still(await _see(backend, thread, run))
        for parts in (
            {"run": RunPatch(status="completed")},
            {"splice": Splice(keep_through=0, tail=[user("x")])},
            {"interrupts": [interrupt(thread, run, "i")]},
        ):
            with pytest.raises(RunConflict) as caught:
                await backend.commit_turn(
                    _commit(thread, run_id=run, lease_token="old", **parts)
                )
            assert caught.value.reason == "lease-lost"
        with pytest.raises(RunConflict):
            await backend.save_draft(thread, run, [assistant("x")], lease_token="old")
        with pytest.raises(RunConflict):
            await backend.renew_lease(thread, run, "old", 1000)
        assert _still(await _see(backend, thread, run)) == before

    async def test_an_expired_lease_that_nobody_took_still_counts(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A slow driver may go on as long as nobody took over."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run, "slow", -1)
        receipt = await backend.commit_turn(
            _commit(thread, run_id=run, lease_token="slow", run=RunPatch(usage={"n": 1}))
        )
        assert receipt.run is not None
        renewed = await backend.renew_lease(thread, run, "slow", 60_000)
        assert renewed.live((await _see(backend, thread)).now)

    async def test_a_token_for_a_run_without_lease_is_lost(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A lease token must be the run's: none is not a match, nor is an unknown run."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run)
        for name in (run, ids.run()):
            with pytest.raises(RunConflict) as caught:
                await backend.commit_turn(
                    _commit(
                        thread,
                        run_id=name,
                        lease_token="x",
                        splice=Splice(keep_through=0, tail=[user("z")]),
                    )
                )
            assert caught.value.reason == "lease-lost"

    async def test_a_patch_of_an_unknown_run_is_a_conflict_or_nothing(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A commit never creates a run by patching it."""
        thread, run = ids.thread(), ids.run()
        try:
            await backend.commit_turn(
                _commit(thread, run_id=run, run=RunPatch(status="completed"))
            )
        except StoreError as error:
            assert isinstance(error, RunConflict)
        assert (await _see(backend, thread, run)).run is None

    async def test_renewing_extends_the_lease_from_the_stores_clock(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """The record comes back, with cancel_requested in it."""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run, "t", 1000)
        await backend.commit_turn(
            _commit(thread, run_id=run, run=RunPatch(cancel_requested=True))
        )
        renewed = await backend.renew_lease(thread, run, "t", 500_000)
        assert renewed.cancel_requested is True
        assert renewed.lease is not None
        view = await _see(backend, thread, run)
        assert abs(renewed.lease.until - view.now - 500_000) < 60_000
        assert view.run == renewed

    async def test_who_may_not_renew(self, backend: TurnBackend, ids: Ids) -> None:
        """Unknown, ended, or another's: each its own reason."""
        thread, run, ended = ids.thread(), ids.run(), ids.run()
        await _start(backend, thread, run, "t")
        await backend.commit_turn(
            _commit(
                thread, run_id=ended, run=RunStart(run_id=ended, started_at=_T0, lease_token="t")
            )
        )
        await backend.commit_turn(
            _commit(thread, run_id=ended, run=RunPatch(status="completed"))
        )
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
        await _start(backend, thread, run, "t", -1)
        await backend.renew_lease(thread, run, "t", 60_000)
        lost = RunPatch(status="failed", error=RunError(message="x", code="worker_lost"))
        sweep = _commit(thread, run_id=run, lease_token="t", lease_expired=True, run=lost)
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
        first = await _start(backend, thread, run)
        await backend.commit_turn(_commit(thread, run_id=run, run=RunPatch(status="completed")))
        receipt = await backend.commit_turn(
            _commit(
                thread,
                run_id=again,
                run=RunStart(
                    run_id=again, started_at=_T0 + 1, lease_token="t", hide_from=first.newest
                ),
            )
        )
        assert receipt.run is not None
        assert receipt.run.hide_from == first.newest
        view = await _see(backend, thread, again)
        assert view.run == receipt.run
        assert message_ids(view.messages) == ["q1"]
        await backend.commit_turn(_commit(thread, run_id=again, run=RunPatch(hide_from=None)))
        after = await _see(backend, thread, again)
        assert after.run is not None
        assert after.run.hide_from is None

    async def test_two_threads_never_start_one_run_id(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Racing from two threads: one starts, the other writes nothing at all."""
        for _ in range(5):
            run, threads = ids.run(), [ids.thread(), ids.thread()]
            won, lost = await outcomes([_start(backend, thread, run) for thread in threads])
            assert (len(won), [type(e) for e in lost]) == (1, [RunConflict])
            views = [await _see(backend, thread, run) for thread in threads]
            assert sorted(len(view.messages) for view in views) == [0, 1]
            assert sorted(view.exists for view in views) == [False, True]

    # -- claims and answers ---------------------------------------------------------------

    async def _paused(self, backend: TurnBackend, ids: Ids, count: int = 1) -> tuple[str, str]:
        """A thread whose run waits for ``count`` answers: i0, i1, …"""
        thread, run = ids.thread(), ids.run()
        await _start(backend, thread, run)
        await backend.commit_turn(
            _commit(
                thread,
                run_id=run,
                interrupts=[interrupt(thread, run, f"i{n}", at=_T0 + n) for n in range(count)],
                run=RunPatch(status="interrupted"),
            )
        )
        return thread, run

    async def _claim(
        self,
        backend: TurnBackend,
        thread: str,
        run: str,
        names: list[str],
        *,
        lease_ms: int = 60_000,
    ) -> TurnReceipt:
        return await backend.commit_turn(
            _commit(
                thread,
                run_id=run,
                claims=[InterruptRef(interrupt_id=name) for name in names],
                run=RunStart(
                    run_id=run, started_at=_T0 + 1, lease_token=f"of {run}", lease_ms=lease_ms
                ),
            )
        )

    async def test_a_claim_is_shown_and_is_no_answer(self, backend: TurnBackend, ids: Ids) -> None:
        """Claimed by a live run: still pending, and the claiming run is named."""
        thread, _ = await self._paused(backend, ids)
        run = ids.run()
        await self._claim(backend, thread, run, ["i0"])
        (record,) = (await _see(backend, thread)).interrupts
        assert (record.status, record.claimed_by) == ("pending", run)
        (pending,) = (await backend.read_view(thread, ViewQuery())).interrupts
        assert pending == record

    async def test_of_two_claims_one_wins(self, backend: TurnBackend, ids: Ids) -> None:
        """Two tabs cannot both execute an approved tool; the loser's run is not created."""
        for _ in range(5):
            thread, _ = await self._paused(backend, ids, 2)
            names = [ids.run(), ids.run()]
            won, lost = await outcomes(
                [
                    self._claim(backend, thread, names[0], ["i0", "i1"]),
                    self._claim(backend, thread, names[1], ["i1", "i0"]),
                ]
            )
            assert (len(won), [type(e) for e in lost]) == (1, [InterruptConflict])
            assert won[0].run is not None
            view = await _see(backend, thread)
            assert {r.claimed_by for r in view.interrupts} == {won[0].run.run_id}
            assert len(view.runs) == 2

    @pytest.mark.parametrize("end", ["completed", "failed", "aborted", "expired"])
    async def test_a_claim_ends_with_its_run(
        self, backend: TurnBackend, ids: Ids, end: str
    ) -> None:
        """Error, abort or an expired lease releases it: the same batch can be sent again."""
        thread, _ = await self._paused(backend, ids)
        first, second = ids.run(), ids.run()
        await self._claim(backend, thread, first, ["i0"], lease_ms=-1 if end == "expired" else 9999)
        if end != "expired":
            status: Any = end
            await backend.commit_turn(
                _commit(
                    thread, run_id=first, lease_token=f"of {first}", run=RunPatch(status=status)
                )
            )
        (free,) = (await _see(backend, thread)).interrupts
        assert (free.status, free.claimed_by) == ("pending", None)
        await self._claim(backend, thread, second, ["i0"])
        (taken,) = (await _see(backend, thread)).interrupts
        assert taken.claimed_by == second

    async def test_only_the_claiming_run_answers_while_it_lives(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Another run, or nobody's call, is refused; the claimer settles."""
        thread, _ = await self._paused(backend, ids)
        run = ids.run()
        await self._claim(backend, thread, run, ["i0"])
        answers = [InterruptAnswer(interrupt_id="i0", response="stolen")]
        for parts in ({}, {"run_id": ids.run()}):
            with pytest.raises(InterruptConflict):
                await backend.commit_turn(_commit(thread, answers=answers, **parts))
        await backend.commit_turn(
            _commit(
                thread,
                run_id=run,
                lease_token=f"of {run}",
                answers=[InterruptAnswer(interrupt_id="i0", response="mine")],
                run=RunPatch(status="completed"),
            )
        )
        (record,) = (await _see(backend, thread)).interrupts
        assert (record.status, record.response) == ("resolved", "mine")
        assert record.claimed_by is None

    async def test_the_claim_of_a_dead_run_stops_nobody(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """An answer settles what a run that no longer lives had claimed."""
        thread, _ = await self._paused(backend, ids)
        await self._claim(backend, thread, ids.run(), ["i0"], lease_ms=-1)
        await backend.commit_turn(
            _commit(thread, answers=[InterruptAnswer(interrupt_id="i0", status="cancelled")])
        )
        (record,) = (await _see(backend, thread)).interrupts
        assert (record.status, record.response) == ("cancelled", UNSET)

    async def test_a_claim_of_what_is_settled_or_unknown_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Nothing of the start is written: the run does not exist afterwards."""
        thread, _ = await self._paused(backend, ids, 2)
        await backend.commit_turn(
            _commit(thread, answers=[InterruptAnswer(interrupt_id="i0")])
        )
        for names in (["i0"], ["i9"], ["i1", "i0"], ["i1", "i9"]):
            run = ids.run()
            with pytest.raises(InterruptConflict):
                await self._claim(backend, thread, run, names)
            view = await _see(backend, thread, run)
            assert view.run is None
            assert {r.claimed_by for r in view.interrupts} == {None}

    async def test_the_paused_run_itself_may_go_on(self, backend: TurnBackend, ids: Ids) -> None:
        """A continuation under the same run id takes the lease of the parked run and claims."""
        thread, run = await self._paused(backend, ids)
        receipt = await self._claim(backend, thread, run, ["i0"])
        assert receipt.run is not None
        assert (receipt.run.status, receipt.created_run) == ("interrupted", False)
        (record,) = (await _see(backend, thread)).interrupts
        assert record.claimed_by == run

    async def test_an_answer_twice_in_a_commit_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A duplicate entry is no answer at all."""
        thread, run = await self._paused(backend, ids)
        with pytest.raises((InterruptConflict, InvalidValue)):
            await backend.commit_turn(
                _commit(
                    thread,
                    answers=[
                        InterruptAnswer(interrupt_id="i0", response=1),
                        InterruptAnswer(interrupt_id="i0", response=2, run_id=run),
                    ],
                )
            )
        (record,) = (await _see(backend, thread)).interrupts
        assert record.status == "pending"

    async def test_answers_and_new_interrupts_stand_in_one_commit(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A continuation settles the old question and asks the next: same id, other run."""
        thread, first = await self._paused(backend, ids)
        run = ids.run()
        await self._claim(backend, thread, run, ["i0"])
        await backend.commit_turn(
            _commit(
                thread,
                run_id=run,
                answers=[InterruptAnswer(interrupt_id="i0", run_id=first)],
                interrupts=[interrupt(thread, run, "i0", at=_T0 + 5)],
                run=RunPatch(status="interrupted"),
            )
        )
        found = (await _see(backend, thread)).interrupts
        assert [(r.run_id, r.status) for r in found] == [(first, "resolved"), (run, "pending")]

    # -- drafts ---------------------------------------------------------------------------

    async def test_a_draft_lies_beside_the_transcript(self, backend: TurnBackend, ids: Ids) -> None:
        """Saved again and again, it changes neither revision, numbers nor cuts."""
        thread, run = ids.thread(), ids.run()
        first = await _start(backend, thread, run, "t")
        for n in range(5):
            await backend.save_draft(
                thread, run, [assistant("x" * n, "a1", x_new={"n": 1.0})], lease_token="t"
            )
        view = await _see(backend, thread)
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
        first = await _start(backend, thread, run, "t")
        await backend.save_draft(thread, run, [assistant("a", "a1")], lease_token="t")
        await backend.commit_turn(
            _commit(
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
        view = await _see(backend, thread)
        assert message_ids(view.messages) == ["q1", "a1"]
        assert view.drafts == []

    async def test_each_run_has_its_own_draft(self, backend: TurnBackend, ids: Ids) -> None:
        """drop_draft removes the draft of the committing run only."""
        thread, one, two = ids.thread(), ids.run(), ids.run()
        for n, run in enumerate((one, two)):
            await backend.commit_turn(
                _commit(thread, run_id=run, run=RunStart(run_id=run, started_at=_T0 + n))
            )
            await backend.save_draft(thread, run, [assistant(run, "a1")])
        assert {d.run_id for d in (await _see(backend, thread)).drafts} == {one, two}
        await backend.commit_turn(
            _commit(thread, run_id=one, run=RunPatch(status="aborted"), drop_draft=True)
        )
        (left,) = (await _see(backend, thread)).drafts
        assert (left.run_id, left.messages) == (two, [assistant(two, "a1")])

    async def test_who_may_not_save_a_draft(self, backend: TurnBackend, ids: Ids) -> None:
        """Unknown and ended runs, and a lost lease, are refused; no draft appears."""
        thread, run, ended = ids.thread(), ids.run(), ids.run()
        await _start(backend, thread, run, "t")
        await backend.commit_turn(
            _commit(thread, run_id=ended, run=RunStart(run_id=ended, started_at=_T0))
        )
        await backend.commit_turn(_commit(thread, run_id=ended, run=RunPatch(status="failed")))
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
        assert (await _see(backend, thread)).drafts == []

    # -- cuts -------------------------------------------------------------------------------

    async def test_a_detached_result_goes_to_the_cut_of_its_turn(
        self, backend: Any, ids: Ids
    ) -> None:
        """cut_append adds messages to a cut record; the transcript is not touched."""
        thread, run = ids.thread(), ids.run()
        first = await _start(backend, thread, run, "t")
        await backend.commit_turn(
            _commit(
                thread,
                splice=Splice(
                    keep_through=0, tail=[user("other", "q2")], expected=first.revision
                ),
            )
        )
        (cut,) = await backend.list_cuts(thread)
        before = await _see(backend, thread)
        from_run = _cut_append(thread, run, cut.cut_id, [assistant("late", "a1")])
        receipt = await backend.commit_turn(from_run)
        assert (await backend.commit_turn(from_run)).replayed
        view = await _see(backend, thread, run)
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
        first = await _start(backend, thread, run, "t")
        await backend.commit_turn(
            _commit(
                thread,
                splice=Splice(keep_through=0, tail=[user("b", "q2")], expected=first.revision),
            )
        )
        (cut,) = await backend.list_cuts(thread)
        await backend.commit_turn(_cut_append(thread, run, cut.cut_id, [assistant("l", "a1")]))
        view = await _see(backend, thread)
        await backend.commit_turn(
            _commit(thread, restore=cut.cut_id, restore_expected=view.revision)
        )
        view = await _see(backend, thread)
        assert message_ids(view.messages) == ["q1", "a1"]
        assert view.numbers == sorted(set(view.numbers))

    async def test_a_restore_beside_a_splice_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A commit changes the transcript in one way."""
        with pytest.raises(InvalidValue):
            await backend.commit_turn(
                _commit(
                    ids.thread(), splice=Splice(keep_through=0), restore="c", restore_expected=""
                )
            )

    # -- activities -------------------------------------------------------------------------

    async def test_activities_are_written_by_position(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """puts replace or add, length cuts off: only changed rows are sent."""
        thread = ids.thread()
        rows = [activity(f"a{i}", i) for i in range(4)]

        async def write(puts: dict[int, Any], length: int) -> list[Any]:
            await backend.commit_turn(
                _commit(thread, activities=ActivitiesWrite(puts=puts, length=length))
            )
            return (await _see(backend, thread)).activities

        assert await write(dict(enumerate(rows)), 4) == rows
        changed = activity("a1", 1, content={"new": True})
        assert await write({1: changed}, 4) == [rows[0], changed, *rows[2:]]
        assert await write({2: activity("z", 2)}, 3) == [rows[0], changed, activity("z", 2)]
        assert await write({}, 1) == [rows[0]]
        assert await write({1: rows[2]}, 2) == [rows[0], rows[2]]
        assert await write({}, 0) == []

    # -- bad input --------------------------------------------------------------------------

    async def test_a_commit_that_makes_no_sense_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Patch or claim without a run, a foreign thread's interrupt, one twice, an odd id."""
        thread, run = ids.thread(), ids.run()
        for parts in (
            {"run": RunPatch(status="completed")},
            {"claims": [InterruptRef(interrupt_id="i")]},
            {"interrupts": [interrupt(ids.thread(), run, "i")]},
            {"interrupts": [interrupt(thread, run, "i"), interrupt(thread, run, "i")]},
            {"splice": Splice(keep_through=-1)},
            {"run_id": "a\x00"},
        ):
            with pytest.raises(InvalidValue):
                await backend.commit_turn(_commit(thread, **parts))
        with pytest.raises(InvalidValue):
            await backend.commit_turn(_commit(thread, "x\x00"))
        assert not (await _see(backend, thread)).exists


def _cut_append(thread: str, run: str, cut_id: str, messages: list[Any]) -> TurnCommit:
    return _commit(
        thread,
        run_id=run,
        lease_token="t",
        cut_append=CutAppend(cut_id=cut_id, messages=messages),
        run=RunPatch(status="completed", detached=True),
    )
