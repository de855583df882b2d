"""Indexes are created once, by whoever comes first, and checked on request; no rule needs one."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import BackendUnavailable, SchemaOutOfDate
from chatkeep_mongo import mongo_persistence
from chatkeep_mongo.layout import COLLECTIONS, INDEXES, LAYOUT
from servers.mongo import MongoDatabase, MongoProcess

pytestmark = pytest.mark.anyio

MESSAGE: Any = {"id": "m", "role": "user", "content": "x"}

RACER = """
import asyncio
from chatkeep import open_persistence

async def main():
    async with open_persistence(url) as persistence:
        if how == "migrate":
            await persistence.migrate()
        message = {"id": name, "role": "user", "content": "here"}
        await persistence.stores.messages.save_thread(name, [message])

gate.wait()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["migrate", "create"])
async def test_twelve_processes_that_start_at_once_create_the_indexes_once(
    mongo_database: MongoDatabase, how: str, processes: Any
) -> None:
    """Both by an explicit migrate and by first use; every one of them then works."""
    url = mongo_database.url()
    processes(RACER, [{"url": url, "how": how, "name": f"t{i}"} for i in range(12)])
    async with mongo_persistence(url, create=False) as persistence:
        await persistence.check_schema()
        found = await persistence.list_threads(limit=50)
        assert {thread.thread_id for thread in found.threads} == {f"t{i}" for i in range(12)}
    with mongo_database.opened() as database:
        assert set(database.list_collection_names()) == set(COLLECTIONS)
        for name, indexes in INDEXES.items():
            there = set(database[name].index_information()) - {"_id_"}
            assert there == {index.document["name"] for index in indexes}


async def test_what_is_missing_is_refused_by_name_of_the_remedy(
    mongo_database: MongoDatabase,
) -> None:
    """``create=False`` creates nothing; ``migrate()`` does."""
    async with mongo_persistence(mongo_database.url(), create=False) as persistence:
        for call in (
            persistence.check_schema,
            lambda: persistence.stores.messages.load_thread("t"),
        ):
            with pytest.raises(SchemaOutOfDate, match="chatkeep migrate"):
                await call()
        with mongo_database.opened() as database:
            assert database.list_collection_names() == []
        await persistence.migrate()
        await persistence.check_schema()
        await persistence.migrate()
        assert await persistence.stores.messages.load_thread("t") == []


async def test_an_index_that_was_dropped_is_named(
    plain: Persistence, mongo_database: MongoDatabase
) -> None:
    await plain.migrate()
    with mongo_database.opened() as database:
        database["chatkeep_entries"].drop_index("chatkeep_thread")
    with pytest.raises(SchemaOutOfDate, match="chatkeep_entries lacks the index chatkeep_thread"):
        await plain.check_schema()
    await plain.migrate()
    await plain.check_schema()


async def test_a_newer_layout_is_refused_and_left_alone(mongo_database: MongoDatabase) -> None:
    with mongo_database.opened() as database:
        database[LAYOUT].insert_one({"_id": "version", "format": 2})
    async with mongo_persistence(mongo_database.url()) as persistence:
        for call in (
            persistence.check_schema,
            persistence.migrate,
            lambda: persistence.stores.messages.load_thread("t"),
        ):
            with pytest.raises(SchemaOutOfDate, match="newer chatkeep"):
                await call()
    with mongo_database.opened() as database:
        assert database.list_collection_names() == [LAYOUT]


async def test_no_rule_depends_on_an_index(
    mongo_database: MongoDatabase, tools: Any, plain: Persistence
) -> None:
    """Someone has dropped them all: what must be unique is a key, and stays so."""
    await plain.migrate()
    with mongo_database.opened() as database:
        for name in INDEXES:
            database[name].drop_indexes()
    backend = tools.backend(plain)
    first = tools.said("t", "a", expected="")
    await backend.commit_turn(first)
    assert (await backend.commit_turn(first)).replayed
    await plain.stores.runs.create_or_resume("r", "t", started_at=1)
    assert (await plain.stores.runs.create_or_resume("r", "t", started_at=2)).started_at == 1
    assert [m["id"] for m in await plain.stores.messages.load_thread("t")] == ["a"]


@pytest.mark.slow
async def test_a_failed_set_up_is_tried_again(own_mongo: MongoProcess) -> None:
    """The server is away for the first call only."""
    own_mongo.kill()
    url = f"{own_mongo.url('x')}&serverSelectionTimeoutMS=1500"
    async with mongo_persistence(url) as persistence:
        with pytest.raises(BackendUnavailable):
            await persistence.stores.messages.load_thread("t")
        own_mongo.start()
        await persistence.stores.messages.save_thread("t", [MESSAGE])
        assert await persistence.stores.messages.load_thread("t") == [MESSAGE]


def test_the_script_creates_what_set_up_creates() -> None:
    """For those who let nobody else create indexes: one line for each."""
    persistence = mongo_persistence("mongodb://127.0.0.1:1/shop")
    script = persistence.backends[0].setup_script()
    assert script is not None
    assert script.splitlines()[0] == "use shop"
    for name, indexes in INDEXES.items():
        for index in indexes:
            line = f"db.{name}.createIndex("
            assert any(
                row.startswith(line) and f'"{index.document["name"]}"' in row
                for row in script.splitlines()
            )
    assert script.splitlines()[-1].startswith(f"db.{LAYOUT}.insertOne(")
