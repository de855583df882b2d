"""Whole threads: the tier ThreadAdmin, over every store of the bag."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chatkeep.backends import Persistence
from chatkeep.errors import InvalidValue
from chatkeep.records import RunPatch, ThreadInfo
from chatkeep.stores import (
    NO_THREAD,
    CutArchive,
    MessageStore,
    RevisionedMessages,
    RunStore,
    ThreadAdmin,
    TurnBackend,
)
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    assistant,
    interrupt,
    message_ids,
    user,
)
from chatkeep.testkit.conformance._listed import ListedWrites

__all__ = ["TestThreadAdmin"]

_T0 = 1_700_000_000_000


async def _fill(persistence: Any, thread: str, run: str) -> None:
    """Something of ``thread`` in every store there is."""
    stores = persistence.stores
    if stores.messages is not None:
        await stores.messages.save_thread(thread, [user("q", "m1"), assistant("a", "m2")])
        await stores.messages.save_thread(thread, [user("q", "m1"), assistant("b", "m3")])
    if stores.runs is not None:
        await stores.runs.create_or_resume(run, thread, started_at=_T0)
        backend = getattr(stores.runs, "backend", None)
        if isinstance(backend, TurnBackend):
            await backend.save_draft(thread, run, [assistant("d", "m4")])
    if stores.interrupts is not None:
        await stores.interrupts.create(interrupt(thread, run, "i1"))
    if stores.activities is not None:
        await stores.activities.save_activities(thread, [activity("card")])
    if stores.metadata is not None:
        await stores.metadata.set("notes", thread, {"of": thread})
        await stores.metadata.set("more", thread, 1)


async def _left(persistence: Any, thread: str, run: str) -> dict[str, Any]:
    """What of ``thread`` can still be found, by any read there is."""
    stores, found = persistence.stores, dict[str, Any]()
    if stores.messages is not None:
        found["messages"] = await stores.messages.load_thread(thread)
        if isinstance(stores.messages, CutArchive):
            found["cuts"] = await stores.messages.list_cuts(thread)
    if stores.runs is not None:
        found["run"] = await stores.runs.get(run)
        found["active"] = await stores.runs.find_active_run(thread)
        if hasattr(stores.runs, "list_by_thread"):
            found["runs"] = await stores.runs.list_by_thread(thread)
    if stores.interrupts is not None:
        found["interrupts"] = await stores.interrupts.list(thread)
        found["interrupt"] = await stores.interrupts.get(thread, "i1")
    if stores.activities is not None:
        found["activities"] = await stores.activities.load_activities(thread)
    if stores.metadata is not None:
        found["metadata"] = await stores.metadata.get("notes", thread)
        found["more"] = await stores.metadata.get("more", thread)
    return {name: value for name, value in found.items() if value}


class TestThreadAdmin(ConformanceCase):
    """Tier ThreadAdmin: delete, list, export, erase."""

    @pytest.fixture
    def write(self, persistence: Any, messages: MessageStore, ids: Ids) -> ListedWrites:
        """Saves a transcript where the list can see it."""
        return ListedWrites(persistence, ids)

    async def test_delete_removes_every_kind_of_record(
        self, persistence: Any, admin: ThreadAdmin, ids: Ids
    ) -> None:
        """Messages, cuts, runs, drafts, interrupts, activities and metadata: nothing is left."""
        thread, run = ids.thread(), ids.run()
        await _fill(persistence, thread, run)
        assert await _left(persistence, thread, run)
        assert await admin.delete_thread(thread) is True
        assert await _left(persistence, thread, run) == {}
        assert await admin.export_thread(thread) is None

    async def test_delete_takes_nothing_else(
        self, persistence: Any, admin: ThreadAdmin, ids: Ids
    ) -> None:
        """Threads whose ids start alike or match as a pattern stay whole."""
        tag = ids("t")
        others = [f"{tag}0", f"{tag}%", f"{tag}_", f"{tag}:1", f"subagent:{tag}", tag[:-1]]
        runs = {thread: ids.run() for thread in [tag, *others]}
        for thread, run in runs.items():
            await _fill(persistence, thread, run)
        before = {t: await _left(persistence, t, runs[t]) for t in others}
        await admin.delete_thread(tag)
        assert {t: await _left(persistence, t, runs[t]) for t in others} == before

    async def test_delete_is_idempotent(
        self, persistence: Any, admin: ThreadAdmin, ids: Ids
    ) -> None:
        """An unknown or deleted thread: False, no error."""
        thread, run = ids.thread(), ids.run()
        assert await admin.delete_thread(thread) is False
        await _fill(persistence, thread, run)
        assert await admin.delete_thread(thread) is True
        assert await admin.delete_thread(thread) is False

    async def test_delete_takes_the_threads_of_subagents(
        self, persistence: Any, admin: ThreadAdmin, runs: RunStore, ids: Ids
    ) -> None:
        """A child thread goes with its parent, and so does a child of the child."""
        if not hasattr(runs, "list_by_parent_runs"):
            pytest.skip("tier RunTree is absent: children cannot be found")
        thread, run = ids.thread(), ids.run()
        await _fill(persistence, thread, run)
        names = [ids.run(), ids.run()]
        parent = run
        for name in names:
            await runs.create_or_resume(
                name,
                f"subagent:{name}",
                started_at=_T0,
                parent_run_id=parent,
                subagent_run_id=name,
            )
            await _fill(persistence, f"subagent:{name}", name)
            parent = name
        exported = await admin.export_thread(thread)
        assert exported is not None
        assert [c.thread_id for c in exported.children] == [f"subagent:{names[0]}"]
        assert [c.thread_id for c in exported.children[0].children] == [f"subagent:{names[1]}"]
        await admin.delete_thread(thread)
        for name in names:
            assert await _left(persistence, f"subagent:{name}", name) == {}

    async def test_a_recreated_thread_starts_anew(
        self, admin: ThreadAdmin, revisioned: RevisionedMessages, ids: Ids
    ) -> None:
        """After a delete an old revision matches nothing: a late writer cannot reach the new."""
        thread = ids.thread()
        seen = {NO_THREAD}
        for _ in range(3):
            done = await revisioned.splice_thread(
                thread, keep=0, tail=[user("same", "m1")], expected=NO_THREAD
            )
            assert done.revision not in seen
            seen.add(done.revision)
            await admin.delete_thread(thread)
            assert (await revisioned.load_transcript(thread)).revision == NO_THREAD
        await revisioned.splice_thread(thread, keep=0, tail=[user("new", "m1")], expected=NO_THREAD)
        for old in seen:
            with pytest.raises(Exception, match="revision"):
                await revisioned.splice_thread(thread, keep=0, tail=[], expected=old)
        found = await revisioned.load_transcript(thread)
        assert found.messages == [user("new", "m1")]

    async def test_a_run_id_is_free_again_after_a_delete(
        self, admin: ThreadAdmin, runs: RunStore, ids: Ids
    ) -> None:
        """A deleted thread keeps no claim on the ids of its runs."""
        thread, other, run = ids.thread(), ids.thread(), ids.run()
        await runs.create_or_resume(run, thread, started_at=_T0)
        await runs.update(run, RunPatch(status="completed"))
        await admin.delete_thread(thread)
        assert await runs.get(run) is None
        again = await runs.create_or_resume(run, other, started_at=_T0 + 1)
        assert (again.thread_id, again.status) == (other, "running")

    async def test_export_has_everything(
        self, persistence: Any, admin: ThreadAdmin, ids: Ids
    ) -> None:
        """Every store's share, drafts and cuts; None for an unknown thread."""
        thread, run = ids.thread(), ids.run()
        assert await admin.export_thread(thread) is None
        await _fill(persistence, thread, run)
        found = await admin.export_thread(thread)
        assert found is not None
        assert found.thread_id == thread
        stores = persistence.stores
        if stores.messages is not None:
            assert found.messages == await stores.messages.load_thread(thread)
            if isinstance(stores.messages, CutArchive):
                assert [message_ids(rows) for rows in found.cuts.values()] == [["m2"]]
        if stores.runs is not None:
            assert found.runs == [await stores.runs.get(run)]
            if isinstance(getattr(stores.runs, "backend", None), TurnBackend):
                assert [d.run_id for d in found.drafts] == [run]
        if stores.interrupts is not None:
            assert found.interrupts == await stores.interrupts.list(thread)
        if stores.activities is not None:
            assert found.activities == await stores.activities.load_activities(thread)
        if stores.metadata is not None:
            assert found.metadata == {"notes": {"of": thread}, "more": 1}
        assert found.children == []

    async def test_a_thread_is_listed_whichever_store_wrote_first(
        self, persistence: Any, admin: ThreadAdmin, ids: Ids
    ) -> None:
        """A run, an interrupt or a row of activities makes a thread as messages do."""
        stores = persistence.stores
        made: dict[str, str] = {}
        for key, store in stores.present().items():
            if key == "metadata" or getattr(store, "backend", None) is None:
                continue
            thread = made[key] = ids.thread()
            if key == "messages":
                await store.save_thread(thread, [user("a")])
            elif key == "runs":
                await store.create_or_resume(ids.run(), thread, started_at=_T0)
            elif key == "interrupts":
                await store.create(interrupt(thread, ids.run(), "i1"))
            else:
                await store.save_activities(thread, [activity("a")])
        if not made:
            pytest.skip("tier ThreadAdmin lists nothing here: no store has a backend")
        listed = {info.thread_id: info async for info in _every(admin)}
        assert set(made.values()) <= set(listed)
        for key, thread in made.items():
            assert listed[thread].message_count == (1 if key == "messages" else 0)
            assert listed[thread].created_at <= listed[thread].updated_at

    async def test_the_list_is_newest_first_and_pages_cover_it(
        self, admin: ThreadAdmin, write: ListedWrites, ids: Ids
    ) -> None:
        """Writing to a thread moves it to the front; pages show each thread once."""
        made = [ids.thread() for _ in range(5)]
        for thread in made:
            await write(thread, [user("a")])
            await asyncio.sleep(0.003)
        await write(made[1], [user("a"), user("b")])
        want = [made[1], made[4], made[3], made[2], made[0]]
        page = await admin.list_threads(limit=5)
        assert [info.thread_id for info in page.threads] == want
        assert [info.message_count for info in page.threads] == [2, 1, 1, 1, 1]
        shown: list[str] = []
        cursor: str | None = None
        while len(shown) < 5:
            page = await admin.list_threads(limit=2, cursor=cursor)
            assert 1 <= len(page.threads) <= 2
            shown += [info.thread_id for info in page.threads]
            cursor = page.cursor
            assert cursor is not None or len(shown) >= 5
        assert shown[:5] == want

    async def test_a_thread_keeps_the_time_of_its_creation(
        self, admin: ThreadAdmin, write: ListedWrites, ids: Ids
    ) -> None:
        """Saving again and cutting move ``updated_at`` only, and never backwards."""
        thread = ids.thread()
        await write(thread, [user("a")])
        (first,) = [info async for info in _every(admin) if info.thread_id == thread]
        newest = first.updated_at
        for rows in ([user("a"), user("b")], [], [user("c")]):
            await asyncio.sleep(0.003)
            await write(thread, rows)
            (info,) = [info async for info in _every(admin) if info.thread_id == thread]
            assert info.created_at == first.created_at
            assert info.updated_at >= newest
            newest = info.updated_at
        assert newest > first.updated_at

    async def test_the_last_page_has_no_cursor(
        self, admin: ThreadAdmin, write: ListedWrites, ids: Ids
    ) -> None:
        """A cursor says that more follow: walking it ends, and every thread came up once."""
        for _ in range(3):
            await write(ids.thread(), [user("a")])
        shown = [info.thread_id async for info in _every(admin, limit=7)]
        assert len(shown) == len(set(shown)) >= 3

    async def test_new_threads_between_pages_repeat_nothing(
        self, admin: ThreadAdmin, write: ListedWrites, ids: Ids
    ) -> None:
        """A thread that comes in while paging neither repeats nor hides an older one."""
        made = [ids.thread() for _ in range(4)]
        for thread in made:
            await write(thread, [user("a")])
            await asyncio.sleep(0.003)
        first = await admin.list_threads(limit=2)
        await write(ids.thread(), [user("new")])
        second = await admin.list_threads(limit=2, cursor=first.cursor)
        shown = [info.thread_id for info in [*first.threads, *second.threads]]
        assert shown == made[::-1]

    async def test_threads_of_subagents_are_listed_only_when_asked_for(
        self, admin: ThreadAdmin, write: ListedWrites, ids: Ids
    ) -> None:
        """``subagent:…`` threads stay out of a plain list."""
        child = f"subagent:{ids.run()}"
        await write(child, [user("a")])
        assert child not in {info.thread_id async for info in _every(admin)}
        assert child in {info.thread_id async for info in _every(admin, children=True)}

    async def test_odd_cursors_and_limits_are_refused(
        self, persistence: Any, admin: ThreadAdmin
    ) -> None:
        """A cursor that is not ours, or a limit below one: InvalidValue."""
        if isinstance(persistence, Persistence) and not persistence.backends:
            pytest.skip("tier ThreadAdmin lists nothing here: no store has a backend")
        for cursor in ("x", "", "AAAA", "é", "'; drop table threads; --"):
            with pytest.raises(InvalidValue):
                await admin.list_threads(cursor=cursor)
        for limit in (0, -1):
            with pytest.raises(InvalidValue):
                await admin.list_threads(limit=limit)

    async def test_a_deleted_thread_is_listed_no_more(
        self, admin: ThreadAdmin, write: ListedWrites, ids: Ids
    ) -> None:
        """The list never shows what cannot be loaded."""
        thread = ids.thread()
        await write(thread, [user("a")])
        assert thread in {info.thread_id async for info in _every(admin)}
        await admin.delete_thread(thread)
        assert thread not in {info.thread_id async for info in _every(admin)}

    async def test_erase_takes_every_copy(
        self,
        admin: ThreadAdmin,
        messages: MessageStore,
        revisioned: RevisionedMessages,
        cuts: CutArchive,
        ids: Ids,
    ) -> None:
        """Live and archived copies of a message go for good; the rest stays in order."""
        thread = ids.thread()
        rows = [user("q", "m1"), assistant("secret", "m2"), user("r", "m3"), assistant("s", "m4")]
        await messages.save_thread(thread, rows)
        await messages.save_thread(thread, [rows[0], assistant("new", "n1"), user("z", "m2")])
        before = await revisioned.load_transcript(thread)
        assert await admin.erase_messages(thread, ["m2", "nowhere"]) >= 1
        found = await revisioned.load_transcript(thread)
        assert message_ids(found.messages) == ["m1", "n1"]
        assert found.revision != before.revision
        assert found.numbers == before.numbers[:2]
        archived = [
            name
            for cut in await cuts.list_cuts(thread)
            for name in message_ids(await cuts.load_cut(thread, cut.cut_id))
        ]
        assert archived == ["m3", "m4"]
        assert "secret" not in repr(await admin.export_thread(thread))
        assert await admin.erase_messages(thread, ["m2"]) == 0
        assert await admin.erase_messages(thread, []) == 0

    async def test_erase_reaches_one_thread_only(
        self, admin: ThreadAdmin, messages: MessageStore, ids: Ids
    ) -> None:
        """The same message id in another thread stays."""
        one, two = ids.thread(), ids.thread()
        for thread in (one, two):
            await messages.save_thread(thread, [user("a", "m1"), user("b", "m2")])
        assert await admin.erase_messages(one, ["m1"]) == 1
        assert message_ids(await messages.load_thread(one)) == ["m2"]
        assert message_ids(await messages.load_thread(two)) == ["m1", "m2"]


async def _every(
    admin: ThreadAdmin, *, limit: int = 50, children: bool = False
) -> AsyncIterator[ThreadInfo]:
    cursor: str | None = None
    while True:
        page = await admin.list_threads(limit=limit, cursor=cursor, children=children)
        for info in page.threads:
            yield info
        cursor = page.cursor
        if cursor is None:
            return
