"""Stopping a run: from every source, at every point, with everything closed and told once."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from ag_ui.core import (
    ReasoningMessageContentEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
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
    CANCEL_REQUESTED,
    AbortInfo,
    AbortSignal,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    ChatStream,
    Event,
    FinishInfo,
    ModelRequest,
    ToolContext,
    ToolOutcome,
    chat,
    define_tool,
)
from chatkeep.errors import ChatkeepError
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, PlayedTurn, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

Json = dict[str, Any]


class Told(TraceMiddleware):
    """Counts terminal hooks, and can wait inside ``on_abort``."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.aborts: list[AbortInfo] = []
        self.pause = pause
        self.committed = asyncio.Event()

    async def on_abort(self, ctx: ChatContext, info: AbortInfo) -> None:
        await asyncio.sleep(self.pause)
        self.aborts.append(info)
        self.committed.set()

    def once(self) -> AbortInfo:
        assert self.finish is None
        assert self.error is None
        (info,) = self.aborts
        return info


def hanging(*first: Event) -> Callable[[ModelRequest], AsyncIterator[Event]]:
    """A model that says ``first``, then never goes on."""

    async def turn(_: ModelRequest) -> AsyncIterator[Event]:
        for event in first:
            yield event
        await asyncio.sleep(3600)
        yield RunFinishedEvent(thread_id="t", run_id="r", finishReason="stop")

    return turn


def text(*deltas: str) -> list[Event]:
    return [
        TextMessageStartEvent(message_id="m1"),
        *[TextMessageContentEvent(message_id="m1", delta=d) for d in deltas],
    ]


def tool_turn(*ids: str) -> list[Event]:
    events: list[Event] = []
    for identity in ids or ("c",):
        events += [
            ToolCallStartEvent(tool_call_id=identity, tool_call_name="t"),
            ToolCallArgsEvent(tool_call_id=identity, delta=f'{{"id":"{identity}"}}'),
            ToolCallEndEvent(tool_call_id=identity),
        ]
    usage = [TokenUsage(input_tokens=3)]
    end = RunFinishedEvent(thread_id="t", run_id="r", finishReason="tool_calls", usage=usage)
    return [*events, end]


def answer() -> list[Event]:
    return [
        *text("done"),
        TextMessageEndEvent(message_id="m1"),
        RunFinishedEvent(thread_id="t", run_id="r", finishReason="stop"),
    ]


def start(*turns: PlayedTurn, middleware: Any = (), tools: Any = (), **options: Any) -> ChatStream:
    return chat(
        adapter=PlayedModel(*turns),
        messages=[{"id": "u1", "role": "user", "content": "hi"}],
        thread_id="t",
        run_id="r",
        middleware=middleware,
        tools=tools,
        **options,
    )


async def until(stream: ChatStream, kind: str) -> list[Event]:
    got: list[Event] = []
    async for event in stream:
        got.append(event)
        if event.type.value == kind:
            return got
    raise AssertionError(f"no {kind} in {[e.type.value for e in got]}")


def dumped(events: list[Event]) -> list[Json]:
    check_events(events)
    return [e.model_dump(mode="json", by_alias=True) for e in events]


def types(events: list[Json]) -> list[str]:
    return [event["type"] for event in events]


# ---------------------------------------------------------------------------- the signal


async def test_a_signal_goes_off_once_and_keeps_its_first_reason() -> None:
    signal = AbortSignal()
    calls: list[str] = []
    forget = lambda: calls.append("forgotten")  # noqa: E731
    signal.add_callback(lambda: calls.append("a"))
    signal.add_callback(forget)
    signal.remove_callback(forget)
    signal.remove_callback(forget)
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    signal.abort("first")
    signal.abort("second")
    await asyncio.wait_for(waiting, 10)
    await signal.wait()
    signal.add_callback(lambda: calls.append("late"))
    assert (signal.aborted, signal.reason, calls) == (True, "first", ["a", "late"])


# ------------------------------------------------------------------- while the model talks


async def test_an_abort_interrupts_a_silent_model_and_closes_the_text() -> None:
    told, signal = Told(), AbortSignal()
    stream = start(hanging(*text("par")), middleware=[told], abort=signal)
    got = await until(stream, "TEXT_MESSAGE_CONTENT")
    signal.abort("user-stop")
    events = dumped(got + await collect(stream))
    assert types(events)[-2:] == ["TEXT_MESSAGE_END", "RUN_FINISHED"]
    assert events[-1]["outcome"] == {"type": "cancelled"}
    assert "finishReason" not in events[-1]["metadata"]["tanstack"]
    info = told.once()
    assert (info.reason, info.cancel_requested) == ("user-stop", False)
    assert told.context is not None
    assert [m.get("id") for m in told.context.messages] == ["u1"]
    assert told.context.accumulated_content == "par"


