"""The columns of the matrix, for tests that want a fresh and empty persistence each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from chatkeep import Persistence, memory_persistence
from chatkeep_dynamodb import open_url as open_dynamodb
from chatkeep_redis import redis_persistence
from chatkeep_sql import postgres_persistence, sqlite_persistence
from conformance.bags import checked_out
from conformance.mongo_clients import opened
from servers import Postgres
from servers.dynamodb import DynamoTable
from servers.mongo import MongoDatabase
from servers.postgres import PostgresDriver
from servers.redis import RedisSpace

COLUMNS = [
    pytest.param("memory", marks=pytest.mark.memory),
    pytest.param("sqlite", marks=pytest.mark.sqlite),
    pytest.param("psycopg", marks=pytest.mark.postgres),
    pytest.param("asyncpg", marks=pytest.mark.postgres),
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("redis cluster", marks=pytest.mark.redis),
    pytest.param("dynamodb", marks=pytest.mark.dynamodb),
    pytest.param("mongo", marks=pytest.mark.mongo),
    pytest.param("motor", marks=pytest.mark.mongo),
]


@pytest.fixture(params=COLUMNS)
async def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Persistence]:
    """An empty persistence of each column; no connection may be in use afterwards."""
    async with _make(request, tmp_path)() as persistence:
        yield persistence
        assert [checked_out(b) for b in persistence.backends] == [0]


def _make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[], AbstractAsyncContextManager[Persistence]]:
    kind: Any = request.param
    if kind == "memory":
        return memory_persistence
    if kind == "sqlite":
        return lambda: sqlite_persistence(tmp_path / "chatkeep.db")
    if kind in ("redis", "redis cluster"):
        fixture = "redis_space" if kind == "redis" else "redis_cluster_space"
        space: RedisSpace = request.getfixturevalue(fixture)
        return lambda: redis_persistence(space.url())
    if kind == "dynamodb":
        table: DynamoTable = request.getfixturevalue("dynamodb_table")
        return lambda: open_dynamodb(table.url())
    if kind in ("mongo", "motor"):
        place: MongoDatabase = request.getfixturevalue("mongo_database")
        return lambda: opened(kind, place)
    server: Postgres = request.getfixturevalue("postgres")
    database = server.create_database()
    request.addfinalizer(lambda: server.drop_database(database))
    driver: PostgresDriver = kind
    return lambda: postgres_persistence(database.url(driver))
