"""Small batches on the way to a log: what comes while an append is under way goes with the next."""

from __future__ import annotations

import asyncio

from ag_ui.core import BaseEvent

from chatkeep.delivery._protocol import LogWriter
from chatkeep.errors import BackendUnavailable, InvalidValue

__all__ = ["Batcher"]

_BATCH = 32
"""Events of one append."""
_ROOM = 256
"""Events that may wait; then whoever publishes waits too, and the model with it."""


class Batcher:
    """Appends events to a log in order, one batch at a time. An event that comes while nothing is
    under way goes at once, so a slow model is not delayed and a fast one is not held up.

    What an append raises is raised by the next call; the events that wait are kept until
    :meth:`drop`.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._waiting: list[BaseEvent] = []
        self._unsure: list[BaseEvent] = []
        self._sending: asyncio.Task[None] | None = None

    async def put(self, event: BaseEvent) -> None:
        """Publish an event soon; waits while too many wait already."""
        self._check()
        self._waiting.append(event)
        sending = self._send_soon()
        if len(self._waiting) >= _ROOM:
            await asyncio.wait({sending})
            self._check()

    async def flush(self) -> None:
        """Wait until all is published."""
        while self._waiting or self._sending is not None:
            await asyncio.wait({self._send_soon()})
            self._check()

    def _send_soon(self) -> asyncio.Task[None]:
        if self._sending is None:
            # Not the caller's to cancel: a batch that was begun is finished.
            self._sending = asyncio.create_task(self._send())
        return self._sending

    async def drop(self) -> list[BaseEvent]:
        """Forget what waits, and what an append raised. Returned are the events of which the
        writer does not know whether they are there: it sends them again, before any others."""
        if self._sending is not None:
            await asyncio.wait({self._sending})
        if self._sending is not None and not self._sending.cancelled():
            self._sending.exception()
        self._sending = None
        unsure, self._unsure = self._unsure, []
        self._waiting.clear()
        return unsure

    def _check(self) -> None:
        sending = self._sending
        if sending is not None and sending.done():
            self._sending = None
            sending.result()

    async def _send(self) -> None:
        whole = True
        while self._waiting:
            batch = self._waiting[: _BATCH if whole else 1]
            try:
                await self._writer.append(batch)
            except InvalidValue:
                if len(batch) == 1:
                    raise
                whole = False  # what stands before the one that cannot be encoded is published
                continue
            except BackendUnavailable:
                self._unsure = batch
                raise
            del self._waiting[: len(batch)]
