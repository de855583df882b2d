"""The way of an event from the engine to the reader: hooks, wire shape, order, hand-over."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ag_ui.core import (
    CustomEvent,
    EventType,
    ReasoningEndEvent,
    ReasoningMessageEndEvent,
    StepFinishedEvent,
    TextMessageEndEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)

from chatkeep.engine.channel import Channel
from chatkeep.engine.events import normalized, now_ms, with_changes
from chatkeep.engine.hooks import Hooks
from chatkeep.engine.middleware import ChatContext, Event
from chatkeep.engine.recording import RECORDED, Recorder
from chatkeep.errors import ChatkeepError

__all__ = ["Publisher", "Spans"]

_LOG: Final = logging.getLogger("chatkeep.engine")

MAX_WAITING_EMITS: Final = 1024
"""Custom events that may wait to be published (they are emitted without waiting)."""

_OPENS: Final = {
    EventType.TEXT_MESSAGE_START: ("text", "message_id"),
    EventType.TOOL_CALL_START: ("tool", "tool_call_id"),
    EventType.REASONING_START: ("span", "message_id"),
    EventType.REASONING_MESSAGE_START: ("reasoning", "message_id"),
    EventType.STEP_STARTED: ("step", "step_name"),
}
_NEEDS: Final = {
    EventType.TEXT_MESSAGE_CONTENT: ("text", "message_id"),
    EventType.TOOL_CALL_ARGS: ("tool", "tool_call_id"),
    EventType.REASONING_MESSAGE_CONTENT: ("reasoning", "message_id"),
}
_CLOSES: Final = {
    EventType.TEXT_MESSAGE_END: ("text", "message_id"),
    EventType.TOOL_CALL_END: ("tool", "tool_call_id"),
    EventType.REASONING_MESSAGE_END: ("reasoning", "message_id"),
    EventType.REASONING_END: ("span", "message_id"),
    EventType.STEP_FINISHED: ("step", "step_name"),
}
_ENDINGS: Final[dict[str, Callable[[str], Event]]] = {
    "text": lambda key: TextMessageEndEvent(message_id=key),
    "tool": lambda key: ToolCallEndEvent(tool_call_id=key),
    "reasoning": lambda key: ReasoningMessageEndEvent(message_id=key),
    "span": lambda key: ReasoningEndEvent(message_id=key),
    "step": lambda key: StepFinishedEvent(step_name=key),
}
_LIFECYCLE: Final = frozenset({EventType.RUN_STARTED, EventType.RUN_FINISHED, EventType.RUN_ERROR})


class Spans:
    """What is open on the wire: a strict reader refuses an end without a start."""

    __slots__ = ("_open", "_settled")

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, str | None], None] = {}
        self._settled: set[str] = set()

    def admit(self, event: Event) -> bool:
        """Whether ``event`` may follow what was admitted before; notes what it opens or closes.

        Refused: a second start, content or an end of what is not open, a second result or one
        of a hidden call. That happens when a middleware dropped the other half, or doubles.
        """
        kind = event.type
        if isinstance(event, ToolCallResultEvent):
            if event.tool_call_id in self._settled:
                return False
            self._settled.add(event.tool_call_id)
        if (place := _NEEDS.get(kind)) is not None:
            return self._key(place, event) in self._open
        if (place := _OPENS.get(kind)) is not None:
            key = self._key(place, event)
            if key in self._open:
                return False
            self._open[key] = None
        elif (place := _CLOSES.get(kind)) is not None:
            key = self._key(place, event)
            if key not in self._open:
                return False
            del self._open[key]
        return True

    def missing(self, event: Event) -> list[Event]:
        """The end that a hook dropped and ``event``, a result, needs before it; noted."""
        if not isinstance(event, ToolCallResultEvent):
            return []
        place = self._key(_OPENS[EventType.TOOL_CALL_START], event)
        return [self._close(place)] if place in self._open else []

    def expect(self, event: Event) -> None:
        """``event`` went through the hooks: a call whose start did not come out is hidden. (One
        that never started here is not: its start was in an earlier run.)"""
        if isinstance(event, ToolCallStartEvent):
            key = self._key(_OPENS[event.type], event)
            if key not in self._open:
                self._settled.add(event.tool_call_id)

    @staticmethod
    def _key(place: tuple[str, str], event: Event) -> tuple[str, str, str | None]:
        return place[0], getattr(event, place[1]), getattr(event, "subagent_run_id", None)

    def closing(self, *, steps: bool) -> list[Event]:
        """The ends of everything open, innermost first, with or without the steps; it is closed
        afterwards."""
        return [
            self._close(place)
            for place in list(reversed(self._open))
            if steps or place[0] != "step"
        ]

    def _close(self, place: tuple[str, str, str | None]) -> Event:
        kind, key, subagent = place
        del self._open[place]
        end = _ENDINGS[kind](key)
        return end if subagent is None else with_changes(end, subagent_run_id=subagent)


class Publisher:
    """One per run. Events of the driver, of running tools and of hooks meet here, in order."""

    __slots__ = (
        "_channel", "_context", "_hooks", "_lock", "_over", "_pump", "_recorder", "_spans",
        "_waiting", "failure", "has_hooks",
    )  # fmt: skip

    def __init__(
        self, channel: Channel, hooks: Hooks, context: ChatContext, recorder: Recorder
    ) -> None:
        self._channel = channel
        self._recorder = recorder
        self._hooks = hooks
        self._context = context
        self._lock = asyncio.Lock()
        self._spans = Spans()
        self._waiting: deque[Event] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._over = False
        self.has_hooks = bool(hooks.of("on_chunk"))
        self.failure: Exception | None = None
        """A hook that failed on an event emitted by a tool or by another hook."""

    async def pipe(self, event: Event) -> None:
        """Publish ``event`` after ``on_chunk`` has seen it."""
        if not self.has_hooks and not self._waiting:
            self._context.chunk_index += 1
            self.put(event)
            if self._channel.full:
                await self._channel.room()
            return
        async with self._lock:
            await self._drain()
            await self._through(event)
        self._raise()

    async def observe(self, event: Event) -> list[Event]:
        """``on_chunk`` for an event that only the engine may publish (a model call's lifecycle).

        What hooks put beside it is published. Returned is what they made of the event itself;
        empty when they dropped it.
        """
        async with self._lock:
            await self._drain()
            self._context.chunk_index += 1
            kept: list[Event] = []
            for out in await self._hooks.chunk(event):
                if out.type is event.type:
                    kept.append(out)
                else:
                    self.put(out)
        await self._channel.room()
        self._raise()
        return kept

    async def hold(self, event: Event) -> list[Event]:
        """What the hooks make of ``event``, for :meth:`put` at a later time."""
        async with self._lock:
            await self._drain()
            self._context.chunk_index += 1
            out = await self._hooks.chunk(event)
        self._raise()
        return out

    async def _through(self, event: Event) -> None:
        self._context.chunk_index += 1
        for out in await self._hooks.chunk(event):
            self.put(out)
        self._spans.expect(event)
        if self._channel.full:
            await self._channel.room()

    def put(self, event: Event) -> None:
        """Publish an event of a pipeline as it is: brought to wire shape, stamped, in order."""
        if event.type in _LIFECYCLE:
            _LOG.warning("%s from a hook is not published: the engine sends it", event.type.value)
            return
        if not self._spans.admit(event):
            _LOG.debug("%s is not published: its other half is missing", event.type.value)
            return
        if event.type in RECORDED and not self._recorder.admit(event):
            return
        for end in self._spans.missing(event):
            self._send(end)
        self._send(event)

    def lifecycle(self, event: Event) -> None:
        """Publish RUN_STARTED or the terminal: past every hook."""
        self._send(event)

    def _send(self, event: Event) -> None:
        if event.__pydantic_extra__:
            event = normalized(event)
        if isinstance(event, CustomEvent) and event.value is None:
            event = with_changes(event, value={})  # AG-UI requires a value
        if event.timestamp is None:
            event = with_changes(event, timestamp=now_ms())
        self._channel.put(event)

    def close_spans(self, *, steps: bool = True) -> None:
        """Publish the ends of what is open, past every hook: the run stops here, or a model call
        has ended whose ends a hook dropped (steps may last longer than a call)."""
        for end in self._spans.closing(steps=steps):
            self._send(end)

    # ------------------------------------------------------------ events emitted on the side

    def emit(self, event: Event) -> None:
        """Take an event from a hook that does not wait; it is published as soon as possible.

        Raises:
            ChatkeepError: too many wait, or the run is over.
        """
        self._check_not_over()
        if len(self._waiting) >= MAX_WAITING_EMITS:
            raise ChatkeepError(
                f"{MAX_WAITING_EMITS} custom events wait to be published; await something "
                "between two emits"
            )
        self._waiting.append(event)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._publish_waiting())

    def _check_not_over(self) -> None:
        if self._over:
            raise ChatkeepError("the run is over: no event can follow its terminal")

    async def _publish_waiting(self) -> None:
        async with self._lock:
            try:
                await self._drain()
            except Exception as error:  # noqa: BLE001 - raised by the driver at its next event
                self.failure = self.failure or error

    async def _drain(self) -> None:
        while self._waiting:
            await self._through(self._waiting.popleft())

    async def emit_from_tool(self, event: Event) -> None:
        """Publish an event of a running tool. A hook that fails on it fails the run.

        Raises:
            ChatkeepError: the run is over (the tool is a thread that an abort left behind).
        """
        self._check_not_over()
        try:
            await self.pipe(event)
        except Exception as error:
            self.failure = self.failure or error
            raise

    async def flush(self) -> None:
        """Publish what hooks have emitted so far."""
        if self._waiting:
            async with self._lock:
                await self._drain()
        self._raise()

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        """Nothing but the terminal follows."""
        self._over = True
        if self._waiting:
            _LOG.warning("%d custom events came too late to be published", len(self._waiting))
            self._waiting.clear()

    async def settle(self) -> None:
        """Wait for the task that publishes emitted events, if it runs."""
        pump: Any = self._pump
        if pump is not None and not pump.done():
            await asyncio.wait([pump])
