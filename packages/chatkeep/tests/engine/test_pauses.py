"""Pauses: what makes a run wait, what is kept and shown, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from ag_ui.core import (
    MessagesSnapshotEvent,
    RunFinishedEvent,
    StepStartedEvent,
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
    ChatContext,
    ChatMiddleware,
    Event,
    InterruptBoundary,
    ToolPhaseInfo,
    chat,
    client_tool,
    define_tool,
)
from chatkeep.engine.interrupts import (
    BINDING_KEY,
    InterruptRequest,
    define_interrupt,
    schema_hash,
)
from chatkeep.errors import ChatkeepError
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
GO: list[Json] = [{"id": "u", "role": "user", "content": "go"}]
TEXT = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
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


class Executed(list[Any]):
    """Arguments of the calls that ran."""

    def tool(self, name: str, **options: Any) -> Any:
        def run(args: Any) -> Json:
            self.append((name, args))
            return {"did": name}

        return define_tool(name=name, execute=run, **options)


class Run:
    def __init__(self, events: list[Event], trace: TraceMiddleware) -> None:
        self.events: list[Json] = [e.model_dump(mode="json", by_alias=True) for e in events]
        self.types = [e["type"] for e in self.events]
        self.trace = trace
        assert trace.context is not None
        self.rows: list[Any] = list(trace.context.messages)
        self.last = self.events[-1]

    @property
    def asked(self) -> list[Json]:
        return list(self.last["outcome"]["interrupts"])

    @property
    def ids(self) -> list[str]:
        return [interrupt["id"] for interrupt in self.asked]

    @property
    def results(self) -> dict[str, str]:
        return {
            e["toolCallId"]: e["content"] for e in self.events if e["type"] == "TOOL_CALL_RESULT"
        }


async def run(
    *turns: list[Event], middleware: Sequence[ChatMiddleware] = (), **options: Any
) -> Run:
    trace = TraceMiddleware()
    stream = chat(
        adapter=PlayedModel(*turns),
        thread_id="t",
        **{"messages": GO, "run_id": "r", **options},
        middleware=[*middleware, trace],
    )
    events = await collect(stream)
    check_events(events)
    return Run(events, trace)


class Asks(ChatMiddleware):
    def __init__(self, at: InterruptBoundary, *keys: str) -> None:
        self.at = at
        self.keys = keys

    async def on_interrupt_boundary(
        self, ctx: ChatContext, boundary: InterruptBoundary
    ) -> Sequence[InterruptRequest] | None:
        if boundary != self.at:
            return None
        return [REVIEW.request(key=key, reason="review", message="?") for key in self.keys]


NEEDY = calls(("c", "send", '{"to":"a"}'))


# ------------------------------------------------------------------------- the order of a pause


async def test_nothing_of_a_pause_is_visible_before_it_is_kept() -> None:
    """While on_interrupt works, the reader has neither the snapshot nor the terminal."""
    kept, entered, read_all = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Keeps(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            entered.set()
            await kept.wait()

    send = Executed().tool("send", needs_approval=True)
    stream = chat(
        adapter=PlayedModel(NEEDY), messages=GO, tools=[send], middleware=[Keeps()], state={}
    )
    events: list[Event] = []

    async def read() -> None:
        async for event in stream:
            events.append(event)
            if event.type.value == "TOOL_CALL_END":
                read_all.set()

    reading = asyncio.create_task(read())
    await entered.wait()
    await read_all.wait()
    await asyncio.sleep(0)
    assert events[-1].type.value == "TOOL_CALL_END"
    kept.set()
    await reading
    tail = [event.type.value for event in events[-3:]]
    assert tail == ["MESSAGES_SNAPSHOT", "STATE_SNAPSHOT", "RUN_FINISHED"]


async def test_a_paused_run_has_no_other_terminal_hook_and_its_deferred_work_is_awaited() -> None:
    done: list[str] = []

    class Defers(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            async def later() -> None:
                done.append("later")

            ctx.defer(later())

    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], middleware=[Defers()])
    assert paused.ids == ["approval_c"]
    trace = paused.trace
    assert (trace.finish, trace.error, trace.abort) == (None, None, None)
    assert trace.lines[-1] == "onInterrupt:afterTools"
    assert done == ["later"]


async def test_on_interrupt_is_given_the_descriptors_that_are_published() -> None:
    given: list[Json] = []

    class Keeps(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            given.append(event.model_dump(mode="json", by_alias=True))
            ctx.terminal_metadata["kept"] = True

    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], middleware=[Keeps()])
    assert given[0]["outcome"] == paused.last["outcome"]
    assert paused.last["metadata"]["kept"] is True
    assert "finishReason" not in paused.last["metadata"].get("tanstack", {})


async def test_the_first_hook_that_cannot_keep_a_pause_is_the_last_one_asked() -> None:
    """A store behind it must not keep a pause that nobody hears of."""
    trace = TraceMiddleware()

    class Refuses(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            raise ChatkeepError("no room")

    send = Executed().tool("send", needs_approval=True)
    failed = await run(NEEDY, tools=[send], middleware=[Refuses(), trace])
    assert failed.last["type"] == "RUN_ERROR"
    assert failed.last["message"] == "no room"
    assert "MESSAGES_SNAPSHOT" not in failed.types
    assert not any(line.startswith("onInterrupt:") for line in trace.lines)
    assert trace.error is not None


async def test_a_hook_that_refuses_what_a_pause_shows_fails_the_run_before_it_is_kept() -> None:
    class Refuses(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            if isinstance(event, MessagesSnapshotEvent):
                raise ChatkeepError("not this")

    send = Executed().tool("send", needs_approval=True)
    failed = await run(NEEDY, tools=[send], middleware=[Refuses()])
    assert failed.last["message"] == "not this"
    assert "onInterrupt:afterTools" not in failed.trace.lines


async def test_what_a_hook_makes_of_the_snapshot_is_shown() -> None:
    class Shortens(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Event | None:
            if isinstance(event, MessagesSnapshotEvent):
                return MessagesSnapshotEvent(messages=event.messages[:1])
            return None

    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], middleware=[Shortens()])
    (snapshot,) = [e for e in paused.events if e["type"] == "MESSAGES_SNAPSHOT"]
    assert [row["id"] for row in snapshot["messages"]] == ["u"]


@pytest.mark.parametrize(("state", "shown"), [({}, [{}]), ({"a": None}, [{"a": None}])])
async def test_the_requests_state_comes_back_at_a_pause(state: Json, shown: list[Json]) -> None:
    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], state=state)
    assert [e["snapshot"] for e in paused.events if e["type"] == "STATE_SNAPSHOT"] == shown


@pytest.mark.parametrize("options", [{}, {"state": None}])
async def test_a_request_without_state_gets_none_back(options: Json) -> None:
    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], **options)
    assert "STATE_SNAPSHOT" not in paused.types


async def test_what_is_open_on_the_wire_is_closed_before_the_snapshot() -> None:
    turn = [StepStartedEvent(step_name="s"), *answer("m")]
    paused = await run(turn, interrupts=[REVIEW], middleware=[Asks("afterModel", "k")])
    assert paused.types[-3:] == ["STEP_FINISHED", "MESSAGES_SNAPSHOT", "RUN_FINISHED"]


async def test_every_model_call_of_a_run_that_pauses_has_its_usage_on_the_terminal() -> None:
    executed = Executed()
    used = TokenUsage(input_tokens=1, output_tokens=2, total_tokens=3)

    def counted(turn: list[Event]) -> list[Event]:
        return [*turn[:-1], turn[-1].model_copy(update={"usage": [used]})]

    tools = [executed.tool("look"), executed.tool("send", needs_approval=True)]
    paused = await run(counted(calls(("a", "look", "{}"))), counted(NEEDY), tools=tools)
    entry = used.model_dump(by_alias=True, exclude_none=True)
    assert paused.last["usage"] == [entry, entry]


# ------------------------------------------------------------------------------- who waits


async def test_an_undecided_approval_holds_back_the_server_tools_of_its_turn() -> None:
    """Nothing of the turn runs behind the back of who decides; browser tools are asked along."""
    executed = Executed()
    turn = calls(("a", "look", "{}"), ("b", "send", '{"to":"x"}'), ("c", "cli", '{"q":1}'))
    tools = [
        executed.tool("look"),
        executed.tool("send", needs_approval=True, input_schema=TEXT),
        client_tool("cli"),
    ]
    paused = await run(turn, tools=tools)
    assert executed == []
    assert paused.results == {}
    assert paused.ids == ["approval_b", "client_tool_c"]
    (info,) = paused.trace.phases
    assert [(w.tool_call_id, w.tool_name, w.args, w.interrupt_id) for w in info.needs_approval] == [
        ("b", "send", {"to": "x"}, "approval_b")
    ]
    assert [w.interrupt_id for w in info.needs_client_execution] == ["client_tool_c"]
    assert [row["role"] for row in paused.rows] == ["user", "assistant"]


async def test_a_browser_tool_alone_holds_nothing_back() -> None:
    executed = Executed()
    turn = calls(("a", "cli", "{}"), ("b", "look", "{}"))
    paused = await run(turn, tools=[client_tool("cli"), executed.tool("look")])
    assert executed == [("look", {})]
    assert paused.results == {"b": '{"did":"look"}'}
    assert paused.ids == ["client_tool_a"]
    order = [t for t in paused.types if t in ("TOOL_CALL_RESULT", "MESSAGES_SNAPSHOT")]
    assert order == ["TOOL_CALL_RESULT", "MESSAGES_SNAPSHOT"]


async def test_a_browser_tool_that_needs_approval_asks_for_that_first() -> None:
    paused = await run(calls(("q", "cli", "{}")), tools=[client_tool("cli", needs_approval=True)])
    assert paused.ids == ["approval_q"]


@pytest.mark.parametrize("arguments", ["{broken", '{"to":1}'])
async def test_a_call_whose_arguments_are_wrong_fails_and_asks_nobody(arguments: str) -> None:
    """So it holds nothing back either, and the model gets another try."""
    executed = Executed()
    turn = calls(("a", "send", arguments), ("b", "look", "{}"))
    tools = [executed.tool("send", needs_approval=True, input_schema=TEXT), executed.tool("look")]
    done = await run(turn, answer(), tools=tools)
    assert executed == [("look", {})]
    assert "error" in done.results["a"]
    assert done.last["type"] == "RUN_FINISHED"
    assert "outcome" not in done.last


async def test_hooks_around_a_call_are_for_server_tools_that_execute() -> None:
    executed = Executed()
    turn = calls(("a", "send", "{}"), ("b", "cli", "{}"), ("c", "look", "{}"))
    tools = [executed.tool("send", needs_approval=True), client_tool("cli"), executed.tool("look")]
    paused = await run(turn, tools=tools)
    assert not [line for line in paused.trace.lines if "ToolCall" in line]


async def test_the_input_of_a_browser_tool_is_checked_where_its_schema_is_our_own() -> None:
    cli = client_tool("cli", input_schema=TEXT)
    done = await run(calls(("a", "cli", '{"to":1}')), answer(), tools=[cli])
    assert "Input validation failed for tool cli" in done.results["a"]


async def test_a_run_that_must_ask_waits_also_when_its_turns_are_used_up() -> None:
    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], loop=1)
    assert paused.ids == ["approval_c"]
    assert not [line for line in paused.trace.lines if line.startswith("onShouldContinue")]


async def test_nulls_inside_of_schemas_and_arguments_are_kept() -> None:
    """The hash of the schema that is sent is taken of it as it is."""
    schema: Json = {"type": "object", "properties": {"cc": {"default": None}}}
    send = Executed().tool("send", needs_approval=True, input_schema=schema)
    stream = chat(
        adapter=PlayedModel(calls(("c", "send", '{"cc":null}'))), messages=GO, tools=[send]
    )
    text = (await collect(stream))[-1].model_dump_json(by_alias=True, exclude_none=True)
    (interrupt,) = json.loads(text)["outcome"]["interrupts"]
    assert interrupt["metadata"]["input"] == {"cc": None}
    approve = interrupt["responseSchema"]["oneOf"][0]
    assert approve["properties"]["editedArgs"] == schema
    sent = schema_hash(interrupt["responseSchema"])
    assert sent == interrupt["metadata"][BINDING_KEY]["responseSchemaHash"]


# --------------------------------------------------------------------------- generic questions


@pytest.mark.parametrize("at", ["beforeModel", "afterModel", "beforeTools", "afterTools"])
async def test_every_boundary_can_pause_and_questions_stand_behind_calls(
    at: InterruptBoundary,
) -> None:
    executed = Executed()
    turn = calls(("a", "look", "{}"), ("b", "cli", "{}"))
    paused = await run(
        *([] if at == "beforeModel" else [turn]),
        tools=[executed.tool("look"), client_tool("cli")],
        interrupts=[REVIEW],
        middleware=[Asks(at, "one"), Asks(at, "two")],
    )
    tools = ["client_tool_b"] if at in ("beforeTools", "afterTools") else []
    assert paused.ids[: len(tools)] == tools
    bindings = [asked["metadata"][BINDING_KEY] for asked in paused.asked[len(tools) :]]
    assert [b["key"] for b in bindings] == ["one", "two"]
    assert [b["batchIndex"] for b in bindings] == [len(tools), len(tools) + 1]
    assert {b["interruptedRunId"] for b in bindings} == {"r"}
    assert executed == ([("look", {})] if at == "afterTools" else [])
    assert paused.trace.lines[-1] == f"onInterrupt:{at}"


# ----------------------------------------------------------------------------------- aborts


async def test_an_abort_before_a_pause_is_kept_ends_the_run_instead() -> None:
    signal = AbortSignal()

    class Stops(ChatMiddleware):
        async def on_tool_phase_complete(self, ctx: ChatContext, info: ToolPhaseInfo) -> None:
            signal.abort("no")

    send = Executed().tool("send", needs_approval=True)
    stopped = await run(NEEDY, tools=[send], middleware=[Stops()], abort=signal)
    assert stopped.last["outcome"] == {"type": "cancelled"}
    assert "MESSAGES_SNAPSHOT" not in stopped.types
    assert stopped.trace.abort is not None
    assert not any(line.startswith("onInterrupt:") for line in stopped.trace.lines)


async def test_an_abort_while_the_snapshot_is_with_the_hooks_ends_the_run() -> None:
    signal = AbortSignal()

    class Stops(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            if isinstance(event, MessagesSnapshotEvent):
                signal.abort("no")

    send = Executed().tool("send", needs_approval=True)
    stopped = await run(NEEDY, tools=[send], middleware=[Stops()], abort=signal)
    assert stopped.last["outcome"] == {"type": "cancelled"}
    assert "MESSAGES_SNAPSHOT" not in stopped.types


async def test_an_abort_while_a_pause_is_being_kept_comes_too_late() -> None:
    """What is being stored is stored, so it is shown too: the question waits for its answer."""
    signal = AbortSignal()

    class Keeps(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            signal.abort("disconnected")
            await asyncio.sleep(0)

    send = Executed().tool("send", needs_approval=True)
    paused = await run(NEEDY, tools=[send], middleware=[Keeps()], abort=signal)
    assert paused.ids == ["approval_c"]
    assert paused.trace.abort is None
    assert paused.trace.context is not None
    assert not paused.trace.context.signal.aborted


async def test_a_reader_that_leaves_while_a_pause_is_being_kept_leaves_it_whole() -> None:
    kept: list[str] = []
    entered, go = asyncio.Event(), asyncio.Event()

    class Keeps(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            entered.set()
            await go.wait()
            kept.append("kept")

    trace = TraceMiddleware()
    send = Executed().tool("send", needs_approval=True)
    stream = chat(
        adapter=PlayedModel(NEEDY), messages=GO, tools=[send], middleware=[Keeps(), trace]
    )
    reading = asyncio.create_task(collect(stream))
    await entered.wait()
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    go.set()
    await closing
    await reading
    assert kept == ["kept"]
    assert trace.abort is None
    assert trace.lines[-1].startswith("onInterrupt")


async def test_a_run_whose_task_is_cancelled_while_it_pauses_tells_its_hooks() -> None:
    """The event loop shuts down. A store that has kept the pause takes the later abort for
    what it is: too late."""
    entered = asyncio.Event()

    class Keeps(ChatMiddleware):
        async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
            entered.set()
            await asyncio.sleep(60)

    trace = TraceMiddleware()
    send = Executed().tool("send", needs_approval=True)
    stream = chat(
        adapter=PlayedModel(NEEDY), messages=GO, tools=[send], middleware=[Keeps(), trace]
    )
    reading = asyncio.create_task(collect(stream))
    await entered.wait()
    (task,) = [t for t in asyncio.all_tasks() if t.get_name().startswith("chatkeep run")]
    task.cancel()
    events = await reading
    assert events[-1].model_dump(by_alias=True)["outcome"] == {"type": "cancelled"}
    assert trace.abort is not None
    assert trace.abort.reason == "cancelled"
