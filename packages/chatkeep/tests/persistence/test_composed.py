"""Stores from several places: order, atomic groups, and stores that users wrote themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.backends import Persistence
from chatkeep.compose import compose_persistence
from chatkeep.errors import CompositionError
from chatkeep.memory import memory_persistence
from chatkeep.persistence import hydrate_thread, with_persistence
from chatkeep.records import ActivityRecord, ModelMessage, RunPatch, RunRecord
from chatkeep.testkit.faults import Faults, with_faults

pytestmark = pytest.mark.anyio

KEYS = ("messages", "runs", "interrupts", "activities", "metadata")


class PlainMessages:
    """A user's own two-method store."""

    def __init__(self) -> None:
        self.threads: dict[str, list[ModelMessage]] = {}
        self.saves = 0

    async def load_thread(self, thread_id: str) -> list[ModelMessage]:
        await asyncio.sleep(0)
        return [ModelMessage(**m) for m in self.threads.get(thread_id, [])]

    async def save_thread(self, thread_id: str, messages: Any) -> None:
        await asyncio.sleep(0)
        self.saves += 1
        self.threads[thread_id] = [ModelMessage(**m) for m in messages]


class PlainRuns:
    """A user's own runs store: records in a dict, no leases."""

    def __init__(self) -> None:
        self.runs: dict[str, RunRecord] = {}

    async def create_or_resume(
        self,
        run_id: str,
        thread_id: str,
        *,
        started_at: int,
        status: Any = "running",
        **links: Any,
    ) -> RunRecord:
        return self.runs.setdefault(
            run_id,
            RunRecord(run_id=run_id, thread_id=thread_id, started_at=started_at, status=status),
        )

    async def update(self, run_id: str, patch: RunPatch, **_: Any) -> None:
        if run_id in self.runs:
            self.runs[run_id] = patch.apply(self.runs[run_id])

    async def get(self, run_id: str, *, thread_id: str | None = None) -> RunRecord | None:
        run = self.runs.get(run_id)
        return run if run and thread_id in (None, run.thread_id) else None

    async def find_active_run(self, thread_id: str) -> RunRecord | None:
        running = [
            r for r in self.runs.values() if r.thread_id == thread_id and r.status == "running"
        ]
        return running[-1] if running else None


class PlainActivities:
    def __init__(self) -> None:
        self.rows: dict[str, list[ActivityRecord]] = {}

    async def load_activities(self, thread_id: str) -> list[ActivityRecord]:
        return list(self.rows.get(thread_id, []))

    async def save_activities(self, thread_id: str, activities: Any) -> None:
        self.rows[thread_id] = list(activities)


def two() -> tuple[Persistence, Faults, Persistence, Faults]:
    one, first = with_faults(memory_persistence())
    other, second = with_faults(memory_persistence())
    return one, first, other, second


async def talk(persistence: Persistence, kit: Any, *messages: Any, **options: Any) -> Any:
    from chatkeep.engine import chat
    from chatkeep.testkit.scripted import ScriptedModel, scripted_tools

    middleware = options.pop("middleware", None) or with_persistence(persistence)
    stream = chat(
        adapter=options.pop("adapter", None) or ScriptedModel(),
        messages=list(messages),
        thread_id="t1",
        run_id=options.pop("run_id", "r1"),
        tools=scripted_tools(),
        middleware=[middleware],
        **options,
    )
    return kit.terminal([event async for event in stream])


@pytest.mark.parametrize("key", KEYS)
async def test_every_single_override_works(kit: Any, key: str) -> None:
    one, _, other, _ = two()
    mixed = compose_persistence(one, overrides={key: getattr(other.stores, key)})
    assert isinstance(await talk(mixed, kit, kit.user("u1")), RunFinishedEvent)
    end = await talk(mixed, kit, kit.user("u2", "SCENARIO:server-tool"), run_id="r2")
    assert isinstance(end, RunFinishedEvent)
    body = await hydrate_thread(mixed, "t1", include_runs=True)
    assert [m["role"] for m in body["messages"]] == [
        "user", "assistant", "user", "assistant", "assistant",
    ]  # fmt: skip
    assert [r["status"] for r in body["runs"]] == ["completed", "completed"]
    assert body["activeRun"] is None


@pytest.mark.parametrize("key", ["interrupts", "activities", "metadata"])
async def test_a_store_that_a_turn_does_not_use_costs_no_commit(kit: Any, key: str) -> None:
    one, first, other, second = two()
    mixed = compose_persistence(one, overrides={key: getattr(other.stores, key)})
    await talk(mixed, kit, kit.user("u1"))
    assert first.log == ["read_view", "commit_turn", "commit_turn"]
    assert second.calls["commit_turn"] == 0
    assert second.calls["read_view"] == (0 if key == "metadata" else 1)


