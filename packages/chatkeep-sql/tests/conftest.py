"""Fixtures: a persistence on each database, and proof that no connection was left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import event, text

from chatkeep import Persistence
from chatkeep.rules import new_commit_id
from chatkeep.stores import Splice, TurnCommit
from chatkeep_sql import postgres_persistence, sqlite_persistence
from chatkeep_sql.backend import SqlBackend
from chatkeep_sql.direct import run_direct
from servers import Database

Open = Callable[..., Persistence]

SQLITE = [pytest.param(kind, marks=pytest.mark.sqlite) for kind in ("sqlite", "memory")]
POSTGRES = [pytest.param(kind, marks=pytest.mark.postgres) for kind in ("psycopg", "asyncpg")]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class Tools:
    """What tests do to a persistence behind its back."""

    @staticmethod
    def backend(persistence: Persistence) -> SqlBackend:
        return cast("SqlBackend", persistence.backends[0])

    def checked_out(self, persistence: Persistence) -> int:
        """Connections that are in use."""
        pool: Any = self.backend(persistence)._runner.engine.pool
        return pool.checkedout() if hasattr(pool, "checkedout") else 0

    async def execute(self, persistence: Persistence, statement: str, **binds: Any) -> list[Any]:
        """One statement on the same database, in its own transaction."""
        async with self.backend(persistence)._runner.engine.connect() as connection:
            result = await connection.execute(text(statement), binds)
            rows = [tuple(row) for row in result.all()] if result.returns_rows else []
            await connection.commit()
            return rows

    @contextmanager
    def statements(self, persistence: Persistence) -> Iterator[list[str]]:
        """The statements that are sent meanwhile, by SQLAlchemy or past its cursors."""
        engine = self.backend(persistence)._runner.engine.sync_engine
        sent: list[str] = []

        def note(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            sent.append(statement)

        def note_direct(engine: Any, statement: Any, binds: Any) -> Any:
            sent.append(str(statement))
            return run_direct(engine, statement, binds)

        event.listen(engine, "before_cursor_execute", note)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("chatkeep_sql.engine.run_direct", note_direct)
            try:
                yield sent
            finally:
                event.remove(engine, "before_cursor_execute", note)

    @staticmethod
    def said(thread_id: str, message_id: str, *, expected: str | None = None, keep: int = 0) -> Any:
        """A commit of one user message."""
        tail: Any = [{"id": message_id, "role": "user", "content": message_id}]
        return TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread_id,
            splice=Splice(keep_through=keep, tail=tail, expected=expected),
        )


@pytest.fixture(scope="session")
def processes() -> Callable[[str, list[dict[str, Any]]], None]:
    """Runs a program in several processes at once: ``processes(source, [globals, …])``. They
    find ``gate``, an event that is set once all have been started. They are forked from one that
    has imported everything: twenty imports take longer than what they are to do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "chatkeep", "chatkeep_sql", "aiosqlite", "psycopg"])

    def run(source: str, each: list[dict[str, Any]]) -> None:
        gate = context.Event()
        started = [
            context.Process(target=exec, args=(source, {**given, "gate": gate})) for given in each
        ]
        for process in started:
            process.start()
        gate.set()
        for process in started:
            process.join(100)
        assert [process.exitcode for process in started] == [0] * len(started)

    return run


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a persistence on a named database: ``opened("psycopg", timeout=1)``."""

    def open_(kind: str, **options: Any) -> Persistence:
        if kind == "sqlite":
            return sqlite_persistence(tmp_path / "chatkeep.db", **options)
        if kind == "memory":
            return sqlite_persistence(":memory:", **options)
        database: Database = request.getfixturevalue("postgres_database")
        return postgres_persistence(database.url(cast("Any", kind)), **options)

    return open_


@pytest.fixture(params=[*SQLITE, *POSTGRES])
async def persistence(
    request: pytest.FixtureRequest, opened: Open, tools: Tools
) -> AsyncIterator[Persistence]:
    """An empty persistence; no connection may be in use when the test is over."""
    async with opened(request.param) as persistence:
        yield persistence
        assert tools.checked_out(persistence) == 0


@pytest.fixture(params=POSTGRES)
async def on_postgres(
    request: pytest.FixtureRequest, opened: Open, tools: Tools
) -> AsyncIterator[Persistence]:
    """The same, on PostgreSQL only."""
    async with opened(request.param) as persistence:
        yield persistence
        assert tools.checked_out(persistence) == 0
