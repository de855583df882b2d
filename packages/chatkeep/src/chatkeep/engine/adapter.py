"""What the engine asks of a model: one call, as a stream of AG-UI events.

An adapter translates the request for its provider and yields, per model call: text
(``TEXT_MESSAGE_START``, ``_CONTENT``…, ``_END``), reasoning (``REASONING_START``,
``REASONING_MESSAGE_START``, ``_CONTENT``…, ``_END``, ``REASONING_END``, signatures as
``REASONING_ENCRYPTED_VALUE``), tool calls (``TOOL_CALL_START``, ``_ARGS``…, ``_END``) and, last,
exactly one ``RUN_FINISHED`` (see :func:`model_finished`) or ``RUN_ERROR``. Raising is as good as
``RUN_ERROR``; a provider's stream that breaks off must do one of the two, because a stream that
just ends is taken as finished, without a reason. ``RUN_STARTED`` may be left out. Ids that are
empty, or used before in the thread, are replaced by the engine; ends that are missing are
supplied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ag_ui.core import RunFinishedEvent

from chatkeep.engine.abort import AbortSignal
from chatkeep.engine.middleware import Event, FinishReason, Usage
from chatkeep.engine.tools import Tool
from chatkeep.engine.usage import leftovers, usage_to_wire
from chatkeep.records import ModelMessage

__all__ = ["ModelAdapter", "ModelRequest", "model_finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call.

    ``messages`` is what the model is sent (failed partial rows left out, every tool call with a
    result). ``message_id`` is an id for the assistant message that the adapter may use.
    ``output_schema`` is a JSON Schema that the answer must fit, when the call asks for one: an
    adapter that cannot ask its provider for that raises.
    """

    messages: Sequence[ModelMessage]
    system_prompts: Sequence[str] = ()
    tools: Sequence[Tool] = ()
    model_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    thread_id: str
    run_id: str
    message_id: str
    abort: AbortSignal
    output_schema: Mapping[str, Any] | None = None


@runtime_checkable
class ModelAdapter(Protocol):
    """A provider and a model.

    An adapter may also say with ``structured_output`` how it gives a structured answer: one of
    :data:`~chatkeep.engine.structured_answer.StructuredMode`, ``separate`` where it does not say;
    with ``api`` by which interface of the provider; and with ``requires`` which capabilities a
    middleware must provide.
    """

    @property
    def provider(self) -> str:
        """Who serves the model: ``openai``, ``anthropic``, …"""
        ...

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        """Make the call. The iterator's ``aclose`` is called when the run stops early; an
        abort cancels the task that waits for the next event."""
        ...


def model_finished(
    request: ModelRequest,
    finish_reason: FinishReason | None,
    *,
    usage: Usage | None = None,
    response_id: str | None = None,
) -> RunFinishedEvent:
    """The ``RUN_FINISHED`` that ends a model call.

    Args:
        request: the call that ends.
        finish_reason: ``tool_calls`` has the engine execute the calls of this turn.
        usage: upstream's usage object (``promptTokens``, …); None: the provider did not say.
        response_id: the provider's id of this answer, kept on the assistant message.
    """
    extra: dict[str, Any] = {}
    if finish_reason is not None:
        extra["finishReason"] = finish_reason
    if response_id is not None:
        extra["responseId"] = response_id
    rest = leftovers(usage) if usage else {}
    if rest:
        extra["usage"] = rest
    return RunFinishedEvent(
        thread_id=request.thread_id,
        run_id=request.run_id,
        usage=[usage_to_wire(usage)] if usage is not None else None,
        metadata={"tanstack": extra} if extra else None,
    )
