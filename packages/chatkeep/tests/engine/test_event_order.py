"""The checker of event streams finds what it is there to find."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from chatkeep.testkit.event_order import EventOrderError, check_events

Json = dict[str, Any]


def event(kind: str, **fields: Any) -> Json:
    return {"type": kind, "timestamp": 1, **fields}


def begin(**fields: Any) -> Json:
    return event("RUN_STARTED", threadId="t", runId="r", protocolVersion="1.0", **fields)


def end(**fields: Any) -> Json:
    return event("RUN_FINISHED", threadId="t", runId="r", **fields)


def text(kind: str, identity: str = "m", **fields: Any) -> Json:
    return event(f"TEXT_MESSAGE_{kind}", messageId=identity, **fields)


START = text("START", role="assistant")
STOP = text("END")
CALL = event("TOOL_CALL_START", toolCallId="c", toolCallName="f", parentMessageId="m")
CALLED = event("TOOL_CALL_END", toolCallId="c")
RESULT = event("TOOL_CALL_RESULT", messageId="x", toolCallId="c", content="1", role="tool")


def test_a_good_stream_passes() -> None:
    delta = text("CONTENT", delta="a")
    check_events([begin(), START, delta, STOP, CALL, CALLED, RESULT, START, STOP, end()])
    check_events([begin(), START, event("RUN_ERROR", message="x")])
    known = event("TOOL_CALL_RESULT", messageId="x", toolCallId="old", content="1", role="tool")
    check_events([begin(), known, end()], known_calls=["old"])


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([START], "RUN_STARTED is first"),
        ([event("RUN_ERROR", message="x")], "RUN_STARTED is first"),
        ([begin(), begin()], "RUN_STARTED comes once"),
        ([event("RUN_STARTED", threadId="t", runId="r")], "the protocol is 1.0"),
        ([begin()], "without a terminal"),
        ([begin(), end(), end()], "nothing follows the terminal"),
        ([begin(), end(), text("START")], "nothing follows the terminal"),
        ([begin(), START, end()], "open at the end"),
        ([begin(), START, START], "is open already"),
        ([begin(), STOP], "is not open"),
        ([begin(), text("CONTENT", delta="x")], "is not open"),
        ([begin(), START, text("CONTENT", delta="")], "deltas are not empty"),
        ([begin(), text("START", "")], "has an id"),
        ([begin(), CALL], "a turn opens with TEXT_MESSAGE_START"),
        ([begin(), START, STOP, CALL, CALLED, CALL], "call ids are used once"),
        ([begin(), RESULT], "a result has a call"),
        ([begin(), START, STOP, CALL, RESULT], "a result follows its call"),
        ([begin(), START, STOP, CALL, CALLED, RESULT, RESULT], "a call has one result"),
        (
            [begin(), START, STOP, CALL, CALLED, {**RESULT, "messageId": "m"}],
            "a tool row has an id of its own",
        ),
        ([begin(), event("REASONING_END", messageId="r")], "is not open"),
        ([begin(), event("STEP_FINISHED", stepName="s")], "is not open"),
        (
            [begin(), START, STOP, event("REASONING_START", messageId="m")],
            "belongs to a text message",
        ),
        ([begin(), {**START, "model": "x"}], "keys outside AG-UI"),
        ([begin(), {**START, "name": None}], "round-trips"),
        ([begin(), {k: v for k, v in START.items() if k != "timestamp"}], "has a time"),
        (
            [begin(), end(metadata={"tanstack": {"finishReason": "tool_calls"}})],
            "never says tool_calls",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_place(events: list[Json], rule: str) -> None:
    with pytest.raises(EventOrderError, match=rule) as raised:
        check_events(events)
    assert raised.value.index == len(events) - 1


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError):
        check_events([begin(), event("NONSENSE")])
