"""Keeping a run's lease while it streams, and noticing what others did to the run.

The keeper's task never outlives its run: it holds the run's context weakly, so a stream that
was dropped without being closed does not keep its run "active" for ever.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Protocol

from chatkeep.engine.abort import CANCEL_REQUESTED
from chatkeep.engine.middleware import ChatContext
from chatkeep.errors import RunConflict
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.shielding import quietly
from chatkeep.records import RunRecord

__all__ = ["LEASE_LOST", "LeaseKeeper"]

LEASE_LOST = "chatkeep:lease-lost"
"""The abort reason of a run whose lease somebody else holds, or whose record is gone."""


class _Renewal(Protocol):
    async def renew_lease(self, lease_ms: int) -> RunRecord | None: ...


class LeaseKeeper:
    """Renews the lease every third of its length.

    A lost lease aborts the run with :data:`LEASE_LOST`; a recorded wish to cancel aborts it with
    the cancel reason. A renewal that fails for want of a database is reported and tried again:
    a lease that ran out is still ours until somebody takes it.
    """

    __slots__ = ("_lease_ms", "_reports", "_run_id", "_store", "_task", "cancel_requested", "lost")

    def __init__(self, store: _Renewal, *, run_id: str, lease_ms: int, reports: Reports) -> None:
        self._store = store
        self._run_id = run_id
        self._lease_ms = lease_ms
        self._reports = reports
        self._task: asyncio.Task[None] | None = None
        self.lost: RunConflict | None = None
        self.cancel_requested = False

    def start(self, ctx: ChatContext) -> None:
        """Begin to renew."""
        task = asyncio.create_task(
            self._keep(weakref.ref(ctx)), name=f"chatkeep lease of {self._run_id}"
        )
        self._task = task

    def stop(self, ctx: ChatContext) -> None:
        """Renew no more; the run has ended. The engine waits for the task with what a run
        deferred."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            ctx.defer(quietly(task))

    async def _keep(self, run: Callable[[], ChatContext | None]) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            if run() is None:
                return
            try:
                record = await self._store.renew_lease(self._lease_ms)
            except RunConflict as error:
                self.lose(error)
                _abort(run(), LEASE_LOST)
                return
            except Exception as error:  # noqa: BLE001 - reported; the next renewal may succeed
                self._reports.failure("lease", error, run_id=self._run_id)
                continue
            if record is not None and record.cancel_requested:
                self.cancel_requested = True
                _abort(run(), CANCEL_REQUESTED)

    def lose(self, error: RunConflict) -> None:
        """Take note that this run is not ours any more: nothing is written from now on."""
        if self.lost is None:
            self.lost = error
            self._reports.count("leases_lost")


def _abort(ctx: ChatContext | None, reason: str) -> None:
    if ctx is not None:
        ctx.abort(reason)
