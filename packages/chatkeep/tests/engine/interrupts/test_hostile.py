"""Whatever is sent: the batch is read or refused, shortly, and nothing else is raised."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.engine.interrupts import (
    BINDING_KEY,
    CONTINUATION_KEY,
    PendingInterrupt,
    ResumeState,
    approval_descriptor,
    client_tool_descriptor,
    define_interrupt,
    generic_descriptor,
    posted_failures,
    resume_approve,
    resume_from_history,
    validate_resume,
)
from chatkeep.engine.tools import client_tool, define_tool, tool
from chatkeep.errors import InterruptResumeError

P = {
    "type": "object",
    "properties": {"p": {"type": "string"}},
    "required": ["p"],
    "additionalProperties": False,
}
DEL = define_tool(name="del", execute=lambda args: args, needs_approval=True, input_schema=P)
CLI = client_tool("cli", output_schema=P)
FREE = client_tool("free")
TOOLS = {t.name: t for t in (DEL, CLI, FREE)}
PLAN = define_interrupt("plan", response=P, payload=P)
DEFINITIONS = {"plan": PLAN}
MEGABYTE = "x" * (1 << 20)


def asked() -> list[PendingInterrupt]:
    request = PLAN.request(key="k", reason="r", message="m", payload={"p": "x"})
    descriptors = [
        approval_descriptor(DEL, "c1", {"p": "a"}, "r1"),
        client_tool_descriptor(CLI, "k1", {}, "r1"),
        client_tool_descriptor(FREE, "k2", {}, "r1"),
        generic_descriptor(request, 3, "g3", "r1"),
    ]
    return [PendingInterrupt(interrupt_id=d["id"], run_id="r1", descriptor=d) for d in descriptors]


PENDING = asked()
IDS = [item.interrupt_id for item in PENDING]


def nested(levels: int) -> Any:
    value: Any = {"p": "x"}
    for level in range(levels):
        value = [value] if level % 2 else {"p": value}
    return value


def resume(
    entries: Any, pending: list[PendingInterrupt] = PENDING
) -> ResumeState | list[dict[str, Any]]:
    """The state, or the errors; every error is JSON and short."""
    try:
        return validate_resume(
            thread_id="t",
            interrupted_run_id="r1",
            pending=pending,
            entries=entries,
            tools=TOOLS,
            definitions=DEFINITIONS,
            failed_outputs={"k1": "boom"},
            now_ms=0,
        )
    except InterruptResumeError as refusal:
        errors = [dict(error) for error in refusal.errors]
    assert errors
    assert json.loads(json.dumps(errors)) == errors
    assert max(len(error["message"]) for error in errors) < 2000
    return errors


def answers(payload: Any) -> list[dict[str, Any]]:
    return [{"interruptId": i, "status": "resolved", "payload": payload} for i in IDS]


def codes(outcome: Any) -> list[str]:
    assert isinstance(outcome, list)
    return [error["code"] for error in outcome]


@pytest.mark.parametrize(
    "payload",
    [
        MEGABYTE,
        {"p": MEGABYTE, "q": 1},
        {"p": [MEGABYTE]},
        {MEGABYTE: MEGABYTE},
        {"approved": MEGABYTE},
        {"approved": True, "editedArgs": MEGABYTE},
        {"approved": True, "editedArgs": {MEGABYTE: {MEGABYTE: 1}}},
        [MEGABYTE] * 3,
        list(range(200_000)),
        {str(i): i for i in range(100_000)},
    ],
    ids=range(10),
)
def test_a_megabyte_that_does_not_fit_is_refused_in_a_few_bytes(payload: Any) -> None:
    outcome = resume(answers(payload))
    assert codes(outcome)[-1] == "item-validation-failed"
    assert len(json.dumps(outcome)) < 20_000


def test_a_megabyte_that_fits_is_taken_whole() -> None:
    value = {"p": MEGABYTE}
    (free,) = (item for item in PENDING if item.interrupt_id == "client_tool_k2")
    entry = {"interruptId": "client_tool_k2", "status": "resolved", "payload": value}
    state = resume([entry], [free])
    assert isinstance(state, ResumeState)
    assert state.client_results == {"k2": value}
    (ask, *_) = PENDING
    entry = resume_approve("approval_c1", edited_args=value)
    state = resume([entry], [ask])
    assert isinstance(state, ResumeState)
    assert state.approvals["c1"].edited_args == value


@pytest.mark.parametrize("levels", [150, 190, 250, 5_000, 100_000])
def test_deep_nesting_is_refused_by_its_code(levels: int) -> None:
    payload = nested(levels)
    outcome = resume(answers(payload)[:2] + answers({"p": "x"})[2:])
    assert codes(outcome) == ["invalid-payload", "invalid-tool-output", "item-validation-failed"]
    outcome = resume(
        [
            {
                "interruptId": "approval_c1",
                "status": "resolved",
                "payload": {"approved": True, "editedArgs": payload},
            },
            *answers({"p": "x"})[1:],
        ]
    )
    assert codes(outcome)[0] in ("invalid-payload", "invalid-edited-args")
    assert len(json.dumps(outcome)) < 20_000


def test_a_megabyte_among_the_arguments_of_a_python_function_is_cut() -> None:
    @tool(needs_approval=True)
    def add(a: int) -> int:
        return a

    descriptor = approval_descriptor(add, "c1", {"a": 1}, "r1")
    item = PendingInterrupt(interrupt_id="approval_c1", run_id="r1", descriptor=descriptor)
    with pytest.raises(InterruptResumeError) as caught:
        validate_resume(
            thread_id="t",
            interrupted_run_id="r1",
            pending=[item],
            entries=[resume_approve("approval_c1", edited_args={"a": 1, MEGABYTE: 1})],
            tools={"add": add},
            definitions={},
            now_ms=0,
        )
    assert caught.value.first_code == "invalid-edited-args"
    assert len(json.dumps(caught.value.errors)) < 5000


def test_a_path_through_a_megabyte_is_left_out() -> None:
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    reader = client_tool("texts", output_schema=texts)
    descriptor = client_tool_descriptor(reader, "k1", {}, "r1")
    item = PendingInterrupt(interrupt_id=descriptor["id"], run_id="r1", descriptor=descriptor)
    for key, path in (("short", ["short"]), (MEGABYTE, None)):
        with pytest.raises(InterruptResumeError) as caught:
            validate_resume(
                thread_id="t",
                interrupted_run_id="r1",
                pending=[item],
                entries=[
                    {"interruptId": item.interrupt_id, "status": "resolved", "payload": {key: 1}}
                ],
                tools={"texts": reader},
                definitions={},
                now_ms=0,
            )
        assert caught.value.errors[0].get("path") == path
        assert len(json.dumps(caught.value.errors)) < 5000


def test_many_entries_are_answered_by_few() -> None:
    entries = [{"interruptId": f"x{i}", "status": "cancelled"} for i in range(20_000)]
    outcome = resume(entries)
    assert isinstance(outcome, list)
    items = [error for error in outcome if error["scope"] == "item"]
    assert len(items) == 100
    assert {error["code"] for error in items} == {"unknown-interrupt"}
    assert codes(outcome)[-2:] == ["incomplete-batch", "item-validation-failed"]
    assert codes(resume(entries[:1] * 20_000))[0] == "unknown-interrupt"


def test_long_ids_are_cut_in_messages_and_whole_in_the_id() -> None:
    name = "y" * 1024
    outcome = resume([{"interruptId": name, "status": "cancelled"}])
    assert isinstance(outcome, list)
    (error,) = (e for e in outcome if e.get("interruptId") == name)
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "entries",
    [
        [None],
        ["approval_c1"],
        [1],
        [[]],
        [{}],
        [{"interruptId": None, "status": "resolved"}],
        [{"interruptId": 1, "status": "resolved"}],
        [{"interruptId": ["approval_c1"], "status": "resolved"}],
        [{"status": "resolved"}],
        [*answers({}), None],
    ],
)
def test_an_entry_that_names_nothing_is_against_the_protocol(entries: Any) -> None:
    assert codes(resume(entries)) == ["protocol"]


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from(["resolved", "cancelled", "output-error", "approved", 10**400, *IDS]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["interruptId", "status", "payload", "metadata", "tanstack", "state", "error",
             "errorText", "approved", "editedArgs", "p", "v", "definitionId", "key", "batchIndex",
             CONTINUATION_KEY]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip
ENTRY = st.fixed_dictionaries(
    {"interruptId": st.sampled_from(IDS), "status": st.sampled_from(["resolved", "cancelled"])},
    optional={"payload": JUNK, "metadata": JUNK},
)


@given(st.lists(JUNK | ENTRY, max_size=5))
def test_any_junk_is_read_or_refused(entries: list[Any]) -> None:
    resume(entries)


@given(st.lists(ENTRY, min_size=len(IDS), max_size=len(IDS)))
def test_junk_in_the_place_of_each_answer_is_read_or_refused(drawn: list[Any]) -> None:
    outcome = resume([{**e, "interruptId": i} for e, i in zip(drawn, IDS, strict=True)])
    if isinstance(outcome, ResumeState):
        decided = set(outcome.approvals) | set(outcome.client_results) | set(outcome.client_errors)
        assert decided | outcome.cancelled == {"c1", "k1", "k2"}
        assert len(outcome.generic) == 1


@given(st.integers(0, len(PENDING) - 1), st.data())
def test_junk_in_a_stored_descriptor_is_read_or_refused(place: int, data: st.DataObject) -> None:
    item = PENDING[place]
    descriptor: dict[str, Any] = json.loads(json.dumps(item.descriptor))
    target = descriptor
    if data.draw(st.booleans()):
        target = descriptor["metadata"]
        if data.draw(st.booleans()):
            target = target[BINDING_KEY]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JUNK)
    entry: dict[str, Any] = {
        "interruptId": item.interrupt_id,
        "status": data.draw(st.sampled_from(["resolved", "cancelled"])),
    }
    if entry["status"] == "resolved":
        entry["payload"] = data.draw(st.sampled_from([True, {"p": "x"}]))
    resume([entry], [dataclasses.replace(item, descriptor=descriptor)])


CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["c1", "k1", "k2", ""]),
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["del", "cli", "free", "gone", "", " x"]),
                "arguments": st.sampled_from(["{}", '{"p":"a"}', "{", "", "null", "[" * 2000]),
            }
        ),
    }
)
ROW = st.one_of(
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "toolCalls": st.lists(CALL, max_size=3)},
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("tool"),
            "toolCallId": st.sampled_from(["c1", "k1", "k2", ""]),
            "content": st.sampled_from(["null", '{"pendingExecution":true}']),
        },
        optional={"error": st.text(max_size=3)},
    ),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.just("hi")}),
)


@given(st.lists(ROW, max_size=6), st.lists(JUNK | ENTRY, max_size=4))
def test_any_history_with_any_answers_is_resumed_or_refused(
    messages: list[Any], entries: list[Any]
) -> None:
    errors: list[dict[str, Any]] = []
    try:
        resume_from_history(
            thread_id="t",
            parent_run_id="r1",
            run_id="r2",
            messages=messages,
            entries=entries,
            tools=TOOLS,
            definitions=DEFINITIONS,
            failed_outputs=posted_failures(messages),
            now_ms=0,
        )
    except InterruptResumeError as refusal:
        errors.extend(refusal.errors)
    assert json.loads(json.dumps(errors)) == errors
