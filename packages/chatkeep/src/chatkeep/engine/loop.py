"""The order of a run, from RUN_STARTED to its one terminal.

1. RUN_STARTED, before any hook: whoever joins hears something at once.
2. ``setup``, ``on_config`` (init), ``on_start``.
3. Turns: ``on_iteration``, ``on_config``, the model call, then its tools, until the model is done
   or the loop's limit is reached.
4. One terminal hook (``on_finish``, ``on_error`` or ``on_abort``), then the terminal event.
5. Deferred work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from ag_ui.core import EventType, RunErrorEvent, RunFinishedEvent
from anyio import move_on_after

from chatkeep.engine import events
from chatkeep.engine.abort import CANCEL_REQUESTED, Aborted, AbortSignal, Gate
from chatkeep.engine.adapter import ModelAdapter, ModelRequest
from chatkeep.engine.channel import Channel
from chatkeep.engine.failure import error_text, failure_of, is_foreign, log_raised
from chatkeep.engine.hooks import Hooks, check_capabilities
from chatkeep.engine.middleware import (
    AbortInfo,
    Capability,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    ErrorInfo,
    Event,
    FinishInfo,
    FinishReason,
    InterruptBoundary,
    LoopState,
    Phase,
    ToolPhaseInfo,
)
from chatkeep.engine.publish import Publisher
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.terminal import Terminal
from chatkeep.engine.tool_phase import ToolExecution, ToolPhase
from chatkeep.engine.tools import Tool, tools_by_name
from chatkeep.engine.transcript import Transcript
from chatkeep.engine.turn import Turn
from chatkeep.errors import CompositionError, InterruptResumeError, ProviderError
from chatkeep.messages import provider_view
from chatkeep.records import ActivityRecord, ModelMessage

__all__ = ["ADAPTER_CLOSE_SECONDS", "LoopStrategy", "Run", "RunOptions"]

_LOG: Final = logging.getLogger("chatkeep.engine")

LoopStrategy = Callable[[LoopState], bool]
"""Whether another model turn may follow. Asked after a tool phase."""

ADAPTER_CLOSE_SECONDS: Final = 10.0
"""How long an adapter may take to close its stream when the run stops early."""

_CONFIG_FIELDS: Final = frozenset(f.name for f in fields(ChatConfig))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything a run is started with, checked and converted by ``chat()``."""

    adapter: ModelAdapter
    messages: list[ModelMessage]
    activities: list[ActivityRecord]
    thread_id: str
    run_id: str
    parent_run_id: str | None
    resume: list[dict[str, Any]]
    system_prompts: list[str]
    tools: list[Tool]
    middleware: tuple[ChatMiddleware, ...]
    loop: LoopStrategy
    tool_execution: ToolExecution
    model_options: dict[str, Any]
    metadata: dict[str, Any]
    context: Any
    seen: int | None
    state: Any
    forwarded_props: dict[str, Any]


