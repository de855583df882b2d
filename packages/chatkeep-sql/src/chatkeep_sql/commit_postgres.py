"""A commit as one data-modifying statement in autocommit (PostgreSQL).

No row back means that something refused it, that another writer was faster, or that the commit
was applied before; :mod:`chatkeep_sql.commit_plain` then tells which. The statement itself is
:mod:`chatkeep_sql.commit_text`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from chatkeep.records import RunPatch
from chatkeep.stores import NO_THREAD, RunStart, Splice, TurnReceipt
from chatkeep_sql.commit_text import CommitShape, commit_statement
from chatkeep_sql.encoded import EncodedCommit, new_thread_values
from chatkeep_sql.head import new_incarnation, version_name
from chatkeep_sql.program import Program
from chatkeep_sql.rows import patch_values, run_from_row, run_key, start_values
from chatkeep_sql.schema import Tables

__all__ = ["Hints", "commit_postgres", "fits_one_statement"]


def fits_one_statement(encoded: EncodedCommit) -> bool:
    """Whether the one statement knows all parts of the commit. Restores, additions to a cut, the
    sweep's commits and patches of fields without a column go the longer way."""
    commit = encoded.commit
    if commit.restore is not None or commit.cut_append is not None or commit.lease_expired:
        return False
    if commit.answers and commit.claims:
        return False
    return encoded.run_key is not None or (commit.lease_token is None and not commit.claims)


class Hints:
    """What this process has last seen of threads and runs, so that the statement which is made
    for a commit has the parts it needs. A wrong hint costs round trips, nothing else."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._runs: OrderedDict[bytes, None] = OrderedDict()

    def saw(self, revision: str, newest: int) -> None:
        """A transcript at ``revision`` ends with number ``newest``."""
        self._newest[revision] = newest
        if len(self._newest) > self._size:
            self._newest.popitem(last=False)

    def saw_run(self, key: bytes) -> None:
        """The run with this key exists."""
        self._runs[key] = None
        if len(self._runs) > self._size:
            self._runs.popitem(last=False)

    def cuts(self, splice: Splice) -> bool:
        """Whether the splice cuts: unknown counts as no."""
        return self._newest.get(splice.expected or "", 0) > splice.keep_through

    def exists(self, key: bytes | None) -> bool:
        """Whether the run is known to exist."""
        return key in self._runs


def commit_postgres(
    tables: Tables, encoded: EncodedCommit, hints: Hints
) -> Program[TurnReceipt | None]:
    """Apply the commit, or write nothing and return None.

    Raises:
        InvalidValue: a part that cannot be stored; nothing was sent.
    """
    commit = encoded.commit
    patch = patch_values(commit.run) if isinstance(commit.run, RunPatch) else {}
    start = start_values(commit.run) if isinstance(commit.run, RunStart) else {}
    if patch is None or start is None:
        return None
    shape = _shape(encoded, tuple(patch), hints)
    rows = yield commit_statement(tables, shape), _binds(encoded, patch, start)
    if not rows:
        return None
    incarnation, version, transcript, newest, first, count, kept, *run_row = rows[0]
    receipt = TurnReceipt(
        revision=version_name(transcript, incarnation) if transcript else NO_THREAD,
        newest=newest,
        numbers=list(range(first, first + count)),
        run=None if commit.run is None else run_from_row(run_row, commit.thread_id),
        created_run=shape.start == "new",
        cut_id=version_name(version, incarnation) if kept else None,
    )
    hints.saw(receipt.revision, receipt.newest)
    if encoded.run_key is not None and commit.run is not None:
        hints.saw_run(encoded.run_key)
    return receipt


def _shape(encoded: EncodedCommit, patch: tuple[str, ...], hints: Hints) -> CommitShape:
    commit, splice, run = encoded.commit, encoded.commit.splice, encoded.commit.run
    starts = isinstance(run, RunStart)
    lease = commit.lease_token is not None and not starts
    needs_run = isinstance(run, RunPatch) or (bool(commit.claims) and not starts)
    again = starts and hints.exists(encoded.run_key)
    expected = None if splice is None else splice.expected
    head: Literal["there", "new", "either"] = "either"
    if expected or lease or needs_run or again or commit.answers or commit.claims:
        head = "there"
    elif expected == NO_THREAD:
        head = "new"
    drops = commit.drop_draft and commit.run_id is not None
    own = drops and commit.run_id == encoded.run_id and (lease or needs_run or again)
    return CommitShape(
        head=head,
        splice=splice is not None,
        cuts=splice is not None and (hints.cuts(splice) if expected is not None else True),
        expected=expected is not None,
        archive=splice is None or splice.archive,
        tail=bool(encoded.tail),
        start="" if not starts else "again" if again else "new",
        hide=isinstance(run, RunStart) and run.hide_from is not None,
        patch=patch if isinstance(run, RunPatch) else None,
        lease=lease,
        needs_run=needs_run,
        own_draft=own,
        other_draft=drops and not own,
        interrupts=bool(encoded.interrupts),
        answers=bool(commit.answers),
        claims=bool(commit.claims),
        activities=commit.activities is not None,
    )


# -------------------------------------------------------------------------------- values


def _binds(
    encoded: EncodedCommit, patch: Mapping[str, Any], start: Mapping[str, Any]
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
    if encoded.tail:
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
    if encoded.interrupts:
        values = [row for _, row in encoded.interrupts]
        for name in ("key", "run_id", "interrupt_id", "requested_at", "payload", "extra"):
            binds[f"i_{name}"] = [row[name] for row in values]
    if encoded.answers:
        rows = encoded.answers
        for i, name in enumerate(("id", "run", "status", "response")):
            binds[f"a_{name}"] = [row[i] for row in rows]
    if commit.claims:
        binds["c_id"] = [ref.interrupt_id for ref in commit.claims]
        binds["c_run"] = [ref.run_id for ref in commit.claims]
    if commit.activities is not None:
        binds |= {
            "needed": encoded.needed_rows,
            "length": commit.activities.length,
            "positions": list(encoded.activities),
            "rows": list(encoded.activities.values()),
        }
    if commit.drop_draft and commit.run_id is not None:
        binds["draft_key"] = run_key(encoded.scope, commit.run_id)
    return binds
