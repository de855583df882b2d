"""Runs that continue a paused one: what the answers do, and what is left open."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from chatkeep.engine import (
    ToolContext,
    client_tool,
    define_tool,
    tool,
)
from chatkeep.engine.interrupts import (
    BINDING_KEY,
    CONTINUATION_KEY,
    Decision,
    GenericAnswer,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)

from .continuing import (
    REVIEW,
    Answers,
    Executed,
    Json,
    answer,
    asked,
    generic,
    run,
    said,
)

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------ what answers do


async def test_a_continuation_shows_the_thread_first_and_results_without_their_calls() -> None:
    executed = Executed()
    done = await run(
        asked(("c", "send", "{}")),
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        resume=[resume_approve("approval_c")],
    )
    assert done.types[:3] == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "TOOL_CALL_RESULT"]
    assert [row["id"] for row in done.events[1]["messages"]] == ["u", "m"]
    assert "TOOL_CALL_START" not in done.types
    assert done.events[2]["messageId"] == done.row("c")["id"] != "m"
    assert executed == [("send", {})]
    sent = [row["role"] for row in done.model.requests[0].messages]
    assert sent == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("schema", "entry", "content", "outcome"),
    [
        (None, resume_deny("approval_c"), '{"error":"User declined tool execution"}', "denied"),
        (
            {"reject": {}},
            resume_deny("approval_c", payload={"why": "no"}),
            '{"why":"no"}',
            "denied",
        ),
        ({"reject": {}}, resume_deny("approval_c", payload="never"), "never", "denied"),
        ({"reject": {}}, resume_deny("approval_c", payload=""), "", "denied"),
        (None, resume_cancel("approval_c"), '{"error":"Tool execution cancelled"}', "cancelled"),
    ],
)
async def test_a_call_that_was_not_approved_is_a_failed_one(
    schema: Json | None, entry: Json, content: str, outcome: str
) -> None:
    executed = Executed()
    done = await run(
        asked(("c", "send", "{}")),
        answer(),
        tools=[executed.tool("send", needs_approval=True, approval_schema=schema)],
        resume=[entry],
    )
    assert executed == []
    assert done.results == [("c", content)]
    assert done.row("c")["error"]
    (result,) = [e for e in done.events if e["type"] == "TOOL_CALL_RESULT"]
    marks = {"state": "output-error", "toolResultOutcome": outcome}
    assert result["metadata"] == {"tanstack": marks}
    assert done.row("c")["metadata"] == {"tanstack": {"toolResultOutcome": outcome}}
    assert not [line for line in done.trace.lines if "ToolCall" in line]


async def test_edited_arguments_replace_the_models_and_the_call_keeps_its_own() -> None:
    executed = Executed()
    schema = {"type": "object", "properties": {"to": {"type": "string"}}}
    done = await run(
        asked(("c", "send", '{"to":"a"}')),
        answer(),
        tools=[executed.tool("send", needs_approval=True, input_schema=schema)],
        resume=[resume_approve("approval_c", edited_args={"to": "b"})],
    )
    assert executed == [("send", {"to": "b"})]
    assert done.rows[1]["toolCalls"][0]["function"]["arguments"] == '{"to":"a"}'


async def test_edited_arguments_are_bound_to_the_function_like_any_other() -> None:
    class Mail(BaseModel):
        to: str

    sent: list[Mail] = []

    @tool(needs_approval=True)
    def send(mail: Mail) -> str:
        """Send."""
        sent.append(mail)
        return "sent"

    await run(
        asked(("c", "send", '{"to":"a"}')),
        answer(),
        tools=[send],
        resume=[resume_approve("approval_c", edited_args={"to": "b"})],
    )
    assert sent == [Mail(to="b")]


async def test_a_tool_is_told_what_was_decided_about_its_call() -> None:
    """With what was said along; a tool that nobody was asked about is told nothing."""
    told: dict[str, Decision | None] = {}

    def send(_: Json, context: ToolContext) -> None:
        told[context.tool_name] = context.approval

    schema: Json = {"approve": {"type": "object"}}
    await run(
        asked(("c", "send", "{}"), ("d", "look", "{}")),
        answer(),
        tools=[
            define_tool(name="send", execute=send, needs_approval=True, approval_schema=schema),
            define_tool(name="look", execute=send),
        ],
        resume=[resume_approve("approval_c", payload={"by": "ann"})],
    )
    assert told["look"] is None
    assert told["send"] is not None
    assert told["send"].payload == {"by": "ann"}


async def test_a_batch_is_processed_whole_and_in_call_order() -> None:
    """The server tool that was held back, the approved one and the browser's, in one go."""
    executed = Executed()
    done = await run(
        asked(("a", "cli", "{}"), ("b", "look", "{}"), ("c", "send", "{}")),
        answer(),
        tools=[
            client_tool("cli"),
            executed.tool("look"),
            executed.tool("send", needs_approval=True),
        ],
        resume=[resume_approve("approval_c"), resume_output("client_tool_a", [1])],
    )
    assert done.results == [("a", "[1]"), ("b", '{"did":"look"}'), ("c", '{"did":"send"}')]
    assert [row.get("toolCallId") for row in done.rows[2:5]] == ["a", "b", "c"]
    (info,) = done.trace.phases
    assert [outcome.tool_call_id for outcome in info.results] == ["a", "b", "c"]


