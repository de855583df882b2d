"""Rows as DynamoDB keeps them: attribute values, sizes in bytes, and bodies in chunks.

A body is JSON *bytes*, never a map: the service would refuse floats, empty keys and 39 digits,
and give numbers back as others. A row holds the first chunk of its body and says how many there
are; the others are rows of their own behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from chatkeep.codec import FORMAT_VERSION, decode
from chatkeep.errors import CorruptRecord, RecordTooLarge, SchemaOutOfDate
from chatkeep_dynamodb.keys import chunk_sk

__all__ = [
    "BATCH_ITEMS",
    "CHUNK_BYTES",
    "ITEM_BYTES",
    "TRANSACTION_BYTES",
    "TRANSACTION_ITEMS",
    "Item",
    "Key",
    "Wire",
    "body_of",
    "check_format",
    "check_size",
    "from_wire",
    "item_size",
    "key_of",
    "object_of",
    "sizes",
    "split_body",
    "to_wire",
    "with_body",
]

Item: TypeAlias = dict[str, Any]
"""A row: attribute name to text, integer, bytes or bool."""

Wire: TypeAlias = dict[str, dict[str, Any]]
"""The same as attribute values."""

Key: TypeAlias = tuple[str, str]
"""Partition and sort key."""

ITEM_BYTES = 400 * 1024
"""The service's limit of one item, names of attributes included."""
CHUNK_BYTES = 380_000
"""Most bytes of a body in one row: the rest of the row takes less than 20 KB."""
TRANSACTION_ITEMS = 100
TRANSACTION_BYTES = 4 * 1024 * 1024
BATCH_ITEMS = 25


def to_wire(item: Mapping[str, Any]) -> Wire:
    """Attribute values of a row."""
    return {name: _value(value) for name, value in item.items()}


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"BOOL": value}
        case int():
            return {"N": str(value)}
        case bytes():
            return {"B": value}
        case _:
            return {"S": value}


def from_wire(wire: Wire) -> Item:
    """The row of attribute values."""
    item: Item = {}
    for name, typed in wire.items():
        ((kind, value),) = typed.items()
        item[name] = int(value) if kind == "N" else value
    return item


def key_of(item: Mapping[str, Any]) -> Key:
    """The key of a row."""
    return (item["pk"], item["sk"])


def item_size(item: Mapping[str, Any]) -> int:
    """Bytes of a row by the service's rules: names and text in UTF-8, numbers at two digits a
    byte and two more."""
    size = 0
    for name, value in item.items():
        size += len(name.encode())
        if isinstance(value, bool):
            size += 1
        elif isinstance(value, int):
            size += len(str(value)) // 2 + 2
        elif isinstance(value, bytes):
            size += len(value)
        else:
            size += len(str(value).encode())
    return size


def check_size(item: Mapping[str, Any], what: str) -> int:
    """Bytes of a row.

    Raises:
        RecordTooLarge: the service would refuse it.
    """
    size = item_size(item)
    if size > ITEM_BYTES:
        raise RecordTooLarge(what, size, ITEM_BYTES)
    return size


# ------------------------------------------------------------------------------- bodies


def split_body(body: bytes, size: int = CHUNK_BYTES) -> list[bytes]:
    """The chunks of a body, at least one."""
    return [body[i : i + size] for i in range(0, len(body), size)] or [b""]


def with_body(item: Item, body: bytes, stamp: Mapping[str, Any] | None = None) -> list[Item]:
    """The rows of ``item`` with its body: itself, and one for each further chunk.

    ``stamp`` is what a chunk has in common with its row, where rows are overwritten.
    """
    chunks = split_body(body)
    item["body"] = chunks[0]
    if len(chunks) == 1:
        return [item]
    item["parts"] = len(chunks)
    return [
        item,
        *(
            {
                "pk": item["pk"],
                "sk": chunk_sk(item["sk"], index),
                "kind": "chunk",
                **(stamp or {}),
                "body": chunk,
            }
            for index, chunk in enumerate(chunks)
            if index
        ),
    ]


def body_of(item: Item, chunks: Sequence[Item], what: str) -> bytes:
    """The whole body of a row; ``chunks`` are its further rows, in order.

    Raises:
        CorruptRecord: one is missing.
    """
    first = item.get("body")
    if not isinstance(first, bytes):
        raise CorruptRecord(what, "has no body")
    parts = item.get("parts", 1)
    if len(chunks) != parts - 1:
        raise CorruptRecord(what, f"has {len(chunks) + 1} of {parts} chunks")
    return b"".join([first, *(cast("bytes", chunk["body"]) for chunk in chunks)])


def check_format(item: Mapping[str, Any], what: str) -> None:
    """Refuse a row of a later format.

    Raises:
        SchemaOutOfDate: a newer chatkeep wrote it.
        CorruptRecord: no version at all.
    """
    version = item.get("format")
    if not isinstance(version, int) or version < 1:
        raise CorruptRecord(what, f"format {version!r} does not exist")
    if version > FORMAT_VERSION:
        raise SchemaOutOfDate(
            f"{what} is stored in format {version}, by a newer chatkeep; this one reads up to "
            f"{FORMAT_VERSION}: upgrade chatkeep-dynamodb",
            found=str(version),
            expected=str(FORMAT_VERSION),
        )


def object_of(body: bytes, what: str) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        CorruptRecord: it is none.
    """
    value = decode(body, what)
    if not isinstance(value, dict):
        raise CorruptRecord(what, "is not a JSON object")
    return cast("dict[str, Any]", value)


def sizes(items: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of several rows."""
    return sum(map(item_size, items))
