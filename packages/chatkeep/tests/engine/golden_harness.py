"""Recorded runs of the TypeScript engine, and how a test plays one and compares.

``golden/trace-*.txt`` hold events, hook orders and histories as recorded. ``deviations.json``
says, event by event and with a reason, where this engine differs on purpose. A deviation that
nothing uses fails.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ag_ui.core import (
    RunFinishedEvent,
    RunStartedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TokenUsage,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import ChatMiddleware, Event, Tool, chat
from chatkeep.testkit.played import PlayedModel, PlayedTurn, collect

GOLDEN = Path(__file__).parent / "golden"
MODEL: dict[str, Any] = {"model": "m1"}
MINTED = re.compile(r"(msg|call|interrupt)-([0-9a-f]{8}-[0-9a-f-]{27}|\d{13}-[a-z0-9]+)\Z")
Json = dict[str, Any]
Key = tuple[str, str]


# ------------------------------------------------------------------- what the traces played


def text(identity: str, delta: str) -> list[Event]:
    return [
        TextMessageStartEvent(message_id=identity, role="assistant", **MODEL),
        TextMessageContentEvent(message_id=identity, delta=delta, **MODEL),
        TextMessageEndEvent(message_id=identity, **MODEL),
    ]


def call(identity: str, name: str, arguments: str, index: int | None = None) -> list[Event]:
    place = {} if index is None else {"index": index}
    return [
        ToolCallStartEvent(
            tool_call_id=identity,
            tool_call_name=name,
            parent_message_id="m1",
            toolName=name,
            **place,
            **MODEL,
        ),
        ToolCallArgsEvent(tool_call_id=identity, delta=arguments, **MODEL),
        ToolCallEndEvent(
            tool_call_id=identity,
            toolCallName=name,
            toolName=name,
            input=json.loads(arguments),
            **MODEL,
        ),
    ]


def begin() -> Event:
    return RunStartedEvent(thread_id="other", run_id="provider-run", **MODEL)


def finish(reason: str) -> Event:
    usage = [TokenUsage(input_tokens=3, output_tokens=2, total_tokens=5)]
    return RunFinishedEvent(
        thread_id="other", run_id="provider-run", usage=usage, finishReason=reason, **MODEL
    )


def answer(identity: str, said: str) -> list[Event]:
    return [begin(), *text(identity, said), finish("stop")]


class Case:
    """One section of a trace: what it plays. ``options`` are those of ``chat()``, and ``mode``: how
    the adapter gives structured output."""

    def __init__(
        self,
        *turns: PlayedTurn,
        tools: tuple[Tool, ...] = (),
        middleware: Callable[[], list[ChatMiddleware]] = list,
        **options: Any,
    ) -> None:
        self.turns = turns
        self.tools = tools
        self.middleware = middleware
        self.options = options


# ----------------------------------------------------------------------- reading the traces


class Section:
    """``events``, ``hooks`` and ``rows`` (histories) as recorded; ``notes`` are other lines."""

    def __init__(self, trace: str, name: str, body: str) -> None:
        self.key: Key = (trace, name)
        lines = [line.removeprefix("MSGS ") for line in unrandom(body).strip().splitlines()]
        said = [json.loads(line) for line in lines if line.startswith('{"type"')]
        self.events: list[Json] = [anonymous(event) for event in said]
        self.rows = [json.loads(line) for line in lines if line.startswith("[{")]
        rest = [line for line in lines if line[0] not in "{["]
        self.notes = [line for line in rest if re.match(r"\w+ \[\[", line)]
        steps = [step for line in rest if line not in self.notes for step in line.split(" | ")]
        steps = [re.sub(r":?[ \[{].*", "", step) for step in steps]
        self.hooks = [step.replace("resolution", "onInterruptResolution") for step in steps]


def unrandom(body: str) -> str:
    """The call ids that one recording drew at random, numbered in their order."""
    drawn = list(dict.fromkeys(re.findall(r'"(c0\.\d+)"', body)))
    for number, identity in enumerate(drawn):
        body = body.replace(f'"{identity}"', f'"c{number}"')
    return body


def sections(*names: str) -> list[Section]:
    """Those of ``golden/trace-<name>.txt``; the first letter of a name is the trace's."""
    found: list[Section] = []
    for name in names:
        parts = re.split(r"(?m)^=== (.*)$", (GOLDEN / f"trace-{name}.txt").read_text())
        found += [Section(name[0], n, b) for n, b in zip(parts[1::2], parts[2::2], strict=True)]
    return found


DEVIATIONS: list[Json] = json.loads((GOLDEN / "deviations.json").read_text())


