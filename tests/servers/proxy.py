"""A TCP proxy on loopback that breaks connections on demand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

__all__ = ["TcpProxy"]

_T = TypeVar("_T")

_QUIET_SECONDS = 0.2
"""A reply is over once its server has been quiet for so long."""


class TcpProxy:
    """Forwards bytes to ``(target_host, target_port)``, until it is told not to.

    It runs an event loop in a thread of its own: tests may be synchronous or not, and a test
    whose loop is blocked does not block it. Every method may be called from any thread.

        with server.proxy() as proxy:
            persistence = postgres_persistence(database.url(proxy=proxy))
            proxy.lose_reply(b"COMMIT")
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.refuse = False
        """New connections are reset."""
        self.latency = 0.0
        """Seconds added to each chunk, each way."""
        self.accepted = 0
        """Connections taken so far."""
        self.bytes_sent = 0
        """Bytes passed to the server."""
        self.bytes_received = 0
        """Bytes passed to clients."""
        self.chunks_sent = 0
        """Reads from clients: with one client at a time, about the round trips."""
        self.losses = 0
        """How often :meth:`lose_request` or :meth:`lose_reply` struck."""
        self._target = (target_host, target_port)
        self._wanted: list[tuple[str, bytes]] = []
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # -- faults -----------------------------------------------------------------------

    def cut(self) -> None:
        """Reset every open connection; new ones are taken."""
        self._do(self._cut)

    def stall(self) -> None:
        """No byte passes any more, either way; connections stay open."""
        self._do(self._flow.clear)

    def flow(self) -> None:
        """Undo :meth:`stall`."""
        self._do(self._flow.set)

    def lose_request(self, containing: bytes = b"") -> None:
        """The next request with these bytes never arrives, and its client sees a reset."""
        self._do(lambda: self._wanted.append(("request", containing)))

    def lose_reply(self, containing: bytes = b"") -> None:
        """The server answers with these bytes, and nobody hears it: its client sees a reset.

        What was asked has been applied. Match on the reply (a command tag such as
        ``b"COMMIT"``, a value), since a driver may send a statement's text long before it
        asks for its execution.
        """
        self._do(lambda: self._wanted.append(("reply", containing)))

    # -- life -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _open(self) -> None:
        self._flow = asyncio.Event()
        self._flow.set()
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, action: Callable[[], object]) -> None:
        async def run() -> None:
            action()

        self._wait(run())

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    # -- bytes ------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.accepted += 1
        if self.refuse:
            _reset(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(self, reader, writer, server_reader, server_writer)
        self._links.add(link)
        try:
            await link.run()
        except asyncio.CancelledError:
            # The proxy closes. Swallowed: before Python 3.12, asyncio's own callback for this
            # task prints a traceback for a cancelled one.
            link.reset()
        finally:
            self._links.discard(link)

    def _strikes(self, kind: str, data: bytes) -> bool:
        """Whether ``data`` is what a test wants lost; each wish is used once."""
        for wish in self._wanted:
            if wish[0] == kind and wish[1] in data:
                self._wanted.remove(wish)
                self.losses += 1
                return True
        return False


class _Link:
    """One client's connection and ours to the server."""

    def __init__(
        self,
        proxy: TcpProxy,
        client_reader: asyncio.StreamReader,
        client_writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client_reader, self._client_writer = client_reader, client_writer
        self._server_reader, self._server_writer = server_reader, server_writer

    async def run(self) -> None:
        """Until both sides are done, or the link is reset."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests())
                both.create_task(self._replies())
        except* OSError:
            self.reset()
        finally:
            self._client_writer.close()
            self._server_writer.close()

    def reset(self) -> None:
        """Both ends see a reset, not an orderly end."""
        _reset(self._client_writer)
        _reset(self._server_writer)

    async def _requests(self) -> None:
        seen = b""
        while data := await self._client_reader.read(65_536):
            await self._pass(self._proxy.latency)
            # A match may stand across two reads.
            seen = seen[-256:] + data
            if self._proxy._strikes("request", seen):
                raise ConnectionResetError
            self._proxy.bytes_sent += len(data)
            self._proxy.chunks_sent += 1
            self._server_writer.write(data)
            await self._server_writer.drain()
        _end(self._server_writer)

    async def _replies(self) -> None:
        seen = b""
        while data := await self._server_reader.read(65_536):
            await self._pass(self._proxy.latency)
            seen = seen[-256:] + data
            if self._proxy._strikes("reply", seen):
                await self._swallow()
                raise ConnectionResetError
            self._proxy.bytes_received += len(data)
            self._client_writer.write(data)
            await self._client_writer.drain()
        _end(self._client_writer)

    async def _pass(self, latency: float) -> None:
        if latency:
            await asyncio.sleep(latency)
        await self._proxy._flow.wait()

    async def _swallow(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(_QUIET_SECONDS):
                    if not await self._server_reader.read(65_536):
                        return


def _end(writer: asyncio.StreamWriter) -> None:
    if writer.can_write_eof() and not writer.is_closing():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):  # already closed: nothing to reset
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
