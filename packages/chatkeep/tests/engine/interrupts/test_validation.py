"""A batch of answers is taken whole or refused whole: the set, and what it answers."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import Any

import pytest

from chatkeep.engine.interrupts import (
    BINDING_KEY,
    BOUNDARY_KEY,
    DECLINED_TEXT,
    PAYLOAD_KEY,
    Decision,
    PendingInterrupt,
    Refusal,
    ResumeState,
    check_generic,
    define_interrupt,
    denial_result,
    may_be_missing,
    parse_binding,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
    schema_hash,
    submitted_ids,
)
from chatkeep.errors import InterruptResumeError, InvalidValue
from chatkeep.records import UNSET

from .kit import (
    ANY,
    BARE,
    CLI,
    DEFINITIONS,
    DEL,
    FREE,
    NOW,
    OK,
    PAY,
    PLAN,
    SHOWN,
    TWO,
    WHY,
    N,
    asks,
    changed,
    codes,
    one,
    question,
    refused,
    resolved,
    validate,
    waits,
    with_binding,
)

# ------------------------------------------------------------------------ what is accepted


@pytest.mark.parametrize(
    ("item", "entry", "decision"),
    [
        (asks(DEL), resume_approve("approval_c1"), Decision(approved=True)),
        (asks(DEL), resume_deny("approval_c1"), Decision(approved=False)),
        (asks(DEL), resolved("approval_c1", payload=True), Decision(approved=True)),
        (asks(BARE), resolved("approval_c1", payload=False), Decision(approved=False)),
        (
            asks(DEL),
            resume_approve("approval_c1", edited_args={"p": "b"}),
            Decision(approved=True, edited_args={"p": "b"}),
        ),
        (
            asks(PAY),
            resume_approve("approval_c1", payload={"n": "x"}),
            Decision(approved=True, payload={"n": "x"}),
        ),
        (asks(PAY), resolved("approval_c1", payload=False), Decision(approved=False)),
        (
            asks(PAY),
            resume_approve("approval_c1", edited_args={"p": "b"}, payload={"n": "x"}),
            Decision(approved=True, edited_args={"p": "b"}, payload={"n": "x"}),
        ),
        (
            asks(WHY),
            resume_deny("approval_c1", payload={"n": "no"}),
            Decision(approved=False, payload={"n": "no"}),
        ),
    ],
)
def test_a_decision_is_read(item: PendingInterrupt, entry: Any, decision: Decision) -> None:
    state = validate([item], [entry])
    assert state == ResumeState(interrupted_run_id="r1", approvals={"c1": decision})


def test_a_denial_has_its_payload_as_result_or_says_who_declined() -> None:
    assert denial_result(Decision(approved=False)) == {"error": DECLINED_TEXT}
    assert denial_result(Decision(approved=False, payload={"n": "no"})) == {"n": "no"}
    assert denial_result(Decision(approved=False, payload=None)) is None


def test_an_output_is_read_as_json() -> None:
    assert validate([waits(CLI)], [resume_output("client_tool_k1", {"n": "x"})]) == ResumeState(
        interrupted_run_id="r1", client_results={"k1": {"n": "x"}}
    )
    state = validate([waits(FREE)], [resolved("client_tool_k1", ("a", 1))])
    assert state.client_results == {"k1": ["a", 1]}


def test_an_absent_output_is_null() -> None:
    assert validate([waits(FREE)], [resolved("client_tool_k1")]).client_results == {"k1": None}
    assert one(waits(CLI), resolved("client_tool_k1")) == ("invalid-tool-output", "client")


def test_an_answer_is_read_with_its_question() -> None:
    item = question(SHOWN, 3, payload={"n": "x"}, expires_at=NOW + 1)
    (answer,) = validate([item], [resume_answer("g3", {"ok": True})]).generic
    assert (answer.definition_id, answer.key, answer.interrupt_id) == ("shown", "k", "g3")
    assert (answer.batch_index, answer.status, answer.response) == (3, "resolved", {"ok": True})
    assert (answer.reason, answer.message, answer.payload) == ("r", "m", {"n": "x"})
    assert answer.expires_at == item.descriptor["expiresAt"]


@pytest.mark.parametrize(("mark", "boundary"), [("afterModel", "afterModel"), (1, None)])
def test_an_answer_knows_where_its_question_was_asked(mark: Any, boundary: str | None) -> None:
    item = question(PLAN)
    item = changed(item, metadata={**item.descriptor["metadata"], BOUNDARY_KEY: mark})
    (answer,) = validate([item], [resume_answer("g0", {"ok": True})]).generic
    assert answer.boundary == boundary


def test_a_question_without_a_schema_takes_anything() -> None:
    for response in (None, "x", [1], {"a": 1}):
        state = validate([question(ANY)], [resume_answer("g0", response)])
        assert state.generic[0].response == response


def test_cancelled_calls_and_questions_are_named() -> None:
    pending = [asks(DEL), waits(CLI), question(PLAN, 2)]
    state = validate(pending, [resume_cancel(item.interrupt_id) for item in pending])
    assert state.cancelled == {"c1", "k1"}
    assert [(a.status, a.response) for a in state.generic] == [("cancelled", None)]
    assert (state.approvals, state.client_results) == ({}, {})


def test_answers_stand_in_the_order_of_the_questions() -> None:
    pending = [question(PLAN, 2), question(ANY, 0), question(PLAN, 1)]
    state = validate(pending, [resume_answer(f"g{i}", {"ok": True}) for i in (1, 2, 0)])
    assert [answer.batch_index for answer in state.generic] == [0, 1, 2]


def test_a_whole_mixed_batch_is_read_in_any_order() -> None:
    pending = [asks(DEL), asks(BARE, "c2"), waits(CLI), question(PLAN, 3)]
    entries = [
        resume_answer("g3", {"ok": False}),
        resume_output("client_tool_k1", {"n": "x"}),
        resume_deny("approval_c2"),
        resume_approve("approval_c1"),
    ]
    state = validate(pending, entries)
    assert {call: d.approved for call, d in state.approvals.items()} == {"c1": True, "c2": False}
    assert state.client_results == {"k1": {"n": "x"}}
    assert state.superseded == frozenset()


def test_nothing_pending_and_nothing_sent_is_an_empty_state() -> None:
    assert validate([], []) == ResumeState(interrupted_run_id="r1")


# --------------------------------------------------------------------- V1, V2, V18: the set


def test_v1_two_entries_for_one_interrupt() -> None:
    entries = [resume_approve("approval_c1"), resume_deny("approval_c1")]
    errors = refused([asks(DEL)], entries)
    assert [(e["code"], e["source"]) for e in errors] == [
        ("conflict", "client"),
        ("item-validation-failed", "client"),
    ]
    assert errors[1]["interruptIds"] == ["approval_c1", "approval_c1"]


def test_v1_a_third_entry_adds_no_second_error() -> None:
    entries = [resume_approve("approval_c1")] * 3
    assert codes([asks(DEL)], entries) == [
        ("approval_c1", "conflict"),
        ("batch", "item-validation-failed"),
    ]


def test_v2_a_pending_interrupt_without_an_entry() -> None:
    assert codes([asks(DEL), asks(BARE, "c2")], [resume_approve("approval_c1")]) == [
        ("approval_c2", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
        ("batch", "item-validation-failed"),
    ]
    assert codes([asks(DEL)], []) == [
        ("approval_c1", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
        ("batch", "item-validation-failed"),
    ]


def test_v2_client_tools_may_be_missing_once_all_questions_are_answered() -> None:
    for entry in (resume_answer("g1", {"ok": True}), resume_cancel("g1")):
        state = validate([waits(CLI), question(PLAN, 1)], [entry])
        assert state.superseded == {"client_tool_k1"}
        assert state.client_results == {}
        assert state.cancelled == frozenset()


def test_v2_a_superseded_client_tool_keeps_its_approval() -> None:
    decision = Decision(approved=True, edited_args={"p": "b"}, proof={"v": 1})
    state = validate(
        [waits(TWO, decision=decision), question(PLAN, 1)], [resume_answer("g1", {"ok": True})]
    )
    assert state.superseded == {"client_tool_k1"}
    assert state.approvals == {"k1": decision}


def test_v2_nothing_else_may_be_missing() -> None:
    missing = ("batch", "incomplete-batch")
    some = [resume_answer("g1", {"ok": True})]
    assert codes([asks(DEL), question(PLAN, 1)], some)[:2] == [
        ("approval_c1", "unknown-interrupt"),
        missing,
    ]
    pending = [waits(CLI), question(PLAN, 1), question(ANY, 2)]
    assert codes(pending, some)[:3] == [
        ("client_tool_k1", "unknown-interrupt"),
        ("g2", "unknown-interrupt"),
        missing,
    ]
    assert codes([waits(CLI), waits(FREE, "k2")], [resume_cancel("client_tool_k1")])[:2] == [
        ("client_tool_k2", "unknown-interrupt"),
        missing,
    ]


def test_what_may_be_missing_is_said_by_the_kinds() -> None:
    pending = [asks(DEL), waits(CLI), question(PLAN, 2), question(PLAN, 3)]
    assert may_be_missing(pending, {"g2", "g3"}) == {"client_tool_k1"}
    assert may_be_missing(pending, {"g2"}) == set()
    assert may_be_missing([waits(CLI)], set()) == set()
    assert may_be_missing([], set()) == set()


def test_v18_an_entry_for_what_is_not_pending() -> None:
    entries = [resume_approve("approval_c1"), resume_approve("approval_zz")]
    assert codes([asks(DEL)], entries) == [
        ("approval_zz", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
        ("batch", "item-validation-failed"),
    ]
    assert codes([], [resume_cancel("x")])[:2] == [
        ("x", "unknown-interrupt"),
        ("batch", "incomplete-batch"),
    ]


# ------------------------------------------------------------------ V3 to V9: the interrupt


@pytest.mark.parametrize(
    "item",
    [
        with_binding(asks(DEL), interruptedRunId="other"),
        with_binding(asks(DEL), interruptId="other"),
        with_binding(asks(DEL), generation=1),
        with_binding(asks(DEL), toolCallId="other"),
        with_binding(asks(DEL), v=2),
        with_binding(asks(DEL), v=UNSET),
        with_binding(asks(DEL), kind="other"),
        with_binding(asks(DEL), responseSchemaHash=UNSET),
        changed(asks(DEL), id="other"),
        changed(asks(DEL), metadata={BINDING_KEY: None}),
        dataclasses.replace(asks(DEL), run_id="other"),
    ],
)
def test_v3_a_binding_of_something_else_is_stale(item: PendingInterrupt) -> None:
    assert one(item, resume_approve("approval_c1")) == ("stale", "server")
    assert one(item, resume_cancel("approval_c1")) == ("stale", "server")


@pytest.mark.parametrize(
    "item",
    [
        changed(asks(DEL), expiresAt="soon"),
        changed(asks(DEL), expiresAt=17),
        with_binding(asks(DEL), expiresAt="soon"),
        with_binding(asks(DEL), expiresAt=[]),
    ],
)
def test_v4_an_expiry_that_is_no_date(item: PendingInterrupt) -> None:
    assert one(item, resume_approve("approval_c1")) == ("invalid-payload", "server")


@pytest.mark.parametrize("early", [0, 1, 10_000])
def test_v5_what_has_expired_takes_no_answer(early: int) -> None:
    item = question(PLAN, 0, expires_at=NOW - early)
    assert one(item, resume_answer("g0", {"ok": True})) == ("expired", "server")
    assert validate([item], [resume_answer("g0", {"ok": True})], now_ms=NOW - early - 1).generic


def test_v5_descriptor_or_binding_may_say_when() -> None:
    past = "2026-01-01T00:00:00Z"
    entry = resume_approve("approval_c1")
    assert one(changed(asks(DEL), expiresAt=past), entry) == ("expired", "server")
    assert one(with_binding(asks(DEL), expiresAt=past), entry) == ("expired", "server")
    future = changed(asks(DEL), expiresAt="2027-01-01T00:00:00Z")
    assert validate([future], [entry]).approvals


@pytest.mark.parametrize("text", ["2026-11-30T12:00:00", "2026-11-30", "20261130T120000Z"])
def test_v5_a_time_without_an_offset_is_utc(text: str) -> None:
    """Whatever the server's own time zone is; a date alone is its first moment."""
    moment = dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)
    end = int(moment.timestamp() * 1000)
    item, entry = changed(asks(DEL), expiresAt=text), resume_approve("approval_c1")
    assert validate([item], [entry], now_ms=end - 1).approvals
    assert one(item, entry, now_ms=end) == ("expired", "server")


