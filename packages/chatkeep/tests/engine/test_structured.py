"""Structured output: three ways to it, one form of the answer in the transcript."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pydantic
import pytest
from ag_ui.core import (
    CustomEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    RunErrorEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import (
    DROP,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    Event,
    InterruptBoundary,
    ModelRequest,
    chat,
    client_tool,
    define_tool,
    model_finished,
)
from chatkeep.errors import CompositionError, StructuredOutputError
from chatkeep.messages import model_to_ui, provider_view
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "number"}},
    "required": ["name", "age"],
}
ADA = {"name": "Ada", "age": 36}
RAW = '{"name": "Ada", "age": 36}'
USAGE = {"promptTokens": 3, "completionTokens": 2, "totalTokens": 5}
QUESTION = {"id": "u1", "role": "user", "content": "who?"}


def says(identity: str, *deltas: str, reason: Any = "stop", before: Sequence[Event] = ()) -> Any:
    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        for event in before:
            yield event
        if identity:
            yield TextMessageStartEvent(message_id=identity)
            for delta in deltas:
                yield TextMessageContentEvent(message_id=identity, delta=delta)
            yield TextMessageEndEvent(message_id=identity)
        yield model_finished(request, reason, usage=USAGE)

    return turn


def calls(identity: str = "m1", name: str = "look") -> Any:
    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        yield ToolCallStartEvent(tool_call_id="c1", tool_call_name=name, parent_message_id=identity)
        yield ToolCallEndEvent(tool_call_id="c1")
        yield model_finished(request, "tool_calls", usage=USAGE)

    return turn


def complete(data: Any = ADA, **more: Any) -> CustomEvent:
    return CustomEvent(name="structured-output.complete", value={"object": data, **more})


LOOK = define_tool(name="look", execute=lambda _: "seen")


class Played(PlayedModel):
    """Says nothing about how it answers where ``mode`` is None."""

    def __init__(self, mode: Any, *turns: Any) -> None:
        super().__init__(*turns, structured_output=mode)
        if mode is None:
            del self.structured_output


class Ran:
    def __init__(self, events: list[Event], trace: TraceMiddleware, model: PlayedModel) -> None:
        check_events(events)
        self.events, self.trace, self.model = events, trace, model
        assert trace.context is not None
        self.rows: list[dict[str, Any]] = [dict(m) for m in trace.context.messages]

    @property
    def answers(self) -> list[tuple[str | None, Any]]:
        """What each row of the assistant says, and its structured part."""
        return [
            (r.get("content"), r.get("structuredOutput"))
            for r in self.rows
            if r["role"] == "assistant"
        ]

    def custom(self) -> list[tuple[str, Any]]:
        return [(e.name, e.value) for e in self.events if isinstance(e, CustomEvent)]

    def kinds(self) -> list[str]:
        return [e.name if isinstance(e, CustomEvent) else e.type.value for e in self.events]

    def painted(self) -> list[list[Any]]:
        """The parts of every message that a page load shows."""
        assert self.trace.context is not None
        return [m["parts"] for m in model_to_ui(self.trace.context.messages)[1:]]

    @property
    def error(self) -> tuple[str, str | None]:
        last = self.events[-1]
        assert isinstance(last, RunErrorEvent)
        return last.message, last.code


async def run(
    mode: str | None,
    *turns: Any,
    schema: Any = PERSON,
    tools: Any = (),
    middleware: Any = (),
    **options: Any,
) -> Ran:
    trace, model = TraceMiddleware(), Played(mode, *turns)
    stream = chat(
        adapter=model,
        messages=options.pop("messages", [QUESTION]),
        tools=tools,
        middleware=[*middleware, trace],
        output_schema=schema,
        **options,
    )
    return Ran(await collect(stream), trace, model)


def part(data: Any = ADA, raw: str = RAW, **more: Any) -> dict[str, Any]:
    return {
        "type": "structured-output",
        "status": "complete",
        "data": data,
        "partial": data,
        "raw": raw,
        **more,
    }


# --------------------------------------------------------------------------------- native


async def test_native_the_text_of_the_last_turn_is_the_answer() -> None:
    ran = await run("native", says("m1", '{"name": ', '"Ada", "age": 36}'))
    assert ran.kinds() == [
        "RUN_STARTED",
        "TEXT_MESSAGE_START",
        "structured-output.start",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "structured-output.complete",
        "RUN_FINISHED",
    ]
    assert ran.custom() == [
        ("structured-output.start", {"messageId": "m1"}),
        ("structured-output.complete", {"object": ADA, "raw": RAW, "messageId": "m1"}),
    ]
    assert ran.answers == [(RAW, part())]
    assert ran.painted() == [[part()]]
    assert [r.output_schema for r in ran.model.requests] == [PERSON]
    assert ran.trace.finish is not None
    assert (ran.trace.finish.content, ran.trace.finish.finish_reason) == (RAW, "stop")
    assert "onConfig:structuredOutput" not in ran.trace.lines


async def test_native_the_schema_goes_with_the_tools_in_every_call() -> None:
    """A turn that only calls tools announces no answer."""
    ran = await run("native", calls(), says("m2", RAW), tools=[LOOK])
    assert [(r.output_schema, len(r.tools)) for r in ran.model.requests] == [(PERSON, 1)] * 2
    assert [value["messageId"] for _, value in ran.custom()] == ["m2", "m2"]
    assert ran.answers == [(None, None), (RAW, part())]


async def test_native_the_message_of_an_answer_is_open_before_the_answer_is_announced() -> None:
    """A browser would take the announcement for one about the message of the tool call."""
    ran = await run("native", calls(), says("m2", RAW), tools=[LOOK])
    kinds = ran.kinds()
    place = kinds.index("structured-output.start")
    assert kinds[place - 1 : place + 2] == [
        "TEXT_MESSAGE_START",
        "structured-output.start",
        "TEXT_MESSAGE_CONTENT",
    ]
    assert "TOOL_CALL_RESULT" in kinds[:place]
    assert ran.custom()[0] == ("structured-output.start", {"messageId": "m2"})


async def test_native_thoughts_stay_thoughts() -> None:
    thought: list[Event] = [
        ReasoningMessageStartEvent(message_id="r1", role="reasoning"),
        ReasoningMessageContentEvent(message_id="r1", delta="hm"),
        ReasoningMessageEndEvent(message_id="r1"),
    ]
    ran = await run("native", says("m1", RAW, before=thought))
    assert ran.painted() == [[{"type": "thinking", "id": "r1", "content": "hm"}, part()]]


async def test_native_an_adapter_may_frame_its_answer_itself() -> None:
    """Start and complete are published once, about the message as it is called here."""
    framed = [CustomEvent(name="structured-output.start", value={"messageId": "m1"})]

    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        async for event in says("m1", RAW, before=framed)(request):
            if isinstance(event, RunFinishedEvent):
                yield complete(raw=RAW)
            yield event

    taken = [{"id": "m1", "role": "assistant", "content": "old"}, QUESTION]
    ran = await run("native", turn, messages=taken)
    fresh = ran.rows[-1]["id"]
    assert fresh != "m1"
    assert [(name, value["messageId"]) for name, value in ran.custom()] == [
        ("structured-output.start", fresh), ("structured-output.complete", fresh),
    ]  # fmt: skip
    assert ran.answers == [("old", None), (RAW, part())]


# ------------------------------------------------------------------------------- separate


async def test_separate_without_tools_the_one_call_is_the_answer() -> None:
    """This is how an adapter answers that does not say how."""
    ran = await run(None, says("so1", RAW))
    assert ran.kinds() == [
        "RUN_STARTED",
        "TEXT_MESSAGE_START",
        "structured-output.start",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "structured-output.complete",
        "RUN_FINISHED",
    ]
    assert ran.answers == [(RAW, part())]
    assert ran.rows[-1]["id"] == "so1"
    assert ran.trace.finish is not None
    assert (ran.trace.finish.content, ran.trace.finish.finish_reason) == ("", None)
    last = ran.events[-1]
    assert isinstance(last, RunFinishedEvent)
    assert last.metadata is not None
    assert last.metadata["tanstack"]["finishReason"] == "stop"


async def test_separate_prose_and_tools_come_first_and_stay_a_message_of_their_own() -> None:
    ran = await run("separate", calls(), says("m2", "I looked."), says("so1", RAW), tools=[LOOK])
    schemas = [(r.output_schema, len(r.tools)) for r in ran.model.requests]
    assert schemas == [(None, 1), (None, 1), (PERSON, 0)]
    assert [m.get("id") for m in ran.model.requests[2].messages][-1] == "m2"
    assert ran.answers == [(None, None), ("I looked.", None), (RAW, part())]
    assert ran.painted()[-2:] == [[{"type": "text", "content": "I looked."}], [part()]]
    assert ran.trace.finish is not None
    assert (ran.trace.finish.content, ran.trace.finish.finish_reason) == ("I looked.", "stop")
    assert ran.trace.finish.usage is not None
    assert ran.trace.finish.usage["totalTokens"] == 15
    last = ran.events[-1]
    assert isinstance(last, RunFinishedEvent)
    assert len(last.usage or ()) == 3


async def test_separate_an_adapter_may_give_the_object_without_streaming_its_text() -> None:
    done = complete(reasoning="because")
    ran = await run("separate", says("", before=[done]))
    raw = '{"name":"Ada","age":36}'
    assert ran.answers == [(raw, part(raw=raw, reasoning="because"))]
    identity = ran.rows[-1]["id"]
    assert [value["messageId"] for _, value in ran.custom()] == [identity, identity]
    assert ran.kinds()[1:5] == [
        "TEXT_MESSAGE_START",
        "structured-output.start",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
    ]


async def test_separate_hooks_configure_the_call_and_may_change_its_schema() -> None:
    wide = {"type": "object", "additionalProperties": True}
    seen: list[Any] = []

    class Configures(ChatMiddleware):
        async def on_structured_output_config(
            self, ctx: ChatContext, config: ChatConfig, schema: dict[str, Any]
        ) -> Mapping[str, Any] | None:
            seen.append((ctx.phase, schema, [t.name for t in config.tools]))
            asked = {"role": "user", "content": "As JSON, please."}
            return {
                "output_schema": wide,
                "provider_messages": [*config.provider_messages, asked],
            }

        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
            if ctx.phase == "structuredOutput":
                seen.append(config.provider_messages[-1].get("content"))
                return {"system_prompts": ["Only JSON."]}
            return None

    ran = await run(
        "separate",
        says("m1", "prose"),
        says("so1", '{"any":1}'),
        tools=[LOOK],
        middleware=[Configures()],
    )
    assert seen == [("structuredOutput", PERSON, ["look"]), "As JSON, please."]
    asked = ran.model.requests[-1]
    assert (asked.output_schema, asked.system_prompts) == (wide, ("Only JSON.",))
    assert asked.messages[-1].get("content") == "As JSON, please."
    assert ran.answers[-1] == ('{"any":1}', part({"any": 1}, '{"any":1}'))
    assert [m["role"] for m in ran.rows] == ["user", "assistant", "assistant"]


async def test_separate_a_call_that_fails_early_still_announces_its_answer() -> None:
    """A client shows a failed answer then, and not nothing."""

    async def fails(request: ModelRequest) -> AsyncIterator[Event]:
        yield RunErrorEvent(message="down", code="x1")

    ran = await run("separate", fails)
    assert ran.kinds() == ["RUN_STARTED", "structured-output.start", "RUN_ERROR"]
    assert ran.error == ("down", "x1")
    assert ran.answers == []


async def test_separate_no_call_is_made_while_the_run_waits_for_somebody() -> None:
    ran = await run("separate", calls(name="ask"), tools=[client_tool("ask")])
    last = ran.events[-1]
    assert isinstance(last, RunFinishedEvent)
    assert last.outcome is not None
    assert last.outcome.type == "interrupt"
    assert len(ran.model.requests) == 1


async def test_separate_an_abort_before_the_call_makes_none() -> None:
    class Stops(ChatMiddleware):
        async def on_interrupt_boundary(
            self, ctx: ChatContext, boundary: InterruptBoundary
        ) -> None:
            if boundary == "afterModel":
                ctx.abort("enough")

    ran = await run("separate", says("m1", "prose"), tools=[LOOK], middleware=[Stops()])
    last = ran.events[-1]
    assert isinstance(last, RunFinishedEvent)
    assert last.outcome is not None
    assert last.outcome.type == "cancelled"
    assert ran.custom() == []


async def test_separate_an_aborted_call_announces_nothing_more() -> None:
    async def stops(request: ModelRequest) -> AsyncIterator[Event]:
        request.abort.abort("stop")
        yield TextMessageStartEvent(message_id="m1")

    ran = await run("separate", stops)
    assert ran.kinds() == ["RUN_STARTED", "RUN_FINISHED"]


# ---------------------------------------------------------------------------------- event


async def test_event_an_answer_of_another_message_is_a_message_of_its_own() -> None:
    """It is streamed as one, where it stands: behind the prose, after all that was said."""
    ran = await run("event", says("m1", "Prose.", before=[complete(messageId="so9", raw=RAW)]))
    assert ran.answers == [("Prose.", None), (RAW, part())]
    assert [r["id"] for r in ran.rows] == ["u1", "m1", "so9"]
    assert ran.custom() == [
        ("structured-output.start", {"messageId": "so9"}),
        ("structured-output.complete", {"object": ADA, "messageId": "so9", "raw": RAW}),
    ]
    assert ran.kinds()[-6:] == [
        "TEXT_MESSAGE_START",
        "structured-output.start",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "structured-output.complete",
        "RUN_FINISHED",
    ]
    assert [r.output_schema for r in ran.model.requests] == [PERSON]


@pytest.mark.parametrize("first", [True, False])
async def test_event_an_answer_of_the_text_message_is_a_part_of_it(first: bool) -> None:
    """Also where the message goes by another id here than the adapter's."""

    async def turn(request: ModelRequest) -> AsyncIterator[Event]:
        async for event in says("m1", "Prose.")(request):
            if isinstance(event, RunFinishedEvent):
                yield complete(messageId="m1", raw=RAW)
            yield event

    taken = [] if first else [{"id": "m1", "role": "user", "content": "old"}]
    ran = await run("event", turn, messages=[*taken, QUESTION])
    assert ran.answers == [("Prose.", part())]
    assert ran.custom()[0][1]["messageId"] == ran.rows[-1]["id"]
    assert (ran.rows[-1]["id"] == "m1") is first
    assert ran.painted()[-1] == [{"type": "text", "content": "Prose."}, part()]


