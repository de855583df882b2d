"""Threads that run out: every key at once, later with each write, and nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence, Scope
from chatkeep.errors import RunConflict
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import ActivitiesWrite, RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_redis import redis_persistence
from servers.redis import RedisSpace

pytestmark = pytest.mark.anyio

LONG = 100_000
SHORT = 400


async def fill(persistence: Persistence, thread: str, run: str = "r") -> None:
    """Something under every key of a thread but for what a delete leaves."""
    backend: Any = persistence.backends[0]
    asked = [
        InterruptRecord(interrupt_id=name, run_id=run, thread_id=thread, requested_at=1, payload={})
        for name in ("open", "answered")
    ]
    row = ActivityRecord(id="a", activity_type="card", content={}, index=0)
    await persistence.stores.runs.create_or_resume(
        f"{run}-old", thread, started_at=1, status="completed"
    )
    await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run=RunStart(run_id=run, started_at=1, lease_token="l", parent_run_id="p"),
            splice=Splice(keep_through=0, tail=[{"id": "a", "role": "user"}]),
            interrupts=asked,
            activities=ActivitiesWrite(puts={0: row}, length=1),
        )
    )
    await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            splice=Splice(keep_through=0, tail=[{"id": "b", "role": "user"}]),
        )
    )
    await persistence.stores.interrupts.cancel(thread, "answered")
    await persistence.stores.runs.update(run, RunPatch(detached_since=5), lease_token="l")
    await backend.save_draft(thread, run, [{"role": "assistant"}])
    await persistence.stores.metadata.set("n", thread, 1)


def lives(space: RedisSpace) -> dict[str, int]:
    """Milliseconds that each key has left; -1: for ever."""
    with space.server.client() as client:
        return {key: client.pttl(key) for key in space.names()}


def of_thread(found: dict[str, int]) -> dict[str, int]:
    return {key: left for key, left in found.items() if "{t/" in key}


async def test_every_key_of_a_thread_runs_out_together(anywhere: RedisSpace) -> None:
    """And what points at it from other slots lives longer."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await fill(persistence, "t")
        left = lives(anywhere)
        own = of_thread(left)
        assert {key.rpartition(":")[2] for key in own} == {
            "head", "body", "info", "open", "ended", "asked", "settled", "rows", "drafts", "cuts",
            "values",
        }  # fmt: skip
        assert all(0 < value <= LONG for value in own.values()), own
        assert max(own.values()) - min(own.values()) < 50
        others = [value for key, value in left.items() if key not in own]
        assert others
        assert min(others) > LONG


