"""A cluster keeps look-ups and indexes apart from threads. Whatever dies in between, and wherever:
no thread, run or cut is lost to a list, and what points at nothing shows nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import RunConflict, StoreError, ThreadConflict
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_redis import redis_persistence
from servers.redis import RedisSpace

pytestmark = pytest.mark.anyio

FOREVER = 2**50


def boundary(**parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id="t", **parts)


def start(run: str = "r", *, lease_ms: int = -1) -> TurnCommit:
    """The start of a turn whose lease has run out already: what a sweep must find."""
    return boundary(
        run=RunStart(
            run_id=run, started_at=1, lease_token="l", lease_ms=lease_ms, parent_run_id="p"
        ),
        splice=Splice(keep_through=0, tail=[{"id": "a", "role": "user"}]),
    )


async def begin(backend: Any) -> None:
    await backend.commit_turn(start())


async def cut(backend: Any) -> None:
    await backend.commit_turn(
        boundary(splice=Splice(keep_through=0, tail=[{"id": "b", "role": "user"}]))
    )


async def detach(backend: Any) -> None:
    await backend.commit_turn(boundary(run_id="r", lease_token="l", run=RunPatch(detached_since=7)))


async def end(backend: Any) -> None:
    await backend.commit_turn(
        boundary(run_id="r", lease_token="l", run=RunPatch(status="completed"))
    )


async def delete(backend: Any) -> None:
    await backend.delete_thread("t")


BEFORE: list[tuple[list[Any], Any]] = [
    ([], begin),
    ([begin], cut),
    ([begin], detach),
    ([begin, detach], end),
    ([begin, cut, detach], delete),
]


async def check_lists(persistence: Persistence) -> bool:
    """Every list shows what is there, and nothing else; whether the thread is there."""
    backend: Any = persistence.backends[0]
    view = await backend.read_view("t", ViewQuery(runs="all"))
    threads = [info.thread_id for info in (await persistence.list_threads()).threads]
    assert threads == (["t"] if view.exists else [])
    idle = await backend.list_idle(idle_ms=0, limit=9)
    assert [name for _, name in idle] == threads
    run = view.runs[0] if view.runs else None
    running = ["r"] if run is not None and run.status == "running" else []
    assert [row.run.run_id for row in await backend.list_lost(limit=9)] == running
    detached = running if run is not None and run.detached_since is not None else []
    for every in (False, True):
        found = await backend.list_reclaimable(detached_before=FOREVER, limit=9, every_scope=every)
        assert [row.run.run_id for row in found] == detached
    assert (await backend.find_run("r")) == run
    children = (await backend.list_child_runs(["p"]))["p"]
    assert children == ([run] if run is not None else [])
    cuts = await backend.list_cut_threads(before=FOREVER, limit=9)
    assert [name for _, name in cuts] == (["t"] if await backend.list_cuts("t") else [])
    return bool(view.exists)


@pytest.mark.parametrize(("first", "last"), BEFORE, ids=lambda v: getattr(v, "__name__", ""))
async def test_a_process_that_dies_at_any_step_leaves_lists_that_are_right(
    anywhere: RedisSpace,
    tools: Any,
    first: list[Callable[[Any], Awaitable[None]]],
    last: Callable[[Any], Awaitable[None]],
) -> None:
    """Each boundary, killed before each of its scripts; then another process looks, and goes on."""
    step = 0
    while True:
        place = f"{anywhere.prefix}:{step}"
        url = anywhere.server.url()
        async with redis_persistence(url, prefix=place) as persistence:
            backend = tools.backend(persistence)
            await backend.ping()
            for call in first:
                await call(backend)
            with tools.crash(persistence, after=step) as crash:
                await last(backend)
        async with redis_persistence(url, prefix=place) as persistence:
            tools.hints_last(persistence, 20)
            await check_lists(persistence)
            await asyncio.sleep(0.1)
            there = await check_lists(persistence)
            if not there:
                # What points at nothing keeps nobody from the same ids, elsewhere too.
                other: Any = persistence.backends[0]
                elsewhere = TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="elsewhere",
                    run=RunStart(run_id="r", started_at=1),
                )
                await other.commit_turn(elsewhere)
                assert (await other.find_run("r")).thread_id == "elsewhere"
                await persistence.delete_thread("elsewhere")
            await persistence.delete_thread("t")
            await asyncio.sleep(0.1)
            assert not await check_lists(persistence)
            left = [key for key in anywhere.names() if key.startswith(f"{place}:")]
            # An attempt that died before it could say so leaves its claim, for a cluster's reader.
            assert all("{r/" in key or "{p/" in key for key in left), left
            if not crash.died:
                assert left == []
        if not crash.died:
            break
        step += 1
    assert step >= 1


async def test_a_refused_start_gives_the_run_id_back(clustered: Persistence, tools: Any) -> None:
    """At once: another thread may have it, and the first one too."""
    backend = tools.backend(clustered)
    await backend.commit_turn(tools.said("t", "a"))
    refused = boundary(
        run=RunStart(run_id="r", started_at=1, lease_token="l", parent_run_id="p"),
        splice=Splice(keep_through=0, tail=[], expected="another"),
    )
    with pytest.raises(ThreadConflict):
        await backend.commit_turn(refused)
    space = tools.space(clustered)
    with space_keys(clustered, tools) as names:
        assert not [key for key in names() if "{r/" in key or "{p/" in key]
    assert await backend.find_run("r") is None
    await clustered.stores.runs.create_or_resume("r", "other", started_at=1)
    assert (await backend.find_run("r")).thread_id == "other"
    assert space.apart


def space_keys(persistence: Persistence, tools: Any) -> Any:
    import contextlib

    from redis.cluster import RedisCluster

    space = tools.space(persistence)
    node = space.runner.client.get_default_node()

    @contextlib.contextmanager
    def opened() -> Any:
        client: Any = RedisCluster(host=node.host, port=node.port)
        try:
            yield lambda: [
                key.decode()
                for key in client.scan_iter(match=f"{space.keys.prefix}:*", count=10_000)
            ]
        finally:
            client.close()

    return opened()


async def test_a_hint_that_is_too_old_does_not_count(clustered: Persistence, tools: Any) -> None:
    """The script says what it needs; it is written, and the commit sent again."""
    backend = tools.backend(clustered)
    await backend.commit_turn(tools.said("t", "a"))
    space = tools.space(clustered)
    with tools.calls(clustered) as sent:
        await backend.commit_turn(tools.said("t", "b", keep=9))
        assert sent == ["commit"]
        space.hints.put(space.place("t"), space.hints.now() - 2 * space.hint_ms)
        sent.clear()
        await backend.commit_turn(tools.said("t", "c", keep=9))
        assert sent == ["commit", "index", "index", "commit"]
        sent.clear()
        await backend.commit_turn(tools.said("t", "d", keep=9))
        assert sent == ["commit"]


async def test_a_clock_of_ours_that_is_wrong_costs_a_trip_and_no_more(
    clustered: Persistence, tools: Any
) -> None:
    """Hints count by the servers' time; a process that is hours off learns it."""
    space = tools.space(clustered)
    backend = tools.backend(clustered)
    await backend.ping()
    for offset in (-10_000_000, 10_000_000):
        space.hints.saw_clock(space.hints.now() + offset)
        space.hints.drop(space.place("t"))
        await backend.commit_turn(tools.said("t", f"m{offset}", keep=FOREVER))
        assert abs(space.hints.now() - (await backend.read_view("t", ViewQuery())).now) < 1000
    assert [info.thread_id for info in (await clustered.list_threads()).threads] == ["t"]


