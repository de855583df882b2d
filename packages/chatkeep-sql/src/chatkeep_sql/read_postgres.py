# ruff: noqa: S608  (names of tables and columns of ours; values are always bound)
"""One consistent read as one statement (PostgreSQL).

The first row, numbered -1, carries everything but the messages as one JSON text; the others are
the messages, as plain rows of two columns: what the database sends fastest and what decodes
fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import TextClause, text

from chatkeep.codec import FORMAT_VERSION, decode
from chatkeep.rules import active_runs, visible_interrupt
from chatkeep.scope import Scope
from chatkeep.stores import ThreadView, ViewQuery
from chatkeep_sql.head import HEAD_COLUMNS, Head
from chatkeep_sql.postgres_text import NOW, live_claim, names_of
from chatkeep_sql.program import Program
from chatkeep_sql.rows import (
    INTERRUPT_COLUMNS,
    RUN_COLUMNS,
    activities_from_rows,
    draft_from_row,
    interrupt_from_row,
    messages_from_bodies,
    run_from_row,
    run_key,
    thread_key,
)
from chatkeep_sql.schema import Tables

__all__ = ["read_postgres"]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a statement reads; those that read the same share their text."""

    messages: str
    limited: bool
    before: bool
    run: bool
    runs: str
    interrupts: str
    activities: bool
    drafts: bool


def read_postgres(
    tables: Tables, scope: Scope, thread_id: str, query: ViewQuery
) -> Program[ThreadView]:
    """What ``query`` asks for."""
    shape = _Shape(
        messages=query.messages,
        limited=query.limit is not None,
        before=query.before is not None,
        run=query.run_id is not None,
        runs=query.runs,
        interrupts=query.interrupts,
        activities=query.activities,
        drafts=query.drafts,
    )
    binds: dict[str, Any] = {"by_key": thread_key(scope, thread_id)}
    if query.run_id is not None:
        binds["run_key"] = run_key(scope, query.run_id)
    if query.messages != "none":
        if query.limit is not None:
            binds["limit"] = query.limit + 1
        if query.before is not None:
            binds["before"] = query.before
    rows = yield _statement(tables, shape), binds
    # The parts of a union may come in any order.
    rows.sort(key=itemgetter(0))
    return _view(thread_id, query, decode(rows[0][1], f"view of thread {thread_id!r}"), rows[1:])


def _view(thread_id: str, query: ViewQuery, parts: Any, rows: Sequence[Any]) -> ThreadView:
    now, row, run_row = parts["now"], parts["head"], parts.get("run")
    if row is None:
        foreign = run_row is not None
        return ThreadView(thread_id=thread_id, exists=False, now=now, foreign_run=foreign)
    head = Head.from_row(row, thread_id)
    foreign = run_row is not None and run_row[-1] != head.thread_no
    truncated = query.limit is not None and len(rows) > query.limit
    if truncated:
        rows = rows[1:]
    numbers = [row[0] for row in rows]
    runs = [run_from_row(r, thread_id) for r in parts.get("runs") or ()]
    return ThreadView(
        thread_id=thread_id,
        exists=True,
        now=now,
        revision=head.revision,
        newest=head.newest,
        messages=messages_from_bodies([row[1] for row in rows], numbers, thread_id)
        if query.messages == "bodies"
        else [],
        numbers=numbers,
        digests=[bytes.fromhex(row[1]) for row in rows] if query.messages == "digests" else [],
        truncated=truncated,
        run=run_from_row(run_row, thread_id) if run_row is not None and not foreign else None,
        foreign_run=foreign,
        runs=active_runs(runs, now) if query.runs == "active" else runs,
        interrupts=[
            visible_interrupt(interrupt_from_row(r, thread_id), claim_live=r[-1])
            for r in parts.get("interrupts") or ()
        ],
        activities=activities_from_rows(parts.get("activities") or (), thread_id),
        drafts=[draft_from_row(r, thread_id) for r in parts.get("drafts") or ()],
    )


@lru_cache(maxsize=256)
def _statement(tables: Tables, shape: _Shape) -> TextClause:
    n = names_of(tables)
    mine = "thread_no = (SELECT thread_no FROM head)"

    def array(*columns: str) -> str:
        return f"json_build_array({', '.join(columns)})"

    def rows(what: str, source: str, where: str, order: str) -> str:
        return f"(SELECT json_agg({what} ORDER BY {order}) FROM {source} WHERE {where})"

    parts = [f"'now', {NOW}", f"'head', (SELECT {array(*HEAD_COLUMNS)} FROM head)"]
    if shape.run:
        what = array(*RUN_COLUMNS, "thread_no")
        parts.append(f"'run', (SELECT {what} FROM {n.runs} WHERE key = CAST(:run_key AS bytea))")
    if shape.runs != "none":
        running = " AND status = 'running'" if shape.runs == "active" else ""
        what = rows(array(*RUN_COLUMNS), n.runs, mine + running, "started_at, run_no")
        parts.append(f"'runs', {what}")
    if shape.interrupts != "none":
        pending = " AND status = 'pending'" if shape.interrupts == "pending" else ""
        what = array(*INTERRUPT_COLUMNS, live_claim(n, "i"))
        found = rows(what, f"{n.interrupts} AS i", mine + pending, "requested_at, sequence")
        parts.append(f"'interrupts', {found}")
    if shape.activities:
        found = rows(array("body", "format"), n.activities, mine, "position")
        parts.append(f"'activities', {found}")
    if shape.drafts:
        what = array("r.run_id", "d.updated_at", "d.body", "d.format")
        source = f"{n.drafts} AS d JOIN {n.runs} AS r ON r.run_no = d.run_no"
        # A draft that was on its way while its run's last commit deleted it may come in behind
        # (that statement's snapshot is older than the draft): an ended run has none.
        mine_and_open = f"d.{mine} AND r.status IN ('running', 'interrupted')"
        parts.append(f"'drafts', {rows(what, source, mine_and_open, 'd.run_no')}")
    sql = (
        f"WITH head AS MATERIALIZED (SELECT {', '.join(HEAD_COLUMNS)} FROM {n.threads}"
        " WHERE key = CAST(:by_key AS bytea))"
        " SELECT CAST(-1 AS bigint) AS number,"
        f" CAST(json_build_object({', '.join(parts)}) AS text) AS body"
    )
    if shape.messages != "none":
        column = {
            "bodies": f"CASE WHEN format <= {FORMAT_VERSION} THEN body END",
            "digests": "encode(digest, 'hex')",
            "numbers": "CAST(NULL AS text)",
        }[shape.messages]
        sql += f" UNION ALL (SELECT number, {column} FROM {n.entries} WHERE {mine} AND cut IS NULL"
        if shape.before:
            sql += " AND number < CAST(:before AS bigint)"
        sql += " ORDER BY number"
        sql += " DESC LIMIT CAST(:limit AS bigint))" if shape.limited else ")"
    return text(sql)
