"""Whatever a turn calls and people answer: nothing runs unasked, nothing twice, nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ag_ui.core import (
    RunFinishedEvent,
    TextMessageContentEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep.engine import Event, Tool, chat, client_tool, define_tool
from chatkeep.engine.interrupts import (
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

Json = dict[str, Any]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NAMES = ["server", "needy", "browser", "needy-browser", "unknown"]

CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["good", "good", "good", "bad", "broken"])),
    min_size=1,
    max_size=5,
)
ARGUMENTS = {"good": '{"n":1}', "bad": '{"n":"x"}', "broken": "{"}


def tools(executed: Counter[str]) -> list[Tool]:
    def runs(args: Json, context: Any) -> Json:
        executed[context.tool_call_id] += 1
        return args

    server: Any = {"input_schema": NUMBER, "execute": runs}
    browser: Any = {"input_schema": NUMBER}
    return [
        define_tool(name="server", **server),
        define_tool(name="needy", needs_approval=True, **server),
        client_tool("browser", **browser),
        client_tool("needy-browser", needs_approval=True, **browser),
    ]


def turn(calls: list[tuple[str, str]]) -> list[Event]:
    events: list[Event] = []
    for place, (name, arguments) in enumerate(calls):
        identity = f"c{place}"
        events += [
            ToolCallStartEvent(tool_call_id=identity, tool_call_name=name),
            ToolCallArgsEvent(tool_call_id=identity, delta=ARGUMENTS[arguments]),
            ToolCallEndEvent(tool_call_id=identity),
        ]
    ended = {"threadId": "t", "runId": "r", "finishReason": "tool_calls"}
    return [*events, RunFinishedEvent.model_validate(ended)]


def done() -> list[Event]:
    ended = {"threadId": "t", "runId": "r", "finishReason": "stop"}
    said = TextMessageContentEvent(message_id="end", delta="done")
    return [said, RunFinishedEvent.model_validate(ended)]


def answer_to(interrupt: Json, choice: int) -> Json:
    name = interrupt["id"]
    if choice == 0:
        return resume_cancel(name)
    if name.startswith("client_tool"):
        return resume_error(name, "broke") if choice == 1 else resume_output(name, {"at": name})
    if choice == 1:
        return resume_deny(name)
    return resume_approve(name) if choice == 2 else resume_approve(name, edited_args={"n": 2})


async def one_run(number: int, rows: list[Json], entries: list[Json], **options: Any) -> Any:
    trace = TraceMiddleware()
    stream = chat(
        thread_id="t",
        run_id=f"r{number}",
        parent_run_id=f"r{number - 1}" if entries else None,
        messages=rows,
        resume=entries,
        middleware=[trace],
        **options,
    )
    events = await asyncio.wait_for(collect(stream), 30)
    check_events(events, known_calls=[c["id"] for row in rows for c in row.get("toolCalls", ())])
    assert trace.context is not None
    return [e.model_dump(mode="json", by_alias=True) for e in events], trace.context.messages


@settings(max_examples=150, deadline=None)
@given(CALLS, st.sampled_from(["parallel", "sequential"]), st.data())
def test_every_call_of_a_turn_comes_to_one_result(
    calls: list[tuple[str, str]], execution: str, data: st.DataObject
) -> None:
    executed: Counter[str] = Counter()
    options: Json = {"tools": tools(executed), "tool_execution": execution}
    approved: set[str] = set()
    asked: list[str] = []
    results: dict[str, Json] = {}

    async def main() -> list[Any]:
        rows: list[Json] = [{"id": "u", "role": "user", "content": "go"}]
        entries: list[Json] = []
        model = PlayedModel(turn(calls), done())
        for number in range(1, 5):
            events, history = await one_run(number, rows, entries, adapter=model, **options)
            for event in events:
                if event["type"] == "TOOL_CALL_RESULT":
                    assert event["toolCallId"] not in results
                    results[event["toolCallId"]] = event
            last = events[-1]
            assert last["type"] == "RUN_FINISHED", last
            if "outcome" not in last:
                return list(history)
            rows = [e["messages"] for e in events if e["type"] == "MESSAGES_SNAPSHOT"][-1]
            assert [row["id"] for row in rows] == [row["id"] for row in history]
            entries = []
            for interrupt in last["outcome"]["interrupts"]:
                assert interrupt["id"] not in asked
                asked.append(interrupt["id"])
                entry = answer_to(interrupt, data.draw(st.integers(0, 3)))
                entries.append(entry)
                payload = entry.get("payload")
                if interrupt["id"].startswith("approval") and payload and payload["approved"]:
                    approved.add(interrupt["toolCallId"])
        raise AssertionError("it never ends")

    history = asyncio.run(main())
    identities = [f"c{place}" for place in range(len(calls))]
    assert set(results) == set(identities)
    rows = [row for row in history if row["role"] == "tool"]
    assert sorted(row["toolCallId"] for row in rows) == identities
    for identity, (name, arguments) in zip(identities, calls, strict=True):
        runs = arguments == "good" and (
            name == "server" or (name == "needy" and identity in approved)
        )
        assert executed[identity] == int(runs), (identity, name)
        wants = arguments == "good" and name in ("needy", "needy-browser")
        assert (f"approval_{identity}" in asked) == wants
    for row in rows:
        assert results[row["toolCallId"]]["messageId"] == row["id"]
        assert results[row["toolCallId"]]["content"] == row["content"]
    assert history[-1]["content"] == "done"
