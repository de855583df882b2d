"""Hooks around a run, and what they are handed.

A middleware overrides the hooks it needs; the engine skips the others at no cost. Order is
array order for every hook. One middleware object serves many runs at once: keep per-run state
under the run's :class:`ChatContext` (one object per run), never on ``self``.

Message dicts in ``ctx.messages`` and in configs are never changed in place, by anybody: a
change replaces the dict. Persistence finds what is new by object identity.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar, cast, overload

from ag_ui.core import BaseEvent

from chatkeep.engine.abort import AbortSignal
from chatkeep.errors import ChatkeepError, CompositionError
from chatkeep.records import UNSET, ActivityRecord, ModelMessage

if TYPE_CHECKING:
    from chatkeep.engine.interrupts import (
        InterruptDefinition,
        InterruptRequest,
        Resolutions,
        ResumeState,
    )
    from chatkeep.engine.tools import Tool

__all__ = [
    "DROP",
    "AbortInfo",
    "BeforeToolDecision",
    "Capability",
    "ChatConfig",
    "ChatContext",
    "ChatMiddleware",
    "ErrorInfo",
    "Event",
    "FinishInfo",
    "FinishReason",
    "InterruptBoundary",
    "LoopState",
    "Phase",
    "ResumePolicy",
    "ToolCallInfo",
    "ToolOutcome",
    "ToolPhaseInfo",
    "Usage",
    "WaitingCall",
]

Event: TypeAlias = BaseEvent
"""An AG-UI 1.0 event (models of ``ag_ui.core``)."""

Usage: TypeAlias = dict[str, Any]
"""Token usage of one call or a run, upstream's names: ``promptTokens``,
``completionTokens``, ``totalTokens``, ``promptTokensDetails``, ``cost``, …"""

FinishReason = Literal["stop", "length", "content_filter", "tool_calls"]
Phase = Literal[
    "init",
    "beforeModel",
    "modelStream",
    "afterModel",
    "beforeTools",
    "afterTools",
    "structuredOutput",
]
ResumePolicy = Literal["continue", "cancel", "stop"]
InterruptBoundary = Literal["beforeModel", "afterModel", "beforeTools", "afterTools"]

_T = TypeVar("_T")
_LOG: Final = logging.getLogger("chatkeep.engine")


class _Drop(enum.Enum):
    DROP = "drop"


DROP: Final = _Drop.DROP
"""Returned by ``on_chunk``: the event is not published."""

ChunkResult: TypeAlias = "Event | Sequence[Event] | _Drop | None"
"""What ``on_chunk`` may return."""


class Capability(Generic[_T]):
    """A typed handle that one middleware provides and others get; compared by identity."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Capability({self.name!r})"


