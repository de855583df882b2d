"""boto3 from an event loop: one table, its requests made in worker threads.

What the service leaves undone (unprocessed parts of a batch, throttling, transactions that met
another one) is sent again here, with back-off, jitter and a bound; pages are followed. Nothing
here decides: a condition that failed is the caller's to judge.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from chatkeep.errors import BackendUnavailable
from chatkeep_dynamodb.errors import cancelled, error_code, try_again
from chatkeep_dynamodb.items import (
    BATCH_ITEMS,
    Item,
    Key,
    check_size,
    from_wire,
    key_of,
    to_wire,
)

__all__ = ["Action", "ClientSource", "Condition", "Table"]

_GET_ITEMS = 100
_BATCHES_AT_ONCE = 4
_TRIES = 8
"""How often one request is sent: with the pauses between, about three seconds."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a write: the expression over ``#name`` and ``:name``, and the values."""

    expression: str
    names: Mapping[str, str]
    values: Mapping[str, Any]

    @classmethod
    def absent(cls) -> Condition:
        """There is no such row."""
        return cls("attribute_not_exists(#pk)", {"#pk": "pk"}, {})

    @classmethod
    def equal(cls, **wanted: Any) -> Condition:
        """Attributes have these values; None: the attribute is absent."""
        terms: list[str] = []
        for name, value in wanted.items():
            terms.append(
                f"attribute_not_exists(#{name})" if value is None else f"#{name} = :{name}"
            )
        return cls(
            " AND ".join(terms),
            {f"#{name}": name for name in wanted},
            {f":{name}": value for name, value in wanted.items() if value is not None},
        )

    def to_wire(self) -> dict[str, Any]:
        """As parameters of a request."""
        wire: dict[str, Any] = {
            "ConditionExpression": self.expression,
            "ExpressionAttributeNames": dict(self.names),
        }
        if self.values:
            wire["ExpressionAttributeValues"] = to_wire(self.values)
        return wire


