"""What the memory backend holds of a thread, and what a read or a commit does to it.

Live numbers are always ascending; entries never change; a cut keeps numbers, not bodies.
Functions that decide (``decide_…``, ``check_…``) change nothing; those that write refuse
nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chatkeep.errors import InterruptConflict, InvalidValue, ThreadConflict
from chatkeep.records import (
    ActivityRecord,
    CutRecord,
    DraftRecord,
    InterruptRecord,
    ModelMessage,
    RunRecord,
)
from chatkeep.rules import (
    Entry,
    claim_interrupt,
    copy_record,
    decode_message,
    find_interrupt,
    new_commit_id,
    new_revision,
    settle_interrupt,
    split_cut,
    visible_interrupt,
)
from chatkeep.scope import Scope
from chatkeep.stores import NO_THREAD, Splice, TurnCommit, TurnReceipt, ViewQuery

# -------------------------------------------------------------------------------- state


@dataclass(slots=True)
class Cut:
    """A cut; ``after`` is the number that it was made behind (see :mod:`chatkeep.rules`)."""

    cut_id: str
    after: int
    cut_at: int
    run_id: str | None
    numbers: list[int]
    extra: int = 0


@dataclass(slots=True)
class Run:
    """A run and its place in the order of creation."""

    record: RunRecord
    order: int


@dataclass(slots=True)
class Draft:
    updated_at: int
    bodies: list[Entry]


@dataclass(slots=True)
class Thread:
    """A head and what hangs on it; ``live`` holds numbers, always ascending."""

    created_at: int
    updated_at: int
    order: int
    revision: str = NO_THREAD
    version: int = 0
    next: int = 1
    live: list[int] = field(default_factory=list[int])
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    interrupts: dict[tuple[str, str], InterruptRecord] = field(
        default_factory=dict[tuple[str, str], InterruptRecord]
    )
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])
    drafts: dict[str, Draft] = field(default_factory=dict[str, Draft])
    recent: dict[str, TurnReceipt] = field(default_factory=dict[str, TurnReceipt])

    @property
    def newest(self) -> int:
        return self.live[-1] if self.live else 0

    def run(self, run_id: str | None) -> RunRecord | None:
        found = self.runs.get(run_id) if run_id is not None else None
        return None if found is None else found.record

    def is_live(self, run_id: str | None, now: int) -> bool:
        run = self.run(run_id)
        return run is not None and run.live(now)

    def runs_in_order(self) -> list[RunRecord]:
        return in_order(self.runs.values())

    def interrupts_in_order(self) -> list[InterruptRecord]:
        return sorted(self.interrupts.values(), key=lambda record: record.requested_at)


@dataclass(slots=True)
class ScopeData:
    """What one scope holds; ``thread_of`` finds a run's thread."""

    threads: dict[str, Thread] = field(default_factory=dict[str, Thread])
    thread_of: dict[str, str] = field(default_factory=dict[str, str])
    metadata: dict[tuple[str, str], tuple[bytes, str]] = field(
        default_factory=dict[tuple[str, str], tuple[bytes, str]]
    )

    def thread(self, thread_id: str) -> Thread:
        """The thread; for an unknown one an empty one that is not kept."""
        return self.threads.get(thread_id) or Thread(created_at=0, updated_at=0, order=0)


