"""A commit, from what is known of its thread to the transaction that applies it.

One ``TransactWriteItems`` with the head's version as its condition. A tail that does not fit
goes ahead of it, in three steps, each of which may be the last one of a process:

1. numbers are taken from the head, and a *leftover* row names them;
2. the rows are written under those numbers: nobody reads them, the head does not name them;
3. the transaction makes them live and removes the leftover row.

Whoever finds a leftover row whose time has come marks it as taken, which makes step 3 fail, and
removes what it names.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, replace

from chatkeep.errors import BackendUnavailable, ChatkeepError, CorruptRecord, RecordTooLarge
from chatkeep.stores import TurnReceipt
from chatkeep_dynamodb import leftovers
from chatkeep_dynamodb.client import Action
from chatkeep_dynamodb.decide import (
    Plan,
    Restage,
    Staged,
    decide,
    leftover_item,
    put_head,
)
from chatkeep_dynamodb.encoded import EncodedCommit
from chatkeep_dynamodb.errors import Cancelled, translate
from chatkeep_dynamodb.fetch import fetch
from chatkeep_dynamodb.head import Head
from chatkeep_dynamodb.items import (
    TRANSACTION_BYTES,
    TRANSACTION_ITEMS,
    Item,
    item_size,
    key_of,
    sizes,
)
from chatkeep_dynamodb.keys import RUN, row_sk, thread_pk
from chatkeep_dynamodb.known import Known, Moved, learn
from chatkeep_dynamodb.rows import StoredRun
from chatkeep_dynamodb.state import Place, State

__all__ = ["STAGED_MS", "apply"]

_log = logging.getLogger("chatkeep.dynamodb")

STAGED_MS = 3_600_000
"""How long rows that were written ahead wait for their commit before they are left over."""

ENTRY_BYTES = 2 * 1024 * 1024
"""Most bytes of new rows in one transaction; its limit counts what it removes too."""

_MISSING_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Rows written ahead, and the row that names them."""

    staged: Staged
    leftover: Item


async def apply(place: Place, encoded: EncodedCommit) -> TurnReceipt:
    """Apply a commit, or raise what refuses it and write nothing.

    Raises:
        RunConflict, InterruptConflict, ThreadConflict: in this order.
        RecordTooLarge: a record, or all of them together, above the service's limits.
        BackendUnavailable: the service cannot be reached, or throttles.
    """
    thread_id = encoded.commit.thread_id
    async with place.memory.turn(place.scope, thread_id):
        ahead: list[_Ahead] = []
        try:
            return await _commit(place, encoded, ahead)
        except BaseException as error:
            # Perhaps it was applied: what is remembered may be behind.
            place.memory.forget(place.scope, thread_id)
            if isinstance(error, ChatkeepError) and not isinstance(error, BackendUnavailable):
                for left in ahead:
                    await _discard(place, left.leftover)
            raise


async def _commit(place: Place, encoded: EncodedCommit, ahead: list[_Ahead]) -> TurnReceipt:
    state = place.memory.get(place.scope, encoded.commit.thread_id)
    refused = moved = 0
    while True:
        try:
            known = await learn(place, encoded, state)
        except Moved as error:
            moved += 1
            if state is None and moved >= _MISSING_TRIES:
                what = f"{error} of thread {encoded.commit.thread_id!r}"
                reason = "the thread names it, but it is missing"
                raise CorruptRecord(what, reason) from None
            state = None
            continue
        receipt = known.head.remembered(encoded.mark)
        if receipt is not None:
            return await _replayed(place, encoded, known.head, receipt)
        try:
            plan = decide(
                encoded,
                known,
                ahead[-1].staged if ahead else None,
                place.now(),
                place.moment(),
            )
        except Restage:
            await _discard(place, ahead.pop().leftover)
            continue
        except ChatkeepError:
            if known.fresh:
                raise
            state = None  # nothing is refused on the strength of a memory
            continue
        try:
            if not ahead and _too_much(plan):
                state = await _write_ahead(place, encoded, known, plan, ahead)
                continue
            await place.table.transact(_actions(plan, written_ahead=bool(ahead)))
        except Cancelled as error:
            state = _as_it_is(error, known)
            refused += 1
            if ahead and error.reasons[_marker_index(plan)].code is not None:
                # A sweep has begun to remove them; what was on its way then is removed here.
                await _discard(place, ahead.pop().leftover)
            if refused > 1:
                await asyncio.sleep(min(0.25, 0.004 * 2 ** min(refused, 6)) * random.random())
            continue
        ahead.clear()
        place.memory.put(plan.state)
        if plan.leftover is not None:
            await _discard(place, plan.leftover)
        return plan.receipt


