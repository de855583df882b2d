"""Pauses where the stores are not the usual ones: none for interrupts, questions of others, and a
run that goes on under its own id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from chatkeep import open_persistence
from chatkeep.records import InterruptRecord
from chatkeep.testkit.scripted import browser_tools
from chatkeep.testkit.tab import Exchange, Tab, user_message
from e2e.checks import broken_off, refused, reloaded, well_formed
from e2e.conftest import DURABLE, STORES
from e2e.server import ChatServer, until

pytestmark = pytest.mark.anyio
MakeServer = Callable[..., ChatServer]

SENT = '{"sent":true,"to":"ada@example.com"}'
FOREIGN = {
    "id": "captcha-1",
    "reason": "captcha",
    "message": "Prove that you are one",
    "metadata": {"vendor": "elsewhere"},
}


def tabs(http: httpx.AsyncClient, server: ChatServer) -> Callable[..., Tab]:
    def make(thread_id: str = "t", **options: object) -> Tab:
        return Tab(http, server.url, thread_id, **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("kind", STORES)
async def test_without_an_interrupt_store_the_posted_history_says_what_was_asked(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """The page that saw the pause answers it: an approval, a tool of the browser, a question. A
    reload has nothing to answer, and a wrong parent run is refused."""
    server = make_server(kind, "--without", "interrupts").start()
    new_tab = tabs(http, server)
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send("SCENARIO:approval")
    assert exchange.outcome == "interrupt"
    assert (await new_tab().load())["interrupts"] is None
    tab.approve()
    stolen = tab.batch()
    tab.view.paused_run = exchange.run_id
    forged = await tab._post(**{**stolen, "parentRunId": "run-nobody-knows"})
    refused(forged, None, "stale")
    assert server.executed("t") == []
    answered = await tab._post(**stolen)
    well_formed(answered)
    assert answered.outcome == "success"
    assert tab.text == f"Email outcome: {SENT}"
    assert len(server.executed("t")) == 1
    await tab.load()
    assert (await tab.send("SCENARIO:client-tool")).outcome == "interrupt"
    tab.fail(text="permission denied")
    assert (await tab.resume()).outcome == "success"
    assert tab.text == 'Location outcome: {"error":"permission denied"}'
    await reloaded(new_tab, tab)
    assert (await tab.send("SCENARIO:generic")).outcome == "interrupt"
    tab.answer(response={"approved": True})
    assert (await tab.resume()).outcome == "success"
    assert tab.text == 'Generic outcome: {"approved":true}'
    await reloaded(new_tab, tab)


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_question_of_somebody_else_neither_blocks_nor_is_answered(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """Another producer's descriptor on the same thread is shown as not ours; turns and pauses go
    on beside it, it is in no batch, and it stays as it was."""
    server = make_server(kind).start()
    new_tab = tabs(http, server)
    tab = new_tab()
    exchange = await tab.send("SCENARIO:text")
    async with open_persistence(server.store) as persistence:
        interrupts = persistence.stores.interrupts
        assert interrupts is not None
        foreign = InterruptRecord(
            interrupt_id="captcha-1",
            thread_id="t",
            run_id=exchange.run_id,
            requested_at=time.time_ns() // 1_000_000,
            payload=FOREIGN,
        )
        await interrupts.create(foreign)
        before = await interrupts.list_pending("t")
        shown = await new_tab().load()
        assert shown["interrupts"]["pending"] == [{**FOREIGN, "owner": False}]
        assert (await tab.send("SCENARIO:text")).outcome == "success"
        assert (await tab.send("SCENARIO:approval")).outcome == "interrupt"
        fresh = new_tab()
        body = await fresh.load()
        owners = {d["id"]: d["owner"] for d in body["interrupts"]["pending"]}
        assert owners.pop("captcha-1") is False
        assert list(owners.values()) == [True]
        assert body["interrupts"]["runId"] == tab.view.paused_run
        fresh.approve()
        assert (await fresh.resume()).outcome == "success"
        assert fresh.text == f"Email outcome: {SENT}"
        answer = {"interruptId": "captcha-1", "status": "resolved", "payload": True}
        refused(
            await fresh._post(resume=[answer], messages=[]),
            "unknown-interrupt",
            "incomplete-batch",
        )
        assert await interrupts.list_pending("t") == before


@pytest.mark.parametrize("kind", DURABLE)
async def test_questions_may_be_kept_in_another_database(
    make_server: MakeServer,
    new_store: Callable[[str], str],
    http: httpx.AsyncClient,
    kind: str,
) -> None:
    """Transcript and runs in one, interrupts in another one: a pause survives the process, of two
    that answer at once one does, and an answer whose process died is asked for again."""
    server = make_server(kind, "--interrupts", new_store(kind), "--lease-ms", "1500").start()
    new_tab = tabs(http, server)
    exchange = await new_tab().send("SCENARIO:approval")
    assert exchange.outcome == "interrupt"
    server.kill()
    server.start()
    one, two = new_tab(), new_tab()
    for tab in (one, two):
        await tab.load()
        tab.approve()
    answers = await asyncio.gather(one.resume(), two.resume())
    assert sorted(str(a.outcome) for a in answers) == ["error", "success"]
    assert len(server.executed("t")) == 1
    fresh = new_tab()
    assert (await fresh.load())["interrupts"] is None
    assert fresh.text == f"Email outcome: {SENT}"
    await fresh.send('SCENARIO:approval-job {"ms": 60000}')
    fresh.approve()
    running = asyncio.ensure_future(broken_off(fresh.resume()))
    await until(lambda: len(server.executed("t")) == 2)
    server.kill()
    await running
    server.start()
    again = new_tab()

    async def asked_again() -> bool:
        body = await again.load()
        return body["activeRun"] is None and body["interrupts"] is not None

    await until(asked_again)
    again.cancel()
    assert (await again.resume()).outcome == "success"
    await reloaded(new_tab, again)


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_run_is_cancelled_from_another_process(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """The process that drives it is told, and its viewers see it end; a paused run ends at once."""
    first = make_server(kind, "--lease-ms", "1500").start()
    second = ChatServer(first.store, "--lease-ms", "1500").start()
    try:
        tab = Tab(http, first.url, "t")
        tab.messages.append(user_message('SCENARIO:slow {"chunks": 2000, "delayMs": 20}'))
        body = tab.body()
        viewed: list[Exchange] = []

        async def watch() -> None:
            async for exchange in tab.stream(body):
                viewed[:] = [exchange]

        running = asyncio.ensure_future(watch())
        await until(lambda: "w3 " in tab.text)
        there = Tab(http, second.url, "t")
        answer = await there.cancel_run(body["runId"])
        assert answer.json()["outcome"] == "requested"
        async with asyncio.timeout(20):
            await running
        assert viewed[0].outcome == "cancelled"
        assert (await there.load())["activeRun"] is None
        paused = await there.send("SCENARIO:approval")
        assert paused.outcome == "interrupt"
        assert (await tab.cancel_run(paused.run_id)).json()["outcome"] == "cancelled"
        assert (await there.load())["interrupts"] is None
    finally:
        second.close()


@pytest.mark.parametrize("kind", DURABLE)
async def test_a_run_may_go_on_under_its_own_id(
    make_server: MakeServer, http: httpx.AsyncClient, kind: str
) -> None:
    """On a process that does not know the run any more; it ends as completed."""
    server = make_server(kind).start()
    new_tab = tabs(http, server)
    exchange = await new_tab().send("SCENARIO:approval")
    server.kill()
    server.start()
    tab = new_tab()
    await tab.load()
    tab.approve()
    answered = await tab.resume(runId=exchange.run_id)
    well_formed(answered)
    assert answered.outcome == "success"
    assert tab.text == f"Email outcome: {SENT}"
    await reloaded(new_tab, tab)
    async with open_persistence(server.store) as persistence:
        runs = persistence.stores.runs
        assert runs is not None
        run = await runs.get(exchange.run_id)
        assert run is not None
        assert run.status == "completed"
        assert len(run.usage or {}) > 0