class State:
    """What all handles of one memory backend share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scopes: dict[Scope, ScopeData] = {}
        self.counter = 0

    def of(self, scope: Scope) -> ScopeData:
        return self.scopes.setdefault(scope, ScopeData())

    def count(self) -> int:
        self.counter += 1
        return self.counter


def in_order(runs: Iterable[Run]) -> list[RunRecord]:
    ordered = sorted(runs, key=lambda run: (run.record.started_at, run.order))
    return [run.record for run in ordered]


# ------------------------------------------------------------------------ parts of a read


def window(live: list[int], query: ViewQuery) -> tuple[list[int], bool]:
    """The numbers that a query asks for, and whether older ones exist."""
    if query.messages == "none":
        return [], False
    end = len(live) if query.before is None else bisect_left(live, query.before)
    start = 0 if query.limit is None else max(0, end - query.limit)
    return live[start:end], start > 0


def message_of(entry: Entry) -> ModelMessage:
    return decode_message(entry.body)


def visible_interrupts(thread: Thread, query: ViewQuery, now: int) -> list[InterruptRecord]:
    if query.interrupts == "none":
        return []
    return [
        copy_record(visible_interrupt(r, claim_live=thread.is_live(r.claimed_by, now)))
        for r in thread.interrupts_in_order()
        if query.interrupts == "all" or r.status == "pending"
    ]


def drafts_of(thread_id: str, thread: Thread) -> list[DraftRecord]:
    return [
        draft_record(thread_id, run_id, draft)
        for run_id, draft in thread.drafts.items()
        if not thread.runs[run_id].record.terminal
    ]


def draft_record(thread_id: str, run_id: str, draft: Draft) -> DraftRecord:
    messages: list[Any] = [message_of(entry) for entry in draft.bodies]
    return DraftRecord(
        thread_id=thread_id, run_id=run_id, updated_at=draft.updated_at, messages=messages
    )


def cut_record(thread_id: str, thread: Thread, cut: Cut) -> CutRecord:
    """The public record of a cut."""
    return CutRecord(
        cut_id=cut.cut_id,
        thread_id=thread_id,
        cut_at=cut.cut_at,
        run_id=cut.run_id,
        numbers=list(cut.numbers),
        message_ids=[thread.entries[n].message_id for n in cut.numbers],
        extra=cut.extra,
    )


def own_receipt(receipt: TurnReceipt) -> TurnReceipt:
    run = None if receipt.run is None else copy_record(receipt.run)
    return replace(receipt, numbers=list(receipt.numbers), run=run)


# ----------------------------------------------------------------------- parts of a write


def decide_interrupts(
    thread: Thread,
    commit: TurnCommit,
    created: Sequence[InterruptRecord],
    run: RunRecord | None,
    now: int,
) -> dict[tuple[str, str], InterruptRecord]:
    """The interrupts that the commit changes, by key. Claims are judged by the runs as they
    were before it."""
    changed: dict[tuple[str, str], InterruptRecord] = {}
    run_id = commit.run_id if run is None else run.run_id

    def records() -> list[InterruptRecord]:
        known = {**thread.interrupts, **changed}
        return sorted(known.values(), key=lambda record: record.requested_at)

    for answer in commit.answers:
        found = find_interrupt(records(), answer)
        record = settle_interrupt(
            found,
            answer,
            thread_id=commit.thread_id,
            run_id=run_id,
            claim_live=found is not None and thread.is_live(found.claimed_by, now),
            now=now,
        )
        changed[record.run_id, record.interrupt_id] = copy_record(record)
    for ref in commit.claims:
        found = find_interrupt(records(), ref)
        record = claim_interrupt(
            found,
            ref,
            thread_id=commit.thread_id,
            run_id=run_id or "",
            claim_live=found is not None and thread.is_live(found.claimed_by, now),
        )
        changed[record.run_id, record.interrupt_id] = record
    for record in created:
        key = (record.run_id, record.interrupt_id)
        if key in thread.interrupts:
            raise InterruptConflict(commit.thread_id, [record.interrupt_id], "already exists")
        changed[key] = record
    return changed


def decide_activities(
    thread: Thread, commit: TurnCommit, puts: Mapping[int, ActivityRecord]
) -> list[ActivityRecord]:
    write = commit.activities
    if write is None:
        return thread.activities
    rows: dict[int, ActivityRecord] = {**dict(enumerate(thread.activities)), **puts}
    missing = next((i for i in range(write.length) if i not in rows), None)
    if missing is not None:
        raise InvalidValue("activities", f"row {missing} is neither stored nor sent")
    return [rows[i] for i in range(write.length)]


def check_revision(thread: Thread, commit: TurnCommit) -> None:
    expected = commit.splice.expected if commit.splice is not None else commit.restore_expected
    if expected is not None and expected != thread.revision:
        raise ThreadConflict(commit.thread_id, expected=expected, actual=thread.revision)
    for cut_id in (commit.restore, commit.cut_append and commit.cut_append.cut_id):
        if cut_id is not None and cut_id not in thread.cuts:
            raise ThreadConflict(commit.thread_id, message=f"there is no cut {cut_id!r}")


def write_transcript(
    thread: Thread,
    commit: TurnCommit,
    tail: Sequence[Entry],
    extra: Sequence[Entry],
    now: int,
) -> tuple[list[int], str | None]:
    """Splice, restore and cut append; the numbers written and the new cut's id."""
    before = (thread.newest, len(thread.live))
    numbers: list[int] = []
    cut_id: str | None = None
    if commit.splice is not None:
        cut_id = _splice(thread, commit.splice, tail, commit.run_id, now)
        numbers = _append(thread, tail)
        thread.live += numbers
    elif commit.restore is not None:
        cut = thread.cuts.pop(commit.restore)
        cut_id = _cut_behind(thread, cut.after, (), archive=True, run_id=commit.run_id, now=now)
        numbers = list(cut.numbers)
        thread.live += numbers
    if before != (thread.newest, len(thread.live)):
        thread.revision = new_revision(thread.version + 1)
    if commit.cut_append is not None:
        cut = thread.cuts[commit.cut_append.cut_id]
        cut.numbers += _append(thread, extra)
        cut.extra += len(extra)
    return numbers, cut_id


