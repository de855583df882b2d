"""Responses that drive their run themselves: a client that leaves aborts it, cleanly."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from chatkeep import open_persistence
from chatkeep.stores import ViewQuery
from chatkeep.testkit.tab import Tab, user_message
from e2e.conftest import DURABLE
from e2e.server import ChatServer, until
from e2e.test_examples import SERVE

pytestmark = pytest.mark.anyio

APP = """
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route

from chatkeep import open_persistence, with_persistence
from chatkeep.engine import chat
from chatkeep.testkit.scripted import ScriptedModel
from chatkeep.web import parse_chat_request, reconstruct_chat, sse_response

persistence = open_persistence({store!r})


class Passing(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        return await call_next(request)


async def run(request):
    params = parse_chat_request(await request.body(), request.headers)
    keep = with_persistence(persistence)
    return sse_response(chat(adapter=ScriptedModel(), middleware=[keep], **params.chat_kwargs()))


async def load(request):
    return await reconstruct_chat(persistence, request)


@asynccontextmanager
async def lifespan(app):
    async with persistence:
        yield


app = Starlette(
    routes=[Route("/chat", run, methods=["POST"]), Route("/chat", load)],
    middleware=[Middleware(Passing)] if {wrapped} else [],
    lifespan=lifespan,
)
"""


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "behind a middleware"])
@pytest.mark.parametrize("kind", DURABLE)
async def test_fifty_clients_that_leave_at_different_moments(
    new_store: Callable[[str], str],
    http: httpx.AsyncClient,
    tmp_path: Path,
    kind: str,
    wrapped: bool,
) -> None:
    """Each run ends as completed or aborted, whenever its client left; nothing is half-written,
    no connection is left in a transaction, and the server goes on."""
    store = new_store(kind)
    (tmp_path / "leaving_app.py").write_text(APP.format(store=store, wrapped=wrapped))
    command = [sys.executable, "-c", SERVE, str(tmp_path), "leaving_app", "/chat"]
    server = ChatServer(store, command=command).start()
    try:
        await Tab(http, server.url, "warm").send("hello")
        # The last two stay to the end, however slow the store is.
        moments = [*(i * 0.04 for i in range(48)), None, None]
        await asyncio.gather(*(leave(server, f"t{i}", s) for i, s in enumerate(moments)))
        async with open_persistence(store) as persistence:
            backend = persistence.backends[0]

            async def settled() -> bool:
                views = [await backend.read_view(f"t{i}", ViewQuery(runs="all")) for i in range(50)]
                runs = [run for view in views for run in view.runs]
                return all(run.terminal for run in runs)

            await until(settled)
            views = [await backend.read_view(f"t{i}", ViewQuery(runs="all")) for i in range(50)]
        statuses = Counter(run.status for view in views for run in view.runs)
        assert set(statuses) <= {"completed", "aborted"}
        assert statuses["completed"] > 0
        assert statuses["aborted"] > 0
        for view in views:
            roles = [message["role"] for message in view.messages]
            if view.runs and view.runs[0].status == "completed":
                assert roles == ["user", "assistant"]
            else:
                assert roles in ([], ["user"])
        tab = Tab(http, server.url, "after")
        exchange = await tab.send("hello")
        assert exchange.terminal is not None
        assert exchange.terminal["type"] == "RUN_FINISHED"
        assert await asyncio.to_thread(server.stop) in (0, -15)
        log = server.errors()
        for trouble in ("Traceback", "never retrieved", "garbage", "was never awaited"):
            assert trouble not in log, log
    finally:
        server.close()


async def leave(server: ChatServer, thread_id: str, seconds: float | None) -> None:
    """Post, and close the socket after some time; None: when the answer is over."""
    host, port = server.url.split("/")[2].split(":")
    message = user_message("")
    message = {"id": message["id"], "role": "user"}
    message["content"] = 'SCENARIO:slow {"chunks": 5, "delayMs": 10}'
    posted = {"threadId": thread_id, "runId": f"r-{thread_id}", "messages": [message]}
    body = json.dumps(posted).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /chat HTTP/1.1\r\nhost: x\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )
    await writer.drain()
    # From "before the first event" to "long after the last one".
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(4096):
                pass
    except TimeoutError:
        pass
    writer.close()
    await writer.wait_closed()
