"""Engines, and how a program is run on them.

Two runners with the same verbs. ``once`` and ``snapshot`` read: one statement in autocommit,
several at one moment. ``transaction`` writes: all or nothing, run again where another writer
was faster. Neither leaves a connection in the middle of anything, cancelled or not.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection, Engine, Executable
from sqlalchemy.dialects import sqlite as sqlite_dialects
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_, greenlet_spawn

from chatkeep_sql.direct import run_direct
from chatkeep_sql.errors import ConnectionLost, is_disconnect, may_run_again
from chatkeep_sql.program import Parameters, Program, Rows

__all__ = ["PostgresRunner", "Runner", "SqliteRunner"]

_T = TypeVar("_T")

ATTEMPTS = 8
"""How often a transaction is run that another writer made fail."""


class Runner(Protocol):
    """Runs programs; each run starts from ``make()``."""

    engine: AsyncEngine

    async def once(self, make: Callable[[], Program[_T]]) -> _T:
        """Run a program that reads."""
        ...

    async def snapshot(self, make: Callable[[], Program[_T]]) -> _T:
        """Run a program that reads several times and must see one moment."""
        ...

    async def transaction(self, make: Callable[[], Program[_T]]) -> _T:
        """Run a program that writes, in one transaction."""
        ...


# --------------------------------------------------------------------------- PostgreSQL


class PostgresRunner:
    """Runs programs on PostgreSQL, over psycopg or asyncpg.

    Args:
        engine: of this package or of the application.
        autocommit: the engine's connections are in autocommit already.
        in_transactions: keep single statements out of autocommit: behind a pooler that gives every
            transaction another server connection, asyncpg's separate preparation of a
            statement needs a transaction around both.
    """

    def __init__(
        self, engine: AsyncEngine, *, autocommit: bool = False, in_transactions: bool = False
    ) -> None:
        self.engine = engine
        sync = engine.sync_engine
        self._multi = sync.execution_options(isolation_level="READ COMMITTED")
        self._moment = sync.execution_options(isolation_level="REPEATABLE READ")
        self._single: Engine
        if in_transactions:
            self._single = self._multi
        elif autocommit:
            self._single = sync
        else:
            self._single = sync.execution_options(isolation_level="AUTOCOMMIT")
        self._in_transactions = in_transactions

    async def once(self, make: Callable[[], Program[_T]]) -> _T:
        """In autocommit; a connection that had died meanwhile is replaced."""
        return await self._unless_lost(lambda: self._in_autocommit(make()))

    async def single(self, make: Callable[[], Program[_T]], *, again: bool) -> _T:
        """A program of one statement, in autocommit. ``again``: it only reads, so it is run again
        on a connection that lives. A commit is not: its id is sent again by who made it."""
        if again:
            return await self._unless_lost(lambda: self._directly(make()))
        return await greenlet_spawn(lambda: self._directly(make()))

    async def _unless_lost(self, work: Callable[[], _T]) -> _T:
        try:
            return await greenlet_spawn(work)
        except (DBAPIError, ConnectionLost) as error:
            if not is_disconnect(error):
                raise
        return await greenlet_spawn(work)

    def _in_autocommit(self, program: Program[_T]) -> _T:
        with self._single.connect() as connection:
            result = _drive(connection, program)
            if self._in_transactions:
                connection.commit()
            return result

    def _directly(self, program: Program[_T]) -> _T:
        if self._in_transactions:
            return self._in_autocommit(program)
        try:
            statement, binds = next(program)
            rows = run_direct(self.engine.sync_engine, statement, cast("Any", binds))
            if rows is None:
                with self._single.connect() as connection:
                    rows = list(connection.execute(statement, cast("Any", binds)).all())
            program.send(rows)
        except StopIteration as done:
            return cast("_T", done.value)
        finally:
            program.close()
        raise AssertionError("a program of one statement has one")

    async def snapshot(self, make: Callable[[], Program[_T]]) -> _T:
        """In a transaction that sees one moment throughout."""

        def work() -> _T:
            with self._moment.begin() as connection:
                return _drive(connection, make())

        return await self._unless_lost(work)

    async def transaction(self, make: Callable[[], Program[_T]]) -> _T:
        """In a transaction. It is run again if it failed because of another writer, or lost its
        connection before it asked for the commit: nothing was written then."""
        attempt = 0
        committing = False

        def work() -> _T:
            nonlocal committing
            committing = False
            with self._multi.connect() as connection, connection.begin() as scope:
                result = _drive(connection, make())
                committing = True
                scope.commit()
                return result

        while True:
            attempt += 1
            try:
                return await greenlet_spawn(work)
            except DBAPIError as error:
                again = may_run_again(error) or (
                    is_disconnect(error) and not committing and attempt == 1
                )
                if not again or attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(0.002 * 2**attempt * random.random())


def _drive(connection: Connection, program: Program[_T]) -> _T:
    try:
        statement, parameters = next(program)
        while True:
            result = connection.execute(statement, cast("Any", parameters))
            rows: Rows = list(result.all()) if result.returns_rows else []
            statement, parameters = program.send(rows)
    except StopIteration as done:
        return cast("_T", done.value)
    finally:
        program.close()


# ------------------------------------------------------------------------------- SQLite


class SqliteRunner:
    """Runs programs on SQLite, over aiosqlite.

    A whole program runs in one visit to the connection's thread, transaction included: one
    hand-over instead of four for each statement, and nothing that a cancelled caller could
    leave open. Writers of this process queue for a lock; those of other processes meet in
    ``BEGIN IMMEDIATE``, which waits up to ``busy_timeout`` seconds.
    """

    def __init__(self, engine: AsyncEngine, *, busy_timeout: float) -> None:
        self.engine = engine
        self._busy_timeout = busy_timeout
        self._writer = asyncio.Lock()

    async def once(self, make: Callable[[], Program[_T]]) -> _T:
        """In one read transaction: a single moment."""
        return await greenlet_spawn(self._visit, "BEGIN", make)

    async def snapshot(self, make: Callable[[], Program[_T]]) -> _T:
        """The same: every read of SQLite sees one moment."""
        return await self.once(make)

    async def transaction(self, make: Callable[[], Program[_T]]) -> _T:
        """In one immediate transaction."""
        async with self._writer:
            return await greenlet_spawn(self._visit, "BEGIN IMMEDIATE", make)

    def _visit(self, begin: str, make: Callable[[], Program[_T]]) -> _T:
        pooled = self.engine.sync_engine.raw_connection()
        try:
            driver: Any = pooled.driver_connection
            work = partial(_visit, begin=begin, make=make, patience=self._busy_timeout)
            # aiosqlite offers no public way to run a function in its thread; SQLAlchemy's own
            # dialect reaches into the same queue. A test fails if this way is ever closed.
            return cast("_T", await_(driver._execute(_with_connection, driver, work)))  # noqa: SLF001
        finally:
            pooled.close()


def _with_connection(driver: Any, work: Callable[[sqlite3.Connection], _T]) -> _T:
    return work(driver._conn)  # noqa: SLF001


def _visit(
    database: sqlite3.Connection, *, begin: str, make: Callable[[], Program[_T]], patience: float
) -> _T:
    deadline = time.monotonic() + patience
    cursor = database.cursor()
    cursor.row_factory = None
    try:
        _wait_for(cursor, begin, deadline)
        try:
            result = _run(cursor, make())
            _wait_for(cursor, "COMMIT", deadline)
        except BaseException:
            if database.in_transaction:
                database.rollback()
            raise
        return result
    finally:
        cursor.close()


def _wait_for(cursor: sqlite3.Cursor, statement: str, deadline: float) -> None:
    """Run ``statement``; while another connection is in the way, try again. SQLite's own busy
    timeout may be short on an engine that was passed in, and gives up where it sees a deadlock."""
    while True:
        try:
            cursor.execute(statement)
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.001 + 0.004 * random.random())
        else:
            return


def _run(cursor: sqlite3.Cursor, program: Program[_T]) -> _T:
    try:
        statement, parameters = next(program)
        while True:
            statement, parameters = program.send(_execute(cursor, statement, parameters))
    except StopIteration as done:
        return cast("_T", done.value)
    finally:
        program.close()


def _execute(cursor: sqlite3.Cursor, statement: Executable, parameters: Parameters) -> Rows:
    if isinstance(parameters, Mapping):
        text, defaults = _compiled(statement, tuple(parameters))
        cursor.execute(text, {**defaults, **parameters})
        return cursor.fetchall() if cursor.description is not None else []
    text, defaults = _compiled(statement, tuple(parameters[0]))
    cursor.executemany(text, [{**defaults, **row} for row in parameters])
    return []


_DIALECT = sqlite_dialects.dialect(paramstyle="named")


@lru_cache(maxsize=512)
def _compiled(statement: Executable, names: tuple[str, ...]) -> tuple[str, Mapping[str, Any]]:
    """SQL text and the values of binds that the statement brings itself."""
    compiled = cast("Any", statement).compile(dialect=_DIALECT, column_keys=list(names))
    own = {name: value for name, value in compiled.params.items() if name not in names}
    return str(compiled), own