@dataclass(frozen=True, slots=True)
class Action:
    """One row of a transaction. ``name`` is for messages; ``size`` in bytes, of what is put."""

    verb: str
    what: Mapping[str, Any]
    name: str
    condition: Condition | None = None
    size: int = 0

    @classmethod
    def put(cls, item: Item, name: str, condition: Condition | None = None) -> Action:
        """Write a row.

        Raises:
            RecordTooLarge: the service would refuse it.
        """
        return cls("Put", item, name, condition, check_size(item, name))

    @classmethod
    def delete(cls, key: Key, name: str, condition: Condition | None = None) -> Action:
        """Remove a row."""
        return cls("Delete", {"pk": key[0], "sk": key[1]}, name, condition)

    @classmethod
    def check(cls, key: Key, name: str, condition: Condition) -> Action:
        """Only the condition."""
        return cls("ConditionCheck", {"pk": key[0], "sk": key[1]}, name, condition)

    def to_wire(self, table: str) -> dict[str, Any]:
        """As a part of ``TransactItems``."""
        part: dict[str, Any] = {"TableName": table}
        part["Item" if self.verb == "Put" else "Key"] = to_wire(self.what)
        if self.condition is not None:
            part |= self.condition.to_wire()
            part["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
        return {self.verb: part}


class ClientSource:
    """Where the boto3 client comes from: given, or made on first use in a thread (that reads
    files); only one that was made is closed."""

    def __init__(
        self,
        client: Any = None,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        threads: int = 32,
        read_timeout: float = 10.0,
    ) -> None:
        self._client: Any = client
        self._owned = client is None
        self._options: dict[str, Any] = {"region_name": region, "endpoint_url": endpoint_url}
        self._read_timeout = read_timeout
        self._lock = threading.Lock()
        self.threads = threads
        if client is not None:
            self.threads = min(threads, client.meta.config.max_pool_connections)

    def get(self) -> Any:
        """The client. Blocking."""
        with self._lock:
            if self._client is None:
                config = Config(
                    retries={"mode": "standard", "total_max_attempts": 3},
                    max_pool_connections=self.threads,
                    connect_timeout=5,
                    read_timeout=self._read_timeout,
                    tcp_keepalive=True,
                    parameter_validation=False,
                    user_agent_extra="chatkeep",
                )
                session: Any = boto3.Session()
                self._client = session.client("dynamodb", config=config, **self._options)
            return self._client

    def close(self) -> None:
        """Close the client if it was made here. Blocking."""
        with self._lock:
            if self._owned and self._client is not None:
                self._client.close()


class Table:
    """The requests on one table."""

    def __init__(self, name: str, source: ClientSource) -> None:
        self.name = name
        self._source = source
        # A limiter belongs to the event loop that it was made in.
        self._limiters: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, anyio.CapacityLimiter
        ] = weakref.WeakKeyDictionary()

    @property
    def busy(self) -> int:
        """Requests that are being made."""
        return sum(limiter.borrowed_tokens for limiter in self._limiters.values())

    async def call(self, operation: str, **arguments: Any) -> Any:
        """One request, as boto3 takes it.

        Raises:
            ClientError, BotoCoreError: see :func:`chatkeep_dynamodb.errors.translate`.
        """
        loop = asyncio.get_running_loop()
        limiter = self._limiters.get(loop)
        if limiter is None:
            limiter = self._limiters[loop] = anyio.CapacityLimiter(self._source.threads)

        def request() -> Any:
            return getattr(self._source.get(), operation)(**arguments)

        # Abandoned when the call's time is up: the thread ends with the client's own timeout.
        return await anyio.to_thread.run_sync(request, limiter=limiter, abandon_on_cancel=True)

    async def close(self) -> None:
        """Close the client if it is ours."""
        await anyio.to_thread.run_sync(self._source.close)

    # -- reads ------------------------------------------------------------------------

    async def get(self, key: Key, names: Sequence[str] = ()) -> Item | None:
        """A row, strongly consistent; only the attributes ``names`` if there are some."""
        answer = await self._patiently(
            "get_item",
            TableName=self.name,
            Key=to_wire({"pk": key[0], "sk": key[1]}),
            ConsistentRead=True,
            **_projection(names),
        )
        return from_wire(answer["Item"]) if "Item" in answer else None

    async def get_many(self, keys: Iterable[Key], names: Sequence[str] = ()) -> dict[Key, Item]:
        """The rows that there are, strongly consistent."""
        wanted = list(dict.fromkeys(keys))
        if len(wanted) == 1:
            item = await self.get(wanted[0], names)
            return {} if item is None else {wanted[0]: item}
        if not wanted:
            return {}
        if names:
            names = list(dict.fromkeys(("pk", "sk", *names)))
        parts = [wanted[i : i + _GET_ITEMS] for i in range(0, len(wanted), _GET_ITEMS)]
        found = await gather([functools.partial(self._get_part, part, names) for part in parts])
        return {key_of(item): item for items in found for item in items}

    async def _get_part(self, keys: Sequence[Key], names: Sequence[str]) -> list[Item]:
        found: list[Item] = []
        rest: Any = [to_wire({"pk": pk, "sk": sk}) for pk, sk in keys]
        retry = _Patience("BatchGetItem")
        while rest:
            request = {"Keys": rest, "ConsistentRead": True, **_projection(names)}
            answer = await self._patiently("batch_get_item", RequestItems={self.name: request})
            found += map(from_wire, answer["Responses"].get(self.name, ()))
            left = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", [])
            if left:
                await retry.pause(progress=len(left) < len(rest))
            rest = left
        return found

    async def query(
        self,
        pk: str,
        low: str,
        high: str,
        *,
        names: Sequence[str] = (),
        limit: int | None = None,
    ) -> list[Item]:
        """The rows of a partition from ``low`` to ``high``, in order, strongly consistent; the
        first ``limit`` of them."""
        return await self._query(
            limit,
            None,
            ConsistentRead=True,
            KeyConditionExpression="pk = :pk AND sk BETWEEN :low AND :high",
            ExpressionAttributeValues=to_wire({":pk": pk, ":low": low, ":high": high}),
            **_projection(names),
        )

    async def query_index(
        self,
        index: str,
        partition: str,
        *,
        below: int | str | None = None,
        inclusive: bool = False,
        newest_first: bool = False,
        limit: int | None = None,
        keep: Callable[[Item], bool] | None = None,
    ) -> list[Item]:
        """The rows of an index that are sorted below ``below``: at most ``limit`` of those that
        ``keep`` takes. Indexes follow the table by a moment."""
        hash_name, range_name = ("list", "listed_at") if index == "by_scope" else ("due", "due_at")
        expression = "#h = :h"
        names = {"#h": hash_name}
        values: dict[str, Any] = {":h": partition}
        if below is not None:
            expression += f" AND #r {'<=' if inclusive else '<'} :r"
            names["#r"] = range_name
            values[":r"] = below
        return await self._query(
            limit,
            keep,
            IndexName=index,
            KeyConditionExpression=expression,
            ExpressionAttributeNames=names,
            ExpressionAttributeValues=to_wire(values),
            ScanIndexForward=not newest_first,
        )

    async def due_page(
        self, partition: str, moment: int, *, inclusive: bool, limit: int, start: Any = None
    ) -> tuple[list[Item], Any]:
        """The first ``limit`` rows of a partition of the index ``by_due``, up to ``moment``, behind
        ``start``; and the ``start`` of the page that follows, None if there is none."""
        arguments: dict[str, Any] = {} if start is None else {"ExclusiveStartKey": start}
        answer = await self._patiently(
            "query",
            TableName=self.name,
            IndexName="by_due",
            KeyConditionExpression=f"#h = :h AND #r {'<=' if inclusive else '<'} :r",
            ExpressionAttributeNames={"#h": "due", "#r": "due_at"},
            ExpressionAttributeValues=to_wire({":h": partition, ":r": moment}),
            Limit=limit,
            **arguments,
        )
        return list(map(from_wire, answer["Items"])), answer.get("LastEvaluatedKey")

    async def _query(
        self, limit: int | None, keep: Callable[[Item], bool] | None, **arguments: Any
    ) -> list[Item]:
        found: list[Item] = []
        if limit is not None:
            arguments["Limit"] = limit
        while True:
            answer = await self._patiently("query", TableName=self.name, **arguments)
            items = map(from_wire, answer["Items"])
            found += items if keep is None else filter(keep, items)
            more = answer.get("LastEvaluatedKey")
            if more is None or (limit is not None and len(found) >= limit):
                return found
            arguments["ExclusiveStartKey"] = more

    # -- writes -----------------------------------------------------------------------

    async def put(self, item: Item, condition: Condition | None = None) -> Item | None:
        """Write a row; what stood there.

        Raises:
            ClientError: ``ConditionalCheckFailedException``, with the row as it is.
            RecordTooLarge: the service would refuse it.
        """
        check_size(item, f"{item.get('kind')} {item['sk']!r}")
        answer = await self._patiently(
            "put_item",
            TableName=self.name,
            Item=to_wire(item),
            ReturnValues="ALL_OLD",
            **_guard(condition),
        )
        return from_wire(answer["Attributes"]) if answer.get("Attributes") else None

    async def delete_if(self, key: Key, condition: Condition) -> None:
        """Remove a row that meets the condition; another one stays."""
        try:
            await self.delete(key, condition)
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise

    async def delete(self, key: Key, condition: Condition | None = None) -> Item | None:
        """Remove a row; what it was."""
        answer = await self._patiently(
            "delete_item",
            TableName=self.name,
            Key=to_wire({"pk": key[0], "sk": key[1]}),
            ReturnValues="ALL_OLD",
            **_guard(condition),
        )
        return from_wire(answer["Attributes"]) if answer.get("Attributes") else None

    async def update(self, key: Key, changes: Mapping[str, Any], condition: Condition) -> Item:
        """Set attributes of a row; the row then."""
        guard = _guard(condition)
        names = {f"#set_{name}": name for name in changes}
        values = {f":set_{name}": value for name, value in changes.items()}
        guard["ExpressionAttributeNames"] = {**guard["ExpressionAttributeNames"], **names}
        given = guard.get("ExpressionAttributeValues", {})
        answer = await self._patiently(
            "update_item",
            TableName=self.name,
            Key=to_wire({"pk": key[0], "sk": key[1]}),
            UpdateExpression="SET " + ", ".join(f"#set_{n} = :set_{n}" for n in changes),
            ReturnValues="ALL_NEW",
            **{**guard, "ExpressionAttributeValues": {**given, **to_wire(values)}},
        )
        return from_wire(answer["Attributes"])

    async def write_many(self, puts: Sequence[Item] = (), deletes: Iterable[Key] = ()) -> None:
        """Write and remove rows, 25 a request, several requests at once. Not atomic.

        Raises:
            BackendUnavailable: the service left some undone until the bound.
        """
        requests: list[dict[str, Any]] = []
        for item in puts:
            check_size(item, f"{item.get('kind')} {item['sk']!r}")
            requests.append({"PutRequest": {"Item": to_wire(item)}})
        requests += [
            {"DeleteRequest": {"Key": to_wire({"pk": pk, "sk": sk})}} for pk, sk in deletes
        ]
        parts = [requests[i : i + BATCH_ITEMS] for i in range(0, len(requests), BATCH_ITEMS)]
        await gather([functools.partial(self._write_part, part) for part in parts])

    async def _write_part(self, part: list[dict[str, Any]]) -> None:
        retry = _Patience("BatchWriteItem")
        while part:
            answer = await self._patiently("batch_write_item", RequestItems={self.name: part})
            left = answer.get("UnprocessedItems", {}).get(self.name, [])
            if left:
                await retry.pause(progress=len(left) < len(part))
            part = left

    async def transact(self, actions: Sequence[Action]) -> None:
        """All actions, or none. Sent again with the same token after a collision: the service
        applies one token once, so neither our retries nor the client's do it twice. Nobody else
        draws that token: two processes that ask for the same at once are not taken for one.

        Raises:
            Cancelled: a condition failed; it holds the rows as they are.
        """
        items = [action.to_wire(self.name) for action in actions]
        names = [action.name for action in actions]
        retry = _Patience("TransactWriteItems")
        token = str(uuid.uuid4())
        while True:
            try:
                await self._patiently(
                    "transact_write_items", TransactItems=items, ClientRequestToken=token
                )
            except ClientError as error:
                if error_code(error) != "TransactionCanceledException":
                    raise
                _, known = cancelled(error, names)
                if known is not None:
                    raise known from error
                await retry.pause(progress=False, cause=error)
            else:
                return

    async def _patiently(self, operation: str, **arguments: Any) -> Any:
        """A request, again while the service is throttling or the row is in a transaction."""
        retry = _Patience(operation)
        while True:
            try:
                return await self.call(operation, **arguments)
            except ClientError as error:
                if not try_again(error):
                    raise
                await retry.pause(progress=False, cause=error)


