"""Rows that nobody reads any more, or never did: named by a *leftover* row, and removed.

Written by a commit that erases more than it removes itself, by one whose tail went ahead of it,
and by the deletion of a thread. Removing is idempotent; the leftover row goes last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from botocore.exceptions import ClientError

from chatkeep.errors import CorruptRecord
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.client import Action, Condition, Table
from chatkeep_dynamodb.errors import Cancelled, error_code
from chatkeep_dynamodb.items import TRANSACTION_ITEMS, Item, Key, key_of
from chatkeep_dynamodb.keys import (
    ACTIVITY,
    CUT,
    DRAFT,
    HEAD,
    INTERRUPT,
    LEFTOVER,
    LOOKUP,
    MESSAGE,
    RUN,
    SHARDS,
    behind,
    child_sk,
    number_sk,
    run_pk,
)
from chatkeep_dynamodb.rows import scope_of
from chatkeep_dynamodb.state import Place

__all__ = ["clear", "sweep"]

_log = logging.getLogger("chatkeep.dynamodb")

_NAMES = ("pk", "sk", "kind", "run_id", "parent_run_id")

_ROWS_AT_ONCE = 200
"""Rows that are looked up before they are removed. The service reads them whole: up to 80 MB."""


async def sweep(place: Place, limit: int) -> int:
    """Remove what is left over in every scope and due; how many leftover rows were found.

    One that cannot be read is logged and stays: it must not keep the others from being removed,
    nor the caller from its own work.
    """
    found = [
        item
        for shard in range(SHARDS)
        for item in await place.table.query_index(
            "by_due",
            f"sweep/{shard}",
            below=place.now(),
            inclusive=True,
            limit=limit,
            keep=lambda item: item["sk"].startswith(f"{LEFTOVER}/"),
        )
    ]
    rows = await place.table.get_many(map(key_of, found)) if found else {}
    for item in rows.values():
        try:
            await take(place.table, item)
        except CorruptRecord:
            _log.exception("rows left over in thread %r cannot be removed", item["thread"])
    return len(rows)


async def take(table: Table, item: Item) -> None:
    """Remove what is left over, unless its commit comes first."""
    try:
        taken = await table.update(
            key_of(item), {"taken": True}, Condition.equal(incarnation=item["incarnation"])
        )
    except ClientError as error:
        if error_code(error) != "ConditionalCheckFailedException":
            raise
        return  # its commit came first, or another sweep
    await clear(table, taken)


async def clear(table: Table, item: Item) -> None:
    """Remove the rows that ``item`` names, and ``item``."""
    pk, incarnation = item["pk"], item["incarnation"]
    if item.get("whole"):
        await _clear_thread(table, item)
    else:
        for letter, named in ((MESSAGE, "messages"), (ACTIVITY, "activities")):
            for first, last in rg.read_ranges(item[named], f"leftover {item['sk']!r}"):
                low = number_sk(letter, incarnation, first)
                high = behind(number_sk(letter, incarnation, last))
                await _clear_between(table, pk, low, high, item)
    await table.write_many(deletes=[key_of(item)])
    # A thread that was never more than numbers taken for it is nobody's.
    if item.get("taken"):
        await table.delete_if(
            (pk, HEAD),
            Condition.equal(unborn=True, incarnation=incarnation, version=item["version"]),
        )


async def _clear_thread(table: Table, item: Item) -> None:
    """Everything that had this incarnation; first what finds its runs from elsewhere."""
    pk, incarnation, scope = item["pk"], item["incarnation"], scope_of(item)
    runs = await table.query(
        pk, f"{RUN}/{incarnation}/", behind(f"{RUN}/{incarnation}"), names=_NAMES
    )
    lookups: list[Key] = []
    for run in runs:
        if run["kind"] != "run":
            continue
        lookups.append((run_pk(scope, run["run_id"]), LOOKUP))
        if "parent_run_id" in run:
            lookups.append((run_pk(scope, run["parent_run_id"]), child_sk(run["run_id"])))
    own = Condition.equal(incarnation=incarnation)
    await _delete_all_if(table, lookups, own)
    for letter in (ACTIVITY, DRAFT, MESSAGE, INTERRUPT, RUN, CUT, LEFTOVER):
        prefix = f"{letter}/{incarnation}"
        await _clear_between(table, pk, prefix + "/", behind(prefix), item)


async def _clear_between(table: Table, pk: str, low: str, high: str, item: Item) -> None:
    """Remove the rows of a stretch, but for ``item``. Some at a time: when the call's time is up,
    those are gone, and the next sweep goes on behind them."""
    while True:
        rows = await table.query(pk, low, high, names=("pk", "sk"), limit=_ROWS_AT_ONCE)
        await table.write_many(deletes=[key for key in map(key_of, rows) if key != key_of(item)])
        if len(rows) < _ROWS_AT_ONCE:
            return
        low = rows[-1]["sk"]


async def _delete_all_if(table: Table, keys: Iterable[Key], condition: Condition) -> None:
    """Remove the rows that meet the condition: all at once where all do."""
    rest = list(keys)
    for i in range(0, len(rest), TRANSACTION_ITEMS):
        part = rest[i : i + TRANSACTION_ITEMS]
        try:
            await table.transact([Action.delete(key, "look-up", condition) for key in part])
        except Cancelled:
            for key in part:
                await table.delete_if(key, condition)
