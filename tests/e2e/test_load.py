"""Many conversations at once on one server process, with bounded memory."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Iterator

import httpx
import pytest

from chatkeep.testkit.client import ChatView, SseReader
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Tab
from e2e.conftest import STORES
from e2e.server import ChatServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

CONVERSATIONS = 1_000
SMALL_CROWD = {"dynamodb": 100, "mongo": 100}
"""Conversations where the server of the tests answers only some hundred requests in a second."""
ARRIVAL_SECONDS = 5.0
SLOW = 'SCENARIO:slow {"chunks": 5, "delayMs": 1600}'
SLOW_TEXT = "w0 w1 w2 w3 w4 "


@pytest.fixture(autouse=True)
def sockets() -> Iterator[None]:
    """Room for a socket to each conversation, here and in the servers started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def converse(server: ChatServer, thread: str, run: str) -> list[dict[str, object]]:
    """One post on a bare socket; the events of its answer."""
    host, port = server.url.split("/")[2].split(":")
    message = {"id": f"u-{run}", "role": "user", "content": SLOW}
    body = json.dumps({"threadId": thread, "runId": run, "messages": [message]}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            b"POST /api/chat HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        answer = await reader.read(-1)
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, chunked = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer[:300]
    sse = SseReader()
    events = [event for _, event in sse.feed(unchunked(chunked))]
    sse.close()
    return events


def unchunked(body: bytes) -> bytes:
    out: list[bytes] = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        out.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(out)


async def wave(server: ChatServer, name: str, conversations: int) -> tuple[float, int]:
    """So many conversations, begun within some seconds; how long it took until the last one was
    over, and how many were open at the same time."""
    clock = asyncio.get_running_loop().time
    start = clock()
    open_now = peak = 0

    async def one(i: int) -> list[dict[str, object]]:
        nonlocal open_now, peak
        await asyncio.sleep(i * ARRIVAL_SECONDS / conversations)
        open_now += 1
        peak = max(peak, open_now)
        try:
            return await converse(server, f"t-{i}", f"{name}-{i}")
        finally:
            open_now -= 1

    answers = await asyncio.gather(*(one(i) for i in range(conversations)))
    seconds = clock() - start
    for events in answers:
        check_events(events)
        view = ChatView()
        for event in events:
            view.apply(event)
        assert view.messages[0]["parts"][0]["content"] == SLOW_TEXT
        assert events[-1]["type"] == "RUN_FINISHED"
    return seconds, peak


@pytest.mark.parametrize("kind", STORES)
async def test_a_thousand_conversations_at_once(
    make_server: Callable[..., ChatServer],
    http: httpx.AsyncClient,
    kind: str,
    record_property: Callable[[str, object], None],
) -> None:
    """They come within five seconds and last eight. All are answered whole; a second thousand
    needs little memory on top of the first; and every thread has both its turns."""
    conversations = SMALL_CROWD.get(kind, CONVERSATIONS)
    server = make_server(kind).start()
    idle = server.rss()
    await wave(server, "first", conversations)
    after_first = server.rss()
    seconds, peak = await wave(server, "second", conversations)
    after_second = server.rss()
    assert peak > 0.9 * conversations
    record_property("seconds", seconds)
    record_property("rss", (idle, after_first, after_second))
    assert after_first - idle < 250 << 20
    assert after_second - after_first < 100 << 20
    for i in (0, conversations // 2, conversations - 1):
        tab = Tab(http, server.url, f"t-{i}")
        body = await tab.load()
        assert [m["role"] for m in tab.messages] == ["user", "assistant"] * 2
        assert body["activeRun"] is None
    print(
        f"{kind}: {conversations} conversations, {peak} at once, in {seconds:.1f} s; resident"
        f" {idle >> 20} -> {after_first >> 20} -> {after_second >> 20} MiB"
    )
