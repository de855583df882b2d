"""Delivery logs on PostgreSQL: who listens, and what happens when nobody can."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ag_ui.core import TextMessageContentEvent
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from chatkeep import Persistence
from chatkeep.delivery import RunKey, StoredLog
from chatkeep_sql.listen import listen
from chatkeep_sql.logs import CHANNEL
from servers import Database

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
    async with asyncio.timeout(10):
        while tools.checked_out(on_postgres):  # their first reads
            await pause()
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


async def test_a_notification_of_somebody_else_ends_no_listener(
    on_postgres: Persistence,
    tools: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged, and what comes behind it is heard on the same connection."""
    monkeypatch.setattr("chatkeep.delivery._hub._SAFETY", NEVER)
    monkeypatch.setattr("chatkeep.delivery._hub._AFTER_FAILURE", NEVER)
    writing, reading = StoredLog(on_postgres), StoredLog(on_postgres, poll_seconds=NEVER)
    writer = await writing.open(KEY, "t")
    watching = asyncio.create_task(watch(reading))
    before = await until_listening(on_postgres, tools)
    await tools.execute(on_postgres, "select pg_notify(:name, 'no key')", name=CHANNEL)
    async with asyncio.timeout(10):
        while "none of ours: 'no key'" not in caplog.text:
            await pause()
        await writer.append([said("a")])
        await writer.close()
        assert await watching == ["a"]
    assert await listeners(on_postgres, tools) == before
    await reading.aclose()


async def test_a_server_that_answers_no_goodbye_is_cut_off(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever closes the log waits for it."""
    monkeypatch.setattr("chatkeep_sql.listen._CLOSING", 0.05)
    told = asyncio.Event()
    with postgres_database.server.proxy() as proxy:
        url = make_url(postgres_database.url("asyncpg", proxy=proxy))
        engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
        listening = asyncio.create_task(listen(engine, lambda _: told.set()))
        async with asyncio.timeout(10):
            await told.wait()
            proxy.stall()
            listening.cancel()
            await asyncio.wait([listening])
        assert "was cut off" in caplog.text
        await engine.dispose()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("psycopg", marks=pytest.mark.postgres),
    ],
)
async def test_five_hundred_viewers_of_fifty_runs_miss_and_repeat_nothing(
    opened: Any, kind: str
) -> None:
    """They join at different moments, at a worker that drives none of the runs; a part of them
    leaves in the middle and comes back behind what it has seen."""
    async with opened(kind) as persistence:
        writing, reading = StoredLog(persistence), StoredLog(persistence, poll_seconds=0.05)
        keys = [RunKey(run_id=f"r{i}") for i in range(50)]
        writers = [await writing.open(key, "t") for key in keys]

        async def drive(i: int) -> None:
            for n in range(0, 40, 4):
                await writers[i].append([said(f"{i}.{n + k}") for k in range(4)])
                await asyncio.sleep(0.01)
            await writers[i].close()

        async def view(i: int, viewer: int) -> list[tuple[str, str]]:
            await asyncio.sleep(0.01 * viewer)
            seen: list[tuple[str, str]] = []
            leaves = viewer % 3 == 0
            while True:
                batches: Any = await reading.follow(keys[i], seen[-1][0] if seen else "-1")
                async for batch in batches:
                    seen += [(e.offset, json.loads(e.body)["delta"]) for e in batch]
                    if leaves and len(seen) >= 10:
                        break
                else:
                    return seen
                await batches.aclose()
                leaves = False

        viewers = [asyncio.create_task(view(i, v)) for i in range(50) for v in range(10)]
        async with asyncio.timeout(60):
            await asyncio.gather(*map(drive, range(50)))
            results = await asyncio.gather(*viewers)
        for place, seen in enumerate(results):
            assert [delta for _, delta in seen] == [f"{place // 10}.{n}" for n in range(40)]
            assert len({offset for offset, _ in seen}) == 40
        await reading.aclose()
