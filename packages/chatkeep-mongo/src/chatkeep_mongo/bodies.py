"""Bodies: JSON text in a document, or in pieces beside it when it is long.

A document never comes near MongoDB's 16 MB. A body above :data:`INLINE` bytes goes into documents
of ``chatkeep_pieces`` first; the one that owns it then names them (``piece``, ``parts``). Until
then nobody sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar, cast

from chatkeep.codec import FORMAT_VERSION, digest
from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.layout import PIECES, Document

__all__ = [
    "INLINE",
    "Patience",
    "Torn",
    "check_format",
    "drop_pieces",
    "load_bodies",
    "object_of",
    "put_body",
    "split_pieces",
    "together",
]

_T = TypeVar("_T")

INLINE = 4 * 1024 * 1024
"""Longest body, in bytes, that stands in the document itself; and the size of a piece."""


class Torn(Exception):
    """What was read is not of one moment: another writer was at work. Read again."""


class Patience:
    """Counts reads that were torn. Nobody was at work, and something is really missing, when it
    happens again and again under one stamp of the head.

    Args:
        what: for the error.
    """

    __slots__ = ("_count", "_stamp", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._stamp: str | None = None
        self._count = 0

    def torn(self, error: Torn, stamp: str = "") -> None:
        """Take note of one.

        Raises:
            CorruptRecord: that was one too many.
        """
        self._count = self._count + 1 if stamp == self._stamp else 1
        self._stamp = stamp
        if self._count >= _TORN_READS:
            raise CorruptRecord(self._what, f"{error} is missing or out of step") from error


_TORN_READS = 5


async def together(*works: Awaitable[_T]) -> list[_T]:
    """The results in order. All have ended when the first error is raised."""
    if len(works) == 1:
        return [await works[0]]
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)


def check_format(document: Document, what: str) -> None:
    """Refuse a document of a later format.

    Raises:
        SchemaOutOfDate: a newer chatkeep wrote it.
        CorruptRecord: no version at all.
    """
    version: Any = document.get("format")
    if not isinstance(version, int) or version < 1:
        raise CorruptRecord(what, f"format {version!r} does not exist")
    if version > FORMAT_VERSION:
        raise SchemaOutOfDate(
            f"{what} is stored in format {version}, by a newer chatkeep; this one reads up to "
            f"{FORMAT_VERSION}: upgrade chatkeep-mongo",
            found=str(version),
            expected=str(FORMAT_VERSION),
        )


def object_of(value: Any, what: str) -> dict[str, Any]:
    """A decoded body that must be an object.

    Raises:
        CorruptRecord: it is something else.
    """
    if not isinstance(value, dict):
        raise CorruptRecord(what, "is not a JSON object")
    return cast("dict[str, Any]", value)


# ------------------------------------------------------------------------------- pieces


def put_body(document: Document, body: bytes, *, t: str, piece: str) -> list[Document]:
    """Give ``document`` its body; the pieces that must be stored before it, mostly none.

    Args:
        document: what owns the body.
        body: JSON.
        t: the incarnation of the thread that the pieces are deleted with.
        piece: names the owner and the write; the body's digest is added, so that a write which is
            sent again meets its own pieces, and one with other contents does not.
    """
    if len(body) <= INLINE:
        document["body"] = body.decode()
        return []
    pieces = split_pieces(body, t=t, piece=f"{piece}.{digest(body).hex()}")
    document["piece"], document["parts"] = pieces[0]["piece"], len(pieces)
    return pieces


def split_pieces(data: bytes, *, t: str, piece: str) -> list[Document]:
    """``data`` as documents of at most :data:`INLINE` bytes each."""
    return [
        {"_id": f"{t}.{piece}.{i:06x}", "t": t, "piece": piece, "i": i, "data": data[at:end]}
        for i, at in enumerate(range(0, len(data), INLINE))
        for end in [at + INLINE]
    ]


async def load_bodies(db: Driver, t: str, documents: Iterable[Document]) -> None:
    """Fetch the bodies that stand in pieces, each as ``body`` of its document.

    Raises:
        Torn: a piece is missing: its owner was replaced meanwhile.
    """

    async def load(document: Document) -> None:
        document["body"] = await _joined(db, t, document["piece"], document["parts"])

    works = [load(document) for document in documents if "piece" in document]
    if works:
        await together(*works)


async def _joined(db: Driver, t: str, piece: str, parts: int) -> bytes:
    found = await db.find(PIECES, {"t": t, "piece": piece}, sort=[("i", 1)])
    if [row["i"] for row in found] != list(range(parts)):
        raise Torn(f"piece {piece!r}")
    return b"".join(row["data"] for row in found)


async def drop_pieces(db: Driver, t: str, names: Iterable[str]) -> None:
    """Delete pieces that nothing names any more."""
    for piece in names:
        await db.delete(PIECES, {"t": t, "piece": piece})
