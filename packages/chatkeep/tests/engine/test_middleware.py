"""Middleware: configuration, chunks, capabilities, custom events, failing hooks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from ag_ui.core import (
    CustomEvent,
    RunErrorEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TokenUsage,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import (
    DROP,
    AbortInfo,
    Capability,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    ErrorInfo,
    Event,
    FinishInfo,
    InterruptBoundary,
    LoopState,
    ToolOutcome,
    ToolPhaseInfo,
    Usage,
    chat,
    define_tool,
    failure_of,
)
from chatkeep.engine.interrupts import define_interrupt
from chatkeep.engine.publish import MAX_WAITING_EMITS
from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    CorruptRecord,
    InterruptResumeError,
    InvalidValue,
    RecordTooLarge,
    RunConflict,
    SchemaOutOfDate,
    StoreClosed,
    StoreError,
    ThreadConflict,
)
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

Json = dict[str, Any]


def text_turn(identity: str = "m1", *deltas: str, reason: str = "stop") -> list[Event]:
    return [
        TextMessageStartEvent(message_id=identity),
        *[TextMessageContentEvent(message_id=identity, delta=d) for d in deltas or ("hello",)],
        TextMessageEndEvent(message_id=identity),
        RunFinishedEvent(
            thread_id="t",
            run_id="r",
            finishReason=reason,
            metadata={"tanstack": {"usage": {"promptTokens": 1}}},
        ),
    ]


def tool_turn() -> list[Event]:
    return [
        ToolCallStartEvent(tool_call_id="c", tool_call_name="ok"),
        ToolCallEndEvent(tool_call_id="c"),
        RunFinishedEvent(thread_id="t", run_id="r", finishReason="tool_calls"),
    ]


OK = define_tool(name="ok", execute=lambda _: "fine")


async def run(
    *middleware: ChatMiddleware,
    turns: Sequence[Any] | None = None,
    tools: Sequence[Any] = (OK,),
    **options: Any,
) -> tuple[list[Json], PlayedModel]:
    model = PlayedModel(*(turns if turns is not None else [text_turn()]))
    stream = chat(
        adapter=model,
        messages=[{"id": "u1", "role": "user", "content": "hi"}],
        thread_id="t",
        run_id="r",
        tools=tools,
        middleware=middleware,
        **options,
    )
    events = await collect(stream)
    check_events(events)
    return [e.model_dump(mode="json", by_alias=True) for e in events], model


def types(events: list[Json]) -> list[str]:
    return [event["type"] for event in events]


class Configures(ChatMiddleware):
    """Answers ``on_config`` with a function of phase and config."""

    def __init__(self, answer: Callable[[str, ChatConfig], Mapping[str, Any] | None]) -> None:
        self.answer = answer
        self.seen: list[tuple[str, list[str]]] = []

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
        self.seen.append((ctx.phase, [str(m.get("id")) for m in config.messages]))
        return self.answer(ctx.phase, config)


# ---------------------------------------------------------------------- configuration


async def test_configuration_is_piped_and_merged_shallowly() -> None:
    first = Configures(lambda _, c: {"system_prompts": [*c.system_prompts, "a"]})
    second = Configures(lambda _, c: {"system_prompts": [*c.system_prompts, "b"]})
    _, model = await run(first, second, system_prompts=["base"])
    assert model.requests[0].system_prompts == ("base", "a", "b", "a", "b")


async def test_on_config_runs_at_init_and_before_every_turn() -> None:
    seen = Configures(lambda _phase, _c: None)
    await run(seen, turns=[tool_turn(), text_turn()])
    assert [phase for phase, _ in seen.seen] == ["init", "beforeModel", "beforeModel"]


async def test_messages_from_init_become_the_transcript() -> None:
    row = {"id": "stored", "role": "user", "content": "earlier"}
    merge = Configures(
        lambda phase, c: {"messages": [row, *c.messages]} if phase == "init" else None
    )
    trace = TraceMiddleware()
    _, model = await run(merge, trace)
    assert [m.get("id") for m in model.requests[0].messages] == ["stored", "u1"]
    assert trace.context is not None
    assert trace.context.messages[0] is row
    assert trace.context.messages[-1].get("content") == "hello"


async def test_provider_messages_last_one_turn_and_never_touch_the_transcript() -> None:
    def compact(phase: str, config: ChatConfig) -> Mapping[str, Any] | None:
        if phase == "beforeModel" and len(config.messages) == 1:
            return {"provider_messages": [{"role": "user", "content": "short"}]}
        return None

    trace = TraceMiddleware()
    _, model = await run(Configures(compact), trace, turns=[tool_turn(), text_turn()])
    assert [m.get("content") for m in model.requests[0].messages] == ["short"]
    assert model.requests[1].messages[0].get("content") == "hi"
    assert trace.context is not None
    assert trace.context.messages[0].get("content") == "hi"


async def test_messages_changed_before_a_turn_last_for_the_run() -> None:
    def edit(phase: str, config: ChatConfig) -> Mapping[str, Any] | None:
        if phase == "beforeModel" and len(config.messages) == 1:
            return {"messages": [{**config.messages[0], "content": "edited"}]}
        return None

    _, model = await run(Configures(edit), turns=[tool_turn(), text_turn()])
    assert [r.messages[0].get("content") for r in model.requests] == ["edited", "edited"]


async def test_tools_added_by_middleware_work() -> None:
    more = define_tool(name="ok", execute=lambda _: "from middleware")
    add = Configures(lambda phase, _: {"tools": [more]} if phase == "init" else None)
    events, model = await run(add, turns=[tool_turn(), text_turn()], tools=())
    assert [t.name for t in model.requests[0].tools] == ["ok"]
    assert [e["content"] for e in events if e["type"] == "TOOL_CALL_RESULT"] == ["from middleware"]


async def test_tools_added_twice_fail_the_run() -> None:
    add = Configures(lambda _, c: {"tools": [*c.tools, OK]})
    events, _ = await run(add)
    assert events[-1]["code"] == "tool-error"


async def test_an_unknown_field_fails_the_run() -> None:
    events, _ = await run(Configures(lambda _phase, _c: {"mesages": []}))
    assert events[-1]["code"] == "composition-error"
    assert "mesages" in events[-1]["message"]


async def test_options_reach_the_adapter_and_the_context() -> None:
    trace = TraceMiddleware()
    _, model = await run(
        trace,
        model_options={"temperature": 0},
        context={"user": 1},
        forwarded_props={"a": 1},
        state={"s": 1},
        seen=7,
    )
    assert model.requests[0].model_options == {"temperature": 0}
    ctx = trace.context
    assert ctx is not None
    assert (ctx.context, ctx.seen, ctx.forwarded_props, ctx.client_state) == (
        {"user": 1},
        7,
        {"a": 1},
        {"s": 1},
    )
    assert (ctx.provider, ctx.model, ctx.tool_names) == ("played", "played-1", ["ok"])
    assert ctx.model_options == {"temperature": 0}


# -------------------------------------------------------------------------------- chunks


class Chunks(ChatMiddleware):
    def __init__(self, answer: Callable[[Event], Any]) -> None:
        self.answer = answer
        self.seen: list[Event] = []

    async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
        self.seen.append(event)
        return self.answer(event)


def is_content(event: Event) -> bool:
    return isinstance(event, TextMessageContentEvent)


async def test_chunks_are_replaced_on_the_wire_but_not_in_the_transcript() -> None:
    loud = Chunks(
        lambda e: e.model_copy(update={"delta": e.delta.upper()}) if is_content(e) else None
    )
    trace = TraceMiddleware()
    events, _ = await run(loud, trace)
    assert [e["delta"] for e in events if e["type"] == "TEXT_MESSAGE_CONTENT"] == ["HELLO"]
    assert trace.context is not None
    assert trace.context.messages[-1].get("content") == "hello"


async def test_chunks_are_expanded_and_piped_one_by_one() -> None:
    twice = Chunks(lambda e: [e, e] if is_content(e) else None)
    second = Chunks(lambda _: None)
    events, _ = await run(twice, second, turns=[text_turn("m", "a", "b")])
    deltas = [e["delta"] for e in events if e["type"] == "TEXT_MESSAGE_CONTENT"]
    assert deltas == ["a", "a", "b", "b"]
    assert len([e for e in second.seen if is_content(e)]) == 4


async def test_dropped_chunks_reach_nobody() -> None:
    dropper = Chunks(lambda e: DROP if is_content(e) else None)
    second = Chunks(lambda _: None)
    events, _ = await run(dropper, second)
    assert "TEXT_MESSAGE_CONTENT" not in types(events)
    assert not any(is_content(e) for e in second.seen)
    events, _ = await run(Chunks(lambda e: [] if is_content(e) else None))
    assert "TEXT_MESSAGE_CONTENT" not in types(events)


async def test_a_half_dropped_message_vanishes_whole() -> None:
    """Content and end of a message whose start was dropped would break a strict reader."""
    dropper = Chunks(lambda e: DROP if isinstance(e, TextMessageStartEvent) else None)
    events, _ = await run(dropper)
    assert types(events) == ["RUN_STARTED", "RUN_FINISHED"]


async def test_a_wrong_return_value_fails_the_run() -> None:
    events, _ = await run(Chunks(lambda _: "no"))
    assert events[-1]["type"] == "RUN_ERROR"
    assert "on_chunk of Chunks returned str" in events[-1]["message"]


async def test_hooks_cannot_publish_or_swallow_the_life_cycle() -> None:
    fake = RunErrorEvent(message="fake")
    events, _ = await run(Chunks(lambda e: [fake, e] if is_content(e) else None))
    assert types(events).count("RUN_ERROR") == 0
    events, _ = await run(Chunks(lambda _: DROP))
    assert types(events) == ["RUN_STARTED", "RUN_FINISHED"]


async def test_a_hook_may_reword_the_models_error_and_decorate_its_end() -> None:
    def reword(event: Event) -> Any:
        if isinstance(event, RunErrorEvent):
            return event.model_copy(update={"message": "sorry", "code": "mine"})
        if isinstance(event, RunFinishedEvent):
            note = CustomEvent(name="note", value=1)
            return [note, event.model_copy(update={"metadata": {"by": "hook"}})]
        return None

    events, _ = await run(Chunks(reword), turns=[[RunErrorEvent(message="raw", code="500")]])
    assert (events[-1]["message"], events[-1]["code"]) == ("sorry", "mine")
    events, _ = await run(Chunks(reword))
    assert types(events)[-2:] == ["CUSTOM", "RUN_FINISHED"]
    assert events[-1]["metadata"]["by"] == "hook"


async def test_hooks_see_raw_keys_before_they_move_to_the_bag() -> None:
    seen = Chunks(lambda _: None)
    turn = text_turn()
    turn[0] = TextMessageStartEvent(message_id="m1", sessionId="s")
    await run(seen, turns=[turn])
    start: Any = next(e for e in seen.seen if isinstance(e, TextMessageStartEvent))
    assert start.sessionId == "s"


async def test_a_guard_that_raises_keeps_rejected_text_out_of_the_transcript() -> None:
    """Raising at the end of a model call rejects what it said; tool rows of the past stay."""

    class Guard(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            if isinstance(event, RunFinishedEvent) and "secret" in ctx.accumulated_content:
                raise RuntimeError("rejected")

    trace = TraceMiddleware()
    events, _ = await run(Guard(), trace, turns=[tool_turn(), text_turn("m", "a ", "secret")])
    assert (events[-1]["type"], events[-1]["message"]) == ("RUN_ERROR", "rejected")
    assert trace.context is not None
    rows = trace.context.messages
    assert [row.get("role") for row in rows] == ["user", "assistant", "tool"]
    assert "secret" not in str(rows)
    assert trace.error is not None
    assert trace.error.refused


@pytest.mark.parametrize("hook", ["on_interrupt_boundary", "on_should_continue", "on_usage"])
async def test_hooks_that_judge_an_answer_refuse_it_by_raising(hook: str) -> None:
    """Any other hook that fails says nothing about the answer."""

    async def raises(*_: Any) -> None:
        raise RuntimeError("rejected")

    class Guard(ChatMiddleware):
        pass

    setattr(Guard, hook, raises)
    trace = TraceMiddleware()
    turn = text_turn()
    turn[-1] = RunFinishedEvent(thread_id="t", run_id="r", usage=[TokenUsage(input_tokens=1)])
    await run(Guard(), trace, turns=[turn])
    assert trace.error is not None
    assert trace.error.refused is (hook != "on_usage")


async def test_a_model_that_fails_refuses_nothing() -> None:
    class Looks(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            return None

    trace = TraceMiddleware()
    await run(Looks(), trace, turns=[[*text_turn()[:2], RunErrorEvent(message="down")]])
    assert trace.error is not None
    assert not trace.error.refused


async def test_only_overridden_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base class's hooks cost nothing: not even their failure would be noticed."""

    class Idle(ChatMiddleware):
        name = "idle"

    async def fails(*_: Any) -> None:
        raise AssertionError("called")

    for hook in ("on_chunk", "on_config", "on_usage", "on_finish"):
        monkeypatch.setattr(ChatMiddleware, hook, fails)
    events, _ = await run(Idle())
    assert types(events)[-1] == "RUN_FINISHED"
    idle = Idle()
    idle.on_start = fails  # type: ignore[method-assign]
    events, _ = await run(idle)
    assert events[-1]["message"] == "called"


