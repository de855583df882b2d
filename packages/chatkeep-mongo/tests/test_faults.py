"""Connections die, replies are lost, callers are cancelled, servers come back: nothing twice,
nothing half, no connection left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import BackendUnavailable
from chatkeep.records import RunPatch
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_mongo import mongo_persistence
from servers import TcpProxy
from servers.mongo import MongoDatabase, MongoProcess

pytestmark = pytest.mark.anyio

CLIENTS = ("pymongo", "motor")
QUICK = "heartbeatFrequencyMS=500&serverSelectionTimeoutMS=4000"


@pytest.fixture
def proxy(mongo_database: MongoDatabase) -> Iterator[TcpProxy]:
    with mongo_database.server.proxy() as proxy:
        yield proxy


@pytest.fixture(params=CLIENTS)
async def through_proxy(
    request: pytest.FixtureRequest,
    opened: Any,
    mongo_database: MongoDatabase,
    proxy: TcpProxy,
    tools: Any,
) -> AsyncIterator[Persistence]:
    # A failed command wakes the driver's monitor; by itself it asks seldom.
    url = f"{mongo_database.url(proxy=proxy)}&serverSelectionTimeoutMS=4000"
    async with opened(request.param, url=url, timeout=20) as persistence:
        await persistence.migrate()
        await persistence.ping()
        yield persistence
        assert tools.checked_out(persistence) == 0


async def test_a_connection_that_died_between_calls_costs_nobody_a_turn(
    through_proxy: Persistence, proxy: TcpProxy, tools: Any
) -> None:
    """The model thinks for a minute, the firewall forgets the connection, the save succeeds."""
    stores, backend = through_proxy.stores, tools.backend(through_proxy)
    await backend.commit_turn(tools.said("t", "a"))
    proxy.cut()
    await backend.commit_turn(tools.said("t", "b", keep=9))
    proxy.cut()
    assert [m["id"] for m in await stores.messages.load_thread("t")] == ["a", "b"]
    proxy.cut()
    await stores.metadata.set("n", "k", 1)
    proxy.cut()
    await stores.runs.create_or_resume("r", "t", started_at=1)
    proxy.cut()
    await backend.save_draft("t", "r", [])
    proxy.cut()
    assert await backend.list_cuts("t") == []


def boundary(number: int, revision: str | None) -> TurnCommit:
    """A run that starts and ends at once, with two messages."""
    tail: Any = [{"id": f"{word}{number}", "role": "user"} for word in "ua"]
    run = RunStart(run_id=f"r{number}", started_at=number)
    return TurnCommit(
        commit_id=f"commit {number}",
        thread_id="t",
        run_id=run.run_id,
        run=run,
        splice=Splice(keep_through=2**40, tail=tail, expected=revision),
    )


@pytest.mark.parametrize("what", ["request", "reply"])
async def test_a_boundary_is_applied_once_whichever_command_is_lost(
    through_proxy: Persistence,
    proxy: TcpProxy,
    mongo_database: MongoDatabase,
    tools: Any,
    what: str,
) -> None:
    """Of every command in turn the request never arrives; or the server does what it was asked, and
    nobody hears it. The driver or the backend asks again, and nothing is there twice."""
    backend, watch = tools.watched(through_proxy)
    known = await backend.commit_turn(boundary(0, ""))
    seen = wanted = 0

    async def lose(_name: str, _where: str) -> None:
        nonlocal seen
        seen += 1
        if seen == wanted:
            # Requests name their database, unlike those of the driver's monitor.
            if what == "request":
                proxy.lose_request(mongo_database.name.encode())
            else:
                proxy.lose_reply(b"ok")

    watch.pause = lose
    number = 0
    while True:
        number += 1
        seen, wanted = 0, number
        known = await backend.commit_turn(boundary(number, known.revision))
        assert len(known.numbers) == 2
        if proxy.losses < number:
            break
    assert number > 4
    view = await backend.read_view("t", ViewQuery(runs="all"))
    have = range(number + 1)
    assert [m["id"] for m in view.messages] == [f"{w}{n}" for n in have for w in "ua"]
    assert [run.run_id for run in view.runs] == [f"r{n}" for n in have]
    assert view.revision == known.revision


async def test_a_database_that_does_not_answer_is_unavailable_in_time(
    opened: Any, mongo_database: MongoDatabase, proxy: TcpProxy, tools: Any
) -> None:
    """And the outcome is unknown; later calls work."""
    url = f"{mongo_database.url(proxy=proxy)}&{QUICK}"
    async with opened("pymongo", url=url, timeout=2) as persistence:
        await persistence.stores.messages.load_thread("t")
        proxy.stall()
        with pytest.raises(BackendUnavailable, match="within 2 s") as caught:
            await tools.backend(persistence).commit_turn(tools.said("t", "a"))
        assert caught.value.outcome_unknown
        proxy.flow()
        proxy.cut()
        await persistence.stores.messages.save_thread("t", [])
        assert tools.checked_out(persistence) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLIENTS)
async def test_what_was_acknowledged_survives_a_killed_server(
    own_mongo: MongoProcess, opened: Any, kind: str, tools: Any
) -> None:
    """SIGKILL in the middle of a row of boundaries, three times: those that were acknowledged are
    there, whole, and one whose answer was not heard is there whole or not at all."""
    url = f"{own_mongo.url('x')}&{QUICK}"
    acknowledged: list[int] = []
    async with opened(kind, url=url, name="x", timeout=20) as persistence:
        backend = tools.backend(persistence)
        await backend.commit_turn(boundary(0, ""))

        async def write(first: int) -> None:
            for number in range(first, first + 40):
                await backend.commit_turn(boundary(number, None))
                acknowledged.append(number)

        for turn in range(3):
            work = asyncio.create_task(write(100 * (turn + 1)))
            while len(acknowledged) < (turn + 1) * 5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            own_mongo.kill()
            own_mongo.start()
            # A commit that the kill has met is sent again by the backend, and the rest goes on.
            await work
        view = await backend.read_view("t", ViewQuery(runs="all"))
        want = [0, *acknowledged]
        assert [m["id"] for m in view.messages] == [f"{w}{n}" for n in want for w in "ua"]
        assert [run.run_id for run in view.runs] == [f"r{n}" for n in sorted(want)]


@pytest.mark.slow
async def test_a_server_that_is_down_is_unavailable_and_then_is_back(
    own_mongo: MongoProcess, tools: Any
) -> None:
    url = f"{own_mongo.url('x')}&heartbeatFrequencyMS=500&serverSelectionTimeoutMS=700"
    async with mongo_persistence(url, timeout=10) as persistence:
        backend = tools.backend(persistence)
        await backend.commit_turn(tools.said("t", "a"))
        own_mongo.kill()
        with pytest.raises(BackendUnavailable):
            await backend.commit_turn(tools.said("t", "b", keep=1))
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        own_mongo.start()
        receipt = await backend.commit_turn(tools.said("t", "c", keep=1))
        view = await backend.read_view("t", ViewQuery())
        assert [m["id"] for m in view.messages] == ["a", "c"]
        assert view.numbers[-1:] == receipt.numbers
        assert tools.checked_out(persistence) == 0


async def test_a_cancelled_caller_waits_for_its_commit_wherever_it_stood(
    plain: Persistence, tools: Any
) -> None:
    """At each command of a boundary the caller goes away: the boundary is whole or was never begun,
    and the same commit sent again completes it."""
    await plain.ping()
    for stop in range(1, 12):
        backend, watch = tools.watched(plain)
        thread = f"t{stop}"
        commit = TurnCommit(
            commit_id="c",
            thread_id=thread,
            run_id=f"r{stop}",
            run=RunStart(run_id=f"r{stop}", started_at=1),
            splice=Splice(keep_through=0, tail=[{"id": "u", "role": "user"}], expected=""),
        )
        reached = asyncio.Event()
        seen = 0

        async def pause(
            _name: str, _where: str, stop: int = stop, reached: asyncio.Event = reached
        ) -> None:
            nonlocal seen
            seen += 1
            if seen == stop:
                reached.set()
                await asyncio.sleep(0.02)

        watch.pause = pause
        task = asyncio.create_task(backend.commit_turn(commit))
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        was_cancelled = task.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        view = await plain.backends[0].read_view(thread, ViewQuery(run_id=f"r{stop}"))
        assert (len(view.messages), view.run is not None) == (1, True)
        receipt = await plain.backends[0].commit_turn(commit)
        assert receipt.replayed
        if not was_cancelled:
            break
    else:
        raise AssertionError("a boundary has fewer commands than this")


async def test_cancelled_callers_leave_no_connection_and_no_half_turn(
    persistence: Persistence, tools: Any
) -> None:
    """Each save is there whole or not at all, and the store goes on working."""
    backend = tools.backend(persistence)
    await backend.ping()

    async def say(thread: str) -> None:
        rows: Any = [{"id": "a", "role": "user"}, {"id": "b", "role": "user"}]
        await persistence.stores.messages.save_thread(thread, rows)

    for step in range(20):
        task = asyncio.create_task(say(f"t{step}"))
        await asyncio.sleep(step * 0.0004)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for step in range(20):
        found = await persistence.stores.messages.load_thread(f"t{step}")
        assert [m["id"] for m in found] in ([], ["a", "b"])
    await say("after")
    assert tools.checked_out(persistence) == 0


async def test_a_late_draft_does_not_bring_an_ended_turn_back(
    persistence: Persistence, tools: Any
) -> None:
    """The throttled snapshot arrives behind the boundary that ended its run."""
    backend = tools.backend(persistence)
    await backend.commit_turn(boundary(0, ""))
    await backend.save_draft("t", "r0", [{"id": "d", "role": "assistant"}])
    await backend.commit_turn(
        TurnCommit(
            commit_id="end", thread_id="t", run_id="r0", run=RunPatch(status="completed"),
            drop_draft=True,
        )
    )  # fmt: skip
    with pytest.raises(Exception, match="has already ended"):
        await backend.save_draft("t", "r0", [{"id": "d", "role": "assistant"}])
    assert (await backend.read_view("t", ViewQuery(drafts=True))).drafts == []
