"""One turn's reads and commits, group by group over whatever stores the bag has.

Parts of a boundary whose stores share a backend are one commit there; a foreign store is
written through its plain methods. The order is that of :data:`~chatkeep.persistence.layout.PARTS`.
A boundary remembers which of its groups are written, so trying again repeats nothing, and
keeps the commit id of each group, so that a backend recognises one that it has applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkeep.backends import new_commit_id
from chatkeep.errors import CompositionError, InterruptConflict, RunConflict, ThreadConflict
from chatkeep.persistence.layout import PARTS, Layout, Part
from chatkeep.persistence.reading import read_view
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.transcript import Change, CutAway
from chatkeep.records import (
    ActivityRecord,
    InterruptRecord,
    ModelMessage,
    RunPatch,
    RunRecord,
)
from chatkeep.stores import (
    ActivitiesWrite,
    BatchCommit,
    CutAppend,
    CutArchive,
    InterruptAnswer,
    InterruptRef,
    MessageStore,
    RevisionedMessages,
    RunStart,
    Splice,
    StoreKey,
    ThreadView,
    Transcript,
    TurnBackend,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)

__all__ = ["ActivityChange", "Boundary", "Opening", "QuestionErased", "UnitOfWork"]


class QuestionErased(ThreadConflict):
    """The message that a run answers was erased for good: there is no place for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """All that a turn needs to begin."""

    transcript: Transcript
    now: int | None = None
    run: RunRecord | None = None
    foreign_run: bool = False
    pending: list[InterruptRecord] = field(default_factory=list[InterruptRecord])
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityChange:
    """The rows as they shall be, and which of them differ from what is stored."""

    rows: list[ActivityRecord]
    changed: dict[int, ActivityRecord]


@dataclass(slots=True, kw_only=True)
class Boundary:
    """One moment of a turn. Made once and kept through retries; ``change``, ``cut`` and
    ``activities`` may be replaced between two tries, the rest stays."""

    change: Change | None = None
    cut: CutAppend | None = None
    answers: Sequence[InterruptAnswer] = ()
    claims: Sequence[InterruptRef] = ()
    interrupts: Sequence[InterruptRecord] = ()
    run: RunStart | RunPatch | None = None
    activities: ActivityChange | None = None
    drop_draft: bool = False
    record: RunRecord | None = None
    """The run after the commit, where the store tells."""
    ids: dict[Part, str] = field(default_factory=dict[Part, str])
    done: set[Part] = field(default_factory=set[Part])

    def parts(self) -> list[Part]:
        """What is still to be written, in promise order."""
        wanted: dict[Part, bool] = {
            "transcript": self.change is not None or self.cut is not None,
            "answers": bool(self.answers or self.claims),
            "interrupts": bool(self.interrupts),
            "run": self.run is not None or self.drop_draft,
            "activities": self.activities is not None,
        }
        return [part for part in PARTS if wanted[part] and part not in self.done]

    def commit_id(self, group: Sequence[Part]) -> str:
        """The id under which a group is committed: the one any of its parts had before."""
        known = [self.ids[part] for part in group if part in self.ids]
        commit_id = known[0] if known else new_commit_id()
        for part in group:
            self.ids[part] = commit_id
        return commit_id


