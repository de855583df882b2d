"""One model turn: the adapter's events become engine state, and the events that are published.

State is taken from the adapter's event before any hook sees it; what a hook makes of the event
is published. The turn repairs what adapters get wrong (empty or reused ids, missing starts and
ends), so that the live stream, the stored message and a strict reader agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from ag_ui.core import (
    BaseEvent,
    CustomEvent,
    ReasoningEncryptedValueEvent,
    ReasoningEndEvent,
    ReasoningMessageChunkEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    RunErrorEvent,
    RunFinishedEvent,
    RunStartedEvent,
    StepFinishedEvent,
    StepStartedEvent,
    TextMessageChunkEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallChunkEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)

from chatkeep.engine.calls import Call
from chatkeep.engine.events import bag, extras, iso, merge_metadata, now_ms, with_changes
from chatkeep.engine.middleware import ChatContext, Event, FinishReason, Usage
from chatkeep.engine.reasoning import Reasoning, signature_event
from chatkeep.engine.recording import UI_RESOURCE
from chatkeep.engine.structured_answer import COMPLETE, START, StructuredAnswer
from chatkeep.engine.text import Text, whole_text
from chatkeep.engine.transcript import Transcript
from chatkeep.engine.usage import usage_of_event
from chatkeep.errors import ProviderError
from chatkeep.messages.parts import is_row
from chatkeep.records import ModelMessage

__all__ = ["Turn"]

Published = Event | list[Event] | None
_FINISH_REASONS: Final = frozenset({"stop", "length", "content_filter", "tool_calls"})
_L = TypeVar("_L", RunStartedEvent, RunFinishedEvent)
_M = TypeVar("_M", TextMessageStartEvent, TextMessageContentEvent, TextMessageEndEvent)


class Turn:
    """State of one model call. Feed it with :meth:`reduce`, then read :meth:`message`.

    ``answer`` is the structured answer that the run is to give. ``announced`` is false where the
    text of this call is that answer: its start is then announced before it.
    """

    def __init__(
        self,
        context: ChatContext,
        transcript: Transcript,
        message_id: str,
        source: Mapping[str, Any],
        *,
        answer: StructuredAnswer | None = None,
        announced: bool = True,
    ) -> None:
        self._answer = answer
        self._plain = announced
        self._announced = announced
        self._context = context
        self._transcript = transcript
        self._source = source
        self.message_id = message_id
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.ended = False
        """Whether the adapter has ended its call with RUN_FINISHED or RUN_ERROR."""
        self.calls: list[Call] = []
        self.results: list[ModelMessage] = []
        """Results of calls that the provider executed itself."""
        self._named = False
        self._begun = False
        self._text_open = False
        self._created_at: int | None = None
        context._text.clear()  # noqa: SLF001 - the context shows what the turn gathers
        self._text = Text(context._text)  # noqa: SLF001
        self._call_ids: dict[str, Call] = {}
        self._reasoning = Reasoning(transcript)
        self._response_id: str | None = None
        self._own_start: Event | None = None
        context.current_message_id = None

    # ------------------------------------------------------------------------- entry

    def reduce(self, event: Event) -> Published:
        """Take one event of the adapter; what is to go through ``on_chunk`` and out.

        Raises:
            ProviderError: it is no AG-UI event.
        """
        if getattr(event, "subagent_run_id", None) is not None:
            return event  # a child's: no part of this turn
        handler = _HANDLERS.get(type(event))
        if handler is None:
            handler = self._handler_of(event)
        return handler(self, event)

    def _handler_of(self, event: object) -> Callable[[Turn, Any], Published]:
        if not isinstance(event, BaseEvent):
            raise ProviderError(
                f"the model adapter yielded {type(event).__name__}; it must yield AG-UI events"
            )
        for kind, handler in _HANDLERS.items():
            if isinstance(event, kind):
                return handler
        return Turn._pass

    def close(self) -> list[Event]:
        """The adapter's stream is over: ends that it left out, and the start of a turn that
        said nothing but thought."""
        events: list[Event] = self._reasoning.close()
        for call in self.calls:
            if call.open:
                events += self._end_call(call, ToolCallEndEvent(tool_call_id=call.identity))
        if self._text_open:
            events += self._end_text(TextMessageEndEvent(message_id=self.message_id))
        if self._reasoning and not self._begun:
            events += self._begin_silently()
        return events

    def message(self) -> ModelMessage | None:
        """The assistant row of this turn; None when the model produced nothing."""
        text = str(self._text)
        if not text and not self.calls and not self._reasoning:
            return None
        row: dict[str, Any] = {"role": "assistant", "content": text or None}
        if self.calls:
            row["toolCalls"] = [call.entry() for call in self.calls]
        row["id"] = self.message_id
        row["createdAt"] = iso(self._created_at if self._created_at is not None else now_ms())
        if self._reasoning:
            row["thinking"] = self._reasoning.entries()
        tanstack: dict[str, Any] = {"source": dict(self._source)} if self._source else {}
        if self._response_id is not None:
            tanstack["responseId"] = self._response_id
        if tanstack:
            row["metadata"] = {"tanstack": tanstack}
        return cast("ModelMessage", row)

    @property
    def content(self) -> str:
        """The text of this turn."""
        return str(self._text)

    # -------------------------------------------------------------------------- text

    def _adopt(self, wanted: str | None) -> None:
        """The first id that the stream names becomes the message's, if it is free and nothing
        was streamed under ours yet."""
        if wanted and not self._named and not self._begun:
            self._named = True
            self.message_id = self._transcript.adopt_message_id(wanted, self.message_id)
        if wanted and self._answer is not None:
            self._answer.name(wanted, self.message_id)
        if self._created_at is None:
            self._created_at = now_ms()
        self._context.current_message_id = self.message_id

    def _text_start(self, event: TextMessageStartEvent) -> Published:
        self._adopt(event.message_id)
        if self._text_open:
            return None
        self._begun = self._text_open = True
        if event.role is None:
            event = with_changes(event, role="assistant")
        return [self._with_message_id(event), *self.announcement()]

    def _text_content(self, event: TextMessageContentEvent) -> Published:
        before: list[Event] = [] if self._text_open else self._open_text(event.message_id)
        known = extras(event).get("content")
        if isinstance(known, str):
            published = self._replace_text(known, event.delta)
        else:
            published = self._text.add(event.delta)
        if not published:
            return before
        if published != event.delta:
            event = with_changes(event, delta=published)
        event = self._with_message_id(event)
        return [*before, event] if before else event

    def _replace_text(self, whole: str, delta: str) -> str:
        """A cumulative ``content`` replaces what was gathered; the delta stays what it is, or is
        what the cumulative text adds."""
        old = str(self._text)
        self._text.replace(whole)
        new = str(self._text)
        if not delta and new.startswith(old):
            return new[len(old) :]
        return whole_text(delta)

    def _open_text(self, wanted: str | None) -> list[Event]:
        self._adopt(wanted)
        self._begun = self._text_open = True
        start = TextMessageStartEvent(message_id=self.message_id, role="assistant")
        return [start, *self.announcement()]

    def announcement(self) -> list[Event]:
        """What goes before the first text of a structured answer, unless it is out already. Its
        message is open by then: a browser takes what is said of a message that it does not know
        for one of the message before."""
        if self._announced or self._answer is None:
            return []
        self._announced = True
        return [self._own_start or self._answer.start_event(self.message_id)]

    def _text_end(self, event: TextMessageEndEvent) -> Published:
        return self._end_text(self._with_message_id(event)) if self._text_open else None

    def _end_text(self, event: TextMessageEndEvent) -> list[Event]:
        self._text_open = False
        rest = self._text.rest()
        if rest:
            return [TextMessageContentEvent(message_id=self.message_id, delta=rest), event]
        return [event]

    def _text_chunk(self, event: TextMessageChunkEvent) -> Published:
        out = [] if self._text_open else self._open_text(event.message_id)
        delta = self._text.add(event.delta or "")
        if delta:
            out.append(
                TextMessageContentEvent(
                    message_id=self.message_id, delta=delta, metadata=event.metadata
                )
            )
        return out

    def _begin_silently(self) -> list[Event]:
        """Every assistant turn opens with TEXT_MESSAGE_START, one that only calls tools too:
        otherwise a browser gives its message the id of the next text."""
        self._begun = True
        self._adopt(None)
        return [
            TextMessageStartEvent(message_id=self.message_id, role="assistant"),
            TextMessageEndEvent(message_id=self.message_id),
        ]

    def _with_message_id(self, event: _M) -> _M:
        if event.message_id == self.message_id:
            return event
        return with_changes(event, message_id=self.message_id)

    # -------------------------------------------------------------------------- tools

    def _call_start(self, event: ToolCallStartEvent) -> Published:
        name = event.tool_call_name
        known = self._call_ids.get(event.tool_call_id)
        if not name.strip() or (known is not None and known.open):
            return None
        self._adopt(event.parent_message_id)
        before = [] if self._begun else self._begin_silently()
        identity = self._transcript.take_call_id(event.tool_call_id)
        metadata = {k: v for k, v in (event.metadata or {}).items() if k != "tanstack"}
        call = Call(identity, name, metadata or None)
        self.calls.append(call)
        self._call_ids[event.tool_call_id] = call
        changes: dict[str, Any] = {}
        if identity != event.tool_call_id:
            changes["tool_call_id"] = identity
        if event.parent_message_id != self.message_id:
            changes["parent_message_id"] = self.message_id
        out: list[Event] = [*before, with_changes(event, **changes) if changes else event]
        signature = metadata.get("thoughtSignature")
        if isinstance(signature, str):
            out.append(signature_event("tool-call", identity, signature))
        return out

    def _call_args(self, event: ToolCallArgsEvent) -> Published:
        call = self._call_ids.get(event.tool_call_id)
        if call is None or not call.open:
            return None
        known = extras(event).get("args")
        if isinstance(known, str):
            call.arguments.replace(known)
            delta = whole_text(event.delta)
        else:
            delta = call.arguments.add(event.delta)
        if not delta:
            return None
        call.streamed = True
        if call.identity == event.tool_call_id and delta == event.delta:
            return event
        return with_changes(event, tool_call_id=call.identity, delta=delta)

    def _call_end(self, event: ToolCallEndEvent) -> Published:
        call = self._call_ids.get(event.tool_call_id)
        if call is None or not call.open:
            return None
        unknown = extras(event)
        given = unknown.get("input", bag(event).get("input"))
        if given is not None:
            call.use_input(given)
        if call.identity != event.tool_call_id:
            event = with_changes(event, tool_call_id=call.identity)
        out = self._end_call(call, event)
        if "result" in unknown:
            out.append(self._provider_result(call, unknown["result"], bag(event)))
        return out

    def _end_call(self, call: Call, event: ToolCallEndEvent) -> list[Event]:
        call.open = False
        rest = call.arguments.rest()
        parsed = call.parsed_object()
        if parsed is not None and "input" not in extras(event) and "input" not in bag(event):
            metadata = merge_metadata({"tanstack": {"input": parsed}}, event.metadata or {})
            event = with_changes(event, metadata=metadata)
        if not call.streamed and call.text not in ("", "{}"):
            rest = call.text
        if rest:
            return [ToolCallArgsEvent(tool_call_id=call.identity, delta=rest), event]
        return [event]

    def _provider_result(self, call: Call, value: Any, tanstack: Mapping[str, Any]) -> Event:
        return self._record_result(call, value, None, tanstack)

    def _record_result(
        self, call: Call, value: Any, wanted: str | None, tanstack: Mapping[str, Any]
    ) -> Event:
        failed = tanstack.get("state") == "output-error"
        identity = self._transcript.take_message_id(wanted)
        row = call.result_row(value, identity=identity, failed=failed)
        call.answered = True
        self.results.append(row)
        return call.result_event(row)

    def _call_result(self, event: ToolCallResultEvent) -> Published:
        call = self._call_ids.get(event.tool_call_id)
        if call is None or call.answered:
            return None
        before: list[Event] = []
        if call.open:  # the adapter left the end out: a result follows a whole call
            before = self._end_call(call, ToolCallEndEvent(tool_call_id=call.identity))
        published = self._record_result(call, event.content, event.message_id, bag(event))
        metadata = merge_metadata(event.metadata or {}, published.metadata or {})
        return [*before, with_changes(published, metadata=metadata or None)]

    def _call_chunk(self, event: ToolCallChunkEvent) -> Published:
        identity = event.tool_call_id or (next(reversed(self._call_ids), ""))
        call = self._call_ids.get(identity)
        out: list[Event] = []
        if call is None or not call.open:
            if not event.tool_call_name:
                return None
            for other in self.calls:
                if other.open:
                    out += self._end_call(other, ToolCallEndEvent(tool_call_id=other.identity))
            out += _listed(
                self._call_start(
                    ToolCallStartEvent(
                        tool_call_id=identity,
                        tool_call_name=event.tool_call_name,
                        parent_message_id=event.parent_message_id,
                        metadata=event.metadata,
                    )
                )
            )
        if event.delta:
            out += _listed(
                self._call_args(ToolCallArgsEvent(tool_call_id=identity, delta=event.delta))
            )
        return out

    def _custom(self, event: CustomEvent) -> Published:
        if event.name in (START, COMPLETE) and self._answer is not None:
            return self._about_answer(event, self._answer)
        # A widget of a call that goes by another id here is one of that call.
        value: object = event.value
        if event.name != UI_RESOURCE or not is_row(value):
            return event
        call = self._call_ids.get(str(value.get("toolCallId")))
        if call is None or call.identity == value["toolCallId"]:
            return event
        return with_changes(event, value={**value, "toolCallId": call.identity})

    def _about_answer(self, event: CustomEvent, answer: StructuredAnswer) -> Published:
        """The adapter frames its structured answer itself."""
        if self._plain:
            return answer.beside(answer.named(event, None), own=self.message_id)
        value: object = event.value
        wanted = value.get("messageId") if is_row(value) else None
        self._adopt(wanted if isinstance(wanted, str) else None)
        named = answer.named(event, self.message_id)
        if event.name == COMPLETE:
            before = [] if self._begun else answer.as_text(named, start=self.announcement())
            self._begun = True
            return [*before, named]
        if self._announced:
            return None
        self._own_start = named
        return self.announcement() if self._begun else None

    # ---------------------------------------------------------------------- reasoning

    def _think(self) -> None:
        if self._created_at is None:
            self._created_at = now_ms()

    def _span_start(self, event: ReasoningStartEvent) -> Published:
        return self._reasoning.span_start(event)

    def _span_end(self, event: ReasoningEndEvent) -> Published:
        return self._reasoning.span_end(event)

    def _thought_start(self, event: ReasoningMessageStartEvent) -> Published:
        self._think()
        return self._reasoning.start(event)

    def _thought_content(self, event: ReasoningMessageContentEvent) -> Published:
        self._think()
        return self._reasoning.content(event)

    def _thought_end(self, event: ReasoningMessageEndEvent) -> Published:
        return self._reasoning.end(event)

    def _thought_chunk(self, event: ReasoningMessageChunkEvent) -> Published:
        self._think()
        return self._reasoning.chunk(event)

    def _encrypted(self, event: ReasoningEncryptedValueEvent) -> Published:
        if event.subtype == "tool-call":
            call = self._call_ids.get(event.entity_id)
            if call is None:
                return event
            call.metadata = {**(call.metadata or {}), "thoughtSignature": event.encrypted_value}
            entity = call.identity
        else:
            self._think()
            entity = self._reasoning.sign(event.encrypted_value, event.entity_id)
        return event if event.entity_id == entity else with_changes(event, entity_id=entity)

    def _step_started(self, event: StepStartedEvent) -> Published:
        return [*self._reasoning.end(), event]

    def _step_finished(self, event: StepFinishedEvent) -> Published:
        signature = extras(event).get("signature", bag(event).get("signature"))
        if not isinstance(signature, str):
            return event
        self._think()
        entity = self._reasoning.sign(signature, event.step_name)
        return [event, signature_event("message", entity, signature)]

    # ----------------------------------------------------------------------- life cycle

    def _started(self, event: RunStartedEvent) -> Published:
        return self._of_this_run(event)

    def _of_this_run(self, event: _L) -> _L:
        """Adapters may invent run ids; everything here carries the request's."""
        context = self._context
        return with_changes(event, thread_id=context.thread_id, run_id=context.run_id)

    def _finished(self, event: RunFinishedEvent) -> Published:
        if event.outcome is not None and event.outcome.type == "interrupt":
            raise ProviderError(
                "the model adapter ended its call with an interrupt; this version of chatkeep "
                "does not take interrupts from adapters"
            )
        tanstack = bag(event)
        reason = extras(event).get("finishReason", tanstack.get("finishReason"))
        if reason in _FINISH_REASONS:
            self.finish_reason = cast("FinishReason", reason)
        response = extras(event).get("responseId", tanstack.get("responseId"))
        if isinstance(response, str):
            self._response_id = response
        self.usage = usage_of_event(event)
        self.ended = True
        return self._of_this_run(event)

    def _failed(self, event: RunErrorEvent) -> Published:
        self.usage = usage_of_event(event)
        self.ended = True
        return event

    def _pass(self, event: Event) -> Published:
        return event