class _Patience:
    """Pauses that grow, until the bound."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._tries = 1

    async def pause(self, *, progress: bool, cause: Exception | None = None) -> None:
        """Wait a moment.

        Raises:
            BackendUnavailable: it was tried often enough without progress.
        """
        self._tries = 1 if progress else self._tries + 1
        if self._tries > _TRIES:
            why = str(cause) if cause is not None else "the service left a part undone"
            raise BackendUnavailable(
                f"{self._operation} was sent {_TRIES} times in vain: {why}"
            ) from cause
        await asyncio.sleep(min(1.0, 0.02 * 2**self._tries) * random.random())


async def gather(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results in order, a few at once; all have ended when the first error is raised."""
    if len(works) == 1:
        return [await works[0]()]
    gate = asyncio.Semaphore(_BATCHES_AT_ONCE)

    async def one(work: Callable[[], Any]) -> Any:
        async with gate:
            return await work()

    done = await asyncio.gather(*map(one, works), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return done


def _guard(condition: Condition | None) -> dict[str, Any]:
    if condition is None:
        return {}
    return {**condition.to_wire(), "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}


def _projection(names: Sequence[str]) -> dict[str, Any]:
    if not names:
        return {}
    return {
        "ProjectionExpression": ", ".join(f"#p{i}" for i in range(len(names))),
        "ExpressionAttributeNames": {f"#p{i}": name for i, name in enumerate(names)},
    }
