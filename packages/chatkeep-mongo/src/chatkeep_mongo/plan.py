"""What a commit does, judged against a head: nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chatkeep.records import UNSET, RunPatch, RunRecord
from chatkeep.stores import RunStart, TurnReceipt
from chatkeep_mongo.bodies import put_body
from chatkeep_mongo.decide import (
    ChangedInterrupt,
    RunDecision,
    check_activities,
    check_transcript,
    decide_interrupts,
    decide_run,
)
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.encoded import EncodedCommit
from chatkeep_mongo.found import Found
from chatkeep_mongo.head import Head, new_born, new_stamp
from chatkeep_mongo.layout import ACTIVITIES, Document
from chatkeep_mongo.ranges import flatten
from chatkeep_mongo.rows import (
    OPEN,
    activity_document,
    body_of_run,
    entry_document,
    interrupt_document,
    run_fields,
)
from chatkeep_mongo.transcript import Rewritten, rewrite

__all__ = ["Plan", "make_plan"]


@dataclass(slots=True)
class Plan:
    """What a commit does, judged against ``before``."""

    before: Head
    after: Head
    receipt: TurnReceipt
    redo: Document
    now: int
    rewritten: Rewritten
    entries: list[Document]
    pieces: list[Document]


async def make_plan(db: Driver, encoded: EncodedCommit, head: Head, found: Found) -> Plan:
    """Judge a commit against a head that was found.

    Raises:
        RunConflict, InterruptConflict, ThreadConflict: in this order.
        InvalidValue: a part that cannot be stored.
        Torn: another writer was at work.
    """
    decided = await decide_run(db, encoded, head, found)
    interrupts = await decide_interrupts(db, encoded, head, found.now)
    check_activities(encoded, head)
    check_transcript(encoded, head)

    rewritten = await rewrite(db, encoded, head, found.now)
    redo: Document = {"version": head.version + 1}
    pieces: list[Document] = []
    if rewritten.erased:
        redo["erase"] = flatten(rewritten.erased)
    if rewritten.changed_cut is not None:
        redo["cuts"] = [rewritten.changed_cut]
    if rewritten.dropped_cuts:
        redo["drop_cuts"] = rewritten.dropped_cuts
    _redo_run(encoded, head, decided, found.now, redo, pieces)
    stale = [*rewritten.stale, *_redo_interrupts(encoded, head, interrupts, redo, pieces)]
    stale += await _redo_activities(db, encoded, head, redo, pieces)
    if stale:
        redo["drop_pieces"] = stale

    entries: list[Document] = []
    for number, entry in rewritten.entries:
        document, parts = entry_document(head.t, number, entry, encoded.mark)
        entries.append(document)
        pieces += parts
    after = _counted(rewritten.head, encoded, decided, interrupts)
    return Plan(
        before=head,
        after=replace(
            after,
            stamp=new_stamp(),
            version=head.version + 1,
            big=head.big or bool(pieces),
        ),
        receipt=TurnReceipt(
            revision=after.revision,
            newest=after.newest,
            numbers=rewritten.numbers,
            run=decided.run,
            created_run=decided.created,
            cut_id=rewritten.cut_id,
        ),
        redo=redo,
        now=found.now,
        rewritten=rewritten,
        entries=entries,
        pieces=pieces,
    )


def _counted(
    head: Head,
    encoded: EncodedCommit,
    decided: RunDecision,
    interrupts: Sequence[ChangedInterrupt],
) -> Head:
    """``head`` with its counters as they are after the commit."""
    write = encoded.commit.activities
    run, stored = decided.run, decided.stored
    opened = 0
    if run is not None:
        opened = (run.status in OPEN) - (stored is not None and stored.status in OPEN)
    pending = sum(
        (entry.record.status == "pending")
        - (entry.stored is not None and entry.stored["status"] == "pending")
        for entry in interrupts
    )
    return replace(
        head,
        runs=head.runs + decided.created,
        open=head.open + opened,
        interrupts=head.interrupts + sum(entry.stored is None for entry in interrupts),
        pending=head.pending + pending,
        activities=head.activities if write is None else write.length,
    )


def _redo_run(
    encoded: EncodedCommit,
    head: Head,
    decided: RunDecision,
    now: int,
    redo: Document,
    pieces: list[Document],
) -> None:
    commit, run = encoded.commit, decided.run
    drop_draft = commit.drop_draft and commit.run_id is not None
    if run is None and not drop_draft:
        return
    fields: Document = {}
    unset: list[str] = []
    if run is not None:
        fields = run_fields(run, encoded.scope)
        pieces += put_body(
            fields, body_of_run(run), t=head.t, piece=f"r{encoded.run_key}.{encoded.mark}"
        )
        unset += ["piece", "parts"] if "body" in fields else ["body"]
        if decided.created:
            fields["born"] = new_born(now)
        _set_lease(commit.run, run, fields, unset)
    if drop_draft:
        unset += ["draft", "draft_at", "draft_piece", "draft_parts"]
    redo["run"] = {"_id": encoded.run_key, "set": fields, "unset": unset}


def _set_lease(
    part: RunStart | RunPatch | None, run: RunRecord, fields: Document, unset: list[str]
) -> None:
    """The lease, where the commit changes it: else it is the renewals' alone."""
    if isinstance(part, RunPatch) and part.lease is UNSET:
        return
    if run.lease is None:
        unset += ["lease_token", "lease_until"]
    else:
        fields |= {"lease_token": run.lease.token, "lease_until": run.lease.until}


def _redo_interrupts(
    encoded: EncodedCommit,
    head: Head,
    interrupts: Sequence[ChangedInterrupt],
    redo: Document,
    pieces: list[Document],
) -> list[str]:
    """Put the interrupts into ``redo``; the pieces that nobody needs afterwards."""
    documents: list[Document] = []
    stale: list[str] = []
    for entry in interrupts:
        document, parts = interrupt_document(
            head.t, entry.record, mark=encoded.mark, place=entry.place
        )
        documents.append(document)
        pieces += parts
        if entry.stored is not None and "piece" in entry.stored:
            stale.append(entry.stored["piece"])
    if documents:
        redo["interrupts"] = documents
    return stale


async def _redo_activities(
    db: Driver, encoded: EncodedCommit, head: Head, redo: Document, pieces: list[Document]
) -> list[str]:
    """Put the UI rows into ``redo``; the pieces that nobody needs afterwards."""
    write = encoded.commit.activities
    if write is None or not (encoded.activities or write.length < head.activities):
        return []
    documents: list[Document] = []
    for position, body in sorted(encoded.activities.items()):
        document, parts = activity_document(head.t, position, body, encoded.mark)
        documents.append(document)
        pieces += parts
    redo["activities"] = {"put": documents, "length": write.length, "had": head.activities}
    if not head.big:
        return []
    rows = await db.find(
        ACTIVITIES, {"t": head.t, "piece": {"$exists": True}}, {"position": 1, "piece": 1}
    )
    return [
        row["piece"]
        for row in rows
        if row["position"] in encoded.activities or row["position"] >= write.length
    ]
