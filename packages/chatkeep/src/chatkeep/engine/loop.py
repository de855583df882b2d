"""The order of a run, from RUN_STARTED to its one terminal.

1. RUN_STARTED, before any hook: whoever joins hears something at once.
2. ``setup``, ``on_config`` (init), the answers if this run continues a paused one
   (``on_interrupt_resolution``), ``on_start``.
3. A continuation: MESSAGES_SNAPSHOT, then the calls that were left open.
4. Turns: ``on_iteration``, ``on_config``, the model call, then its tools, until the model is done,
   the loop's limit is reached, or somebody must be asked; then the structured answer, if one is
   wanted.
5. One terminal hook (``on_finish``, ``on_interrupt``, ``on_error`` or ``on_abort``), then the
   terminal event.
6. Deferred work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

from chatkeep.engine import events
from chatkeep.engine.abort import Aborted, AbortSignal, Gate
from chatkeep.engine.activities import Activities
from chatkeep.engine.call_plan import Verdict
from chatkeep.engine.calls import Call
from chatkeep.engine.channel import Channel
from chatkeep.engine.configuration import Configuration
from chatkeep.engine.continuation import answers_of, open_calls, policy_of
from chatkeep.engine.endings import Endings
from chatkeep.engine.failure import error_text
from chatkeep.engine.hooks import Hooks, check_capabilities
from chatkeep.engine.interrupts import Batch, InterruptRequest, ResumeState
from chatkeep.engine.middleware import (
    Capability,
    ChatContext,
    Event,
    FinishReason,
    InterruptBoundary,
    LoopState,
    ResumePolicy,
    ToolPhaseInfo,
)
from chatkeep.engine.model_calls import ModelCalls
from chatkeep.engine.options import RunOptions
from chatkeep.engine.pause import Pause, check_requests, prepare
from chatkeep.engine.publish import Publisher
from chatkeep.engine.recording import Recorder
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.snapshot import thread_snapshot
from chatkeep.engine.structured import complete_answer, loop_is_needed
from chatkeep.engine.structured_answer import StructuredAnswer
from chatkeep.engine.terminal import Terminal
from chatkeep.engine.tool_phase import ToolPhase
from chatkeep.engine.transcript import Transcript
from chatkeep.engine.turn import Turn

__all__ = ["Run"]

_LOG: Final = logging.getLogger("chatkeep.engine")


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
        transcript = Transcript(context)
        activities = Activities(context, transcript)
        answer = (
            StructuredAnswer(options.output, options.structured, transcript)
            if options.output is not None
            else None
        )
        publisher = Publisher(channel, hooks, context, Recorder(transcript, activities, answer))
        self._runtime = Runtime(context, gate, hooks, publisher, transcript, activities, answer)
        terminal = Terminal(context)
        self._configuration = Configuration(self._runtime, options)
        self._model = ModelCalls(self._runtime, options, terminal)
        self._endings = Endings(self._runtime, terminal)
        self._last: Turn | None = None
        self._last_reason: FinishReason | None = None
        self._content = ""
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
        runtime, options = self._runtime, self._options
        self._endings.begin()
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
        endings = self._endings
        try:
            end = await self._turns()
        except Aborted:
            return await endings.aborted()
        except asyncio.CancelledError:
            # The task itself is cancelled (the loop shuts down): the hooks still have their say.
            self.signal.abort("cancelled")
            return await endings.aborted()
        except Exception as error:  # noqa: BLE001 - becomes RUN_ERROR and on_error
            if self.signal.aborted:
                endings.log(logging.INFO, error, "raised while the run was aborted")
                return await endings.aborted()
            return await endings.failed(error)
        except GeneratorExit:
            raise
        except BaseException as error:
            # An extension panicked, somebody called exit: that is not ours to stop, but the run
            # ends too, or its lease would be renewed for ever.
            wrapped = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
            wrapped.__cause__ = error
            await endings.failed(wrapped)
            raise
        if isinstance(end, Pause):
            return await endings.paused(end)
        return await endings.finished(end, self._content, told=end or self._last_reason)

    async def _turns(self) -> FinishReason | Pause | None:
        """Everything up to the end; the finish reason, or what the run pauses with."""
        runtime = self._runtime
        runtime.gate.check()
        await runtime.hooks.setup(self._declared)
        runtime.gate.check()
        await self._configuration.refresh("init")
        runtime.gate.check()
        answers = answers_of(runtime, self._options, self._configuration)
        policy: ResumePolicy = "continue"
        if answers is not None:
            policy = await policy_of(runtime, answers)
        await runtime.hooks.call("on_start")
        runtime.gate.check()
        if answers is not None:
            await runtime.publisher.pipe(thread_snapshot(runtime.context))
            if policy == "stop":
                return "stop"
            calls = open_calls(runtime.context.messages, answers)
            if calls:
                pause = await self._continue(calls, answers, cancel_all=policy == "cancel")
                if pause is not None:
                    return pause
        end = None
        if loop_is_needed(runtime.answer, self._configuration):
            end = await self._loop()
            self._content = "" if self._last is None else self._last.content
        if runtime.answer is not None and not isinstance(end, Pause):
            made = await complete_answer(
                runtime, runtime.answer, self._configuration, self._model, self._last
            )
            self._last_reason = None if made is None else made.finish_reason
        return end

    async def _loop(self) -> FinishReason | Pause | None:
        """Model turns and their tools."""
        runtime = self._runtime
        while True:
            runtime.gate.check()
            turn = await self._model_turn()
            if isinstance(turn, Pause):
                return turn
            self._last = turn
            requests = await self._boundary("afterModel")
            if requests:
                return await self._pause(requests)
            if not self._wants_tools(turn):
                await self._may_continue(turn)
                return "stop" if turn.finish_reason == "tool_calls" else turn.finish_reason
            pause = await self._tool_phase(turn)
            if pause is not None:
                return pause
            stop = await self._may_continue(turn)
            if stop is not None:
                return stop
            runtime.context.iteration += 1

    async def _model_turn(self) -> Turn | Pause:
        runtime = self._runtime
        context = runtime.context
        message_id = runtime.transcript.take_message_id(None)
        await runtime.hooks.call("on_iteration", context.iteration, message_id)
        await self._configuration.refresh("beforeModel")
        requests = await self._boundary("beforeModel")
        if requests:
            return await self._pause(requests)
        context.phase = "modelStream"
        return await self._model.make(message_id, self._configuration.config)

    def _wants_tools(self, turn: Turn) -> bool:
        if turn.finish_reason != "tool_calls" or not turn.calls:
            return False
        # Without tools a call is one of an unknown tool: it gets its failed result as any other.
        return bool(self._configuration.tools) or any(call.waiting for call in turn.calls)

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

    # --------------------------------------------------------------------- pauses

    async def _boundary(self, boundary: InterruptBoundary) -> list[InterruptRequest]:
        """Ask every middleware whether the run is to pause here."""
        runtime = self._runtime
        runtime.context.phase = boundary
        requests: list[InterruptRequest] = []
        for asked in await runtime.hooks.call("on_interrupt_boundary", boundary):
            requests += asked or ()
        check_requests(requests, self._configuration.config.interrupts)
        await runtime.publisher.flush()
        runtime.gate.check()
        return requests

    async def _pause(
        self, requests: Sequence[InterruptRequest], phase: ToolPhase | None = None
    ) -> Pause:
        answers = self._configuration.config.resume_tool_state
        batch = Batch(self._options.run_id, () if answers is None else answers.taken)
        if phase is not None:
            phase.ask(batch)
        for request in requests:
            batch.generic(request, boundary=self._runtime.context.phase)
        return await prepare(self._runtime, batch)

    # -------------------------------------------------------------------------- tools

    async def _tool_phase(self, turn: Turn) -> Pause | None:
        """The tools of a model turn."""
        self._tool_calls += len(turn.calls)
        requests = await self._boundary("beforeTools")
        phase = self._phase(turn.calls)
        if requests:
            return await self._pause(requests, phase)
        return await self._run_tools(turn.calls, phase, after="afterTools")

    async def _continue(
        self, calls: Sequence[Call], answers: ResumeState, *, cancel_all: bool
    ) -> Pause | None:
        """The calls that a paused run left open."""
        requests = await self._boundary("beforeTools")
        phase = self._phase(calls, answers, cancel_all=cancel_all)
        if requests:
            phase.settle()
            for event in phase.record():
                await self._runtime.publisher.pipe(event)
            return await self._pause(requests, phase)
        return await self._run_tools(calls, phase, after=None)

    def _phase(
        self,
        calls: Sequence[Call],
        answers: ResumeState | None = None,
        *,
        cancel_all: bool = False,
    ) -> ToolPhase:
        return ToolPhase(
            self._runtime,
            self._configuration.tools,
            self._options.tool_execution,
            calls,
            answers=answers,
            cancel_all=cancel_all,
        )

    async def _run_tools(
        self, calls: Sequence[Call], phase: ToolPhase, *, after: Literal["afterTools"] | None
    ) -> Pause | None:
        """Execute, tell the hooks, publish the results in call order, and pause if a call or a
        middleware (at the boundary ``after``) asks for somebody."""
        runtime = self._runtime
        requests: list[InterruptRequest] = []
        results: list[Event] = []
        try:
            try:
                await phase.run()
            finally:
                results = phase.record()
            runtime.gate.check()
            if after is not None:
                runtime.context.phase = after
            approvals = phase.waiting(Verdict.ASK_APPROVAL)
            browser = phase.waiting(Verdict.ASK_CLIENT)
            info = ToolPhaseInfo(
                tool_calls=[call.entry() for call in calls],
                results=phase.outcomes,
                needs_approval=approvals,
                needs_client_execution=browser,
            )
            await runtime.hooks.call("on_tool_phase_complete", info)
            if after is not None:
                requests = await self._boundary(after)
        except BaseException:
            # The run ends here. What the tools did is in the transcript, so it is shown too.
            for event in results:
                runtime.publisher.put(event)
            raise
        for event in results:
            await runtime.publisher.pipe(event)
        runtime.gate.check()
        if requests or approvals or browser:
            return await self._pause(requests, phase)
        return None

    async def _deferred(self) -> None:
        deferred = self._runtime.context.deferred
        while deferred:
            work, deferred[:] = list(deferred), []
            for result in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(result, BaseException):
                    _LOG.error("deferred work failed", exc_info=result)
