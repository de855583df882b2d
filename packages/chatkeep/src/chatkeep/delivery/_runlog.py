"""The in-process delivery log.

Each run is one list of encoded events that all its readers share: a reader is an index into
it, so a viewer costs a few hundred bytes however far it is behind, and there is no queue that
a stalled one could fill. Memory is bounded three ways: bytes per run (the oldest events are
trimmed), bytes of all finished runs, and their number and age. A running run is never evicted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from ag_ui.core import BaseEvent

from chatkeep.codec import encode
from chatkeep.delivery._offsets import Offset
from chatkeep.delivery._protocol import (
    FROM_NOW,
    FROM_START,
    LoggedEvent,
    LoggedRun,
    RunKey,
)
from chatkeep.errors import EventsTrimmed, RunConflict, RunConflictReason, UnknownOffset, UnknownRun
from chatkeep.scope import check_id

__all__ = ["RunLog", "encode_event"]

_BATCH_EVENTS = 512
_BATCH_BYTES = 1 << 20


def encode_event(event: BaseEvent) -> bytes:
    """The JSON of an event on one line, camelCase, absent optional fields left out.

    Raises:
        InvalidValue: the event holds what JSON cannot carry (NaN, an object, …).
    """
    return encode(event.model_dump(by_alias=True), "$event").lstrip(b" ")


class _Run:
    """The events of one run; ``first`` is the number of ``bodies[0]``, numbers start at 1."""

    __slots__ = (
        "bodies",
        "closed_at",
        "first",
        "key",
        "news",
        "prefix",
        "size",
        "thread_id",
        "writer",
    )

    def __init__(self, key: RunKey, thread_id: str) -> None:
        self.key = key
        self.thread_id = thread_id
        self.prefix = str(Offset(key.run_id, 0))[:-1]
        self.bodies: list[bytes] = []
        self.first = 1
        self.size = 0
        self.closed_at: float | None = None
        self.news = asyncio.Event()
        self.writer: object = None

    @property
    def end(self) -> int:
        """The number that the next event gets."""
        return self.first + len(self.bodies)

    def wake(self) -> None:
        """Let every reader that waits look again."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def trim(self, limit: int) -> None:
        """Drop the oldest events above ``limit`` bytes, a quarter of it at a time; the newest
        event always stays."""
        if self.size <= limit:
            return
        drop = 0
        while self.size > limit * 3 // 4 and drop < len(self.bodies) - 1:
            self.size -= len(self.bodies[drop])
            drop += 1
        del self.bodies[:drop]
        self.first += drop

    def start(self, after: str) -> int:
        """The number of the first event after ``after``."""
        if after == FROM_NOW:
            return self.end
        number = 0
        if after != FROM_START:
            parsed = Offset.parse(after)
            if parsed is None or (parsed.run_id, parsed.incarnation) != (self.key.run_id, ""):
                raise UnknownOffset(self.key.run_id, after)
            number = parsed.number
            if not 0 < number < self.end:
                raise UnknownOffset(self.key.run_id, after)
        if number + 1 < self.first:
            raise EventsTrimmed(self.key.run_id)
        return number + 1

    def batch(self, number: int) -> list[LoggedEvent]:
        """Some of the events from ``number`` on, all if they are few."""
        if number < self.first:
            raise EventsTrimmed(self.key.run_id)
        out: list[LoggedEvent] = []
        size = 0
        for body in self.bodies[number - self.first : number - self.first + _BATCH_EVENTS]:
            if out and size + len(body) > _BATCH_BYTES:
                break
            out.append(LoggedEvent(f"{self.prefix}{number + len(out)}", body))
            size += len(body)
        return out


