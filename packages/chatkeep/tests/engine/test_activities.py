"""ACTIVITY_SNAPSHOT and ACTIVITY_DELTA: rows beside the transcript, never worth a failed run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from ag_ui.core import (
    ActivityDeltaEvent,
    ActivitySnapshotEvent,
    CustomEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.delivery import encode_event
from chatkeep.engine import (
    DROP,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    Event,
    ModelRequest,
    ToolCallInfo,
    chat,
    define_tool,
    model_finished,
)
from chatkeep.records import ActivityRecord
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio


def snapshot(name: str = "x", content: Any = None, **more: Any) -> ActivitySnapshotEvent:
    body = {"found": 0} if content is None else content
    more.setdefault("activity_type", "search")
    return ActivitySnapshotEvent(message_id=name, content=body, **more)


def delta(*patch: Any, name: str = "x", kind: str = "search", **more: Any) -> ActivityDeltaEvent:
    return ActivityDeltaEvent(message_id=name, activity_type=kind, patch=list(patch), **more)


def replace(path: str, value: Any) -> dict[str, Any]:
    return {"op": "replace", "path": path, "value": value}


def saying(*before: Event, within: tuple[Event, ...] = (), after: tuple[Event, ...] = ()) -> Any:
    async def turn(request: ModelRequest) -> Any:
        for event in before:
            yield event
        yield TextMessageStartEvent(message_id="m1")
        yield TextMessageContentEvent(message_id="m1", delta="hello")
        for event in within:
            yield event
        yield TextMessageEndEvent(message_id="m1")
        for event in after:
            yield event
        yield model_finished(request, "stop")

    return turn


async def run(
    *turns: Any, middleware: Any = (), messages: Any = None, tools: Any = (), **options: Any
) -> tuple[list[Event], TraceMiddleware, PlayedModel]:
    trace, model = TraceMiddleware(), PlayedModel(*turns)
    stream = chat(
        adapter=model,
        messages=messages or [{"id": "u1", "role": "user", "content": "go"}],
        run_id="r1",
        tools=tools,
        middleware=[*middleware, trace],
        **options,
    )
    events = await collect(stream)
    check_events(events)
    assert isinstance(events[-1], RunFinishedEvent)
    return events, trace, model


def rows(trace: TraceMiddleware) -> list[ActivityRecord]:
    assert trace.context is not None
    return trace.context.activities


def activity_events(events: list[Event]) -> list[Event]:
    return [e for e in events if isinstance(e, ActivitySnapshotEvent | ActivityDeltaEvent)]


async def test_a_snapshot_and_its_deltas_become_one_row_behind_the_message_before_it() -> None:
    done = {"op": "add", "path": "/done", "value": True}
    events, trace, model = await run(saying(snapshot(), delta(replace("/found", 3), done)))
    (row,) = rows(trace)
    assert row.to_json() == {
        "id": "x",
        "activityType": "search",
        "content": {"found": 3, "done": True},
        "index": 1,
        "anchor": "u1",
        "runId": "r1",
    }
    assert len(activity_events(events)) == 2
    assert [m.get("id") for m in model.requests[0].messages] == ["u1"]
    assert trace.context is not None
    assert [m.get("id") for m in trace.context.messages] == ["u1", "m1"]


async def test_a_row_that_comes_while_a_message_streams_stands_behind_that_message() -> None:
    _, trace, _ = await run(saying(within=(snapshot("x"), snapshot("y"))))
    assert [(r.id, r.anchor, r.index) for r in rows(trace)] == [("x", "m1", 2), ("y", "m1", 3)]


async def test_a_row_of_a_tool_stands_behind_the_message_of_its_call() -> None:
    """Wherever the tool stands in the batch: results are parts of that message."""

    async def calls(request: ModelRequest) -> Any:
        for name in ("c1", "c2"):
            yield ToolCallStartEvent(
                tool_call_id=name, tool_call_name="work", parent_message_id="m0"
            )
            yield ToolCallEndEvent(tool_call_id=name)
        yield model_finished(request, "tool_calls")

    class Reports(ChatMiddleware):
        async def on_before_tool_call(self, ctx: ChatContext, call: ToolCallInfo) -> None:
            ctx.emit_custom_event("working", {"on": call.tool_call_id})

        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            if isinstance(event, CustomEvent):
                return [event, snapshot(f"row-{event.value['on']}")]
            return None

    _, trace, _ = await run(
        calls,
        saying(),
        tools=[define_tool(name="work", execute=lambda _: 1)],
        middleware=[Reports()],
        messages=[{"id": "u1", "role": "user", "content": "go"}],
    )
    assert [(r.id, r.anchor, r.index) for r in rows(trace)] == [
        ("row-c1", "m0", 2), ("row-c2", "m0", 3),
    ]  # fmt: skip


async def test_a_snapshot_replaces_the_row_and_keeps_its_place() -> None:
    again = snapshot("x", {"other": 1}, activity_type="plan")
    _, trace, _ = await run(saying(snapshot(), within=(again,)))
    (row,) = rows(trace)
    assert (row.content, row.activity_type) == ({"other": 1}, "plan")
    assert (row.anchor, row.index) == ("u1", 1)


async def test_replace_false_keeps_the_row_that_is_there_and_makes_one_that_is_not() -> None:
    first = snapshot("x", {"n": 1}, replace=False)
    again = snapshot("x", {"n": 2}, replace=False, metadata={"late": True})
    events, trace, _ = await run(saying(first, again))
    (row,) = rows(trace)
    assert row.content == {"n": 1}
    assert row.metadata is None
    assert len(activity_events(events)) == 2


async def test_metadata_is_merged_into_the_row_its_bag_one_level_deeper() -> None:
    first = snapshot(metadata={"a": 1, "tanstack": {"one": 1}})
    then = delta(replace("/found", 1), metadata={"b": 2, "tanstack": {"two": 2}})
    _, trace, _ = await run(saying(first, then))
    (row,) = rows(trace)
    assert row.metadata == {"a": 1, "b": 2, "tanstack": {"one": 1, "two": 2}}


async def test_fields_that_ag_ui_does_not_know_are_in_the_rows_metadata_as_on_the_wire() -> None:
    events, trace, _ = await run(saying(snapshot(model="m")))
    assert rows(trace)[0].metadata == {"tanstack": {"model": "m"}}
    assert activity_events(events)[0].metadata == {"tanstack": {"model": "m"}}


async def test_a_row_of_a_child_run_says_whose_it_is() -> None:
    _, trace, _ = await run(saying(snapshot(subagent_run_id="child")))
    assert rows(trace)[0].subagent_run_id == "child"


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (delta(replace("/found", 9), kind="plan"), "activityType"),
        (delta(replace("/found", 9), replace("/nothing", 1)), "nothing"),
        (delta({"op": "test", "path": "/found", "value": 7}, replace("/found", 9)), "not equal"),
        (delta(replace("", [1, 2])), "no object"),
        (delta(replace("/found", float("nan"))), "NaN"),
        (delta(replace("/found", 9), metadata={"bad": object()}), "metadata"),
        (snapshot("u1"), "a message"),
        (snapshot("m1"), "a message"),
        (snapshot("", {}), "messageId"),
        (snapshot("n" * 1025), "messageId"),
        (snapshot("x", {"v": float("inf")}), "content"),
    ],
)
async def test_what_cannot_be_applied_changes_nothing_and_is_not_published(
    event: Event, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All of a patch or nothing; clients would disagree about the rest. The run goes on."""
    with caplog.at_level(logging.WARNING, logger="chatkeep.engine"):
        events, trace, _ = await run(saying(snapshot(), within=(event,)))
    assert [(r.id, r.content, r.metadata) for r in rows(trace)] == [("x", {"found": 0}, None)]
    assert len(activity_events(events)) == 1
    assert "is ignored" in caplog.text
    assert why in caplog.text


