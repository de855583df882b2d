"""Scopes: a row of another scope does not exist, for every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatkeep.errors import InvalidValue, RunConflict, ThreadConflict
from chatkeep.records import RunPatch
from chatkeep.scope import Scope
from chatkeep.stores import (
    NO_THREAD,
    InterruptAnswer,
    Splice,
    TurnBackend,
    TurnCommit,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    assistant,
    interrupt,
    left_out,
    now_ms,
    user,
)
from chatkeep.testkit.conformance._listed import ListedWrites

__all__ = ["TestScope"]

_T0 = 1_700_000_000_000
_Scoped = Callable[[Scope], Any]


class TestScope(ConformanceCase):
    """``persistence.scoped(scope)``: tenant and user are part of every key."""

    @pytest.fixture
    def views(self, persistence: Any, scoped: _Scoped, ids: Ids) -> dict[str, Any]:
        """Bags of scopes that would meet if tenant and user were joined or inherited."""
        tag = ids("s")
        scopes = {
            "tenant": Scope(tenant_id=tag),
            "tenant and user": Scope(tenant_id=tag, user_id="u"),
            "another user": Scope(tenant_id=tag, user_id="v"),
            "user": Scope(user_id=tag),
            "user named as tenant and user": Scope(user_id=f"{tag}u"),
            "colon one": Scope(tenant_id=f"{tag}:a", user_id="b"),
            "colon two": Scope(tenant_id=tag, user_id="a:b"),
            "slash": Scope(tenant_id=f"{tag}/u"),
            "long": Scope(tenant_id=tag + "x" * 900, user_id="😀" * 200),
        }
        return {name: scoped(scope) for name, scope in scopes.items()}

    async def test_an_empty_text_is_no_scope(self, scoped: _Scoped) -> None:
        """Absent is absent: an empty tenant or user is refused, as are other bad ids."""
        for bad in ("", "a\x00", "\ud800", "x" * 1025):
            with pytest.raises(InvalidValue):
                Scope(tenant_id=bad)
            with pytest.raises(InvalidValue):
                Scope(user_id=bad)

    async def test_the_empty_scope_is_the_unscoped_bag(
        self, persistence: Any, scoped: _Scoped, ids: Ids
    ) -> None:
        """Scope() is the default scope, not another one."""
        backends = persistence.backends
        if any(b.scope != Scope() for b in backends):
            pytest.skip("this persistence is itself scoped")
        thread = ids.thread()
        stores = persistence.stores
        if stores.messages is None:
            pytest.skip("declared: no messages store")
        await stores.messages.save_thread(thread, [user("a")])
        assert await scoped(Scope()).stores.messages.load_thread(thread) == [user("a")]

    async def test_messages_of_scopes_never_meet(
        self, views: dict[str, Any], messages: Any, ids: Ids
    ) -> None:
        """One thread id, a transcript per scope; overwriting one leaves the others."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("unscoped", "m1")])
        for name, view in views.items():
            assert await view.stores.messages.load_thread(thread) == []
            await view.stores.messages.save_thread(thread, [user(name, "m1")])
        for name, view in views.items():
            assert await view.stores.messages.load_thread(thread) == [user(name, "m1")]
        await views["tenant"].stores.messages.save_thread(thread, [])
        assert await messages.load_thread(thread) == [user("unscoped", "m1")]
        found = await views["tenant and user"].stores.messages.load_thread(thread)
        assert found == [user("tenant and user", "m1")]

    async def test_revisions_pages_and_cuts_of_scopes_never_meet(
        self, views: dict[str, Any], revisioned: Any, paged: Any, cuts: Any, ids: Ids
    ) -> None:
        """A revision or a cut id of one scope is worth nothing in another."""
        thread = ids.thread()
        one, two = (views[n].stores.messages for n in ("tenant", "tenant and user"))
        first = await one.splice_thread(thread, keep=0, tail=[user("a")], expected=NO_THREAD)
        assert (await two.load_transcript(thread)).revision == NO_THREAD
        assert (await two.load_page(thread, limit=5)).messages == []
        with pytest.raises(ThreadConflict):
            await two.splice_thread(thread, keep=0, tail=[user("x")], expected=first.revision)
        await one.splice_thread(thread, keep=0, tail=[user("b")], expected=first.revision)
        (cut,) = await one.list_cuts(thread)
        assert await two.list_cuts(thread) == []
        assert await two.load_cut(thread, cut.cut_id) == []
        assert await two.purge_cuts(thread, before=now_ms() + 60_000) == 0
        done = await two.splice_thread(thread, keep=0, tail=[user("c")], expected=NO_THREAD)
        with pytest.raises(ThreadConflict):
            await two.restore_cut(thread, cut.cut_id, expected=done.revision)
        assert await one.list_cuts(thread) == [cut]

    async def test_runs_of_scopes_never_meet(
        self, views: dict[str, Any], runs: Any, ids: Ids
    ) -> None:
        """A run id is unique within a scope: each scope has its own run of that id."""
        run = ids.run()
        threads = {name: ids.thread() for name in views}
        await runs.create_or_resume(run, ids.thread(), started_at=_T0)
        for n, (name, view) in enumerate(views.items()):
            store = view.stores.runs
            assert await store.get(run) is None
            made = await store.create_or_resume(run, threads[name], started_at=_T0 + n)
            assert made.thread_id == threads[name]
        first, *rest = views
        mine = views[first].stores.runs
        await mine.update(run, RunPatch(status="completed", finished_at=_T0))
        assert await mine.find_active_run(threads[first]) is None
        for name in rest:
            store = views[name].stores.runs
            assert (await store.get(run)).status == "running"
            assert (await store.find_active_run(threads[name])).run_id == run
            assert await store.get(run, thread_id=threads[first]) is None
            assert await store.find_active_run(threads[first]) is None
        assert (await runs.get(run)).status == "running"

    async def test_an_update_reaches_no_other_scope(
        self, views: dict[str, Any], runs: Any, ids: Ids
    ) -> None:
        """Update of a run that another scope owns is a no-op, with and without its thread."""
        run, thread = ids.run(), ids.thread()
        made = await views["tenant"].stores.runs.create_or_resume(run, thread, started_at=_T0)
        for store in (views["tenant and user"].stores.runs, views["user"].stores.runs, runs):
            await store.update(run, RunPatch(status="failed"))
            await store.update(run, RunPatch(status="failed"), thread_id=thread)
        assert await views["tenant"].stores.runs.get(run) == made

    async def test_lists_of_runs_show_one_scope(
        self, views: dict[str, Any], history: Any, tree: Any, reclaimable: Any, ids: Ids
    ) -> None:
        """By thread, by parent and reclaimable: rows of the own scope only."""
        thread, parent, run = ids.thread(), ids.run(), ids.run()
        one, two = (views[n].stores.runs for n in ("tenant", "another user"))
        await one.create_or_resume(run, thread, started_at=_T0, parent_run_id=parent)
        await one.update(run, RunPatch(detached_since=5))
        assert [r.run_id for r in await one.list_by_thread(thread)] == [run]
        assert [r.run_id for r in await one.list_by_parent_run(parent)] == [run]
        assert [r.run_id for r in await one.list_reclaimable(now=9, ttl_ms=0)] == [run]
        for other in (two, history):
            assert await other.list_by_thread(thread) == []
            assert await other.list_by_parent_run(parent) == []
            assert await other.list_by_parent_runs([parent]) == {parent: []}
            listed = await other.list_reclaimable(now=9, ttl_ms=0, limit=10_000)
            assert run not in [r.run_id for r in listed]

    async def test_interrupts_of_scopes_never_meet(
        self, views: dict[str, Any], interrupts: Any, ids: Ids
    ) -> None:
        """The same (thread, run, id) is another interrupt in another scope."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        for n, view in enumerate(views.values()):
            store = view.stores.interrupts
            assert await store.list(thread) == []
            assert await store.create(interrupt(thread, run, name, payload={"n": n}))
        mine = views["tenant"].stores.interrupts
        await mine.resolve(thread, name, "mine")
        for n, (word, view) in enumerate(views.items()):
            store = view.stores.interrupts
            found = await store.get(thread, name, run_id=run)
            assert found.payload == {"n": n}
            assert found.status == ("resolved" if word == "tenant" else "pending")
            assert len(await store.list_pending(thread)) == (0 if word == "tenant" else 1)
            assert len(await store.list_by_run(thread, run)) == 1
            assert len(await store.list_pending_by_run(thread, run)) == (word != "tenant")
        assert await interrupts.get(thread, name) is None
        await interrupts.cancel(thread, name)
        assert len(await views["user"].stores.interrupts.list_pending(thread)) == 1

    async def test_a_batch_reaches_no_other_scope(
        self, views: dict[str, Any], batch: Any, ids: Ids
    ) -> None:
        """commit_batch of an interrupt of another scope is an unknown entry."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        one, two = (views[n].stores.interrupts for n in ("tenant", "tenant and user"))
        await one.create(interrupt(thread, run, name))
        with pytest.raises(Exception, match=name):
            await two.commit_batch(thread, [InterruptAnswer(interrupt_id=name)])
        assert len(await one.list_pending(thread)) == 1

    async def test_activities_of_scopes_never_meet(
        self, views: dict[str, Any], activities: Any, ids: Ids
    ) -> None:
        """One thread id, rows per scope."""
        thread = ids.thread()
        for n, view in enumerate(views.values()):
            assert await view.stores.activities.load_activities(thread) == []
            await view.stores.activities.save_activities(thread, [activity("a", n)])
        await views["tenant"].stores.activities.save_activities(thread, [])
        for n, (name, view) in enumerate(views.items()):
            want = [] if name == "tenant" else [activity("a", n)]
            assert await view.stores.activities.load_activities(thread) == want
        assert await activities.load_activities(thread) == []

    async def test_metadata_of_scopes_never_meets(
        self, views: dict[str, Any], metadata: Any, ids: Ids
    ) -> None:
        """One (namespace, key), a value per scope."""
        key = ids("k")
        for n, view in enumerate(views.values()):
            assert await view.stores.metadata.get("n", key) is None
            await view.stores.metadata.set("n", key, n)
        await views["tenant"].stores.metadata.delete("n", key)
        for n, (name, view) in enumerate(views.items()):
            want = None if name == "tenant" else n
            assert await view.stores.metadata.get("n", key) == want
        assert await metadata.get("n", key) is None

    async def test_revisions_of_metadata_are_of_one_scope(
        self, views: dict[str, Any], versioned: Any, ids: Ids
    ) -> None:
        """set_if with the revision of another scope writes nothing."""
        key = ids("k")
        one, two = (views[n].stores.metadata for n in ("tenant", "user"))
        revision = await one.set_if("n", key, 1, None)
        assert await two.get_versioned("n", key) is None
        assert await two.set_if("n", key, 2, revision) is None
        assert await two.set_if("n", key, 2, None) is not None
        assert (await one.get_versioned("n", key)).value == 1

    async def test_whole_threads_are_of_one_scope(
        self, views: dict[str, Any], admin: Any, messages: Any, ids: Ids
    ) -> None:
        """List, export, erase and delete see and touch the own scope only."""
        thread = ids.thread()
        for name, view in views.items():
            await ListedWrites(view, ids)(thread, [user(name, "m1"), user("x", "m2")])
        for name, view in views.items():
            listed = await view.list_threads(limit=10)
            assert [(t.thread_id, t.message_count) for t in listed.threads] == [(thread, 2)]
            assert (await view.export_thread(thread)).messages[0] == user(name, "m1")
        assert await admin.export_thread(thread) is None
        assert await admin.delete_thread(thread) is False
        assert await admin.erase_messages(thread, ["m1"]) == 0
        assert await views["tenant"].erase_messages(thread, ["m1"]) == 1
        assert await views["tenant and user"].delete_thread(thread) is True
        for name, view in views.items():
            found = await view.stores.messages.load_thread(thread)
            assert len(found) == {"tenant": 1, "tenant and user": 0}.get(name, 2)

    async def test_turns_of_scopes_never_meet(
        self, views: dict[str, Any], messages: Any, declared: frozenset[str], ids: Ids
    ) -> None:
        """Commit ids, leases, drafts and views belong to one scope."""
        backend: Any = getattr(messages, "backend", None)
        if "TurnBackend" in declared or not isinstance(backend, TurnBackend):
            raise left_out("TurnBackend", declared, "the messages store has none behind it")
        thread, run = ids.thread(), ids.run()
        one: Any = views["tenant"].stores.messages.backend
        two: Any = views["tenant and user"].stores.messages.backend
        commit = TurnCommit(
            commit_id="same", thread_id=thread, splice=Splice(keep_through=0, tail=[user("a")])
        )
        for handle in (one, two, backend):
            assert not (await handle.commit_turn(commit)).replayed
            assert (await handle.commit_turn(commit)).replayed
        stores: Any = views["tenant"].stores
        of_runs: Any = getattr(stores.runs, "backend", None)
        if of_runs is not one:
            return
        await stores.runs.create_or_resume(run, thread, started_at=_T0, lease_token="t")
        await one.save_draft(thread, run, [assistant("d")], lease_token="t")
        query = ViewQuery(runs="all", drafts=True, run_id=run)
        for handle in (two, backend):
            view = await handle.read_view(thread, query)
            assert (view.run, view.runs, view.drafts, view.foreign_run) == (None, [], [], False)
            with pytest.raises(RunConflict):
                await handle.save_draft(thread, run, [assistant("x")], lease_token="t")
            with pytest.raises(RunConflict):
                await handle.renew_lease(thread, run, "t", 1000)
            with pytest.raises(RunConflict):
                await handle.commit_turn(
                    TurnCommit(commit_id=ids("c"), thread_id=thread, run_id=run, lease_token="t")
                )
        mine = await one.read_view(thread, query)
        assert [d.run_id for d in mine.drafts] == [run]
