"""A model that plays back given events, and a middleware that writes down every hook.

For tests of middlewares and of the engine itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from chatkeep.engine.adapter import ModelRequest
from chatkeep.engine.chat import ChatStream
from chatkeep.engine.interrupts import Resolutions
from chatkeep.engine.middleware import (
    AbortInfo,
    BeforeToolDecision,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    ChunkResult,
    ErrorInfo,
    Event,
    FinishInfo,
    InterruptBoundary,
    LoopState,
    ResumePolicy,
    ToolCallInfo,
    ToolOutcome,
    ToolPhaseInfo,
    Usage,
)
from chatkeep.engine.structured_answer import StructuredMode

__all__ = ["PlayedModel", "PlayedTurn", "TraceMiddleware", "collect"]

PlayedTurn = Iterable[Event] | Callable[[ModelRequest], AsyncIterator[Event]]
"""The events of one model call, or a function that makes them of the request."""


class PlayedModel:
    """Plays one turn per model call, in order; more calls than turns are an error.

    ``requests`` keeps what each call was given. Events are handed over as copies, so one list
    may be played twice.
    """

    def __init__(
        self,
        *turns: PlayedTurn,
        provider: str = "played",
        model: str = "played-1",
        structured_output: StructuredMode = "separate",
    ) -> None:
        self.provider = provider
        self.model = model
        self.structured_output: StructuredMode = structured_output
        self.requests: list[ModelRequest] = []
        self._turns = turns

    async def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        """Play the next turn."""
        self.requests.append(request)
        if len(self.requests) > len(self._turns):
            raise AssertionError(f"the model was called more than {len(self._turns)} times")
        turn = self._turns[len(self.requests) - 1]
        if callable(turn):
            async for event in turn(request):
                yield event
        else:
            for event in turn:
                yield event.model_copy()


class TraceMiddleware(ChatMiddleware):
    """Writes every hook call to ``lines`` as ``hook:phase``; changes nothing.

    Names are upstream's (``onConfig:init``, ``chunk:RUN_STARTED@modelStream``). ``finish``,
    ``error`` and ``abort`` keep what the terminal hook was given.
    """

    def __init__(self, name: str = "trace", *, lines: list[str] | None = None) -> None:
        self.name = name
        self.lines: list[str] = [] if lines is None else lines
        self.outcomes: list[ToolOutcome] = []
        self.phases: list[ToolPhaseInfo] = []
        self.usages: list[Usage] = []
        self.resolutions: Resolutions | None = None
        self.finish: FinishInfo | None = None
        self.error: ErrorInfo | None = None
        self.abort: AbortInfo | None = None
        self.context: ChatContext | None = None

    def _note(self, ctx: ChatContext, hook: str) -> None:
        self.lines.append(f"{hook}:{ctx.phase}")

    async def setup(self, ctx: ChatContext) -> None:
        self.context = ctx
        self._note(ctx, "setup")

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
        self._note(ctx, "onConfig")
        return None

    async def on_structured_output_config(
        self, ctx: ChatContext, config: ChatConfig, schema: dict[str, Any]
    ) -> Mapping[str, Any] | None:
        self._note(ctx, "onStructuredOutputConfig")
        return None

    async def on_start(self, ctx: ChatContext) -> None:
        self._note(ctx, "onStart")

    async def on_interrupt_resolution(
        self, ctx: ChatContext, resolutions: Resolutions
    ) -> ResumePolicy | None:
        self.resolutions = resolutions
        self._note(ctx, "onInterruptResolution")
        return None

    async def on_iteration(self, ctx: ChatContext, iteration: int, message_id: str) -> None:
        self._note(ctx, "onIteration")

    async def on_interrupt_boundary(
        self, ctx: ChatContext, boundary: InterruptBoundary
    ) -> Sequence[Any] | None:
        self._note(ctx, "onInterruptBoundary")
        return None

    async def on_chunk(self, ctx: ChatContext, event: Event) -> ChunkResult:
        self.lines.append(f"chunk:{event.type.value}@{ctx.phase}")
        return None

    async def on_usage(self, ctx: ChatContext, usage: Usage) -> None:
        self.usages.append(usage)
        self._note(ctx, "onUsage")

    async def on_before_tool_call(
        self, ctx: ChatContext, call: ToolCallInfo
    ) -> BeforeToolDecision | None:
        self._note(ctx, "onBeforeToolCall")
        return None

    async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
        self.outcomes.append(outcome)
        self._note(ctx, "onAfterToolCall")

    async def on_tool_phase_complete(self, ctx: ChatContext, info: ToolPhaseInfo) -> None:
        self.phases.append(info)
        self._note(ctx, "onToolPhaseComplete")

    async def on_should_continue(self, ctx: ChatContext, state: LoopState) -> bool | None:
        self._note(ctx, "onShouldContinue")
        return None

    async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
        self._note(ctx, "onInterrupt")

    async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
        self.finish = info
        self._note(ctx, "onFinish")

    async def on_error(self, ctx: ChatContext, info: ErrorInfo) -> None:
        self.error = info
        self._note(ctx, "onError")

    async def on_abort(self, ctx: ChatContext, info: AbortInfo) -> None:
        self.abort = info
        self._note(ctx, "onAbort")


async def collect(stream: ChatStream) -> list[Event]:
    """Every event of a run."""
    return [event async for event in stream]