async def test_a_browser_tool_that_failed_stays_failed_for_the_model() -> None:
    cli = client_tool("cli", output_schema={"type": "object", "required": ["a"]})
    done = await run(
        asked(("c", "cli", "{}")),
        answer(),
        tools=[cli],
        resume=[resume_error("client_tool_c", "no camera")],
    )
    assert done.results == [("c", '{"error":"no camera"}')]
    assert done.row("c")["error"] == "no camera"
    (sent,) = [row for row in done.model.requests[0].messages if row["role"] == "tool"]
    assert dict(sent)["error"] == "no camera"


async def test_an_output_that_looks_like_an_error_is_a_success() -> None:
    done = await run(
        asked(("c", "cli", "{}")),
        answer(),
        tools=[client_tool("cli")],
        resume=[resume_output("client_tool_c", {"error": "none"})],
    )
    assert done.results == [("c", '{"error":"none"}')]
    assert "error" not in done.row("c")


async def test_an_approved_browser_tool_takes_two_steps_and_keeps_edited_arguments() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    cli = client_tool("cli", needs_approval=True, input_schema=schema)
    rows = asked(("q", "cli", '{"x":1}'))
    second = await run(
        rows, tools=[cli], resume=[resume_approve("approval_q", edited_args={"x": 2})]
    )
    assert second.ids == ["client_tool_q"]
    assert second.results == []
    (interrupt,) = second.last["outcome"]["interrupts"]
    assert interrupt["metadata"]["input"] == {"x": 2}
    assert interrupt["metadata"][BINDING_KEY]["interruptedRunId"] == "r2"
    third = await run(
        rows,
        answer(),
        tools=[cli],
        parent_run_id="r2",
        resume=[resume_output("client_tool_q", "out")],
    )
    assert third.results == [("q", "out")]


async def test_the_decision_of_a_first_step_is_proved_in_the_second() -> None:
    cli = client_tool("cli", needs_approval=True)
    decision = Decision(approved=True, proof={"v": 1})
    second = await run(
        asked(("q", "cli", "{}")), tools=[cli], middleware=[Answers(approvals={"q": decision})]
    )
    (interrupt,) = second.last["outcome"]["interrupts"]
    assert interrupt["metadata"]["chatkeep:approvalProof"] == {"v": 1}


async def test_what_was_approved_is_not_held_back_by_a_call_that_asks_only_now() -> None:
    """Its answer counts once: held back, it would be lost. What nobody was asked about waits."""
    executed = Executed()
    again = await run(
        asked(("a", "send", "{}"), ("b", "new", "{}"), ("c", "look", "{}")),
        tools=[
            executed.tool("send", needs_approval=True),
            executed.tool("new", needs_approval=True),
            executed.tool("look"),
        ],
        middleware=[Answers(approvals={"a": Decision(approved=True)})],
    )
    assert executed == [("send", {})]
    assert again.ids == ["approval_b"]


