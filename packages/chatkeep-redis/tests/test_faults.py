"""Connections die, replies are lost, callers are cancelled: nothing twice, nothing half, no call
left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import BackendUnavailable, RunConflict
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_redis import redis_persistence
from servers import TcpProxy
from servers.redis import RedisProcess, RedisSpace

pytestmark = pytest.mark.anyio


@pytest.fixture
def proxy(redis_space: RedisSpace) -> Iterator[TcpProxy]:
    with redis_space.server.proxy() as proxy:  # type: ignore[attr-defined]
        yield proxy


@pytest.fixture
async def through_proxy(
    redis_space: RedisSpace, proxy: TcpProxy, tools: Any
) -> AsyncIterator[Persistence]:
    async with redis_persistence(redis_space.url(proxy=proxy), timeout=10) as persistence:
        await persistence.ping()
        yield persistence
        assert tools.in_use(persistence) == 0


async def test_a_commit_whose_reply_was_lost_is_applied_once(
    through_proxy: Persistence, proxy: TcpProxy, tools: Any
) -> None:
    """The server answered; nobody heard it; the same commit is sent again and recognised."""
    backend = tools.backend(through_proxy)
    known = await backend.commit_turn(tools.said("t", "m0", expected=""))
    proxy.lose_reply(b"ok")
    receipt = await backend.commit_turn(tools.said("t", "m1", keep=1, expected=known.revision))
    assert proxy.losses == 1
    assert receipt.replayed
    assert receipt.numbers == [2]
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["m0", "m1"]
    assert view.revision == receipt.revision


async def test_a_commit_that_never_arrived_is_applied_once(
    through_proxy: Persistence, proxy: TcpProxy, tools: Any
) -> None:
    backend = tools.backend(through_proxy)
    await backend.commit_turn(tools.said("t", "a"))
    proxy.lose_request()
    receipt = await backend.commit_turn(tools.said("t", "b", keep=1))
    assert proxy.losses == 1
    assert not receipt.replayed
    assert (await backend.read_view("t", ViewQuery())).numbers == [1, 2]


async def test_whatever_reply_is_lost_each_call_is_done_once(
    through_proxy: Persistence, proxy: TcpProxy, tools: Any
) -> None:
    """Compare-and-set of metadata, drafts, leases, purges, deletes: sent again, recognised."""
    backend, stores = tools.backend(through_proxy), through_proxy.stores
    await stores.runs.create_or_resume("r", "t", started_at=1, lease_token="l")
    proxy.lose_reply(b"ok")
    first = await backend.metadata_put("n", "t", 1, None)
    assert first is not None
    proxy.lose_reply(b"ok")
    second = await backend.metadata_put("n", "t", 2, first)
    assert second not in (None, first)
    assert (await backend.metadata_get("n", "t")).revision == second
    proxy.lose_reply(b"ok")
    await backend.save_draft("t", "r", [{"id": "d", "role": "assistant"}], lease_token="l")
    proxy.lose_reply(b"ok")
    assert (await backend.renew_lease("t", "r", "l", 60_000)).run_id == "r"
    proxy.lose_reply(b"ok")
    assert await through_proxy.delete_thread("t")
    assert proxy.losses == 5
    assert not (await backend.read_view("t", ViewQuery())).exists


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


async def test_a_server_that_does_not_answer_is_unavailable_in_time(
    redis_space: RedisSpace, proxy: TcpProxy, tools: Any
) -> None:
    """And the outcome is unknown; later calls work."""
    async with redis_persistence(redis_space.url(proxy=proxy), timeout=1) as persistence:
        await persistence.stores.messages.load_thread("t")
        proxy.stall()
        with pytest.raises(BackendUnavailable, match="within 1 s") as caught:
            await tools.backend(persistence).commit_turn(tools.said("t", "a"))
        assert caught.value.outcome_unknown
        proxy.flow()
        proxy.cut()
        await persistence.stores.messages.save_thread("t", [])
        assert tools.in_use(persistence) == 0


async def test_an_answer_that_comes_too_late_is_nobody_elses(
    own_redis: RedisProcess, tools: Any
) -> None:
    """A call timed out while the server stood still; the next call on the pool does not get its
    answer."""
    async with redis_persistence(own_redis.url(), timeout=1, max_connections=1) as persistence:
        backend = tools.backend(persistence)
        await backend.commit_turn(tools.said("t", "a"))
        own_redis.pause()
        with pytest.raises(BackendUnavailable):
            await backend.commit_turn(tools.said("t", "b", keep=1))
        own_redis.resume()
        assert await backend.metadata_get("n", "k") is None
        view = await backend.read_view("t", ViewQuery())
        assert [m["id"] for m in view.messages] in (["a"], ["a", "b"])
        assert tools.in_use(persistence) == 0


async def test_a_killed_server_has_every_acknowledged_boundary(
    own_redis: RedisProcess, tools: Any
) -> None:
    """``appendonly yes, appendfsync always``, killed with SIGKILL under load, three times: what
    was acknowledged is there, each commit whole, nothing twice."""
    async with redis_persistence(own_redis.url(), timeout=15) as persistence:
        backend = tools.backend(persistence)
        acknowledged: dict[str, list[str]] = {}
        stop = asyncio.Event()

        async def write(writer: int) -> None:
            thread, number = f"t{writer}", 0
            mine = acknowledged.setdefault(thread, [])
            while not stop.is_set():
                number += 1
                tail: Any = [{"id": f"{part}{number}", "role": "user"} for part in ("u", "a")]
                commit = TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id=thread,
                    splice=Splice(keep_through=2**50, tail=tail),
                    run=RunStart(run_id=f"{thread}-{number}", started_at=number),
                )
                try:
                    await backend.commit_turn(commit)
                except BackendUnavailable:
                    await asyncio.sleep(0.05)
                else:
                    mine += [message["id"] for message in tail]

        writers = [asyncio.create_task(write(n)) for n in range(8)]
        for _ in range(3):
            before = sum(map(len, acknowledged.values()))
            while sum(map(len, acknowledged.values())) < before + 100:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.to_thread(own_redis.kill)
            await asyncio.to_thread(own_redis.start)
        stop.set()
        await asyncio.gather(*writers)
        for thread, mine in acknowledged.items():
            view = await backend.read_view(thread, ViewQuery(runs="all"))
            found: Any = [message["id"] for message in view.messages]
            assert len(set(found)) == len(found)
            assert set(mine) <= set(found)
            assert [i[1:] for i in found[::2]] == [i[1:] for i in found[1::2]]
            assert len(view.runs) == len(found) // 2
            for run in view.runs:
                assert (await backend.find_run(run.run_id)).thread_id == thread
        listed = await persistence.list_threads()
        assert {info.thread_id for info in listed.threads} == set(acknowledged)
        assert tools.in_use(persistence) == 0


async def test_a_server_that_is_down_is_unavailable_and_then_is_back(
    own_redis: RedisProcess, tools: Any
) -> None:
    """Between a run's start and its finish: the last boundary goes through after a restart."""
    async with redis_persistence(own_redis.url(), timeout=15) as persistence:
        backend, stores = tools.backend(persistence), persistence.stores
        await stores.runs.create_or_resume("r", "t", started_at=1, lease_token="l")
        own_redis.kill()
        with pytest.raises(BackendUnavailable):
            await backend.commit_turn(tools.said("t", "b", keep=1))
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        own_redis.start()
        await stores.runs.update("r", RunPatch(status="completed"), lease_token="l")
        assert (await stores.runs.get("r")).status == "completed"
        with pytest.raises(RunConflict):
            await backend.save_draft("t", "r", [])
        assert tools.in_use(persistence) == 0


