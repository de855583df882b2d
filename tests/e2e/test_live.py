"""Two servers on one database: a run is shown by whichever a page reaches."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Exchange, Tab, user_message
from e2e.server import ChatServer, until

pytestmark = pytest.mark.anyio

KINDS = [
    pytest.param("sqlite", marks=pytest.mark.sqlite),
    pytest.param("psycopg", marks=pytest.mark.postgres),
    pytest.param("asyncpg", marks=pytest.mark.postgres),
    pytest.param("redis", marks=pytest.mark.redis),
]
SLOW = 'SCENARIO:slow {"chunks": 40, "delayMs": 25}'
LONG = 'SCENARIO:slow {"chunks": 400, "delayMs": 25}'
SLOW_TEXT = "".join(f"w{i} " for i in range(40))
LIVE = ("--stored-log", "--lease-ms", "1500")


_threads = itertools.count()


class Pair:
    """Two servers on one store, and pages on either that show one thread."""

    def __init__(self, servers: Sequence[ChatServer], http: httpx.AsyncClient) -> None:
        self.servers = servers
        self.thread_id = f"t{next(_threads)}"
        self._http = http

    def tab(self, server: int) -> Tab:
        return Tab(self._http, self.servers[server].url, self.thread_id)


@contextmanager
def two_servers(store: str) -> Generator[list[ChatServer]]:
    """They must not log an error."""
    with ExitStack() as stack:
        servers = [ChatServer(store, *LIVE) for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
            server.start()
        yield servers
        for server in servers:
            log = server.errors()
            assert not re.search(r"Traceback|ERROR|CRITICAL|never retrieved|not closed", log), log


@pytest.fixture(scope="module", params=KINDS)
def shared(
    request: pytest.FixtureRequest, new_store: Callable[[str], str]
) -> Iterator[list[ChatServer]]:
    with two_servers(new_store(request.param)) as servers:
        yield servers


@pytest.fixture
def pair(shared: list[ChatServer], http: httpx.AsyncClient) -> Pair:
    """Two servers that live on."""
    return Pair(shared, http)


@pytest.fixture(params=KINDS)
def mortal(
    request: pytest.FixtureRequest, new_store: Callable[[str], str], http: httpx.AsyncClient
) -> Iterator[Pair]:
    """Two servers for one test, which may end them."""
    with two_servers(new_store(request.param)) as servers:
        yield Pair(servers, http)


class Watched:
    """A posted turn that somebody watches to its end, or until the socket breaks."""

    def __init__(self, tab: Tab, text: str) -> None:
        tab.messages.append(user_message(text))
        self.tab = tab
        self.exchange: Exchange | None = None
        self.task = asyncio.create_task(self._watch(tab.body()))

    async def _watch(self, body: dict[str, Any]) -> None:
        try:
            async for exchange in self.tab.stream(body):
                self.exchange = exchange
        except httpx.TransportError:
            return

    async def words(self, count: int) -> Exchange:
        await until(lambda: len(self.tab.text.split()) >= count)
        assert self.exchange is not None
        return self.exchange


async def test_a_page_on_the_other_server_joins_and_sees_the_same(pair: Pair) -> None:
    """The same events under the same offsets, live and afterwards; nothing is run twice."""
    watched = Watched(pair.tab(0), SLOW)
    begun = await watched.words(5)
    there = pair.tab(1)
    assert (await there.load())["activeRun"] == {"runId": begun.run_id}
    joined = await there.join(begun.run_id)
    await watched.task
    ended = watched.exchange
    assert ended is not None
    assert there.text == SLOW_TEXT
    assert (joined.events, joined.offsets) == (ended.events, ended.offsets)
    check_events(joined.events)
    again = await pair.tab(1).join(begun.run_id)
    assert again.offsets == joined.offsets
    late = pair.tab(1)
    await late.load()
    assert comparable(late.messages) == comparable(watched.tab.messages)


async def test_a_dropped_stream_is_taken_up_on_the_other_server(pair: Pair) -> None:
    """The same post with Last-Event-ID: the rest, once, and no second run."""
    tab = pair.tab(0)
    tab.messages.append(user_message(SLOW))
    left: Exchange | None = None
    async for exchange in tab.stream(tab.body()):
        left = exchange
        if len(tab.text.split()) >= 5:
            break
    assert left is not None
    assert left.body is not None
    other = pair.tab(1)
    other.view = tab.view
    rest = [e async for e in other.stream(left.body, last_event_id=left.offsets[-1])][-1]
    assert not set(rest.offsets) & set(left.offsets)
    check_events([*left.events, *rest.events])
    assert tab.text == SLOW_TEXT
    fresh = pair.tab(1)
    await fresh.load()
    assert [m["role"] for m in fresh.messages] == ["user", "assistant"]


async def test_the_same_post_at_both_servers_runs_once(pair: Pair) -> None:
    """At the same moment, and again afterwards: one run, whose events everybody gets."""
    tabs = [pair.tab(i % 2) for i in range(6)]
    tabs[0].messages.append(user_message("SCENARIO:server-tool"))
    body = tabs[0].body()

    async def post(tab: Tab) -> Exchange:
        return [exchange async for exchange in tab.stream(body)][-1]

    exchanges = await asyncio.gather(*map(post, tabs))
    exchanges.append(await post(pair.tab(1)))
    assert all(e.offsets == exchanges[0].offsets for e in exchanges)
    assert all(e.events == exchanges[0].events for e in exchanges)
    ran = [call for server in pair.servers for call in server.executed(pair.thread_id)]
    assert len(ran) == 1


async def test_many_pages_on_both_servers_see_one_run_alike(pair: Pair) -> None:
    """Wherever and whenever they join."""
    watched = Watched(pair.tab(0), SLOW)
    begun = await watched.words(1)

    async def watch(i: int) -> tuple[str, list[str | None]]:
        await asyncio.sleep(i * 0.05)
        page = pair.tab(i % 2)
        await page.load()
        exchange = await page.join(begun.run_id)
        return page.text, exchange.offsets

    seen = await asyncio.gather(*map(watch, range(12)))
    await watched.task
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == SLOW_TEXT


async def test_a_continuation_is_joined_with_its_thread_on_the_other_server(pair: Pair) -> None:
    """Its log begins with the thread as it was, so a page that drops its last message has it."""
    tab = pair.tab(0)
    question = await tab.send('SCENARIO:approval-slow {"chunks": 30, "delayMs": 30}')
    assert question.outcome == "interrupt"
    tab = pair.tab(1)
    await tab.load()
    tab.approve()
    running = asyncio.create_task(tab.resume())
    await until(lambda: tab.text.startswith("w0 w1 "))
    page = pair.tab(0)
    body = await page.load()
    assert body["interrupts"] is None
    joined = await page.join(body["activeRun"]["runId"])
    answered = await running
    assert joined.types[:2] == ["RUN_STARTED", "MESSAGES_SNAPSHOT"]
    assert joined.events == answered.events
    assert comparable(page.messages) == comparable(tab.messages)


async def test_unknown_runs_are_404_on_both(pair: Pair) -> None:
    """And so is an offset of a run that has none of that name."""
    exchange = await pair.tab(0).send("SCENARIO:text")
    for server in (0, 1):
        assert (await pair.tab(server).join("nobody")).status == 404
        wrong = [
            e
            async for e in pair.tab(server).stream(
                exchange.body or {}, last_event_id=f"{exchange.run_id}:00000000.1"
            )
        ]
        assert wrong[-1].status == 404


async def test_viewers_of_a_server_that_is_killed_are_told_by_the_other(mortal: Pair) -> None:
    """The last event is RUN_ERROR worker_lost; the run ends, the log is closed, and the talk
    goes on."""
    watched = Watched(mortal.tab(0), LONG)
    begun = await watched.words(10)
    page = mortal.tab(1)
    await page.load()
    joining = asyncio.create_task(page.join(begun.run_id))
    await until(lambda: len(page.text.split()) >= 5)
    mortal.servers[0].kill()
    await watched.task
    async with asyncio.timeout(20):
        joined = await joining
    assert joined.terminal is not None
    assert joined.terminal["code"] == "worker_lost"
    assert watched.exchange is not None
    seen = watched.exchange.offsets
    assert joined.offsets[: len(seen)] == seen
    assert len(set(joined.offsets)) == len(joined.offsets)

    async def over() -> bool:
        return (await page.load())["activeRun"] is None

    await until(over)
    again = await mortal.tab(1).join(begun.run_id)
    assert again.offsets == joined.offsets
    after = await page.send("SCENARIO:text")
    assert after.outcome == "success"


async def test_a_run_is_cancelled_at_the_other_server(pair: Pair) -> None:
    """DELETE where nobody drives it: the driver stops, is saved, and every viewer is told."""
    watched = Watched(pair.tab(0), LONG)
    begun = await watched.words(3)
    answer = await pair.tab(1).cancel_run(begun.run_id)
    assert answer.json() == {"runId": begun.run_id, "outcome": "requested"}
    async with asyncio.timeout(10):
        await watched.task
    assert watched.exchange is not None
    assert watched.exchange.outcome == "cancelled"
    body = await pair.tab(1).load()
    assert body["activeRun"] is None
    joined = await pair.tab(1).join(begun.run_id)
    assert joined.outcome == "cancelled"


async def test_a_server_that_only_shows_a_run_stops_at_once(mortal: Pair) -> None:
    """Its viewers' streams end without a terminal, so that clients come back elsewhere."""
    watched = Watched(mortal.tab(0), SLOW)
    begun = await watched.words(3)
    page = mortal.tab(1)
    await page.load()
    joining = asyncio.create_task(page.join(begun.run_id))
    await until(lambda: len(page.text.split()) >= 3)
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(mortal.servers[1].stop) == 0
    joined = await joining
    assert joined.terminal is None
    await watched.task
    assert watched.tab.text == SLOW_TEXT


async def test_a_finished_run_outlives_its_server(mortal: Pair) -> None:
    """The events of before are there after a restart, under their old offsets."""
    exchange = await mortal.tab(0).send("SCENARIO:server-tool")
    for server in mortal.servers:
        server.kill()
    mortal.servers[1].start()
    again = await mortal.tab(1).join(exchange.run_id)
    assert (again.events, again.offsets) == (exchange.events, exchange.offsets)
