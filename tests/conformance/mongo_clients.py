"""The two clients that MongoDB is reached with: a URL's own, and an application's Motor client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from motor.motor_asyncio import AsyncIOMotorClient

from chatkeep import Persistence
from chatkeep_mongo import mongo_persistence
from servers.mongo import MongoDatabase

MongoClientKind = Literal["mongo", "motor"]


@asynccontextmanager
async def opened(kind: MongoClientKind, database: MongoDatabase) -> AsyncIterator[Persistence]:
    """A persistence in ``database``; nothing is left open behind it."""
    if kind == "mongo":
        async with mongo_persistence(database.url()) as persistence:
            yield persistence
        return
    client: AsyncIOMotorClient[Any] = AsyncIOMotorClient(database.url())
    try:
        async with mongo_persistence(client, database.name) as persistence:
            yield persistence
    finally:
        client.close()
