"""Two processes' worth of writers on one thread, and many threads at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import InterruptConflict, RunConflict, StoreError, ThreadConflict
from chatkeep.records import InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import InterruptAnswer, InterruptRef, RunStart, Splice, TurnCommit, ViewQuery
from servers.dynamodb import DynamoTable

pytestmark = pytest.mark.anyio


def commit(thread: str = "t", **parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id=thread, **parts)


async def outcomes(works: list[Any]) -> tuple[list[Any], list[Any]]:
    done = await asyncio.gather(*works, return_exceptions=True)
    assert all(not isinstance(d, BaseException) or isinstance(d, StoreError) for d in done), done
    return (
        [d for d in done if not isinstance(d, BaseException)],
        [d for d in done if isinstance(d, BaseException)],
    )


@pytest.fixture
async def other(opened: Any, persistence: Persistence) -> Any:
    """A second process' persistence on the same table: it remembers nothing of the first."""
    async with opened() as other:
        await other.ping()
        yield other


async def test_of_two_writers_with_one_revision_one_wins(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    """Both from memory: one transaction is refused, read again and told the conflict."""
    known = await tools.backend(persistence).commit_turn(tools.said("t", "q"))
    await tools.backend(other).read_view("t", ViewQuery())
    won, lost = await outcomes(
        [
            tools.backend(p).commit_turn(tools.said("t", f"a{i}", keep=1, expected=known.revision))
            for i, p in enumerate([persistence, other, persistence, other])
        ]
    )
    assert (len(won), len(lost)) == (1, 3)
    for error in lost:
        assert isinstance(error, ThreadConflict)
        assert error.actual == won[0].revision
    view = await tools.backend(persistence).read_view("t", ViewQuery())
    assert view.numbers == [1, 2]


async def test_thirty_two_writers_of_one_thread_lose_nothing(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    works = [
        tools.backend(p).commit_turn(tools.said("t", f"{i}.{n}", keep=10**6))
        for i, p in enumerate([persistence, other])
        for n in range(16)
    ]
    won, lost = await outcomes(works)
    assert (len(won), lost) == (32, [])
    view = await tools.backend(other).read_view("t", ViewQuery())
    assert sorted(m["id"] for m in view.messages) == sorted(
        f"{i}.{n}" for i in range(2) for n in range(16)
    )
    assert view.numbers == sorted(n for receipt in won for n in receipt.numbers)


async def test_thirty_two_threads_at_once(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    """Whole turns, each with its run; no request waits for another thread's."""

    async def turn(p: Persistence, thread: str) -> None:
        backend = tools.backend(p)
        view = await backend.read_view(thread, ViewQuery(run_id=f"r{thread}"))
        started = await backend.commit_turn(
            commit(
                thread,
                run_id=f"r{thread}",
                run=RunStart(run_id=f"r{thread}", started_at=1, lease_token=thread),
                splice=Splice(
                    keep_through=0,
                    tail=[{"id": "q", "role": "user", "content": thread}],
                    expected=view.revision,
                ),
            )
        )
        await backend.commit_turn(
            commit(
                thread,
                run_id=f"r{thread}",
                lease_token=thread,
                run=RunPatch(status="completed"),
                splice=Splice(
                    keep_through=started.newest,
                    tail=[{"id": "a", "role": "assistant", "content": thread}],
                    expected=started.revision,
                ),
            )
        )

    await asyncio.gather(
        *(turn(p, f"{i}-{n}") for i, p in enumerate([persistence, other]) for n in range(16))
    )
    for i, p in enumerate([other, persistence]):
        for n in range(16):
            view = await tools.backend(p).read_view(f"{i}-{n}", ViewQuery(run_id=f"r{i}-{n}"))
            assert [m["content"] for m in view.messages] == [f"{i}-{n}"] * 2
            assert view.run.status == "completed"


async def test_the_first_answer_wins_and_the_first_claim(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    """Contested by two processes that both remember the question as pending."""
    backends = [tools.backend(persistence), tools.backend(other)]
    asked = [
        InterruptRecord(interrupt_id=name, run_id="p", thread_id="t", requested_at=1, payload={})
        for name in ("i1", "i2")
    ]
    await backends[0].commit_turn(commit(interrupts=asked))
    for backend in backends:
        await backend.read_view("t", ViewQuery())
    won, lost = await outcomes(
        [
            backend.commit_turn(commit(answers=[InterruptAnswer(interrupt_id="i1", response=i)]))
            for i, backend in enumerate(backends * 3)
        ]
    )
    assert len(won) == 1
    assert all(isinstance(error, InterruptConflict) for error in lost)
    won, lost = await outcomes(
        [
            backend.commit_turn(
                commit(
                    run_id=f"c{i}",
                    run=RunStart(run_id=f"c{i}", started_at=2, lease_token=f"k{i}"),
                    claims=[InterruptRef(interrupt_id="i2")],
                )
            )
            for i, backend in enumerate(backends * 2)
        ]
    )
    assert len(won) == 1
    assert all(isinstance(error, InterruptConflict) for error in lost)
    view = await backends[1].read_view("t", ViewQuery(runs="all"))
    assert [run.run_id for run in view.runs] == [won[0].run.run_id]
    assert view.interrupts[0].claimed_by == won[0].run.run_id


async def test_a_run_id_is_one_threads(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    """Started in eight threads at once: one owns it, the other threads do not even exist."""
    won, lost = await outcomes(
        [
            tools.backend(p).commit_turn(
                commit(f"t{i}.{n}", run_id="r", run=RunStart(run_id="r", started_at=1))
            )
            for i, p in enumerate([persistence, other])
            for n in range(4)
        ]
    )
    assert len(won) == 1
    assert all(isinstance(e, RunConflict) and e.reason == "foreign-thread" for e in lost)
    owner = (await tools.backend(other).find_run("r")).thread_id
    listed = await persistence.list_threads()
    assert [thread.thread_id for thread in listed.threads] == [owner]


async def test_metadata_of_many_writers(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    """Of those that expect one revision one wins, long values among them."""
    stores = [persistence.stores.metadata, other.stores.metadata]
    known = await stores[0].set_if("n", "k", 0, None)
    for size in (1, 500_000):
        done = await asyncio.gather(
            *(stores[n % 2].set_if("n", "k", f"{n}" * size, known) for n in range(6))
        )
        assert sum(revision is not None for revision in done) == 1
        known = next(revision for revision in done if revision is not None)
        assert (await stores[1].get_versioned("n", "k")).revision == known


@pytest.mark.parametrize("operation", ["DeleteItem", "PutItem"])
async def test_a_long_value_is_whole_although_another_one_goes(
    persistence: Persistence, other: Persistence, wire: Any, operation: str
) -> None:
    """Who removes a value, or writes a short one over it, takes its chunks away: not those of a
    long one that was written a moment later."""
    store = persistence.stores.metadata
    await store.set("n", "k", "a" * 900_000)
    come, go = threading.Event(), threading.Event()

    def slow(wire: Any, request: Any, _: str) -> Any:
        reply = wire.inner.send(request)
        come.set()
        go.wait(30)
        return reply

    wire.faults.append((operation, slow))
    change = store.set("n", "k", "short") if operation == "PutItem" else store.delete("n", "k")
    work = asyncio.create_task(change)
    assert await asyncio.to_thread(come.wait, 30)
    await other.stores.metadata.set("n", "k", "b" * 900_000)
    go.set()
    await work
    assert await store.get("n", "k") == "b" * 900_000


async def test_of_a_value_that_became_shorter_no_chunk_stays(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Also where the revision was the condition."""
    store = persistence.stores.metadata
    revision = await store.set_if("n", "k", "a" * 1_500_000, None)
    for size, rows in ((900_000, 3), (1, 1)):
        revision = await store.set_if("n", "k", "b" * size, revision)
        assert len(tools.rows(dynamodb_table)) == rows


async def test_a_deleted_thread_is_unknown_to_who_remembers_it(
    persistence: Persistence, other: Persistence, tools: Any
) -> None:
    """And a new one with its id meets nothing of the old."""
    backend = tools.backend(persistence)
    await backend.commit_turn(
        commit(
            run_id="r",
            run=RunStart(run_id="r", started_at=1, lease_token="k"),
            splice=Splice(keep_through=0, tail=[{"id": "q", "role": "user", "content": "x"}]),
        )
    )
    assert await other.delete_thread("t")
    with pytest.raises(RunConflict) as caught:
        await backend.commit_turn(
            commit(run_id="r", lease_token="k", run=RunPatch(status="completed"))
        )
    assert caught.value.reason == "lease-lost"
    with pytest.raises(RunConflict):
        await backend.save_draft("t", "r", [], lease_token="k")
    with pytest.raises(RunConflict):
        await backend.renew_lease("t", "r", "k", 1000)
    receipt = await backend.commit_turn(tools.said("t", "new", expected=""))
    assert receipt.numbers == [1]
    await backend.commit_turn(commit(run_id="r", run=RunStart(run_id="r", started_at=2)))
    view = await tools.backend(other).read_view("t", ViewQuery(run_id="r", drafts=True))
    assert ([m["id"] for m in view.messages], view.run.started_at) == (["new"], 2)
