"""The delivery log in a database: every worker reads what one of them writes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence

from ag_ui.core import BaseEvent

from chatkeep._admin import backend_of
from chatkeep._maintenance import WORKER_LOST
from chatkeep.backends import Backend, Persistence
from chatkeep.codec import decode
from chatkeep.delivery._hub import Feed, Hub
from chatkeep.delivery._offsets import Offset
from chatkeep.delivery._protocol import FROM_NOW, FROM_START, LoggedEvent, LoggedRun, RunKey
from chatkeep.delivery._runlog import encode_event
from chatkeep.delivery._terminal import TERMINAL_TYPES, failed
from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    CorruptRecord,
    EventsTrimmed,
    RunConflict,
    SchemaOutOfDate,
    UnknownOffset,
    UnknownRun,
)
from chatkeep.logs import LogBackend, LogHead, log_key
from chatkeep.scope import EMPTY_SCOPE, check_id

__all__ = ["StoredLog"]

_log = logging.getLogger("chatkeep.delivery")

_READ_BYTES = 1 << 20
_AFTER_FAILURE = 1.0


class StoredLog:
    """Events of runs in the database of a persistence; implements :class:`DeliveryLog`.

    A worker that does not drive a run serves its viewers all the same, and a run's events outlive
    the process that published them. What was published is stored before anybody sees it.

    Args:
        persistence: whose backend keeps the log: that of its runs, else the first that can.
        keep_seconds: how long a finished run can still be replayed; a sweep drops it then.
        lease_ms: how long a writer counts as alive after it was last heard of.
        max_run_bytes: bytes of events of one run. Above it the oldest events are dropped, as
            in :class:`RunLog`.
        poll_seconds: how often the database is asked for news of other processes' runs that
            somebody follows, where it does not tell by itself.

    Raises:
        CompositionError: no backend of the persistence keeps logs.
    """

    def __init__(
        self,
        persistence: Persistence,
        *,
        keep_seconds: float = 300.0,
        lease_ms: int = 30_000,
        max_run_bytes: int = 32 << 20,
        poll_seconds: float = 0.1,
    ) -> None:
        if lease_ms < 1 or not keep_seconds >= 0 or not poll_seconds > 0 or max_run_bytes < 1:
            raise CompositionError(
                "keep_seconds must not be negative; lease_ms, max_run_bytes and poll_seconds must "
                "be above 0"
            )
        self._backend = _log_backend(persistence)
        self._keep_ms = int(keep_seconds * 1000)
        self._lease_ms = lease_ms
        self._max_run_bytes = max_run_bytes
        self._hub = Hub(self._backend, poll=poll_seconds, on_lost=self._told_of_loss)

    def __repr__(self) -> str:
        return f"<StoredLog in {self._backend.name}>"

    def _store(self, key: RunKey) -> LogBackend:
        return self._backend if key.scope == EMPTY_SCOPE else self._backend.scoped(key.scope)

    # -- writers ------------------------------------------------------------------------

    async def open(self, key: RunKey, thread_id: str) -> _Writer:
        """See :class:`DeliveryLog`."""
        store, token = self._store(key), secrets.token_urlsafe(16)
        head = await store.log_open(key.run_id, thread_id, token, self._lease_ms)
        return self._writer(store, head, token)

    async def take_over(self, key: RunKey, *, only_lost: bool = False) -> _Writer | None:
        """See :class:`DeliveryLog`."""
        store, token = self._store(key), secrets.token_urlsafe(16)
        head = await store.log_take(key.run_id, token, self._lease_ms, only_lost=only_lost)
        return None if head is None else self._writer(store, head, token)

    def _writer(self, store: LogBackend, head: LogHead, token: str) -> _Writer:
        return _Writer(
            store,
            self._hub,
            head,
            token,
            lease_ms=self._lease_ms,
            max_run_bytes=self._max_run_bytes,
        )

    # -- readers ------------------------------------------------------------------------

    async def find(self, key: RunKey) -> LoggedRun | None:
        """See :class:`DeliveryLog`."""
        head = await self._head(key)
        return None if head is None else _logged(key, head)

    async def read(self, key: RunKey, after: str = FROM_START) -> list[LoggedEvent]:
        """See :class:`DeliveryLog`."""
        head = await self._known(key)
        number = _start(head, after)
        feed = Feed(b"", self._store(key), head)
        events: list[LoggedEvent] = []
        while number < head.end:
            bodies = await feed.page(number)
            if not bodies:
                raise EventsTrimmed(key.run_id)
            events += _events(head, number, bodies[: head.end - number])
            number += len(bodies)
        return events

    async def follow(
        self, key: RunKey, after: str = FROM_START
    ) -> AsyncIterator[Sequence[LoggedEvent]]:
        """See :class:`DeliveryLog`."""
        head = await self._known(key)
        return self._tail(key, head, _start(head, after))

    async def _tail(
        self, key: RunKey, head: LogHead, number: int
    ) -> AsyncIterator[Sequence[LoggedEvent]]:
        feed = self._hub.join(self._store(key), head)
        try:
            while True:
                news = feed.news
                if number < feed.end:
                    try:
                        behind = number < feed.first
                        bodies = await feed.page(number) if behind else feed.batch(number)
                    except BackendUnavailable as error:
                        _log.warning("a log could not be read; the next try comes: %s", error)
                        await asyncio.sleep(_AFTER_FAILURE)
                        continue
                    if not bodies:
                        raise EventsTrimmed(key.run_id)
                    yield _events(head, number, bodies)
                    number += len(bodies)
                elif feed.closed or feed.stopped:
                    return
                elif feed.gone:
                    raise EventsTrimmed(key.run_id)
                else:
                    await news.wait()
        finally:
            self._hub.leave(feed)

    async def _head(self, key: RunKey) -> LogHead | None:
        check_id(key.run_id, "run_id")
        page = await self._store(key).log_read(key.run_id, 0, limit=1, max_bytes=1)
        return None if page is None else page.head

    async def _known(self, key: RunKey) -> LogHead:
        head = await self._head(key)
        if head is None:
            raise UnknownRun(key.run_id)
        return head

    # -- beside the chats -----------------------------------------------------------------

    async def sweep(self, *, limit: int = 100) -> list[LoggedRun]:
        """See :class:`DeliveryLog`. Crosses scopes; what cannot be read is logged and left."""
        ended: list[LoggedRun] = []
        for scope, head in await self._backend.log_lost(limit=limit):
            key = RunKey(run_id=head.run_id, scope=scope)
            try:
                closed = await self._end_lost(self._store(key), head.run_id)
            except (CorruptRecord, SchemaOutOfDate):
                # It must not keep the others from being ended.
                _log.exception("the log of run %r cannot be ended as lost", head.run_id)
                continue
            if closed:
                ended.append(_logged(key, head, finished=True))
        await self._backend.log_trim(closed_ms=self._keep_ms, limit=max(limit, 1000))
        return ended

    async def aclose(self) -> None:
        """See :class:`DeliveryLog`."""
        await self._hub.aclose()

    async def _told_of_loss(self, feed: Feed) -> None:
        await self._end_lost(feed.store, feed.run_id)

    async def _end_lost(self, store: LogBackend, run_id: str) -> bool:
        """Tell the viewers of a run whose writer is gone, and close its log; one of all that try
        does so."""
        token = secrets.token_urlsafe(16)
        head = await store.log_take(run_id, token, self._lease_ms, only_lost=True)
        if head is None:
            return False
        if not await _has_terminal(store, head):
            event = failed(
                "The worker that ran it is gone.",
                WORKER_LOST,
                thread_id=head.thread_id,
                run_id=run_id,
            )
            body = encode_event(event)
            await store.log_append(run_id, token, head.end, [body], lease_ms=self._lease_ms)
        _log.warning("the writer of run %r is gone; its log is closed", run_id)
        return await store.log_close(run_id, token)


class _Writer:
    """The writer of one run of a :class:`StoredLog`; keeps its lease while it lives."""

    def __init__(
        self,
        store: LogBackend,
        hub: Hub,
        head: LogHead,
        token: str,
        *,
        lease_ms: int,
        max_run_bytes: int,
    ) -> None:
        self._store = store
        self._hub = hub
        self._head = head
        self._token = token
        self._lease_ms = lease_ms
        self._max_bytes = max_run_bytes
        self._key = log_key(store.scope, head.run_id)
        self._next = head.end
        self._sizes: deque[int] = deque()
        self._size = 0
        self._unsure: list[bytes] = []
        self._unsure_from = 1
        self._order = asyncio.Lock()
        self._active = False
        self._ended = False
        self._keeper = asyncio.create_task(self._keep(), name=f"chatkeep log of {head.run_id}")

    async def append(self, events: Sequence[BaseEvent]) -> list[str]:
        """See :class:`LogWriter`.

        Raises:
            BackendUnavailable: the events may be there or not; the next append finds out.
        """
        bodies = [encode_event(event) for event in events]
        async with self._order:
            await self._settle()
            number = self._next
            if bodies:
                self._unsure, self._unsure_from = bodies, self._keep_from(bodies)
                await self._settle()
        head = self._head
        return [str(Offset(head.run_id, number + i, head.incarnation)) for i in range(len(bodies))]

    async def _settle(self) -> None:
        """Send what may not be there. A batch is sent again as it was: so it is there once."""
        bodies, number = self._unsure, self._next
        if not bodies:
            return
        try:
            await self._send(number, bodies, self._unsure_from)
        except BackendUnavailable:
            raise
        except RunConflict:
            self._unsure = []
            self._stop()
            raise
        except ChatkeepError:
            # Refused for what it is: nothing was stored, nor will be, and what comes next may be.
            self._unsure = []
            raise
        self._unsure = []
        self._next += len(bodies)
        self._active = True
        self._hub.published(self._key, number, bodies)

    async def _send(
        self,
        number: int,
        bodies: Sequence[bytes],
        keep_from: int = 1,
        *,
        lease_ms: int | None = None,
    ) -> None:
        await self._store.log_append(
            self._head.run_id,
            self._token,
            number,
            bodies,
            lease_ms=self._lease_ms if lease_ms is None else lease_ms,
            keep_from=keep_from,
        )

    def _keep_from(self, bodies: Sequence[bytes]) -> int:
        """The oldest event to keep if there are too many bytes, else 1. A quarter goes at once."""
        new = [len(body) for body in bodies]
        self._sizes += new
        self._size += sum(new)
        if self._size <= self._max_bytes:
            return 1
        while self._size > self._max_bytes * 3 // 4 and len(self._sizes) > 1:
            self._size -= self._sizes.popleft()
        return self._next + len(bodies) - len(self._sizes)

    async def close(self) -> None:
        """See :class:`LogWriter`."""
        if self._ended:
            return
        try:
            async with self._order:
                try:
                    await self._settle()
                finally:
                    self._stop()
                    await self._store.log_close(self._head.run_id, self._token)
                    self._hub.left(self._key)  # once more: now it is closed
        finally:
            self._stop()  # also if it never came to that: who is gone renews no lease

    async def leave(self, *, wait_ms: int = 0) -> None:
        """See :class:`LogWriter`."""
        try:
            async with self._order:
                if wait_ms and not self._ended:
                    await self._settle()
                    await self._send(self._next, [], lease_ms=wait_ms)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._ended = True
        self._keeper.cancel()
        self._hub.left(self._key)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            if self._active:  # an append has just done it
                self._active = False
                continue
            try:
                async with self._order:
                    await self._settle()
                    await self._send(self._next, [])
            except RunConflict as conflict:
                _log.warning("%s", conflict)
                self._hub.left(self._key)
                return
            except ChatkeepError as error:
                _log.warning("the lease of a log could not be renewed: %s", error)


def _log_backend(persistence: Persistence) -> LogBackend:
    runs = persistence.stores.runs
    first = None if runs is None else backend_of(persistence, runs)
    candidates: list[Backend] = [*([] if first is None else [first]), *persistence.backends]
    for backend in candidates:
        if isinstance(backend, LogBackend):
            return backend
    names = ", ".join(dict.fromkeys(backend.name for backend in candidates)) or "a user's stores"
    raise CompositionError(
        f"{names}: no delivery log can be kept there. Give StoredLog a persistence on PostgreSQL, "
        "SQLite or Redis, beside the one that keeps the chats; or leave log= out: then each "
        "process keeps the events of its own runs"
    )


def _logged(key: RunKey, head: LogHead, *, finished: bool = False) -> LoggedRun:
    return LoggedRun(
        key=key,
        thread_id=head.thread_id,
        finished=head.closed or finished,
        complete=head.first == 1,
    )


def _start(head: LogHead, after: str) -> int:
    """The number of the first event after ``after``."""
    if after == FROM_NOW:
        return head.end
    number = 0
    if after != FROM_START:
        parsed = Offset.parse(after)
        mine = (head.run_id, head.incarnation)
        if parsed is None or (parsed.run_id, parsed.incarnation) != mine:
            raise UnknownOffset(head.run_id, after)
        number = parsed.number
        if not 0 < number < head.end:
            raise UnknownOffset(head.run_id, after)
    if number + 1 < head.first:
        raise EventsTrimmed(head.run_id)
    return number + 1


def _events(head: LogHead, number: int, bodies: Sequence[bytes]) -> list[LoggedEvent]:
    prefix = str(Offset(head.run_id, 0, head.incarnation))[:-1]
    return [LoggedEvent(f"{prefix}{number + i}", body) for i, body in enumerate(bodies)]


async def _has_terminal(store: LogBackend, head: LogHead) -> bool:
    """Whether the writer died between its last event and closing."""
    if head.end == head.first:
        return False
    page = await store.log_read(head.run_id, head.end - 1, limit=1, max_bytes=_READ_BYTES)
    return (
        page is not None
        and bool(page.bodies)
        and decode(page.bodies[0], "event").get("type") in TERMINAL_TYPES
    )
