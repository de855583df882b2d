"""The databases, each with our backends on it and with the bare drivers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from bench.contenders import Chatkeep, Contender, Floor
from bench.measure import written_by_process
from bench.references import RefAiosqlite, RefAsyncpg, RefBoto3, RefCore, RefMongo, RefRedis
from bench.units import Units, units_by_size
from chatkeep.backends import open_persistence
from chatkeep_dynamodb import dynamodb_persistence
from chatkeep_mongo import mongo_persistence
from chatkeep_redis import redis_persistence
from chatkeep_sql import postgres_persistence, sqlite_persistence
from servers import Database, PostgresDriver, PostgresProcess, TcpProxy
from servers.dynamodb import DynamoDB, GivenDynamoDB, MotoProcess
from servers.mongo import MongoProcess
from servers.redis import RedisClusterProcesses, RedisProcess

__all__ = ["FIELDS", "Field"]

_POOL = 32
"""Connections of every pool, ours and the references'."""

_EVERYSEC = {"appendfsync": "everysec"}


@dataclass(kw_only=True)
class Field:
    """One database. Each of ours stands beside the floor it is compared with."""

    title: str
    settings: dict[str, str]
    ours: list[tuple[Chatkeep, Floor | None]]
    others: list[Floor] = field(default_factory=list[Floor])
    written: Callable[[], Awaitable[int]] | None = None
    written_is: str = ""
    behind: Callable[[str], AbstractAsyncContextManager[tuple[Chatkeep, TcpProxy]]] | None = None
    """Opens the contender of that name behind a proxy that counts."""

    @property
    def contenders(self) -> list[Contender]:
        """Everybody, each once."""
        floors = [floor for _, floor in self.ours if floor is not None]
        return [*(ours for ours, _ in self.ours), *floors, *self.others]


@asynccontextmanager
async def memory() -> AsyncGenerator[Field]:
    """The reference backend, in this process."""
    async with open_persistence("memory://") as persistence:
        yield Field(
            title="memory",
            settings={},
            ours=[(Chatkeep("chatkeep memory", persistence.backends[0]), None)],
        )


@asynccontextmanager
async def sqlite() -> AsyncGenerator[Field]:
    """Files in the temporary directory, once as durable as our default and once as fast as
    many peers' default."""
    ours: list[tuple[Chatkeep, Floor | None]] = []
    with tempfile.TemporaryDirectory(prefix="chatkeep-bench-") as folder:
        async with AsyncExitStack() as stack:
            for synchronous in ("FULL", "NORMAL"):
                path = Path(folder) / synchronous
                reference = RefAiosqlite(path.with_suffix(".reference"), synchronous)
                await reference.open()
                stack.push_async_callback(reference.close)
                persistence = await stack.enter_async_context(
                    sqlite_persistence(path, synchronous=synchronous)
                )
                await persistence.migrate()
                name = f"chatkeep sqlite {synchronous}"
                ours.append((Chatkeep(name, persistence.backends[0]), Floor(reference)))
            yield Field(
                title="SQLite",
                settings={**await _pragmas(path), "default synchronous": "FULL"},
                ours=ours,
                written=written_by_process,
                written_is="bytes written to files by this process",
            )


async def _pragmas(path: Path) -> dict[str, str]:
    import aiosqlite

    async with aiosqlite.connect(path) as connection:
        rows = await connection.execute_fetchall("pragma journal_mode")
        version = await connection.execute_fetchall("select sqlite_version()")
    return {"sqlite": str(next(iter(version))[0]), "journal_mode": str(next(iter(rows))[0])}


@asynccontextmanager
async def postgres() -> AsyncGenerator[Field]:
    """A server of our own with PostgreSQL's default durability."""
    with (
        PostgresProcess(durable=True) as server,
        server.database() as database,
        psycopg.connect(database.url(""), autocommit=True) as admin,
    ):

        async def written() -> int:
            row = admin.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
            return int(row[0]) if row else 0

        settings = {
            name: str((admin.execute(f"show {name}".encode()).fetchone() or ("",))[0])
            for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes")
        }
        references = [RefCore(database.url(d), _POOL) for d in ("psycopg", "asyncpg")]
        bare = RefAsyncpg(database.url(""), _POOL)
        for reference in (*references, bare):
            await reference.open()
        persistences = [
            postgres_persistence(database.url(d), pool_size=_POOL, max_overflow=0)
            for d in ("psycopg", "asyncpg")
        ]
        await persistences[0].migrate()
        yield Field(
            title="PostgreSQL",
            settings={**settings, "pool": str(_POOL)},
            ours=[
                (Chatkeep(f"chatkeep {name}", p.backends[0]), Floor(reference))
                for name, p, reference in zip(
                    ("psycopg", "asyncpg"), persistences, references, strict=True
                )
            ],
            others=[Floor(bare)],
            written=written,
            written_is="bytes of WAL",
            behind=lambda name: _behind_proxy(name, database),
        )
        for persistence in persistences:
            await persistence.aclose()
        for reference in (*references, bare):
            await reference.close()