async def test_event_an_answer_without_an_id_gets_one_that_readers_are_told() -> None:
    ran = await run("event", says("m1", "Prose.", before=[complete(raw=RAW)]))
    assert ran.answers == [("Prose.", None), (RAW, part())]
    assert ran.custom()[0][1]["messageId"] == ran.rows[-1]["id"]
    assert ran.rows[-1]["metadata"]["tanstack"]["source"]["provider"] == "played"


async def test_event_an_answer_of_an_earlier_message_is_put_on_it() -> None:
    old = {"id": "a0", "role": "assistant", "content": "Earlier."}
    ran = await run(
        "event",
        says("m1", "Prose.", before=[complete(messageId="a0", raw=RAW)]),
        messages=[old, QUESTION],
    )
    assert ran.answers == [("Earlier.", part()), ("Prose.", None)]
    assert "structuredOutput" not in old


async def test_event_the_answer_of_an_earlier_turn_counts_and_the_last_one_wins() -> None:
    async def looks(request: ModelRequest) -> AsyncIterator[Event]:
        yield complete({"name": "Old", "age": 1}, messageId="so1")
        async for event in calls()(request):
            yield event

    ran = await run(
        "event", looks, says("m2", "Done.", before=[complete(messageId="so9", raw=RAW)]),
        tools=[LOOK],
    )  # fmt: skip
    assert ran.answers == [(None, None), ("Done.", None), (RAW, part())]