def matches(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, dict) and "$in" in pattern:
        return value in pattern["$in"]
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            k in value and matches(value[k], v) for k, v in pattern.items()
        )
    return bool(value == pattern)


def merged(value: Json, patch: Json) -> Json:
    out = dict(value)
    for key, change in patch.items():
        if change is None:
            out.pop(key, None)
        elif isinstance(change, dict):
            inner = out.get(key)
            out[key] = merged(inner if isinstance(inner, dict) else {}, change)
        else:
            out[key] = copy.deepcopy(change)
    return out


def concerns(deviation: Json, key: Key) -> bool:
    return (
        key[0] in deviation["traces"]
        and key[1] in deviation.get("sections", [key[1]])
        and key[1] not in deviation.get("except", [])
    )


def deviating(events: list[Json], key: Key) -> tuple[list[Json], set[int]]:
    """The recorded events with the deviations of a section, and which of these were used.

    Operations: ``merge`` changes an event, ``row`` the rows of a MESSAGES_SNAPSHOT,
    ``interrupt`` the interrupts of a terminal, ``drop`` leaves an event out, ``before`` puts
    others before it (``once``: before the first one), ``begin`` and ``append`` put others at the
    start and at the end.
    """
    used: set[int] = set()
    for number, deviation in enumerate(DEVIATIONS):
        op = deviation["op"]
        if not concerns(deviation, key) or op == "hooks":
            continue
        out: list[Json] = []
        for event in events:
            if op in ("row", "interrupt"):
                changed = _inside(event, deviation)
                hit = changed != event
                event = changed
            else:
                hit = op not in ("begin", "append") and matches(event, deviation["match"])
            if hit and op == "before" and deviation.get("once") and number in used:
                hit = False
            if hit:
                used.add(number)
            if hit and op == "merge":
                event = merged(event, deviation["merge"])
            if hit and op == "before":
                out += copy.deepcopy(deviation["events"])
            if not hit or op != "drop":
                out.append(event)
        if op in ("append", "begin"):
            used.add(number)
            more = copy.deepcopy(deviation["events"])
            out = [*more, *out] if op == "begin" else [*out, *more]
        events = out
    return events, used


def _inside(event: Json, deviation: Json) -> Json:
    """``event`` with the change to each of its rows or interrupts that the deviation matches."""

    def change(items: list[Json]) -> list[Json]:
        pattern, patch = deviation["match"], deviation["merge"]
        return [merged(item, patch) if matches(item, pattern) else item for item in items]

    if deviation["op"] == "row" and event["type"] == "MESSAGES_SNAPSHOT":
        return {**event, "messages": change(event["messages"])}
    outcome = event.get("outcome") or {}
    if deviation["op"] == "interrupt" and "interrupts" in outcome:
        return {**event, "outcome": {**outcome, "interrupts": change(outcome["interrupts"])}}
    return event


def deviating_hooks(hooks: list[str], key: Key) -> tuple[list[str], set[int]]:
    """The recorded hooks with the deviations of a section, and which of these were used. ``drop``
    names lines that are left out, ``after`` maps a line to those that follow it."""
    used: set[int] = set()
    for number, deviation in enumerate(DEVIATIONS):
        if deviation["op"] != "hooks" or not concerns(deviation, key):
            continue
        out: list[str] = []
        for line in hooks:
            if line not in deviation.get("drop", []):
                out.append(line)
            out += deviation.get("after", {}).get(line, [])
        if out != hooks:
            used.add(number)
        hooks = out
    return hooks, used


# ---------------------------------------------------------------------------------- playing


def plain(event: Event) -> Json:
    """An event without its time and with minted ids named by their kind."""
    data: Json = event.model_dump(mode="json", by_alias=True)
    del data["timestamp"]
    return anonymous(data)


def anonymous(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "<time>" if k == "createdAt" else anonymous(v) for k, v in value.items()}
    if isinstance(value, list):
        return [anonymous(v) for v in value]
    if isinstance(value, str):
        found = MINTED.match(value)
        return f"<{found[1]}>" if found else value
    return value


async def played(case: Case, *middleware: ChatMiddleware, **more: Any) -> list[Event]:
    """The events of a case; ``more`` options win over its own."""
    said: Sequence[Json] = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"run_id": "r1", "messages": said, **case.options, **more}
    mode = options.pop("mode", "separate")
    stream = chat(
        adapter=PlayedModel(*case.turns, provider="", model="m1", structured_output=mode),
        thread_id="thread1",
        tools=case.tools,
        middleware=[*case.middleware(), *middleware],
        **options,
    )
    return await collect(stream)
