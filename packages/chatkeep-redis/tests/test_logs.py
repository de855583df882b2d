"""Delivery logs on Redis: who listens, and indexes that were left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ag_ui.core import TextMessageContentEvent

from chatkeep import Persistence
from chatkeep.delivery import RunKey, StoredLog
from chatkeep_redis import logs, redis_persistence
from servers.redis import RedisSpace

pytestmark = pytest.mark.anyio
KEY = RunKey(run_id="r")
NEVER = 3600.0
"""Seconds between two questions: whoever gets news has been told."""


def said(delta: str) -> Any:
    return TextMessageContentEvent(message_id="m", delta=delta)


async def watch(log: StoredLog) -> list[str]:
    batches = await log.follow(KEY)
    return [json.loads(event.body)["delta"] async for batch in batches for event in batch]


async def subscribers(persistence: Persistence) -> int:
    backend: Any = persistence.backends[0]
    name = backend._space.keys.log_channel
    ((_, count),) = await backend._space.runner.client.pubsub_numsub(name)
    return int(count)


async def pause() -> None:
    await asyncio.sleep(0.02)


async def test_readers_are_told_on_one_channel(
    redis_space: RedisSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One subscription of a process, however many follow; it is gone when the log is closed, and
    it is made again when it was cut off."""
    monkeypatch.setattr("chatkeep.delivery._hub._SAFETY", NEVER)
    monkeypatch.setattr("chatkeep.delivery._hub._AFTER_FAILURE", 0.05)
    async with redis_persistence(redis_space.url()) as persistence:
        writing, reading = StoredLog(persistence), StoredLog(persistence, poll_seconds=NEVER)
        writer = await writing.open(KEY, "t")
        watching = [asyncio.create_task(watch(reading)) for _ in range(5)]
        async with asyncio.timeout(10):
            while await subscribers(persistence) != 1:
                await pause()
            await writer.append([said("0")])
            backend: Any = persistence.backends[0]
            await backend._space.runner.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await writer.append([said("1")])
            while await subscribers(persistence) != 1:
                await pause()
            await writer.append([said("2")])
            await writer.close()
            assert await asyncio.gather(*watching) == [["0", "1", "2"]] * 5
        await reading.aclose()
        async with asyncio.timeout(10):
            while await subscribers(persistence):
                await pause()


async def test_a_close_whose_index_was_not_written_is_swept_all_the_same(
    redis_space: RedisSpace,
) -> None:
    """The process died between the two: the log is found among the open ones, and moved."""
    async with redis_persistence(redis_space.url()) as persistence:
        log = StoredLog(persistence, keep_seconds=0, lease_ms=60_000)
        await log.open(KEY, "t")
        backend: Any = persistence.backends[0]
        space = backend._here
        token = await space.runner.client.hget(_head(space), "token")
        answer = await space.runner.run(
            "log", space.keys.log(_digest()), ["close", 1, token, "", ""]
        )
        assert answer[0] == b"ok"
        await asyncio.sleep(0.01)
        await log.sweep()
        await log.sweep()
        assert await log.find(KEY) is None
        client = space.runner.client
        assert [key async for key in client.scan_iter(f"{space.keys.prefix}:{{l/*")] == []
        assert await client.exists(space.keys.open_logs, space.keys.closed_logs) == 0


@pytest.mark.parametrize("same_time", [False, True])
async def test_a_sweep_meets_every_lost_log_while_others_are_closed(
    redis_space: RedisSpace, monkeypatch: pytest.MonkeyPatch, same_time: bool
) -> None:
    """Between two reads of the index the first ones leave it; many may have run out at one time."""
    monkeypatch.setattr(logs, "_BATCH", 4)
    async with redis_persistence(redis_space.url()) as persistence:
        backend: Any = persistence.backends[0]
        names = [f"r{n:02}" for n in range(15)]
        for name in names:
            await backend.log_open(name, "t", name, 1)
            await asyncio.sleep(0.002)
        runner, index = backend._here.runner, backend._here.keys.open_logs
        if same_time:
            members = await runner.client.zrange(index, 0, -1)
            await runner.client.zadd(index, dict.fromkeys(members, 1000))
        send, ends = runner._send, iter(names[:3])

        async def meddled(name: str, keys: Any, values: Any) -> Any:
            answer = await send(name, keys, values)
            if name == "index" and values[0] == b"up" and not same_time:
                runner._send = send
                if (first := next(ends, None)) is not None:
                    await backend.log_close(first, first)
                runner._send = meddled
            return answer

        runner._send = meddled
        found = [head.run_id for _, head in await backend.log_lost(limit=50)]
        runner._send = send
        assert len(set(found)) == len(found)
        assert set(names[3:]) <= set(found)


def _digest() -> bytes:
    from chatkeep.logs import log_key
    from chatkeep.scope import EMPTY_SCOPE

    return log_key(EMPTY_SCOPE, "r")


def _head(space: Any) -> bytes:
    head: bytes = space.keys.log(_digest())[0]
    return head