async def test_a_delta_for_a_row_that_nobody_here_knows_is_published() -> None:
    """Its reader may know it from an earlier run."""
    events, trace, _ = await run(saying(delta(replace("/found", 1), name="elsewhere")))
    assert rows(trace) == []
    assert len(activity_events(events)) == 1


async def test_a_patch_to_null_is_null_in_the_row_and_on_the_wire() -> None:
    events, trace, _ = await run(saying(snapshot(), delta(replace("/found", None))))
    assert rows(trace)[0].content == {"found": None}
    sent = json.loads(encode_event(activity_events(events)[1]))
    assert sent["patch"] == [{"op": "replace", "path": "/found", "value": None}]


async def test_rows_share_nothing_with_the_events_that_made_them() -> None:
    content: dict[str, Any] = {"list": []}
    value: dict[str, Any] = {"n": 1}
    _, trace, _ = await run(
        saying(snapshot("x", content), delta({"op": "add", "path": "/list/-", "value": value}))
    )
    content["list"].append("later")
    value["n"] = 2
    assert rows(trace)[0].content == {"list": [{"n": 1}]}


async def test_hooks_inject_rewrite_and_drop_what_becomes_a_row() -> None:
    class Hooks(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            if isinstance(event, TextMessageStartEvent):
                return [snapshot("injected"), event]
            if isinstance(event, ActivitySnapshotEvent) and event.message_id == "dropped":
                return DROP
            if isinstance(event, ActivitySnapshotEvent) and event.message_id == "x":
                return snapshot("x", {"by": "hook"})
            return None

    _, trace, _ = await run(saying(snapshot("dropped"), snapshot("x")), middleware=[Hooks()])
    assert [(r.id, r.content) for r in rows(trace)] == [
        ("x", {"by": "hook"}), ("injected", {"found": 0}),
    ]  # fmt: skip


async def test_lists_and_records_are_replaced_never_changed() -> None:
    seen: list[list[ActivityRecord]] = []

    class Watches(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            seen.append(ctx.activities)

    _, trace, _ = await run(
        saying(snapshot("x"), snapshot("y"), delta(replace("/found", 1))), middleware=[Watches()]
    )
    assert [[(r.id, r.content["found"]) for r in found] for found in seen if found][:2] == [
        [("x", 0)], [("x", 0), ("y", 0)],
    ]  # fmt: skip
    first, last = seen[-1], rows(trace)
    assert [(r.id, r.content["found"]) for r in last] == [("x", 1), ("y", 0)]
    assert first[1] is last[1]


async def test_hooks_see_the_rows_in_every_config_and_may_exchange_them() -> None:
    configs: list[list[str]] = []

    class Prunes(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
            configs.append([r.id for r in config.activities])
            if len(configs) == 3:
                return {"activities": [r for r in config.activities if r.id != "x"]}
            return None

    async def calls(request: ModelRequest) -> Any:
        yield snapshot("x")
        yield snapshot("y")
        yield ToolCallStartEvent(tool_call_id="c1", tool_call_name="work")
        yield ToolCallEndEvent(tool_call_id="c1")
        yield model_finished(request, "tool_calls")

    _, trace, _ = await run(
        calls,
        saying(snapshot("z")),
        tools=[define_tool(name="work", execute=lambda _: 1)],
        middleware=[Prunes()],
    )
    assert configs == [[], [], ["x", "y"]]
    assert [r.id for r in rows(trace)] == ["y", "z"]


async def test_a_row_that_is_emitted_before_the_run_is_configured_is_not_lost() -> None:
    class Early(ChatMiddleware):
        async def setup(self, ctx: ChatContext) -> None:
            ctx.emit_custom_event("hello", {})

        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            if isinstance(event, CustomEvent):
                return [event, snapshot("x"), delta(replace("/found", 1))]
            return None

    _, trace, _ = await run(saying(), middleware=[Early()])
    (row,) = rows(trace)
    assert (row.content, row.anchor, row.index) == ({"found": 1}, "u1", 1)


async def test_posted_rows_are_taken_out_of_the_messages_and_may_be_patched() -> None:
    posted = [
        {"id": "u0", "role": "user", "content": "before"},
        {"id": "x", "role": "activity", "activityType": "search", "content": {"found": 0}},
        {"id": "u1", "role": "user", "content": "go"},
    ]
    _, trace, model = await run(saying(delta(replace("/found", 5))), messages=posted)
    (row,) = rows(trace)
    assert (row.content, row.anchor, row.index) == ({"found": 5}, "u0", 1)
    assert [m.get("role") for m in model.requests[0].messages] == ["user", "user"]


async def test_a_posted_row_with_the_id_of_a_message_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A reader could not tell them apart; the same for what a middleware puts in."""

    class Doubles(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
            if ctx.phase == "init":
                return None
            row = ActivityRecord(id="u1", activity_type="t", content={}, index=0)
            return {"activities": [*config.activities, row]}

    posted = [
        {"id": "u1", "role": "activity", "activityType": "search", "content": {"found": 0}},
        {"id": "x", "role": "activity", "activityType": "search", "content": {"found": 0}},
        {"id": "u1", "role": "user", "content": "go"},
    ]
    _, trace, _ = await run(saying(), messages=posted, middleware=[Doubles()])
    assert [r.id for r in rows(trace)] == ["x"]
    assert caplog.text.count("a message has that id") == 2


async def test_no_message_gets_the_id_of_a_row() -> None:
    """Not even one that the provider names so later."""
    _, trace, _ = await run(saying(snapshot("m1")))
    assert trace.context is not None
    assert [r.id for r in rows(trace)] == ["m1"]
    assert trace.context.messages[-1]["id"] != "m1"