async def test_the_transcript_is_written_before_the_run_ends(kit: Any) -> None:
    one, first, other, second = two()
    mixed = compose_persistence(one, overrides={"runs": other.stores.runs})
    model = kit.Paced()
    task = asyncio.create_task(talk(mixed, kit, kit.user("u1"), adapter=model))
    await model.began.wait()
    assert first.calls["commit_turn"] == second.calls["commit_turn"] == 1
    first.stall("commit_turn", seconds=0.05)
    model.go.set()
    while second.calls["commit_turn"] < 2:
        body = await hydrate_thread(mixed, "t1")
        assert body["activeRun"] == {"runId": "r1"}
        await asyncio.sleep(0.002)
    assert [m["role"] for m in await one.stores.messages.load_thread("t1")] == [
        "user",
        "assistant",
    ]
    await task


async def test_a_run_store_that_fails_at_the_finish_leaves_the_answer_stored(kit: Any) -> None:
    one, _, other, second = two()
    mixed = compose_persistence(one, overrides={"runs": other.stores.runs})
    model = kit.Paced()
    task = asyncio.create_task(talk(mixed, kit, kit.user("u1"), adapter=model))
    await model.began.wait()
    second.refuse("commit_turn", times=1000)
    model.go.set()
    assert isinstance(await task, RunErrorEvent)
    second.heal()
    rows = await one.stores.messages.load_thread("t1")
    assert [m["role"] for m in rows] == ["user", "assistant"]
    assert (await other.stores.runs.get("r1")).status == "running"  # until the sweep


async def test_a_lost_reply_of_any_group_is_applied_once(kit: Any) -> None:
    one, first, other, second = two()
    mixed = compose_persistence(one, overrides={"runs": other.stores.runs})
    first.lose_reply("commit_turn", times=5)
    second.lose_reply("commit_turn", times=3)
    end = await talk(mixed, kit, kit.user("u1"))
    assert isinstance(end, RunFinishedEvent)
    rows = await one.stores.messages.load_thread("t1")
    assert [m["role"] for m in rows] == ["user", "assistant"]


async def test_two_turns_at_once_are_both_kept_across_backends(kit: Any) -> None:
    one, _, other, _ = two()
    mixed = compose_persistence(one, overrides={"runs": other.stores.runs})
    for number in range(20):
        await asyncio.gather(
            talk(mixed, kit, kit.user(f"a{number}"), run_id=f"A{number}"),
            talk(mixed, kit, kit.user(f"b{number}"), run_id=f"B{number}"),
        )
    rows = await one.stores.messages.load_thread("t1")
    assert [m["role"] for m in rows] == ["user", "assistant"] * 40


async def test_a_driver_that_lost_its_lease_writes_no_transcript_elsewhere(kit: Any) -> None:
    one, _, other, _ = two()
    mixed = compose_persistence(one, overrides={"runs": other.stores.runs})
    model = kit.Paced()
    task = asyncio.create_task(talk(mixed, kit, kit.user("u1"), adapter=model))
    await model.began.wait()
    lease = (await other.stores.runs.get("r1")).lease
    await other.stores.runs.update(
        "r1", RunPatch(lease=lease.model_copy(update={"token": "theirs"}))
    )
    model.go.set()
    end = await task
    assert end.code == "run-conflict"
    assert [m["role"] for m in await one.stores.messages.load_thread("t1")] == ["user"]


async def test_drafts_follow_the_runs(kit: Any) -> None:
    one, _, other, second = two()
    mixed = compose_persistence(one, overrides={"runs": other.stores.runs})
    middleware = with_persistence(mixed, snapshot_streaming=True)
    model = kit.Paced()
    task = asyncio.create_task(
        talk(mixed, kit, kit.user("u1"), adapter=model, middleware=middleware)
    )
    while second.applied["save_draft"] < 1:  # noqa: ASYNC110 - sets no event
        await asyncio.sleep(0.001)
    body = await hydrate_thread(mixed, "t1")
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
    model.go.set()
    await task
    assert len((await hydrate_thread(mixed, "t1"))["messages"]) == 2


# ----------------------------------------------------------------- stores of users


async def test_messages_alone_are_enough(kit: Any) -> None:
    base = memory_persistence()
    off = dict.fromkeys(("runs", "interrupts", "activities", "metadata"), False)
    bare, faults = with_faults(base)
    bare = compose_persistence(bare, overrides=off)
    assert isinstance(await talk(bare, kit, kit.user("u1")), RunFinishedEvent)
    assert faults.log == ["read_view", "commit_turn", "commit_turn"]
    body = await hydrate_thread(bare, "t1", limit=1)
    assert body["activeRun"] is None
    assert [m["role"] for m in body["messages"]] == ["assistant"]


async def test_a_users_own_message_store_keeps_every_turn(kit: Any) -> None:
    plain = PlainMessages()
    mixed = compose_persistence(memory_persistence(), overrides={"messages": plain})
    for number in range(3):
        end = await talk(mixed, kit, kit.user(f"u{number}"), run_id=f"r{number}")
        assert isinstance(end, RunFinishedEvent)
    assert [m["role"] for m in plain.threads["t1"]] == ["user", "assistant"] * 3
    assert plain.saves == 6


