"""Windows of a thread, in UI messages, by cursors that stay good.

A cursor is the sequence number of the oldest message of a window, as text: numbers are never
reused, so it survives appends, cuts and regenerates. Where activity rows stand between two
messages, a second number says how many of them, counted back from that message, were shown.
Callers take it as opaque.

A window begins where a UI message begins: never at a tool result whose call is left out, never
in the middle of a message of several segments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from chatkeep._checks import MAX_INTEGER
from chatkeep.messages import activity_message, model_to_ui, placed
from chatkeep.records import ActivityRecord, ModelMessage

__all__ = [
    "MAX_PAGE",
    "Cursor",
    "Group",
    "Page",
    "Unit",
    "group_rows",
    "interleaved",
    "is_before",
    "newest_units",
    "units_of",
]

MAX_PAGE: Final = 500
"""Largest page, in UI messages."""

_ANSWERS: Final = frozenset({"assistant", "tool"})

_CURSOR: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Everything before message ``number`` and its last ``activities`` activity rows."""

    number: int
    activities: int = 0

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """The cursor; None for a text that is none of ours."""
        match = _CURSOR.fullmatch(text)
        if match is None or int(match[1]) > MAX_INTEGER:
            return None
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        return f"{self.number}.{self.activities}" if self.activities else str(self.number)


@dataclass(slots=True)
class Group:
    """The rows that make one UI message (or, where an old row answers none, a few)."""

    rows: list[ModelMessage] = field(default_factory=list[ModelMessage])
    numbers: list[int] = field(default_factory=list[int])

    def add(self, row: ModelMessage, number: int) -> None:
        """One more row."""
        self.rows.append(row)
        self.numbers.append(number)


@dataclass(frozen=True, slots=True)
class Page:
    """UI messages with their cursors. ``cursor`` is set when older ones exist."""

    ui: list[dict[str, Any]]
    cursor: Cursor | None


def group_rows(
    rows: Sequence[ModelMessage], numbers: Sequence[int], *, from_start: bool
) -> tuple[list[Group], int]:
    """The groups of ``rows``, and the first of them that is sure to be whole.

    ``from_start``: nothing older exists. Otherwise the first group may lack its beginning,
    unless it opens with a user row; it takes in every result whose call must be older.
    """
    if not rows:
        return [], 0
    torn = not from_start and rows[0].get("role") in _ANSWERS
    leading = torn
    groups: list[Group] = []
    holders: dict[str, int] = {}  # call id -> its group, within a turn
    for row, number in zip(rows, numbers, strict=True):
        role = row.get("role")
        if role == "tool" and groups:
            at = holders.get(row.get("toolCallId", ""), 0 if leading else -1)
            if at >= 0:
                _join_tail(groups, at, holders)
                groups[-1].add(row, number)
                continue
        if role == "assistant" and groups and _continues(groups[-1], row):
            groups[-1].add(row, number)
        else:
            groups.append(Group([row], [number]))
        if role not in _ANSWERS:
            leading = False
            holders.clear()
        for call in row.get("toolCalls") or ():
            holders[call["id"]] = len(groups) - 1
    return groups, int(torn)


def _continues(group: Group, row: ModelMessage) -> bool:
    """Whether an assistant row is a further segment of the group's message."""
    for earlier in reversed(group.rows):
        if earlier.get("role") == "assistant":
            return bool(row.get("id")) and earlier.get("id") == row.get("id")
    return False


def _join_tail(groups: list[Group], at: int, holders: dict[str, int]) -> None:
    """A result for a call that is not in the last group ties all in between together."""
    if at == len(groups) - 1:
        return
    for group in groups[at + 1 :]:
        groups[at].rows.extend(group.rows)
        groups[at].numbers.extend(group.numbers)
    del groups[at + 1 :]
    for call, place in holders.items():
        if place > at:
            holders[call] = at


@dataclass(frozen=True, slots=True)
class Unit:
    """What a window never splits: UI messages, and the cursor of everything before them."""

    ui: list[dict[str, Any]]
    cursor: Cursor


def units_of(
    groups: Sequence[Group],
    extra: Mapping[int, Sequence[dict[str, Any]]],
) -> list[Unit]:
    """A unit a group; ``extra`` are UI rows that belong behind the group with a number."""
    units: list[Unit] = []
    for group in groups:
        ui = model_to_ui(group.rows, numbers=group.numbers)
        for number in dict.fromkeys(group.numbers):
            ui.extend(extra.get(number, ()))
        units.append(Unit(ui, Cursor(group.numbers[0])))
    return units


def newest_units(units: Sequence[Unit], limit: int, *, more: bool) -> Page:
    """The newest units with at least ``limit`` UI messages; ``more``: older ones exist beyond
    ``units``."""
    start, count = len(units), 0
    while start > 0 and count < limit:
        start -= 1
        count += len(units[start].ui)
    older = more or any(unit.ui for unit in units[:start])
    ui = [message for unit in units[start:] for message in unit.ui]
    cursor = units[start].cursor if older and start < len(units) else None
    return Page(ui, cursor)


def interleaved(
    units: Sequence[Unit], activities: Sequence[ActivityRecord], *, end: int, whole: bool
) -> list[Unit]:
    """Activity rows in their places among the UI messages: units of their own, except inside a
    unit, of which they then are a part.

    ``units`` are those of the messages numbered below ``end``; ``whole``: there are no others.
    Rows that stand behind a message which is not among them are left out.
    """
    flat = [(unit, message) for unit in units for message in unit.ui]
    names = [message.get("id") for _, message in flat]
    out: list[Unit] = []
    waiting: list[dict[str, Any]] = []
    last: Unit | None = None
    for item in placed(names, activities, whole=whole):
        if not isinstance(item, int):
            waiting.append(activity_message(item))
            continue
        unit, message = flat[item]
        if unit is last:
            out[-1] = Unit([*out[-1].ui, *waiting, message], unit.cursor)
        else:
            out += [*_activity_units(waiting, unit.cursor.number), Unit([message], unit.cursor)]
        waiting, last = [], unit
    return [*out, *_activity_units(waiting, end)]


def _activity_units(rows: Sequence[dict[str, Any]], number: int) -> list[Unit]:
    return [Unit([row], Cursor(number, len(rows) - i)) for i, row in enumerate(rows)]


def is_before(one: Cursor, other: Cursor) -> bool:
    """Whether ``one`` stands before ``other`` in the thread."""
    if one.number != other.number:
        return one.number < other.number
    return one.activities > other.activities
