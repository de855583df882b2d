"""The contract: five stores, and the tiers that a backend may have on top.

A store is whole: every method of a protocol is required. What a backend may lack is a whole
protocol (a *tier*). Protocols are structural: nobody has to inherit.

Sequence numbers: every message is an entry with a number, per thread, never reused; entries
are inserted and never changed. A splice keeps the live entries up to a number and replaces
what follows. A *revision* is an opaque text, compared for equality only; it changes with the
transcript and never repeats, not even after delete and re-create. ``""`` is the revision of a
thread whose transcript was never written.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from chatkeep.codec import JsonValue
from chatkeep.records import (
    UNSET,
    ActivityRecord,
    CutRecord,
    DraftRecord,
    InterruptRecord,
    ModelMessage,
    RunPatch,
    RunRecord,
    RunStatus,
    ThreadInfo,
    Unset,
)
from chatkeep.scope import Scope

__all__ = [
    "NO_THREAD",
    "STORE_KEYS",
    "ActivitiesWrite",
    "ActivityStore",
    "AnswerStatus",
    "BatchCommit",
    "CutAppend",
    "CutArchive",
    "InterruptAnswer",
    "InterruptRef",
    "InterruptStore",
    "LostRun",
    "MessagePage",
    "MessageStore",
    "MetadataStore",
    "PagedMessages",
    "ReclaimableRuns",
    "RevisionedMessages",
    "RunHistory",
    "RunStart",
    "RunStore",
    "RunTree",
    "Splice",
    "SpliceResult",
    "StoreKey",
    "ThreadAdmin",
    "ThreadExport",
    "ThreadList",
    "ThreadView",
    "Transcript",
    "TurnBackend",
    "TurnCommit",
    "TurnReceipt",
    "VersionedMetadata",
    "VersionedValue",
    "ViewQuery",
]

StoreKey = Literal["messages", "runs", "interrupts", "activities", "metadata"]
STORE_KEYS: tuple[StoreKey, ...] = ("messages", "runs", "interrupts", "activities", "metadata")

NO_THREAD = ""
"""Revision of a thread without a transcript so far; as ``expected`` it means "none was
written". A run, an interrupt or an activity makes the thread exist and leaves it there."""


# ----------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One consistent read: ``numbers[i]`` is the sequence number of ``messages[i]``."""

    messages: list[ModelMessage]
    numbers: list[int]
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePage:
    """A window of a thread, oldest first. ``cursor`` is set exactly when ``truncated``:
    the number of the oldest entry of the page; pass it as ``before`` for the older page."""

    messages: list[ModelMessage]
    numbers: list[int]
    truncated: bool
    cursor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpliceResult:
    """The new revision and the numbers of the new tail, in order."""

    revision: str
    numbers: list[int]


@runtime_checkable
class MessageStore(Protocol):
    """Transcripts. The two methods that a store must have."""

    async def load_thread(self, thread_id: str) -> list[ModelMessage]:
        """The whole list in order; an empty list for an unknown thread. Fresh objects."""
        ...

    async def save_thread(self, thread_id: str, messages: Sequence[ModelMessage]) -> None:
        """Replace the whole thread; never merges. Last means last to commit. Writes only the
        difference; what it overwrites is archived where there is a cut archive."""
        ...


@runtime_checkable
class RevisionedMessages(Protocol):
    """Tier: compare-and-set on the transcript."""

    async def load_transcript(self, thread_id: str) -> Transcript:
        """Messages, numbers and revision in one consistent read."""
        ...

    async def splice_thread(
        self,
        thread_id: str,
        *,
        keep: int,
        tail: Sequence[ModelMessage],
        expected: str,
        archive: bool = True,
    ) -> SpliceResult:
        """Keep the first ``keep`` messages, replace what follows by ``tail``.

        Raises:
            ThreadConflict: the thread is not at ``expected``; nothing was written.
            InvalidValue: ``keep`` is negative or above the length; a message cannot be stored.
        """
        ...


