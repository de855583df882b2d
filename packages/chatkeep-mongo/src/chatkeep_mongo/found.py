"""Finding a thread: its head at rest, and runs from other places than their thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from chatkeep.records import RunRecord
from chatkeep_mongo.bodies import Patience, Torn, load_bodies, together
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.head import Head
from chatkeep_mongo.layout import PIECES, RUNS, THREADS, Document
from chatkeep_mongo.redo import back_off, complete
from chatkeep_mongo.rows import NO_DRAFT

__all__ = ["Found", "at_rest", "find_head", "find_runs", "has_body", "load_drafts", "owner_lives"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Found:
    """A head at rest, with what was asked for beside it, and the server's clock.

    ``head`` is None for a thread that was never written, or is deleted. ``run`` is the document
    of the run that was asked for, in whichever thread, if it is one. ``line`` is what the head
    remembers of the commit that was asked for. ``known`` is the run itself, where it was not read
    but remembered.
    """

    now: int
    head: Head | None = None
    run: Document | None = None
    line: Document | None = None
    known: RunRecord | None = None


async def find_head(
    db: Driver,
    key: str,
    thread_id: str,
    *,
    run_key: str | None = None,
    mark: str | None = None,
    to_write: bool = False,
) -> Found:
    """The head with this key, once no redo record is left in it.

    Args:
        db: the database.
        key: of the head.
        thread_id: for errors.
        run_key: a run to find with it.
        mark: a commit to look for among those that it remembers.
        to_write: a deletion that was begun is brought to its end first.
    """
    pipeline = _pipeline(key, run_key, mark)
    patience = Patience(f"a run of thread {thread_id!r}")
    for attempt in count():
        rows = await db.aggregate(THREADS, pipeline)
        if not rows:
            return await _without_head(db, run_key)
        row = rows[0]
        gone = bool(row.get("gone"))
        if gone and not to_write:
            return await _without_head(db, run_key)
        if not gone and row.get("redo") is None:
            lines: Any = row.get("commits")
            head = Head.from_document(row, thread_id)
            try:
                run = await _whole_run(db, row.get("run") or [])
            except Torn as error:
                patience.torn(error, head.stamp)
                continue
            return Found(
                now=row["now"],
                head=head if head.exists or to_write else None,
                run=run,
                line=lines[0] if lines else None,
            )
        # Who wrote it is most likely still at work.
        await back_off(attempt + 1)
        if attempt:
            await complete(db, key)
    raise AssertionError("unreachable")


async def at_rest(
    db: Driver,
    key: str,
    thread_id: str,
    work: Callable[[Found], Awaitable[_T]],
    *,
    run_key: str | None = None,
    to_write: bool = False,
) -> _T:
    """What ``work`` makes of a head; again from the start where it meets another writer (it raises
    :class:`Torn`).

    Raises:
        CorruptRecord: nobody is at work, but what the head names is not there.
    """
    patience = Patience(f"thread {thread_id!r}")
    for attempt in count():
        if attempt:
            await back_off(attempt)
        found = await find_head(db, key, thread_id, run_key=run_key, to_write=to_write)
        try:
            return await work(found)
        except Torn as error:
            patience.torn(error, "" if found.head is None else found.head.stamp)
    raise AssertionError("unreachable")


def _pipeline(key: str, run_key: str | None, mark: str | None) -> list[Document]:
    stages: list[Document] = [{"$match": {"_id": key}}]
    if run_key is not None:
        only = [{"$match": {"_id": run_key}}, {"$project": NO_DRAFT}]
        stages.append({"$lookup": {"from": RUNS, "pipeline": only, "as": "run"}})
    fields: Document = {"now": {"$toLong": "$$NOW"}}
    if mark is None:
        stages.append({"$project": {"commits": 0}})
    else:
        same = {"$eq": ["$$this.mark", mark]}
        fields["commits"] = {"$filter": {"input": "$commits", "cond": same}}
    return [*stages, {"$set": fields}]


async def _without_head(db: Driver, run_key: str | None) -> Found:
    if run_key is None:
        return Found(now=await db.clock())
    rows = await db.find(RUNS, {"_id": run_key}, NO_DRAFT)
    return Found(now=await db.clock(), run=await _whole_run(db, rows))


async def _whole_run(db: Driver, rows: Sequence[Document]) -> Document | None:
    """The run's document with its body; None for a mere claim on the id."""
    if not rows or not has_body(rows[0]):
        return None
    document = rows[0]
    await load_bodies(db, document["t"], [document])
    return document


def has_body(document: Document) -> bool:
    """Whether a run's document is a run, and not a claim on its id."""
    return "body" in document or "piece" in document


async def owner_lives(db: Driver, run: Document) -> bool:
    """Whether the thread that a run's document names is there, and is the one it was written in."""
    found = await db.find(THREADS, {"_id": run["thread"]}, {"t": 1, "gone": 1})
    return bool(found) and found[0]["t"] == run["t"] and not found[0].get("gone")


async def find_runs(
    db: Driver,
    query: Document,
    *,
    sort: Sequence[tuple[str, int]] = (),
    limit: int | None = None,
    drafts: bool = False,
) -> list[Document]:
    """Runs of any threads, with their bodies. What their threads' commits left undone is done
    first; runs of threads that are being deleted are left out."""
    pipeline: list[Document] = [{"$match": query}]
    if sort:
        pipeline.append({"$sort": dict(sort)})
    if limit is not None:
        pipeline.append({"$limit": min(limit, 2**31 - 1)})
    if not drafts:
        pipeline.append({"$project": NO_DRAFT})
    pipeline += [
        {
            "$lookup": {
                "from": THREADS,
                "localField": "thread",
                "foreignField": "_id",
                "pipeline": [{"$project": {"t": 1, "gone": 1, "undone": {"$gt": ["$redo", None]}}}],
                "as": "owner",
            }
        }
    ]
    patience = Patience("a list of runs")
    for attempt in count():
        rows = await db.aggregate(RUNS, pipeline)
        undone = {row["thread"] for row in rows for owner in row["owner"] if owner.get("undone")}
        if not undone:
            alive = [row for row in rows if has_body(row) and _alive(row)]
            try:
                await together(*(load_bodies(db, row["t"], [row]) for row in alive))
                await load_drafts(db, alive)
            except Torn as error:
                patience.torn(error)
                continue
            return alive
        await back_off(attempt + 1)
        if attempt:
            for key in sorted(undone):
                await complete(db, key)
    raise AssertionError("unreachable")


def _alive(row: Document) -> bool:
    return any(owner["t"] == row["t"] and not owner.get("gone") for owner in row["owner"])


async def load_drafts(db: Driver, runs: Sequence[Document]) -> None:
    """Fetch the drafts that stand in pieces, each as ``draft`` of its run's document.

    Raises:
        Torn: a draft was replaced meanwhile.
    """
    for run in runs:
        if "draft_piece" not in run:
            continue
        found = await db.find(PIECES, {"t": run["t"], "piece": run["draft_piece"]}, sort=[("i", 1)])
        if len(found) != run["draft_parts"]:
            raise Torn(f"the draft of run {run['run_id']!r}")
        run["draft"] = b"".join(row["data"] for row in found)
