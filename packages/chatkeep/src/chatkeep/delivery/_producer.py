"""Driving a chat stream into a delivery log, apart from whoever watches it.

A response only reads the log. A viewer who leaves stops reading; the run goes on, is saved
and finishes. What ends a run early is :meth:`Producer.abort` or the server going down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self

from ag_ui.core import BaseEvent

from chatkeep.delivery._batch import Batcher
from chatkeep.delivery._protocol import (
    FROM_START,
    DeliveryLog,
    LoggedEvent,
    LoggedRun,
    LogWriter,
    RunKey,
)
from chatkeep.delivery._runlog import RunLog
from chatkeep.delivery._terminal import (
    aclose,
    cancelled,
    check_stream,
    failed,
    is_cancelled,
    is_terminal,
    with_terminal,
)
from chatkeep.engine.abort import HAND_OVER
from chatkeep.errors import ChatkeepError, RunConflict, StoreClosed, StoreError, UnknownRun

if TYPE_CHECKING:
    from types import TracebackType

    from chatkeep.engine import AbortSignal

__all__ = ["EVENTS_LOST", "Delivery", "Producer"]

_log = logging.getLogger("chatkeep.delivery")

_ABORT_GRACE = 5.0
"""Seconds in which a run that was asked to stop may end by itself before its task is cancelled."""


_HAND_OVER_MS = 300_000
"""How long viewers wait for a run that was handed over."""

EVENTS_LOST = "events-lost"
"""Error code for the viewers of a run whose log was out of reach for a while."""


class Producer:
    """Drives one stream into the log of its run, in a task of its own.

    The log gets exactly one terminal event, last, and is closed on every way out. A producer
    whose task is cancelled closes the stream first, so that the run is saved as aborted, and
    then publishes RUN_FINISHED with outcome ``cancelled``.
    """

    def __init__(
        self,
        stream: AsyncIterator[BaseEvent],
        writer: LogWriter,
        *,
        key: RunKey,
        thread_id: str,
        abort: AbortSignal | None = None,
        detachable: bool = False,
    ) -> None:
        self.key = key
        self.thread_id = thread_id
        self.detachable = detachable
        self._stream = stream
        self._writer = writer
        self._batches = Batcher(writer)
        self._handing_over: int | None = None
        self._held: list[BaseEvent] = []
        self._signal = abort
        self._ended = False
        self._speechless = False
        self._task = asyncio.create_task(self._run(), name=f"chatkeep run {key.run_id}")

    @property
    def task(self) -> asyncio.Task[None]:
        """The background task; it never fails, only ends or is cancelled."""
        return self._task

    async def abort(self, reason: str | None = None, *, grace: float = _ABORT_GRACE) -> None:
        """Stop the run and wait until it has been saved and its log is closed.

        With an abort signal the stream ends by itself (it closes what is open and says
        ``cancelled``); after ``grace`` seconds, or without a signal, the task is cancelled.
        """
        if self._signal is not None:
            self._signal.abort(reason)
            await asyncio.wait({self._task}, timeout=grace)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def hand_over(self, *, wait_ms: int, grace: float = _ABORT_GRACE) -> None:
        """Stop driving without ending the run: no terminal, and the log stays open for
        ``wait_ms`` for whoever takes the run over."""
        self._handing_over = wait_ms
        if self._signal is not None:
            self._signal.abort(HAND_OVER)
            await asyncio.wait({self._task}, timeout=grace)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        ids = {"thread_id": self.thread_id, "run_id": self.key.run_id}
        events = with_terminal(self._stream, **ids)
        try:
            async for event in events:
                await self._publish(event)
                # A model that never waits would keep every viewer from being served.
                await asyncio.sleep(0)
            await self._batches.flush()
        except asyncio.CancelledError:
            await self._cut(events, cancelled(**ids))
            raise
        except StoreError as error:
            await self._go_on_unseen(events, error)
        except ChatkeepError as error:
            # The log refused an event: its value is no JSON.
            _log.exception("an event of run %r could not be published", self.key.run_id)
            message = "An event of the run could not be published."
            await self._cut(events, failed(message, error.code, **ids))
        finally:
            await self._close()

    async def _publish(self, event: BaseEvent) -> None:
        if self._handing_over is not None and not self._ended:
            # What a stopped stream says about its end is not so; one that ends otherwise has.
            self._held.append(event)
            if not is_terminal(event) or is_cancelled(event):
                return
            for held in self._held[:-1]:
                await self._batches.put(held)
        await self._batches.put(event)
        self._ended = self._ended or is_terminal(event)

    async def _cut(self, events: AsyncIterator[BaseEvent], end: BaseEvent) -> None:
        """Stop the run, which is saved then, and say how it ended."""
        await aclose(events)
        await aclose(self._stream)
        try:
            if not self._ended and self._handing_over is None:
                await self._publish(end)
            await self._batches.flush()
        except ChatkeepError:
            unsure = await self._batches.drop()
            if self._ended or self._handing_over is None:
                await self._say(end, unsure=unsure)

    async def _go_on_unseen(self, events: AsyncIterator[BaseEvent], error: StoreError) -> None:
        """The log takes no events: viewers have lost sight of the run, but its tools have had
        effects and its model has been paid. It goes on and is stored; whether this worker may
        still write is for the run's own lease to decide."""
        _log.error(
            "run %r goes on without viewers, its log takes no events: %s", self.key.run_id, error
        )
        unsure = await self._batches.drop()
        try:
            async for _ in events:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await aclose(events)
            await aclose(self._stream)
            await self._say_lost(error, unsure)
            raise
        await self._say_lost(error, unsure)

    async def _say_lost(self, error: StoreError, unsure: Sequence[BaseEvent]) -> None:
        # A run that was handed over, or taken, ends elsewhere.
        if self._handing_over is None and not isinstance(error, RunConflict):
            message = "Events of the run were lost; load the thread again."
            ids = {"thread_id": self.thread_id, "run_id": self.key.run_id}
            await self._say(failed(message, EVENTS_LOST, **ids), unsure=unsure)

    async def _say(self, event: BaseEvent, *, unsure: Sequence[BaseEvent]) -> None:
        """Append a terminal event, unless one is among those that the writer sends again."""
        try:
            await self._writer.append([] if any(map(is_terminal, unsure)) else [event])
        except ChatkeepError as error:
            self._speechless = True
            _log.error("run %r has no terminal event in its log: %s", self.key.run_id, error)

    async def _close(self) -> None:
        try:
            if self._handing_over is not None and not self._ended:
                await self._writer.leave(wait_ms=self._handing_over)
            elif self._speechless:
                # A log that is closed without an end would never get one: its lease runs out
                # now, and whoever looks then tells its viewers.
                await self._writer.leave()
            else:
                await self._writer.close()
        except ChatkeepError as error:
            _log.error("the log of run %r could not be closed: %s", self.key.run_id, error)


