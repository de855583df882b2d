"""Approvals over HTTP, on every store: asked, reloaded, answered, and what the model hears."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.scripted import browser_tools
from chatkeep.testkit.tab import Exchange, Tab
from e2e.checks import NewTab, model_input, paused, refused, reloaded, well_formed
from e2e.server import ChatServer

pytestmark = pytest.mark.anyio

SENT = '{"sent":true,"to":"ada@example.com"}'
DECLINED = '{"error":"User declined tool execution"}'
CANCELLED = '{"error":"Tool execution cancelled"}'


async def ask(new_tab: NewTab, text: str, *, count: int = 1) -> tuple[Tab, Tab, Exchange]:
    """A page whose run paused, a freshly loaded one on the same thread, and the answer."""
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send(text)
    return tab, await paused(new_tab, tab, exchange, count=count), exchange


def continued(exchange: Exchange, parent: str | None) -> None:
    """The answer of a continuation: it names the parent that its request named, and shows the
    thread before anything else, so that who joins it has the call that was answered."""
    well_formed(exchange)
    assert exchange.types[:2] == ["RUN_STARTED", "MESSAGES_SNAPSHOT"]
    assert exchange.events[0].get("parentRunId") == parent
    assert exchange.outcome == "success"


async def test_the_descriptor_says_all_that_a_page_needs(new_tab: NewTab) -> None:
    """Tool, arguments, what may be answered, and the binding that the browser checks."""
    _, _, exchange = await ask(new_tab, "SCENARIO:approval")
    (descriptor,) = exchange.interrupts
    metadata = descriptor["metadata"]
    args = {"to": "ada@example.com", "subject": "Hi"}
    assert descriptor["reason"] == "tool_call"
    assert descriptor["id"] == f"approval_{descriptor['toolCallId']}"
    assert (metadata["kind"], metadata["toolName"]) == ("approval", "send_email")
    assert metadata["input"] == args
    assert metadata["tanstack:interruptBinding"] == {
        "v": 1,
        "kind": "tool-approval",
        "interruptId": descriptor["id"],
        "toolName": "send_email",
        "toolCallId": descriptor["toolCallId"],
        "originalArgs": args,
        "inputSchemaHash": "sha256:"
        "e8c3c38ac148dedf4d54441277bf5359f83b76fae01c2c32eabaf431bbcc8fb5",
        "approvalSchemaHash": "sha256:"
        "22f76d9a1c618a3cfaa891208a14f6e5e6ab1be4ff1c38cc8a8cd1e8fd0c0e4e",
        "responseSchemaHash": "sha256:"
        "6d9fd4b5d4b5be637af995fb4aef21338247b00a58ffede2e104b4b7e694eab3",
        "interruptedRunId": exchange.run_id,
        "generation": 0,
    }


@pytest.mark.parametrize("where", ["live", "reloaded"])
@pytest.mark.parametrize(
    ("decision", "text", "state"),
    [
        ("approve", SENT, "complete"),
        ("deny", DECLINED, "error"),
        ("cancel", CANCELLED, "error"),
    ],
)
async def test_a_decision_is_carried_out_once_and_comes_back(
    server: ChatServer, new_tab: NewTab, where: str, decision: str, text: str, state: str
) -> None:
    """In the tab that saw the pause and in a freshly loaded one; the call has one result, the
    model hears it, and the question is gone."""
    live, loaded, exchange = await ask(new_tab, "SCENARIO:approval")
    tab = live if where == "live" else loaded
    getattr(tab, decision)()
    answered = await tab.resume()
    continued(answered, exchange.run_id)
    rows = [row for row in answered.body["messages"] if row["role"] == "tool"]  # type: ignore[index]
    posted_placeholder = where == "live" and decision != "cancel"
    assert len(rows) == posted_placeholder
    assert tab.text == f"Email outcome: {text}"
    fresh = await reloaded(new_tab, tab)
    parts = [p for m in fresh.messages for p in m["parts"]]
    (call,) = [p for p in parts if p["type"] == "tool-call"]
    (result,) = [p for p in parts if p["type"] == "tool-result"]
    assert call["state"] == result["state"] == state
    assert call["output"] == json.loads(text)
    assert result.get("outcome") == {"deny": "denied", "cancel": "cancelled"}.get(decision)
    assert server.executed(tab.thread_id) == (
        [{"tool": "send_email", "args": {"to": "ada@example.com", "subject": "Hi"}}]
        if decision == "approve"
        else []
    )
    heard = [row["text"] for row in await model_input(fresh) if row["role"] == "tool"]
    assert heard == [text]
    await reloaded(new_tab, fresh)


async def test_edited_arguments_are_what_runs(server: ChatServer, new_tab: NewTab) -> None:
    """The tool gets the edited arguments; the question keeps those of the model."""
    _, tab, exchange = await ask(new_tab, "SCENARIO:approval")
    edited = {"to": "grace@example.com", "subject": "Hi"}
    tab.approve(editedArgs=edited)
    continued(await tab.resume(), exchange.run_id)
    assert tab.text == 'Email outcome: {"sent":true,"to":"grace@example.com"}'
    assert server.executed(tab.thread_id) == [{"tool": "send_email", "args": edited}]
    await reloaded(new_tab, tab)


async def test_two_calls_are_decided_one_by_one(server: ChatServer, new_tab: NewTab) -> None:
    """One approved and one refused, in one batch; results stand in the order of the calls."""
    _, tab, exchange = await ask(new_tab, "SCENARIO:approval-two", count=2)
    first, second = (d["id"] for d in exchange.interrupts)
    tab.deny(first)
    tab.approve(second)
    continued(await tab.resume(), exchange.run_id)
    assert tab.text == f'Email outcomes: {DECLINED} | {{"sent":true,"to":"bob@example.com"}}'
    assert [c["args"]["to"] for c in server.executed(tab.thread_id)] == ["bob@example.com"]
    await reloaded(new_tab, tab)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"approved": True, "payload": {"pin": "1234"}}, '{"moved":5}'),
        ({"approved": False, "payload": {"reason": "too much"}}, '{"reason":"too much"}'),
    ],
)
async def test_a_form_goes_along_with_a_decision(
    new_tab: NewTab, answer: dict[str, Any], text: str
) -> None:
    """Each branch has a schema of its own; a refusal's payload is the call's result."""
    _, tab, exchange = await ask(new_tab, "SCENARIO:approval-form")
    payload = answer["payload"]
    if answer["approved"]:
        tab.approve(payload=payload)
    else:
        tab.deny(payload=payload)
    continued(await tab.resume(), exchange.run_id)
    assert tab.text == f"Transfer outcome: {text}"
    await reloaded(new_tab, tab)


async def test_a_bare_yes_is_enough_where_nothing_else_is_asked(new_tab: NewTab) -> None:
    """``payload: true`` is an approval; with a form it is not."""
    _, tab, exchange = await ask(new_tab, "SCENARIO:approval")
    entry = {"interruptId": exchange.interrupts[0]["id"], "status": "resolved", "payload": True}
    answered = await tab._post(parentRunId=exchange.run_id, resume=[entry])
    continued(answered, exchange.run_id)
    assert tab.text == f"Email outcome: {SENT}"
    _, tab, exchange = await ask(new_tab, "SCENARIO:approval-form")
    entry["interruptId"] = exchange.interrupts[0]["id"]
    refused(
        await tab._post(parentRunId=exchange.run_id, resume=[entry]),
        "invalid-payload",
        "item-validation-failed",
    )


async def test_an_approved_tool_of_the_browser_takes_two_steps(
    server: ChatServer, new_tab: NewTab
) -> None:
    """The approval leads to the browser's own question; its output is what the model hears."""
    tools = browser_tools("share_photo")
    tab = new_tab(tools=tools)
    exchange = await tab.send("SCENARIO:approval-client")
    tab = await paused(new_tab, tab, exchange)
    tab.approve(editedArgs={"album": "summer"})
    second = await tab.resume()
    fresh = await paused(new_tab, tab, second)
    (descriptor,) = second.interrupts
    assert descriptor["reason"] == "tanstack:client_tool_execution"
    assert descriptor["metadata"]["input"] == {"album": "summer"}
    fresh.output("share_photo", {"url": "https://example.com/1.jpg"})
    continued(await fresh.resume(), second.run_id)
    assert fresh.text == 'Photo outcome: {"url":"https://example.com/1.jpg"}'
    await reloaded(new_tab, fresh)
    assert server.executed(tab.thread_id) == []