def test_v5_the_first_and_the_last_year_are_times_too() -> None:
    entry = resume_approve("approval_c1")
    first = changed(asks(DEL), expiresAt="0001-01-01T00:00:00+23:59")
    assert one(first, entry) == ("expired", "server")
    last = changed(asks(DEL), expiresAt="9999-12-31T23:59:59-23:59")
    assert validate([last], [entry]).approvals


def test_v5_what_has_expired_can_be_cancelled() -> None:
    item = question(PLAN, 0, expires_at=1)
    assert validate([item], [resume_cancel("g0")]).generic[0].status == "cancelled"
    item = changed(asks(DEL), expiresAt="soon")
    assert validate([item], [resume_cancel("approval_c1")]).cancelled == {"c1"}


@pytest.mark.parametrize(
    "item",
    [
        changed(asks(DEL), responseSchema=UNSET),
        changed(asks(DEL), responseSchema={}),
        changed(asks(DEL), responseSchema="text"),
        changed(asks(DEL), responseSchema={"default": float("nan")}),
        with_binding(asks(DEL), responseSchemaHash=schema_hash({})),
        with_binding(question(PLAN), responseSchemaHash=UNSET),
        changed(question(PLAN), responseSchema=UNSET),
        changed(question(ANY), responseSchema={}),
    ],
)
def test_v6_a_response_schema_that_is_not_the_bound_one(item: PendingInterrupt) -> None:
    entry = resolved(item.interrupt_id, payload=True)
    assert one(item, entry) == ("invalid-response-schema", "server")


