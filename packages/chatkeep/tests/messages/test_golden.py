"""Recorded traffic of a browser client: what it posted, hydrated and was sent as snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatkeep.messages import (
    ensure_ids,
    interleave_activities,
    merge_messages,
    model_to_ui,
    model_to_wire,
    ui_to_model,
    wire_to_model,
)
from chatkeep.records import ActivityRecord

DATA = Path(__file__).parent / "data"
SCENARIOS: dict[str, list[dict[str, Any]]] = json.loads((DATA / "client.json").read_text())
TRACE_H: dict[str, Any] = json.loads((DATA / "trace_h.json").read_text())

STEPS = [(name, step) for name, steps in SCENARIOS.items() for step in steps]


def steps_of(kind: str) -> list[Any]:
    return [
        pytest.param(name, step, id=f"{name}-{step['step']}")
        for name, step in STEPS
        if step["kind"] == kind and step["messages"]
    ]


def ordered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Widgets of a row stand behind its calls; where exactly among the results is not fixed."""
    widgets = [p for p in parts if p["type"] == "ui-resource"]
    return [p for p in parts if p["type"] != "ui-resource"] + widgets


def activities_of(messages: list[dict[str, Any]]) -> list[ActivityRecord]:
    return [
        ActivityRecord(
            id=message["id"],
            activity_type=message["parts"][0]["activityType"],
            content=message["parts"][0]["content"],
            index=place,
        )
        for place, message in enumerate(messages)
        if message["role"] == "activity"
    ]


@pytest.mark.parametrize(("name", "step"), steps_of("post"))
def test_posted_rows_survive_the_way_to_the_wire_and_back(name: str, step: dict[str, Any]) -> None:
    """Model, wire and model again: nothing changes after the first reading."""
    model = wire_to_model(step["messages"]).messages
    assert wire_to_model(model_to_wire(model)).messages == model


@pytest.mark.parametrize(("name", "step"), steps_of("snapshot"))
def test_snapshots_are_written_as_they_were_recorded(name: str, step: dict[str, Any]) -> None:
    """A recorded snapshot, read and written again, has the same rows."""
    again = model_to_wire(wire_to_model(step["messages"]).messages)
    assert again == step["messages"]


@pytest.mark.parametrize(("name", "step"), steps_of("hydrate"))
def test_hydrated_messages_are_painted_as_they_were_recorded(
    name: str, step: dict[str, Any]
) -> None:
    """UI to model and back keeps ids, order, creation times and every part."""
    hydrated = step["messages"]
    again = interleave_activities(model_to_ui(ui_to_model(hydrated)), activities_of(hydrated))
    assert [m["id"] for m in again] == [m["id"] for m in hydrated]
    for ours, theirs in zip(again, hydrated, strict=True):
        assert ours["role"] == theirs["role"]
        assert ordered(ours["parts"]) == ordered(theirs["parts"])
        assert ours.get("createdAt") == theirs.get("createdAt")


def test_reading_hydrated_rows_through_the_request_reader_gives_the_same() -> None:
    """A post may hold UI messages; they are read like the direct conversion does."""
    for _, step in STEPS:
        if step["kind"] == "hydrate":
            inbound = wire_to_model(step["messages"])
            shown = [m for m in step["messages"] if m["role"] != "activity"]
            plain = wire_to_model(ui_to_model(shown)).messages
            assert inbound.messages == plain
            assert [a.id for a in inbound.activities] == [
                m["id"] for m in step["messages"] if m["role"] == "activity"
            ]


# What a post does to the thread as the last hydrate before it showed it. Posts that are not
# listed append the one new user message.
EXPECTED: dict[tuple[str, str], tuple[str, list[str]]] = {
    ("reload", "06"): ("regenerate", []),
}
PARTIAL_VIEWS = {"paging"}


def replay() -> list[Any]:
    cases: list[Any] = []
    for name, steps in SCENARIOS.items():
        if name in PARTIAL_VIEWS:
            continue
        seen: dict[str, Any] | None = None
        for step in steps:
            if step["kind"] == "hydrate":
                seen = step
            elif step["kind"] == "post" and seen is not None and seen["messages"]:
                cases.append(pytest.param(name, seen, step, id=f"{name}-{step['step']}"))
                seen = None
    return cases


