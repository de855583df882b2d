"""MESSAGES_SNAPSHOT: the thread as strict readers take it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from ag_ui.core import Event
from pydantic import TypeAdapter

from chatkeep.engine.snapshot import messages_snapshot

Json = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(Event)
TEXT: Json = {"type": "text", "text": "look"}
PICTURE: Json = {"type": "image", "source": {"type": "url", "value": "https://x/y.png"}}


def shown(*rows: Json) -> list[Json]:
    """What a strict reader has of the rows."""
    sent = messages_snapshot(rows).model_dump_json(by_alias=True, exclude_none=True)
    event = EVENT.validate_json(sent)
    return list(event.model_dump(mode="json", by_alias=True, exclude_none=True)["messages"])


def test_rows_are_shown_as_they_are() -> None:
    """With keys that AG-UI does not know, and nulls inside of values."""
    rows: list[Json] = [
        {"id": "u", "role": "user", "content": [TEXT, PICTURE], "x-mine": {"a": None}},
        {"id": "r", "role": "reasoning", "content": "hm", "encryptedValue": "s"},
        {
            "id": "m",
            "role": "assistant",
            "content": "",
            "toolCalls": [
                {"id": "c", "type": "function", "function": {"name": "n", "arguments": "{}"}}
            ],
            "metadata": {"tanstack": {"createdAt": "2026-11-30T12:00:00.000Z", "x": None}},
        },
        {"id": "t", "role": "tool", "toolCallId": "c", "content": "no", "error": "no"},
    ]
    assert shown(*rows) == rows


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "source": {"type": "file", "fileId": "f"}},
        {"type": "image", "source": {"type": "data", "value": "untyped"}},
        {"type": "hologram", "content": "x"},
        {},
    ],
)
def test_a_part_that_ag_ui_has_no_form_for_is_left_out(
    part: Json, caplog: pytest.LogCaptureFixture
) -> None:
    """One row must not keep a reader from the whole thread. It is told in the log."""
    with caplog.at_level(logging.WARNING, "chatkeep.engine"):
        (row,) = shown({"id": "u", "role": "user", "content": [TEXT, part, PICTURE]})
    assert row == {"id": "u", "role": "user", "content": [TEXT, PICTURE]}
    assert "'u'" in caplog.text


def test_a_key_of_a_wrong_kind_is_left_out() -> None:
    row = {"id": "u", "role": "user", "content": "hi", "encryptedValue": {"a": 1}}
    assert shown(row) == [{"id": "u", "role": "user", "content": "hi"}]


def test_a_row_of_an_unknown_role_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "chatkeep.engine"):
        rows = shown(
            {"id": "x", "role": "narrator", "content": "…"},
            {"id": "u", "role": "user", "content": "hi"},
        )
    assert [row["id"] for row in rows] == ["u"]
    assert "no form in a snapshot" in caplog.text
