"""A commit: documents that nobody sees yet, then one update of the head, then the redo record.

1. The head is read, at rest (or known from a moment ago), and everything is judged.
2. What the commit adds is stored: messages at the head's next numbers, a cut's record, the claim on
   a new run's id, bodies in pieces. Nobody reads any of it.
3. The head is updated, if its stamp is still the one that was read: **that is the commit**. With
   it goes the redo record: the run, interrupts and UI rows as they are afterwards.
4. The redo record is done and cleared. A crash before that leaves it to whoever comes next.

If step 3 finds another stamp, another writer was faster: all is judged again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import count

from bson.datetime_ms import DatetimeMS

from chatkeep.errors import ChatkeepError
from chatkeep.stores import TurnReceipt
from chatkeep_mongo.bodies import Patience, Torn, together
from chatkeep_mongo.claims import claim_run
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.encoded import EncodedCommit
from chatkeep_mongo.found import find_head
from chatkeep_mongo.head import (
    REMEMBERED,
    Head,
    commit_line,
    new_head,
    new_head_document,
    new_stamp,
    receipt_of,
)
from chatkeep_mongo.hints import Hints
from chatkeep_mongo.layout import CUTS, ENTRIES, PIECES, THREADS, Document
from chatkeep_mongo.plan import Plan, make_plan
from chatkeep_mongo.redo import (
    apply_redo,
    back_off,
    clear_redo,
    delete_documents,
    stage_redo,
)
from chatkeep_mongo.rows import run_of

__all__ = ["commit_turn", "write_and_do"]


async def commit_turn(db: Driver, encoded: EncodedCommit, hints: Hints) -> TurnReceipt:
    """Apply a commit, or raise what refuses it and change nothing that anybody sees.

    Raises:
        RunConflict, InterruptConflict, ThreadConflict: in this order.
    """
    fresh = new_head(encoded.scope, encoded.commit.thread_id)
    places: set[str] = set()
    patience = Patience(f"thread {encoded.commit.thread_id!r}")
    for attempt in count():
        if attempt:
            await back_off(attempt)
        try:
            receipt = await _attempt(db, encoded, hints, fresh, places, patience, attempt)
        except ChatkeepError:
            await _tidy(db, encoded.thread_key, places)
            raise
        if receipt is not None:
            if len(places) > 1:
                await _tidy(db, encoded.thread_key, places)
            return receipt
    raise AssertionError("unreachable")


async def _tidy(db: Driver, key: str, places: set[str]) -> None:
    """Delete what this commit stored in incarnations of the thread other than the living one:
    none of them can come to life any more."""
    if places:
        found = await db.find(THREADS, {"_id": key}, {"t": 1})
        for t in places - {row["t"] for row in found}:
            await delete_documents(db, t)


async def _attempt(
    db: Driver,
    encoded: EncodedCommit,
    hints: Hints,
    fresh: Head,
    places: set[str],
    patience: Patience,
    attempt: int,
) -> TurnReceipt | None:
    """The receipt; None if another writer was faster.

    Args:
        db: the database.
        encoded: the commit.
        hints: what is known of heads; taken up once.
        fresh: the head to write if there is none.
        places: incarnations in which something was stored; added to.
        patience: with documents that are out of step.
        attempt: how often this was in vain.
    """
    commit = encoded.commit
    hinted = hints.found_for(encoded)
    hints.forget(encoded.thread_key)
    found = hinted or await find_head(
        db,
        encoded.thread_key,
        commit.thread_id,
        run_key=encoded.run_key,
        mark=encoded.mark,
        to_write=True,
    )
    head = found.head or fresh
    if found.line is not None:
        if not await _confirmed(db, encoded):
            return None
        known = receipt_of(found.line, commit.thread_id)
        run = run_of(found.run) if found.run is not None and commit.run is not None else None
        return replace(known, run=run)
    try:
        plan = await make_plan(db, encoded, head, found)
    except Torn as error:
        patience.torn(error, head.stamp)
        return None
    except ChatkeepError:
        if hinted is None:
            raise
        return None  # a hint refuses nobody
    if plan.entries or plan.pieces or plan.rewritten.cut is not None or plan.receipt.created_run:
        places.add(head.t)
    if not await _store_unseen(db, encoded, plan, attempt):
        return None
    line = commit_line(encoded.mark, plan.receipt)
    change: Document = {}
    if not head.exists:
        change |= new_head_document(head, encoded.scope, commit.thread_id, plan.now)
    if plan.rewritten.oldest_changed:
        change["oldest_cut"] = plan.rewritten.oldest
    if not await write_and_do(db, head, plan.after, plan.redo, change, line):
        return None
    hints.saw(plan.after, plan.now, encoded.run_key, plan.receipt.run)
    return plan.receipt


async def _confirmed(db: Driver, encoded: EncodedCommit) -> bool:
    """Whether a commit that the head remembers is there for good: its first attempt may have ended
    before a majority, or the journal, had it. A write that changes nothing waits for both."""
    same = {"_id": encoded.thread_key, "commits.mark": encoded.mark}
    return await db.update(THREADS, same, {"$max": {"version": 0}})


async def write_and_do(
    db: Driver,
    before: Head,
    after: Head,
    redo: Document,
    change: Document,
    line: Document | None = None,
) -> bool:
    """Put ``after`` in the place of ``before``, do ``redo`` and clear it; False as
    :func:`write_head`. A redo record that says no more than its version is none."""
    work = len(redo) > 1
    stored, staged = stage_redo(redo, t=before.t, name=f"redo.{after.stamp}")
    if staged:
        await db.insert_missing(PIECES, staged)
    if not await write_head(db, before, after, stored if work else None, change, line):
        return False
    if work:
        await apply_redo(db, before.t, redo)
        await clear_redo(db, before.key, after.stamp, before.t, stored)
    return True


async def write_head(
    db: Driver,
    before: Head,
    after: Head,
    redo: Document | None,
    change: Document,
    line: Document | None = None,
) -> bool:
    """Put ``after`` in the place of ``before``; False if that is no longer what is stored.

    Args:
        db: the database.
        before: the head as read.
        after: the head to write, with a new stamp.
        redo: what is left to be done.
        change: more fields to set; ``oldest_cut`` None removes it.
        line: the commit to remember; it makes the thread the one written last.
    """
    fields: Document = {**change, "redo": redo}
    removed = [name for name in ("oldest_cut",) if name in fields and fields[name] is None]
    for name in removed:
        del fields[name]
    if not before.stamp:
        document = {
            **after.changes(),
            **fields,
            "commits": [] if line is None else [line],
            "updated_at": DatetimeMS(fields["created_at"]),
        }
        return await db.insert(THREADS, [document])
    was = before.changes()
    fields |= {name: value for name, value in after.changes().items() if value != was[name]}
    fields.pop("_id", None)
    update: Document = {"$set": fields}
    same: Document = {"_id": before.key, "stamp": before.stamp}
    if line is not None:
        # The same commit may have been sent before: known by its mark, under the same guard.
        same["commits.mark"] = {"$ne": line["mark"]}
        update["$currentDate"] = {"updated_at": True}
        update["$push"] = {"commits": {"$each": [line], "$position": 0, "$slice": REMEMBERED}}
    if removed:
        update["$unset"] = dict.fromkeys(removed, "")
    return await db.update(THREADS, same, update)


# ------------------------------------------------------------------------- before the head


async def _store_unseen(db: Driver, encoded: EncodedCommit, plan: Plan, attempt: int) -> bool:
    """Store what the commit adds; False if that met something, and all must be judged again."""
    works: list[Awaitable[bool]] = []
    if plan.pieces:
        works.append(_insert_pieces(db, plan.pieces))
    if plan.rewritten.cut is not None:
        works.append(db.insert(CUTS, [plan.rewritten.cut]))
    if plan.entries:
        works.append(_insert_entries(db, plan, attempt))
    if plan.receipt.created_run and plan.receipt.run is not None:
        works.append(claim_run(db, encoded.scope, plan.before, plan.receipt.run))
    return not works or all(await together(*works))


async def _insert_pieces(db: Driver, pieces: Sequence[Document]) -> bool:
    await db.insert_missing(PIECES, pieces)
    return True


async def _insert_entries(db: Driver, plan: Plan, attempt: int) -> bool:
    """Insert the messages at the next numbers.

    Messages that stand there already are this commit's own, from an earlier attempt; or another
    writer's, who is about to commit; or they were left behind by one that crashed.
    """
    if await db.insert(ENTRIES, plan.entries):
        return True
    head, entries = plan.before, plan.entries
    first = entries[0]["n"]
    fields = {"n": 1, "mark": 1, "digest": 1}
    stored = await db.find(ENTRIES, {"t": head.t, "n": {"$gte": first}}, fields)
    wanted = {entry["n"]: (entry["mark"], entry["digest"]) for entry in entries}
    there = {row["n"]: (row["mark"], row["digest"]) for row in stored if row["n"] in wanted}
    if all(wanted[number] == there[number] for number in there):
        missing = [entry for entry in entries if entry["n"] not in there]
        return not missing or await db.insert(ENTRIES, missing)
    if attempt and head.stamp:
        # It has not moved for a while: leave these numbers to whoever took them.
        behind = replace(head, stamp=new_stamp(), next=max(row["n"] for row in stored) + 1)
        await write_head(db, head, behind, None, {})
    return False
