"""``with_persistence``: the hooks of a chat, each wired to the run's turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from chatkeep._bag import Persistence
from chatkeep.engine.middleware import (
    AbortInfo,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    ErrorInfo,
    Event,
    FinishInfo,
    Usage,
)
from chatkeep.errors import CompositionError
from chatkeep.persistence.capabilities import (
    INTERRUPTS,
    METADATA,
    PERSISTENCE,
    PERSISTENCE_COMPLETION,
)
from chatkeep.persistence.layout import Layout, chat_layout
from chatkeep.persistence.reports import CounterName, Phase, Reports
from chatkeep.persistence.shielding import to_the_end
from chatkeep.persistence.takeover import RunClaim
from chatkeep.persistence.turn import Turn

__all__ = ["PersistenceMiddleware", "with_persistence"]


def with_persistence(
    persistence: Persistence,
    *,
    snapshot_streaming: bool = False,
    snapshot_interval_ms: int = 1000,
    lease_ms: int = 30_000,
    claim: RunClaim | None = None,
    on_persistence_error: Callable[[Phase, BaseException], object] | None = None,
) -> PersistenceMiddleware:
    """Keep a chat: its messages, runs and whatever else ``persistence`` has stores for.

    One middleware serves any number of runs at once. It changes no event. What a run writes:

    * start: the posted messages and the run, with a lease, in one commit. Best effort for the
      messages: a failure does not stop the run. A run that answers questions claims them here,
      which must succeed: whoever comes too late is refused before anything executes;
    * interrupt: the questions, the transcript so far, usage and the parked run, in one commit
      before the terminal event is published. Must succeed. It settles what the run answered;
    * finish: the answer, usage and the run's end, likewise;
    * error, abort: the run's end, and with ``snapshot_streaming`` the part of the answer that was
      there, marked with its ``stopReason``. A regenerate leaves the old answer as it was. Claims
      end with the run, and what it answered can be answered anew.

    With an interrupt store, answers (``resume``) are checked against what is stored, and input is
    refused while a question of this chat waits. A refusal writes nothing.

    Args:
        persistence: ``messages`` is needed; ``interrupts`` needs ``runs``.
        snapshot_streaming: also keep what has been streamed so far, in a draft slot beside
            the transcript.
        snapshot_interval_ms: at most one draft in this time; the first at once.
        lease_ms: how long a run counts as alive after its process died; renewed every third.
        claim: what :func:`claim_run` gave: the chat of that run drives it on instead of starting
            it.
        on_persistence_error: called with the moment and the error whenever a write failed.

    Raises:
        CompositionError: a store is missing, or drafts are asked for and the runs store has
            none.
    """
    if snapshot_interval_ms < 0:
        raise CompositionError("snapshot_interval_ms must not be negative")
    if lease_ms < 1:
        raise CompositionError("lease_ms must be at least 1")
    layout = chat_layout(persistence, "with_persistence")
    if snapshot_streaming and layout.backend("runs") is None:
        raise CompositionError(
            "snapshot_streaming keeps drafts beside the runs: it needs a runs store of a backend "
            "that can commit turns (postgres, sqlite, memory, …)"
        )
    kind = _Snapshotting if snapshot_streaming else PersistenceMiddleware
    return kind(
        persistence,
        layout,
        snapshot_ms=snapshot_interval_ms if snapshot_streaming else None,
        lease_ms=lease_ms,
        claim=claim,
        reports=Reports(on_persistence_error),
    )


class PersistenceMiddleware(ChatMiddleware):
    """What :func:`with_persistence` returns."""

    name = "chat-persistence"

    def __init__(
        self,
        persistence: Persistence,
        layout: Layout,
        *,
        snapshot_ms: int | None,
        lease_ms: int,
        claim: RunClaim | None,
        reports: Reports,
    ) -> None:
        self._claim = claim
        self._persistence = persistence
        self._layout = layout
        self._snapshot_ms = snapshot_ms
        self._lease_ms = lease_ms
        self._reports = reports
        self.provides = tuple(
            capability
            for capability, there in (
                (PERSISTENCE, True),
                (PERSISTENCE_COMPLETION, True),
                (INTERRUPTS, layout.stores.interrupts is not None),
                (METADATA, layout.stores.metadata is not None),
            )
            if there
        )

    @property
    def persistence(self) -> Persistence:
        """The stores that runs are kept in."""
        return self._persistence

    @property
    def counters(self) -> Counter[CounterName]:
        """What happened so far, over all runs of this middleware."""
        return self._reports.counters

    def _turn(self, ctx: ChatContext) -> Turn:
        claim = self._claim
        return ctx.state(
            self,
            lambda: Turn(
                self._layout,
                ctx,
                lease_ms=self._lease_ms,
                snapshot_ms=self._snapshot_ms,
                claimed=claim.token if claim and claim.run.run_id == ctx.run_id else None,
                reports=self._reports,
            ),
        )

    async def setup(self, ctx: ChatContext) -> None:
        """Provide the stores; touches none of them.

        Raises:
            CompositionError: the chat is kept by another ``with_persistence`` already.
        """
        if ctx.get(PERSISTENCE, optional=True) is not None:
            raise CompositionError(
                "two with_persistence in one chat would drive the same run twice: compose the "
                "stores with compose_persistence and keep one"
            )
        ctx.provide(PERSISTENCE, self._persistence)
        ctx.provide(PERSISTENCE_COMPLETION, self._turn(ctx).completion)
        stores = self._layout.stores
        if stores.interrupts is not None:
            ctx.provide(INTERRUPTS, stores.interrupts)
        if stores.metadata is not None:
            ctx.provide(METADATA, stores.metadata)

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
        """At init: read, gate, merge. Before a model call: a new draft."""
        turn = self._turn(ctx)
        if ctx.phase == "init":
            return await turn.open(ctx, config)
        turn.next_call(ctx)
        return None

    async def on_start(self, ctx: ChatContext) -> None:
        """The start boundary."""
        await to_the_end(self._turn(ctx).start(ctx))

    async def on_usage(self, ctx: ChatContext, usage: Usage) -> None:
        """Add up what the model calls report."""
        self._turn(ctx).count(usage)

    async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
        """The interrupt boundary."""
        await to_the_end(self._turn(ctx).pause(ctx, event))

    async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
        """The finish boundary."""
        await to_the_end(self._turn(ctx).finish(ctx, info))

    async def on_error(self, ctx: ChatContext, info: ErrorInfo) -> None:
        """Record the failure."""
        await to_the_end(self._turn(ctx).fail(ctx, info))

    async def on_abort(self, ctx: ChatContext, info: AbortInfo) -> None:
        """Record the stop, or leave a detachable run to others."""
        await to_the_end(self._turn(ctx).abort(ctx, info))


class _Snapshotting(PersistenceMiddleware):
    """With drafts. Without them no event passes through here at all."""

    async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
        """Perhaps keep a draft; the event stays as it is."""
        self._turn(ctx).observe(ctx, event)