def _splice(
    thread: Thread, splice: Splice, tail: Sequence[Entry], run_id: str | None, now: int
) -> str | None:
    return _cut_behind(
        thread, splice.keep_through, tail, archive=splice.archive, run_id=run_id, now=now
    )


def _cut_behind(
    thread: Thread,
    keep_through: int,
    tail: Sequence[Entry],
    *,
    archive: bool,
    run_id: str | None,
    now: int,
) -> str | None:
    """Take off what is numbered above ``keep_through``; the id of the archive record."""
    at = bisect_right(thread.live, keep_through)
    cut = [(n, thread.entries[n].message_id) for n in thread.live[at:]]
    kept, gone = split_cut(cut, tail, archive=archive)
    after = thread.live[at - 1] if at else 0
    del thread.live[at:]
    erase_entries(thread, gone)
    if not kept:
        return None
    cut_id = new_commit_id()
    thread.cuts[cut_id] = Cut(cut_id, after, now, run_id, kept)
    return cut_id


def _append(thread: Thread, entries: Sequence[Entry]) -> list[int]:
    numbers = list(range(thread.next, thread.next + len(entries)))
    thread.entries.update(zip(numbers, entries, strict=True))
    thread.next += len(entries)
    return numbers


def erase_entries(thread: Thread, numbers: Iterable[int]) -> None:
    for number in numbers:
        del thread.entries[number]


def erase_messages(thread: Thread, asked: set[str]) -> int:
    """Erase every copy of the asked ids, in drafts too; how many entries went."""
    gone = {n for n, entry in thread.entries.items() if entry.message_id in asked}
    if not gone.isdisjoint(thread.live):
        thread.live = [n for n in thread.live if n not in gone]
        thread.version += 1
        thread.revision = new_revision(thread.version)
    for cut in list(thread.cuts.values()):
        cut.extra -= sum(n in gone for n in cut.numbers[len(cut.numbers) - cut.extra :])
        cut.numbers = [n for n in cut.numbers if n not in gone]
        if not cut.numbers:
            del thread.cuts[cut.cut_id]
    erase_entries(thread, gone)
    for draft in thread.drafts.values():
        draft.bodies = [entry for entry in draft.bodies if entry.message_id not in asked]
    return len(gone)
