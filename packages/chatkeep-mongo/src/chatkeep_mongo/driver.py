"""The few commands that this package sends, over PyMongo's asyncio client.

Everything goes through :class:`Driver`: one place to count commands at, to break them at in tests,
and to adapt to another client (:class:`MotorDriver`). Whatever the caller's client was set to,
these commands read from the primary, write with majority and journal, and see plain documents.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, IndexModel, ReadPreference, ReplaceOne, ReturnDocument
from pymongo.errors import BulkWriteError, DuplicateKeyError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from chatkeep_mongo.errors import only_duplicates
from chatkeep_mongo.layout import Document

__all__ = ["Driver", "MotorDriver", "milliseconds"]

_DURABLE: Final = WriteConcern("majority", j=True)
_QUICK: Final = WriteConcern(1)
_LOCAL: Final = ReadConcern("local")
_MAJORITY: Final = ReadConcern("majority")
_MOST: Final = 2**31 - 1
"""Greatest size of a batch."""


def milliseconds(moment: dt.datetime) -> int:
    """Epoch milliseconds of a date as documents hold it, which is UTC without saying so."""
    return round(moment.replace(tzinfo=dt.UTC).timestamp() * 1000)


class Driver:
    """A database of MongoDB.

    Args:
        client: PyMongo's asyncio client, or what makes one.
        database: name of the database.
    """

    def __init__(
        self,
        client: AsyncMongoClient[Document] | Callable[[], AsyncMongoClient[Document]],
        database: str,
    ) -> None:
        self._make = client if callable(client) else None
        self._name = database
        self._use(client() if callable(client) else client)

    def _use(self, client: AsyncMongoClient[Document]) -> None:
        self._client: Any = client
        # Options that a caller set for documents of its own would change ours.
        self._database: Any = self._client.get_database(
            self._name,
            codec_options=CodecOptions(),
            read_preference=ReadPreference.PRIMARY,
            write_concern=_DURABLE,
            read_concern=_LOCAL,
        )

    # -- reads ----------------------------------------------------------------------

    async def find(
        self,
        name: str,
        query: Document,
        fields: Mapping[str, int] | None = None,
        *,
        sort: Sequence[tuple[str, int]] = (),
        limit: int = 0,
        majority: bool = False,
    ) -> list[Document]:
        """All matching documents of a collection. ``majority``: only what no failover can undo."""
        where = self._database[name]
        if majority:
            where = where.with_options(read_concern=_MAJORITY)
        cursor = where.find(query, fields, limit=min(limit, _MOST), batch_size=_MOST)
        if sort:
            cursor = cursor.sort(list(sort))
        return cast("list[Document]", await cursor.to_list(None))

    async def aggregate(self, name: str, pipeline: Sequence[Document]) -> list[Document]:
        """All that a pipeline gives."""
        cursor = await self._database[name].aggregate(list(pipeline))
        return cast("list[Document]", await cursor.to_list(None))

    async def clock(self) -> int:
        """The server's clock, epoch milliseconds."""
        told = await self._database.command("hello")
        return milliseconds(told["localTime"])

    # -- writes ---------------------------------------------------------------------

    async def insert(self, name: str, documents: Sequence[Document]) -> bool:
        """Insert in order, up to the first whose key is taken; whether all were inserted."""
        try:
            if len(documents) == 1:
                await self._database[name].insert_one(documents[0])
            else:
                await self._database[name].insert_many(documents)
        except DuplicateKeyError:
            return False
        except BulkWriteError as error:
            if not only_duplicates(error):
                raise
            return False
        return True

    async def insert_missing(self, name: str, documents: Sequence[Document]) -> None:
        """Insert those whose key is free."""
        try:
            await self._database[name].insert_many(documents, ordered=False)
        except BulkWriteError as error:
            if not only_duplicates(error):
                raise

    async def update(
        self,
        name: str,
        query: Document,
        change: Document | list[Document],
        *,
        durable: bool = True,
    ) -> bool:
        """Change one document; whether one matched. Not ``durable``: what may be lost."""
        where = self._database[name]
        if not durable:
            where = where.with_options(write_concern=_QUICK)
        done = await where.update_one(query, change)
        return bool(done.matched_count)

    async def change(
        self,
        name: str,
        query: Document,
        change: Document | list[Document],
        fields: Mapping[str, int],
        *,
        after: bool,
        durable: bool = True,
    ) -> Document | None:
        """Change one document; what it was, or is ``after``. None if none matched."""
        where = self._database[name]
        if not durable:
            where = where.with_options(write_concern=_QUICK)
        which = ReturnDocument.AFTER if after else ReturnDocument.BEFORE
        found = await where.find_one_and_update(query, change, fields, return_document=which)
        return cast("Document | None", found)

    async def replace(
        self, name: str, pairs: Sequence[tuple[Document, Document]], *, upsert: bool
    ) -> bool:
        """Replace each document that a query matches; with ``upsert`` insert it where none does.
        False if a key was taken by a document that its query did not match."""
        works = [ReplaceOne(query, document, upsert=upsert) for query, document in pairs]
        try:
            await self._database[name].bulk_write(works, ordered=False)
        except BulkWriteError as error:
            if not only_duplicates(error):
                raise
            return False
        return True

    async def delete(self, name: str, query: Document) -> int:
        """Delete all matching documents; how many."""
        done = await self._database[name].delete_many(query)
        return int(done.deleted_count)

    # -- life -----------------------------------------------------------------------

    async def ping(self) -> None:
        """One round trip."""
        await self._database.command("ping")

    async def create_indexes(self, name: str, indexes: Sequence[IndexModel]) -> None:
        """Create a collection's indexes; those that are there already stay."""
        await self._database[name].create_indexes(list(indexes))

    async def index_names(self, name: str) -> set[str]:
        """Names of the indexes of a collection; empty if there is no such collection."""
        return set(await self._database[name].index_information())

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    async def start_over(self) -> None:
        """Close the client and have a new one, which belongs to no event loop yet. Only for a
        driver that makes its clients."""
        if self._make is None:
            raise AssertionError("this client is somebody else's")
        await self.close()
        self._use(self._make())


class MotorDriver(Driver):
    """The same over a Motor client: its cursors are made without waiting."""

    async def aggregate(self, name: str, pipeline: Sequence[Document]) -> list[Document]:
        """See :meth:`Driver.aggregate`."""
        cursor = self._database[name].aggregate(list(pipeline))
        return cast("list[Document]", await cursor.to_list(None))

    async def close(self) -> None:
        """See :meth:`Driver.close`."""
        self._client.close()
