"""A paused run is continued by an answer: claimed at the start, stored with the next boundary."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.engine import client_tool
from chatkeep.engine.interrupts import (
    define_interrupt,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)
from chatkeep.persistence import hydrate_thread
from chatkeep.records import UNSET

pytestmark = pytest.mark.anyio

PAY = [("c1", "pay", {"n": 1})]
LOCATE = [("c1", "locate", {"n": 1})]
SIGN = [("c1", "sign", {"n": 1})]


def paused(end: Any) -> list[str]:
    """Ids of the interrupts that a run paused with."""
    assert isinstance(end, RunFinishedEvent), end
    assert end.outcome is not None
    assert end.outcome.type == "interrupt", end.outcome
    return [interrupt.id for interrupt in end.outcome.interrupts]


def ended_well(end: Any) -> None:
    assert isinstance(end, RunFinishedEvent), end
    assert end.outcome is None or end.outcome.type == "success", end.outcome


async def test_a_pause_is_stored_with_its_question_before_it_is_seen(lab: Any, kit: Any) -> None:
    assert paused(await lab.pause(PAY)) == ["approval_c1"]
    (record,) = await lab.persistence.stores.interrupts.list("t1")
    assert (record.status, record.run_id, record.claimed_by) == ("pending", "r1", None)
    run = await lab.run("r1")
    assert (run.status, run.finished_at, run.lease) == ("interrupted", None, None)
    assert run.usage["totalTokens"] == 3
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["activeRun"] is None
    assert body["interrupts"]["runId"] == "r1"
    (shown,) = body["interrupts"]["pending"]
    assert shown == {**record.payload, "owner": True}


async def test_an_approval_executes_once_and_is_stored_with_the_finish(lab: Any) -> None:
    await lab.pause(PAY)
    end = await lab.resume(resume_approve("approval_c1"), parent_run_id="r1", turns=[PAY])
    ended_well(end)
    assert lab.bank.paid == [1]
    assert await lab.settled() == {"approval_c1": ("resolved", {"approved": True})}
    assert await lab.said() == [
        "user: hello",
        "assistant: None",
        'tool: {"paid":1}',
        'assistant: said {"paid":1}',
    ]
    assert [(await lab.run(name)).status for name in ("r1", "r2")] == ["interrupted", "completed"]
    assert (await hydrate_thread(lab.persistence, "t1"))["interrupts"] is None


@pytest.mark.parametrize("named", ["r1", None])
async def test_the_paused_run_need_not_be_named(lab: Any, named: str | None) -> None:
    await lab.pause(PAY)
    ended_well(await lab.resume(resume_approve("approval_c1"), parent_run_id=named))
    assert lab.bank.paid == [1]


async def test_edited_arguments_are_executed(lab: Any) -> None:
    await lab.pause(PAY)
    ended_well(await lab.resume(resume_approve("approval_c1", edited_args={"n": 9})))
    assert lab.bank.paid == [9]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (resume_deny("approval_c1"), "User declined tool execution"),
        (resume_cancel("approval_c1"), "Tool execution cancelled"),
    ],
)
async def test_a_refused_or_cancelled_call_is_not_executed(lab: Any, entry: Any, text: str) -> None:
    await lab.pause(PAY)
    ended_well(await lab.resume(entry))
    assert lab.bank.paid == []
    (row,) = [m for m in await lab.stored() if m["role"] == "tool"]
    assert text in row["content"]
    ((status, response),) = (await lab.settled()).values()
    assert status == entry["status"]
    assert response == entry.get("payload", UNSET)


async def test_what_a_browser_tool_returned_is_its_result(lab: Any) -> None:
    assert paused(await lab.pause(LOCATE)) == ["client_tool_c1"]
    ended_well(await lab.resume(resume_output("client_tool_c1", {"city": "Bonn"}), turns=[LOCATE]))
    assert (await lab.said())[-1] == 'assistant: said {"city":"Bonn"}'


@pytest.mark.parametrize("how", ["marker", "posted"])
async def test_a_browser_tool_that_failed_is_a_failed_result(lab: Any, kit: Any, how: str) -> None:
    """With the marker, or with the failed tool row that an older browser posts instead."""
    await lab.pause(LOCATE)
    entry = resume_error("client_tool_c1", "no signal")
    messages: list[Any] = []
    if how == "posted":
        del entry["metadata"]
        row = {"id": "tool-c1", "role": "tool", "toolCallId": "c1", "content": "null"}
        messages = [*await lab.stored(), {**row, "error": "no signal"}]
    ended_well(await lab.resume(entry, messages=messages, turns=[LOCATE]))
    (row,) = [m for m in await lab.stored() if m["role"] == "tool"]
    assert (json.loads(row["content"]), row["error"]) == ({"error": "no signal"}, "no signal")
    assert await lab.settled() == {"client_tool_c1": ("resolved", {"error": "no signal"})}
    body = await hydrate_thread(lab.persistence, "t1")
    parts = [p for m in body["messages"] for p in m["parts"] if p["type"] == "tool-result"]
    assert [(p["state"], p["error"]) for p in parts] == [("error", "no signal")]


async def test_a_generic_question_is_answered(lab: Any, kit: Any) -> None:
    asks = kit.Asks("beforeModel", "a", "b")
    keep = lab.middleware()
    names = paused(await lab.pause(middleware=[keep, asks]))
    entries = [resume_answer(names[0], {"ok": True}), resume_cancel(names[1])]
    ended_well(
        await lab.resume(
            *entries, middleware=[keep, asks], parent_run_id="r1", adapter=kit.Paced(waits=False)
        )
    )
    assert asks.answers == [("a", "resolved", {"ok": True}), ("b", "cancelled", None)]
    found = await lab.settled()
    assert found == {names[0]: ("resolved", {"ok": True}), names[1]: ("cancelled", UNSET)}


async def test_two_questions_of_one_key_are_told_apart_by_their_ids(lab: Any, kit: Any) -> None:
    asks = kit.Asks("beforeModel", "k", "k")
    keep = lab.middleware()
    first, second = paused(await lab.pause(middleware=[keep, asks]))
    entries = [resume_answer(second, {"ok": False}), resume_answer(first, {"ok": True})]
    options = {"middleware": [keep, asks], "parent_run_id": "r1"}
    ended_well(await lab.resume(*entries, adapter=kit.Paced(waits=False), **options))
    assert asks.answers == [("k", "resolved", {"ok": True}), ("k", "resolved", {"ok": False})]
    found = await lab.settled()
    assert [found[name][1] for name in (first, second)] == [{"ok": True}, {"ok": False}]


async def test_a_cancelled_browser_tool_completes_the_turn(lab: Any) -> None:
    await lab.pause(LOCATE)
    ended_well(await lab.resume(resume_cancel("client_tool_c1"), turns=[LOCATE]))
    (row,) = [m for m in await lab.stored() if m["role"] == "tool"]
    assert row["error"] == "Tool execution cancelled"
    assert (await lab.said())[-1] == 'assistant: said {"error":"Tool execution cancelled"}'


async def test_an_approved_browser_tool_pauses_twice_and_its_decision_holds(lab: Any) -> None:
    assert paused(await lab.pause(SIGN)) == ["approval_c1"]
    second = await lab.resume(
        resume_approve("approval_c1", edited_args={"n": 5}), turns=[SIGN], parent_run_id="r1"
    )
    assert paused(second) == ["client_tool_c1"]
    assert second.outcome.interrupts[0].metadata["input"] == {"n": 5}
    assert (await lab.settled())["approval_c1"][0] == "resolved"
    end = await lab.resume(
        resume_output("client_tool_c1", {"city": "Rome"}), turns=[SIGN], parent_run_id="r2"
    )
    ended_well(end)
    assert (await lab.said())[-1] == 'assistant: said {"city":"Rome"}'
    statuses = [(await lab.run(name)).status for name in ("r1", "r2", "r3")]
    assert statuses == ["interrupted", "interrupted", "completed"]


async def test_a_mixed_batch_is_answered_as_one(lab: Any) -> None:
    turn = [("c1", "look", {"n": 1}), ("c2", "pay", {"n": 2}), ("c3", "locate", {"n": 3})]
    assert paused(await lab.pause(turn)) == ["approval_c2", "client_tool_c3"]
    assert lab.bank.looked == []
    ended_well(
        await lab.resume(
            resume_output("client_tool_c3", {"city": "Oslo"}),
            resume_approve("approval_c2"),
            turns=[turn],
        )
    )
    assert (lab.bank.looked, lab.bank.paid) == ([1], [2])
    rows = [m["toolCallId"] for m in await lab.stored() if m["role"] == "tool"]
    assert rows == ["c1", "c2", "c3"]


async def test_a_browser_tool_beside_answered_questions_is_settled_and_asked_again(
    lab: Any, kit: Any
) -> None:
    """The first interrupt ends as cancelled in the commit that asks the second."""
    asks = kit.Asks("beforeTools")
    keep = lab.middleware()
    tool, question = paused(await lab.pause(LOCATE, middleware=[keep, asks]))
    again = await lab.resume(
        resume_answer(question, {"ok": True}),
        turns=[LOCATE],
        middleware=[keep, asks],
        parent_run_id="r1",
    )
    assert paused(again) == [tool] == ["client_tool_c1"]
    records = await lab.persistence.stores.interrupts.list("t1")
    assert [(r.run_id, r.status) for r in records if r.interrupt_id == tool] == [
        ("r1", "cancelled"),
        ("r2", "pending"),
    ]
    ended_well(
        await lab.resume(
            resume_output(tool, {"city": "Bern"}),
            turns=[LOCATE],
            middleware=[keep, asks],
            parent_run_id="r2",
        )
    )
    assert (await lab.said())[-1] == 'assistant: said {"city":"Bern"}'


async def test_an_approval_that_holds_no_more_is_asked_for_anew_beside_answered_questions(
    lab: Any, kit: Any
) -> None:
    """Browsers leave their tools out of such a batch, so it must not be refused for one."""

    class AsksLater(kit.Asks):  # type: ignore[misc]
        async def on_interrupt_boundary(self, ctx: Any, boundary: Any) -> Any:
            seen = ctx.state(self, dict[str, bool])
            if boundary != "beforeTools" or seen or ctx.run_id != "r2":
                return None
            seen["asked"] = True
            definition = self.definition
            return [definition.request(key="k", reason="r", message="?", payload={})]

    asks = AsksLater()
    asks.definition = define_interrupt("later", payload={"type": "object"})
    options: dict[str, Any] = {
        "middleware": [lab.middleware(), asks],
        "interrupts": [asks.definition],
        "turns": [SIGN],
    }
    await lab.pause(SIGN)
    tool, question = paused(await lab.resume(resume_approve("approval_c1"), **options))
    assert tool == "client_tool_c1"
    changed = client_tool(
        name="sign", description="", input_schema={"type": "object"}, needs_approval=True
    )
    again = await lab.resume(resume_answer(question, None), tools=[changed], **options)
    assert paused(again) == ["approval_c1"]
    assert (await lab.settled())["client_tool_c1"] == ("cancelled", UNSET)


@pytest.mark.parametrize(("name", "args"), [("pay", {"n": 1}), ("locate", {"n": 1})])
@pytest.mark.parametrize("call_id", ["c" * 1020, "é" * 600, "c\x001", "c" * 5000])
async def test_a_call_whose_id_is_no_id_of_a_store_pauses_and_goes_on_all_the_same(
    lab: Any, name: str, args: Any, call_id: str
) -> None:
    """Some providers keep signatures in the ids of calls."""
    turns = [[(call_id, name, args)]]
    (asked,) = paused(await lab.pause(*turns))
    body = await hydrate_thread(lab.persistence, "t1")
    (shown,) = body["interrupts"]["pending"]
    assert (shown["id"], shown["toolCallId"]) == (asked, call_id)
    answer = resume_approve(asked) if name == "pay" else resume_output(asked, {"city": "Bonn"})
    ended_well(await lab.resume(answer, turns=turns))
    (row,) = [m for m in await lab.stored() if m["role"] == "tool"]
    assert row["toolCallId"] == call_id


async def test_a_run_that_asks_again_under_its_own_id_gives_its_questions_other_ids(
    lab: Any, kit: Any
) -> None:
    """An id names one question of a run, also when a browser's tool must be asked once more."""
    keep, asks = lab.middleware(), kit.Asks("beforeTools")
    own: dict[str, Any] = {"run_id": "r1", "turns": [LOCATE]}
    tool, question = paused(await lab.pause(LOCATE, middleware=[keep, asks]))
    for number in (2, 3):
        again = paused(
            await lab.resume(
                resume_answer(question, {"ok": True}),
                middleware=[keep, asks := kit.Asks("beforeTools")],
                **own,
            )
        )
        assert again[0] == f"client_tool_c1~{number}"
        question = again[1]
    tool = again[0]
    entries = [resume_output(tool, {"city": "Bern"}), resume_answer(question, {"ok": True})]
    ended_well(await lab.resume(*entries, middleware=[keep], **own))
    assert (await lab.said())[-1] == 'assistant: said {"city":"Bern"}'
    assert await lab.waiting() == []


