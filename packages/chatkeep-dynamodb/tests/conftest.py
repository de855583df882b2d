"""Fixtures: a persistence on a test server, with a layer under boto3 that counts and breaks."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError

from chatkeep import Persistence
from chatkeep.rules import new_commit_id
from chatkeep.stores import Splice, TurnCommit
from chatkeep_dynamodb import dynamodb_persistence
from chatkeep_dynamodb.backend import DynamoDBBackend
from chatkeep_dynamodb.items import Item, from_wire
from servers.dynamodb import DynamoTable

Open = Callable[..., Persistence]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class _Raw:
    """What a fabricated answer is read from."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._body


class Killed(BaseException):
    """This process is gone."""


Fault = Callable[["Wire", Any, str], Any]


class Wire:
    """Stands where a boto3 client sends its requests: notes each, and breaks those it is told to.

    Faults are used up one by one, each by the next request of its operation.
    """

    def __init__(self, client: Any) -> None:
        self.inner = client._endpoint.http_session
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.bytes_sent = 0
        self.bytes_received = 0
        self.in_flight = 0
        self.most_at_once = 0
        self.faults: list[tuple[str, Fault]] = []
        self.always: dict[str, Fault] = {}
        self._fatal: tuple[str, ...] = ()
        self._passing = 0
        self._dead = False
        self._lock = threading.Lock()
        client._endpoint.http_session = self

    # -- what was sent ----------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """Requests by operation."""
        return Counter(operation for operation, _ in self.sent)

    def clear(self) -> None:
        self.sent.clear()
        self.bytes_sent = self.bytes_received = 0

    # -- what is to break -------------------------------------------------------------

    def refuse(self, operation: str, code: str, *, times: int = 1, status: int = 400) -> None:
        """Answer with an error; the request does not arrive."""

        def fault(_wire: Wire, request: Any, _operation: str) -> Any:
            return refusal(request, code, status)

        self.faults += [(operation, fault)] * times

    def cancel(self, reasons: list[str | None], *, times: int = 1) -> None:
        """A transaction is cancelled, one reason for each of its rows (the last for the rest)."""

        def fault(_wire: Wire, request: Any, _operation: str) -> Any:
            count = len(json.loads(request.body)["TransactItems"])
            codes = [*reasons, *[reasons[-1]] * count][:count]
            told = [{"Code": code or "None", "Message": f"injected {code}"} for code in codes]
            return refusal(request, "TransactionCanceledException", 400, CancellationReasons=told)

        self.faults += [("TransactWriteItems", fault)] * times

    def lose_reply(self, operation: str, *, times: int = 1) -> None:
        """The request is applied; its sender sees a closed connection."""

        def fault(wire: Wire, request: Any, _operation: str) -> Any:
            wire.inner.send(request)
            raise ConnectionClosedError(endpoint_url=request.url)

        self.faults += [(operation, fault)] * times

    def lose_request(self, operation: str, *, times: int = 1) -> None:
        """The request never arrives; its sender sees a closed connection."""

        def fault(_wire: Wire, request: Any, _operation: str) -> Any:
            raise ConnectionClosedError(endpoint_url=request.url)

        self.faults += [(operation, fault)] * times

    def leave_undone(self, operation: str, count: int, *, times: int = 1) -> None:
        """The service leaves ``count`` parts of a batch undone."""

        def fault(wire: Wire, request: Any, _operation: str) -> Any:
            body = json.loads(request.body)
            ((table, part),) = body["RequestItems"].items()
            parts = part["Keys"] if operation == "BatchGetItem" else part
            rest = [parts.pop() for _ in range(min(count, len(parts)))]
            undone: Any = {**part, "Keys": rest} if operation == "BatchGetItem" else rest
            name = "UnprocessedKeys" if operation == "BatchGetItem" else "UnprocessedItems"
            if not parts:
                return answer(request, {name: {table: undone}, "Responses": {}})
            request.body = json.dumps(body).encode()
            request.headers["Content-Length"] = str(len(request.body))
            found = json.loads(wire.inner.send(request).content)
            return answer(request, {**found, name: {table: undone}})

        self.faults += [(operation, fault)] * times

    def hold(self, operation: str) -> tuple[threading.Event, threading.Event]:
        """The next request of an operation waits on its way: (it has come, let it go)."""
        come, go = threading.Event(), threading.Event()

        def fault(wire: Wire, request: Any, _operation: str) -> Any:
            come.set()
            go.wait(30)
            return wire.inner.send(request)

        self.faults.append((operation, fault))
        return come, go

    def rewrite(self, operation: str, change: Callable[[Any], Any], *, times: int = 1) -> None:
        """Change what the service answers."""

        def fault(wire: Wire, request: Any, _operation: str) -> Any:
            return answer(request, change(json.loads(wire.inner.send(request).content)))

        self.faults += [(operation, fault)] * times

    def die(self, *operations: str, after: int) -> None:
        """The process ends at the next request of these, ``after`` of them having passed."""
        self._fatal, self._passing = operations, after

    # -- boto3's side -----------------------------------------------------------------

    def send(self, request: Any) -> Any:
        target = request.headers["X-Amz-Target"]
        name = target.decode() if isinstance(target, bytes) else target
        operation = name.partition(".")[2]
        with self._lock:
            if operation in self._fatal:
                self._dead = self._dead or self._passing == 0
                self._passing -= 1
            if self._dead:
                raise Killed
            self.sent.append((operation, json.loads(request.body)))
            self.bytes_sent += len(request.body)
            self.in_flight += 1
            self.most_at_once = max(self.most_at_once, self.in_flight)
            fault = self.always.get(operation)
            for known in self.faults:
                if known[0] == operation:
                    self.faults.remove(known)
                    fault = known[1]
                    break
        try:
            got = self.inner.send(request) if fault is None else fault(self, request, operation)
        finally:
            with self._lock:
                self.in_flight -= 1
        with self._lock:
            self.bytes_received += len(got.content)
        return got

    def close(self) -> None:
        self.inner.close()