@pytest.mark.parametrize("status", ["other", "", None, 1, [], {}, "Resolved"])
def test_v7_a_status_that_is_none(status: Any) -> None:
    entry = {"interruptId": "approval_c1", "status": status, "payload": True}
    assert one(asks(DEL), entry) == ("invalid-payload", "client")
    assert one(asks(DEL), {"interruptId": "approval_c1"}) == ("invalid-payload", "client")


@pytest.mark.parametrize("payload", [True, False, 0, "", {}, {"approved": False}])
def test_v8_a_cancelled_entry_with_a_payload(payload: Any) -> None:
    entry = {**resume_cancel("approval_c1"), "payload": payload}
    assert one(asks(DEL), entry) == ("invalid-payload", "client")


def test_v8_null_is_no_payload() -> None:
    entry = {**resume_cancel("approval_c1"), "payload": None}
    assert validate([asks(DEL)], [entry]).cancelled == {"c1"}


@pytest.mark.parametrize(
    "item",
    [
        with_binding(question(), definitionId="gone"),
        with_binding(question(), payloadSchemaHash="sha256:x"),
        with_binding(question(), batchIndex=UNSET),
        with_binding(question(), batchIndex=-1),
        with_binding(question(), batchIndex="0"),
        with_binding(question(), key=UNSET),
        changed(
            with_binding(question(), responseSchemaHash=schema_hash(N)),
            responseSchema=N,
        ),
        changed(
            question(SHOWN, payload={"n": "x"}),
            metadata={
                BINDING_KEY: question(SHOWN, payload={"n": "x"}).descriptor["metadata"][BINDING_KEY]
            },
        ),
        changed(
            question(SHOWN, payload={"n": "x"}),
            metadata={
                **question(SHOWN, payload={"n": "x"}).descriptor["metadata"],
                PAYLOAD_KEY: {"n": 1},
            },
        ),
    ],
)
def test_v9_a_question_that_is_not_asked_like_that_any_more(item: PendingInterrupt) -> None:
    assert one(item, resume_answer("g0", {"ok": True})) == ("stale", "server")