async def test_a_run_that_goes_on_under_its_own_id_keeps_its_first_part_beside_other_turns(
    lab: Any, kit: Any
) -> None:
    """Rows with its tag are no leftovers of a process that died: it started from them."""
    asking, other = kit.Calls([PAY], waits=True), kit.Paced(after=("B",))
    first = lab.start(kit.user("u1"), adapter=asking, run_id="A")
    await asking.began.wait()
    second = lab.start(kit.user("uB"), adapter=other, run_id="B")
    await other.began.wait()
    asking.go.set()
    await first
    other.go.set()
    await second
    ended_well(await lab.resume(resume_approve("approval_c1"), run_id="A", parent_run_id="A"))
    assert await lab.said() == [
        "user: hello",
        "assistant: None",
        'tool: {"paid":1}',
        'assistant: said {"paid":1}',
        "user: hello",
        "assistant: one B",
    ]
    assert await lab.persistence.stores.messages.list_cuts("t1") == []


async def test_a_continuation_that_pauses_again_settles_and_asks_in_one_commit(lab: Any) -> None:
    turns = [PAY, [("c2", "pay", {"n": 2})]]
    await lab.pause(*turns)
    lab.faults.log.clear()
    assert paused(await lab.resume(resume_approve("approval_c1"), turns=turns)) == ["approval_c2"]
    assert lab.faults.log == ["read_view", "commit_turn", "commit_turn"]
    assert await lab.settled() == {"approval_c1": ("resolved", {"approved": True})}
    assert await lab.waiting() == ["approval_c2"]
    ended_well(await lab.resume(resume_approve("approval_c2"), turns=turns, parent_run_id="r2"))
    assert lab.bank.paid == [1, 2]
    assert (await lab.run("r3")).usage["totalTokens"] == 3


