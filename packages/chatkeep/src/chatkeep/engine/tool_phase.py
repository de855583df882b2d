"""Executing the calls of one model turn, and saying which of them pause the run.

Order: what becomes of each call is planned in call order (:mod:`chatkeep.engine.call_plan`),
and ``on_before_tool_call`` asked for those that are executed; then all that may run do so,
together (or one after the other); results stand in call order, whatever finished first. A failure
of a tool is a result like any other: ``{"error": …}``, ``error`` on its row, and the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import anyio

from chatkeep.engine.call_plan import CallPlan, Planner, Verdict
from chatkeep.engine.calls import Call, result_content
from chatkeep.engine.events import custom
from chatkeep.engine.failure import error_text, failure_of, is_foreign, log_raised
from chatkeep.engine.interrupts import (
    CANCELLED_TEXT,
    Batch,
    ResumeState,
    approval_id,
    client_tool_id,
)
from chatkeep.engine.middleware import (
    BeforeToolDecision,
    Event,
    ToolCallInfo,
    ToolOutcome,
    WaitingCall,
)
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.tools import Tool, ToolContext
from chatkeep.records import ModelMessage

__all__ = ["ToolExecution", "ToolPhase"]

ToolExecution = Literal["parallel", "sequential"]

_GIVEN: Final = frozenset({Verdict.RESULT, Verdict.FAILED})


@dataclass(slots=True)
class _Planned:
    """One call of the batch, and what became of it."""

    plan: CallPlan
    row: ModelMessage | None = None
    outcome: ToolOutcome | None = None

    @property
    def call(self) -> Call:
        return self.plan.call


class ToolPhase:
    """One batch of calls: those of a model turn, or, with ``answers``, those that a paused run
    left open.

    Calls that the provider executes or has answered are no part of it. ``cancel_all``: nothing
    of it is executed, every call gets a failed result.
    """

    def __init__(
        self,
        runtime: Runtime,
        tools: Mapping[str, Tool],
        execution: ToolExecution,
        calls: Sequence[Call],
        *,
        answers: ResumeState | None = None,
        cancel_all: bool = False,
    ) -> None:
        self._runtime = runtime
        self._execution = execution
        self._continues = answers is not None
        self._planner = Planner(
            tools, answers=answers, cancel_all=cancel_all, report=self._log_raised
        )
        plans = self._planner.plan([call for call in calls if call.waiting])
        self._planned = [_Planned(plan) for plan in plans]
        self._after = asyncio.Lock()

    async def run(self) -> None:
        """Execute what may be executed.

        Returns early when the run is aborted. The calls without a result are then failed ones;
        not so in a continuation: there they stay open, because their questions do. A hook that
        fails propagates; a tool that fails does not.
        """
        ready: list[_Planned] = []
        gate = self._runtime.gate
        done = False
        try:
            for planned in self._planned:
                if await self._prepare(planned):
                    ready.append(planned)
                if gate.signal.aborted:
                    return
            if ready:
                with gate.interruptible():
                    await self._execute_all(ready)
            done = not gate.signal.aborted
        finally:
            if not done and not self._continues:
                for planned in self._planned:
                    if planned.row is None:
                        self._fail(planned, CANCELLED_TEXT)
        if self._runtime.publisher.failure is not None:
            raise self._runtime.publisher.failure

    def settle(self) -> None:
        """Give their results to the calls that have one without being executed, and leave the
        others open: the run pauses before it executes anything."""
        for planned in self._planned:
            if planned.plan.verdict in _GIVEN:
                self._give(planned)

    @property
    def outcomes(self) -> list[ToolOutcome]:
        """What became of each call, in call order."""
        return [planned.outcome for planned in self._planned if planned.outcome is not None]

    def record(self) -> list[Event]:
        """Add the result rows to the transcript, in call order, each with its own id; the events
        that tell of them."""
        events: list[Event] = []
        for planned in self._planned:
            if planned.row is not None:
                self._runtime.transcript.append(planned.row)
                events.append(planned.call.result_event(planned.row))
        return events

    # --------------------------------------------------------------------- who waits

    def waiting(
        self, verdict: Literal[Verdict.ASK_APPROVAL, Verdict.ASK_CLIENT]
    ) -> list[WaitingCall]:
        """The calls that wait for a person, or for a browser."""
        name_of = approval_id if verdict is Verdict.ASK_APPROVAL else client_tool_id
        return [
            WaitingCall(
                tool_call_id=p.call.identity,
                tool_name=p.call.name,
                args=p.plan.args,
                interrupt_id=name_of(p.call.identity),
            )
            for p in self._planned
            if p.plan.verdict is verdict
        ]

    def ask(self, batch: Batch) -> None:
        """Add to ``batch`` what the calls without a result ask. An approved call that was not
        executed, because the run pauses before that, asks again: its answer counts once."""
        for planned in self._planned:
            plan, tool = planned.plan, planned.plan.tool
            if planned.row is not None or tool is None:
                continue
            name = plan.call.identity
            if plan.verdict is Verdict.ASK_CLIENT:
                batch.client_tool(tool, name, plan.args, decision=plan.decision)
            elif plan.verdict is Verdict.ASK_APPROVAL or plan.decision is not None:
                batch.approval(tool, name, plan.args)

    # ---------------------------------------------------------------------- one call

    async def _prepare(self, planned: _Planned) -> bool:
        """Give a call the result it has, or ask the hooks. True: it is to be executed."""
        plan = planned.plan
        if plan.verdict in _GIVEN:
            self._give(planned)
            return False
        if plan.verdict is not Verdict.EXECUTE:
            return False
        tool = cast("Tool", plan.tool)
        info = ToolCallInfo(
            tool_call_id=plan.call.identity, tool_name=tool.name, tool=tool, args=plan.args
        )
        decision: BeforeToolDecision | None = await self._runtime.hooks.first(
            "on_before_tool_call", info
        )
        return True if decision is None else await self._decided(planned, decision)

    def _give(self, planned: _Planned) -> None:
        plan = planned.plan
        if plan.verdict is Verdict.RESULT:
            self._succeed(planned, plan.value, duration_ms=0.0)
        else:
            self._fail_with(planned, plan.value, duration_ms=0.0)

    async def _decided(self, planned: _Planned, decision: BeforeToolDecision) -> bool:
        plan = planned.plan
        if decision.action == "transform":
            issue = self._planner.issue(plan.call, cast("Tool", plan.tool), decision.value)
            if issue is not None:
                self._fail(planned, issue)
                return False
            plan.args = decision.value
            return True
        if decision.action == "skip":
            self._succeed(planned, decision.value, duration_ms=0.0)
            await self._tell(planned)
            return False
        reason = decision.value
        self._runtime.context.abort(None if reason is None else str(reason))
        return False

    async def _execute_all(self, ready: Sequence[_Planned]) -> None:
        if self._execution == "sequential" or len(ready) == 1:
            for planned in ready:
                await self._execute(planned)
                if self._runtime.gate.signal.aborted:
                    return
            return
        try:
            async with anyio.create_task_group() as group:
                for planned in ready:
                    group.start_soon(self._execute, planned)
        except BaseExceptionGroup as group_error:
            # Only hooks and cancellation come out of _execute.
            raise group_error.exceptions[0] from None

    async def _execute(self, planned: _Planned) -> None:
        execute = cast("Tool", planned.plan.tool).execute
        if execute is None:
            raise AssertionError("client tools are never executed here")
        began = time.perf_counter()
        try:
            value = await execute(planned.plan.args, self._context_of(planned))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._fail(planned, CANCELLED_TEXT, duration_ms=_since(began))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - becomes the call's result
            # All of them: a command line parser exits, extensions in Rust panic.
            why = failure_of(error).message
            if not isinstance(error, Exception):
                why = f"{type(error).__name__}: {why}"
            self._log_raised(planned.call, error)
            self._fail(planned, why, duration_ms=_since(began))
        else:
            self._succeed(planned, value, duration_ms=_since(began))
        async with self._after:
            await self._tell(planned)

    def _log_raised(self, call: Call, error: BaseException) -> None:
        context = self._runtime.context
        log_raised(
            logging.WARNING,
            error,
            "tool %r raised",
            call.name,
            run_id=context.run_id,
            thread_id=context.thread_id,
        )

    def _context_of(self, planned: _Planned) -> ToolContext:
        runtime, call = self._runtime, planned.call

        async def emit(name: str, value: Any) -> None:
            body: Mapping[str, Any] = {} if value is None else {"value": value}
            if isinstance(value, Mapping):
                body = cast("Mapping[str, Any]", value)
            event = custom(name, {**body, "toolCallId": call.identity})
            await runtime.publisher.emit_from_tool(event)

        return ToolContext(
            tool_call_id=call.identity,
            tool_name=call.name,
            thread_id=runtime.context.thread_id,
            run_id=runtime.context.run_id,
            context=runtime.context.context,
            abort=runtime.gate.signal,
            _emit=emit,
            approval=planned.plan.decision,
        )

    async def _tell(self, planned: _Planned) -> None:
        if planned.outcome is not None:
            await self._runtime.hooks.call("on_after_tool_call", planned.outcome)

    # ------------------------------------------------------------------------ results

    def _row(self, planned: _Planned, value: Any, *, failed: bool) -> ModelMessage:
        identity = self._runtime.transcript.take_message_id(None)
        outcome = planned.plan.outcome
        return planned.call.result_row(value, identity=identity, failed=failed, outcome=outcome)

    def _succeed(self, planned: _Planned, value: Any, *, duration_ms: float) -> None:
        tool = cast("Tool", planned.plan.tool)
        try:
            seen, _ = result_content(value)
            row = self._row(planned, value, failed=False)
        except Exception as error:  # noqa: BLE001 - reading a result runs the tool's own code
            if is_foreign(error):
                self._log_raised(planned.call, error)
            self._fail(
                planned,
                f"The result of tool {tool.name} cannot be written as JSON: {error_text(error)}",
                duration_ms=duration_ms,
            )
            return
        issue = tool.output_issue(seen)
        if issue is not None:
            self._fail(
                planned,
                f"Output validation failed for tool {tool.name}: {issue}",
                duration_ms=duration_ms,
            )
            return
        planned.row = row
        planned.outcome = ToolOutcome(
            tool_call_id=planned.call.identity,
            tool_name=tool.name,
            ok=True,
            duration_ms=duration_ms,
            result=seen,
        )

    def _fail(self, planned: _Planned, message: str, *, duration_ms: float = 0.0) -> None:
        self._fail_with(planned, {"error": message}, duration_ms=duration_ms)

    def _fail_with(self, planned: _Planned, value: Any, *, duration_ms: float) -> None:
        row = planned.row = self._row(planned, value, failed=True)
        planned.outcome = ToolOutcome(
            tool_call_id=planned.call.identity,
            tool_name=planned.call.name,
            ok=False,
            duration_ms=duration_ms,
            error=row.get("error"),
        )


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
