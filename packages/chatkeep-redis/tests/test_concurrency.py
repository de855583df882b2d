"""Many writers on one thread: every acknowledged message is there, once, and turns are whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import InterruptConflict, RunConflict, ThreadConflict
from chatkeep.records import InterruptRecord
from chatkeep.rules import new_commit_id
from chatkeep.stores import InterruptAnswer, InterruptRef, RunStart, Splice, TurnCommit, ViewQuery

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_sixteen_writers_with_cuts_and_one_contested_answer(
    persistence: Persistence, tools: Any
) -> None:
    """Forty commits each, every fifth a cut: what was acknowledged is live or archived, in whole
    turns; one writer wins the answer."""
    backend = tools.backend(persistence)
    asked = InterruptRecord(interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={})
    await backend.commit_turn(
        TurnCommit(
            commit_id="first",
            thread_id="t",
            run=RunStart(run_id="r", started_at=1),
            interrupts=[asked],
        )
    )
    acknowledged: list[str] = []
    winners: list[int] = []

    async def write(writer: int) -> None:
        for number in range(40):
            tail: Any = [{"id": f"{part}{writer}-{number}", "role": "user"} for part in ("u", "a")]
            answers = [InterruptAnswer(interrupt_id="i", response=writer)] if number == 20 else []
            while True:
                view = await backend.read_view("t", ViewQuery(messages="numbers"))
                keep = view.newest
                if number % 5 == 4 and len(view.numbers) >= 2:
                    keep = view.numbers[-3] if len(view.numbers) > 2 else 0
                commit = TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="t",
                    splice=Splice(keep_through=keep, tail=tail, expected=view.revision),
                    answers=answers,
                )
                try:
                    await backend.commit_turn(commit)
                except ThreadConflict:
                    continue
                except InterruptConflict:
                    answers = []
                    continue
                break
            if answers:
                winners.append(writer)
            acknowledged.extend(message["id"] for message in tail)

    await asyncio.gather(*(write(writer) for writer in range(16)))
    live: Any = [m["id"] for m in (await backend.read_view("t", ViewQuery())).messages]
    archived: list[str] = []
    for cut in await backend.list_cuts("t"):
        archived += [m["id"] for m in await backend.load_cut("t", cut.cut_id)]
    assert sorted(live + archived) == sorted(acknowledged)
    assert len(acknowledged) == 16 * 40 * 2
    assert [i[1:] for i in live[::2]] == [i[1:] for i in live[1::2]]
    assert len(winners) == 1
    (settled,) = (await backend.read_view("t", ViewQuery(interrupts="all"))).interrupts
    assert settled.response == winners[0]
    (thread,) = (await backend.list_threads(limit=5, cursor=None, children=False)).threads
    assert thread.message_count == len(live)
    assert (await backend.list_cut_threads(before=2**50, limit=5)) == [(backend.scope, "t")]


async def test_of_two_writers_at_one_revision_one_wins(
    persistence: Persistence, tools: Any
) -> None:
    backend = tools.backend(persistence)
    revision = ""
    for number in range(20):
        commits = [tools.said("t", f"{who}{number}", keep=2**50, expected=revision) for who in "ab"]
        results = await asyncio.gather(
            *(backend.commit_turn(commit) for commit in commits), return_exceptions=True
        )
        lost = [result for result in results if isinstance(result, ThreadConflict)]
        (won,) = [result for result in results if not isinstance(result, BaseException)]
        assert len(lost) == 1
        assert lost[0].actual == won.revision
        revision = won.revision
    assert len((await backend.read_view("t", ViewQuery())).messages) == 20


async def test_one_run_id_in_two_threads_has_one_owner(
    persistence: Persistence, tools: Any
) -> None:
    """A hundred times two posts at once: one thread has the run, the other one nothing."""
    backend = tools.backend(persistence)
    reasons: set[str] = set()

    async def start(thread: str, run: str) -> str | None:
        try:
            await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id=thread,
                    run=RunStart(run_id=run, started_at=1, lease_token=thread, parent_run_id="p"),
                    splice=Splice(keep_through=0, tail=[{"id": "u", "role": "user"}], expected=""),
                )
            )
        except RunConflict as error:
            reasons.add(error.reason)
            return None
        return thread

    for number in range(100):
        threads = [f"x{number}", f"y{number}"]
        won = await asyncio.gather(*(start(thread, f"r{number}") for thread in threads))
        (owner,) = [thread for thread in won if thread is not None]
        (loser,) = [thread for thread in threads if thread != owner]
        assert not (await backend.read_view(loser, ViewQuery())).exists
        assert (await backend.find_run(f"r{number}")).thread_id == owner
    assert reasons == {"foreign-thread"}
    assert len((await backend.list_child_runs(["p"]))["p"]) == 100


async def test_one_run_that_two_start_at_once_is_driven_by_one(
    persistence: Persistence, tools: Any
) -> None:
    """The loser leaves the look-up of the winner's run alone."""
    backend = tools.backend(persistence)

    async def start(run: str, token: str) -> Any:
        return await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=f"t{run}",
                run=RunStart(run_id=run, started_at=1, lease_token=token, parent_run_id="p"),
            )
        )

    for number in range(40):
        results = await asyncio.gather(
            *(start(f"r{number}", token) for token in "abc"), return_exceptions=True
        )
        assert sum(isinstance(result, RunConflict) for result in results) == 2
        run = await backend.find_run(f"r{number}")
        (won,) = [result for result in results if not isinstance(result, BaseException)]
        assert run.lease == won.run.lease
    children = (await backend.list_child_runs(["p"]))["p"]
    assert sorted(run.run_id for run in children) == sorted(f"r{n}" for n in range(40))


async def test_one_question_is_claimed_by_one_run(persistence: Persistence, tools: Any) -> None:
    """Two tabs answer at once: one run goes on, nothing of the other is there."""
    backend = tools.backend(persistence)
    for number in range(20):
        thread = f"t{number}"
        await persistence.stores.runs.create_or_resume(f"r{number}", thread, started_at=1)
        await persistence.stores.interrupts.create(
            InterruptRecord(
                interrupt_id="i", run_id=f"r{number}", thread_id=thread, requested_at=1, payload={}
            )
        )
        commits = [
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=f"{who}{number}",
                run=RunStart(run_id=f"{who}{number}", started_at=2, lease_token=who),
                claims=[InterruptRef(interrupt_id="i")],
            )
            for who in ("a", "b", "c")
        ]
        results = await asyncio.gather(
            *(backend.commit_turn(commit) for commit in commits), return_exceptions=True
        )
        assert sum(isinstance(result, InterruptConflict) for result in results) == 2
        (won,) = [result for result in results if not isinstance(result, BaseException)]
        (record,) = await persistence.stores.interrupts.list_pending(thread)
        assert record.claimed_by == won.run.run_id
        for commit in commits:
            assert commit.run is not None
            found = await backend.find_run(commit.run_id)
            assert (found is not None) == (commit.run_id == won.run.run_id)