async def test_clocks_of_servers_that_differ_too_much_are_an_error(
    clustered: Persistence, tools: Any
) -> None:
    """Rather than a thread that no list shows."""
    tools.hints_last(clustered, -1)
    backend = tools.backend(clustered)
    with pytest.raises(StoreError, match="clocks"):
        await backend.commit_turn(tools.said("t", "a"))
    assert not (await backend.read_view("t", ViewQuery())).exists


async def test_two_who_claim_one_run_id_at_a_distance(clustered: Persistence, tools: Any) -> None:
    """One has claimed it and not committed yet: the other is refused until that claim is old, and
    then the first one's commit comes too late."""
    backend = tools.backend(clustered)
    first = start()
    await backend.ping()
    with tools.crash(clustered, after=1) as crash:
        await backend.commit_turn(first)
    assert crash.died
    elsewhere = TurnCommit(
        commit_id=new_commit_id(), thread_id="other", run=RunStart(run_id="r", started_at=1)
    )
    with pytest.raises(RunConflict, match="another thread"):
        await backend.commit_turn(elsewhere)
    tools.hints_last(clustered, 50)
    await asyncio.sleep(0.2)
    backend = tools.backend(clustered)
    await backend.commit_turn(elsewhere)
    assert (await backend.find_run("r")).thread_id == "other"
    with pytest.raises(RunConflict, match="another thread"):
        await backend.commit_turn(first)
    assert not (await backend.read_view("t", ViewQuery())).exists