@runtime_checkable
class PagedMessages(Protocol):
    """Tier: windows of a thread by durable cursors (sequence numbers)."""

    async def load_page(
        self, thread_id: str, *, limit: int, before: int | None = None
    ) -> MessagePage:
        """The newest ``limit`` messages, or the newest of those numbered below ``before``.
        A ``before`` whose entry was cut still works: numbers are never reused."""
        ...


@runtime_checkable
class CutArchive(Protocol):
    """Tier: what a splice cuts is kept."""

    async def list_cuts(self, thread_id: str) -> list[CutRecord]:
        """Cuts of the thread, oldest first."""
        ...

    async def load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        """The messages of a cut, in order; ``[]`` for an unknown cut."""
        ...

    async def restore_cut(self, thread_id: str, cut_id: str, *, expected: str) -> SpliceResult:
        """Put a cut back where it was: what now stands behind that place is archived as a
        cut of its own, the restored entries keep their numbers, the cut record goes.

        Raises:
            ThreadConflict: another revision, or no such cut.
        """
        ...

    async def purge_cuts(self, thread_id: str, *, before: int) -> int:
        """Erase the cuts made before ``before`` (ms) for good; how many."""
        ...


# --------------------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Create a run, or take it up again.

    An unknown id is inserted with ``status``. A known one of this thread:
    ``running`` with a live lease: ``RunConflict("running")``; ``running`` with an expired
    lease: taken over (new lease, nothing else changes); ``interrupted``: the lease is set,
    the status stays; terminal: ``RunConflict("terminal")``. Of another thread:
    ``RunConflict("foreign-thread")``. ``lease_ms`` counts from the store's clock; without a
    token the run gets no lease and never expires. Links and ``extra`` are written on insert only;
    ``hide_from`` is set whenever given.
    """

    run_id: str
    started_at: int
    status: RunStatus = "running"
    lease_token: str | None = None
    lease_ms: int = 30_000
    parent_run_id: str | None = None
    subagent_run_id: str | None = None
    name: str | None = None
    hide_from: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class RunStore(Protocol):
    """Executions. A run id is unique within its scope, over all threads."""

    async def create_or_resume(
        self,
        run_id: str,
        thread_id: str,
        *,
        started_at: int,
        status: RunStatus = "running",
        parent_run_id: str | None = None,
        subagent_run_id: str | None = None,
        name: str | None = None,
        lease_token: str | None = None,
        lease_ms: int = 30_000,
        extra: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """Insert the run, or return the stored one unchanged (idempotent; a winner's row is
        what every racing caller gets). A running run whose lease has expired is taken over
        when ``lease_token`` is given.

        Raises:
            RunConflict: the id belongs to another thread.
        """
        ...

    async def update(
        self,
        run_id: str,
        patch: RunPatch,
        *,
        thread_id: str | None = None,
        lease_token: str | None = None,
    ) -> None:
        """Apply a patch, atomically; an unknown id is a no-op.

        Raises:
            RunConflict: ``lease-lost``, or a status that this run cannot take
                (see :func:`chatkeep.backends.check_transition`).
        """
        ...

    async def get(self, run_id: str, *, thread_id: str | None = None) -> RunRecord | None:
        """The run, or None (also when ``thread_id`` is given and is not its thread)."""
        ...

    async def find_active_run(self, thread_id: str) -> RunRecord | None:
        """The ``running`` run with a live lease that started last; ties: created last."""
        ...


@runtime_checkable
class RunHistory(Protocol):
    """Tier: all runs of a thread."""

    async def list_by_thread(self, thread_id: str) -> list[RunRecord]:
        """Ascending by ``started_at``; ties in order of creation."""
        ...


@runtime_checkable
class RunTree(Protocol):
    """Tier: children of runs (subagents)."""

    async def list_by_parent_run(self, parent_run_id: str) -> list[RunRecord]:
        """Ascending by ``started_at``; ties in order of creation; empty for unknown."""
        ...

    async def list_by_parent_runs(
        self, parent_run_ids: Sequence[str]
    ) -> dict[str, list[RunRecord]]:
        """The same for many parents in one query: every asked id is a key."""
        ...


@runtime_checkable
class ReclaimableRuns(Protocol):
    """Tier: detached runs that nobody came back for."""

    async def list_reclaimable(self, *, now: int, ttl_ms: int, limit: int = 100) -> list[RunRecord]:
        """``running`` and ``detached_since <= now - ttl_ms`` (inclusive), oldest first."""
        ...


# --------------------------------------------------------------------------- interrupts

AnswerStatus = Literal["resolved", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRef:
    """Names an interrupt of a thread; without a run the pending one, else the newest."""

    interrupt_id: str
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptAnswer:
    """One answer. ``response`` absent, null and a value are three different things."""

    interrupt_id: str
    status: AnswerStatus = "resolved"
    response: JsonValue | Unset = UNSET
    run_id: str | None = None


@runtime_checkable
class InterruptStore(Protocol):
    """Human decisions. Identity is (thread, run, interrupt id); the thread id comes first.

    Lists are ordered by ``requested_at``; equal times keep the order of insertion.
    """

    async def create(self, record: InterruptRecord) -> bool:
        """Insert as pending, whatever ``record.status`` says; False (and no change) if the
        identity is taken, also by a settled record."""
        ...

    async def resolve(
        self,
        thread_id: str,
        interrupt_id: str,
        response: JsonValue | Unset = UNSET,
        *,
        run_id: str | None = None,
    ) -> None:
        """Settle as resolved; unknown is a no-op.

        Raises:
            InterruptConflict: already settled; the first answer stays.
        """
        ...

    async def cancel(self, thread_id: str, interrupt_id: str, *, run_id: str | None = None) -> None:
        """Settle as cancelled; like :meth:`resolve`."""
        ...

    async def get(
        self, thread_id: str, interrupt_id: str, *, run_id: str | None = None
    ) -> InterruptRecord | None:
        """The record; without a run the pending one, else the newest."""
        ...

    async def list(self, thread_id: str) -> builtins.list[InterruptRecord]:
        """All of the thread."""
        ...

    async def list_pending(self, thread_id: str) -> builtins.list[InterruptRecord]:
        """Pending of the thread."""
        ...

    async def list_by_run(self, thread_id: str, run_id: str) -> builtins.list[InterruptRecord]:
        """All of one run."""
        ...

    async def list_pending_by_run(
        self, thread_id: str, run_id: str
    ) -> builtins.list[InterruptRecord]:
        """Pending of one run."""
        ...


@runtime_checkable
class BatchCommit(Protocol):
    """Tier: settle a batch, all or nothing."""

    async def commit_batch(self, thread_id: str, answers: Sequence[InterruptAnswer]) -> None:
        """Settle every entry, or none.

        Raises:
            InterruptConflict: a duplicate, unknown or settled entry; nothing was written.
        """
        ...


# ----------------------------------------------------------------- activities, metadata


@runtime_checkable
class ActivityStore(Protocol):
    """UI rows beside the transcript. These two methods are a whole store."""

    async def load_activities(self, thread_id: str) -> list[ActivityRecord]:
        """In the order last saved; empty for a thread never saved."""
        ...

    async def save_activities(self, thread_id: str, activities: Sequence[ActivityRecord]) -> None:
        """Full overwrite."""
        ...


@runtime_checkable
class MetadataStore(Protocol):
    """Small state under (namespace, key). The pair is the identity; it is never joined.

    By convention a key equal to a thread id belongs to that thread: deleting and exporting
    the thread includes it.
    """

    async def get(self, namespace: str, key: str) -> JsonValue | None:
        """The value, or None."""
        ...

    async def set(self, namespace: str, key: str, value: JsonValue) -> None:
        """Upsert.

        Raises:
            InvalidValue: ``value`` is None: it could not be told from absence.
        """
        ...

    async def delete(self, namespace: str, key: str) -> None:
        """Remove; absent is a no-op."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedValue:
    """A metadata value and its revision (opaque, never reused, not even after a delete)."""

    value: JsonValue
    revision: str


