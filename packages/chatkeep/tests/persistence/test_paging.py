"""Windows of any thread: each UI message once, none torn, whatever the rows look like."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep.messages import model_to_ui
from chatkeep.persistence.paging import Cursor, group_rows, newest_units, units_of


@st.composite
def threads(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns of user rows, assistant rows (some sharing an id) and results."""
    rows: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(min_value=1, max_value=4))):
        rows.append({"id": f"u{turn}", "role": "user", "content": "q"})
        open_calls: list[str] = []
        for step in range(draw(st.integers(min_value=0, max_value=4))):
            calls = [f"c{turn}-{step}-{i}" for i in range(draw(st.integers(0, 3)))]
            segment = draw(st.booleans()) and step > 0
            row: dict[str, Any] = {
                "id": f"a{turn}-{step - 1 if segment else step}",
                "role": "assistant",
                "content": f"text {turn}.{step}",
            }
            if calls:
                row["toolCalls"] = [
                    {"id": c, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    for c in calls
                ]
            rows.append(row)
            open_calls += calls
            answered = draw(st.permutations(open_calls))[: draw(st.integers(0, len(open_calls)))]
            for call in answered:
                open_calls.remove(call)
                rows.append({"id": f"t-{call}", "role": "tool", "toolCallId": call, "content": "1"})
    return rows


def pages(rows: list[Any], limit: int, chunk: int) -> list[list[dict[str, Any]]]:
    """The walk of a reader that gets ``chunk`` rows at a time, newest first."""
    numbers = list(range(1, len(rows) + 1))
    found, before = [], len(rows) + 1
    while True:
        size = chunk
        while True:
            start = max(0, before - 1 - size)
            window, held = rows[start : before - 1], numbers[start : before - 1]
            groups, sure = group_rows(window, held, from_start=start == 0)
            units = units_of(groups[sure:], {})
            if start == 0 or sum(len(unit.ui) for unit in units[1:]) >= limit:
                break
            size *= 2
        page = newest_units(units, limit, more=start > 0)
        found.append(page.ui)
        if page.cursor is None:
            return found
        assert page.cursor.number < before
        before = page.cursor.number


@given(rows=threads(), limit=st.integers(1, 9), chunk=st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_a_walk_shows_every_message_once_and_whole(
    rows: list[dict[str, Any]], limit: int, chunk: int
) -> None:
    shown = [message for page in reversed(pages(rows, limit, chunk)) for message in page]
    assert shown == model_to_ui(rows)  # type: ignore[arg-type]


def test_a_cursor_is_read_back_from_its_text() -> None:
    for cursor in (Cursor(7), Cursor(7, 3), Cursor(2**53 - 1)):
        assert Cursor.parse(str(cursor)) == cursor
    for text in ("", "x", "1.", "-1", "1.2.3", "٣", " 1"):
        assert Cursor.parse(text) is None
