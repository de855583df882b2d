"""Ids of calls are used again, by providers and by tabs: an answer is about one call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatkeep.engine import chat
from chatkeep.engine.interrupts import approval_descriptor, resume_approve, resume_deny
from chatkeep.persistence import hydrate_thread
from chatkeep.records import InterruptRecord

pytestmark = pytest.mark.anyio

YES, NO = resume_approve("approval_c1"), resume_deny("approval_c1")


def asks(row: str, n: int) -> dict[str, Any]:
    call = {"name": "pay", "arguments": json.dumps({"n": n})}
    return {
        "id": row,
        "role": "assistant",
        "toolCalls": [{"id": "c1", "type": "function", "function": call}],
    }


def used_again(kit: Any) -> list[dict[str, Any]]:
    """A thread that another server wrote: two calls of one id, the later one is open."""
    paid = {"id": "row1", "role": "tool", "toolCallId": "c1", "content": '{"paid":1}'}
    done = {"id": "a2", "role": "assistant", "content": "done"}
    return [kit.user("u1"), asks("a1", 1), paid, done, kit.user("u2"), asks("a3", 2)]


async def outputs(lab: Any) -> list[Any]:
    body = await hydrate_thread(lab.persistence, "t1")
    parts = [part for message in body["messages"] for part in message["parts"]]
    return [part.get("output") for part in parts if part["type"] == "tool-call"]


async def test_an_answer_is_about_the_last_call_of_its_id(lab: Any, kit: Any) -> None:
    """The earlier call keeps its result; the later one is executed, with its own arguments."""
    await lab.fill(*used_again(kit))
    (pay,) = [tool for tool in lab.bank.tools() if tool.name == "pay"]
    await lab.persistence.stores.interrupts.create(
        InterruptRecord(
            interrupt_id="approval_c1",
            run_id="r0",
            thread_id="t1",
            requested_at=1,
            payload=approval_descriptor(pay, "c1", {"n": 2}, "r0"),
        )
    )
    end = await lab.resume(YES, parent_run_id="r0")
    assert end.outcome is None or end.outcome.type == "success"
    assert lab.bank.paid == [2]
    assert await outputs(lab) == [{"paid": 1}, {"paid": 2}]


async def test_without_a_store_too(kit: Any) -> None:
    bank = kit.Bank()
    model = kit.Calls([])
    stream = chat(
        adapter=model,
        messages=used_again(kit),
        tools=bank.tools(),
        thread_id="t1",
        run_id="r2",
        parent_run_id="r1",
        resume=[YES],
    )
    kit.terminal([event async for event in stream])
    assert bank.paid == [2]
    (request,) = model.requests
    results = [m["content"] for m in request.messages if m["role"] == "tool"]
    assert results == ['{"paid":1}', '{"paid":2}']


@pytest.mark.parametrize("first", ["r1", "r2"])
async def test_two_tabs_whose_provider_uses_one_call_id_are_answered_each_for_itself(
    lab: Any, kit: Any, first: str
) -> None:
    """Whichever is answered first: a yes executes the call that was shown with the question."""
    models = {
        run: kit.Calls([[("c1", "pay", {"n": n})]], waits=True) for run, n in (("r1", 1), ("r2", 2))
    }
    tabs: list[Any] = []
    for run, model in models.items():
        tabs.append((model, lab.start(kit.user(f"u-{run}"), adapter=model, run_id=run)))
        await model.began.wait()
    for model, tab in tabs:
        model.go.set()
        assert kit.terminal(await tab).outcome.type == "interrupt"
    second = "r2" if first == "r1" else "r1"
    for run, answer in ((first, YES), (second, NO)):
        models[run].waits = False
        await lab.resume(answer, parent_run_id=run, adapter=models[run])
    assert lab.bank.paid == [1 if first == "r1" else 2]
    refused = {"error": "User declined tool execution"}
    paid = {"paid": lab.bank.paid[0]}
    assert await outputs(lab) == ([paid, refused] if first == "r1" else [refused, paid])
    assert await lab.waiting() == []
