"""What a user does in a page, over HTTP against a real server, on every store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from chatkeep import open_persistence
from chatkeep.testkit.client import comparable, wire_rows
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.tab import Exchange, Tab, user_message
from e2e.checks import NewTab, reloaded, well_formed
from e2e.conftest import DURABLE
from e2e.server import ChatServer

pytestmark = pytest.mark.anyio

TURNS = [
    "Hello",
    "SCENARIO:text",
    'SCENARIO:slow {"chunks": 5, "delayMs": 1}',
    "SCENARIO:reasoning",
    "SCENARIO:server-tool",
    "SCENARIO:server-tool-text",
    "SCENARIO:server-tool-error",
    "SCENARIO:inspect",
    "text of every kind: \x00 \U0001f600 עברית e\u0301 \u2028 </script> \\",
]


async def test_every_turn_comes_back_as_it_streamed(new_tab: NewTab) -> None:
    """After each turn of a long talk a fresh page shows the same messages, field by field."""
    tab = new_tab()
    assert (await tab.load())["messages"] == []
    for text in TURNS:
        exchange = await tab.send(text)
        well_formed(exchange)
        assert exchange.terminal is not None
        assert exchange.terminal["type"] == "RUN_FINISHED"
        await reloaded(new_tab, tab)
    ids = [message["id"] for message in tab.messages]
    assert len(set(ids)) == len(ids)


async def test_times_do_not_change_over_later_turns(new_tab: NewTab) -> None:
    """A user message keeps the time the browser gave it, an answer the time it was made."""
    tab = new_tab()
    await tab.send("SCENARIO:server-tool")
    first = (await new_tab(tab.thread_id).load())["messages"]
    await tab.send("more")
    second = (await new_tab(tab.thread_id).load())["messages"]
    assert second[: len(first)] == first
    assert second[0]["createdAt"] == tab.messages[0]["createdAt"]


async def test_the_model_sees_the_whole_thread_when_only_news_is_posted(new_tab: NewTab) -> None:
    """A page that shows the newest window posts only what is new."""
    tab = new_tab()
    await tab.send("SCENARIO:server-tool")
    news = user_message("SCENARIO:inspect")
    tab.view.messages = [news]
    await tab.send("SCENARIO:inspect")
    roles = [row["role"] for row in json.loads(tab.text)]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "user"]
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert len(fresh.messages) == 6


async def test_an_empty_post_continues_the_stored_thread(new_tab: NewTab) -> None:
    """``messages: []`` is the stored thread, not an empty one."""
    tab = new_tab()
    await tab.send("SCENARIO:text")
    exchange = await tab._post(messages=[])
    well_formed(exchange)
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert [m["role"] for m in fresh.messages][:2] == ["user", "assistant"]
    assert len(fresh.messages) == 3


async def test_regenerate_replaces_the_answer(new_tab: NewTab) -> None:
    """The old answer is gone from the page and from the store, what stood before it stays."""
    tab = new_tab()
    await tab.send("SCENARIO:text")
    await tab.send("SCENARIO:server-tool")
    before = [m["id"] for m in tab.messages]
    well_formed(await tab.regenerate())
    after = [m["id"] for m in tab.messages]
    assert after[:3] == before[:3]
    assert not set(after[3:]) & set(before)
    await reloaded(new_tab, tab)


async def test_a_failed_run_leaves_the_question_and_the_next_turn_works(new_tab: NewTab) -> None:
    """The thread is not stuck: the user's message is there, nothing is active."""
    tab = new_tab()
    exchange = await tab.send("SCENARIO:error-early")
    well_formed(exchange)
    assert exchange.terminal is not None
    assert exchange.terminal["type"] == "RUN_ERROR"
    assert "scripted failure" in exchange.terminal["message"]
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert [m["id"] for m in fresh.messages] == [tab.messages[0]["id"]]
    assert fresh.hydrated["activeRun"] is None
    await fresh.send("SCENARIO:text")
    await reloaded(new_tab, fresh)
    # The tab that saw the error posts its made-up empty bubble; it is not stored.
    await tab.send("SCENARIO:text")
    last = new_tab(tab.thread_id)
    await last.load()
    assert all(m["parts"] for m in last.messages)


