"""What a commit leaves to be done once its head is written, and who finds it does it.

A redo record names the documents that the commit changes, as they are afterwards. Doing it again,
late, or twice at the same time changes nothing: a document is written only over an older version,
a run only where its document stands already, and numbers of messages never return.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import bson

from chatkeep_mongo.bodies import check_format, drop_pieces, split_pieces, together
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.layout import (
    ACTIVITIES,
    CUTS,
    ENTRIES,
    INTERRUPTS,
    METADATA,
    OF_THREAD,
    PIECES,
    RUNS,
    THREADS,
    Document,
)
from chatkeep_mongo.ranges import from_flat

__all__ = [
    "STAGE_ABOVE",
    "apply_redo",
    "back_off",
    "clear_redo",
    "complete",
    "delete_documents",
    "delete_rest",
    "delete_value",
    "delete_values",
    "erase_entries",
    "stage_redo",
]

STAGE_ABOVE: Final = 64 * 1024
"""Longest redo record, in bytes, that stands in the head itself."""

_AT_ONCE: Final = 500
"""Documents replaced by one command, at most."""


async def back_off(attempt: int) -> None:
    """Wait a little, the longer the more often this was in vain; never in step with others."""
    await asyncio.sleep(0.002 * 2 ** min(attempt, 6) * random.random())


def stage_redo(redo: Document, *, t: str, name: str) -> tuple[Document, list[Document]]:
    """What the head holds of a redo record, and the pieces to store before it (mostly none)."""
    if _short(redo):
        return redo, []
    data = bson.encode(redo)
    if len(data) <= STAGE_ABOVE:
        return redo, []
    pieces = split_pieces(data, t=t, piece=name)
    return {"version": redo["version"], "piece": name, "parts": len(pieces)}, pieces


def _short(redo: Document) -> bool:
    """Whether it is short for certain: most are, and need not be encoded to be measured."""
    if redo.keys() - {"version", "run"}:
        return False
    return len(redo.get("run", {}).get("set", {}).get("body", "")) < STAGE_ABOVE // 8


# ---------------------------------------------------------------------------- doing it


async def apply_redo(db: Driver, t: str, redo: Document) -> None:
    """Bring the documents of thread ``t`` to where the commit left them."""
    version: int = redo["version"]
    older = {"t": t, "v": {"$lt": version}}
    works: list[Any] = []
    stale: list[str] = list(redo.get("drop_pieces", ()))
    if run := redo.get("run"):
        works.append(_put_run(db, {"_id": run["_id"], **older}, run, version, stale))
    if interrupts := redo.get("interrupts"):
        works.append(_put_newer(db, INTERRUPTS, interrupts, version))
    if activities := redo.get("activities"):
        if activities["put"]:
            works.append(_put_newer(db, ACTIVITIES, activities["put"], version))
        if activities["length"] < activities["had"]:
            behind = {"t": t, "position": {"$gte": activities["length"]}, "v": {"$lte": version}}
            works.append(db.delete(ACTIVITIES, behind))
    if erased := redo.get("erase"):
        works.append(erase_entries(db, t, erased))
    for cut in redo.get("cuts", ()):
        change = {"ranges": cut["ranges"], "extra": cut["extra"], "v": version}
        works.append(db.update(CUTS, {"_id": cut["_id"], **older}, {"$set": change}))
    if dropped := redo.get("drop_cuts"):
        works.append(db.delete(CUTS, {"t": t, "_id": {"$in": dropped}}))
    if works:
        await together(*works)
    await drop_pieces(db, t, stale)


async def _put_run(
    db: Driver, query: Document, run: Document, version: int, stale: list[str]
) -> None:
    change: Document = {"$set": {**run["set"], "v": version}}
    unset = dict.fromkeys(run["unset"], "")
    if "born" in run["set"] and "parent" not in run["set"]:
        unset["parent"] = ""  # the claim may have been renewed by another commit, for its run
    if unset:
        change["$unset"] = unset
    was = await db.change(RUNS, query, change, {"piece": 1, "draft_piece": 1}, after=False)
    if was is None:
        return
    stale += [
        was[name]
        for name in ("piece", "draft_piece")
        if name in was and (name in run["unset"] or run["set"].get(name, was[name]) != was[name])
    ]


async def _put_newer(db: Driver, name: str, documents: Sequence[Document], version: int) -> None:
    """Put each document where there is none, or an older one."""
    for at in range(0, len(documents), _AT_ONCE):
        pairs = [
            ({"_id": doc["_id"], "t": doc["t"], "v": {"$lt": version}}, {**doc, "v": version})
            for doc in documents[at : at + _AT_ONCE]
        ]
        if not await db.replace(name, pairs, upsert=True):
            # Newer ones stand there, or others put theirs in this very moment.
            await db.replace(name, pairs, upsert=False)


async def erase_entries(db: Driver, t: str, flat: Sequence[int]) -> None:
    """Delete messages by their numbers, given as flat ranges."""
    for first, last in from_flat(flat):
        await db.delete(ENTRIES, {"t": t, "n": {"$gte": first, "$lte": last}})


async def clear_redo(db: Driver, key: str, stamp: str, t: str, redo: Document) -> None:
    """Say in the head that its redo record is done.

    Nothing waits for this to be durable: a record that stays is done once more.
    """
    cleared = await db.update(
        THREADS, {"_id": key, "stamp": stamp}, {"$set": {"redo": None}}, durable=False
    )
    if cleared:
        if "piece" in redo:
            await drop_pieces(db, t, [redo["piece"]])
        return
    # Somebody was faster. If the thread is gone by now, what was just written must go too.
    found = await db.find(THREADS, {"_id": key}, {"t": 1, "gone": 1})
    if not found or found[0]["t"] != t or found[0].get("gone"):
        await delete_documents(db, t)


# --------------------------------------------------------------------------- finding it


async def complete(db: Driver, key: str) -> None:
    """Do what the commit or the deletion that is recorded in a head has left to do.

    The record is read with majority: one that a failover may still undo is not acted on.
    """
    fields = {"t": 1, "stamp": 1, "redo": 1, "gone": 1, "notes": 1, "thread_id": 1, "format": 1}
    found = await db.find(THREADS, {"_id": key}, fields, majority=True)
    if not found:
        return
    head = found[0]
    check_format(head, f"thread {head.get('thread_id')!r}")
    if head.get("gone"):
        await delete_rest(db, key, head["t"], head["notes"])
    elif head["redo"] is not None:
        redo = await _staged(db, head["t"], head["redo"])
        if redo is not None:
            await apply_redo(db, head["t"], redo)
            await clear_redo(db, key, head["stamp"], head["t"], head["redo"])


async def _staged(db: Driver, t: str, redo: Document) -> Document | None:
    """The whole record; None if its pieces are gone: then it was done meanwhile."""
    if "piece" not in redo:
        return redo
    found = await db.find(PIECES, {"t": t, "piece": redo["piece"]}, sort=[("i", 1)])
    if len(found) != redo["parts"]:
        return None
    data = b"".join(row["data"] for row in found)
    return cast("Document", cast("Any", bson).decode(data))


async def delete_rest(db: Driver, key: str, t: str, notes: Iterable[Sequence[str]]) -> None:
    """Delete everything of a thread whose head says that it is gone, the head last.

    Args:
        db: the database.
        key: of the head.
        t: the incarnation that is deleted.
        notes: key and revision of the metadata values that go with it; one that was written
            again since belongs to a new thread.
    """
    await delete_documents(db, t)
    await delete_values(db, notes)
    await db.delete(THREADS, {"_id": key, "t": t})


async def delete_documents(db: Driver, t: str) -> None:
    """Delete everything that hangs on an incarnation of a thread, but for its head."""
    await together(*(db.delete(name, {"t": t}) for name in OF_THREAD))


async def delete_values(db: Driver, notes: Iterable[Sequence[str]]) -> None:
    """Delete metadata values, given as key and revision."""
    for key, revision in notes:
        await delete_value(db, key, revision)


async def delete_value(db: Driver, key: str, revision: str) -> None:
    """Delete a metadata value and its pieces, unless it was written again."""
    if await db.delete(METADATA, {"_id": key, "revision": revision}):
        await db.delete(PIECES, {"t": f"value.{key}", "piece": revision})
