"""Small questions about the pieces of a message, asked by every conversion.

Content parts: ``{"type": "text", "content": …}``, or ``image``, ``audio``, ``video``,
``document`` with a ``source``: ``{"type": "data", "value", "mimeType"}``,
``{"type": "url", "value", "mimeType"?}`` or ``{"type": "file", …}``. On the wire a text part of
a user message has its text under ``text``. ``metadata.tanstack`` is the *bag*: the space of
the protocol family; the keys beside it belong to the user and are never read.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias, cast

from typing_extensions import TypeIs

from chatkeep.records import ModelMessage

__all__ = [
    "MEDIA_TYPES",
    "STOP_REASONS",
    "Row",
    "add_ui_resource",
    "bag_of",
    "calls_of",
    "collapse_text",
    "compact_json",
    "is_content_parts",
    "is_list",
    "is_placeholder",
    "is_row",
    "is_thought",
    "iso_time",
    "load_json",
    "parse_result",
    "provider_executed",
    "put_bag",
    "text_of",
    "ui_resource_key",
    "ui_resource_part",
    "ui_resources_of",
]

Row: TypeAlias = dict[str, Any]
"""A message, wire row or part: a JSON object."""

MEDIA_TYPES: Final = frozenset({"image", "audio", "video", "document"})
STOP_REASONS: Final = ("error", "aborted")
"""``metadata.tanstack.stopReason`` of the partial answer of a run that did not finish."""

_EMPTY: Final[Row] = {}
_MAX_NESTING: Final = 128


def is_row(value: object) -> TypeIs[Row]:
    """Whether ``value`` is a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeIs[list[Any]]:
    """Whether ``value`` is a JSON array."""
    return isinstance(value, list)


def compact_json(value: Any) -> str:
    """JSON text without spaces, as every text made from a value is written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def bag_of(message: Mapping[str, Any]) -> Row:
    """``metadata.tanstack``, or an empty object. Not to be changed."""
    metadata = message.get("metadata")
    if not is_row(metadata):
        return _EMPTY
    bag = metadata.get("tanstack")
    return bag if is_row(bag) else _EMPTY


def put_bag(row: Row, bag: Mapping[str, Any]) -> None:
    """Give ``row`` (a fresh dict) this bag; empty containers are left out."""
    old: Row = row.get("metadata") or {}
    metadata = {k: v for k, v in old.items() if k != "tanstack"}
    if bag:
        metadata["tanstack"] = dict(bag)
    if metadata:
        row["metadata"] = metadata
    else:
        row.pop("metadata", None)


def calls_of(message: Mapping[str, Any]) -> list[Row]:
    """The tool calls of an assistant message, or an empty list."""
    return cast("list[Row]", message.get("toolCalls") or [])


def provider_executed(call: Mapping[str, Any]) -> bool:
    """Whether the provider ran this call itself: it needs no result of ours."""
    metadata = call.get("metadata")
    return is_row(metadata) and metadata.get("providerExecuted") is True


def is_thought(entry: Mapping[str, Any]) -> bool:
    """Whether a thinking entry says anything: readable, signed or redacted."""
    return bool(entry.get("content") or entry.get("signature") or entry.get("redacted"))


def is_content_parts(value: object) -> TypeIs[list[Row]]:
    """Whether ``value`` is a non-empty list of valid content parts.

    An empty list is no content: as a tool result it is the JSON value ``[]``.
    """
    return is_list(value) and len(parts := value) > 0 and all(_is_content_part(p) for p in parts)


def _is_content_part(value: object) -> bool:
    if not is_row(value):
        return False
    if value.get("type") == "text":
        return isinstance(value.get("content"), str)
    if value.get("type") not in MEDIA_TYPES:
        return False
    source = value.get("source")
    if not is_row(source):
        return False
    kind, inner = source.get("type"), source.get("value")
    if kind == "data":
        return isinstance(inner, str) and isinstance(source.get("mimeType"), str)
    return kind == "file" or (kind == "url" and isinstance(inner, str))


def text_of(content: object) -> str:
    """The text of a message's content: all text parts, joined without a separator."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        return ""
    parts = cast("list[Row]", content)
    return "".join(
        p["content"] for p in parts if p.get("type") == "text" and isinstance(p.get("content"), str)
    )


