"""The engine against recorded runs of the TypeScript engine; every difference is data."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import (
    RunErrorEvent,
    TextMessageContentEvent,
    TextMessageStartEvent,
)

from chatkeep.engine import (
    AbortSignal,
    BeforeToolDecision,
    ChatContext,
    ChatMiddleware,
    Event,
    FinishInfo,
    ModelRequest,
    ToolCallInfo,
    ToolContext,
    define_tool,
)
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import TraceMiddleware

from .golden_harness import (
    DEVIATIONS,
    MODEL,
    Case,
    Key,
    Section,
    anonymous,
    answer,
    begin,
    call,
    deviating,
    deviating_hooks,
    finish,
    plain,
    played,
    sections,
    text,
)

pytestmark = pytest.mark.anyio

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


CASES: dict[Key, Case] = {
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
}


SECTIONS = sections("a", "d")


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
    for section in sections("a", "b", "d", "d-pauses", "e", "h", "i", "j"):
        used |= deviating(section.events, section.key)[1]
        used |= deviating_hooks(section.hooks, section.key)[1]
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
