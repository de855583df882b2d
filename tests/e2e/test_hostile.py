"""Requests that nobody should send: refused with a typed answer, and nothing touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.tab import Exchange, Tab, user_message
from e2e.server import ChatServer, until

pytestmark = pytest.mark.anyio
NewTab = Callable[..., Tab]

GOOD = {"threadId": "t", "runId": "r", "messages": [{"id": "u", "role": "user", "content": "hi"}]}


def raw(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


BAD_BODIES = {
    "empty": b"",
    "no json": b"{nope",
    "a list": b"[]",
    "null": b"null",
    "broken utf-8": b'{"threadId":"\xff\xfe"}',
    "utf-16": json.dumps(GOOD).encode("utf-16"),
    "nan": raw()[:-1] + b',"state":NaN}',
    "infinite": raw()[:-1] + b',"state":1e999}',
    "too deep": raw()[:-1] + b',"state":' + b"[" * 400 + b"]" * 400 + b"}",
    "bottomless": b"[" * 1_000_000,
    "no thread": raw(threadId=None),
    "thread number": raw(threadId=7),
    "thread empty": raw(threadId=""),
    "thread nul": raw(threadId="a\x00b"),
    "thread surrogate": raw(threadId="\ud800"),
    "thread long": raw(threadId="x" * 1025),
    "run object": raw(runId={}),
    "run long": raw(runId="\u00e9" * 513),
    "no messages": raw(messages=None),
    "messages text": raw(messages="hi"),
    "message null": raw(messages=[None]),
    "message no id": raw(messages=[{"role": "user", "content": "x"}]),
    "message role": raw(messages=[{"id": "u", "role": "root", "content": "x"}]),
    "message content": raw(messages=[{"id": "u", "role": "user", "content": 1}]),
    "tools text": raw(tools="all"),
    "tool schema": raw(tools=[{"name": "x", "parameters": {"type": 5}}]),
    "resume status": raw(resume=[{"interruptId": "i", "status": "perhaps"}]),
    "props list": raw(forwardedProps=[1]),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_a_malformed_body_is_400_and_touches_nothing(
    server: ChatServer, http: httpx.AsyncClient, body: bytes
) -> None:
    """A problem with a code; the thread that it may have named is as it was."""
    answer = await http.post(server.url, content=body)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "bad-request"
    hydrated = (await http.get(server.url, params={"threadId": "t"})).json()
    assert hydrated["messages"] == []
    assert (await http.get(server.url, params={"offset": "-1", "runId": "r"})).status_code == 404


async def test_a_body_above_the_limit_is_413_and_not_kept(
    server: ChatServer, http: httpx.AsyncClient
) -> None:
    """Declared or streamed: the server gives up at its limit, whatever is sent after it."""

    async def large() -> AsyncIterator[bytes]:
        for _ in range(4_000):
            yield b"x" * (1 << 16)

    before = server.rss()
    declared = await http.post(server.url, content=b"x" * (33 << 20))
    streamed = await http.post(server.url, content=large())
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert answer.json()["code"] == "body-too-large"
    assert server.rss() - before < 100 << 20


ODD_IDS = [
    " ",
    "../../etc/passwd",
    "a:b",
    "%2F%00",
    "x' or '1'='1",
    'quote" back\\slash',
    "new\nline\r\ttab",
    "\U0001f600" * 256,
    "x" * 1024,
    "\u05e2\u05d1\u05e8\u05d9\u05ea",
    "e\u0301",
    "\ufeff",
    "-1",
    "now",
    "null",
]


@pytest.mark.parametrize("odd", ODD_IDS, ids=range(len(ODD_IDS)))
async def test_an_odd_id_is_an_id(server: ChatServer, new_tab: NewTab, odd: str) -> None:
    """As thread, run and message id it works like any other, joins and reconnects included."""
    thread = f"{odd}"
    tab = new_tab(thread)
    message = {**user_message("SCENARIO:server-tool"), "id": odd}
    tab.messages.append(message)
    body = tab.body(runId=odd)
    # The header cannot carry every id; the browser's own never needs more than it can.
    request = tab._http.build_request("POST", tab._url, json=body)
    grown = [e async for e in tab._exchange(request, odd, body)]
    assert grown[-1].terminal is not None
    assert grown[-1].terminal["type"] == "RUN_FINISHED"
    fresh = new_tab(thread)
    await fresh.load()
    assert comparable(fresh.messages) == comparable(tab.messages)
    assert fresh.messages[0]["id"] == odd
    again = new_tab(thread)
    joined = await again.join(odd)
    assert joined.events == grown[-1].events
    offset = str(joined.offsets[2])
    assert offset.isascii()
    rest = await again.join(odd, last_event_id=offset)
    assert rest.offsets == joined.offsets[3:]


async def test_ids_that_look_alike_are_different(new_tab: NewTab) -> None:
    """No case folding, no trimming, no Unicode normalisation."""
    names = ["alike", "Alike", "alike ", "ali\u0301ke", "al\u00edke"]
    for name in names:
        await new_tab(name).send(f"I am {name!r}")
    for name in names:
        fresh = new_tab(name)
        await fresh.load()
        assert fresh.messages[0]["parts"][0]["content"] == f"I am {name!r}"
        assert len(fresh.messages) == 2


async def test_a_run_id_of_another_thread_is_refused(new_tab: NewTab) -> None:
    """409 from the process that knows the run; both threads are as they were."""
    mine = new_tab()
    exchange = await mine.send("SCENARIO:text")
    other = new_tab()
    other.messages.append(user_message("let me in"))
    refused = await other._post(runId=exchange.run_id)
    assert refused.status == 409
    assert json.loads(refused.refusal)["code"] == "run-conflict"
    fresh = new_tab(other.thread_id)
    await fresh.load()
    assert fresh.messages == []


async def test_rows_of_another_user_do_not_exist(
    server: ChatServer, new_tab: NewTab, http: httpx.AsyncClient
) -> None:
    """Page load, join, reconnect and post of another user meet nothing, and change nothing."""
    ada = new_tab(headers={"x-user": "ada"})
    exchange = await ada.send("SCENARIO:text")
    before = (await new_tab(ada.thread_id, headers={"x-user": "ada"}).load())["messages"]
    for headers in ({"x-user": "bob"}, {}):
        bob = new_tab(ada.thread_id, headers=headers)
        assert (await bob.load())["messages"] == []
        assert (await bob.join(exchange.run_id)).status == 404
        last = exchange.offsets[0]
        assert (await bob.join(exchange.run_id, last_event_id=last)).status == 404
    bob = new_tab(ada.thread_id, headers={"x-user": "bob"})
    await bob.send("SCENARIO:inspect")
    assert [row["role"] for row in json.loads(bob.text)] == ["user"]
    # Bob may even use Ada's run id: in his scope it is another run.
    assert (await bob._post(runId=exchange.run_id)).status == 200
    after = (await new_tab(ada.thread_id, headers={"x-user": "ada"}).load())["messages"]
    assert after == before


async def test_a_reconnect_never_starts_a_run(
    server: ChatServer, new_tab: NewTab, http: httpx.AsyncClient
) -> None:
    """Whatever the id says: no run, no thread; 404."""
    tab = new_tab()
    tab.messages.append(user_message("hello"))
    body = tab.body()
    for offset in (f"{body['runId']}:3", "nonsense", "", "memory:v1:run-1:5", "-1", "now"):
        headers = {"last-event-id": offset, "x-run-id": body["runId"]}
        answer = await http.post(server.url, json=body, headers=headers)
        assert answer.status_code == 404
        assert answer.json()["code"] == "unknown-run"
    assert (await new_tab(tab.thread_id).load())["messages"] == []


async def test_unknown_tools_and_broken_arguments_do_not_stop_the_talk(new_tab: NewTab) -> None:
    """A history with a call of a tool that nobody knows, and arguments that are no JSON."""
    tab = new_tab()
    call = {"id": "c", "type": "function", "function": {"name": "gone", "arguments": "{broken"}}
    history = [
        {"id": "u0", "role": "user", "content": "use it"},
        {"id": "a0", "role": "assistant", "content": None, "toolCalls": [call]},
        {"id": "u1", "role": "user", "content": "SCENARIO:text"},
    ]
    exchange = await tab._post(messages=history)
    assert exchange.terminal is not None
    assert exchange.terminal["type"] == "RUN_FINISHED"
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert [m["id"] for m in fresh.messages][:3] == ["u0", "a0", "u1"]


async def test_a_client_tool_of_the_request_is_not_run_by_the_server(new_tab: NewTab) -> None:
    """Tools that only the browser has are offered; the server's win where names clash."""
    tools = [
        {"name": "get_weather", "description": "mine", "parameters": {"type": "object"}},
        {"name": "only_here", "description": "browser", "parameters": {"type": "object"}},
    ]
    tab = new_tab()
    exchange = await tab.send("SCENARIO:server-tool", tools=tools)
    assert "TOOL_CALL_RESULT" in exchange.types
    assert tab.text == 'Weather: {"city":"Paris","tempC":21}'