async def test_answers_after_which_a_middleware_stops_are_given_and_nothing_is_executed(
    lab: Any, kit: Any
) -> None:
    """The calls stay open; the next turn tells the model so."""

    class Stops(kit.Asks):  # type: ignore[misc]
        async def on_interrupt_resolution(self, ctx: Any, resolutions: Any) -> Any:
            return "stop"

    middleware = [lab.middleware(), Stops("beforeTools")]
    call, question = paused(await lab.pause(PAY, middleware=middleware))
    entries = [resume_approve(call), resume_answer(question, {"ok": False})]
    ended_well(await lab.resume(*entries, middleware=middleware, parent_run_id="r1"))
    assert lab.bank.paid == []
    assert {status for status, _ in (await lab.settled()).values()} == {"resolved"}
    assert (await lab.run("r2")).status == "completed"
    model = kit.Paced(waits=False)
    ended_well(kit.terminal(await lab.turn(kit.user("u2"), adapter=model)))
    assert [m["role"] for m in model.requests[0].messages] == ["user", "assistant", "tool", "user"]


async def test_a_request_that_a_proxy_repeats_is_refused_by_its_run(lab: Any) -> None:
    await lab.pause(PAY)
    ended_well(await lab.resume(resume_approve("approval_c1"), run_id="once"))
    before = await lab.everything()
    again = await lab.resume(resume_approve("approval_c1"), run_id="once")
    assert again.code == "run-conflict"
    assert await lab.everything() == before
    assert lab.bank.paid == [1]


