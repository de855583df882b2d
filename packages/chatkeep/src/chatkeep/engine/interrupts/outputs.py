"""What a browser's tool came back with: an output, or the text of its failure.

A failure is told from a success by what the client says, never by looks: a tool may well return
``{"error": …}``. Clients say it by a marker on the entry, or, where they know no marker, by the
``error`` of the tool row that they post along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from chatkeep.codec import normalize
from chatkeep.engine.interrupts.resume import ResumeEntry
from chatkeep.engine.schema import Problem
from chatkeep.engine.tools import Tool
from chatkeep.errors import InvalidValue
from chatkeep.messages.parts import calls_of
from chatkeep.records import ModelMessage

__all__ = ["Failed", "Output", "posted_failures", "read_output"]

OUTPUT_ERROR: Final = "output-error"
NO_TEXT: Final = "The tool failed."
"""Stands for a failure that came without a text: an empty one would be no failure any more."""


@dataclass(frozen=True, slots=True)
class Output:
    """What the tool returned, as JSON."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The tool failed."""

    text: str


def read_output(
    tool: Tool | None, entry: Mapping[str, Any], posted_error: str | None
) -> Output | Failed | Problem:
    """What the answer to a browser tool's interrupt says; a :class:`Problem` refuses it.

    ``posted_error`` is the ``error`` of the tool row that was posted for the call. An output is
    made JSON first and then checked against the tool's schema.
    """
    payload = entry.get("payload")
    if _marked(entry):
        text = _error_of(payload)
        return Problem("the failure is not {error: text}") if text is None else Failed(text)
    if posted_error is not None and payload == {"error": posted_error}:
        return Failed(posted_error or NO_TEXT)
    try:
        value = normalize(payload, "$.payload")
    except InvalidValue as error:
        return Problem(str(error))
    problem = None if tool is None else tool.output_problem(value)
    return Output(value) if problem is None else problem


def _marked(entry: Mapping[str, Any]) -> bool:
    metadata = entry.get("metadata")
    if not isinstance(metadata, Mapping):
        return False
    bag = cast("Mapping[str, Any]", metadata).get("tanstack")
    return isinstance(bag, Mapping) and cast("ResumeEntry", bag).get("state") == OUTPUT_ERROR


def _error_of(payload: object) -> str | None:
    if not isinstance(payload, Mapping):
        return None
    said = dict(cast("Mapping[str, Any]", payload))
    if said.keys() == {"state", "errorText"} and said["state"] == OUTPUT_ERROR:
        text = said["errorText"]
    elif said.keys() == {"error"}:
        text = said["error"]
    else:
        return None
    return (cast("str", normalize(text)) or NO_TEXT) if isinstance(text, str) else None


def posted_failures(messages: Sequence[ModelMessage]) -> dict[str, str]:
    """Error texts of posted tool rows by call id: of the last result of the last call with
    that id. To be read before the rows are merged into what is stored."""
    out: dict[str, str] = {}
    for row in messages:
        if row.get("role") == "tool":
            call_id: object = row.get("toolCallId")
            error: object = row.get("error")
            if isinstance(call_id, str):
                if isinstance(error, str):
                    out[call_id] = error
                else:
                    out.pop(call_id, None)
        for call in calls_of(row):
            out.pop(call["id"], None)
    return out
