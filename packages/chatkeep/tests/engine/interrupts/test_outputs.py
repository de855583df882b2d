"""A browser tool that failed stays a failure, and a success that looks like one a success."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.engine.interrupts import (
    PendingInterrupt,
    ResumeState,
    client_tool_descriptor,
    posted_failures,
    resume_error,
    resume_output,
    validate_resume,
)
from chatkeep.engine.tools import Tool, client_tool
from chatkeep.errors import InterruptResumeError
from chatkeep.messages import wire_to_model

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
STRICT = client_tool("cli", output_schema=CITY)
FREE = client_tool("cli")
LIKE_AN_ERROR = client_tool("cli", output_schema=ERROR)
MARK = {"metadata": {"tanstack": {"state": "output-error"}}}
EVERY_TOOL = pytest.mark.parametrize(
    "tool", [STRICT, FREE, LIKE_AN_ERROR], ids=["strict", "free", "like an error"]
)


def resume(
    tool: Tool, entry: dict[str, Any], failed_outputs: dict[str, str] | None = None
) -> ResumeState:
    descriptor = client_tool_descriptor(tool, "k1", {}, "r1")
    item = PendingInterrupt(interrupt_id=descriptor["id"], run_id="r1", descriptor=descriptor)
    return validate_resume(
        thread_id="t",
        interrupted_run_id="r1",
        pending=[item],
        entries=[entry],
        tools={"cli": tool},
        definitions={},
        failed_outputs=failed_outputs,
        now_ms=0,
    )


def entry(payload: Any, **more: Any) -> dict[str, Any]:
    return {**resume_output("client_tool_k1", payload), **more}


def code(tool: Tool, sent: dict[str, Any], failed_outputs: dict[str, str] | None = None) -> str:
    with pytest.raises(InterruptResumeError) as caught:
        resume(tool, sent, failed_outputs)
    return str(caught.value.first_code)


@EVERY_TOOL
def test_a_marked_failure_skips_the_success_schema(tool: Tool) -> None:
    state = resume(tool, entry({"error": "permission denied"}, **MARK))
    assert (state.client_errors, state.client_results) == ({"k1": "permission denied"}, {})
    assert state == resume(tool, resume_error("client_tool_k1", "permission denied"))


@EVERY_TOOL
def test_a_marked_failure_may_say_its_state(tool: Tool) -> None:
    sent = entry({"state": "output-error", "errorText": "permission denied"}, **MARK)
    assert resume(tool, sent).client_errors == {"k1": "permission denied"}


@EVERY_TOOL
@pytest.mark.parametrize(
    "payload",
    [
        None,
        "boom",
        1,
        [],
        {},
        {"error": None},
        {"error": {"message": "boom"}},
        {"error": "boom", "city": "Basel"},
        {"city": "Basel"},
        {"errorText": "boom"},
        {"state": "output-available", "errorText": "boom"},
        {"state": "output-error", "errorText": 1},
        {"state": "output-error", "errorText": "boom", "error": "boom"},
        {"state": "output-error", "error": "boom"},
    ],
)
def test_a_marked_failure_of_another_form_is_refused(tool: Tool, payload: Any) -> None:
    assert code(tool, entry(payload, **MARK)) == "invalid-tool-output"


@EVERY_TOOL
def test_a_posted_error_that_says_the_same_is_the_mark(tool: Tool) -> None:
    """Browsers that know no mark post a tool row with its error along."""
    state = resume(tool, entry({"error": "permission denied"}), {"k1": "permission denied"})
    assert (state.client_errors, state.client_results) == ({"k1": "permission denied"}, {})


@pytest.mark.parametrize("posted", [None, {}, {"k1": "something else"}, {"k2": "boom"}, {"k1": ""}])
def test_a_success_that_looks_like_a_failure_stays_one(posted: dict[str, str] | None) -> None:
    for tool in (FREE, LIKE_AN_ERROR):
        state = resume(tool, entry({"error": "boom"}), posted)
        assert (state.client_errors, state.client_results) == ({}, {"k1": {"error": "boom"}})
    assert code(STRICT, entry({"error": "boom"}), posted) == "invalid-tool-output"


def test_an_output_beside_a_posted_error_is_an_output() -> None:
    state = resume(STRICT, entry({"city": "Basel"}), {"k1": "boom"})
    assert state.client_results == {"k1": {"city": "Basel"}}


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        1,
        "output-error",
        [],
        {"state": "output-error"},
        {"tanstack": None},
        {"tanstack": "output-error"},
        {"tanstack": {"state": "output-available"}},
        {"tanstack": {"state": ["output-error"]}},
        {"tanstack": {"state": None}},
    ],
)
def test_nothing_else_is_the_mark(metadata: Any) -> None:
    sent = entry({"error": "boom"}, metadata=metadata)
    assert resume(FREE, sent).client_results == {"k1": {"error": "boom"}}


def test_a_failure_without_a_text_gets_one() -> None:
    """An empty text would be taken for no failure further on."""
    for state in (
        resume(STRICT, resume_error("client_tool_k1", "")),
        resume(STRICT, entry({"error": ""}), {"k1": ""}),
    ):
        assert state.client_errors == {"k1": "The tool failed."}


def test_a_failure_text_is_stored_as_every_text() -> None:
    state = resume(STRICT, entry({"error": "a\x00"}, **MARK))
    assert state.client_errors == {"k1": "a\x00"}
    sent = {**resume_error("client_tool_k1", ""), "payload": {"error": "a\ud800"}}
    assert resume(STRICT, sent).client_errors == {"k1": "a\ufffd"}


@given(st.text())
def test_every_text_of_a_failure_survives(text: str) -> None:
    marked = resume(STRICT, resume_error("client_tool_k1", text))
    posted = resume(STRICT, entry({"error": text}), {"k1": text})
    assert marked == posted
    if text:
        assert marked.client_errors == {"k1": text}


# --------------------------------------------------------------------------- posted failures


def row(call_id: str, error: str | None = None) -> dict[str, Any]:
    out = {"role": "tool", "id": f"tool-{call_id}", "toolCallId": call_id, "content": "null"}
    return out if error is None else {**out, "error": error}


def turn(*call_ids: str) -> dict[str, Any]:
    calls = [
        {"id": c, "type": "function", "function": {"name": "cli", "arguments": "{}"}}
        for c in call_ids
    ]
    return {"role": "assistant", "id": f"m-{'-'.join(call_ids)}", "toolCalls": calls}


def failures(*rows: dict[str, Any]) -> dict[str, str]:
    return posted_failures(wire_to_model(rows).messages)


def test_failures_are_read_from_the_rows_that_a_browser_posts() -> None:
    """The row of client 0.33.2: ``content`` is null, the text stands in ``error``."""
    posted = {**row("k1", "permission denied"), "metadata": {"tanstack": {"toolResult": {}}}}
    assert failures({"role": "user", "id": "u", "content": "hi"}, turn("k1"), posted) == {
        "k1": "permission denied"
    }


def test_the_last_result_of_the_last_call_counts() -> None:
    assert failures(turn("k1"), row("k1", "boom"), turn("k2"), row("k2")) == {"k1": "boom"}
    assert failures(turn("k1"), row("k1", "boom"), turn("k1")) == {}
    assert posted_failures([]) == {}


def test_a_later_success_takes_a_failure_back() -> None:
    rows: list[Any] = [turn("k1"), row("k1", "boom"), row("k1")]
    assert posted_failures(rows) == {}
    rows = [turn("k1"), row("k1"), row("k1", "boom")]
    assert posted_failures(rows) == {"k1": "boom"}
