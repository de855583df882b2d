"""Delivery logs on PostgreSQL: who listens, and what happens when nobody can."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ag_ui.core import TextMessageContentEvent

from chatkeep import Persistence
from chatkeep.delivery import RunKey, StoredLog

pytestmark = pytest.mark.anyio
KEY = RunKey(run_id="r")
NEVER = 3600.0
"""Seconds between two questions: whoever gets news has been told."""


def said(delta: str) -> Any:
    return TextMessageContentEvent(message_id="m", delta=delta)


async def watch(log: StoredLog) -> list[str]:
    batches = await log.follow(KEY)
    return [json.loads(event.body)["delta"] async for batch in batches for event in batch]


async def listeners(persistence: Persistence, tools: Any) -> list[int]:
    rows = await tools.execute(
        persistence,
        "select pid from pg_stat_activity where query ilike 'listen%' and datname = "
        "current_database()",
    )
    return [row[0] for row in rows]


async def pause() -> None:
    await asyncio.sleep(0.02)


async def until_listening(persistence: Persistence, tools: Any) -> list[int]:
    async with asyncio.timeout(10):
        while not (found := await listeners(persistence, tools)):
            await pause()
    return found


async def test_readers_are_told_by_one_connection_that_is_none_of_the_pool(
    on_postgres: Persistence, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process, however many follow; it is gone when the log is closed."""
    monkeypatch.setattr("chatkeep.delivery._hub._SAFETY", NEVER)
    writing, reading = StoredLog(on_postgres), StoredLog(on_postgres, poll_seconds=NEVER)
    writer = await writing.open(KEY, "t")
    watching = [asyncio.create_task(watch(reading)) for _ in range(5)]
    assert len(await until_listening(on_postgres, tools)) == 1
    assert tools.checked_out(on_postgres) == 0
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        for i in range(3):
            await writer.append([said(str(i))])
            await asyncio.sleep(0.02)
        await writer.close()
        assert await asyncio.gather(*watching) == [["0", "1", "2"]] * 5
    await reading.aclose()
    async with asyncio.timeout(10):
        while await listeners(on_postgres, tools):
            await pause()


async def test_a_listener_that_is_cut_off_listens_again_and_misses_nothing(
    on_postgres: Persistence, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatkeep.delivery._hub._SAFETY", NEVER)
    monkeypatch.setattr("chatkeep.delivery._hub._AFTER_FAILURE", 0.05)
    writing, reading = StoredLog(on_postgres), StoredLog(on_postgres, poll_seconds=NEVER)
    writer = await writing.open(KEY, "t")
    watching = asyncio.create_task(watch(reading))
    (pid,) = await until_listening(on_postgres, tools)
    await tools.execute(on_postgres, "select pg_terminate_backend(:pid)", pid=pid)
    await writer.append([said("while nobody listened")])
    async with asyncio.timeout(10):
        while await listeners(on_postgres, tools) in ([], [pid]):
            await pause()
        await writer.append([said("and after")])
        await writer.close()
        assert await watching == ["while nobody listened", "and after"]
    await reading.aclose()


async def test_behind_a_pooler_readers_ask(opened: Any, request: pytest.FixtureRequest) -> None:
    """LISTEN would be lost there: nobody tries."""
    request.getfixturevalue("postgres_database")
    async with opened("psycopg", pooler=True) as persistence:
        assert await persistence.backends[0].log_listen(lambda _: None) is None
        writing, reading = StoredLog(persistence), StoredLog(persistence, poll_seconds=0.02)
        writer = await writing.open(KEY, "t")
        watching = asyncio.create_task(watch(reading))
        await asyncio.sleep(0.1)
        await writer.append([said("a")])
        await writer.close()
        async with asyncio.timeout(10):
            assert await watching == ["a"]
        await reading.aclose()


async def test_an_append_is_one_statement(on_postgres: Persistence, tools: Any) -> None:
    """A viewer waits for it."""
    writer = await StoredLog(on_postgres).open(KEY, "t")
    with tools.statements(on_postgres) as sent:
        await writer.append([said(str(i)) for i in range(20)])
    assert len(sent) == 1
    await writer.close()