@pytest.mark.parametrize("what", ["commit", "draft", "lease", "metadata", "erase"])
async def test_every_write_makes_a_thread_live_longer(anywhere: RedisSpace, what: str) -> None:
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        backend: Any = persistence.backends[0]
        await fill(persistence, "t")
        with anywhere.server.client() as client:
            for key in of_thread(lives(anywhere)):
                client.pexpire(key, LONG // 2)
        calls: dict[str, Any] = {
            "commit": lambda: persistence.stores.activities.save_activities("t", []),
            "draft": lambda: backend.save_draft("t", "r", []),
            "lease": lambda: backend.renew_lease("t", "r", "l", 1000),
            "metadata": lambda: persistence.stores.metadata.set("m", "t", 2),
            "erase": lambda: persistence.erase_messages("t", ["b"]),
        }
        await calls[what]()
        own = of_thread(lives(anywhere))
        assert min(own.values()) > LONG * 0.9, own
        await persistence.stores.messages.load_thread("t")


async def test_a_read_makes_nothing_live_longer(anywhere: RedisSpace) -> None:
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await fill(persistence, "t")
        with anywhere.server.client() as client:
            for key in of_thread(lives(anywhere)):
                client.pexpire(key, LONG // 2)
        await persistence.stores.messages.load_thread("t")
        await persistence.list_threads()
        assert max(of_thread(lives(anywhere)).values()) <= LONG // 2


async def test_list_load_and_answer_agree_that_a_thread_ran_out(
    anywhere: RedisSpace, tools: Any
) -> None:
    """Its run id is free again, and nothing of it is left after a while."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=SHORT) as persistence:
        tools.hints_last(persistence, 100)
        await fill(persistence, "t")
        assert [info.thread_id for info in (await persistence.list_threads()).threads] == ["t"]
        await asyncio.sleep(SHORT / 1000 + 0.1)
        backend: Any = persistence.backends[0]
        assert not (await backend.read_view("t", ViewQuery())).exists
        assert (await persistence.list_threads()).threads == []
        assert await persistence.stores.runs.get("r") is None
        assert await persistence.stores.runs.list_by_parent_run("p") == []
        assert await backend.list_idle(idle_ms=0, limit=9) == []
        assert await backend.list_lost(limit=9) == []
        assert await backend.list_cut_threads(before=2**50, limit=9) == []
        assert await backend.list_reclaimable(detached_before=2**50, limit=9) == []
        assert await persistence.stores.metadata.get("n", "t") is None
        if "cluster" in anywhere.url():
            await asyncio.sleep(0.3)  # a claim may still be under way, as far as others can see
        await persistence.stores.runs.create_or_resume("r", "other", started_at=1)
        assert (await persistence.stores.runs.get("r")).thread_id == "other"
        await persistence.delete_thread("other")
        await asyncio.sleep(3 * SHORT / 1000)
        await persistence.list_threads()
        assert anywhere.names() == []


async def test_metadata_that_is_of_no_thread_stays(anywhere: RedisSpace) -> None:
    """Until there is a thread of that id."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await persistence.stores.metadata.set("settings", "t", 1)
        assert list(lives(anywhere).values()) == [-1]
        await persistence.stores.messages.save_thread("t", [{"role": "user"}])
        assert 0 < min(of_thread(lives(anywhere)).values()) <= LONG


async def test_a_thread_that_was_to_run_out_stays_once_that_is_switched_off(
    anywhere: RedisSpace,
) -> None:
    """At its next write; look-ups and lists with it."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await fill(persistence, "t")
    async with redis_persistence(anywhere.url()) as persistence:
        await persistence.stores.messages.save_thread("t", [{"role": "user", "content": "new"}])
        assert set(lives(anywhere).values()) == {-1}


async def test_a_list_that_was_to_run_out_keeps_what_is_written_without_that(
    anywhere: RedisSpace,
) -> None:
    """Also when no thread of before is written again."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await fill(persistence, "t")
    async with redis_persistence(anywhere.url()) as persistence:
        await fill(persistence, "new", run="other")
        left = lives(anywhere)
        assert {value for key, value in left.items() if "{i/" in key} == {-1}
        # A parent has children of both; its look-up stays with those that stay.
        assert {value for key, value in left.items() if "{p/" in key} == {-1}


async def test_lists_live_as_long_as_a_thread_that_is_on_them(
    anywhere: RedisSpace, tools: Any
) -> None:
    """Its cut and its run are on lists that nothing else is written to."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await fill(persistence, "t")
        head = next(key for key in anywhere.names() if key.endswith(":head"))
        with anywhere.server.client() as client:
            for key in anywhere.names():
                if "{i/" in key:
                    client.pexpire(key, 2 * LONG)
            client.hset(head, "renewed", 1)
            await tools.backend(persistence).save_draft("t", "r", [{"role": "assistant"}])
        found = {key: left for key, left in lives(anywhere).items() if "{i/" in key}
        assert len(found) == 6
        assert min(found.values()) > 2.9 * LONG, found


async def test_look_ups_are_renewed_before_they_run_out(anywhere: RedisSpace, tools: Any) -> None:
    """They live three times as long as a thread, and start again once that has passed once."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=LONG) as persistence:
        await fill(persistence, "t")
        backend = tools.backend(persistence)
        pointers = [key for key in anywhere.names() if "{r/" in key or "{p/" in key]
        assert len(pointers) == 3
        head = next(key for key in anywhere.names() if key.endswith(":head"))
        with anywhere.server.client() as client:
            for key in pointers:
                client.pexpire(key, 2 * LONG)
            renewed = int(client.hget(head, "renewed"))
            with tools.calls(persistence) as sent:
                await backend.commit_turn(tools.said("t", "m"))
            assert "pointers" not in sent
            client.hset(head, "renewed", renewed - LONG - 1)
            with tools.calls(persistence) as sent:
                await backend.commit_turn(tools.said("t", "m"))
            assert "pointers" in sent
            assert min(client.pttl(key) for key in pointers) > 2.9 * LONG
            assert int(client.hget(head, "renewed")) >= renewed


async def test_a_deleted_thread_leaves_no_key(anywhere: RedisSpace, tools: Any) -> None:
    """Neither its own, nor a look-up, nor a place in an index."""
    async with redis_persistence(anywhere.url()) as persistence:
        tools.hints_last(persistence, 50)
        mine = persistence.scoped(Scope(tenant_id="a", user_id="b"))
        await fill(mine, "t")
        await fill(mine, "subagent:x", run="child")
        with pytest.raises(RunConflict):
            await mine.stores.runs.create_or_resume("r", "elsewhere", started_at=1)
        assert await mine.delete_thread("t")
        assert await mine.delete_thread("subagent:x")
        await asyncio.sleep(0.2)
        backend: Any = mine.backends[0]
        assert (await mine.list_threads(children=True)).threads == []
        assert await backend.list_idle(idle_ms=0, limit=9) == []
        assert await backend.list_lost(limit=9) == []
        assert anywhere.names() == []


async def test_a_thread_that_is_written_to_stays_in_the_lists(anywhere: RedisSpace) -> None:
    """For many times its time to live: what points at it does not run out before it does."""
    async with redis_persistence(anywhere.url(), thread_ttl_ms=SHORT) as persistence:
        backend: Any = persistence.backends[0]
        await persistence.stores.runs.create_or_resume("r", "t", started_at=1, parent_run_id="p")
        for number in range(24):
            await persistence.stores.messages.save_thread("t", [{"id": f"m{number}", "role": "u"}])
            await asyncio.sleep(SHORT / 3000)
            listed = (await persistence.list_threads()).threads
            assert [info.thread_id for info in listed] == ["t"]
            assert [name for _, name in await backend.list_idle(idle_ms=0, limit=9)] == ["t"]
            assert (await persistence.stores.runs.get("r")).thread_id == "t"
            assert len(await persistence.stores.runs.list_by_parent_run("p")) == 1
