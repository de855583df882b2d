"""The floors: bare drivers, one insert and one commit per boundary, no bookkeeping at all."""

from __future__ import annotations

import abc
import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiosqlite
import orjson
from pymongo import AsyncMongoClient, WriteConcern
from redis.asyncio import BlockingConnectionPool, Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from chatkeep.records import ModelMessage

__all__ = ["RefAiosqlite", "RefAsyncpg", "RefBoto3", "RefCore", "RefMongo", "RefRedis", "Reference"]

_TABLE = (
    "create table if not exists ref (thread text, seq bigint, body text, primary key (thread, seq))"
)


class Reference(abc.ABC):
    """A store that can do nothing but append and load."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def _number(self, thread: str, messages: Sequence[ModelMessage]) -> list[tuple[int, str]]:
        first = self._next.get(thread, 1)
        self._next[thread] = first + len(messages)
        return [(first + i, orjson.dumps(m).decode()) for i, m in enumerate(messages)]

    @abc.abstractmethod
    async def open(self) -> None: ...

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        """One boundary."""

    @abc.abstractmethod
    async def load(self, thread: str) -> list[ModelMessage]: ...


class RefAsyncpg(Reference):
    """asyncpg with its own pool."""

    name = "ref asyncpg"

    def __init__(self, url: str, pool: int = 10) -> None:
        super().__init__()
        self._url, self._size = url, pool
        self._pool: Any = None

    async def open(self) -> None:
        driver: Any = importlib.import_module("asyncpg")  # it has no types
        self._pool = await driver.create_pool(self._url, min_size=1, max_size=self._size)
        await self._pool.execute(_TABLE)

    async def close(self) -> None:
        await self._pool.close()

    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        rows = self._number(thread, messages)
        await self._pool.execute(
            "insert into ref select $1, * from unnest($2::bigint[], $3::text[])",
            thread, [n for n, _ in rows], [b for _, b in rows],
        )  # fmt: skip

    async def load(self, thread: str) -> list[ModelMessage]:
        rows = await self._pool.fetch("select body from ref where thread = $1 order by seq", thread)
        return [orjson.loads(row[0]) for row in rows]


class RefRedis(Reference):
    """redis-py with a pool that waits: a list of bodies, one MULTI with a push a boundary."""

    name = "ref redis-py"

    def __init__(self, url: str, pool: int = 10) -> None:
        super().__init__()
        connections: Any = BlockingConnectionPool
        self._client: Any = Redis.from_pool(connections.from_url(url, max_connections=pool))

    async def open(self) -> None:
        await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()

    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        async with self._client.pipeline(transaction=True) as boundary:
            boundary.rpush(f"ref:{thread}", *(orjson.dumps(m) for m in messages))
            await boundary.execute()

    async def load(self, thread: str) -> list[ModelMessage]:
        return [orjson.loads(body) for body in await self._client.lrange(f"ref:{thread}", 0, -1)]


class RefBoto3(Reference):
    """boto3 in a worker thread: a row for each message, one transaction a boundary."""

    name = "ref boto3"

    def __init__(self, client: Any, table: str) -> None:
        super().__init__()
        self._client, self._table = client, table

    async def open(self) -> None:
        await asyncio.to_thread(
            self._client.create_table,
            TableName=self._table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[
                {"AttributeName": "thread", "AttributeType": "S"},
                {"AttributeName": "n", "AttributeType": "N"},
            ],
            KeySchema=[
                {"AttributeName": "thread", "KeyType": "HASH"},
                {"AttributeName": "n", "KeyType": "RANGE"},
            ],
        )
        waiter = self._client.get_waiter("table_exists")
        await asyncio.to_thread(waiter.wait, TableName=self._table)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.delete_table, TableName=self._table)

    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        rows = self._number(thread, messages)
        for i in range(0, len(rows), 100):
            actions = [
                {
                    "Put": {
                        "TableName": self._table,
                        "Item": {
                            "thread": {"S": thread},
                            "n": {"N": str(n)},
                            "body": {"B": body.encode()},
                        },
                    }
                }
                for n, body in rows[i : i + 100]
            ]
            await asyncio.to_thread(self._client.transact_write_items, TransactItems=actions)

    async def load(self, thread: str) -> list[ModelMessage]:
        bodies: list[bytes] = []
        more: dict[str, Any] = {}
        while True:
            page: Any = await asyncio.to_thread(
                self._client.query,
                TableName=self._table,
                KeyConditionExpression="thread = :t",
                ExpressionAttributeValues={":t": {"S": thread}},
                ConsistentRead=True,
                **more,
            )
            bodies += (item["body"]["B"] for item in page["Items"])
            if "LastEvaluatedKey" not in page:
                return [orjson.loads(body) for body in bodies]
            more = {"ExclusiveStartKey": page["LastEvaluatedKey"]}


class RefMongo(Reference):
    """PyMongo's asyncio client: a document for each message, then a counter in the thread's."""

    name = "ref PyMongo"

    def __init__(self, url: str, database: str, pool: int = 10) -> None:
        super().__init__()
        self._client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url, maxPoolSize=pool)
        durable = WriteConcern("majority", j=True)
        self._entries = self._client[database].get_collection("ref", write_concern=durable)
        self._heads = self._client[database].get_collection("ref_heads", write_concern=durable)

    async def open(self) -> None:
        await self._entries.create_index([("thread", 1), ("n", 1)])

    async def close(self) -> None:
        await self._client.close()

    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        rows = self._number(thread, messages)
        await self._entries.insert_many(
            [{"_id": f"{thread}.{n}", "thread": thread, "n": n, "body": b} for n, b in rows]
        )
        await self._heads.update_one({"_id": thread}, {"$set": {"n": rows[-1][0]}}, upsert=True)

    async def load(self, thread: str) -> list[ModelMessage]:
        found = self._entries.find({"thread": thread}, {"body": 1}, batch_size=100_000)
        return [orjson.loads(row["body"]) for row in await found.sort("n", 1).to_list()]


class RefCore(Reference):
    """SQLAlchemy Core in AUTOCOMMIT, over either driver."""

    def __init__(self, url: str, pool: int = 10) -> None:
        super().__init__()
        driver = url.partition("://")[0].partition("+")[2]
        self.name = f"ref Core/{driver}"  # type: ignore[misc]
        self._engine: AsyncEngine = create_async_engine(
            url, isolation_level="AUTOCOMMIT", pool_size=pool, max_overflow=0
        )
        self._insert = text(
            "insert into ref select cast(:thread as text), * "
            "from unnest(cast(:numbers as bigint[]), cast(:bodies as text[]))"
        )
        self._select = text("select body from ref where thread = :thread order by seq")

    async def open(self) -> None:
        async with self._engine.connect() as connection:
            await connection.execute(text(_TABLE))

    async def close(self) -> None:
        await self._engine.dispose()

    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        rows = self._number(thread, messages)
        values = {
            "thread": thread,
            "numbers": [n for n, _ in rows],
            "bodies": [b for _, b in rows],
        }
        async with self._engine.connect() as connection:
            await connection.execute(self._insert, values)

    async def load(self, thread: str) -> list[ModelMessage]:
        async with self._engine.connect() as connection:
            rows = await connection.execute(self._select, {"thread": thread})
            return [orjson.loads(row[0]) for row in rows]


class RefAiosqlite(Reference):
    """aiosqlite, write-ahead log, one connection."""

    def __init__(self, path: Path, synchronous: str) -> None:
        super().__init__()
        self.name = f"ref aiosqlite {synchronous}"  # type: ignore[misc]
        self._synchronous = synchronous
        self._path = path
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        self._connection = await aiosqlite.connect(self._path, isolation_level=None)
        await self._connection.execute("pragma journal_mode = wal")
        await self._connection.execute(f"pragma synchronous = {self._synchronous}")
        await self._connection.execute(_TABLE)

    async def close(self) -> None:
        await self._connection.close()

    async def append(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        rows = [(thread, number, body) for number, body in self._number(thread, messages)]
        async with self._lock:  # one connection has one transaction at a time
            await self._connection.execute("begin immediate")
            await self._connection.executemany("insert into ref values (?, ?, ?)", rows)
            await self._connection.execute("commit")

    async def load(self, thread: str) -> list[ModelMessage]:
        rows = await self._connection.execute_fetchall(
            "select body from ref where thread = ? order by seq", (thread,)
        )
        return [orjson.loads(row[0]) for row in rows]
