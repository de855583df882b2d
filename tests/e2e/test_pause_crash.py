"""Pauses that outlive their server, and two that answer at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.scripted import browser_tools
from chatkeep.testkit.tab import Exchange, Tab, user_message
from e2e.checks import broken_off, model_input, reloaded, well_formed
from e2e.conftest import DURABLE, STORES
from e2e.server import ChatServer, until

pytestmark = pytest.mark.anyio
MakeServer = Callable[..., ChatServer]

QUICK_LEASE = ("--lease-ms", "1500")
SENT = '{"sent":true,"to":"ada@example.com"}'


def tabs(http: httpx.AsyncClient, server: ChatServer) -> Callable[..., Tab]:
    """Pages of a server, whatever process it is at the moment."""

    def make(thread_id: str = "t", **options: object) -> Tab:
        return Tab(http, server.url, thread_id, **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.parametrize(
    ("scenario", "count"),
    [("approval", 1), ("client-tool", 1), ("generic", 1), ("mixed-server", 2), ("ui-resource", 1)],
)
async def test_a_pause_on_one_process_is_answered_on_another(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str, scenario: str, count: int
) -> None:
    """SIGKILL while paused: the next process shows what the first one showed, descriptor for
    descriptor and message for message, and takes the answers of a page that saw neither."""
    server = make_server(kind).start()
    new_tab = tabs(http, server)
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send(f"SCENARIO:{scenario}")
    assert exchange.outcome == "interrupt"
    before = await new_tab().load()
    assert server.kill() == -9
    server.start()
    fresh = new_tab(tools=browser_tools())
    assert await fresh.load() == before
    assert comparable(fresh.messages) == comparable(tab.messages)
    assert len(fresh.pending) == count
    for descriptor in fresh.pending:
        match descriptor["metadata"]["tanstack:interruptBinding"]["kind"]:
            case "tool-approval":
                fresh.approve()
            case "client-tool-execution":
                fresh.output(value={"city": "Berlin"} if scenario != "ui-resource" else "clicked")
            case _:
                fresh.answer(response={"approved": True})
    answered = await fresh.resume()
    well_formed(answered)
    assert answered.outcome == "success"
    assert answered.events[0]["parentRunId"] == exchange.run_id
    again = await reloaded(new_tab, fresh)
    await model_input(again)


@pytest.mark.parametrize("kind", DURABLE)
async def test_requests_that_a_new_process_is_sent_again_ask_and_execute_nothing(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """The post that paused and the one that answered it, both repeated after a restart: their
    runs are over, the model is not called, and the thread is as it was."""
    server = make_server(kind).start()
    new_tab = tabs(http, server)
    tab = new_tab()
    exchange = await tab.send("SCENARIO:approval")
    tab.approve()
    answered = await tab.resume()
    assert answered.outcome == "success"
    server.kill()
    server.start()
    before = await new_tab().load()
    assert exchange.body is not None
    assert answered.body is not None
    first = [e async for e in new_tab().stream(exchange.body)][-1]
    assert first.types == ["RUN_STARTED", "RUN_ERROR"]
    assert first.terminal is not None
    assert first.terminal["code"] == "run-conflict"
    second = [e async for e in new_tab().stream(answered.body)][-1]
    assert second.status == 409
    assert json.loads(second.refusal)["code"] == "run-conflict"
    assert await new_tab().load() == before
    assert len(server.executed("t")) == 1


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_server_that_stops_while_runs_pause_loses_none_and_logs_no_failure(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """SIGTERM under load: whoever saw a question finds it on the next process, whoever came too
    late was told 503, or not let in, and nothing of it is there."""
    server = make_server(kind).start()

    async def ask(number: int) -> Exchange | None:
        await asyncio.sleep(0.01 * number)
        try:
            return await Tab(http, server.url, f"t{number}").send("SCENARIO:approval")
        except httpx.TransportError:
            return None

    asking = [asyncio.ensure_future(ask(number)) for number in range(20)]
    await asking[2]
    assert await asyncio.to_thread(server.stop) == 0
    answers = await asyncio.gather(*asking)
    server.start()
    for number, answer in enumerate(answers):
        tab = Tab(http, server.url, f"t{number}")
        page = await tab.load()
        assert page["activeRun"] is None
        if answer is not None and answer.status == 503:
            assert json.loads(answer.refusal)["code"] == "store-closed"
            assert page["messages"] == []
        if answer is not None and answer.outcome == "interrupt":
            assert page["interrupts"]["runId"] == answer.run_id
        if page["interrupts"]:
            tab.approve()
            assert (await tab.resume()).outcome == "success"
            assert len(server.executed(tab.thread_id)) == 1
    log = server.errors()
    assert "ERROR" not in log, log
    assert "Traceback" not in log, log


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_second_step_survives_too(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """A tool of the browser that was approved on one process is asked on the second and answered
    on the third: the proof of the approval is in the store."""
    server = make_server(kind).start()
    new_tab = tabs(http, server)
    tools = browser_tools("share_photo")
    tab = new_tab(tools=tools)
    await tab.send("SCENARIO:approval-client")
    server.kill()
    server.start()
    tab = new_tab(tools=tools)
    await tab.load()
    tab.approve()
    assert (await tab.resume()).outcome == "interrupt"
    server.kill()
    server.start()
    tab = new_tab(tools=tools)
    await tab.load()
    tab.output(value={"url": "https://example.com/1.jpg"})
    assert (await tab.resume()).outcome == "success"
    assert tab.text == 'Photo outcome: {"url":"https://example.com/1.jpg"}'
    await reloaded(new_tab, tab)


@pytest.mark.parametrize("kind", DURABLE)
async def test_an_answer_whose_process_died_can_be_given_again(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """SIGKILL while the approved tool runs: until the dead run's lease is over its claim stands,
    then the question waits again, and the next answer is carried out."""
    server = make_server(kind, *QUICK_LEASE).start()
    new_tab = tabs(http, server)
    tab = new_tab()
    exchange = await tab.send('SCENARIO:approval-job {"ms": 60000}')
    tab.approve()
    running = asyncio.ensure_future(broken_off(tab.resume()))
    await until(lambda: bool(server.executed("t")))
    assert (await new_tab().load())["interrupts"] is None
    server.kill()
    await running
    server.start()
    fresh = new_tab()

    async def asked_again() -> bool:
        body = await fresh.load()
        return body["activeRun"] is None and body["interrupts"] is not None

    await until(asked_again)
    assert [d["id"] for d in fresh.pending] == [d["id"] for d in exchange.interrupts]
    fresh.approve(editedArgs={"ms": 1})
    answered = await fresh.resume()
    well_formed(answered)
    assert answered.outcome == "success"
    assert fresh.text == 'Job outcome: {"done":true}'
    await reloaded(new_tab, fresh)
    assert [call["args"]["ms"] for call in server.executed("t")] == [60000, 1]


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_thread_whose_process_died_in_a_tool_can_be_used(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """SIGKILL in the middle of a tool that nobody was asked for: the call that was left open gets
    a failed result before the model sees it, and the talk goes on."""
    server = make_server(kind, "--drafts", "--draft-ms", "50", *QUICK_LEASE).start()
    new_tab = tabs(http, server)
    tab = new_tab()
    tab.messages.append(user_message("SCENARIO:long-job"))
    running = asyncio.ensure_future(broken_off(all_of(tab)))
    await until(lambda: bool(server.executed("t")))
    await asyncio.sleep(0.3)  # a draft or two
    server.kill()
    await running
    server.start()
    fresh = new_tab()

    async def over() -> bool:
        return (await fresh.load())["activeRun"] is None

    await until(over)
    assert fresh.hydrated["interrupts"] is None
    rows = await model_input(fresh)
    for row in rows:
        if row["role"] == "tool":
            assert row["error"]
    await reloaded(new_tab, fresh)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("second", ["same", "another"])
async def test_two_tabs_that_approve_at_once_run_the_tool_once(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str, second: str
) -> None:
    """On one process, and on two that share a database: one tab's answer is carried out, the
    other is told so in a way that its client takes as an answer to its batch."""
    if kind == "memory" and second == "another":
        kind = "sqlite"
    server = make_server(kind).start()
    other = server if second == "same" else ChatServer(server.store).start()
    try:
        for turn in range(3):
            await race(http, server, other, f"t{turn}")
    finally:
        if other is not server:
            other.close()


async def race(http: httpx.AsyncClient, server: ChatServer, other: ChatServer, thread: str) -> None:
    first = Tab(http, server.url, thread)
    exchange = await first.send("SCENARIO:approval")
    late = Tab(http, other.url, thread)
    await late.load()
    first.approve()
    late.approve()
    answers = await asyncio.gather(first.resume(), late.resume())
    won = [a for a in answers if a.outcome == "success"]
    lost = [a for a in answers if a.outcome == "error"]
    assert (len(won), len(lost)) == (1, 1)
    (loser,) = lost
    assert loser.types == ["RUN_STARTED", "RUN_ERROR"]
    assert loser.interrupt_errors
    for error in loser.interrupt_errors:
        assert error["interruptedRunId"] == exchange.run_id
        assert error["threadId"] == thread
    ran = server.executed(thread) + (other.executed(thread) if other is not server else [])
    assert len(ran) == 1
    fresh = Tab(http, other.url, thread)
    body = await fresh.load()
    assert (body["interrupts"], body["activeRun"]) == (None, None)
    assert fresh.text == f"Email outcome: {SENT}"
    assert len(fresh.messages) == 3


async def test_an_answer_that_was_given_is_not_taken_twice(
    make_server: MakeServer, http: httpx.AsyncClient
) -> None:
    """A slow continuation: while it runs, and when it is over, the same answer of another tab is
    refused and changes nothing."""
    server = make_server("memory").start()
    tab = Tab(http, server.url, "t")
    await tab.send('SCENARIO:approval-slow {"chunks": 20, "delayMs": 40}')
    late = Tab(http, server.url, "t")
    await late.load()
    tab.approve()
    running = asyncio.ensure_future(tab.resume())
    await until(lambda: tab.text.startswith("w0 "))
    late.deny()
    refusal = await late.resume()
    assert refusal.types == ["RUN_STARTED", "RUN_ERROR"]
    assert refusal.interrupt_errors
    assert (await running).outcome == "success"
    third = Tab(http, server.url, "t")
    third.view = late.view
    third.deny()
    assert (await third.resume()).outcome == "error"
    fresh = Tab(http, server.url, "t")
    await fresh.load()
    assert fresh.text == "".join(f"w{i} " for i in range(20))
    assert len(server.executed("t")) == 1


async def all_of(tab: Tab) -> Exchange:
    return [exchange async for exchange in tab.stream(tab.body())][-1]