async def test_paging_shows_every_message_once(new_tab: NewTab) -> None:
    """Windows from the newest to the oldest, by the cursor of the page before."""
    tab = new_tab()
    for text in ("SCENARIO:text", "SCENARIO:server-tool", "SCENARIO:text"):
        await tab.send(text)
    pages: list[list[dict[str, Any]]] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        body = await new_tab(tab.thread_id).load(**query)
        assert 0 < len(body["messages"]) <= 2
        pages.insert(0, body["messages"])
        if not body["page"]["truncated"]:
            break
        query["before"] = body["page"]["cursor"]
    assert comparable(m for page in pages for m in page) == comparable(tab.messages)


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "", "9" * 30, "٣"])
async def test_an_odd_limit_is_no_limit(new_tab: NewTab, limit: str) -> None:
    """Never an error: the whole thread, or the largest page."""
    tab = new_tab()
    await tab.send("SCENARIO:text")
    body = await new_tab(tab.thread_id).load(limit=limit)
    assert len(body["messages"]) == 2


async def test_a_page_load_is_never_cached_and_an_unknown_thread_is_empty(
    server: ChatServer, http: httpx.AsyncClient
) -> None:
    for query in ({"threadId": "nobody"}, {"threadId": ""}, {}):
        answer = await http.get(server.url, params=query)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        assert (body["messages"], body["activeRun"], body["interrupts"]) == ([], None, None)


# ---------------------------------------------------------------- leaving and coming back

SLOW = 'SCENARIO:slow {"chunks": 20, "delayMs": 30}'
SLOW_TEXT = "".join(f"w{i} " for i in range(20))


async def start_slow(tab: Tab, words: int = 3) -> Exchange:
    """Post a slow turn and leave (drop the socket) after some words."""
    tab.messages.append(user_message(SLOW))
    async for exchange in tab.stream(tab.body()):
        if len(tab.text.split()) >= words:
            return exchange
    raise AssertionError("the run was over before its viewer could leave")


async def test_a_reload_in_the_middle_joins_the_run(new_tab: NewTab) -> None:
    """The page finds the running run, replays it and sees it to its end."""
    tab = new_tab()
    left = await start_slow(tab)
    fresh = new_tab(tab.thread_id)
    await fresh.load()
    assert fresh.hydrated["activeRun"] == {"runId": left.run_id}
    assert fresh.messages[0]["id"] == tab.messages[0]["id"]
    joined = await fresh.join(left.run_id)
    assert fresh.text == SLOW_TEXT
    assert joined.offsets[: len(left.offsets)] == left.offsets
    assert [m["id"] for m in fresh.messages] == [m["id"] for m in tab.messages]
    await reloaded(new_tab, fresh)


async def test_a_dropped_stream_is_taken_up_where_it_broke(new_tab: NewTab) -> None:
    """The same post with Last-Event-ID brings the rest, once, and no second run."""
    tab = new_tab()
    left = await start_slow(tab)
    assert left.body is not None
    growing = tab.stream(left.body, last_event_id=left.offsets[-1])
    rest = [exchange async for exchange in growing][-1]
    assert not set(rest.offsets) & set(left.offsets)
    assert tab.text == SLOW_TEXT
    check_events([*left.events, *rest.events])
    fresh = await reloaded(new_tab, tab)
    assert [m["role"] for m in fresh.messages] == ["user", "assistant"]


async def test_many_tabs_see_one_run_alike(new_tab: NewTab) -> None:
    """Ten pages join at different moments; ids, offsets and text agree in all of them."""
    tab = new_tab()
    left = await start_slow(tab, words=1)

    async def watch(delay: float) -> tuple[str, list[str | None], list[dict[str, Any]]]:
        await asyncio.sleep(delay)
        page = new_tab(tab.thread_id)
        await page.load()
        exchange = await page.join(left.run_id)
        return page.text, exchange.offsets, comparable(page.messages)

    seen = await asyncio.gather(*(watch(i * 0.06) for i in range(10)))
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == SLOW_TEXT