async def test_a_list_is_newest_first_while_hints_are_older(
    clustered: Persistence, tools: Any
) -> None:
    """Written again within the minute for which a hint is good: no index is touched, and the list
    is right all the same, page by page."""
    backend = tools.backend(clustered)
    names = [f"t{n}" for n in range(12)]
    for name in names:
        await backend.commit_turn(tools.said(name, "a"))
    for name in reversed(names):
        await asyncio.sleep(0.003)
        with tools.calls(clustered) as sent:
            await backend.commit_turn(tools.said(name, "b", keep=9))
        assert sent == ["commit"]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = await clustered.list_threads(limit=5, cursor=cursor)
        found += [info.thread_id for info in page.threads]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == names


async def test_a_run_that_is_driven_is_no_lost_one_and_is_looked_at_once(
    clustered: Persistence, tools: Any
) -> None:
    """Renewals touch no index; the sweep that meets the run moves its place to the lease's end."""
    backend = tools.backend(clustered)
    await backend.commit_turn(start(lease_ms=60_000))
    tools.hints_last(clustered, 10)
    backend = tools.backend(clustered)
    await backend.renew_lease("t", "r", "l", 120_000)
    await asyncio.sleep(0.1)
    with tools.calls(clustered) as sent:
        assert await backend.list_lost(limit=9) == []
        assert "runs" in sent
        sent.clear()
        assert await backend.list_lost(limit=9) == []
        assert "runs" not in sent


async def test_a_deleted_thread_leaves_the_lists_unless_a_commit_may_rely_on_its_place(
    clustered: Persistence, redis_cluster_space: RedisSpace, tools: Any
) -> None:
    """At once, if nobody has written it for a while; else the next reader takes it out."""

    def lists() -> set[str]:
        return {key.rpartition(":")[2] for key in redis_cluster_space.names() if "{i/" in key}

    tools.hints_last(clustered, 100)
    backend = tools.backend(clustered)
    for thread in ("t", "subagent:x"):
        await backend.commit_turn(tools.said(thread, "a"))
        await backend.delete_thread(thread)
        assert lists()
        await backend.commit_turn(tools.said(thread, "a"))
        await asyncio.sleep(0.3)
        await backend.delete_thread(thread)
        assert not lists()


async def test_a_start_that_is_sent_again_too_late_gives_up_no_run_id_of_its_own(
    clustered: Persistence, tools: Any
) -> None:
    """It was applied, and the thread does not remember it: refused, and its run is still found."""
    backend = tools.backend(clustered)
    late = start(lease_ms=60_000)
    await backend.commit_turn(late)
    for number in range(17):
        await backend.commit_turn(tools.said("t", f"m{number}", keep=FOREVER))
    with pytest.raises(RunConflict):
        await backend.commit_turn(late)
    assert (await backend.find_run("r")).thread_id == "t"
    assert [run.run_id for run in (await backend.list_child_runs(["p"]))["p"]] == ["r"]
    with pytest.raises(RunConflict, match="another thread"):
        await clustered.stores.runs.create_or_resume("r", "other", started_at=1)
