"""Many writers on one thread: every acknowledged message is there, once, and turns are whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chatkeep import Persistence, open_persistence
from chatkeep.errors import InterruptConflict, RunConflict, ThreadConflict
from chatkeep.records import InterruptRecord
from chatkeep.rules import new_commit_id
from chatkeep.stores import InterruptAnswer, RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_sql import sqlite_persistence

pytestmark = pytest.mark.anyio

WRITTEN_BY_MANY = [
    pytest.param("sqlite", marks=pytest.mark.sqlite),
    pytest.param("psycopg", marks=pytest.mark.postgres),
    pytest.param("asyncpg", marks=pytest.mark.postgres),
]


@pytest.mark.slow
@pytest.mark.parametrize("persistence", WRITTEN_BY_MANY, indirect=True)
async def test_sixteen_writers_with_cuts_and_one_contested_answer(
    persistence: Persistence, tools: Any
) -> None:
    """Forty commits each, every fifth a cut: what was acknowledged is live or archived, in
    whole turns; one writer wins the answer."""
    backend = tools.backend(persistence)
    asked = InterruptRecord(interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={})
    await backend.commit_turn(
        TurnCommit(
            commit_id="first", thread_id="t", run=RunStart(run_id="r", started_at=1),
            interrupts=[asked],
        )
    )  # fmt: skip
    acknowledged: list[str] = []
    winners: list[int] = []

    async def write(writer: int) -> None:
        for number in range(40):
            tail: Any = [{"id": f"{part}{writer}-{number}", "role": "user"} for part in ("u", "a")]
            answers = [InterruptAnswer(interrupt_id="i", response=writer)] if number == 20 else []
            while True:
                view = await backend.read_view("t", ViewQuery(messages="numbers"))
                cut = number % 5 == 4 and len(view.numbers) >= 2
                splice = Splice(
                    keep_through=view.numbers[-3] if cut and len(view.numbers) > 2 else
                    0 if cut else view.newest,
                    tail=tail,
                    expected=view.revision,
                )  # fmt: skip
                try:
                    await backend.commit_turn(
                        TurnCommit(
                            commit_id=new_commit_id(),
                            thread_id="t",
                            splice=splice,
                            answers=answers,
                        )
                    )
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
    live = [m["id"] for m in (await backend.read_view("t", ViewQuery())).messages]
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


async def test_one_run_id_in_two_threads_has_one_owner(
    persistence: Persistence, tools: Any
) -> None:
    """A hundred times two posts at once: one head moves, the other thread has nothing."""
    backend = tools.backend(persistence)
    reasons: set[str] = set()

    async def start(thread: str, run: str) -> str | None:
        try:
            await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id=thread,
                    run=RunStart(run_id=run, started_at=1, lease_token=thread),
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


async def test_a_new_thread_that_many_create_at_once_is_created_once(
    persistence: Persistence, tools: Any
) -> None:
    backend = tools.backend(persistence)

    async def create(writer: int) -> bool:
        try:
            await backend.commit_turn(tools.said("t", f"m{writer}", expected=""))
        except ThreadConflict:
            return False
        return True

    won = await asyncio.gather(*(create(writer) for writer in range(12)))
    assert sum(won) == 1
    (message,) = (await backend.read_view("t", ViewQuery())).messages
    assert message["id"] == f"m{won.index(True)}"


WRITER = """
import asyncio
from chatkeep import open_persistence

async def main():
    async with open_persistence(url) as persistence:
        messages = persistence.stores.messages
        async def write(task):
            for number in range(15):
                await messages.save_thread(
                    f"own {process}-{task}", [{"id": str(number), "role": "user"}]
                )
                await persistence.stores.metadata.set("shared", "counter", [process, task, number])
                await persistence.stores.runs.create_or_resume(
                    f"{process}-{task}-{number}", "shared", started_at=number
                )
        await asyncio.gather(*(write(task) for task in range(4)))