async def test_the_request_that_paused_is_not_played_again_once_it_is_answered(
    lab: Any, kit: Any
) -> None:
    """Repeated under its run id, as it was or with an old answer: the run that went on with it
    has had its turn, so nothing is asked or executed anew."""
    await lab.pause(PAY)
    ended_well(await lab.resume(resume_approve("approval_c1")))
    before = await lab.everything()
    model = kit.Calls([PAY])
    again = kit.terminal(await lab.turn(kit.user("u1"), adapter=model, run_id="r1"))
    late = await lab.resume(resume_approve("approval_c1"), run_id="r1")
    assert (again.code, late.code) == ("run-conflict", "run-conflict")
    assert await lab.everything() == before
    assert (model.requests, lab.bank.paid) == ([], [1])


# -------------------------------------------------------------- while it continues, and after


async def test_a_reload_is_shown_the_continuation_instead_of_its_question(lab: Any) -> None:
    await lab.pause(PAY)
    lab.bank.gate.clear()
    task = asyncio.create_task(lab.resume(resume_approve("approval_c1")))
    await lab.bank.paying.wait()
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == ({"runId": "r2"}, None)
    assert await lab.settled() == {}
    lab.bank.gate.set()
    ended_well(await task)
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == (None, None)


async def test_a_continuation_under_the_paused_runs_own_id_is_shown_too(lab: Any) -> None:
    await lab.pause(PAY)
    lab.bank.gate.clear()
    task = asyncio.create_task(lab.resume(resume_approve("approval_c1"), run_id="r1"))
    await lab.bank.paying.wait()
    assert (await lab.run("r1")).status == "interrupted"
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == ({"runId": "r1"}, None)
    assert await lab.persistence.stores.runs.find_active_run("t1") is None
    lab.bank.gate.set()
    ended_well(await task)
    run = await lab.run("r1")
    assert (run.status, run.usage["totalTokens"]) == ("completed", 6)


