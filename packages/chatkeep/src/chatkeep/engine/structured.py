"""Structured output: from the end of the loop to a transcript that has the answer.

The strategies are those of :data:`~chatkeep.engine.structured_answer.StructuredMode`. An answer
that is missing, no JSON, or does not fit the schema fails the run; the text that was shown stays
on its message, marked as failed, for people to see and no model to read.
"""

from __future__ import annotations

from typing import Any, Final, cast

from chatkeep.engine.configuration import Configuration
from chatkeep.engine.events import iso, now_ms
from chatkeep.engine.model_calls import ModelCalls
from chatkeep.engine.output_schema import OutputSchema
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.structured_answer import StructuredAnswer
from chatkeep.engine.turn import Turn
from chatkeep.errors import StructuredOutputError
from chatkeep.messages.parts import bag_of, load_json
from chatkeep.records import ModelMessage

__all__ = ["complete_answer", "loop_is_needed"]

_SHOWN: Final = 200
"""Characters of a wrong answer that an error quotes."""


def loop_is_needed(answer: StructuredAnswer | None, configuration: Configuration) -> bool:
    """Whether there is anything to do before the answer: a separate call without tools is all."""
    return answer is None or answer.mode != "separate" or bool(configuration.tools)


async def complete_answer(
    runtime: Runtime,
    answer: StructuredAnswer,
    configuration: Configuration,
    model: ModelCalls,
    last: Turn | None,
) -> Turn | None:
    """Get the answer if it is not there yet, and put it on its message; the turn of the separate
    call if one was made. ``last`` is the last turn of the loop.

    Raises:
        StructuredOutputError: there is no answer, or a wrong one.
        Aborted, ProviderError: as a model call.
    """
    made: Turn | None = None
    if answer.mode == "separate" and answer.found is None and answer.failure is None:
        made = await _ask(runtime, answer, configuration, model)
    for event in answer.held():
        await runtime.publisher.pipe(event)
        runtime.gate.check()
    own = last if answer.mode == "native" else made
    if own is not None and answer.found is None and answer.failure is None:
        await _read(runtime, answer, own)
    if answer.found is not None:
        is_text = own is not None and answer.found.message_id == own.message_id
        answer.record(answer.found, is_text=is_text, row=_fresh_row(model.source))
        return made
    failure = answer.failure or StructuredOutputError(
        "the model gave no structured output", "missing-result"
    )
    if own is not None:
        _mark_failed(runtime, own, failure)
    raise failure


async def _ask(
    runtime: Runtime, answer: StructuredAnswer, configuration: Configuration, model: ModelCalls
) -> Turn:
    """The separate call."""
    message_id = runtime.transcript.take_message_id(None)
    schema = await configuration.refresh("structuredOutput", schema=answer.schema.schema)
    runtime.gate.check()
    if schema is not answer.schema.schema:
        answer.schema = OutputSchema(schema)
    return await model.make(message_id, configuration.config, final=True)


async def _read(runtime: Runtime, answer: StructuredAnswer, turn: Turn) -> None:
    """The text of ``turn`` is the answer: published, as the hooks leave it."""
    raw = turn.content
    if not raw.strip():
        return
    try:
        data = load_json(raw)
    except ValueError:
        quoted = raw if len(raw) <= _SHOWN else raw[:_SHOWN] + "…"
        answer.failure = StructuredOutputError(
            f"the structured output is no JSON: {quoted}",
            "parse-failed",
            raw=raw,
        )
        return
    await runtime.publisher.pipe(answer.complete_event(data, raw, turn.message_id))
    runtime.gate.check()


def _fresh_row(source: dict[str, Any]) -> ModelMessage:
    row: dict[str, Any] = {"role": "assistant", "createdAt": iso(now_ms())}
    if source:
        row["metadata"] = {"tanstack": {"source": dict(source)}}
    return cast("ModelMessage", row)


def _mark_failed(runtime: Runtime, turn: Turn, failure: StructuredOutputError) -> None:
    """The wrong text stays what clients show it as: a structured part that failed."""
    place = runtime.transcript.find_assistant(turn.message_id)
    if place is None or not turn.content:
        return
    row = runtime.context.messages[place]
    part = {
        "type": "structured-output",
        "status": "error",
        "raw": turn.content,
        "errorMessage": str(failure),
    }
    metadata = {
        **row.get("metadata", {}),
        "tanstack": {**bag_of(row), "stopReason": "error"},
    }
    runtime.transcript.change(place, {"structuredOutput": part, "metadata": metadata})
