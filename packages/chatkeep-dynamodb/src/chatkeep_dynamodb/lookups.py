"""Drafts, leases, and finding runs from other places than their thread."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence

from botocore.exceptions import ClientError

from chatkeep.codec import encode
from chatkeep.errors import RecordTooLarge
from chatkeep.records import ModelMessage, RunRecord
from chatkeep.rules import check_writer, encode_messages, renewed_run
from chatkeep.stores import LostRun
from chatkeep_dynamodb import leftovers
from chatkeep_dynamodb.client import Action, Condition, gather
from chatkeep_dynamodb.errors import Cancelled, error_code
from chatkeep_dynamodb.fetch import fetch, read_head
from chatkeep_dynamodb.head import Head
from chatkeep_dynamodb.items import TRANSACTION_BYTES, TRANSACTION_ITEMS, Item, Key, key_of, sizes
from chatkeep_dynamodb.keys import (
    CHILD,
    DRAFT,
    HEAD,
    LOOKUP,
    RUN,
    SHARDS,
    behind,
    list_partition,
    row_sk,
    run_pk,
    sortable,
    thread_pk,
)
from chatkeep_dynamodb.rows import StoredRun, draft_from_item, draft_items, scope_of
from chatkeep_dynamodb.state import Place, Rows
from chatkeep_dynamodb.table import BY_DUE, BY_SCOPE

__all__ = [
    "find_run",
    "list_child_runs",
    "list_lost",
    "list_reclaimable",
    "renew_lease",
    "save_draft",
]

_DRAFT_DAYS = 30
"""How long a chunk of a draft that was replaced may stay."""


async def _run_of(
    place: Place, thread_id: str, run_id: str, *, remembered: bool
) -> tuple[Head | None, StoredRun | None, Rows]:
    """The thread's head, and the run with its rows; ``remembered``: without a request, if it can
    be."""
    state = place.memory.get(place.scope, thread_id) if remembered else None
    if state is not None and (run := state.run(run_id)) is not None:
        return state.head, run, state.runs[run_id]
    head = state.head if state is not None else await read_head(place, thread_id)
    if head is None:
        return None, None, ()
    key = (thread_pk(place.scope, thread_id), row_sk(RUN, head.incarnation, run_id))
    rows = (await fetch(place.table, [key])).get(key)
    if rows is None:
        return head, None, ()
    return head, StoredRun.from_item(rows[0], rows[1:]), rows


async def save_draft(
    place: Place,
    thread_id: str,
    run_id: str,
    messages: Sequence[ModelMessage],
    lease_token: str | None,
) -> None:
    """Put the draft into the run's slot, if the run is open and the lease held: one transaction,
    which leaves the head alone."""
    encode_messages(messages)
    body = encode(list(messages), "messages")
    state = place.memory.get(place.scope, thread_id)
    head = None if state is None else state.head
    while True:
        if head is None:
            head, run, _ = await _run_of(place, thread_id, run_id, remembered=False)
            record = None if run is None else run.record
            check_writer(record, run_id, thread_id, lease_token)
            if head is None:
                raise AssertionError("check_writer refuses an unknown run")
        now = place.now()
        rows = draft_items(
            head,
            run_id,
            body,
            now,
            secrets.token_hex(6),
            now // 1000 + _DRAFT_DAYS * 86_400,
        )
        name = f"draft of run {run_id!r}"
        size = sizes(rows)
        if size > TRANSACTION_BYTES - 1024 or len(rows) >= TRANSACTION_ITEMS:
            raise RecordTooLarge(name, size, TRANSACTION_BYTES)
        run_key = (thread_pk(head.scope, thread_id), row_sk(RUN, head.incarnation, run_id))
        actions = [Action.check(run_key, f"run {run_id!r}", _open_and_held(lease_token))]
        try:
            await place.table.transact([*actions, *(Action.put(row, name) for row in rows)])
        except Cancelled:
            head = None  # read why
        else:
            return


def _open_and_held(token: str | None) -> Condition:
    expression = "#status IN (:running, :interrupted)"
    names = {"#status": "status"}
    values = {":running": "running", ":interrupted": "interrupted"}
    if token is None:
        return Condition(expression, names, values)
    return Condition(
        f"{expression} AND #token = :token",
        {**names, "#token": "lease_token"},
        {**values, ":token": token},
    )


async def renew_lease(
    place: Place, thread_id: str, run_id: str, lease_token: str, lease_ms: int
) -> RunRecord:
    """Extend the lease from this machine's clock: one update of the run's row."""
    remembered = True
    while True:
        head, run, rows = await _run_of(place, thread_id, run_id, remembered=remembered)
        record = None if run is None else run.record
        if remembered and (
            record is None or record.lease is None or record.lease.token != lease_token
        ):
            remembered = False  # nothing is refused on the strength of a memory
            continue
        renewed = renewed_run(record, run_id, thread_id, lease_token, lease_ms, place.now())
        if run is None or head is None or renewed.lease is None:
            raise AssertionError("renewed_run refuses an unknown run and gives a lease")
        until = renewed.lease.until
        first = run.renewed(until).to_items(head)[0]
        changes: Item = {"lease_until": until}
        if "due_at" in first:
            changes["due_at"] = first["due_at"]
        try:
            item = await place.table.update(
                (first["pk"], first["sk"]),
                changes,
                Condition.equal(lease_token=lease_token, version=run.version),
            )
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            remembered = False
            continue
        rows = [item, *rows[1:]]
        place.memory.renewed(place.scope, thread_id, run_id, rows)
        return StoredRun.from_item(item, rows[1:]).record


# ------------------------------------------------------------------------------ look-ups


async def find_run(place: Place, run_id: str) -> RunRecord | None:
    """The run, in whichever thread of the scope. A look-up whose run is gone finds nothing."""
    lookup = await place.table.get((run_pk(place.scope, run_id), LOOKUP))
    if lookup is None:
        return None
    found = await _living(place, [_run_key(place, lookup)])
    return found[0][1].record if found else None


async def _living(place: Place, keys: Sequence[Key]) -> list[tuple[Item, StoredRun]]:
    """Runs by their keys, each with its row, but for those of threads that were deleted."""
    heads = [(pk, HEAD) for pk, _ in keys]
    rows = await fetch(place.table, [*keys, *heads])
    incarnations = {pk: found[0]["incarnation"] for (pk, sk), found in rows.items() if sk == HEAD}
    return [
        (found[0], StoredRun.from_item(found[0], found[1:]))
        for pk, sk in keys
        if (found := rows.get((pk, sk))) is not None and sk.split("/")[1] == incarnations.get(pk)
    ]


def _run_key(place: Place, lookup: Item) -> Key:
    return (
        thread_pk(place.scope, lookup["thread"]),
        row_sk(RUN, lookup["incarnation"], lookup["run_id"]),
    )


async def list_child_runs(place: Place, parents: Sequence[str]) -> dict[str, list[RunRecord]]:
    """Children by parent id, each ascending by start; equal starts by the clock at creation."""
    asked = list(dict.fromkeys(parents))
    children: list[list[Item]] = await gather(
        [
            functools.partial(
                place.table.query, run_pk(place.scope, parent), f"{CHILD}/", behind(CHILD)
            )
            for parent in asked
        ]
    )
    keys = [_run_key(place, child) for own in children for child in own]
    runs = [run for _, run in await _living(place, keys)] if keys else []
    runs.sort(key=lambda run: (run.record.started_at, run.created))
    found: dict[str, list[RunRecord]] = {parent: [] for parent in asked}
    for run in runs:
        found[run.record.parent_run_id or ""].append(run.record)
    return found


# ------------------------------------------------------------------- runs that need a look


async def list_lost(place: Place, limit: int) -> list[LostRun]:
    """Running runs of every scope whose lease has run out, the longest first. When they are found,
    what writers that died have left over is removed."""
    now = place.now()

    def lost(run: StoredRun) -> int | None:
        return run.lease_until if run.lease_until is not None and run.lease_until <= now else None

    found = await _due_runs(place, now, lost, limit)
    await leftovers.sweep(place, limit)
    return found


async def list_reclaimable(
    place: Place, detached_before: int, limit: int, every_scope: bool
) -> list[LostRun]:
    """Running runs that were left at or before ``detached_before``, the longest ago first."""

    def left(run: StoredRun) -> int | None:
        since = run.record.detached_since
        return since if since is not None and since <= detached_before else None

    if every_scope:
        return await _due_runs(place, detached_before, left, limit)
    items = await place.table.query_index(
        BY_SCOPE,
        list_partition(place.scope, "left"),
        below=sortable(detached_before) + "0",  # behind the slash that follows
        limit=limit,
    )
    return await _chosen(place, items, left, limit)


async def _due_runs(
    place: Place, moment: int, when: Callable[[StoredRun], int | None], limit: int
) -> list[LostRun]:
    """Runs of every scope that fall due up to ``moment``."""
    found: list[list[Item]] = await gather(
        [
            functools.partial(
                place.table.query_index,
                BY_DUE,
                f"sweep/{shard}",
                below=moment,
                inclusive=True,
                keep=lambda item: item["sk"].startswith(f"{RUN}/"),
            )
            for shard in range(SHARDS)
        ]
    )
    return await _chosen(place, [item for items in found for item in items], when, limit)


async def _chosen(
    place: Place, items: Sequence[Item], when: Callable[[StoredRun], int | None], limit: int
) -> list[LostRun]:
    """Of runs that an index has named those that are due by their own rows, the oldest first,
    with their drafts."""
    if not items:
        return []
    due: list[tuple[int, int, StoredRun, Item]] = []
    for row, run in await _living(place, [key_of(item) for item in items]):
        moment = when(run) if run.record.status == "running" else None
        if moment is not None:
            due.append((moment, run.created, run, row))
    due.sort(key=lambda row: row[:2])
    chosen = due[:limit]
    if not chosen:
        return []
    drafts = await fetch(place.table, [_draft_key(item) for *_, item in chosen])
    return [
        LostRun(
            scope=scope_of(item),
            run=run.record,
            draft=None
            if (draft := drafts.get(_draft_key(item))) is None
            else draft_from_item(draft[0], draft[1:], item["thread"]),
        )
        for _, _, run, item in chosen
    ]


def _draft_key(item: Item) -> Key:
    return (item["pk"], DRAFT + item["sk"].removeprefix(RUN))
