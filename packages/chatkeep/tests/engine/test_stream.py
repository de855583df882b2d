"""Rules of the stream: what is published, in which order, under which ids."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ag_ui.core import (
    ActivitySnapshotEvent,
    CustomEvent,
    MessagesSnapshotEvent,
    RawEvent,
    ReasoningEncryptedValueEvent,
    ReasoningEndEvent,
    ReasoningMessageChunkEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    RunErrorEvent,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    RunStartedEvent,
    StateDeltaEvent,
    StateSnapshotEvent,
    StepFinishedEvent,
    StepStartedEvent,
    TextMessageChunkEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TokenUsage,
    ToolCallArgsEvent,
    ToolCallChunkEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import Event, ModelRequest, chat, define_tool, model_finished
from chatkeep.records import ModelMessage
from chatkeep.scope import check_id
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
OK = define_tool(name="ok", execute=lambda _: {"done": True})


def done(reason: str | None = "stop", **more: Any) -> Event:
    extra = {} if reason is None else {"finishReason": reason}
    return RunFinishedEvent(thread_id="x", run_id="y", **extra, **more)


def said(identity: str, *deltas: str) -> list[Event]:
    return [
        TextMessageStartEvent(message_id=identity),
        *[TextMessageContentEvent(message_id=identity, delta=delta) for delta in deltas],
        TextMessageEndEvent(message_id=identity),
    ]


def called(identity: str, name: str = "ok", arguments: str = "{}", parent: str = "") -> list[Event]:
    return [
        ToolCallStartEvent(
            tool_call_id=identity, tool_call_name=name, parent_message_id=parent or None
        ),
        ToolCallArgsEvent(tool_call_id=identity, delta=arguments),
        ToolCallEndEvent(tool_call_id=identity),
    ]


class Played:
    """One run: its events as JSON, its transcript, what the model was given."""

    def __init__(self, events: list[Event], trace: TraceMiddleware, model: PlayedModel) -> None:
        self.events: list[Json] = [e.model_dump(mode="json", by_alias=True) for e in events]
        self.trace = trace
        self.model = model
        assert trace.context is not None
        self.context = trace.context
        self.rows: list[Any] = list(trace.context.messages)

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def of(self, kind: str) -> list[Json]:
        return [event for event in self.events if event["type"] == kind]

    def assistants(self) -> list[Any]:
        return [row for row in self.rows if row["role"] == "assistant"]


async def play(
    *turns: Any, history: Sequence[Any] = (), tools: Sequence[Any] = (OK,), **options: Any
) -> Played:
    model = PlayedModel(*turns)
    trace = TraceMiddleware()
    stream = chat(
        adapter=model,
        messages=[*history, {"id": "u1", "role": "user", "content": "hi"}],
        thread_id="t",
        run_id="r",
        tools=tools,
        middleware=[trace],
        **options,
    )
    events = await collect(stream)
    check_events(events)
    return Played(events, trace, model)


# ------------------------------------------------------------------ the frame of a run


async def test_run_started_names_thread_run_parent_and_protocol() -> None:
    run = await play([done()], parent_run_id="r0")
    first = run.events[0]
    assert first["type"] == "RUN_STARTED"
    assert (first["threadId"], first["runId"], first["parentRunId"]) == ("t", "r", "r0")
    assert first["protocolVersion"] == "1.0"


async def test_fresh_ids_are_made_when_none_are_given() -> None:
    stream = chat(adapter=PlayedModel([done()]), messages=[])
    assert stream.thread_id.startswith("thread-")
    assert stream.run_id.startswith("run-")
    events = await collect(stream)
    assert events[0].model_dump(by_alias=True)["threadId"] == stream.thread_id


async def test_an_adapters_own_run_events_are_absorbed() -> None:
    run = await play(
        [RunStartedEvent(thread_id="p", run_id="p"), *called("c"), done("tool_calls")],
        [RunStartedEvent(thread_id="p", run_id="p"), *said("m2", "x"), done()],
    )
    assert run.types().count("RUN_STARTED") == 1
    assert run.types().count("RUN_FINISHED") == 1
    assert run.events[-1]["runId"] == "r"
    assert run.trace.lines.count("chunk:RUN_STARTED@modelStream") == 2


async def test_the_terminal_has_one_usage_entry_per_model_call_and_no_tool_calls_reason() -> None:
    def usage(n: int) -> list[TokenUsage]:
        return [TokenUsage(model=f"m{n}", input_tokens=n, output_tokens=1, total_tokens=n + 1)]

    run = await play(
        [*called("c"), done("tool_calls", usage=usage(1))],
        [*said("m", "x"), done("stop", usage=usage(2))],
    )
    terminal = run.events[-1]
    assert [u["inputTokens"] for u in terminal["usage"]] == [1, 2]
    assert [u["model"] for u in terminal["usage"]] == ["m1", "m2"]
    assert terminal["metadata"]["tanstack"]["finishReason"] == "stop"
    assert run.trace.finish is not None
    assert run.trace.finish.usage == {
        "promptTokens": 3,
        "completionTokens": 2,
        "totalTokens": 5,
    }


async def test_usage_that_nobody_reported_is_absent() -> None:
    run = await play([*said("m", "x"), done()])
    assert "usage" not in run.events[-1]
    assert run.trace.finish is not None
    assert run.trace.finish.usage is None
    assert run.trace.usages == []


async def test_costs_that_agui_cannot_carry_stay_in_the_bag() -> None:
    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        yield model_finished(request, "stop", usage={"promptTokens": 4, "cost": 0.5})

    run = await play(turn)
    terminal = run.events[-1]
    assert terminal["usage"] == [{"inputTokens": 4}]
    assert terminal["metadata"]["tanstack"]["usage"] == {"cost": 0.5}
    assert run.trace.usages == [{"promptTokens": 4, "cost": 0.5}]


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
async def test_the_finish_reason_of_the_last_turn_is_on_the_terminal(reason: str) -> None:
    run = await play([*said("m", "x"), done(reason)])
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == reason
    assert run.trace.finish is not None
    assert run.trace.finish.finish_reason == reason


@pytest.mark.parametrize("reason", [None, "strange"])
async def test_an_unknown_finish_reason_is_none(reason: str | None) -> None:
    run = await play([*said("m", "x"), done(reason)])
    assert "finishReason" not in run.events[-1]["metadata"]["tanstack"]
    assert run.trace.finish is not None
    assert run.trace.finish.finish_reason is None


async def test_the_finish_reason_is_found_in_the_bag_too() -> None:
    finished = RunFinishedEvent(
        thread_id="x", run_id="y", metadata={"tanstack": {"finishReason": "length"}}
    )
    run = await play([*said("m", "x"), finished])
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == "length"


async def test_calls_without_tools_are_failed_results_and_the_loop_goes_on() -> None:
    """A call that stays open would break the next turn at a provider."""
    run = await play([*called("c"), done("tool_calls")], [*said("m", "x"), done()], tools=())
    (result,) = run.of("TOOL_CALL_RESULT")
    assert result["content"] == '{"error":"Unknown tool: ok"}'
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == "stop"
    assert [row["role"] for row in run.rows] == ["user", "assistant", "tool", "assistant"]
    assert run.rows[2]["error"] == "Unknown tool: ok"
    assert run.model.requests[1].messages[-1]["toolCallId"] == "c"


async def test_calls_without_tools_end_with_the_turn_limit() -> None:
    turns = [[*called(f"c{i}"), done("tool_calls")] for i in range(9)]
    run = await play(*turns, tools=())
    assert len(run.model.requests) == 5
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == "length"


async def test_calls_that_the_provider_answered_ask_for_no_turn_without_tools() -> None:
    result = ToolCallResultEvent(message_id="r", tool_call_id="c", content="1", role="tool")
    run = await play([*called("c"), result, done("tool_calls")], tools=())
    assert len(run.model.requests) == 1
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == "stop"


async def test_calls_under_another_finish_reason_are_not_executed() -> None:
    run = await play([*called("c"), done("stop")])
    assert run.of("TOOL_CALL_RESULT") == []
    assert run.rows[-1]["toolCalls"][0]["id"] == "c"


async def test_the_turn_limit_is_five_calls_and_ends_with_length() -> None:
    turns = [[*called(f"c{i}"), done("tool_calls")] for i in range(9)]
    run = await play(*turns)
    assert len(run.model.requests) == 5
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == "length"
    assert len(run.of("TOOL_CALL_RESULT")) == 5


async def test_a_strategy_decides_on_the_loop_state() -> None:
    seen: list[tuple[int, int, int]] = []

    def strategy(state: Any) -> bool:
        seen.append((state.iteration_count, state.tool_call_count, state.last_turn_tool_call_count))
        return bool(state.iteration_count < 2)

    first = [*called("a"), *called("b"), done("tool_calls")]
    run = await play(first, [*called("c"), done("tool_calls")], loop=strategy)
    assert seen == [(1, 2, 2), (2, 3, 1)]
    assert len(run.model.requests) == 2


async def test_metadata_of_the_last_call_and_of_hooks_reaches_the_terminal() -> None:
    run = await play([*said("m", "x"), done("stop", metadata={"mine": 1}, responseId="resp-1")])
    assert run.events[-1]["metadata"]["mine"] == 1
    assert run.events[-1]["metadata"]["tanstack"]["responseId"] == "resp-1"
    assert run.rows[-1]["metadata"]["tanstack"]["responseId"] == "resp-1"


# ------------------------------------------------------------------------------ texts


async def test_the_row_has_the_streamed_id_text_and_time_of_its_start() -> None:
    run = await play([*said("m1", "Hel", "lo"), done()])
    (row,) = run.assistants()
    assert (row["id"], row["content"]) == ("m1", "Hello")
    start = run.of("TEXT_MESSAGE_START")[0]
    assert start["role"] == "assistant"
    assert row["createdAt"].endswith("Z")
    assert row["metadata"]["tanstack"]["source"] == {"provider": "played", "model": "played-1"}


async def test_a_slow_answer_has_the_time_at_which_it_began() -> None:
    """Not that of its end, nor of its storage."""

    async def slow(_: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id="m")
        for delta in "abc":
            await asyncio.sleep(0.03)
            yield TextMessageContentEvent(message_id="m", delta=delta)
        yield done()

    run = await play(slow)
    began = run.of("TEXT_MESSAGE_START")[0]["timestamp"]
    created = dt.datetime.fromisoformat(run.assistants()[0]["createdAt"]).timestamp() * 1000
    assert abs(created - began) < 30
    assert run.events[-1]["timestamp"] - created > 60


async def test_the_adapter_may_use_the_id_it_is_offered() -> None:
    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        for event in said(request.message_id, "x"):
            yield event
        yield done()

    run = await play(turn)
    assert run.rows[-1]["id"] == run.model.requests[0].message_id
    assert run.of("TEXT_MESSAGE_START")[0]["messageId"] == run.rows[-1]["id"]


async def test_empty_ids_are_absent_ids() -> None:
    """A text start with id "" does not hide the usable parent id, nor glue two turns."""
    run = await play(
        [
            TextMessageStartEvent(message_id=""),
            TextMessageContentEvent(message_id="", delta="one"),
            *called("c1", parent="a1"),
            TextMessageEndEvent(message_id=""),
            done("tool_calls"),
        ],
        [*said("", "two"), done()],
    )
    first, second = run.assistants()
    assert first["id"]
    assert second["id"]
    assert first["id"] != second["id"]
    assert (first["content"], second["content"]) == ("one", "two")
    starts = [e["messageId"] for e in run.of("TEXT_MESSAGE_START")]
    assert starts == [first["id"], second["id"]]


@pytest.mark.parametrize("odd", ["m" * 1025, "\U0001f600" * 257, "a\x00b", "a\ud800"])
async def test_an_id_that_no_store_takes_is_an_absent_id(odd: str) -> None:
    """Else the answer could be shown, but not be stored."""
    run = await play(
        [ReasoningMessageStartEvent(message_id=odd), *called("c1", parent=odd), done("tool_calls")],
        [*said(odd, "text"), done()],
    )
    for row in run.assistants():
        check_id(row["id"], "id")
        check_id(row.get("thinking", [row])[0]["id"], "id")
    assert {e["messageId"] for e in run.of("TEXT_MESSAGE_START")} == {
        row["id"] for row in run.assistants()
    }


async def test_a_call_id_may_be_as_long_as_its_provider_needs() -> None:
    """Some keep a signature in it, and want it back."""
    long, odd = "call_" + "x" * 5000, "c\ud800"
    run = await play([*called(long), *called(odd), done("tool_calls")], [done()])
    first, second = [row["toolCallId"] for row in run.rows if row["role"] == "tool"]
    assert first == long
    assert second.startswith("call-")


async def test_a_parent_id_names_a_turn_that_only_calls_tools() -> None:
    run = await play([*called("c1", parent="a1"), done("tool_calls")], [done()])
    assert run.types()[1:5] == [
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_END",
        "TOOL_CALL_START",
        "TOOL_CALL_ARGS",
    ]
    assert run.events[1]["messageId"] == run.events[3]["parentMessageId"] == "a1"
    (row,) = run.assistants()
    assert (row["id"], row["content"]) == ("a1", None)


@pytest.mark.parametrize("taken", ["u1", "old", "thought"])
async def test_an_id_of_the_thread_is_not_used_again(taken: str) -> None:
    history = [
        {
            "id": "old",
            "role": "assistant",
            "content": "x",
            "thinking": [{"id": "thought", "content": "t"}],
        }
    ]
    run = await play([*said(taken, "new"), done()], history=history)
    row = run.rows[-1]
    assert row["id"] != taken
    assert run.of("TEXT_MESSAGE_CONTENT")[0]["messageId"] == row["id"]


async def test_one_id_in_two_turns_makes_two_rows_with_two_ids() -> None:
    """A provider that reuses its message id within one run loses nothing."""
    run = await play([*said("x", "a"), *called("c"), done("tool_calls")], [*said("x", "b"), done()])
    first, second = run.assistants()
    assert first["id"] == "x"
    assert second["id"] != "x"
    assert (first["content"], second["content"]) == ("a", "b")


async def test_a_second_text_in_one_turn_continues_the_first() -> None:
    """One assistant row per model turn: live and stored show the same bubble."""
    run = await play([*said("m1", "before "), *called("c"), *said("m2", "after"), done("stop")])
    (row,) = run.assistants()
    assert row["content"] == "before after"
    assert {e["messageId"] for e in run.of("TEXT_MESSAGE_START")} == {"m1"}


async def test_content_without_a_start_is_given_one() -> None:
    run = await play([TextMessageContentEvent(message_id="m1", delta="x"), done()])
    assert run.types()[1:4] == ["TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END"]
    assert run.rows[-1]["id"] == "m1"


async def test_a_second_start_and_a_lone_end_are_left_out() -> None:
    start = TextMessageStartEvent(message_id="m1")
    end = TextMessageEndEvent(message_id="m1")
    run = await play([start, start, end, end, done()])
    assert run.types()[1:-1] == ["TEXT_MESSAGE_START", "TEXT_MESSAGE_END"]


async def test_empty_deltas_are_left_out() -> None:
    run = await play([*said("m1", "", "x", ""), done()])
    assert [e["delta"] for e in run.of("TEXT_MESSAGE_CONTENT")] == ["x"]


async def test_a_cumulative_content_replaces_what_was_gathered() -> None:
    run = await play(
        [
            TextMessageStartEvent(message_id="m"),
            TextMessageContentEvent(message_id="m", delta="Hel", content="Hel"),
            TextMessageContentEvent(message_id="m", delta="", content="Hello"),
            TextMessageEndEvent(message_id="m"),
            done(),
        ]
    )
    assert [e["delta"] for e in run.of("TEXT_MESSAGE_CONTENT")] == ["Hel", "lo"]
    assert run.rows[-1]["content"] == "Hello"


async def test_a_character_split_over_two_deltas_is_put_together() -> None:
    run = await play([*said("m", "a\ud83d", "\ude00b", "\ud83d"), done()])
    assert run.rows[-1]["content"] == "a\U0001f600b\ufffd"
    streamed = "".join(e["delta"] for e in run.of("TEXT_MESSAGE_CONTENT"))
    assert streamed == run.rows[-1]["content"]


async def test_lone_surrogates_become_replacement_characters() -> None:
    run = await play([*said("m", "a\ude00b\ud83dc"), done()])
    assert run.rows[-1]["content"] == "a\ufffdb\ufffdc"


@pytest.mark.parametrize("halves", [("\ud83d", "\ude00"), ("\\ud83d", "\\ude00")])
async def test_a_character_split_over_two_pieces_of_arguments_is_put_together(
    halves: tuple[str, str],
) -> None:
    """Also when the halves come as JSON escapes."""
    seen: list[Any] = []
    echo = define_tool(name="echo", execute=seen.append)
    run = await play(
        [
            ToolCallStartEvent(tool_call_id="c", tool_call_name="echo"),
            ToolCallArgsEvent(tool_call_id="c", delta='{"q":"a' + halves[0]),
            ToolCallArgsEvent(tool_call_id="c", delta=halves[1] + 'b"}'),
            ToolCallEndEvent(tool_call_id="c"),
            done("tool_calls"),
        ],
        [done()],
        tools=[echo],
    )
    assert seen == [{"q": "a\U0001f600b"}]
    streamed = "".join(e["delta"] for e in run.of("TOOL_CALL_ARGS"))
    (call,) = run.assistants()[0]["toolCalls"]
    assert call["function"]["arguments"] == streamed
    assert json.loads(streamed.encode()) == seen[0]


async def test_half_a_character_at_the_end_of_arguments_is_shown_as_it_is_stored() -> None:
    run = await play(
        [
            ToolCallStartEvent(tool_call_id="c", tool_call_name="ok"),
            ToolCallArgsEvent(tool_call_id="c", delta='{"q":"\ud83d'),
            ToolCallEndEvent(tool_call_id="c"),
            done("tool_calls"),
        ],
        [done()],
    )
    streamed = "".join(e["delta"] for e in run.of("TOOL_CALL_ARGS"))
    (call,) = run.assistants()[0]["toolCalls"]
    assert call["function"]["arguments"] == streamed == '{"q":"\ufffd'
    assert "error" in next(row for row in run.rows if row["role"] == "tool")


async def test_half_a_character_in_an_error_breaks_no_encoder() -> None:
    async def broken(_: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id="m")
        raise ConnectionError("bad \ud83d")

    for failing in ([RunErrorEvent(message="bad \ud83d", code="c\ud83d")], broken):
        run = await play(failing)
        assert run.events[-1]["message"] == "bad \ufffd"
        json.dumps(run.events, ensure_ascii=False).encode()


async def test_text_chunks_become_whole_messages() -> None:
    run = await play(
        [
            TextMessageChunkEvent(message_id="m", delta="Hel"),
            TextMessageChunkEvent(delta="lo"),
            done(),
        ]
    )
    assert run.types()[1:-1] == [
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
    ]
    assert (run.rows[-1]["id"], run.rows[-1]["content"]) == ("m", "Hello")


async def test_a_turn_that_says_nothing_leaves_no_row() -> None:
    assert (await play([done()])).assistants() == []
    assert (await play([*said("m"), done()])).assistants() == []


async def test_a_text_of_many_deltas_is_whole() -> None:
    deltas = [f"{i} " for i in range(20_000)]
    run = await play([*said("m", *deltas), done()])
    assert run.rows[-1]["content"] == "".join(deltas)
    assert run.trace.finish is not None
    assert run.trace.finish.content == "".join(deltas)


# ------------------------------------------------------------------------- tool calls


async def test_the_result_row_has_an_id_of_its_own_and_the_live_event_names_it() -> None:
    run = await play([*called("c1"), done("tool_calls")], [*said("m", "x"), done()])
    (result,) = run.of("TOOL_CALL_RESULT")
    row = next(row for row in run.rows if row["role"] == "tool")
    assert result["messageId"] == row["id"] != run.assistants()[0]["id"]
    assert result["role"] == "tool"
    assert result["content"] == row["content"] == '{"done":true}'
    assert "metadata" not in result
    assert "error" not in row


async def test_a_call_id_of_the_thread_is_not_used_again() -> None:
    """Providers number their calls anew in each turn; a result must find one call only."""
    history: list[Any] = [
        {
            "id": "a0",
            "role": "assistant",
            "content": None,
            "toolCalls": [
                {"id": "call_0", "type": "function", "function": {"name": "ok", "arguments": "{}"}}
            ],
        },
        {"id": "t0", "role": "tool", "toolCallId": "call_0", "content": "1"},
    ]
    run = await play(
        [*called("call_0"), done("tool_calls")],
        [*called("call_0"), done("tool_calls")],
        [*said("m", "x"), done()],
        history=history,
    )
    ids = [call["id"] for row in run.assistants() for call in row.get("toolCalls", [])]
    assert len(ids) == len(set(ids)) == 3
    assert [e["toolCallId"] for e in run.of("TOOL_CALL_RESULT")] == ids[1:]
    assert [e["toolCallId"] for e in run.of("TOOL_CALL_ARGS")] == ids[1:]


async def test_calls_without_ids_get_their_own() -> None:
    run = await play([*called(""), *called(""), done("tool_calls")], [done()])
    ids = [call["id"] for call in run.assistants()[0]["toolCalls"]]
    assert len(set(ids)) == 2
    assert all(ids)
    assert len(run.of("TOOL_CALL_RESULT")) == 2


async def test_a_second_start_does_not_reset_arguments() -> None:
    start = ToolCallStartEvent(tool_call_id="c", tool_call_name="ok")
    run = await play(
        [
            start,
            ToolCallArgsEvent(tool_call_id="c", delta='{"a":'),
            start,
            ToolCallArgsEvent(tool_call_id="c", delta="1}"),
            ToolCallEndEvent(tool_call_id="c"),
            done("tool_calls"),
        ],
        [done()],
    )
    (call,) = run.assistants()[0]["toolCalls"]
    assert call["function"]["arguments"] == '{"a":1}'


async def test_a_call_without_a_name_is_left_out() -> None:
    run = await play([*called("c", name=" "), done("tool_calls")])
    assert run.of("TOOL_CALL_START") == []
    assert run.events[-1]["metadata"]["tanstack"]["finishReason"] == "stop"


async def test_a_missing_end_is_supplied_with_the_parsed_input() -> None:
    run = await play(
        [
            ToolCallStartEvent(tool_call_id="c", tool_call_name="ok"),
            ToolCallArgsEvent(tool_call_id="c", delta='{"a":1}'),
            done("tool_calls"),
        ],
        [done()],
    )
    (end,) = run.of("TOOL_CALL_END")
    assert end["metadata"]["tanstack"]["input"] == {"a": 1}


async def test_a_result_of_a_call_that_was_not_ended_ends_it() -> None:
    run = await play(
        [
            ToolCallStartEvent(tool_call_id="c", tool_call_name="search"),
            ToolCallResultEvent(message_id="r1", tool_call_id="c", content="found"),
            ToolCallEndEvent(tool_call_id="c"),
            done(),
        ]
    )
    kinds = [kind for kind in run.types() if kind.startswith("TOOL")]
    assert kinds == ["TOOL_CALL_START", "TOOL_CALL_END", "TOOL_CALL_RESULT"]
    assert [row["content"] for row in run.rows if row["role"] == "tool"] == ["found"]


async def test_parsed_input_wins_over_other_streamed_text_but_keeps_equal_text() -> None:
    def call(identity: str, text: str, given: Any) -> list[Event]:
        return [
            ToolCallStartEvent(tool_call_id=identity, tool_call_name="ok"),
            ToolCallArgsEvent(tool_call_id=identity, delta=text),
            ToolCallEndEvent(tool_call_id=identity, input=given),
        ]

    run = await play(
        [
            *call("a", '{ "x": 1 }', {"x": 1}),
            *call("b", '{"x":', {"x": 2}),
            *call("c", '{"x":3}', "no object"),
            done("stop"),
        ]
    )
    texts = [call["function"]["arguments"] for call in run.assistants()[0]["toolCalls"]]
    assert texts == ['{ "x": 1 }', '{"x":2}', "{}"]


async def test_cumulative_arguments_replace_what_was_gathered() -> None:
    run = await play(
        [
            ToolCallStartEvent(tool_call_id="c", tool_call_name="ok"),
            ToolCallArgsEvent(tool_call_id="c", delta='{"a"', args='{"a"'),
            ToolCallArgsEvent(tool_call_id="c", delta=":1}", args='{"a":1}'),
            ToolCallEndEvent(tool_call_id="c"),
            done("stop"),
        ]
    )
    assert run.assistants()[0]["toolCalls"][0]["function"]["arguments"] == '{"a":1}'
    assert all("metadata" not in e for e in run.of("TOOL_CALL_ARGS"))


async def test_tool_chunks_become_whole_calls() -> None:
    run = await play(
        [
            ToolCallChunkEvent(tool_call_id="a", tool_call_name="ok", delta='{"x":'),
            ToolCallChunkEvent(delta="1}"),
            ToolCallChunkEvent(tool_call_id="b", tool_call_name="ok", delta="{}"),
            done("tool_calls"),
        ],
        [done()],
    )
    calls = run.assistants()[0]["toolCalls"]
    assert [c["function"]["arguments"] for c in calls] == ['{"x":1}', "{}"]
    assert len(run.of("TOOL_CALL_END")) == 2


async def test_metadata_of_a_call_is_kept_without_the_transports() -> None:
    start = ToolCallStartEvent(
        tool_call_id="c",
        tool_call_name="ok",
        metadata={"thoughtSignature": "S", "tanstack": {"model": "m"}},
    )
    run = await play([start, ToolCallEndEvent(tool_call_id="c"), done("stop")])
    assert run.assistants()[0]["toolCalls"][0]["metadata"] == {"thoughtSignature": "S"}
    (signed,) = run.of("REASONING_ENCRYPTED_VALUE")
    assert (signed["subtype"], signed["entityId"], signed["encryptedValue"]) == (
        "tool-call",
        "c",
        "S",
    )


async def test_what_the_provider_executes_is_recorded_and_not_executed() -> None:
    run = await play(
        [
            ToolCallStartEvent(
                tool_call_id="p", tool_call_name="web", metadata={"providerExecuted": True}
            ),
            ToolCallEndEvent(tool_call_id="p", result={"hits": 2}),
            ToolCallStartEvent(tool_call_id="q", tool_call_name="web"),
            ToolCallEndEvent(tool_call_id="q"),
            ToolCallResultEvent(
                message_id="",
                tool_call_id="q",
                content='{"error":"down"}',
                metadata={"tanstack": {"state": "output-error"}},
            ),
            *said("m", "found"),
            done("tool_calls"),
        ],
        [*said("m2", "end"), done()],
    )
    results = run.of("TOOL_CALL_RESULT")
    assert [r["content"] for r in results] == ['{"hits":2}', '{"error":"down"}']
    rows = [row for row in run.rows if row["role"] == "tool"]
    assert [row["id"] for row in rows] == [r["messageId"] for r in results]
    assert rows[1]["error"] == "down"
    roles = [row["role"] for row in run.rows]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert not any(line.startswith("onBeforeToolCall") for line in run.trace.lines)


# -------------------------------------------------------------------------- reasoning


def thought(identity: str, *deltas: str) -> list[Event]:
    return [
        ReasoningStartEvent(message_id=identity),
        ReasoningMessageStartEvent(message_id=identity, role="reasoning"),
        *[ReasoningMessageContentEvent(message_id=identity, delta=d) for d in deltas],
        ReasoningMessageEndEvent(message_id=identity),
        ReasoningEndEvent(message_id=identity),
    ]


def signed(entity: str, value: str) -> Event:
    return ReasoningEncryptedValueEvent(subtype="message", entity_id=entity, encrypted_value=value)


async def test_reasoning_is_kept_once_with_its_streamed_id_and_signature() -> None:
    run = await play([*thought("r1", "ab", "c"), signed("r1", "SIG"), *said("m", "x"), done()])
    (row,) = run.assistants()
    assert row["thinking"] == [{"id": "r1", "content": "abc", "signature": "SIG"}]
    assert run.of("REASONING_MESSAGE_START")[0]["messageId"] == "r1"


async def test_a_closing_full_text_is_not_added_again() -> None:
    closing = StepFinishedEvent(step_name="think", content="abc", signature="SIG")
    run = await play(
        [StepStartedEvent(step_name="think"), *thought("r1", "ab", "c"), closing, done()]
    )
    assert run.assistants()[0]["thinking"] == [{"id": "r1", "content": "abc", "signature": "SIG"}]
    assert [e["encryptedValue"] for e in run.of("REASONING_ENCRYPTED_VALUE")] == ["SIG"]


async def test_each_block_is_an_entry_with_its_own_signature() -> None:
    run = await play(
        [
            *thought("r1", "one"),
            signed("r1", "S1"),
            *thought("r2", "two"),
            signed("r2", "S2"),
            *said("m", "x"),
            done(),
        ]
    )
    assert run.assistants()[0]["thinking"] == [
        {"id": "r1", "content": "one", "signature": "S1"},
        {"id": "r2", "content": "two", "signature": "S2"},
    ]


async def test_a_signature_without_text_stands_alone() -> None:
    run = await play([signed("hidden", "S"), *said("m", "x"), done()])
    (entry,) = run.assistants()[0]["thinking"]
    assert (entry["content"], entry["signature"]) == ("", "S")


async def test_one_reasoning_id_in_two_turns_is_told_apart() -> None:
    run = await play(
        [*thought("r", "a"), *called("c"), done("tool_calls")],
        [*thought("r", "b"), *said("m", "x"), done()],
    )
    first, second = run.assistants()
    assert first["thinking"][0]["id"] == "r"
    assert second["thinking"][0]["id"] != "r"
    streamed = [e["messageId"] for e in run.of("REASONING_MESSAGE_CONTENT")]
    assert streamed == ["r", second["thinking"][0]["id"]]


async def test_reasoning_and_text_never_share_an_id() -> None:
    run = await play([*thought("same", "a"), *said("same", "x"), done()])
    (row,) = run.assistants()
    assert row["id"] != row["thinking"][0]["id"]


async def test_reasoning_alone_opens_the_assistant_message() -> None:
    run = await play([*thought("r", "a"), done()])
    (row,) = run.assistants()
    assert run.of("TEXT_MESSAGE_START")[0]["messageId"] == row["id"]
    assert row["content"] is None


async def test_missing_parts_of_reasoning_are_supplied() -> None:
    run = await play(
        [
            ReasoningStartEvent(message_id="s"),
            ReasoningMessageContentEvent(message_id="s", delta="a"),
            ReasoningMessageContentEvent(message_id="s", delta="", content="abc"),
            done(),
        ]
    )
    assert run.assistants()[0]["thinking"] == [{"id": "s", "content": "abc"}]
    assert run.types().count("REASONING_MESSAGE_END") == 1
    assert run.types().count("REASONING_END") == 1


async def test_reasoning_chunks_become_whole_blocks() -> None:
    run = await play(
        [
            ReasoningMessageChunkEvent(message_id="s", delta="a"),
            ReasoningMessageChunkEvent(delta="b"),
            done(),
        ]
    )
    assert run.assistants()[0]["thinking"] == [{"id": "s", "content": "ab"}]


async def test_a_step_that_never_started_cannot_finish() -> None:
    run = await play([StepFinishedEvent(step_name="x"), done()])
    assert run.of("STEP_FINISHED") == []


async def test_a_step_closes_the_open_thought() -> None:
    run = await play(
        [
            ReasoningMessageStartEvent(message_id="r", role="reasoning"),
            ReasoningMessageContentEvent(message_id="r", delta="a"),
            StepStartedEvent(step_name="s"),
            StepFinishedEvent(step_name="s"),
            done(),
        ]
    )
    kinds = run.types()
    assert kinds.index("REASONING_MESSAGE_END") < kinds.index("STEP_STARTED")


# ------------------------------------------------------------------------ other events


async def test_other_events_pass() -> None:
    others: list[Event] = [
        StateSnapshotEvent(snapshot={"a": None}),
        StateDeltaEvent(delta=[{"op": "add", "path": "/b", "value": 1}]),
        RawEvent(event={"x": 1}, source="p"),
        CustomEvent(name="n", value=[1]),
        MessagesSnapshotEvent(messages=[]),
        ActivitySnapshotEvent(message_id="act", activity_type="search", content={"q": 1}),
    ]
    run = await play([*others, done()])
    assert run.types()[1:-1] == [event.type.value for event in others]
    assert run.of("STATE_SNAPSHOT")[0]["snapshot"] == {"a": None}


async def test_unknown_keys_move_to_the_bag_and_nulls_vanish() -> None:
    start = TextMessageStartEvent(message_id="m", model="x", sessionId="s", nothing=None)
    content = TextMessageContentEvent(message_id="m", delta="a", model="x", extra=1)
    run = await play([start, content, done()])
    assert run.of("TEXT_MESSAGE_START")[0]["metadata"] == {
        "tanstack": {"model": "x", "sessionId": "s"}
    }
    assert run.of("TEXT_MESSAGE_CONTENT")[0]["metadata"] == {"tanstack": {"extra": 1}}


async def test_user_metadata_beside_the_bag_is_kept() -> None:
    start = TextMessageStartEvent(
        message_id="m", metadata={"mine": {"a": 1}, "tanstack": {"model": "y"}}, model="x", z=1
    )
    run = await play([start, done()])
    assert run.of("TEXT_MESSAGE_START")[0]["metadata"] == {
        "mine": {"a": 1},
        "tanstack": {"model": "y", "z": 1},
    }


async def test_a_childs_events_are_no_part_of_the_turn() -> None:
    child = [event.model_copy(update={"subagent_run_id": "s1"}) for event in said("cm", "child")]
    run = await play([*child, *said("m", "parent"), done()])
    (row,) = run.assistants()
    assert row["content"] == "parent"


# ------------------------------------------------------------------------------ errors


async def test_a_yielded_error_ends_the_run_through_the_error_hook() -> None:
    usage = [TokenUsage(input_tokens=1)]
    run = await play(
        [
            *said("m", "a")[:2],
            RunErrorEvent(message="rate", code="429", raw_event={"p": 1}, usage=usage),
        ]
    )
    terminal = run.events[-1]
    assert (terminal["type"], terminal["message"], terminal["code"]) == ("RUN_ERROR", "rate", "429")
    assert terminal["rawEvent"] == {"p": 1}
    assert terminal["usage"] == [{"inputTokens": 1}]
    assert terminal["metadata"]["tanstack"]["runId"] == "r"
    assert run.trace.error is not None
    assert (run.trace.error.message, run.trace.error.code) == ("rate", "429")
    assert run.trace.finish is None
    assert run.assistants() == []
    assert "onInterruptBoundary:afterModel" not in run.trace.lines


async def test_a_raised_error_keeps_the_usage_of_earlier_calls() -> None:
    async def broken(_: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id="m2")
        raise ConnectionError("gone")

    first = [*called("c"), done("tool_calls", usage=[TokenUsage(input_tokens=7)])]
    run = await play(first, broken)
    assert run.events[-1]["message"] == "gone"
    assert run.events[-1]["usage"] == [{"inputTokens": 7}]
    assert [row["role"] for row in run.rows] == ["user", "assistant", "tool"]


async def test_a_stream_that_just_ends_is_finished_under_the_requests_run_id() -> None:
    run = await play([*said("m", "ok")[:2]])
    terminal = run.events[-1]
    assert (terminal["type"], terminal["runId"]) == ("RUN_FINISHED", "r")
    assert "finishReason" not in terminal["metadata"]["tanstack"]
    assert run.types()[-2] == "TEXT_MESSAGE_END"
    assert run.rows[-1]["content"] == "ok"
    assert run.trace.finish is not None


async def test_calls_of_a_stream_that_just_ends_are_not_executed() -> None:
    run = await play([*called("c")])
    assert run.of("TOOL_CALL_RESULT") == []
    assert run.events[-1]["type"] == "RUN_FINISHED"


async def test_what_is_no_event_is_an_error() -> None:
    run = await play(lambda _: _strings())
    assert run.events[-1]["type"] == "RUN_ERROR"
    assert "str" in run.events[-1]["message"]


async def _strings() -> AsyncIterator[Any]:
    yield "hello"


async def test_events_after_the_end_of_a_call_are_ignored() -> None:
    run = await play([*said("m", "a"), done(), *said("n", "b"), done()])
    assert run.rows[-1]["content"] == "a"
    assert run.types().count("RUN_FINISHED") == 1


async def test_an_interrupt_of_an_adapter_is_refused_clearly() -> None:
    outcome = RunFinishedInterruptOutcome.model_validate(
        {"type": "interrupt", "interrupts": [{"id": "i", "reason": "r"}]}
    )
    run = await play([RunFinishedEvent(thread_id="x", run_id="y", outcome=outcome)])
    assert run.events[-1]["type"] == "RUN_ERROR"
    assert "interrupt" in run.events[-1]["message"]


async def test_rows_are_never_changed_in_place() -> None:
    history: list[Any] = [{"id": "a", "role": "assistant", "content": "x", "metadata": {"k": [1]}}]
    before = json.dumps(history)
    run = await play([*said("m", "x"), *called("c"), done("tool_calls")], [done()], history=history)
    assert json.dumps(history) == before
    rows: list[ModelMessage] = run.rows
    assert rows[0].get("metadata") == {"k": [1]}
