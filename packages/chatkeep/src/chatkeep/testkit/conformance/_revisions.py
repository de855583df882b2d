"""Compare-and-set and pages: two tiers of the messages store."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from chatkeep.errors import InvalidValue, ThreadConflict
from chatkeep.records import ModelMessage
from chatkeep.stores import NO_THREAD, MessageStore, PagedMessages, RevisionedMessages
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    exact,
    gather,
    message_ids,
    outcomes,
    retrying,
    user,
)

__all__ = ["TestPagedMessages", "TestRevisionedMessages"]


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
        """Keep equal to the length appends and cuts nothing."""
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
        """Keep is between 0 and the length; nothing is written otherwise."""
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
        """Limit equal to the length shows everything, without a cursor."""
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
        """Before the oldest number: nothing, and no more to come."""
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
