"""Answers that are refused: the codes that the browser knows, and not one byte written."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import time
from collections.abc import Callable
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.engine import ChatMiddleware
from chatkeep.engine.interrupts import (
    BINDING_KEY,
    PAYLOAD_KEY,
    PROOF_KEY,
    define_interrupt,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)
from chatkeep.errors import InterruptResumeError
from chatkeep.memory import memory_persistence
from chatkeep.records import InterruptRecord
from chatkeep.stores import InterruptAnswer

pytestmark = pytest.mark.anyio

PAY = [("c1", "pay", {"n": 1})]
LOCATE = [("c1", "locate", {"n": 1})]
SIGN = [("c1", "sign", {"n": 1})]
YES = resume_approve("approval_c1")


async def refused(
    lab: Any, *entries: Any, messages: Any = (), **options: Any
) -> list[tuple[str, str]]:
    """Scope and code of each error of a request that is refused, and proof that it wrote
    nothing: no run, no message, no claim."""
    before = await lab.everything()
    commits = lab.faults.calls["commit_turn"]
    paid = list(lab.bank.paid)
    end = await lab.resume(*entries, run_id="refused", messages=list(messages), **options)
    assert isinstance(end, RunErrorEvent), end
    assert await lab.everything() == before
    assert lab.faults.calls["commit_turn"] == commits
    assert lab.bank.paid == paid
    assert await lab.run("refused") is None
    errors = end.metadata["tanstack"]["interruptErrors"]
    sent = [entry["interruptId"] for entry in entries]
    named = options.get("parent_run_id")
    for error in errors:
        assert (error["threadId"], error["generation"]) == ("t1", 0)
        assert error["retryable"] is False
        assert named is None or error["interruptedRunId"] == named
        assert error["scope"] == "item" or error["interruptIds"] == sent
    assert end.code == errors[0]["code"]
    return [(error["scope"], error["code"]) for error in errors]


def only(*codes: str) -> list[tuple[str, str]]:
    """One item error and its batch error."""
    item, batch = codes
    return [("item", item), ("batch", batch)]


async def rewrite(lab: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    """Have the one pending interrupt be as a foreign or an older writer left it."""
    store = lab.persistence.stores.interrupts
    (record,) = await store.list_pending("t1")
    payload = copy.deepcopy(record.payload)
    change(payload)
    await lab.persistence.delete_thread("t1")
    await store.create(
        InterruptRecord(
            interrupt_id=record.interrupt_id,
            run_id=record.run_id,
            thread_id="t1",
            requested_at=record.requested_at,
            payload=payload,
        )
    )


# ------------------------------------------------------------------ R1 to R7: the batch


async def test_r1_answers_for_two_paused_runs_are_stale(lab: Any) -> None:
    store = lab.persistence.stores.interrupts
    for run in ("rA", "rB"):
        await store.create(
            InterruptRecord(
                interrupt_id=f"i-{run}", run_id=run, thread_id="t1", requested_at=1, payload={}
            )
        )
    both = [resume_answer("i-rA", 1), resume_answer("i-rB", 1)]
    assert await refused(lab, *both) == [("batch", "stale")]
    assert await refused(lab, resume_answer("i-none", 1)) == [("batch", "stale")]
    codes = await refused(lab, *both, parent_run_id="rA")
    assert codes == [
        ("item", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
        ("batch", "item-validation-failed"),
    ]


async def test_r2_an_interrupt_that_is_answered_twice_is_a_conflict(lab: Any) -> None:
    await lab.pause(PAY)
    no = resume_deny("approval_c1")
    assert await refused(lab, YES, no) == only("conflict", "conflict")
    assert await refused(lab, YES, YES, parent_run_id="r1") == only("conflict", "conflict")


async def test_r3_an_answer_where_nothing_waits_is_unknown(lab: Any, kit: Any) -> None:
    await lab.pause(PAY)
    await lab.resume(YES, parent_run_id="r1")
    again = await refused(lab, YES, parent_run_id="r1")
    assert again == only("unknown-interrupt", "incomplete-batch")


async def test_r4_a_post_that_ignores_the_question_is_refused(lab: Any, kit: Any) -> None:
    """New input, the whole history with new input, nothing at all, and a regenerate."""
    await lab.pause(PAY)
    shown = await lab.stored()
    for messages in ([kit.user("u2")], [*shown, kit.user("u2")], [], shown[:1]):
        codes = await refused(lab, messages=messages)
        assert codes == only("unknown-interrupt", "incomplete-batch")
    assert await lab.waiting() == ["approval_c1"]


async def test_r5_and_r7_a_batch_that_lacks_or_adds_an_answer_is_incomplete(lab: Any) -> None:
    await lab.pause([*PAY, ("c2", "pay", {"n": 2})])
    incomplete = ("batch", "incomplete-batch")
    failed = ("batch", "item-validation-failed")
    missing = await refused(lab, YES)
    assert missing == [("item", "unknown-interrupt"), incomplete, failed]
    two = [YES, resume_approve("approval_c2")]
    extra = await refused(lab, *two, resume_approve("approval_c9"))
    assert extra == [("item", "unknown-interrupt"), incomplete, failed]


@pytest.mark.parametrize("status", ["done", "", None, 1, ["resolved"]])
async def test_r6_a_status_that_is_none_is_refused(lab: Any, status: Any) -> None:
    await lab.pause(PAY)
    codes = await refused(lab, {"interruptId": "approval_c1", "status": status})
    assert codes == only("invalid-payload", "item-validation-failed")


async def test_an_answer_for_another_run_is_stale(lab: Any) -> None:
    """Whatever the other run is: unknown, ended, this thread's or another thread's."""
    await lab.pause(PAY, run_id="elsewhere", thread_id="t2")
    await lab.pause(PAY)
    for named in ("nobody", "elsewhere", "refused"):
        assert await refused(lab, YES, parent_run_id=named) == only("stale", "stale")
    assert len(await lab.persistence.stores.interrupts.list_pending("t2")) == 1


async def test_an_answer_of_another_thread_is_unknown_here(lab: Any) -> None:
    await lab.pause(PAY, run_id="elsewhere", thread_id="t2")
    assert await refused(lab, YES) == only("unknown-interrupt", "incomplete-batch")
    (record,) = await lab.persistence.stores.interrupts.list_pending("t2")
    assert record.claimed_by is None


# ------------------------------------------------------ R8 to R15: what a record says of itself


def unbind(payload: dict[str, Any]) -> None:
    payload.pop("message")


def version(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY]["v"] = 2


def torn(payload: dict[str, Any]) -> None:
    del payload["metadata"][BINDING_KEY]["inputSchemaHash"]


def nonsense(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY] = "x"


def other_id(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY]["interruptId"] = "approval_c2"


def other_run(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY]["interruptedRunId"] = "r9"


def generation(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY]["generation"] = 1


def other_call(payload: dict[str, Any]) -> None:
    payload["toolCallId"] = "c2"


@pytest.mark.parametrize(
    "change", [version, torn, nonsense, other_id, other_run, generation, other_call]
)
async def test_r8_to_r10_a_record_whose_binding_does_not_fit_it_is_stale(
    lab: Any, change: Callable[[dict[str, Any]], None]
) -> None:
    await lab.pause(PAY)
    await rewrite(lab, change)
    assert await refused(lab, YES) == only("stale", "item-validation-failed")


def other_response(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY]["responseSchemaHash"] = "sha256:0"


def no_response(payload: dict[str, Any]) -> None:
    del payload["responseSchema"]


@pytest.mark.parametrize("change", [other_response, no_response])
async def test_v6_a_response_schema_that_is_not_the_bound_one(
    lab: Any, change: Callable[[dict[str, Any]], None]
) -> None:
    await lab.pause(PAY)
    await rewrite(lab, change)
    codes = await refused(lab, YES)
    assert codes == only("invalid-response-schema", "item-validation-failed")


async def asked(lab: Any, kit: Any, *keys: str, **options: Any) -> list[str]:
    """Ids of generic questions that wait."""
    middleware = [lab.middleware(), kit.Asks("beforeModel", *keys, **options)]
    end = await lab.pause(middleware=middleware)
    return [interrupt.id for interrupt in end.outcome.interrupts]


async def test_r11_and_r12_a_definition_that_is_not_registered_is_stale(lab: Any, kit: Any) -> None:
    (name,) = await asked(lab, kit)
    entry = resume_answer(name, {"ok": True})
    for definitions in ([], [define_interrupt("other")]):
        codes = await refused(lab, entry, interrupts=definitions)
        assert codes == only("stale", "item-validation-failed")


def shown_otherwise(payload: dict[str, Any]) -> None:
    payload["metadata"][PAYLOAD_KEY] = "no object"


def shown_nothing(payload: dict[str, Any]) -> None:
    del payload["metadata"][PAYLOAD_KEY]


@pytest.mark.parametrize("change", [shown_otherwise, shown_nothing])
async def test_r13_a_question_that_cannot_be_rebuilt_is_stale(
    lab: Any, kit: Any, change: Callable[[dict[str, Any]], None]
) -> None:
    (name,) = await asked(lab, kit)
    await rewrite(lab, change)
    codes = await refused(lab, resume_answer(name, {"ok": True}))
    assert codes == only("stale", "item-validation-failed")


async def test_r14_a_definition_whose_schemas_drifted_is_stale(lab: Any, kit: Any) -> None:
    (name,) = await asked(lab, kit)
    entry = resume_answer(name, {"ok": True})
    for drifted in (
        define_interrupt("review", response={"type": "object"}, payload={"type": "object"}),
        define_interrupt("review", payload={"type": "object"}),
        define_interrupt("review"),
    ):
        codes = await refused(lab, entry, interrupts=[drifted])
        assert codes == only("stale", "item-validation-failed")


def second_index(payload: dict[str, Any]) -> None:
    payload["metadata"][BINDING_KEY].pop("batchIndex")


async def test_r15_a_question_without_a_place_in_its_batch_is_stale(lab: Any, kit: Any) -> None:
    (name,) = await asked(lab, kit)
    await rewrite(lab, second_index)
    codes = await refused(lab, resume_answer(name, {"ok": True}))
    assert codes == only("stale", "item-validation-failed")


# --------------------------------------------------------------------- V: what is answered


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (resume_approve("approval_c1", edited_args={"n": "x"}), "invalid-edited-args"),
        (resume_approve("approval_c1", payload={"x": 1}), "invalid-payload"),
        (resume_deny("approval_c1", payload={"x": 1}), "invalid-payload"),
        (resume_answer("approval_c1", "yes"), "invalid-payload"),
        (resume_answer("approval_c1", {"approved": "true"}), "invalid-payload"),
        (resume_answer("approval_c1", {"approved": True, "more": 1}), "invalid-payload"),
        (resume_answer("approval_c1", None), "invalid-payload"),
        ({"interruptId": "approval_c1", "status": "resolved"}, "invalid-payload"),
        ({"interruptId": "approval_c1", "status": "cancelled", "payload": 1}, "invalid-payload"),
    ],
)
async def test_v_an_approval_that_says_neither_yes_nor_no(lab: Any, entry: Any, code: str) -> None:
    await lab.pause(PAY)
    codes = await refused(lab, entry, parent_run_id="r1")
    assert codes == only(code, "item-validation-failed")


@pytest.mark.parametrize(
    "entry",
    [
        resume_output("client_tool_c1", {"town": "x"}),
        resume_output("client_tool_c1", None),
        {"interruptId": "client_tool_c1", "status": "resolved"},
        resume_output("client_tool_c1", {"error": "no marker, and no failed row"}),
        {**resume_error("client_tool_c1", "x"), "payload": {"error": 1}},
        {**resume_error("client_tool_c1", "x"), "payload": "x"},
    ],
)
async def test_v14_an_output_that_is_none(lab: Any, entry: Any) -> None:
    await lab.pause(LOCATE)
    assert await refused(lab, entry) == only("invalid-tool-output", "item-validation-failed")


async def test_v10_a_response_that_does_not_fit(lab: Any, kit: Any) -> None:
    (name,) = await asked(lab, kit)
    for response in ({"ok": "yes"}, {}, None, 3):
        codes = await refused(lab, resume_answer(name, response))
        assert codes == only("invalid-payload", "item-validation-failed")


@pytest.mark.parametrize(
    ("turn", "entry", "change"),
    [
        (PAY, YES, None),
        (PAY, YES, {"input_schema": {"type": "object"}}),
        (PAY, YES, {"approval_schema": {"type": "object"}}),
        (LOCATE, resume_output("client_tool_c1", {"city": "x"}), None),
        (LOCATE, resume_output("client_tool_c1", {"city": "x"}), {"output_schema": None}),
        (LOCATE, resume_output("client_tool_c1", {"city": "x"}), {"needs_approval": True}),
    ],
)
async def test_v11_to_v13_a_tool_that_is_gone_or_changed_is_stale(
    lab: Any, turn: Any, entry: Any, change: Any
) -> None:
    await lab.pause(turn)
    (_, name, _) = turn[0]
    tools = {tool.name: tool for tool in lab.bank.tools()}
    tool = tools.pop(name)
    if change is not None:
        tools[name] = dataclasses.replace(tool, **change)
    codes = await refused(lab, entry, tools=list(tools.values()))
    assert codes == only("stale", "item-validation-failed")


async def test_every_item_that_is_wrong_is_named(lab: Any) -> None:
    await lab.pause([*PAY, ("c2", "locate", {"n": 2})])
    codes = await refused(
        lab,
        resume_approve("approval_c1", edited_args={}),
        resume_output("client_tool_c2", 5),
        parent_run_id="r1",
    )
    assert codes == [
        ("item", "invalid-edited-args"),
        ("item", "invalid-tool-output"),
        ("batch", "item-validation-failed"),
    ]


async def test_v5_what_has_expired_can_only_be_cancelled(lab: Any, kit: Any) -> None:
    (name,) = await asked(lab, kit, expires_at=1)
    codes = await refused(lab, resume_answer(name, {"ok": True}))
    assert codes == only("expired", "item-validation-failed")
    end = await lab.resume(resume_cancel(name), parent_run_id="r1", adapter=kit.Paced(waits=False))
    assert isinstance(end, RunFinishedEvent)
    assert (await lab.settled())[name][0] == "cancelled"
    assert isinstance(kit.terminal(await lab.turn(kit.user("u2"))), RunFinishedEvent)


async def test_a_cancellation_is_taken_also_when_the_tool_is_gone(lab: Any, kit: Any) -> None:
    await lab.pause(PAY)
    rest = [tool for tool in lab.bank.tools() if tool.name != "pay"]
    end = await lab.resume(resume_cancel("approval_c1"), tools=rest, adapter=kit.Paced(waits=False))
    assert isinstance(end, RunFinishedEvent)
    assert await lab.waiting() == []


async def test_a_refused_batch_can_be_corrected_and_sent_again(lab: Any) -> None:
    await lab.pause(PAY)
    await refused(lab, resume_approve("approval_c1", edited_args={}), parent_run_id="r1")
    assert isinstance(await lab.resume(YES, parent_run_id="r1"), RunFinishedEvent)
    assert lab.bank.paid == [1]


async def test_a_refusal_under_the_paused_runs_own_id_leaves_it_paused(lab: Any) -> None:
    await lab.pause(PAY)
    before = await lab.everything()
    end = await lab.resume(resume_approve("approval_c9"), run_id="r1", parent_run_id="r1")
    assert isinstance(end, RunErrorEvent)
    assert await lab.everything() == before
    run = await lab.run("r1")
    assert (run.status, run.finished_at, run.error) == ("interrupted", None, None)


@pytest.mark.parametrize("payload", [{"deep": "x"}, {"id": 5}, {"id": "i", "reason": "r"}])
async def test_an_opaque_record_gates_and_can_be_answered_or_cancelled(
    lab: Any, kit: Any, payload: dict[str, Any]
) -> None:
    """As older or other writers left it: there is nothing to check an answer against."""
    await lab.persistence.stores.interrupts.create(
        InterruptRecord(
            interrupt_id="i1", run_id="r0", thread_id="t1", requested_at=1, payload=payload
        )
    )
    codes = await refused(lab, messages=[kit.user("u1")])
    assert codes == only("unknown-interrupt", "incomplete-batch")
    model = kit.Paced(waits=False)
    end = await lab.resume(resume_cancel("i1"), messages=[kit.user("u1")], adapter=model)
    assert isinstance(end, RunFinishedEvent)
    assert await lab.waiting() == []


@pytest.mark.parametrize("said", [{"approved": "yes"}, {}, None, {"approved": 1}])
async def test_an_old_approval_without_a_clear_yes_is_a_no(lab: Any, kit: Any, said: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"n":1}'}}
    await lab.fill(kit.user("u1"), {"id": "a1", "role": "assistant", "toolCalls": [call]})
    payload = {"id": "i1", "reason": "approval_required", "message": "?", "toolCallId": "c1"}
    await lab.persistence.stores.interrupts.create(
        InterruptRecord(
            interrupt_id="i1", run_id="r0", thread_id="t1", requested_at=1, payload=payload
        )
    )
    end = await lab.resume(resume_answer("i1", said))
    assert isinstance(end, RunFinishedEvent)
    assert lab.bank.paid == []
    assert await lab.waiting() == []


# ------------------------------------------------------------- P1 to P4: proofs of approvals


async def signed(lab: Any, entry: Any = YES) -> None:
    """A browser tool that was approved and waits for what it returns."""
    await lab.pause(SIGN)
    await lab.resume(entry, turns=[SIGN], parent_run_id="r1")
    assert await lab.waiting() == ["client_tool_c1"]


async def forge(
    lab: Any,
    *,
    question: Callable[[dict[str, Any]], None] | None = None,
    approval: Callable[[dict[str, Any]], None] | None = None,
    response: Any = None,
    keep_approval: bool = True,
) -> None:
    """The two interrupts of an approved browser tool, written anew with something wrong."""
    store = lab.persistence.stores.interrupts
    records = {r.interrupt_id: r for r in await store.list("t1")}
    rows = await lab.stored()
    await lab.persistence.delete_thread("t1")
    await lab.fill(*rows)
    old, new = records["approval_c1"], records["client_tool_c1"]
    payloads = copy.deepcopy((old.payload, new.payload))
    for payload, change in zip(payloads, (approval, question), strict=True):
        if change is not None:
            change(payload)
    if keep_approval:
        await store.create(old.model_copy(update={"payload": payloads[0]}))
        answer = InterruptAnswer(
            interrupt_id="approval_c1",
            response=old.response if response is None else response,
        )
        await store.commit_batch("t1", [answer])
    await store.create(new.model_copy(update={"payload": payloads[1]}))


OUTPUT = resume_output("client_tool_c1", {"city": "Rome"})


def proof(payload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = payload["metadata"][PROOF_KEY]
    return found


async def test_p1_without_its_approval_an_output_is_stale(lab: Any) -> None:
    await signed(lab)
    await forge(lab, keep_approval=False)
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: proof(p).update(interruptId="approval_c2"),
        lambda p: proof(p).update(interruptedRunId="r9"),
    ],
)
async def test_p1_a_proof_of_another_approval_is_stale(lab: Any, change: Any) -> None:
    await signed(lab)
    await forge(lab, question=change)
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: proof(p).update(inputSchemaHash="sha256:0"),
        lambda p: proof(p).update(approvalSchemaHash="sha256:0"),
        lambda p: proof(p).update(generation=1),
        lambda p: proof(p).update(decision={"approved": True, "editedArgs": {"n": 1000}}),
    ],
)
async def test_p2_a_proof_that_is_not_its_approvals_is_stale(lab: Any, change: Any) -> None:
    await signed(lab)
    await forge(lab, question=change)
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["metadata"][BINDING_KEY].update(toolCallId="c2"),
        lambda p: p["metadata"][BINDING_KEY].update(toolName="locate"),
        lambda p: p["metadata"].pop(BINDING_KEY),
        lambda p: p.pop("message"),
    ],
)
async def test_p2_an_approval_of_another_call_is_stale(lab: Any, change: Any) -> None:
    await signed(lab)
    await forge(lab, approval=change)
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


async def test_p3_a_decision_that_does_not_fit_todays_tools_is_stale(lab: Any) -> None:
    await signed(lab)
    await forge(lab, response={"approved": True, "editedArgs": {"n": "many"}})
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


async def test_p4_a_refusal_is_no_approval(lab: Any) -> None:
    await signed(lab)
    await forge(lab, response={"approved": False})
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


async def test_an_output_whose_proof_was_taken_away_needs_the_approval_all_the_same(
    lab: Any,
) -> None:
    """The approval of the call is found by its id."""
    await signed(lab)
    await forge(lab, question=lambda p: p["metadata"].pop(PROOF_KEY), response=False)
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


async def test_an_approval_may_have_expired_since_it_was_given(kit: Any) -> None:
    """It is judged as of the time of the decision."""
    moment = [time.time_ns() // 1_000_000]
    lab = kit.Lab(memory_persistence(clock=lambda: moment[0]))

    def expires(payload: dict[str, Any]) -> None:
        soon = dt.datetime.fromtimestamp(moment[0] / 1000 + 60, dt.UTC).isoformat()
        payload["expiresAt"] = payload["metadata"][BINDING_KEY]["expiresAt"] = soon

    await signed(lab, resume_approve("approval_c1", edited_args={"n": 7}))
    await forge(lab, approval=expires)
    moment[0] += 3_600_000
    end = await lab.resume(OUTPUT, turns=[SIGN], parent_run_id="r2")
    assert isinstance(end, RunFinishedEvent)
    assert end.outcome is None or end.outcome.type == "success"


async def test_an_approval_that_had_expired_when_it_was_given_is_stale(kit: Any) -> None:
    """The same, with a decision after the end."""
    lab = kit.Lab(memory_persistence())

    def expired(payload: dict[str, Any]) -> None:
        long_ago = "2001-01-01T00:00:00Z"
        payload["expiresAt"] = payload["metadata"][BINDING_KEY]["expiresAt"] = long_ago

    await signed(lab)
    await forge(lab, approval=expired)
    assert await refused(lab, OUTPUT) == only("stale", "item-validation-failed")


async def test_a_browser_tool_whose_approval_does_not_hold_can_still_be_cancelled(
    lab: Any, kit: Any
) -> None:
    await signed(lab)
    await forge(lab, keep_approval=False)
    end = await lab.resume(resume_cancel("client_tool_c1"), adapter=kit.Paced(waits=False))
    assert isinstance(end, RunFinishedEvent)
    assert await lab.waiting() == []


# ---------------------------------------------------------------- hostile sizes and shapes


async def test_a_megabyte_and_deep_nesting_are_refused_without_a_trace(lab: Any) -> None:
    await lab.pause(PAY)
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    for payload in ({"approved": True, "x": "y" * 1_000_000}, {"approved": deep}):
        entry = {"interruptId": "approval_c1", "status": "resolved", "payload": payload}
        assert await refused(lab, entry) == only("invalid-payload", "item-validation-failed")
    many = [{"interruptId": f"i{n}", "status": "cancelled"} for n in range(5000)]
    codes = await refused(lab, *many)
    assert len(codes) < 200
    assert await lab.waiting() == ["approval_c1"]


@pytest.mark.parametrize("status", ["resolved", "cancelled"])
@pytest.mark.parametrize(
    "entry", [{}, {"interruptId": 5}, {"interruptId": None}, {"interruptId": []}]
)
async def test_entries_without_an_id_are_refused(lab: Any, entry: Any, status: str) -> None:
    await lab.pause(PAY)
    before = await lab.everything()
    end = await lab.resume({**entry, "status": status}, run_id="refused")
    assert isinstance(end, RunErrorEvent)
    assert end.code == "protocol"
    assert await lab.everything() == before


async def test_the_refusal_of_half_a_character_can_be_encoded(lab: Any) -> None:
    """A cut emoji in an id comes back as U+FFFD, in the list as in the message."""
    await lab.pause(PAY)
    end = await lab.resume(resume_cancel("approval_\ud83d"), run_id="refused")
    assert isinstance(end, RunErrorEvent)
    assert end.code == "unknown-interrupt"
    assert "approval_\ufffd" in end.model_dump_json()


async def test_errors_of_a_middleware_that_are_no_json_end_the_run_all_the_same(lab: Any) -> None:
    class Refuses(ChatMiddleware):
        name = "refuses"

        async def on_config(self, ctx: Any, config: Any) -> None:
            raise InterruptResumeError([{"code": "stale", "message": "no", "at": float("nan")}])

    end = await lab.pause(PAY, middleware=[lab.middleware(), Refuses()])
    assert isinstance(end, RunErrorEvent)
    assert (end.code, end.message) == ("stale", "no")
    assert end.model_dump_json()
