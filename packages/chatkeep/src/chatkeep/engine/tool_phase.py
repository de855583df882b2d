"""Executing the calls of one model turn.

Order: every call is checked and ``on_before_tool_call`` asked in call order; then all that may
run do so, together (or one after the other); results stand in call order, whatever finished
first. A failure of a tool is a result like any other: ``{"error": …}``, ``error`` on its row,
and the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import anyio

from chatkeep.engine.calls import Call, compact, result_content
from chatkeep.engine.events import custom
from chatkeep.engine.failure import error_text, failure_of, is_foreign, log_raised
from chatkeep.engine.middleware import BeforeToolDecision, ToolCallInfo, ToolOutcome
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.tools import Tool, ToolContext
from chatkeep.records import ModelMessage

__all__ = ["CANCELLED", "ToolExecution", "ToolPhase"]

ToolExecution = Literal["parallel", "sequential"]

CANCELLED: Final = "Tool execution cancelled"
"""``error`` of a call that the run's abort left without a result."""

NO_CLIENT_TOOLS: Final = (
    "Tool {name} runs in the browser, and this version of chatkeep cannot pause a run for it"
)

NO_APPROVALS: Final = (
    "Tool {name} needs approval, and this version of chatkeep cannot pause a run to ask for it"
)


@dataclass(slots=True)
class _Planned:
    """One call of the batch, and what became of it."""

    call: Call
    tool: Tool | None = None
    args: Any = None
    row: ModelMessage | None = None
    outcome: ToolOutcome | None = None


class ToolPhase:
    """One batch of calls. :meth:`run` once; then :attr:`outcomes` and :meth:`rows`."""

    def __init__(
        self, runtime: Runtime, tools: Mapping[str, Tool], execution: ToolExecution
    ) -> None:
        self._runtime = runtime
        self._tools = tools
        self._execution = execution
        self._planned: list[_Planned] = []
        self._after = asyncio.Lock()

    async def run(self, calls: Sequence[Call]) -> None:
        """Execute ``calls``; those that the provider executes or has answered are left out.

        Returns early when the run is aborted: the calls without a result are then failed ones.
        A hook that fails propagates; a tool that fails does not.
        """
        self._planned = [_Planned(c) for c in calls if c.waiting]
        ready: list[_Planned] = []
        gate = self._runtime.gate
        try:
            for planned in self._planned:
                if await self._prepare(planned):
                    ready.append(planned)
                if gate.signal.aborted:
                    return
            if ready:
                with gate.interruptible():
                    await self._execute_all(ready)
        finally:
            for planned in self._planned:
                if planned.row is None:
                    self._fail(planned, CANCELLED)
        if self._runtime.publisher.failure is not None:
            raise self._runtime.publisher.failure

    @property
    def outcomes(self) -> list[ToolOutcome]:
        """What became of each call, in call order."""
        return [planned.outcome for planned in self._planned if planned.outcome is not None]

    def rows(self) -> list[tuple[Call, ModelMessage]]:
        """The result rows in call order, each with its own id."""
        return [(p.call, p.row) for p in self._planned if p.row is not None]

    # ---------------------------------------------------------------------- one call

    async def _prepare(self, planned: _Planned) -> bool:
        """Check a call and ask the hooks. True: it is to be executed."""
        call = planned.call
        tool = planned.tool = self._tools.get(call.name)
        if tool is None:
            self._fail(planned, f"Unknown tool: {call.name}")
            return False
        if tool.is_client or tool.needs_approval:
            # Not validated: a browser's schema is not to be trusted with our time.
            why = NO_CLIENT_TOOLS if tool.is_client else NO_APPROVALS
            self._fail(planned, why.format(name=tool.name))
            return False
        try:
            planned.args = call.parse()
        except ValueError as error:
            text = call.text if len(call.text) <= 500 else call.text[:500] + "…"
            self._fail(planned, f"Arguments of tool {call.name} are not JSON ({error}): {text}")
            return False
        if not self._fits(planned):
            return False
        info = ToolCallInfo(
            tool_call_id=call.identity, tool_name=tool.name, tool=tool, args=planned.args
        )
        decision: BeforeToolDecision | None = await self._runtime.hooks.first(
            "on_before_tool_call", info
        )
        return True if decision is None else await self._decided(planned, decision)

    def _fits(self, planned: _Planned) -> bool:
        tool = cast("Tool", planned.tool)
        try:
            tool.check_input(planned.args)
        except Exception as error:  # noqa: BLE001 - validators are the tool's own code
            if is_foreign(error):
                self._log(planned, error)
            why = error_text(error)
            self._fail(planned, f"Input validation failed for tool {tool.name}: {why}")
            return False
        return True

    async def _decided(self, planned: _Planned, decision: BeforeToolDecision) -> bool:
        if decision.action == "transform":
            planned.args = decision.value
            return self._fits(planned)
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
        tool = cast("Tool", planned.tool)
        execute = tool.execute
        if execute is None:
            raise AssertionError("client tools are never executed here")
        began = time.perf_counter()
        try:
            value = await execute(planned.args, self._context_of(planned))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._fail(planned, CANCELLED, duration_ms=_since(began))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - becomes the call's result
            # All of them: a command line parser exits, extensions in Rust panic.
            why = failure_of(error).message
            if not isinstance(error, Exception):
                why = f"{type(error).__name__}: {why}"
            self._log(planned, error)
            self._fail(planned, why, duration_ms=_since(began))
        else:
            self._succeed(planned, value, duration_ms=_since(began))
        async with self._after:
            await self._tell(planned)

    def _log(self, planned: _Planned, error: BaseException) -> None:
        context = self._runtime.context
        log_raised(
            logging.WARNING,
            error,
            "tool %r raised",
            planned.call.name,
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
        )

    async def _tell(self, planned: _Planned) -> None:
        if planned.outcome is not None:
            await self._runtime.hooks.call("on_after_tool_call", planned.outcome)

    # ------------------------------------------------------------------------ results

    def _row(self, planned: _Planned, value: Any, *, failed: bool) -> ModelMessage:
        identity = self._runtime.transcript.take_message_id(None)
        return planned.call.result_row(value, identity=identity, failed=failed)

    def _succeed(self, planned: _Planned, value: Any, *, duration_ms: float) -> None:
        tool = cast("Tool", planned.tool)
        try:
            seen, _ = result_content(value)
            row = self._row(planned, value, failed=False)
        except Exception as error:  # noqa: BLE001 - reading a result runs the tool's own code
            if is_foreign(error):
                self._log(planned, error)
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
        planned.row = self._row(planned, compact({"error": message}), failed=True)
        planned.outcome = ToolOutcome(
            tool_call_id=planned.call.identity,
            tool_name=planned.call.name,
            ok=False,
            duration_ms=duration_ms,
            error=message,
        )


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