async def test_every_kind_of_open_span_is_closed_innermost_first() -> None:
    opened: list[Event] = [
        StepStartedEvent(step_name="s"),
        ReasoningStartEvent(message_id="r"),
        ReasoningMessageStartEvent(message_id="r", role="reasoning"),
        ReasoningMessageContentEvent(message_id="r", delta="hm"),
        *text("x"),
        ToolCallStartEvent(tool_call_id="c", tool_call_name="t"),
        ToolCallArgsEvent(tool_call_id="c", delta="{"),
    ]
    stream = start(hanging(*opened))
    got = await until(stream, "TOOL_CALL_ARGS")
    stream.abort()
    events = dumped(got + await collect(stream))
    assert types(events)[-6:] == [
        "TOOL_CALL_END",
        "TEXT_MESSAGE_END",
        "REASONING_MESSAGE_END",
        "REASONING_END",
        "STEP_FINISHED",
        "RUN_FINISHED",
    ]


async def test_the_cancel_word_says_that_somebody_asked() -> None:
    told = Told()
    stream = start(hanging(), middleware=[told])
    await until(stream, "RUN_STARTED")
    stream.abort(CANCEL_REQUESTED)
    await collect(stream)
    assert told.once().cancel_requested is True


async def test_a_model_that_ends_quietly_after_an_abort_is_aborted_not_finished() -> None:
    told, signal = Told(), AbortSignal()

    async def quiet(request: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id="m")
        signal.abort()
        assert request.abort.aborted

    events = dumped(await collect(start(quiet, middleware=[told], abort=signal)))
    assert events[-1]["outcome"] == {"type": "cancelled"}
    told.once()


async def test_a_model_that_raises_because_of_an_abort_is_aborted_not_failed() -> None:
    told, signal = Told(), AbortSignal()

    async def raises(_: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id="m")
        signal.abort()
        raise ConnectionError("closed by us")

    events = dumped(await collect(start(raises, middleware=[told], abort=signal)))
    assert events[-1]["outcome"] == {"type": "cancelled"}
    told.once()


async def test_the_models_stream_is_closed() -> None:
    closed: list[str] = []

    async def careful(_: ModelRequest) -> AsyncIterator[Event]:
        try:
            yield TextMessageStartEvent(message_id="m")
            await asyncio.sleep(3600)
            yield TextMessageStartEvent(message_id="m")
        finally:
            closed.append("closed")

    stream = start(careful)
    await until(stream, "TEXT_MESSAGE_START")
    stream.abort()
    await collect(stream)
    assert closed == ["closed"]


async def test_a_stream_whose_close_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn:
        def __aiter__(self) -> Stubborn:
            return self

        async def __anext__(self) -> Event:
            await asyncio.sleep(3600)
            raise StopAsyncIteration

        async def aclose(self) -> None:
            raise OSError("cannot close")

    class Model:
        provider, model = "p", "m"

        def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
            return Stubborn()

    stream = chat(adapter=Model(), messages=[])
    await until(stream, "RUN_STARTED")
    await asyncio.sleep(0)
    stream.abort()
    events = await collect(stream)
    assert events[-1].type.value == "RUN_FINISHED"
    assert "closing the model's stream failed" in caplog.text


