"""Model messages to AG-UI rows: what a MESSAGES_SNAPSHOT carries.

One assistant message fans out: a reasoning row for each thinking entry, then the anchor, then
(they are messages of their own) its tool rows. What AG-UI has no field for stands in the
anchor's bag, ``metadata.tanstack``: ``createdAt``, ``toolCallMetadata`` by call id, the full
``structuredOutput``, and whatever else the bag held. Rows of one assistant id that follow each
other without a user row in between are segments of one message and become one anchor: that is
what a client built from the live stream.

Ids are those of the stored rows. Content of a tool row is always text (older clients refuse
parts); the parts stand in ``metadata.tanstack.toolResult.content``. Media parts of an
assistant have no place on the wire; the stored row and the hydrated message keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from chatkeep.messages.ids import reasoning_id, stable_ids, tool_row_id, unique
from chatkeep.messages.parts import (
    Row,
    bag_of,
    calls_of,
    compact_json,
    is_content_parts,
    is_list,
    is_row,
    is_thought,
    iso_time,
    put_bag,
    text_of,
)
from chatkeep.messages.placing import placed
from chatkeep.records import ActivityRecord, ModelMessage

__all__ = ["activity_row", "model_to_wire"]

_SHARED = frozenset({"id", "role", "content", "createdAt", "metadata", "parts"})
_ASSISTANT = _SHARED | {"toolCalls", "thinking", "structuredOutput"}


def model_to_wire(
    messages: Sequence[ModelMessage],
    *,
    activities: Iterable[ActivityRecord] = (),
    numbers: Sequence[int] | None = None,
) -> list[Row]:
    """The rows of a snapshot, oldest first; activities in their places.

    A message without an id gets the one that :func:`stable_ids` derives (``numbers`` are
    passed on to it). No row has ``null`` for an absent field.
    """
    writer = _Writer({name for m in messages if (name := m.get("id"))})
    for message, stable in zip(messages, stable_ids(messages, numbers=numbers), strict=True):
        writer.add(cast("Row", stable), owns_id=bool(message.get("id")))
    out: list[Row] = []
    for item in placed(writer.names, activities):
        out.extend(writer.blocks[item] if isinstance(item, int) else [activity_row(item)])
    return out


def activity_row(record: ActivityRecord) -> Row:
    """The AG-UI activity message of a record."""
    row: Row = {
        "id": record.id,
        "role": "activity",
        "activityType": record.activity_type,
        "content": record.content,
    }
    if record.metadata is not None:
        row["metadata"] = record.metadata
    if record.subagent_run_id is not None:
        row["subagentRunId"] = record.subagent_run_id
    return row


class _Writer:
    """Collects blocks: the rows that belong to one UI message, in order; ``names`` are the ids
    of these messages."""

    def __init__(self, taken: set[str]) -> None:
        self.blocks: list[list[Row]] = []
        self.names: list[str] = []
        self._taken = taken
        self._anchor: Row | None = None  # open assistant message
        self._block: list[Row] = []  # its rows
        self._anchor_at = 0
        self._thinking = 0
        self._calls: set[str] = set()

    def add(self, message: Row, *, owns_id: bool) -> None:
        role = message.get("role")
        if role == "assistant":
            self._assistant(message)
        elif role == "tool":
            self._tool(message, owns_id)
        else:
            self._anchor = None
            self._begin([self._plain(message)], message["id"])

    def _begin(self, block: list[Row], name: str) -> None:
        self.blocks.append(block)
        self.names.append(name)

    def _plain(self, message: Row) -> Row:
        row = _common(message, _SHARED)
        content: Any = message.get("content")
        if is_list(content) and message.get("role") == "user":
            row["content"] = [_wire_part(p) for p in cast("list[Row]", content)]
        else:
            row["content"] = text_of(content)
        _stamp(row, message, {})
        return row

    def _assistant(self, message: Row) -> None:
        anchor = self._anchor
        if anchor is None or anchor["id"] != message["id"]:
            anchor = _common(message, _ASSISTANT)
            self._anchor, self._anchor_at, self._thinking = anchor, 0, 0
            self._block = [anchor]
            self._begin(self._block, anchor["id"])
        for entry in cast("list[Row]", message.get("thinking") or []):
            if is_thought(entry):
                self._block.insert(self._anchor_at, self._reasoning(message["id"], entry))
                self._anchor_at += 1
        text = text_of(message.get("content"))
        if text:
            anchor["content"] = anchor.get("content", "") + text
        extra: Row = {}
        calls = calls_of(message)
        if calls:
            anchor["toolCalls"] = [*anchor.get("toolCalls", []), *map(_wire_call, calls)]
            self._calls.update(c["id"] for c in calls)
            kept = {c["id"]: c["metadata"] for c in calls if c.get("metadata") is not None}
            known = bag_of(anchor).get("toolCallMetadata") or bag_of(message).get(
                "toolCallMetadata"
            )
            if kept:
                extra["toolCallMetadata"] = {**(known if is_row(known) else {}), **kept}
        structured = message.get("structuredOutput")
        if is_row(structured):
            extra["structuredOutput"] = {
                k: v for k, v in structured.items() if k != "type" and v is not None
            }
        _stamp(anchor, message, extra)

    def _reasoning(self, message_id: str, entry: Row) -> Row:
        extras = {k: v for k, v in entry.items() if v is not None}
        name = extras.pop("id", None) or unique(
            reasoning_id(message_id, self._thinking), self._taken
        )
        self._thinking += 1
        row: Row = {"id": name, "role": "reasoning", "content": extras.pop("content", "")}
        signature = extras.pop("signature", None)
        if signature:
            row["encryptedValue"] = signature
        return {**extras, **row}

    def _tool(self, message: Row, owns_id: bool) -> None:
        row = _common(message, _SHARED)
        call = str(message.get("toolCallId", ""))
        owned: Row = {}
        if owns_id:
            owned["id"] = message["id"]
        else:
            row["id"] = unique(tool_row_id(call), self._taken)
        created = iso_time(message.get("createdAt"))
        if created is not None:
            owned["createdAt"] = created
        content = message.get("content")
        if isinstance(content, str) or content is None:
            row["content"] = content or ""
        else:
            row["content"] = compact_json(content)
            if is_content_parts(content):
                owned["content"] = content
        _stamp(row, message, {"toolResult": owned}, created=False)
        if call in self._calls and self.blocks:
            self.blocks[-1].append(row)
        else:
            self._begin([row], message["id"])


def _common(message: Row, shaped: frozenset[str]) -> Row:
    """Id, role and every key that has the same form on the wire."""
    row: Row = {"id": message["id"], "role": message["role"]}
    row.update({k: v for k, v in message.items() if k not in shaped and v is not None})
    if message["role"] != "assistant":
        row["content"] = ""
    metadata = message.get("metadata")
    if is_row(metadata):
        row["metadata"] = metadata
    return row


def _stamp(row: Row, message: Row, extra: Mapping[str, Any], *, created: bool = True) -> None:
    """Write the bag of ``row``: what it has, what ``message`` has, and ``extra``."""
    bag = {**bag_of(message), **bag_of(row), **extra}
    if created and "createdAt" not in bag_of(row):
        time = iso_time(message.get("createdAt"))
        if time is not None:
            bag = {**bag, "createdAt": time}
    metadata = message.get("metadata")
    if is_row(metadata):
        row["metadata"] = {**metadata, **(row.get("metadata") or {})}
    put_bag(row, bag)


def _wire_part(part: Row) -> Row:
    if part.get("type") != "text" or "content" not in part:
        return part
    return {"text" if k == "content" else k: v for k, v in part.items() if v is not None}


def _wire_call(call: Row) -> Row:
    row = {k: v for k, v in call.items() if k != "metadata" and v is not None}
    metadata = call.get("metadata")
    signature = metadata.get("thoughtSignature") if is_row(metadata) else None
    if isinstance(signature, str) and signature:
        row["encryptedValue"] = signature
    return row
