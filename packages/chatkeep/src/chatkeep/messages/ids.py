"""Message ids: minted once, or derived for rows that came without.

Every row has one id everywhere: live event, snapshot, store, hydrate. New messages get a
random id before they are stored (:func:`ensure_ids`). Rows of older stores that have none
are given one that depends on their place only (:func:`stable_ids`), so that reading the
thread twice gives the same ids and a client's copy finds its row again.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, cast

from chatkeep.records import ModelMessage

__all__ = ["ensure_ids", "new_message_id", "reasoning_id", "stable_ids", "tool_row_id"]


def new_message_id() -> str:
    """A fresh durable id, ``msg-<uuid>``."""
    return f"msg-{uuid.uuid4()}"


def ensure_ids(
    messages: Sequence[ModelMessage], *, created_at: str | None = None
) -> list[ModelMessage]:
    """The same new messages, each with an id; those that need nothing come back by identity.

    ``created_at`` (ISO 8601) is given to those without a creation time. An empty id counts as
    none: it would hide the row from every look-up.
    """
    out: list[ModelMessage] = []
    for message in messages:
        named = message if message.get("id") else _with_id(message, new_message_id())
        if created_at is not None and "createdAt" not in named:
            named = cast("ModelMessage", {**named, "createdAt": created_at})
        out.append(named)
    return out


def stable_ids(
    messages: Sequence[ModelMessage], *, numbers: Sequence[int] | None = None
) -> list[ModelMessage]:
    """The same messages, where one without an id gets one derived from its place.

    ``numbers`` are the sequence numbers of the entries; without them the position in the list
    (from 1) is taken, which is the same as long as the thread was never cut. The derived id
    is no part of the stored row: whoever reads the thread derives it again.
    """
    if all(m.get("id") for m in messages):
        return list(messages)
    places = range(1, len(messages) + 1) if numbers is None else numbers
    taken = {name for m in messages if (name := m.get("id"))}
    out: list[ModelMessage] = []
    for message, place in zip(messages, places, strict=True):
        if message.get("id"):
            out.append(message)
            continue
        name = unique(f"msg-entry-{place}", taken)
        out.append(_with_id(message, name))
    return out


def tool_row_id(tool_call_id: str) -> str:
    """Id of a tool row that has none of its own, as browser clients derive it."""
    return f"tool-{tool_call_id}"


def reasoning_id(message_id: str, position: int) -> str:
    """Id of a reasoning row whose thinking entry (``position`` from 0) has none."""
    return f"{message_id}-reasoning" + (f"-{position + 1}" if position else "")


def unique(name: str, taken: set[str]) -> str:
    """``name``, or with ``-2``, ``-3``, … when it is taken; the result is taken now."""
    found, suffix = name, 1
    while found in taken:
        suffix += 1
        found = f"{name}-{suffix}"
    taken.add(found)
    return found


def _with_id(message: ModelMessage, name: str) -> ModelMessage:
    rest: dict[str, Any] = {k: v for k, v in message.items() if k != "id"}
    return cast("ModelMessage", {"id": name, **rest})
