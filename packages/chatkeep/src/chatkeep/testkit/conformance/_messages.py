"""Transcripts: the messages store and its tiers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from chatkeep.errors import InvalidValue
from chatkeep.records import ModelMessage
from chatkeep.stores import MessageStore
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    exact,
    gather,
    user,
)

__all__ = ["TestMessages"]

_IMAGE = {"type": "image", "source": {"type": "url", "value": "https://example.org/a.png"}}
_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Köln"}'},
    "metadata": {"signature": "s=="},
}

SHAPES: dict[str, dict[str, Any]] = {
    "plain text": {"role": "user", "content": "hello"},
    "content null with a tool call": {"role": "assistant", "content": None, "toolCalls": [_CALL]},
    "content of parts": {
        "role": "user",
        "content": [{"type": "text", "content": "look"}, _IMAGE, {"type": "foo", "x_new": 1}],
    },
    "tool result": {"role": "tool", "content": '{"t":1}', "toolCallId": "c1"},
    "failed tool result": {
        "role": "tool",
        "content": "boom",
        "toolCallId": "c1",
        "error": "boom",
    },
    "thinking with signature": {
        "role": "assistant",
        "content": "so",
        "thinking": [{"content": "hm", "signature": "abc=="}, {"content": ""}],
    },
    "structured output": {
        "role": "assistant",
        "content": "",
        "structuredOutput": {"raw": '{"a":null}', "data": {"a": None, "b": [], "c": {}}},
    },
    "empty text": {"role": "assistant", "content": ""},
    "empty list of parts": {"role": "user", "content": []},
    "an empty part": {"role": "user", "content": [{}]},
    "id, createdAt and name": {
        "id": "m-1",
        "role": "user",
        "content": "x",
        "createdAt": "2026-01-02T03:04:05.678Z",
        "name": "ann",
    },
    "metadata with a run tag": {
        "role": "assistant",
        "content": "x",
        "metadata": {"tanstack": {"run": {"id": "r-1"}, "x": 1}, "tanstack:mark": True},
    },
    "unknown keys": {"role": "user", "content": "x", "x_new": {"deep": [1, {"y": None}]}},
    "explicit nulls": {"role": "user", "content": "x", "name": None, "metadata": None},
    "odd key order": {"zeta": 1, "content": "x", "alpha": 2, "role": "user"},
}

_ODD_IDS = (
    "t",
    "t1",
    "t%",
    "t_",
    "t:1",
    "t#1",
    "t/1",
    "t 1",
    "T",
    "subagent:x",
    "a{b}c",
    "{}",
    "}x",
    "*",
    "?",
    "[t]",
    "t\n1",
    "'; --",
    '"q"',
    "\\",
    "tést",
    "te\u0301st",
    "😀",
    "x" * 1000,
    "😀" * 256,
)


class TestMessages(ConformanceCase):
    """The messages store: M1 to M3, and what upstream does not ask."""

    async def test_m1_an_unknown_thread_is_an_empty_list(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """A thread that was never saved loads as an empty plain list."""
        found = await messages.load_thread(ids.thread())
        assert found == []
        assert type(found) is list

    async def test_m1_what_was_saved_loads_equal_and_in_order(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Save, then load: an equal plain list in the order given."""
        thread = ids.thread()
        saved = [user("hi", "m1"), assistant("hello", "m2"), user("more", "m3")]
        await messages.save_thread(thread, saved)
        found = await messages.load_thread(thread)
        assert found == saved
        assert type(found) is list

    async def test_m1_a_second_save_replaces_the_first(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """save_thread never merges: only the second list is there."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a", "m1"), assistant("b", "m2")])
        await messages.save_thread(thread, [user("z", "m9")])
        assert await messages.load_thread(thread) == [user("z", "m9")]

    async def test_m2_rich_shapes_round_trip_together(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Text, tool call, tool result, image part and thinking keep every field."""
        thread = ids.thread()
        saved = cast("list[ModelMessage]", list(SHAPES.values()))
        await messages.save_thread(thread, saved)
        assert exact(await messages.load_thread(thread)) == exact(saved)

    async def test_m3_message_metadata_round_trips(self, messages: MessageStore, ids: Ids) -> None:
        """Message metadata comes back, the nested run tag included."""
        thread = ids.thread()
        row = assistant("x", "m1", metadata={"tanstack": {"run": {"id": "r"}}, "own": [1, None]})
        await messages.save_thread(thread, [row])
        assert exact(await messages.load_thread(thread)) == exact([row])

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_each_message_shape_round_trips_exactly(
        self, messages: MessageStore, ids: Ids, shape: str
    ) -> None:
        """Every field, type and key order of a message survives; absent never becomes null."""
        thread = ids.thread()
        row = cast("ModelMessage", SHAPES[shape])
        await messages.save_thread(thread, [row])
        assert exact(await messages.load_thread(thread)) == exact([row])

    async def test_an_empty_save_loads_as_an_empty_list(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Saving an empty list is allowed and empties the thread."""
        thread = ids.thread()
        await messages.save_thread(thread, [])
        assert await messages.load_thread(thread) == []
        await messages.save_thread(thread, [user("a")])
        await messages.save_thread(thread, [])
        assert await messages.load_thread(thread) == []

    async def test_two_messages_may_share_an_id(self, messages: MessageStore, ids: Ids) -> None:
        """A message id is no key: two assistant messages with one id both stay."""
        thread = ids.thread()
        rows = [user("q", "m1"), assistant("a", "m2"), assistant("b", "m2"), user("q", "m1")]
        await messages.save_thread(thread, rows)
        assert await messages.load_thread(thread) == rows

    async def test_messages_without_ids_keep_their_places(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Equal messages without an id are separate messages."""
        thread = ids.thread()
        rows = [user("same"), user("same"), assistant("x"), user("same")]
        await messages.save_thread(thread, rows)
        assert await messages.load_thread(thread) == rows

    async def test_order_is_the_order_given_not_the_clock(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Fifty messages of one time, and later ones with an earlier time, keep their order."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}", createdAt="2026-01-01T00:00:00Z") for i in range(50)]
        await messages.save_thread(thread, rows)
        rows = [*rows, *(user(f"n{i}", createdAt="2025-01-01T00:00:00Z") for i in range(50, 60))]
        await messages.save_thread(thread, rows)
        for _ in range(5):
            assert await messages.load_thread(thread) == rows

    async def test_a_changed_message_keeps_its_place(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Rewriting one message in the middle moves nothing."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(12)]
        await messages.save_thread(thread, rows)
        rows = [*rows[:3], user("changed", "m3"), *rows[4:]]
        await messages.save_thread(thread, rows)
        assert await messages.load_thread(thread) == rows

    async def test_the_creation_time_of_a_message_is_kept(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """A second save of a thread does not touch the first save's createdAt."""
        thread = ids.thread()
        row = user("a", "m1", createdAt="2024-02-29T23:59:59.999Z")
        await messages.save_thread(thread, [row])
        await messages.save_thread(thread, [row, assistant("b", "m2")])
        assert (await messages.load_thread(thread))[0] == row

    async def test_changing_what_was_passed_or_returned_changes_nothing_stored(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Copy semantics: lists and messages are copied on the way in and on the way out."""
        thread = ids.thread()
        row = cast("Any", user("a", "m1", metadata={"deep": [1]}))
        given = [row]
        await messages.save_thread(thread, given)
        given.append(user("b"))
        row["metadata"]["deep"].append(2)
        want = [user("a", "m1", metadata={"deep": [1]})]
        first = await messages.load_thread(thread)
        assert first == want
        cast("Any", first[0])["metadata"]["deep"].append(3)
        first.clear()
        assert await messages.load_thread(thread) == want

    async def test_threads_are_apart_whatever_their_ids(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Ids that are prefixes, patterns or escapes of each other never meet."""
        tag = ids("o")
        odd = [f"{name}{tag}" if len(name) < 200 else name for name in _ODD_IDS]
        for n, thread in enumerate(odd):
            await messages.save_thread(thread, [user(f"text {n}", tag)])
        for n, thread in enumerate(odd):
            assert await messages.load_thread(thread) == [user(f"text {n}", tag)], thread
        await messages.save_thread(odd[0], [])
        assert await messages.load_thread(odd[1]) == [user("text 1", tag)]

    @pytest.mark.parametrize(
        "bad",
        ["", "a\x00b", "\ud800", "x" * 1025, "😀" * 257, 7, None, b"t"],
        ids=["empty", "nul", "surrogate", "1025 bytes", "1028 bytes", "int", "None", "bytes"],
    )
    async def test_an_id_that_is_none_is_refused(self, messages: MessageStore, bad: Any) -> None:
        """Ids are text of 1 to 1 024 UTF-8 bytes without NUL or surrogates, else refused."""
        with pytest.raises(InvalidValue):
            await messages.load_thread(bad)
        with pytest.raises(InvalidValue):
            await messages.save_thread(bad, [user("x")])

    async def test_a_message_of_five_megabytes_round_trips(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """One large message is stored whole."""
        thread = ids.thread()
        row = user("é" * 2_500_000, "m1")
        await messages.save_thread(thread, [user("a"), row])
        assert await messages.load_thread(thread) == [user("a"), row]

    async def test_a_thread_of_five_thousand_messages_round_trips(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """A long thread comes back whole and in order, also after one more turn."""
        thread = ids.thread()
        rows = [user(f"text {i}", f"m{i}") for i in range(5000)]
        await messages.save_thread(thread, rows)
        rows.append(assistant("end", "m-end"))
        await messages.save_thread(thread, rows)
        assert await messages.load_thread(thread) == rows

    async def test_a_refused_message_changes_nothing(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """A value that cannot be stored is refused with its path; the thread stays as it was."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a", "m1")])
        bad = user("b", "m2", metadata={"score": float("nan")})
        with pytest.raises(InvalidValue) as caught:
            await messages.save_thread(thread, [user("new", "m1"), bad])
        assert "score" in caught.value.path
        assert await messages.load_thread(thread) == [user("a", "m1")]

    async def test_a_load_beside_saves_never_shows_half_a_list(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """A reader sees the old list or the new one, whole."""
        thread = ids.thread()
        lists = [[user(f"{word}{i}", f"{word}{i}") for i in range(8)] for word in "ab"]
        await messages.save_thread(thread, lists[0])

        async def write() -> None:
            for n in range(12):
                await messages.save_thread(thread, lists[(n + 1) % 2])

        async def read() -> None:
            for _ in range(24):
                assert await messages.load_thread(thread) in lists
                await asyncio.sleep(0)

        await gather([write(), read(), read()])

    async def test_of_concurrent_saves_one_whole_list_stands(
        self, messages: MessageStore, ids: Ids
    ) -> None:
        """Concurrent overwrites never interleave: the thread is one writer's list."""
        thread = ids.thread()
        lists = [[user(f"{n}-{i}", f"{n}-{i}") for i in range(n + 1)] for n in range(6)]
        await gather([messages.save_thread(thread, rows) for rows in lists])
        assert await messages.load_thread(thread) in lists
