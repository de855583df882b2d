"""The second pause of an approved browser tool is held against the approval that went before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chatkeep.engine.interrupts import (
    BINDING_KEY,
    PROOF_KEY,
    Decision,
    PendingInterrupt,
    Refusal,
    approval_descriptor,
    client_tool_descriptor,
    parse_proof,
    replay_approval,
    resume_approve,
    resume_deny,
    validate_resume,
)
from chatkeep.engine.tools import Tool, client_tool
from chatkeep.errors import InterruptResumeError

P = {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]}
TOOL = client_tool("pay", input_schema=P, needs_approval=True)
TOOLS = {"pay": TOOL}
EDITED = {"approved": True, "editedArgs": {"p": "b"}}


def approval(call_id: str = "c1", tool: Tool = TOOL) -> PendingInterrupt:
    descriptor = approval_descriptor(tool, call_id, {"p": "a"}, "r1")
    return PendingInterrupt(interrupt_id=descriptor["id"], run_id="r1", descriptor=descriptor)


def decided() -> Decision:
    """The decision as the resume of the first pause reads it."""
    state = validate_resume(
        thread_id="t",
        interrupted_run_id="r1",
        pending=[approval()],
        entries=[resume_approve("approval_c1", edited_args={"p": "b"})],
        tools=TOOLS,
        definitions={},
        now_ms=0,
    )
    return state.approvals["c1"]


def waiting(decision: Decision | None = None) -> PendingInterrupt:
    descriptor = client_tool_descriptor(
        TOOL, "c1", {"p": "b"}, "r2", decision=decision or decided()
    )
    return PendingInterrupt(interrupt_id=descriptor["id"], run_id="r2", descriptor=descriptor)


def with_proof(**changes: Any) -> PendingInterrupt:
    item = waiting()
    metadata = item.descriptor["metadata"]
    metadata = {**metadata, PROOF_KEY: {**metadata[PROOF_KEY], **changes}}
    return dataclasses.replace(item, descriptor={**item.descriptor, "metadata": metadata})


def replay(item: PendingInterrupt, asked: PendingInterrupt, **options: Any) -> Decision:
    given: dict[str, Any] = {"response": EDITED, "resolved_at": 0, "tools": TOOLS, **options}
    refusal = Refusal("t", "r2", [item.interrupt_id])
    return replay_approval(item, asked, thread_id="t", refusal=refusal, **given)


def refused(item: PendingInterrupt, asked: PendingInterrupt, **options: Any) -> str:
    """The message of the refusal; its form is checked: about the interrupt that was answered."""
    with pytest.raises(InterruptResumeError) as caught:
        replay(item, asked, **options)
    stale, batch = caught.value.errors
    assert (stale["code"], stale["interruptId"]) == ("stale", "client_tool_c1")
    assert (stale["source"], stale["interruptedRunId"]) == ("server", "r2")
    assert (batch["code"], batch["interruptIds"]) == ("item-validation-failed", ["client_tool_c1"])
    return str(stale["message"])


def test_the_decision_is_read_again_from_the_approval() -> None:
    decision = replay(waiting(), approval())
    assert decision == decided()
    assert decision.edited_args == {"p": "b"}


def test_a_descriptor_without_a_proof_is_held_against_the_approval_all_the_same() -> None:
    item = waiting(Decision(approved=True))
    assert parse_proof(item.descriptor) is None
    assert replay(item, approval()).approved


def test_the_proof_of_a_second_question_outlives_the_first_run() -> None:
    """Superseded and asked again, the tool still names the approval of the first pause."""
    again = client_tool_descriptor(TOOL, "c1", {"p": "b"}, "r3", decision=decided())
    proof = parse_proof(again)
    assert proof is not None
    assert proof["interruptedRunId"] == "r1"


@pytest.mark.parametrize(
    "asked",
    [
        approval("c2"),
        approval(tool=client_tool("other", input_schema=P, needs_approval=True)),
        dataclasses.replace(approval(), descriptor={"id": "x", "reason": "r", "message": "m"}),
        waiting(),
    ],
    ids=["another call", "another tool", "no binding", "no approval"],
)
def test_an_approval_of_something_else_is_none(asked: PendingInterrupt) -> None:
    assert "same call" in refused(waiting(), asked)


@pytest.mark.parametrize(
    "changes",
    [
        {"interruptId": "approval_c2"},
        {"interruptedRunId": "r9"},
        {"generation": 1},
        {"inputSchemaHash": "sha256:x"},
        {"approvalSchemaHash": "sha256:x"},
        {"responseSchemaHash": "sha256:x"},
        {"decision": {"approved": True}},
        {"decision": {"approved": True, "editedArgs": {"p": "c"}}},
        {"decision": float("nan")},
        {"more": 1},
    ],
)
def test_a_forged_proof_is_refused(changes: dict[str, Any]) -> None:
    assert "its proof says" in refused(with_proof(**changes), approval())


def test_a_decision_that_does_not_hold_for_todays_tools_is_refused() -> None:
    drifted = {"pay": client_tool("pay", needs_approval=True)}
    assert "does not hold" in refused(waiting(), approval(), tools=drifted)
    assert "does not hold" in refused(waiting(), approval(), tools={})
    assert "does not hold" in refused(waiting(), approval(), response={"approved": "yes"})
    wrong = {"approved": True, "editedArgs": {"p": 1}}
    assert "does not hold" in refused(waiting(), approval(), response=wrong)


def test_an_approval_holds_as_of_when_it_was_given() -> None:
    asked = approval()
    asked = dataclasses.replace(
        asked, descriptor={**asked.descriptor, "expiresAt": "1970-01-01T00:00:01Z"}
    )
    assert replay(waiting(), asked, resolved_at=999).approved
    assert "expired" in refused(waiting(), asked, resolved_at=1000)


def test_a_refusal_is_no_approval() -> None:
    denied = resume_deny("approval_c1")["payload"]
    assert "was not given" in refused(waiting(), approval(), response=denied)


@pytest.mark.parametrize("proof", [None, 1, "x", [], {}, {"v": 2}, {"v": 1, "interruptId": "a"}])
def test_what_is_no_proof_is_none(proof: Any) -> None:
    assert parse_proof({"metadata": {PROOF_KEY: proof}}) is None
    assert parse_proof({"metadata": {BINDING_KEY: {}}}) is None