def collapse_text(parts: Sequence[Row]) -> str | list[Row]:
    """One text when every part is text and nothing else; the parts otherwise."""
    if all(p.get("type") == "text" and len(p) == 2 and "content" in p for p in parts):
        return "".join(p["content"] for p in parts)
    return list(parts)


def iso_time(value: object) -> str | None:
    """``createdAt`` as ISO 8601 text; None for what is no time (dropped silently).

    Text is kept as it stands; datetimes and epoch milliseconds become UTC with ``Z``.
    """
    if isinstance(value, str):
        try:
            dt.datetime.fromisoformat(value)
        except ValueError:
            return None
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | dt.datetime):
        return None
    if not isinstance(value, dt.datetime):
        try:
            value = dt.datetime.fromtimestamp(value / 1000, dt.UTC)
        except (OverflowError, OSError, ValueError):
            return None
    if value.tzinfo is None:
        value = value.replace(tzinfo=dt.UTC)
    text = value.astimezone(dt.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def load_json(text: str) -> Any:
    """The value of a JSON text that came from a model or a tool.

    Raises:
        ValueError: no JSON, a number that is no JSON number (NaN, an overflow), or nesting that
            no encoder of ours would write again.
    """
    if text.count("[") + text.count("{") > _MAX_NESTING and _depth(text) > _MAX_NESTING:
        raise ValueError("nested too deep")
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _depth(text: str) -> int:
    """Upper bound of the nesting of a JSON text (brackets inside strings count too)."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def parse_result(content: object) -> Any:
    """What a tool result is worth: its JSON value, or the text (or parts) itself."""
    if not isinstance(content, str):
        return content
    try:
        return load_json(content)
    except ValueError:
        return content


def is_placeholder(content: object) -> bool:
    """Whether a tool row's content stands for a result that is still to come.

    Clients post ``{"approved": true, "pendingExecution": true, …}`` for a call that they
    approved; it is not a result.
    """
    if not isinstance(content, str) or "pendingExecution" not in content:
        return False
    value = parse_result(content)
    return is_row(value) and value.get("pendingExecution") is True


def ui_resource_part(value: object) -> Row | None:
    """The ``ui-resource`` part of a CUSTOM event's value (or of a stored entry); None if it
    is not one: ``toolCallId``, ``toolName``, ``resource.uri`` and ``resource.mimeType`` must
    be texts."""
    if not is_row(value):
        return None
    resource = value.get("resource")
    if not is_row(resource):
        return None
    needed = (
        value.get("toolCallId"),
        value.get("toolName"),
        resource.get("uri"),
        resource.get("mimeType"),
    )
    if not all(isinstance(text, str) for text in needed):
        return None
    if value.get("type") == "ui-resource":
        return value
    return {"type": "ui-resource", **{k: v for k, v in value.items() if k != "type"}}


def ui_resources_of(message: Mapping[str, Any]) -> list[Row]:
    """The widgets recorded on an assistant message; entries that are none are skipped."""
    entries = bag_of(message).get("uiResources")
    if not is_list(entries):
        return []
    return [part for entry in entries if (part := ui_resource_part(entry)) is not None]


def ui_resource_key(part: Mapping[str, Any]) -> tuple[str, str, str]:
    """Two parts with one key are the same widget."""
    return (part["toolCallId"], part["toolName"], part["resource"]["uri"])


def add_ui_resource(
    messages: Sequence[ModelMessage], value: object
) -> tuple[list[ModelMessage], bool]:
    """Record a widget on the message that owns its call, and whether anything changed.

    The owner is the last assistant message whose ``toolCalls`` hold the ``toolCallId``. The
    first part of a key wins: a later one with the same call, tool and uri is not stored. The
    owner is replaced by a new dict; everything else comes back by identity.
    """
    out = list(messages)
    part = ui_resource_part(value)
    if part is None:
        return out, False
    for place in range(len(out) - 1, -1, -1):
        row = cast("Row", out[place])
        if row.get("role") != "assistant":
            continue
        if not any(c.get("id") == part["toolCallId"] for c in calls_of(row)):
            continue
        known = ui_resources_of(row)
        if ui_resource_key(part) in {ui_resource_key(p) for p in known}:
            return out, False
        changed = dict(row)
        put_bag(changed, {**bag_of(row), "uiResources": [*known, part]})
        out[place] = cast("ModelMessage", changed)
        return out, True
    return out, False
