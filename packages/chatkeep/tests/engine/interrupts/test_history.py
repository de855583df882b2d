"""Resume without a store: what was pending is read from the posted history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatkeep.engine.interrupts import (
    BINDING_KEY,
    CONTINUATION_KEY,
    Decision,
    PendingInterrupt,
    ResumeState,
    approval_descriptor,
    client_tool_descriptor,
    define_interrupt,
    generic_descriptor,
    pending_from_history,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_from_history,
    resume_output,
)
from chatkeep.engine.tools import Tool, client_tool, define_tool
from chatkeep.errors import InterruptResumeError

P = {
    "type": "object",
    "properties": {"p": {"type": "string"}},
    "required": ["p"],
    "additionalProperties": False,
}
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


def server(name: str, **options: Any) -> Tool:
    return define_tool(name=name, execute=lambda args: args, **options)


DEL = server("del", input_schema=P, needs_approval=True)
FREE = server("free")
CLI = client_tool("cli")
TWO = client_tool("two", input_schema=P, needs_approval=True)
TOOLS = {t.name: t for t in (DEL, FREE, CLI, TWO)}
PLAN = define_interrupt("plan", response=OK)
SHOWN = define_interrupt("shown", response=OK, payload=TITLE)
DEFINITIONS = {"plan": PLAN, "shown": SHOWN}
USER = {"role": "user", "content": "hi", "id": "u1"}


def turn(*calls: tuple[str, str], args: str = '{"p":"a"}', **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "id": "m1",
        "toolCalls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": args}}
            for call_id, name in calls
        ],
        **more,
    }


def result(call_id: str, content: str = "null", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "toolCallId": call_id, "content": content, **more}


def pending(messages: list[Any], entries: list[Any], **options: Any) -> list[PendingInterrupt]:
    given: dict[str, Any] = {"tools": TOOLS, "definitions": DEFINITIONS, **options}
    return pending_from_history(messages, run_id="r1", entries=entries, **given)


def ids(messages: list[Any], entries: list[Any], **options: Any) -> list[str]:
    return [item.interrupt_id for item in pending(messages, entries, **options)]


def resume(messages: list[Any], entries: list[Any], **options: Any) -> ResumeState:
    given: dict[str, Any] = {
        "tools": TOOLS,
        "definitions": DEFINITIONS,
        "parent_run_id": "r1",
        "now_ms": 0,
        **options,
    }
    return resume_from_history(
        thread_id="t", run_id="r2", messages=messages, entries=entries, **given
    )


def refused(messages: list[Any], entries: list[Any], **options: Any) -> list[tuple[str, str]]:
    with pytest.raises(InterruptResumeError) as caught:
        resume(messages, entries, **options)
    paused = options.get("parent_run_id", "r1") or "r2"
    for error in caught.value.errors:
        assert (error["threadId"], error["interruptedRunId"]) == ("t", paused)
    return [(e.get("interruptId", "batch"), e["code"]) for e in caught.value.errors]


# ------------------------------------------------------------------------- calls of the turn


def test_open_calls_that_need_a_person_or_a_browser_are_pending() -> None:
    messages = [USER, turn(("c1", "del"), ("c2", "free"), ("c3", "cli"))]
    approval, waiting = pending(messages, [])
    assert approval.descriptor == approval_descriptor(DEL, "c1", {"p": "a"}, "r1")
    assert waiting.descriptor == client_tool_descriptor(CLI, "c3", {"p": "a"}, "r1")
    assert {approval.run_id, waiting.run_id} == {"r1"}
    assert approval.decision is None


def test_calls_of_earlier_turns_are_not_pending() -> None:
    messages = [USER, turn(("c1", "cli")), USER, turn(("c2", "cli"))]
    assert ids(messages, []) == ["client_tool_c2"]
    assert ids([USER, turn(("c1", "cli")), USER], []) == []
    assert ids([], []) == []


def test_all_turns_since_the_user_spoke_are_looked_at() -> None:
    messages = [USER, turn(("c1", "free")), result("c1"), turn(("c2", "cli"))]
    assert ids(messages, []) == ["client_tool_c2"]


def test_a_call_with_a_result_is_pending_only_when_it_is_answered() -> None:
    """Browsers post what their tools returned along with the answer."""
    messages = [USER, turn(("c1", "cli"), ("c2", "cli")), result("c1"), result("c2")]
    assert ids(messages, []) == []
    assert ids(messages, [resume_output("client_tool_c2", 1)]) == ["client_tool_c2"]


def test_a_placeholder_is_no_result() -> None:
    posted = result("c1", '{"approved":true,"pendingExecution":true}')
    assert ids([USER, turn(("c1", "del")), posted], []) == ["approval_c1"]


def test_what_the_provider_runs_is_not_pending() -> None:
    message = turn(("c1", "cli"))
    message["toolCalls"][0]["metadata"] = {"providerExecuted": True}
    assert ids([USER, message], []) == []


def test_a_call_that_fails_before_anybody_is_asked_is_not_pending() -> None:
    for args in ("{", '{"p":1}', "{}", "[1]"):
        messages = [USER, turn(("c1", "del"), args=args)]
        assert ids(messages, []) == []
        (item,) = pending(messages, [resume_approve("approval_c1")])
        assert item.descriptor["metadata"]["input"] == {}


def test_an_output_for_a_call_that_needs_an_approval_says_that_it_was_given() -> None:
    messages = [USER, turn(("c1", "two"))]
    assert ids(messages, []) == ["approval_c1"]
    (item,) = pending(messages, [resume_output("client_tool_c1", 1)])
    assert item.interrupt_id == "client_tool_c1"
    assert item.decision == Decision(approved=True)
    state = resume(messages, [resume_output("client_tool_c1", 1)])
    assert state.client_results == {"c1": 1}
    assert state.approvals == {"c1": Decision(approved=True)}


def test_an_unknown_tool_can_be_cancelled_and_nothing_else() -> None:
    messages = [USER, turn(("c1", "gone"))]
    assert ids(messages, []) == []
    for name in ("client_tool_c1", "approval_c1"):
        assert resume(messages, [resume_cancel(name)]).cancelled == {"c1"}
    assert refused(messages, [resume_output("client_tool_c1", 1)])[0] == (
        "client_tool_c1",
        "stale",
    )
    assert refused(messages, [resume_approve("approval_c1")])[0] == ("approval_c1", "stale")


@pytest.mark.parametrize("name", ["", " ", " cli"])
def test_a_call_without_a_proper_name_is_never_pending(name: str) -> None:
    messages = [USER, turn(("c1", name))]
    assert refused(messages, [resume_cancel("client_tool_c1")])[0] == (
        "client_tool_c1",
        "unknown-interrupt",
    )


# ------------------------------------------------------------------------- what it comes to


def test_a_whole_batch_is_resumed_from_history() -> None:
    messages = [USER, turn(("c1", "del"), ("c2", "free"), ("c3", "cli"))]
    entries = [
        resume_approve("approval_c1", edited_args={"p": "b"}),
        resume_output("client_tool_c3", [1]),
    ]
    state = resume(messages, entries)
    assert state.interrupted_run_id == "r1"
    assert state.approvals == {"c1": Decision(approved=True, edited_args={"p": "b"})}
    assert state.client_results == {"c3": [1]}


def test_an_answer_to_what_was_never_asked_is_refused() -> None:
    messages = [USER, turn(("c1", "del"))]
    assert refused(messages, [resume_approve("approval_c1"), resume_approve("approval_c2")]) == [
        ("approval_c2", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
        ("batch", "item-validation-failed"),
    ]
    assert refused(messages, [resume_deny("approval_zz")])[:2] == [
        ("approval_c1", "unknown-interrupt"),
        ("approval_zz", "unknown-interrupt"),
    ]


def test_without_the_paused_run_nothing_is_resumed() -> None:
    messages = [USER, turn(("c1", "del"))]
    entries = [resume_approve("approval_c1")]
    assert refused(messages, entries, parent_run_id=None) == [("batch", "stale")]


def test_posted_failures_count_as_in_every_resume() -> None:
    messages = [USER, turn(("c1", "cli")), result("c1", error="boom")]
    entries = [resume_output("client_tool_c1", {"error": "boom"})]
    state = resume(messages, entries, failed_outputs={"c1": "boom"})
    assert state.client_errors == {"c1": "boom"}
    assert resume(messages, entries).client_results == {"c1": {"error": "boom"}}


# ------------------------------------------------------------------------------- questions


def repeated(item: Any, index: int = 0, **changes: Any) -> dict[str, Any]:
    """What a browser repeats of a question, from its descriptor."""
    descriptor = generic_descriptor(item, index, f"g{index}", "r1")
    binding = descriptor["metadata"][BINDING_KEY]
    kept = ("definitionId", "key", "batchIndex", "expiresAt", "responseSchemaHash",
            "payloadSchemaHash")  # fmt: skip
    out = {
        "v": 1,
        "reason": descriptor["reason"],
        "message": descriptor["message"],
        **{key: binding[key] for key in kept if key in binding},
        **({} if not item.payload else {"payload": item.payload}),
        **changes,
    }
    return {key: value for key, value in out.items() if value != "-"}


def answered(continuation: Any, index: int = 0, response: Any = None) -> dict[str, Any]:
    entry = resume_answer(f"g{index}", {"ok": True} if response is None else response)
    return {**entry, "metadata": {CONTINUATION_KEY: continuation}}


def ask(**options: Any) -> Any:
    return SHOWN.request(
        **{"key": "k", "reason": "r", "message": "m", "payload": {"title": "x"}, **options}
    )


def test_a_question_is_rebuilt_from_what_the_browser_repeats() -> None:
    request = ask(expires_at=5)
    (item,) = pending([USER], [answered(repeated(request))])
    assert item.descriptor == generic_descriptor(request, 0, "g0", "r1")
    state = resume([USER], [answered(repeated(request))])
    (answer,) = state.generic
    assert (answer.definition_id, answer.key, answer.response) == ("shown", "k", {"ok": True})
    assert (answer.payload, answer.batch_index) == ({"title": "x"}, 0)


def test_the_recorded_entry_of_a_browser_is_taken() -> None:
    definition = define_interrupt(
        "review-plan",
        response={
            "type": "object",
            "properties": {"approved": {"type": "boolean"}},
            "required": ["approved"],
            "additionalProperties": False,
        },
        payload={
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "required": ["title"],
            "additionalProperties": False,
        },
    )
    entry = json.loads(
        '{"interruptId":"interrupt-1","metadata":{"tanstack:interruptContinuation":{"batchIndex":0,'
        '"definitionId":"review-plan","key":"initial-plan","message":"Review the proposed plan.",'
        '"payload":{"title":"Release plan"},"payloadSchemaHash":"sha256:'
        'c0f00621ba42dc1169cada464288b7e72467105c72f48a996833673ce4435390",'
        '"reason":"review-required","responseSchemaHash":"sha256:'
        'f111104f51bda2c26e17d6938191c0b2bceec42124a9a748e12ae697ffce8190","v":1}},'
        '"payload":{"approved":true},"status":"resolved"}'
    )
    state = resume([USER], [entry], definitions={"review-plan": definition})
    assert state.generic[0].response == {"approved": True}
    assert state.generic[0].reason == "review-required"


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": "-"},
        {"definitionId": "gone"},
        {"definitionId": ["shown"]},
        {"definitionId": "plan"},
        {"batchIndex": -1},
        {"batchIndex": True},
        {"batchIndex": "0"},
        {"batchIndex": "-"},
        {"key": ""},
        {"key": 1},
        {"key": "-"},
        {"reason": None},
        {"message": "-"},
        {"responseSchemaHash": "sha256:x"},
        {"responseSchemaHash": "-"},
        {"payloadSchemaHash": None},
        {"payload": "-"},
        {"payload": {"title": 1}},
        {"expiresAt": "soon"},
        {"expiresAt": 5},
    ],
)
def test_a_question_that_is_none_of_ours_is_stale(changes: dict[str, Any]) -> None:
    assert refused([USER], [answered(repeated(ask(), **changes))]) == [
        ("g0", "stale"),
        ("batch", "item-validation-failed"),
    ]


@pytest.mark.parametrize("continuation", [None, 1, "x", [], {}])
def test_junk_in_place_of_a_question_is_stale(continuation: Any) -> None:
    assert refused([USER], [answered(continuation)])[0] == ("g0", "stale")


@pytest.mark.parametrize("metadata", [None, 1, "x", [], {}, {"other": 1}])
def test_an_answer_that_repeats_no_question_is_unknown(metadata: Any) -> None:
    entry = {**resume_answer("g0", {"ok": True}), "metadata": metadata}
    assert refused([USER], [entry])[0] == ("g0", "unknown-interrupt")


def test_two_questions_in_one_place_are_stale() -> None:
    entries = [answered(repeated(ask())), answered(repeated(ask(), 1, batchIndex=0), 1)]
    assert refused([USER], entries)[0] == ("g1", "stale")


def test_an_expired_question_is_refused_but_can_be_cancelled() -> None:
    entry = answered(repeated(ask(expires_at=5)))
    assert refused([USER], [entry], now_ms=5)[0] == ("g0", "expired")
    cancel = {**resume_cancel("g0"), "metadata": entry["metadata"]}
    assert resume([USER], [cancel], now_ms=5).generic[0].status == "cancelled"


def test_a_batch_that_began_with_a_question_asked_about_no_call() -> None:
    """A question before the tools pauses alone: the calls of the turn are decided afterwards."""
    messages = [USER, turn(("c1", "del"), ("c2", "cli"))]
    assert ids(messages, [answered(repeated(ask()))]) == ["g0"]
    assert ids(messages, [answered(repeated(ask(), 2), 2)]) == [
        "approval_c1",
        "client_tool_c2",
        "g2",
    ]


def test_client_tools_beside_answered_questions_are_asked_again() -> None:
    messages = [USER, turn(("c2", "cli"))]
    state = resume(messages, [answered(repeated(ask(), 1), 1)])
    assert state.superseded == {"client_tool_c2"}
