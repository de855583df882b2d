"""Stores that a server can use, a server on each, and a client."""

from __future__ import annotations

import itertools
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatkeep.testkit.tab import Tab
from e2e.server import ChatServer
from servers.dynamodb import DynamoDB
from servers.mongo import MongoServer
from servers.postgres import Postgres
from servers.redis import RedisServer

DURABLE = [
    pytest.param("sqlite", marks=pytest.mark.sqlite),
    pytest.param("psycopg", marks=pytest.mark.postgres),
    pytest.param("asyncpg", marks=pytest.mark.postgres),
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("dynamodb", marks=pytest.mark.dynamodb),
    pytest.param("mongo", marks=pytest.mark.mongo),
]
STORES = ["memory", *DURABLE]

_threads = itertools.count()
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture(scope="module")
def new_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """The URL of a new, empty store of a kind."""
    with ExitStack() as stack:

        def make(kind: str) -> str:
            if kind == "memory":
                return "memory://"
            if kind == "sqlite":
                folder: Path = tmp_path_factory.mktemp("e2e")
                return f"sqlite:///{folder / 'chat.db'}"
            if kind == "redis":
                redis: RedisServer = request.getfixturevalue("redis_server")
                return stack.enter_context(redis.space()).url()
            if kind == "dynamodb":
                dynamodb: DynamoDB = request.getfixturevalue("dynamodb")
                return stack.enter_context(dynamodb.table()).url()
            if kind == "mongo":
                mongo: MongoServer = request.getfixturevalue("mongo")
                return stack.enter_context(mongo.database()).url()
            server: Postgres = request.getfixturevalue("postgres")
            return stack.enter_context(server.database()).url(kind)  # type: ignore[arg-type]

        yield make


@pytest.fixture(scope="module", params=STORES)
def server(request: pytest.FixtureRequest, new_store: Callable[[str], str]) -> Iterator[ChatServer]:
    """A server that a module's tests share, on every store. It must not log an error."""
    running = ChatServer(new_store(request.param)).start()
    yield running
    log = running.errors()
    running.close()
    assert not re.search(r"Traceback|ERROR|CRITICAL|never retrieved|not closed", log), log


@pytest.fixture
def make_server(
    request: pytest.FixtureRequest, new_store: Callable[[str], str]
) -> Iterator[Callable[..., ChatServer]]:
    """Servers for one test, on a store of a kind; closed afterwards."""
    with ExitStack() as stack:

        def make(kind: str, *options: str, **extra: Any) -> ChatServer:
            made = ChatServer(new_store(kind), *options, **extra)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    # Loopback only: reading a certificate store for every test costs more than the test.
    async with httpx.AsyncClient(timeout=30, limits=limits, verify=_NO_CERTIFICATES) as client:
        yield client


@pytest.fixture
def new_tab(server: ChatServer, http: httpx.AsyncClient) -> Callable[..., Tab]:
    """A page on a new thread of the shared server, or on a given one."""

    def make(thread_id: str | None = None, **options: Any) -> Tab:
        name = f"thread-{next(_threads)}" if thread_id is None else thread_id
        return Tab(http, server.url, name, **options)

    return make
