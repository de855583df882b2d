"""The table: how it is made, and whether one is what this package reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from botocore.exceptions import ClientError

from chatkeep.errors import BackendUnavailable, SchemaOutOfDate
from chatkeep_dynamodb.client import Table
from chatkeep_dynamodb.errors import error_code

__all__ = ["BY_DUE", "BY_SCOPE", "EXPIRES_AT", "create_table", "require_table", "table_definition"]

BY_SCOPE, BY_DUE = "by_scope", "by_due"
EXPIRES_AT = "expires_at"
"""Attribute of the time to live: of the rows of a draft in chunks, and nothing else."""

_POLLS = 120
_POLL_SECONDS = 0.5


def table_definition(name: str) -> dict[str, Any]:
    """The arguments of ``CreateTable``: to be reviewed, or for a tool that makes tables."""

    def key(partition: str, sort: str) -> list[dict[str, str]]:
        return [
            {"AttributeName": partition, "KeyType": "HASH"},
            {"AttributeName": sort, "KeyType": "RANGE"},
        ]

    def index(name: str, partition: str, sort: str, *projected: str) -> dict[str, Any]:
        projection = {"ProjectionType": "INCLUDE", "NonKeyAttributes": list(projected)}
        return {"IndexName": name, "KeySchema": key(partition, sort), "Projection": projection}

    kinds = {"pk": "S", "sk": "S", "list": "S", "listed_at": "S", "due": "S", "due_at": "N"}
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [
            {"AttributeName": attribute, "AttributeType": kind} for attribute, kind in kinds.items()
        ],
        "KeySchema": key("pk", "sk"),
        "GlobalSecondaryIndexes": [
            index(BY_SCOPE, "list", "listed_at", "thread", "created_at", "updated_at", "messages"),
            index(BY_DUE, "due", "due_at", "tenant", "user", "thread"),
        ],
    }


def definition_text(name: str) -> str:
    """The same as JSON, for ``aws dynamodb create-table --cli-input-json``."""
    return json.dumps(table_definition(name), indent=2) + "\n"


async def create_table(table: Table) -> None:
    """Make the table if there is none, wait until it can be used, switch its time to live on.
    Many may do so at once.

    Raises:
        SchemaOutOfDate: there is a table of another shape.
    """
    if await _described(table) is None:
        try:
            await table.call("create_table", **table_definition(table.name))
        except ClientError as error:
            if error_code(error) != "ResourceInUseException":
                raise  # else somebody was faster
    for _ in range(_POLLS):
        found = await _described(table)
        if found is not None and _active(found):
            break
        await asyncio.sleep(_POLL_SECONDS)
    else:
        raise BackendUnavailable(f"table {table.name!r} is still not active")
    _check(table.name, found)
    await _expire(table)


async def require_table(table: Table) -> None:
    """Refuse a table that is missing or of another shape.

    Raises:
        SchemaOutOfDate: says which, and what to run.
    """
    found = await _described(table)
    if found is None:
        raise SchemaOutOfDate(
            f"there is no table {table.name!r}: run `chatkeep migrate URL` or "
            "`await persistence.migrate()` with a role that may create it"
        )
    _check(table.name, found)


async def has_table(table: Table) -> bool:
    """Whether there is one that can be used, of the right shape."""
    found = await _described(table)
    if found is None:
        return False
    _check(table.name, found)
    return _active(found)


async def _described(table: Table) -> dict[str, Any] | None:
    try:
        answer: Any = await table.call("describe_table", TableName=table.name)
    except ClientError as error:
        if error_code(error) == "ResourceNotFoundException":
            return None
        raise
    found: dict[str, Any] = answer["Table"]
    return found


def _active(found: dict[str, Any]) -> bool:
    indexes: list[Any] = found.get("GlobalSecondaryIndexes", [])
    states = [found["TableStatus"], *(index.get("IndexStatus", "ACTIVE") for index in indexes)]
    return all(state in {"ACTIVE", "UPDATING"} for state in states)


def _check(name: str, found: dict[str, Any]) -> None:
    wanted = table_definition(name)

    def shape(definition: dict[str, Any]) -> dict[str, Any]:
        indexes: list[Any] = definition.get("GlobalSecondaryIndexes", [])
        return {"the table": definition["KeySchema"]} | {
            index["IndexName"]: index["KeySchema"] for index in indexes
        }

    there = shape(found)
    wrong = [what for what, keys in shape(wanted).items() if there.get(what) != keys]
    if wrong:
        raise SchemaOutOfDate(
            f"table {name!r} is not one of chatkeep's: {', '.join(wrong)} has other keys, or is "
            "missing"
        )


async def _expire(table: Table) -> None:
    answer: Any = await table.call("describe_time_to_live", TableName=table.name)
    state = answer.get("TimeToLiveDescription", {}).get("TimeToLiveStatus")
    if state in {"ENABLED", "ENABLING"}:
        return
    try:
        await table.call(
            "update_time_to_live",
            TableName=table.name,
            TimeToLiveSpecification={"Enabled": True, "AttributeName": EXPIRES_AT},
        )
    except ClientError as error:
        # Somebody was faster: it is on, or on its way.
        if error_code(error) != "ValidationException":
            raise
