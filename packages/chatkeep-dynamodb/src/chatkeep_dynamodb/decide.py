"""What a commit means for the rows of its thread: judged, and turned into actions.

Nothing here makes a request. What refuses is decided in the order RunConflict,
InterruptConflict, ThreadConflict, by the rules of the core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chatkeep.codec import FORMAT_VERSION
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
    split_cut,
    start_run,
)
from chatkeep.stores import RunStart, TurnReceipt
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.client import Action, Condition
from chatkeep_dynamodb.encoded import EncodedCommit
from chatkeep_dynamodb.head import Head, Row, commit_line, version_name
from chatkeep_dynamodb.items import Item, Key, key_of, split_body
from chatkeep_dynamodb.keys import (
    ACTIVITY,
    CUT,
    DRAFT,
    LEFTOVER,
    MESSAGE,
    RUN,
    chunk_sk,
    due_partition,
    number_sk,
    row_sk,
    thread_pk,
)
from chatkeep_dynamodb.known import Known, missing
from chatkeep_dynamodb.rows import Cut, StoredInterrupt, StoredRun, entry_items, lookup_items
from chatkeep_dynamodb.state import InterruptKey, Rows, State

__all__ = ["Plan", "Restage", "Staged", "decide", "leftover_item", "put_head"]

_DELETES_AT_ONCE = 4
"""Rows that a commit removes itself; more are named as left over, and removed behind it."""


class Restage(Exception):
    """Rows that were written ahead stand under numbers that no longer fit."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that were written ahead of their commit: under which numbers, and the row that names
    them as left over until the commit makes them live."""

    incarnation: str
    first_number: int
    first_row: int
    marker: Key


@dataclass(slots=True)
class Plan:
    """A commit as actions: ``entries`` are rows under new numbers (those can be written ahead),
    ``actions`` all the others, the head's first."""

    head: Head
    state: State
    receipt: TurnReceipt
    actions: list[Action] = field(default_factory=list[Action])
    entries: list[Item] = field(default_factory=list[Item])
    leftover: Item | None = None


def decide(
    encoded: EncodedCommit, known: Known, staged: Staged | None, now: int, moment: int
) -> Plan:
    """The plan for a commit.

    Raises:
        RunConflict, InterruptConflict, ThreadConflict: in this order.
        InvalidValue: a UI row that is neither stored nor sent.
        RecordTooLarge: a row that the service would refuse.
        Restage: the rows that were written ahead do not fit.
    """
    commit = encoded.commit
    before = known.head
    run, created_run = _decide_run(encoded, known, now)
    interrupts = _decide_interrupts(encoded, known, run, now)
    _check_activities(encoded, before)
    _check_transcript(encoded, known)

    version = before.version + 1
    after = replace(before, version=version, updated_at=now, unborn=False)
    if before.unborn:
        after = replace(after, created_at=now)
    if staged is not None and staged.incarnation != before.incarnation:
        raise Restage
    pk = thread_pk(before.scope, before.thread_id)
    gone: list[_Gone] = []
    actions: list[Action] = []
    entries: list[Item] = []

    after, numbers, made = _write_transcript(encoded, known, after, staged, entries, gone, now)
    actions += made.actions
    after = _write_activities(encoded, after, staged, entries, gone)
    runs: dict[str, Rows] = {}
    if run is not None:
        stored = None if created_run else known.runs[run.run_id]
        rows, written = _write_run(after, run, stored, moment)
        runs[run.run_id] = rows
        actions += written
        open_runs = {r: v for r, v in after.open_runs.items() if r != run.run_id}
        if not run.terminal:
            open_runs[run.run_id] = version
        after = replace(after, open_runs=open_runs)
    pending_rows, written = _write_interrupts(after, known, interrupts)
    actions += written
    pending = dict(after.pending)
    for record in interrupts:
        key = (record.run_id, record.interrupt_id)
        pending.pop(key, None)
        if record.status == "pending":
            pending[key] = version
    after = replace(after, pending=pending)
    actions += _guard_leases(encoded, known, run, interrupts, now)
    if commit.drop_draft and commit.run_id is not None and before.version:
        draft_key = (pk, row_sk(DRAFT, before.incarnation, commit.run_id))
        actions.append(Action.delete(draft_key, f"draft of run {commit.run_id!r}"))
    leftover = _remove(after, gone, actions, now)
    if staged is not None:
        actions.append(
            Action.delete(
                staged.marker,
                "rows written ahead",
                Condition(
                    "attribute_exists(#pk) AND attribute_not_exists(#taken)",
                    {"#pk": "pk", "#taken": "taken"},
                    {},
                ),
            )
        )
    after = after.remember(
        commit_line(
            encoded.mark,
            after,
            numbers=rg.from_numbers(numbers),
            created_run=created_run,
            cut=made.cut_id is not None,
        )
    )
    return Plan(
        head=after,
        state=State(
            after,
            {**known.state.runs, **runs},
            {**known.state.interrupts, **pending_rows},
        ),
        receipt=TurnReceipt(
            revision=after.revision,
            newest=after.newest,
            numbers=numbers,
            run=None if run is None else copy_record(run),
            created_run=created_run,
            cut_id=made.cut_id,
        ),
        actions=[put_head(before, after), *actions],
        entries=entries,
        leftover=leftover,
    )