gate.wait()
asyncio.run(main())
"""


@pytest.mark.slow
async def test_several_processes_and_tasks_write_one_sqlite_file(
    sqlite_path: Path, processes: Any
) -> None:
    """No one is told that the database is locked."""
    url = f"sqlite:///{sqlite_path}"
    async with sqlite_persistence(sqlite_path) as persistence:
        await persistence.migrate()
        processes(WRITER, [{"url": url, "process": process} for process in range(4)])
        runs = await persistence.stores.runs.list_by_thread("shared")
        assert len(runs) == 4 * 4 * 15
        for process in range(4):
            for task in range(4):
                found = await persistence.stores.messages.load_thread(f"own {process}-{task}")
                assert [m["id"] for m in found] == ["14"]


ANSWERER = """
import asyncio
from chatkeep import open_persistence
from chatkeep.errors import InterruptConflict

async def main():
    async with open_persistence(url) as persistence:
        interrupts, won = persistence.stores.interrupts, []
        async def answer(number):
            try:
                await interrupts.resolve("t", f"i{number}", process, run_id="r")
            except InterruptConflict:
                return
            won.append(number)
        await asyncio.gather(*(answer(number) for number in range(50)))
        await persistence.stores.metadata.set("won", process, sorted(won))

gate.wait()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("psycopg", marks=pytest.mark.postgres),
    ],
)
async def test_of_processes_that_answer_the_same_questions_one_wins_each(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, processes: Any
) -> None:
    """Fifty questions, three processes: one answer each, and everybody knows whose."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'answers.db'}"
    else:
        url = request.getfixturevalue("postgres_database").url(kind)
    async with open_persistence(url) as persistence:
        await persistence.migrate()
        for number in range(50):
            await persistence.stores.interrupts.create(
                InterruptRecord(
                    interrupt_id=f"i{number}",
                    run_id="r",
                    thread_id="t",
                    requested_at=number,
                    payload={},
                )
            )
        names = ["approve", "deny", "cancel"]
        processes(ANSWERER, [{"url": url, "process": name} for name in names])
        stored = [r.response for r in await persistence.stores.interrupts.list("t")]
        claimed: list[Any] = [None] * 50
        for name in names:
            for number in await persistence.stores.metadata.get("won", name):
                assert claimed[number] is None
                claimed[number] = name
        assert claimed == stored


@pytest.mark.sqlite
async def test_tasks_of_one_database_in_memory_see_their_own(opened: Any) -> None:
    """One connection serves all: neither its cursors nor its transactions mix."""
    async with opened("memory") as persistence:
        messages, runs = persistence.stores.messages, persistence.stores.runs

        async def talk(name: str) -> None:
            rows: list[Any] = []
            for number in range(5):
                rows.append({"id": f"{name}-{number}", "role": "user", "content": name})
                await messages.save_thread(name, rows)
                await runs.create_or_resume(f"{name}-{number}", name, started_at=number)
                assert await messages.load_thread(name) == rows
                assert len(await runs.list_by_thread(name)) == number + 1

        await asyncio.gather(*(talk(f"t{n}") for n in range(20)))
        assert len((await persistence.list_threads()).threads) == 20


async def test_writers_that_share_a_transaction_are_refused_one_by_one(
    persistence: Persistence, tools: Any
) -> None:
    """A conflict, a refused run and a caller who gave up take nobody else's write along."""
    backend = tools.backend(persistence)
    await backend.commit_turn(tools.said("t", "first", expected=""))

    def foreign(number: int) -> TurnCommit:
        return TurnCommit(
            commit_id=new_commit_id(), thread_id=f"f{number}", run_id="nobody", lease_token="x"
        )

    commits = [
        commit
        for number in range(30)
        for commit in (
            tools.said(f"own{number}", "m", expected=""),
            tools.said("t", f"late{number}", expected="stale"),
            foreign(number),
        )
    ]
    work = [asyncio.create_task(backend.commit_turn(commit)) for commit in commits]
    await asyncio.sleep(0)
    work[0].cancel()
    results = await asyncio.gather(*work, return_exceptions=True)
    assert [type(r).__name__ for r in results[1:3]] == ["ThreadConflict", "RunConflict"]
    for number in range(1, 30):
        own, late, lost = results[3 * number : 3 * number + 3]
        assert own.numbers == [1]
        assert isinstance(late, ThreadConflict)
        assert isinstance(lost, RunConflict)
        assert (await backend.read_view(f"own{number}", ViewQuery())).numbers == [1]
        assert not (await backend.read_view(f"f{number}", ViewQuery())).exists
    assert (await backend.read_view("t", ViewQuery())).numbers == [1]
