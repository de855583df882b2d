"""What a commit does to the transcript: ranges of the head, cuts, and messages to erase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from chatkeep.codec import FORMAT_VERSION
from chatkeep.rules import Entry, new_commit_id, new_revision, split_cut
from chatkeep_mongo.bodies import Torn, check_format
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.encoded import EncodedCommit
from chatkeep_mongo.head import Head
from chatkeep_mongo.layout import CUTS, ENTRIES, Document
from chatkeep_mongo.ranges import (
    Ranges,
    covers,
    flatten,
    from_flat,
    join,
    newest_of,
    numbers_of,
    of_numbers,
    size,
    spans,
    split_behind,
    without,
)

__all__ = ["Rewritten", "find_cuts", "in_numbers", "oldest_cut", "pieces_of", "rewrite"]

SPANS: Final = 8
"""Queries for one stretch of a transcript, at most: the closest ranges are read as one."""

_IDS_AT_ONCE: Final = 1000
"""Message ids that one query names, at most."""


@dataclass(slots=True)
class Rewritten:
    """The transcript after a commit.

    ``entries`` are the new messages with their numbers; ``cut`` is a cut's document to store
    before the commit; ``changed_cut`` one that the commit changes; ``oldest`` is when the oldest
    cut was made, where that changes (None: there is none left).
    """

    head: Head
    entries: list[tuple[int, Entry]] = field(default_factory=list[tuple[int, Entry]])
    numbers: list[int] = field(default_factory=list[int])
    cut: Document | None = None
    changed_cut: Document | None = None
    dropped_cuts: list[str] = field(default_factory=list[str])
    erased: Ranges = field(default_factory=Ranges)
    stale: list[str] = field(default_factory=list[str])
    oldest: int | None = None
    oldest_changed: bool = False

    @property
    def cut_id(self) -> str | None:
        """Id of the cut that the commit makes."""
        return None if self.cut is None else self.cut["_id"]


async def rewrite(db: Driver, encoded: EncodedCommit, head: Head, now: int) -> Rewritten:
    """Splice, restore and cut append.

    Raises:
        Torn: another writer was at work.
    """
    commit = encoded.commit
    done = Rewritten(head)
    if commit.splice is not None:
        archive = commit.splice.archive
        keep = commit.splice.keep_through
        await _cut_behind(db, done, encoded, keep, now, archive=archive)
        done.numbers = _append(done, encoded.tail)
        done.head = _with_live(done.head, join(done.head.live, of_numbers(done.numbers)))
    elif commit.restore is not None:
        (cut,) = await find_cuts(db, head, [commit.restore])
        await _cut_behind(db, done, encoded, cut["after"], now, archive=True)
        restored = from_flat(cut["ranges"])
        done.numbers = numbers_of(restored)
        done.dropped_cuts = [commit.restore]
        cuts = [cut_id for cut_id in done.head.cuts if cut_id != commit.restore]
        done.head = _with_live(replace(done.head, cuts=cuts), join(done.head.live, restored))
        made = [] if done.cut is None else [done.cut["cut_at"]]
        done.oldest = await oldest_cut(db, head, without_ids=[commit.restore], made=made)
        done.oldest_changed = True
    if (done.head.newest, done.head.count) != (head.newest, head.count):
        done.head = replace(done.head, revision=new_revision(head.version + 1))
    if commit.cut_append is not None:
        (cut,) = await find_cuts(db, head, [commit.cut_append.cut_id])
        added = of_numbers(_append(done, encoded.extra))
        done.changed_cut = {
            "_id": cut["_id"],
            "ranges": flatten(join(from_flat(cut["ranges"]), added)),
            "extra": cut["extra"] + len(encoded.extra),
        }
    return done


def _with_live(head: Head, live: Ranges) -> Head:
    return replace(head, live=live, newest=newest_of(live), count=size(live))


def _append(done: Rewritten, entries: Sequence[Entry]) -> list[int]:
    first = done.head.next
    numbers = list(range(first, first + len(entries)))
    done.entries += zip(numbers, entries, strict=True)
    done.head = replace(done.head, next=first + len(entries))
    return numbers


async def _cut_behind(
    db: Driver,
    done: Rewritten,
    encoded: EncodedCommit,
    keep: int,
    now: int,
    *,
    archive: bool,
) -> None:
    """Take off what is live above ``keep``."""
    head = done.head
    kept, cut = split_behind(head.live, keep)
    if not cut:
        return
    gone = await _gone(db, head, cut, encoded.tail, archive=archive)
    archived = without(cut, gone) if archive else []
    done.head = _with_live(head, kept)
    if gone:
        done.erased = of_numbers(gone)
        done.stale += await pieces_of(db, head, done.erased)
    if archived:
        done.cut = {
            "_id": new_commit_id(),
            "t": head.t,
            "v": 0,
            "after": newest_of(kept),
            "cut_at": now,
            "run_id": encoded.commit.run_id,
            "ranges": flatten(archived),
            "extra": 0,
            "format": FORMAT_VERSION,
        }
        done.head = replace(done.head, cuts=[*head.cuts, done.cut["_id"]])
        if not head.cuts:
            done.oldest, done.oldest_changed = now, True


async def _gone(
    db: Driver, head: Head, cut: Ranges, tail: Sequence[Entry], *, archive: bool
) -> list[int]:
    """Of the cut numbers those to erase. Only what may return in the tail is looked up."""
    if not archive:
        return numbers_of(cut)
    ids = sorted({entry.message_id for entry in tail if entry.message_id is not None})
    if not ids:
        return []
    query: Document = {} if len(ids) > _IDS_AT_ONCE else {"id": {"$in": ids}}
    rows = await in_numbers(db, head, cut, {"n": 1, "id": 1}, query)
    _, gone = split_cut(((row["n"], row["id"]) for row in rows), tail, archive=True)
    return gone


# ---------------------------------------------------------------------------- documents


async def in_numbers(
    db: Driver,
    head: Head,
    ranges: Ranges,
    fields: dict[str, int] | None = None,
    query: Document | None = None,
) -> list[Document]:
    """Messages by their numbers, ascending, and of those what ``query`` says."""
    found: list[Document] = []
    for first, last in spans(ranges, SPANS):
        where = {"t": head.t, "n": {"$gte": first, "$lte": last}, **(query or {})}
        found += await db.find(ENTRIES, where, fields, sort=[("n", 1)])
    if len(ranges) == 1:
        return found
    return [row for row in found if covers(ranges, row["n"])]


async def pieces_of(db: Driver, head: Head, ranges: Ranges) -> list[str]:
    """Names of the pieces that messages own."""
    if not head.big:
        return []
    rows = await in_numbers(db, head, ranges, {"n": 1, "piece": 1}, {"piece": {"$exists": True}})
    return [row["piece"] for row in rows]


async def find_cuts(db: Driver, head: Head, cut_ids: Sequence[str]) -> list[Document]:
    """The documents of cuts that the head names, in this order.

    Raises:
        Torn: another writer was at work.
    """
    found = await db.find(CUTS, {"t": head.t, "_id": {"$in": list(cut_ids)}})
    by_id = {document["_id"]: document for document in found}
    for cut_id in cut_ids:
        if cut_id not in by_id or by_id[cut_id]["v"] > head.version:
            raise Torn(f"cut {cut_id!r}")
        check_format(by_id[cut_id], f"cut {cut_id!r}")
    return [by_id[cut_id] for cut_id in cut_ids]


async def oldest_cut(
    db: Driver, head: Head, *, without_ids: Sequence[str], made: Sequence[int] = ()
) -> int | None:
    """When the oldest cut was made, of those of ``head`` that stay and of new ones."""
    staying = [cut_id for cut_id in head.cuts if cut_id not in without_ids]
    times = [cut["cut_at"] for cut in await find_cuts(db, head, staying)] if staying else []
    return min([*times, *made], default=None)
