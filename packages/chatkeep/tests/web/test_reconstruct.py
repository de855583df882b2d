"""The page load: shapes, refusals, and stores that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from chatkeep import memory_persistence
from chatkeep.backends import Persistence
from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CorruptRecord,
    SchemaOutOfDate,
    StoreClosed,
)
from chatkeep.web import reconstruct_chat
from chatkeep.web._reconstruct import _limit

from .conftest import Answer, request

pytestmark = pytest.mark.anyio
MESSAGES: list[Any] = [
    {"id": f"m{i}", "role": "user" if i % 2 == 0 else "assistant", "content": f"text {i}"}
    for i in range(6)
]


@pytest.fixture
async def persistence() -> Persistence:
    bag = memory_persistence()
    assert bag.stores.messages is not None
    await bag.stores.messages.save_thread("t", MESSAGES)
    return bag


async def load(persistence: Persistence, query: dict[str, str], **options: Any) -> Answer:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = await reconstruct_chat(persistence, Request(scope, receive), **options)
        await response(scope, receive, send)

    return await request(app, query=query)


async def test_a_thread_is_its_messages_and_who_is_at_work(persistence: Persistence) -> None:
    answer = await load(persistence, {"threadId": "t"})
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "application/json"
    assert [m["id"] for m in answer.json["messages"]] == [m["id"] for m in MESSAGES]
    assert all("parts" in m for m in answer.json["messages"])
    assert (answer.json["activeRun"], answer.json["interrupts"]) == (None, None)
    assert answer.json["seen"] == 6
    assert "page" not in answer.json


@pytest.mark.parametrize("query", [{}, {"threadId": ""}, {"threadId": "unknown"}])
async def test_no_thread_is_an_empty_chat(persistence: Persistence, query: dict[str, str]) -> None:
    """Never a 404: the page of a new chat loads like any other."""
    answer = await load(persistence, query, authorize=lambda *_: True)
    assert answer.status == 200
    assert answer.json["messages"] == []
    assert (answer.json["activeRun"], answer.json["interrupts"]) == (None, None)
    assert answer.headers["cache-control"] == "no-store"


async def test_without_an_id_nobody_is_asked(persistence: Persistence) -> None:
    """There is no thread that could be forbidden."""

    def never(*_: Any) -> bool:
        raise AssertionError("asked")

    assert (await load(persistence, {}, authorize=never)).status == 200


async def test_the_parameter_may_have_another_name(persistence: Persistence) -> None:
    answer = await load(persistence, {"chat": "t"}, param="chat")
    assert len(answer.json["messages"]) == 6


async def test_a_window_has_a_cursor_to_the_older_one(persistence: Persistence) -> None:
    newest = await load(persistence, {"threadId": "t", "limit": "4"})
    assert [m["id"] for m in newest.json["messages"]] == ["m2", "m3", "m4", "m5"]
    assert newest.json["page"]["truncated"] is True
    cursor = newest.json["page"]["cursor"]
    assert isinstance(cursor, str)
    older = await load(persistence, {"threadId": "t", "limit": "4", "before": cursor})
    assert [m["id"] for m in older.json["messages"]] == ["m0", "m1"]
    assert older.json["page"] == {"truncated": False}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1", 1), ("0007", 7), ("500", 500), ("501", 500), ("9" * 40, 500), ("00500", 500),
        ("0", None), ("", None), ("-3", None), ("2.5", None), ("x", None), ("²", None),
        ("٣", None), (" 5", None), ("1_0", None),
    ],
)  # fmt: skip
def test_a_limit_is_a_positive_integer_up_to_500(text: str, limit: int | None) -> None:
    assert _limit(text) == limit


async def test_a_refusal_reads_no_store(
    persistence: Persistence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may not see a thread does not learn whether it exists."""

    async def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(type(persistence.backends[0]), "read_view", never)
    answer = await load(persistence, {"threadId": "t"}, authorize=lambda *_: False)
    assert (answer.status, answer.json) == (403, {"error": "Forbidden"})
    assert answer.headers["cache-control"] == "no-store"


async def test_authorize_may_answer_itself_or_raise(persistence: Persistence) -> None:
    async def teapot(thread_id: str, request: Request) -> Response:
        assert (thread_id, request.query_params["threadId"]) == ("t", "t")
        return PlainTextResponse("short and stout", 418)

    answer = await load(persistence, {"threadId": "t"}, authorize=teapot)
    assert (answer.status, answer.body) == (418, b"short and stout")

    def broken(*_: Any) -> bool:
        raise LookupError("no session")

    with pytest.raises(LookupError):
        await load(persistence, {"threadId": "t"}, authorize=broken)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackendUnavailable("db-7.internal is down"), 503, "backend-unavailable"),
        (StoreClosed(), 503, "store-closed"),
        (CorruptRecord("entry 7 of thread t", "db-7.internal"), 500, "corrupt-record"),
        (SchemaOutOfDate("db-7.internal is behind"), 500, "schema-out-of-date"),
    ],
)
async def test_a_store_that_fails_is_a_problem_with_a_code(
    persistence: Persistence,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: ChatkeepError,
    status: int,
    code: str,
) -> None:
    """Never an empty chat, never internals; the server's log has the whole error."""
    caplog.set_level(logging.WARNING)

    def fail(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        raise error

    monkeypatch.setattr(type(persistence.backends[0]), "read_view", fail)
    answer = await load(persistence, {"threadId": "t"})
    assert (answer.status, answer.json["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert b"db-7" not in answer.body
    assert str(error) in caplog.text


async def test_an_impossible_id_is_400(persistence: Persistence) -> None:
    answer = await load(persistence, {"threadId": "a\x00b"})
    assert (answer.status, answer.json["code"]) == (400, "invalid-value")


async def test_integers_beyond_64_bits_come_back(persistence: Persistence) -> None:
    assert persistence.stores.messages is not None
    row: Any = {"id": "m", "role": "user", "content": "x", "metadata": {"n": 2**90}}
    await persistence.stores.messages.save_thread("big", [row])
    answer = await load(persistence, {"threadId": "big"})
    assert answer.json["messages"][0]["metadata"]["n"] == 2**90
