"""The limits of the service, on a server that is exact about them (and knows no transactions):
what a turn is made of, below the turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from chatkeep.errors import RecordTooLarge
from chatkeep.rules import encode_messages
from chatkeep.scope import Scope
from chatkeep_dynamodb import table_definition
from chatkeep_dynamodb.client import ClientSource, Condition, Table
from chatkeep_dynamodb.errors import error_code, translate
from chatkeep_dynamodb.fetch import fetch, grouped
from chatkeep_dynamodb.head import new_head
from chatkeep_dynamodb.items import CHUNK_BYTES, ITEM_BYTES, body_of, check_size, item_size, to_wire
from chatkeep_dynamodb.keys import MESSAGE, behind, chunk_sk, interrupt_sk, thread_pk, value_pk
from chatkeep_dynamodb.rows import entry_items
from servers.dynamodb import DynaliteProcess

pytestmark = pytest.mark.anyio


@pytest.fixture
async def table(dynalite: DynaliteProcess) -> AsyncIterator[Table]:
    """A table of ours."""
    with dynalite.table() as given:
        client = given.client(max_pool_connections=8)
        client.create_table(**table_definition(given.name))
        client.get_waiter("table_exists").wait(TableName=given.name, WaiterConfig={"Delay": 1})
        yield Table(given.name, ClientSource(client))
        client.close()


def row(size: int, *, name: str = "s") -> dict[str, Any]:
    """A row of ASCII and bytes of so many bytes."""
    item: dict[str, Any] = {"pk": "p", "sk": name, "body": b""}
    item["body"] = b"x" * (size - item_size(item))
    return item


async def test_our_size_is_the_services(table: Table) -> None:
    """A row of exactly 400 KB is taken, one byte more refused: by both."""
    largest = row(ITEM_BYTES)
    assert check_size(largest, "x") == ITEM_BYTES
    await table.put(largest)
    larger = row(ITEM_BYTES + 1)
    with pytest.raises(RecordTooLarge):
        await table.put(larger)
    with pytest.raises(ClientError) as caught:
        await table.call("put_item", TableName=table.name, Item=to_wire(larger))
    assert isinstance(translate(caught.value), RecordTooLarge)


async def test_rows_of_the_longest_ids_and_bodies_are_taken(table: Table) -> None:
    """A message of 2 MB in text that is no ASCII, of a tenant, a user and a thread with ids of a
    kilobyte: written in batches, read back over several pages."""
    scope = Scope(tenant_id="é" * 512, user_id="😀" * 256)
    head = new_head(scope, "x" * 1024, 1, 2)
    (entry,) = encode_messages([{"id": "é" * 512, "role": "user", "content": "é" * 1_000_000}])
    rows = entry_items(head, MESSAGE, 1, entry.body, entry)
    assert len(rows) == -(-len(entry.body) // CHUNK_BYTES) == 6
    await table.write_many(rows)
    pk = thread_pk(scope, head.thread_id)
    found = grouped(await table.query(pk, MESSAGE, behind(MESSAGE)))
    (item, *chunks) = found[rows[0]["sk"]]
    assert body_of(item, chunks, "x") == entry.body
    again = await fetch(table, [(pk, rows[0]["sk"])])
    assert list(again.values()) == [found[rows[0]["sk"]]]


async def test_more_than_a_batch_holds_is_written_and_removed(table: Table) -> None:
    """25 rows a request are the limit of a write, 100 of a read."""
    rows = [{"pk": "p", "sk": f"{n:04d}", "body": b"x"} for n in range(230)]
    await table.write_many(rows)
    keys = [("p", item["sk"]) for item in rows]
    assert len(await table.get_many(keys)) == 230
    assert await table.query("p", "0000", "0229") == rows
    assert await table.query("p", "0000", "0229", names=("sk",)) == [
        {"sk": item["sk"]} for item in rows
    ]
    await table.write_many(deletes=keys[:120])
    assert await table.query("p", "0000", "0229") == rows[120:]


async def test_keys_of_any_id_are_taken(table: Table) -> None:
    """The longest partition and sort keys there can be, and odd ones."""
    odd = ["~" * 1024, "é" * 512, "/", "%", " ", "\n", "a/b", "..", "*", "\U0010ffff" * 256]
    for text in odd:
        scope = Scope(tenant_id=text, user_id=text)
        sk = chunk_sk(interrupt_sk("0" * 12, text, text), 1)
        for pk in (thread_pk(scope, text), value_pk(scope, text), value_pk(scope, "")):
            await table.put({"pk": pk, "sk": sk, "body": b""})
            assert await table.get((pk, sk)) == {"pk": pk, "sk": sk, "body": b""}


async def test_values_come_back_as_they_went(table: Table) -> None:
    """No Decimal, no empty value, no float: bodies are bytes; attributes are text, integers of 53
    bits and booleans."""
    item: dict[str, Any] = {
        "pk": "p",
        "sk": "s",
        "most": 2**53 - 1,
        "least": -(2**53) + 1,
        "moment": 1_700_000_000_123_456_789,
        "none": 0,
        "yes": True,
        "empty": "",
        "nothing": b"",
        "text": "\x00é😀",
        "body": bytes(range(256)),
    }
    await table.put(item)
    found = await table.get(("p", "s"))
    assert found == item
    assert found is not None
    assert [type(found[name]) for name in item] == [type(value) for value in item.values()]


async def test_conditions_are_judged(table: Table) -> None:
    await table.put({"pk": "p", "sk": "s", "n": 1}, Condition.absent())
    with pytest.raises(ClientError) as caught:
        await table.put({"pk": "p", "sk": "s", "n": 2}, Condition.absent())
    assert error_code(caught.value) == "ConditionalCheckFailedException"
    with pytest.raises(ClientError):
        await table.put({"pk": "p", "sk": "s"}, Condition.equal(n=2, other=None))
    await table.put({"pk": "p", "sk": "s", "n": 3}, Condition.equal(n=1, other=None))
    changed = await table.update(("p", "s"), {"due_at": 7}, Condition.equal(n=3))
    assert changed == {"pk": "p", "sk": "s", "n": 3, "due_at": 7}
    with pytest.raises(ClientError):
        await table.update(("p", "s"), {"due_at": 8}, Condition.equal(n=1))
    with pytest.raises(ClientError):
        await table.delete(("p", "s"), Condition.equal(n=1))
    assert await table.put({"pk": "p", "sk": "s", "n": 4}) == changed
    assert await table.delete(("p", "s"), Condition.equal(n=4)) == {"pk": "p", "sk": "s", "n": 4}
    assert await table.delete(("p", "s")) is None


async def test_the_indexes_hold_the_rows_that_name_them(table: Table) -> None:
    """In order, from either end, below a value, with what they project."""
    for n in range(9):
        await table.put(
            {
                "pk": f"p{n}",
                "sk": "h",
                "list": "a//threads",
                "listed_at": f"{n:016d}",
                "due": "idle/1",
                "due_at": n * 10,
                "thread": f"t{n}",
                "tenant": "a",
                "user": "",
                "updated_at": n,
                "created_at": n,
                "messages": n,
                "body": b"not projected",
            }
        )
    await table.put({"pk": "p", "sk": "unborn"})
    newest = await table.query_index("by_scope", "a//threads", newest_first=True, limit=3)
    assert [item["thread"] for item in newest] == ["t8", "t7", "t6"]
    assert "body" not in newest[0]
    below = newest[-1]["listed_at"]
    more = await table.query_index(
        "by_scope", "a//threads", below=below, newest_first=True, limit=2
    )
    assert [item["thread"] for item in more] == ["t5", "t4"]
    due = await table.query_index("by_due", "idle/1", below=30, inclusive=True)
    assert [item["thread"] for item in due] == ["t0", "t1", "t2", "t3"]
    assert {item["tenant"] for item in due} == {"a"}
    even = await table.query_index(
        "by_due", "idle/1", limit=2, keep=lambda item: item["due_at"] % 20 == 0
    )
    assert [item["thread"] for item in even][:2] == ["t0", "t2"]
    assert await table.query_index("by_due", "idle/2") == []