async def test_event_no_start_follows_its_answer() -> None:
    late = CustomEvent(name="structured-output.start", value={"messageId": "so9"})
    done = complete(messageId="so9", raw=RAW)
    ran = await run("event", says("m1", "Prose.", before=[late, done, late]))
    assert [name for name, _ in ran.custom()] == [
        "structured-output.start", "structured-output.complete",
    ]  # fmt: skip


async def test_without_a_schema_an_adapters_events_pass_and_change_nothing() -> None:
    ran = await run("event", says("m1", "Prose.", before=[complete(messageId="so9")]), schema=None)
    assert len(ran.custom()) == 1
    assert ran.answers == [("Prose.", None)]


# ------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("mode", ["native", "separate"])
@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("nope", "structured-output-parse-failed"),
        ('{"name": NaN, "age": 1}', "structured-output-parse-failed"),
        ('{"name": "Ada"}', "structured-output-validation-failed"),
        ('{"name": "Ada", "age": "old"}', "structured-output-validation-failed"),
        ("[]", "structured-output-validation-failed"),
    ],
)
async def test_a_wrong_answer_fails_the_run_and_stays_as_a_failed_part(
    mode: str, said: str, code: str
) -> None:
    """RUN_ERROR is the last event; the text is kept for people, not for models."""
    ran = await run(mode, says("m1", said))
    message, found = ran.error
    assert found == code
    assert "structured-output.complete" not in ran.kinds()
    failed = {
        "type": "structured-output", "status": "error", "raw": said, "errorMessage": message,
    }  # fmt: skip
    assert ran.answers == [(said, failed)]
    assert ran.painted() == [[failed]]
    assert ran.trace.finish is None
    assert ran.trace.error is not None
    assert isinstance(ran.trace.error.error, StructuredOutputError)
    assert (ran.trace.error.code, ran.trace.error.error.raw) == (code, said)
    assert ran.trace.context is not None
    assert [m.get("id") for m in provider_view(ran.trace.context.messages)] == ["u1"]


