"""Reasoning of a model turn: spans, blocks, signatures.

Each block becomes one ``thinking`` entry of the assistant row, under the id it was streamed with.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from ag_ui.core import (
    ReasoningEncryptedValueEvent,
    ReasoningEndEvent,
    ReasoningMessageChunkEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
)

from chatkeep.engine.events import extras, with_changes
from chatkeep.engine.middleware import Event
from chatkeep.engine.text import Text, whole_text
from chatkeep.engine.transcript import Transcript

__all__ = ["Reasoning", "signature_event"]

_M = TypeVar(
    "_M",
    ReasoningStartEvent,
    ReasoningEndEvent,
    ReasoningMessageStartEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
)


def _renamed(event: _M, identity: str) -> _M:
    return event if event.message_id == identity else with_changes(event, message_id=identity)


def signature_event(subtype: str, entity: str, value: str) -> Event:
    """A REASONING_ENCRYPTED_VALUE; ``subtype`` is ``message`` or ``tool-call``."""
    return ReasoningEncryptedValueEvent(
        subtype=cast("Any", subtype), entity_id=entity, encrypted_value=value
    )


class _Thought:
    """One block. ``named`` is the adapter's id for it, ``identity`` ours."""

    __slots__ = ("identity", "named", "open", "signature", "text")

    def __init__(self, named: str, identity: str) -> None:
        self.named = named
        self.identity = identity
        self.text = Text()
        self.signature: str | None = None
        self.open = True

    def entry(self) -> dict[str, Any]:
        out: dict[str, Any] = {"id": self.identity, "content": str(self.text)}
        if self.signature is not None:
            out["signature"] = self.signature
        return out


class Reasoning:
    """Every method takes an adapter's event and returns what is to be published for it."""

    __slots__ = ("_spans", "_thoughts", "_transcript")

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._thoughts: list[_Thought] = []
        self._spans: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._thoughts)

    def entries(self) -> list[dict[str, Any]]:
        """The ``thinking`` of the assistant row."""
        return [thought.entry() for thought in self._thoughts]

    def span_start(self, event: ReasoningStartEvent) -> Event | None:
        """REASONING_START."""
        if event.message_id in self._spans:
            return None
        identity = self._transcript.take_message_id(event.message_id)
        self._spans[event.message_id] = identity
        return _renamed(event, identity)

    def span_end(self, event: ReasoningEndEvent) -> Event | None:
        """REASONING_END."""
        identity = self._spans.pop(event.message_id, None)
        return None if identity is None else _renamed(event, identity)

    def start(self, event: ReasoningMessageStartEvent) -> Event | None:
        """REASONING_MESSAGE_START."""
        if self._thoughts and self._thoughts[-1].open:
            return None
        return _renamed(event, self._think(event.message_id).identity)

    def _think(self, named: str) -> _Thought:
        """Begin a block. It may carry the id of the span around it, once."""
        identity = self._spans.get(named)
        if identity is None or any(t.identity == identity for t in self._thoughts):
            identity = self._transcript.take_message_id(named)
        thought = _Thought(named, identity)
        self._thoughts.append(thought)
        return thought

    def content(self, event: ReasoningMessageContentEvent) -> Event | list[Event]:
        """REASONING_MESSAGE_CONTENT; a cumulative ``content`` replaces what was gathered."""
        before, thought = self._opened(event.message_id)
        known = extras(event).get("content")
        if isinstance(known, str):
            thought.text.replace(known)
            delta = whole_text(event.delta)
        else:
            delta = thought.text.add(event.delta)
        if not delta:
            return before
        if delta != event.delta:
            event = with_changes(event, delta=delta)
        renamed = _renamed(event, thought.identity)
        return [*before, renamed] if before else renamed

    def _opened(self, named: str) -> tuple[list[Event], _Thought]:
        if self._thoughts and self._thoughts[-1].open:
            return [], self._thoughts[-1]
        thought = self._think(named)
        start = ReasoningMessageStartEvent(message_id=thought.identity, role="reasoning")
        return [start], thought

    def chunk(self, event: ReasoningMessageChunkEvent) -> list[Event]:
        """REASONING_MESSAGE_CHUNK: start and content in one."""
        before, thought = self._opened(event.message_id or "")
        delta = thought.text.add(event.delta or "")
        if delta:
            content = ReasoningMessageContentEvent(
                message_id=thought.identity, delta=delta, metadata=event.metadata
            )
            before.append(content)
        return before

    def end(self, event: ReasoningMessageEndEvent | None = None) -> list[Event]:
        """REASONING_MESSAGE_END, or the end of the block that another event implies."""
        if not self._thoughts or not self._thoughts[-1].open:
            return []
        last = self._thoughts[-1]
        last.open = False
        out: list[Event] = []
        rest = last.text.rest()
        if rest:
            out.append(ReasoningMessageContentEvent(message_id=last.identity, delta=rest))
        end = event or ReasoningMessageEndEvent(message_id=last.identity)
        return [*out, _renamed(end, last.identity)]

    def sign(self, signature: str, named: str) -> str:
        """Put a signature on a block; returns the block's id.

        It is the block that the adapter names, else the latest one that has none, else one of
        its own without text (the provider kept the thought to itself).
        """
        thought = next((t for t in reversed(self._thoughts) if t.named == named), None)
        if thought is None and self._thoughts and self._thoughts[-1].signature is None:
            thought = self._thoughts[-1]
        if thought is None:
            thought = self._think(named)
            thought.open = False
        thought.signature = signature
        return thought.identity

    def close(self) -> list[Event]:
        """Ends that the adapter left out."""
        out = self.end()
        out += [ReasoningEndEvent(message_id=identity) for identity in self._spans.values()]
        self._spans.clear()
        return out
