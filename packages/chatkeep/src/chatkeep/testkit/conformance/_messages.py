"""Transcripts: the messages store and its tiers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from chatkeep.errors import InvalidValue, ThreadConflict
from chatkeep.records import ModelMessage
from chatkeep.stores import NO_THREAD, CutArchive, MessageStore, PagedMessages, RevisionedMessages
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    exact,
    gather,
    message_ids,
    outcomes,
    retrying,
    tool_row,
    user,
)

__all__ = ["TestCutArchive", "TestMessages", "TestPagedMessages", "TestRevisionedMessages"]

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


class TestRevisionedMessages(ConformanceCase):
    """Tier RevisionedMessages: compare-and-set on the transcript."""

    async def test_an_unknown_thread_has_no_revision(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """A thread that does not exist is empty, at revision ""."""
        found = await revisioned.load_transcript(ids.thread())
        assert (found.messages, found.numbers, found.revision) == ([], [], NO_THREAD)

    async def test_a_first_splice_expects_no_thread(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Revision "" as expected means: must not exist; the second such splice conflicts."""
        thread = ids.thread()
        done = await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        assert done.revision != NO_THREAD
        with pytest.raises(ThreadConflict):
            await revisioned.splice_thread(thread, keep=0, tail=[user("b")], expected=NO_THREAD)
        found = await revisioned.load_transcript(thread)
        assert (found.messages, found.revision) == ([user("a")], done.revision)
        assert found.numbers == done.numbers

    async def test_a_splice_keeps_the_front_and_replaces_the_rest(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Kept messages keep their numbers; the tail gets greater ones, in order."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(4)]
        one = await revisioned.splice_thread(thread, keep=0, tail=rows, expected=NO_THREAD)
        assert len(one.numbers) == 4
        tail = [assistant("x", "x"), user("y", "y")]
        two = await revisioned.splice_thread(thread, keep=2, tail=tail, expected=one.revision)
        found = await revisioned.load_transcript(thread)
        assert found.messages == [*rows[:2], *tail]
        assert found.numbers == [*one.numbers[:2], *two.numbers]
        assert found.numbers == sorted(set(found.numbers))
        assert min(two.numbers) > max(one.numbers)
        assert min(one.numbers) >= 1
        assert found.revision == two.revision != one.revision

    async def test_an_append_leaves_what_is_there_alone(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """keep equal to the length appends and cuts nothing."""
        thread = ids.thread()
        one = await revisioned.splice_thread(
            thread, keep=0, tail=[user("a", "a"), assistant("b", "b")], expected=NO_THREAD
        )
        two = await revisioned.splice_thread(
            thread, keep=2, tail=[user("c", "c")], expected=one.revision
        )
        found = await revisioned.load_transcript(thread)
        assert message_ids(found.messages) == ["a", "b", "c"]
        assert found.numbers == [*one.numbers, *two.numbers]

    async def test_another_revision_conflicts_and_writes_nothing(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """A splice on a stale or made-up revision is refused; the thread is untouched."""
        thread = ids.thread()
        one = await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        two = await revisioned.splice_thread(
            thread, keep=1, tail=[user("b")], expected=one.revision
        )
        before = await revisioned.load_transcript(thread)
        for stale in (one.revision, "made-up", NO_THREAD, two.revision + "0"):
            with pytest.raises(ThreadConflict) as caught:
                await revisioned.splice_thread(thread, keep=0, tail=[user("z")], expected=stale)
            assert caught.value.thread_id == thread
        assert await revisioned.load_transcript(thread) == before

    async def test_a_revision_for_a_thread_that_does_not_exist_conflicts(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Expecting some revision of an unknown thread is a conflict, and creates nothing."""
        thread = ids.thread()
        with pytest.raises(ThreadConflict):
            await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected="1.abc")
        assert (await revisioned.load_transcript(thread)).revision == NO_THREAD

    @pytest.mark.parametrize("keep", [-1, 3])
    async def test_keep_outside_the_thread_is_refused(
        self, revisioned: RevisionedMessages, ids: Ids, keep: int
    ) -> None:
        """keep is between 0 and the length; nothing is written otherwise."""
        thread = ids.thread()
        one = await revisioned.splice_thread(
            thread, keep=0, tail=[user("a"), user("b")], expected=NO_THREAD
        )
        with pytest.raises(InvalidValue):
            await revisioned.splice_thread(
                thread, keep=keep, tail=[user("c")], expected=one.revision
            )
        assert (await revisioned.load_transcript(thread)).revision == one.revision

    async def test_a_tail_that_cannot_be_stored_writes_nothing(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """InvalidValue for a message of the tail leaves transcript and revision alone."""
        thread = ids.thread()
        one = await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        with pytest.raises(InvalidValue):
            await revisioned.splice_thread(
                thread,
                keep=0,
                tail=[user("b"), user("c", metadata={"x": float("inf")})],
                expected=one.revision,
            )
        found = await revisioned.load_transcript(thread)
        assert (found.messages, found.revision) == ([user("a")], one.revision)

    async def test_numbers_and_revisions_are_never_used_twice(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Cutting and writing the same text again gives new numbers and new revisions."""
        thread = ids.thread()
        revision, numbers, revisions = NO_THREAD, list[int](), [NO_THREAD]
        for _ in range(6):
            done = await revisioned.splice_thread(
                thread, keep=0, tail=[user("same", "m1")], expected=revision
            )
            revision = done.revision
            numbers += done.numbers
            revisions.append(revision)
        assert numbers == sorted(set(numbers))
        assert len(set(revisions)) == 7

    async def test_an_emptied_thread_still_remembers_its_numbers(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """After everything was cut, new messages do not start again at one."""
        thread = ids.thread()
        one = await revisioned.splice_thread(
            thread, keep=0, tail=[user("a"), user("b")], expected=NO_THREAD
        )
        two = await revisioned.splice_thread(thread, keep=0, tail=[], expected=one.revision)
        found = await revisioned.load_transcript(thread)
        assert (found.messages, found.revision) == ([], two.revision)
        assert two.revision not in (one.revision, NO_THREAD)
        three = await revisioned.splice_thread(
            thread, keep=0, tail=[user("c")], expected=two.revision
        )
        assert min(three.numbers) > max(one.numbers)

    async def test_saving_an_equal_list_writes_nothing(
        self, messages: MessageStore, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """save_thread of what is stored changes neither revision nor numbers."""
        thread = ids.thread()
        rows = [user("a", "m1", metadata={"x": 1}), assistant("b", "m2")]
        await messages.save_thread(thread, rows)
        before = await revisioned.load_transcript(thread)
        await messages.save_thread(thread, rows)
        assert await revisioned.load_transcript(thread) == before

    async def test_saving_a_longer_list_writes_only_the_rest(
        self, messages: MessageStore, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """The common front keeps its entries; only what follows gets new numbers."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(5)]
        await messages.save_thread(thread, rows)
        before = await revisioned.load_transcript(thread)
        await messages.save_thread(thread, [*rows, assistant("x", "x")])
        longer = await revisioned.load_transcript(thread)
        assert longer.numbers[:5] == before.numbers
        assert longer.revision != before.revision
        await messages.save_thread(thread, [*rows[:3], user("y", "y")])
        shorter = await revisioned.load_transcript(thread)
        assert shorter.numbers[:3] == before.numbers[:3]
        assert shorter.numbers[3] > longer.numbers[-1]

    async def test_one_tells_1_from_1_0_and_key_order_when_saving(
        self, messages: MessageStore, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """The difference that save_thread writes is one of bytes, not of Python equality."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a", metadata={"n": 1})])
        before = await revisioned.load_transcript(thread)
        await messages.save_thread(thread, [user("a", metadata={"n": 1.0})])
        after = await revisioned.load_transcript(thread)
        assert after.revision != before.revision
        assert exact(after.messages) == exact([user("a", metadata={"n": 1.0})])

    async def test_of_two_tabs_one_wins_and_the_other_is_told(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Of eight splices on one revision exactly one is applied, the others conflict."""
        thread = ids.thread()
        one = await revisioned.splice_thread(
            thread, keep=0, tail=[user("a", "a")], expected=NO_THREAD
        )
        won, lost = await outcomes(
            [
                revisioned.splice_thread(
                    thread, keep=1, tail=[user(f"tab {n}", f"tab{n}")], expected=one.revision
                )
                for n in range(8)
            ]
        )
        assert len(won) == 1
        assert [type(e) for e in lost] == [ThreadConflict] * 7
        found = await revisioned.load_transcript(thread)
        assert (len(found.messages), found.revision) == (2, won[0].revision)

    async def test_of_concurrent_first_splices_one_creates_the_thread(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """A thread is created once, however many race for it."""
        thread = ids.thread()
        won, lost = await outcomes(
            [
                revisioned.splice_thread(
                    thread, keep=0, tail=[user(f"tab {n}")], expected=NO_THREAD
                )
                for n in range(6)
            ]
        )
        assert len(won) == 1
        assert [type(e) for e in lost] == [ThreadConflict] * 5
        assert len((await revisioned.load_transcript(thread)).messages) == 1

    async def test_writers_that_retry_lose_no_turn(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """Whole turns of many writers stay whole, in some order, and none is missing."""
        thread = ids.thread()

        async def turn(n: int) -> None:
            async def attempt() -> None:
                seen = await revisioned.load_transcript(thread)
                await revisioned.splice_thread(
                    thread,
                    keep=len(seen.messages),
                    tail=[user(f"q{n}", f"q{n}"), assistant(f"a{n}", f"a{n}")],
                    expected=seen.revision,
                )

            await retrying(attempt, ThreadConflict)

        await gather([turn(n) for n in range(6)])
        found = await revisioned.load_transcript(thread)
        order = message_ids(found.messages)
        assert sorted(cast("list[str]", order[::2])) == [f"q{n}" for n in range(6)]
        assert [cast("str", q).replace("q", "a") for q in order[::2]] == order[1::2]
        assert found.numbers == sorted(set(found.numbers))

    async def test_a_load_is_one_consistent_read(
        self, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """A revision always comes with the messages and numbers that it names."""
        thread = ids.thread()
        first = await revisioned.splice_thread(
            thread, keep=0, tail=[user("0", "m0")], expected=NO_THREAD
        )
        shown: dict[str, tuple[list[str | None], list[int]]] = {}

        async def write() -> None:
            revision = first.revision
            for n in range(1, 11):
                rows = [user(f"{n}.{i}", f"m{n}.{i}") for i in range(n % 3 + 1)]
                done = await revisioned.splice_thread(thread, keep=0, tail=rows, expected=revision)
                revision = done.revision
                want = (message_ids(rows), done.numbers)
                assert shown.setdefault(revision, want) == want

        async def read() -> None:
            for _ in range(15):
                found = await revisioned.load_transcript(thread)
                seen = (message_ids(found.messages), found.numbers)
                assert shown.setdefault(found.revision, seen) == seen
                await asyncio.sleep(0)

        await gather([write(), read()])


class TestPagedMessages(ConformanceCase):
    """Tier PagedMessages: windows with durable cursors."""

    async def test_an_unknown_thread_is_an_empty_page(self, paged: PagedMessages, ids: Ids) -> None:
        """Nothing there: an empty page that is not truncated."""
        page = await paged.load_page(ids.thread(), limit=5)
        assert (page.messages, page.numbers, page.truncated, page.cursor) == ([], [], False, None)

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
    async def test_a_chain_of_pages_shows_each_message_once(
        self, messages: MessageStore, paged: PagedMessages, ids: Ids, limit: int
    ) -> None:
        """Newest page first, each page oldest first, the chain ends exactly at the start."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(7)]
        await messages.save_thread(thread, rows)
        shown: list[ModelMessage] = []
        before: int | None = None
        for _ in range(8):
            page = await paged.load_page(thread, limit=limit, before=before)
            assert len(page.messages) == len(page.numbers) <= limit
            shown = [*page.messages, *shown]
            assert (page.cursor is not None) == page.truncated
            if not page.truncated:
                break
            assert page.cursor == page.numbers[0]
            before = page.cursor
        assert shown == rows

    async def test_a_page_that_fits_exactly_is_not_truncated(
        self, messages: MessageStore, paged: PagedMessages, ids: Ids
    ) -> None:
        """limit equal to the length shows everything, without a cursor."""
        thread = ids.thread()
        rows = [user(f"n{i}") for i in range(3)]
        await messages.save_thread(thread, rows)
        page = await paged.load_page(thread, limit=3)
        assert (page.messages, page.truncated, page.cursor) == (rows, False, None)
        assert (await paged.load_page(thread, limit=2)).truncated

    async def test_a_cursor_survives_appends(
        self, messages: MessageStore, paged: PagedMessages, ids: Ids
    ) -> None:
        """The older page is the same after newer messages came in."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(6)]
        await messages.save_thread(thread, rows)
        page = await paged.load_page(thread, limit=2)
        await messages.save_thread(thread, [*rows, user("new", "new")])
        older = await paged.load_page(thread, limit=2, before=page.cursor)
        assert message_ids(older.messages) == ["m2", "m3"]

    async def test_the_cursor_of_a_cut_message_still_works(
        self, messages: MessageStore, paged: PagedMessages, ids: Ids
    ) -> None:
        """A cursor names a place; what stood there may be gone."""
        thread = ids.thread()
        rows = [user(f"n{i}", f"m{i}") for i in range(6)]
        await messages.save_thread(thread, rows)
        page = await paged.load_page(thread, limit=2)
        await messages.save_thread(thread, [*rows[:3], user("z", "z")])
        older = await paged.load_page(thread, limit=9, before=page.cursor)
        assert message_ids(older.messages) == ["m0", "m1", "m2"]

    async def test_a_cursor_before_everything_gives_an_empty_page(
        self, messages: MessageStore, paged: PagedMessages, ids: Ids
    ) -> None:
        """before the oldest number: nothing, and no more to come."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a"), user("b")])
        page = await paged.load_page(thread, limit=5)
        older = await paged.load_page(thread, limit=5, before=page.numbers[0])
        assert (older.messages, older.truncated, older.cursor) == ([], False, None)

    @pytest.mark.parametrize("limit", [0, -1])
    async def test_a_limit_below_one_is_refused(
        self, paged: PagedMessages, ids: Ids, limit: int
    ) -> None:
        """A page has at least one place."""
        with pytest.raises(InvalidValue):
            await paged.load_page(ids.thread(), limit=limit)


class TestCutArchive(ConformanceCase):
    """Tier CutArchive: a cut never destroys."""

    async def test_a_thread_that_was_never_cut_has_no_cuts(
        self, messages: MessageStore, cuts: CutArchive, ids: Ids
    ) -> None:
        """Appending archives nothing; an unknown cut loads as an empty list."""
        thread = ids.thread()
        assert await cuts.list_cuts(thread) == []
        await messages.save_thread(thread, [user("a")])
        await messages.save_thread(thread, [user("a"), user("b")])
        assert await cuts.list_cuts(thread) == []
        assert await cuts.load_cut(thread, "nope") == []

    async def test_what_a_splice_cuts_is_archived_whole(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """The cut record names numbers and ids in order; loading it gives the messages."""
        thread = ids.thread()
        rows = [user("q", "m0"), assistant("a", "m1"), user("no id"), tool_row("c", "r", "m3")]
        one = await revisioned.splice_thread(thread, keep=0, tail=rows, expected=NO_THREAD)
        await revisioned.splice_thread(
            thread, keep=1, tail=[assistant("new", "n1")], expected=one.revision
        )
        (cut,) = await cuts.list_cuts(thread)
        assert cut.thread_id == thread
        assert cut.numbers == one.numbers[1:]
        assert cut.message_ids == ["m1", None, "m3"]
        assert cut.extra == 0
        assert cut.cut_at > 0
        assert exact(await cuts.load_cut(thread, cut.cut_id)) == exact(rows[1:])

    async def test_a_replacement_is_not_archived(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """A cut message whose id comes back in the tail was replaced, not cut."""
        thread = ids.thread()
        one = await revisioned.splice_thread(
            thread,
            keep=0,
            tail=[user("q", "m0"), assistant("a", "m1"), user("x", "m2")],
            expected=NO_THREAD,
        )
        two = await revisioned.splice_thread(
            thread,
            keep=1,
            tail=[assistant("better", "m1"), user("x", "m2")],
            expected=one.revision,
        )
        assert await cuts.list_cuts(thread) == []
        await revisioned.splice_thread(
            thread, keep=1, tail=[assistant("best", "m1")], expected=two.revision
        )
        (cut,) = await cuts.list_cuts(thread)
        assert cut.message_ids == ["m2"]
        assert await cuts.load_cut(thread, cut.cut_id) == [user("x", "m2")]

    async def test_an_overwrite_is_archived(
        self, messages: MessageStore, cuts: CutArchive, ids: Ids
    ) -> None:
        """What save_thread overwrites can be found again."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a", "m1"), assistant("b", "m2")])
        await messages.save_thread(thread, [user("z", "m9")])
        (cut,) = await cuts.list_cuts(thread)
        assert message_ids(await cuts.load_cut(thread, cut.cut_id)) == ["m1", "m2"]

    async def test_archive_false_keeps_no_copy(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """A caller may say that a cut is for good."""
        thread = ids.thread()
        one = await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        await revisioned.splice_thread(
            thread, keep=0, tail=[user("b")], expected=one.revision, archive=False
        )
        assert await cuts.list_cuts(thread) == []

    async def test_cuts_are_listed_oldest_first(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """Twelve cuts within a millisecond or two stand in the order they were made."""
        thread = ids.thread()
        revision = NO_THREAD
        for n in range(13):
            done = await revisioned.splice_thread(
                thread, keep=0, tail=[user(f"n{n}", f"m{n}")], expected=revision
            )
            revision = done.revision
        found = await cuts.list_cuts(thread)
        assert [cut.message_ids for cut in found] == [[f"m{n}"] for n in range(12)]
        assert len({cut.cut_id for cut in found}) == 12

    async def test_a_restored_cut_is_back_where_it_was(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """Restored entries keep their numbers; what took their place is archived instead."""
        thread = ids.thread()
        rows = [user("q", "m0"), assistant("a", "m1"), user("r", "m2")]
        one = await revisioned.splice_thread(thread, keep=0, tail=rows, expected=NO_THREAD)
        two = await revisioned.splice_thread(
            thread, keep=1, tail=[assistant("b", "n1")], expected=one.revision
        )
        (cut,) = await cuts.list_cuts(thread)
        back = await cuts.restore_cut(thread, cut.cut_id, expected=two.revision)
        found = await revisioned.load_transcript(thread)
        assert found.messages == rows
        assert found.numbers == one.numbers
        assert found.revision == back.revision
        assert back.revision not in (one.revision, two.revision)
        (other,) = await cuts.list_cuts(thread)
        assert other.cut_id != cut.cut_id
        assert message_ids(await cuts.load_cut(thread, other.cut_id)) == ["n1"]
        assert await cuts.load_cut(thread, cut.cut_id) == []

    async def test_a_restore_can_be_undone(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """Restoring the cut that a restore made gives the later transcript back."""
        thread = ids.thread()
        one = await revisioned.splice_thread(
            thread, keep=0, tail=[user("q", "q"), assistant("a", "a")], expected=NO_THREAD
        )
        two = await revisioned.splice_thread(
            thread, keep=1, tail=[assistant("b", "b")], expected=one.revision
        )
        (cut,) = await cuts.list_cuts(thread)
        back = await cuts.restore_cut(thread, cut.cut_id, expected=two.revision)
        (other,) = await cuts.list_cuts(thread)
        await cuts.restore_cut(thread, other.cut_id, expected=back.revision)
        found = await revisioned.load_transcript(thread)
        assert message_ids(found.messages) == ["q", "b"]
        assert found.numbers == [one.numbers[0], *two.numbers]
        (again,) = await cuts.list_cuts(thread)
        assert message_ids(await cuts.load_cut(thread, again.cut_id)) == ["a"]

    async def test_a_restore_on_another_revision_changes_nothing(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """Stale revision or unknown cut: ThreadConflict, transcript and cuts stay."""
        thread = ids.thread()
        one = await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        two = await revisioned.splice_thread(
            thread, keep=0, tail=[user("b")], expected=one.revision
        )
        before = await revisioned.load_transcript(thread)
        listed = await cuts.list_cuts(thread)
        with pytest.raises(ThreadConflict):
            await cuts.restore_cut(thread, listed[0].cut_id, expected=one.revision)
        with pytest.raises(ThreadConflict):
            await cuts.restore_cut(thread, "no-such-cut", expected=two.revision)
        assert await revisioned.load_transcript(thread) == before
        assert await cuts.list_cuts(thread) == listed

    async def test_nothing_is_ever_lost_by_cutting_and_restoring(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """Transcript and cuts together always hold every number that was ever written."""
        thread = ids.thread()
        revision, written = NO_THREAD, set[int]()
        for n, keep in enumerate((0, 2, 1, 3, 0, 2, 4, 1)):
            rows = [user(f"{n}.{i}", f"m{n}.{i}") for i in range(3)]
            length = len((await revisioned.load_transcript(thread)).messages)
            done = await revisioned.splice_thread(
                thread, keep=min(keep, length), tail=rows, expected=revision
            )
            revision = done.revision
            written |= set(done.numbers)
            if n in (3, 5, 7):
                listed = await cuts.list_cuts(thread)
                picked = listed[len(listed) // 2].cut_id
                revision = (await cuts.restore_cut(thread, picked, expected=revision)).revision
            live = await revisioned.load_transcript(thread)
            archived = [i for cut in await cuts.list_cuts(thread) for i in cut.numbers]
            assert len(live.numbers) + len(archived) == len(written)
            assert {*live.numbers, *archived} == written

    async def test_purging_erases_old_cuts_only(
        self, revisioned: RevisionedMessages, cuts: CutArchive, ids: Ids
    ) -> None:
        """purge_cuts takes what was cut before the given time, and says how many."""
        thread = ids.thread()
        one = await revisioned.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        await revisioned.splice_thread(thread, keep=0, tail=[user("b")], expected=one.revision)
        (cut,) = await cuts.list_cuts(thread)
        assert await cuts.purge_cuts(thread, before=cut.cut_at) == 0
        assert await cuts.list_cuts(thread) == [cut]
        assert await cuts.purge_cuts(thread, before=cut.cut_at + 1) == 1
        assert await cuts.list_cuts(thread) == []
        assert await cuts.load_cut(thread, cut.cut_id) == []
        assert (await revisioned.load_transcript(thread)).messages == [user("b")]

    async def test_the_cuts_of_two_threads_are_apart(
        self, messages: MessageStore, cuts: CutArchive, ids: Ids
    ) -> None:
        """A cut id is looked up in its own thread."""
        threads = [ids.thread(), ids.thread()]
        for thread in threads:
            await messages.save_thread(thread, [user("a", "m1")])
            await messages.save_thread(thread, [user("b", "m2")])
        (cut,) = await cuts.list_cuts(threads[0])
        assert await cuts.load_cut(threads[1], cut.cut_id) == []
        assert await cuts.purge_cuts(threads[1], before=cut.cut_at + 60_000) == 1
        assert await cuts.list_cuts(threads[0]) == [cut]
