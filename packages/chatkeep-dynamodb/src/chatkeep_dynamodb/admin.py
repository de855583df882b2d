"""Cuts, and whole threads: list, erase, delete."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatkeep.codec import decode, encode
from chatkeep.records import CutRecord, ModelMessage, ThreadInfo
from chatkeep.rules import decode_cursor, encode_cursor
from chatkeep.scope import Scope
from chatkeep.stores import ThreadList
from chatkeep_dynamodb import leftovers
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.client import Action, Condition, gather
from chatkeep_dynamodb.decide import leftover_item, put_head
from chatkeep_dynamodb.errors import Cancelled
from chatkeep_dynamodb.fetch import grouped, numbers_behind, prefixed, read_head
from chatkeep_dynamodb.head import Head, parse_cut_id
from chatkeep_dynamodb.items import Item, body_of, check_format, key_of
from chatkeep_dynamodb.keys import (
    CUT,
    DRAFT,
    HEAD,
    MESSAGE,
    SHARDS,
    behind,
    list_partition,
    number_sk,
    thread_pk,
)
from chatkeep_dynamodb.known import missing
from chatkeep_dynamodb.rows import Cut, draft_expired, draft_items, message_from_item, scope_of
from chatkeep_dynamodb.state import Place
from chatkeep_dynamodb.table import BY_SCOPE
from chatkeep_dynamodb.values import delete_values_of

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

_CUTS_AT_ONCE = 50
"""Cut rows that one transaction changes."""


async def _cuts(place: Place, head: Head) -> dict[int, Cut]:
    """Cuts by version, the oldest first."""
    cuts = [Cut.from_item(rows[0]) for rows in (await prefixed(place, head, CUT)).values()]
    return {cut.version: cut for cut in cuts}


# --------------------------------------------------------------------------------- cuts


async def list_cuts(place: Place, thread_id: str) -> list[CutRecord]:
    """Cuts of the thread, oldest first."""
    head = await read_head(place, thread_id)
    if head is None:
        return []
    cuts = await _cuts(place, head)
    numbers = [bound for cut in cuts.values() for stretch in cut.numbers for bound in stretch]
    if not numbers:
        return []
    ids = await numbers_behind(place, head, min(numbers) - 1, max(numbers))
    names = {number: message_id for number, (message_id, _) in ids.items()}
    return [cut.to_record(head, names) for cut in cuts.values()]


async def load_cut(place: Place, thread_id: str, cut_id: str) -> list[ModelMessage]:
    """The messages of a cut, in order."""
    head = await read_head(place, thread_id)
    version = None if head is None else parse_cut_id(cut_id, head.incarnation)
    if head is None or version is None:
        return []
    pk = thread_pk(place.scope, thread_id)
    item = await place.table.get((pk, number_sk(CUT, head.incarnation, version)))
    if item is None:
        return []
    messages: list[ModelMessage] = []
    for first, last in Cut.from_item(item).numbers:
        low = number_sk(MESSAGE, head.incarnation, first)
        high = behind(number_sk(MESSAGE, head.incarnation, last))
        rows = grouped(await place.table.query(pk, low, high))
        for number in range(first, last + 1):
            found = rows.get(number_sk(MESSAGE, head.incarnation, number))
            if found is None:
                raise missing(head, number)
            messages.append(message_from_item(found[0], found[1:], number, thread_id))
    return messages


async def purge_cuts(place: Place, thread_id: str, before: int) -> int:
    """Erase the cuts made before ``before``; how many."""
    async with place.memory.turn(place.scope, thread_id):
        purged = 0
        while True:
            head = await read_head(place, thread_id)
            if head is None:
                return purged
            old = [cut for cut in (await _cuts(place, head)).values() if cut.cut_at < before]
            if not old:
                return purged
            part = old[:_CUTS_AT_ONCE]
            numbers = sorted(n for cut in part for n in rg.expand(cut.numbers))
            if await _rewrite(place, head, head, dict.fromkeys(part), numbers):
                purged += len(part)


async def _rewrite(
    place: Place,
    before: Head,
    after: Head,
    cuts: Mapping[Cut, Cut | None],
    gone: Sequence[int],
) -> bool:
    """Change the head and cuts (None: it goes), and erase messages; False: another writer was
    faster, and nothing was written."""
    after = replace(after, version=before.version + 1)
    leftover = leftover_item(after, place.now(), messages=rg.from_numbers(gone))
    actions = [put_head(before, after)]
    for cut, changed in cuts.items():
        name = f"cut {cut.version}"
        if changed is None:
            actions.append(Action.delete(key_of(cut.to_item(after)), name))
        else:
            actions.append(Action.put(changed.to_item(after), name))
    if gone:
        actions.append(Action.put(leftover, "rows left over"))
    place.memory.forget(place.scope, before.thread_id)
    try:
        await place.table.transact(actions)
    except Cancelled:
        return False
    if gone:
        await leftovers.clear(place.table, leftover)
    return True


# ------------------------------------------------------------------------------ threads


async def delete_thread(place: Place, thread_id: str) -> bool:
    """Erase the thread, all that hangs on it, and the metadata under its id.

    The head goes first, in one transaction with a leftover row that names the incarnation: from
    then on the thread is unknown, whatever becomes of the rest.
    """
    existed = False
    async with place.memory.turn(place.scope, thread_id):
        while (head := await read_head(place, thread_id)) is not None:
            leftover = leftover_item(
                replace(head, version=head.version + 1), place.now(), whole=True
            )
            condition = Condition.equal(version=head.version, incarnation=head.incarnation)
            place.memory.forget(place.scope, thread_id)
            key = (thread_pk(place.scope, thread_id), HEAD)
            try:
                await place.table.transact(
                    [
                        Action.delete(key, f"thread {thread_id!r}", condition),
                        Action.put(leftover, "a deleted thread"),
                    ]
                )
            except Cancelled:
                continue
            existed = not head.unborn
            await leftovers.clear(place.table, leftover)
            break
    notes = await delete_values_of(place, thread_id)
    return existed or notes


async def list_threads(place: Place, limit: int, cursor: str | None, children: bool) -> ThreadList:
    """Newest first; equal times in reverse order of creation."""
    below = None if cursor is None else decode_cursor(cursor, str)[0]
    kinds = ("threads", "subthreads") if children else ("threads",)
    found: list[list[Item]] = await gather(
        [
            functools.partial(
                place.table.query_index,
                BY_SCOPE,
                list_partition(place.scope, kind),
                below=below,
                newest_first=True,
                limit=limit + 1,
            )
            for kind in kinds
        ]
    )
    rows = sorted(
        (item for items in found for item in items),
        key=lambda item: item["listed_at"],
        reverse=True,
    )
    page = rows[:limit]
    return ThreadList(
        threads=[
            ThreadInfo(
                thread_id=item["thread"],
                created_at=item["created_at"],
                updated_at=item["updated_at"],
                message_count=item["messages"],
            )
            for item in page
        ],
        cursor=encode_cursor(page[-1]["listed_at"]) if len(rows) > limit else None,
    )


async def list_idle(place: Place, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
    """Threads of every scope that nobody has written for so long, the longest first."""
    before = place.now() - idle_ms
    idle: list[tuple[int, int, str, Item]] = []

    async def in_shard(shard: int) -> None:
        own: list[int] = []
        start: Any = None
        while True:
            page, start = await place.table.due_page(
                f"idle/{shard}", before, inclusive=True, limit=limit, start=start
            )
            heads = await place.table.get_many(map(key_of, page))
            for item in heads.values():
                if item["updated_at"] <= before:
                    idle.append((item["updated_at"], item["created"], item["thread"], item))
                    own.append(item["updated_at"])
            # The index knows hours: of the one that a page ends in more may follow.
            hour = page[-1]["due_at"] if page else 0
            if start is None or sum(moment < hour for moment in own) >= limit:
                return

    await gather([functools.partial(in_shard, shard) for shard in range(SHARDS)])
    idle.sort(key=lambda found: found[:3])
    return [(scope_of(item), thread_id) for _, _, thread_id, item in idle[:limit]]


async def list_cut_threads(place: Place, before: int, limit: int) -> list[tuple[Scope, str]]:
    """Threads of every scope with a cut made before ``before``, the oldest cut first."""
    found: list[Item] = []

    async def in_shard(shard: int) -> None:
        own: set[str] = set()
        start: Any = None
        while True:
            page, start = await place.table.due_page(
                f"cut/{shard}", before, inclusive=False, limit=limit, start=start
            )
            found.extend(page)
            own |= {item["pk"] for item in page}
            if start is None or len(own) >= limit:
                return

    await gather([functools.partial(in_shard, shard) for shard in range(SHARDS)])
    found.sort(key=lambda item: item["due_at"])
    threads = dict.fromkeys((scope_of(item), item["thread"]) for item in found)
    return list(threads)[:limit]


# -------------------------------------------------------------------------------- erasure


async def erase_messages(place: Place, thread_id: str, message_ids: Sequence[str]) -> int:
    """Erase every copy of these messages: live, archived, and in drafts."""
    asked = set(message_ids)
    erased = 0
    async with place.memory.turn(place.scope, thread_id):
        while True:
            head = await read_head(place, thread_id)
            if head is None:
                return erased
            ids = await numbers_behind(place, head, 0, head.next_number)
            cuts = await _cuts(place, head)
            kept = {n for n in ids if rg.holds(head.live, n)}
            kept |= {n for cut in cuts.values() for n in rg.expand(cut.numbers)}
            gone = {n for n, (message_id, _) in ids.items() if message_id in asked and n in kept}
            if not gone:
                break
            erased += await _erase(place, head, cuts, gone)
        await _erase_from_drafts(place, head, asked)
    return erased


async def _erase(place: Place, head: Head, cuts: Mapping[int, Cut], gone: set[int]) -> int:
    """Erase messages, or those of them that one transaction can; how many."""
    touched = [cut for cut in cuts.values() if not gone.isdisjoint(rg.expand(cut.numbers))]
    part = touched[:_CUTS_AT_ONCE]
    if len(touched) > len(part):
        gone = gone & {n for cut in part for n in rg.expand(cut.numbers)}
    changed: dict[Cut, Cut | None] = {}
    for cut in part:
        numbers = rg.expand(cut.numbers)
        added = numbers[len(numbers) - cut.extra :]
        rest = rg.without(cut.numbers, gone)
        extra = sum(number not in gone for number in added)
        changed[cut] = replace(cut, numbers=rest, extra=extra) if rest else None
    live = rg.without(head.live, gone)
    after = replace(head, live=live)
    if live != head.live:
        after = replace(after, transcript_version=head.version + 1)
    done = await _rewrite(place, head, after, changed, sorted(gone))
    return len(gone) if done else 0


async def _erase_from_drafts(place: Place, head: Head, asked: set[str]) -> None:
    for rows in (await prefixed(place, head, DRAFT)).values():
        what = f"draft of run {rows[0]['run_id']!r}"
        check_format(rows[0], what)
        if draft_expired(rows[0], place.now()):
            await place.table.write_many(deletes=map(key_of, rows))
            continue
        own = [row for row in rows if row["stamp"] == rows[0]["stamp"]]
        messages = decode(body_of(rows[0], own[1:], what), what)
        rest = [message for message in messages if message.get("id") not in asked]
        if len(rest) == len(messages):
            continue
        shorter = draft_items(
            head,
            rows[0]["run_id"],
            encode(rest),
            rows[0]["updated_at"],
            secrets.token_hex(6),
            own[-1].get("expires_at", 0),
        )
        condition = Condition.equal(stamp=rows[0]["stamp"])
        try:
            await place.table.transact(
                [Action.put(row, what, None if i else condition) for i, row in enumerate(shorter)]
            )
        except Cancelled:
            continue  # its run has streamed on: what it wrote then is its own
    await _erase_old_chunks(place, head)


async def _erase_old_chunks(place: Place, head: Head) -> None:
    """Remove the chunks of drafts that were replaced or have gone: they hold what was erased."""
    prefix = f"{DRAFT}/{head.incarnation}"
    rows = await place.table.query(
        thread_pk(head.scope, head.thread_id),
        prefix + "/",
        behind(prefix),
        names=("pk", "sk", "kind", "stamp"),
    )
    chunks = [row for row in rows if row["kind"] == "chunk"]
    # Read behind the chunks: a draft is written in one transaction with those of its stamp.
    drafts = await place.table.get_many(
        ((row["pk"], row["sk"].rpartition("/")[0]) for row in chunks), ("stamp",)
    )
    stamps = {draft["stamp"] for draft in drafts.values()}
    await gather(
        [
            functools.partial(
                place.table.delete_if, key_of(row), Condition.equal(stamp=row["stamp"])
            )
            for row in chunks
            if row["stamp"] not in stamps
        ]
    )