async def test_the_event_in_flight_is_still_published_when_a_hook_aborts() -> None:
    class Aborts(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            if isinstance(event, TextMessageContentEvent):
                ctx.abort("mw says no")
                await asyncio.sleep(0.01)

    told = Told()
    events = dumped(await collect(start(answer(), middleware=[Aborts(), told])))
    assert types(events)[1:-2] == ["TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT"]
    assert told.once().reason == "mw says no"


# -------------------------------------------------------------------------- before the model


async def test_a_signal_that_is_off_before_the_run_stops_it_at_once() -> None:
    told, signal = Told(), AbortSignal()
    signal.abort("early")
    model = PlayedModel()
    stream = chat(adapter=model, messages=[], middleware=[told], abort=signal)
    assert types(dumped(await collect(stream))) == ["RUN_STARTED", "RUN_FINISHED"]
    assert told.once().reason == "early"
    assert model.requests == []


HOOKS = [
    "setup", "on_config", "on_start", "on_iteration", "on_interrupt_boundary", "on_chunk",
    "on_usage", "on_before_tool_call", "on_after_tool_call", "on_tool_phase_complete",
    "on_should_continue",
]  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
async def test_an_abort_during_any_hook_lets_it_end_and_then_stops(hook: str) -> None:
    """A hook is never interrupted: what it writes to a store is written."""
    entered, ended = asyncio.Event(), asyncio.Event()

    class Slow(ChatMiddleware):
        pass

    async def work(ctx: ChatContext, *_: Any) -> None:
        if entered.is_set():
            return
        entered.set()
        await asyncio.sleep(0.02)
        assert ctx.signal.aborted
        ended.set()

    slow, told = Slow(), Told()
    setattr(slow, hook, work)
    tool = define_tool(name="t", execute=lambda _: 1)
    stream = start(tool_turn(), answer(), middleware=[slow, told], tools=[tool])
    reading = asyncio.create_task(collect(stream))
    await asyncio.wait_for(entered.wait(), 10)
    stream.abort("now")
    events = dumped(await asyncio.wait_for(reading, 10))
    assert ended.is_set()
    assert events[-1]["outcome"] == {"type": "cancelled"}
    assert told.once().reason == "now"


async def test_an_abort_during_on_finish_comes_too_late() -> None:
    entered = asyncio.Event()

    class Commits(ChatMiddleware):
        async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
            entered.set()
            await asyncio.sleep(0.02)

    told = Told()
    stream = start(answer(), middleware=[Commits(), told])
    reading = asyncio.create_task(collect(stream))
    await asyncio.wait_for(entered.wait(), 10)
    stream.abort("late")
    events = dumped(await reading)
    assert "outcome" not in events[-1]
    assert told.aborts == []
    assert told.finish is not None


# -------------------------------------------------------------------------------- tools


async def test_an_abort_cancels_running_tools_and_their_calls_are_failed_results() -> None:
    cancelled: list[str] = []

    async def work(args: Any) -> str:
        if args["id"] == "fast":
            return "did it"
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(args["id"])
            raise
        return "never"

    class Tells(Told):
        async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
            ended.set()

    ended = asyncio.Event()
    told = Tells()
    tool = define_tool(name="t", execute=work)
    stream = start(tool_turn("fast", "slow"), middleware=[told], tools=[tool])
    reading = asyncio.create_task(collect(stream))
    await asyncio.wait_for(ended.wait(), 10)
    stream.abort()
    events = dumped(await asyncio.wait_for(reading, 10))
    assert cancelled == ["slow"]
    results = [e for e in events if e["type"] == "TOOL_CALL_RESULT"]
    assert [r["content"] for r in results] == ["did it", '{"error":"Tool execution cancelled"}']
    assert events[-1]["outcome"] == {"type": "cancelled"}
    assert events[-1]["usage"] == [{"inputTokens": 3}]
    told.once()
    assert told.context is not None
    rows: list[Any] = told.context.messages[-2:]
    assert [row.get("error") for row in rows] == [None, "Tool execution cancelled"]
    assert [row["id"] for row in rows] == [r["messageId"] for r in results]


async def test_a_thread_is_left_behind_and_cannot_speak_after_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go, refused = threading.Event(), threading.Event()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(_: Any, ctx: ToolContext) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(10)
        assert ctx.abort.aborted
        try:
            ctx.emit_custom_event_from_thread("late", {})
        except ChatkeepError:
            refused.set()

    stream = start(tool_turn(), tools=[define_tool(name="t", execute=work)])
    reading = asyncio.create_task(collect(stream))
    await asyncio.wait_for(began.wait(), 10)
    stream.abort()
    events = dumped(await asyncio.wait_for(reading, 10))
    go.set()
    assert await asyncio.to_thread(refused.wait, 10)
    assert types(events)[-2:] == ["TOOL_CALL_RESULT", "RUN_FINISHED"]


async def test_sequential_tools_stop_where_the_abort_came() -> None:
    began: list[str] = []

    def work(args: Any, ctx: ToolContext) -> str:
        began.append(args["id"])
        return "ok"

    class Aborts(ChatMiddleware):
        async def on_after_tool_call(self, ctx: ChatContext, outcome: Any) -> None:
            ctx.abort()

    tool = define_tool(name="t", execute=work)
    stream = start(
        tool_turn("a", "b"), middleware=[Aborts()], tools=[tool], tool_execution="sequential"
    )
    events = dumped(await collect(stream))
    assert began == ["a"]
    contents = [e["content"] for e in events if e["type"] == "TOOL_CALL_RESULT"]
    assert contents == ["ok", '{"error":"Tool execution cancelled"}']


# ------------------------------------------------------------------------- the reader leaves


async def test_cancelling_the_reader_stops_the_run_after_its_hooks() -> None:
    """The hooks are shielded from the cancellation, and are over when the reader's task ends."""
    told = Told(pause=0.02)
    stream = start(hanging(*text("x")), middleware=[told])
    reading = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert told.once().reason == "disconnected"


async def test_a_cancel_scope_around_the_reader_stops_the_run_after_its_hooks() -> None:
    told = Told(pause=0.02)
    stream = start(hanging(*text("x")), middleware=[told])
    with anyio.move_on_after(0.02) as scope:
        await collect(stream)
    assert scope.cancelled_caught
    told.once()


async def test_a_reader_that_goes_on_after_its_cancellation_gets_the_end() -> None:
    stream = start(hanging(*text("x")))
    got = await until(stream, "TEXT_MESSAGE_CONTENT")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.__anext__(), 0.01)
    events = dumped(got + await collect(stream))
    assert events[-1]["outcome"] == {"type": "cancelled"}


