"""Wire rows in both directions, row kind by row kind."""

from __future__ import annotations

from typing import Any

import pytest
from ag_ui.core import AssistantMessage, RunAgentInput, UserMessage

from chatkeep.errors import InvalidValue
from chatkeep.messages import (
    ensure_ids,
    merge_messages,
    model_to_ui,
    model_to_wire,
    provider_view,
    stable_ids,
    wire_to_model,
)
from chatkeep.records import ActivityRecord

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(*rows: dict[str, Any]) -> list[Any]:
    return wire_to_model(rows).messages


def nulls(value: Any, path: str = "$") -> list[str]:
    if value is None:
        return [path]
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in nulls(v, f"{path}.{k}")]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in nulls(v, f"{path}[{i}]")]
    return []


# ------------------------------------------------------------------------------- reading

READ: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text stays text": (
        [{"id": "u", "role": "user", "content": "hi"}],
        [{"id": "u", "role": "user", "content": "hi"}],
    ),
    "a list of nothing but text becomes one text": (
        [{"id": "u", "role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"id": "u", "role": "user", "content": "a"}],
    ),
    "text parts with media keep their places, under content": (
        [
            {
                "id": "u",
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "metadata": {"k": 1}},
                    {"type": "image", "source": {"type": "url", "value": "x", "mimeType": None}},
                    {"type": "document", "source": {"type": "file", "value": "f"}},
                ],
            }
        ],
        [
            {
                "id": "u",
                "role": "user",
                "content": [
                    {"type": "text", "content": "a", "metadata": {"k": 1}},
                    {"type": "image", "source": {"type": "url", "value": "x"}},
                    {"type": "document", "source": {"type": "file", "value": "f"}},
                ],
            }
        ],
    ),
    "an assistant without content has null content": (
        [{"id": "a", "role": "assistant", "toolCalls": [CALL]}],
        [{"id": "a", "role": "assistant", "toolCalls": [CALL], "content": None}],
    ),
    "null is absence": (
        [
            {
                "id": "a",
                "role": "assistant",
                "content": None,
                "name": None,
                "toolCalls": None,
                "metadata": None,
                "encryptedValue": None,
            }
        ],
        [{"id": "a", "role": "assistant", "content": None}],
    ),
    "an empty list of calls is absence": (
        [{"id": "a", "role": "assistant", "content": "x", "toolCalls": []}],
        [{"id": "a", "role": "assistant", "content": "x"}],
    ),
    "an empty id is absence": (
        [{"id": "", "role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}],
    ),
    "reasoning becomes thinking of the next assistant": (
        [
            {"id": "r", "role": "reasoning", "content": "hm", "encryptedValue": "sig"},
            {
                "id": "r2",
                "role": "reasoning",
                "content": "ha",
                "metadata": {"tanstack": {"signature": "s2"}},
            },
            {"id": "a", "role": "assistant", "content": "x"},
        ],
        [
            {
                "id": "a",
                "role": "assistant",
                "content": "x",
                "thinking": [
                    {"id": "r", "content": "hm", "signature": "sig"},
                    {"id": "r2", "content": "ha", "signature": "s2"},
                ],
            }
        ],
    ),
    "reasoning never crosses a user row, and none follows: it is lost": (
        [
            {"id": "r", "role": "reasoning", "content": "hm"},
            {"id": "u", "role": "user", "content": "x"},
            {"id": "a", "role": "assistant", "content": "y"},
            {"id": "r3", "role": "reasoning", "content": "late"},
        ],
        [
            {"id": "u", "role": "user", "content": "x"},
            {"id": "a", "role": "assistant", "content": "y"},
        ],
    ),
    "a developer row is a system message": (
        [{"id": "d", "role": "developer", "content": "be kind"}],
        [{"id": "d", "role": "system", "content": "be kind"}],
    ),
    "the creation time of the bag moves to its field; other keys stay": (
        [
            {
                "id": "u",
                "role": "user",
                "content": "x",
                "metadata": {
                    "mine": 1,
                    "tanstack": {"createdAt": "2026-11-30T12:00:00.000Z", "future": {"a": 1}},
                },
            }
        ],
        [
            {
                "id": "u",
                "role": "user",
                "content": "x",
                "createdAt": "2026-11-30T12:00:00.000Z",
                "metadata": {"mine": 1, "tanstack": {"future": {"a": 1}}},
            }
        ],
    ),
    "a creation time that is none is dropped": (
        [
            {
                "id": "u",
                "role": "user",
                "content": "x",
                "createdAt": "yesterday",
                "metadata": {"tanstack": {"createdAt": 5}},
            }
        ],
        [{"id": "u", "role": "user", "content": "x", "createdAt": "1970-01-01T00:00:00.005Z"}],
    ),
    "call metadata and signatures go to the calls": (
        [
            {
                "id": "a",
                "role": "assistant",
                "toolCalls": [{**CALL, "encryptedValue": "TS"}],
                "metadata": {"tanstack": {"toolCallMetadata": {"c1": {"k": 1}, "other": 2}}},
            }
        ],
        [
            {
                "id": "a",
                "role": "assistant",
                "content": None,
                "toolCalls": [{**CALL, "metadata": {"k": 1, "thoughtSignature": "TS"}}],
                "metadata": {"tanstack": {"toolCallMetadata": {"other": 2}}},
            }
        ],
    ),
    "a structured part of the bag goes to its field": (
        [
            {
                "id": "a",
                "role": "assistant",
                "content": "{}",
                "metadata": {
                    "tanstack": {
                        "structuredOutput": {"status": "complete", "raw": "{}", "data": {}}
                    }
                },
            }
        ],
        [
            {
                "id": "a",
                "role": "assistant",
                "content": "{}",
                "structuredOutput": {
                    "type": "structured-output",
                    "status": "complete",
                    "raw": "{}",
                    "data": {},
                },
            }
        ],
    ),
    "a structured part that is none is dropped": (
        [
            {
                "id": "a",
                "role": "assistant",
                "content": "x",
                "metadata": {"tanstack": {"structuredOutput": {"status": "odd", "raw": 1}}},
            }
        ],
        [{"id": "a", "role": "assistant", "content": "x"}],
    ),
    "a made-up id of a tool row is dropped": (
        [
            {
                "id": "tool-c1",
                "role": "tool",
                "toolCallId": "c1",
                "content": "ok",
                "metadata": {"tanstack": {"toolResult": {}}},
            }
        ],
        [{"role": "tool", "toolCallId": "c1", "content": "ok"}],
    ),
    "a tool row gets what it owned": (
        [
            {
                "id": "tool-c1",
                "role": "tool",
                "toolCallId": "c1",
                "content": "[…]",
                "error": "E",
                "metadata": {
                    "k": 1,
                    "tanstack": {
                        "toolResultOutcome": "denied",
                        "toolResult": {
                            "id": "t1",
                            "createdAt": "2026-11-30T12:00:00.000Z",
                            "content": [{"type": "text", "content": "q"}],
                        },
                    },
                },
            }
        ],
        [
            {
                "id": "t1",
                "role": "tool",
                "toolCallId": "c1",
                "content": [{"type": "text", "content": "q"}],
                "error": "E",
                "createdAt": "2026-11-30T12:00:00.000Z",
                "metadata": {"k": 1, "tanstack": {"toolResultOutcome": "denied"}},
            }
        ],
    ),
    "owned content that is none switches the whole restore off": (
        [
            {
                "id": "t",
                "role": "tool",
                "toolCallId": "c1",
                "content": "x",
                "metadata": {"tanstack": {"toolResult": {"content": [{"type": "odd"}]}}},
            }
        ],
        [
            {
                "id": "t",
                "role": "tool",
                "toolCallId": "c1",
                "content": "x",
                "metadata": {"tanstack": {"toolResult": {"content": [{"type": "odd"}]}}},
            }
        ],
    ),
    "an ownership record in the old boolean form is ignored": (
        [
            {
                "id": "t",
                "role": "tool",
                "toolCallId": "c1",
                "content": "x",
                "metadata": {"tanstack": {"toolResult": True}},
            }
        ],
        [
            {
                "id": "t",
                "role": "tool",
                "toolCallId": "c1",
                "content": "x",
                "metadata": {"tanstack": {"toolResult": True}},
            }
        ],
    ),
    "a tool row may have parts": (
        [
            {
                "id": "t",
                "role": "tool",
                "toolCallId": "c1",
                "content": [{"type": "text", "text": "x"}],
            }
        ],
        [
            {
                "id": "t",
                "role": "tool",
                "toolCallId": "c1",
                "content": [{"type": "text", "content": "x"}],
            }
        ],
    ),
    "unknown keys stay": (
        [{"id": "u", "role": "user", "content": "x", "future": {"a": [1]}}],
        [{"id": "u", "role": "user", "content": "x", "future": {"a": [1]}}],
    ),
}


@pytest.mark.parametrize("case", READ, ids=str)
def test_reading(case: str) -> None:
    rows, expected = READ[case]
    assert read(*rows) == expected


def test_a_canonical_model_message_comes_back_by_identity() -> None:
    """Reading changes nothing that is already a model message."""
    rows = [expected for _, result in READ.values() for expected in result]
    assert all(a is b for a, b in zip(read(*rows), rows, strict=True))


def test_tool_rows_answered_by_parts_are_repeats() -> None:
    """A tool row whose result stands in a UI message of the same list is dropped."""
    ui = {
        "id": "a",
        "role": "assistant",
        "parts": [
            {
                "type": "tool-call",
                "id": "c1",
                "name": "f",
                "arguments": "{}",
                "state": "complete",
            },
            {"type": "tool-result", "toolCallId": "c1", "content": "ok", "state": "complete"},
        ],
    }
    repeat = {"id": "t", "role": "tool", "toolCallId": "c1", "content": "ok"}
    assert [m["role"] for m in read(ui, repeat)] == ["assistant", "tool"]


def test_activities_and_child_rows_stand_beside_the_transcript() -> None:
    """An activity's index is its position among the UI rows of the post."""
    inbound = wire_to_model(
        [
            {"id": "u", "role": "user", "content": "x"},
            {"id": "r", "role": "reasoning", "content": "hm"},
            {"id": "a", "role": "assistant", "content": "y"},
            {"id": "act", "role": "activity", "activityType": "s", "content": {"n": 1}},
            {"id": "child", "role": "assistant", "content": "z", "subagentRunId": "sub"},
            {
                "role": "activity",
                "id": "act2",
                "parts": [{"type": "activity", "activityType": "s", "content": {"n": 2}}],
                "metadata": {"k": 1},
            },
        ]
    )
    assert [m["id"] for m in inbound.messages] == ["u", "a"]
    assert inbound.activities == [
        ActivityRecord(id="act", activity_type="s", content={"n": 1}, index=2, anchor="a"),
        ActivityRecord(
            id="act2",
            activity_type="s",
            content={"n": 2},
            index=3,
            metadata={"k": 1},
            anchor="a",
        ),
    ]
    assert [c["id"] for c in inbound.children] == ["child"]


def test_models_of_the_official_package_are_read() -> None:
    """A parsed RunAgentInput may be passed as it is."""
    parsed = RunAgentInput.model_validate(
        {
            "threadId": "t",
            "runId": "r",
            "state": {},
            "tools": [],
            "context": [],
            "forwardedProps": {},
            "messages": [
                {"id": "u", "role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"id": "a", "role": "assistant", "toolCalls": [CALL]},
                {"id": "t", "role": "tool", "toolCallId": "c1", "content": "ok"},
            ],
        }
    )
    assert wire_to_model(parsed.messages).messages == [
        {"id": "u", "role": "user", "content": "hi"},
        {"id": "a", "role": "assistant", "content": None, "toolCalls": [CALL]},
        {"id": "t", "role": "tool", "toolCallId": "c1", "content": "ok"},
    ]


MALFORMED: dict[str, tuple[Any, str]] = {
    "no list": ("hi", "$.messages"),
    "no object": ([1], "$.messages[0]"),
    "no role": ([{"id": "x", "content": "y"}], "$.messages[0].role"),
    "odd role": ([{"id": "x", "role": "robot"}], "$.messages[0].role"),
    "role is a list": ([{"id": "x", "role": ["user"]}], "$.messages[0].role"),
    "id is a number": ([{"id": 5, "role": "user", "content": ""}], "$.messages[0].id"),
    "id with NUL": ([{"id": "a\0", "role": "user", "content": ""}], "$.messages[0].id"),
    "id too long": ([{"id": "a" * 1025, "role": "user", "content": ""}], "$.messages[0].id"),
    "content is a number": ([{"role": "user", "content": 5}], "$.messages[0].content"),
    "content is an object": ([{"role": "user", "content": {}}], "$.messages[0].content"),
    "part without type": (
        [{"role": "user", "content": [{"text": "x"}]}],
        "$.messages[0].content[0]",
    ),
    "text part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "$.messages[0].content[0]",
    ),
    "metadata is a list": (
        [{"role": "user", "content": "", "metadata": []}],
        "$.messages[0].metadata",
    ),
    "name is a number": ([{"role": "user", "content": "", "name": 1}], "$.messages[0].name"),
    "calls are an object": (
        [{"role": "assistant", "toolCalls": {}}],
        "$.messages[0].toolCalls",
    ),
    "call without id": (
        [{"role": "assistant", "toolCalls": [{"function": {"name": "f"}}]}],
        "$.messages[0].toolCalls[0].id",
    ),
    "call without function": (
        [{"role": "user", "content": ""}, {"role": "assistant", "toolCalls": [{"id": "c"}]}],
        "$.messages[1].toolCalls[0].function",
    ),
    "arguments are an object": (
        [
            {
                "role": "assistant",
                "toolCalls": [{"id": "c", "function": {"name": "f", "arguments": {}}}],
            }
        ],
        "$.messages[0].toolCalls[0].function.arguments",
    ),
    "tool row without call": ([{"role": "tool", "content": "x"}], "$.messages[0].toolCallId"),
    "error is an object": (
        [{"role": "tool", "toolCallId": "c", "content": "x", "error": {}}],
        "$.messages[0].error",
    ),
    "thinking is text": (
        [{"role": "assistant", "content": "x", "thinking": "hm"}],
        "$.messages[0].thinking",
    ),
    "structured output is text": (
        [{"role": "assistant", "content": "x", "structuredOutput": "hm"}],
        "$.messages[0].structuredOutput",
    ),
    "reasoning is a list": ([{"role": "reasoning", "content": []}], "$.messages[0].content"),
    "activity without content": (
        [{"role": "activity", "activityType": "s"}],
        "$.messages[0]",
    ),
    "thinking of a user is text": (
        [{"role": "user", "content": "", "thinking": "x"}],
        "$.messages[0].thinking",
    ),
    "thinking with an object as text": (
        [{"role": "assistant", "thinking": [{"content": "a"}, {"content": {}}]}],
        "$.messages[0].thinking[1].content",
    ),
    "thinking with a list as id": (
        [{"role": "assistant", "thinking": [{"content": "a", "id": []}]}],
        "$.messages[0].thinking[0].id",
    ),
    "structured raw is a number": (
        [{"role": "assistant", "content": "x", "structuredOutput": {"raw": -1}}],
        "$.messages[0].structuredOutput.raw",
    ),
    "calls of a user without id": (
        [{"role": "user", "content": "", "toolCalls": [{}]}],
        "$.messages[0].toolCalls[0].id",
    ),
    "signature is a number": (
        [{"role": "reasoning", "content": "a", "metadata": {"tanstack": {"signature": 1}}}],
        "$.messages[0]",
    ),
    "text of a UI part is a number": (
        [{"role": "user", "parts": [{"type": "text", "content": 1}]}],
        "$.messages[0].parts[0].content",
    ),
    "state of a UI call is a list": (
        [{"role": "assistant", "parts": [{"type": "tool-call", "id": "c", "state": []}]}],
        "$.messages[0].parts[0].state",
    ),
    "parts are text": ([{"role": "user", "parts": "x"}], "$.messages[0].parts"),
    "part of a UI message without type": (
        [{"role": "assistant", "parts": [{}]}],
        "$.messages[0].parts",
    ),
    "UI result without call": (
        [{"role": "assistant", "parts": [{"type": "tool-result", "state": "complete"}]}],
        "$.messages[0].parts[0].toolCallId",
    ),
}


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_a_malformed_message_is_refused_with_its_path(case: str) -> None:
    rows, path = MALFORMED[case]
    with pytest.raises(InvalidValue) as caught:
        wire_to_model(rows, path="$.messages")
    assert caught.value.path == path


ODD: list[Any] = [True, -1, 1.5, "x", [], [None], [[]], [{}], {}, {"a": 1}, {"type": "text"}]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize(
    "key",
    ["structuredOutput", "stopReason", "uiResources", "run", "source", "toolCallMetadata",
     "toolResult", "createdAt", "status"],
)  # fmt: skip
def test_an_odd_bag_never_makes_a_row_that_cannot_be_read(key: str, odd: Any) -> None:
    """What a client forges under ``metadata.tanstack`` is no such entry: the thread still
    paints, goes over the wire, and is sent to a model."""
    structured = {"status": odd, "raw": "x"}
    bag = {"structuredOutput": structured} if key == "status" else {key: odd}
    rows = read(
        {"id": "u", "role": "user", "content": "q", "metadata": {"tanstack": bag}},
        {"id": "a", "role": "assistant", "content": "x", "toolCalls": [CALL],
         "thinking": [{"content": "hm"}], "metadata": {"tanstack": bag}},
        {"id": "t", "role": "tool", "toolCallId": "c1", "content": "r",
         "metadata": {"tanstack": bag}},
    )  # fmt: skip
    assert len(model_to_ui(rows)) == 2
    assert len(model_to_wire(rows)) == 4
    assert [r["role"] for r in provider_view(rows, source={})] == ["user", "assistant", "tool"]
    merge = merge_messages(rows, read({"id": "u2", "role": "user", "content": "next"}))
    assert merge.kind == "append"


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_odd_structured_part_that_is_stored_already_still_paints(odd: Any) -> None:
    """Rows of a store of one's own never came through the reader."""
    row: Any = {"id": "a", "role": "assistant", "content": "x"}
    row |= {"structuredOutput": {"raw": odd, "status": odd}}
    (ui,) = model_to_ui([row])
    assert [p["type"] for p in ui["parts"]][-1:] == ["structured-output"]
    widget: Any = {"id": "a", "role": "assistant", "content": [{"type": "ui-resource"}]}
    assert model_to_ui([widget])[0]["parts"] == [{"type": "ui-resource"}]


# ------------------------------------------------------------------------------- writing

FULL: list[Any] = [
    {"id": "s", "role": "system", "content": "be kind"},
    {
        "id": "u",
        "role": "user",
        "name": "bob",
        "content": [
            {"type": "text", "content": "t"},
            {"type": "image", "source": {"type": "url", "value": "x"}},
        ],
        "createdAt": "2026-11-30T12:00:00.000Z",
        "metadata": {"mine": 1},
    },
    {
        "id": "a",
        "role": "assistant",
        "content": 'prose{"r":1}',
        "createdAt": "2026-11-30T12:00:01.000Z",
        "thinking": [{"id": "r1", "content": "hm", "signature": "SIG"}, {"content": "ha"}],
        "toolCalls": [
            {**CALL, "metadata": {"thoughtSignature": "TS"}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
        "structuredOutput": {
            "type": "structured-output",
            "status": "complete",
            "raw": '{"r":1}',
            "data": {"r": 1},
            "partial": {"r": 1},
        },
        "metadata": {
            "mine": 2,
            "tanstack": {"run": {"id": "run"}, "stopReason": "error", "responseId": "x"},
        },
    },
    {"id": "t1", "role": "tool", "toolCallId": "c1", "content": '{"error":"E"}', "error": "E"},
    {
        "id": "t2",
        "role": "tool",
        "toolCallId": "c2",
        "content": [{"type": "text", "content": "q"}],
        "createdAt": "2026-11-30T12:00:02.000Z",
        "metadata": {"tanstack": {"toolResultOutcome": "denied"}},
    },
]


def test_one_assistant_message_fans_out_into_its_rows() -> None:
    """Reasoning rows before the anchor, everything AG-UI has no field for in the bag."""
    assert model_to_wire(FULL)[2:] == [
        {"id": "r1", "role": "reasoning", "content": "hm", "encryptedValue": "SIG"},
        {"id": "a-reasoning-2", "role": "reasoning", "content": "ha"},
        {
            "id": "a",
            "role": "assistant",
            "content": 'prose{"r":1}',
            "toolCalls": [
                {**CALL, "encryptedValue": "TS"},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
            "metadata": {
                "mine": 2,
                "tanstack": {
                    "run": {"id": "run"},
                    "stopReason": "error",
                    "responseId": "x",
                    "createdAt": "2026-11-30T12:00:01.000Z",
                    "toolCallMetadata": {"c1": {"thoughtSignature": "TS"}},
                    "structuredOutput": {
                        "status": "complete",
                        "raw": '{"r":1}',
                        "data": {"r": 1},
                        "partial": {"r": 1},
                    },
                },
            },
        },
        {
            "id": "t1",
            "role": "tool",
            "toolCallId": "c1",
            "content": '{"error":"E"}',
            "error": "E",
            "metadata": {"tanstack": {"toolResult": {"id": "t1"}}},
        },
        {
            "id": "t2",
            "role": "tool",
            "toolCallId": "c2",
            "content": '[{"type":"text","content":"q"}]',
            "metadata": {
                "tanstack": {
                    "toolResultOutcome": "denied",
                    "toolResult": {
                        "id": "t2",
                        "createdAt": "2026-11-30T12:00:02.000Z",
                        "content": [{"type": "text", "content": "q"}],
                    },
                }
            },
        },
    ]


def test_a_full_transcript_comes_back_from_the_wire_as_it_was() -> None:
    """Ids, order, thinking, signatures, errors, parts, bags and unknown keys survive."""
    assert wire_to_model(model_to_wire(FULL)).messages == FULL


def test_rows_satisfy_the_official_models() -> None:
    """Every row validates as an AG-UI 1.0 message and has no null."""
    rows = model_to_wire(FULL)
    RunAgentInput.model_validate({"threadId": "t", "runId": "r", "messages": rows})
    UserMessage.model_validate(rows[1])
    AssistantMessage.model_validate(rows[4])
    assert nulls(rows) == []


def test_content_is_left_out_when_empty_and_never_null() -> None:
    assert model_to_wire([{"id": "a", "role": "assistant", "content": None}]) == [
        {"id": "a", "role": "assistant"}
    ]
    assert model_to_wire([{"id": "u", "role": "user", "content": None}]) == [
        {"id": "u", "role": "user", "content": ""}
    ]


def test_segments_of_one_message_are_one_anchor() -> None:
    """As a client builds it from the stream: text appended, calls together, result behind."""
    rows = model_to_wire(
        [
            {"id": "a", "role": "assistant", "content": "one ", "toolCalls": [CALL]},
            {"id": "t", "role": "tool", "toolCallId": "c1", "content": "ok"},
            {
                "id": "a",
                "role": "assistant",
                "content": "two",
                "thinking": [{"id": "r", "content": "hm"}],
                "metadata": {"tanstack": {"run": {"id": "x"}}},
            },
            {"id": "b", "role": "assistant", "content": "three"},
        ]
    )
    assert [(r["id"], r.get("content")) for r in rows] == [
        ("r", "hm"),
        ("a", "one two"),
        ("t", "ok"),
        ("b", "three"),
    ]
    assert rows[1]["metadata"] == {"tanstack": {"run": {"id": "x"}}}


def test_activities_are_written_in_their_places() -> None:
    """Rows are counted as UI messages: reasoning and results belong to their message."""
    late = ActivityRecord(id="late", activity_type="s", content={"n": 2}, index=99)
    first = ActivityRecord(id="x", activity_type="s", content={"n": 1}, index=2, metadata={"k": 1})
    rows = model_to_wire(FULL, activities=[late, first])
    assert [r["id"] for r in rows] == [
        "s", "u", "x", "r1", "a-reasoning-2", "a", "t1", "t2", "late",
    ]  # fmt: skip
    assert rows[2] == {
        "id": "x",
        "role": "activity",
        "activityType": "s",
        "content": {"n": 1},
        "metadata": {"k": 1},
    }


def test_rows_without_ids_get_the_same_ids_every_time() -> None:
    """Derived from the place: by position, or by the sequence numbers of the entries."""
    legacy: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "toolCalls": [CALL]},
        {"role": "tool", "toolCallId": "c1", "content": "ok"},
    ]
    rows = model_to_wire(legacy)
    assert [r["id"] for r in rows] == ["msg-entry-1", "msg-entry-2", "tool-c1"]
    assert rows == model_to_wire(legacy)
    numbered = model_to_wire(legacy, numbers=[7, 9, 12])
    assert [r["id"] for r in numbered] == ["msg-entry-7", "msg-entry-9", "tool-c1"]
    assert rows[2]["metadata"] == {"tanstack": {"toolResult": {}}}


def test_stable_ids_never_meet_an_id_that_is_there() -> None:
    named = stable_ids([{"id": "msg-entry-2", "role": "user"}, {"role": "user"}])
    assert [m.get("id") for m in named] == ["msg-entry-2", "msg-entry-2-2"]


def test_ensure_ids_touches_only_what_lacks_something() -> None:
    """Messages that need nothing come back by identity; empty ids count as none."""
    whole: Any = {"id": "a", "role": "user", "content": "x", "createdAt": "2026-11-30T12:00:00Z"}
    out = ensure_ids([whole, {"id": "", "role": "user"}], created_at="2026-12-01T00:00:00.000Z")
    assert out[0] is whole
    assert out[1]["id"].startswith("msg-")
    assert out[1]["createdAt"] == "2026-12-01T00:00:00.000Z"
    assert len({ensure_ids([{"role": "user"}])[0]["id"] for _ in range(100)}) == 100