@runtime_checkable
class VersionedMetadata(Protocol):
    """Tier: compare-and-set on metadata."""

    async def get_versioned(self, namespace: str, key: str) -> VersionedValue | None:
        """Value and revision, or None."""
        ...

    async def set_if(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        """Set if the revision is ``expected`` (None: if absent); the new revision, or None
        when it was not. A plain ``set`` changes the revision too."""
        ...


# ------------------------------------------------------------------------- thread admin


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadList:
    """A page of threads, newest ``updated_at`` first; ``cursor`` set exactly when more follow."""

    threads: list[ThreadInfo]
    cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadExport:
    """Everything that is kept of one thread, leases aside; ``children`` are its subagent
    threads."""

    thread_id: str
    messages: list[ModelMessage]
    runs: list[RunRecord]
    interrupts: list[InterruptRecord]
    activities: list[ActivityRecord]
    metadata: dict[str, JsonValue]
    drafts: list[DraftRecord]
    cuts: dict[str, list[ModelMessage]]
    children: list[ThreadExport] = field(default_factory=list["ThreadExport"])


@runtime_checkable
class ThreadAdmin(Protocol):
    """Tier: whole threads. Deleting and exporting include child threads, runs, interrupts,
    activities, drafts, cuts and the thread's metadata."""

    async def delete_thread(self, thread_id: str) -> bool:
        """Erase for good; whether there was anything. Idempotent."""
        ...

    async def list_threads(
        self, *, limit: int = 50, cursor: str | None = None, children: bool = False
    ) -> ThreadList:
        """Newest first. A thread is listed whichever store was written first. Threads of
        subagents (``subagent:…``) only when asked for.

        Raises:
            InvalidValue: a cursor that is not ours; a limit below 1.
        """
        ...

    async def export_thread(self, thread_id: str) -> ThreadExport | None:
        """Everything, or None for an unknown thread."""
        ...

    async def erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        """Erase every copy of these messages, archived ones included; how many entries."""
        ...


# -------------------------------------------------------------------------- turn backend


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewQuery:
    """What :meth:`TurnBackend.read_view` should bring, all from one moment.

    ``messages``: bodies; ``"numbers"``: numbers only; ``"digests"``: numbers and digests.
    ``limit`` takes the newest, ``before`` only numbers below it. ``run_id`` asks for that
    run; ``runs`` for the running ones with a live lease, or all of the thread.
    """

    messages: Literal["none", "bodies", "numbers", "digests"] = "bodies"
    limit: int | None = None
    before: int | None = None
    run_id: str | None = None
    runs: Literal["none", "active", "all"] = "active"
    interrupts: Literal["none", "pending", "all"] = "pending"
    activities: bool = False
    drafts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadView:
    """One consistent read of a thread, as far as it was asked for.

    ``now`` is the store's clock (ms). ``run`` is the record of ``query.run_id`` if it is a
    run of this thread. ``foreign_run`` says that the id belongs to another thread of the
    scope. ``pending`` or all interrupts: ``claimed_by`` only while the claiming run is live.
    ``runs`` are in order of ``started_at``, ties by creation. ``truncated``: older entries
    exist than ``messages`` shows. ``newest`` is the highest live number (0 for none).
    An ended run has no draft here, whether or not its last commit dropped it.
    """

    thread_id: str
    exists: bool
    now: int
    revision: str = NO_THREAD
    newest: int = 0
    messages: list[ModelMessage] = field(default_factory=list[ModelMessage])
    numbers: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    truncated: bool = False
    run: RunRecord | None = None
    foreign_run: bool = False
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    interrupts: list[InterruptRecord] = field(default_factory=list[InterruptRecord])
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])
    drafts: list[DraftRecord] = field(default_factory=list[DraftRecord])


