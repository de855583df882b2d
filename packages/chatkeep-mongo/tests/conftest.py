"""Fixtures: a persistence through each client, and what breaks or counts its commands."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from motor.motor_asyncio import AsyncIOMotorClient

from chatkeep import Persistence
from chatkeep.rules import new_commit_id
from chatkeep.scope import Scope
from chatkeep.stores import Splice, TurnCommit
from chatkeep_mongo import MongoBackend, mongo_persistence
from servers.mongo import MongoDatabase

WRITES = ("insert", "insert_missing", "update", "change", "replace", "delete")
READS = ("find", "aggregate", "clock")

CLIENTS = ("pymongo", "motor")


class Crash(Exception):
    """The process is gone: it sends nothing any more."""


class Watched:
    """Stands in the place of a driver: notes its commands, and ends them where it is told to.

    ``crash_at`` is the write, counted from one, before which (or ``after`` which) the process dies.
    ``pause`` is awaited before each command.
    """

    def __init__(self, inner: Any, *, crash_at: int = 0, after: bool = False) -> None:
        self._inner = inner
        self._crash_at, self._after = crash_at, after
        self.sent: list[tuple[str, str]] = []
        self.writes = 0
        self.dead = False
        self.pause: Callable[[str, str], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._inner, name)
        if name not in WRITES + READS:
            return work

        async def send(*arguments: Any, **options: Any) -> Any:
            where = arguments[0] if arguments else ""
            if self.pause is not None:
                await self.pause(name, where)
            if self.dead:
                raise Crash
            if name not in WRITES:
                self.sent.append((name, where))
                return await work(*arguments, **options)
            self.writes += 1
            last = self.writes == self._crash_at
            if last and not self._after:
                self.dead = True
                raise Crash
            self.sent.append((name, where))
            result = await work(*arguments, **options)
            if last:
                self.dead = True
            if self.dead:
                raise Crash
            return result

        return send


class Tools:
    """What tests do to a persistence behind its back."""

    Crash = Crash

    @staticmethod
    def backend(persistence: Persistence) -> MongoBackend:
        return cast("MongoBackend", persistence.backends[0])

    @staticmethod
    def watched(
        persistence: Persistence, scope: Scope | None = None, **options: Any
    ) -> tuple[Any, Watched]:
        """A handle of its own whose commands are noted, or end."""
        backend: Any = persistence.scoped(scope or Scope()).backends[0]
        backend._db = Watched(backend._db, **options)
        return backend, backend._db

    @staticmethod
    def checked_out(persistence: Persistence) -> int:
        """Connections that are in use."""
        client: Any = Tools.backend(persistence)._db._client
        topology = (client.delegate if isinstance(client, AsyncIOMotorClient) else client)._topology
        return sum(server.pool.active_sockets for server in topology._servers.values())

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
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture
def opened(mongo_database: MongoDatabase) -> Any:
    """Opens a persistence through a client: ``async with opened("motor", timeout=1) as p``."""

    @asynccontextmanager
    async def open_(
        kind: str, *, url: str | None = None, name: str | None = None, **options: Any
    ) -> AsyncIterator[Persistence]:
        place = url or mongo_database.url()
        database = name or mongo_database.name
        if kind == "pymongo":
            async with mongo_persistence(place, database, **options) as persistence:
                yield persistence
            return
        client: AsyncIOMotorClient[Any] = AsyncIOMotorClient(place, serverSelectionTimeoutMS=5000)
        try:
            async with mongo_persistence(client, database, **options) as persistence:
                yield persistence
        finally:
            client.close()

    return open_


@pytest.fixture(params=CLIENTS)
async def persistence(
    request: pytest.FixtureRequest, opened: Any, tools: Tools
) -> AsyncIterator[Persistence]:
    """An empty persistence through each client; no connection may be in use afterwards."""
    async with opened(request.param) as persistence:
        yield persistence
        assert tools.checked_out(persistence) == 0


@pytest.fixture
async def plain(opened: Any, tools: Tools) -> AsyncIterator[Persistence]:
    """The same through PyMongo's client only."""
    async with opened("pymongo") as persistence:
        yield persistence
        assert tools.checked_out(persistence) == 0


@pytest.fixture(scope="session")
def processes() -> Callable[[str, list[dict[str, Any]]], None]:
    """Runs a program in several processes at once: ``processes(source, [globals, …])``. They
    find ``gate``, an event that is set once all have been started. They are forked from one that
    has imported everything: twenty imports take longer than what they are to do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "chatkeep", "chatkeep_mongo"])

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
