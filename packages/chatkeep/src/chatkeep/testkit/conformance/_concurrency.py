"""Many at once, and callers that go away in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

from chatkeep.errors import InterruptConflict, ThreadConflict
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    InterruptAnswer,
    MessageStore,
    RevisionedMessages,
    RunStart,
    Splice,
    TurnBackend,
    TurnCommit,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    gather,
    interrupt,
    message_ids,
    retrying,
    user,
)

__all__ = ["TestConcurrency"]

_T0 = 1_700_000_000_000


class TestConcurrency(ConformanceCase):
    """No lost turns, no half states, whoever races or is cancelled."""

    async def test_first_use_by_many_at_once_loses_nothing(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Twenty new threads written at the same time are all there."""
        threads = [ids.thread() for _ in range(20)]
        await gather([messages.save_thread(t, [user(t, "m1")]) for t in threads])
        found = await gather([messages.load_thread(t) for t in threads])
        assert found == [[user(t, "m1")] for t in threads]

    async def test_writers_with_cuts_and_one_contested_answer(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Every acknowledged turn is live or archived, whole; the answer has one winner."""
        thread, paused = ids.thread(), ids.run()
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                splice=Splice(keep_through=0, tail=[user("first", "first")]),
                interrupts=[interrupt(thread, paused, "i1")],
            )
        )
        winners: list[int] = []

        async def work(writer: int) -> None:
            for turn in range(5):

                async def attempt(turn: int = turn) -> None:
                    view = await backend.read_view(thread, ViewQuery(messages="numbers"))
                    cut = writer == 0 and turn == 2
                    keep = view.numbers[0] if cut else view.newest
                    name = f"{writer}.{turn}"
                    await backend.commit_turn(
                        TurnCommit(
                            commit_id=new_commit_id(),
                            thread_id=thread,
                            splice=Splice(
                                keep_through=keep,
                                tail=[user(name, f"q{name}"), assistant(name, f"a{name}")],
                                expected=view.revision,
                            ),
                        )
                    )

                await retrying(attempt, ThreadConflict)
                if turn == 3:
                    try:
                        await backend.commit_turn(
                            TurnCommit(
                                commit_id=new_commit_id(),
                                thread_id=thread,
                                answers=[InterruptAnswer(interrupt_id="i1", response=writer)],
                            )
                        )
                    except InterruptConflict:
                        continue
                    winners.append(writer)

        await gather([work(n) for n in range(6)])
        view = await backend.read_view(thread, ViewQuery(interrupts="all"))
        assert [r.response for r in view.interrupts] == winners
        assert len(winners) == 1
        live = message_ids(view.messages)
        archived: list[str | None] = []
        store: Any = backend
        for cut in await store.list_cuts(thread):
            archived += message_ids(await store.load_cut(thread, cut.cut_id))
        want = {f"{word}{w}.{t}" for w in range(6) for t in range(5) for word in "qa"}
        assert {*live, *archived} - {"first"} == want
        assert len(live) + len(archived) == 1 + len(want)
        for rows in (live[1:], archived):
            assert [str(q).replace("q", "a", 1) for q in rows[::2]] == rows[1::2]

    async def test_turns_in_many_threads_do_not_mix(self, backend: TurnBackend, ids: Ids) -> None:
        """Twelve conversations at once, each with runs and messages of its own."""

        async def chat(thread: str) -> None:
            for n in range(3):
                run = ids.run()
                first = await backend.commit_turn(
                    TurnCommit(
                        commit_id=new_commit_id(),
                        thread_id=thread,
                        run_id=run,
                        splice=Splice(keep_through=2**40, tail=[user(thread, f"q{n}")]),
                        run=RunStart(run_id=run, started_at=_T0 + n, lease_token="t"),
                    )
                )
                await backend.save_draft(thread, run, [assistant("…")], lease_token="t")
                await backend.commit_turn(
                    TurnCommit(
                        commit_id=new_commit_id(),
                        thread_id=thread,
                        run_id=run,
                        lease_token="t",
                        splice=Splice(
                            keep_through=first.newest,
                            tail=[assistant(thread, f"a{n}")],
                            expected=first.revision,
                        ),
                        run=RunPatch(status="completed", finished_at=_T0 + n),
                        drop_draft=True,
                    )
                )

        threads = [ids.thread() for _ in range(12)]
        await gather([chat(thread) for thread in threads])
        for thread in threads:
            view = await backend.read_view(thread, ViewQuery(runs="all", drafts=True))
            assert message_ids(view.messages) == ["q0", "a0", "q1", "a1", "q2", "a2"]
            assert [m.get("content") for m in view.messages] == [thread] * 6
            assert [r.status for r in view.runs] == ["completed"] * 3
            assert view.drafts == []

    async def test_a_cancelled_save_is_done_or_not_begun(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """A caller that goes away leaves the old list or the new one, and a store that works."""
        thread = ids.thread()
        lists = [[user(f"{word}{i}", f"{word}{i}") for i in range(20)] for word in "ab"]
        await messages.save_thread(thread, lists[0])
        for n in range(24):
            task = asyncio.ensure_future(messages.save_thread(thread, lists[(n + 1) % 2]))
            for _ in range(n):
                await asyncio.sleep(0)
            if n % 3 == 2:
                await asyncio.sleep(0.0005 * (n % 8))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await messages.load_thread(thread) in lists
            await messages.save_thread(thread, lists[n % 2])
            assert await messages.load_thread(thread) == lists[n % 2]

    async def test_a_cancelled_commit_is_known_or_unknown_whole(
        self, backend: TurnBackend, ids: Ids
    ) -> None:
        """Sending a cancelled commit again applies it exactly once, run and transcript alike."""
        for n in range(12):
            thread, run = ids.thread(), ids.run()
            commit = TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                splice=Splice(keep_through=0, tail=[user("q", "q1")], expected=""),
                run=RunStart(run_id=run, started_at=_T0),
            )
            task = asyncio.ensure_future(backend.commit_turn(commit))
            for _ in range(n):
                await asyncio.sleep(0)
            if n % 3 == 2:
                await asyncio.sleep(0.0005 * n)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            between = await backend.read_view(thread, ViewQuery(run_id=run))
            assert (len(between.messages), between.run is not None) in ((0, False), (1, True))
            receipt = await backend.commit_turn(commit)
            assert receipt.replayed == (between.run is not None)
            after = await backend.read_view(thread, ViewQuery(run_id=run))
            assert message_ids(after.messages) == ["q1"]
            assert after.run is not None

    async def test_many_cancelled_callers_leave_no_connection_behind(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """After a hundred callers that went away the store answers as before."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a")])
        tasks = [asyncio.ensure_future(messages.load_thread(thread)) for _ in range(100)]
        await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, list | asyncio.CancelledError) for r in results)
        found = await gather([messages.load_thread(thread) for _ in range(20)])
        assert found == [[user("a")]] * 20

    async def test_two_runs_that_finish_together_keep_both_turns(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Both loaded the same thread: one is told, merges again, and nothing is lost."""
        thread = ids.thread()
        await revisioned.splice_thread(
            thread, keep=0, tail=[user(f"m{n}", f"m{n}") for n in range(4)], expected=""
        )
        loaded = await revisioned.load_transcript(thread)

        async def finish(name: str) -> bool:
            tail = [user(f"q{name}", f"q{name}"), assistant(f"a{name}", f"a{name}")]
            try:
                await revisioned.splice_thread(thread, keep=4, tail=tail, expected=loaded.revision)
            except ThreadConflict:
                now = await revisioned.load_transcript(thread)
                await revisioned.splice_thread(
                    thread, keep=len(now.messages), tail=tail, expected=now.revision
                )
                return False
            return True

        results = await gather([finish("1"), finish("2")])
        assert sorted(results) == [False, True]
        found = message_ids((await revisioned.load_transcript(thread)).messages)
        assert len(found) == 8
        assert set(found[4:]) == {"q1", "a1", "q2", "a2"}