async def test_two_turns_at_once_in_a_store_without_revisions(kit: Any) -> None:
    plain = PlainMessages()
    mixed = compose_persistence(memory_persistence(), overrides={"messages": plain})
    a, b = kit.Paced(after=("A",)), kit.Paced(after=("B",))
    first = asyncio.create_task(talk(mixed, kit, kit.user("uA"), adapter=a, run_id="A"))
    second = asyncio.create_task(talk(mixed, kit, kit.user("uB"), adapter=b, run_id="B"))
    await a.began.wait()
    await b.began.wait()
    a.go.set()
    await first
    b.go.set()
    await second
    texts = [m.get("content") for m in plain.threads["t1"]]
    assert sorted(t for t in texts if t != "hello") == ["one A", "one B"]
    ids = [m["id"] for m in plain.threads["t1"] if m["role"] == "user"]
    assert sorted(ids) == ["uA", "uB"]


async def test_a_regenerate_in_a_users_own_store_waits_for_output_too(kit: Any) -> None:
    plain = PlainMessages()
    plain.threads["t1"] = [kit.user("u1"), kit.assistant("old")]
    mixed = compose_persistence(memory_persistence(), overrides={"messages": plain})
    model = kit.Paced(waits=False, error=RuntimeError("no"))
    await talk(mixed, kit, kit.user("u1"), adapter=model)
    assert [m["id"] for m in plain.threads["t1"]] == ["u1", "old"]
    await talk(mixed, kit, kit.user("u1"), adapter=kit.Paced(waits=False), run_id="r2")
    assert [m["content"] for m in plain.threads["t1"]] == ["hello", "one two"]


async def test_a_users_own_list_store_is_paged_by_message_ids(kit: Any) -> None:
    plain = PlainMessages()
    plain.threads["t1"] = [kit.user(f"m{i}") for i in range(5)]
    mixed = compose_persistence(memory_persistence(), overrides={"messages": plain})
    first = await hydrate_thread(mixed, "t1", limit=2)
    assert [m["id"] for m in first["messages"]] == ["m3", "m4"]
    assert first["page"] == {"truncated": True, "cursor": "m3"}
    second = await hydrate_thread(mixed, "t1", limit=2, before="m3")
    assert [m["id"] for m in second["messages"]] == ["m1", "m2"]
    last = await hydrate_thread(mixed, "t1", limit=2, before="m1")
    assert last["page"] == {"truncated": False}
    unknown = await hydrate_thread(mixed, "t1", limit=2, before="gone")
    assert (unknown["messages"], unknown["page"]) == ([], {"truncated": False})


async def test_a_users_own_runs_store_follows_the_run(kit: Any) -> None:
    plain = PlainRuns()
    mixed = compose_persistence(memory_persistence(), overrides={"runs": plain})
    await talk(mixed, kit, kit.user("u1"))
    run = plain.runs["r1"]
    assert (run.status, run.lease) == ("completed", None)
    assert run.usage is not None
    again = await talk(mixed, kit, kit.user("u1"))
    assert again.code == "run-conflict"
    plain.runs["other"] = RunRecord(run_id="other", thread_id="t2", started_at=1, status="running")
    foreign = await talk(mixed, kit, kit.user("u1"), run_id="other")
    assert foreign.code == "run-conflict"
    assert plain.runs["other"].status == "running"


async def test_a_users_own_activities_store_is_read_back_in_place(kit: Any) -> None:
    plain = PlainActivities()
    plain.rows["t1"] = [ActivityRecord(id="x", activity_type="s", content={}, index=1)]
    mixed = compose_persistence(memory_persistence(), overrides={"activities": plain})
    await talk(mixed, kit, kit.user("u1"))
    body = await hydrate_thread(mixed, "t1")
    assert [m["role"] for m in body["messages"]] == ["user", "activity", "assistant"]


async def test_an_activities_store_that_fails_fails_no_run(kit: Any) -> None:
    class Broken(PlainActivities):
        async def save_activities(self, thread_id: str, activities: Any) -> None:
            raise OSError("disk full")

    told: list[str] = []
    mixed = compose_persistence(memory_persistence(), overrides={"activities": Broken()})
    middleware = with_persistence(mixed, on_persistence_error=lambda phase, _: told.append(phase))
    row = {"id": "x", "role": "activity", "activityType": "s", "content": {"a": 1}}
    end = await talk(mixed, kit, kit.user("u1"), row, middleware=middleware)
    assert isinstance(end, RunFinishedEvent)
    assert set(told) == {"activities"}
    assert middleware.counters["activities_failures"] == len(told)


async def test_posted_activities_are_stored_at_the_start(kit: Any) -> None:
    persistence = memory_persistence()
    row = {"id": "x", "role": "activity", "activityType": "s", "content": {"a": 1}}
    await talk(persistence, kit, kit.user("u1"), row)
    body = await hydrate_thread(persistence, "t1")
    assert [m["role"] for m in body["messages"]] == ["user", "activity", "assistant"]


def test_what_is_missing_is_said_at_once() -> None:
    base = memory_persistence()
    with pytest.raises(CompositionError, match="messages"):
        with_persistence(compose_persistence(base, overrides={"messages": False}))
    with pytest.raises(CompositionError, match="runs"):
        with_persistence(compose_persistence(base, overrides={"runs": False}))
