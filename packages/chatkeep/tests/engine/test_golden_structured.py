"""Structured output against recorded runs of the TypeScript engine; differences are data.

Answers by event were not recorded: the engine that made the traces could not play them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from ag_ui.core import (
    CustomEvent,
    RunFinishedEvent,
    RunStartedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TokenUsage,
)

from chatkeep.engine import Event, define_tool
from chatkeep.errors import StructuredOutputError
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import TraceMiddleware

from .golden_harness import (
    GOLDEN,
    MODEL,
    Case,
    Section,
    anonymous,
    answer,
    begin,
    call,
    deviating,
    finish,
    plain,
    played,
    sections,
    text,
)

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
RAW = '{"a":1}'
QUESTION = {"role": "user", "content": "hi", "id": "u1"}


def said(identity: str | None, raw: str = RAW) -> list[Event]:
    """The separate call of an adapter that streams it and says so."""
    name = identity or ""
    usage = [TokenUsage(input_tokens=3, output_tokens=2, total_tokens=5)]
    end = RunFinishedEvent(
        thread_id="other", run_id="provider-run", usage=usage, finishReason="stop"
    )
    return [
        RunStartedEvent(thread_id="other", run_id="provider-run"),
        TextMessageStartEvent(message_id=name, role="assistant"),
        TextMessageContentEvent(message_id=name, delta=raw),
        TextMessageEndEvent(message_id=name),
        CustomEvent(name="structured-output.complete", value={"object": {"a": 1}, "raw": raw}),
        end,
    ]


def whole() -> list[Event]:
    """One that has its answer at once, and names no message."""
    events = [begin(), *text("", RAW)]
    end = RunFinishedEvent(thread_id="other", run_id="provider-run", finishReason="stop", **MODEL)
    return [*events, end]


SRV = define_tool(name="srv", execute=lambda _: "r")
OPTIONS: dict[str, Any] = {"output_schema": SCHEMA, "messages": [QUESTION]}

CASES: dict[str, Case] = {
    "SO separate stream, no tools": Case(said("so1"), **OPTIONS),
    "SO separate stream, tools": Case(
        [begin(), *text("m1", "pre"), *call("c1", "srv", "{}"), finish("tool_calls")],
        answer("m2", "prose"),
        said("so1"),
        tools=(SRV,),
        **OPTIONS,
    ),
    "SO fallback": Case(whole(), **OPTIONS),
    "SO native": Case(answer("m1", RAW), mode="native", **OPTIONS),
    "SO native bad": Case(answer("m1", "nope"), mode="native", **OPTIONS),
}

SECTIONS = sections("e")


def recorded(name: str) -> list[list[tuple[str, str]]]:
    """The hooks of each run of a section, and what follows them on their line; a promise that
    was rejected is a run of its own."""
    body = re.split(r"(?m)^=== (.*)$", (GOLDEN / "trace-e.txt").read_text())
    lines = dict(zip(body[1::2], body[2::2], strict=True))[name].strip().splitlines()
    runs: list[list[tuple[str, str]]] = [[]]
    for line in lines:
        if line.startswith("REJECT"):
            runs.append([])
        elif line.startswith("on"):
            hook, _, rest = line.replace("onSOC", "onStructuredOutputConfig").partition(" ")
            runs[-1].append((hook, rest))
    return runs


def hooks(run: list[tuple[str, str]]) -> list[str]:
    return [f"{h}:{rest.split(' ')[0]}" if h.endswith("Config") else h for h, rest in run]


def own_hooks(trace: TraceMiddleware) -> list[str]:
    kept = [line for line in trace.lines if re.match(r"on(\w*Config|Finish|Error):", line)]
    return [line if "Config" in line else line.partition(":")[0] for line in kept]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.key[1])
async def test_the_stream_is_the_recorded_one_but_for_listed_deviations(section: Section) -> None:
    events = await played(CASES[section.key[1]])
    check_events(events)
    expected, _ = deviating(section.events, section.key)
    assert [plain(event) for event in events] == expected


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.key[1])
async def test_hooks_are_called_in_the_recorded_order(section: Section) -> None:
    trace = TraceMiddleware()
    await played(CASES[section.key[1]], trace)
    assert own_hooks(trace) == hooks(recorded(section.key[1])[0])


@pytest.mark.parametrize("section", [s for s in SECTIONS if s.rows], ids=lambda s: s.key[1])
async def test_the_history_is_the_recorded_one_with_ids_and_sources(section: Section) -> None:
    trace = TraceMiddleware()
    await played(CASES[section.key[1]], trace)
    assert trace.context is not None
    (rows,) = section.rows
    for row in rows:
        if row["role"] == "tool":
            row.update(id="<msg>", createdAt="<time>")
        if row["role"] == "assistant":
            row["metadata"] = {"tanstack": {"source": {"model": "m1"}}}
            row["id"] = re.sub(r"fallback-.*", "<msg>", row["id"])
    assert anonymous(list(trace.context.messages)) == anonymous(rows)


@pytest.mark.parametrize("section", [s for s in SECTIONS if s.rows], ids=lambda s: s.key[1])
async def test_the_finish_is_told_the_prose_and_the_reason_of_the_loop(section: Section) -> None:
    trace = TraceMiddleware()
    await played(CASES[section.key[1]], trace)
    info = json.loads(dict(recorded(section.key[1])[0])["onFinish"])
    assert trace.finish is not None
    assert trace.finish.finish_reason == info["finishReason"]
    assert trace.finish.content == info["content"]


async def test_an_answer_that_does_not_fit_fails_as_the_recorded_promise_was_rejected() -> None:
    trace = TraceMiddleware()
    await played(Case(answer("m1", '{"a":"x"}'), mode="native", **OPTIONS), trace)
    assert own_hooks(trace) == hooks(recorded("SO native bad")[1])
    assert trace.error is not None
    assert isinstance(trace.error.error, StructuredOutputError)
    assert trace.error.code == "structured-output-validation-failed"


def test_every_recorded_section_is_played() -> None:
    """No recording lies about unused."""
    assert {s.key[1] for s in SECTIONS} == set(CASES)
