"""The canonical transcript of a run, and the ids that are taken in it.

Two rows never share an id that the engine hands out, and two calls never share a call id:
providers reuse both, and a browser finds a result's call by its id anywhere in the thread.
An id that no store would take counts as none: otherwise the answer that it names, paid for
and shown already, could not be stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from chatkeep.engine.events import new_id
from chatkeep.engine.middleware import ChatContext
from chatkeep.engine.text import whole_text
from chatkeep.errors import InvalidValue
from chatkeep.messages import add_ui_resource, ui_resource_key, ui_resource_part
from chatkeep.records import ModelMessage
from chatkeep.scope import check_id

__all__ = ["Transcript"]


class Transcript:
    """Wraps ``ctx.messages``: rows are appended or the whole list is exchanged, never changed.

    A widget (a ``ui-resource`` part) stands on the assistant row that holds its call. One that
    comes before its row does is kept until then.
    """

    __slots__ = ("_calls", "_context", "_ids", "_widgets")

    def __init__(self, context: ChatContext) -> None:
        self._context = context
        self._ids: set[str] = set()
        self._calls: set[str] = set()
        self._widgets: dict[tuple[str, str, str], dict[str, Any]] = {}

    def replace(self, messages: Sequence[ModelMessage]) -> None:
        """Exchange the transcript (a middleware's ``on_config`` did)."""
        rows = list(messages)
        for part in self._widgets.values():
            rows, _ = add_ui_resource(rows, part)
        self._context.messages = rows
        for row in rows:
            self._note(row)

    def append(self, row: ModelMessage) -> None:
        """Add one row."""
        for call in row.get("toolCalls") or ():
            for part in self._widgets.values():
                if part["toolCallId"] == call["id"]:
                    ((row,), _) = add_ui_resource([row], part)
        self._context.messages.append(row)
        self._note(row)

    def add_widget(self, value: object) -> None:
        """Record the value of a ``ui-resource`` event on the row that owns its call; what is no
        widget is left out. The first one of a call, a tool and a uri is kept."""
        part = ui_resource_part(value)
        if part is None or ui_resource_key(part) in self._widgets:
            return
        self._widgets[ui_resource_key(part)] = part
        # A new list: whoever is about to store the old one has not stored this.
        self._context.messages, _ = add_ui_resource(self._context.messages, part)

    def find_assistant(self, identity: str) -> int | None:
        """Place of the last assistant row with this id."""
        rows = self._context.messages
        for place in range(len(rows) - 1, -1, -1):
            if rows[place].get("role") == "assistant" and rows[place].get("id") == identity:
                return place
        return None

    def change(self, place: int, changes: Mapping[str, Any]) -> None:
        """Replace the row at ``place`` by one with ``changes``; the list is a new one too."""
        rows = list(self._context.messages)
        rows[place] = cast("ModelMessage", {**rows[place], **changes})
        self._context.messages = rows

    @property
    def last_shown(self) -> str | None:
        """Id of the last message that readers see: results are parts of other messages."""
        for row in reversed(self._context.messages):
            if row.get("role") != "tool":
                name: str | None = row.get("id")
                return name
        return None

    def _note(self, row: ModelMessage) -> None:
        identity = row.get("id")
        if identity:
            self._ids.add(identity)
        for entry in row.get("thinking") or ():
            if entry.get("id"):
                self._ids.add(entry["id"])
        for call in row.get("toolCalls") or ():
            self._calls.add(call["id"])

    def reserve(self, identity: str) -> bool:
        """Take an id for something that is no message; False if it is taken already."""
        if identity in self._ids:
            return False
        self._ids.add(identity)
        return True

    def adopt_message_id(self, wanted: str, instead: str) -> str:
        """``wanted`` if it can be stored and is free (taken from now on), else ``instead``, which
        is ours already."""
        if wanted in self._ids or not _storable(wanted):
            return instead
        self._ids.add(wanted)
        return wanted

    def take_message_id(self, wanted: str | None) -> str:
        """``wanted`` if it can be stored and is free, else a fresh id; taken from now on."""
        free = wanted and wanted not in self._ids and _storable(wanted)
        identity = wanted if wanted and free else new_id("msg")
        self._ids.add(identity)
        return identity

    def take_call_id(self, wanted: str | None) -> str:
        """``wanted`` if no call of the thread has it, else a fresh one; taken from now on.

        Of any length: some providers keep signatures in it.
        """
        free = wanted and wanted not in self._calls and whole_text(wanted) == wanted
        identity = wanted if wanted and free else new_id("call")
        self._calls.add(identity)
        return identity


def _storable(identity: str) -> bool:
    try:
        check_id(identity, "id")
    except InvalidValue:
        return False
    return True
