"""The model calls of a run: what is sent, and how the answer is taken."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Final

from ag_ui.core import EventType, RunErrorEvent, RunFinishedEvent
from anyio import move_on_after

from chatkeep.engine import events
from chatkeep.engine.adapter import ModelAdapter, ModelRequest
from chatkeep.engine.middleware import ChatConfig, Event
from chatkeep.engine.options import RunOptions
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.terminal import Terminal
from chatkeep.engine.turn import Turn
from chatkeep.errors import ProviderError
from chatkeep.messages import provider_view

__all__ = ["ADAPTER_CLOSE_SECONDS", "ModelCalls"]

_LOG: Final = logging.getLogger("chatkeep.engine")

ADAPTER_CLOSE_SECONDS: Final = 10.0
"""How long an adapter may take to close its stream when the run stops early."""


class ModelCalls:
    """Makes the calls, publishes what they say, and adds it to the transcript."""

    __slots__ = ("_options", "_runtime", "_terminal")

    def __init__(self, runtime: Runtime, options: RunOptions, terminal: Terminal) -> None:
        self._runtime = runtime
        self._options = options
        self._terminal = terminal

    @property
    def source(self) -> dict[str, Any]:
        """``{provider, api, model}`` of the adapter, as far as it says."""
        return _source_of(self._options.adapter)

    async def make(self, message_id: str, config: ChatConfig, *, final: bool = False) -> Turn:
        """One call, to its end. Its rows are in the transcript when this returns. ``final``: the
        call is only for the structured answer: no tools, and its text is the answer.

        Raises:
            Aborted: the run is to stop.
            ProviderError: the call failed.
        """
        runtime, options = self._runtime, self._options
        source, answer = self.source, runtime.answer
        with_schema = answer is not None and (final or answer.mode != "separate")
        turn = Turn(
            runtime.context,
            runtime.transcript,
            message_id,
            source,
            answer=answer,
            announced=not (final or (answer is not None and answer.mode == "native")),
        )
        request = ModelRequest(
            messages=provider_view(config.provider_messages, source=source or None),
            system_prompts=tuple(config.system_prompts),
            tools=() if final else tuple(config.tools),
            model_options=config.model_options,
            thread_id=options.thread_id,
            run_id=options.run_id,
            message_id=message_id,
            abort=runtime.gate.signal,
            output_schema=answer.schema.schema if answer is not None and with_schema else None,
        )
        try:
            with runtime.gate.interruptible():
                await self._consume(options.adapter.stream(request), turn)
        except Exception:
            if final and not runtime.gate.signal.aborted:
                # A client then shows a failed answer instead of nothing.
                for event in turn.announcement():
                    runtime.publisher.put(event)
            raise
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
