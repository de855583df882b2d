"""A commit as one data-modifying statement in autocommit (PostgreSQL).

No row back means that something refused it, that another writer was faster, or that the commit
was applied before; :mod:`chatkeep_sql.commit_plain` then tells which. The statement itself is
:mod:`chatkeep_sql.commit_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatkeep.records import RunPatch, RunRecord
from chatkeep.rules import patch_run, start_run
from chatkeep.stores import NO_THREAD, RunStart, Splice, TurnReceipt
from chatkeep_sql.commit_text import START_VALUES, CommitShape, commit_statement
from chatkeep_sql.encoded import EncodedCommit, new_thread_values
from chatkeep_sql.head import new_incarnation, version_name
from chatkeep_sql.program import Program
from chatkeep_sql.rows import run_from_row, run_key, run_values
from chatkeep_sql.schema import Tables

__all__ = ["commit_postgres", "fits_one_statement"]

_PATCH_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "status": ("status",),
    "finished_at": ("finished_at",),
    "error": ("error", "error_code"),
    "usage": ("usage",),
    "cancel_requested": ("cancel_requested",),
    "detached_since": ("detached_since",),
    "hide_from": ("hide_from",),
    "lease": ("lease_token", "lease_until"),
}
"""Fields of a run with columns of their own; the others need the stored row to be read."""


def fits_one_statement(encoded: EncodedCommit) -> bool:
    """Whether the one statement knows all parts of the commit. Restores, additions to a cut, the
    sweep's commits and patches of fields without a column go the longer way."""
    commit = encoded.commit
    if commit.restore is not None or commit.cut_append is not None or commit.lease_expired:
        return False
    if commit.answers and commit.claims:
        return False
    if encoded.run_key is None and (commit.lease_token is not None or commit.claims):
        return False
    if isinstance(commit.run, RunPatch):
        return not commit.run.extra and all(n in _PATCH_COLUMNS for n in commit.run.changes())
    return True


def commit_postgres(tables: Tables, encoded: EncodedCommit) -> Program[TurnReceipt | None]:
    """Apply the commit, or write nothing and return None.

    Raises:
        InvalidValue: a part that cannot be stored; nothing was sent.
    """
    commit = encoded.commit
    patch = _patched(encoded)
    shape = CommitShape(
        splice=commit.splice is not None,
        expected=commit.splice is not None and commit.splice.expected is not None,
        archive=commit.splice is None or commit.splice.archive,
        tail=bool(encoded.tail),
        start=isinstance(commit.run, RunStart),
        hide=isinstance(commit.run, RunStart) and commit.run.hide_from is not None,
        patch=tuple(patch) if isinstance(commit.run, RunPatch) else None,
        lease=commit.lease_token is not None and not isinstance(commit.run, RunStart),
        needs_run=isinstance(commit.run, RunPatch)
        or (bool(commit.claims) and not isinstance(commit.run, RunStart)),
        interrupts=bool(encoded.interrupts),
        answers=bool(commit.answers),
        claims=bool(commit.claims),
        activities=commit.activities is not None,
        draft=commit.drop_draft and commit.run_id is not None,
    )
    rows = yield commit_statement(tables, shape), _binds(encoded, shape, patch)
    if not rows:
        return None
    incarnation, version, transcript, newest, start, count, kept, created, *run_row = rows[0]
    run = None
    if commit.run is not None:
        run = run_from_row(run_row, commit.thread_id)
    return TurnReceipt(
        revision=version_name(transcript, incarnation) if transcript else NO_THREAD,
        newest=newest,
        numbers=list(range(start, start + count)),
        run=run,
        created_run=created,
        cut_id=version_name(version, incarnation) if kept else None,
    )


# -------------------------------------------------------------------------------- values


def _patched(encoded: EncodedCommit) -> dict[str, Any]:
    """The columns that a patch sets, judged by the same rules as anywhere."""
    patch = encoded.commit.run
    if not isinstance(patch, RunPatch):
        return {}
    example = RunRecord(
        run_id=encoded.run_id or "",
        thread_id=encoded.commit.thread_id,
        status="running",
        started_at=0,
    )
    values = run_values(patch_run(example, patch, holds_lease=False))
    return {column: values[column] for name in patch.changes() for column in _PATCH_COLUMNS[name]}


def _binds(encoded: EncodedCommit, shape: CommitShape, patch: Mapping[str, Any]) -> dict[str, Any]:
    commit = encoded.commit
    splice = commit.splice or Splice(keep_through=0)
    binds: dict[str, Any] = {f"t_{name}": v for name, v in new_thread_values(encoded).items()}
    binds |= {
        "mark": encoded.mark,
        "incarnation": new_incarnation(),
        "count": len(encoded.tail),
        "run_key": encoded.run_key,
        "run_id": encoded.run_id,
        "cut_run_id": commit.run_id,
        "token": commit.lease_token,
        "keep": splice.keep_through,
        "expected": splice.expected,
        "returning": [e.message_id for e in encoded.tail if e.message_id is not None],
    }
    binds |= {f"p_{name}": value for name, value in patch.items()}
    if shape.tail:
        binds |= {
            "ids": [entry.message_id for entry in encoded.tail],
            "digests": [entry.digest for entry in encoded.tail],
            "bodies": [entry.body.decode() for entry in encoded.tail],
        }
    if isinstance(commit.run, RunStart):
        binds |= _start_binds(encoded, commit.run)
    if shape.interrupts:
        values = [row for _, row in encoded.interrupts]
        for name in ("key", "run_id", "interrupt_id", "requested_at", "payload", "extra"):
            binds[f"i_{name}"] = [row[name] for row in values]
    if shape.answers:
        rows = encoded.answers
        for i, name in enumerate(("id", "run", "status", "response")):
            binds[f"a_{name}"] = [row[i] for row in rows]
    if shape.claims:
        binds["c_id"] = [ref.interrupt_id for ref in commit.claims]
        binds["c_run"] = [ref.run_id for ref in commit.claims]
    if commit.activities is not None:
        binds |= {
            "needed": encoded.needed_rows,
            "length": commit.activities.length,
            "positions": list(encoded.activities),
            "rows": list(encoded.activities.values()),
        }
    if shape.draft and commit.run_id is not None:
        binds["draft_key"] = run_key(encoded.scope, commit.run_id)
    return binds


def _start_binds(encoded: EncodedCommit, start: RunStart) -> dict[str, Any]:
    values = run_values(start_run(None, encoded.commit.thread_id, start, 0))
    parent = start.parent_run_id
    values["key"] = encoded.run_key
    values["parent_key"] = None if parent is None else run_key(encoded.scope, parent)
    return {f"s_{name}": values[name] for name in START_VALUES} | {"lease_ms": start.lease_ms}
