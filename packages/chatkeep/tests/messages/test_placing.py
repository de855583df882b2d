"""Where activity rows stand: behind the message they follow, else by their index."""

from __future__ import annotations

from chatkeep.messages import (
    before_each,
    interleave_activities,
    model_to_wire,
    placed,
    wire_to_model,
)
from chatkeep.records import ActivityRecord


def row(name: str, index: int, anchor: str | None = None) -> ActivityRecord:
    return ActivityRecord(id=name, activity_type="t", content={}, index=index, anchor=anchor)


def shown(names: list[str | None], *rows: ActivityRecord) -> list[object]:
    return [names[i] if isinstance(i, int) else i.id for i in placed(names, rows)]


def test_a_row_stands_behind_its_message_wherever_that_is() -> None:
    assert shown(["u1", "a1"], row("x", 1, "u1")) == ["u1", "x", "a1"]
    # Another tab's turn was put in before it: the index is off, the anchor is not.
    assert shown(["u0", "a0", "u1", "a1"], row("x", 1, "u1")) == ["u0", "a0", "u1", "x", "a1"]


def test_rows_of_one_message_keep_the_order_in_which_they_came() -> None:
    rows = (row("second", 2, "u1"), row("first", 1, "u1"), row("third", 2, "u1"))
    assert shown(["u1", "a1"], *rows) == ["u1", "first", "second", "third", "a1"]


def test_rows_without_an_anchor_go_in_at_their_index() -> None:
    assert shown(["u1", "a1"], row("x", 1), row("y", 3), row("z", 99)) == [
        "u1", "x", "a1", "y", "z",
    ]  # fmt: skip


def test_an_index_counts_anchored_rows_too() -> None:
    assert shown(["u1", "a1"], row("own", 1, "u1"), row("other", 2)) == ["u1", "own", "other", "a1"]


def test_a_row_whose_message_is_gone_goes_in_at_its_index() -> None:
    assert shown(["u1", "a1"], row("x", 1, "gone")) == ["u1", "x", "a1"]


def test_messages_without_an_id_are_no_anchors() -> None:
    names: list[str | None] = [None, "a1"]
    assert [i if isinstance(i, int) else i.id for i in placed(names, [row("x", 1, "a1")])] == [
        0, 1, "x",
    ]  # fmt: skip


def test_each_row_knows_how_many_messages_stand_before_it() -> None:
    rows = [row("x", 1, "u1"), row("y", 4), row("z", 0)]
    found = before_each(["u1", "a1"], rows)
    assert [(record.id, count) for record, count in found] == [("z", 0), ("x", 1), ("y", 2)]


def test_painted_and_wire_rows_stand_alike() -> None:
    """Tool rows and segments belong to the message before them on both sides."""
    model = [
        {"id": "u1", "role": "user", "content": "q"},
        {
            "id": "a1",
            "role": "assistant",
            "content": None,
            "toolCalls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"id": "t1", "role": "tool", "toolCallId": "c1", "content": "1"},
        {"id": "a2", "role": "assistant", "content": "done"},
    ]
    rows = [row("x", 2, "a1"), row("y", 1, "u1")]
    wire = model_to_wire(model, activities=rows)  # type: ignore[arg-type]
    assert [r["id"] for r in wire] == ["u1", "y", "a1", "t1", "x", "a2"]
    back = wire_to_model(wire)
    assert [(a.id, a.anchor, a.index) for a in back.activities] == [("y", "u1", 1), ("x", "a1", 3)]
    ui = interleave_activities(
        [{"id": n, "role": "user", "parts": []} for n in ("u1", "a1", "a2")], rows
    )
    assert [m["id"] for m in ui] == ["u1", "y", "a1", "x", "a2"]


def test_a_posted_row_is_anchored_at_the_message_before_it_in_any_form() -> None:
    posted = [
        {"id": "x", "role": "activity", "activityType": "t", "content": {}},
        {"id": "u1", "role": "user", "parts": [{"type": "text", "content": "q"}]},
        {"id": "y", "role": "activity", "parts": [{"type": "activity", "activityType": "t",
                                                   "content": {}}]},
        {"id": "a1", "role": "assistant", "parts": [{"type": "text", "content": "a"}]},
        {"id": "z", "role": "activity", "activityType": "t", "content": {}},
        {"role": "user", "content": "no id"},
        {"id": "w", "role": "activity", "activityType": "t", "content": {}},
    ]  # fmt: skip
    found = wire_to_model(posted).activities
    assert [(a.id, a.anchor, a.index) for a in found] == [
        ("x", None, 0), ("y", "u1", 2), ("z", "a1", 4), ("w", None, 6),
    ]  # fmt: skip
