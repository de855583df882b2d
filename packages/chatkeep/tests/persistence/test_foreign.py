"""Stores without a backend of ours behind them: what each tier of theirs is good for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

import chatkeep.persistence.committer as committer
import chatkeep.persistence.foreign as foreign
from chatkeep.compose import compose_persistence
from chatkeep.errors import InterruptConflict
from chatkeep.memory import memory_persistence
from chatkeep.persistence import hydrate_thread, with_persistence
from chatkeep.persistence.boundary import Boundary
from chatkeep.persistence.layout import chat_layout
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import InterruptRecord
from chatkeep.stores import InterruptAnswer

pytestmark = pytest.mark.anyio


class Hidden:
    """A store of ours of which only some methods are visible, and no backend."""

    def __init__(self, store: Any, *methods: str) -> None:
        for name in methods:
            setattr(self, name, getattr(store, name))


REVISIONED = ("load_thread", "save_thread", "load_transcript", "splice_thread")
INTERRUPTS = (
    "create", "resolve", "cancel", "get", "list", "list_pending", "list_by_run",
    "list_pending_by_run",
)  # fmt: skip
RUNS = ("create_or_resume", "update", "get", "find_active_run", "list_by_thread")


def mixed(key: str, *methods: str) -> tuple[Any, Any]:
    """A persistence with one hidden store of another place, and that place."""
    other = memory_persistence()
    hidden = Hidden(getattr(other.stores, key), *methods)
    return compose_persistence(memory_persistence(), overrides={key: hidden}), other


async def talk(persistence: Any, kit: Any, *messages: Any, **options: Any) -> Any:
    from chatkeep.engine import chat
    from chatkeep.testkit.scripted import ScriptedModel

    stream = chat(
        adapter=options.pop("adapter", None) or ScriptedModel(),
        messages=list(messages),
        thread_id="t1",
        run_id=options.pop("run_id", "r1"),
        middleware=[options.pop("middleware", None) or with_persistence(persistence)],
        **options,
    )
    return kit.terminal([event async for event in stream])


async def test_a_revisioned_store_is_spliced_and_never_saved_whole(kit: Any) -> None:
    persistence, other = mixed("messages", *REVISIONED)

    async def never(*_: Any) -> None:
        raise AssertionError("a whole-thread save")

    persistence.stores.messages.save_thread = never
    end = await talk(persistence, kit, kit.user("u1"))
    assert isinstance(end, RunFinishedEvent)
    assert end.metadata["chatkeep"] == {"seen": 2}
    rows = await other.stores.messages.load_thread("t1")
    assert [m["role"] for m in rows] == ["user", "assistant"]


async def test_two_turns_at_once_are_both_kept_in_a_revisioned_store(kit: Any) -> None:
    persistence, other = mixed("messages", *REVISIONED)
    for number in range(20):
        await asyncio.gather(
            talk(persistence, kit, kit.user(f"a{number}"), run_id=f"A{number}"),
            talk(persistence, kit, kit.user(f"b{number}"), run_id=f"B{number}"),
        )
    rows = await other.stores.messages.load_thread("t1")
    assert [m["role"] for m in rows] == ["user", "assistant"] * 40


async def test_without_an_archive_an_answer_to_a_cut_question_fails_the_run(kit: Any) -> None:
    persistence, other = mixed("messages", *REVISIONED)
    await other.stores.messages.save_thread("t1", [kit.user("m1"), kit.assistant("m2")])
    model = kit.Paced()
    task = asyncio.create_task(talk(persistence, kit, kit.user("uA"), adapter=model))
    await model.began.wait()
    await other.stores.messages.save_thread("t1", [kit.user("m1"), kit.assistant("m2")])
    model.go.set()
    assert isinstance(await task, RunErrorEvent)
    run = await persistence.stores.runs.get("r1")
    assert (run.status, run.error.code) == ("failed", "thread-conflict")


async def test_a_store_of_whole_lists_gets_an_overwritten_question_back(kit: Any) -> None:
    persistence, other = mixed("messages", "load_thread", "save_thread")
    model = kit.Paced()
    task = asyncio.create_task(talk(persistence, kit, kit.user("uA"), adapter=model))
    await model.began.wait()
    await other.stores.messages.save_thread("t1", [kit.user("uB"), kit.assistant("aB")])
    model.go.set()
    assert isinstance(await task, RunFinishedEvent)
    rows = await other.stores.messages.load_thread("t1")
    assert [m["content"] for m in rows] == ["hello", "answer", "hello", "one two"]


async def test_a_draft_is_shown_over_a_foreign_transcript(kit: Any) -> None:
    persistence, _ = mixed("messages", "load_thread", "save_thread")
    middleware = with_persistence(persistence, snapshot_streaming=True)
    model = kit.Paced()
    task = asyncio.create_task(
        talk(persistence, kit, kit.user("u1"), adapter=model, middleware=middleware)
    )
    while middleware.counters["drafts_saved"] < 1:  # noqa: ASYNC110 - sets no event
        await asyncio.sleep(0.001)
    for limit in (None, 5):
        body = await hydrate_thread(persistence, "t1", limit=limit)
        assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
        assert body["activeRun"] == {"runId": "r1"}
    model.go.set()
    await task
    assert len((await hydrate_thread(persistence, "t1"))["messages"]) == 2


@pytest.mark.parametrize("methods", [REVISIONED, ("load_thread", "save_thread")])
async def test_a_running_regenerate_hides_the_old_answer_of_a_foreign_store(
    kit: Any, methods: tuple[str, ...]
) -> None:
    persistence, other = mixed("messages", *methods)
    for _ in range(2):  # so that numbers are no places
        await other.stores.messages.save_thread("t1", [])
        await other.stores.messages.save_thread("t1", [kit.user("u1"), kit.assistant("old")])
    model = kit.Paced()
    task = asyncio.create_task(talk(persistence, kit, kit.user("u1"), adapter=model))
    await model.began.wait()
    body = await hydrate_thread(persistence, "t1")
    assert [m["id"] for m in body["messages"]] == ["u1"]
    model.go.set()
    await task
    body = await hydrate_thread(persistence, "t1")
    assert [m["parts"][0]["content"] for m in body["messages"]] == ["hello", "one two"]


async def test_a_foreign_interrupt_store_gates_and_is_reloaded(kit: Any) -> None:
    persistence, other = mixed("interrupts", *INTERRUPTS)
    record = InterruptRecord(
        interrupt_id="i1", run_id="r0", thread_id="t1", requested_at=1, payload={"x": 1}
    )
    await other.stores.interrupts.create(record)
    end = await talk(persistence, kit, kit.user("u1"))
    assert end.code == "unknown-interrupt"
    body = await hydrate_thread(persistence, "t1")
    assert body["interrupts"] == {"runId": "r0", "pending": [{"x": 1, "owner": True}]}


async def test_a_foreign_runs_store_with_a_history_gives_the_times_of_runs(kit: Any) -> None:
    persistence, _ = mixed("runs", *RUNS)
    await talk(persistence, kit, kit.user("u1"))
    body = await hydrate_thread(persistence, "t1", include_runs=True)
    assert [r["status"] for r in body["runs"]] == ["completed"]
    assert body["messages"][1]["metadata"]["tanstack"]["run"]["startedAt"]


# ------------------------------------------------------------------ answers, one by one


async def work(methods: tuple[str, ...]) -> tuple[UnitOfWork, Any]:
    persistence, other = mixed("interrupts", *methods)
    for number in (1, 2, 3):
        await other.stores.interrupts.create(
            InterruptRecord(
                interrupt_id=f"i{number}",
                run_id="r0",
                thread_id="t1",
                requested_at=number,
                payload={},
            )
        )
    layout = chat_layout(persistence, "test")
    unit = UnitOfWork(layout, "t1", "r1", lease_token=None, reports=Reports(None))
    return unit, other.stores.interrupts


def answer(name: str, **more: Any) -> InterruptAnswer:
    return InterruptAnswer(interrupt_id=name, run_id="r0", **more)


async def test_answers_without_a_batch_commit_are_all_checked_before_the_first_write() -> None:
    unit, store = await work(INTERRUPTS)
    with pytest.raises(InterruptConflict) as caught:
        await unit.commit(Boundary(answers=[answer("i1"), answer("gone")]))
    assert caught.value.interrupt_ids == ("gone",)
    assert len(await store.list_pending("t1")) == 3


async def test_a_failure_between_two_answers_says_what_remains() -> None:
    unit, store = await work(INTERRUPTS)
    resolve = unit.layout.stores.interrupts.resolve

    async def fails(thread_id: str, interrupt_id: str, *rest: Any, **more: Any) -> None:
        if interrupt_id == "i2":
            raise OSError("disk full")
        await resolve(thread_id, interrupt_id, *rest, **more)

    unit.layout.stores.interrupts.resolve = fails
    boundary = Boundary(answers=[answer("i1", response=1), answer("i2", response=2), answer("i3")])
    with pytest.raises(InterruptConflict) as caught:
        await unit.commit(boundary)
    assert caught.value.remaining == ("i2", "i3")
    assert [r.interrupt_id for r in await store.list_pending("t1")] == ["i2", "i3"]


async def test_answers_are_resolved_or_cancelled() -> None:
    unit, store = await work(INTERRUPTS)
    await unit.commit(
        Boundary(answers=[answer("i1", response={"ok": 1}), answer("i2", status="cancelled")])
    )
    found = {r.interrupt_id: (r.status, r.response) for r in await store.list("t1")}
    assert found["i1"] == ("resolved", {"ok": 1})
    assert found["i2"][0] == "cancelled"
    assert found["i3"][0] == "pending"


async def test_a_batch_commit_is_called_once() -> None:
    unit, store = await work((*INTERRUPTS, "commit_batch"))
    await unit.commit(Boundary(answers=[answer("i1"), answer("i2")]))
    assert [r.interrupt_id for r in await store.list_pending("t1")] == ["i3"]


async def test_new_interrupts_are_created_one_by_one_and_never_over_others() -> None:
    unit, _ = await work(INTERRUPTS)
    record = InterruptRecord(
        interrupt_id="i1", run_id="r0", thread_id="t1", requested_at=1, payload={"new": 1}
    )
    with pytest.raises(InterruptConflict):
        await unit.commit(Boundary(interrupts=[record]))


async def test_a_boundary_that_is_sent_again_repeats_nothing(kit: Any) -> None:
    unit, _ = await work(INTERRUPTS)
    record = InterruptRecord(
        interrupt_id="i9", run_id="r1", thread_id="t1", requested_at=1, payload={}
    )
    boundary = Boundary(interrupts=[record])
    await unit.commit(boundary)
    await unit.commit(boundary)  # the identity is taken by now, but nothing is left to write
    assert boundary.parts() == []


class NeverSaves:
    """A messages store that hangs."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def load_thread(self, thread_id: str) -> list[Any]:
        return []

    async def save_thread(self, thread_id: str, messages: Any) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_store_that_never_answers_holds_nobody_for_ever(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails when the call's time is over; a cancelled reader gets away then too."""
    monkeypatch.setattr(foreign, "ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(committer, "OUTAGE_PAUSES", (0.0,))
    store = NeverSaves()
    persistence = compose_persistence(memory_persistence(), overrides={"messages": store})
    end = await talk(persistence, kit, kit.user("u1"))
    assert (end.type, end.code) == ("RUN_ERROR", "backend-unavailable")
    run = await persistence.stores.runs.get("r1")
    assert run is not None
    assert (run.status, run.error.code) == ("failed", "backend-unavailable")

    store.asked.clear()
    reader = asyncio.create_task(talk(persistence, kit, kit.user("u1"), run_id="r2"))
    await store.asked.wait()
    reader.cancel()
    done, _ = await asyncio.wait({reader}, timeout=10)
    assert done
    run = await persistence.stores.runs.get("r2")
    assert run is not None
    assert run.status == "aborted"
