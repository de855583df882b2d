"""How a program is run on SQLite, over aiosqlite.

A whole program runs in one visit to the connection's thread, transaction included: one
hand-over instead of four for each statement, and nothing that a cancelled caller could leave
open. Writers of this process that come while another writes go together in the next visit: one
transaction, a savepoint each, one sync of the disk for all. Writers of other processes meet in
``BEGIN IMMEDIATE``, which waits.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from sqlalchemy import Executable
from sqlalchemy.dialects import sqlite as sqlite_dialects
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_, greenlet_spawn

from chatkeep_sql.program import Parameters, Program, Rows

__all__ = ["SqliteRunner"]

_T = TypeVar("_T")
_Make = Callable[[], Program[Any]]

_TOGETHER = 64
"""How many writers may share a transaction."""


class SqliteRunner:
    """Runs programs on one SQLite database; waits up to ``busy_timeout`` seconds for others."""

    def __init__(self, engine: AsyncEngine, *, busy_timeout: float) -> None:
        self.engine = engine
        self._busy_timeout = busy_timeout
        self._waiting: deque[tuple[_Make, asyncio.Future[Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def once(self, make: Callable[[], Program[_T]]) -> _T:
        """In one read transaction: a single moment."""
        return cast("_T", await greenlet_spawn(self._visit, partial(_read, make=make)))

    async def snapshot(self, make: Callable[[], Program[_T]]) -> _T:
        """The same: every read of SQLite sees one moment."""
        return await self.once(make)

    async def transaction(self, make: Callable[[], Program[_T]]) -> _T:
        """In an immediate transaction, perhaps together with others: their refusals are theirs."""
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append((make, done))
        if self._writing is None or self._writing.done():
            # A task of its own: a caller who gives up must not take the others along.
            self._writing = asyncio.create_task(self._write())
        return await done

    async def _write(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _TOGETHER)
            taken = [self._waiting.popleft() for _ in range(count)]
            asked = [(make, done) for make, done in taken if not done.done()]
            if not asked:
                continue
            makes = [make for make, _ in asked]
            results: list[tuple[Any, Exception | None]]
            try:
                results = await greenlet_spawn(self._visit, partial(_write, makes=makes))
            except BaseException as error:
                for _, done in asked:
                    if not done.done():
                        done.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, done), (result, refusal) in zip(asked, results, strict=True):
                if done.done():
                    continue
                if refusal is not None:
                    done.set_exception(refusal)
                else:
                    done.set_result(result)

    def _visit(self, work: Callable[[sqlite3.Connection, float], Any]) -> Any:
        pooled = self.engine.sync_engine.raw_connection()
        try:
            driver: Any = pooled.driver_connection
            # aiosqlite offers no public way to run a function in its thread; SQLAlchemy's own
            # dialect reaches into the same queue. A test fails if this way is ever closed.
            visit = driver._execute(_with_connection, driver, work, self._busy_timeout)  # noqa: SLF001
            return await_(visit)
        finally:
            pooled.close()


def _with_connection(
    driver: Any, work: Callable[[sqlite3.Connection, float], _T], patience: float
) -> _T:
    return work(driver._conn, time.monotonic() + patience)  # noqa: SLF001


def _read(database: sqlite3.Connection, deadline: float, *, make: Callable[[], Program[_T]]) -> _T:
    def all_of_it(cursor: sqlite3.Cursor) -> _T:
        return _run(cursor, make())

    return _in_transaction(database, deadline, "BEGIN", all_of_it)


def _write(
    database: sqlite3.Connection, deadline: float, *, makes: Sequence[_Make]
) -> list[tuple[Any, Exception | None]]:
    """Result or refusal of each."""
    if len(makes) == 1:
        return [(_in_transaction(database, deadline, "BEGIN IMMEDIATE", _only(makes[0])), None)]

    def each(cursor: sqlite3.Cursor) -> list[tuple[Any, Exception | None]]:
        results: list[tuple[Any, Exception | None]] = []
        for make in makes:
            cursor.execute("SAVEPOINT one")
            try:
                results.append((_run(cursor, make()), None))
            except Exception as error:
                if not database.in_transaction:
                    raise  # SQLite has rolled everything back: nobody's write was made
                cursor.execute("ROLLBACK TO one")
                results.append((None, error))
            cursor.execute("RELEASE one")
        return results

    return _in_transaction(database, deadline, "BEGIN IMMEDIATE", each)


def _only(make: _Make) -> Callable[[sqlite3.Cursor], Any]:
    return lambda cursor: _run(cursor, make())


def _in_transaction(
    database: sqlite3.Connection,
    deadline: float,
    begin: str,
    work: Callable[[sqlite3.Cursor], _T],
) -> _T:
    cursor = database.cursor()
    cursor.row_factory = None
    try:
        _wait_for(cursor, begin, deadline)
        try:
            result = work(cursor)
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