async def test_cancelled_callers_leave_no_call_and_no_half_turn(
    persistence: Persistence, tools: Any
) -> None:
    """Each commit is there whole or not at all, its run is found, its thread is listed."""
    backend = tools.backend(persistence)
    await backend.ping()

    async def say(thread: str) -> None:
        tail: Any = [{"id": "a", "role": "user"}, {"id": "b", "role": "user"}]
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                splice=Splice(keep_through=0, tail=tail, expected=""),
                run=RunStart(run_id=thread, started_at=1, lease_token="x", parent_run_id="p"),
            )
        )

    for step in range(60):
        task = asyncio.create_task(say(f"t{step}"))
        await asyncio.sleep(step * 0.0002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    there: set[str] = set()
    for step in range(60):
        found = await persistence.stores.messages.load_thread(f"t{step}")
        assert [m["id"] for m in found] in ([], ["a", "b"])
        run = await backend.find_run(f"t{step}")
        assert (run is not None) == bool(found)
        there |= {f"t{step}"} if found else set()
    listed = (await persistence.list_threads(limit=200)).threads
    assert {info.thread_id for info in listed} == there
    children = (await backend.list_child_runs(["p"]))["p"]
    assert {run.run_id for run in children} == there
    await say("after")
    assert tools.in_use(persistence) == 0
