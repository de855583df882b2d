"""Widgets, placeholders and the bag."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.messages import (
    add_ui_resource,
    is_content_parts,
    is_placeholder,
    put_bag,
    ui_resource_part,
)

VALUE = {
    "toolCallId": "c",
    "toolName": "f",
    "serverId": "s",
    "resource": {"uri": "ui://x", "mimeType": "text/html", "text": "<p>one</p>"},
}
PART = {"type": "ui-resource", **VALUE}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def thread() -> list[Any]:
    return [
        {"id": "old", "role": "assistant", "content": None, "toolCalls": [CALL]},
        {"id": "u", "role": "user", "content": "x"},
        {
            "id": "new",
            "role": "assistant",
            "content": None,
            "toolCalls": [CALL],
            "metadata": {"mine": 1, "tanstack": {"run": {"id": "r"}}},
        },
    ]


def test_a_widget_is_recorded_on_the_last_message_that_holds_its_call() -> None:
    """By a new dict; everything else by identity, and what the bag held stays."""
    rows = thread()
    out, changed = add_ui_resource(rows, VALUE)
    assert changed
    assert out[0] is rows[0]
    assert out[1] is rows[1]
    assert "uiResources" not in rows[2]["metadata"]["tanstack"]
    assert out[2]["metadata"] == {
        "mine": 1,
        "tanstack": {"run": {"id": "r"}, "uiResources": [PART]},
    }


def test_the_first_widget_of_a_call_tool_and_uri_wins() -> None:
    rows, _ = add_ui_resource(thread(), VALUE)
    again, changed = add_ui_resource(
        rows, {**VALUE, "resource": {**VALUE["resource"], "text": "2"}}
    )  # type: ignore[dict-item]
    assert not changed
    assert again[2] is rows[2]
    more, changed = add_ui_resource(rows, {**VALUE, "toolName": "g"})
    assert changed
    assert len(more[2]["metadata"]["tanstack"]["uiResources"]) == 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        "x",
        {},
        {**VALUE, "toolCallId": 1},
        {**VALUE, "toolName": None},
        {**VALUE, "resource": {"uri": "x"}},
        {**VALUE, "resource": []},
        {**VALUE, "toolCallId": "unknown"},
    ],
)
def test_what_is_no_widget_or_has_no_owner_is_left_out(value: Any) -> None:
    rows = thread()
    out, changed = add_ui_resource(rows, value)
    assert not changed
    assert all(a is b for a, b in zip(out, rows, strict=True))


def test_a_widget_part_is_not_built_twice() -> None:
    assert ui_resource_part(PART) is PART
    assert ui_resource_part(VALUE) == PART


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"approved":true,"pendingExecution":true}', True),
        ('{"pendingExecution":false}', False),
        ('{"note":"pendingExecution"}', False),
        ("pendingExecution", False),
        ('["pendingExecution"]', False),
        (None, False),
        ([{"type": "text", "content": "pendingExecution"}], False),
    ],
)
def test_placeholders_are_told_by_their_flag(content: Any, expected: bool) -> None:
    assert is_placeholder(content) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], False),
        ("x", False),
        ([{"type": "text", "content": "x"}], True),
        ([{"type": "text", "text": "x"}], False),
        ([{"type": "image", "source": {"type": "url", "value": "x"}}], True),
        ([{"type": "image", "source": {"type": "url"}}], False),
        ([{"type": "audio", "source": {"type": "data", "value": "x"}}], False),
        ([{"type": "audio", "source": {"type": "data", "value": "x", "mimeType": "a/b"}}], True),
        ([{"type": "document", "source": {"type": "file", "fileId": "f"}}], True),
        ([{"type": "video"}], False),
        ([{"type": "text", "content": "x"}, 1], False),
    ],
)
def test_content_parts_are_recognised(value: Any, expected: bool) -> None:
    assert is_content_parts(value) is expected


def test_an_empty_bag_leaves_no_container_behind() -> None:
    row: dict[str, Any] = {"metadata": {"tanstack": {"a": 1}}}
    put_bag(row, {})
    assert row == {}
    put_bag(row, {"a": 1})
    assert row == {"metadata": {"tanstack": {"a": 1}}}
