"""A commit as one data-modifying statement in autocommit (PostgreSQL).

No row back means that something refused it, that another writer was faster, or that the commit
was applied before; :mod:`chatkeep_sql.commit_plain` then tells which. The statement itself is
:mod:`chatkeep_sql.commit_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatkeep.records import RunPatch
from chatkeep.stores import NO_THREAD, RunStart, Splice, TurnReceipt
from chatkeep_sql.commit_text import CommitShape, commit_statement
from chatkeep_sql.encoded import EncodedCommit, new_thread_values
from chatkeep_sql.head import new_incarnation, version_name
from chatkeep_sql.program import Program
from chatkeep_sql.rows import patch_values, run_from_row, run_key, start_values
from chatkeep_sql.schema import Tables

__all__ = ["commit_postgres", "fits_one_statement"]


def fits_one_statement(encoded: EncodedCommit) -> bool:
    """Whether the one statement knows all parts of the commit. Restores, additions to a cut, the
    sweep's commits and patches of fields without a column go the longer way."""
    commit = encoded.commit
    if commit.restore is not None or commit.cut_append is not None or commit.lease_expired:
        return False
    if commit.answers and commit.claims:
        return False
    return encoded.run_key is not None or (commit.lease_token is None and not commit.claims)


def commit_postgres(tables: Tables, encoded: EncodedCommit) -> Program[TurnReceipt | None]:
    """Apply the commit, or write nothing and return None.

    Raises:
        InvalidValue: a part that cannot be stored; nothing was sent.
    """
    commit = encoded.commit
    patch = patch_values(commit.run) if isinstance(commit.run, RunPatch) else {}
    start = start_values(commit.run) if isinstance(commit.run, RunStart) else {}
    if patch is None or start is None:
        return None
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
    rows = yield commit_statement(tables, shape), _binds(encoded, shape, patch, start)
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


def _binds(
    encoded: EncodedCommit,
    shape: CommitShape,
    patch: Mapping[str, Any],
    start: Mapping[str, Any],
) -> dict[str, Any]:
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
        parent = commit.run.parent_run_id
        binds |= {f"s_{name}": value for name, value in start.items()}
        binds["s_key"] = encoded.run_key
        binds["s_parent_key"] = None if parent is None else run_key(encoded.scope, parent)
        binds["lease_ms"] = commit.run.lease_ms
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