class Delivery:
    """A delivery log and the producers that write to it; make one per process.

    Args:
        log: where events go; an in-process :class:`RunLog` by default.
        drain: seconds that :meth:`aclose` gives running runs to finish by themselves.
    """

    def __init__(self, log: DeliveryLog | None = None, *, drain: float = 5.0) -> None:
        self.log: DeliveryLog = RunLog() if log is None else log
        self._drain = drain
        self._producers: dict[RunKey, Producer] = {}
        self._opening: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def running(self) -> list[RunKey]:
        """The runs that this process drives."""
        return list(self._producers)

    async def start(
        self,
        stream: AsyncIterator[BaseEvent],
        *,
        key: RunKey,
        thread_id: str,
        abort: AbortSignal | None = None,
        detachable: bool = False,
    ) -> Producer:
        """Drive ``stream`` into the log. It is closed here if the log refuses the run.

        Args:
            stream: the events of one run.
            key: the run.
            thread_id: whom to ask before somebody may read the log.
            abort: the signal that the stream obeys; without one it is cancelled.
            detachable: the run can go on in another process; at shutdown it is handed over, not
                aborted.

        Raises:
            CompositionError: ``stream`` is no async iterator.
            RunConflict: the log knows the run already.
            StoreClosed: after :meth:`aclose`.
        """
        opening = self.log.open(key, thread_id)
        return await self._drive(opening, stream, key, thread_id, abort, detachable)

    async def take_over(
        self,
        stream: AsyncIterator[BaseEvent],
        *,
        key: RunKey,
        thread_id: str,
        abort: AbortSignal | None = None,
        detachable: bool = False,
    ) -> Producer:
        """Drive the rest of a run into the log that it has: viewers go on where they are, and
        its former writer appends nothing any more. Claim the run first, with
        :func:`chatkeep.persistence.claim_run`, so that one of several wins.

        Args:
            stream: what comes next in the run, up to its end; not its start.
            key: the run.
            thread_id: see :meth:`start`.
            abort: see :meth:`start`.
            detachable: see :meth:`start`.

        Raises:
            CompositionError: ``stream`` is no async iterator.
            UnknownRun: the log does not know the run, or it has ended.
            StoreClosed: after :meth:`aclose`.
        """
        taking = self._take(key)
        return await self._drive(taking, stream, key, thread_id, abort, detachable)

    async def _take(self, key: RunKey) -> LogWriter:
        writer = await self.log.take_over(key)
        if writer is None:
            raise UnknownRun(key.run_id)
        return writer

    async def _drive(
        self,
        getting: Coroutine[Any, Any, LogWriter],
        stream: AsyncIterator[BaseEvent],
        key: RunKey,
        thread_id: str,
        abort: AbortSignal | None,
        detachable: bool,
    ) -> Producer:
        try:
            check_stream(stream)
        except BaseException:
            getting.close()
            raise
        opened = asyncio.get_running_loop().create_future()
        self._opening.add(opened)
        try:
            if self._closed:
                getting.close()
                raise StoreClosed("this delivery")
            writer = await getting
            producer = Producer(
                stream, writer, key=key, thread_id=thread_id, abort=abort, detachable=detachable
            )
            self._producers[key] = producer
        except BaseException:
            await aclose(stream)
            raise
        finally:
            self._opening.discard(opened)
            opened.set_result(None)
        producer.task.add_done_callback(lambda _: self._forget(producer))
        return producer

    def _forget(self, producer: Producer) -> None:
        # A run that was taken over in its own process has another one by now.
        if self._producers.get(producer.key) is producer:
            del self._producers[producer.key]

    async def find(self, key: RunKey) -> LoggedRun | None:
        """See :class:`DeliveryLog`."""
        return await self.log.find(key)

    async def follow(
        self, key: RunKey, after: str = FROM_START
    ) -> AsyncIterator[Sequence[LoggedEvent]]:
        """See :class:`DeliveryLog`."""
        return await self.log.follow(key, after)

    async def abort(self, key: RunKey, reason: str | None = None) -> bool:
        """Stop a run that this process drives; whether it did drive it."""
        producer = self._producers.get(key)
        if producer is None:
            return False
        await producer.abort(reason)
        return True

    async def aclose(self) -> None:
        """Take no more runs and let the running ones finish for ``drain`` seconds. Then hand over
        those that can go on elsewhere, abort the rest, and wait until they are saved. Call it
        before the persistence is closed. Idempotent; ``async with`` opens it again."""
        self._closed = True
        if self._opening:  # asked for before: these runs have begun
            await asyncio.wait(set(self._opening))
        producers = list(self._producers.values())
        if producers:
            await asyncio.wait({p.task for p in producers}, timeout=self._drain)
        left = [p for p in producers if not p.task.done()]
        if left:
            lasting = not isinstance(self.log, RunLog)
            over = [p for p in left if p.detachable and lasting]
            doomed = [p for p in left if p not in over]
            _log.warning(
                "shutting down: %d runs are aborted, %d handed over", len(doomed), len(over)
            )
            await asyncio.gather(
                *(p.abort("server shutdown") for p in doomed),
                *(p.hand_over(wait_ms=_HAND_OVER_MS) for p in over),
            )
        await self.log.aclose()

    async def sweep(self) -> list[LoggedRun]:
        """See :class:`DeliveryLog`."""
        return await self.log.sweep()

    async def __aenter__(self) -> Self:
        # An app object that is started again (test suites do) takes runs again.
        self._closed = False
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