@pytest.mark.parametrize(("name", "hydrated", "post"), replay())
def test_a_post_leaves_the_stored_thread_alone(
    name: str, hydrated: dict[str, Any], post: dict[str, Any]
) -> None:
    """Everything shown is posted back; the stored rows come back by identity, and only what
    the user added is new."""
    stored = ensure_ids(ui_to_model(hydrated["messages"]))
    activities = {a.id for a in activities_of(hydrated["messages"])}
    merged = merge_messages(
        stored,
        wire_to_model(post["messages"]).messages,
        pending_tool_calls=frozenset(hydrated["pending"]),
        activity_ids=activities,
    )
    default = ("continue", []) if "resume" in post else ("append", ["user"])
    kind, roles = EXPECTED.get((name, post["step"]), default)
    assert merged.kind == kind
    assert [m["role"] for m in merged.appended] == roles
    kept = merged.messages[: merged.keep]
    assert all(a is b for a, b in zip(kept, stored, strict=False))
    assert merged.first_change == merged.keep == len(stored) - len(merged.cut)


def test_every_expectation_belongs_to_a_recorded_post() -> None:
    assert set(EXPECTED) <= {(case.values[0], case.values[2]["step"]) for case in replay()}


def test_a_row_of_reasoning_a_failed_tool_and_a_pending_call_comes_back_from_the_client() -> None:
    """The client's copy of a snapshot reads back as the model messages it was made from, with
    our canonical form: creation time and call metadata in their fields."""
    messages = wire_to_model(TRACE_H["WIRE BACK"]).messages
    assert messages == [
        {"id": "u1", "role": "user", "content": "hi"},
        {
            "id": "m1",
            "role": "assistant",
            "content": "pre",
            "createdAt": "2026-11-30T11:52:07.819Z",
            "thinking": [{"id": "m1-reasoning-1tos1e", "content": "think", "signature": "SIG"}],
            "toolCalls": [
                {
                    "id": "b1",
                    "type": "function",
                    "function": {"name": "bad", "arguments": "{}"},
                    "metadata": {"tanstack": {"model": "m1", "index": 0}},
                },
                {
                    "id": "k1",
                    "type": "function",
                    "function": {"name": "cli", "arguments": '{"q":1}'},
                    "metadata": {"thoughtSignature": "TS"},
                },
            ],
        },
        {"id": "snapshot_r1_2", "role": "tool", "toolCallId": "b1", "content": '{"error":"boom"}'},
    ]


def test_a_snapshot_is_painted_as_a_fresh_client_paints_it() -> None:
    """Painting the model messages gives the parts that a client makes of the snapshot."""
    painted = model_to_ui(wire_to_model(TRACE_H["SNAPSHOT"]).messages)
    theirs = TRACE_H["FRESH"]
    assert [m["id"] for m in painted] == [m["id"] for m in theirs]
    for ours, other in zip(painted, theirs, strict=True):
        for mine, part in zip(ours["parts"], other["parts"], strict=True):
            assert {k: v for k, v in mine.items() if k in part} == part


def test_a_fan_out_with_media_repeats_and_an_empty_row_is_read() -> None:
    """Two thoughts, three texts in one row, an error on a result with parts, a bare anchor."""
    messages = wire_to_model(TRACE_H["MM"]).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "system"]
    assert messages[0]["content"] == [
        {"type": "text", "content": "t"},
        {"type": "image", "source": {"type": "url", "value": "http://x"}},
    ]
    assert messages[0]["metadata"] == {"k": 1}
    assert [t["content"] for t in messages[1]["thinking"]] == ["x", "x"]
    assert messages[2] == {
        "role": "tool",
        "toolCallId": "c",
        "content": [{"type": "text", "content": "q"}],
        "error": "E",
    }
    assert messages[3] == {"id": "e", "role": "assistant", "content": None}