def put_head(before: Head, after: Head) -> Action:
    """Write the head if it is still as it was."""
    if before.version:
        condition = Condition.equal(version=before.version, incarnation=before.incarnation)
    else:
        condition = Condition.absent()
    return Action.put(after.to_item(), f"thread {after.thread_id!r}", condition)


# --------------------------------------------------------------------------- judgements


def _decide_run(encoded: EncodedCommit, known: Known, now: int) -> tuple[RunRecord | None, bool]:
    """The run after the commit if it writes one, and whether it is new."""
    commit = encoded.commit
    stored = known.runs.get(encoded.run_id or "")
    record = None if stored is None else stored.record
    check_driver(commit, record, now)
    if isinstance(commit.run, RunStart):
        if record is None and known.owner not in (None, commit.thread_id):
            raise RunConflict(commit.run.run_id, "foreign-thread", thread_id=commit.thread_id)
        return start_run(record, commit.thread_id, commit.run, now), record is None
    if isinstance(commit.run, RunPatch):
        if record is None:
            raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
        holds = holds_lease(record, commit.lease_token)
        return patch_run(record, commit.run, holds_lease=holds), False
    if commit.claims and record is None:
        raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
    return None, False


def _decide_interrupts(
    encoded: EncodedCommit, known: Known, run: RunRecord | None, now: int
) -> list[InterruptRecord]:
    """The interrupts that the commit changes. Claims are judged by the runs as stored."""
    commit = encoded.commit
    run_id = commit.run_id if run is None else run.run_id
    ordered = sorted(
        known.interrupts.values(), key=lambda stored: (stored.record.requested_at, stored.order)
    )
    records = {stored.key: stored.record for stored in ordered}
    changed: dict[InterruptKey, InterruptRecord] = {}

    def put(record: InterruptRecord) -> None:
        key = (record.run_id, record.interrupt_id)
        records[key] = changed[key] = record

    def claim_live(found: InterruptRecord | None) -> bool:
        return found is not None and known.is_live(found.claimed_by, now)

    for answer in commit.answers:
        found = find_interrupt(list(records.values()), answer)
        put(
            settle_interrupt(
                found,
                answer,
                thread_id=commit.thread_id,
                run_id=run_id,
                claim_live=claim_live(found),
                now=now,
            )
        )
    for ref in commit.claims:
        found = find_interrupt(list(records.values()), ref)
        put(
            claim_interrupt(
                found,
                ref,
                thread_id=commit.thread_id,
                run_id=run_id or "",
                claim_live=claim_live(found),
            )
        )
    for record in encoded.interrupts:
        key = (record.run_id, record.interrupt_id)
        if key in records or key in known.head.pending:
            raise InterruptConflict(commit.thread_id, [record.interrupt_id], "already exists")
        put(record)
    return list(changed.values())


def _check_activities(encoded: EncodedCommit, head: Head) -> None:
    write = encoded.commit.activities
    if write is None:
        return
    for position in range(len(head.rows), write.length):
        if position not in encoded.rows:
            raise InvalidValue("activities", f"row {position} is neither stored nor sent")


def _check_transcript(encoded: EncodedCommit, known: Known) -> None:
    commit, head = encoded.commit, known.head
    expected = commit.splice.expected if commit.splice is not None else commit.restore_expected
    if expected is not None and expected != head.revision:
        raise ThreadConflict(commit.thread_id, expected=expected, actual=head.revision)
    appended_to = None if commit.cut_append is None else commit.cut_append.cut_id
    for cut_id in (commit.restore, appended_to):
        if cut_id is not None and cut_id not in known.cuts:
            raise ThreadConflict(commit.thread_id, message=f"there is no cut {cut_id!r}")


# --------------------------------------------------------------------- the transcript


@dataclass(frozen=True, slots=True)
class _Gone:
    """A message or UI row that is no longer kept."""

    letter: str
    number: int
    parts: int


@dataclass(slots=True)
class _Made:
    """Rows of cuts, and the id of the one that the commit made."""

    actions: list[Action] = field(default_factory=list[Action])
    cut_id: str | None = None


