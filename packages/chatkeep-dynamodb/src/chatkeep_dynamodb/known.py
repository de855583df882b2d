"""What a commit must know of its thread before it can be judged, and where that comes from.

Of a remembered thread the rows that are not yet known are read; a thread that is not remembered
is read. Rows may be younger than the head that they were read under: then the commit's condition
on the head fails, and it is judged again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chatkeep.errors import CorruptRecord
from chatkeep.stores import RunStart
from chatkeep_dynamodb.encoded import EncodedCommit
from chatkeep_dynamodb.fetch import fetch, numbers_behind, prefixed
from chatkeep_dynamodb.head import Head, new_head, parse_cut_id
from chatkeep_dynamodb.items import Key
from chatkeep_dynamodb.keys import (
    CUT,
    HEAD,
    INTERRUPT,
    LOOKUP,
    RUN,
    interrupt_sk,
    number_sk,
    row_sk,
    run_pk,
    thread_pk,
)
from chatkeep_dynamodb.rows import Cut, StoredInterrupt, StoredRun
from chatkeep_dynamodb.state import InterruptKey, Place, Rows, State

__all__ = ["Known", "Moved", "learn", "missing"]


class Moved(Exception):
    """A row that the head names is not there: somebody else was committing."""


@dataclass(slots=True)
class Known:
    """A head, and what a commit touches.

    ``fresh``: read for this commit, so it may be refused on the strength of it. ``owner`` is the
    thread that the run's id belongs to, as far as that was looked up.
    """

    state: State
    fresh: bool
    owner: str | None = None
    runs: dict[str, StoredRun] = field(default_factory=dict[str, StoredRun])
    interrupts: dict[InterruptKey, StoredInterrupt] = field(
        default_factory=dict[InterruptKey, StoredInterrupt]
    )
    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])
    behind: Mapping[int, tuple[str | None, int]] = field(
        default_factory=dict[int, tuple[str | None, int]]
    )

    @property
    def head(self) -> Head:
        """The head."""
        return self.state.head

    def is_live(self, run_id: str | None, now: int) -> bool:
        """Whether somebody may be driving an open run."""
        run = self.runs.get(run_id or "")
        return run is not None and run.record.live(now)


async def learn(place: Place, encoded: EncodedCommit, state: State | None) -> Known:
    """What ``encoded`` touches; ``state`` is what is remembered, None to read.

    Raises:
        Moved: what was remembered is no longer so.
        CorruptRecord: a row cannot be read back.
    """
    known = await _with_head(place, encoded, state)
    if known.head.remembered(encoded.mark) is not None:
        return known
    await _read_rows(place, encoded, known)
    await _read_claimers(place, known)
    await _read_behind(place, encoded, known)
    return known


async def _with_head(place: Place, encoded: EncodedCommit, state: State | None) -> Known:
    if state is not None:
        return Known(state, fresh=False)
    commit = encoded.commit
    head_key: Key = (thread_pk(place.scope, commit.thread_id), HEAD)
    keys: list[Key] = [head_key]
    if isinstance(commit.run, RunStart):
        keys.append((run_pk(place.scope, commit.run.run_id), LOOKUP))
    found = await place.table.get_many(keys)
    item = found.get(head_key)
    if item is None:
        head = new_head(place.scope, commit.thread_id, place.now(), place.moment())
    else:
        head = Head.from_item(item)
    lookup = found.get(keys[-1]) if len(keys) > 1 else None
    return Known(State(head), fresh=True, owner=None if lookup is None else lookup["thread"])


async def _read_rows(place: Place, encoded: EncodedCommit, known: Known) -> None:
    """Runs, interrupts and cuts that the commit names, remembered or read in one request."""
    head, commit = known.head, encoded.commit
    pk = thread_pk(head.scope, head.thread_id)
    keys: list[Key] = []
    run_id = encoded.run_id
    needs_run = commit.run is not None or commit.lease_token is not None or bool(commit.claims)
    if run_id is not None and needs_run:
        open_run = known.state.run(run_id)
        if open_run is not None:
            known.runs[run_id] = open_run
        elif run_id in head.open_runs or known.fresh or not isinstance(commit.run, RunStart):
            # A new run is not looked for under a remembered head: its row's condition tells.
            keys.append((pk, row_sk(RUN, head.incarnation, run_id)))
    named = encoded.named_interrupts
    for key in head.pending:
        if key[1] in named:
            stored = known.state.interrupt(key)
            if stored is not None:
                known.interrupts[key] = stored
            else:
                keys.append((pk, interrupt_sk(head.incarnation, *key)))
    if known.fresh:
        keys += [
            (pk, interrupt_sk(head.incarnation, record.run_id, record.interrupt_id))
            for record in encoded.interrupts
        ]
    cut_ids = [commit.restore, None if commit.cut_append is None else commit.cut_append.cut_id]
    for cut_id in cut_ids:
        version = None if cut_id is None else parse_cut_id(cut_id, head.incarnation)
        if version is not None:
            keys.append((pk, number_sk(CUT, head.incarnation, version)))
    if not keys or not head.version:
        return
    _take(known, (await fetch(place.table, keys)).values())
    if needs_run and run_id in head.open_runs and run_id not in known.runs:
        raise Moved(f"run {run_id!r}")
    for key in head.pending:
        if key[1] in named and key not in known.interrupts:
            raise Moved(f"interrupt {key[1]!r}")
    if known.fresh and not named <= {key[1] for key in head.pending}:
        # Not pending: settled long ago, or never there? It is refused either way.
        _take(known, (await prefixed(place, head, INTERRUPT)).values())


def _take(known: Known, found: Iterable[Rows]) -> None:
    for rows in found:
        if rows[0]["kind"] == "run":
            run = StoredRun.from_item(rows[0], rows[1:])
            known.runs[run.record.run_id] = run
        elif rows[0]["kind"] == "interrupt":
            stored = StoredInterrupt.from_item(rows[0], rows[1:])
            known.interrupts[stored.key] = stored
        elif rows[0]["kind"] == "cut":
            cut = Cut.from_item(rows[0])
            known.cuts[f"{cut.version:x}.{known.head.incarnation}"] = cut


async def _read_claimers(place: Place, known: Known) -> None:
    """Runs that have claimed one of the interrupts: a claim ends with its run."""
    head = known.head
    keys: list[Key] = []
    for stored in known.interrupts.values():
        run_id = stored.record.claimed_by
        if run_id is None or run_id in known.runs or run_id not in head.open_runs:
            continue
        # Its lease may have been extended meanwhile: what is remembered would not do.
        pk = thread_pk(head.scope, head.thread_id)
        keys.append((pk, row_sk(RUN, head.incarnation, run_id)))
    if keys:
        _take(known, (await fetch(place.table, keys)).values())


async def _read_behind(place: Place, encoded: EncodedCommit, known: Known) -> None:
    """Ids of the messages that the commit cuts."""
    head, commit = known.head, encoded.commit
    after: int | None = None
    if commit.splice is not None:
        after = commit.splice.keep_through
    elif commit.restore is not None and commit.restore in known.cuts:
        after = known.cuts[commit.restore].after
    if after is None or head.newest <= after:
        return
    expected = commit.splice.expected if commit.splice is not None else commit.restore_expected
    if expected is not None and expected != head.revision:
        return  # it is refused anyway
    known.behind = await numbers_behind(place, head, after, head.newest)


def missing(head: Head, number: int) -> CorruptRecord:
    """The error for a live message that is not there."""
    what = f"message {number} of thread {head.thread_id!r}"
    return CorruptRecord(what, "the thread names it, but it is missing")