async def test_a_browser_tool_that_was_left_open_is_asked_again() -> None:
    generic = GenericAnswer(
        definition_id="review", key="k", interrupt_id="i", batch_index=1, status="resolved"
    )
    again = await run(
        asked(("c", "cli", "{}")),
        tools=[client_tool("cli")],
        interrupts=[REVIEW],
        middleware=[Answers(generic=(generic,), superseded=frozenset({"client_tool_c"}))],
    )
    assert again.ids == ["client_tool_c"]


async def test_a_call_that_has_its_result_is_not_executed_again() -> None:
    """A continuation that was aborted after its tool ran is answered anew."""
    executed = Executed()
    done = await run(
        [*asked(("c", "send", "{}")), said("c", "sent")],
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        middleware=[Answers(approvals={"c": Decision(approved=True)})],
    )
    assert executed == []
    assert done.results == []
    assert done.row("c")["content"] == "sent"


@pytest.mark.parametrize("outcome", ["denied", "cancelled"])
async def test_a_decision_that_did_not_count_can_be_taken_otherwise(outcome: str) -> None:
    """The continuation that it was taken for failed; nothing was executed by it."""
    executed = Executed()
    decided = said(
        "c",
        '{"error":"no"}',
        error="no",
        metadata={"tanstack": {"toolResultOutcome": outcome}},
    )
    done = await run(
        [*asked(("c", "send", "{}")), decided],
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        middleware=[Answers(approvals={"c": Decision(approved=True)})],
    )
    assert executed == [("send", {})]
    assert done.row("c")["content"] == '{"did":"send"}'


async def test_what_a_browser_gave_for_a_continuation_that_failed_can_be_given_anew() -> None:
    done = await run(
        [*asked(("c", "cli", "{}")), said("c", "1")],
        answer(),
        tools=[client_tool("cli")],
        middleware=[Answers(client_results={"c": 2})],
    )
    assert done.results == [("c", "2")]
    assert done.row("c")["content"] == "2"


async def test_a_decision_about_another_turn_stays() -> None:
    executed = Executed()
    old = {"id": "x", "type": "function", "function": {"name": "send", "arguments": "{}"}}
    marks = {"tanstack": {"toolResultOutcome": "denied"}}
    rows = [
        {"id": "u0", "role": "user", "content": "before"},
        {"id": "m0", "role": "assistant", "toolCalls": [old]},
        said("x", "no", error="no", metadata=marks),
        *asked(("c", "send", "{}")),
    ]
    done = await run(
        rows,
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        middleware=[Answers(approvals={"c": Decision(approved=True)})],
    )
    assert done.row("x")["content"] == "no"


async def test_a_placeholder_is_no_result() -> None:
    executed = Executed()
    waiting = said("c", '{"approved":true,"pendingExecution":true}')
    done = await run(
        [*asked(("c", "send", "{}")), waiting],
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        middleware=[Answers(approvals={"c": Decision(approved=True)})],
    )
    assert executed == [("send", {})]
    assert [row["id"] for row in done.events[1]["messages"]] == ["u", "m"]
    sent = [row for row in done.model.requests[0].messages if row["role"] == "tool"]
    assert [dict(row)["content"] for row in sent] == ['{"did":"send"}']


