"""An answer is claimed before anything executes."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InterruptConflict, InvalidValue, RunConflict
from chatkeep.records import UNSET, RunPatch
from chatkeep.stores import (
    InterruptAnswer,
    InterruptRef,
    RunStart,
    TurnBackend,
    TurnReceipt,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import ConformanceCase, Ids, interrupt, outcomes
from chatkeep.testkit.conformance._turnkit import T0, see, start_turn, turn

__all__ = ["TestClaims"]


class TestClaims(ConformanceCase):
    """Tier TurnBackend: claims, and the answers that follow them."""

    async def _paused(self, backend: TurnBackend, ids: Ids, count: int = 1) -> tuple[str, str]:
        """A thread whose run waits for ``count`` answers: i0, i1, …"""
        thread, run = ids.thread(), ids.run()
        await start_turn(backend, thread, run)
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                interrupts=[interrupt(thread, run, f"i{n}", at=T0 + n) for n in range(count)],
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
            turn(
                thread,
                run_id=run,
                claims=[InterruptRef(interrupt_id=name) for name in names],
                run=RunStart(
                    run_id=run, started_at=T0 + 1, lease_token=f"of {run}", lease_ms=lease_ms
                ),
            )
        )

    async def test_a_claim_is_shown_and_is_no_answer(self, backend: TurnBackend, ids: Ids) -> None:
        """Claimed by a live run: still pending, and the claiming run is named."""
        thread, _ = await self._paused(backend, ids)
        run = ids.run()
        await self._claim(backend, thread, run, ["i0"])
        (record,) = (await see(backend, thread)).interrupts
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
            view = await see(backend, thread)
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
                turn(thread, run_id=first, lease_token=f"of {first}", run=RunPatch(status=status))
            )
        (free,) = (await see(backend, thread)).interrupts
        assert (free.status, free.claimed_by) == ("pending", None)
        await self._claim(backend, thread, second, ["i0"])
        (taken,) = (await see(backend, thread)).interrupts
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
                await backend.commit_turn(turn(thread, answers=answers, **parts))
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                lease_token=f"of {run}",
                answers=[InterruptAnswer(interrupt_id="i0", response="mine")],
                run=RunPatch(status="completed"),
            )
        )
        (record,) = (await see(backend, thread)).interrupts
        assert (record.status, record.response) == ("resolved", "mine")
        assert record.claimed_by is None

    async def test_the_claim_of_a_dead_run_stops_nobody(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """An answer settles what a run that no longer lives had claimed."""
        thread, _ = await self._paused(backend, ids)
        await self._claim(backend, thread, ids.run(), ["i0"], lease_ms=-1)
        await backend.commit_turn(
            turn(thread, answers=[InterruptAnswer(interrupt_id="i0", status="cancelled")])
        )
        (record,) = (await see(backend, thread)).interrupts
        assert (record.status, record.response) == ("cancelled", UNSET)

    async def test_a_claim_of_what_is_settled_or_unknown_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Nothing of the start is written: the run does not exist afterwards."""
        thread, _ = await self._paused(backend, ids, 2)
        await backend.commit_turn(turn(thread, answers=[InterruptAnswer(interrupt_id="i0")]))
        for names in (["i0"], ["i9"], ["i1", "i0"], ["i1", "i9"]):
            run = ids.run()
            with pytest.raises(InterruptConflict):
                await self._claim(backend, thread, run, names)
            view = await see(backend, thread, run)
            assert view.run is None
            assert {r.claimed_by for r in view.interrupts} == {None}

    async def test_the_paused_run_itself_may_go_on(self, backend: TurnBackend, ids: Ids) -> None:
        """A continuation under the same run id takes the lease of the parked run and claims."""
        thread, run = await self._paused(backend, ids)
        receipt = await self._claim(backend, thread, run, ["i0"])
        assert receipt.run is not None
        assert (receipt.run.status, receipt.created_run) == ("interrupted", False)
        (record,) = (await see(backend, thread)).interrupts
        assert record.claimed_by == run

    async def test_a_live_claim_refuses_its_own_run_too(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Two drivers of one run id: the second has another token, and comes too late."""
        thread, run = await self._paused(backend, ids)
        await self._claim(backend, thread, run, ["i0"])
        before = await see(backend, thread)
        with pytest.raises((InterruptConflict, RunConflict)):
            await backend.commit_turn(
                turn(
                    thread,
                    run_id=run,
                    claims=[InterruptRef(interrupt_id="i0")],
                    run=RunStart(run_id=run, started_at=T0 + 2, lease_token="the other's"),
                )
            )
        assert (await see(backend, thread)).runs == before.runs

    async def test_a_claim_that_is_sent_again_is_recognised(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Its reply was lost: the same commit id is the success of the first one, no second."""
        thread, _ = await self._paused(backend, ids)
        run = ids.run()
        commit = turn(
            thread,
            run_id=run,
            claims=[InterruptRef(interrupt_id="i0")],
            run=RunStart(run_id=run, started_at=T0 + 1, lease_token="mine"),
        )
        first = await backend.commit_turn(commit)
        again = await backend.commit_turn(commit)
        assert (first.replayed, again.replayed) == (False, True)
        (record,) = (await see(backend, thread)).interrupts
        assert record.claimed_by == run

    async def test_a_claim_names_the_run_that_asked(self, backend: TurnBackend, ids: Ids) -> None:
        """One id in two paused runs: only the named one's interrupt is claimed and answered."""
        thread, first = await self._paused(backend, ids)
        second = ids.run()
        await start_turn(backend, thread, second)
        await backend.commit_turn(
            turn(
                thread,
                run_id=second,
                interrupts=[interrupt(thread, second, "i0", at=T0 + 5)],
                run=RunPatch(status="interrupted"),
            )
        )
        run = ids.run()
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                claims=[InterruptRef(interrupt_id="i0", run_id=first)],
                run=RunStart(run_id=run, started_at=T0 + 6, lease_token="t"),
            )
        )
        found = (await see(backend, thread)).interrupts
        assert {r.run_id: r.claimed_by for r in found} == {first: run, second: None}
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                lease_token="t",
                answers=[InterruptAnswer(interrupt_id="i0", run_id=first, response=1)],
                run=RunPatch(status="completed"),
            )
        )
        found = (await see(backend, thread)).interrupts
        assert {r.run_id: r.status for r in found} == {first: "resolved", second: "pending"}

    async def test_a_parked_run_with_a_lease_holds_its_claims(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Live is what has not ended and has a lease that runs: the word may be interrupted. Such
        a run is none to join, and its claims end with its lease."""
        thread, _ = await self._paused(backend, ids)
        for lease_ms, live in ((60_000, True), (-1, False)):
            run = ids.run()
            await backend.commit_turn(
                turn(
                    thread,
                    run_id=run,
                    claims=[InterruptRef(interrupt_id="i0")],
                    run=RunStart(
                        run_id=run,
                        started_at=T0 + 1,
                        status="interrupted",
                        lease_token=run,
                        lease_ms=lease_ms,
                    ),
                )
            )
            view = await backend.read_view(thread, ViewQuery(runs="active"))
            assert view.runs == []
            assert [r.claimed_by for r in view.interrupts] == [run if live else None]
            if live:
                with pytest.raises(InterruptConflict):
                    await self._claim(backend, thread, ids.run(), ["i0"])
                await backend.commit_turn(
                    turn(thread, run_id=run, lease_token=run, run=RunPatch(status="completed"))
                )
        await self._claim(backend, thread, ids.run(), ["i0"])

    async def test_an_answer_twice_in_a_commit_is_refused(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A duplicate entry is no answer at all."""
        thread, run = await self._paused(backend, ids)
        with pytest.raises((InterruptConflict, InvalidValue)):
            await backend.commit_turn(
                turn(
                    thread,
                    answers=[
                        InterruptAnswer(interrupt_id="i0", response=1),
                        InterruptAnswer(interrupt_id="i0", response=2, run_id=run),
                    ],
                )
            )
        (record,) = (await see(backend, thread)).interrupts
        assert record.status == "pending"

    async def test_answers_and_new_interrupts_stand_in_one_commit(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """A continuation settles the old question and asks the next: same id, other run."""
        thread, first = await self._paused(backend, ids)
        run = ids.run()
        await self._claim(backend, thread, run, ["i0"])
        await backend.commit_turn(
            turn(
                thread,
                run_id=run,
                answers=[InterruptAnswer(interrupt_id="i0", run_id=first)],
                interrupts=[interrupt(thread, run, "i0", at=T0 + 5)],
                run=RunPatch(status="interrupted"),
            )
        )
        found = (await see(backend, thread)).interrupts
        assert [(r.run_id, r.status) for r in found] == [(first, "resolved"), (run, "pending")]
