"""One consistent read: the head, then what it names, all of the head's moment.

Documents are read after the head, and count only while its counters and versions agree with them.
If another writer comes between, the read begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from chatkeep.records import ActivityRecord, InterruptRecord, ModelMessage
from chatkeep.rules import active_runs, visible_interrupt
from chatkeep.scope import Scope
from chatkeep.stores import ThreadView, ViewQuery
from chatkeep_mongo.bodies import Torn, load_bodies, together
from chatkeep_mongo.decide import check_version, live_runs
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.found import Found, at_rest, has_body, load_drafts, owner_lives
from chatkeep_mongo.head import Head
from chatkeep_mongo.hints import Hints
from chatkeep_mongo.layout import ACTIVITIES, INTERRUPTS, RUNS, Document, run_key, thread_key
from chatkeep_mongo.ranges import Ranges, numbers_of, size, window
from chatkeep_mongo.rows import (
    NO_DRAFT,
    OPEN,
    activity_of,
    draft_of,
    interrupt_of,
    messages_of,
    run_of,
)
from chatkeep_mongo.transcript import in_numbers

__all__ = ["entries_in", "messages_in", "read_view"]


async def read_view(
    db: Driver, scope: Scope, thread_id: str, query: ViewQuery, hints: Hints
) -> ThreadView:
    """What ``query`` asks for.

    Raises:
        CorruptRecord: a document is missing, or cannot be read back.
    """
    return await at_rest(
        db,
        thread_key(scope, thread_id),
        thread_id,
        partial(_view, db, scope, thread_id, query, hints),
        run_key=None if query.run_id is None else run_key(scope, query.run_id),
    )


async def _view(
    db: Driver, scope: Scope, thread_id: str, query: ViewQuery, hints: Hints, found: Found
) -> ThreadView:
    head, run = found.head, found.run
    own = foreign = False
    if run is not None:
        own = head is not None and run["thread"] == head.key and run["t"] == head.t
        foreign = not own and run["thread_id"] != thread_id and await owner_lives(db, run)
    if head is None:
        return ThreadView(thread_id=thread_id, exists=False, now=found.now, foreign_run=foreign)
    if run is not None and own:
        check_version([run], head)
    parts = _Parts(db, scope, thread_id, query, head)
    fields: dict[str, Any] = {}
    for part in await together(*parts.works()):
        fields |= part
    runs: list[Document] = fields.pop("_runs", [])
    if "interrupts" in fields:
        fields["interrupts"] = await parts.visible(fields["interrupts"], runs, found.now)
    if query.runs != "none":
        records = [run_of(document) for document in runs]
        fields["runs"] = records if query.runs == "all" else active_runs(records, found.now)
    if query.drafts:
        still_open = [document for document in runs if document["status"] in OPEN]
        fields["drafts"] = [d for d in map(draft_of, still_open) if d is not None]
    asked = run_of(run) if run is not None and own else None
    hints.saw(head, found.now, None if run is None else run["_id"], asked)
    return ThreadView(
        thread_id=thread_id,
        exists=True,
        now=found.now,
        revision=head.revision,
        newest=head.newest,
        run=asked,
        foreign_run=foreign,
        **fields,
    )


class _Parts:
    """The queries beside the head, as many as ``query`` needs, side by side."""

    def __init__(
        self, db: Driver, scope: Scope, thread_id: str, query: ViewQuery, head: Head
    ) -> None:
        self._db, self._scope, self._thread_id = db, scope, thread_id
        self._query, self._head = query, head

    def works(self) -> list[Awaitable[dict[str, Any]]]:
        """What must be asked for; each gives some fields of the view, and ``_runs``."""
        query, head = self._query, self._head
        works: list[Awaitable[dict[str, Any]]] = []
        if query.messages != "none":
            works.append(self._messages())
        if (query.runs == "all" and head.runs) or (
            head.open and (query.runs == "active" or query.drafts)
        ):
            works.append(self._runs())
        if query.interrupts != "none" and (
            head.interrupts if query.interrupts == "all" else head.pending
        ):
            works.append(self._interrupts())
        if query.activities and head.activities:
            works.append(self._activities())
        return works

    async def _messages(self) -> dict[str, Any]:
        query = self._query
        chosen, truncated = window(self._head.live, limit=query.limit, before=query.before)
        fields: dict[str, Any] = {"numbers": numbers_of(chosen), "truncated": truncated}
        if chosen and query.messages == "bodies":
            fields["messages"] = await messages_in(self._db, self._head, chosen, self._thread_id)
        elif chosen and query.messages == "digests":
            rows = await entries_in(self._db, self._head, chosen, {"n": 1, "digest": 1})
            fields["digests"] = [row["digest"] for row in rows]
        return fields

    async def _runs(self) -> dict[str, Any]:
        """Documents of all runs, or of those that have not ended, in order of start."""
        query, head = self._query, self._head
        everything = query.runs == "all"
        where: Document = {"t": head.t}
        if not everything:
            where["status"] = {"$in": OPEN}
        fields = None if query.drafts else NO_DRAFT
        found = [row for row in await self._db.find(RUNS, where, fields) if has_body(row)]
        check_version(found, head)
        if len(found) != (head.runs if everything else head.open):
            raise Torn("a run")
        await load_bodies(self._db, head.t, found)
        if query.drafts:
            await load_drafts(self._db, found)
        return {"_runs": sorted(found, key=_start)}

    async def _interrupts(self) -> dict[str, Any]:
        """Interrupts as stored, in the order of lists."""
        head = self._head
        where: Document = {"t": head.t}
        if self._query.interrupts == "pending":
            where["status"] = "pending"
        found = await self._db.find(INTERRUPTS, where)
        check_version(found, head)
        if len(found) != (head.interrupts if self._query.interrupts == "all" else head.pending):
            raise Torn("an interrupt")
        await load_bodies(self._db, head.t, found)
        found.sort(key=lambda document: tuple(document["place"]))
        records = sorted(map(interrupt_of, found), key=lambda record: record.requested_at)
        return {"interrupts": records}

    async def visible(
        self, records: Sequence[InterruptRecord], runs: Sequence[Document], now: int
    ) -> list[InterruptRecord]:
        """Interrupts as readers see them: a claim ends with its run."""
        claimers = {record.claimed_by for record in records if record.claimed_by is not None}
        known = {run.run_id for run in map(run_of, runs) if run.live(now)}
        if not claimers <= known:
            known |= await live_runs(self._db, self._scope, self._head, claimers - known, now)
        return [visible_interrupt(r, claim_live=r.claimed_by in known) for r in records]

    async def _activities(self) -> dict[str, list[ActivityRecord]]:
        head = self._head
        where = {"t": head.t, "position": {"$lt": head.activities}}
        found = await self._db.find(ACTIVITIES, where, sort=[("position", 1)])
        check_version(found, head)
        if [row["position"] for row in found] != list(range(head.activities)):
            raise Torn("an activity")
        await load_bodies(self._db, head.t, found)
        return {"activities": [activity_of(row, self._thread_id) for row in found]}


def _start(document: Document) -> tuple[int, int]:
    return run_of(document).started_at, document["born"]


async def entries_in(
    db: Driver, head: Head, ranges: Ranges, fields: dict[str, int] | None = None
) -> list[Document]:
    """The entries with these numbers.

    Raises:
        Torn: one is missing.
    """
    rows = await in_numbers(db, head, ranges, fields)
    if len(rows) != size(ranges):
        raise Torn("a message")
    return rows


async def messages_in(db: Driver, head: Head, ranges: Ranges, thread_id: str) -> list[ModelMessage]:
    """The messages with these numbers.

    Raises:
        Torn: one is missing.
        CorruptRecord: one cannot be read back.
    """
    rows = await entries_in(db, head, ranges)
    await load_bodies(db, head.t, rows)
    return messages_of(rows, thread_id)
