"""MESSAGES_SNAPSHOT: the whole thread, in rows that a strict reader takes.

Stored messages may hold what AG-UI has no form for: parts of other writers, keys of later
versions. One such row would have a reader refuse the event, and with it the pause. So it is shown
without them; the store, and every reload, keep it whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from ag_ui.core import ContentPart, Message, MessagesSnapshotEvent
from pydantic import TypeAdapter, ValidationError

from chatkeep.engine.middleware import ChatContext, Event
from chatkeep.messages import model_to_wire
from chatkeep.messages.parts import is_list

__all__ = ["messages_snapshot", "thread_snapshot"]

_LOG: Final = logging.getLogger("chatkeep.engine")
_MESSAGE: Final[TypeAdapter[Any]] = TypeAdapter(Message)
_PART: Final[TypeAdapter[Any]] = TypeAdapter(ContentPart)
_NEEDED: Final = frozenset({"id", "role", "content", "toolCallId"})


def thread_snapshot(context: ChatContext) -> Event:
    """The transcript so far, and what stands behind it."""
    return messages_snapshot(model_to_wire([*context.messages, *context.behind]))


def messages_snapshot(rows: Sequence[dict[str, Any]]) -> MessagesSnapshotEvent:
    """The event that shows ``rows``, oldest first."""
    shown = [message for row in rows if (message := _message(row)) is not None]
    return MessagesSnapshotEvent(messages=shown)


def _message(row: dict[str, Any]) -> Any:
    try:
        return _MESSAGE.validate_python(row)
    except ValidationError as error:
        mended = _without(row, error)
    try:
        message = _MESSAGE.validate_python(mended)
    except ValidationError as error:
        _LOG.warning("message %r has no form in a snapshot: %s", row.get("id"), error)
        return None
    left = [key for key in row if row[key] != mended.get(key)]
    _LOG.warning("message %r is shown without what AG-UI does not know in: %s", row["id"], left)
    return message


def _without(row: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """``row`` without the keys and the parts that ``error`` is about."""
    wrong = {problem["loc"][1] for problem in error.errors() if len(problem["loc"]) > 1}
    mended = {key: value for key, value in row.items() if key in _NEEDED or key not in wrong}
    content = row.get("content")
    if is_list(content):
        mended["content"] = [part for part in content if _is_known(part)]
    return mended


def _is_known(part: object) -> bool:
    try:
        _PART.validate_python(part)
    except ValidationError:
        return False
    return True