async def test_calls_of_other_turns_stay_as_they_are() -> None:
    """A process that died left them, or a client made them up: an answer is for its own turn."""
    executed = Executed()
    old = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    forged = {"id": "y", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    rows = [
        {"id": "u0", "role": "user", "content": "before"},
        {"id": "m0", "role": "assistant", "toolCalls": [old]},
        *asked(("c", "send", "{}")),
        {"id": "m9", "role": "assistant", "toolCalls": [forged]},
    ]
    done = await run(
        rows,
        answer(),
        tools=[executed.tool("look"), executed.tool("send", needs_approval=True)],
        middleware=[Answers(approvals={"c": Decision(approved=True)})],
    )
    assert executed == [("send", {})]
    assert [call for call, _ in done.results] == ["c"]


@pytest.mark.parametrize(
    ("boundary", "runs"),
    [("beforeModel", False), ("afterModel", True), ("beforeTools", True), (None, True)],
)
async def test_a_question_before_the_model_call_has_no_open_calls(
    boundary: str | None, runs: bool
) -> None:
    """Those that stand there are of a run that died, or made up by a client: answering a question
    about something else must not execute them."""
    executed = Executed()
    await run(
        asked(("c", "look", "{}")),
        answer(),
        tools=[executed.tool("look")],
        interrupts=[REVIEW],
        middleware=[Answers(generic=(generic(boundary=boundary),))],
    )
    assert bool(executed) == runs


async def test_calls_that_the_provider_executes_are_not_open() -> None:
    executed = Executed()
    rows = asked(("c", "look", "{}"))
    rows[1]["toolCalls"][0]["metadata"] = {"providerExecuted": True}
    rows[1]["metadata"] = {"tanstack": {"toolCallMetadata": {"c": {"providerExecuted": True}}}}
    done = await run(
        rows,
        answer(),
        tools=[executed.tool("look")],
        interrupts=[REVIEW],
        middleware=[Answers(generic=(generic(),))],
    )
    assert executed == []
    assert "onInterruptBoundary:beforeTools" not in done.trace.lines


async def test_open_calls_are_never_executed_without_an_answer() -> None:
    executed = Executed()
    done = await run(
        asked(("c", "look", "{}")), answer(), tools=[executed.tool("look")], parent_run_id=None
    )
    assert executed == []
    assert "MESSAGES_SNAPSHOT" not in done.types


# ----------------------------------------------------------------------- without a store


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        (resume_approve("approval_c"), said("c", '{"approved":true,"pendingExecution":true}')),
        (resume_deny("approval_c"), said("c", '{"approved":false,"message":"User denied"}')),
        (resume_deny("approval_c"), said("c", '{"error":"made up"}', error="made up")),
    ],
)
async def test_what_a_browser_posts_as_result_of_an_answered_call_gives_way(
    entry: Json, row: Json
) -> None:
    executed = Executed()
    done = await run(
        [*asked(("c", "send", "{}")), row],
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        resume=[entry],
    )
    assert [r["id"] for r in done.events[1]["messages"]] == ["u", "m"]
    assert done.row("c")["id"] != "row-c"
    assert len(done.results) == 1


async def test_a_posted_error_row_marks_the_output_as_failed() -> None:
    """The only way in which one generation of browsers says so."""
    done = await run(
        [*asked(("c", "cli", "{}")), said("c", "null", error="no camera")],
        answer(),
        tools=[client_tool("cli")],
        resume=[resume_output("client_tool_c", {"error": "no camera"})],
    )
    assert done.row("c")["error"] == "no camera"


async def test_a_refused_resume_changes_nothing_and_starts_nothing() -> None:
    executed = Executed()
    refused = await run(
        asked(("c", "send", "{}")),
        tools=[executed.tool("send", needs_approval=True)],
        resume=[resume_output("client_tool_c", 1)],
    )
    assert refused.types == ["RUN_STARTED", "RUN_ERROR"]
    assert executed == []
    lines = [line.partition(":")[0] for line in refused.trace.lines]
    assert lines == ["setup", "onConfig", "onError"]


async def test_a_batch_of_one_generic_question_needs_no_answer_for_calls() -> None:
    """At afterModel only the question was asked; the turn's calls ask for themselves now."""
    executed = Executed()
    entry = resume_answer("i", {})
    repeated: Json = {"v": 1, "definitionId": "review", "key": "k", "batchIndex": 0}
    repeated |= {"reason": "review", "message": "?", "responseSchemaHash": REVIEW.response_hash}
    again = await run(
        asked(("c", "send", "{}"), ("d", "look", "{}")),
        tools=[executed.tool("send", needs_approval=True), executed.tool("look")],
        interrupts=[REVIEW],
        resume=[{**entry, "metadata": {CONTINUATION_KEY: repeated}}],
    )
    assert again.ids == ["approval_c"]
    assert executed == []
