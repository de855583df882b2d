"""A cut never destroys: the archive tier of the messages store."""

from __future__ import annotations

import pytest

from chatkeep.errors import ThreadConflict
from chatkeep.stores import NO_THREAD, CutArchive, MessageStore, RevisionedMessages
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    assistant,
    exact,
    message_ids,
    tool_row,
    user,
)

__all__ = ["TestCutArchive"]


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
