"""Hearing of changed logs: LISTEN on a connection of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from chatkeep_sql.errors import ConnectionLost
from chatkeep_sql.logs import CHANNEL

__all__ = ["listen"]

_log = logging.getLogger("chatkeep.sql")

_CLOSING = 5.0
"""Seconds that a server has to say goodbye."""

Heard = Callable[[bytes | None], None]


async def listen(engine: AsyncEngine, heard: Heard) -> None:
    """Hand what is notified to ``heard`` until cancelled; the engine lends its way to connect,
    and nothing of its pool.

    Raises:
        ConnectionLost: the connection has ended.
    """
    pooled: Any = await greenlet_spawn(engine.sync_engine.raw_connection)
    driver = pooled.driver_connection
    pooled.detach()
    asyncpg = engine.dialect.driver == "asyncpg"
    try:
        hear = _with_asyncpg if asyncpg else _with_psycopg
        await hear(driver, heard)
        raise ConnectionLost("the connection that listens has ended")
    finally:
        await asyncio.shield(asyncio.ensure_future(_close(driver, asyncpg=asyncpg)))


async def _with_asyncpg(driver: Any, heard: Heard) -> None:
    ended = asyncio.get_running_loop().create_future()

    def end(_driver: object) -> None:
        if not ended.done():
            ended.set_result(None)

    def notified(_driver: object, _pid: int, _channel: str, payload: str) -> None:
        _tell(heard, payload)

    driver.add_termination_listener(end)
    await driver.add_listener(CHANNEL, notified)
    heard(None)
    await ended


async def _with_psycopg(driver: Any, heard: Heard) -> None:
    await driver.set_autocommit(True)
    await driver.execute(f"LISTEN {CHANNEL}")
    heard(None)
    async for notice in driver.notifies():
        _tell(heard, notice.payload)


def _tell(heard: Heard, payload: str) -> None:
    try:
        key = bytes.fromhex(payload)
    except ValueError:
        _log.warning("a notification on %s is none of ours: %.80r", CHANNEL, payload)
        return
    heard(key)


async def _close(driver: Any, *, asyncpg: bool) -> None:
    """Psycopg waits for nobody; asyncpg for the server, which may be gone without a word."""
    if not asyncpg:
        await driver.close()
        return
    try:
        await driver.close(timeout=_CLOSING)
    except TimeoutError:
        _log.warning("the connection that listened was not closed in time, so it was cut off")
