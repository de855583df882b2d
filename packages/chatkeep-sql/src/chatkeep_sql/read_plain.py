"""One consistent read as plain statements in one read transaction (SQLite)."""

from __future__ import annotations

from typing import Any

from chatkeep.records import RunRecord
from chatkeep.rules import active_runs, visible_interrupt
from chatkeep.scope import Scope
from chatkeep.stores import ThreadView, ViewQuery
from chatkeep_sql.head import Head
from chatkeep_sql.program import Program, first
from chatkeep_sql.rows import (
    activities_from_rows,
    draft_from_row,
    interrupt_from_row,
    messages_from_bodies,
    run_from_row,
    run_key,
    thread_key,
)
from chatkeep_sql.statements import Statements

__all__ = ["cut_window", "read_plain"]


def read_plain(
    sql: Statements, scope: Scope, thread_id: str, query: ViewQuery
) -> Program[ThreadView]:
    """What ``query`` asks for."""
    run: RunRecord | None = None
    foreign = False
    row = first((yield sql.head, {"by_key": thread_key(scope, thread_id)}))
    if query.run_id is not None:
        found = first((yield sql.run, {"by_key": run_key(scope, query.run_id)}))
        if found is not None:
            foreign = row is None or found[-2] != row[0]
            run = None if foreign else run_from_row(found, thread_id)
    if row is None:
        (now,) = (yield sql.now, {})[0]
        return ThreadView(thread_id=thread_id, exists=False, now=now, foreign_run=foreign)
    now = row[-1]
    head = Head.from_row(row, thread_id)
    by_thread: dict[str, Any] = {"by_thread": head.thread_no}
    view: dict[str, Any] = {}

    if query.messages != "none":
        binds = dict(by_thread)
        if query.limit is not None:
            binds["limit"] = query.limit + 1
        if query.before is not None:
            binds["before"] = query.before
        rows = yield (
            sql.window(
                query.messages, limited=query.limit is not None, before=query.before is not None
            ),
            binds,
        )
        view |= cut_window(rows, query, thread_id)
    if query.runs != "none":
        rows = yield (sql.thread_runs if query.runs == "all" else sql.running_runs), by_thread
        runs = [run_from_row(r, thread_id) for r in rows]
        view["runs"] = runs if query.runs == "all" else active_runs(runs, now)
    if query.interrupts != "none":
        rows = yield (
            (sql.interrupts if query.interrupts == "all" else sql.pending_interrupts),
            by_thread,
        )
        view["interrupts"] = [
            visible_interrupt(interrupt_from_row(r, thread_id), claim_live=bool(r[-1]))
            for r in rows
        ]
    if query.activities:
        view["activities"] = activities_from_rows((yield sql.activities, by_thread), thread_id)
    if query.drafts:
        drafts = yield sql.open_drafts, by_thread
        view["drafts"] = [draft_from_row(row, thread_id) for row in drafts]
    return ThreadView(
        thread_id=thread_id,
        exists=True,
        now=now,
        revision=head.revision,
        newest=head.newest,
        run=run,
        foreign_run=foreign,
        **view,
    )


def cut_window(rows: list[Any], query: ViewQuery, thread_id: str) -> dict[str, Any]:
    """The view's fields for rows (number, body or digest), newest first if limited."""
    truncated = False
    if query.limit is not None:
        truncated = len(rows) > query.limit
        rows = rows[query.limit - 1 :: -1] if truncated else rows[::-1]
    numbers = [row[0] for row in rows]
    view: dict[str, Any] = {"numbers": numbers, "truncated": truncated}
    if query.messages == "bodies":
        view["messages"] = messages_from_bodies([row[1] for row in rows], numbers, thread_id)
    elif query.messages == "digests":
        view["digests"] = [bytes(row[1]) for row in rows]
    return view
