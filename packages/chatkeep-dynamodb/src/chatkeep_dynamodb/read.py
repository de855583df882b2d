"""One consistent read of a thread.

One query brings the head and all that sorts beside it (activities, drafts, messages). The head
names the open runs, the pending interrupts and the live numbers, each in the version in which a
commit left it: a row that is missing, or is not in that version, shows that a commit fell
between the rows, and everything is read again. So a view is the state that one head describes,
although a query alone is not isolated from transactions.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatkeep.errors import BackendUnavailable, CorruptRecord
from chatkeep.records import ActivityRecord, DraftRecord, InterruptRecord, ModelMessage, RunRecord
from chatkeep.rules import active_runs, visible_interrupt
from chatkeep.stores import ThreadView, ViewQuery
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.client import gather
from chatkeep_dynamodb.fetch import fetch, grouped, prefixed
from chatkeep_dynamodb.head import Head
from chatkeep_dynamodb.items import Item, Key, body_of, check_format, object_of
from chatkeep_dynamodb.keys import (
    ACTIVITY,
    DRAFT,
    HEAD,
    INTERRUPT,
    LOOKUP,
    MESSAGE,
    RUN,
    behind,
    interrupt_sk,
    number_sk,
    row_sk,
    run_pk,
    thread_pk,
)
from chatkeep_dynamodb.rows import (
    StoredInterrupt,
    StoredRun,
    draft_expired,
    draft_from_item,
    message_from_item,
)
from chatkeep_dynamodb.state import InterruptKey, Place, Rows, State

__all__ = ["read_view"]

_TRIES = 10

_DIGEST_NAMES = (
    "pk", "sk", "kind", "digest", "format", "tenant", "user", "thread", "incarnation", "version",
    "transcript_version", "next_number", "next_row", "live", "activities", "open", "commits",
    "created_at", "created", "updated_at", "unborn",
)  # fmt: skip
"""What a read of digests leaves out is the bodies."""


class _Moved(Exception):
    """A commit fell between the rows of a read."""

    def __init__(self, what: str, version: int) -> None:
        self.what = what
        self.version = version
        super().__init__(what)


async def read_view(place: Place, thread_id: str, query: ViewQuery) -> ThreadView:
    """What ``query`` asks for.

    Raises:
        CorruptRecord: a row cannot be read back, or one that the head names is not there.
        BackendUnavailable: commits fell between the rows of every try.
    """
    before: _Moved | None = None
    for attempt in range(_TRIES):
        try:
            return await _read(place, thread_id, query)
        except _Moved as moved:
            if before is not None and (before.what, before.version) == (moved.what, moved.version):
                # Twice under the same head: it is not there.
                raise CorruptRecord(moved.what, "the thread names it, but it is missing") from None
            before = moved
        await asyncio.sleep(0.002 * 2**attempt * random.random())
    raise BackendUnavailable(f"thread {thread_id!r} was written to during each of {_TRIES} reads")


@dataclass(slots=True)
class _Gate:
    """Runs and interrupts that were read, and their rows."""

    runs: dict[str, StoredRun] = field(default_factory=dict[str, StoredRun])
    interrupts: dict[InterruptKey, StoredInterrupt] = field(
        default_factory=dict[InterruptKey, StoredInterrupt]
    )
    run_rows: dict[str, Rows] = field(default_factory=dict[str, "Rows"])
    interrupt_rows: dict[InterruptKey, Rows] = field(default_factory=dict[InterruptKey, "Rows"])

    def put_run(self, rows: Rows) -> None:
        run = StoredRun.from_item(rows[0], rows[1:])
        self.runs[run.record.run_id] = run
        self.run_rows[run.record.run_id] = rows

    def put_interrupt(self, rows: Rows) -> None:
        stored = StoredInterrupt.from_item(rows[0], rows[1:])
        self.interrupts[stored.key] = stored
        self.interrupt_rows[stored.key] = rows

    def state(self, head: Head) -> State:
        """What to remember: of open runs and pending interrupts."""
        return State(
            head,
            {name: rows for name, rows in self.run_rows.items() if name in head.open_runs},
            {key: rows for key, rows in self.interrupt_rows.items() if key in head.pending},
        )


async def _read(place: Place, thread_id: str, query: ViewQuery) -> ThreadView:
    pk = thread_pk(place.scope, thread_id)
    whole = query.messages in ("bodies", "digests") and query.limit is None and query.before is None
    low = f"{ACTIVITY}/" if query.activities else f"{DRAFT}/" if query.drafts else HEAD
    high = behind(MESSAGE) if whole else HEAD
    names = _DIGEST_NAMES if query.messages == "digests" and low == HEAD else ()
    works: list[Any] = [
        functools.partial(place.table.query, pk, low, high, names=names)
        if low != high
        else functools.partial(_one, place, pk)
    ]
    if query.run_id is not None and not _is_open(place, thread_id, query.run_id):
        works.append(
            functools.partial(place.table.get, (run_pk(place.scope, query.run_id), LOOKUP))
        )
    items, *looked_up = await gather(works)
    lookup: Item | None = looked_up[0] if looked_up else None
    foreign = lookup is not None and lookup["thread"] != thread_id
    head_item = next((item for item in items if item["sk"] == HEAD), None)
    head = None if head_item is None else Head.from_item(head_item)
    now = place.now()
    if head is None or head.unborn:
        return ThreadView(thread_id=thread_id, exists=False, now=now, foreign_run=foreign)
    rows = grouped(items)
    numbers: list[int] = []
    truncated = False
    if query.messages != "none":
        numbers, truncated = rg.window(head.live, query.limit, query.before)
    more: list[Any] = [functools.partial(_read_gate, place, head, query, lookup, bool(looked_up))]
    if query.messages in ("bodies", "digests") and not whole and numbers:
        first, last = (number_sk(MESSAGE, head.incarnation, numbers[i]) for i in (0, -1))
        more.append(functools.partial(place.table.query, pk, first, behind(last)))
    gate, *entries = await gather(more)
    if entries:
        rows |= grouped(entries[0])
    messages, digests = _messages(head, rows, numbers, query)
    view = ThreadView(
        thread_id=thread_id,
        exists=True,
        now=now,
        revision=head.revision,
        newest=head.newest,
        messages=messages,
        numbers=numbers,
        digests=digests,
        truncated=truncated,
        run=_run_of(gate, query.run_id),
        foreign_run=foreign,
        runs=_runs(gate, query, now),
        interrupts=_interrupts(gate, head, query, now),
        activities=_activities(head, rows) if query.activities else [],
        drafts=_drafts(head, rows, now) if query.drafts else [],
    )
    place.memory.put(gate.state(head))
    return view


async def _one(place: Place, pk: str) -> list[Item]:
    item = await place.table.get((pk, HEAD))
    return [] if item is None else [item]


def _is_open(place: Place, thread_id: str, run_id: str) -> bool:
    known = place.memory.get(place.scope, thread_id)
    return known is not None and run_id in known.head.open_runs


# ----------------------------------------------------------------------- runs, interrupts


async def _read_gate(
    place: Place, head: Head, query: ViewQuery, lookup: Item | None, looked_up: bool
) -> _Gate:
    pk = thread_pk(head.scope, head.thread_id)
    run_keys: dict[str, Key] = {}
    interrupt_keys: dict[InterruptKey, Key] = {}
    if query.runs == "active" or query.interrupts != "none":
        # An interrupt's claim ends with its run.
        run_keys = {r: (pk, row_sk(RUN, head.incarnation, r)) for r in head.open_runs}
    if query.interrupts == "pending":
        interrupt_keys = {k: (pk, interrupt_sk(head.incarnation, *k)) for k in head.pending}
    asked = query.run_id
    if asked is not None and (asked in head.open_runs or not looked_up or _here(lookup, head)):
        run_keys[asked] = (pk, row_sk(RUN, head.incarnation, asked))
    works: list[Any] = []
    if query.runs == "all":
        works.append(functools.partial(prefixed, place, head, RUN))
        run_keys = {}
    if query.interrupts == "all":
        works.append(functools.partial(prefixed, place, head, INTERRUPT))
    keys = [*run_keys.values(), *interrupt_keys.values()]
    if keys:
        works.append(functools.partial(fetch, place.table, keys))
    gate = _Gate()
    for found in await gather(works):
        for rows in found.values():
            if rows[0]["kind"] == "run":
                gate.put_run(rows)
            else:
                gate.put_interrupt(rows)
    _verify(gate, head, run_keys, query)
    return gate


def _here(lookup: Item | None, head: Head) -> bool:
    return lookup is not None and lookup["thread"] == head.thread_id


def _verify(gate: _Gate, head: Head, run_keys: Mapping[str, Key], query: ViewQuery) -> None:
    """Whether the rows are those that the head left."""
    for run_id, version in head.open_runs.items():
        found = gate.runs.get(run_id)
        wanted = run_id in run_keys or query.runs == "all"
        if wanted and (found is None or found.version != version):
            raise _Moved(f"run {run_id!r} of thread {head.thread_id!r}", head.version)
    if query.interrupts != "none":
        for key, version in head.pending.items():
            stored = gate.interrupts.get(key)
            if stored is None or stored.version != version:
                raise _Moved(f"interrupt {key[1]!r} of thread {head.thread_id!r}", head.version)
    versions = [
        *(run.version for run in gate.runs.values()),
        *(stored.version for stored in gate.interrupts.values()),
    ]
    if max(versions, default=0) > head.version:
        raise _Moved(f"thread {head.thread_id!r}", head.version)


def _run_of(gate: _Gate, run_id: str | None) -> RunRecord | None:
    found = gate.runs.get(run_id) if run_id is not None else None
    return None if found is None else found.record


def _runs(gate: _Gate, query: ViewQuery, now: int) -> list[RunRecord]:
    if query.runs == "none":
        return []
    ordered = sorted(gate.runs.values(), key=lambda run: (run.record.started_at, run.order))
    records = [run.record for run in ordered]
    return records if query.runs == "all" else active_runs(records, now)


def _interrupts(gate: _Gate, head: Head, query: ViewQuery, now: int) -> list[InterruptRecord]:
    if query.interrupts == "none":
        return []
    ordered = sorted(gate.interrupts.values(), key=lambda i: (i.record.requested_at, i.order))

    def claim_live(record: InterruptRecord) -> bool:
        run = gate.runs.get(record.claimed_by or "")
        return run is not None and record.claimed_by in head.open_runs and run.record.live(now)

    return [visible_interrupt(i.record, claim_live=claim_live(i.record)) for i in ordered]


# ---------------------------------------------------------------- messages and UI rows


def _messages(
    head: Head, rows: Mapping[str, Rows], numbers: Sequence[int], query: ViewQuery
) -> tuple[list[ModelMessage], list[bytes]]:
    messages: list[ModelMessage] = []
    digests: list[bytes] = []
    if query.messages not in ("bodies", "digests"):
        return messages, digests
    for number in numbers:
        found = rows.get(number_sk(MESSAGE, head.incarnation, number))
        if found is None:
            what = f"message {number} of thread {head.thread_id!r}"
            raise _Moved(what, head.version)
        if query.messages == "digests":
            digests.append(found[0]["digest"])
        else:
            messages.append(message_from_item(found[0], found[1:], number, head.thread_id))
    return messages, digests


def _activities(head: Head, rows: Mapping[str, Rows]) -> list[ActivityRecord]:
    records: list[ActivityRecord] = []
    for position, row in enumerate(head.rows):
        what = f"activity {position} of thread {head.thread_id!r}"
        found = rows.get(number_sk(ACTIVITY, head.incarnation, row.number))
        if found is None:
            raise _Moved(what, head.version)
        check_format(found[0], what)
        plain = object_of(body_of(found[0], found[1:], what), what)
        records.append(ActivityRecord.from_json(plain, what))
    return records


def _drafts(head: Head, rows: Mapping[str, Rows], now: int) -> list[DraftRecord]:
    records: list[DraftRecord] = []
    for run_id in head.open_runs:
        found = rows.get(row_sk(DRAFT, head.incarnation, run_id))
        if found is None or draft_expired(found[0], now):
            continue
        draft = draft_from_item(found[0], found[1:], head.thread_id)
        if draft is None:
            raise _Moved(f"draft of run {run_id!r}, {found[0]['stamp']}", head.version)
        records.append(draft)
    return records
