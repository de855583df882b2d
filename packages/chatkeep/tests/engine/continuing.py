"""Runs that continue a paused one, played: rows, answers as a store gives them, what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ag_ui.core import (
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import ChatConfig, ChatContext, ChatMiddleware, Event, chat, define_tool
from chatkeep.engine.interrupts import GenericAnswer, ResumeState, define_interrupt
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

Json = dict[str, Any]
GO: Json = {"id": "u", "role": "user", "content": "go"}
REVIEW = define_interrupt("review", response={"type": "object"})


def calls(*wanted: tuple[str, str, str]) -> list[Event]:
    """A turn that makes calls (id, tool, argument text)."""
    events: list[Event] = []
    for identity, name, arguments in wanted:
        events += [
            ToolCallStartEvent(tool_call_id=identity, tool_call_name=name),
            ToolCallArgsEvent(tool_call_id=identity, delta=arguments),
            ToolCallEndEvent(tool_call_id=identity),
        ]
    return [*events, RunFinishedEvent(thread_id="t", run_id="r", finishReason="tool_calls")]


def answer(identity: str = "end") -> list[Event]:
    return [
        TextMessageStartEvent(message_id=identity),
        TextMessageContentEvent(message_id=identity, delta="done"),
        TextMessageEndEvent(message_id=identity),
        RunFinishedEvent(thread_id="t", run_id="r", finishReason="stop"),
    ]


def asked(*wanted: tuple[str, str, str]) -> list[Json]:
    """The rows of a thread whose last turn made calls."""
    entries = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name, arguments in wanted
    ]
    return [GO, {"id": "m", "role": "assistant", "toolCalls": entries}]


def said(call: str, content: str, **more: Any) -> Json:
    return {"id": f"row-{call}", "role": "tool", "toolCallId": call, "content": content, **more}


class Executed(list[Any]):
    """Arguments of the calls that ran."""

    def tool(self, name: str, **options: Any) -> Any:
        def run(args: Any) -> Json:
            self.append((name, args))
            return {"did": name}

        return define_tool(name=name, execute=run, **options)


class Answers(ChatMiddleware):
    """What a store's middleware does with a request: it says what the answers are."""

    def __init__(self, **answers: Any) -> None:
        self.state = ResumeState(interrupted_run_id="r1", **answers)

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Json | None:
        return {"resume": [], "resume_tool_state": self.state} if ctx.phase == "init" else None


class Run:
    def __init__(self, events: list[Event], trace: TraceMiddleware, model: PlayedModel) -> None:
        self.events: list[Json] = [e.model_dump(mode="json", by_alias=True) for e in events]
        self.types = [e["type"] for e in self.events]
        self.trace = trace
        self.model = model
        assert trace.context is not None
        self.rows: list[Any] = list(trace.context.messages)
        self.last = self.events[-1]

    @property
    def ids(self) -> list[str]:
        return [interrupt["id"] for interrupt in self.last["outcome"]["interrupts"]]

    @property
    def results(self) -> list[tuple[str, str]]:
        """Call ids and contents, as published."""
        found = [e for e in self.events if e["type"] == "TOOL_CALL_RESULT"]
        return [(e["toolCallId"], e["content"]) for e in found]

    def row(self, call: str) -> Json:
        (row,) = [r for r in self.rows if r.get("toolCallId") == call]
        return dict(row)


async def run(
    rows: Sequence[Json],
    *turns: list[Event],
    middleware: Sequence[ChatMiddleware] = (),
    **options: Any,
) -> Run:
    trace, model = TraceMiddleware(), PlayedModel(*turns)
    stream = chat(
        adapter=model,
        thread_id="t",
        run_id="r2",
        messages=rows,
        middleware=[*middleware, trace],
        **{"parent_run_id": "r1", **options},
    )
    events = await collect(stream)
    known = [call["id"] for row in rows for call in row.get("toolCalls", ())]
    check_events(events, known_calls=known)
    return Run(events, trace, model)


def generic(**more: Any) -> GenericAnswer:
    return GenericAnswer(
        definition_id="review",
        key="k",
        interrupt_id="i",
        batch_index=0,
        status="resolved",
        response={"ok": True},
        **more,
    )
