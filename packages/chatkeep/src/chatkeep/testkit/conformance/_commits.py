"""A commit is applied once, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InterruptConflict, InvalidValue, RunConflict, ThreadConflict
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    NO_THREAD,
    ActivitiesWrite,
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    TurnBackend,
)
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    assistant,
    gather,
    interrupt,
    message_ids,
    user,
)
from chatkeep.testkit.conformance._turnkit import T0, see, start_turn, still, turn

__all__ = ["TestCommits"]


class TestCommits(ConformanceCase):
    """Tier TurnBackend: commit ids, and all or nothing."""

    # -- commit ids ----------------------------------------------------------------------

    async def test_a_commit_sent_again_is_applied_once(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A known commit id gives the same result and writes nothing."""
        thread, run = ids.thread(), ids.run()
        commit = turn(
            thread,
            run_id=run,
            splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=NO_THREAD),
            interrupts=[interrupt(thread, run, "i1")],
            run=RunStart(run_id=run, started_at=T0, lease_token="t"),
            activities=ActivitiesWrite(puts={0: activity("a")}, length=1),
        )
        first = await backend.commit_turn(commit)
        before = still(await see(backend, thread, run))
        again = await backend.commit_turn(commit)
        assert (first.replayed, again.replayed) == (False, True)
        assert (again.revision, again.newest, again.numbers) == (
            first.revision,
            first.newest,
            first.numbers,
        )
        assert again.run == first.run
        assert still(await see(backend, thread, run)) == before

    async def test_a_commit_is_known_after_fifteen_others(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """The head remembers sixteen commits: other tabs in between change nothing."""
        thread, run = ids.thread(), ids.run()
        commit = turn(
            thread,
            run_id=run,
            splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=NO_THREAD),
            run=RunStart(run_id=run, started_at=T0),
        )
        first = await backend.commit_turn(commit)
        newest = first.newest
        for n in range(15):
            done = await backend.commit_turn(
                turn(thread, splice=Splice(keep_through=newest, tail=[user(f"n{n}")]))
                if n % 2
                else turn(thread, run_id=run, run=RunPatch(usage={"n": n}))
            )
            newest = done.newest
        before = still(await see(backend, thread))
        again = await backend.commit_turn(commit)
        assert again.replayed
        assert (again.revision, again.newest, again.numbers) == (
            first.revision,
            first.newest,
            first.numbers,
        )
        assert still(await see(backend, thread)) == before

    async def test_the_calls_of_the_stores_go_through_the_head_too(
        self, backend: Any, ids: Ids
    ) -> None:
        """Sixteen later commits of any kind push a commit id out: then its guards decide."""
        thread, run = ids.thread(), ids.run()
        commit = turn(
            thread, splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=NO_THREAD)
        )
        await backend.commit_turn(commit)
        await backend.commit_turn(turn(thread, run_id=run, run=RunStart(run_id=run, started_at=T0)))
        for n in range(16):
            await backend.commit_turn(turn(thread, run_id=run, run=RunPatch(usage={"n": n})))
        with pytest.raises(ThreadConflict):
            await backend.commit_turn(commit)

    async def test_a_known_commit_id_comes_before_every_refusal(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Sent again after its run ended and its answer is settled: still a success."""
        thread, paused, run = ids.thread(), ids.run(), ids.run()
        await start_turn(backend, thread, paused)
        await backend.commit_turn(
            turn(thread, run_id=paused, interrupts=[interrupt(thread, paused, "i1")])
        )
        view = await see(backend, thread)
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                run=RunStart(run_id=run, started_at=T0 + 1, lease_token="t"),
            )
        )
        commit = turn(
            thread,
            run_id=run,
            lease_token="t",
            splice=Splice(
                keep_through=view.newest, tail=[assistant("a", "a1")], expected=view.revision
            ),
            answers=[InterruptAnswer(interrupt_id="i1")],
            run=RunPatch(status="completed", finished_at=T0 + 2),
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
                turn(thread, splice=Splice(keep_through=0, tail=[user("a", "a")]))
            )
            commit = turn(
                thread,
                splice=Splice(
                    keep_through=one.newest, tail=[user("b", "b")], expected=one.revision
                ),
            )
            receipts = await gather([backend.commit_turn(commit) for _ in range(4)])
            assert sorted(r.replayed for r in receipts) == [False, True, True, True]
            assert len({(r.revision, tuple(r.numbers)) for r in receipts}) == 1
            assert message_ids((await see(backend, thread)).messages) == ["a", "b"]

    async def test_a_commit_id_belongs_to_its_thread(self, backend: TurnBackend, ids: Ids) -> None:
        """The same commit id in another thread is another commit."""
        commit_id = new_commit_id()
        for _ in range(2):
            thread = ids.thread()
            receipt = await backend.commit_turn(
                turn(thread, commit_id, splice=Splice(keep_through=0, tail=[user("a")]))
            )
            assert not receipt.replayed
            assert len((await see(backend, thread)).messages) == 1

    # -- all or nothing ------------------------------------------------------------------

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
        await start_turn(backend, other, abroad)
        await start_turn(backend, thread, busy, "busy")
        await backend.commit_turn(
            turn(thread, run_id=ended, run=RunStart(run_id=ended, started_at=T0))
        )
        await backend.commit_turn(
            turn(
                thread,
                run_id=ended,
                interrupts=[interrupt(thread, ended, f"i{n}", at=T0 + n) for n in range(4)],
                answers=[],
                run=RunPatch(status="completed"),
            )
        )
        await backend.commit_turn(
            turn(thread, answers=[InterruptAnswer(interrupt_id="i1", response=1)])
        )
        await backend.commit_turn(
            turn(thread, run_id=busy, lease_token="busy", claims=[InterruptRef(interrupt_id="i2")])
        )
        await backend.commit_turn(
            turn(thread, run_id=run, run=RunStart(run_id=run, started_at=T0, lease_token="t"))
        )
        await backend.save_draft(thread, run, [assistant("draft", "d")], lease_token="t")
        view = await see(backend, thread, run)
        nan = float("nan")
        good: dict[str, Any] = {
            "run_id": run,
            "lease_token": "t",
            "splice": Splice(keep_through=0, tail=[user("new", "n1")], expected=view.revision),
            "answers": [InterruptAnswer(interrupt_id="i0", response="x")],
            "claims": [InterruptRef(interrupt_id="i3")],
            "interrupts": [interrupt(thread, run, "fresh")],
            "run": RunPatch(status="completed", finished_at=T0 + 9),
            "activities": ActivitiesWrite(puts={0: activity("a")}, length=1),
            "drop_draft": True,
        }
        bad: dict[str, tuple[dict[str, Any], type[Exception]]] = {
            "revision": (
                {"splice": Splice(keep_through=0, tail=[user("n")], expected="1.x")},
                ThreadConflict,
            ),
            "foreign run": (
                {"run": RunStart(run_id=abroad, started_at=T0), "run_id": abroad},
                RunConflict,
            ),
            "running run": (
                {"run": RunStart(run_id=busy, started_at=T0, lease_token="n"), "run_id": busy},
                RunConflict,
            ),
            "terminal run": (
                {"run": RunStart(run_id=ended, started_at=T0), "run_id": ended},
                RunConflict,
            ),
            "lost lease": ({"lease_token": "other"}, RunConflict),
            "transition": (
                {"run_id": ended, "lease_token": None, "run": RunPatch(status="aborted")},
                RunConflict,
            ),
            "taken interrupt": (
                {"interrupts": [interrupt(thread, ended, "i0")]},
                InterruptConflict,
            ),
            "settled answer": (
                {"answers": [InterruptAnswer(interrupt_id="i1")]},
                InterruptConflict,
            ),
            "unknown answer": (
                {"answers": [InterruptAnswer(interrupt_id="i9")]},
                InterruptConflict,
            ),
            "claimed answer": (
                {"answers": [InterruptAnswer(interrupt_id="i2")]},
                InterruptConflict,
            ),
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
        commit = turn(thread, **parts)
        for _ in range(2):
            with pytest.raises(error):
                await backend.commit_turn(commit)
            assert still(await see(backend, thread, run)) == still(view)
        receipt = await backend.commit_turn(turn(thread, **good))
        assert not receipt.replayed

    async def test_refusals_come_in_the_order_promised(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """RunConflict before InterruptConflict before ThreadConflict."""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run, "t")
        stale = Splice(keep_through=0, tail=[user("x")], expected="1.x")
        answers = [InterruptAnswer(interrupt_id="i9")]
        with pytest.raises(RunConflict):
            await backend.commit_turn(
                turn(thread, run_id=run, lease_token="no", splice=stale, answers=answers)
            )
        with pytest.raises(InterruptConflict):
            await backend.commit_turn(
                turn(thread, run_id=run, lease_token="t", splice=stale, answers=answers)
            )
        with pytest.raises(InterruptConflict):
            await backend.commit_turn(
                turn(
                    thread,
                    run_id=run,
                    lease_token="t",
                    splice=stale,
                    claims=[InterruptRef(interrupt_id="i9")],
                )
            )
        with pytest.raises(ThreadConflict):
            await backend.commit_turn(turn(thread, run_id=run, lease_token="t", splice=stale))