@pytest.mark.parametrize("end", ["pauses", "fails", "stops"])
async def test_a_run_under_its_own_id_ends_in_every_way(lab: Any, kit: Any, end: str) -> None:
    turns = [PAY, [("c2", "pay", {"n": 2})]]
    await lab.pause(*turns)
    options: dict[str, Any] = {"run_id": "r1", "parent_run_id": "r1"}
    if end == "pauses":
        second = await lab.resume(resume_approve("approval_c1"), turns=turns, **options)
        assert paused(second) == ["approval_c2"]
        ended_well(await lab.resume(resume_approve("approval_c2"), turns=turns, **options))
    elif end == "fails":
        model = kit.Paced(waits=False, error=RuntimeError("no"))
        await lab.resume(resume_approve("approval_c1"), adapter=model, **options)
        assert await lab.waiting() == ["approval_c1"]
    else:
        model = kit.Paced()
        task = asyncio.create_task(
            lab.resume(resume_approve("approval_c1"), adapter=model, **options)
        )
        await model.began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    want = {"pauses": "completed", "fails": "failed", "stops": "aborted"}
    run = await lab.run("r1")
    assert run.status == want[end]
    assert run.finished_at is not None


@pytest.mark.parametrize("end", ["failed", "aborted"])
async def test_a_continuation_that_does_not_succeed_releases_its_answers(
    lab: Any, kit: Any, end: str
) -> None:
    """Nothing is consumed, and the same batch can be sent again."""
    await lab.pause(PAY)
    error = RuntimeError("no") if end == "failed" else None
    model = kit.Paced(waits=end == "aborted", error=error)
    task = asyncio.create_task(lab.resume(resume_deny("approval_c1"), adapter=model))
    if end == "aborted":
        await model.began.wait()
        assert (await hydrate_thread(lab.persistence, "t1"))["interrupts"] is None
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await lab.run("r2")).status == end
    assert await lab.settled() == {}
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1"]
    assert body["interrupts"]["runId"] == "r1"
    ended_well(await lab.resume(resume_approve("approval_c1"), parent_run_id="r1"))