@pytest.mark.parametrize("mode", ["native", "separate", "event"])
@pytest.mark.parametrize("said", ["", "  \n"])
async def test_no_answer_at_all_fails_the_run(mode: str, said: str) -> None:
    ran = await run(mode, says("m1", said) if said else says(""))
    assert ran.error[1] == "structured-output-missing-result"


async def test_event_a_wrong_answer_is_not_published_and_fails_the_run() -> None:
    ran = await run("event", says("m1", "Prose.", before=[complete({"name": 1}, messageId="s")]))
    assert ran.error[1] == "structured-output-validation-failed"
    assert ran.custom() == []
    assert ran.answers == [("Prose.", None)]


async def test_an_answer_that_a_hook_drops_was_not_given() -> None:
    class Drops(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            named = isinstance(event, CustomEvent) and event.name == "structured-output.complete"
            return DROP if named else None

    ran = await run("native", says("m1", RAW), middleware=[Drops()])
    assert ran.error[1] == "structured-output-missing-result"


async def test_what_a_hook_makes_of_the_answer_is_checked_and_recorded() -> None:
    class Rewrites(ChatMiddleware):
        def __init__(self, data: Any) -> None:
            self.data = data

        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            if isinstance(event, CustomEvent) and event.name == "structured-output.complete":
                return CustomEvent(name=event.name, value={**event.value, "object": self.data})
            return None

    bob = {"name": "Bob", "age": 1}
    good = await run("native", says("m1", RAW), middleware=[Rewrites(bob)])
    assert good.answers == [(RAW, part(bob))]
    bad = await run("native", says("m1", RAW), middleware=[Rewrites({"name": 1})])
    assert bad.error[1] == "structured-output-validation-failed"


async def test_the_turn_limit_leaves_no_answer_to_read() -> None:
    ran = await run("native", calls(), tools=[LOOK], loop=1)
    assert ran.error[1] == "structured-output-missing-result"


# -------------------------------------------------------------------------------- schemas


class Address(pydantic.BaseModel):
    street: str
    zip: str | None = None


class Person(pydantic.BaseModel):
    name: str
    nick: str = "none"
    home: Address | None = None
    tags: list[Address] = []

    @pydantic.field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        if value == "Nobody":
            raise ValueError("must be somebody")
        return value


async def test_a_type_is_a_schema_and_its_own_rules_count() -> None:
    ran = await run("native", says("m1", '{"name":"Ada"}'), schema=Person)
    assert ran.answers[0][1]["data"] == {"name": "Ada"}
    assert ran.model.requests[0].output_schema == Person.model_json_schema()
    bad = await run("native", says("m1", '{"name":"Nobody"}'), schema=Person)
    assert bad.error[1] == "structured-output-validation-failed"
    assert "must be somebody" in bad.error[0]


async def test_any_type_that_pydantic_describes_will_do() -> None:
    ran = await run("native", says("m1", "[1, 2]"), schema=list[int])
    assert ran.answers == [("[1, 2]", part([1, 2], "[1, 2]"))]


async def test_nulls_that_a_provider_demands_for_optional_fields_are_dropped() -> None:
    """Where the schema allows a null, or knows nothing of the key, it stays."""
    schema = {
        "type": "object",
        "properties": {
            "required": {"type": ["string", "null"]},
            "optional": {"type": "string"},
            "nullable": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
            "choice": {"enum": ["a", "b"]},
            "fixed": {"const": 1},
            "list": {"type": "array", "items": {"$ref": "#/$defs/inner"}},
            "perhaps": {"anyOf": [{"$ref": "#/$defs/inner"}, {"type": "null"}]},
        },
        "required": ["required"],
        "$defs": {"inner": {"type": "object", "properties": {"x": {"type": "number"}}}},
    }
    given = {
        "required": None, "optional": None, "nullable": None, "any": None, "choice": None,
        "fixed": None, "list": [{"x": None, "y": None}, {"x": 1}], "perhaps": {"x": None},
        "unknown": None,
    }  # fmt: skip
    ran = await run("native", says("m1", json.dumps(given)), schema=schema)
    assert ran.answers[0][1]["data"] == {
        "required": None, "nullable": None, "any": None, "list": [{"y": None}, {"x": 1}],
        "perhaps": {}, "unknown": None,
    }  # fmt: skip
    assert ran.custom()[-1][1]["object"] == ran.answers[0][1]["data"]


async def test_a_schema_that_refers_to_itself_is_no_endless_one() -> None:
    node: dict[str, Any] = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "v": {"type": "number"}},
    }
    ran = await run("native", says("m1", '{"next": {"v": null, "next": null}}'), schema=node)
    assert ran.answers[0][1]["data"] == {"next": {}}


@pytest.mark.parametrize("wrong", [{"type": "nonsense"}, 5, "Person", object()])
def test_what_is_no_schema_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(CompositionError, match="output_schema"):
        chat(adapter=Played(None), messages=[QUESTION], output_schema=wrong)


def test_an_adapter_that_answers_in_an_unknown_way_is_refused_at_once() -> None:
    with pytest.raises(CompositionError, match="native, separate, event"):
        chat(adapter=Played("magic"), messages=[QUESTION])