def _write_transcript(
    encoded: EncodedCommit,
    known: Known,
    after: Head,
    staged: Staged | None,
    entries: list[Item],
    gone: list[_Gone],
    now: int,
) -> tuple[Head, list[int], _Made]:
    """Splice, restore and cut append; the head then, and the numbers made live."""
    commit, before, made = encoded.commit, known.head, _Made()
    count = len(encoded.tail) + len(encoded.extra)
    first = after.next_number if staged is None else staged.first_number
    if staged is None:
        after = replace(after, next_number=first + count)
    numbers: list[int] = []
    if commit.splice is not None:
        splice = commit.splice
        after = _cut_behind(
            encoded, known, after, splice.keep_through, made, gone, now, archive=splice.archive
        )
        if encoded.tail and after.newest >= first:
            raise Restage
        numbers = list(range(first, first + len(encoded.tail)))
        after = replace(after, live=rg.append(after.live, rg.from_numbers(numbers)))
    elif commit.restore is not None:
        cut = known.cuts[commit.restore]
        after = _cut_behind(encoded, known, after, cut.after, made, gone, now, archive=True)
        key = (
            thread_pk(after.scope, after.thread_id),
            number_sk(CUT, after.incarnation, cut.version),
        )
        made.actions.append(Action.delete(key, f"cut {commit.restore!r}"))
        numbers = rg.expand(cut.numbers)
        after = replace(after, live=rg.append(after.live, cut.numbers))
    if (before.newest, rg.count(before.live)) != (after.newest, rg.count(after.live)):
        after = replace(after, transcript_version=after.version)
    if commit.cut_append is not None and encoded.extra:
        cut = known.cuts[commit.cut_append.cut_id]
        own = range(first + len(encoded.tail), first + count)
        grown = replace(
            cut,
            numbers=rg.append(cut.numbers, rg.from_numbers(own)),
            extra=cut.extra + len(own),
        )
        made.actions.append(Action.put(grown.to_item(after), f"cut {commit.cut_append.cut_id!r}"))
    if staged is None:
        for number, entry in enumerate([*encoded.tail, *encoded.extra], first):
            entries += entry_items(after, MESSAGE, number, entry.body, entry)
    return after, numbers, made


def _cut_behind(
    encoded: EncodedCommit,
    known: Known,
    after: Head,
    keep_through: int,
    made: _Made,
    gone: list[_Gone],
    now: int,
    *,
    archive: bool,
) -> Head:
    """Take off what is live above ``keep_through``."""
    kept_live, cut_live = rg.split_behind(after.live, keep_through)
    if not cut_live:
        return after
    cut = rg.expand(cut_live)
    for number in cut:
        if number not in known.behind:
            raise missing(after, number)
    tail = encoded.tail if encoded.commit.splice is not None else ()
    kept, erased = split_cut(((n, known.behind[n][0]) for n in cut), tail, archive=archive)
    gone += [_Gone(MESSAGE, number, known.behind[number][1]) for number in erased]
    after = replace(after, live=kept_live)
    if kept:
        made.cut_id = version_name(after.version, after.incarnation)
        row = Cut(
            after.version,
            rg.newest(kept_live),
            now,
            encoded.commit.run_id,
            rg.from_numbers(kept),
        )
        made.actions.append(Action.put(row.to_item(after), f"cut {made.cut_id!r}"))
    return after


def _write_activities(
    encoded: EncodedCommit,
    after: Head,
    staged: Staged | None,
    entries: list[Item],
    gone: list[_Gone],
) -> Head:
    write = encoded.commit.activities
    if write is None:
        return after
    first = after.next_row if staged is None else staged.first_row
    rows = list(after.rows[: write.length])
    gone += [_Gone(ACTIVITY, row.number, row.parts) for row in after.rows[write.length :]]
    for number, (position, body) in enumerate(sorted(encoded.rows.items()), first):
        row = Row(number, len(split_body(body)))
        if position < len(rows):
            gone.append(_Gone(ACTIVITY, rows[position].number, rows[position].parts))
            rows[position] = row
        else:
            rows.append(row)
        if staged is None:
            entries += entry_items(after, ACTIVITY, number, body)
    if staged is None:
        after = replace(after, next_row=first + len(encoded.rows))
    return replace(after, rows=tuple(rows))


# ------------------------------------------------------------- runs, interrupts, removals