async def test_after_a_failed_continuation_its_executed_call_is_not_executed_again(
    lab: Any, kit: Any
) -> None:
    """The result is stored with the run's end, so the repeated batch finds the call answered."""
    await lab.pause(PAY)
    model = kit.Paced(waits=False, error=RuntimeError("no"))
    end = await lab.resume(resume_approve("approval_c1"), adapter=model)
    assert isinstance(end, RunErrorEvent)
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool"]
    ended_well(await lab.resume(resume_approve("approval_c1"), parent_run_id="r1"))
    assert lab.bank.paid == [1]
    assert (await lab.said())[-1] == 'assistant: said {"paid":1}'


async def test_the_posted_history_of_the_browser_changes_nothing(lab: Any, kit: Any) -> None:
    """All that is shown comes along, with a placeholder for the result."""
    await lab.pause(PAY)
    placeholder = {"approved": True, "pendingExecution": True, "message": "User approved this"}
    shown = [
        *await lab.stored(),
        {"id": "tool-c1", "role": "tool", "toolCallId": "c1", "content": json.dumps(placeholder)},
    ]
    ended_well(await lab.resume(resume_approve("approval_c1"), messages=shown, parent_run_id="r1"))
    assert lab.bank.paid == [1]
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool", "assistant"]


async def test_the_next_turn_after_an_answer_is_an_ordinary_one(lab: Any, kit: Any) -> None:
    await lab.pause(PAY)
    await lab.resume(resume_approve("approval_c1"))
    ended_well(kit.terminal(await lab.turn(kit.user("u2"))))
    assert [m["role"] for m in await lab.stored()][-2:] == ["user", "assistant"]


async def test_a_continuation_cuts_nothing_and_writes_behind_its_own_turn(
    lab: Any, kit: Any
) -> None:
    """Another tab began a turn before the first one paused: both stay whole, in their order."""
    other = kit.Paced(after=("B",))
    asking = kit.Calls([PAY], waits=True)
    first = lab.start(kit.user("u1"), adapter=asking, run_id="A")
    second = lab.start(kit.user("uB"), adapter=other, run_id="B")
    await asking.began.wait()
    await other.began.wait()
    asking.go.set()
    await first
    other.go.set()
    await second
    rows = await lab.stored()
    assert sorted(m["id"] for m in rows if m["role"] == "user") == ["u1", "uB"]
    tab = [m for m in rows if m.get("id") != "uB" and m.get("content") != "one B"]
    ended_well(await lab.resume(resume_approve("approval_c1"), messages=tab, parent_run_id="A"))
    said = await lab.said()
    at = said.index("user: hello") if rows[0]["id"] == "u1" else said.index("user: hello", 1)
    assert said[at : at + 4] == [
        "user: hello",
        "assistant: None",
        'tool: {"paid":1}',
        'assistant: said {"paid":1}',
    ]
    assert "assistant: one B" in said
    assert len(said) == 6
    assert await lab.persistence.stores.messages.list_cuts("t1") == []