async def test_closing_the_stream_stops_the_run_and_waits_for_its_hooks() -> None:
    told = Told(pause=0.02)
    stream = start(hanging(*text("x")), middleware=[told])
    await until(stream, "TEXT_MESSAGE_START")
    await stream.aclose()
    told.once()
    await stream.aclose()
    assert await collect(stream) == []


async def test_a_stream_closed_before_it_began_never_runs() -> None:
    told = Told()
    stream = start(answer(), middleware=[told])
    await stream.aclose()
    assert await collect(stream) == []
    assert told.lines == []


async def test_closing_after_the_end_changes_nothing() -> None:
    told = Told()
    stream = start(answer(), middleware=[told])
    await collect(stream)
    await stream.aclose()
    assert told.aborts == []
    assert told.finish is not None


async def test_a_dropped_stream_stops_its_run() -> None:
    told = Told()
    stream = start(hanging(*text("x")), middleware=[told])
    await until(stream, "TEXT_MESSAGE_START")
    del stream
    gc.collect()
    await asyncio.wait_for(told.committed.wait(), 10)
    assert told.once().reason == "disconnected"


async def test_one_stream_has_one_reader() -> None:
    stream = start(hanging())
    await until(stream, "RUN_STARTED")
    first = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await stream.__anext__()
    stream.abort()
    await first


async def test_a_reader_that_does_not_read_does_not_hold_up_an_abort() -> None:
    """The run is at most a buffer ahead of its reader, and stops without it."""
    told = Told()

    async def endless(_: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id="m")
        while True:
            yield TextMessageContentEvent(message_id="m", delta="x")

    stream = start(endless, middleware=[told])
    await until(stream, "TEXT_MESSAGE_START")
    await asyncio.sleep(0.02)
    stream.abort()
    await asyncio.wait_for(told.committed.wait(), 10)
    told.once()
    rest = await collect(stream)
    assert rest[-1].type.value == "RUN_FINISHED"
    assert len(rest) < 80


async def test_a_cancelled_run_task_still_tells_its_hooks() -> None:
    """What happens to runs when the event loop shuts down."""
    told = Told()
    stream = start(hanging(*text("x")), middleware=[told])
    got = await until(stream, "TEXT_MESSAGE_CONTENT")
    (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "chatkeep run r"]
    task.cancel()
    events = dumped(got + await collect(stream))
    assert events[-1]["outcome"] == {"type": "cancelled"}
    assert told.once().reason == "cancelled"


def test_a_loop_that_shuts_down_lets_the_hooks_run() -> None:
    told: list[str] = []

    class Writes(ChatMiddleware):
        async def on_abort(self, ctx: ChatContext, info: AbortInfo) -> None:
            await asyncio.sleep(0.01)
            told.append("written")

    async def main() -> ChatStream:
        stream = start(hanging(*text("x")), middleware=[Writes()])
        await until(stream, "TEXT_MESSAGE_CONTENT")
        return stream

    stream = asyncio.run(main())
    assert told == ["written"]
    del stream


async def test_many_aborts_at_random_moments_end_every_run_once() -> None:
    told = Told()
    tool = define_tool(name="t", execute=lambda _: time.sleep(0.001))

    async def slowly(_: ModelRequest) -> AsyncIterator[Event]:
        for event in tool_turn("a", "b"):
            await asyncio.sleep(0.0005)
            yield event

    async def one(number: int) -> None:
        trace = Told()
        stream = start(slowly, answer(), middleware=[trace, told], tools=[tool])
        reading = asyncio.create_task(collect(stream))
        await asyncio.sleep(number * 0.0002)
        stream.abort()
        events = dumped(await asyncio.wait_for(reading, 30))
        ended = [trace.finish is not None, bool(trace.aborts), trace.error is not None]
        assert ended.count(True) == 1
        assert ("outcome" in events[-1]) == bool(trace.aborts)

    await asyncio.gather(*[one(n) for n in range(100)])


async def test_config_hooks_see_the_signal(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that may take long can stop early by itself."""

    class Watches(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> None:
            await ctx.signal.wait()

    with caplog.at_level(logging.WARNING):
        stream = start(answer(), middleware=[Watches()])
        await until(stream, "RUN_STARTED")
        stream.abort()
        events = await collect(stream)
    assert events[-1].type.value == "RUN_FINISHED"
    assert caplog.text == ""