def _as_it_is(error: Cancelled, known: Known) -> State | None:
    """The head that the condition met, as a state nothing else is known of; None: read."""
    item = error.reasons[0].item if error.reasons else None
    if item is None:
        return None
    head = Head.from_item(item)
    if head.version == known.head.version and head.incarnation == known.head.incarnation:
        return None  # the head is as it was: another row was not
    return State(head)


async def _replayed(
    place: Place, encoded: EncodedCommit, head: Head, receipt: TurnReceipt
) -> TurnReceipt:
    """The receipt, with the run as it is now."""
    if encoded.commit.run is None or encoded.run_id is None:
        return receipt
    key = (
        thread_pk(head.scope, head.thread_id),
        row_sk(RUN, head.incarnation, encoded.run_id),
    )
    rows = (await fetch(place.table, [key])).get(key)
    run = None if rows is None else StoredRun.from_item(rows[0], rows[1:]).record
    return replace(receipt, run=run)


# ---------------------------------------------------------------------------- what fits


def _too_much(plan: Plan) -> bool:
    """Whether the new rows have to go ahead of their commit."""
    return bool(plan.entries) and (
        len(plan.entries) + len(plan.actions) > TRANSACTION_ITEMS
        or sizes(plan.entries) > ENTRY_BYTES
        or _bytes(plan) > TRANSACTION_BYTES
    )


def _bytes(plan: Plan) -> int:
    return sum(action.size for action in plan.actions) + sizes(plan.entries)


def _actions(plan: Plan, *, written_ahead: bool) -> list[Action]:
    """The transaction.

    Raises:
        RecordTooLarge: it is none: too many records for one commit, or too long ones.
    """
    actions = list(plan.actions)
    if not written_ahead:
        actions += [Action("Put", item, "new row", None, item_size(item)) for item in plan.entries]
    if len(actions) > TRANSACTION_ITEMS:
        raise RecordTooLarge("a commit's list of records", len(actions), TRANSACTION_ITEMS)
    size = sum(action.size for action in actions)
    if size > TRANSACTION_BYTES:
        longest = max(actions, key=lambda action: action.size)
        raise RecordTooLarge(f"a commit (most of it {longest.name})", size, TRANSACTION_BYTES)
    return actions


def _marker_index(plan: Plan) -> int:
    return next(i for i, action in enumerate(plan.actions) if action.name == "rows written ahead")


# ------------------------------------------------------------------------ ahead of a commit


async def _write_ahead(
    place: Place, encoded: EncodedCommit, known: Known, plan: Plan, ahead: list[_Ahead]
) -> State:
    """Take numbers, name them as left over, and write the new rows under them.

    Raises:
        Cancelled: another commit was faster; nothing was written.
    """
    before = known.head
    count, rows = len(encoded.tail) + len(encoded.extra), len(encoded.rows)
    head = replace(
        before,
        version=before.version + 1,
        next_number=before.next_number + count,
        next_row=before.next_row + rows,
    )
    item = leftover_item(
        head,
        place.now() + STAGED_MS,
        messages=((before.next_number, before.next_number + count - 1),) if count else (),
        rows=((before.next_row, before.next_row + rows - 1),) if rows else (),
    )
    await place.table.transact(
        [put_head(before, head), Action.put(item, "rows to be written ahead")]
    )
    staged = Staged(head.incarnation, before.next_number, before.next_row, key_of(item))
    ahead.append(_Ahead(staged, item))
    await place.table.write_many(plan.entries)
    return State(head, known.state.runs, known.state.interrupts)


async def _discard(place: Place, leftover: Item) -> None:
    """Remove rows that nobody reads. Best effort: a sweep does what is not done here."""
    try:
        await leftovers.clear(place.table, leftover)
    except Exception as error:
        known = translate(error)
        if not isinstance(known, ChatkeepError):
            raise
        _log.warning("rows left over in thread %r wait for a sweep: %s", leftover["thread"], known)
