"""What a commit does to runs, interrupts and UI rows, by the rules of the core; nothing is written.

Everything is judged against documents that were read after the head: if the head is still the
same when the commit is written, they were what they are now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chatkeep.errors import InterruptConflict, InvalidValue, RunConflict, ThreadConflict
from chatkeep.records import InterruptRecord, RunPatch, RunRecord
from chatkeep.rules import (
    check_driver,
    claim_interrupt,
    copy_record,
    find_interrupt,
    holds_lease,
    patch_run,
    settle_interrupt,
    start_run,
)
from chatkeep.scope import Scope
from chatkeep.stores import RunStart
from chatkeep_mongo.bodies import Torn, load_bodies
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.encoded import EncodedCommit
from chatkeep_mongo.found import Found, owner_lives
from chatkeep_mongo.head import Head
from chatkeep_mongo.layout import INTERRUPTS, RUNS, Document, run_key
from chatkeep_mongo.rows import NO_DRAFT, interrupt_of, run_of

__all__ = [
    "ChangedInterrupt",
    "RunDecision",
    "check_activities",
    "check_transcript",
    "check_version",
    "decide_interrupts",
    "decide_run",
    "live_runs",
]


def check_version(documents: Iterable[Document], head: Head) -> None:
    """Refuse documents that a later commit than that of ``head`` has written.

    Raises:
        Torn: one of them is such.
    """
    for document in documents:
        if document["v"] > head.version:
            raise Torn(f"document {document['_id']!r}")


# --------------------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class RunDecision:
    """``run`` is the run after the commit, if it writes one; ``stored`` what it was here before."""

    run: RunRecord | None
    stored: RunRecord | None
    created: bool = False


async def decide_run(db: Driver, encoded: EncodedCommit, head: Head, found: Found) -> RunDecision:
    """The run part of a commit.

    Raises:
        RunConflict: by the rules.
        InvalidValue: a field that no run can have.
        Torn: another writer was at work.
    """
    commit = encoded.commit
    document = found.run
    stored = own = found.known
    if document is not None:
        stored = run_of(document)
        if document["thread"] == head.key and document["t"] == head.t:
            check_version([document], head)
            own = stored
    check_driver(commit, own, found.now)
    if isinstance(commit.run, RunStart):
        if document is not None and own is None and not await owner_lives(db, document):
            stored = None
        run = start_run(stored, commit.thread_id, commit.run, found.now)
        return RunDecision(run, own, created=stored is None)
    if isinstance(commit.run, RunPatch):
        if own is None:
            raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
        holds = holds_lease(own, commit.lease_token)
        return RunDecision(patch_run(own, commit.run, holds_lease=holds), own)
    if commit.claims and own is None:
        raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
    return RunDecision(None, own)


async def live_runs(
    db: Driver, scope: Scope, head: Head, run_ids: Iterable[str], now: int
) -> set[str]:
    """Which of these runs of the thread are live."""
    keys = sorted(run_key(scope, run_id) for run_id in set(run_ids))
    if not keys:
        return set()
    found = await db.find(RUNS, {"_id": {"$in": keys}, "t": head.t}, NO_DRAFT)
    documents = [document for document in found if "status" in document]
    check_version(documents, head)
    await load_bodies(db, head.t, documents)
    return {run.run_id for run in map(run_of, documents) if run.live(now)}


# --------------------------------------------------------------------------- interrupts


@dataclass(frozen=True, slots=True)
class ChangedInterrupt:
    """An interrupt after the commit; ``place`` is that of its creation. ``stored`` is its document
    before, None for a new one."""

    record: InterruptRecord
    place: Sequence[int]
    stored: Document | None


async def decide_interrupts(
    db: Driver, encoded: EncodedCommit, head: Head, now: int
) -> list[ChangedInterrupt]:
    """The interrupts that a commit changes. Claims are judged by the runs as they were before it.

    Raises:
        InterruptConflict: by the rules.
        Torn: another writer was at work.
    """
    commit = encoded.commit
    if not (commit.answers or commit.claims or encoded.interrupts):
        return []
    documents = await _named(db, encoded, head)
    known: dict[tuple[str, str], ChangedInterrupt] = {}
    for document in documents:
        record = interrupt_of(document)
        known[record.run_id, record.interrupt_id] = ChangedInterrupt(
            record, document["place"], document
        )
    claimers = {entry.record.claimed_by for entry in known.values()} - {None}
    living = await live_runs(db, encoded.scope, head, (c for c in claimers if c), now)
    changed: dict[tuple[str, str], ChangedInterrupt] = {}

    def records() -> list[InterruptRecord]:
        both = {**known, **changed}
        return sorted((entry.record for entry in both.values()), key=_requested_at)

    def put(record: InterruptRecord) -> None:
        key = (record.run_id, record.interrupt_id)
        before = known[key]
        changed[key] = ChangedInterrupt(copy_record(record), before.place, before.stored)

    for answer in commit.answers:
        found = find_interrupt(records(), answer)
        put(
            settle_interrupt(
                found,
                answer,
                thread_id=commit.thread_id,
                run_id=encoded.run_id,
                claim_live=found is not None and found.claimed_by in living,
                now=now,
            )
        )
    for ref in commit.claims:
        found = find_interrupt(records(), ref)
        put(
            claim_interrupt(
                found,
                ref,
                thread_id=commit.thread_id,
                run_id=encoded.run_id or "",
                claim_live=found is not None and found.claimed_by in living,
            )
        )
    for i, record in enumerate(encoded.interrupts):
        key = (record.run_id, record.interrupt_id)
        if key in known:
            raise InterruptConflict(commit.thread_id, [record.interrupt_id], "already exists")
        changed[key] = ChangedInterrupt(record, (head.version + 1, i), None)
    return list(changed.values())


def _requested_at(record: InterruptRecord) -> int:
    return record.requested_at


async def _named(db: Driver, encoded: EncodedCommit, head: Head) -> list[Document]:
    """The stored interrupts that a commit names, in order of insertion."""
    if not head.interrupts:
        return []
    commit = encoded.commit
    names = {
        *(answer.interrupt_id for answer in commit.answers),
        *(ref.interrupt_id for ref in commit.claims),
        *(record.interrupt_id for record in encoded.interrupts),
    }
    found = await db.find(INTERRUPTS, {"t": head.t, "id": {"$in": sorted(names)}})
    check_version(found, head)
    await load_bodies(db, head.t, found)
    return sorted(found, key=lambda document: tuple(document["place"]))


# ---------------------------------------------------------------------------- the rest


def check_activities(encoded: EncodedCommit, head: Head) -> None:
    """Whether every UI row is stored or sent.

    Raises:
        InvalidValue: names the first that is neither.
    """
    write = encoded.commit.activities
    if write is None:
        return
    for position in range(head.activities, write.length):
        if position not in encoded.activities:
            raise InvalidValue("activities", f"row {position} is neither stored nor sent")


def check_transcript(encoded: EncodedCommit, head: Head) -> None:
    """Compare the revision, and look for the cuts that a commit names.

    Raises:
        ThreadConflict: another revision, or no such cut.
    """
    commit = encoded.commit
    expected: Any = commit.splice.expected if commit.splice is not None else commit.restore_expected
    if expected is not None and expected != head.revision:
        raise ThreadConflict(commit.thread_id, expected=expected, actual=head.revision)
    for cut_id in (commit.restore, commit.cut_append and commit.cut_append.cut_id):
        if cut_id is not None and cut_id not in head.cuts:
            raise ThreadConflict(commit.thread_id, message=f"there is no cut {cut_id!r}")
