"""Many writers, some of which die: what was acknowledged is there, once, and turns are whole."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import InterruptConflict, RunConflict, ThreadConflict
from chatkeep.records import InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    TurnCommit,
    ViewQuery,
)

pytestmark = pytest.mark.anyio


def asked(thread: str = "t") -> InterruptRecord:
    return InterruptRecord(
        interrupt_id="i", run_id="r", thread_id=thread, requested_at=1, payload={}
    )


async def test_of_two_writers_one_wins_and_one_is_told(
    persistence: Persistence, tools: Any
) -> None:
    backend = tools.backend(persistence)
    first = await backend.commit_turn(tools.said("t", "m", expected=""))
    for number in range(10):
        view = await backend.read_view("t", ViewQuery())
        both = [
            backend.commit_turn(
                tools.said("t", f"{word}{number}", keep=view.newest, expected=view.revision)
            )
            for word in "xy"
        ]
        results = await asyncio.gather(*both, return_exceptions=True)
        (lost,) = [r for r in results if isinstance(r, BaseException)]
        assert isinstance(lost, ThreadConflict)
    view = await backend.read_view("t", ViewQuery())
    assert len(view.messages) == 11
    assert view.revision != first.revision


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_eight_writers_with_cuts_one_contested_answer_and_crashes(
    plain: Persistence, tools: Any
) -> None:
    """Twelve commits each, every fifth a cut; each writer dies now and then at a random write and
    sends its commit again from another process. What was acknowledged is live or archived, in whole
    turns; one writer wins the answer; every run has ended, once."""
    backend = tools.backend(plain)
    await backend.commit_turn(
        TurnCommit(
            commit_id="first", thread_id="t", run=RunStart(run_id="r", started_at=1),
            interrupts=[asked()],
        )
    )  # fmt: skip
    acknowledged: list[str] = []
    winners: list[int] = []
    crashes = 0

    async def write(writer: int) -> None:
        nonlocal crashes
        chance = random.Random(writer)
        for number in range(12):
            run_id = f"r{writer}-{number}"
            tail: Any = [{"id": f"{part}{writer}-{number}", "role": "user"} for part in ("u", "a")]
            answers = [InterruptAnswer(interrupt_id="i", response=writer)] if number == 6 else []
            while True:
                view = await backend.read_view("t", ViewQuery(messages="numbers"))
                cut = number % 5 == 4 and len(view.numbers) >= 2
                splice = Splice(
                    keep_through=view.numbers[-3] if cut and len(view.numbers) > 2 else
                    0 if cut else view.newest,
                    tail=tail,
                    expected=view.revision,
                )  # fmt: skip
                commit = TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="t",
                    run_id=run_id,
                    run=RunStart(run_id=run_id, started_at=1, status="completed"),
                    splice=splice,
                    answers=answers,
                )
                sender: Any = backend
                if chance.random() < 0.4:
                    sender, _ = tools.watched(
                        plain, crash_at=chance.randrange(1, 8), after=chance.random() < 0.5
                    )
                try:
                    try:
                        await sender.commit_turn(commit)
                    except tools.Crash:
                        crashes += 1
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

    await asyncio.gather(*(write(writer) for writer in range(8)))
    view = await backend.read_view("t", ViewQuery(runs="all", interrupts="all"))
    live = [m["id"] for m in view.messages]
    archived: list[str] = []
    for cut in await backend.list_cuts("t"):
        archived += [m["id"] for m in await backend.load_cut("t", cut.cut_id)]
    assert sorted(live + archived) == sorted(acknowledged)
    assert len(acknowledged) == 8 * 12 * 2
    assert [i[1:] for i in live[::2]] == [i[1:] for i in live[1::2]]
    assert len(winners) == 1
    assert [record.response for record in view.interrupts] == winners
    assert sorted(run.run_id for run in view.runs) == sorted(
        ["r", *(f"r{w}-{n}" for w in range(8) for n in range(12))]
    )
    assert crashes > 5
    (thread,) = (await backend.list_threads(limit=5, cursor=None, children=False)).threads
    assert thread.message_count == len(live)


async def start(backend: Any, thread: str, run: str) -> str | None:
    """The thread, if it got the run; nothing of the commit is there otherwise."""
    try:
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run=RunStart(run_id=run, started_at=1, lease_token=thread),
                splice=Splice(keep_through=0, tail=[{"id": "u", "role": "user"}], expected=""),
            )
        )
    except RunConflict:
        return None
    return thread


async def test_one_run_id_in_two_threads_has_one_owner(
    persistence: Persistence, tools: Any
) -> None:
    """Forty times two posts at once: one head moves, the other thread has nothing."""
    backend = tools.backend(persistence)
    for number in range(40):
        threads = [f"x{number}", f"y{number}"]
        won = await asyncio.gather(*(start(backend, thread, f"r{number}") for thread in threads))
        (owner,) = [thread for thread in won if thread is not None]
        (loser,) = [thread for thread in threads if thread != owner]
        assert not (await backend.read_view(loser, ViewQuery())).exists
        assert (await backend.find_run(f"r{number}")).thread_id == owner


async def test_a_claim_that_a_crash_left_behind_holds_up_nobody(
    plain: Persistence, tools: Any
) -> None:
    """At whichever write the first thread died: the second gets the run, or the first has it; and
    the first, coming back, is told so."""
    backend = tools.backend(plain)
    outcomes: set[str] = set()
    for turn in range(2, 12):
        at, after = turn // 2, bool(turn % 2)
        run, threads = f"r{turn}", (f"x{turn}", f"y{turn}")
        broken, watch = tools.watched(plain, crash_at=at, after=after)
        with suppress(tools.Crash):
            await start(broken, threads[0], run)
        assert watch.dead
        second = await start(backend, threads[1], run)
        first = await start(backend, threads[0], run)
        owner = (await backend.find_run(run)).thread_id
        if second is not None:
            assert (owner, first) == (threads[1], None)
            outcomes.add("taken over")
        else:
            assert (owner, first) == (threads[0], None)
            outcomes.add("kept")
        for thread in threads:
            view = await backend.read_view(thread, ViewQuery(run_id=run))
            assert view.exists == (thread == owner)
            assert view.foreign_run == (thread != owner)
    assert outcomes == {"taken over", "kept"}


async def test_a_slow_thread_does_not_get_a_run_that_was_taken_over(
    plain: Persistence, tools: Any
) -> None:
    """It has claimed the id, and stops for long right before each of its later commands; another
    thread comes meanwhile. One of them has the run, whichever."""
    backend = tools.backend(plain)
    await backend.ping()
    for stop in range(1, 9):
        run, slow, quick = f"r{stop}", f"x{stop}", f"y{stop}"
        handle, watch = tools.watched(plain)
        stopped, go = asyncio.Event(), asyncio.Event()
        seen = 0

        async def pause(
            _name: str,
            _where: str,
            stop: int = stop,
            stopped: asyncio.Event = stopped,
            go: asyncio.Event = go,
        ) -> None:
            nonlocal seen
            seen += 1
            if seen == stop:
                stopped.set()
                await go.wait()

        watch.pause = pause
        first = asyncio.create_task(start(handle, slow, run))
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait({first, waiting}, return_when=asyncio.FIRST_COMPLETED)
        second = await start(backend, quick, run)
        go.set()
        won = [thread for thread in (await first, second) if thread is not None]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(won) == 1
        assert (await backend.find_run(run)).thread_id == won[0]
        for thread in (slow, quick):
            view = await backend.read_view(thread, ViewQuery(run_id=run))
            assert view.exists == (thread == won[0])


async def test_a_deleted_threads_run_may_be_used_by_another(plain: Persistence, tools: Any) -> None:
    """Also while the deletion is only half done."""
    backend = tools.backend(plain)
    for at in range(1, 8):
        await start(backend, f"x{at}", f"r{at}")
        broken, _ = tools.watched(plain, crash_at=at, after=True)
        with pytest.raises(tools.Crash):
            await broken.delete_thread(f"x{at}")
        assert await backend.find_run(f"r{at}") is None
        assert await start(backend, f"y{at}", f"r{at}") == f"y{at}"
        assert (await backend.find_run(f"r{at}")).thread_id == f"y{at}"
        await backend.delete_thread(f"x{at}")
        assert (await backend.find_run(f"r{at}")).thread_id == f"y{at}"


async def test_two_tabs_cannot_both_claim_an_answer(persistence: Persistence, tools: Any) -> None:
    """Twenty times two resumes at once: one may execute, the other is told before it does."""
    backend = tools.backend(persistence)
    for number in range(20):
        thread = f"t{number}"
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id="r",
                run=RunStart(run_id=f"r{number}", started_at=1, status="interrupted"),
                interrupts=[asked(thread)],
            )
            if number < 0
            else TurnCommit(commit_id=new_commit_id(), thread_id=thread, interrupts=[asked(thread)])
        )

        async def resume(tab: str, thread: str = thread, number: int = number) -> bool:
            run = RunStart(run_id=f"{tab}{number}", started_at=2, lease_token=tab)
            claims = [InterruptRef(interrupt_id="i")]
            try:
                await backend.commit_turn(
                    TurnCommit(
                        commit_id=new_commit_id(), thread_id=thread, run_id=run.run_id, run=run,
                        claims=claims,
                    )
                )  # fmt: skip
            except InterruptConflict:
                return False
            return True

        assert sorted(await asyncio.gather(resume("x"), resume("y"))) == [False, True]
        view = await backend.read_view(thread, ViewQuery(runs="all"))
        assert len(view.runs) == 1
        assert view.interrupts[0].claimed_by == view.runs[0].run_id


async def test_a_lease_that_was_renewed_in_time_is_not_taken_over(
    plain: Persistence, tools: Any
) -> None:
    """A driver that comes late and one that takes over meet in the head: one has the run."""
    backend = tools.backend(plain)
    for number in range(20):
        run, thread = f"r{number}", f"t{number}"
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run=RunStart(run_id=run, started_at=1, lease_token="old", lease_ms=-1),
            )
        )
        takeover = TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run=RunStart(run_id=run, started_at=1, lease_token="new"),
        )
        late, taken = await asyncio.gather(
            backend.renew_lease(thread, run, "old", 60_000),
            backend.commit_turn(takeover),
            return_exceptions=True,
        )
        failed = [r for r in (late, taken) if isinstance(r, BaseException)]
        assert [type(error) for error in failed] == [RunConflict]
        token = (await backend.find_run(run)).lease.token
        assert token == ("new" if isinstance(late, RunConflict) else "old")
        end = TurnCommit(
            commit_id=new_commit_id(), thread_id=thread, run_id=run, lease_token=token,
            run=RunPatch(status="completed"),
        )  # fmt: skip
        assert (await backend.commit_turn(end)).run.status == "completed"


async def test_a_read_among_writers_is_of_one_moment(plain: Persistence, tools: Any) -> None:
    """Each boundary sets a message and a run to the same number; no read mixes two boundaries."""
    backend = tools.backend(plain)
    done = False

    async def write() -> None:
        nonlocal done
        for number in range(40):
            tail: Any = [{"id": "m", "role": "user", "content": str(number)}]
            await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="t",
                    run_id="r",
                    splice=Splice(keep_through=0, tail=tail),
                    run=RunPatch(usage={"n": number})
                    if number
                    else RunStart(run_id="r", started_at=1),
                )
            )
        done = True

    async def read() -> int:
        seen = 0
        while not done:
            view = await backend.read_view("t", ViewQuery(runs="all", run_id="r"))
            if view.messages and view.run is not None and view.run.usage is not None:
                number = int(view.messages[0]["content"])
                assert view.run.usage == {"n": number}
                assert view.runs == [view.run]
                seen += 1
        return seen

    _, *seen = await asyncio.gather(write(), read(), read())
    assert all(seen)


async def test_a_stale_hint_misleads_nobody(plain: Persistence, opened: Any, tools: Any) -> None:
    """Two processes take turns on one thread; each remembers the head as it last saw it. Who is at
    the newest revision succeeds, who is not is refused for what is stored, and what was sent
    before, by either, is recognised."""
    async with opened("pymongo") as other:
        one, two = tools.backend(plain), tools.backend(other)
        first = tools.said("t", "m0", expected="")
        known = await one.commit_turn(first)
        for number in range(1, 7):
            here, there = (one, two) if number % 2 else (two, one)
            stale = known.revision
            sent = tools.said("t", f"m{number}", keep=9, expected=stale)
            known = await there.commit_turn(sent)
            assert not known.replayed
            with pytest.raises(ThreadConflict) as caught:
                await here.commit_turn(tools.said("t", "no", keep=9, expected=stale))
            assert caught.value.actual == known.revision
            assert (await here.commit_turn(sent)).replayed
        run = RunStart(run_id="r", started_at=1, lease_token="k", lease_ms=-1)
        await one.commit_turn(TurnCommit(commit_id="s", thread_id="t", run_id="r", run=run))
        taken = RunStart(run_id="r", started_at=1, lease_token="other")
        await two.commit_turn(TurnCommit(commit_id="o", thread_id="t", run_id="r", run=taken))
        late = TurnCommit(
            commit_id="l", thread_id="t", run_id="r", lease_token="k",
            run=RunPatch(status="completed"),
            splice=Splice(keep_through=99, tail=[{"id": "late", "role": "assistant"}]),
        )  # fmt: skip
        with pytest.raises(RunConflict, match="lease was lost"):
            await one.commit_turn(late)
        assert await two.delete_thread("t")
        again = await one.commit_turn(tools.said("t", "new", keep=9))
        assert again.numbers == [1]
        view = await two.read_view("t", ViewQuery(runs="all"))
        assert ([m["id"] for m in view.messages], view.runs) == (["new"], [])
        rows = await one._db.find("chatkeep_entries", {})
        assert [row["id"] for row in rows] == ["new"]


async def test_a_late_erasure_takes_no_message_that_was_committed_since(
    plain: Persistence, tools: Any
) -> None:
    """It names messages that a commit has stored but not committed yet. Somebody else carries it
    out, the commit is made, and then the one who began to erase wakes up."""
    backend = tools.backend(plain)
    await backend.commit_turn(tools.said("t", "a"))
    commit = tools.said("t", "b", keep=9)
    broken, _ = tools.watched(plain, crash_at=1, after=True)
    with pytest.raises(tools.Crash):
        await broken.commit_turn(commit)
    slow, watch = tools.watched(plain)
    stopped, go = asyncio.Event(), asyncio.Event()

    async def pause(name: str, where: str) -> None:
        if (name, where) == ("delete", "chatkeep_entries"):
            stopped.set()
            await go.wait()

    watch.pause = pause
    erasing = asyncio.create_task(slow.erase_messages("t", ["b"]))
    await stopped.wait()
    await backend.commit_turn(commit)
    go.set()
    assert await erasing == 0
    assert [m["id"] for m in (await backend.read_view("t", ViewQuery())).messages] == ["a", "b"]


async def test_a_commit_that_a_failover_takes_back_is_not_acknowledged(
    plain: Persistence, opened: Any, tools: Any
) -> None:
    """Its reply was lost. Sent again, it finds itself in a head that no majority has yet, and which
    is taken back before it can be made sure of: it is applied again."""
    backend = tools.backend(plain)
    await backend.commit_turn(tools.said("t", "a"))
    (before,) = await backend._db.find("chatkeep_threads", {})
    commit = tools.said("t", "b", keep=9)
    await backend.commit_turn(commit)
    async with opened("pymongo") as other:
        handle, watch = tools.watched(other)
        taken_back = 0

        async def pause(name: str, where: str) -> None:
            nonlocal taken_back
            if (name, where) == ("update", "chatkeep_threads") and not taken_back:
                taken_back += 1
                same = {"_id": before["_id"]}
                await backend._db.replace("chatkeep_threads", [(same, before)], upsert=False)

        watch.pause = pause
        receipt = await handle.commit_turn(commit)
    assert taken_back
    assert not receipt.replayed
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["a", "b"]
    assert view.revision == receipt.revision


async def test_two_posts_of_one_run_mix_nothing_of_each_other(
    plain: Persistence, tools: Any
) -> None:
    """The second renews the claim right between the commit of the first and what goes with it; it
    names a parent, and the first, which has the run, does not."""
    backend = tools.backend(plain)
    await backend.commit_turn(tools.said("t", "a"))
    (one, first), (two, second) = tools.watched(plain), tools.watched(plain)
    head, work, renew = asyncio.Event(), asyncio.Event(), asyncio.Event()
    at_head, at_work, at_renew = asyncio.Event(), asyncio.Event(), asyncio.Event()
    renewed = asyncio.Event()
    gates = {
        ("update", "chatkeep_threads"): (at_head, head),
        ("change", "chatkeep_runs"): (at_work, work),
    }

    async def pause_first(name: str, where: str) -> None:
        if gate := gates.get((name, where)):
            gate[0].set()
            await gate[1].wait()

    async def pause_second(name: str, where: str) -> None:
        if at_renew.is_set():
            renewed.set()
        elif (name, where) == ("update", "chatkeep_runs"):
            at_renew.set()
            await renew.wait()

    first.pause, second.pause = pause_first, pause_second

    def start(parent: str | None) -> TurnCommit:
        run = RunStart(run_id="r", started_at=1, lease_token="k", parent_run_id=parent)
        return TurnCommit(commit_id=new_commit_id(), thread_id="t", run=run)

    won = asyncio.create_task(one.commit_turn(start(None)))
    await at_head.wait()
    lost = asyncio.create_task(two.commit_turn(start("p")))
    await at_renew.wait()
    head.set()
    await at_work.wait()
    renew.set()
    await renewed.wait()
    work.set()
    assert (await won).created_run
    with pytest.raises(RunConflict):
        await lost
    assert (await backend.find_run("r")).parent_run_id is None
    assert not (await backend.list_child_runs(["p"]))["p"]
    (row,) = await backend._db.find("chatkeep_runs", {})
    assert "parent" not in row
