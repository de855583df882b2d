"""Activity rows of runs: stored at every end, in their places, beside what others store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ag_ui.core import (
    ActivityDeltaEvent,
    ActivitySnapshotEvent,
    BaseEvent,
    RunErrorEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.backends import Persistence
from chatkeep.compose import compose_persistence, define_activity_store
from chatkeep.engine import ModelRequest, client_tool, model_finished, resume_output
from chatkeep.memory import memory_persistence
from chatkeep.persistence import hydrate_thread
from chatkeep.records import ActivityRecord

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg")

WAIT = object()


def snapshot(name: str, found: int = 0, **more: Any) -> BaseEvent:
    return ActivitySnapshotEvent(
        message_id=name, activity_type="search", content={"found": found}, **more
    )


def delta(name: str, found: int) -> BaseEvent:
    patch: Any = [{"op": "replace", "path": "/found", "value": found}]
    return ActivityDeltaEvent(message_id=name, activity_type="search", patch=patch)


class Shows:
    """A model that yields what it is given; at ``WAIT`` it waits for ``go``."""

    provider, model = "shows", "shows-1"

    def __init__(self, *steps: Any, error: Exception | None = None, text: str = "done") -> None:
        self.steps, self.error, self.text = steps, error, text
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        self.requests.append(request)
        for step in self.steps:
            if step is WAIT:
                self.reached.set()
                await self.go.wait()
            elif isinstance(step, str):
                yield TextMessageStartEvent(message_id=request.message_id)
                yield TextMessageContentEvent(message_id=request.message_id, delta=step)
            else:
                yield step
        if self.error is not None:
            raise self.error
        if self.text:
            yield TextMessageStartEvent(message_id=request.message_id)
            yield TextMessageContentEvent(message_id=request.message_id, delta=self.text)
            yield TextMessageEndEvent(message_id=request.message_id)
        yield model_finished(request, "stop")


async def stored(lab: Any) -> list[ActivityRecord]:
    rows = await lab.persistence.stores.activities.load_activities("t1")
    return list(rows)


async def found(lab: Any) -> list[tuple[str, int]]:
    return [(r.id, r.content["found"]) for r in await stored(lab)]


async def shown(lab: Any, **options: Any) -> list[str]:
    """A page load, one word a message: activity rows by id, the others by role."""
    body = await hydrate_thread(lab.persistence, "t1", **options)
    return [m["id"] if m["role"] == "activity" else m["role"] for m in body["messages"]]


async def test_a_finished_run_keeps_its_rows_where_they_came(lab: Any, kit: Any) -> None:
    """Between the question and the answer, over a second turn, and never in a model's input."""
    row = snapshot("x", metadata={"note": 1})
    await lab.turn(kit.user("u1"), adapter=Shows(row, delta("x", 3)))
    (record,) = await stored(lab)
    assert (record.content, record.anchor, record.index) == ({"found": 3}, "u1", 1)
    assert (record.metadata, record.run_id) == ({"note": 1}, "r1")
    assert await shown(lab) == ["user", "x", "assistant"]
    second = Shows()
    # An older browser posts a row that it hydrated as an assistant that says nothing.
    answer = (await lab.ids())[-1]
    posted = [kit.user("u1"), {"id": "x", "role": "assistant"}, kit.assistant(answer, "done")]
    await lab.turn(*posted, kit.user("u2"), adapter=second)
    assert [m.get("role") for m in second.requests[0].messages] == ["user", "assistant", "user"]
    assert await shown(lab) == ["user", "x", "assistant", "user", "assistant"]


