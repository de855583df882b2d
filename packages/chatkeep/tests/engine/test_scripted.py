"""The scripted model: each scenario says what it should, through the whole engine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from chatkeep.engine import AbortSignal, chat
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import collect
from chatkeep.testkit.scripted import ScriptedModel, scenarios, scripted_tools

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
HELLO = ["Hello", " from the", " scripted model."]


async def play(text: str, history: Any = ()) -> list[Json]:
    stream = chat(
        adapter=ScriptedModel(),
        messages=[*history, {"id": "u1", "role": "user", "content": text}],
        thread_id="t",
        run_id="r",
        tools=scripted_tools(),
    )
    events = await collect(stream)
    check_events(events)
    return [e.model_dump(mode="json", by_alias=True) for e in events]


def deltas(events: list[Json]) -> list[str]:
    return [e["delta"] for e in events if e["type"] == "TEXT_MESSAGE_CONTENT"]


def test_the_built_scenarios_are_listed() -> None:
    assert scenarios() == (
        "error", "error-early", "inspect", "reasoning", "server-tool", "server-tool-error",
        "server-tool-text", "slow", "text",
    )  # fmt: skip


@pytest.mark.parametrize("text", ["SCENARIO:text", "anything", "SCENARIO:text {}"])
async def test_text(text: str) -> None:
    events = await play(text)
    assert deltas(events) == HELLO
    assert events[-1]["usage"] == [{"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}]
    assert events[-1]["metadata"]["tanstack"] == {"model": "scripted-1", "finishReason": "stop"}


async def test_slow_takes_its_options() -> None:
    began = time.perf_counter()
    assert deltas(await play('SCENARIO:slow {"chunks":3,"delayMs":10}')) == ["w0 ", "w1 ", "w2 "]
    assert time.perf_counter() - began >= 0.03


async def test_slow_can_be_stopped() -> None:
    signal = AbortSignal()
    stream = chat(
        adapter=ScriptedModel(),
        messages=[{"role": "user", "content": "SCENARIO:slow"}],
        abort=signal,
    )
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if event.type.value == "TEXT_MESSAGE_CONTENT":
            signal.abort()
    check_events(events)
    assert events[-1].outcome.type == "cancelled"


async def test_reasoning_streams_before_its_text() -> None:
    events = await play("SCENARIO:reasoning")
    thoughts = [e["delta"] for e in events if e["type"] == "REASONING_MESSAGE_CONTENT"]
    assert thoughts == ["Let me ", "think."]
    assert deltas(events) == ["Reasoned answer."]


async def test_server_tool() -> None:
    events = await play("SCENARIO:server-tool")
    (args,) = [e["delta"] for e in events if e["type"] == "TOOL_CALL_ARGS"]
    (result,) = [e for e in events if e["type"] == "TOOL_CALL_RESULT"]
    assert args == '{"city":"Paris"}'
    assert result["content"] == '{"city":"Paris","tempC":21}'
    assert deltas(events) == ['Weather: {"city":"Paris","tempC":21}']
    assert len(events[-1]["usage"]) == 2


async def test_server_tool_text_speaks_before_it_calls() -> None:
    events = await play("SCENARIO:server-tool-text")
    assert deltas(events)[0] == "Looking up. "
    starts = [e["messageId"] for e in events if e["type"] == "TEXT_MESSAGE_START"]
    (call,) = [e for e in events if e["type"] == "TOOL_CALL_START"]
    assert call["parentMessageId"] == starts[0]
    assert len(starts) == 2


async def test_server_tool_error_goes_on_after_the_failure() -> None:
    events = await play("SCENARIO:server-tool-error")
    (result,) = [e for e in events if e["type"] == "TOOL_CALL_RESULT"]
    assert result["metadata"]["tanstack"]["state"] == "output-error"
    assert deltas(events) == ['Tool outcome: {"error":"tool failed: scripted"}']


@pytest.mark.parametrize(("name", "said"), [("error", ["partial "]), ("error-early", [])])
async def test_errors(name: str, said: list[str]) -> None:
    events = await play(f"SCENARIO:{name}")
    assert deltas(events) == said
    assert (events[-1]["type"], events[-1]["message"]) == ("RUN_ERROR", "scripted failure")


async def test_inspect_describes_what_the_model_is_given() -> None:
    history: list[Any] = [
        {
            "id": "a1",
            "role": "assistant",
            "content": "x",
            "toolCalls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"id": "t1", "role": "tool", "toolCallId": "c1", "content": "no", "error": "no"},
    ]
    (text,) = deltas(await play("SCENARIO:inspect", history))
    assert json.loads(text) == [
        {"role": "assistant", "id": "a1", "text": "x", "toolCalls": ["c1"]},
        {"role": "tool", "id": "t1", "text": "no", "toolCallId": "c1", "error": "no"},
        {"role": "user", "id": "u1", "text": "SCENARIO:inspect"},
    ]


async def test_results_before_the_last_user_message_do_not_count() -> None:
    history: list[Any] = [
        {"id": "u0", "role": "user", "content": "SCENARIO:server-tool"},
        {
            "id": "a0",
            "role": "assistant",
            "content": None,
            "toolCalls": [
                {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"id": "t0", "role": "tool", "toolCallId": "c0", "content": "old"},
    ]
    assert deltas(await play("SCENARIO:server-tool", history)) == [
        'Weather: {"city":"Paris","tempC":21}'
    ]


@pytest.mark.parametrize(
    ("name", "why"), [("approval", "comes with a later version"), ("nonsense", "is unknown")]
)
async def test_scenarios_that_are_not_built_say_so(name: str, why: str) -> None:
    events = await play(f"SCENARIO:{name}")
    assert events[-1]["type"] == "RUN_ERROR"
    assert events[-1]["code"] == "unknown-scenario"
    assert why in events[-1]["message"]
    assert "server-tool-text" in events[-1]["message"]


async def test_options_that_are_no_object_are_an_error() -> None:
    assert "must be a JSON object" in (await play("SCENARIO:slow [1]"))[-1]["message"]