async def test_two_paused_runs_are_answered_one_after_the_other(lab: Any, kit: Any) -> None:
    """A reload shows the questions of one run at a time, since a browser answers one."""
    pays = [("cA", "pay", {"n": 1})], [("cB", "pay", {"n": 2})]
    models = [kit.Calls([turn], waits=True) for turn in pays]
    tasks = [
        lab.start(kit.user(f"u{name}"), adapter=model, run_id=name)
        for name, model in zip("AB", models, strict=True)
    ]
    for model in models:
        await model.began.wait()
    for model in models:
        model.go.set()
    await asyncio.gather(*tasks)
    assert sorted(await lab.waiting()) == ["approval_cA", "approval_cB"]
    while (body := await hydrate_thread(lab.persistence, "t1"))["interrupts"] is not None:
        run_id = body["interrupts"]["runId"]
        (question,) = body["interrupts"]["pending"]
        assert question["id"] == f"approval_c{run_id}"
        ended_well(
            await lab.resume(
                resume_approve(question["id"]),
                parent_run_id=run_id,
                turns=[pays["AB".index(run_id)]],
            )
        )
    assert sorted(lab.bank.paid) == [1, 2]
    said = await lab.said()
    for number, name in ((1, "A"), (2, "B")):
        at = (await lab.ids()).index(f"u{name}")
        assert said[at + 2 : at + 4] == [
            f'tool: {{"paid":{number}}}',
            f'assistant: said {{"paid":{number}}}',
        ]


async def test_a_question_of_somebody_else_neither_blocks_nor_is_answered(
    lab: Any, kit: Any
) -> None:
    from chatkeep.records import InterruptRecord

    foreign = InterruptRecord(
        interrupt_id="x",
        run_id="other",
        thread_id="t1",
        requested_at=1,
        payload={"id": "x", "reason": "theirs", "message": "?"},
    )
    await lab.persistence.stores.interrupts.create(foreign)
    ended_well(kit.terminal(await lab.turn(kit.user("u0"))))
    await lab.pause(PAY)
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["interrupts"]["runId"] == "r2"
    shown = {p["id"]: p["owner"] for p in body["interrupts"]["pending"]}
    assert shown == {"x": False, "approval_c1": True}
    ended_well(await lab.resume(resume_approve("approval_c1")))
    assert await lab.waiting() == ["x"]


# ---------------------------------------------------------------------------------- drafts


async def drafted(lab: Any, kit: Any, **options: Any) -> tuple[Any, Any]:
    """A continuation that has executed its call and said a word, all of it in its draft."""
    await lab.pause(PAY)
    model = kit.Paced()
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0, **options)
    task = asyncio.create_task(
        lab.resume(resume_approve("approval_c1"), adapter=model, middleware=keep)
    )
    await model.said.wait()
    await lab.until(lambda: keep.counters["drafts_saved"] >= 1)
    return model, task


async def test_a_reload_in_the_middle_shows_the_result_and_what_was_said_so_far(
    lab: Any, kit: Any
) -> None:
    model, task = await drafted(lab, kit)
    for limit in (None, 10):
        body = await hydrate_thread(lab.persistence, "t1", limit=limit)
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "assistant"]
        _, asked, said = body["messages"]
        assert [p["type"] for p in asked["parts"]] == ["tool-call", "tool-result"]
        assert said["parts"][0]["content"] == "one "
    model.go.set()
    ended_well(await task)
    assert await lab.said() == [
        "user: hello", "assistant: None", 'tool: {"paid":1}', "assistant: one two",
    ]  # fmt: skip


async def test_what_a_dead_continuation_executed_is_kept_with_its_draft(lab: Any, kit: Any) -> None:
    """Its sweep puts the draft into the transcript; the repeated answer executes nothing again."""
    _, task = await drafted(lab, kit, lease_ms=60)
    for other in asyncio.all_tasks():
        if other.get_name().startswith("chatkeep lease"):
            other.cancel()
    while not await lab.persistence.maintenance().sweep():  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # a lease that runs out sets no event
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1"]
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool", "assistant"]
    ended_well(await lab.resume(resume_approve("approval_c1"), parent_run_id="r1"))
    assert lab.bank.paid == [1]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    said = await lab.said()
    assert said.count('tool: {"paid":1}') == 1
    assert said[-1] == 'assistant: said {"paid":1}'
