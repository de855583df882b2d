"""Cuts, and whole threads: list, erase, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from bson.datetime_ms import DatetimeMS

from chatkeep.codec import decode, encode
from chatkeep.errors import InvalidValue
from chatkeep.records import CutRecord, ModelMessage, ThreadInfo
from chatkeep.rules import decode_cursor, encode_cursor, new_revision
from chatkeep.scope import Scope
from chatkeep.stores import ThreadList
from chatkeep_mongo.bodies import Patience, Torn, check_format
from chatkeep_mongo.commit import write_and_do
from chatkeep_mongo.driver import Driver, milliseconds
from chatkeep_mongo.found import Found, at_rest, find_head, load_drafts
from chatkeep_mongo.head import Head, new_stamp
from chatkeep_mongo.layout import (
    ENTRIES,
    METADATA,
    RUNS,
    THREADS,
    Document,
    owner_key,
    thread_key,
    values_key,
)
from chatkeep_mongo.lookups import put_draft
from chatkeep_mongo.ranges import (
    flatten,
    from_flat,
    newest_of,
    numbers_of,
    of_numbers,
    size,
    without,
)
from chatkeep_mongo.read import entries_in, messages_in
from chatkeep_mongo.redo import back_off, delete_rest, delete_values
from chatkeep_mongo.transcript import find_cuts, oldest_cut, pieces_of

__all__ = [
    "delete_thread",
    "erase_messages",
    "list_cut_threads",
    "list_cuts",
    "list_idle",
    "list_threads",
    "load_cut",
    "purge_cuts",
]


# --------------------------------------------------------------------------------- cuts


async def list_cuts(db: Driver, scope: Scope, thread_id: str) -> list[CutRecord]:
    """Cuts of the thread, oldest first."""
    key = thread_key(scope, thread_id)
    return await at_rest(db, key, thread_id, partial(_list_cuts, db, thread_id))


async def _list_cuts(db: Driver, thread_id: str, found: Found) -> list[CutRecord]:
    head = found.head
    if head is None or not head.cuts:
        return []
    cuts = await find_cuts(db, head, head.cuts)
    numbers = sorted(n for cut in cuts for n in numbers_of(from_flat(cut["ranges"])))
    rows = await entries_in(db, head, of_numbers(numbers), {"n": 1, "id": 1})
    ids = {row["n"]: row["id"] for row in rows}
    records: list[CutRecord] = []
    for cut in cuts:
        own = numbers_of(from_flat(cut["ranges"]))
        records.append(
            CutRecord(
                cut_id=cut["_id"],
                thread_id=thread_id,
                cut_at=cut["cut_at"],
                run_id=cut["run_id"],
                numbers=own,
                message_ids=[ids[number] for number in own],
                extra=cut["extra"],
            )
        )
    return records


async def load_cut(db: Driver, scope: Scope, thread_id: str, cut_id: str) -> list[ModelMessage]:
    """The messages of a cut, in order."""
    key = thread_key(scope, thread_id)
    return await at_rest(db, key, thread_id, partial(_load_cut, db, thread_id, cut_id))


async def _load_cut(db: Driver, thread_id: str, cut_id: str, found: Found) -> list[ModelMessage]:
    head = found.head
    if head is None or cut_id not in head.cuts:
        return []
    (cut,) = await find_cuts(db, head, [cut_id])
    return await messages_in(db, head, from_flat(cut["ranges"]), thread_id)


async def purge_cuts(db: Driver, scope: Scope, thread_id: str, before: int) -> int:
    """Erase the cuts made before ``before``; how many."""
    key = thread_key(scope, thread_id)
    while True:
        done = await at_rest(db, key, thread_id, partial(_purge_cuts, db, before), to_write=True)
        if done is not None:
            return done
        await back_off(1)


async def _purge_cuts(db: Driver, before: int, found: Found) -> int | None:
    head = found.head
    if head is None or not head.cuts:
        return 0
    cuts = await find_cuts(db, head, head.cuts)
    old = [cut for cut in cuts if cut["cut_at"] < before]
    if not old:
        return 0
    gone = [cut["_id"] for cut in old]
    erased = of_numbers(sorted(n for cut in old for n in numbers_of(from_flat(cut["ranges"]))))
    after = replace(head, cuts=[cut_id for cut_id in head.cuts if cut_id not in gone])
    redo: Document = {"drop_cuts": gone, "erase": flatten(erased)}
    oldest = min((cut["cut_at"] for cut in cuts if cut not in old), default=None)
    redo["drop_pieces"] = await pieces_of(db, head, erased)
    return len(old) if await _write(db, head, after, redo, {"oldest_cut": oldest}) else None


async def _write(db: Driver, head: Head, after: Head, redo: Document, change: Document) -> bool:
    """Write a head that no turn has changed, and do what goes with it."""
    version = head.version + 1
    after = replace(after, stamp=new_stamp(), version=version)
    return await write_and_do(db, head, after, {"version": version, **redo}, change)


# ------------------------------------------------------------------------------ threads

_TOO_LATE = 2**63
"""No number in a document reaches this."""

_TO_DELETE = {"t": 1, "stamp": 1, "version": 1, "gone": 1, "format": 1}


async def delete_thread(db: Driver, scope: Scope, thread_id: str) -> bool:
    """Erase the thread, all that hangs on it, and the metadata under its id.

    One update says that the thread is gone; from then on it does not exist. What it leaves is
    deleted afterwards, by this call or by whoever writes to the thread, or sweeps, next.
    """
    key = thread_key(scope, thread_id)
    rows = await db.find(METADATA, {"owner": values_key(scope, thread_id)}, {"revision": 1})
    notes = [[row["_id"], row["revision"]] for row in rows]
    for attempt in count():
        if attempt:
            await back_off(attempt)
        heads = await db.find(THREADS, {"_id": key}, _TO_DELETE)
        if not heads:
            await delete_values(db, notes)
            return bool(notes)
        head = heads[0]
        check_format(head, f"thread {thread_id!r}")
        if head.get("gone"):
            await find_head(db, key, thread_id, to_write=True)
            await delete_values(db, notes)
            return True
        change: Document = {
            "$set": {
                "gone": True,
                "notes": notes,
                "stamp": new_stamp(),
                "redo": {"version": head["version"] + 1},
            },
            "$unset": {"owner": "", "oldest_cut": ""},
        }
        if await db.update(THREADS, {"_id": key, "stamp": head["stamp"]}, change):
            await delete_rest(db, key, head["t"], notes)
            return bool(head["version"] or notes)
    raise AssertionError("unreachable")


async def list_threads(
    db: Driver, scope: Scope, limit: int, cursor: str | None, children: bool
) -> ThreadList:
    """Newest first; equal times in reverse order of creation."""
    query: Document = {"owner": owner_key(scope)}
    if not children:
        query["child"] = False
    if cursor is not None:
        updated_at, born = decode_cursor(cursor, int, int)
        if not (0 <= updated_at < _TOO_LATE and 0 <= born < _TOO_LATE):
            raise InvalidValue("cursor", "is not a cursor of this list")
        moment = DatetimeMS(updated_at)
        query["$or"] = [
            {"updated_at": {"$lt": moment}},
            {"updated_at": moment, "born": {"$lt": born}},
        ]
    fields = {"thread_id": 1, "created_at": 1, "updated_at": 1, "born": 1, "count": 1}
    order = [("updated_at", -1), ("born", -1)]
    rows = await db.find(THREADS, query, fields, sort=order, limit=limit + 1)
    page = rows[:limit]
    more = len(rows) > limit
    return ThreadList(
        threads=[
            ThreadInfo(
                thread_id=row["thread_id"],
                created_at=row["created_at"],
                updated_at=milliseconds(row["updated_at"]),
                message_count=row["count"],
            )
            for row in page
        ],
        cursor=encode_cursor(milliseconds(page[-1]["updated_at"]), page[-1]["born"])
        if more
        else None,
    )


async def list_idle(db: Driver, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
    """Threads of every scope that nobody has written for so long, the longest first."""
    before = DatetimeMS(await db.clock() - idle_ms)
    return await _threads(db, {"updated_at": {"$lte": before}, "child": False}, "updated_at", limit)


async def list_cut_threads(db: Driver, before: int, limit: int) -> list[tuple[Scope, str]]:
    """Threads of every scope with a cut made before ``before``, the oldest cut first."""
    return await _threads(db, {"oldest_cut": {"$lt": before}}, "oldest_cut", limit)


async def _threads(db: Driver, query: Document, by: str, limit: int) -> list[tuple[Scope, str]]:
    fields = {"tenant": 1, "user": 1, "thread_id": 1}
    rows = await db.find(THREADS, query, fields, sort=[(by, 1), ("born", 1)], limit=limit)
    return [(Scope.from_key(row["tenant"], row["user"]), row["thread_id"]) for row in rows]


# ------------------------------------------------------------------------------ erasing


async def erase_messages(
    db: Driver, scope: Scope, thread_id: str, message_ids: Sequence[str]
) -> int:
    """Erase every copy of these messages: live, archived, in drafts, and what a crash left."""
    key = thread_key(scope, thread_id)
    while True:
        work = partial(_erase_messages, db, sorted(set(message_ids)))
        done = await at_rest(db, key, thread_id, work, to_write=True)
        if done is not None:
            break
        await back_off(1)
    found = await find_head(db, key, thread_id)
    if found.head is not None:
        await _erase_from_drafts(db, found.head, set(message_ids))
    return done


async def _erase_messages(db: Driver, message_ids: list[str], found: Found) -> int | None:
    head = found.head
    if head is None:
        return 0
    where = {"t": head.t, "id": {"$in": message_ids}}
    rows = await db.find(ENTRIES, where, {"n": 1, "piece": 1}, sort=[("n", 1)])
    if not rows:
        return 0
    gone = [row["n"] for row in rows]
    live = without(head.live, gone)
    # Messages that a commit has stored but not committed go too: their numbers must not return.
    after = replace(
        head,
        live=live,
        newest=newest_of(live),
        count=size(live),
        next=max(head.next, gone[-1] + 1),
    )
    erased = head.count - after.count
    if erased:
        after = replace(after, revision=new_revision(head.version + 1))
    redo: Document = {
        "erase": flatten(of_numbers(gone)),
        "drop_pieces": [row["piece"] for row in rows if "piece" in row],
    }
    change: Document = {}
    if head.cuts:
        after, count_in_cuts = await _shrink_cuts(db, head, after, gone, redo, change)
        erased += count_in_cuts
    return erased if await _write(db, head, after, redo, change) else None


async def _shrink_cuts(
    db: Driver, head: Head, after: Head, gone: list[int], redo: Document, change: Document
) -> tuple[Head, int]:
    """Take erased numbers out of the cuts; an empty one goes. The last ``extra`` entries of a cut
    are those that a detached run added."""
    erased = 0
    for cut in await find_cuts(db, head, head.cuts):
        before = from_flat(cut["ranges"])
        left = without(before, gone)
        if left == before:
            continue
        erased += size(before) - size(left)
        if left:
            added = numbers_of(before)[size(before) - cut["extra"] :]
            redo.setdefault("cuts", []).append(
                {
                    "_id": cut["_id"],
                    "ranges": flatten(left),
                    "extra": sum(number not in gone for number in added),
                }
            )
        else:
            redo.setdefault("drop_cuts", []).append(cut["_id"])
    dropped = redo.get("drop_cuts", [])
    if dropped:
        change["oldest_cut"] = await oldest_cut(db, head, without_ids=dropped)
        after = replace(after, cuts=[cut_id for cut_id in head.cuts if cut_id not in dropped])
    return after, erased


async def _erase_from_drafts(db: Driver, head: Head, asked: set[str]) -> None:
    """Rewrite the drafts that hold one of these messages, unless a newer draft came meanwhile: then
    that one."""
    query: Document = {"t": head.t, "draft_at": {"$exists": True}}
    patience = Patience("a draft")
    for attempt in count():
        if attempt:
            await back_off(attempt)
        rows = await db.find(RUNS, query)
        again = False
        for row in rows:
            try:
                same = {"_id": row["_id"], **{n: row.get(n) for n in ("draft_at", "draft_piece")}}
                if "draft" in row:
                    same["draft"] = row["draft"]
                await load_drafts(db, [row])
            except Torn as error:
                patience.torn(error, str(row["draft_at"]))
                again = True
                continue
            messages: list[ModelMessage] = decode(row["draft"], f"draft of run {row['run_id']!r}")
            rest = [message for message in messages if message.get("id") not in asked]
            if len(rest) == len(messages):
                continue
            again |= not await put_draft(db, head.t, same, encode(rest), {})
        if not again:
            return
