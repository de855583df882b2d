"""Rows of a thread by name, each with the chunks behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from chatkeep_dynamodb.client import Table
from chatkeep_dynamodb.head import Head
from chatkeep_dynamodb.items import Item, Key
from chatkeep_dynamodb.keys import HEAD, MESSAGE, behind, chunk_sk, number_sk, thread_pk
from chatkeep_dynamodb.state import Place, Rows

__all__ = ["fetch", "grouped", "numbers_behind", "prefixed", "read_head"]

_TRIES = 10


def grouped(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Rows by sort key, in order, each followed by its chunks."""
    found: dict[str, list[Item]] = {}
    chunks: list[Item] = []
    for item in items:
        if item.get("kind") == "chunk":
            chunks.append(item)
        else:
            found[item["sk"]] = [item]
    for chunk in chunks:
        # Other rows may sort between a row and its chunks.
        rows = found.get(chunk["sk"].rpartition("/")[0])
        if rows is not None and _same(rows[0], chunk):
            rows.append(chunk)
    return found


async def fetch(table: Table, keys: Iterable[Key]) -> dict[Key, Rows]:
    """The rows that there are; one request more if one of them has chunks. A row that was
    written over between the two is read again."""
    rows = await _fetch(table, keys)
    for attempt in range(_TRIES):
        torn = [key for key, found in rows.items() if _torn(found)]
        if not torn:
            break
        await asyncio.sleep(0.002 * 2**attempt * random.random())
        again = await _fetch(table, torn)
        rows = {key: found for key, found in rows.items() if key not in torn} | again
    return rows


async def _fetch(table: Table, keys: Iterable[Key]) -> dict[Key, Rows]:
    found = await table.get_many(keys)
    rows: dict[Key, list[Item]] = {key: [item] for key, item in found.items()}
    missing = {
        key: [(key[0], chunk_sk(key[1], i)) for i in range(1, item["parts"])]
        for key, item in found.items()
        if item.get("parts", 1) > 1
    }
    if missing:
        chunks = await table.get_many(key for keys in missing.values() for key in keys)
        for key, wanted in missing.items():
            own = [chunks[chunk] for chunk in wanted if chunk in chunks]
            rows[key] += [chunk for chunk in own if _same(rows[key][0], chunk)]
    return dict(rows)


async def read_head(place: Place, thread_id: str) -> Head | None:
    """The head as it is now."""
    item = await place.table.get((thread_pk(place.scope, thread_id), HEAD))
    return None if item is None else Head.from_item(item)


async def prefixed(place: Place, head: Head, letter: str) -> dict[str, list[Item]]:
    """All rows of a kind, by sort key, each with its chunks."""
    sk = f"{letter}/{head.incarnation}"
    pk = thread_pk(head.scope, head.thread_id)
    rows = grouped(await place.table.query(pk, sk + "/", behind(sk)))
    torn = [(pk, sk) for sk, found in rows.items() if _torn(found)]
    if torn:
        again = await fetch(place.table, torn)
        for key in torn:
            del rows[key[1]]
        rows |= {sk: list(found) for (_, sk), found in again.items()}
    return rows


async def numbers_behind(
    place: Place, head: Head, after: int, through: int
) -> dict[int, tuple[str | None, int]]:
    """Message id and number of chunks of the messages numbered above ``after``, by number."""
    pk = thread_pk(head.scope, head.thread_id)
    low = number_sk(MESSAGE, head.incarnation, after + 1)
    high = behind(number_sk(MESSAGE, head.incarnation, through))
    names = ("sk", "kind", "message_id", "parts")
    rows = await place.table.query(pk, low, high, names=names)
    return {
        int(row["sk"].split("/")[2]): (row.get("message_id"), row.get("parts", 1))
        for row in rows
        if row.get("kind") != "chunk"
    }


def _torn(rows: Rows) -> bool:
    """Whether some of a row's chunks are missing, or of another version."""
    parts: int = rows[0].get("parts", 1)
    return len(rows) != parts


def _same(item: Item, chunk: Item) -> bool:
    """Whether a chunk was written with its row."""
    return all(chunk.get(name) == item.get(name) for name in ("version", "stamp", "revision"))