class Run:
    """One run. :meth:`drive` does all of it in one task; events come out of ``channel``."""

    def __init__(self, options: RunOptions, channel: Channel) -> None:
        self._options = options
        self._channel = channel
        self._declared = check_capabilities(
            options.middleware,
            cast("Sequence[Capability[Any]]", getattr(options.adapter, "requires", ())),
        )
        self.signal = AbortSignal()
        gate = Gate(self.signal)
        context = ChatContext(
            thread_id=options.thread_id,
            run_id=options.run_id,
            parent_run_id=options.parent_run_id,
            provider=options.adapter.provider,
            model=options.adapter.model,
            context=options.context,
            seen=options.seen,
            client_state=options.state,
            forwarded_props=options.forwarded_props,
            signal=self.signal,
            abort=self.abort,
            emit=lambda event: self._runtime.publisher.emit(event),
        )
        hooks = Hooks(options.middleware, context, gate)
        self._runtime = Runtime(
            context, gate, hooks, Publisher(channel, hooks, context), Transcript(context)
        )
        self._config = ChatConfig(
            messages=options.messages,
            provider_messages=list(options.messages),
            system_prompts=options.system_prompts,
            tools=options.tools,
            resume=options.resume,
            resume_tool_state=None,
            metadata=options.metadata,
            model_options=options.model_options,
            activities=options.activities,
        )
        self._tools: dict[str, Tool] = {}
        self._began = 0.0
        self._terminal = Terminal(context)
        self._last: Turn | None = None
        self._tool_calls = 0

    @property
    def context(self) -> ChatContext:
        """What hooks are handed."""
        return self._runtime.context

    def abort(self, reason: str | None = None) -> None:
        """Have the run end through the abort path; too late once it has begun to end."""
        self._channel.release()
        if not self._runtime.gate.closed:
            self.signal.abort(reason)

    # ------------------------------------------------------------------------ the run

    async def drive(self) -> None:
        """Run to the terminal event and past the deferred work; never raises an ordinary error."""
        self._began = time.perf_counter()
        runtime, options = self._runtime, self._options
        runtime.publisher.lifecycle(
            events.run_started(
                thread_id=options.thread_id,
                run_id=options.run_id,
                parent_run_id=options.parent_run_id,
                model=options.adapter.model,
            )
        )
        try:
            terminal = await self._outcome()
            await runtime.publisher.settle()
            runtime.publisher.finish()
            runtime.publisher.lifecycle(terminal)
        finally:
            await self._deferred()
            self._channel.close()

    async def _outcome(self) -> Event:
        """Everything between the first event and the last, which is returned."""
        try:
            reason = await self._turns()
        except Aborted:
            return await self._aborted(self.signal.reason)
        except asyncio.CancelledError:
            # The task itself is cancelled (the loop shuts down): the hooks still have their say.
            self.signal.abort("cancelled")
            return await self._aborted(self.signal.reason)
        except Exception as error:  # noqa: BLE001 - becomes RUN_ERROR and on_error
            if self.signal.aborted:
                self._log(logging.INFO, error, "raised while the run was aborted")
                return await self._aborted(self.signal.reason)
            return await self._failed(error)
        except GeneratorExit:
            raise
        except BaseException as error:
            # An extension panicked, somebody called exit: that is not ours to stop, but the run
            # ends too, or its lease would be renewed for ever.
            wrapped = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
            wrapped.__cause__ = error
            await self._failed(wrapped)
            raise
        return await self._finished(reason)

    async def _turns(self) -> FinishReason | None:
        runtime = self._runtime
        runtime.gate.check()
        await runtime.hooks.setup(self._declared)
        runtime.gate.check()
        await self._configure("init")
        runtime.gate.check()
        if self._config.resume:
            raise self._nothing_pending(self._config.resume)
        await runtime.hooks.call("on_start")
        while True:
            runtime.gate.check()
            turn = await self._model_turn()
            self._last = turn
            await self._boundary("afterModel")
            if not self._wants_tools(turn):
                await self._may_continue(turn)
                return "stop" if turn.finish_reason == "tool_calls" else turn.finish_reason
            await self._tool_phase(turn)
            stop = await self._may_continue(turn)
            if stop is not None:
                return stop
            runtime.context.iteration += 1

    def _wants_tools(self, turn: Turn) -> bool:
        if turn.finish_reason != "tool_calls" or not turn.calls:
            return False
        # Without tools a call is one of an unknown tool: it gets its failed result as any other.
        return bool(self._tools) or any(call.waiting for call in turn.calls)

    async def _may_continue(self, turn: Turn) -> FinishReason | None:
        """Ask the strategy and every hook. The finish reason if one of them says stop."""
        runtime = self._runtime
        state = LoopState(
            iteration_count=runtime.context.iteration + 1,
            messages=runtime.context.messages,
            finish_reason=turn.finish_reason,
            tool_call_count=self._tool_calls,
            last_turn_tool_call_count=len(turn.calls),
        )
        allowed = self._options.loop(state)
        answers = await runtime.hooks.call("on_should_continue", state)
        await runtime.publisher.flush()
        runtime.gate.check()
        if any(answer is False for answer in answers):
            return "stop"
        return None if allowed else "length"

    # --------------------------------------------------------------------- configuration

    async def _configure(self, phase: Phase) -> None:
        """The ``on_config`` pipeline. What it makes of the messages lasts; what it makes of
        ``provider_messages`` is for the next call."""
        runtime = self._runtime
        context = runtime.context
        context.phase = phase
        config = replace(self._config)
        if phase != "init":
            config.messages = context.messages
        config.provider_messages = list(config.messages)
        before = config.messages
        with runtime.gate:
            for middleware, hook in runtime.hooks.of("on_config"):
                patch = await hook(context, config)
                if patch:
                    config = _patched(config, patch, middleware)
        self._config = config
        if phase == "init" or config.messages is not before:
            runtime.transcript.replace(config.messages)
        self._tools = tools_by_name(config.tools)
        context.activities = config.activities
        context.system_prompts = list(config.system_prompts)
        context.model_options = dict(config.model_options)
        context.tool_names = list(self._tools)
        await runtime.publisher.flush()

    def _nothing_pending(self, entries: Sequence[Mapping[str, Any]]) -> InterruptResumeError:
        """The refusal of answers that no middleware took: nothing waits for one."""
        common = {
            "threadId": self._options.thread_id,
            "interruptedRunId": self._options.parent_run_id or self._options.run_id,
            "generation": 0,
            "source": "server",
            "retryable": False,
        }
        ids = [str(entry.get("interruptId", "")) for entry in entries]
        items = [
            {
                **common,
                "scope": "item",
                "interruptId": name,
                "code": "unknown-interrupt",
                "message": f"Interrupt {name} is not pending: nothing is pending on this thread.",
            }
            for name in sorted(ids)
        ]
        batch = {
            **common,
            "scope": "batch",
            "interruptIds": ids,
            "code": "incomplete-batch",
            "message": "The answers do not match what is pending.",
        }
        return InterruptResumeError([*items, batch])

    async def _boundary(self, boundary: InterruptBoundary) -> None:
        context = self._runtime.context
        context.phase = boundary
        for requests in await self._runtime.hooks.call("on_interrupt_boundary", boundary):
            if requests:
                raise CompositionError(
                    f"a middleware asks to interrupt the run at {boundary}; this version of "
                    "chatkeep cannot pause runs"
                )
        await self._runtime.publisher.flush()
        self._runtime.gate.check()

    # ---------------------------------------------------------------------- a model turn

    async def _model_turn(self) -> Turn:
        runtime, options = self._runtime, self._options
        context = runtime.context
        message_id = runtime.transcript.take_message_id(None)
        await runtime.hooks.call("on_iteration", context.iteration, message_id)
        await self._configure("beforeModel")
        await self._boundary("beforeModel")
        context.phase = "modelStream"
        source = _source_of(options.adapter)
        turn = Turn(context, runtime.transcript, message_id, source)
        request = ModelRequest(
            messages=provider_view(self._config.provider_messages, source=source or None),
            system_prompts=tuple(self._config.system_prompts),
            tools=tuple(self._config.tools),
            model_options=self._config.model_options,
            thread_id=options.thread_id,
            run_id=options.run_id,
            message_id=message_id,
            abort=self.signal,
        )
        with runtime.gate.interruptible():
            await self._consume(options.adapter.stream(request), turn)
        runtime.gate.check()
        if not turn.ended:
            _LOG.warning("the model's stream ended without RUN_FINISHED; taken as its end")
            await self._close_turn(turn)
            runtime.gate.check()
        row = turn.message()
        if row is not None:
            runtime.transcript.append(row)
            for result in turn.results:
                runtime.transcript.append(result)
        return turn

    async def _consume(self, stream: AsyncIterator[Event], turn: Turn) -> None:
        publisher, gate = self._runtime.publisher, self._runtime.gate
        over = False
        try:
            async for event in stream:
                gate.check()
                if over:
                    _LOG.warning("an event after the end of a model call is ignored: %r", event)
                    continue
                published = turn.reduce(event)
                if published is None:
                    continue
                if isinstance(published, list):
                    for one in published:
                        await publisher.pipe(one)
                elif published.type is EventType.RUN_STARTED:
                    await publisher.observe(published)
                elif isinstance(published, RunFinishedEvent | RunErrorEvent):
                    over = True
                    await self._end_of_call(turn, published)
                else:
                    await publisher.pipe(published)
        finally:
            await _close(stream)

    async def _close_turn(self, turn: Turn) -> None:
        """Publish the ends that the adapter, or a hook, left out."""
        publisher = self._runtime.publisher
        for event in turn.close():
            await publisher.pipe(event)
        publisher.close_spans(steps=False)

    async def _end_of_call(self, turn: Turn, ended: RunFinishedEvent | RunErrorEvent) -> None:
        """RUN_FINISHED or RUN_ERROR of the adapter: hooks see it, the wire does not."""
        runtime = self._runtime
        if not isinstance(ended, RunErrorEvent):
            await self._close_turn(turn)
        seen = await runtime.publisher.observe(ended)
        if turn.usage is not None:
            self._terminal.count(turn.usage, ended)
            await runtime.hooks.call("on_usage", turn.usage)
        last = events.normalized(seen[-1]) if seen else events.normalized(ended)
        self._terminal.remember(last)
        if isinstance(last, RunErrorEvent):
            raise ProviderError(last.message, provider_code=last.code, raw_event=last.raw_event)

    # -------------------------------------------------------------------------- tools

    async def _tool_phase(self, turn: Turn) -> None:
        runtime = self._runtime
        context = runtime.context
        self._tool_calls += len(turn.calls)
        await self._boundary("beforeTools")
        phase = ToolPhase(runtime, self._tools, self._options.tool_execution)
        results: list[Event] = []
        try:
            try:
                await phase.run(turn.calls)
            finally:
                for call, row in phase.rows():
                    runtime.transcript.append(row)
                    results.append(call.result_event(row))
            runtime.gate.check()
            context.phase = "afterTools"
            info = ToolPhaseInfo(
                tool_calls=[call.entry() for call in turn.calls], results=phase.outcomes
            )
            await runtime.hooks.call("on_tool_phase_complete", info)
            await self._boundary("afterTools")
        except BaseException:
            # The run ends here. What the tools did is in the transcript, so it is shown too.
            for event in results:
                runtime.publisher.put(event)
            raise
        for event in results:
            await runtime.publisher.pipe(event)
        runtime.gate.check()

    # ---------------------------------------------------------------------- the terminal

    def _log(self, level: int, error: Exception, what: str) -> None:
        """What chatkeep raises itself is told by RUN_ERROR; of all else the log has more."""
        if is_foreign(error):
            options = self._options
            log_raised(level, error, what, run_id=options.run_id, thread_id=options.thread_id)

    def _elapsed(self) -> float:
        return (time.perf_counter() - self._began) * 1000

    async def _finished(self, reason: FinishReason | None) -> Event:
        runtime = self._runtime
        runtime.gate.close()
        runtime.publisher.close_spans()
        info = FinishInfo(
            finish_reason=reason,
            duration_ms=self._elapsed(),
            content=self._last.content if self._last is not None else "",
            usage=self._terminal.usage,
        )
        failures = await runtime.hooks.every("on_finish", info)
        try:
            await runtime.publisher.flush()
        except Exception as late:  # noqa: BLE001 - becomes the terminal
            self._log(logging.ERROR, late, "the run failed at its end")
            failures.append(late)
        if failures:
            return self._terminal.failed(failure_of(failures[0]))
        return self._terminal.finished(reason)

    async def _failed(self, error: Exception) -> Event:
        self._runtime.gate.close()
        failure = failure_of(error)
        self._log(logging.ERROR, error, "the run failed")
        info = ErrorInfo(
            error=error,
            message=failure.message,
            code=failure.code,
            duration_ms=self._elapsed(),
            refused=error is self._runtime.hooks.refusal,
        )
        await self._runtime.hooks.every("on_error", info)
        return self._terminal.failed(failure)

    async def _aborted(self, reason: str | None) -> Event:
        self._runtime.gate.close()
        self._runtime.publisher.close_spans()
        info = AbortInfo(
            reason=reason,
            cancel_requested=reason == CANCEL_REQUESTED,
            duration_ms=self._elapsed(),
        )
        await self._runtime.hooks.every("on_abort", info)
        return self._terminal.cancelled()

    async def _deferred(self) -> None:
        deferred = self._runtime.context.deferred
        while deferred:
            work, deferred[:] = list(deferred), []
            for result in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(result, BaseException):
                    _LOG.error("deferred work failed", exc_info=result)


