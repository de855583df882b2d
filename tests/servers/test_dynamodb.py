"""The DynamoDB test servers do what the suites on them rely on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from chatkeep_dynamodb import table_definition
from servers.dynamodb import DynaliteProcess, DynamoDB, MotoProcess


def put(table: str, name: str, body: bytes = b"", more: Any = None) -> dict[str, Any]:
    item = {"pk": {"S": "p"}, "sk": {"S": name}, "body": {"B": body}}
    return {"Put": {"TableName": table, "Item": item, **(more or {})}}


def code(error: ClientError) -> str:
    response: Any = error.response
    return str(response["Error"]["Code"])


@pytest.fixture
def made(dynamodb: DynamoDB) -> Iterator[tuple[Any, str]]:
    """A client and a table."""
    with dynamodb.table() as table:
        client = table.client(max_pool_connections=32)
        client.create_table(**table_definition(table.name))
        yield client, table.name
        client.close()


def test_a_transaction_is_applied_once_for_a_token(made: tuple[Any, str]) -> None:
    """And a token belongs to one request."""
    client, table = made
    absent = {"ConditionExpression": "attribute_not_exists(pk)"}
    once: list[Any] = [put(table, "a", more=absent), put(table, "b", more=absent)]
    for _ in range(2):
        client.transact_write_items(TransactItems=once, ClientRequestToken="t")
    with pytest.raises(ClientError) as caught:
        client.transact_write_items(TransactItems=[put(table, "c")], ClientRequestToken="t")
    assert code(caught.value) == "IdempotentParameterMismatchException"
    with pytest.raises(ClientError) as caught:
        client.transact_write_items(TransactItems=once, ClientRequestToken="other")
    assert code(caught.value) == "TransactionCanceledException"


def test_a_refused_transaction_leaves_everything_as_it_was(made: tuple[Any, str]) -> None:
    """Rows that it would have replaced, removed and added; the reason brings the row that is."""
    client, table = made
    client.transact_write_items(TransactItems=[put(table, "a", b"1"), put(table, "b", b"1")])
    before = client.scan(TableName=table)["Items"]
    guard = {
        "ConditionExpression": "attribute_not_exists(pk)",
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    removed = {"Delete": {"TableName": table, "Key": {"pk": {"S": "p"}, "sk": {"S": "b"}}}}
    with pytest.raises(ClientError) as caught:
        client.transact_write_items(
            TransactItems=[put(table, "c"), removed, put(table, "a", b"2", guard)]
        )
    response: Any = caught.value.response
    reasons = response["CancellationReasons"]
    assert [reason["Code"] for reason in reasons] == ["None", "None", "ConditionalCheckFailed"]
    assert reasons[2]["Item"]["body"] == {"B": b"1"}
    assert client.scan(TableName=table)["Items"] == before


def test_limits_that_moto_alone_does_not_have(made: tuple[Any, str]) -> None:
    client, table = made
    rows = [put(table, f"{n}")["Put"]["Item"] for n in range(26)]
    requests: list[Any] = [{"PutRequest": {"Item": row}} for row in rows]
    with pytest.raises(ClientError, match="not 26"):
        client.batch_write_item(RequestItems={table: requests})
    client.batch_write_item(RequestItems={table: requests[:25]})
    large: list[Any] = [put(table, f"{n}", b"x" * 390_000) for n in range(11)]
    with pytest.raises(ClientError, match="4194304"):
        client.transact_write_items(TransactItems=large)
    client.transact_write_items(TransactItems=large[:10])


def test_transactions_under_threads_are_whole(made: tuple[Any, str]) -> None:
    """One request at a time: sixteen writers, of each version one."""
    client, table = made
    won: list[int] = []

    def write(name: int) -> None:
        for version in range(5):
            guard = {"ConditionExpression": "attribute_not_exists(pk)"}
            rows = [put(table, f"v{version}", more=guard), put(table, f"{name}-{version}")]
            try:
                client.transact_write_items(TransactItems=rows)
            except ClientError:
                continue
            won.append(version)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(5))
    assert client.scan(TableName=table)["Count"] == 10


def test_moto_comes_back_empty(own_dynamodb: MotoProcess) -> None:
    client = own_dynamodb.client()
    client.create_table(**table_definition("chats"))
    own_dynamodb.kill()
    own_dynamodb.start()
    assert client.list_tables()["TableNames"] == []
    client.close()


def test_dynalite_knows_no_transactions(dynalite: DynaliteProcess) -> None:
    """So the suites that need them do not run on it."""
    client = dynalite.client()
    with pytest.raises(ClientError) as caught:
        client.transact_write_items(TransactItems=[put("table", "a")])
    assert code(caught.value) == "UnknownOperationException"
    client.close()