# -------------------------------------------------------------------------- capabilities

CLOCK: Capability[str] = Capability("clock")


class Provides(ChatMiddleware):
    name = "provider"
    provides = (CLOCK,)

    async def setup(self, ctx: ChatContext) -> None:
        ctx.provide(CLOCK, "tick")


class Requires(ChatMiddleware):
    name = "consumer"
    requires = (CLOCK,)

    def __init__(self, hook: str = "on_start") -> None:
        self.hook = hook
        self.got: str | None = None

    async def setup(self, ctx: ChatContext) -> None:
        if self.hook == "setup":
            self.got = ctx.get(CLOCK)

    async def on_start(self, ctx: ChatContext) -> None:
        self.got = ctx.get(CLOCK)


async def test_a_capability_is_handed_on() -> None:
    consumer = Requires()
    await run(Provides(), consumer)
    assert consumer.got == "tick"


async def test_a_later_provider_is_fine_for_hooks_after_setup() -> None:
    consumer = Requires()
    await run(consumer, Provides())
    assert consumer.got == "tick"


async def test_asking_in_setup_before_the_provider_says_what_to_change() -> None:
    events, _ = await run(Requires("setup"), Provides())
    assert events[-1]["code"] == "composition-error"
    assert "'provider' provides it, but comes later" in events[-1]["message"]


