"""Servers that die or are told to stop, and what is there afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Exchange, Tab, user_message
from e2e.conftest import DURABLE
from e2e.server import ChatServer, until

pytestmark = pytest.mark.anyio
MakeServer = Callable[..., ChatServer]

SLOW = 'SCENARIO:slow {"chunks": 200, "delayMs": 20}'
QUICK_LEASE = ("--lease-ms", "1500")


async def streaming(tab: Tab, growing: list[Exchange], words: int) -> None:
    """Post a slow turn and return once some words have come; it goes on in ``growing``."""
    tab.messages.append(user_message(SLOW))
    arrived = asyncio.Event()

    async def watch() -> None:
        try:
            async for exchange in tab.stream(tab.body()):
                growing[:] = [exchange]
                if len(tab.text.split()) >= words:
                    arrived.set()
        except httpx.TransportError:
            arrived.set()

    tab.watcher = asyncio.ensure_future(watch())  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        await arrived.wait()


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_run_whose_server_was_killed_ends_as_lost_and_the_talk_goes_on(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """SIGKILL in the middle: the question and the part that was saved are there, the dead run
    stops being active, its events are 404, and a fresh page can go on."""
    server = make_server(kind, "--drafts", "--draft-ms", "50", *QUICK_LEASE).start()
    tab = Tab(http, server.url, "t")
    await tab.send("SCENARIO:server-tool")
    whole = comparable(tab.messages)
    growing: list[Exchange] = []
    await streaming(tab, growing, words=20)
    assert server.kill() == -9
    await tab.watcher  # type: ignore[attr-defined]
    (cut,) = growing
    assert cut.terminal is None
    server.start()
    fresh = Tab(http, server.url, "t")

    async def lost() -> bool:
        body = await fresh.load()
        bag = body["messages"][-1].get("metadata", {}).get("tanstack", {})
        return body["activeRun"] is None and bag.get("stopReason") == "error"

    await until(lost)
    assert (await fresh.join(cut.run_id)).status == 404
    await fresh.load()
    assert comparable(fresh.messages)[: len(whole)] == whole
    question, answer = fresh.messages[len(whole) :]
    assert question["id"] == tab.messages[-2]["id"]
    assert answer["id"] == tab.messages[-1]["id"]
    assert fresh.text
    assert tab.text.startswith(fresh.text)
    again = await fresh.send("SCENARIO:inspect")
    assert again.terminal is not None
    assert again.terminal["type"] == "RUN_FINISHED"
    last = Tab(http, server.url, "t")
    await last.load()
    assert comparable(last.messages) == comparable(fresh.messages)


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_regenerate_whose_server_was_killed_leaves_the_old_answer(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """Nothing is destroyed before its replacement is stored, not even by a kill."""
    server = make_server(kind, *QUICK_LEASE).start()
    tab = Tab(http, server.url, "t")
    await tab.send("SCENARIO:text")
    tab.messages.append(user_message(SLOW))
    answer = {"id": "a-old", "role": "assistant", "content": "the old answer"}
    body = tab.body()
    seeded = [*body["messages"], answer, {"id": "u2", "role": "user", "content": "SCENARIO:text"}]
    await tab._post(messages=seeded)
    await tab.load()
    before = comparable(tab.messages)
    assert before[3]["id"] == "a-old"
    redo = Tab(http, server.url, "t")
    redo.view.messages = tab.messages[:3]
    growing: list[Exchange] = []

    async def regenerate() -> None:
        try:
            async for exchange in redo.stream(redo.body()):
                growing[:] = [exchange]
        except httpx.TransportError:
            return

    watcher = asyncio.ensure_future(regenerate())
    await until(lambda: len(redo.text.split()) > 5)
    server.kill()
    await watcher
    server.start()
    fresh = Tab(http, server.url, "t")

    async def back() -> bool:
        return (await fresh.load())["activeRun"] is None and len(fresh.messages) == len(before)

    await until(back)
    assert comparable(fresh.messages) == before


@pytest.mark.parametrize("kind", ["memory", *DURABLE])
async def test_sigterm_ends_runs_in_an_orderly_way(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """Viewers get a terminal, the part that was there is stored as aborted, the exit code is 0
    and nothing was logged as an error."""
    server = make_server(kind, "--drafts", "--drain", "0.2").start()
    tab = Tab(http, server.url, "t")
    growing: list[Exchange] = []
    await streaming(tab, growing, words=10)
    code = await asyncio.to_thread(server.stop)
    await tab.watcher  # type: ignore[attr-defined]
    assert code == 0
    (exchange,) = growing
    check_events(exchange.events)
    assert exchange.terminal is not None
    assert exchange.terminal["outcome"] == {"type": "cancelled"}
    assert "Traceback" not in server.errors()
    if kind == "memory":
        return
    server.start()
    fresh = Tab(http, server.url, "t")
    body = await fresh.load()
    assert body["activeRun"] is None
    assert [m["id"] for m in fresh.messages] == [m["id"] for m in tab.messages]
    assert fresh.text == tab.text


async def test_sigterm_lets_short_runs_finish(
    make_server: MakeServer, http: httpx.AsyncClient
) -> None:
    """A run that ends within the drain time ends as if nothing happened."""
    server = make_server("memory", "--drain", "10").start()
    tab = Tab(http, server.url, "t")
    turn = asyncio.ensure_future(tab.send('SCENARIO:slow {"chunks": 30, "delayMs": 20}'))
    await until(lambda: tab.text.startswith("w0 w1 "))
    code = await asyncio.to_thread(server.stop)
    exchange = await turn
    assert code == 0
    assert exchange.terminal is not None
    assert "outcome" not in exchange.terminal or exchange.terminal["outcome"]["type"] == "success"
    assert len(tab.text.split()) == 30


async def test_a_server_without_runs_stops_at_once(make_server: MakeServer) -> None:
    server = make_server("memory").start()
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(server.stop) == 0


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_run_that_another_process_drives_is_409_and_404_here(
    make_server: MakeServer, new_store: Callable[[str], str], http: httpx.AsyncClient, kind: str
) -> None:
    """Two servers on one database: the second refuses to run it again, and has no events."""
    first = make_server(kind).start()
    second = ChatServer(first.store).start()
    try:
        tab = Tab(http, first.url, "t")
        growing: list[Exchange] = []
        await streaming(tab, growing, words=5)
        there = Tab(http, second.url, "t")
        body = await there.load()
        run_id = growing[0].run_id
        assert body["activeRun"] == {"runId": run_id}
        assert (await there.join(run_id)).status == 404
        posted = growing[0].body
        assert posted is not None
        (refused,) = [exchange async for exchange in there.stream(posted)]
        assert refused.status == 409
        assert json.loads(refused.refusal)["code"] == "run-conflict"
        first.kill()
        await tab.watcher  # type: ignore[attr-defined]
    finally:
        second.close()