def test_v9_two_questions_in_one_place() -> None:
    other = dataclasses.replace(question(ANY, 1))
    other = with_binding(other, batchIndex=0)
    entries = [resume_answer("g0", {"ok": True}), resume_answer("g1", 1)]
    assert codes([question(PLAN, 0), other], entries) == [
        ("g1", "stale"),
        ("batch", "item-validation-failed"),
    ]


def test_v9_a_question_whose_definition_is_gone_can_be_cancelled() -> None:
    state = validate([question()], [resume_cancel("g0")], definitions={})
    assert state.generic[0].status == "cancelled"


def test_what_a_question_needs_is_said_in_one_sentence() -> None:
    item = question(SHOWN, payload={"n": "x"})
    binding = parse_binding(item.descriptor)
    assert binding is not None
    assert check_generic(binding, item.descriptor, DEFINITIONS) is None
    assert "not registered" in str(check_generic(binding, item.descriptor, {}))
    drifted = {"shown": define_interrupt("shown", response=N, payload=N)}
    assert "have changed" in str(check_generic(binding, item.descriptor, drifted))
    drifted = {"shown": define_interrupt("shown", response=OK)}
    assert "have changed" in str(check_generic(binding, item.descriptor, drifted))
    hidden = {**item.descriptor, "metadata": {}}
    assert "is missing" in str(check_generic(binding, hidden, DEFINITIONS))


