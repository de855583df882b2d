"""UI rows: the activities store."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InvalidValue
from chatkeep.records import ActivityRecord
from chatkeep.stores import ActivityStore, MessageStore
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    exact,
    gather,
    user,
)

__all__ = ["TestActivities"]


def _json(rows: list[ActivityRecord]) -> str:
    return exact([row.to_json() for row in rows])


class TestActivities(ConformanceCase):
    """The activities store: A1, and what upstream does not ask."""

    async def test_a1_an_unknown_thread_has_no_rows(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """Never saved loads as an empty plain list."""
        found = await activities.load_activities(ids.thread())
        assert found == []
        assert type(found) is list

    async def test_a1_rows_load_equal_in_the_order_saved(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """Save, then load: equal records in the order given."""
        thread = ids.thread()
        rows = [activity("b", 0), activity("a", 1), activity("c", 2, activity_type="chart")]
        await activities.save_activities(thread, rows)
        assert await activities.load_activities(thread) == rows

    async def test_a1_a_second_save_replaces_the_first(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """save_activities is a full overwrite, also by a shorter or an empty list."""
        thread = ids.thread()
        await activities.save_activities(thread, [activity(f"a{i}", i) for i in range(5)])
        for rows in ([activity("a1", 0), activity("z", 1)], [activity("a4", 9)], []):
            await activities.save_activities(thread, rows)
            assert await activities.load_activities(thread) == rows

    async def test_equal_indexes_keep_the_order_saved(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """The order is that of the list, not of index, id or time."""
        thread = ids.thread()
        rows = [activity(name, index) for name, index in (("m", 3), ("z", 0), ("a", 3), ("c", 0))]
        await activities.save_activities(thread, rows)
        assert await activities.load_activities(thread) == rows
        await activities.save_activities(thread, rows[::-1])
        assert await activities.load_activities(thread) == rows[::-1]

    async def test_every_field_round_trips(self, activities: ActivityStore, ids: Ids) -> None:
        """Content, metadata, subagent and unknown fields; absent ones stay absent."""
        thread = ids.thread()
        content: dict[str, Any] = {
            "z": None,
            "a.b": [],
            "$x": {"": 1.0},
            "_id": 1,
            "text": "é\x00😀",
            "n": 2**60,
        }
        rows = [
            ActivityRecord.from_json(
                {
                    "id": "full",
                    "activityType": "card",
                    "content": content,
                    "index": 4,
                    "metadata": {"tanstack": {"x": [1, None]}},
                    "subagentRunId": "r1",
                    "xNew": {"deep": [1, 2.5]},
                }
            ),
            ActivityRecord(id="bare", activity_type="t", content={}, index=0),
        ]
        await activities.save_activities(thread, rows)
        found = await activities.load_activities(thread)
        assert _json(found) == _json(rows)
        assert found[1].to_json() == {"id": "bare", "activityType": "t", "content": {}, "index": 0}

    async def test_the_place_and_the_run_of_a_row_round_trip(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """A row stands behind the message that its anchor names, whatever its index says: a
        store that loses the anchor moves rows when another turn is put in before them."""
        thread = ids.thread()
        rows = [
            activity("x", 7, anchor="m1", run_id="r1"),
            activity("y", 1, anchor="é😀 m/2"),
            activity("z", 0),
        ]
        await activities.save_activities(thread, rows)
        found = await activities.load_activities(thread)
        assert [(r.anchor, r.run_id) for r in found] == [
            ("m1", "r1"), ("é😀 m/2", None), (None, None),
        ]  # fmt: skip
        assert _json(found) == _json(rows)

    async def test_rows_and_messages_are_independent(
        self, messages: MessageStore, activities: ActivityStore, ids: Ids
    ) -> None:
        """Writing or cutting messages leaves the rows, and the other way round."""
        thread = ids.thread()
        rows = [activity("a", 0), activity("b", 1)]
        await activities.save_activities(thread, rows)
        await messages.save_thread(thread, [user("x", "m1"), user("y", "m2")])
        await messages.save_thread(thread, [])
        assert await activities.load_activities(thread) == rows
        await messages.save_thread(thread, [user("z", "m3")])
        await activities.save_activities(thread, [])
        assert await messages.load_thread(thread) == [user("z", "m3")]

    async def test_threads_are_apart(self, activities: ActivityStore, ids: Ids) -> None:
        """Ids that are prefixes or patterns of each other never meet."""
        tag = ids("t")
        threads = [tag, f"{tag}1", f"{tag}%", f"{tag}_", f"{tag}:1", f"subagent:{tag}"]
        for n, thread in enumerate(threads):
            await activities.save_activities(thread, [activity("row", n)])
        await activities.save_activities(threads[0], [])
        for n, thread in enumerate(threads[1:], 1):
            assert await activities.load_activities(thread) == [activity("row", n)]

    async def test_changing_what_was_passed_or_returned_changes_nothing_stored(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """Copy semantics on the way in and on the way out."""
        thread = ids.thread()
        content: dict[str, Any] = {"deep": [1]}
        given = [activity("a", 0, content=content)]
        await activities.save_activities(thread, given)
        content["deep"].append(2)
        given.clear()
        first = await activities.load_activities(thread)
        assert first[0].content == {"deep": [1]}
        first[0].content["deep"].append(3)
        first.clear()
        assert (await activities.load_activities(thread))[0].content == {"deep": [1]}

    async def test_many_rows_round_trip(self, activities: ActivityStore, ids: Ids) -> None:
        """A few hundred rows, and one of a megabyte, are no special case."""
        thread = ids.thread()
        rows = [activity(f"a{i}", i) for i in range(300)]
        rows.append(activity("big", 300, content={"text": "x" * 1_000_000}))
        await activities.save_activities(thread, rows)
        assert await activities.load_activities(thread) == rows

    async def test_a_row_that_cannot_be_stored_changes_nothing(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """InvalidValue leaves the saved rows as they were."""
        thread = ids.thread()
        await activities.save_activities(thread, [activity("a", 0)])
        with pytest.raises(InvalidValue):
            await activities.save_activities(
                thread, [activity("b", 0), activity("c", 1, content={"x": float("nan")})]
            )
        assert await activities.load_activities(thread) == [activity("a", 0)]

    async def test_concurrent_saves_never_interleave(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """Of overwrites at once, one whole list stands."""
        thread = ids.thread()
        lists = [[activity(f"{n}.{i}", i) for i in range(n + 1)] for n in range(5)]
        await gather([activities.save_activities(thread, rows) for rows in lists])
        assert await activities.load_activities(thread) in lists
