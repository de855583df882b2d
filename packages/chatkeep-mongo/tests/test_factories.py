"""How a persistence is made, and what of it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bson import SON
from bson.codec_options import CodecOptions
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern

from chatkeep import Persistence, Scope, open_persistence
from chatkeep.errors import CompositionError, StoreClosed
from chatkeep_mongo import mongo_persistence
from servers.mongo import MongoDatabase

pytestmark = pytest.mark.anyio

MESSAGE: Any = {"id": "m", "role": "user", "content": "x"}


async def test_a_url_and_either_client_open_the_same_database(
    mongo_database: MongoDatabase, tools: Any
) -> None:
    """The clients stay open, and keep their settings."""
    url, name = mongo_database.url(), mongo_database.name
    async with open_persistence(url) as persistence:
        await persistence.stores.messages.save_thread("t", [MESSAGE])
    odd: dict[str, Any] = {
        "w": 0,
        "readPreference": "secondaryPreferred",
        "tz_aware": True,
        "document_class": SON,
        "unicode_decode_error_handler": "ignore",
    }
    client: AsyncMongoClient[Any] = AsyncMongoClient(url, **odd)
    async with mongo_persistence(client, name) as persistence:
        assert await persistence.stores.messages.load_thread("t") == [MESSAGE]
        await persistence.stores.messages.save_thread("t", [MESSAGE, MESSAGE])
        assert tools.checked_out(persistence) == 0
    assert client.options.write_concern == WriteConcern(0)
    assert client.options.read_preference == ReadPreference.SECONDARY_PREFERRED
    assert client.options.codec_options.document_class is SON
    assert (await client.admin.command("ping"))["ok"] == 1
    await client.close()
    motor: AsyncIOMotorClient[Any] = AsyncIOMotorClient(url, **odd)
    async with mongo_persistence(motor, name) as persistence:
        assert await persistence.stores.messages.load_thread("t") == [MESSAGE, MESSAGE]
    assert (await motor.admin.command("ping"))["ok"] == 1
    assert motor.write_concern == WriteConcern(0)
    motor.close()


async def test_reads_go_to_the_primary_and_writes_wait_for_a_majority_and_the_journal(
    mongo_database: MongoDatabase,
) -> None:
    """Whatever the client was set to."""
    client: AsyncMongoClient[Any] = AsyncMongoClient(
        mongo_database.url(), w=1, readPreference="nearest", readConcernLevel="available"
    )
    async with mongo_persistence(client, mongo_database.name) as persistence:
        database = persistence.backends[0]._db._database  # type: ignore[attr-defined]
        assert database.write_concern == WriteConcern("majority", j=True)
        assert database.read_preference == ReadPreference.PRIMARY
        assert database.read_concern.level == "local"
        assert database.codec_options == CodecOptions()
    await client.close()


async def test_the_database_is_the_one_asked_for_else_that_of_the_url(
    mongo_database: MongoDatabase,
) -> None:
    server = mongo_database.server
    for persistence, name in (
        (mongo_persistence(mongo_database.url()), mongo_database.name),
        (mongo_persistence(mongo_database.url(), "other"), "other"),
        (mongo_persistence(server.url()), "chatkeep"),
        (open_persistence(server.url(), database="third"), "third"),
    ):
        assert persistence.backends[0]._database == name  # type: ignore[attr-defined]
        await persistence.aclose()


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://host/x",
        "mongodb://",
        "mongodb://us/er:secret@host/",
        "mongodb://user:secret@[::1",
        "mongodb://user:secret@host:notaport/",
        object(),
        None,
    ],
)
def test_what_is_no_mongodb_is_refused_and_its_password_kept(given: Any) -> None:
    with pytest.raises(CompositionError) as caught:
        mongo_persistence(given)
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.__cause__)


def test_a_client_that_blocks_is_refused() -> None:
    """It would hold up the event loop at every call."""
    blocking = MongoClient[Any]("mongodb://127.0.0.1:1", connect=False)
    with blocking as client, pytest.raises(CompositionError, match="AsyncMongoClient"):
        mongo_persistence(client)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a$b", "a/b", "x" * 64])
async def test_a_name_that_no_database_may_have_is_refused(name: str) -> None:
    client: AsyncMongoClient[Any] = AsyncMongoClient("mongodb://127.0.0.1:1")
    if name:
        with pytest.raises(CompositionError, match="no database"):
            mongo_persistence(client, name)
    await client.close()


async def test_making_one_connects_to_nothing() -> None:
    """Not even looks whether there is a server."""
    persistence = mongo_persistence("mongodb://127.0.0.1:1/x")
    await persistence.aclose()
    with pytest.raises(StoreClosed):
        await persistence.ping()


async def test_another_event_loop_is_refused_at_once(persistence: Persistence) -> None:
    """Connections belong to one loop. Of every handle, without harm to the loop that uses it."""
    await persistence.stores.messages.load_thread("t")

    async def elsewhere() -> None:
        other = persistence.scoped(Scope(user_id="u"))
        for bag in (persistence, other):
            with pytest.raises(CompositionError, match="another event loop"):
                await bag.stores.messages.load_thread("t")

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert await persistence.stores.messages.load_thread("t") == []


async def test_setting_up_in_a_loop_of_its_own_comes_before_the_servers_loop(
    mongo_database: MongoDatabase,
) -> None:
    """``asyncio.run(persistence.migrate())``, then a server: a usual way to start."""
    async with mongo_persistence(mongo_database.url()) as persistence:

        async def before() -> None:
            await persistence.migrate()
            await persistence.check_schema()

        await asyncio.to_thread(asyncio.run, before())
        await persistence.stores.messages.save_thread("t", [MESSAGE])
        await persistence.check_schema()  # in use by now: what it uses is kept
        assert len(await persistence.stores.messages.load_thread("t")) == 1
