"""What the readers of a process share: one feed for each run that somebody follows.

A feed keeps the newest events of its run, so that ten viewers cost one read. It learns of new
ones from the writer, if that is in this process; else the database tells, or is asked every now
and then, for all runs at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from chatkeep.errors import ChatkeepError, StoreClosed
from chatkeep.logs import LogBackend, LogHead, log_key

__all__ = ["Feed", "Hub"]

_log = logging.getLogger("chatkeep.delivery")

_PAGE_EVENTS = 512
_PAGE_BYTES = 1 << 20
_AT_ONCE = 8
"""How many runs are read at once: a pool has other things to do."""
_IDLE = 10.0
"""Seconds without a reader after which nobody asks any more."""
_SAFETY = 2.0
"""Seconds between two questions while the database tells by itself: a connection may be half
dead, and a writer's death is told by nobody."""
_AFTER_FAILURE = 1.0


class Feed:
    """The newest events of one run; ``first`` is the number of ``window[0]``, ``end`` the one
    behind the last. ``closed``: nothing comes behind it. ``gone``: the log is no longer kept.
    ``stopped``: nobody here asks for it any more."""

    def __init__(self, key: bytes, store: LogBackend, head: LogHead) -> None:
        self.key = key
        self.store = store
        self.run_id = head.run_id
        self.incarnation = head.incarnation
        self.first = head.end
        self.window: list[bytes] = []
        self.size = 0
        self.closed = head.closed
        self.gone = False
        self.stopped = False
        self.local = False
        self.readers = 0
        self.news = asyncio.Event()
        self.reading = asyncio.Lock()

    @property
    def end(self) -> int:
        """The number behind the newest event."""
        return self.first + len(self.window)

    @property
    def over(self) -> bool:
        """Whether nothing more can come."""
        return self.closed or self.gone or self.stopped

    def wake(self) -> None:
        """Let every reader that waits look again."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def add(self, number: int, bodies: Sequence[bytes]) -> bool:
        """Take events over; those that are there already are passed over. False: some between
        are missing."""
        if number > self.end:
            return False
        new = bodies[self.end - number :]
        if new:
            self.window += new
            self.size += sum(map(len, new))
            drop = 0
            while self.size > _PAGE_BYTES and drop < len(self.window) - 1:
                self.size -= len(self.window[drop])
                drop += 1
            if drop:
                del self.window[:drop]
                self.first += drop
            self.wake()
        return True

    def end_at(self, *, gone: bool) -> None:
        """Nothing comes any more."""
        self.gone, self.closed = self.gone or gone, self.closed or not gone
        self.wake()

    def stop(self) -> None:
        """Let the readers go: they find what comes next in another process."""
        self.stopped = True
        self.wake()

    def batch(self, number: int) -> list[bytes]:
        """Some of the events from ``number`` on, which is in the window."""
        return self.window[number - self.first : number - self.first + _PAGE_EVENTS]

    async def page(self, number: int) -> list[bytes]:
        """The same from the store, for a reader that is behind; nothing if they are gone."""
        page = await self.store.log_read(
            self.run_id, number, limit=_PAGE_EVENTS, max_bytes=_PAGE_BYTES
        )
        if page is None or page.head.incarnation != self.incarnation:
            return []
        return page.bodies


class Hub:
    """All feeds of a process on one backend.

    Args:
        backend: reads heads, and hears of changes.
        poll: seconds between two questions where the database tells nothing.
        on_lost: called when the writer of a followed run is gone.
    """

    def __init__(
        self, backend: LogBackend, *, poll: float, on_lost: Callable[[Feed], Awaitable[object]]
    ) -> None:
        self._backend = backend
        self._poll = poll
        self._on_lost = on_lost
        self._feeds: dict[bytes, Feed] = {}
        self._stale: set[bytes] = set()
        self._kick = asyncio.Event()
        self._listening = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- readers ----------------------------------------------------------------------

    def join(self, store: LogBackend, head: LogHead) -> Feed:
        """The feed of a log, for one more reader, who must :meth:`leave` it."""
        key = log_key(store.scope, head.run_id)
        known = self._feeds.get(key)
        if known is not None and known.incarnation == head.incarnation:
            feed = known
        else:
            feed = self._feeds[key] = Feed(key, store, head)
            self._look_at(key)
        feed.readers += 1
        self._start()
        return feed

    def leave(self, feed: Feed) -> None:
        """A reader has left."""
        feed.readers -= 1
        if not feed.readers and self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]

    # -- the writer, if it is here --------------------------------------------------------

    def published(self, key: bytes, number: int, bodies: Sequence[bytes]) -> None:
        """A writer of this process has appended."""
        feed = self._feeds.get(key)
        if feed is not None:
            feed.local = True
            if not feed.add(number, bodies):
                self._look_at(key)

    def left(self, key: bytes) -> None:
        """A writer of this process has closed its log, or is no longer its writer."""
        feed = self._feeds.get(key)
        if feed is not None:
            feed.local = False
            self._look_at(key)

    # -- news from elsewhere ---------------------------------------------------------------

    def _look_at(self, key: bytes) -> None:
        self._stale.add(key)
        self._kick.set()

    def _heard(self, key: bytes | None) -> None:
        if key is None:
            self._listening = True
            for feed in self._feeds.values():
                self._look_at(feed.key)
        elif (known := self._feeds.get(key)) is not None and not known.local:
            self._look_at(key)

    def _start(self) -> None:
        if not self._tasks or self._tasks[0].done():
            self._kick = asyncio.Event()  # an event belongs to the loop that waited for it
            self._kick.set()
            self._tasks = [
                asyncio.create_task(self._run(), name="chatkeep log readers"),
                asyncio.create_task(self._listen(), name="chatkeep log listener"),
            ]

    async def aclose(self) -> None:
        """Stop asking and listening, and let the readers go."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._listening = False
        for feed in self._feeds.values():
            feed.stop()
        self._feeds.clear()

    async def _listen(self) -> None:
        while True:
            try:
                await self._backend.log_listen(self._heard)
            except StoreClosed:
                return
            except ChatkeepError as error:
                self._listening = False
                _log.warning("changes of logs are not told any more, so they are asked: %s", error)
            else:
                self._listening = False
                return  # a database that tells nobody anything
            await asyncio.sleep(_AFTER_FAILURE)

    async def _run(self) -> None:
        idle = 0.0
        while True:
            wait = _SAFETY if self._listening else self._poll
            try:
                async with asyncio.timeout(wait):
                    await self._kick.wait()
            except TimeoutError:
                idle = 0.0 if self._feeds else idle + wait
                if idle > _IDLE:
                    self._tasks.pop().cancel()
                    self._listening = False
                    return
                self._stale.update(feed.key for feed in self._feeds.values() if not feed.local)
            self._kick.clear()
            stale, self._stale = self._stale, set()
            try:
                await self._refresh(
                    [feed for feed in self._feeds.values() if feed.key in stale and not feed.over]
                )
            except StoreClosed:
                for each in list(self._feeds.values()):
                    each.stop()
            except ChatkeepError as error:
                _log.warning("logs could not be read; the next try comes: %s", error)
                self._stale |= stale
                await asyncio.sleep(_AFTER_FAILURE)

    async def _refresh(self, feeds: Sequence[Feed]) -> None:
        """Look at the heads of all at once, and read those that have moved."""
        heads = await self._backend.log_heads([feed.key for feed in feeds])
        moved: list[Feed] = []
        for feed in feeds:
            head = heads.get(feed.key)
            if head is None or head.incarnation != feed.incarnation:
                feed.end_at(gone=True)
            elif head.end != feed.end or head.closed:
                moved.append(feed)
            elif head.lost:
                await self._on_lost(feed)
                moved.append(feed)
        for start in range(0, len(moved), _AT_ONCE):
            await asyncio.gather(*map(self._catch_up, moved[start : start + _AT_ONCE]))

    async def _catch_up(self, feed: Feed) -> None:
        async with feed.reading:
            while not feed.over:
                page = await feed.store.log_read(
                    feed.run_id, feed.end, limit=_PAGE_EVENTS, max_bytes=_PAGE_BYTES
                )
                if page is None or page.head.incarnation != feed.incarnation:
                    feed.end_at(gone=True)
                    return
                feed.add(page.number, page.bodies)
                if feed.end < page.head.first:
                    # Trimmed before anybody here has read it.
                    feed.first, feed.window, feed.size = page.head.first, [], 0
                elif feed.end >= page.head.end:
                    if page.head.closed:
                        feed.end_at(gone=False)
                    return
                elif not page.bodies:
                    return