async def test_a_viewer_who_never_reads_holds_nobody_up(
    new_tab: NewTab, server: ChatServer, http: httpx.AsyncClient
) -> None:
    """A stalled join costs the run and the other viewers nothing."""
    tab = new_tab()
    left = await start_slow(tab)
    request = http.build_request("GET", server.url, params={"offset": "-1", "runId": left.run_id})
    stalled = await http.send(request, stream=True)
    page = new_tab(tab.thread_id)
    await page.load()
    async with asyncio.timeout(10):
        await page.join(left.run_id)
    assert page.text == SLOW_TEXT
    await stalled.aclose()


async def test_the_same_post_again_replays_and_runs_nothing(new_tab: NewTab) -> None:
    """A retry of a client that lost the answer gets the answer, under the same ids."""
    tab = new_tab()
    exchange = await tab.send("SCENARIO:server-tool")
    again = new_tab(tab.thread_id)
    assert exchange.body is not None
    async for repeated in again.stream(exchange.body):
        replay = repeated
    assert replay.events == exchange.events
    assert replay.offsets == exchange.offsets
    await reloaded(new_tab, tab)


@pytest.mark.parametrize("shown", ["everything", "only news"])
async def test_two_tabs_at_once_lose_nothing(new_tab: NewTab, shown: str) -> None:
    """Both post a turn on the same thread at the same time: both turns are kept, whole, whether
    pages post all that they show or only what is new."""
    first = new_tab()
    await first.send("SCENARIO:text")
    second = new_tab(first.thread_id)
    await second.load()

    async def send(tab: Tab, text: str) -> None:
        tab.messages.append(user_message(text))
        posted = tab.messages if shown == "everything" else tab.messages[-1:]
        async for _ in tab.stream(tab.body(messages=wire_rows(posted))):
            pass

    slow = 'SCENARIO:slow {"chunks": 5, "delayMs": 20}'
    await asyncio.gather(send(first, slow), send(second, "SCENARIO:server-tool"))
    fresh = new_tab(first.thread_id)
    await fresh.load()
    stored = {m["id"]: m for m in comparable(fresh.messages)}
    for tab in (first, second):
        for message in comparable(tab.messages):
            assert stored[message["id"]] == message
    order = [m["id"] for m in fresh.messages]
    for tab in (first, second):
        turn = [order.index(m["id"]) for m in tab.messages[2:]]
        assert turn == list(range(turn[0], turn[0] + len(turn)))
    assert len(order) == 2 + 2 + 3


async def test_old_news_does_not_cut_what_its_client_never_saw(new_tab: NewTab) -> None:
    """A stale tab that says how far it has seen is refused, and nothing is lost."""
    stale = new_tab()
    await stale.send("SCENARIO:text")
    seen = (await new_tab(stale.thread_id).load())["seen"]
    other = new_tab(stale.thread_id)
    await other.load()
    await other.send("SCENARIO:text")
    exchange = await stale.regenerate(forwardedProps={"threadSeen": seen})
    assert exchange.types == ["RUN_STARTED", "RUN_ERROR"]
    assert exchange.terminal is not None
    assert exchange.terminal["code"] == "unseen-messages"
    await reloaded(new_tab, other)


@pytest.mark.parametrize("server", DURABLE, indirect=True)
async def test_what_a_client_cuts_that_does_not_say_how_far_it_has_seen_is_archived(
    new_tab: NewTab, server: ChatServer
) -> None:
    """Served as upstream does, but nothing is destroyed: the other tab's turn can be restored.
    (A turn that is younger than two seconds is not cut at all.)"""
    stale = new_tab()
    await stale.send("SCENARIO:text")
    other = new_tab(stale.thread_id)
    await other.load()
    await other.send("SCENARIO:text")
    await asyncio.sleep(2.5)
    await stale.send("SCENARIO:text")
    await reloaded(new_tab, stale)
    async with open_persistence(server.store) as persistence:
        store = persistence.backends[0]
        (cut,) = await store.list_cuts(stale.thread_id)
    assert cut.message_ids == [m["id"] for m in other.messages[2:]]
