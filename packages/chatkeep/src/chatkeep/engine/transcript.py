"""The canonical transcript of a run, and the ids that are taken in it.

Two rows never share an id that the engine hands out, and two calls never share a call id:
providers reuse both, and a browser finds a result's call by its id anywhere in the thread.
An id that no store would take counts as none: otherwise the answer that it names, paid for
and shown already, could not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatkeep.engine.events import new_id
from chatkeep.engine.middleware import ChatContext
from chatkeep.engine.text import whole_text
from chatkeep.errors import InvalidValue
from chatkeep.records import ModelMessage
from chatkeep.scope import check_id

__all__ = ["Transcript"]


class Transcript:
    """Wraps ``ctx.messages``: rows are appended or the whole list is exchanged, never changed."""

    __slots__ = ("_calls", "_context", "_ids")

    def __init__(self, context: ChatContext) -> None:
        self._context = context
        self._ids: set[str] = set()
        self._calls: set[str] = set()

    def replace(self, messages: Sequence[ModelMessage]) -> None:
        """Exchange the transcript (a middleware's ``on_config`` did)."""
        self._context.messages = list(messages)
        for row in self._context.messages:
            self._note(row)

    def append(self, row: ModelMessage) -> None:
        """Add one row."""
        self._context.messages.append(row)
        self._note(row)

    def _note(self, row: ModelMessage) -> None:
        identity = row.get("id")
        if identity:
            self._ids.add(identity)
        for entry in row.get("thinking") or ():
            if entry.get("id"):
                self._ids.add(entry["id"])
        for call in row.get("toolCalls") or ():
            self._calls.add(call["id"])

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
