"""What happens beside a boundary: work that may be put off, and others who write meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Lost

from chatkeep import Persistence
from chatkeep.errors import CorruptRecord, RunConflict, ThreadConflict
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, TurnCommit, ViewQuery
from chatkeep_redis import places, redis_persistence
from servers.redis import RedisSpace

pytestmark = pytest.mark.anyio


async def test_what_may_be_put_off_is_logged_and_harms_nothing(
    clustered: Persistence, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A run ends; taking it out of the list of lost runs fails. The boundary stands, and the list
    does not show the run."""
    backend, stores = tools.backend(clustered), clustered.stores
    await stores.runs.create_or_resume("r", "t", started_at=1, lease_token="l", lease_ms=-1)
    runner: Any = tools.space(clustered).runner
    send = runner._send

    async def broken(name: str, keys: Any, values: Any) -> Any:
        if name == "index":
            raise Lost("Connection lost")
        return await send(name, keys, values)

    runner._send = broken
    with caplog.at_level(logging.WARNING, "chatkeep.redis"):
        await stores.runs.update("r", RunPatch(status="completed"), lease_token="l")
    del runner._send
    assert "taking a run out of the index was put off" in caplog.text
    assert (await stores.runs.get("r")).status == "completed"
    assert await backend.list_lost(limit=9) == []


