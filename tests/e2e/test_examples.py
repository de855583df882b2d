"""The examples work as they stand, under plain uvicorn."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Tab, user_message
from e2e.server import EXAMPLES, ChatServer

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite]

SERVE = """
import importlib, socket, sys, uvicorn

folder, module, path = sys.argv[1:]
sys.path.insert(0, folder)
app = importlib.import_module(module).app
listener = socket.socket()
listener.bind(("127.0.0.1", 0))


class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(f"ready http://127.0.0.1:{listener.getsockname()[1]}{path}", flush=True)


Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str, str], ChatServer]]:
    """An example app under uvicorn, in a folder of its own."""
    with ExitStack() as stack:

        def start(module: str, path: str) -> ChatServer:
            command = [sys.executable, "-c", SERVE, str(EXAMPLES), module, path]
            server = ChatServer("", command=command, folder=tmp_path)
            stack.callback(server.close)
            return server.start()

        yield start


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("minimal_app", "/api/chat"),
        ("fastapi_app", "/api/chat"),
        ("fastapi_app", "/own/chat"),
    ],
)
async def test_an_app_talks_and_remembers(
    serve: Callable[[str, str], ChatServer], http: httpx.AsyncClient, module: str, path: str
) -> None:
    """Turns stream with ids, a page load brings them back, also after a restart."""
    server = serve(module, path)
    tab = Tab(http, server.url, "t", headers={"x-user": "ada"})
    for text in ("hello", "SCENARIO:server-tool"):
        exchange = await tab.send(text)
        check_events(exchange.events)
        assert None not in exchange.offsets
    server.stop()
    assert "Traceback" not in server.errors()
    server.start()
    fresh = Tab(http, server.url, "t", headers={"x-user": "ada"})
    await fresh.load()
    assert comparable(fresh.messages) == comparable(tab.messages)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("minimal_app", "/api/chat"),
        ("fastapi_app", "/api/chat"),
        ("fastapi_app", "/own/chat"),
    ],
)
async def test_an_app_asks_and_takes_the_answer_after_a_restart(
    serve: Callable[[str, str], ChatServer], http: httpx.AsyncClient, module: str, path: str
) -> None:
    """An approval that waits outlives the server; a question that is given up goes with its run."""
    server = serve(module, path)
    headers = {"x-user": "ada"}
    tab = Tab(http, server.url, "t", headers=headers)
    exchange = await tab.send("SCENARIO:approval")
    assert exchange.outcome == "interrupt"
    server.kill()
    server.start()
    fresh = Tab(http, server.url, "t", headers=headers)
    await fresh.load()
    assert comparable(fresh.messages) == comparable(tab.messages)
    assert [d["id"] for d in fresh.pending] == [d["id"] for d in exchange.interrupts]
    fresh.approve()
    assert (await fresh.resume()).outcome == "success"
    assert fresh.text == 'Email outcome: {"sent":true,"to":"ada@example.com"}'
    again = await fresh.send("SCENARIO:approval")
    answer = await fresh.cancel_run(again.run_id)
    assert (answer.status_code, answer.json()["outcome"]) == (200, "cancelled")
    last = Tab(http, server.url, "t", headers=headers)
    assert (await last.load())["interrupts"] is None
    assert (await last.send("SCENARIO:text")).outcome == "success"


@pytest.mark.parametrize("path", ["/api/chat", "/own/chat"])
async def test_users_of_the_fastapi_app_see_their_own(
    serve: Callable[[str, str], ChatServer], http: httpx.AsyncClient, path: str
) -> None:
    """Nobody without a login; another user's thread is empty; a bad body is 400."""
    server = serve("fastapi_app", path)
    ada = Tab(http, server.url, "t", headers={"x-user": "ada"})
    await ada.send("hello")
    bob = Tab(http, server.url, "t", headers={"x-user": "bob"})
    assert (await bob.load())["messages"] == []
    assert (await http.get(server.url, params={"threadId": "t"})).status_code == 401
    bad = await http.post(server.url, content=b"{nope", headers={"x-user": "ada"})
    assert bad.status_code == 400


async def test_leaving_the_fastapi_route_of_its_own_stops_nothing(
    serve: Callable[[str, str], ChatServer], http: httpx.AsyncClient
) -> None:
    """``sse_response(stream, delivery=…)``: the run goes on and is saved without its viewer, and
    ``watch_response`` shows it to who comes back."""
    server = serve("fastapi_app", "/own/chat")
    headers = {"x-user": "ada"}
    tab = Tab(http, server.url, "t", headers=headers)
    tab.messages.append(user_message('SCENARIO:slow {"chunks": 20, "delayMs": 20}'))
    body = tab.body()
    offsets: list[str | None] = []
    async for exchange in tab.stream(body):
        offsets = exchange.offsets
        if "w2 " in tab.text:
            break
    rest = [e async for e in tab.stream(body, last_event_id=offsets[-1])][-1]
    assert not set(rest.offsets) & set(offsets)
    assert tab.text == "".join(f"w{i} " for i in range(20))
    joined = Tab(http, server.url, "t", headers=headers)
    assert (await joined.join(body["runId"])).offsets == [*offsets, *rest.offsets]
    tab.messages.append(user_message('SCENARIO:slow {"chunks": 20, "delayMs": 20}'))
    async for _ in tab.stream(tab.body()):
        if "w2 " in tab.text:
            break
    server.stop()  # waits for the run, as it drains
    server.start()
    fresh = Tab(http, server.url, "t", headers=headers)
    await fresh.load()
    assert fresh.text == "".join(f"w{i} " for i in range(20))


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_sees_every_difference(demo: ModuleType) -> None:
    """Missing, added and changed fields, types, order: each is named by its path."""
    a = {"id": "m", "parts": [{"type": "text", "content": "x", "n": 1}]}
    assert (
        demo.differences(a, {"id": "m", "parts": [{"type": "text", "content": "x", "n": 1}]}, "")
        == []
    )
    for b, path in (
        ({"id": "n", "parts": a["parts"]}, ".id"),
        ({"id": "m"}, ".parts"),
        ({**a, "extra": None}, ".extra"),
        ({"id": "m", "parts": []}, ".parts"),
        ({"id": "m", "parts": [{"type": "text", "content": "y", "n": 1}]}, ".parts[0].content"),
        ({"id": "m", "parts": [{"type": "text", "content": "x", "n": 1.0}]}, ".parts[0].n"),
    ):
        (found,) = demo.differences(a, b, "")
        assert found.startswith(f"{path}: ")


def test_the_demo_fails_when_something_is_missing(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = demo.Timeline()
    message = {"id": "message-one", "role": "user", "parts": [{"type": "text", "content": "x"}]}
    demo.compare(timeline, [message], [])
    assert timeline.failures == 1
    assert "DIFFERENT" in capsys.readouterr().out
