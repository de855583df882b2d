"""One run between its first read and its last commit: the moments at which it writes.

start: the question, and the run with its lease and its claims. interrupt: what it answered, what
it asks, the parked run. finish: what it answered, the answer, the usage, the end. Each is one
commit, and the terminal event is published after it. error, abort: the end, and what a draft kept
of the answer. A boundary is made once; retries and re-merges keep its commit ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal

from chatkeep.engine.abort import HAND_OVER
from chatkeep.engine.middleware import (
    AbortInfo,
    ChatConfig,
    ChatContext,
    ErrorInfo,
    Event,
    FinishInfo,
    Usage,
)
from chatkeep.engine.usage import add_usage
from chatkeep.errors import (
    BackendUnavailable,
    InterruptConflict,
    InvalidValue,
    RecordTooLarge,
    RunConflict,
)
from chatkeep.messages import stable_ids
from chatkeep.persistence.activities import RunActivities, before_cut, merge_activities
from chatkeep.persistence.boundary import Boundary
from chatkeep.persistence.capabilities import DETACHABLE
from chatkeep.persistence.committer import Committer
from chatkeep.persistence.completion import RunCompletion
from chatkeep.persistence.endings import (
    ended,
    failure_of,
    now_ms,
    parked,
    questions,
    up_to_last_result,
    withdrawn,
)
from chatkeep.persistence.gate import admit, check_run
from chatkeep.persistence.in_flight import InFlight
from chatkeep.persistence.layout import Layout
from chatkeep.persistence.posting import merge_post
from chatkeep.persistence.reports import Phase, Reports
from chatkeep.persistence.resume import Resume
from chatkeep.persistence.transcript import RunTranscript
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import InterruptRecord, ModelMessage, RunError, RunPatch, RunStatus
from chatkeep.rules import ANCHOR
from chatkeep.stores import InterruptAnswer, RunStart

__all__ = ["HAND_OVER_MS", "Turn"]

HAND_OVER_MS: Final = 300_000
"""How long a run that was handed over waits for a claim before it counts as lost."""


class Turn:
    """The persistence of one run; made at setup, done after its terminal hook.

    Args:
        layout: the stores.
        ctx: names thread and run.
        lease_ms: length of the lease; renewed every third of it.
        snapshot_ms: interval of drafts; None: no drafts.
        claimed: the lease token of a run that is driven on; None: the run is started.
        reports: counters and callback.
    """

    def __init__(
        self,
        layout: Layout,
        ctx: ChatContext,
        *,
        lease_ms: int,
        snapshot_ms: int | None,
        claimed: str | None = None,
        reports: Reports,
    ) -> None:
        self._claimed = claimed
        self._layout = layout
        self._reports = reports
        self._run_id = ctx.run_id
        self._thread_id = ctx.thread_id
        self._lease_ms = lease_ms
        leased = layout.backend("runs") is not None or layout.desk is not None
        self._token = (claimed or secrets.token_urlsafe(16)) if leased else None
        self._work = UnitOfWork(
            layout, ctx.thread_id, ctx.run_id, lease_token=self._token, reports=reports
        )
        if claimed is not None:
            self._work.drives_on()
        self._transcript = RunTranscript(ctx.run_id)
        self._committer = Committer(
            self._work, self._transcript, run_id=ctx.run_id, reports=reports
        )
        self._activities = RunActivities(ctx.run_id, reports)
        self._flight = InFlight(
            layout,
            self._work,
            lease_ms=lease_ms,
            snapshot_ms=snapshot_ms,
            save_activities=partial(self._save_activities, ctx),
            reports=reports,
        )
        self._lease = self._flight.lease
        self._usage: Usage | None = None
        self._resume: Resume | None = None
        self._asked: Sequence[InterruptRecord] = ()
        self._hide: tuple[int, int] | None = None
        self._drop_draft = self._flight.drafts is not None
        self._began = now_ms()
        self._started = False
        self._ended = False
        self._refused = False
        self.completion = RunCompletion()

    # -- init -------------------------------------------------------------------------

    async def open(self, ctx: ChatContext, config: ChatConfig) -> dict[str, Any]:
        """Read, let nobody past the gate who may not pass, merge what was posted.

        Raises:
            RunConflict, InterruptResumeError: see :mod:`chatkeep.persistence.gate`.
            UnseenMessages: the post would cut what its client never saw.
            StoreError: the store cannot be read.
        """
        opening = await self._work.open()
        check_run(opening, self._run_id, self._thread_id, claimed=self._claimed)
        resume = await admit(self._work, opening, config, parent_run_id=ctx.parent_run_id)
        self._resume = resume
        posted = await merge_post(
            self._work,
            opening,
            config,
            ctx,
            began=self._began,
            continues=None if resume is None else resume.run_id,
        )
        self._transcript.loaded(posted.stored, apart=posted.apart)
        ctx.behind = posted.behind
        self._hide = posted.hide
        self._transcript.deferred_cut = posted.hide is not None
        patch: dict[str, Any] = {"messages": posted.messages}
        if resume is not None:
            patch["resume"] = []
            patch["resume_tool_state"] = resume.state
        if self._layout.stores.activities is not None:
            rows = opening.activities
            if posted.kept is not None and rows:
                thread = opening.transcript
                rows = before_cut(
                    rows,
                    stable_ids(thread.messages, numbers=thread.numbers),
                    kept=posted.kept,
                    end=posted.stored.messages,
                    back={name for m in posted.messages if (name := m.get("id"))},
                )
            self._activities.loaded(opening.activities, rows)
            patch["activities"] = merge_activities(rows, config.activities)
        self._drop_draft |= opening.run is not None and self._layout.backend("runs") is not None
        return patch

    # -- start ------------------------------------------------------------------------

    async def start(self, ctx: ChatContext) -> None:
        """The start boundary: the question, the answers' claims and the run, in one commit.

        The transcript part is best effort, the run and its claims are not: what cannot be written
        with the question is tried without it. A value that no store will ever take fails the
        run here, before a model is paid for it.

        Raises:
            RunConflict: somebody else drives this run.
            InterruptResumeError: somebody else's answer came first; nothing was written.
            InvalidValue, RecordTooLarge: the question cannot be stored.
            StoreError: the run could not be recorded.
        """
        self._transcript.begins(ctx.messages)
        resume = self._resume
        boundary = Boundary(
            run=self._run_start(ctx), claims=() if resume is None else resume.claims
        )
        try:
            await self._begin(boundary, ctx)
        except InterruptConflict as conflict:
            if resume is None:
                raise
            self._started = False
            raise resume.lost_to_another(conflict.interrupt_ids) from conflict
        self._started = True
        if boundary.activities is not None:
            boundary.activities.settle()
        if boundary.record is not None and boundary.record.usage is not None:
            self._usage = dict(boundary.record.usage)
        self._flight.start(ctx)

    async def _begin(self, boundary: Boundary, ctx: ChatContext) -> None:
        try:
            await self._fill(boundary, ctx, ctx.messages)
            await self._committer.commit(boundary, ctx.messages)
        except (RunConflict, InterruptConflict, InvalidValue, RecordTooLarge):
            raise
        except Exception as error:  # noqa: BLE001 - reported; foreign stores raise anything
            self._reports.failure("start", error, run_id=self._run_id)
            boundary.change = boundary.activities = None
            # If the reply to this is lost, the run may be there: then it must be ended.
            self._started = True
            await self._work.commit(boundary)

    def _run_start(self, ctx: ChatContext) -> RunStart | None:
        if self._layout.stores.runs is None or self._claimed is not None:
            return None
        extra: dict[str, Any] = {}
        if self._transcript.anchor_id is not None:
            extra[ANCHOR] = self._transcript.anchor_id
        if self._hide is not None:
            extra["hideThrough"] = self._hide[1]
        return RunStart(
            run_id=self._run_id,
            started_at=now_ms(),
            lease_token=self._token,
            lease_ms=self._lease_ms,
            parent_run_id=ctx.parent_run_id,
            hide_from=None if self._hide is None else self._hide[0],
            extra=extra,
        )

    # -- while it streams ---------------------------------------------------------------

    def count(self, usage: Usage) -> None:
        """One more model call reported its usage."""
        if not self._ended:
            self._usage = add_usage(self._usage, usage)

    def next_call(self, ctx: ChatContext) -> None:
        """A model call is about to begin."""
        if self._flight.drafts is not None:
            border = self._transcript.border(ctx.messages)
            self._flight.drafts.reset(len(ctx.messages) - border)

    def observe(self, ctx: ChatContext, event: Event) -> None:
        """An event is about to be published: perhaps a draft is due."""
        if self._started:
            self._flight.observe(ctx, event, lambda: self._transcript.produced(ctx.messages))

    # -- the ends -----------------------------------------------------------------------

    async def finish(self, ctx: ChatContext, info: FinishInfo) -> None:
        """The finish boundary. What could not be written ends the run as failed.

        Raises:
            RunConflict: the lease was lost; nothing was written.
            StoreError: the answer could not be stored.
        """
        if self._ended:
            return
        self._ended = True
        await self._flight.close(ctx)
        if self._lease.lost is not None:
            self.completion.settle("failed", self._lease.lost)
            raise self._lease.lost
        if self._usage is None and info.usage is not None:
            self._usage = dict(info.usage)
        boundary = Boundary(
            answers=self._answers(),
            run=self._run(ended("completed", usage=self._usage)),
            drop_draft=self._drop_draft,
        )
        try:
            await self._fill(boundary, ctx, ctx.messages)
            await self._committer.commit(boundary, ctx.messages, patient=True)
        except RunConflict as error:
            self._not_ours(error, "finish")
            self.completion.settle("failed", error)
            raise
        except Exception as error:
            self._reports.failure("finish", error, run_id=self._run_id)
            await self._end_badly(ctx, "failed", failure_of(error), phase="finish")
            if not (isinstance(error, BackendUnavailable) and await self._is("completed")):
                self.completion.settle("failed", error)
                raise
        self._show_seen(ctx)
        self.completion.settle("completed")

    async def _is(self, status: RunStatus) -> bool:
        """Whether the boundary that seemed to fail was applied after all."""
        try:
            run = await self._work.read_run()
        except Exception:  # noqa: BLE001 - the failure of the boundary itself is what is reported
            return False
        parked = run is not None and (status != "interrupted" or run.lease is None)
        return run is not None and run.status == status and parked

    def _answers(self) -> Sequence[InterruptAnswer]:
        """What this run was started with: settled with the first boundary that succeeds."""
        return () if self._resume is None else self._resume.answers

    async def pause(self, ctx: ChatContext, event: Event) -> None:
        """The interrupt boundary: the answers that the run was started with, the questions, the
        transcript so far, and the run parked without a lease, in one commit before anybody sees
        the terminal event.

        Raises:
            InterruptConflict: an interrupt of this run has that id already.
            RunConflict: the lease was lost; nothing was written.
            StoreError: it could not be stored; the run then fails.
        """
        await self._flight.close(ctx)
        if self._lease.lost is not None:
            raise self._lease.lost
        asked: list[InterruptRecord] = []
        if self._layout.stores.interrupts is not None:
            asked = questions(event, thread_id=self._thread_id, run_id=self._run_id)
        boundary = Boundary(
            answers=self._answers(),
            interrupts=asked,
            run=self._run(parked(self._usage)),
            drop_draft=self._drop_draft,
        )
        try:
            await self._fill(boundary, ctx, ctx.messages)
            await self._committer.commit(boundary, ctx.messages, patient=True)
        except Exception as error:
            self._reports.failure("interrupt", error, run_id=self._run_id)
            if not (isinstance(error, BackendUnavailable) and await self._is("interrupted")):
                if "interrupts" in boundary.done:
                    self._asked = asked
                raise
        self._ended = True
        self._asked, self._resume = asked, None
        self._work.parked()
        self._show_seen(ctx)
        self.completion.settle("interrupted")

    async def fail(self, ctx: ChatContext, info: ErrorInfo) -> None:
        """The run failed: record it, keep what a draft has of the answer, unless a hook
        refused it. A pause that is stored already, and that a later hook refused, is taken back:
        nobody is shown it."""
        if self.completion.outcome == "interrupted":
            failure = RunError(message=info.message, code=info.code)
            await self._end_badly(ctx, "failed", failure, phase="error")
        elif not self._ended:
            self._ended = True
            self._refused = info.refused
            await self._flight.close(ctx)
            if self._may_end():
                failure = RunError(message=info.message, code=info.code)
                await self._end_badly(ctx, "failed", failure, phase="error")
            await self._work.release()
        self.completion.settle("failed", info.error)

    async def abort(self, ctx: ChatContext, info: AbortInfo) -> None:
        """The run was stopped: for good, or only its viewer left a run that can go on."""
        if self._ended:
            return
        self._ended = True
        await self._flight.close(ctx)
        if self._lease.lost is not None:
            await self._work.release()
            self.completion.settle("failed", self._lease.lost)
            return
        if not self._may_end():
            await self._work.release()
            self.completion.settle("aborted")
        elif await self._aborts_for_good(ctx, info):
            refused = await self._end_badly(ctx, "aborted", None, phase="abort")
            self.completion.settle("aborted" if refused is None else "failed", refused)
        else:
            if info.reason == HAND_OVER:
                await self._hand_over()
            self.completion.settle("detached")

    async def _hand_over(self) -> None:
        """Best effort: left alone, the lease runs out."""
        try:
            await self._work.hand_over(now_ms(), HAND_OVER_MS)
        except Exception as error:  # noqa: BLE001 - reported; foreign stores raise anything
            self._reports.failure("abort", error, run_id=self._run_id)

    async def _aborts_for_good(self, ctx: ChatContext, info: AbortInfo) -> bool:
        if info.cancel_requested or self._lease.cancel_requested:
            return True
        if not ctx.get(DETACHABLE, optional=True):
            return True
        try:
            run = await self._work.read_run()
        except Exception as error:  # noqa: BLE001 - reported; foreign stores raise anything
            self._reports.failure("cancel-read", error, run_id=self._run_id)
            return False
        return run is not None and bool(run.cancel_requested)

    def _may_end(self) -> bool:
        return self._started and self._lease.lost is None

    async def _fill(
        self, boundary: Boundary, ctx: ChatContext, mine: Sequence[ModelMessage]
    ) -> None:
        """Transcript and activities of a boundary. A regenerate without output cuts neither."""
        boundary.change = self._transcript.plan(mine)
        if self._layout.stores.activities is None:
            return
        cutting = boundary.change is not None or not self._transcript.deferred_cut
        boundary.activities = self._activities.plan(ctx.activities, cutting=cutting, mine=mine)
        if boundary.activities is not None and self._started:
            # Others may have written since: at the start, nobody has.
            boundary.activities = await self._work.rebased(boundary.activities)

    async def _save_activities(self, ctx: ChatContext) -> None:
        """The rows so far, while the run streams."""
        cutting = not self._transcript.deferred_cut
        change = self._activities.plan(ctx.activities, cutting=cutting)
        if change is not None:
            change = await self._work.rebased(change)
        if change is not None:
            await self._work.save_activities(change)

    def _run(self, patch: RunPatch) -> RunPatch | None:
        return None if self._layout.stores.runs is None else patch

    async def _end_badly(
        self,
        ctx: ChatContext,
        status: Literal["failed", "aborted"],
        error: RunError | None,
        *,
        phase: Phase,
    ) -> RunConflict | None:
        """Record that the run failed or was stopped; what the store says if it is not ours to
        end. Where somebody else took the answers over, the turn is theirs, and nothing is added to
        it. The transcript part (finished model turns, what a draft has kept, a question whose
        start could not be written) is best effort; the run's end is written without it if need
        be, and reported if it cannot be written at all."""
        boundary = Boundary(
            answers=withdrawn(self._asked),
            run=self._run(ended(status, usage=self._usage, error=error)),
            drop_draft=self._drop_draft,
        )
        run_alone = False
        try:
            try:
                mine = self._kept(ctx, "error" if status == "failed" else "aborted")
                if not await self._work.lost_claims(self._answers()):
                    await self._fill(boundary, ctx, mine)
                run_alone = boundary.change is None and boundary.activities is None
                await self._committer.commit(boundary, mine)
            except RunConflict:
                raise
            except Exception as problem:
                if run_alone:
                    raise
                self._reports.failure(phase, problem, run_id=self._run_id)
                boundary.change = boundary.cut = boundary.activities = None
                await self._work.commit(boundary)
        except RunConflict as conflict:
            self._not_ours(conflict, phase)
            return conflict
        except Exception as problem:  # noqa: BLE001 - reported; the run ends all the same
            self._reports.failure(phase, problem, run_id=self._run_id)
        else:
            self._show_seen(ctx)
        return None

    def _kept(
        self, ctx: ChatContext, stop_reason: Literal["error", "aborted"]
    ) -> list[ModelMessage]:
        """The transcript of a run that did not finish: its finished model turns, since their
        tools have had effects, and what a draft kept. A regenerate leaves the old answer."""
        front = ctx.messages[: self._transcript.border(ctx.messages)]
        if self._transcript.deferred_cut:
            return front
        produced = self._transcript.produced(ctx.messages)
        if self._refused:
            return [*front, *up_to_last_result(produced)]
        drafts = self._flight.drafts
        if drafts is None:
            return [*front, *produced]
        return [*front, *drafts.rows(produced, self._run_id, stop_reason=stop_reason)]

    def _not_ours(self, error: RunConflict, phase: Phase) -> None:
        if error.reason == "lease-lost":
            self._lease.lose(error)
        self._reports.failure(phase, error, run_id=self._run_id)

    def _show_seen(self, ctx: ChatContext) -> None:
        newest = self._transcript.newest
        if newest and not self._work.blind:
            ctx.terminal_metadata.setdefault("chatkeep", {})["seen"] = newest
