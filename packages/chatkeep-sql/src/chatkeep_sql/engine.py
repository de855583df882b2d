"""How a program is run, and run on PostgreSQL (on SQLite: :mod:`chatkeep_sql.sqlite_runner`).

Two runners with the same verbs. ``once`` and ``snapshot`` read: one statement in autocommit,
several at one moment. ``transaction`` writes: all or nothing, run again where another writer
was faster. Neither leaves a connection in the middle of anything, cancelled or not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from chatkeep_sql.direct import run_direct
from chatkeep_sql.errors import ConnectionLost, is_disconnect, may_run_again
from chatkeep_sql.program import Program, Rows

__all__ = ["PostgresRunner", "Runner"]

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
        listens: LISTEN hears what is notified; not so behind such a pooler.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        autocommit: bool = False,
        in_transactions: bool = False,
        listens: bool = True,
    ) -> None:
        self.engine = engine
        self.listens = listens
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