@asynccontextmanager
async def _behind_proxy(name: str, database: Database) -> AsyncGenerator[tuple[Chatkeep, TcpProxy]]:
    driver: PostgresDriver = "asyncpg" if name.endswith("asyncpg") else "psycopg"
    with database.server.proxy() as proxy:
        async with postgres_persistence(database.url(driver, proxy=proxy)) as persistence:
            yield Chatkeep(f"{name} counted", persistence.backends[0]), proxy


@asynccontextmanager
async def redis() -> AsyncGenerator[Field]:
    """A server of our own that logs every write and syncs once a second."""
    with RedisProcess(settings=_EVERYSEC) as server, server.client() as admin:

        async def written() -> int:
            return int(admin.info("persistence")["aof_current_size"])

        facts = admin.info("server")
        reference = RefRedis(server.url(), _POOL)
        async with redis_persistence(server.url(), max_connections=_POOL) as persistence:
            yield Field(
                title="Redis",
                settings={
                    "version": facts.get("valkey_version") or facts["redis_version"],
                    **_EVERYSEC,
                    "pool": str(_POOL),
                },
                ours=[(Chatkeep("chatkeep redis", persistence.backends[0]), Floor(reference))],
                written=written,
                written_is="bytes of the append-only file",
                behind=lambda name: _redis_behind_proxy(name, server),
            )
        await reference.close()


@asynccontextmanager
async def redis_cluster() -> AsyncGenerator[Field]:
    """Three servers of the same kind that share the slots."""
    cluster = RedisClusterProcesses(settings=_EVERYSEC)
    try:
        cluster.start()
        async with redis_persistence(cluster.url(), max_connections=_POOL) as persistence:
            yield Field(
                title="Redis Cluster",
                settings={"nodes": "3", **_EVERYSEC, "pool": str(_POOL)},
                ours=[(Chatkeep("chatkeep redis cluster", persistence.backends[0]), None)],
            )
    finally:
        cluster.close()


@asynccontextmanager
async def _redis_behind_proxy(
    name: str, server: RedisProcess
) -> AsyncGenerator[tuple[Chatkeep, TcpProxy]]:
    with server.proxy() as proxy:
        async with redis_persistence(server.url(proxy=proxy), prefix="counted") as persistence:
            yield Chatkeep(f"{name} counted", persistence.backends[0]), proxy


@asynccontextmanager
async def dynamodb() -> AsyncGenerator[Field]:
    """The service of ``CHATKEEP_TEST_DYNAMODB_URL``, else the stand-in server of the tests: what
    counts then is the comparison with the bare driver, the requests and the units."""
    async with AsyncExitStack() as stack:
        server: DynamoDB
        if given := os.environ.get("CHATKEEP_TEST_DYNAMODB_URL"):
            server = GivenDynamoDB(given)
        else:
            os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
            os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
            server = stack.enter_context(MotoProcess())
        table = stack.enter_context(server.table())
        client = server.client(max_pool_connections=_POOL)
        stack.callback(client.close)
        reference = RefBoto3(client, f"{table.name}_ref")
        await reference.open()
        stack.push_async_callback(reference.close)
        own = dynamodb_persistence(table.name, client=client, threads=_POOL)
        persistence = await stack.enter_async_context(own)
        await persistence.migrate()
        meter = Units()
        metered = server.client()
        stack.callback(metered.close)
        meter.attach(metered)
        counted = dynamodb_persistence(table.name, client=metered, create=False)
        units = await units_by_size(counted.backends[0], meter)
        yield Field(
            title="DynamoDB" if given else "DynamoDB (stand-in server)",
            settings={"threads": str(_POOL), **units},
            ours=[(Chatkeep("chatkeep dynamodb", persistence.backends[0]), Floor(reference))],
        )


@asynccontextmanager
async def mongo() -> AsyncGenerator[Field]:
    """The stand-in server of the tests, which syncs each commit. It is no mongod, and slower: what
    counts here is the comparison with the bare driver on it, and the commands."""
    with MongoProcess() as server:
        reference = RefMongo(server.url(), "reference", _POOL)
        await reference.open()
        # Of a client made from a URL the pool is set in the URL.
        url = f"{server.url('bench')}&maxPoolSize={_POOL}"
        async with mongo_persistence(url) as persistence:
            await persistence.migrate()
            yield Field(
                title="MongoDB (stand-in server)",
                settings={"write concern": "majority, j", "pool": str(_POOL)},
                ours=[(Chatkeep("chatkeep mongo", persistence.backends[0]), Floor(reference))],
                behind=lambda name: _mongo_behind_proxy(name, server),
            )
        await reference.close()


@asynccontextmanager
async def _mongo_behind_proxy(
    name: str, server: MongoProcess
) -> AsyncGenerator[tuple[Chatkeep, TcpProxy]]:
    with server.proxy() as proxy:
        async with mongo_persistence(server.url("counted", proxy=proxy)) as persistence:
            await persistence.migrate()
            yield Chatkeep(f"{name} counted", persistence.backends[0]), proxy


FIELDS = {
    "memory": memory,
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": redis,
    "redis-cluster": redis_cluster,
    "dynamodb": dynamodb,
    "mongo": mongo,
}
