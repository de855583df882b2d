"""How a persistence is made: from a URL, a path, or an engine of your own."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from sqlalchemy import event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from chatkeep.backends import Persistence
from chatkeep.errors import CompositionError, MissingExtra
from chatkeep_sql.backend import PostgresBackend, SqliteBackend
from chatkeep_sql.engine import PostgresRunner
from chatkeep_sql.sqlite_runner import SqliteRunner

__all__ = ["open_url", "postgres_persistence", "sqlite_persistence"]

_SYNCHRONOUS = ("FULL", "NORMAL", "EXTRA")


def postgres_persistence(
    url_or_engine: str | URL | AsyncEngine,
    *,
    schema: str | None = None,
    create: bool = True,
    timeout: float | None = 30.0,
    pooler: bool = False,
    pool_size: int = 10,
    max_overflow: int = 10,
) -> Persistence:
    """A persistence in PostgreSQL.

    Args:
        url_or_engine: ``postgresql://…`` (psycopg if it is installed, else asyncpg),
            ``postgresql+psycopg://…``, ``postgresql+asyncpg://…``, or an ``AsyncEngine``, which is
            neither closed nor reconfigured.
        schema: where the tables are; None: where unqualified names lead.
        create: create the tables on first use if there are none. Needs no right where they are.
        timeout: seconds for one store call, waiting for a connection included.
        pooler: the server is behind a pooler in transaction mode (PgBouncer): nothing is prepared
            under a name, and nothing is left on a connection between transactions.
        pool_size: connections that an engine made from a URL keeps.
        max_overflow: how many more it opens while all are in use.

    Raises:
        MissingExtra: the driver is not installed.
        CompositionError: no URL of PostgreSQL, or no asynchronous engine.
    """
    if isinstance(url_or_engine, AsyncEngine):
        engine, owned = url_or_engine, False
        if engine.dialect.name != "postgresql":
            raise CompositionError(f"an engine of {engine.dialect.name} is not PostgreSQL")
    else:
        url, owned = _postgres_url(url_or_engine), True
        options: dict[str, Any] = {"pool_size": pool_size, "max_overflow": max_overflow}
        level = "AUTOCOMMIT"
        if url.get_driver_name() == "psycopg":
            # A turn's statements are few and always the same: prepare each when it returns.
            options["connect_args"] = {"prepare_threshold": 1}
        if pooler:
            options["connect_args"] = _pooler_arguments(url.get_driver_name())
        if pooler and url.get_driver_name() == "asyncpg":
            url = url.update_query_dict({"prepared_statement_cache_size": "0"})
            level = "READ COMMITTED"
        engine = create_async_engine(url, isolation_level=level, **options)
    in_transactions = pooler and engine.dialect.driver == "asyncpg"
    runner = PostgresRunner(
        engine,
        autocommit=owned and not in_transactions,
        in_transactions=in_transactions,
        listens=not pooler,
    )
    return PostgresBackend(
        runner, schema=schema, create=create, owned=owned, timeout=timeout
    ).persistence()


def _postgres_url(given: str | URL) -> URL:
    url = _parsed(given)
    base, _, driver = url.drivername.partition("+")
    if base not in {"postgresql", "postgres"}:
        raise CompositionError(f"not a PostgreSQL URL: {url.drivername}://…")
    if driver not in {"", "psycopg", "asyncpg"}:
        raise CompositionError(f"{url.drivername}: use postgresql+psycopg or postgresql+asyncpg")
    if not driver:
        driver = "psycopg" if _installed("psycopg") or not _installed("asyncpg") else "asyncpg"
    if not _installed(driver):
        extra = "postgres" if driver == "psycopg" else "asyncpg"
        raise MissingExtra(f"a postgresql+{driver}:// persistence", extra)
    return url.set(drivername=f"postgresql+{driver}")


def _pooler_arguments(driver: str) -> dict[str, Any]:
    if driver == "psycopg":
        return {"prepare_threshold": None}
    # The unnamed statement lives as long as the transaction around it, and leaves nothing.
    return {"statement_cache_size": 0, "prepared_statement_name_func": str}


def sqlite_persistence(
    path_or_engine: str | os.PathLike[str] | URL | AsyncEngine,
    *,
    create: bool = True,
    timeout: float | None = 30.0,
    synchronous: str = "FULL",
    pool_size: int = 5,
) -> Persistence:
    """A persistence in a SQLite file, or in memory (``":memory:"``).

    The file is set to write-ahead logging: readers and the writer do not wait for each other,
    and several processes may use it at once (on one machine: not over a network file system).

    Args:
        path_or_engine: a path, ``":memory:"``, a ``sqlite://`` URL, or an ``AsyncEngine``, which
            is neither closed nor reconfigured.
        create: create file and tables on first use.
        timeout: seconds for one store call, waiting for other writers included.
        synchronous: ``FULL``: a turn that was acknowledged survives a power cut, as on the other
            databases. ``NORMAL`` saves the sync of each commit (about ten times faster on some
            disks): nothing is lost when the process is killed, but a power cut may take the
            last turns.
        pool_size: connections of the engine that is made from a path.

    Raises:
        MissingExtra: aiosqlite is not installed.
        CompositionError: no URL of SQLite, or no asynchronous engine.
    """
    if synchronous not in _SYNCHRONOUS:
        raise CompositionError(f"synchronous must be one of {', '.join(_SYNCHRONOUS)}")
    patience = 30.0 if timeout is None else timeout
    if isinstance(path_or_engine, AsyncEngine):
        engine, owned = path_or_engine, False
        if engine.dialect.name != "sqlite":
            raise CompositionError(f"an engine of {engine.dialect.name} is not SQLite")
    else:
        engine, owned = _sqlite_engine(_sqlite_url(path_or_engine), synchronous, pool_size), True
    runner = SqliteRunner(engine, busy_timeout=patience)
    return SqliteBackend(runner, create=create, owned=owned, timeout=timeout).persistence()


def _sqlite_url(given: str | os.PathLike[str] | URL) -> URL:
    if not _installed("aiosqlite"):
        raise MissingExtra("a SQLite persistence", "sqlite")
    if isinstance(given, URL) or (isinstance(given, str) and "://" in given):
        url = _parsed(given)
        if url.drivername not in {"sqlite", "sqlite+aiosqlite"}:
            raise CompositionError(f"not a SQLite URL: {url.drivername}://…")
        if url.host:
            raise CompositionError(
                "a SQLite URL has three slashes before a relative path (sqlite:///chat.db), four "
                "before an absolute one"
            )
        return url.set(drivername="sqlite+aiosqlite")
    return URL.create("sqlite+aiosqlite", database=os.fspath(given))


def _sqlite_engine(url: URL, synchronous: str, pool_size: int) -> AsyncEngine:
    in_memory = url.database in {None, "", ":memory:"}
    # A visit leaves no transaction open, so a connection goes back as it is: the pool's own
    # rollback would cost one more trip to the thread.
    options: dict[str, Any] = {"pool_reset_on_return": None}
    if not in_memory:
        options |= {"pool_size": pool_size, "max_overflow": 0}
    engine = create_async_engine(url, **options)

    def configure(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA busy_timeout = 5000")
        if not in_memory:
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA synchronous = {synchronous}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    event.listen(engine.sync_engine, "connect", configure)
    return engine


def open_url(url: str, **options: Any) -> Persistence:
    """The factory behind ``open_persistence("sqlite://…")`` and ``("postgresql://…")``."""
    scheme = _parsed(url).drivername.partition("+")[0]
    if scheme == "sqlite":
        return sqlite_persistence(url, **options)
    return postgres_persistence(url, **options)


def _parsed(given: str | URL) -> URL:
    try:
        return make_url(given)
    except ArgumentError as error:
        raise CompositionError(f"not a database URL: {error}") from error


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
