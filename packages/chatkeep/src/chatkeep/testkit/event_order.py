"""The rules of a run's event stream, checked from outside.

:func:`check_events` takes the events of one run, as models or as JSON, and raises
:class:`EventOrderError` at the first that breaks a rule: what a strict AG-UI 1.0 client refuses,
and what chatkeep promises on top (one id for each row, nothing outside the specification, no
null for an absent field).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from ag_ui.core import BaseEvent, Event
from pydantic import TypeAdapter

__all__ = ["EventOrder", "EventOrderError", "check_events"]

_EVENTS: Final[TypeAdapter[Any]] = TypeAdapter(Event)
_TERMINALS: Final = frozenset({"RUN_FINISHED", "RUN_ERROR"})
_SPANS: Final = {
    "TEXT_MESSAGE": ("text message", "messageId"),
    "TOOL_CALL": ("tool call", "toolCallId"),
    "REASONING_MESSAGE": ("reasoning message", "messageId"),
    "REASONING": ("reasoning span", "messageId"),
}
_MIDDLES: Final = ("_CONTENT", "_ARGS")


class EventOrderError(AssertionError):
    """A stream broke a rule. ``index`` is the position of the event, from 0."""

    def __init__(self, index: int, rule: str, event: Mapping[str, Any] | None) -> None:
        self.index = index
        self.rule = rule
        super().__init__(f"event {index}: {rule}" + (f"\n{event}" if event else ""))


class EventOrder:
    """Feed it the events of one run in order, then :meth:`finish`."""

    def __init__(self, *, known_calls: Iterable[str] = ()) -> None:
        self._index = -1
        self._begun = False
        self._ended = False
        self._open: dict[tuple[str, str], None] = {}
        self._messages: dict[str, str] = {}
        self._calls: set[str] = set(known_calls)
        self._answered: set[str] = set()

    def feed(self, event: BaseEvent | Mapping[str, Any]) -> None:
        """Check one event.

        Raises:
            EventOrderError: it breaks a rule.
        """
        self._index += 1
        data: dict[str, Any]
        if isinstance(event, BaseEvent):
            data = event.model_dump(mode="json", by_alias=True)
        else:
            data = dict(event)
        self._check_shape(data)
        kind = str(data["type"])
        self._check(not self._ended, "nothing follows the terminal", data)
        self._check(self._begun or kind == "RUN_STARTED", "RUN_STARTED is first", data)
        if kind == "RUN_STARTED":
            self._check(not self._begun, "RUN_STARTED comes once", data)
            self._check(data.get("protocolVersion") == "1.0", "the protocol is 1.0", data)
            self._begun = True
        elif kind in _TERMINALS:
            self._terminal(kind, data)
        elif kind == "TOOL_CALL_RESULT":
            self._result(data)
        elif kind == "MESSAGES_SNAPSHOT":
            self._snapshot(data)
        elif kind.startswith("STEP_"):
            self._span("step", str(data["stepName"]), kind, data)
        else:
            self._content(kind, data)

    def finish(self) -> None:
        """Check that the run has ended.

        Raises:
            EventOrderError: there was no terminal.
        """
        if not self._ended:
            raise EventOrderError(self._index, "the stream ended without a terminal", None)

    def _check(self, holds: bool, rule: str, event: Mapping[str, Any]) -> None:
        if not holds:
            raise EventOrderError(self._index, rule, event)

    def _check_shape(self, data: dict[str, Any]) -> None:
        model = _EVENTS.validate_python(data)
        self._check(
            model.model_dump(mode="json", by_alias=True) == data, "the event round-trips", data
        )
        unknown = list(cast("dict[str, Any]", model.model_extra or {}))
        self._check(not unknown, f"keys outside AG-UI stand in metadata, not {unknown}", data)
        absent = [key for key, value in data.items() if value is None]
        self._check(not absent, f"absent fields are absent, not null: {absent}", data)
        self._check(isinstance(data.get("timestamp"), int), "every event has a time", data)

    def _content(self, kind: str, data: dict[str, Any]) -> None:
        for prefix, (what, field) in _SPANS.items():
            suffix = kind.removeprefix(prefix)
            if suffix == kind or suffix not in ("_START", "_END", *_MIDDLES):
                continue
            key = data[field]
            self._check(bool(key), f"a {what} has an id", data)
            self._span(what, key, kind, data)
            if suffix == "_START":
                self._opened(what, key, data)
            elif suffix in _MIDDLES:
                self._check(bool(data["delta"]), "deltas are not empty", data)
            return

    def _opened(self, what: str, key: str, data: dict[str, Any]) -> None:
        if what == "tool call":
            self._check(key not in self._calls, "call ids are used once", data)
            self._calls.add(key)
            parent = data.get("parentMessageId")
            self._check(
                parent is not None and self._messages.get(parent) == "text message",
                "a turn opens with TEXT_MESSAGE_START, and its calls name it",
                data,
            )
            return
        owner = "reasoning" if what.startswith("reasoning") else what
        known = self._messages.setdefault(key, owner)
        self._check(known == owner, f"id {key!r} belongs to a {known}", data)

    def _span(self, what: str, key: str, kind: str, data: dict[str, Any]) -> None:
        place = (what, key)
        if kind.endswith(("_START", "_STARTED")):
            self._check(place not in self._open, f"{what} {key!r} is open already", data)
            self._open[place] = None
            return
        self._check(place in self._open, f"{what} {key!r} is not open", data)
        if kind.endswith(("_END", "_FINISHED")):
            del self._open[place]

    def _result(self, data: dict[str, Any]) -> None:
        call, row = data["toolCallId"], data["messageId"]
        self._check(call in self._calls, f"a result has a call: {call!r}", data)
        self._check(("tool call", call) not in self._open, "a result follows its call", data)
        self._check(call not in self._answered, "a call has one result", data)
        self._check(row not in self._messages, "a tool row has an id of its own", data)
        self._answered.add(call)
        self._messages[row] = "tool row"

    def _snapshot(self, data: dict[str, Any]) -> None:
        """Rows that are there from now on: their calls may be answered, their results are."""
        self._check(not self._open, f"open at a snapshot: {list(self._open)}", data)
        rows: list[dict[str, Any]] = data["messages"]
        ids = [(row["role"], row["id"]) for row in rows]
        self._check(len({*ids}) == len(ids), "rows of a snapshot have ids of their own", data)
        held: set[str] = set()
        for row in rows:
            held.update(call["id"] for call in row.get("toolCalls", ()))
            if row["role"] == "tool":
                call = row["toolCallId"]
                self._check(call in held, f"a tool row follows its call: {call!r}", data)
                self._answered.add(call)
        self._calls |= held

    def _terminal(self, kind: str, data: dict[str, Any]) -> None:
        metadata: dict[str, Any] = data.get("metadata") or {}
        tanstack: dict[str, Any] = metadata.get("tanstack") or {}
        if kind == "RUN_FINISHED":
            self._check(not self._open, f"open at the end: {list(self._open)}", data)
            self._check(
                tanstack.get("finishReason") != "tool_calls",
                "the terminal never says tool_calls",
                data,
            )
            outcome: dict[str, Any] = data.get("outcome") or {}
            self._check(
                outcome.get("type") != "interrupt" or "finishReason" not in tanstack,
                "a pause has no finish reason",
                data,
            )
        self._ended = True


def check_events(
    events: Iterable[BaseEvent | Mapping[str, Any]], *, known_calls: Iterable[str] = ()
) -> None:
    """Check the whole stream of one run.

    Args:
        events: models, or JSON objects as they went over the wire.
        known_calls: tool call ids of the history, which a continuation may answer.

    Raises:
        EventOrderError: a rule is broken.
        pydantic.ValidationError: an event is none of AG-UI 1.0.
    """
    order = EventOrder(known_calls=known_calls)
    for event in events:
        order.feed(event)
    order.finish()
