"""The scripted model: each scenario says what it should, through the whole engine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from chatkeep.engine import AbortSignal, ModelRequest, chat
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import collect
from chatkeep.testkit.scripted import (
    ScriptedModel,
    ScriptedPauses,
    browser_tools,
    scenarios,
    scripted_interrupts,
    scripted_mode,
    scripted_schema,
    scripted_tools,
)

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
        client_tools=browser_tools("adhoc_client_tool"),
        interrupts=scripted_interrupts(),
        middleware=[ScriptedPauses()],
    )
    events = await collect(stream)
    check_events(events)
    return [e.model_dump(mode="json", by_alias=True) for e in events]


def deltas(events: list[Json]) -> list[str]:
    return [e["delta"] for e in events if e["type"] == "TEXT_MESSAGE_CONTENT"]


def test_the_scenarios_are_listed() -> None:
    """Those of the convention, and a few more that need options or another process."""
    assert {
        "activity", "approval", "approval-slow", "approval-two", "client-tool",
        "client-tool-adhoc", "client-tool-noschema", "client-tool-sequence", "error",
        "error-early", "generic", "inspect", "mixed", "reasoning", "server-tool",
        "server-tool-error", "server-tool-text", "slow", "structured", "text", "ui-resource",
        "ui-resource-parallel", "ui-resource-plain",
    } <= {*scenarios()}  # fmt: skip
    assert list(scenarios()) == sorted(scenarios())


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


def questions(events: list[Json]) -> list[tuple[str, Any]]:
    """Tool or definition, and arguments or payload, of what the run paused for."""
    asked: list[tuple[str, Any]] = []
    for descriptor in events[-1]["outcome"]["interrupts"]:
        metadata = descriptor["metadata"]
        binding = metadata["tanstack:interruptBinding"]
        if binding["kind"] == "generic":
            asked.append((binding["definitionId"], metadata["tanstack:interruptPayload"]))
        else:
            asked.append((metadata["toolName"], metadata["input"]))
    return asked


EMAIL = ("send_email", {"to": "ada@example.com", "subject": "Hi"})
LOCATION = ("get_location", {"accuracy": "high"})
NOTHING: Json = {}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("approval", [EMAIL]),
        ("approval-slow", [EMAIL]),
        (
            "approval-two",
            [
                ("send_email", {"to": "ada@example.com", "subject": "A"}),
                ("send_email", {"to": "bob@example.com", "subject": "B"}),
            ],
        ),
        ("client-tool", [LOCATION]),
        ("client-tool-noschema", [("pick_color", {"palette": "warm"})]),
        ("client-tool-adhoc", [("adhoc_client_tool", {"q": 1})]),
        ("client-tool-sequence", [LOCATION]),
        ("mixed", [EMAIL, LOCATION]),
        ("generic", [("review-plan", {"title": "Release plan"})]),
        ("ui-resource", [("await_widget_result", NOTHING)]),
        ("ui-resource-parallel", [("await_widget_result", NOTHING)]),
        ('text {"pause": ["afterModel"]}', [("review-plan", {"title": "Release plan"})]),
        ('approval-job {"ms": 7}', [("approved_job", {"ms": 7})]),
    ],
)
async def test_scenarios_that_ask_a_person(name: str, asked: list[tuple[str, Any]]) -> None:
    assert questions(await play(f"SCENARIO:{name}")) == asked


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("approval", "Email outcome: one | two"),
        ("client-tool-sequence", "Sequence outcome: one | two"),
        ("mixed", "Mixed outcome: one | two"),
        ("approval-slow", "w0 w1 "),
    ],
)
async def test_results_after_the_message_are_what_is_said(name: str, said: str) -> None:
    """A placeholder of the browser is none."""
    rows: list[Any] = [
        {"id": "u1", "role": "user", "content": f'SCENARIO:{name} {{"chunks":2,"delayMs":1}}'}
    ]
    contents = ["one", '{"approved":true,"pendingExecution":true,"message":"…"}', "two"]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(len(contents))
    ]
    rows.append({"id": "a1", "role": "assistant", "content": None, "toolCalls": calls})
    rows += [
        {"id": f"t{i}", "role": "tool", "toolCallId": f"c{i}", "content": content}
        for i, content in enumerate(contents)
    ]
    model = ScriptedModel()
    request = ModelRequest(
        messages=rows, thread_id="t", run_id="r", message_id="m", abort=AbortSignal()
    )
    events = [e async for e in model.stream(request)]
    assert "".join(getattr(e, "delta", "") for e in events) == said


async def test_the_run_that_an_option_names_fails() -> None:
    events = await play('SCENARIO:server-tool {"failsIn": "r"}')
    assert (events[-1]["type"], events[-1]["message"]) == ("RUN_ERROR", "scripted failure")
    assert (await play('SCENARIO:server-tool {"failsIn": "x"}'))[-1]["type"] == "RUN_FINISHED"


def test_a_route_asks_for_structure_in_one_scenario_only() -> None:
    def schema(text: str) -> Any:
        return scripted_schema([{"role": "user", "content": text}])

    assert schema("SCENARIO:structured")["required"] == ["name", "age"]
    assert schema('SCENARIO:structured {"as": "event"}') is not None
    for text in ("SCENARIO:text", "SCENARIO:slow [1]", "structured", ""):
        assert schema(text) is None
    assert scripted_schema([]) is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("SCENARIO:structured", "native"),
        ('SCENARIO:structured {"as": "separate"}', "separate"),
        ('SCENARIO:structured {"as": "event"}', "event"),
        ('SCENARIO:structured {"as": "song"}', "native"),
        ('SCENARIO:text {"as": "event"}', "native"),
        ("SCENARIO:slow [1]", "native"),
    ],
)
def test_a_scenario_says_how_its_answer_is_made(text: str, mode: str) -> None:
    assert scripted_mode([{"role": "user", "content": text}]) == mode


async def test_an_unknown_scenario_says_which_there_are() -> None:
    events = await play("SCENARIO:nonsense")
    assert events[-1]["type"] == "RUN_ERROR"
    assert events[-1]["code"] == "unknown-scenario"
    assert "is unknown" in events[-1]["message"]
    assert "server-tool-text" in events[-1]["message"]


async def test_options_that_are_no_object_are_an_error() -> None:
    assert "must be a JSON object" in (await play("SCENARIO:slow [1]"))[-1]["message"]