def _listed(published: Published) -> list[Event]:
    if published is None:
        return []
    return published if isinstance(published, list) else [published]


_HANDLERS: Final[dict[type[Any], Callable[[Turn, Any], Published]]] = {
    TextMessageStartEvent: Turn._text_start,  # noqa: SLF001
    TextMessageContentEvent: Turn._text_content,  # noqa: SLF001
    TextMessageEndEvent: Turn._text_end,  # noqa: SLF001
    TextMessageChunkEvent: Turn._text_chunk,  # noqa: SLF001
    ToolCallStartEvent: Turn._call_start,  # noqa: SLF001
    ToolCallArgsEvent: Turn._call_args,  # noqa: SLF001
    ToolCallEndEvent: Turn._call_end,  # noqa: SLF001
    ToolCallResultEvent: Turn._call_result,  # noqa: SLF001
    ToolCallChunkEvent: Turn._call_chunk,  # noqa: SLF001
    ReasoningStartEvent: Turn._span_start,  # noqa: SLF001
    ReasoningEndEvent: Turn._span_end,  # noqa: SLF001
    ReasoningMessageStartEvent: Turn._thought_start,  # noqa: SLF001
    ReasoningMessageContentEvent: Turn._thought_content,  # noqa: SLF001
    ReasoningMessageEndEvent: Turn._thought_end,  # noqa: SLF001
    ReasoningMessageChunkEvent: Turn._thought_chunk,  # noqa: SLF001
    ReasoningEncryptedValueEvent: Turn._encrypted,  # noqa: SLF001
    StepStartedEvent: Turn._step_started,  # noqa: SLF001
    StepFinishedEvent: Turn._step_finished,  # noqa: SLF001
    CustomEvent: Turn._custom,  # noqa: SLF001
    RunStartedEvent: Turn._started,  # noqa: SLF001
    RunFinishedEvent: Turn._finished,  # noqa: SLF001
    RunErrorEvent: Turn._failed,  # noqa: SLF001
}