def test_a_requirement_nobody_provides_is_refused_before_the_run() -> None:
    with pytest.raises(CompositionError, match="'consumer' requires 'clock', and no middleware"):
        chat(adapter=PlayedModel(), messages=[], middleware=[Requires()])


def test_requirements_of_the_adapter_are_checked_too() -> None:
    model: Any = PlayedModel()
    model.requires = (CLOCK,)
    with pytest.raises(CompositionError, match="the model adapter requires 'clock'"):
        chat(adapter=model, messages=[])


async def test_a_broken_promise_to_provide_fails_the_run() -> None:
    class Liar(ChatMiddleware):
        name = "liar"
        provides = (CLOCK,)

    events, _ = await run(Liar())
    assert "'liar' declares that it provides 'clock'" in events[-1]["message"]


async def test_providing_twice_is_warned_about_and_the_last_wins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Again(Provides):
        async def setup(self, ctx: ChatContext) -> None:
            ctx.provide(CLOCK, "tock")

    consumer = Requires()
    await run(Provides(), Again(), consumer)
    assert consumer.got == "tock"
    assert "'clock' is provided twice" in caplog.text


async def test_a_refused_resume_of_a_middleware_reaches_the_wire_with_its_errors() -> None:
    errors = [{"scope": "item", "code": "stale", "message": "gone", "interruptId": "i"}]

    def refuse(_phase: str, _config: ChatConfig) -> None:
        raise InterruptResumeError(errors)

    trace = TraceMiddleware()
    events, _ = await run(Configures(refuse), trace)
    assert types(events) == ["RUN_STARTED", "RUN_ERROR"]
    assert events[-1]["code"] == "stale"
    assert events[-1]["metadata"]["tanstack"]["interruptErrors"] == errors
    assert "onStart:init" not in trace.lines
    assert trace.error is not None


