"""Activity rows while the run streams: saved with the streaming snapshots.

At most one write at a time and one an interval, the first at once, in the background. What a run
has shown is there for a reload, and stays if its process dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from chatkeep.engine.middleware import ChatContext
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.shielding import quietly

__all__ = ["ActivitySaver"]


class ActivitySaver:
    """Calls ``save`` when rows may have changed.

    Args:
        save: writes what is new; it looks itself.
        run_id: named in reports.
        interval_ms: at most one write in this time.
        patience: seconds that the end of the run waits for a write that is on its way.
        reports: told of failures; the run goes on.
    """

    def __init__(
        self,
        save: Callable[[], Awaitable[None]],
        *,
        run_id: str,
        interval_ms: int,
        patience: float,
        reports: Reports,
    ) -> None:
        self._save = save
        self._run_id = run_id
        self._interval = interval_ms / 1000
        self._patience = patience
        self._reports = reports
        self._task: asyncio.Task[None] | None = None
        self._last: float | None = None
        self._due = self._writing = self._closed = False

    def touch(self) -> None:
        """Rows may have changed, or will when the hooks are done with an event."""
        self._due = True
        if self._closed or (self._task is not None and not self._task.done()):
            return
        self._task = asyncio.create_task(self._run(), name=f"chatkeep activities of {self._run_id}")

    async def _run(self) -> None:
        while self._due and not self._closed:
            wait = 0.0 if self._last is None else self._last + self._interval - time.monotonic()
            await asyncio.sleep(max(wait, 0.0))
            self._due, self._writing = False, True
            self._last = time.monotonic()
            try:
                await self._save()
            except Exception as error:  # noqa: BLE001 - reported; the run goes on
                if not self._closed:
                    self._reports.failure("activities", error, run_id=self._run_id)
            finally:
                self._writing = False

    async def close(self, ctx: ChatContext) -> None:
        """No more writes: the run is about to end, and writes the rows itself."""
        self._closed = True
        task, self._task = self._task, None
        if task is None or task.done():
            return
        if not self._writing:
            task.cancel()
        await asyncio.wait({task}, timeout=self._patience)
        if not task.done():
            ctx.defer(quietly(task))