class RunLog:
    """Events of this process's runs, bounded; implements :class:`DeliveryLog`.

    Args:
        keep_seconds: how long a finished run can still be replayed.
        keep_runs: how many finished runs are kept; the ones that ended first go first.
        keep_bytes: bytes of events of all finished runs together.
        max_run_bytes: bytes of events of one run. Above it the oldest events are trimmed:
            viewers that keep up notice nothing, a replay from before raises ``EventsTrimmed``
            (the transcript is in the store, so a reload still shows everything).
        clock: seconds, monotonic.

    What has run out is dropped by the next call that opens, closes or looks up a run.
    """

    def __init__(
        self,
        *,
        keep_seconds: float = 300.0,
        keep_runs: int = 1024,
        keep_bytes: int = 256 << 20,
        max_run_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._keep_runs = keep_runs
        self._keep_bytes = keep_bytes
        self._max_run_bytes = max_run_bytes
        self._clock = clock
        self._running: dict[RunKey, _Run] = {}
        self._finished: dict[RunKey, _Run] = {}  # in the order in which they ended
        self._finished_bytes = 0

    def __len__(self) -> int:
        """How many runs are kept, running and finished."""
        return len(self._running) + len(self._finished)

    @property
    def size(self) -> int:
        """Bytes of events that are kept."""
        return self._finished_bytes + sum(run.size for run in self._running.values())

    async def open(self, key: RunKey, thread_id: str) -> _Writer:
        """See :class:`DeliveryLog`."""
        check_id(key.run_id, "run_id")
        check_id(thread_id, "thread_id")
        self._evict()
        known = self._running.get(key) or self._finished.get(key)
        if known is not None:
            if known.thread_id != thread_id:
                raise RunConflict(key.run_id, "foreign-thread")
            state: RunConflictReason = "running" if known.closed_at is None else "terminal"
            raise RunConflict(key.run_id, state, thread_id=thread_id)
        run = self._running[key] = _Run(key, thread_id)
        return self._writer(run)

    async def take_over(self, key: RunKey, *, only_lost: bool = False) -> _Writer | None:
        """See :class:`DeliveryLog`. A writer in this process is never lost."""
        run = self._running.get(key)
        return None if run is None or only_lost else self._writer(run)

    def _writer(self, run: _Run) -> _Writer:
        writer = run.writer = _Writer(run, self._max_run_bytes, self._retire)
        return writer

    async def sweep(self, *, limit: int = 100) -> list[LoggedRun]:
        """See :class:`DeliveryLog`."""
        del limit  # dropping all that has run out costs nothing
        self._evict()
        return []

    async def aclose(self) -> None:
        """See :class:`DeliveryLog`: there is nothing to let go of."""

    async def find(self, key: RunKey) -> LoggedRun | None:
        """See :class:`DeliveryLog`."""
        self._evict()
        run = self._running.get(key) or self._finished.get(key)
        if run is None:
            return None
        return LoggedRun(
            key=key,
            thread_id=run.thread_id,
            finished=run.closed_at is not None,
            complete=run.first == 1,
        )

    async def read(self, key: RunKey, after: str = FROM_START) -> list[LoggedEvent]:
        """See :class:`DeliveryLog`."""
        run = self._get(key)
        number = run.start(after)
        out: list[LoggedEvent] = []
        while batch := run.batch(number + len(out)):
            out += batch
        return out

    async def follow(
        self, key: RunKey, after: str = FROM_START
    ) -> AsyncIterator[Sequence[LoggedEvent]]:
        """See :class:`DeliveryLog`."""
        run = self._get(key)
        return self._tail(run, run.start(after))

    @staticmethod
    async def _tail(run: _Run, number: int) -> AsyncIterator[Sequence[LoggedEvent]]:
        while True:
            news = run.news
            if batch := run.batch(number):
                number += len(batch)
                yield batch
            elif run.closed_at is not None:
                return
            else:
                await news.wait()

    def _get(self, key: RunKey) -> _Run:
        self._evict()
        run = self._running.get(key) or self._finished.get(key)
        if run is None:
            raise UnknownRun(key.run_id)
        return run

    def _retire(self, run: _Run) -> None:
        run.closed_at = self._clock()
        del self._running[run.key]
        self._finished[run.key] = run
        self._finished_bytes += run.size
        run.wake()
        self._evict()

    def _evict(self) -> None:
        oldest = self._clock() - self._keep_seconds
        while self._finished:
            run = next(iter(self._finished.values()))
            expired = run.closed_at is not None and run.closed_at <= oldest
            crowded = (
                len(self._finished) > self._keep_runs or self._finished_bytes > self._keep_bytes
            )
            if not expired and not crowded:
                return
            del self._finished[run.key]
            self._finished_bytes -= run.size


class _Writer:
    """The writer of one run of a :class:`RunLog`."""

    __slots__ = ("_limit", "_retire", "_run")

    def __init__(self, run: _Run, limit: int, retire: Callable[[_Run], None]) -> None:
        self._run = run
        self._limit = limit
        self._retire = retire

    async def append(self, events: Sequence[BaseEvent]) -> list[str]:
        """See :class:`LogWriter`."""
        run = self._run
        if run.writer is not self:
            raise RunConflict(run.key.run_id, "lease-lost", thread_id=run.thread_id)
        if run.closed_at is not None:
            raise RunConflict(run.key.run_id, "terminal", detail="its log is closed")
        bodies = [encode_event(event) for event in events]
        number = run.end
        run.bodies += bodies
        run.size += sum(map(len, bodies))
        run.trim(self._limit)
        run.wake()
        return [f"{run.prefix}{number + i}" for i in range(len(bodies))]

    async def close(self) -> None:
        """See :class:`LogWriter`."""
        if self._run.closed_at is None and self._run.writer is self:
            self._retire(self._run)

    async def leave(self, *, wait_ms: int = 0) -> None:
        """See :class:`LogWriter`."""