def answer(request: Any, body: Any, status: int = 200) -> Any:
    headers = {"Content-Type": "application/x-amz-json-1.0"}
    return AWSResponse(request.url, status, headers, _Raw(json.dumps(body).encode()))


def refusal(request: Any, code: str, status: int, **more: Any) -> Any:
    kind = f"com.amazonaws.dynamodb.v20120810#{code}"
    return answer(request, {"__type": kind, "message": f"injected {code}", **more}, status)


class Tools:
    """What tests do to a persistence behind its back."""

    Killed = Killed

    @staticmethod
    def backend(persistence: Persistence) -> DynamoDBBackend:
        return cast("DynamoDBBackend", persistence.backends[0])

    def wire(self, persistence: Persistence) -> Wire:
        """The layer under the client of a persistence."""
        client = self.backend(persistence)._source.get()
        session = client._endpoint.http_session
        return session if isinstance(session, Wire) else Wire(client)

    @staticmethod
    def said(thread_id: str, message_id: str, *, expected: str | None = None, keep: int = 0) -> Any:
        """A commit of one user message."""
        tail: Any = [{"id": message_id, "role": "user", "content": message_id}]
        return TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread_id,
            splice=Splice(keep_through=keep, tail=tail, expected=expected),
        )

    @staticmethod
    def rows(table: DynamoTable) -> list[Item]:
        """Every row of a table, by key."""
        client = table.client()
        pages = client.get_paginator("scan").paginate(TableName=table.name, ConsistentRead=True)
        found = [from_wire(item) for page in pages for item in page["Items"]]
        client.close()
        return sorted(found, key=lambda item: (item["pk"], item["sk"]))

    @staticmethod
    @contextmanager
    def raw(table: DynamoTable) -> Iterator[Any]:
        """A client of its own."""
        client = table.client()
        try:
            yield client
        finally:
            client.close()


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture
def opened(dynamodb_table: DynamoTable) -> Iterator[Open]:
    """Opens a persistence on the test's table, with a client of its own each time:
    ``opened(timeout=1)``. Options that begin with ``client_`` go to the client's configuration."""
    clients: list[Any] = []

    def open_(**options: Any) -> Persistence:
        own = {k.removeprefix("client_"): v for k, v in options.items() if k.startswith("client_")}
        given = {k: v for k, v in options.items() if not k.startswith("client_")}
        config = {"max_pool_connections": 32, "retries": {"total_max_attempts": 1}, **own}
        client = dynamodb_table.client(**config)
        clients.append(client)
        return dynamodb_persistence(dynamodb_table.name, client=client, **given)

    yield open_
    for client in clients:
        client.close()


@pytest.fixture
async def persistence(opened: Open, tools: Tools) -> AsyncIterator[Persistence]:
    """An empty persistence whose client retries nothing; no request may be under way when the
    test is over."""
    async with opened() as persistence:
        await persistence.migrate()
        yield persistence
        assert tools.backend(persistence)._table.busy == 0


@pytest.fixture
def wire(persistence: Persistence, tools: Tools) -> Iterator[Wire]:
    """The layer under its client; every fault that was asked for must have struck."""
    wire = tools.wire(persistence)
    yield wire
    assert wire.faults == []
