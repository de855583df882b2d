"""What is kept of a run while it streams: drafts, activity rows, its lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ag_ui.core import ActivityDeltaEvent, ActivitySnapshotEvent

from chatkeep.engine.middleware import ChatContext, Event
from chatkeep.persistence.activity_saver import ActivitySaver
from chatkeep.persistence.drafts import Drafts
from chatkeep.persistence.foreign import ANSWER_SECONDS
from chatkeep.persistence.layout import Layout
from chatkeep.persistence.lease import LeaseKeeper
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import ModelMessage

__all__ = ["InFlight"]


class InFlight:
    """The background writes of one run.

    Args:
        layout: the stores.
        work: the run's unit of work.
        lease_ms: length of the lease.
        snapshot_ms: interval of drafts and of activity rows; None: neither is written.
        save_activities: writes the rows so far.
        reports: told of failures.
    """

    def __init__(
        self,
        layout: Layout,
        work: UnitOfWork,
        *,
        lease_ms: int,
        snapshot_ms: int | None,
        save_activities: Callable[[], Awaitable[None]],
        reports: Reports,
    ) -> None:
        self._work = work
        run_id = work.run_id
        self.lease = LeaseKeeper(work, run_id=run_id, lease_ms=lease_ms, reports=reports)
        self.drafts: Drafts | None = None
        self._saver: ActivitySaver | None = None
        self._shown: object = None
        if snapshot_ms is None:
            return
        self.drafts = Drafts(work, run_id=run_id, interval_ms=snapshot_ms, reports=reports)
        if layout.stores.activities is not None:
            self._saver = ActivitySaver(
                save_activities,
                run_id=run_id,
                interval_ms=snapshot_ms,
                # Only a store of ours refuses a write that comes after the run has ended.
                patience=ANSWER_SECONDS if layout.backend("activities") is None else 0.25,
                reports=reports,
            )

    def start(self, ctx: ChatContext) -> None:
        """The run is recorded: keep it alive."""
        self._shown = ctx.activities
        if self._work.leased:
            self.lease.start(ctx)

    def observe(
        self, ctx: ChatContext, event: Event, produced: Callable[[], Sequence[ModelMessage]]
    ) -> None:
        """An event is about to be published: perhaps a draft is due. ``produced`` gives what the
        run has finished, in stored form."""
        if self.drafts is None:
            return
        if self.drafts.observe(event):
            self.drafts.save(produced(), self._work.run_id)
        if self._saver is not None and (
            isinstance(event, ActivitySnapshotEvent | ActivityDeltaEvent)
            or ctx.activities is not self._shown
        ):
            self._shown = ctx.activities
            self._saver.touch()

    async def close(self, ctx: ChatContext) -> None:
        """The run is about to end: nothing more is written behind its back."""
        if self.drafts is not None:
            await self.drafts.close(ctx)
        if self._saver is not None:
            await self._saver.close(ctx)
        self.lease.stop(ctx)