async def test_what_is_no_error_of_the_driver_is_not_put_off(
    clustered: Persistence, tools: Any
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await tools.space(clustered).best_effort("x", broken())


async def test_a_draft_that_is_written_while_messages_are_erased_loses_them_too(
    persistence: Persistence, tools: Any
) -> None:
    backend = tools.backend(persistence)
    await persistence.stores.runs.create_or_resume("r", "t", started_at=1)
    secret: Any = {"id": "secret", "role": "assistant", "content": "one"}
    await backend.save_draft("t", "r", [secret, {"id": "fine", "role": "assistant"}])
    runner: Any = tools.space(persistence).runner
    send = runner._send
    left = [1]

    async def meddled(name: str, keys: Any, values: Any) -> Any:
        answer = await send(name, keys, values)
        if name == "drafts" and left[0]:
            left[0] = 0
            await backend.save_draft("t", "r", [{**secret, "content": "two"}])
        return answer

    runner._send = meddled
    await backend.erase_messages("t", ["secret"])
    del runner._send
    (draft,) = (await backend.read_view("t", ViewQuery(drafts=True))).drafts
    assert draft.messages == []


@pytest.mark.parametrize("what", ["draft", "lease", "purge", "metadata", "forgetting metadata"])
async def test_every_kind_of_write_renews_look_ups_in_time(
    anywhere: RedisSpace, tools: Any, what: str
) -> None:
    ttl = 100_000
    async with redis_persistence(anywhere.url(), thread_ttl_ms=ttl) as persistence:
        backend = tools.backend(persistence)
        await persistence.stores.runs.create_or_resume("r", "t", started_at=1, lease_token="l")
        await backend.commit_turn(tools.said("t", "a"))
        await backend.commit_turn(tools.said("t", "b"))
        await persistence.stores.metadata.set("n", "t", 1)
        head = next(key for key in anywhere.names() if key.endswith(":head"))
        owner = next(key for key in anywhere.names() if "{r/" in key)
        with anywhere.server.client() as client:
            client.hset(head, "renewed", 1)
            client.pexpire(owner, 2 * ttl)
            calls: dict[str, Any] = {
                "draft": lambda: backend.save_draft("t", "r", [{"role": "assistant"}]),
                "lease": lambda: backend.renew_lease("t", "r", "l", 1000),
                "purge": lambda: backend.purge_cuts("t", before=2**50),
                "metadata": lambda: persistence.stores.metadata.set("n", "t", 2),
                "forgetting metadata": lambda: persistence.stores.metadata.delete("n", "t"),
            }
            await calls[what]()
            assert client.pttl(owner) > 2.9 * ttl


async def test_a_commit_that_only_compares_a_revision_writes_if_it_holds(
    persistence: Persistence, tools: Any
) -> None:
    backend = tools.backend(persistence)
    receipt = await backend.commit_turn(tools.said("t", "a"))

    def compare(revision: str) -> TurnCommit:
        return TurnCommit(commit_id=new_commit_id(), thread_id="t", restore_expected=revision)

    assert (await backend.commit_turn(compare(receipt.revision))).revision == receipt.revision
    with pytest.raises(ThreadConflict):
        await backend.commit_turn(compare("another"))


async def test_a_remembered_commit_that_cannot_be_read_is_corrupt(
    persistence: Persistence, anywhere: RedisSpace, tools: Any
) -> None:
    backend = tools.backend(persistence)
    commit = tools.said("t", "a")
    await backend.commit_turn(commit)
    head = next(key for key in anywhere.names() if key.endswith(":head"))
    with anywhere.server.client() as client:
        line = client.hget(head, "commits")
        client.hset(head, "commits", line.split(b" ")[0] + b" x y")
    with pytest.raises(CorruptRecord, match="commit line"):
        await backend.commit_turn(commit)


async def test_a_run_id_that_looks_free_is_taken_only_as_it_was_looked_at(
    anywhere: RedisSpace, persistence: Persistence, tools: Any
) -> None:
    """Its thread ran out and only the look-up is left; while another thread asks for the id, the
    first one starts the run anew. One of them has it."""
    backend, stores = tools.backend(persistence), persistence.stores
    await stores.runs.create_or_resume("r", "first", started_at=1)
    with anywhere.server.client() as client:
        for key in anywhere.names():
            if "{t/" in key:
                client.delete(key)
    tools.hints_last(persistence, 50)
    await asyncio.sleep(0.2)
    backend = tools.backend(persistence)
    runner: Any = tools.space(persistence).runner
    send = runner._send

    async def meddled(name: str, keys: Any, values: Any) -> Any:
        answer = await send(name, keys, values)
        if name == "runs":
            runner._send = send
            await stores.runs.create_or_resume("r", "first", started_at=2)
        return answer

    runner._send = meddled
    late = TurnCommit(
        commit_id=new_commit_id(), thread_id="second", run=RunStart(run_id="r", started_at=3)
    )
    with pytest.raises(RunConflict, match="another thread"):
        await backend.commit_turn(late)
    runner._send = send
    assert (await stores.runs.get("r")).thread_id == "first"
    assert (await backend.read_view("second", ViewQuery(runs="all"))).runs == []


async def test_a_list_shows_each_thread_once_while_others_are_written(
    persistence: Persistence, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two reads of the index one thread comes and another one goes."""
    monkeypatch.setattr(places, "_BATCH", 4)
    backend = tools.backend(persistence)
    names = [f"t{n}" for n in range(12)]
    for name in names:
        await backend.commit_turn(tools.said(name, "a"))
        await asyncio.sleep(0.002)
    runner: Any = tools.space(persistence).runner
    send = runner._send
    left = ["new", "new too"]

    async def meddled(name: str, keys: Any, values: Any) -> Any:
        answer = await send(name, keys, values)
        if name == "index" and values[0] == b"down":
            runner._send = send
            if left:
                await backend.commit_turn(tools.said(left.pop(), "a"))
            elif names[-1] == "t11":
                del names[-1]
                await backend.delete_thread("t11")
                await backend.delete_thread("new")
                await backend.delete_thread("new too")
            runner._send = meddled
        return answer

    runner._send = meddled
    page = await persistence.list_threads(limit=50)
    runner._send = send
    found = [info.thread_id for info in page.threads]
    assert len(set(found)) == len(found)
    assert set(names) <= set(found)


@pytest.mark.parametrize("same_time", [False, True])
async def test_a_sweep_meets_every_lost_run_while_others_end(
    persistence: Persistence, tools: Any, monkeypatch: pytest.MonkeyPatch, same_time: bool
) -> None:
    """Between two reads of the index the first ones leave it; many may have run out at one time."""
    monkeypatch.setattr(places, "_BATCH", 4)
    backend, stores = tools.backend(persistence), persistence.stores
    names = [f"r{n:02}" for n in range(15)]
    for name in names:
        await stores.runs.create_or_resume(name, "t", started_at=1, lease_token="l", lease_ms=-9)
    space = tools.space(persistence)
    if same_time:
        client: Any = space.runner.client
        members = await client.zrange(space.keys.lost, 0, -1)
        await client.zadd(space.keys.lost, dict.fromkeys(members, 1000))
    send = space.runner._send
    ends = iter(names[:3])

    async def meddled(name: str, keys: Any, values: Any) -> Any:
        answer = await send(name, keys, values)
        if name == "index" and values[0] == b"up" and int(values[3]):
            space.runner._send = send
            if (first := next(ends, None)) is not None and not same_time:
                await stores.runs.update(first, RunPatch(status="failed"), lease_token="l")
            space.runner._send = meddled
        return answer

    space.runner._send = meddled
    found = [lost.run.run_id for lost in await backend.list_lost(limit=50)]
    space.runner._send = send
    assert len(set(found)) == len(found)
    assert set(names[3:]) <= set(found)