async def test_a_refused_tool_of_the_browser_never_gets_there(new_tab: NewTab) -> None:
    """The model hears the refusal; the browser is not asked."""
    tab = new_tab(tools=browser_tools("share_photo"))
    tab = await paused(new_tab, tab, await tab.send("SCENARIO:approval-client"))
    tab.deny()
    exchange = await tab.resume()
    assert exchange.outcome == "success"
    assert tab.text == f"Photo outcome: {DECLINED}"
    await reloaded(new_tab, tab)


async def test_a_continuation_may_pause_again(new_tab: NewTab) -> None:
    """Questions of later turns; the whole thread is in every snapshot."""
    tab = new_tab(tools=browser_tools())
    exchange = await tab.send("SCENARIO:client-tool-sequence")
    tab = await paused(new_tab, tab, exchange)
    tab.output("get_location", {"city": "Berlin"})
    second = await tab.resume()
    assert second.events[0]["parentRunId"] == exchange.run_id
    tab = await paused(new_tab, tab, second)
    tab.output("pick_color", "red")
    continued(await tab.resume(), second.run_id)
    assert tab.text == 'Sequence outcome: {"city":"Berlin"} | red'
    await reloaded(new_tab, tab)


async def test_a_slow_continuation_is_joined_with_its_thread(new_tab: NewTab) -> None:
    """While it runs a page load reports it instead of the question, and a joiner that drops its
    last message rebuilds it from the snapshot."""
    import asyncio

    from e2e.server import until

    _, tab, exchange = await ask(new_tab, 'SCENARIO:approval-slow {"chunks": 30, "delayMs": 40}')
    tab.approve()
    running = asyncio.ensure_future(tab.resume())
    await until(lambda: tab.text.startswith("w0 w1 "))
    joiner = new_tab(tab.thread_id)
    body = await joiner.load()
    assert body["interrupts"] is None
    assert body["activeRun"] is not None
    joined = await joiner.join(body["activeRun"]["runId"])
    answered = await running
    continued(answered, exchange.run_id)
    assert joined.events == answered.events
    assert comparable(joiner.messages) == comparable(tab.messages)
    await reloaded(new_tab, joiner)


