"""Pauses where the stores are not the usual ones: none for interrupts, questions of others, and a
run that goes on under its own id."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from chatkeep import open_persistence
from chatkeep.records import InterruptRecord
from chatkeep.testkit.scripted import browser_tools
from chatkeep.testkit.tab import Tab
from e2e.checks import refused, reloaded, well_formed
from e2e.conftest import DURABLE, STORES
from e2e.server import ChatServer

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
