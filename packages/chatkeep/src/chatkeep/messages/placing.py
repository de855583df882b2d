"""Where activity rows stand among the UI messages of a thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chatkeep.records import ActivityRecord

__all__ = ["before_each", "placed"]


def placed(
    names: Sequence[str | None], activities: Iterable[ActivityRecord], *, whole: bool = True
) -> list[int | ActivityRecord]:
    """The places of the messages (``names`` are their ids, in order) with the rows in between.

    A row stands behind the message that its ``anchor`` names; rows of one message by ``index``,
    else in the order given. A row without an anchor, or whose message is not among them, goes in
    at its ``index``, which counts messages and rows, or at the end. Where the messages are not
    the ``whole`` thread but its beginning, rows that stand behind them are left out.
    """
    by_name = {name: place for place, name in enumerate(names) if name is not None}
    behind: dict[int, list[ActivityRecord]] = {}
    by_index: list[ActivityRecord] = []
    for record in sorted(activities, key=lambda record: record.index):
        place = None if record.anchor is None else by_name.get(record.anchor)
        if place is None:
            by_index.append(record)
        else:
            behind.setdefault(place, []).append(record)
    out: list[int | ActivityRecord] = []
    for place in range(len(names)):
        out.append(place)
        out.extend(behind.get(place, ()))
    for record in by_index:
        if whole or (record.anchor is None and record.index <= len(out)):
            out.insert(min(record.index, len(out)), record)
    return out


def before_each(
    names: Sequence[str | None], activities: Iterable[ActivityRecord]
) -> list[tuple[ActivityRecord, int]]:
    """Each row in its place, with the number of messages that stand before it."""
    found: list[tuple[ActivityRecord, int]] = []
    count = 0
    for item in placed(names, activities):
        if isinstance(item, int):
            count += 1
        else:
            found.append((item, count))
    return found