async def test_messages_may_be_left_out(server: ChatServer, new_tab: NewTab) -> None:
    """The server knows what it asked: ``messages: []``, with and without ``parentRunId``."""
    for fields in ({}, {"parentRunId": None}):
        _, tab, exchange = await ask(new_tab, "SCENARIO:approval")
        tab.approve()
        answered = await tab.resume(messages=[], **fields)
        continued(answered, None if fields else exchange.run_id)
        assert tab.text == f"Email outcome: {SENT}"
        await reloaded(new_tab, tab)
        assert len(server.executed(tab.thread_id)) == 1


async def test_a_page_with_a_window_answers_too(new_tab: NewTab) -> None:
    """It posts from the last user message on; nothing of the thread is lost."""
    first = new_tab()
    for _ in range(3):
        await first.send("SCENARIO:text")
    tab = new_tab(first.thread_id, page_size=2, tools=browser_tools())
    await tab.load()
    exchange = await tab.send("SCENARIO:approval")
    assert exchange.body is not None
    assert [row["role"] for row in exchange.body["messages"]] == ["user"]
    assert exchange.outcome == "interrupt"
    tab = new_tab(first.thread_id, page_size=2, tools=browser_tools())
    await tab.load()
    assert len(tab.messages) == 2
    tab.approve()
    answered = await tab.resume()
    assert answered.body is not None
    assert [row["role"] for row in answered.body["messages"]] == ["user", "assistant"]
    continued(answered, exchange.run_id)
    assert tab.text == f"Email outcome: {SENT}"
    whole = new_tab(first.thread_id)
    await whole.load()
    assert [m["role"] for m in whole.messages] == ["user", "assistant"] * 4 + ["assistant"]


async def test_answers_in_the_scope_of_a_user(new_tab: NewTab) -> None:
    """Another user neither sees the question nor can answer it."""
    ada = new_tab(headers={"x-user": "ada"}, tools=browser_tools())
    exchange = await ada.send("SCENARIO:approval")
    assert exchange.outcome == "interrupt"
    before = await new_tab(ada.thread_id, headers={"x-user": "ada"}).load()
    for headers in ({"x-user": "bob"}, {}):
        bob = new_tab(ada.thread_id, headers=headers)
        assert (await bob.load())["interrupts"] is None
        bob.view.interrupts, bob.view.paused_run = exchange.interrupts, exchange.run_id
        bob.approve()
        refused(await bob.resume(), "unknown-interrupt", "incomplete-batch")
    assert await new_tab(ada.thread_id, headers={"x-user": "ada"}).load() == before
    ada.approve()
    continued(await ada.resume(), exchange.run_id)
