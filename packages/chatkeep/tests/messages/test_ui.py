"""Model messages as UI messages, and back."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from chatkeep.errors import InvalidValue
from chatkeep.messages import (
    interleave_activities,
    model_to_ui,
    ui_length,
    ui_to_model,
    wire_to_model,
)
from chatkeep.records import ActivityRecord


def call(name: str, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": name, "type": "function", "function": function, **more}


def assistant(name: str, content: Any = None, /, *calls: dict[str, Any], **more: Any) -> Any:
    row: dict[str, Any] = {"id": name, "role": "assistant", "content": content, **more}
    if calls:
        row["toolCalls"] = list(calls)
    return row


def result(name: str, of: str, content: Any, /, **more: Any) -> Any:
    return {"id": name, "role": "tool", "toolCallId": of, "content": content, **more}


def part(message: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [p for p in message["parts"] if p["type"] == kind]
    return found


def test_a_server_tool_turn_is_painted() -> None:
    """The result sits in the message that holds the call and gives it state and output."""
    ui = model_to_ui(
        [
            {"id": "u", "role": "user", "content": "go", "createdAt": "2026-11-30T12:00:00.000Z"},
            assistant("a", "Looking up. ", call("c", '{"city":"Paris"}')),
            result("t", "c", '{"tempC":21}'),
            assistant("b", "21"),
        ]
    )
    assert ui == [
        {
            "id": "u",
            "role": "user",
            "parts": [{"type": "text", "content": "go"}],
            "createdAt": "2026-11-30T12:00:00.000Z",
        },
        {
            "id": "a",
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "Looking up. "},
                {
                    "type": "tool-call",
                    "id": "c",
                    "name": "f",
                    "arguments": '{"city":"Paris"}',
                    "state": "complete",
                    "input": {"city": "Paris"},
                    "output": {"tempC": 21},
                },
                {
                    "type": "tool-result",
                    "toolCallId": "c",
                    "content": '{"tempC":21}',
                    "state": "complete",
                    "id": "t",
                },
            ],
        },
        {"id": "b", "role": "assistant", "parts": [{"type": "text", "content": "21"}]},
    ]


@pytest.mark.parametrize(
    ("row", "state", "output"),
    [
        (result("t", "c", '{"error":"E"}', error="E"), "error", {"error": "E"}),
        (result("t", "c", "null", error="denied"), "error", {"error": "denied"}),
        (result("t", "c", "", error="denied"), "error", {"error": "denied"}),
        (result("t", "c", '{"reason":"no"}', error="E"), "error", {"reason": "no"}),
        (result("t", "c", "no", error="no"), "error", "no"),
        (result("t", "c", '{"error":"looks like one"}'), "complete", {"error": "looks like one"}),
        (result("t", "c", "plain text"), "complete", "plain text"),
        (result("t", "c", "NaN"), "complete", "NaN"),
        (result("t", "c", "1e999"), "complete", "1e999"),
        (result("t", "c", "[" * 5000 + "]" * 5000), "complete", "[" * 5000 + "]" * 5000),
        (result("t", "c", "null"), "complete", None),
        (
            result("t", "c", [{"type": "text", "content": "q"}]),
            "complete",
            [{"type": "text", "content": "q"}],
        ),
    ],
)  # fmt: skip
def test_the_error_field_alone_decides_whether_a_result_failed(
    row: Any, state: str, output: Any
) -> None:
    (ui,) = model_to_ui([assistant("a", None, call("c")), row])
    painted = part(ui, "tool-call")
    assert (painted["state"], painted["output"]) == (state, output)
    shown = part(ui, "tool-result")
    assert (shown["state"], shown.get("error")) == (state, row.get("error"))
    assert shown["content"] == row["content"]


def test_an_open_call_has_no_output_key() -> None:
    """A null output would make the client invent a result."""
    (ui,) = model_to_ui([assistant("a", None, call("c", "{broken"))])
    assert ui["parts"] == [
        {
            "type": "tool-call",
            "id": "c",
            "name": "f",
            "arguments": "{broken",
            "state": "input-complete",
        }
    ]


def test_a_placeholder_leaves_the_call_open() -> None:
    (ui,) = model_to_ui(
        [assistant("a", None, call("c")), result("t", "c", '{"pendingExecution":true}')]
    )
    assert [p["type"] for p in ui["parts"]] == ["tool-call"]
    assert ui["parts"][0]["state"] == "input-complete"


def test_a_result_finds_its_call_wherever_that_stands_before_it() -> None:
    ui = model_to_ui(
        [
            assistant("a", None, call("c")),
            {"id": "u", "role": "user", "content": "meanwhile"},
            assistant("b", "sure"),
            result("t", "c", "late"),
        ]
    )
    assert [m["id"] for m in ui] == ["a", "u", "b"]
    assert part(ui[0], "tool-result")["content"] == "late"


def test_a_call_id_used_again_belongs_to_the_later_message() -> None:
    ui = model_to_ui(
        [
            assistant("a", None, call("call_0")),
            result("t1", "call_0", "one"),
            assistant("b", None, call("call_0")),
            result("t2", "call_0", "two"),
        ]
    )
    assert [part(m, "tool-result")["content"] for m in ui] == ["one", "two"]


def test_a_second_result_of_one_call_replaces_the_first() -> None:
    (ui,) = model_to_ui(
        [assistant("a", None, call("c")), result("t1", "c", "one"), result("t2", "c", "two")]
    )
    assert part(ui, "tool-result")["id"] == "t2"
    assert part(ui, "tool-call")["output"] == "two"


def test_a_result_without_a_call_is_a_message_of_its_own() -> None:
    ui = model_to_ui([result("t", "gone", "x", createdAt="2026-11-30T12:00:00Z")])
    assert ui[0]["id"] == "t"
    assert ui[0]["role"] == "assistant"
    assert part(ui[0], "tool-result")["toolCallId"] == "gone"


SEGMENTS = [
    {"id": "m1", "role": "user", "content": "go"},
    assistant("a1", "one", call("c1")),
    result("t1", "c1", "ok"),
    assistant("a1", "two"),
]


def test_segments_come_back_as_one_message_with_its_parts_in_order() -> None:
    """text, call, result, text: four parts under one id, and the rows again from them."""
    ui = model_to_ui(SEGMENTS)
    assert [m["id"] for m in ui] == ["m1", "a1"]
    assert [p["type"] for p in ui[1]["parts"]] == ["text", "tool-call", "tool-result", "text"]
    assert ui_to_model(ui) == SEGMENTS


def test_consecutive_assistants_with_different_ids_stay_apart() -> None:
    assert len(model_to_ui([assistant("a", "x"), assistant("b", "y")])) == 2


def test_the_same_id_after_a_user_row_is_another_message() -> None:
    rows = [assistant("a", "x"), {"id": "u", "role": "user", "content": "?"}, assistant("a", "y")]
    assert [m["id"] for m in model_to_ui(rows)] == ["a", "u", "a"]


def test_thinking_comes_first_with_signature_and_id() -> None:
    thinking = [{"id": "r", "content": "hm", "signature": "S"}, {"content": ""}]
    (ui,) = model_to_ui([assistant("a", "x", thinking=thinking)])
    assert ui["parts"] == [
        {"type": "thinking", "id": "r", "content": "hm", "signature": "S"},
        {"type": "text", "content": "x"},
    ]


STRUCTURED = {
    "type": "structured-output",
    "status": "complete",
    "raw": '{"n":1}',
    "data": {"n": 1},
    "partial": {"n": 1},
}


@pytest.mark.parametrize(
    ("content", "text"),
    [('{"n":1}', None), ('prose{"n":1}', "prose"), ("prose", "prose"), (None, None)],
)
def test_a_structured_part_stands_behind_the_text_without_its_raw(
    content: str | None, text: str | None
) -> None:
    (ui,) = model_to_ui([assistant("a", content, structuredOutput=STRUCTURED)])
    texts = [{"type": "text", "content": text}] if text else []
    assert ui["parts"] == [*texts, STRUCTURED]


WIDGET = {
    "type": "ui-resource",
    "toolCallId": "c",
    "toolName": "f",
    "resource": {"uri": "ui://x", "mimeType": "text/html", "text": "<p>"},
}


def test_widgets_are_painted_once_in_the_message_of_their_call() -> None:
    """Kept in the metadata, where the next post of the client finds them too."""
    stored = assistant(
        "a", None, call("c"), metadata={"tanstack": {"uiResources": [WIDGET, WIDGET, {"odd": 1}]}}
    )
    (ui,) = model_to_ui([stored, result("t", "c", "shown")])
    assert [p["type"] for p in ui["parts"]] == ["tool-call", "ui-resource", "tool-result"]
    assert part(ui, "ui-resource") == WIDGET


def test_metadata_name_and_unknown_keys_go_there_and_back() -> None:
    row = assistant(
        "a", "x", name="n", future=1, metadata={"k": 1, "tanstack": {"run": {"id": "r"}}}
    )
    (ui,) = model_to_ui([row])
    assert ui["metadata"] == row["metadata"]
    assert (ui["name"], ui["future"]) == ("n", 1)
    assert ui_to_model([ui]) == [row]


def test_no_key_is_null() -> None:
    nothing: dict[str, Any] = dict.fromkeys(["name", "createdAt", "metadata", "future"])
    rows: Any = [
        {"id": "u", "role": "user", "content": None, **nothing},
        assistant("a", None, call("c", metadata=None), thinking=None, **nothing),
        result("t", "c", None, error=None, **nothing),
    ]
    user, ui = model_to_ui(rows)
    assert user == {"id": "u", "role": "user", "parts": []}
    assert set(ui) == {"id", "role", "parts"}
    assert ui["parts"] == [
        {
            "type": "tool-call",
            "id": "c",
            "name": "f",
            "arguments": "{}",
            "state": "complete",
            "input": {},
            "output": "",
        },
        {"type": "tool-result", "toolCallId": "c", "content": "", "state": "complete", "id": "t"},
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("2026-11-30T12:00:00.000Z", "2026-11-30T12:00:00.000Z"),
        (dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC), "2026-11-30T12:00:00.000Z"),
        (
            dt.datetime(2026, 11, 30, 14, tzinfo=dt.timezone(dt.timedelta(hours=2))),
            "2026-11-30T12:00:00.000Z",
        ),
        (1796040000000, "2026-11-30T12:00:00.000Z"),
        ("soon", None),
        (True, None),
        (1e300, None),
    ],
)
def test_creation_times_are_iso_text_or_absent(value: Any, shown: str | None) -> None:
    (ui,) = model_to_ui([{"id": "u", "role": "user", "content": "x", "createdAt": value}])
    assert ui.get("createdAt") == shown


def test_painting_twice_gives_rows_without_ids_the_same_ids() -> None:
    """Also by sequence number, so that a page gives the ids that the whole thread gives."""
    rows: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "toolCalls": [call("c")]},
        {"role": "tool", "toolCallId": "c", "content": "ok"},
        {"role": "assistant", "content": "y"},
    ]
    whole = model_to_ui(rows, numbers=[1, 2, 5, 6])
    assert whole == model_to_ui(rows, numbers=[1, 2, 5, 6])
    assert [m["id"] for m in whole] == ["msg-entry-1", "msg-entry-2", "msg-entry-6"]
    page = model_to_ui(rows[3:], numbers=[6])
    assert page == whole[2:]
    assert "id" not in part(whole[1], "tool-result")
    assert [m["id"] for m in model_to_ui(rows)] == ["msg-entry-1", "msg-entry-2", "msg-entry-4"]


def test_activities_are_interleaved_by_index() -> None:
    ui = model_to_ui([{"id": "u", "role": "user", "content": "x"}, assistant("a", "y")])
    rows = interleave_activities(
        ui,
        [
            ActivityRecord(id="z", activity_type="s", content={}, index=50),
            ActivityRecord(id="x", activity_type="s", content={"n": 1}, index=1, metadata={"k": 1}),
        ],
    )
    assert [r["id"] for r in rows] == ["u", "x", "a", "z"]
    assert rows[1] == {
        "id": "x",
        "role": "activity",
        "parts": [{"type": "activity", "activityType": "s", "content": {"n": 1}}],
        "metadata": {"k": 1},
    }
    assert wire_to_model(rows).activities[0].index == 1


def test_ui_length_counts_messages_not_rows() -> None:
    assert ui_length(SEGMENTS) == 2  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- UI to model


def paint(*parts: dict[str, Any], **more: Any) -> list[Any]:
    return ui_to_model([{"id": "a", "role": "assistant", "parts": list(parts), **more}])


def tool_call(state: str = "complete", **more: Any) -> dict[str, Any]:
    return {"type": "tool-call", "id": "c", "name": "f", "arguments": "{}", "state": state, **more}


def test_a_result_without_anything_before_it_still_has_an_assistant_row() -> None:
    rows = paint({"type": "tool-result", "toolCallId": "c", "content": "x", "state": "complete"})
    assert [r["role"] for r in rows] == ["assistant", "tool"]


def test_a_call_that_still_streams_is_left_out() -> None:
    assert paint(tool_call("input-streaming")) == [assistant("a")]


def test_an_output_without_a_result_part_becomes_a_result() -> None:
    ok, row = paint(tool_call(output={"n": 1}))
    assert ok["toolCalls"][0]["id"] == "c"
    assert row == {"role": "tool", "toolCallId": "c", "content": '{"n":1}'}
    failed = paint(tool_call("error", output={"error": "E"}))[1]
    assert failed == {"role": "tool", "toolCallId": "c", "content": '{"error":"E"}', "error": "E"}


@pytest.mark.parametrize(
    ("approved", "content"),
    [
        (
            True,
            '{"approved":true,"pendingExecution":true,"message":"User approved this action"}',
        ),
        (False, '{"approved":false,"message":"User denied this action"}'),
    ],
)
def test_an_answered_approval_becomes_its_placeholder(approved: bool, content: str) -> None:
    row = paint(tool_call("approval-responded", approval={"id": "x", "approved": approved}))[1]
    assert row["content"] == content


def test_a_failed_result_part_always_has_an_error() -> None:
    shown = {"type": "tool-result", "toolCallId": "c", "content": '{"error":"E"}', "state": "error"}
    assert paint(tool_call("error"), shown)[1]["error"] == "E"


def test_repeated_and_streaming_results_are_left_out() -> None:
    shown = {"type": "tool-result", "toolCallId": "c", "content": "x", "state": "complete"}
    streaming = {**shown, "toolCallId": "d", "state": "streaming"}
    rows = paint(tool_call(), shown, shown, streaming)
    assert [r["role"] for r in rows] == ["assistant", "tool"]


def test_thinking_after_a_provider_executed_call_opens_a_segment() -> None:
    rows = paint(
        tool_call(metadata={"providerExecuted": True}),
        {"type": "thinking", "content": "hm"},
        {"type": "text", "content": "x"},
    )
    assert [r.get("thinking") for r in rows] == [None, [{"content": "hm"}]]


def test_an_empty_message_is_one_row_without_content() -> None:
    assert paint() == [assistant("a")]


def test_structured_parts_are_text_only_when_complete() -> None:
    (done,) = paint(STRUCTURED)
    assert (done["content"], done["structuredOutput"]) == ('{"n":1}', STRUCTURED)
    data_only = {**STRUCTURED, "raw": ""}
    assert paint(data_only)[0]["content"] == '{"n":1}'
    broken = {"type": "structured-output", "status": "error", "raw": "{", "errorMessage": "E"}
    (failed,) = paint(broken)
    assert (failed["content"], failed["structuredOutput"]) == (None, broken)


def test_media_stays_a_list_and_text_becomes_one() -> None:
    image = {"type": "image", "source": {"type": "url", "value": "x"}}
    text = {"type": "text", "content": "a"}
    rows = ui_to_model(
        [
            {"id": "1", "role": "user", "parts": [text, text]},
            {"id": "2", "role": "user", "parts": [text, image]},
            {"id": "3", "role": "system", "parts": [text]},
            {"id": "4", "role": "user", "parts": []},
            {"id": "5", "role": "activity", "parts": []},
        ]
    )
    assert [(r["id"], r["content"]) for r in rows] == [
        ("1", "aa"),
        ("2", [text, image]),
        ("3", "a"),
        ("4", ""),
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"id": "a", "role": "assistant"},
        {"id": "a", "role": "tool", "parts": []},
        {"id": "a", "role": "assistant", "parts": [{**tool_call(), "id": ""}]},
        {"id": "a", "role": "assistant", "parts": [{**tool_call(), "arguments": {}}]},
    ],
)
def test_a_malformed_ui_message_is_refused(message: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^\$\[0\]"):
        ui_to_model([message])