class UnitOfWork:
    """The store side of one run.

    Args:
        layout: the stores.
        thread_id: the thread.
        run_id: the run.
        lease_token: the run's token; None: no leases.
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

    @property
    def lease_backend(self) -> TurnBackend | None:
        """Where the run and its lease are; None: a foreign runs store, or none at all."""
        return self.layout.backend("runs")

    # -- reading ----------------------------------------------------------------------

    async def open(self) -> Opening:
        """Messages, this run, pending interrupts and activities: one read a backend."""
        views: dict[StoreKey, ThreadView] = {}
        keys: tuple[StoreKey, ...] = ("runs", "interrupts", "messages", "activities")
        for backend, served in self.layout.readers(keys):
            view = await read_view(
                backend,
                self.thread_id,
                ViewQuery(
                    messages="bodies" if "messages" in served else "none",
                    run_id=self.run_id if "runs" in served else None,
                    runs="none",
                    interrupts="pending" if "interrupts" in served else "none",
                    activities="activities" in served,
                ),
            )
            views.update(dict.fromkeys(served, view))
        stores = self.layout.stores
        run: RunRecord | None = None
        foreign, now = False, None
        if "runs" in views:
            run, foreign = views["runs"].run, views["runs"].foreign_run
            now = views["runs"].now
        elif stores.runs is not None:
            run = await stores.runs.get(self.run_id)
            if run is not None and run.thread_id != self.thread_id:
                run, foreign = None, True
        pending = views["interrupts"].interrupts if "interrupts" in views else []
        if "interrupts" not in views and stores.interrupts is not None:
            pending = await stores.interrupts.list_pending(self.thread_id)
        activities = views["activities"].activities if "activities" in views else []
        if "activities" not in views and stores.activities is not None:
            activities = await stores.activities.load_activities(self.thread_id)
        return Opening(
            transcript=(
                _transcript(views["messages"])
                if "messages" in views
                else await self._load_foreign()
            ),
            now=now,
            run=run,
            foreign_run=foreign,
            pending=list(pending),
            activities=list(activities),
        )

    async def reload(self) -> Transcript:
        """The transcript as it is now."""
        backend = self.layout.backend("messages")
        if backend is None:
            return await self._load_foreign()
        query = ViewQuery(messages="bodies", runs="none", interrupts="none")
        return _transcript(await read_view(backend, self.thread_id, query))

    async def read_run(self) -> RunRecord | None:
        """This run's record as it is now."""
        backend = self.lease_backend
        if backend is not None:
            query = ViewQuery(messages="none", run_id=self.run_id, runs="none", interrupts="none")
            return (await read_view(backend, self.thread_id, query)).run
        runs = self.layout.stores.runs
        return None if runs is None else await runs.get(self.run_id, thread_id=self.thread_id)

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

    async def _load_foreign(self) -> Transcript:
        store = self.layout.messages
        if isinstance(store, RevisionedMessages):
            return await store.load_transcript(self.thread_id)
        messages = await store.load_thread(self.thread_id)
        return Transcript(
            messages=list(messages), numbers=list(range(1, len(messages) + 1)), revision=""
        )

    # -- writing ----------------------------------------------------------------------

    @property
    def blind(self) -> bool:
        """Whether the messages store has no revisions: it is read again before each write."""
        return self.layout.backend("messages") is None and not isinstance(
            self.layout.stores.messages, RevisionedMessages
        )

    async def commit(self, boundary: Boundary) -> None:
        """Write what of ``boundary`` is not written yet.

        Raises:
            ThreadConflict: another writer moved the thread; nothing of this try was written.
            RunConflict, InterruptConflict: see :class:`~chatkeep.stores.TurnCommit`.
            StoreError: a group failed; the groups before it are written and remembered.
            (Activities in a store of their own are best effort and only reported.)
        """
        groups = self.layout.stretches(boundary.parts())
        if groups and self._must_prove_lease(groups[0], boundary):
            await self._prove_lease()
        for group in groups:
            try:
                await self._write(group, boundary)
            except Exception as error:
                if group != ["activities"]:
                    raise
                self._reports.failure("activities", error, run_id=self.run_id)
            boundary.done.update(group)

    async def _write(self, group: list[Part], boundary: Boundary) -> None:
        backend = self.layout.backend_of(group[0])
        if backend is None:
            await self._write_foreign(group[0], boundary)
        else:
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
                claims=boundary.claims if "answers" in group else (),
                interrupts=boundary.interrupts if "interrupts" in group else (),
                run=boundary.run if "run" in group else None,
                activities=(
                    None
                    if activities is None
                    else ActivitiesWrite(puts=activities.changed, length=len(activities.rows))
                ),
                drop_draft=boundary.drop_draft and "run" in group,
            )
        )

    def _apply(self, boundary: Boundary, group: Sequence[Part], receipt: TurnReceipt) -> None:
        change = boundary.change
        if "transcript" in group and change is not None:
            change.settle(receipt.numbers, receipt.revision)
        if "run" in group:
            boundary.record = receipt.run

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
        """Extend the lease; the run's record, None where there are no leases."""
        backend = self.lease_backend
        if backend is None or self._token is None:
            return None
        return await backend.renew_lease(self.thread_id, self.run_id, self._token, lease_ms)

    # -- foreign stores ------------------------------------------------------------------

    async def _write_foreign(self, part: Part, boundary: Boundary) -> None:
        stores = self.layout.stores
        if part == "transcript":
            await self._write_messages(self.layout.messages, boundary)
        elif part == "answers":
            await self._write_answers(boundary)
        elif part == "interrupts" and stores.interrupts is not None:
            for record in boundary.interrupts:
                if not await stores.interrupts.create(record):
                    raise InterruptConflict(
                        self.thread_id, [record.interrupt_id], "is already there"
                    )
        elif part == "run":
            await self._write_run(boundary)
        elif stores.activities is not None and boundary.activities is not None:
            await stores.activities.save_activities(self.thread_id, boundary.activities.rows)

    async def _write_messages(self, store: MessageStore, boundary: Boundary) -> None:
        if boundary.cut is not None:
            raise CompositionError("this messages store keeps no cuts")
        change = boundary.change
        if change is None:
            return
        if isinstance(store, RevisionedMessages):
            result = await store.splice_thread(
                self.thread_id, keep=change.keep, tail=change.tail, expected=change.expected
            )
            change.settle(result.numbers, result.revision)
            return
        await store.save_thread(self.thread_id, change.whole())
        numbers = range(change.keep + 1, change.keep + len(change.tail) + 1)
        change.settle(list(numbers), "")

    async def _write_answers(self, boundary: Boundary) -> None:
        store = self.layout.stores.interrupts
        if store is None or not boundary.answers:
            return
        if isinstance(store, BatchCommit):
            await store.commit_batch(self.thread_id, list(boundary.answers))
            return
        pending = {
            (record.run_id, record.interrupt_id)
            for record in await store.list_pending(self.thread_id)
        }
        refused = [
            a.interrupt_id for a in boundary.answers if (a.run_id, a.interrupt_id) not in pending
        ]
        if refused:
            raise InterruptConflict(self.thread_id, refused, "not pending")
        for index, answer in enumerate(boundary.answers):
            try:
                if answer.status == "resolved":
                    await store.resolve(
                        self.thread_id, answer.interrupt_id, answer.response, run_id=answer.run_id
                    )
                else:
                    await store.cancel(self.thread_id, answer.interrupt_id, run_id=answer.run_id)
            except Exception as error:
                rest = [a.interrupt_id for a in boundary.answers[index:]]
                raise InterruptConflict(
                    self.thread_id,
                    [answer.interrupt_id],
                    f"could not be settled ({error}); earlier answers of the batch are",
                    remaining=rest,
                ) from error

    async def _write_run(self, boundary: Boundary) -> None:
        runs, run = self.layout.stores.runs, boundary.run
        if runs is None or run is None:
            return
        if isinstance(run, RunPatch):
            await runs.update(self.run_id, run, thread_id=self.thread_id)
            return
        stored = await runs.create_or_resume(
            self.run_id,
            self.thread_id,
            started_at=run.started_at,
            parent_run_id=run.parent_run_id,
        )
        if stored.thread_id != self.thread_id:
            raise RunConflict(self.run_id, "foreign-thread", thread_id=self.thread_id)
        if stored.terminal:
            raise RunConflict(self.run_id, "terminal", thread_id=self.thread_id)
        boundary.record = stored


def _transcript(view: ThreadView) -> Transcript:
    return Transcript(messages=view.messages, numbers=view.numbers, revision=view.revision)
