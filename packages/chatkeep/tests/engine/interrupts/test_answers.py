"""What is answered has to fit: decisions, outputs, responses, and records of older writers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from chatkeep.engine.interrupts import (
    Decision,
    PendingInterrupt,
    ResumeState,
    approval_proof,
    define_interrupt,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)
from chatkeep.engine.tools import Tool, client_tool, define_tool

from .kit import (
    BARE,
    CLI,
    DEL,
    FREE,
    PAY,
    TWO,
    WHY,
    N,
    P,
    asks,
    codes,
    one,
    question,
    refused,
    resolved,
    server,
    validate,
    waits,
)

# -------------------------------------------------------------- V10 to V17: what is answered


@pytest.mark.parametrize("response", [None, 1, "x", [], {}, {"ok": "yes"}, {"ok": float("nan")}])
def test_v10_a_response_that_breaks_its_schema(response: Any) -> None:
    assert one(question(), resolved("g0", response)) == ("invalid-payload", "client")


def test_v10_a_response_is_held_to_the_type_of_its_definition() -> None:
    class Even(BaseModel):
        number: int

        @model_validator(mode="after")
        def even(self) -> Even:
            if self.number % 2:
                raise ValueError("must be even")
            return self

    definition = define_interrupt("even", response=Even)
    given = {"definitions": {"even": definition}}
    assert validate([question(definition)], [resume_answer("g0", {"number": 2})], **given).generic
    (item, _) = refused([question(definition)], [resume_answer("g0", {"number": 3})], **given)
    assert item["code"] == "invalid-payload"
    assert "must be even" in item["message"]


@pytest.mark.parametrize("item", [asks(DEL), waits(CLI)], ids=["approval", "client tool"])
def test_v11_a_tool_that_is_gone(item: PendingInterrupt) -> None:
    assert one(item, resolved(item.interrupt_id, True), tools={}) == ("stale", "server")  # noqa: FBT003
    cancelled = validate([item], [resume_cancel(item.interrupt_id)], tools={})
    assert len(cancelled.cancelled) == 1


@pytest.mark.parametrize(
    "now",
    [client_tool("cli"), client_tool("cli", output_schema=P), server("cli", output_schema=N)],
)
def test_v12_a_client_tool_with_another_output_schema(now: Tool) -> None:
    entry = resume_output("client_tool_k1", {"n": "x"})
    assert one(waits(CLI), entry, tools={"cli": now}) == ("stale", "server")
    assert validate([waits(CLI)], [resume_cancel("client_tool_k1")], tools={"cli": now}).cancelled


@pytest.mark.parametrize(
    "now",
    [
        server("del"),
        server("del", input_schema=N),
        server("del", input_schema=P, approval_schema=N),
        server("del", input_schema=P, approval_schema={"reject": N}),
        server("del", input_schema=P, input_schema_hash="sha256:x"),
    ],
)
def test_v13_a_tool_with_other_schemas(now: Tool) -> None:
    entry = resume_approve("approval_c1")
    assert one(asks(DEL), entry, tools={"del": now}) == ("stale", "server")
    assert validate([asks(DEL)], [resume_cancel("approval_c1")], tools={"del": now}).cancelled


def test_v13_a_tool_that_needs_no_approval_any_more_is_still_decided() -> None:
    now = define_tool(name="del", execute=lambda args: args, input_schema=P)
    assert validate([asks(DEL)], [resume_deny("approval_c1")], tools={"del": now}).approvals


@pytest.mark.parametrize(
    ("output", "path"),
    [({"n": 1}, ["n"]), ("x", None), (None, None), ({}, None), ({"error": "boom"}, None)],
)
def test_v14_an_output_that_breaks_its_schema(output: Any, path: list[str] | None) -> None:
    item, batch = refused([waits(CLI)], [resolved("client_tool_k1", output)])
    assert (item["code"], item["source"]) == ("invalid-tool-output", "client")
    assert item.get("path") == path
    assert batch["code"] == "item-validation-failed"


@pytest.mark.parametrize("output", [float("nan"), {"n": {1, 2}}, object()])
def test_v14_an_output_that_is_no_json(output: Any) -> None:
    entry = resolved("client_tool_k1", output)
    assert one(waits(FREE), entry) == ("invalid-tool-output", "client")


@pytest.mark.parametrize(
    "payload",
    [None, "yes", 1, 0, [], {}, {"approved": None}, {"approved": 1}, {"approved": "true"}],
)
def test_v15_an_answer_that_says_neither_yes_nor_no(payload: Any) -> None:
    assert one(asks(DEL), resolved("approval_c1", payload)) == ("invalid-payload", "client")


def test_v15_an_approval_without_a_payload_says_nothing() -> None:
    assert one(asks(DEL), resolved("approval_c1")) == ("invalid-payload", "client")


@pytest.mark.parametrize(
    ("item", "payload"),
    [
        (asks(PAY), True),
        (asks(PAY), {"approved": True}),
        (asks(PAY), {"approved": True, "payload": {"n": 1}}),
        (asks(PAY), {"approved": True, "payload": None}),
        (asks(PAY), {"approved": False, "payload": {"n": "x"}}),
        (asks(WHY), False),
        (asks(WHY), {"approved": False, "payload": {}}),
        (asks(BARE), {"approved": True, "payload": 1}),
        (asks(BARE), {"approved": True, "payload": None}),
        (asks(BARE), {"approved": True, "extra": 1}),
        (asks(DEL), {"approved": False, "editedArgs": {"p": "x"}}),
    ],
)
def test_v16_an_envelope_that_breaks_its_branch(item: PendingInterrupt, payload: Any) -> None:
    assert one(item, resolved("approval_c1", payload)) == ("invalid-payload", "client")


@pytest.mark.parametrize(
    ("item", "edited_args"),
    [
        (asks(BARE), {"p": "x"}),
        (asks(DEL), {"p": 1}),
        (asks(DEL), {}),
        (asks(DEL), None),
        (asks(DEL), "text"),
        (asks(DEL), {"p": "x", "q": 1}),
    ],
)
def test_v17_edited_arguments_that_the_tool_does_not_take(
    item: PendingInterrupt, edited_args: Any
) -> None:
    entry = resolved("approval_c1", {"approved": True, "editedArgs": edited_args})
    assert one(item, entry) == ("invalid-edited-args", "client")


def test_v17_edited_arguments_of_a_python_function_are_bound_to_it() -> None:
    from chatkeep.engine.tools import tool

    @tool(needs_approval=True)
    def add(a: int, b: int) -> int:
        return a + b

    item, given = asks(add), {"tools": {"add": add}}
    edited = resume_approve("approval_c1", edited_args={"a": 1, "b": 2})
    assert validate([item], [edited], **given).approvals["c1"].edited_args == {"a": 1, "b": 2}
    wrong = resume_approve("approval_c1", edited_args={"a": 1})
    assert one(item, wrong, **given) == ("invalid-edited-args", "client")


def test_a_bad_payload_and_bad_edited_arguments_are_both_said() -> None:
    entry = resolved("approval_c1", {"approved": True, "editedArgs": {}, "payload": {}})
    assert codes([asks(PAY)], [entry]) == [
        ("approval_c1", "invalid-payload"),
        ("approval_c1", "invalid-edited-args"),
        ("batch", "item-validation-failed"),
    ]


# ------------------------------------------------------------------------------ V19, proofs


class Moody(BaseModel):
    value: Any = None

    @model_validator(mode="before")
    @classmethod
    def breaks(cls, data: Any) -> Any:
        raise KeyError(f"not prepared for {data!r}")


def test_v19_a_validator_that_breaks(caplog: pytest.LogCaptureFixture) -> None:
    definition = define_interrupt("moody", response=Moody)
    entry = resume_answer("g0", {})
    answer = one(question(definition), entry, definitions={"moody": definition})
    assert answer == ("invalid-response-schema", "server")
    assert "could not be checked" in caplog.text


def test_v19_a_schema_that_cannot_be_applied() -> None:
    lost = client_tool("cli", output_schema={"$ref": "#/nowhere"})
    given = {"tools": {"cli": lost}}
    answer = one(waits(lost), resume_output("client_tool_k1", {"n": "x"}), **given)
    assert answer == ("invalid-response-schema", "server")


def test_a_client_tool_that_needs_an_approval_takes_no_output_without_one() -> None:
    entry = resume_output("client_tool_k1", 1)
    assert one(waits(TWO), entry) == ("stale", "server")
    denied = waits(TWO, decision=Decision(approved=False))
    assert one(denied, entry) == ("stale", "server")


def test_the_approval_of_a_client_tool_is_part_of_the_state() -> None:
    decision = Decision(approved=True, edited_args={"p": "b"}, proof={"v": 1})
    state = validate([waits(TWO, decision=decision)], [resume_output("client_tool_k1", 1)])
    assert state.approvals == {"k1": decision}
    assert state.client_results == {"k1": 1}


def test_only_the_approval_of_a_client_tool_is_proved() -> None:
    entry = resume_approve("approval_c1", edited_args={"p": "b"})
    decision = validate([asks(TWO)], [entry]).approvals["c1"]
    assert decision.proof == approval_proof(asks(TWO).descriptor, decision)
    assert decision.edited_args == {"p": "b"}
    assert validate([asks(DEL)], [entry]).approvals["c1"].proof is None
    assert validate([asks(TWO)], [resume_deny("approval_c1")]).approvals["c1"].proof is None


# ----------------------------------------------------------------------- records of old times


def unbound(**descriptor: Any) -> PendingInterrupt:
    whole = {"id": "i", "reason": "r", "message": "m", **descriptor}
    return PendingInterrupt(interrupt_id="i", run_id="r1", descriptor=whole)


@pytest.mark.parametrize(
    "marks",
    [{"metadata": {"kind": "approval"}}, {"reason": "approval_required"}],
)
def test_an_approval_without_a_binding_needs_a_clear_yes(marks: dict[str, Any]) -> None:
    item = unbound(toolCallId="c1", **marks)
    for payload, approved in (
        (True, True),
        ({"approved": True}, True),
        (False, False),
        ({"approved": "yes"}, False),
        ({}, False),
        (None, False),
        ("yes", False),
    ):
        state = validate([item], [resolved("i", payload)])
        assert state.approvals == {"c1": Decision(approved=approved)}
    assert validate([item], [resume_cancel("i")]).cancelled == {"c1"}


@pytest.mark.parametrize(
    "marks",
    [
        {"metadata": {"kind": "client_tool", "toolName": "cli"}},
        {"reason": "client_tool_input"},
        {"reason": "tanstack:client_tool_execution"},
    ],
)
def test_a_client_tool_without_a_binding_has_its_output(marks: dict[str, Any]) -> None:
    item = unbound(toolCallId="k1", **marks)
    state = validate([item], [resume_output("i", {"n": "x"})])
    assert state.client_results == {"k1": {"n": "x"}}
    assert validate([item], [resume_error("i", "no")]).client_errors == {"k1": "no"}


def test_the_output_of_an_unbound_client_tool_is_checked_where_the_tool_is_known() -> None:
    item = unbound(toolCallId="k1", metadata={"kind": "client_tool", "toolName": "cli"})
    assert one(item, resume_output("i", 1)) == ("invalid-tool-output", "client")


def test_an_unbound_record_of_another_kind_only_names_its_call() -> None:
    item = unbound(toolCallId="c1")
    assert validate([item], [resolved("i", payload=True)]) == ResumeState(interrupted_run_id="r1")
    assert validate([item], [resume_cancel("i")]).cancelled == {"c1"}


def test_an_opaque_record_is_settled_and_says_nothing() -> None:
    item = PendingInterrupt(interrupt_id="i", run_id="r1", descriptor={"whatever": 1})
    for entry in (resolved("i", {"approved": True}), resume_cancel("i")):
        assert validate([item], [entry]) == ResumeState(interrupted_run_id="r1")
    assert codes([item], []) == [
        ("i", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
        ("batch", "item-validation-failed"),
    ]
