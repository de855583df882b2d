"""Model messages to UI messages and back: what a browser paints.

A UI message is ``{"id", "role", "parts", "createdAt"?, "name"?, "metadata"?}``; every one has
``id``, ``role`` and ``parts``, and no key is ``null`` (an absent output must be absent; a tool
that returned null has the output ``null``).

The rules of :func:`model_to_ui`:

* parts of an assistant row in this order: thinking, text or media, the structured part, tool
  calls, widgets. Text that ends with the raw of a structured part is shown without it;
* assistant rows with one id and no user row in between are segments of one UI message;
  rows with different ids stay apart;
* a tool row becomes a ``tool-result`` part of the message that holds its call, wherever that
  stands before it, and gives the call its output and state. Its ``error`` field alone decides
  between ``complete`` and ``error``. Without a call it is a message of its own;
* a placeholder for a result to come is not shown.

:func:`ui_to_model` walks the parts back into rows: each tool result closes the segment before
it, so rows, order, pairing and ids are those of the transcript the message came from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from chatkeep.errors import InvalidValue
from chatkeep.messages.ids import stable_ids
from chatkeep.messages.parts import (
    MEDIA_TYPES,
    Row,
    bag_of,
    calls_of,
    collapse_text,
    compact_json,
    is_list,
    is_placeholder,
    is_row,
    is_thought,
    iso_time,
    load_json,
    parse_result,
    provider_executed,
    put_bag,
    text_of,
    ui_resource_key,
    ui_resource_part,
    ui_resources_of,
)
from chatkeep.messages.placing import placed
from chatkeep.records import ActivityRecord, ModelMessage
from chatkeep.scope import check_id

__all__ = [
    "activity_message",
    "interleave_activities",
    "model_to_ui",
    "ui_length",
    "ui_to_model",
]

_MESSAGE = frozenset(
    {"id", "role", "content", "createdAt", "toolCalls", "toolCallId", "thinking", "error",
     "structuredOutput", "metadata", "parts"}
)  # fmt: skip
_UI = frozenset({"id", "role", "parts", "createdAt", "metadata"})
_RESULT = frozenset({"type", "state", "toolCallId", "content", "createdAt", "outcome"})
_CALL = frozenset({"type", "name", "arguments", "state", "input", "output", "approval"})
_INCLUDED = frozenset(
    {"input-complete", "complete", "approval-requested", "approval-responded", "error"}
)
_PART_TEXTS = {
    "text": ("content",),
    "thinking": ("id", "content", "signature"),
    "structured-output": ("status", "raw"),
    "tool-call": ("id", "name", "arguments", "state"),
    "tool-result": ("toolCallId", "state", "id", "error"),
}
"""Fields of a part that are text if they are there at all."""


# ---------------------------------------------------------------------- model to UI


def model_to_ui(
    messages: Sequence[ModelMessage], *, numbers: Sequence[int] | None = None
) -> list[Row]:
    """The UI messages of a transcript, oldest first.

    A row without an id gets the one that :func:`stable_ids` derives (``numbers`` are passed on
    to it), so that two calls give the same ids.
    """
    painter = _Painter()
    for message, stable in zip(messages, stable_ids(messages, numbers=numbers), strict=True):
        painter.add(cast("Row", stable), owns_id=bool(message.get("id")))
    return painter.out


def ui_length(messages: Sequence[ModelMessage]) -> int:
    """How many UI messages these rows make: what activity positions count."""
    return len(model_to_ui(messages))


def interleave_activities(ui: Sequence[Row], activities: Iterable[ActivityRecord]) -> list[Row]:
    """UI messages with activity rows in their places: each behind the message of its ``anchor``,
    one without at its ``index`` or at the end."""
    places = placed([message.get("id") for message in ui], activities)
    return [ui[item] if isinstance(item, int) else activity_message(item) for item in places]


def activity_message(record: ActivityRecord) -> Row:
    """The UI message of an activity row."""
    part = {
        "type": "activity",
        "activityType": record.activity_type,
        "content": record.content,
    }
    row: Row = {"id": record.id, "role": "activity", "parts": [part]}
    if record.metadata is not None:
        row["metadata"] = record.metadata
    return row


class _Painter:
    def __init__(self) -> None:
        self.out: list[Row] = []
        self._open: Row | None = None  # assistant message that segments may still extend
        self._owners: dict[str, tuple[Row, Row]] = {}  # call id -> (message, call part)
        self._results: dict[int, Row] = {}  # identity of a call part -> its result part

    def add(self, message: Row, *, owns_id: bool) -> None:
        role = message.get("role")
        if role == "tool":
            self._result(message, owns_id)
        elif role == "assistant":
            self._assistant(message)
        else:
            self._open = None
            ui = _ui_message(message)
            content = message.get("content")
            if is_list(content):
                ui["parts"].extend(content)
            elif content:
                ui["parts"].append({"type": "text", "content": content})
            self.out.append(ui)

    def _assistant(self, message: Row) -> None:
        ui = self._open
        if ui is None or ui["id"] != message["id"]:
            ui = _ui_message(message)
            self.out.append(ui)
            self._open = ui
        else:
            _join_metadata(ui, message)
        parts = cast("list[Row]", ui["parts"])
        for entry in cast("list[Row]", message.get("thinking") or []):
            if is_thought(entry):
                kept = {k: v for k, v in entry.items() if v is not None}
                parts.append({**kept, "type": "thinking", "content": entry.get("content") or ""})
        parts.extend(_body_parts(message))
        for call in calls_of(message):
            part = _call_part(call)
            parts.append(part)
            self._owners[call["id"]] = (ui, part)
        known = {ui_resource_key(p) for p in parts if ui_resource_part(p) is p}
        for widget in ui_resources_of(message):
            if ui_resource_key(widget) not in known:
                known.add(ui_resource_key(widget))
                parts.append(widget)

    def _result(self, message: Row, owns_id: bool) -> None:
        content = message.get("content")
        if is_placeholder(content):
            return
        call_id = str(message.get("toolCallId", ""))
        owner = self._owners.get(call_id)
        part = _result_part(message, owns_id)
        if owner is None:
            ui: Row = {"id": message["id"], "role": "assistant", "parts": [part]}
            created = iso_time(message.get("createdAt"))
            if created is not None:
                ui["createdAt"] = created
            self._open = None
            self.out.append(ui)
            return
        holder, call = owner
        call["state"] = part["state"]
        call["output"] = _output(part)
        if part.get("id") == holder["id"]:
            del part["id"]
        earlier = self._results.get(id(call))
        if earlier is None:
            self._results[id(call)] = part
            holder["parts"].append(part)
        else:  # a call has one result: the newest
            earlier.clear()
            earlier.update(part)


def _ui_message(message: Row) -> Row:
    ui: Row = {"id": message["id"], "role": message["role"], "parts": []}
    ui.update({k: v for k, v in message.items() if k not in _MESSAGE and v is not None})
    created = iso_time(message.get("createdAt"))
    if created is not None:
        ui["createdAt"] = created
    if is_row(message.get("metadata")):
        ui["metadata"] = message["metadata"]
    return ui


def _join_metadata(ui: Row, message: Row) -> None:
    """Metadata of a further segment: what the message has already wins, widgets add up."""
    metadata = message.get("metadata")
    if not is_row(metadata) or metadata == ui.get("metadata"):
        return
    bag, more = bag_of(ui), bag_of(message)
    joined = {**more, **bag}
    first, second = bag.get("uiResources"), more.get("uiResources")
    if is_list(first) and is_list(second) and first != second:
        joined["uiResources"] = [*first, *second]
    ui["metadata"] = {**metadata, **(ui.get("metadata") or {})}
    put_bag(ui, joined)


def _body_parts(message: Row) -> list[Row]:
    """Text, media and structured parts."""
    content = message.get("content")
    structured = message.get("structuredOutput")
    if not is_row(structured):
        stored = bag_of(message).get("structuredOutput")
        structured = stored if is_row(stored) else None
    if structured is None:
        if is_list(content):
            return list(cast("list[Row]", content))
        return [{"type": "text", "content": content}] if content else []
    raw = structured.get("raw")
    if not isinstance(raw, str):
        raw = ""
    parts: list[Row] = []
    if is_list(content):
        parts.extend(p for p in cast("list[Row]", content) if p.get("content") != raw)
    elif content:
        text = content.removesuffix(raw) if raw else content
        if text:
            parts.append({"type": "text", "content": text})
    kept = {k: v for k, v in structured.items() if v is not None or k == "data"}
    parts.append({**kept, "type": "structured-output"})
    return parts


def _call_part(call: Row) -> Row:
    function: Row = call.get("function") or {}
    arguments = function.get("arguments", "")
    part: Row = {
        "type": "tool-call",
        "id": call["id"],
        "name": function.get("name", ""),
        "arguments": arguments,
        "state": "input-complete",
    }
    # Broken arguments are shown as the model wrote them, without an input.
    with contextlib.suppress(ValueError):
        part["input"] = load_json(arguments)
    for key, value in call.items():
        if key not in {"id", "type", "function"} and value is not None:
            part.setdefault(key, value)
    return part


def _result_part(message: Row, owns_id: bool) -> Row:
    error = message.get("error")
    content = message.get("content")
    part: Row = {
        "type": "tool-result",
        "toolCallId": message.get("toolCallId", ""),
        "content": "" if content is None else content,
        "state": "complete" if error is None else "error",
    }
    if owns_id:
        part["id"] = message["id"]
    taken = _MESSAGE | _RESULT
    part.update({k: v for k, v in message.items() if k not in taken and v is not None})
    if is_row(message.get("metadata")):
        part["metadata"] = message["metadata"]
    created = iso_time(message.get("createdAt"))
    if created is not None:
        part["createdAt"] = created
    if error is not None:
        part["error"] = error
    outcome = bag_of(message).get("toolResultOutcome")
    if outcome is not None:
        part["outcome"] = outcome
    return part


def _output(part: Row) -> Any:
    """The output of a call: the parsed result, as a browser takes it from the stream. A failure
    without one names its error."""
    value = parse_result(part["content"])
    if part["state"] == "error" and value in (None, ""):
        return {"error": part["error"]}
    return value


# ---------------------------------------------------------------------- UI to model


def ui_to_model(ui: Sequence[Mapping[str, Any]]) -> list[ModelMessage]:
    """The model messages of UI messages. Activity rows make none.

    Raises:
        InvalidValue: a message without ``parts``, or a part without what its type needs.
    """
    out: list[Row] = []
    for index, message in enumerate(ui):
        role, parts = message.get("role"), message.get("parts")
        where = f"$[{index}]"
        if not is_list(parts):
            raise InvalidValue(f"{where}.parts", "must be a list")
        if role == "activity":
            continue
        rows = cast("list[Row]", parts)
        for place, part in enumerate(rows):
            _check_part(part, f"{where}.parts[{place}]")
        if role == "assistant":
            out.extend(_Walker(dict(message), where).walk(rows))
        elif role in ("user", "system"):
            out.append(_from_plain(dict(message), rows))
        else:
            raise InvalidValue(f"{where}.role", f"must be user, assistant, system, not {role!r}")
    return cast("list[ModelMessage]", out)


def _check_part(part: Row, where: str) -> None:
    kind = part.get("type")
    for key in _PART_TEXTS.get(kind, ()) if isinstance(kind, str) else ():
        if not isinstance(part.get(key), str | None):
            raise InvalidValue(f"{where}.{key}", "must be text")
    if kind == "text" and part.get("content", "") is None:
        raise InvalidValue(f"{where}.content", "must be text")


def _from_plain(message: Row, parts: Sequence[Row]) -> Row:
    content = collapse_text([p for p in parts if p.get("type") in MEDIA_TYPES | {"text"}])
    row = {k: v for k, v in message.items() if k != "parts" and v is not None}
    row["content"] = content or ""
    return row


class _Walker:
    """One assistant message, part by part."""

    def __init__(self, message: Row, where: str) -> None:
        self._where = where
        metadata = message.get("metadata")
        self._shared = {k: v for k, v in message.items() if k not in _UI and v is not None}
        self._head: Row = {"role": "assistant"}
        if message.get("id"):
            self._head["id"] = message["id"]
        created = iso_time(message.get("createdAt"))
        if created is not None:
            self._head["createdAt"] = created
        if is_row(metadata):
            self._head["metadata"] = metadata
        self.rows: list[Row] = []
        self._answered: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._content: list[Row] = []
        self._calls: list[Row] = []
        self._thinking: list[Row] = []
        self._structured: Row | None = None

    def walk(self, parts: Sequence[Row]) -> list[Row]:
        resources: list[Row] = []
        for index, part in enumerate(parts):
            kind = part.get("type")
            if kind == "text" or kind in MEDIA_TYPES:
                self._content.append(part)
            elif kind == "tool-call":
                self._call(part, f"{self._where}.parts[{index}]")
            elif kind == "tool-result":
                self._result(part, f"{self._where}.parts[{index}]")
            elif kind == "thinking":
                self._thought(part)
            elif kind == "structured-output":
                self._structure(part)
            elif kind == "ui-resource" and (resource := ui_resource_part(part)) is not None:
                resources.append(resource)
        if self._content or self._calls or self._thinking or self._structured or not self.rows:
            self._flush()
        self._late_results(parts)
        self._give_resources(resources)
        return self.rows

    def _flush(self) -> None:
        content = collapse_text(self._content)
        row: Row = {**self._shared, **self._head, "content": content or None}
        if self._calls:
            row["toolCalls"] = self._calls
        if self._thinking:
            row["thinking"] = self._thinking
        if self._structured is not None:
            row["structuredOutput"] = self._structured
        self.rows.append(row)
        self._reset()

    def _call(self, part: Row, where: str) -> None:
        if part.get("state") not in _INCLUDED and "output" not in part:
            return  # still streaming: the model has not finished it
        name = check_id(part.get("id"), f"{where}.id")
        if not isinstance(part.get("name"), str) or not isinstance(part.get("arguments"), str):
            raise InvalidValue(where, "a tool call needs a name and arguments as text")
        call: Row = {
            "id": name,
            "type": "function",
            "function": {"name": part["name"], "arguments": part["arguments"]},
        }
        for key, value in part.items():
            if key not in _CALL and key != "id" and value is not None:
                call[key] = value
        self._calls.append(call)

    def _result(self, part: Row, where: str) -> None:
        call = check_id(part.get("toolCallId"), f"{where}.toolCallId")
        if self._content or self._calls or self._thinking or self._structured or not self.rows:
            self._flush()
        if part.get("state") not in ("complete", "error") or call in self._answered:
            return
        self._answered.add(call)
        row: Row = {"role": "tool", "toolCallId": call}
        row.update({k: v for k, v in part.items() if k not in _RESULT and v is not None})
        row["content"] = part.get("content", "")
        created = iso_time(part.get("createdAt"))
        if created is not None:
            row["createdAt"] = created
        if part["state"] == "error" and "error" not in row:
            row["error"] = _error_text(row["content"])
        self.rows.append(row)

    def _thought(self, part: Row) -> None:
        if not is_thought(part):
            return
        if any(provider_executed(c) for c in self._calls):
            self._flush()
        kept = {k: v for k, v in part.items() if k != "type" and v is not None}
        self._thinking.append({**kept, "content": part.get("content") or ""})

    def _structure(self, part: Row) -> None:
        if part.get("status") != "complete":
            self._structured = dict(part)
            return
        text = part.get("raw") or (compact_json(part["data"]) if "data" in part else "")
        if text:
            self._content.append({"type": "text", "content": text})
            self._structured = dict(part)

    def _late_results(self, parts: Sequence[Row]) -> None:
        """Results that stand on the call only: outputs, and answers to approvals."""
        for part in parts:
            if part.get("type") != "tool-call" or part.get("id") in self._answered:
                continue
            approval = part.get("approval")
            approved = approval.get("approved") if is_row(approval) else None
            if "output" in part:
                output = part["output"]
                row: Row = {"role": "tool", "toolCallId": part["id"]}
                row["content"] = output if isinstance(output, str) else compact_json(output)
                if part.get("state") == "error":
                    row["error"] = _error_text(output)
            elif part.get("state") == "approval-responded" and approved is not None:
                row = {"role": "tool", "toolCallId": part["id"]}
                row["content"] = compact_json(_answer(bool(approved)))
            else:
                continue
            self._answered.add(part["id"])
            self.rows.append(row)

    def _give_resources(self, resources: Sequence[Row]) -> None:
        """Widgets go to the segment that holds their call; the parts are the truth, so the
        list that the message's own bag repeats is replaced."""
        segments = [r for r in self.rows if r["role"] == "assistant"]
        given: dict[int, list[Row]] = {}
        for resource in resources:
            place = next(
                (
                    i
                    for i, row in enumerate(segments)
                    if any(c["id"] == resource["toolCallId"] for c in calls_of(row))
                ),
                0,
            )
            given.setdefault(place, []).append(resource)
        for place, row in enumerate(segments):
            bag = bag_of(row)
            if place in given:
                put_bag(row, {**bag, "uiResources": given[place]})
            elif resources and "uiResources" in bag:
                put_bag(row, {k: v for k, v in bag.items() if k != "uiResources"})


def _answer(approved: bool) -> Row:
    if approved:
        return {
            "approved": True,
            "pendingExecution": True,
            "message": "User approved this action",
        }
    return {"approved": False, "message": "User denied this action"}


def _error_text(content: object) -> str:
    value = parse_result(content)
    found = value.get("error") if is_row(value) else None
    return found if isinstance(found, str) else text_of(content) or "Tool execution failed"
