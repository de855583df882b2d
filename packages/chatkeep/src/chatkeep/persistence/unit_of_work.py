"""One turn's reads and commits, group by group over whatever stores the bag has.

Parts of a boundary whose stores share a backend are one commit there; a foreign store is
written through its plain methods. The order is that of :data:`~chatkeep.persistence.layout.PARTS`.
A boundary remembers which of its groups are written, so trying again repeats nothing, and
keeps the commit id of each group, so that a backend recognises one that it has applied.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatkeep.backends import new_commit_id
from chatkeep.errors import CompositionError, InterruptConflict, RunConflict, StoreError
from chatkeep.persistence.boundary import ActivityChange, Boundary, Opening, QuestionErased
from chatkeep.persistence.claims import lend_records, stand_in_end, stand_in_start
from chatkeep.persistence.foreign import answered, load_messages, write_part
from chatkeep.persistence.layout import Layout, Part
from chatkeep.persistence.opening import read_opening, transcript_of
from chatkeep.persistence.reading import read_view
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.transcript import CutAway
from chatkeep.records import ActivityRecord, ModelMessage, RunPatch, RunRecord
from chatkeep.stores import (
    ActivitiesWrite,
    CutAppend,
    CutArchive,
    InterruptAnswer,
    RevisionedMessages,
    RunStart,
    Splice,
    Transcript,
    TurnBackend,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)

__all__ = ["UnitOfWork"]


class UnitOfWork:
    """The store side of one run.

    Args:
        layout: the stores.
        thread_id: the thread.
        run_id: the run.
        lease_token: the token of the run's leases; None: no leases.
        reports: told of activities that could not be written.
    """

    def __init__(
        self,
        layout: Layout,
        thread_id: str,
        run_id: str,
        *,
        lease_token: str | None,
        reports: Reports,
    ) -> None:
        self.layout = layout
        self.thread_id = thread_id
        self.run_id = run_id
        self._token = lease_token
        self._reports = reports
        self._holds_lease = False
        self._lent_run = False
        self._claimed: set[tuple[str | None, str]] = set()

    @property
    def lease_backend(self) -> TurnBackend | None:
        """Where the run and its lease are; None: a foreign runs store, or none at all."""
        return self.layout.backend("runs")

    @property
    def leased(self) -> bool:
        """Whether there is a lease to renew: the run's, or that of the stand-in which holds
        its claims."""
        return self._token is not None and (self.lease_backend is not None or self._lent_run)

    # -- reading ----------------------------------------------------------------------

    async def open(self) -> Opening:
        """Messages, this run, pending interrupts and activities."""
        return await read_opening(self.layout, self.thread_id, self.run_id)

    async def reload(self) -> Transcript:
        """The transcript as it is now."""
        backend = self.layout.backend("messages")
        if backend is None:
            return await load_messages(self.layout.messages, self.thread_id)
        query = ViewQuery(messages="bodies", runs="none", interrupts="none")
        return transcript_of(await read_view(backend, self.thread_id, query))

    async def find_run(self, run_id: str) -> RunRecord | None:
        """A run of this thread."""
        runs = self.layout.stores.runs
        if runs is None:
            return None
        call = runs.get(run_id, thread_id=self.thread_id)
        return await (answered(call) if self.lease_backend is None else call)

    async def read_run(self) -> RunRecord | None:
        """This run's record as it is now."""
        backend = self.lease_backend
        if backend is not None:
            query = ViewQuery(messages="none", run_id=self.run_id, runs="none", interrupts="none")
            return (await read_view(backend, self.thread_id, query)).run
        return await self.find_run(self.run_id)

    async def cut_of(self, away: CutAway) -> CutAppend:
        """Where the answer to a question that was cut meanwhile belongs.

        Raises:
            QuestionErased: there is no such cut: the thread or the question was erased.
        """
        archive: object = self.layout.messages
        if self.layout.backend("messages") is not None and isinstance(archive, CutArchive):
            for cut in reversed(await archive.list_cuts(self.thread_id)):
                if away.number in cut.numbers or (
                    away.message_id is not None and away.message_id in cut.message_ids
                ):
                    return CutAppend(cut_id=cut.cut_id, messages=away.answer)
        raise QuestionErased(
            self.thread_id,
            message=f"the message that run {self.run_id!r} answers no longer exists in "
            f"thread {self.thread_id!r}",
        )

    # -- writing ----------------------------------------------------------------------

    @property
    def blind(self) -> bool:
        """Whether the messages store has no revisions: it is read again before each write."""
        return self.layout.backend("messages") is None and not isinstance(
            self.layout.stores.messages, RevisionedMessages
        )

    async def commit(self, boundary: Boundary) -> None:
        """Write what of ``boundary`` is not written yet. A stand-in that holds the run's claims
        ends with the run.

        Raises:
            ThreadConflict: another writer moved the thread; nothing of this try was written.
            RunConflict, InterruptConflict: see :class:`~chatkeep.stores.TurnCommit`.
            StoreError: a group failed; the groups before it are written and remembered.
            (Activities in a store of their own are best effort and only reported.)
        """
        groups = self.layout.stretches(boundary.parts())
        if groups and self._must_prove_lease(groups[0], boundary):
            await self._prove_lease()
        if groups and "answers" in boundary.parts() and "answers" not in groups[0]:
            # What is written first, no commit guards by the answers.
            lost = await self.lost_claims(boundary.answers)
            if lost:
                raise InterruptConflict(self.thread_id, lost, "is not claimed by this run any more")
        for group in groups:
            try:
                await self._write(group, boundary)
            except Exception as error:
                if group != ["activities"]:
                    raise
                self._reports.failure("activities", error, run_id=self.run_id)
                boundary.activities = None
            boundary.done.update(group)
        if isinstance(boundary.run, RunPatch):
            await self._end_stand_in()

    def drives_on(self) -> None:
        """The run is there, and its lease is this driver's."""
        self._holds_lease = True

    async def hand_over(self, now: int, wait_ms: int) -> None:
        """Leave the run to whoever claims it within ``wait_ms``.

        Raises:
            StoreError: it could not be written; the lease runs out as it is.
        """
        backend, token = self.lease_backend, self._token
        if backend is None or token is None:
            return
        await backend.renew_lease(self.thread_id, self.run_id, token, wait_ms)
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=self.thread_id,
                run_id=self.run_id,
                lease_token=token,
                run=RunPatch(detached_since=now),
            )
        )

    def parked(self) -> None:
        """The run waits for a human: it has no lease any more."""
        self._holds_lease = False

    async def release(self) -> None:
        """Give up the claims of a run that never began: nothing else ends its stand-in."""
        await self._end_stand_in()

    async def _end_stand_in(self) -> None:
        """Best effort: left alone, the stand-in's lease runs out."""
        desk = self.layout.desk
        if not self._lent_run or desk is None:
            return
        self._lent_run = False
        try:
            await desk.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id=self.thread_id,
                    run_id=self.run_id,
                    lease_token=self._token,
                    run=stand_in_end(self._token),
                )
            )
        except StoreError as error:
            self._reports.failure("claims", error, run_id=self.run_id)

    async def _write(self, group: list[Part], boundary: Boundary) -> None:
        backend = self.layout.backend_of(group[0])
        if backend is None:
            await write_part(
                self.layout, group[0], boundary, thread_id=self.thread_id, run_id=self.run_id
            )
            return
        start = boundary.run
        if "claims" in group and self.layout.lends_records and isinstance(start, RunStart):
            await lend_records(backend, self.thread_id, boundary.claims, now=start.started_at)
        self._apply(boundary, group, await self._send(backend, group, boundary))

    def _must_prove_lease(self, group: Sequence[Part], boundary: Boundary) -> bool:
        # A group in the run's own backend carries the token; others cannot check it.
        return (
            self._holds_lease
            and not isinstance(boundary.run, RunStart)
            and not self._in_run_backend(group)
        )

    def _in_run_backend(self, group: Sequence[Part]) -> bool:
        backend = self.layout.backend_of(group[0])
        return backend is not None and self.layout.stretches([group[0], "run"]) == [
            [group[0], "run"]
        ]

    async def _prove_lease(self) -> None:
        run = await self.read_run()
        if run is None or run.lease is None or run.lease.token != self._token:
            raise RunConflict(self.run_id, "lease-lost", thread_id=self.thread_id)

    async def lost_claims(self, answers: Sequence[InterruptAnswer]) -> list[str]:
        """Which of the interrupts that this run claimed it has lost: a process that stood still
        for longer than its lease may find them claimed, or answered, by somebody else."""
        desk = self.layout.desk
        answers = [a for a in answers if (a.run_id, a.interrupt_id) in self._claimed]
        if desk is None or not answers:
            return []
        query = ViewQuery(messages="none", runs="none", interrupts="pending")
        view = await read_view(desk, self.thread_id, query)
        held = {(r.run_id, r.interrupt_id) for r in view.interrupts if r.claimed_by == self.run_id}
        return [a.interrupt_id for a in answers if (a.run_id, a.interrupt_id) not in held]

    async def _send(
        self, backend: TurnBackend, group: Sequence[Part], boundary: Boundary
    ) -> TurnReceipt:
        splice = None
        if "transcript" in group and boundary.change is not None:
            change = boundary.change
            splice = Splice(
                keep_through=change.keep_through, tail=change.tail, expected=change.expected
            )
        starts = isinstance(boundary.run, RunStart)
        if starts and "run" in group:
            # From here on the run may be there, also when the reply is lost.
            self._holds_lease = self._token is not None
        token = self._token if self._in_run_backend(group) and self._holds_lease else None
        run = boundary.run if "run" in group else None
        if self.layout.lends_run and isinstance(boundary.run, RunStart) and "claims" in group:
            run = self._lend_run(boundary.run)
        elif self._lent_run and isinstance(boundary.run, RunPatch) and "answers" in group:
            # The stand-in ends with the answers that it held the claims for.
            run, token = stand_in_end(self._token), self._token
        activities = boundary.activities if "activities" in group else None
        return await backend.commit_turn(
            TurnCommit(
                commit_id=boundary.commit_id(group),
                thread_id=self.thread_id,
                run_id=self.run_id,
                lease_token=None if starts else token,
                splice=splice,
                cut_append=boundary.cut if "transcript" in group else None,
                answers=boundary.answers if "answers" in group else (),
                claims=boundary.claims if "claims" in group else (),
                interrupts=boundary.interrupts if "interrupts" in group else (),
                run=run,
                activities=(
                    None
                    if activities is None
                    else ActivitiesWrite(puts=activities.changed, length=len(activities.rows))
                ),
                drop_draft=boundary.drop_draft and "run" in group,
            )
        )

    def _lend_run(self, start: RunStart) -> RunStart:
        if self._token is None:
            raise CompositionError("claims need a lease token")
        # From here on it may be there, also when the reply is lost.
        self._lent_run = True
        return stand_in_start(start, self._token)

    def _apply(self, boundary: Boundary, group: Sequence[Part], receipt: TurnReceipt) -> None:
        change = boundary.change
        if "claims" in group:
            self._claimed.update((ref.run_id, ref.interrupt_id) for ref in boundary.claims)
        if "answers" in group and boundary.answers:
            self._lent_run = False
        if "transcript" in group and change is not None:
            change.settle(receipt.numbers, receipt.revision)
        if "run" in group:
            boundary.record = receipt.run

    async def rebased(self, change: ActivityChange) -> ActivityChange | None:
        """``change`` on the activity rows that are stored now; None if they have it. Where they
        cannot be read, on those that were read last."""
        try:
            stored = await self._read_activities()
        except Exception as error:  # noqa: BLE001 - reported; activities are best effort
            self._reports.failure("activities", error, run_id=self.run_id)
            return change
        return change.onto(stored)

    async def _read_activities(self) -> Sequence[ActivityRecord]:
        backend, store = self.layout.backend("activities"), self.layout.stores.activities
        if backend is not None:
            query = ViewQuery(messages="none", runs="none", interrupts="none", activities=True)
            return (await read_view(backend, self.thread_id, query)).activities
        return [] if store is None else await answered(store.load_activities(self.thread_id))

    async def save_activities(self, change: ActivityChange) -> None:
        """Write activity rows by themselves, while the run streams.

        Raises:
            RunConflict: the run has ended, or the lease was lost.
            StoreError: they could not be written.
        """
        backend, store = self.layout.backend("activities"), self.layout.stores.activities
        leased = self._holds_lease and self._in_run_backend(["activities"])
        if self._holds_lease and not leased:
            await self._prove_lease()
        if backend is not None:
            write = ActivitiesWrite(puts=change.changed, length=len(change.rows))
            await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id=self.thread_id,
                    run_id=self.run_id,
                    lease_token=self._token if leased else None,
                    activities=write,
                )
            )
        elif store is not None:
            await answered(store.save_activities(self.thread_id, change.rows))
        change.settle()

    async def save_draft(self, rows: Sequence[ModelMessage]) -> None:
        """Put ``rows`` into the run's draft slot.

        Raises:
            RunConflict: the run has ended, or the lease was lost.
            CompositionError: the runs store has no drafts.
        """
        backend = self.lease_backend
        if backend is None:
            raise CompositionError("drafts need a runs store with a turn backend")
        await backend.save_draft(self.thread_id, self.run_id, rows, lease_token=self._token)

    async def renew_lease(self, lease_ms: int) -> RunRecord | None:
        """Extend the leases of the run and of its stand-in; the run's record, None where the
        runs have no leases."""
        backend, desk = self.lease_backend, self.layout.desk
        if self._token is None:
            return None
        record = None
        if backend is not None:
            record = await backend.renew_lease(self.thread_id, self.run_id, self._token, lease_ms)
        if self._lent_run and desk is not None:
            await desk.renew_lease(self.thread_id, self.run_id, self._token, lease_ms)
        return record
