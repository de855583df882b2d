"""Whole threads over one backend, several, and stores of the user's own."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep import (
    ActivityRecord,
    CompositionError,
    InterruptRecord,
    InvalidValue,
    Persistence,
    RunPatch,
    Scope,
    ThreadAdmin,
    compose_persistence,
    define_activity_store,
    define_message_store,
    define_metadata_store,
    define_run_store,
    memory_persistence,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["one backend", "two backends", "own messages"])
async def bag(request: Any, memory: Persistence, clock: Any) -> Persistence:
    if request.param == "one backend":
        return memory
    if request.param == "two backends":
        other = memory_persistence(clock=clock)
        return compose_persistence(
            memory, overrides={"messages": other.stores.messages, "metadata": other.stores.metadata}
        )
    return compose_persistence(memory, overrides={"messages": own_messages()})


def own_messages() -> Any:
    kept: dict[str, list[Any]] = {}

    async def load_thread(thread_id: str) -> list[Any]:
        return list(kept.get(thread_id, []))

    async def save_thread(thread_id: str, messages: Any) -> None:
        kept[thread_id] = list(messages)

    return define_message_store(load_thread=load_thread, save_thread=save_thread)


def message(name: str) -> Any:
    return {"id": name, "role": "user", "content": name}


async def fill(bag: Persistence, thread_id: str, run_id: str, parent: str | None = None) -> None:
    stores = bag.stores
    await stores.messages.save_thread(thread_id, [message(f"{thread_id}-m")])
    await stores.runs.create_or_resume(run_id, thread_id, started_at=1, parent_run_id=parent)
    await stores.interrupts.create(
        InterruptRecord(
            interrupt_id="i", run_id=run_id, thread_id=thread_id, requested_at=1, payload={}
        )
    )
    row = ActivityRecord(id="a", activity_type="x", content={}, index=0)
    await stores.activities.save_activities(thread_id, [row])
    await stores.metadata.set("ns", thread_id, 1)
    await stores.runs.backend.save_draft(thread_id, run_id, [message("draft")])


async def fill_family(bag: Persistence) -> None:
    await fill(bag, "t", "r")
    await fill(bag, "subagent:c1", "c1", parent="r")
    await fill(bag, "subagent:c2", "c2", parent="c1")
    await fill(bag, "other", "r9")


async def test_a_persistence_has_the_admin_tier(memory: Persistence) -> None:
    assert isinstance(memory, ThreadAdmin)


async def test_deleting_takes_children_and_every_store_and_leaves_the_rest(
    bag: Persistence,
) -> None:
    await fill_family(bag)
    assert await bag.delete_thread("t")
    for thread_id in ("t", "subagent:c1", "subagent:c2"):
        assert await bag.export_thread(thread_id) is None
    for run_id in ("r", "c1", "c2"):
        assert await bag.stores.runs.get(run_id) is None
    assert (await bag.export_thread("other")).metadata == {"ns": 1}
    assert not await bag.delete_thread("t")
    await fill(bag, "t", "r")
    assert [m["id"] for m in (await bag.export_thread("t")).messages] == ["t-m"]


async def test_an_export_has_everything_of_the_thread_and_its_children(bag: Persistence) -> None:
    await fill_family(bag)
    exported = await bag.export_thread("t")
    assert [m["id"] for m in exported.messages] == ["t-m"]
    assert [r.run_id for r in exported.runs] == ["r"]
    assert [i.interrupt_id for i in exported.interrupts] == ["i"]
    assert [a.id for a in exported.activities] == ["a"]
    assert exported.metadata == {"ns": 1}
    assert [d.run_id for d in exported.drafts] == ["r"]
    [child] = exported.children
    assert child.thread_id == "subagent:c1"
    assert [grandchild.thread_id for grandchild in child.children] == ["subagent:c2"]


async def test_an_export_has_the_cuts(memory: Persistence) -> None:
    await memory.stores.messages.save_thread("t", [message("a"), message("b")])
    await memory.stores.messages.save_thread("t", [message("a")])
    [(_, rows)] = (await memory.export_thread("t")).cuts.items()
    assert rows == [message("b")]


async def test_runs_that_name_each_other_as_parents_end_the_walk(memory: Persistence) -> None:
    runs = memory.stores.runs
    await runs.create_or_resume("a", "subagent:a", started_at=1, parent_run_id="b")
    await runs.create_or_resume("b", "subagent:b", started_at=1, parent_run_id="a")
    exported = await memory.export_thread("subagent:a")
    assert [c.thread_id for c in exported.children] == ["subagent:b"]
    assert await memory.delete_thread("subagent:a")
    assert await runs.get("b") is None


async def test_an_unknown_thread_is_nothing(bag: Persistence) -> None:
    assert await bag.export_thread("t") is None
    assert not await bag.delete_thread("t")
    assert await bag.erase_messages("t", ["m"]) == 0
    for call in (bag.export_thread, bag.delete_thread):
        with pytest.raises(InvalidValue):
            await call("")


async def test_threads_are_listed_newest_first_in_pages_that_chain(
    bag: Persistence, clock: Any
) -> None:
    for n in range(5):
        await bag.stores.messages.save_thread(f"t{n}", [message("m")] * (n + 1))
        clock.forward(1)
        await bag.stores.runs.create_or_resume(f"r{n}", f"t{n}", started_at=1)
        clock.forward(1)
    await bag.stores.runs.create_or_resume("c", "subagent:c", started_at=1)
    clock.forward(1)
    await bag.stores.runs.update("r1", RunPatch(status="completed"))

    seen: list[tuple[str, int]] = []
    cursor: str | None = None
    while True:
        page = await bag.list_threads(limit=2, cursor=cursor)
        assert len(page.threads) <= 2
        seen += [(info.thread_id, info.message_count) for info in page.threads]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == [("t1", 2), ("t4", 5), ("t3", 4), ("t2", 3), ("t0", 1)]
    everything = await bag.list_threads(children=True)
    assert [info.thread_id for info in everything.threads][:2] == ["t1", "subagent:c"]


async def test_threads_of_one_moment_are_each_listed_once(bag: Persistence) -> None:
    for n in range(5):
        await bag.stores.messages.save_thread(f"t{n}", [message("m")])
        await bag.stores.runs.create_or_resume(f"r{n}", f"t{n}", started_at=1)
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(10):
        page = await bag.list_threads(limit=1, cursor=cursor)
        seen += [info.thread_id for info in page.threads]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(seen) == ["t0", "t1", "t2", "t3", "t4"]


async def test_a_thread_is_listed_whichever_store_was_written_first(memory: Persistence) -> None:
    await memory.stores.runs.create_or_resume("r", "runs", started_at=1)
    await memory.stores.activities.save_activities("activities", [])
    await memory.stores.interrupts.create(
        InterruptRecord(
            interrupt_id="i", run_id="x", thread_id="interrupts", requested_at=1, payload={}
        )
    )
    await memory.stores.messages.save_thread("messages", [message("m")])
    listed = {info.thread_id for info in (await memory.list_threads()).threads}
    assert listed == {"runs", "activities", "interrupts", "messages"}


@pytest.mark.parametrize("cursor", ["x", "", "W10"])
async def test_a_foreign_cursor_or_an_empty_page_is_refused(bag: Persistence, cursor: str) -> None:
    with pytest.raises(InvalidValue):
        await bag.list_threads(cursor=cursor)
    with pytest.raises(InvalidValue, match="limit"):
        await bag.list_threads(limit=0)


async def test_erasing_takes_every_copy_archived_ones_and_drafts_too(memory: Persistence) -> None:
    messages = memory.stores.messages
    await memory.stores.runs.create_or_resume("r", "t", started_at=1)
    await messages.save_thread("t", [message("a"), message("b"), message("c")])
    await messages.save_thread("t", [message("a"), message("d"), message("b")])
    await memory.backends[0].save_draft("t", "r", [message("c"), message("e")])
    before = (await messages.load_transcript("t")).revision
    assert await memory.erase_messages("t", ["a", "c", "none"]) == 2
    exported = await memory.export_thread("t")
    assert [m["id"] for m in exported.messages] == ["d", "b"]
    assert exported.cuts == {}
    assert [m["id"] for d in exported.drafts for m in d.messages] == ["e"]
    assert (await messages.load_transcript("t")).revision != before
    assert await memory.erase_messages("t", []) == 0


async def test_erasing_reaches_a_message_store_of_the_users_own(memory: Persistence) -> None:
    bag = compose_persistence(memory, overrides={"messages": own_messages()})
    await bag.stores.messages.save_thread("t", [message("a"), message("b")])
    assert await bag.erase_messages("t", ["a"]) == 1
    assert await bag.stores.messages.load_thread("t") == [message("b")]


async def nothing(*_: Any, **__: Any) -> Any:
    return None


RUN_FUNCTIONS = dict.fromkeys(["create_or_resume", "update", "get", "find_active_run"], nothing)


async def test_what_cannot_be_emptied_is_named_before_anything_is_erased(
    memory: Persistence,
) -> None:
    await fill(memory, "t", "r")
    notes = define_metadata_store(get=nothing, set=nothing, delete=nothing)
    runs = define_run_store(**RUN_FUNCTIONS)
    for key, store in (("metadata", notes), ("runs", runs)):
        bag = compose_persistence(memory, overrides={key: store})
        with pytest.raises(CompositionError, match=rf"{key} store \(define_.*delete_thread"):
            await bag.delete_thread("t")
        with pytest.raises(CompositionError, match=rf"{key} store \(define_.*export"):
            await bag.export_thread("t")
    assert [m["id"] for m in await memory.stores.messages.load_thread("t")] == ["t-m"]


async def test_a_store_that_can_forget_a_thread_is_asked_to(memory: Persistence) -> None:
    class Notes:
        forgotten: list[str] = []  # noqa: RUF012  (one test, one class)

        get = set = delete = staticmethod(nothing)

        async def delete_thread(self, thread_id: str) -> bool:
            self.forgotten.append(thread_id)
            return True

    bag = compose_persistence(memory, overrides={"metadata": Notes()})
    assert await bag.delete_thread("t")
    assert Notes.forgotten == ["t"]


async def test_own_activities_are_emptied_through_their_plain_methods(
    memory: Persistence,
) -> None:
    kept = {"t": [ActivityRecord(id="a", activity_type="x", content={}, index=0)]}

    async def load_activities(thread_id: str) -> Any:
        return kept.get(thread_id, [])

    async def save_activities(thread_id: str, rows: Any) -> None:
        kept[thread_id] = list(rows)

    store = define_activity_store(load_activities=load_activities, save_activities=save_activities)
    bag = compose_persistence(memory, overrides={"activities": store})
    assert await bag.delete_thread("t")
    assert kept == {"t": []}


async def test_a_scope_sees_and_deletes_its_own_threads_only(memory: Persistence) -> None:
    tenant = Scope(tenant_id="x")
    views = [memory, memory.scoped(tenant), memory.scoped(Scope(tenant_id="x", user_id="u"))]
    for n, view in enumerate(views):
        await fill(view, "t", "r")
        await view.stores.messages.save_thread(f"t{n}", [])
        await view.stores.activities.save_activities(f"t{n}", [])
    assert await views[1].delete_thread("t")
    assert await views[1].export_thread("t") is None
    for n in (0, 2):
        assert (await views[n].export_thread("t")).runs[0].run_id == "r"
        listed = {info.thread_id for info in (await views[n].list_threads()).threads}
        assert listed == {"t", f"t{n}"}
