"""The structured answer of a run, as its events tell it.

Two CUSTOM events frame it: ``structured-output.start {messageId}``, behind the start of its
message and before the text, and ``structured-output.complete {object, raw, messageId,
reasoning?}``. Either may come from the adapter or be made here; what is published counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from ag_ui.core import (
    CustomEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
)

from chatkeep.codec import normalize
from chatkeep.engine.events import custom, with_changes
from chatkeep.engine.middleware import Event
from chatkeep.engine.output_schema import OutputSchema
from chatkeep.engine.transcript import Transcript
from chatkeep.errors import InvalidValue, StructuredOutputError
from chatkeep.messages import compact_json
from chatkeep.messages.parts import is_row
from chatkeep.records import ModelMessage

__all__ = ["COMPLETE", "START", "Answer", "StructuredAnswer", "StructuredMode"]

StructuredMode: TypeAlias = Literal["native", "separate", "event"]
"""How a model adapter gives a structured answer.

``native``: the schema goes with every call, tools too; the text of the last turn is the answer.
``separate``: prose and tools first, then one more call with the schema and without tools.
``event``: the adapter says it itself, with ``structured-output.complete``, in any of its calls.
"""

START: Final = "structured-output.start"
COMPLETE: Final = "structured-output.complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object that fits the schema, the text it was read from, and its message."""

    data: Any
    raw: str
    message_id: str
    reasoning: str | None = None

    def part(self) -> dict[str, Any]:
        """The part of its message."""
        part: dict[str, Any] = {
            "type": "structured-output",
            "status": "complete",
            "data": self.data,
            "partial": self.data,
            "raw": self.raw,
        }
        if self.reasoning is not None:
            part["reasoning"] = self.reasoning
        return part


