"""A commit as plain statements inside one transaction that holds the head's lock.

The only way on SQLite (``BEGIN IMMEDIATE``). On PostgreSQL the way for what the single
statement of :mod:`chatkeep_sql.commit_postgres` leaves aside: it finds the typed refusal, and
it waits for the head where another writer was faster.

Everything is read and judged first; then nothing can be refused any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from chatkeep.codec import FORMAT_VERSION
from chatkeep.errors import InterruptConflict, InvalidValue, RunConflict, ThreadConflict
from chatkeep.records import InterruptRecord, RunPatch, RunRecord
from chatkeep.rules import (
    check_driver,
    claim_interrupt,
    find_interrupt,
    holds_lease,
    patch_run,
    settle_interrupt,
    split_cut,
    start_run,
)
from chatkeep.stores import RunStart, TurnReceipt
from chatkeep_sql.encoded import EncodedCommit, entry_values, new_thread_values
from chatkeep_sql.head import (
    Head,
    commit_line,
    empty_head,
    parse_cut_id,
    remember,
    replayed_run,
    version_name,
)
from chatkeep_sql.program import Program, first
from chatkeep_sql.rows import (
    RUN_COLUMNS,
    interrupt_from_row,
    interrupt_key,
    interrupt_values,
    run_from_row,
    run_key,
    run_values,
)
from chatkeep_sql.statements import Statements, in_chunks

__all__ = ["commit_plain"]


@dataclass(frozen=True, slots=True)
class _StoredRun:
    record: RunRecord
    run_no: int
    thread_no: int


@dataclass(slots=True)
class _Changed:
    """An interrupt that the commit changes; ``sequence`` is None for a new one."""

    record: InterruptRecord
    sequence: int | None
    claim_live: bool


def commit_plain(sql: Statements, encoded: EncodedCommit) -> Program[TurnReceipt]:
    """Apply a commit, or raise what refuses it and write nothing.

    Raises:
        RunConflict, InterruptConflict, ThreadConflict: in this order.
    """
    commit = encoded.commit
    row = first((yield sql.lock_head, {"by_key": encoded.thread_key}))
    if row is None:
        (now,) = (yield sql.now, {})[0]
        head, is_new = empty_head(), True
    else:
        now = row[-1]
        head, is_new = Head.from_row(row, commit.thread_id), False
        known = head.remembered(encoded.mark, commit.thread_id)
        if known is not None:
            if commit.run is None:
                return known
            stored = yield from _stored_run(sql, encoded)
            return replayed_run(known, None if stored is None else stored.record)

    stored = None
    if encoded.run_key is not None and (commit.run or commit.lease_token or commit.claims):
        stored = yield from _stored_run(sql, encoded)
    run = _decide_run(encoded, stored, head, now)
    interrupts = yield from _decide_interrupts(sql, encoded, head, now)
    yield from _check_activities(sql, encoded, head)
    cut_numbers = yield from _check_transcript(sql, encoded, head)

    if is_new:
        head = yield from _insert_head(sql, encoded, head, now)
    after = yield from _write_transcript(sql, encoded, head, cut_numbers, now)
    created_run = False
    if run is not None:
        created_run = stored is None
        yield from _write_run(sql, encoded, after.head, run, stored)
    yield from _write_interrupts(sql, after.head, interrupts)
    yield from _write_activities(sql, encoded, after.head)
    if commit.drop_draft and commit.run_id is not None:
        key = run_key(encoded.scope, commit.run_id)
        yield sql.delete_draft, {"by_key": key, "by_thread": after.head.thread_no}
    line = commit_line(
        encoded.mark,
        after.head,
        numbers=after.numbers,
        created_run=created_run,
        cut=after.cut_id is not None,
    )
    yield (
        sql.update_head,
        {
            "by_thread": after.head.thread_no,
            "version": after.head.version,
            "transcript_version": after.head.transcript_version,
            "next_number": after.head.next_number,
            "newest": after.head.newest,
            "message_count": after.head.message_count,
            "commits": remember(head.commits, line),
            "updated_at": now,
        },
    )
    return TurnReceipt(
        revision=after.head.revision,
        newest=after.head.newest,
        numbers=after.numbers,
        run=run,
        created_run=created_run,
        cut_id=after.cut_id,
    )


# --------------------------------------------------------------------------- judgements


def _stored_run(sql: Statements, encoded: EncodedCommit) -> Program[_StoredRun | None]:
    row = first((yield sql.lock_run, {"by_key": encoded.run_key}))
    if row is None:
        return None
    run_no, thread_no, thread_id = row[len(RUN_COLUMNS) :]
    return _StoredRun(run_from_row(row, thread_id), run_no, thread_no)


def _decide_run(
    encoded: EncodedCommit, stored: _StoredRun | None, head: Head, now: int
) -> RunRecord | None:
    """The run after the commit, if it writes one."""
    commit = encoded.commit
    own = stored if stored is not None and stored.thread_no == head.thread_no else None
    record = None if own is None else own.record
    check_driver(commit, record, now)
    if isinstance(commit.run, RunStart):
        known = None if stored is None else stored.record
        return start_run(known, commit.thread_id, commit.run, now)
    if isinstance(commit.run, RunPatch):
        if record is None:
            raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
        holds = holds_lease(record, commit.lease_token)
        return patch_run(record, commit.run, holds_lease=holds)
    if commit.claims and record is None:
        raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
    return None


def _decide_interrupts(
    sql: Statements, encoded: EncodedCommit, head: Head, now: int
) -> Program[list[_Changed]]:
    """The interrupts that the commit changes. Claims are judged by the runs as stored."""
    commit = encoded.commit
    if not (commit.answers or commit.claims or encoded.interrupts):
        return []
    known: dict[tuple[str, str], _Changed] = {}
    for row in (yield from _named_interrupts(sql, encoded, head)):
        record = interrupt_from_row(row, commit.thread_id)
        known[record.run_id, record.interrupt_id] = _Changed(record, row[-2], bool(row[-1]))
    changed: set[tuple[str, str]] = set()

    def put(record: InterruptRecord) -> None:
        key = (record.run_id, record.interrupt_id)
        known[key] = replace(known[key], record=record)
        changed.add(key)

    def claim_live(found: InterruptRecord | None) -> bool:
        return found is not None and known[found.run_id, found.interrupt_id].claim_live

    for answer in commit.answers:
        found = find_interrupt([entry.record for entry in known.values()], answer)
        put(
            settle_interrupt(
                found,
                answer,
                thread_id=commit.thread_id,
                run_id=encoded.run_id,
                claim_live=claim_live(found),
                now=now,
            ),
        )
    for ref in commit.claims:
        found = find_interrupt([entry.record for entry in known.values()], ref)
        put(
            claim_interrupt(
                found,
                ref,
                thread_id=commit.thread_id,
                run_id=encoded.run_id or "",
                claim_live=claim_live(found),
            ),
        )
    for record, _ in encoded.interrupts:
        key = (record.run_id, record.interrupt_id)
        if key in known:
            raise InterruptConflict(commit.thread_id, [record.interrupt_id], "already exists")
        known[key] = _Changed(record, None, claim_live=False)
        changed.add(key)
    return [entry for key, entry in known.items() if key in changed]


def _named_interrupts(sql: Statements, encoded: EncodedCommit, head: Head) -> Program[list[Any]]:
    commit = encoded.commit
    named = {
        *(answer.interrupt_id for answer in commit.answers),
        *(ref.interrupt_id for ref in commit.claims),
        *(record.interrupt_id for record, _ in encoded.interrupts),
    }
    found: list[Any] = []
    for ids in in_chunks(sorted(named)):
        binds = {f"id_{i}": interrupt_id for i, interrupt_id in enumerate(ids)}
        rows = yield (
            sql.interrupts_by_id(len(ids)),
            {**binds, "by_thread": head.thread_no},
        )
        found += rows
    return found


def _check_activities(sql: Statements, encoded: EncodedCommit, head: Head) -> Program[None]:
    if not encoded.needed_rows:
        return
    ((stored,),) = yield sql.activity_count, {"by_thread": head.thread_no}
    if stored < encoded.needed_rows:
        raise InvalidValue(
            "activities", f"row {encoded.needed_rows - 1} is neither stored nor sent"
        )


def _check_transcript(
    sql: Statements, encoded: EncodedCommit, head: Head
) -> Program[dict[str, int]]:
    """Compare the revision; the versions of the cuts that the commit names, by id."""
    commit = encoded.commit
    expected = commit.splice.expected if commit.splice is not None else commit.restore_expected
    if expected is not None and expected != head.revision:
        raise ThreadConflict(commit.thread_id, expected=expected, actual=head.revision)
    found: dict[str, int] = {}
    appended_to = None if commit.cut_append is None else commit.cut_append.cut_id
    for cut_id in (commit.restore, appended_to):
        if cut_id is None:
            continue
        cut = parse_cut_id(cut_id, head.incarnation)
        rows = []
        if cut is not None:
            rows = yield sql.cut, {"by_thread": head.thread_no, "by_cut": cut}
        if cut is None or not rows:
            raise ThreadConflict(commit.thread_id, message=f"there is no cut {cut_id!r}")
        found[cut_id] = cut
    return found


# --------------------------------------------------------------------------------- writes


@dataclass(frozen=True, slots=True)
class _Written:
    """The head after the commit, the numbers it made live, the cut it made."""

    head: Head
    numbers: list[int]
    cut_id: str | None


def _insert_head(sql: Statements, encoded: EncodedCommit, head: Head, now: int) -> Program[Head]:
    rows = yield (
        sql.insert_head,
        {
            **new_thread_values(encoded),
            "incarnation": head.incarnation,
            "version": 0,
            "transcript_version": 0,
            "next_number": 1,
            "newest": 0,
            "message_count": 0,
            "commits": "",
            "created_at": now,
            "updated_at": now,
        },
    )
    return replace(head, thread_no=rows[0][0])


def _write_transcript(
    sql: Statements, encoded: EncodedCommit, head: Head, cuts: dict[str, int], now: int
) -> Program[_Written]:
    commit = encoded.commit
    after = replace(head, version=head.version + 1)
    numbers: list[int] = []
    archived = False
    if commit.splice is not None:
        after, archived = yield from _cut_behind(
            sql, encoded, after, commit.splice.keep_through, now, archive=commit.splice.archive
        )
        numbers = list(range(after.next_number, after.next_number + len(encoded.tail)))
        rows = [
            entry_values(head.thread_no, number, entry)
            for number, entry in zip(numbers, encoded.tail, strict=True)
        ]
        if rows:
            yield sql.insert_entry, rows
            after = replace(after, next_number=after.next_number + len(numbers))
    elif commit.restore is not None:
        cut = cuts[commit.restore]
        by_cut = {"by_thread": head.thread_no, "by_cut": cut}
        behind = (yield sql.cut, by_cut)[0][1]
        entries = yield sql.cut_numbers, by_cut
        after, archived = yield from _cut_behind(sql, encoded, after, behind, now)
        yield sql.restore_entries, by_cut
        yield sql.delete_cut, by_cut
        numbers = [number for number, _ in entries]
    if numbers:
        after = replace(
            after,
            newest=numbers[-1],
            message_count=after.message_count + len(numbers),
            transcript_version=after.version,
        )
    if commit.cut_append is not None:
        after = yield from _append_to_cut(sql, encoded, after, cuts[commit.cut_append.cut_id])
    cut_id = version_name(after.version, after.incarnation) if archived else None
    return _Written(after, numbers, cut_id)


def _cut_behind(
    sql: Statements,
    encoded: EncodedCommit,
    head: Head,
    keep: int,
    now: int,
    *,
    archive: bool = True,
) -> Program[tuple[Head, bool]]:
    """Take off what is live above ``keep``; the head then, and whether a cut was archived."""
    if head.newest <= keep:
        return head, False
    by_thread = {"by_thread": head.thread_no}
    cut = yield sql.live_behind, {**by_thread, "after": keep}
    kept, gone = split_cut(((n, i) for n, i in cut), encoded.tail, archive=archive)
    ((newest,),) = yield sql.newest_up_to, {**by_thread, "upto": keep}
    newest = newest or 0
    if gone:
        yield sql.delete_entry, [{**by_thread, "by_number": number} for number in gone]
    if kept:
        yield sql.archive_behind, {**by_thread, "after": keep, "to_cut": head.version}
        yield (
            sql.insert_cut,
            {
                "thread_no": head.thread_no,
                "cut": head.version,
                "after": newest,
                "cut_at": now,
                "run_id": encoded.commit.run_id,
                "extra": 0,
                "format": FORMAT_VERSION,
            },
        )
    after = replace(
        head,
        newest=newest,
        message_count=head.message_count - len(cut),
        transcript_version=head.version if cut else head.transcript_version,
    )
    return after, bool(kept)


def _append_to_cut(sql: Statements, encoded: EncodedCommit, head: Head, cut: int) -> Program[Head]:
    numbers = range(head.next_number, head.next_number + len(encoded.extra))
    rows = [
        entry_values(head.thread_no, number, entry, cut)
        for number, entry in zip(numbers, encoded.extra, strict=True)
    ]
    if not rows:
        return head
    yield sql.insert_entry, rows
    by_cut = {"by_thread": head.thread_no, "by_cut": cut}
    extra = (yield sql.cut, by_cut)[0][4]
    yield sql.update_cut, {**by_cut, "extra": extra + len(rows)}
    return replace(head, next_number=head.next_number + len(rows))


def _write_run(
    sql: Statements,
    encoded: EncodedCommit,
    head: Head,
    run: RunRecord,
    stored: _StoredRun | None,
) -> Program[None]:
    values = run_values(run)
    if stored is not None:
        yield sql.update_run, {**values, "by_run": stored.run_no}
        return
    parent = run.parent_run_id
    keys = {
        "key": encoded.run_key,
        "thread_no": head.thread_no,
        "parent_key": None if parent is None else run_key(encoded.scope, parent),
    }
    yield sql.insert_run, {**keys, **values}


def _write_interrupts(sql: Statements, head: Head, interrupts: list[_Changed]) -> Program[None]:
    for change in interrupts:
        values = interrupt_values(change.record)
        if change.sequence is not None:
            yield sql.update_interrupt, {**values, "by_sequence": change.sequence}
        else:
            key = interrupt_key(change.record.run_id, change.record.interrupt_id)
            yield sql.insert_interrupt, {**values, "thread_no": head.thread_no, "key": key}


def _write_activities(sql: Statements, encoded: EncodedCommit, head: Head) -> Program[None]:
    write = encoded.commit.activities
    if write is None:
        return
    by_thread = {"by_thread": head.thread_no}
    puts = sorted(encoded.activities)
    if puts:
        yield sql.delete_activity, [{**by_thread, "by_position": p} for p in puts]
    yield sql.delete_activities, {**by_thread, "from_position": write.length}
    if puts:
        rows = [
            {
                "thread_no": head.thread_no,
                "position": position,
                "body": encoded.activities[position],
                "format": FORMAT_VERSION,
            }
            for position in puts
        ]
        yield sql.insert_activity, rows