def _write_run(
    after: Head, run: RunRecord, stored: StoredRun | None, moment: int
) -> tuple[Rows, list[Action]]:
    name = f"run {run.run_id!r}"
    new = StoredRun(
        run,
        after.version if stored is None else stored.order,
        moment if stored is None else stored.created,
        after.version,
    )
    rows = new.to_items(after)
    if stored is None:
        condition = Condition.absent()
    else:
        # A lease is extended without the head.
        condition = Condition.equal(lease_until=stored.lease_until)
    actions = _put_rows(rows, name, condition, 1 if stored is None else stored.parts)
    if stored is None:
        lookup, *child = lookup_items(after, run, new.created)
        own = Condition(
            "attribute_not_exists(#pk) OR #thread = :thread",
            {"#pk": "pk", "#thread": "thread"},
            {":thread": after.thread_id},
        )
        actions.append(Action.put(lookup, f"look-up of {name}", own))
        actions += [Action.put(item, f"parent of {name}") for item in child]
    return rows, actions


def _write_interrupts(
    after: Head, known: Known, records: Sequence[InterruptRecord]
) -> tuple[dict[InterruptKey, Rows], list[Action]]:
    pending: dict[InterruptKey, Rows] = {}
    actions: list[Action] = []
    for i, record in enumerate(records):
        key = (record.run_id, record.interrupt_id)
        stored = known.interrupts.get(key)
        order = after.version * 1000 + i if stored is None else stored.order
        rows = StoredInterrupt(record, order, after.version).to_items(after)
        actions += _put_rows(
            rows,
            f"interrupt {record.interrupt_id!r}",
            Condition.absent() if stored is None else None,
            1 if stored is None else stored.parts,
        )
        if record.status == "pending":
            pending[key] = rows
    return pending, actions


def _put_rows(
    rows: Rows, name: str, condition: Condition | None, parts_before: int
) -> list[Action]:
    pk, sk = key_of(rows[0])
    puts = [Action.put(item, name, None if index else condition) for index, item in enumerate(rows)]
    fewer = range(len(rows), parts_before)
    return puts + [Action.delete((pk, chunk_sk(sk, i)), name) for i in fewer]


def _guard_leases(
    encoded: EncodedCommit,
    known: Known,
    run: RunRecord | None,
    interrupts: Iterable[InterruptRecord],
    now: int,
) -> list[Action]:
    """What was decided because a lease has run out must not hold if it was extended meanwhile.
    (The committing run's own row has that condition where it is written.)"""
    relied: set[str] = set()
    if encoded.commit.lease_expired and encoded.run_id is not None:
        relied.add(encoded.run_id)
    for record in interrupts:
        stored = known.interrupts.get((record.run_id, record.interrupt_id))
        claimer = None if stored is None else stored.record.claimed_by
        if claimer in known.runs and not known.is_live(claimer, now):
            relied.add(claimer or "")
    if run is not None:
        relied.discard(run.run_id)
    head = known.head
    pk = thread_pk(head.scope, head.thread_id)
    return [
        Action.check(
            (pk, row_sk(RUN, head.incarnation, run_id)),
            f"lease of run {run_id!r}",
            Condition.equal(lease_until=known.runs[run_id].lease_until),
        )
        for run_id in sorted(relied)
    ]


def _remove(after: Head, gone: Sequence[_Gone], actions: list[Action], now: int) -> Item | None:
    """Remove a few rows at once, or name more as left over."""
    if not gone:
        return None
    pk = thread_pk(after.scope, after.thread_id)
    if len(gone) <= _DELETES_AT_ONCE and all(row.parts == 1 for row in gone):
        actions += [
            Action.delete((pk, number_sk(row.letter, after.incarnation, row.number)), "old row")
            for row in gone
        ]
        return None
    by_letter = {
        letter: rg.from_numbers(sorted(row.number for row in gone if row.letter == letter))
        for letter in (MESSAGE, ACTIVITY)
    }
    item = leftover_item(after, now, messages=by_letter[MESSAGE], rows=by_letter[ACTIVITY])
    actions.append(Action.put(item, "rows left over"))
    return item


def leftover_item(
    head: Head,
    due_at: int,
    *,
    messages: rg.Ranges = (),
    rows: rg.Ranges = (),
    whole: bool = False,
) -> Item:
    """A row that names others that nobody reads, to be removed at ``due_at`` (ms) if it is still
    there: messages and UI rows by number, or all that the incarnation had."""
    tenant, user = head.scope.key
    pk = thread_pk(head.scope, head.thread_id)
    item: dict[str, Any] = {
        "pk": pk,
        "sk": number_sk(LEFTOVER, head.incarnation, head.version),
        "kind": "leftover",
        "tenant": tenant,
        "user": user,
        "thread": head.thread_id,
        "incarnation": head.incarnation,
        "version": head.version,
        "messages": rg.write_ranges(messages),
        "activities": rg.write_ranges(rows),
        "due": due_partition("sweep", pk),
        "due_at": due_at,
        "format": FORMAT_VERSION,
    }
    if whole:
        item["whole"] = True
    return item