async def test_a_page_load_shows_a_row_as_a_message_with_one_part(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"), adapter=Shows(snapshot("x", metadata={"note": 1})))
    body = await hydrate_thread(lab.persistence, "t1")
    part = {"type": "activity", "activityType": "search", "content": {"found": 0}}
    assert body["messages"][1] == {
        "id": "x",
        "role": "activity",
        "parts": [part],
        "metadata": {"note": 1},
    }


async def test_a_failed_run_keeps_its_rows(lab: Any, kit: Any) -> None:
    model = Shows(snapshot("x"), delta("x", 2), error=RuntimeError("no"))
    assert isinstance(kit.terminal(await lab.turn(kit.user("u1"), adapter=model)), RunErrorEvent)
    assert await found(lab) == [("x", 2)]
    assert await shown(lab) == ["user", "x"]


async def test_a_row_behind_an_answer_that_was_not_kept_follows_what_was(
    lab: Any, kit: Any
) -> None:
    model = Shows("par", snapshot("x"), error=RuntimeError("no"))
    await lab.turn(kit.user("u1"), adapter=model)
    (record,) = await stored(lab)
    assert record.anchor == "u1"
    await lab.turn(kit.user("u1"), kit.user("u2"), adapter=Shows())
    assert await shown(lab) == ["user", "x", "user", "assistant"]


async def test_a_stopped_run_keeps_its_rows(lab: Any, kit: Any) -> None:
    model = Shows(snapshot("x"), WAIT)
    task = lab.start(kit.user("u1"), adapter=model)
    await model.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = await lab.run("r1")
    assert run is not None
    assert run.status == "aborted"
    assert await shown(lab) == ["user", "x"]


async def test_a_pause_keeps_them_and_its_continuation_goes_on_with_them(
    lab: Any, kit: Any
) -> None:
    calls = (
        snapshot("x"),
        ToolCallStartEvent(tool_call_id="c1", tool_call_name="ask"),
        ToolCallEndEvent(tool_call_id="c1"),
    )

    class Asks(Shows):
        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            for event in calls:
                yield event
            yield model_finished(request, "tool_calls")

    tools = {"client_tools": [], "middleware": [lab.middleware()]}
    ask = client_tool("ask")
    events = await run_with(lab, kit.user("u1"), adapter=Asks(), tools=[ask], **tools)
    assert isinstance(events[-1], RunFinishedEvent)
    assert await found(lab) == [("x", 0)]
    assert await shown(lab) == ["user", "x", "assistant"]
    events = await run_with(
        lab,
        adapter=Shows(delta("x", 7), snapshot("y")),
        tools=[ask],
        resume=[resume_output("client_tool_c1", "blue")],
        **tools,
    )
    assert isinstance(events[-1], RunFinishedEvent)
    assert await found(lab) == [("x", 7), ("y", 0)]
    assert await shown(lab) == ["user", "x", "assistant", "y", "assistant"]


async def run_with(lab: Any, *messages: Any, tools: Sequence[Any], **options: Any) -> Any:
    from chatkeep.engine import chat

    lab.runs += 1
    options.pop("client_tools", None)
    stream = chat(
        messages=list(messages), thread_id="t1", run_id=f"r{lab.runs}", tools=tools, **options
    )
    return [event async for event in stream]


# ----------------------------------------------------------------------- while it streams


async def test_with_snapshots_rows_are_there_while_the_run_streams(lab: Any, kit: Any) -> None:
    """Also before any text, and around the draft once there is some."""
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    model = Shows(snapshot("x"), WAIT)
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.reached.wait()
    await until(lambda: has(lab, ("x", 0)))
    assert await shown(lab) == ["user", "x"]
    model.go.set()
    await task
    assert await shown(lab) == ["user", "x", "assistant"]


async def test_a_row_stands_before_the_draft_of_the_answer(lab: Any, kit: Any) -> None:
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    model = Shows(snapshot("x"), "par", snapshot("y"), delta("x", 4), WAIT)
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.reached.wait()
    await until(lambda: has(lab, ("x", 4), ("y", 0)))
    await lab.until(lambda: keep.counters["drafts_saved"] > 0)
    assert await shown(lab) == ["user", "x", "assistant", "y"]
    assert await shown(lab, limit=1) == ["y"]
    # A question and the draft of its answer are never torn apart.
    assert await shown(lab, limit=2) == ["user", "x", "assistant", "y"]
    model.go.set()
    await task
    assert await shown(lab) == ["user", "x", "assistant", "y"]


async def test_without_snapshots_nothing_is_written_in_between(lab: Any, kit: Any) -> None:
    model = Shows(snapshot("x"), WAIT)
    task = lab.start(kit.user("u1"), adapter=model)
    await model.reached.wait()
    assert await found(lab) == []
    model.go.set()
    await task
    assert await found(lab) == [("x", 0)]


async def test_a_write_in_between_that_fails_is_told_and_made_good_at_the_end(
    lab: Any, kit: Any
) -> None:
    told: list[str] = []
    keep = lab.middleware(
        snapshot_streaming=True,
        snapshot_interval_ms=0,
        on_persistence_error=lambda phase, _: told.append(phase),
    )
    model = Shows(WAIT, snapshot("x"), text="")
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.reached.wait()
    lab.faults.refuse("commit_turn", times=1)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert await found(lab) == [("x", 0)]
    assert set(told) <= {"activities"}


async def until(ready: Any) -> None:
    while not await ready():  # noqa: ASYNC110 - a store sets no event
        await asyncio.sleep(0.002)


async def has(lab: Any, *rows: tuple[str, int]) -> bool:
    return sorted(await found(lab)) == sorted(rows)


# -------------------------------------------------------------------- cuts and other tabs


async def test_a_regenerate_replaces_the_rows_of_the_answer_when_it_is_stored(
    lab: Any, kit: Any
) -> None:
    """Until then a reader sees the new run's rows and not the old ones."""
    await lab.turn(kit.user("u1"), adapter=Shows(snapshot("old")))
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    model = Shows(snapshot("new"), WAIT)
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.reached.wait()
    await until(lambda: has(lab, ("old", 0), ("new", 0)))
    assert await shown(lab) == ["user", "new"]
    assert await shown(lab, limit=5) == ["user", "new"]
    model.go.set()
    await task
    assert await found(lab) == [("new", 0)]
    assert await shown(lab) == ["user", "new", "assistant"]


async def test_a_regenerate_that_fails_cuts_no_row_and_keeps_its_own(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"), adapter=Shows(snapshot("old")))
    await lab.turn(kit.user("u1"), adapter=Shows(snapshot("new"), error=RuntimeError("no")))
    assert await found(lab) == [("old", 0), ("new", 0)]
    assert await shown(lab) == ["user", "old", "new", "assistant"]


async def test_an_edit_keeps_the_rows_of_the_turns_before_it(lab: Any, kit: Any) -> None:
    """Also the one at the end of the last of them: it was shown for that answer."""
    await lab.turn(kit.user("u1"), adapter=Shows("said", snapshot("x"), text=""))
    answer = (await lab.ids())[-1]
    shown_so_far = [kit.user("u1"), kit.assistant(answer, "said")]
    await lab.turn(*shown_so_far, kit.user("u2"), adapter=Shows(snapshot("y")))
    assert await shown(lab) == ["user", "assistant", "x", "user", "y", "assistant"]
    await lab.turn(*shown_so_far, kit.user("edit"), adapter=Shows(snapshot("z")))
    assert await shown(lab) == ["user", "assistant", "x", "user", "z", "assistant"]
    assert await found(lab) == [("x", 0), ("z", 0)]


@pytest.mark.parametrize("snapshots", [False, True])
async def test_two_tabs_keep_both_their_rows_each_behind_its_question(
    lab: Any, kit: Any, snapshots: bool
) -> None:
    options = {"snapshot_streaming": snapshots, "snapshot_interval_ms": 0} if snapshots else {}
    one = Shows(snapshot("x"), WAIT, delta("x", 1))
    two = Shows(snapshot("y"), WAIT, delta("y", 2))
    tasks = []
    for name, model in (("u1", one), ("u2", two)):
        tasks.append(lab.start(kit.user(name), adapter=model, middleware=lab.middleware(**options)))
        await model.reached.wait()
    two.go.set()
    await tasks[1]
    one.go.set()
    await tasks[0]
    assert sorted(await found(lab)) == [("x", 1), ("y", 2)]
    assert await shown(lab) == ["user", "x", "assistant", "user", "y", "assistant"]


async def test_a_failing_run_does_not_overwrite_the_rows_of_another_tab(lab: Any, kit: Any) -> None:
    """Its last commit has no messages that could conflict."""
    one = Shows(snapshot("x"), WAIT, error=RuntimeError("no"))
    task = lab.start(kit.user("u1"), adapter=one)
    await one.reached.wait()
    await lab.turn(kit.user("u2"), adapter=Shows(snapshot("y")))
    one.go.set()
    await task
    assert sorted(await found(lab)) == [("x", 0), ("y", 0)]
    assert await shown(lab) == ["user", "x", "user", "y", "assistant"]


async def test_a_turn_that_was_cut_meanwhile_leaves_no_rows(lab: Any, kit: Any) -> None:
    """Its answer belongs to the cut; rows have no archive."""
    await lab.fill(kit.user("u0"), kit.assistant("a0"))
    model = Shows(snapshot("x"), WAIT)
    task = lab.start(kit.user("u0"), kit.assistant("a0"), kit.user("u1"), adapter=model)
    await model.reached.wait()
    store = lab.persistence.stores.messages
    transcript = await store.load_transcript("t1")
    await store.splice_thread("t1", keep=2, tail=[kit.user("u2")], expected=transcript.revision)
    model.go.set()
    await task
    assert await found(lab) == []
    assert await shown(lab) == ["user", "assistant", "user"]


async def test_windows_show_each_row_once_and_in_its_place(lab: Any, kit: Any) -> None:
    posted: list[Any] = []
    for n in range(6):
        posted.append(kit.user(f"u{n}"))
        rows = [snapshot(f"x{n}"), snapshot(f"y{n}")] if n % 2 else []
        await lab.turn(*posted, adapter=Shows(*rows))
        posted.append(kit.assistant((await lab.ids())[-1], "done"))
    whole = await hydrate_thread(lab.persistence, "t1")
    names = [m["id"] for m in whole["messages"]]
    assert names[2:6] == ["u1", "x1", "y1", names[5]]
    for limit in range(1, 7):
        pages: list[str] = []
        before = None
        while True:
            body = await hydrate_thread(lab.persistence, "t1", limit=limit, before=before)
            pages = [m["id"] for m in body["messages"]] + pages
            if not body["page"]["truncated"]:
                break
            before = body["page"]["cursor"]
        assert pages == names


async def test_a_window_of_a_long_thread_reads_no_more_for_its_rows(lab: Any, kit: Any) -> None:
    """Rows that name their message need no count from the start of the thread."""
    await lab.fill(*(kit.user(f"m{n}") for n in range(200)))
    rows = [
        ActivityRecord(id=f"x{n}", activity_type="t", content={}, index=0, anchor=f"m{n}")
        for n in range(0, 200, 10)
    ]
    await lab.persistence.stores.activities.save_activities("t1", rows)
    lab.faults.calls.clear()
    body = await hydrate_thread(lab.persistence, "t1", limit=3)
    assert [m["id"] for m in body["messages"]] == ["m197", "m198", "m199"]
    body = await hydrate_thread(lab.persistence, "t1", limit=9, before=body["page"]["cursor"])
    names = ["m189", "m190", "x190", *(f"m{n}" for n in range(191, 197))]
    assert [m["id"] for m in body["messages"]] == names
    assert lab.faults.calls["read_view"] == 2


async def test_a_row_whose_message_was_erased_is_shown_at_its_index(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"))
    gone = ActivityRecord(id="x", activity_type="t", content={}, index=1, anchor="gone")
    other = ActivityRecord(id="y", activity_type="t", content={}, index=0)
    await lab.persistence.stores.activities.save_activities("t1", [gone, other])
    assert await shown(lab) == ["y", "x", "user", "assistant"]


# ---------------------------------------------------------------- composed and own stores


async def test_rows_may_live_in_another_backend(persistence: Persistence, kit: Any) -> None:
    other = memory_persistence()
    lab = kit.Lab(persistence)
    lab.persistence = compose_persistence(
        lab.persistence, overrides={"activities": other.stores.activities}
    )
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    model = Shows(snapshot("x"), WAIT, delta("x", 2))
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.reached.wait()
    await until(lambda: has(lab, ("x", 0)))
    model.go.set()
    await task
    posted = [kit.user("u1"), kit.assistant((await lab.ids())[-1], "done"), kit.user("u2")]
    failing = Shows(snapshot("y"), error=RuntimeError("no"))
    await lab.turn(*posted, adapter=failing)
    assert await found(lab) == [("x", 2), ("y", 0)]
    assert await shown(lab) == ["user", "x", "assistant", "user", "y"]


class Own:
    """Two functions of an application: the whole store."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.saves = 0
        self.broken = False
        self.slow: asyncio.Event | None = None

    async def load(self, thread_id: str) -> list[ActivityRecord]:
        return [ActivityRecord.from_json(row) for row in self.rows.get(thread_id, [])]

    async def save(self, thread_id: str, rows: Sequence[ActivityRecord]) -> None:
        if self.broken:
            raise OSError("disk full")
        kept = [row.to_json() for row in rows]
        slow, self.slow = self.slow, None
        if slow is not None:
            await slow.wait()
        self.saves += 1
        self.rows[thread_id] = kept

    def lab(self, persistence: Persistence, kit: Any) -> Any:
        store = define_activity_store(load_activities=self.load, save_activities=self.save)
        lab = kit.Lab(persistence)
        lab.persistence = compose_persistence(lab.persistence, overrides={"activities": store})
        return lab


async def test_two_functions_are_enough(persistence: Persistence, kit: Any) -> None:
    own = Own()
    lab = own.lab(persistence, kit)
    await lab.turn(kit.user("u1"), adapter=Shows(snapshot("x"), delta("x", 3)))
    assert own.rows["t1"] == [
        {
            "id": "x",
            "activityType": "search",
            "content": {"found": 3},
            "index": 1,
            "anchor": "u1",
            "runId": "r1",
        }
    ]
    assert own.saves == 1
    await lab.turn(kit.user("u1"), adapter=Shows(snapshot("y")))
    assert [row["id"] for row in own.rows["t1"]] == ["y"]
    assert await shown(lab) == ["user", "y", "assistant"]


async def test_a_store_of_ones_own_that_fails_fails_no_run_and_is_told(
    persistence: Persistence, kit: Any
) -> None:
    own = Own()
    lab = own.lab(persistence, kit)
    own.broken = True
    told: list[tuple[str, str]] = []
    keep = lab.middleware(on_persistence_error=lambda p, e: told.append((p, str(e))))
    events = await lab.turn(kit.user("u1"), adapter=Shows(snapshot("x")), middleware=keep)
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert told == [("activities", "disk full")]
    assert keep.counters["activities_failures"] == 1
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]


async def test_a_slow_write_of_a_store_of_ones_own_never_comes_after_the_last(
    persistence: Persistence, kit: Any
) -> None:
    """Such a store cannot refuse what comes too late, so the end of the run waits for it."""
    own = Own()
    lab = own.lab(persistence, kit)
    release = own.slow = asyncio.Event()
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    model = Shows(snapshot("x"), WAIT, delta("x", 5))
    task = lab.start(kit.user("u1"), adapter=model, middleware=keep)
    await model.reached.wait()
    await lab.until(lambda: own.slow is None)
    model.go.set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert own.saves == 0
    release.set()
    await task
    assert own.saves == 2
    assert await found(lab) == [("x", 5)]


async def test_rows_that_no_store_takes_are_dropped_once_and_the_others_kept(
    lab: Any, kit: Any
) -> None:
    """The engine refuses what is no JSON; what a middleware makes of the list is checked here."""
    from chatkeep.engine import ChatConfig, ChatContext, ChatMiddleware

    class Spoils(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Any:
            if ctx.phase == "init":
                return None
            bad = ActivityRecord(id="bad", activity_type="t", content={"v": float("nan")}, index=1)
            return {"activities": [*config.activities, bad]}

    keep = lab.middleware()
    model = Shows(snapshot("x"))
    events = await lab.turn(kit.user("u1"), adapter=model, middleware=[keep, Spoils()])
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert await found(lab) == [("x", 0)]
    assert keep.counters["activities_dropped"] == 1