@dataclass(slots=True, kw_only=True)
class ChatConfig:
    """What the next model call is made of.

    ``messages`` is the canonical transcript (kept for the rest of the run),
    ``provider_messages`` what the next call sees (rebuilt from ``messages`` for every turn).
    ``resume`` are the request's resume entries; a middleware that has dealt with them sets it
    to ``[]`` and ``resume_tool_state`` to what they say. Entries that are left at the end of phase
    ``init`` are checked against the history. ``interrupts`` are the definitions of the generic
    interrupts that may be asked.
    """

    messages: list[ModelMessage]
    provider_messages: list[ModelMessage]
    system_prompts: list[str]
    tools: list[Tool]
    resume: list[dict[str, Any]]
    resume_tool_state: ResumeState | None
    metadata: dict[str, Any]
    model_options: dict[str, Any]
    activities: list[ActivityRecord]
    interrupts: list[InterruptDefinition] = field(default_factory=list["InterruptDefinition"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """State handed to the loop strategy and to ``on_should_continue``."""

    iteration_count: int
    messages: Sequence[ModelMessage]
    finish_reason: FinishReason | None
    tool_call_count: int
    last_turn_tool_call_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallInfo:
    """A server tool call about to be executed."""

    tool_call_id: str
    tool_name: str
    tool: Tool
    args: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeToolDecision:
    """First decision of any middleware wins.

    ``transform``: execute with ``value`` as input; ``skip``: do not execute, ``value`` is the
    result; ``abort``: end the run through the abort path, ``value`` is the reason.
    """

    action: Literal["transform", "skip", "abort"]
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What became of an executed or skipped server tool call."""

    tool_call_id: str
    tool_name: str
    ok: bool
    duration_ms: float
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCall:
    """A call that pauses the run: ``interrupt_id`` names the question, ``args`` are what the tool
    will be given."""

    tool_call_id: str
    tool_name: str
    args: Any
    interrupt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPhaseInfo:
    """A finished batch: its calls, its results, and what still waits for a person's approval or
    for the browser."""

    tool_calls: Sequence[Mapping[str, Any]]
    results: Sequence[ToolOutcome]
    needs_approval: Sequence[WaitingCall] = ()
    needs_client_execution: Sequence[WaitingCall] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishInfo:
    """A run that ended well. ``content`` is the prose of the last model turn."""

    finish_reason: FinishReason | None
    duration_ms: float
    content: str
    usage: Usage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """A run that failed. ``error`` is the exception; ``message`` and ``code`` what the wire
    gets. ``refused``: a hook raised it to refuse what the model said, which is then not to be
    kept, not even in part."""

    error: BaseException
    message: str
    code: str | None
    duration_ms: float
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortInfo:
    """A run that was stopped. ``cancel_requested``: somebody asked for it, as opposed to a
    viewer who left."""

    reason: str | None
    cancel_requested: bool
    duration_ms: float


class ChatContext:
    """One run, as its middlewares see it. Identity matters: keep per-run state by it.

    ``messages`` is the canonical transcript so far (read-only). ``terminal_metadata`` is
    merged into the metadata of the terminal event; ``on_finish`` may still add to it.
    """

    __slots__ = (
        "__weakref__",
        "_abort", "_capabilities", "_declared", "_emit", "_state", "_text", "activities",
        "behind", "chunk_index", "client_state", "context", "current_message_id", "deferred",
        "forwarded_props", "iteration", "messages", "model", "model_options", "parent_run_id",
        "phase", "provider", "run_id", "seen", "signal", "system_prompts", "terminal_metadata",
        "thread_id", "tool_names",
    )  # fmt: skip

    def __init__(
        self,
        *,
        thread_id: str,
        run_id: str,
        parent_run_id: str | None = None,
        provider: str = "",
        model: str = "",
        context: Any = None,
        seen: int | None = None,
        client_state: Any = UNSET,
        forwarded_props: Mapping[str, Any] | None = None,
        signal: AbortSignal | None = None,
        abort: Callable[[str | None], None] | None = None,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        self.thread_id = thread_id
        self.run_id = run_id
        self.parent_run_id = parent_run_id
        self.provider = provider
        self.model = model
        self.context = context
        self.seen = seen
        """Highest sequence number the client says it has seen; None: it did not say."""
        self.client_state = client_state
        """The request's ``state``; UNSET when it had none."""
        self.forwarded_props: Mapping[str, Any] = forwarded_props or {}
        """The request's ``forwardedProps``: what the browser's application sent along."""
        self.signal = signal or AbortSignal()
        """Goes off when the run is to stop; hooks that take long may watch it."""
        self.phase: Phase = "init"
        self.iteration = 0
        self.chunk_index = 0
        self.messages: list[ModelMessage] = []
        self.behind: Sequence[ModelMessage] = ()
        """What others stored behind the turn that this run continues: no part of its transcript,
        but snapshots, which replace all that a browser shows, have it too."""
        self.activities: list[ActivityRecord] = []
        self.system_prompts: list[str] = []
        self.tool_names: list[str] = []
        self.model_options: dict[str, Any] = {}
        self.current_message_id: str | None = None
        self.terminal_metadata: dict[str, Any] = {}
        self.deferred: list[Awaitable[Any]] = []
        self._capabilities: dict[Capability[Any], Any] = {}
        self._declared: dict[Capability[Any], str] = {}
        self._abort = abort
        self._emit = emit
        self._state: dict[object, Any] = {}
        self._text: list[str] = []

    @property
    def accumulated_content(self) -> str:
        """The text that the current model turn has streamed so far (before ``on_chunk``)."""
        if len(self._text) > 1:
            self._text[:] = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def declare(self, providers: Mapping[Capability[Any], str]) -> None:
        """Who will provide what, by name: lets :meth:`get` tell "later" from "never"."""
        self._declared = dict(providers)

    def provide(self, capability: Capability[_T], value: _T) -> None:
        """Publish a capability; the last provider wins, with a warning."""
        if capability in self._capabilities:
            _LOG.warning("capability %r is provided twice; the later one wins", capability.name)
        self._capabilities[capability] = value

    @overload
    def get(self, capability: Capability[_T]) -> _T: ...
    @overload
    def get(self, capability: Capability[_T], *, optional: Literal[True]) -> _T | None: ...
    def get(self, capability: Capability[_T], *, optional: bool = False) -> _T | None:
        """The value of a capability.

        Raises:
            CompositionError: nobody provides it; names it and says what to check.
        """
        if capability in self._capabilities:
            return cast("_T", self._capabilities[capability])
        if optional:
            return None
        if capability in self._declared:
            raise CompositionError(
                f"{capability.name!r} is not there yet: {self._declared[capability]} provides "
                "it, but comes later in middleware=[…]; put it before the middleware that asks"
            )
        raise CompositionError(
            f"no middleware provides {capability.name!r}: add one that does, and put it "
            "before the middleware that asks"
        )

    def state(self, key: object, make: Callable[[], _T]) -> _T:
        """Per-run state of a middleware, made on first use. ``key`` is usually ``self``."""
        if key not in self._state:
            self._state[key] = make()
        return cast("_T", self._state[key])

    def abort(self, reason: str | None = None) -> None:
        """End the run through the abort path: the hook that is running ends first, the event
        in flight is still published. Without effect once a terminal hook has begun."""
        if self._abort is not None:
            self._abort(reason)

    def emit_custom_event(self, name: str, value: Any) -> None:
        """Publish a CUSTOM event as soon as the engine can, through ``on_chunk``; also while
        the hook that calls this is still at work. Call it from the event loop's thread.

        Raises:
            InvalidValue: ``value`` is not JSON.
            ChatkeepError: events pile up faster than they are published, or the run is over.
        """
        from chatkeep.engine.events import custom

        if self._emit is None:
            raise ChatkeepError("this context belongs to no running chat")
        self._emit(custom(name, value))

    def defer(self, work: Awaitable[Any]) -> None:
        """Have ``work`` awaited when the run is over; its failure is logged, not raised."""
        self.deferred.append(work)

    @staticmethod
    def create_id(prefix: str) -> str:
        """A fresh id, ``<prefix>-<uuid>``."""
        return f"{prefix}-{uuid.uuid4()}"


class ChatMiddleware:
    """Base class: override what you need. All hooks are coroutines.

    ``requires`` must be provided by some middleware's ``setup`` (checked before the run);
    ``provides`` must have been provided when this one's ``setup`` returns.
    """

    name: str = ""
    requires: Sequence[Capability[Any]] = ()
    provides: Sequence[Capability[Any]] = ()

    async def setup(self, ctx: ChatContext) -> None:
        """Once, first."""

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
        """At phase ``init``, before every model turn, and before a separate structured-output
        call. Return the fields of :class:`ChatConfig` to change."""
        return None

    async def on_structured_output_config(
        self, ctx: ChatContext, config: ChatConfig, schema: dict[str, Any]
    ) -> Mapping[str, Any] | None:
        """Before a separate structured-output call; may also return ``output_schema``."""
        return None

    async def on_interrupt_resolution(
        self, ctx: ChatContext, resolutions: Resolutions
    ) -> ResumePolicy | None:
        """Once in a run that answers generic interrupts, before anything executes. The strongest
        word wins: ``stop`` ends the run, the open tool calls stay without a result; ``cancel``
        gives each of them a failed one; ``continue`` (also None) goes on."""
        return None

    async def on_start(self, ctx: ChatContext) -> None:
        """Once, before anything executes."""

    async def on_iteration(self, ctx: ChatContext, iteration: int, message_id: str) -> None:
        """Start of each model turn."""

    async def on_interrupt_boundary(
        self, ctx: ChatContext, boundary: InterruptBoundary
    ) -> Sequence[InterruptRequest] | None:
        """At each boundary: generic interrupt requests, to pause the run. Their definitions
        are among ``interrupts`` of the chat. Asked again in the run that continues, at the
        boundaries that it passes: look at what was answered before asking the same."""
        return None

    async def on_chunk(self, ctx: ChatContext, event: Event) -> ChunkResult:
        """Every event before it is published: None passes it, an event replaces it, a list
        expands it, :data:`DROP` drops it. Raising refuses what the model says: the run fails, and
        of this model call nothing is kept, also where unfinished answers are."""
        return None

    async def on_usage(self, ctx: ChatContext, usage: Usage) -> None:
        """After each model call that reported usage."""

    async def on_before_tool_call(
        self, ctx: ChatContext, call: ToolCallInfo
    ) -> BeforeToolDecision | None:
        """Before each server tool executes."""
        return None

    async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
        """After each server tool that was executed or skipped."""

    async def on_tool_phase_complete(self, ctx: ChatContext, info: ToolPhaseInfo) -> None:
        """After the batch of a turn."""

    async def on_should_continue(self, ctx: ChatContext, state: LoopState) -> bool | None:
        """False stops the loop; everyone is asked. Raising refuses the answer, as in
        :meth:`on_chunk`."""
        return None

    async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
        """The run pauses: ``event`` is the RUN_FINISHED with its interrupt outcome, not yet
        published. Raising replaces it by a RUN_ERROR, and those behind are not asked any more:
        what refuses pauses stands before what stores them."""

    async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
        """The run ended well; RUN_FINISHED is published after all of these returned.
        Everyone runs even if one raises; a failure turns the terminal into RUN_ERROR."""

    async def on_error(self, ctx: ChatContext, info: ErrorInfo) -> None:
        """The run failed. Failures in here are logged."""

    async def on_abort(self, ctx: ChatContext, info: AbortInfo) -> None:
        """The run was stopped. Failures in here are logged."""
