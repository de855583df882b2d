"""moto's DynamoDB behind an HTTP server that takes one request at a time.

Run as a script (``python _moto.py PORT``). moto's own server is not safe under threads: it loses
transactions and shows halves of them. Added to it is what the service does and moto does not:
idempotency tokens of transactions, their limit of 4 MB, and 25 rows a batch. And what makes it
slow is taken out: it copies a table for each transaction, and sorts it for each query.
"""

from __future__ import annotations

import base64
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from moto.core.request import Request
from moto.dynamodb.models.dynamo_type import DynamoType, Item, LimitedSizeDict
from moto.dynamodb.models.table import Table
from moto.dynamodb.responses import DynamoHandler

_BATCH_ITEMS = 25
_TRANSACTION_BYTES = 4 * 1024 * 1024
_TOKEN_SECONDS = 600.0


class Reply(NamedTuple):
    """Status and body."""

    status: int
    body: bytes


class _Applied(NamedTuple):
    """A transaction that was applied under a token."""

    at: float
    request: str
    reply: Reply


class Service:
    """The requests, one by one."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._tokens: dict[str, _Applied] = {}

    def answer(self, headers: dict[str, str], body: bytes) -> Reply:
        """What the service answers to one request."""
        operation = headers.get("X-Amz-Target", "").partition(".")[2]
        with self._turn:
            if operation == "BatchWriteItem":
                return _check_batch(json.loads(body)) or _call(headers, body)
            if operation == "TransactWriteItems":
                return self._transact(headers, body)
            return _call(headers, body)

    def _transact(self, headers: dict[str, str], body: bytes) -> Reply:
        request = json.loads(body)
        size = sum(_size(item["Put"]["Item"]) for item in request["TransactItems"] if "Put" in item)
        if size > _TRANSACTION_BYTES:
            return _refusal("Collection size in bytes exceeded maximum allowed 4194304")
        token = request.pop("ClientRequestToken", None)
        parts = [part for item in request["TransactItems"] for part in item.values()]
        _touched[:] = [part.get("Item") or part["Key"] for part in parts]
        same = json.dumps(request, sort_keys=True)
        known = self._tokens.get(token)
        if known is not None and time.monotonic() - known.at < _TOKEN_SECONDS:
            if known.request == same:
                return known.reply
            return _refusal(
                "the token was used for another request", "IdempotentParameterMismatchException"
            )
        reply = _call(headers, body)
        if token is not None and reply.status == 200:
            self._tokens[token] = _Applied(time.monotonic(), same, reply)
        return reply


def _call(headers: dict[str, str], body: bytes) -> Reply:
    url = "http://dynamodb.us-east-1.amazonaws.com/"
    request = Request.from_primitives("POST", url, headers, body)
    status, _, answer = DynamoHandler.dispatch(request, url, request.headers)
    return Reply(int(status), answer.encode() if isinstance(answer, str) else answer)


def _check_batch(request: dict[str, Any]) -> Reply | None:
    count = sum(len(part) for part in request["RequestItems"].values())
    if 1 <= count <= _BATCH_ITEMS:
        return None
    return _refusal(f"a batch has 1 to {_BATCH_ITEMS} requests, not {count}")


def _refusal(message: str, kind: str = "ValidationException") -> Reply:
    body = {"__type": f"com.amazonaws.dynamodb.v20120810#{kind}", "message": message}
    return Reply(400, json.dumps(body).encode())


def _size(item: dict[str, Any]) -> int:
    """Bytes of a row of texts, numbers, bytes and bools."""
    size = 0
    for name, typed in item.items():
        ((kind, value),) = typed.items()
        size += len(name.encode())
        size += len(base64.b64decode(value)) if kind == "B" else len(str(value).encode())
    return size


_touched: list[dict[str, Any]] = []
"""Keys of the rows in the transaction that is under way."""


def _snapshot(table: Any, memo: dict[int, Any]) -> Any:
    """What moto keeps of a table to undo a transaction: the partitions that it touches. A row is
    replaced, not changed, by all that is in our transactions."""
    copy: Any = object.__new__(table.__class__)
    copy.__dict__.update(table.__dict__)
    rows = table.items
    copy.items = type(rows)(rows.default_factory, rows)
    for keys in _touched:
        key = DynamoType(keys[table.hash_key_attr])
        if key in rows:
            copy.items[key] = dict(rows[key])
    memo[id(table)] = copy
    return copy


def _shallow(item: Any, memo: dict[int, Any]) -> Any:
    """A copy of a row that shares its values, which nothing changes in place."""
    copy: Any = object.__new__(item.__class__)
    copy.__dict__.update(item.__dict__)
    copy.attrs = LimitedSizeDict.__new__(LimitedSizeDict)
    values: Any = dict
    values.update(copy.attrs, item.attrs)  # past its check of sizes, one for each value
    memo[id(item)] = copy
    return copy


_query, _all_items = Table.query, Table.all_items


def _of_index(table: Any, index: str, arguments: Any, options: Any) -> list[Item]:
    """Rows of a partition of an index; with a limit, the first ones and one more."""
    schema = next(i.schema for i in table.global_indexes if i.name == index)
    hash_name, range_name = (key["AttributeName"] for key in schema)
    ((_, wanted),) = options["hash_key_conditions"]
    conditions: list[Any] = options.get("range_key_conditions") or []
    rows = [
        item
        for part in table.items.values()
        for item in part.values()
        if hash_name in item.attrs
        and range_name in item.attrs
        and item.attrs[hash_name] == wanted
        and all(item.attrs[name].compare(how, values) for name, how, values in conditions)
    ]
    _, _, limit, start, forward, *_ = arguments
    if limit is not None and start is None and limit < len(rows):
        rows.sort(key=lambda item: (item.attrs[range_name], item.hash_key, item.range_key))
        rows = rows[: limit + 1] if forward else rows[-limit - 1 :]
    return rows


def _narrow_query(table: Any, hash_key: Any, *arguments: Any, **options: Any) -> Any:
    """moto sorts all rows of a table for each query, and then looks for those of the partition."""
    index = arguments[6] if len(arguments) > 6 else options.get("index_name")
    if index is None:
        table.narrowed = sorted(
            table.items.get(hash_key, {}).values(), key=lambda item: item.range_key
        )
    else:
        table.narrowed = _of_index(table, index, arguments, options)
    try:
        return _query(table, hash_key, *arguments, **options)
    finally:
        table.narrowed = None


def _narrowed(table: Any) -> list[Item]:
    found = getattr(table, "narrowed", None)
    return _all_items(table) if found is None else found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    service: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = self.service.answer(dict(self.headers.items()), body)
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    """Never returns."""
    table: Any = Table
    item: Any = Item
    table.__deepcopy__, table.query, table.all_items = _snapshot, _narrow_query, _narrowed
    item.__deepcopy__ = _shallow
    _Handler.service = Service()
    socket.setdefaulttimeout(None)
    _Server(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
