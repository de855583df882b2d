"""Behind a pooler that gives every transaction another server connection (PgBouncer's
transaction mode), everything works with ``pooler=True``."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from chatkeep.errors import StoreError
from chatkeep.records import RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_sql import postgres_persistence
from servers import Database

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]


class Pooler:
    """The least that a transaction pooler is: it answers start-up itself, lends a client a
    server connection for each transaction, and takes the one that has waited longest, so that
    two transactions in a row never see the same one."""

    def __init__(self, host: str, port: int, size: int = 3) -> None:
        self._target = (host, port)
        self._size = size
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._greeting = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self.transactions = 0
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            startup = await reader.readexactly(size - 4)
            if struct.unpack("!i", startup[:4])[0] != 80877103:  # a request for TLS
                break
            writer.write(b"N")
        while not self._idle and self._size:
            await self._connect(startup)
        writer.write(self._greeting)
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        reading = asyncio.create_task(self._read(reader, messages))
        try:
            while (first := await messages.get())[:1] != b"X":
                while not self._idle:  # noqa: ASYNC110  (a test's pooler may poll)
                    await asyncio.sleep(0.001)
                server = self._idle.popleft()
                self.transactions += 1
                returned = False
                try:
                    returned = await self._transaction(first, messages, writer, server)
                finally:
                    if not returned:
                        server[1].close()
                if not returned:
                    return
                self._idle.append(server)
        finally:
            reading.cancel()

    async def _read(self, reader: asyncio.StreamReader, messages: asyncio.Queue[bytes]) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                messages.put_nowait(await _message(reader))
        messages.put_nowait(b"X")

    async def _transaction(
        self,
        message: bytes,
        messages: asyncio.Queue[bytes],
        writer: asyncio.StreamWriter,
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        """Pass messages on until the server is idle again; False if the client left before."""
        asked = message[:1] in (b"S", b"Q")
        server[1].write(message)
        answering = asyncio.create_task(_message(server[0]))
        asking = asyncio.create_task(messages.get())
        try:
            while True:
                await asyncio.wait({answering, asking}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    if asking.result()[:1] == b"X":
                        return False
                    asked += asking.result()[:1] in (b"S", b"Q")
                    server[1].write(asking.result())
                    asking = asyncio.create_task(messages.get())
                if answering.done():
                    answer = answering.result()
                    writer.write(answer)
                    asked -= answer[:1] == b"Z"
                    if not asked and answer[:1] == b"Z" and answer[5:6] == b"I":
                        return True
                    answering = asyncio.create_task(_message(server[0]))
        finally:
            answering.cancel()
            asking.cancel()

    async def _connect(self, startup: bytes) -> None:
        for _ in range(self._size):
            reader, writer = await asyncio.open_connection(*self._target)
            writer.write(struct.pack("!i", len(startup) + 4) + startup)
            self._greeting = b""
            while not self._greeting.endswith(b"Z\x00\x00\x00\x05I"):
                self._greeting += await _message(reader)
            self._idle.append((reader, writer))
        self._size = 0


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(5)
    return head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)


@pytest.fixture
async def pooler(postgres_database: Database) -> AsyncIterator[Pooler]:
    parts = urlsplit(postgres_database.url(""))
    pooler = Pooler(parts.hostname or "", parts.port or 5432)
    await pooler.start()
    yield pooler
    await pooler.stop()


def through(pooler: Pooler, database: Database, driver: Any) -> str:
    parts = urlsplit(database.url(driver))
    login, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{login}{at}127.0.0.1:{pooler.port}").geturl()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_turns_behind_a_transaction_pooler(
    pooler: Pooler, postgres_database: Database, tools: Any, driver: Any
) -> None:
    """Set-up, forty turns (more than any driver waits before it prepares), reads, drafts."""
    url = through(pooler, postgres_database, driver)
    async with postgres_persistence(url, pooler=True) as persistence:
        backend = tools.backend(persistence)
        revision, newest = "", 0
        for number in range(40):
            run = f"r{number}"
            begun = await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="t",
                    run_id=run,
                    run=RunStart(run_id=run, started_at=number, lease_token="x"),
                    splice=Splice(
                        keep_through=newest,
                        tail=[{"id": f"u{number}", "role": "user"}],
                        expected=revision,
                    ),
                )
            )
            await backend.save_draft("t", run, [{"id": "d", "role": "assistant"}])
            ended = await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="t",
                    run_id=run,
                    lease_token="x",
                    run=RunPatch(status="completed", finished_at=1),
                    splice=Splice(
                        keep_through=begun.newest,
                        tail=[{"id": f"a{number}", "role": "assistant"}],
                        expected=begun.revision,
                    ),
                    drop_draft=True,
                )
            )
            revision, newest = ended.revision, ended.newest
        view = await backend.read_view("t", ViewQuery(runs="all", drafts=True))
        assert len(view.messages) == 80
        assert len(view.runs) == 40
        assert view.drafts == []
        assert pooler.transactions >= 120
        assert tools.checked_out(persistence) == 0


async def test_without_the_option_a_pooler_breaks_prepared_statements(
    pooler: Pooler, postgres_database: Database, tools: Any
) -> None:
    """So the test above tests something."""
    url = through(pooler, postgres_database, "asyncpg")
    async with postgres_persistence(url) as persistence:
        with pytest.raises(StoreError):
            await asyncio.gather(
                *(tools.backend(persistence).commit_turn(tools.said("t", "m")) for _ in range(20))
            )
