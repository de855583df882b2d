"""The bounded hand-over from the task that drives a run to whoever reads its events."""

from __future__ import annotations

import asyncio
from collections import deque

from chatkeep.engine.middleware import Event

__all__ = ["Channel"]


class Channel:
    """First in, first out, one writer at a time, one reader.

    A writer that awaits :meth:`room` before each :meth:`put` never gets more than ``capacity``
    events ahead of the reader. It is woken when the reader has emptied the buffer, not after
    every event: one switch of tasks serves many events.
    """

    __slots__ = ("_buffer", "_capacity", "_closed", "_discard", "_reader", "_released", "_writers")

    def __init__(self, capacity: int) -> None:
        self._buffer: deque[Event] = deque()
        self._capacity = capacity
        self._closed = False
        self._released = False
        self._discard = False
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def full(self) -> bool:
        """Whether the writer has to await :meth:`room`."""
        return len(self._buffer) >= self._capacity and not self._released

    def put(self, event: Event) -> None:
        """Hand over one event, without waiting; dropped when the reader has left."""
        if self._discard:
            return
        self._buffer.append(event)
        self._wake_reader()

    async def room(self) -> None:
        """Return when the reader has caught up, or need not be waited for any more."""
        while self.full:
            writer = asyncio.get_running_loop().create_future()
            self._writers.append(writer)
            try:
                await writer
            finally:
                if writer in self._writers:
                    self._writers.remove(writer)

    def release(self) -> None:
        """Never wait for the reader again: what is left to say is short."""
        self._released = True
        self._wake_writers()

    def discard(self) -> None:
        """The reader has left: forget what is buffered and what comes."""
        self._discard = True
        self._buffer.clear()
        self.release()

    def close(self) -> None:
        """Nothing follows."""
        self._closed = True
        self._wake_reader()

    def poll(self) -> Event | None:
        """The next event if there is one by now."""
        if not self._buffer:
            return None
        event = self._buffer.popleft()
        if not self._buffer:
            self._wake_writers()
        return event

    async def get(self) -> Event | None:
        """The next event; None when there is none and nothing follows."""
        while True:
            if self._buffer:
                return self.poll()
            if self._closed:
                return None
            if self._reader is not None:
                raise RuntimeError("a chat stream has one reader: it is being read already")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        for writer in self._writers:
            if not writer.done():
                writer.set_result(None)
