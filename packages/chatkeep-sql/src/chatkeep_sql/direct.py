"""The two statements that every turn waits for, sent by the driver itself.

SQLAlchemy lends the connection and compiles the text, once for each shape; execution then goes
past its cursors and result rows, which take longer than PostgreSQL takes for the statement.
Only single statements in autocommit go this way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import Engine, Executable, PoolProxiedConnection
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_

from chatkeep_sql.errors import ConnectionLost
from chatkeep_sql.program import Rows

__all__ = ["run_direct"]


def run_direct(engine: Engine, statement: Executable, binds: Mapping[str, Any]) -> Rows | None:
    """Rows of one statement, within a greenlet; None (and nothing sent) if the connection is not
    in autocommit, as one of an application's psycopg engine may be.

    Raises:
        ConnectionLost: the connection is gone; the pool has been looked through.
        Exception: the driver's own errors.
    """
    send = _with_asyncpg if engine.dialect.driver == "asyncpg" else _with_psycopg
    text, names = _numbered(statement)
    values = [binds[name] for name in names]
    pooled = engine.raw_connection()
    try:
        return await_(send(cast("Any", pooled.driver_connection), text, values))
    except BaseException as error:
        if not _usable(pooled, error):
            pooled.invalidate(error)
            if isinstance(error, Exception):
                _look_through(engine)
                raise ConnectionLost(f"{type(error).__name__}: {error}") from error
        raise
    finally:
        pooled.close()


_DIALECT = DefaultDialect(paramstyle="numeric_dollar")


@lru_cache(maxsize=1024)
def _numbered(statement: Executable) -> tuple[str, tuple[str, ...]]:
    """Text with ``$1``, ``$2``, …, and the names of the binds in that order."""
    compiled = cast("Any", statement).compile(dialect=_DIALECT)
    return str(compiled), tuple(compiled.positiontup or ())


async def _with_asyncpg(driver: Any, text: str, values: Sequence[Any]) -> Rows:
    return cast("Rows", await driver.fetch(text, *values))


async def _with_psycopg(driver: Any, text: str, values: Sequence[Any]) -> Rows | None:
    if not driver.autocommit:
        return None
    # Its usual cursors would look for placeholders in the long text at every execution.
    from psycopg import AsyncRawCursor

    cursor = AsyncRawCursor[Any](driver)
    await cursor.execute(text.encode(), values)
    return await cursor.fetchall()


def _usable(pooled: PoolProxiedConnection, error: BaseException) -> bool:
    """Whether the connection may go back: the server has answered, with an error, and listens."""
    driver: Any = pooled.driver_connection
    closed = driver.is_closed() if hasattr(driver, "is_closed") else driver.closed
    return isinstance(error, Exception) and not closed and not isinstance(error, OSError)


def _look_through(engine: Engine) -> None:
    """Have SQLAlchemy try another connection: if that one is dead too, it drops all that are as
    old, so that a call that is made again meets no third one."""
    with suppress(DBAPIError, OSError), engine.connect() as connection:
        connection.exec_driver_sql("select 1")
