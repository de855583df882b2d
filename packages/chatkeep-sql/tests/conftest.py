"""Fixtures: a persistence on each database, and proof that no connection was left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from chatkeep.backends import Persistence
from chatkeep_sql import postgres_persistence, sqlite_persistence
from chatkeep_sql.backend import SqlBackend

BACKENDS = ["sqlite", "memory", "psycopg", "asyncpg"]
POSTGRES = ["psycopg", "asyncpg"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def backend_of(persistence: Persistence) -> SqlBackend:
    return cast("SqlBackend", persistence.backends[0])


def checked_out(persistence: Persistence) -> int:
    """Connections that are in use."""
    pool: Any = backend_of(persistence)._runner.engine.pool
    return pool.checkedout() if hasattr(pool, "checkedout") else 0


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Opens a persistence on a named database: ``opened("psycopg", timeout=1)``."""

    def open_(kind: str, **options: Any) -> Persistence:
        if kind == "sqlite":
            return sqlite_persistence(tmp_path / "chatkeep.db", **options)
        if kind == "memory":
            return sqlite_persistence(":memory:", **options)
        database = request.getfixturevalue("postgres_database")
        return postgres_persistence(database.url(kind), **options)

    return open_


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("memory", marks=pytest.mark.sqlite),
        pytest.param("psycopg", marks=pytest.mark.postgres),
        pytest.param("asyncpg", marks=pytest.mark.postgres),
    ]
)
async def persistence(request: pytest.FixtureRequest, opened: Any) -> AsyncIterator[Persistence]:
    """An empty persistence; no connection may be in use when the test is over."""
    async with opened(request.param) as persistence:
        yield persistence
        assert checked_out(persistence) == 0


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.postgres) for kind in POSTGRES])
async def on_postgres(request: pytest.FixtureRequest, opened: Any) -> AsyncIterator[Persistence]:
    """The same, on PostgreSQL only."""
    async with opened(request.param) as persistence:
        yield persistence
        assert checked_out(persistence) == 0