# ------------------------------------------------------------------------------- the errors


def test_errors_have_what_a_browser_matches_against_its_batch() -> None:
    entries = [resolved("client_tool_k1", 1), resolved("approval_c1", "x")]
    errors = refused([waits(CLI), asks(DEL)], entries)
    assert [list(error) for error in errors] == [
        ["scope", "code", "message", "source", "retryable", "interruptId", "threadId",
         "interruptedRunId", "generation"],
        ["scope", "code", "message", "source", "retryable", "interruptId", "threadId",
         "interruptedRunId", "generation"],
        ["scope", "code", "message", "source", "retryable", "interruptIds", "threadId",
         "interruptedRunId", "generation"],
    ]  # fmt: skip
    assert [error.get("interruptId") for error in errors[:2]] == ["approval_c1", "client_tool_k1"]
    assert errors[2]["interruptIds"] == ["client_tool_k1", "approval_c1"]
    for error in errors:
        assert (error["threadId"], error["interruptedRunId"]) == ("t", "r1")
        assert (error["generation"], error["retryable"]) == (0, False)
        assert json.loads(json.dumps(error)) == error


def test_items_come_before_the_batch_and_each_batch_code_once() -> None:
    refusal = Refusal("t", "r", ["b", "a"])
    assert not refusal
    refusal.check()
    refusal.batch("conflict", "first").batch("conflict", "second", source="server")
    refusal.item("b", "stale", "m", source="server").item("a", "conflict", "m", path=["x", 0])
    assert refusal
    assert refusal.items == 2
    errors = refusal.error().errors
    assert [(e["scope"], e.get("interruptId")) for e in errors] == [
        ("item", "a"),
        ("item", "b"),
        ("batch", None),
    ]
    assert errors[0]["path"] == ["x", 0]
    assert "path" not in errors[1]
    assert errors[2]["message"] == "first"
    assert refusal.error().first_code == "conflict"
    with pytest.raises(InterruptResumeError):
        refusal.check()


def test_the_ids_of_a_batch_are_those_that_are_texts() -> None:
    entries: list[Any] = [{"interruptId": "b"}, {"interruptId": 1}, "x", None, {"interruptId": "a"}]
    assert submitted_ids(entries) == ["b", "a"]


# -------------------------------------------------------------------------------- builders


def test_builders_make_the_entries_that_a_browser_sends() -> None:
    assert resume_approve("i") == resolved("i", {"approved": True})
    assert resume_approve("i", edited_args=None, payload=None) == resolved(
        "i", {"approved": True, "editedArgs": None, "payload": None}
    )
    assert resume_deny("i") == resolved("i", {"approved": False})
    assert resume_deny("i", payload=1) == resolved("i", {"approved": False, "payload": 1})
    assert resume_output("i", None) == resolved("i", None)
    assert resume_answer("i", (1,)) == resolved("i", [1])
    assert resume_cancel("i") == {"interruptId": "i", "status": "cancelled"}
    assert resume_error("i", "no") == resolved(
        "i", {"error": "no"}, metadata={"tanstack": {"state": "output-error"}}
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda value: resume_approve("i", edited_args=value),
        lambda value: resume_approve("i", payload=value),
        lambda value: resume_deny("i", payload=value),
        lambda value: resume_output("i", value),
        lambda value: resume_answer("i", value),
    ],
)
def test_builders_refuse_what_is_no_json(build: Any) -> None:
    with pytest.raises(InvalidValue, match=r"\$\.payload"):
        build(float("nan"))
