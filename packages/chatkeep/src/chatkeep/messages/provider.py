"""What a model is sent. The stored history is never changed by it.

Providers refuse transcripts that people may well have: a call without a result (a process
died), a result without a call (a cut history), a partial answer of a failed run. The rules of
:func:`provider_view`:

* assistant rows with ``metadata.tanstack.stopReason`` ``error`` or ``aborted`` are left out, and
  with them the results of their calls;
* results stand right behind the rows that hold their calls, the newest one where a call has
  several; a call without one gets a failed result that says so. Calls that the provider ran
  itself need none;
* placeholders for a result to come, results of no call, and assistant rows with nothing in
  them are left out;
* given the ``source`` of the model about to be called, thinking of another model loses its
  signatures: readable thoughts become text, redacted ones go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from chatkeep.messages.parts import (
    STOP_REASONS,
    Row,
    bag_of,
    calls_of,
    compact_json,
    is_list,
    is_placeholder,
    provider_executed,
)
from chatkeep.records import ModelMessage

__all__ = ["NO_RESULT", "provider_view"]

NO_RESULT: Final = "No result was provided for this tool call"
"""``error`` of the result that stands in for a missing one."""


def provider_view(
    messages: Sequence[ModelMessage], *, source: Mapping[str, Any] | None = None
) -> list[ModelMessage]:
    """The rows to send. Rows that need no change come back by identity.

    ``source`` is the ``{"provider", "api", "model"}`` of the model that will be called.
    """
    rows = cast("Sequence[Row]", messages)
    results = _results(rows)
    out: list[Row] = []
    index, count = 0, len(rows)
    while index < count:
        start = index
        row = rows[index]
        index += 1
        if row.get("role") == "tool":
            continue  # placed behind its call
        if row.get("role") != "assistant":
            out.append(row)
            continue
        # Segments of one message without results in between share one set of calls.
        while index < count and row.get("id") and _continues(rows[index], row):
            index += 1
        sent = [i for i in range(start, index) if not _failed(rows[i]) and not _empty(rows[i])]
        out.extend(rows[i] if source is None else _for_source(rows[i], source) for i in sent)
        for i in sent:
            out.extend(results.get(i, {}).values())
        for i in sent:
            out.extend(_missing(rows[i], results.get(i, {})))
    return cast("list[ModelMessage]", out)


def _results(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """Results by the position of the assistant row that holds their call, then by call id."""
    holders: dict[str, int] = {}
    found: dict[int, dict[str, Row]] = {}
    for place, row in enumerate(rows):
        role = row.get("role")
        if role == "assistant":
            for call in calls_of(row):
                holders[call["id"]] = place
        elif role == "tool" and not is_placeholder(row.get("content")):
            call_id = row.get("toolCallId")
            if call_id in holders:
                found.setdefault(holders[call_id], {})[call_id] = row
    return found


def _missing(row: Row, results: Mapping[str, Row]) -> list[Row]:
    return [
        {
            "role": "tool",
            "toolCallId": call["id"],
            "content": compact_json({"error": NO_RESULT}),
            "error": NO_RESULT,
        }
        for call in calls_of(row)
        if call["id"] not in results and not provider_executed(call)
    ]


def _continues(row: Row, first: Row) -> bool:
    return row.get("role") == "assistant" and row.get("id") == first["id"]


def _failed(row: Row) -> bool:
    return bag_of(row).get("stopReason") in STOP_REASONS


def _empty(row: Row) -> bool:
    return not (row.get("content") or row.get("toolCalls") or row.get("thinking"))


def _for_source(row: Row, source: Mapping[str, Any]) -> Row:
    made_by = bag_of(row).get("source")
    thinking = cast("list[Row]", row.get("thinking") or [])
    if not thinking or not made_by or made_by == source:
        return row
    told = [e["content"] for e in thinking if e.get("content") and not e.get("redacted")]
    out = {k: v for k, v in row.items() if k != "thinking"}
    if told:
        content = row.get("content")
        parts = [{"type": "text", "content": text} for text in told]
        if is_list(content):
            out["content"] = [*parts, *cast("list[Row]", content)]
        else:
            out["content"] = "\n\n".join([*told, content] if content else told)
    calls = [_without_signature(c) for c in calls_of(row)]
    if calls:
        out["toolCalls"] = calls
    return out


def _without_signature(call: Row) -> Row:
    metadata = call.get("metadata")
    if not isinstance(metadata, dict) or "thoughtSignature" not in metadata:
        return call
    rest = {k: v for k, v in cast("Row", metadata).items() if k != "thoughtSignature"}
    out = {k: v for k, v in call.items() if k != "metadata"}
    return {**out, "metadata": rest} if rest else out
