"""The entry: ``chat()`` checks what it is given; the stream it returns runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, cast, get_args

from anyio import CancelScope
from pydantic import BaseModel

from chatkeep.engine.abort import AbortSignal
from chatkeep.engine.adapter import ModelAdapter
from chatkeep.engine.channel import Channel
from chatkeep.engine.events import new_id
from chatkeep.engine.interrupts import InterruptDefinition, definitions_by_id
from chatkeep.engine.loop import Run
from chatkeep.engine.middleware import ChatMiddleware, Event, LoopState
from chatkeep.engine.options import LoopStrategy, RunOptions
from chatkeep.engine.output_schema import OutputSchema
from chatkeep.engine.structured_answer import StructuredMode
from chatkeep.engine.tool_phase import ToolExecution
from chatkeep.engine.tools import Tool, client_tools_of_request, tools_by_name
from chatkeep.errors import CompositionError
from chatkeep.messages import wire_to_model
from chatkeep.records import UNSET, ActivityRecord, ModelMessage

__all__ = ["DEFAULT_MAX_TURNS", "ChatStream", "chat"]

DEFAULT_MAX_TURNS: Final = 5
"""Model calls that one run makes at most, unless ``loop`` says otherwise."""

STREAM_BUFFER: Final = 32
"""Events that a run may be ahead of its reader."""

_RUNNING: Final[set[asyncio.Task[None]]] = set()
"""Strong references: the loop keeps weak ones, and a run outlives its reader."""


class ChatStream:
    """The events of one run, for one reader: ``async for event in stream``.

    The run begins with the first read, in a task of its own, and stays at most
    ``STREAM_BUFFER`` events ahead. It is stopped through the abort path by :meth:`abort`,
    :meth:`aclose`, cancelling the task that reads, or dropping the stream. Iteration ends after
    the terminal event and the deferred work.
    """

    def __init__(self, options: RunOptions, abort: AbortSignal | None) -> None:
        self._channel = Channel(STREAM_BUFFER)
        self._run = Run(options, self._channel)
        self._task: asyncio.Task[None] | None = None
        self._signal = abort
        self.thread_id = options.thread_id
        self.run_id = options.run_id
        self.middleware = options.middleware

    def abort(self, reason: str | None = None) -> None:
        """Stop the run: what is open is closed, ``on_abort`` runs, and the stream ends with
        RUN_FINISHED, outcome cancelled. Too late once the run has begun to end."""
        self._run.abort(reason)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        task = self._task or self._start()
        event = self._channel.poll()
        if event is not None:
            return event
        try:
            event = await self._channel.get()
        except asyncio.CancelledError:
            self._run.abort("disconnected")
            with CancelScope(shield=True):
                await asyncio.wait([task])
            raise
        if event is None:
            await asyncio.wait([task])
            task.result()
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Stop the run if it runs, and wait until its hooks are done. Safe to call again."""
        self._channel.discard()
        if self._task is None:
            self._channel.close()
            self._task = asyncio.get_running_loop().create_task(_nothing())
            return
        self._run.abort("disconnected")
        with CancelScope(shield=True):
            await asyncio.wait([self._task])

    def _start(self) -> asyncio.Task[None]:
        run, signal = self._run, self._signal or AbortSignal()

        def forward() -> None:
            run.abort(signal.reason)

        signal.add_callback(forward)
        task = asyncio.get_running_loop().create_task(
            run.drive(), name=f"chatkeep run {self.run_id}"
        )
        self._task = task
        _RUNNING.add(task)

        def done(_: asyncio.Task[None]) -> None:
            _RUNNING.discard(task)
            signal.remove_callback(forward)

        task.add_done_callback(done)
        return task

    def __del__(self) -> None:
        task = getattr(self, "_task", None)
        if task is not None and not task.done():
            loop = task.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_abandon, self._channel, self._run)


def _abandon(channel: Channel, run: Run) -> None:
    channel.discard()
    run.abort("disconnected")


async def _nothing() -> None:
    """The task of a stream that was closed before it began."""


def max_turns(limit: int) -> LoopStrategy:
    """The strategy that allows ``limit`` model calls."""

    def strategy(state: LoopState) -> bool:
        return state.iteration_count < limit

    return strategy