def _patched(
    config: ChatConfig, patch: Mapping[str, Any], middleware: ChatMiddleware
) -> ChatConfig:
    unknown = set(patch) - _CONFIG_FIELDS
    if unknown:
        raise CompositionError(
            f"on_config of {middleware.name or type(middleware).__name__} returned unknown "
            f"fields: {', '.join(sorted(unknown))}"
        )
    values = dict(patch)
    if "messages" in values and "provider_messages" not in values:
        values["provider_messages"] = list(values["messages"])
    return replace(config, **values)


def _source_of(adapter: ModelAdapter) -> dict[str, Any]:
    """``{provider, api, model}`` of an adapter, as far as it says."""
    named = {
        "provider": adapter.provider,
        "api": getattr(adapter, "api", None),
        "model": adapter.model,
    }
    return {key: value for key, value in named.items() if value}


async def _close(stream: AsyncIterator[Event]) -> None:
    """Close an adapter's stream, also while the run is being cancelled, within a time."""
    close = getattr(stream, "aclose", None)
    if close is None:
        return
    with move_on_after(ADAPTER_CLOSE_SECONDS, shield=True) as scope:
        try:
            await close()
        except Exception:  # noqa: BLE001 - the call is over; what it gave stands
            _LOG.exception("closing the model's stream failed")
    if scope.cancelled_caught:
        _LOG.error("the model's stream did not close within %s s", ADAPTER_CLOSE_SECONDS)
