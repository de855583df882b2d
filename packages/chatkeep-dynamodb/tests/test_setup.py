"""The table: made once however many begin at once, checked, and never guessed at."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from chatkeep import Persistence, open_persistence
from chatkeep.errors import BackendUnavailable, SchemaOutOfDate
from chatkeep_dynamodb import table as table_module
from chatkeep_dynamodb import table_definition
from servers.dynamodb import DynamoTable

pytestmark = pytest.mark.anyio


async def test_the_first_call_makes_the_table(
    opened: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """On demand, with both indexes and a time to live."""
    async with opened() as persistence:
        await persistence.stores.messages.save_thread("t", [{"role": "user", "content": "x"}])
        await persistence.check_schema()
    with tools.raw(dynamodb_table) as client:
        found = client.describe_table(TableName=dynamodb_table.name)["Table"]
        assert found["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        assert [index["IndexName"] for index in found["GlobalSecondaryIndexes"]] == [
            "by_scope",
            "by_due",
        ]
        ttl = client.describe_time_to_live(TableName=dynamodb_table.name)
        assert ttl["TimeToLiveDescription"] == {
            "TimeToLiveStatus": "ENABLED",
            "AttributeName": "expires_at",
        }


async def test_many_may_be_the_first_at_once(opened: Any, tools: Any) -> None:
    """Twelve processes' worth of clients: one table, and no error."""
    persistences = [opened() for _ in range(12)]
    try:
        await asyncio.gather(
            *(
                p.stores.metadata.set("n", f"k{i}", i) if i % 2 else p.migrate()
                for i, p in enumerate(persistences)
            )
        )
        stores = persistences[0].stores
        assert [await stores.metadata.get("n", f"k{i}") for i in (1, 11)] == [1, 11]
        wires = [tools.wire(p) for p in persistences]
        await asyncio.gather(*(p.migrate() for p in persistences))
        assert sum((wire.counts for wire in wires), Counter())["CreateTable"] == 0
    finally:
        for persistence in persistences:
            await persistence.aclose()


async def test_a_loser_of_the_race_waits_for_the_winner(
    opened: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else makes the table between the look and the try; it is not active at once."""
    monkeypatch.setattr(table_module, "_POLL_SECONDS", 0.001)
    async with opened() as winner, opened() as loser:
        wire = tools.wire(loser)
        come, go = wire.hold("CreateTable")
        work = asyncio.create_task(loser.migrate())
        assert await asyncio.to_thread(come.wait, 30)
        await winner.migrate()

        def creating(page: Any) -> Any:
            page["Table"]["TableStatus"] = "CREATING"
            return page

        wire.rewrite("DescribeTable", creating, times=2)
        go.set()
        await work
        assert wire.faults == []
        assert wire.counts["DescribeTable"] == 4


async def test_a_table_that_never_comes_up_is_an_outage(
    opened: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(table_module, "_POLLS", 3)
    async with opened() as persistence:
        wire = tools.wire(persistence)

        def creating(page: Any) -> Any:
            page["Table"]["TableStatus"] = "CREATING"
            return page

        def look(own: Any, request: Any, _operation: str) -> Any:
            return own.inner.send(request)

        wire.faults.append(("DescribeTable", look))
        wire.rewrite("DescribeTable", creating, times=3)
        with pytest.raises(BackendUnavailable, match="still not active"):
            await persistence.migrate()


async def test_a_time_to_live_that_somebody_else_switches_on(opened: Any, tools: Any) -> None:
    """The service refuses a second change within the hour: it is on, or on its way."""
    async with opened() as persistence:
        wire = tools.wire(persistence)
        wire.refuse("UpdateTimeToLive", "ValidationException")
        await persistence.migrate()
        assert wire.faults == []


async def test_without_create_nothing_is_made_or_looked_at(
    opened: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """A role that may only read and write rows is enough; a missing table is named."""
    async with opened(create=False) as persistence:
        with pytest.raises(SchemaOutOfDate, match="chatkeep migrate"):
            await persistence.stores.messages.load_thread("t")
        with pytest.raises(SchemaOutOfDate, match="there is no table"):
            await persistence.check_schema()
        wire = tools.wire(persistence)
        with pytest.raises(SchemaOutOfDate):
            await persistence.ping()
        assert set(wire.counts) == {"GetItem"}
        await persistence.migrate()
        await persistence.ping()


async def test_a_table_of_another_shape_is_refused(
    opened: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """By the first call already; nothing is written to somebody else's table."""
    with tools.raw(dynamodb_table) as client:
        client.create_table(
            TableName=dynamodb_table.name,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )
    async with opened() as persistence:
        for call in (persistence.check_schema, persistence.migrate, persistence.ping):
            with pytest.raises(SchemaOutOfDate, match="not one of chatkeep's"):
                await call()


async def test_the_definition_can_be_reviewed(opened: Any, dynamodb_table: DynamoTable) -> None:
    """As the input of the AWS CLI; a table made of it is one of ours."""
    async with opened(create=False) as persistence:
        script = persistence.backends[0].setup_script()
        definition = json.loads(script)
        assert definition == table_definition(dynamodb_table.name)
        client = dynamodb_table.client()
        client.create_table(**definition)
        client.close()
        await persistence.check_schema()


async def test_a_persistence_may_be_used_from_more_than_one_loop(
    dynamodb_table: DynamoTable,
) -> None:
    """boto3's connections belong to no loop: a migration may run in one of its own."""
    persistence: Persistence = open_persistence(dynamodb_table.url())

    def in_a_loop(value: int) -> Any:
        async def work() -> Any:
            await persistence.stores.metadata.set("n", "k", value)
            return await persistence.stores.metadata.get("n", "k")

        return asyncio.run(work())

    assert [await asyncio.to_thread(in_a_loop, n) for n in (1, 2)] == [1, 2]
    await persistence.aclose()