def chat(
    *,
    adapter: ModelAdapter,
    messages: Sequence[Mapping[str, Any] | BaseModel],
    thread_id: str | None = None,
    run_id: str | None = None,
    parent_run_id: str | None = None,
    resume: Sequence[Mapping[str, Any] | BaseModel] = (),
    system_prompts: Sequence[str] = (),
    tools: Sequence[Tool] = (),
    client_tools: Sequence[Any] = (),
    middleware: Sequence[ChatMiddleware] = (),
    loop: int | LoopStrategy = DEFAULT_MAX_TURNS,
    tool_execution: ToolExecution = "parallel",
    model_options: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    context: Any = None,
    state: Any = UNSET,
    forwarded_props: Mapping[str, Any] | None = None,
    seen: int | None = None,
    abort: AbortSignal | None = None,
    interrupts: Sequence[InterruptDefinition] = (),
    output_schema: Any = None,
) -> ChatStream:
    """Run a model with tools and middleware; the result is a stream of AG-UI 1.0 events.

    The first event is RUN_STARTED, the last one the only terminal: RUN_FINISHED (outcome
    ``interrupt`` when the run waits for answers, ``cancelled`` when it was stopped) or RUN_ERROR.
    A run that waits is over: another one, with ``resume``, continues it. Errors of the model, of
    hooks and of stores arrive as RUN_ERROR, never as an exception out of the iteration.

    Args:
        adapter: the model.
        messages: the conversation so far: AG-UI wire rows, UI messages (with ``parts``) or
            model messages.
        thread_id: the conversation; a fresh one when None.
        run_id: this run; the request's, so that the browser finds its own; fresh when None.
        parent_run_id: the run that this one continues.
        resume: the request's answers to what a paused run asked. A store that keeps interrupts
            decides about them (:func:`chatkeep.persistence.with_persistence`); without one they
            are checked against ``messages``, and ``parent_run_id`` must name the paused run.
        system_prompts: instructions for the model; they are no messages.
        tools: server tools and client tools.
        client_tools: ``tools[]`` of the request; a tool in ``tools`` wins over its name.
        middleware: hooks, in this order.
        loop: how many model calls at most (a positive number), or a function that decides.
        tool_execution: whether the calls of one turn run together or one after the other.
        model_options: for the adapter, as is.
        metadata: for middleware, as is.
        context: for tools and middleware: whatever the application wants to hand them.
        state: the request's ``state``; sent back in snapshots when given.
        forwarded_props: the request's ``forwardedProps``; middleware reads it.
        seen: highest sequence number of the thread that the client says it has seen.
        abort: stops the run from outside.
        interrupts: definitions of the generic interrupts that middleware may ask.
        output_schema: the run ends with an object that fits it: a JSON Schema, or a type that
            pydantic can describe. The object arrives as CUSTOM ``structured-output.complete`` and
            is kept on its message; without one the run fails with
            :class:`~chatkeep.errors.StructuredOutputError`.

    Raises:
        CompositionError: no model adapter, a capability nobody provides, or a feature of a
            later version.
        ToolError: two tools or two interrupts of one name, or a definition that is wrong.
        InvalidValue: messages that are none.
    """
    if isinstance(adapter, type) or not isinstance(adapter, ModelAdapter):
        raise CompositionError(
            f"not a model adapter: {adapter!r}; give an object with provider, model and stream()"
        )
    if isinstance(middleware, ChatMiddleware):
        raise CompositionError("middleware is a list: middleware=[…]")
    for item in middleware:
        if not isinstance(item, ChatMiddleware):
            raise CompositionError(f"not a middleware: {item!r}; subclass ChatMiddleware")
    own = tools_by_name(tools)
    definitions = definitions_by_id(interrupts)
    offered = [t for t in client_tools_of_request(client_tools) if t.name not in own]
    rows, activities = _converted(messages)
    options = RunOptions(
        adapter=adapter,
        messages=rows,
        activities=activities,
        thread_id=thread_id or new_id("thread"),
        run_id=run_id or new_id("run"),
        parent_run_id=parent_run_id,
        resume=[_plain(entry) for entry in resume],
        interrupts=list(definitions.values()),
        system_prompts=list(system_prompts),
        tools=[*own.values(), *offered],
        middleware=tuple(middleware),
        loop=_strategy(loop),
        tool_execution=tool_execution,
        model_options=dict(model_options or {}),
        metadata=dict(metadata or {}),
        context=context,
        seen=seen,
        state=state,
        forwarded_props=dict(forwarded_props or {}),
        output=None if output_schema is None else OutputSchema.of(output_schema),
        structured=_structured_mode(adapter),
    )
    return ChatStream(options, abort)


def _structured_mode(adapter: ModelAdapter) -> StructuredMode:
    mode: object = getattr(adapter, "structured_output", "separate")
    if mode not in get_args(StructuredMode):
        known = ", ".join(get_args(StructuredMode))
        raise CompositionError(f"structured_output of {adapter!r} is {mode!r}, not one of {known}")
    return cast("StructuredMode", mode)


def _strategy(loop: int | LoopStrategy) -> LoopStrategy:
    if callable(loop):
        return loop
    if isinstance(loop, bool) or loop < 1:
        raise ValueError(f"loop must be a positive number of model calls, not {loop!r}")
    return max_turns(loop)


def _plain(value: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_none=True)
    return dict(value)


def _converted(
    messages: Sequence[Mapping[str, Any] | BaseModel],
) -> tuple[list[ModelMessage], list[ActivityRecord]]:
    rows: list[Mapping[str, Any]] = [_plain(m) if isinstance(m, BaseModel) else m for m in messages]
    inbound = wire_to_model(rows)
    return list(inbound.messages), list(inbound.activities)