@dataclass(frozen=True, slots=True, kw_only=True)
class Splice:
    """Keep the live entries numbered up to ``keep_through`` (0: none), then append ``tail``.

    ``expected`` is a revision, or None for "whatever it is". Cut entries whose message id is
    in ``tail`` are replacements: they are not archived; the rest of the cut is, under a new
    cut id, unless ``archive`` is False.
    """

    keep_through: int
    tail: Sequence[ModelMessage] = ()
    expected: str | None = None
    archive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAppend:
    """Messages for a cut record: a run finished whose own turn was cut meanwhile."""

    cut_id: str
    messages: Sequence[ModelMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitiesWrite:
    """Rows by position: ``puts[i]`` replaces or adds row ``i``; rows from ``length`` on go."""

    puts: Mapping[int, ActivityRecord]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCommit:
    """One boundary of a turn; everything in it is applied, or nothing.

    ``commit_id`` is minted once per boundary and kept through retries: a thread's head
    remembers the last 16, and a known one returns its receipt without writing.
    ``run_id`` is the run that commits; with ``lease_token`` every write is refused with
    ``RunConflict("lease-lost")`` unless that run holds this token (an expired lease that nobody
    took over still counts as held). ``lease_expired`` (sweep) demands that it has expired.

    Order of refusal: own commit id (a success), RunConflict, InterruptConflict,
    ThreadConflict. ``claims`` are taken for ``run_id``: pending and not claimed by a live run,
    else InterruptConflict. ``answers`` settle pending records that are unclaimed, claimed by
    ``run_id``, or claimed by a run that no longer lives. ``interrupts`` are created pending;
    a taken identity is an InterruptConflict. ``drop_draft`` removes the draft of ``run_id``.
    """

    commit_id: str
    thread_id: str
    run_id: str | None = None
    lease_token: str | None = None
    lease_expired: bool = False
    splice: Splice | None = None
    restore: str | None = None
    restore_expected: str | None = None
    cut_append: CutAppend | None = None
    answers: Sequence[InterruptAnswer] = ()
    claims: Sequence[InterruptRef] = ()
    interrupts: Sequence[InterruptRecord] = ()
    run: RunStart | RunPatch | None = None
    activities: ActivitiesWrite | None = None
    drop_draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReceipt:
    """What a commit did. ``numbers`` are those of the splice's tail; ``run`` is the record
    after the commit when it had a run part; ``replayed``: the commit id was known (``run`` may
    then be the record as it is now)."""

    revision: str
    newest: int
    numbers: list[int]
    run: RunRecord | None = None
    created_run: bool = False
    cut_id: str | None = None
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRun:
    """A running run whose lease has run out, with its scope and its draft."""

    scope: Scope
    run: RunRecord
    draft: DraftRecord | None = None


@runtime_checkable
class TurnBackend(Protocol):
    """Tier: what one backend reads and commits at once. Stores that share the same backend
    object are committed atomically."""

    @property
    def scope(self) -> Scope:
        """The scope in every key of this handle."""
        ...

    async def read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        """One consistent read; one round trip where the database allows."""
        ...

    async def commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        """One atomic write; one round trip where the database allows.

        Raises:
            RunConflict, InterruptConflict, ThreadConflict: nothing was written.
            InvalidValue, RecordTooLarge: a part that cannot be stored; nothing was written.
            BackendUnavailable: send the same commit again.
        """
        ...

    async def save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        *,
        lease_token: str | None = None,
    ) -> None:
        """Upsert the run's draft slot. Changes no revision, conflicts with nobody.

        Raises:
            RunConflict: the run has ended, does not exist, or the lease was lost.
        """
        ...

    async def renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        """Extend the lease from the store's clock; the record (see ``cancel_requested``).

        Raises:
            RunConflict: ``lease-lost``, ``terminal`` or ``unknown``.
        """
        ...
