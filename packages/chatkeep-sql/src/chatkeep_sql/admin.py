"""Cuts, and whole threads: list, erase, delete."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from chatkeep.codec import decode, encode
from chatkeep.records import CutRecord, ModelMessage, ThreadInfo
from chatkeep.rules import decode_cursor, encode_cursor
from chatkeep.scope import Scope, key_digest
from chatkeep.stores import ThreadList
from chatkeep_sql.head import Head, parse_cut_id, version_name
from chatkeep_sql.program import Program, first
from chatkeep_sql.rows import check_format, messages_from_bodies, thread_key
from chatkeep_sql.statements import Statements
from chatkeep_sql.values import owner_key

__all__ = [
    "delete_thread",
    "erase_messages",
    "list_cut_threads",
    "list_cuts",
    "list_idle",
    "list_threads",
    "load_cut",
    "purge_cuts",
]


def _head(
    sql: Statements, scope: Scope, thread_id: str, *, lock: bool = False
) -> Program[tuple[Head, int] | None]:
    """The head and the clock."""
    statement = sql.lock_head if lock else sql.head
    row = first((yield statement, {"by_key": thread_key(scope, thread_id)}))
    return None if row is None else (Head.from_row(row, thread_id), row[-1])


# --------------------------------------------------------------------------------- cuts


def list_cuts(sql: Statements, scope: Scope, thread_id: str) -> Program[list[CutRecord]]:
    """Cuts of the thread, oldest first."""
    found = yield from _head(sql, scope, thread_id)
    if found is None:
        return []
    head = found[0]
    by_thread = {"by_thread": head.thread_no}
    cuts = yield sql.cuts, by_thread
    archived = yield sql.archived_ids, by_thread
    entries = {cut: list(rows) for cut, rows in groupby(archived, key=itemgetter(0))}
    records: list[CutRecord] = []
    for cut, _, cut_at, run_id, extra, version in cuts:
        cut_id = version_name(cut, head.incarnation)
        check_format(version, f"cut {cut_id!r}")
        rows = entries.get(cut, [])
        records.append(
            CutRecord(
                cut_id=cut_id,
                thread_id=thread_id,
                cut_at=cut_at,
                run_id=run_id,
                numbers=[row[1] for row in rows],
                message_ids=[row[2] for row in rows],
                extra=extra,
            )
        )
    return records


def load_cut(
    sql: Statements, scope: Scope, thread_id: str, cut_id: str
) -> Program[list[ModelMessage]]:
    """The messages of a cut, in order."""
    found = yield from _head(sql, scope, thread_id)
    cut = None if found is None else parse_cut_id(cut_id, found[0].incarnation)
    if found is None or cut is None:
        return []
    rows = yield sql.cut_bodies, {"by_thread": found[0].thread_no, "by_cut": cut}
    return messages_from_bodies([row[1] for row in rows], [row[0] for row in rows], thread_id)


def purge_cuts(sql: Statements, scope: Scope, thread_id: str, before: int) -> Program[int]:
    """Erase the cuts made before ``before``; how many."""
    found = yield from _head(sql, scope, thread_id, lock=True)
    if found is None:
        return 0
    thread_no = found[0].thread_no
    cuts = yield sql.cuts, {"by_thread": thread_no}
    old = [{"by_thread": thread_no, "by_cut": row[0]} for row in cuts if row[2] < before]
    if old:
        yield sql.delete_cut_entries, old
        yield sql.delete_cut, old
    return len(old)


# ------------------------------------------------------------------------------ threads


def delete_thread(sql: Statements, scope: Scope, thread_id: str) -> Program[bool]:
    """Erase the thread, all that hangs on it, and the metadata under its id."""
    found = yield from _head(sql, scope, thread_id, lock=True)
    if found is not None:
        for statement in sql.delete_thread:
            yield statement, {"by_thread": found[0].thread_no}
    notes = yield sql.delete_values_of, {"by_owner": owner_key(scope, thread_id)}
    return found is not None or bool(notes)


def list_threads(
    sql: Statements, scope: Scope, limit: int, cursor: str | None, children: bool
) -> Program[ThreadList]:
    """Newest first; equal times in reverse order of creation."""
    binds: dict[str, Any] = {"by_owner": key_digest("owner", *scope.key), "limit": limit + 1}
    if cursor is not None:
        updated_at, thread_no = decode_cursor(cursor, int, int)
        binds |= {"updated_at": updated_at, "thread_no": thread_no}
    rows = yield sql.threads_page(after=cursor is not None, children=children), binds
    page = rows[:limit]
    return ThreadList(
        threads=[
            ThreadInfo(
                thread_id=thread_id,
                created_at=created_at,
                updated_at=updated_at,
                message_count=count,
            )
            for thread_id, created_at, updated_at, count, _ in page
        ],
        cursor=encode_cursor(page[-1][2], page[-1][4]) if len(rows) > limit else None,
    )


def list_idle(sql: Statements, idle_ms: int, limit: int) -> Program[list[tuple[Scope, str]]]:
    """Threads of every scope that nobody has written for so long, the longest first."""
    rows = yield sql.idle_threads, {"idle_ms": idle_ms, "limit": limit}
    return [(Scope.from_key(tenant, user), thread_id) for tenant, user, thread_id in rows]


def list_cut_threads(sql: Statements, before: int, limit: int) -> Program[list[tuple[Scope, str]]]:
    """Threads of every scope with a cut made before ``before``, the oldest cut first."""
    rows = yield sql.threads_with_cuts, {"before": before, "limit": limit}
    return [(Scope.from_key(tenant, user), thread_id) for tenant, user, thread_id in rows]


def erase_messages(
    sql: Statements, scope: Scope, thread_id: str, message_ids: Sequence[str]
) -> Program[int]:
    """Erase every copy of these messages: live, archived, and in drafts."""
    found = yield from _head(sql, scope, thread_id, lock=True)
    if found is None:
        return 0
    head = found[0]
    asked = set(message_ids)
    by_thread = {"by_thread": head.thread_no}
    entries = yield sql.all_ids, by_thread
    gone = [row for row in entries if row[1] in asked]
    if gone:
        yield sql.delete_entry, [{**by_thread, "by_number": row[0]} for row in gone]
        yield from _shrink_cuts(sql, head, entries, {row[0] for row in gone})
    live = [row[0] for row in entries if row[2] is None and row[1] not in asked]
    if any(row[2] is None for row in gone):
        version = head.version + 1
        yield (
            sql.update_head,
            {
                **by_thread,
                "version": version,
                "transcript_version": version,
                "newest": live[-1] if live else 0,
                "message_count": len(live),
            },
        )
    yield from _erase_from_drafts(sql, head, asked)
    return len(gone)


def _shrink_cuts(
    sql: Statements, head: Head, entries: Sequence[Any], gone: set[int]
) -> Program[None]:
    """Cut records after an erasure: an empty one goes; the last ``extra`` entries of a cut
    are those that a detached run added."""
    cuts = yield sql.cuts, {"by_thread": head.thread_no}
    for cut, _, _, _, extra, _ in cuts:
        numbers = [row[0] for row in entries if row[2] == cut]
        by_cut = {"by_thread": head.thread_no, "by_cut": cut}
        if gone.isdisjoint(numbers):
            continue
        if gone.issuperset(numbers):
            yield sql.delete_cut, by_cut
            continue
        added = numbers[len(numbers) - extra :]
        yield sql.update_cut, {**by_cut, "extra": sum(n not in gone for n in added)}


def _erase_from_drafts(sql: Statements, head: Head, asked: set[str]) -> Program[None]:
    for run_id, _, body, version, run_no in (yield sql.drafts, {"by_thread": head.thread_no}):
        what = f"draft of run {run_id!r}"
        check_format(version, what)
        messages = decode(body, what)
        rest = [message for message in messages if message.get("id") not in asked]
        if len(rest) != len(messages):
            yield sql.update_draft, {"by_run": run_no, "body": encode(rest).decode()}
