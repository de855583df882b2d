"""Drafts, leases, and finding runs from other places than their thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from chatkeep.codec import FORMAT_VERSION, encode
from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep.records import ModelMessage, RunRecord
from chatkeep.rules import check_writer, renewed_run
from chatkeep.scope import Scope, key_digest
from chatkeep.stores import LostRun
from chatkeep_sql.program import Program, first
from chatkeep_sql.rows import RUN_COLUMNS, draft_from_row, run_from_row, run_key
from chatkeep_sql.statements import Statements, in_chunks

__all__ = [
    "find_run",
    "list_child_runs",
    "list_lost",
    "list_reclaimable",
    "renew_lease",
    "save_draft",
]

_log = logging.getLogger("chatkeep.sql")

_RUN_NO, _THREAD_NO, _THREAD_ID = (len(RUN_COLUMNS) + i for i in range(3))


def save_draft(
    sql: Statements,
    scope: Scope,
    thread_id: str,
    run_id: str,
    messages: Sequence[ModelMessage],
    lease_token: str | None,
) -> Program[None]:
    """Put the draft into the run's slot. Locks the run, not the head: it conflicts with nobody."""
    body = encode(list(messages), "messages").decode()
    row = first((yield sql.lock_run, {"by_key": run_key(scope, run_id)}))
    run = _of_thread(row, thread_id)
    check_writer(run, run_id, thread_id, lease_token)
    if row is None:
        raise AssertionError("check_writer refuses an unknown run")
    ((now,),) = yield sql.now, {}
    values = {"updated_at": now, "body": body, "format": FORMAT_VERSION}
    if (yield sql.draft, {"by_run": row[_RUN_NO]}):
        yield sql.update_draft, {**values, "by_run": row[_RUN_NO]}
    else:
        keys = {"run_no": row[_RUN_NO], "thread_no": row[_THREAD_NO]}
        yield sql.insert_draft, {**keys, **values}


def renew_lease(
    sql: Statements, scope: Scope, thread_id: str, run_id: str, lease_token: str, lease_ms: int
) -> Program[RunRecord]:
    """Extend the lease from the store's clock."""
    row = first((yield sql.lock_run, {"by_key": run_key(scope, run_id)}))
    ((now,),) = yield sql.now, {}
    run = renewed_run(_of_thread(row, thread_id), run_id, thread_id, lease_token, lease_ms, now)
    if row is None or run.lease is None:
        raise AssertionError("renewed_run refuses an unknown run and gives a lease")
    yield sql.update_run, {"by_run": row[_RUN_NO], "lease_until": run.lease.until}
    return run


def _of_thread(row: Any, thread_id: str) -> RunRecord | None:
    if row is None or row[_THREAD_ID] != thread_id:
        return None
    return run_from_row(row, thread_id)


def find_run(sql: Statements, scope: Scope, run_id: str) -> Program[RunRecord | None]:
    """The run, in whichever thread of the scope."""
    row = first((yield sql.run, {"by_key": run_key(scope, run_id)}))
    return None if row is None else run_from_row(row, row[_THREAD_ID])


def list_child_runs(
    sql: Statements, scope: Scope, parents: Sequence[str]
) -> Program[dict[str, list[RunRecord]]]:
    """Children by parent id, each ascending by start; ties in order of creation."""
    found: dict[str, list[RunRecord]] = {}
    for chunk in in_chunks(sorted(set(parents))):
        binds = {f"by_{i}": run_key(scope, parent) for i, parent in enumerate(chunk)}
        for row in (yield sql.child_runs(len(chunk)), binds):
            run = run_from_row(row, row[_THREAD_ID])
            found.setdefault(run.parent_run_id or "", []).append(run)
    return found


def list_reclaimable(
    sql: Statements, scope: Scope, detached_before: int, limit: int, every_scope: bool
) -> Program[list[LostRun]]:
    """Running runs detached since then, the longest first."""
    binds: dict[str, Any] = {"due": detached_before, "limit": limit}
    if not every_scope:
        binds["by_owner"] = key_digest("owner", *scope.key)
    rows = yield sql.due_runs("detached_since", every_scope=every_scope), binds
    return _lost_runs(rows)


def list_lost(sql: Statements, limit: int) -> Program[list[LostRun]]:
    """Running runs of every scope whose lease has run out, the longest first."""
    rows = yield sql.due_runs("lease_until", every_scope=True), {"limit": limit}
    return _lost_runs(rows)


def _lost_runs(rows: Sequence[Any]) -> list[LostRun]:
    """One that cannot be read is logged and left: it must not keep the others from being ended."""
    found: list[LostRun] = []
    for row in rows:
        try:
            found.append(_lost_run(row))
        except (CorruptRecord, SchemaOutOfDate):
            _log.exception("a run of thread %r cannot be read", row[len(RUN_COLUMNS)])
    return found


def _lost_run(row: Any) -> LostRun:
    thread_id, tenant, user, updated_at, body, version = row[len(RUN_COLUMNS) :]
    run = run_from_row(row, thread_id)
    draft = None
    if body is not None:
        draft = draft_from_row((run.run_id, updated_at, body, version), thread_id)
    return LostRun(scope=Scope.from_key(tenant, user), run=run, draft=draft)