async def test_a_value_that_cannot_be_stored_is_refused_before_the_run(new_tab: NewTab) -> None:
    """A message with a number that JSON has no room for does not get half-way."""
    tab = new_tab()
    message = {**GOOD["messages"][0], "metadata": {"n": 10**5000}}  # type: ignore[dict-item]
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        content = json.dumps(tab.body(messages=[message])).encode()
    finally:
        sys.set_int_max_str_digits(limit)
    answer = await tab._http.post(tab._url, content=content)
    assert answer.status_code == 400
    assert (await new_tab(tab.thread_id).load())["messages"] == []


async def test_clients_that_leave_at_every_moment_leave_nothing_behind(
    server: ChatServer, new_tab: NewTab
) -> None:
    """Sockets that close before, in and after the request; the server is as before."""
    host, port = server.url.split("/")[2].split(":")
    tab = new_tab()
    tab.messages.append(user_message('SCENARIO:slow {"chunks": 3, "delayMs": 5}'))
    for i in range(60):
        body = json.dumps(tab.body(threadId=f"{tab.thread_id}-{i}")).encode()
        head = (
            f"POST /api/chat HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        whole = head + body
        reader, writer = await asyncio.open_connection(host, int(port))
        cut = len(whole) * i // 40
        writer.write(whole[:cut])
        await writer.drain()
        if i > 45:
            await reader.read(200)
        writer.close()
        await writer.wait_closed()
    await until(lambda: server.connections() <= 20)
    check = new_tab()
    exchange: Exchange = await check.send("SCENARIO:text")
    assert exchange.terminal is not None
    # A post that arrived whole is a run, whoever stayed to watch it.
    last = new_tab(f"{tab.thread_id}-59")

    async def over() -> bool:
        return len((await last.load())["messages"]) == 2 and not last.hydrated["activeRun"]

    await until(over)
    assert last.text == "w0 w1 w2 "


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_other_methods_are_405(
    server: ChatServer, http: httpx.AsyncClient, method: str
) -> None:
    assert (await http.request(method, server.url)).status_code == 405


@pytest.mark.parametrize("before", ["x", "-1", "0", "999999999", "\x00", "9" * 400, "%00"])
async def test_a_cursor_that_is_none_is_answered(
    server: ChatServer, new_tab: NewTab, http: httpx.AsyncClient, before: str
) -> None:
    """A page load never fails on what stands in its query."""
    tab = new_tab()
    await tab.send("SCENARIO:text")
    query = {"threadId": tab.thread_id, "limit": "1", "before": before}
    answer = await http.get(server.url, params=query)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert isinstance(answer.json()["messages"], list)
    else:
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("thread", ["\x00", "x" * 1025])
async def test_a_page_load_of_an_impossible_id_is_400(
    server: ChatServer, http: httpx.AsyncClient, thread: str
) -> None:
    answer = await http.get(server.url, params={"threadId": thread})
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid-value"