class StructuredAnswer:
    """One per run that asks for structured output; gathers what is published about it."""

    __slots__ = ("_held", "_ids", "_transcript", "failure", "found", "mode", "schema")

    def __init__(self, schema: OutputSchema, mode: StructuredMode, transcript: Transcript) -> None:
        self.schema = schema
        self.mode: StructuredMode = mode
        self.found: Answer | None = None
        """The latest answer that was published."""
        self.failure: StructuredOutputError | None = None
        """Why the latest one was not."""
        self._transcript = transcript
        self._ids: dict[str, str] = {}
        self._held: CustomEvent | None = None

    # ------------------------------------------------------------ before the hooks see it

    def name(self, wanted: str, identity: str) -> None:
        """The adapter's message ``wanted`` goes by ``identity`` here."""
        self._ids[wanted] = identity

    def named(self, event: CustomEvent, own: str | None) -> CustomEvent:
        """``event`` of an adapter, about the message as it is called here, and its object without
        the nulls that the provider needed. ``own`` is the id of the message whose text is the
        answer, where there is one."""
        value: object = event.value
        if not is_row(value):
            return event
        wanted = value.get("messageId")
        identity = own
        if identity is None:
            identity = self._resolved(wanted if isinstance(wanted, str) else "")
        changed = {**value, "messageId": identity}
        if event.name == COMPLETE and "object" in value:
            changed["object"] = self.schema.narrowed(value["object"])
        return with_changes(event, value=changed)

    def _resolved(self, wanted: str) -> str:
        """A message of this thread keeps its id: the answer is put on it. Any other id is taken
        if it is free."""
        known = self._ids.get(wanted)
        if known is None:
            there = self._transcript.find_assistant(wanted) is not None
            known = wanted if there else self._transcript.take_message_id(wanted)
            if wanted:
                self._ids[wanted] = known
        return known

    def beside(self, event: CustomEvent, *, own: str) -> CustomEvent | None:
        """What may go out now of what an adapter tells beside its prose. ``own`` is the id of the
        message that the prose is in.

        An answer that gets a message of its own waits until the prose is over, because that
        message stands behind it (:meth:`held`).
        """
        value: object = event.value
        identity = value.get("messageId") if is_row(value) else None
        if not isinstance(identity, str):
            return event
        if identity == own or self._transcript.find_assistant(identity) is not None:
            self._held = None
            return event
        if event.name == COMPLETE:
            self._held = event
        return None

    def held(self) -> list[Event]:
        """The answer that waited, as a message: its start, its text, its end, and the answer."""
        event, self._held = self._held, None
        if event is None:
            return []
        value = cast("dict[str, Any]", event.value)
        return [*self.as_text(event, start=[self.start_event(value["messageId"])]), event]

    def as_text(self, event: CustomEvent, *, start: list[Event]) -> list[Event]:
        """The message of an answer that was given without streaming its text; nothing of an
        answer that is wrong, which is not published either."""
        value: object = event.value
        if not is_row(value) or "object" not in value:
            return []
        try:
            data = normalize(value["object"], "$.object")
        except InvalidValue:
            return []
        if self.schema.issue(data) is not None:
            return []
        raw, identity = value.get("raw"), value["messageId"]
        text = raw if isinstance(raw, str) and raw else compact_json(data)
        return [
            TextMessageStartEvent(message_id=identity, role="assistant"),
            *start,
            TextMessageContentEvent(message_id=identity, delta=text),
            TextMessageEndEvent(message_id=identity),
        ]

    def start_event(self, message_id: str) -> CustomEvent:
        """What tells a client that the text of this message is JSON."""
        return custom(START, {"messageId": message_id})

    def complete_event(self, data: Any, raw: str, message_id: str) -> CustomEvent:
        """The answer.

        Raises:
            InvalidValue: ``data`` is no JSON.
        """
        value = {"object": self.schema.narrowed(data), "raw": raw, "messageId": message_id}
        return custom(COMPLETE, value)

    # -------------------------------------------------------------- after the hooks saw it

    def admit(self, event: CustomEvent) -> bool:
        """Take note of an event that is about to be published; whether it may be."""
        value: object = event.value
        if not is_row(value):
            return True
        if event.name == START:
            # After the answer it would have clients wait for another one.
            return self.found is None or value.get("messageId") != self.found.message_id
        if event.name == COMPLETE and "object" in value:
            return self._take(value)
        return True

    def _take(self, value: dict[str, Any]) -> bool:
        try:
            data = normalize(value["object"], "$.object")
        except InvalidValue as error:
            self.failure = _invalid(str(error), value)
            return False
        issue = self.schema.issue(data)
        if issue is not None:
            self.failure = _invalid(issue, value)
            return False
        raw, identity, thoughts = (value.get(k) for k in ("raw", "messageId", "reasoning"))
        self.failure = None
        self.found = Answer(
            data=data,
            raw=raw if isinstance(raw, str) and raw else compact_json(data),
            message_id=identity if isinstance(identity, str) and identity else self._resolved(""),
            reasoning=thoughts if isinstance(thoughts, str) else None,
        )
        return True

    # ------------------------------------------------------------------ the transcript

    def record(self, answer: Answer, *, is_text: bool, row: ModelMessage) -> None:
        """Put the answer on its message. ``is_text``: it is all that the message says. ``row`` is
        what a message that is not there yet begins with (time, source)."""
        place = self._transcript.find_assistant(answer.message_id)
        part = answer.part()
        if place is None:
            made: dict[str, Any] = {**row, "id": answer.message_id, "content": answer.raw}
            made["structuredOutput"] = part
            self._transcript.append(cast("ModelMessage", made))
            return
        changes: dict[str, Any] = {"structuredOutput": part}
        if is_text:
            changes["content"] = answer.raw
        self._transcript.change(place, changes)


def _invalid(issue: str, value: dict[str, Any]) -> StructuredOutputError:
    raw = value.get("raw")
    return StructuredOutputError(
        f"the structured output does not fit its schema: {issue}",
        "validation-failed",
        raw=raw if isinstance(raw, str) else None,
    )