async def test_a_middleware_that_deals_with_answers_clears_them() -> None:
    taken = Configures(lambda phase, _: {"resume": []} if phase == "init" else None)
    events, _ = await run(taken, resume=[{"interruptId": "i", "status": "cancelled"}])
    assert types(events)[-1] == "RUN_FINISHED"


async def test_an_absent_capability_is_optional_when_asked_so() -> None:
    got: list[Any] = []

    class Asks(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            got.append(ctx.get(CLOCK, optional=True))
            ctx.get(CLOCK)

    events, _ = await run(Asks())
    assert got == [None]
    assert "no middleware provides 'clock'" in events[-1]["message"]


def test_what_is_no_middleware_is_refused() -> None:
    wrong: Any = object()
    with pytest.raises(CompositionError, match="not a middleware"):
        chat(adapter=PlayedModel(), messages=[], middleware=[wrong])


async def test_state_is_per_run_on_one_shared_middleware() -> None:
    class Counts(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            box: list[int] = ctx.state(self, list)
            box.append(1)

        async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
            ctx.terminal_metadata["chunks"] = len(ctx.state(self, list[int]))

    shared = Counts()
    results = await asyncio.gather(*[run(shared) for _ in range(5)])
    assert [events[-1]["metadata"]["chunks"] for events, _ in results] == [4] * 5


# -------------------------------------------------------------------------- custom events


class Emits(ChatMiddleware):
    """Emits from one hook, ``count`` times."""

    def __init__(self, hook: str, count: int = 1) -> None:
        self.count = count

        async def emit(ctx: ChatContext, *_: Any) -> None:
            for i in range(count):
                ctx.emit_custom_event("e", {"i": i})

        setattr(self, hook, emit)


@pytest.mark.parametrize(
    "hook",
    [
        "setup", "on_config", "on_start", "on_iteration", "on_interrupt_boundary", "on_usage",
        "on_before_tool_call", "on_after_tool_call", "on_tool_phase_complete",
        "on_should_continue", "on_finish",
    ],
)  # fmt: skip
async def test_every_hook_may_emit_and_the_terminal_stays_last(hook: str) -> None:
    events, _ = await run(Emits(hook), turns=[tool_turn(), text_turn()])
    assert "CUSTOM" in types(events)
    assert types(events)[0] == "RUN_STARTED"
    assert types(events)[-1] == "RUN_FINISHED"


async def test_events_are_emitted_while_the_hook_is_still_at_work() -> None:
    heard = asyncio.Event()

    class Slow(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> None:
            if ctx.phase == "init":
                ctx.emit_custom_event("working", {"n": 1})
                await asyncio.wait_for(heard.wait(), 10)

    async for event in chat(adapter=PlayedModel(text_turn()), messages=[], middleware=[Slow()]):
        if event.type.value == "CUSTOM":
            heard.set()
    assert heard.is_set()


async def test_emitted_events_precede_what_the_driver_publishes_next() -> None:
    events, _ = await run(Emits("on_after_tool_call", 3), turns=[tool_turn(), text_turn()])
    kinds = types(events)
    assert kinds.index("CUSTOM") < kinds.index("TOOL_CALL_RESULT")
    assert [e["value"]["i"] for e in events if e["type"] == "CUSTOM"] == [0, 1, 2]


async def test_emitted_events_pass_every_on_chunk() -> None:
    seen = Chunks(lambda _: None)
    await run(Emits("on_start"), seen)
    assert any(isinstance(e, CustomEvent) for e in seen.seen)


async def test_too_many_waiting_events_are_refused() -> None:
    events, _ = await run(Emits("on_start", MAX_WAITING_EMITS + 1))
    assert events[-1]["type"] == "RUN_ERROR"
    assert "wait to be published" in events[-1]["message"]


async def test_an_event_that_is_no_json_is_refused_where_it_is_emitted() -> None:
    raised: list[BaseException] = []

    class Emitter(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            try:
                ctx.emit_custom_event("bad", {"x": object()})
            except InvalidValue as error:
                raised.append(error)
            ctx.emit_custom_event("null", None)

    events, _ = await run(Emitter())
    assert "$.value.x" in str(raised[0])
    assert [e["value"] for e in events if e["type"] == "CUSTOM"] == [{}]


async def test_after_the_run_nothing_can_be_emitted() -> None:
    trace = TraceMiddleware()
    await run(trace)
    assert trace.context is not None
    with pytest.raises(ChatkeepError, match="the run is over"):
        trace.context.emit_custom_event("late", {})
    with pytest.raises(ChatkeepError, match="no running chat"):
        ChatContext(thread_id="t", run_id="r").emit_custom_event("x", {})


async def test_a_hook_that_fails_on_an_emitted_event_fails_the_run() -> None:
    def fail(event: Event) -> None:
        if isinstance(event, CustomEvent):
            raise RuntimeError("hook down")

    class Slow(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            ctx.emit_custom_event("e", {})
            await asyncio.sleep(0.01)

    events, _ = await run(Slow(), Chunks(fail))
    assert events[-1]["message"] == "hook down"


# ------------------------------------------------------------------------- failing hooks

BEFORE_THE_END = [
    "setup", "on_config", "on_start", "on_iteration", "on_interrupt_boundary", "on_chunk",
    "on_usage", "on_before_tool_call", "on_after_tool_call", "on_tool_phase_complete",
    "on_should_continue",
]  # fmt: skip


class Boom(Exception):
    code = "boom"


@pytest.mark.parametrize("hook", BEFORE_THE_END)
async def test_a_failing_hook_fails_the_run_through_on_error(hook: str) -> None:
    class Fails(ChatMiddleware):
        pass

    async def fail(*_: Any) -> None:
        raise Boom("hook down")

    bad = Fails()
    setattr(bad, hook, fail)
    trace = TraceMiddleware()
    events, _ = await run(trace, bad, turns=[tool_turn(), text_turn()])
    assert types(events)[0] == "RUN_STARTED"
    terminal = events[-1]
    assert (terminal["type"], terminal["message"], terminal["code"]) == (
        "RUN_ERROR",
        "hook down",
        "boom",
    )
    assert terminal["metadata"]["tanstack"]["threadId"] == "t"
    assert trace.error is not None
    assert isinstance(trace.error.error, Boom)
    assert trace.finish is None
    assert trace.abort is None


async def test_a_failing_on_finish_replaces_the_terminal_and_everyone_still_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(ChatMiddleware):
        async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
            raise Boom("store down")

    trace = TraceMiddleware()
    events, _ = await run(Fails(), trace, Fails())
    assert types(events)[-1] == "RUN_ERROR"
    assert types(events).count("RUN_FINISHED") == 0
    assert events[-1]["message"] == "store down"
    assert trace.finish is not None
    assert trace.error is None
    assert caplog.text.count("on_finish of middleware Fails failed") == 2


@pytest.mark.parametrize("hook", ["on_error", "on_abort"])
async def test_failures_of_the_other_terminal_hooks_are_logged(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(ChatMiddleware):
        async def on_error(self, ctx: ChatContext, info: ErrorInfo) -> None:
            raise Boom("x")

        async def on_abort(self, ctx: ChatContext, info: AbortInfo) -> None:
            raise Boom("x")

    class Aborts(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            if hook == "on_abort":
                ctx.abort("enough")
            else:
                raise Boom("first")

    trace = TraceMiddleware()
    events, _ = await run(Fails(), trace, Aborts())
    assert f"{hook} of middleware Fails failed" in caplog.text
    if hook == "on_abort":
        assert trace.abort is not None
        assert events[-1]["outcome"] == {"type": "cancelled"}
    else:
        assert trace.error is not None
        assert events[-1]["message"] == "first"


@pytest.mark.parametrize("hook", ["on_finish", "on_error", "on_abort"])
async def test_a_terminal_hook_whose_work_was_cancelled_has_failed_like_any_other(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The hooks behind it still run (one of them stores the answer), and the stream ends with
    its terminal: nobody cancelled the run."""

    async def waits_for_a_dead_task(*_: Any) -> None:
        task = asyncio.create_task(asyncio.sleep(1))
        task.cancel()
        await task

    class Begins(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            if hook == "on_abort":
                ctx.abort("enough")
            elif hook == "on_error":
                raise Boom("first")

    dead = type("Dead", (ChatMiddleware,), {hook: waits_for_a_dead_task})
    trace = TraceMiddleware()
    events, _ = await run(dead(), trace, Begins())
    assert (trace.finish or trace.error or trace.abort) is not None
    assert f"{hook} of middleware Dead was cancelled" in caplog.text
    terminal = events[-1]
    if hook == "on_finish":
        assert terminal["message"] == "on_finish of middleware Dead was cancelled"
    elif hook == "on_error":
        assert terminal["message"] == "first"
    else:
        assert terminal["outcome"] == {"type": "cancelled"}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("please", "definition.request"),
        (define_interrupt("x").request(key="k", reason="r", message="m"), "interrupts=["),
    ],
)
async def test_what_a_boundary_hook_cannot_ask_is_refused_clearly(asked: Any, told: str) -> None:
    """Something else than a request, and a request that no answer could be checked for."""

    class Pauses(ChatMiddleware):
        async def on_interrupt_boundary(
            self, ctx: ChatContext, boundary: InterruptBoundary
        ) -> Sequence[Any] | None:
            return [asked] if boundary == "beforeModel" else None

    events, _ = await run(Pauses())
    assert events[-1]["code"] == "composition-error"
    assert told in events[-1]["message"]


# -------------------------------------------------------------------- the end of a run


async def test_the_terminal_is_published_after_on_finish_has_returned() -> None:
    release = asyncio.Event()
    entered = asyncio.Event()

    class Commits(ChatMiddleware):
        async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
            entered.set()
            await release.wait()
            ctx.terminal_metadata["chatkeep"] = {"seen": 4}

    stream = chat(adapter=PlayedModel(text_turn()), messages=[], middleware=[Commits()])
    got: list[Json] = []

    async def read() -> None:
        got.extend([e.model_dump(by_alias=True) async for e in stream])

    task = asyncio.create_task(read())
    await asyncio.wait_for(entered.wait(), 10)
    await asyncio.sleep(0.02)
    assert "RUN_FINISHED" not in types(got)
    release.set()
    await asyncio.wait_for(task, 10)
    assert got[-1]["metadata"]["chatkeep"] == {"seen": 4}
    assert got[-1]["metadata"]["tanstack"]["finishReason"] == "stop"


async def test_any_middleware_may_stop_the_loop_and_all_are_asked() -> None:
    asked: list[str] = []

    class Stops(ChatMiddleware):
        def __init__(self, *, answer: bool | None) -> None:
            self.answer = answer

        async def on_should_continue(self, ctx: ChatContext, state: LoopState) -> bool | None:
            asked.append(f"{self.answer}")
            return self.answer

    events, model = await run(
        Stops(answer=None),
        Stops(answer=False),
        Stops(answer=True),
        turns=[tool_turn(), text_turn()],
    )
    assert asked == ["None", "False", "True"]
    assert len(model.requests) == 1
    assert events[-1]["metadata"]["tanstack"]["finishReason"] == "stop"


async def test_deferred_work_is_awaited_after_the_terminal_and_its_failure_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []

    class Defers(ChatMiddleware):
        async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
            async def work() -> None:
                await asyncio.sleep(0.01)
                done.append("work")
                ctx.defer(later())

            async def later() -> None:
                done.append("later")

            async def fails() -> None:
                raise Boom("deferred down")

            ctx.defer(work())
            ctx.defer(fails())

    with caplog.at_level(logging.ERROR):
        events, _ = await run(Defers())
    assert done == ["work", "later"]
    assert "deferred work failed" in caplog.text
    assert types(events)[-1] == "RUN_FINISHED"


async def test_what_hooks_are_told_at_the_end() -> None:
    trace = TraceMiddleware()
    await run(trace, turns=[tool_turn(), text_turn("m", "a", "b")])
    info = trace.finish
    assert info is not None
    assert (info.content, info.finish_reason, info.usage) == ("ab", "stop", {"promptTokens": 1})
    assert info.duration_ms >= 0
    assert trace.context is not None
    assert trace.context.iteration == 1
    assert trace.context.chunk_index > 5
    assert trace.context.current_message_id == "m"
    assert trace.context.accumulated_content == "ab"


async def test_iteration_and_message_id_are_told_before_the_turn() -> None:
    told: list[tuple[int, str]] = []

    class Listens(ChatMiddleware):
        async def on_iteration(self, ctx: ChatContext, iteration: int, message_id: str) -> None:
            told.append((iteration, message_id))

        async def on_usage(self, ctx: ChatContext, usage: Usage) -> None: ...
        async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None: ...
        async def on_tool_phase_complete(self, ctx: ChatContext, info: ToolPhaseInfo) -> None: ...

    _, model = await run(Listens(), turns=[tool_turn(), text_turn()])
    assert [i for i, _ in told] == [0, 1]
    assert [m for _, m in told] == [r.message_id for r in model.requests]


# --------------------------------------------------------------------------- error mapping


class WithCode(Exception):
    def __init__(self, **attributes: Any) -> None:
        super().__init__("text")
        self.__dict__.update(attributes)


class AbortError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (RuntimeError("x"), "x", None),
        (RuntimeError(), "RuntimeError", None),
        (WithCode(code="c"), "text", "c"),
        (WithCode(code=42), "text", "42"),
        (WithCode(code=float("nan"), status=503), "text", "503"),
        (WithCode(status_code=429), "text", "429"),
        (WithCode(code=True), "text", None),
        (AbortError("x"), "request aborted", "aborted"),
        (CompositionError("y"), "y", "composition-error"),
        (ExceptionGroup("g", [WithCode(code="first"), ValueError("2")]), "text", "first"),
    ],
)
def test_errors_are_mapped(error: BaseException, message: str, code: str | None) -> None:
    failure = failure_of(error)
    assert (failure.message, failure.code) == (message, code)


@pytest.mark.parametrize(
    "error",
    [
        BackendUnavailable("db-7.internal refused user chat"),
        CorruptRecord("entry 7 of thread t", "db-7.internal"),
        SchemaOutOfDate("db-7.internal is behind"),
        StoreClosed("db-7.internal"),
        StoreError("ReadOnlySqlTransaction on db-7.internal"),
    ],
)
def test_a_browser_is_not_told_what_a_store_says_of_itself(
    error: StoreError, caplog: pytest.LogCaptureFixture
) -> None:
    """Hosts, tables and rows go to the log; the code stays."""
    failure = failure_of(error)
    assert failure.message == error.public
    assert "db-7" not in failure.message
    assert failure.code == error.code
    assert "db-7.internal" in caplog.text


def test_a_refusal_of_a_store_is_explained_to_the_browser() -> None:
    """It names what the request named itself."""
    for error in (ThreadConflict("t"), RunConflict("r", "running"), RecordTooLarge("body", 9, 8)):
        assert failure_of(error).message == str(error)
