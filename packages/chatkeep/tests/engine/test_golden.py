"""The engine against recorded runs of the TypeScript engine; every difference is data.

``golden/trace-*.txt`` hold events, hook orders and histories as recorded. ``deviations.json``
says, event by event and with a reason, where this engine differs on purpose. A deviation that
nothing uses fails.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from ag_ui.core import (
    ReasoningEndEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    RunErrorEvent,
    RunFinishedEvent,
    RunStartedEvent,
    StepFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TokenUsage,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import (
    AbortSignal,
    BeforeToolDecision,
    ChatContext,
    ChatMiddleware,
    Event,
    FinishInfo,
    ModelRequest,
    Tool,
    ToolCallInfo,
    ToolContext,
    chat,
    client_tool,
    define_tool,
)
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, PlayedTurn, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parent / "golden"
MODEL: dict[str, Any] = {"model": "m1"}
MINTED = re.compile(r"(msg|call)-[0-9a-f]{8}-[0-9a-f-]{27}\Z")
Json = dict[str, Any]


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


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


async def _progress(_: Any, ctx: ToolContext) -> dict[str, int]:
    await ctx.emit_custom_event("progress", {"n": 1, "toolCallId": "forged"})
    return {"y": 2}


def _boom(_: Any) -> None:
    raise RuntimeError("boom")


SRV = define_tool(name="srv", execute=_progress, input_schema=NUMBER)
BOOM = define_tool(name="srv", execute=_boom, input_schema=NUMBER)
STR = define_tool(name="str", execute=lambda _: "plain")
QUIET = define_tool(name="srv", execute=lambda _: {"y": 2})


async def _throwing(_: ModelRequest) -> AsyncIterator[Event]:
    yield begin()
    yield TextMessageStartEvent(message_id="m1", role="assistant", **MODEL)
    yield TextMessageContentEvent(message_id="m1", delta="par")
    raise RuntimeError("kaboom")


def tool_turn(*, said: str = "") -> list[Event]:
    spoken = text("m1", said) if said else []
    return [begin(), *spoken, *call("s1", "srv", '{"x":1}'), finish("tool_calls")]


class _Emits(ChatMiddleware):
    async def on_start(self, ctx: ChatContext) -> None:
        ctx.emit_custom_event("prog", {"a": 1})


class _AbortsOnText(ChatMiddleware):
    async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
        if isinstance(event, TextMessageContentEvent):
            ctx.abort("mw says no")


class _Decides(ChatMiddleware):
    def __init__(self, decision: BeforeToolDecision) -> None:
        self.decision = decision

    async def on_before_tool_call(
        self, ctx: ChatContext, call: ToolCallInfo
    ) -> BeforeToolDecision | None:
        return self.decision


class _FailsToFinish(ChatMiddleware):
    async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
        raise RuntimeError("store down")


STOPS = AbortSignal()


async def _stops(_: ModelRequest) -> AsyncIterator[Event]:
    yield begin()
    yield TextMessageStartEvent(message_id="m1", role="assistant", **MODEL)
    yield TextMessageContentEvent(message_id="m1", delta="par")
    STOPS.abort("user-stop")
    yield TextMessageContentEvent(message_id="m1", delta="never")


def reasoning_turn() -> list[Event]:
    return [
        begin(),
        ReasoningStartEvent(message_id="rs1", **MODEL),
        ReasoningMessageStartEvent(message_id="rs1", role="reasoning", **MODEL),
        ReasoningMessageContentEvent(message_id="rs1", delta="think", **MODEL),
        ReasoningMessageEndEvent(message_id="rs1", **MODEL),
        StepFinishedEvent(step_name="rs1", stepId="rs1", signature="SIG", **MODEL),
        ReasoningEndEvent(message_id="rs1", **MODEL),
        *text("m1", "pre"),
        *call("b1", "bad", "{}", 0),
        ToolCallStartEvent(
            tool_call_id="k1",
            tool_call_name="cli",
            parent_message_id="m1",
            metadata={"thoughtSignature": "TS"},
            index=1,
            **MODEL,
        ),
        ToolCallEndEvent(tool_call_id="k1", toolCallName="cli", input={"q": 1}, **MODEL),
        finish("tool_calls"),
    ]


class Case:
    """One section of a trace: what it plays."""

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


CASES: dict[tuple[str, str], Case] = {
    ("a", "text"): Case(answer("m1", "hello")),
    ("a", "server tool"): Case(
        [begin(), *text("m1", "thinking"), *call("c1", "srv", '{"x":1}'), finish("tool_calls")],
        answer("m2", "done"),
        tools=(SRV,),
    ),
    ("a", "failing tools"): Case(
        [
            begin(),
            *call("c1", "srv", '{"x":1}', 0),
            *call("c2", "srv", '{"x":"bad"}', 1),
            *call("c3", "nope", "{}", 2),
            *call("c4", "str", "{}", 3),
            finish("tool_calls"),
        ],
        answer("m2", "done"),
        tools=(BOOM, STR),
    ),
    ("a", "adapter RUN_ERROR"): Case(
        [begin(), *text("m1", "par")[:2], RunErrorEvent(message="bad", code="x1", **MODEL)]
    ),
    ("a", "adapter throws"): Case(_throwing),
    ("a", "max iterations"): Case(
        *[[begin(), *call(f"c{i}", "str", "{}"), finish("tool_calls")] for i in range(5)],
        tools=(STR,),
    ),
    ("d", "no parent resume"): Case(
        run_id="r2", resume=[{"interruptId": "approval_c1", "status": "resolved"}]
    ),
    ("d", "mw custom event before model"): Case(answer("m1", "ok"), middleware=lambda: [_Emits()]),
    ("d", "abort signal mid stream"): Case(_stops, abort=STOPS),
    ("d", "ctx.abort in onChunk"): Case(
        [begin(), *text("m1", "par"), finish("stop")], middleware=lambda: [_AbortsOnText()]
    ),
    ("d", "onBeforeToolCall abort"): Case(
        tool_turn(),
        tools=(QUIET,),
        middleware=lambda: [_Decides(BeforeToolDecision(action="abort", value="nope"))],
    ),
    ("d", "onBeforeToolCall skip"): Case(
        tool_turn(),
        answer("m2", "k"),
        tools=(QUIET,),
        middleware=lambda: [_Decides(BeforeToolDecision(action="skip", value={"s": 1}))],
    ),
    ("d", "onFinish throws"): Case(answer("m1", "ok"), middleware=lambda: [_FailsToFinish()]),
    ("h", "reasoning+fail+client"): Case(
        reasoning_turn(),
        tools=(define_tool(name="bad", execute=_boom), client_tool("cli")),
        messages=[{"id": "u1", "role": "user", "content": "hi"}],
        state={},
    ),
}


# ----------------------------------------------------------------------- reading the traces


class Section:
    def __init__(self, trace: str, name: str, body: str) -> None:
        self.key = (trace, name)
        lines = unrandom(body).strip().splitlines()
        self.events = [json.loads(line) for line in lines if line.startswith('{"type"')]
        self.hooks = [re.sub(r"\{.*", "", line) for line in lines if line[0] not in "{["]
        self.rows = [json.loads(line) for line in lines if line.startswith("[{")]


def unrandom(body: str) -> str:
    """The call ids that one recording drew at random, numbered in their order."""
    drawn = list(dict.fromkeys(re.findall(r'"(c0\.\d+)"', body)))
    for number, identity in enumerate(drawn):
        body = body.replace(f'"{identity}"', f'"c{number}"')
    return body


def sections() -> list[Section]:
    found: list[Section] = []
    for path in sorted(GOLDEN.glob("trace-*.txt")):
        parts = re.split(r"(?m)^=== (.*)$", path.read_text())
        trace = path.stem[-1]
        found += [Section(trace, n, b) for n, b in zip(parts[1::2], parts[2::2], strict=True)]
    return found


SECTIONS = sections()
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
        elif isinstance(change, dict) and isinstance(out.get(key), dict):
            out[key] = merged(out[key], change)
        else:
            out[key] = copy.deepcopy(change)
    return out


def concerns(deviation: Json, key: tuple[str, str]) -> bool:
    return key[0] in deviation["traces"] and key[1] in deviation.get("sections", [key[1]])


def deviating(events: list[Json], key: tuple[str, str]) -> tuple[list[Json], set[int]]:
    """The recorded events with the deviations of a section, and which of these were used."""
    used: set[int] = set()
    for number, deviation in enumerate(DEVIATIONS):
        if not concerns(deviation, key):
            continue
        out: list[Json] = []
        for event in events:
            hit = "match" in deviation and matches(event, deviation["match"])
            if hit:
                used.add(number)
            if hit and deviation["op"] == "merge":
                out.append(merged(event, deviation["merge"]))
            elif hit and deviation["op"] == "before":
                out += [*copy.deepcopy(deviation["events"]), event]
            elif not hit or deviation["op"] != "drop":
                out.append(event)
        if deviation["op"] == "append":
            used.add(number)
            out += copy.deepcopy(deviation["events"])
        events = out
    return events, used


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


async def played(case: Case, *middleware: ChatMiddleware) -> list[Event]:
    said = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"run_id": "r1", "messages": said, **case.options}
    stream = chat(
        adapter=PlayedModel(*case.turns, provider="", model="m1"),
        thread_id="thread1",
        tools=case.tools,
        middleware=[*case.middleware(), *middleware],
        **options,
    )
    return await collect(stream)


# --------------------------------------------------------------------------------- the tests


@pytest.fixture(autouse=True)
def _fresh_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = AbortSignal()
    monkeypatch.setitem(globals(), "STOPS", signal)
    case = CASES["d", "abort signal mid stream"]
    monkeypatch.setitem(case.options, "abort", signal)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.key[0]}: {s.key[1]}")
async def test_the_stream_is_the_recorded_one_but_for_listed_deviations(section: Section) -> None:
    case = CASES[section.key]
    events = await played(case)
    check_events(events)
    actual = [plain(event) for event in events]
    expected, _ = deviating(section.events, section.key)
    assert actual == expected


@pytest.mark.parametrize(
    "section", [s for s in SECTIONS if s.hooks], ids=lambda s: f"{s.key[0]}: {s.key[1]}"
)
async def test_hooks_are_called_in_the_recorded_order(section: Section) -> None:
    trace = TraceMiddleware()
    await played(CASES[section.key], trace)
    lines = trace.lines
    if section.key[1] in ("adapter RUN_ERROR", "adapter throws"):
        # These recordings kept chunks and the terminal hook only.
        lines = [line for line in lines if line.startswith(("chunk", "onError"))]
        if section.key[1] == "adapter RUN_ERROR":
            lines = lines[1:]  # recorded without its first chunk
    assert lines == section.hooks


def test_every_deviation_is_used() -> None:
    """A deviation that matches nothing any more is a mistake, or has become needless."""
    used: set[int] = set()
    for section in SECTIONS:
        used |= deviating(section.events, section.key)[1]
    unused = [d for i, d in enumerate(DEVIATIONS) if i not in used]
    assert not unused
    assert all(d["reason"] for d in DEVIATIONS)


def test_every_recorded_section_is_played() -> None:
    """No recording lies about unused."""
    assert {s.key for s in SECTIONS} == set(CASES)


async def test_the_history_is_the_recorded_one_with_ids_errors_and_the_last_answer() -> None:
    """Tool rows have ids and times, failures keep their error, the final text is recorded."""
    by_key = {s.key: s for s in SECTIONS}
    for name in ("server tool", "failing tools"):
        trace = TraceMiddleware()
        await played(CASES["a", name], trace)
        assert trace.context is not None
        (recorded,) = by_key["a", name].rows
        for row in recorded:
            if row["role"] == "tool":
                row.update(id="<msg>", createdAt="<time>")
                said = json.loads(row["content"]) if row["content"][0] == "{" else {}
                if "error" in said:
                    if row["toolCallId"] == "c2":
                        said["error"] = (
                            "Input validation failed for tool srv: x: 'bad' is not of type 'number'"
                        )
                        row["content"] = json.dumps(said, separators=(",", ":"))
                    row["error"] = said["error"]
            if row["role"] == "assistant":
                row["metadata"] = {"tanstack": {"source": {"model": "m1"}}}
        recorded.append(
            {
                "role": "assistant",
                "content": "done",
                "id": "m2",
                "createdAt": "<time>",
                "metadata": {"tanstack": {"source": {"model": "m1"}}},
            }
        )
        assert anonymous(list(trace.context.messages)) == anonymous(recorded)
