"""Whatever an adapter yields, the stream stays well-formed and says what is stored."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import pytest
from ag_ui.core import (
    CustomEvent,
    ReasoningEncryptedValueEvent,
    ReasoningEndEvent,
    ReasoningMessageChunkEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    RunErrorEvent,
    RunFinishedEvent,
    RunStartedEvent,
    StepFinishedEvent,
    StepStartedEvent,
    TextMessageChunkEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallChunkEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep.engine import DROP, ChatContext, ChatMiddleware, Event, chat, define_tool
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

IDS = st.sampled_from(["", "a", "b", "u1", "old"])
DELTAS = st.sampled_from(["", "x", "{}", '{"k":1}', "é\U0001f600", "\ud83d", "\ude00"])
NAMES = st.sampled_from(["t", "fails", "unknown", " "])


def built(model: Any, **fields: Any) -> st.SearchStrategy[Event]:
    # Not st.builds: it would fill the camelCase aliases too.
    return st.fixed_dictionaries(fields).map(lambda values: model(**values))


EVENTS: st.SearchStrategy[Event] = st.one_of(
    built(TextMessageStartEvent, message_id=IDS),
    built(TextMessageContentEvent, message_id=IDS, delta=DELTAS),
    built(TextMessageEndEvent, message_id=IDS),
    built(TextMessageChunkEvent, message_id=st.none() | IDS, delta=st.none() | DELTAS),
    built(ToolCallStartEvent, tool_call_id=IDS, tool_call_name=NAMES, parent_message_id=IDS),
    built(ToolCallArgsEvent, tool_call_id=IDS, delta=DELTAS),
    built(ToolCallEndEvent, tool_call_id=IDS),
    built(ToolCallEndEvent, tool_call_id=IDS, input=st.just({"k": 2})),
    built(ToolCallEndEvent, tool_call_id=IDS, result=st.just("done")),
    built(
        ToolCallChunkEvent,
        tool_call_id=st.none() | IDS,
        tool_call_name=st.none() | NAMES,
        delta=st.none() | DELTAS,
    ),
    built(ToolCallResultEvent, message_id=IDS, tool_call_id=IDS, content=DELTAS),
    built(ReasoningStartEvent, message_id=IDS),
    built(ReasoningMessageStartEvent, message_id=IDS, role=st.just("reasoning")),
    built(ReasoningMessageContentEvent, message_id=IDS, delta=DELTAS),
    built(ReasoningMessageChunkEvent, message_id=st.none() | IDS, delta=st.none() | DELTAS),
    built(ReasoningMessageEndEvent, message_id=IDS),
    built(ReasoningEndEvent, message_id=IDS),
    built(
        ReasoningEncryptedValueEvent,
        subtype=st.sampled_from(["message", "tool-call"]),
        entity_id=IDS,
        encrypted_value=st.just("S"),
    ),
    built(StepStartedEvent, step_name=IDS),
    built(StepFinishedEvent, step_name=IDS),
    built(StepFinishedEvent, step_name=IDS, signature=st.just("S")),
    built(CustomEvent, name=IDS, value=st.none() | st.just({"a": None})),
    built(RunStartedEvent, thread_id=IDS, run_id=IDS),
)
ENDS: st.SearchStrategy[list[Event]] = st.one_of(
    st.sampled_from(["stop", "tool_calls", "length"]).map(
        lambda reason: [RunFinishedEvent(thread_id="p", run_id="p", finishReason=reason)]
    ),
    st.just([RunErrorEvent(message="failed")]),
    st.just([]),
)
TURNS = st.builds(lambda events, end: [*events, *end], st.lists(EVENTS, max_size=12), ENDS)


def _fails(_: Any) -> None:
    raise RuntimeError("no")


TOOLS = [define_tool(name="t", execute=lambda _: 1), define_tool(name="fails", execute=_fails)]
HISTORY: list[Any] = [
    {"id": "old", "role": "assistant", "content": "before"},
    {"id": "u1", "role": "user", "content": "hi"},
]


def play(turns: list[list[Event]], *middleware: ChatMiddleware) -> tuple[list[Any], list[Any]]:
    """Events of a run as JSON, and its new rows."""
    trace = TraceMiddleware()

    async def main() -> list[Event]:
        stream = chat(
            adapter=PlayedModel(*turns),
            messages=HISTORY,
            tools=TOOLS,
            middleware=[*middleware, trace],
            loop=len(turns),
        )
        return await asyncio.wait_for(collect(stream), 30)

    events = asyncio.run(main())
    check_events(events)
    assert trace.context is not None
    rows: list[Any] = trace.context.messages[len(HISTORY) :]
    return [e.model_dump(mode="json", by_alias=True) for e in events], rows


@settings(max_examples=200, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=3))
def test_any_stream_becomes_a_valid_one_that_equals_the_stored_rows(
    turns: list[list[Event]],
) -> None:
    events, rows = play(turns)
    texts: dict[str, str] = defaultdict(str)
    arguments: dict[str, str] = defaultdict(str)
    thoughts: dict[str, str] = defaultdict(str)
    results: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "TEXT_MESSAGE_CONTENT":
            texts[event["messageId"]] += event["delta"]
        elif kind == "REASONING_MESSAGE_CONTENT":
            thoughts[event["messageId"]] += event["delta"]
        elif kind == "TOOL_CALL_START":
            owners[event["toolCallId"]] = event["parentMessageId"]
        elif kind == "TOOL_CALL_ARGS":
            arguments[event["toolCallId"]] += event["delta"]
        elif kind == "TOOL_CALL_RESULT":
            results[event["messageId"]] = event
    identities = [row["id"] for row in rows]
    assert len(identities) == len(set(identities))
    assert not {"u1", "old", ""} & set(identities)
    for row in rows:
        if row["role"] == "tool":
            event = results.pop(row["id"])
            assert event["content"] == row["content"]
            assert event["toolCallId"] == row["toolCallId"]
            assert ("error" in row) == ("metadata" in event)
            continue
        assert (row["content"] or "") == texts.pop(row["id"], "")
        for entry in row.get("thinking", []):
            assert entry["content"] == thoughts.pop(entry["id"], "")
        for call in row.get("toolCalls", []):
            assert owners[call["id"]] == row["id"]
            written = call["function"]["arguments"]
            streamed = arguments[call["id"]]
            if written != (streamed or "{}"):
                # The adapter gave other arguments parsed, at the end.
                assert json.loads(written) == {"k": 2}
    if events[-1]["type"] == "RUN_FINISHED":
        assert not texts
        assert not results


@settings(max_examples=100, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=2), st.data())
def test_any_hook_that_drops_doubles_or_aborts_leaves_a_valid_stream(
    turns: list[list[Event]], data: st.DataObject
) -> None:
    class Meddles(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            match data.draw(st.integers(0, 9)):
                case 0 if not isinstance(event, TextMessageStartEvent):
                    return DROP
                case 1:
                    return [event, event]
                case 2:
                    ctx.emit_custom_event("noise", {})
                case 3 if data.draw(st.booleans()):
                    ctx.abort("fuzz")
            return None

    class Quiet(Meddles):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            # A custom event that emits another for each of its kind would never end.
            return None if isinstance(event, CustomEvent) else await super().on_chunk(ctx, event)

    play(turns, Quiet())


@pytest.mark.parametrize("end", [{"result": "done"}, {}], ids=["by the provider", "by a tool"])
def test_the_result_of_a_call_whose_start_was_dropped_is_not_published(end: Any) -> None:
    """A strict reader knows no such call; the rows are stored all the same."""

    class Hides(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            return DROP if isinstance(event, ToolCallStartEvent) else None

    turn: list[Event] = [
        ToolCallStartEvent(tool_call_id="a", tool_call_name="t"),
        ToolCallEndEvent(tool_call_id="a", **end),
        RunFinishedEvent(
            thread_id="t", run_id="r", metadata={"tanstack": {"finishReason": "tool_calls"}}
        ),
    ]
    stop: list[Event] = [RunFinishedEvent(thread_id="t", run_id="r")]
    events, rows = play([turn, stop], Hides())
    assert not [e for e in events if e["type"].startswith("TOOL_CALL")]
    assert "tool" in [row["role"] for row in rows]


def test_a_doubled_result_is_published_once() -> None:
    """A call has one result on the wire, as in the store."""

    class Doubles(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            return [event, event] if isinstance(event, ToolCallResultEvent) else None

    turn: list[Event] = [
        ToolCallStartEvent(tool_call_id="a", tool_call_name="t"),
        ToolCallEndEvent(tool_call_id="a", result="done"),
        RunFinishedEvent(thread_id="t", run_id="r"),
    ]
    events, _ = play([turn], Doubles())
    assert [e["type"] for e in events].count("TOOL_CALL_RESULT") == 1


def test_a_call_whose_end_was_dropped_is_ended_before_its_result() -> None:
    """A strict reader refuses the result of a call that is still open."""

    class Hides(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            return DROP if isinstance(event, ToolCallEndEvent) else None

    turn: list[Event] = [
        ToolCallStartEvent(tool_call_id="a", tool_call_name="t"),
        ToolCallEndEvent(tool_call_id="a", result="done"),
        RunFinishedEvent(thread_id="t", run_id="r"),
    ]
    events, _ = play([turn], Hides())
    calls = [e["type"] for e in events if e["type"].startswith("TOOL_CALL")]
    assert calls[-2:] == ["TOOL_CALL_END", "TOOL_CALL_RESULT"]
