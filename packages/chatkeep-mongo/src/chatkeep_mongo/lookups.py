"""Drafts, leases, and finding runs from other places than their thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from chatkeep.codec import encode
from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep.records import ModelMessage, RunRecord
from chatkeep.rules import check_writer, renewed_run
from chatkeep.scope import Scope
from chatkeep.stores import LostRun
from chatkeep_mongo.bodies import INLINE, drop_pieces, split_pieces
from chatkeep_mongo.commit import write_and_do
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.found import Found, find_head, find_runs
from chatkeep_mongo.head import new_stamp
from chatkeep_mongo.layout import PIECES, RUNS, THREADS, Document, owner_key, run_key, thread_key
from chatkeep_mongo.redo import back_off
from chatkeep_mongo.rows import OPEN, draft_of, run_of

__all__ = [
    "find_run",
    "list_child_runs",
    "list_lost",
    "list_reclaimable",
    "put_draft",
    "renew_lease",
    "save_draft",
]

_log = logging.getLogger("chatkeep.mongo")

_UNDONE_AT_ONCE = 1000
_NOW: Document = {"$toLong": "$$NOW"}


async def save_draft(
    db: Driver,
    scope: Scope,
    thread_id: str,
    run_id: str,
    messages: Sequence[ModelMessage],
    lease_token: str | None,
) -> None:
    """Put the draft into the run's document: one command that checks and writes. It touches no
    head: it conflicts with nobody."""
    body = encode(list(messages), "messages")
    key = run_key(scope, run_id)
    open_run: Document = {
        "_id": key,
        "thread": thread_key(scope, thread_id),
        "status": {"$in": OPEN},
    }
    if lease_token is not None:
        open_run["lease_token"] = lease_token
    for attempt in count():
        if attempt:
            await back_off(attempt)
        t = await _place_of(db, key, body)
        if t is not None and await put_draft(
            db, t, open_run, body, {"draft_at": _NOW}, durable=False
        ):
            return
        found = await find_head(db, thread_key(scope, thread_id), thread_id, run_key=key)
        check_writer(_own(found), run_id, thread_id, lease_token)


async def _place_of(db: Driver, key: str, body: bytes) -> str | None:
    """What the pieces of a draft hang on, mostly none; None if there is no run to belong to."""
    if len(body) <= INLINE:
        return ""
    found = await db.find(RUNS, {"_id": key}, {"t": 1})
    return found[0]["t"] if found else None


async def put_draft(
    db: Driver, t: str, run: Document, body: bytes, fields: Document, *, durable: bool = True
) -> bool:
    """Put a draft into the document of a run, and drop the pieces of the one before; False if no
    run matches.

    Args:
        db: the database.
        t: what pieces hang on.
        run: matches the run.
        body: the draft.
        fields: to set with it.
        durable: see :meth:`Driver.change`.
    """
    pieces: list[Document] = []
    unset = ["draft"]
    if len(body) <= INLINE:
        fields = {**fields, "draft": {"$literal": body.decode()}}
        unset = ["draft_piece", "draft_parts"]
    else:
        pieces = split_pieces(body, t=t, piece=f"d{run['_id']}.{new_stamp()}")
        await db.insert_missing(PIECES, pieces)
        name = {"$literal": pieces[0]["piece"]}
        fields = {**fields, "draft_piece": name, "draft_parts": len(pieces)}
    change: list[Document] = [{"$set": fields}, {"$unset": unset}]
    was = await db.change(
        RUNS, run, change, {"t": 1, "draft_piece": 1}, after=False, durable=durable
    )
    if was is None:
        await drop_pieces(db, t, [piece["piece"] for piece in pieces[:1]])
        return False
    await drop_pieces(db, was["t"], [was[n] for n in ("draft_piece",) if n in was])
    return True


def _own(found: Found) -> RunRecord | None:
    """The run that was asked for, if it is one of this thread."""
    if found.run is None or found.head is None or found.run["t"] != found.head.t:
        return None
    return run_of(found.run)


async def renew_lease(
    db: Driver, scope: Scope, thread_id: str, run_id: str, lease_token: str, lease_ms: int
) -> RunRecord:
    """Extend the lease from the database's clock.

    A lease that still runs is extended in the run's document alone: nobody can be taking it over.
    One that has run out goes through the head, where whoever takes the run over has to pass too.
    """
    key, thread = run_key(scope, run_id), thread_key(scope, thread_id)
    live: Document = {
        "_id": key,
        "thread": thread,
        "status": {"$in": OPEN},
        "lease_token": lease_token,
        "$expr": {"$gt": ["$lease_until", _NOW]},
    }
    until = {"$set": {"lease_until": {"$add": [_NOW, lease_ms]}}}
    if await db.update(RUNS, live, [until]):
        # Read through the thread's head: a commit that ended or stopped the run may be half done.
        rows = await find_runs(db, {"_id": key})
        run = run_of(rows[0]) if rows else None
        check_writer(run, run_id, thread_id, lease_token)
        if run is not None:
            return run
    for attempt in count():
        if attempt:
            await back_off(attempt)
        found = await find_head(db, thread, thread_id, run_key=key)
        run = renewed_run(_own(found), run_id, thread_id, lease_token, lease_ms, found.now)
        head = found.head
        if head is None or run.lease is None:
            raise AssertionError("renewed_run refuses an unknown run and gives a lease")
        after = replace(head, stamp=new_stamp(), version=head.version + 1)
        fields = {"lease_token": run.lease.token, "lease_until": run.lease.until}
        redo: Document = {
            "version": after.version,
            "run": {"_id": key, "set": fields, "unset": []},
        }
        if await write_and_do(db, head, after, redo, {}):
            return run
    raise AssertionError("unreachable")


# ------------------------------------------------------------------------------ look-ups


async def find_run(db: Driver, scope: Scope, run_id: str) -> RunRecord | None:
    """The run, in whichever thread of the scope."""
    found = await find_runs(db, {"_id": run_key(scope, run_id)})
    return run_of(found[0]) if found else None


async def list_child_runs(
    db: Driver, scope: Scope, parents: Sequence[str]
) -> dict[str, list[RunRecord]]:
    """Children by parent id, each ascending by start; ties in order of creation."""
    keys = sorted({run_key(scope, parent) for parent in parents})
    found: dict[str, list[tuple[int, int, RunRecord]]] = {}
    for document in await find_runs(db, {"parent": {"$in": keys}}):
        run = run_of(document)
        row = (run.started_at, document["born"], run)
        found.setdefault(run.parent_run_id or "", []).append(row)
    return {
        parent: [row[2] for row in sorted(rows, key=lambda row: row[:2])]
        for parent, rows in found.items()
    }


async def list_reclaimable(
    db: Driver, scope: Scope, detached_before: int, limit: int, every_scope: bool
) -> list[LostRun]:
    """Running runs detached since then, the longest first."""
    query: Document = {
        "status": "running",
        "detached_since": {"$lte": detached_before},
    }
    if not every_scope:
        query["owner"] = owner_key(scope)
    return await _lost_runs(db, query, "detached_since", limit)


async def list_lost(db: Driver, limit: int) -> list[LostRun]:
    """Running runs of every scope whose lease has run out, the longest first.

    What crashed commits and deletions left undone is done here too, where nobody else looks.
    A thread or a run that cannot be read is logged and left: it must not keep the others from
    being ended.
    """
    undone = await db.find(
        THREADS, {"redo.version": {"$gte": 0}}, {"thread_id": 1}, limit=_UNDONE_AT_ONCE
    )
    unreadable: list[str] = []
    for row in undone:
        # A head that only keeps a thread from a run (see claims) has no id beside its key.
        thread_id = row.get("thread_id", "")
        try:
            await find_head(db, row["_id"], thread_id, to_write=True)
        except (CorruptRecord, SchemaOutOfDate):
            _log.exception("what thread %r has left to do cannot be done", thread_id)
            unreadable.append(row["_id"])
    query: Document = {"status": "running", "lease_until": {"$lte": await db.clock()}}
    if unreadable:
        query["thread"] = {"$nin": unreadable}
    return await _lost_runs(db, query, "lease_until", limit)


async def _lost_runs(db: Driver, query: Document, by: str, limit: int) -> list[LostRun]:
    lost: list[LostRun] = []
    found = await find_runs(db, query, sort=[(by, 1), ("born", 1)], limit=limit, drafts=True)
    for document in found:
        scope = Scope.from_key(document["tenant"], document["user"])
        try:
            row = LostRun(scope=scope, run=run_of(document), draft=draft_of(document))
        except (CorruptRecord, SchemaOutOfDate):
            _log.exception("run %r cannot be read", document["run_id"])
            continue
        lost.append(row)
    return lost
