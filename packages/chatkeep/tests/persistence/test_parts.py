"""Widgets and structured answers: stored with the message they belong to, and never lost again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    CustomEvent,
    EventType,
    RunErrorEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import (
    ChatContext,
    ChatMiddleware,
    ModelRequest,
    ToolContext,
    chat,
    client_tool,
    define_tool,
    model_finished,
    resume_approve,
    resume_output,
)
from chatkeep.messages import model_to_wire
from chatkeep.persistence import hydrate_thread
from chatkeep.records import ModelMessage

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg")

RESOURCE = {"uri": "ui://a/b", "mimeType": "text/html", "text": "<p>1</p>"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "number"}},
    "required": ["name", "age"],
}
ADA = {"name": "Ada", "age": 36}
RAW = '{"name": "Ada", "age": 36}'


def widget(call: str = "c1") -> dict[str, Any]:
    return {"resource": RESOURCE, "serverId": "s", "toolName": "show", "toolCallId": call}


async def show(_: Any, ctx: ToolContext) -> str:
    await ctx.emit_custom_event("ui-resource", widget())
    await ctx.emit_custom_event("ui-resource", widget())
    return "widget shown"


SHOW = define_tool(name="show", execute=show)
ASK = client_tool("ask")


class Says:
    """A model that plays one turn a call: names of tools to call, or a text."""

    provider, model = "says", "says-1"

    def __init__(self, *turns: Any, mode: str = "separate") -> None:
        self.turns = list(turns)
        self.requests: list[ModelRequest] = []
        self.structured_output = mode

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        self.requests.append(request)
        turn = self.turns.pop(0)
        if isinstance(turn, tuple):
            for number, name in enumerate(turn, 1):
                yield ToolCallStartEvent(tool_call_id=f"c{number}", tool_call_name=name)
                yield ToolCallEndEvent(tool_call_id=f"c{number}")
            yield model_finished(request, "tool_calls")
            return
        for event in turn if isinstance(turn, list) else [turn]:
            if isinstance(event, BaseEvent):
                yield event
                continue
            yield TextMessageStartEvent(message_id=request.message_id)
            yield TextMessageContentEvent(message_id=request.message_id, delta=event)
            yield TextMessageEndEvent(message_id=request.message_id)
        yield model_finished(request, "stop")


async def play(
    lab: Any, model: Says, *messages: Any, middleware: Any = (), **options: Any
) -> list[BaseEvent]:
    lab.runs += 1
    options.setdefault("tools", [SHOW, ASK])
    stream = chat(
        adapter=model,
        messages=list(messages),
        thread_id="t1",
        run_id=f"r{lab.runs}",
        middleware=[lab.middleware(), *middleware],
        **options,
    )
    return [event async for event in stream]


def widgets_of(message: ModelMessage) -> list[Any]:
    tanstack = (message.get("metadata") or {}).get("tanstack", {})
    return list(tanstack.get("uiResources", []))


async def parts(lab: Any, kind: str) -> list[Any]:
    """The parts of a kind that a page load shows."""
    body = await hydrate_thread(lab.persistence, "t1")
    return [p for m in body["messages"] for p in m["parts"] if p["type"] == kind]


# -------------------------------------------------------------------------------- widgets


async def test_a_widget_is_stored_once_and_in_every_page_load(lab: Any, kit: Any) -> None:
    await play(lab, Says(("show",), "done"), kit.user("u1"))
    part = {"type": "ui-resource", **widget()}
    assert [widgets_of(m) for m in await lab.stored()] == [[], [part], [], []]
    assert await parts(lab, "ui-resource") == [part]


async def test_a_widget_is_in_the_snapshot_of_the_pause_that_follows_it(lab: Any, kit: Any) -> None:
    """It was on the screen a moment ago, and stays there; later turns do not lose it either."""
    events = await play(lab, Says(("show",), ("ask",)), kit.user("u1"))
    kinds = [e.type for e in events]
    assert kinds[-2:] == [EventType.MESSAGES_SNAPSHOT, EventType.RUN_FINISHED]
    part = {"type": "ui-resource", **widget()}
    (snapshot,) = [e for e in events if e.type is EventType.MESSAGES_SNAPSHOT]
    rows = snapshot.model_dump(by_alias=True)["messages"]
    bags = [r.get("metadata", {}).get("tanstack", {}) for r in rows]
    assert [b["uiResources"] for b in bags if "uiResources" in b] == [[part]]
    assert await parts(lab, "ui-resource") == [part]
    waiting = (await hydrate_thread(lab.persistence, "t1"))["interrupts"]["pending"]
    answer = resume_output(waiting[0]["id"], "blue")
    # The browser posts what its snapshot had.
    await play(lab, Says("done"), *rows, resume=[answer])
    await play(lab, Says("more"), *model_to_wire(await lab.stored()), kit.user("u2"))
    assert await parts(lab, "ui-resource") == [part]


async def test_a_widget_of_an_approved_tool_goes_to_the_message_of_the_paused_run(
    lab: Any, kit: Any
) -> None:
    """In the continuation that message is an old one; it is replaced in the store."""
    approved = define_tool(name="show", execute=show, needs_approval=True)
    await play(lab, Says(("show",)), kit.user("u1"), tools=[approved])
    assert await parts(lab, "ui-resource") == []
    resume = [resume_approve("approval_c1")]
    await play(lab, Says("done"), tools=[approved], resume=resume)
    part = {"type": "ui-resource", **widget()}
    assert [widgets_of(m) for m in await lab.stored()] == [[], [part], [], []]
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool", "assistant"]
    assert len(await lab.persistence.stores.messages.list_cuts("t1")) == 0


async def test_widgets_of_the_stream_and_of_hooks_are_stored_too(lab: Any, kit: Any) -> None:
    class Shows(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: BaseEvent) -> Any:
            if isinstance(event, ToolCallStartEvent):
                other = {**widget(event.tool_call_id), "toolName": "hook"}
                return [event, CustomEvent(name="ui-resource", value=other)]
            return None

    class Streams(Says):
        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            async for event in super().stream(request):
                if isinstance(event, ToolCallEndEvent):
                    value = {**widget(), "toolName": "stream"}
                    yield CustomEvent(name="ui-resource", value=value)
                yield event

    model = Streams(("show",), "done")
    await play(lab, model, kit.user("u1"), middleware=[Shows()])
    names = [p["toolName"] for p in await parts(lab, "ui-resource")]
    assert names == ["hook", "stream", "show"]


async def test_a_failed_run_keeps_the_widgets_of_its_finished_turns(lab: Any, kit: Any) -> None:
    class Fails(Says):
        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            if self.requests:
                raise RuntimeError("down")
            async for event in super().stream(request):
                yield event

    events = await play(lab, Fails(("show",)), kit.user("u1"))
    assert isinstance(kit.terminal(events), RunErrorEvent)
    assert await parts(lab, "ui-resource") == [{"type": "ui-resource", **widget()}]


async def test_a_widget_that_comes_while_the_start_is_written_is_not_lost(
    lab: Any, kit: Any
) -> None:
    """The list that is being stored is not the one that gets the widget."""
    call = {"id": "c0", "type": "function", "function": {"name": "show", "arguments": "{}"}}
    old = {"id": "a0", "role": "assistant", "content": "x", "toolCalls": [call]}
    result = {"id": "t0", "role": "tool", "toolCallId": "c0", "content": "1"}
    await lab.fill(kit.user("u0"), old, result)

    class Early(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            ctx.emit_custom_event("ui-resource", widget("c0"))

    keep = lab.middleware()
    lab.runs += 1
    stream = chat(
        adapter=Says("done"),
        messages=[kit.user("u1")],
        thread_id="t1",
        run_id="r1",
        middleware=[Early(), keep],  # emitted before, published while the store is written
    )
    assert [e async for e in stream]
    assert await parts(lab, "ui-resource") == [{"type": "ui-resource", **widget("c0")}]
    assert [m["id"] for m in await lab.stored()][:4] == ["u0", "a0", "t0", "u1"]


# ------------------------------------------------------------------------------ structured


def part(data: Any = ADA, raw: str = RAW) -> dict[str, Any]:
    return {
        "type": "structured-output",
        "status": "complete",
        "data": data,
        "partial": data,
        "raw": raw,
    }


@pytest.mark.parametrize("mode", ["native", "separate"])
async def test_a_structured_answer_is_stored_before_the_terminal(
    lab: Any, kit: Any, mode: str
) -> None:
    events = await play(lab, Says(RAW, mode=mode), kit.user("u1"), output_schema=PERSON, tools=[])
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    _, answer = await lab.stored()
    assert (answer["content"], answer["structuredOutput"]) == (RAW, part())
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["messages"][1]["parts"] == [part()]


async def test_prose_and_answer_are_two_messages(lab: Any, kit: Any) -> None:
    model = Says(("show",), "I looked.", RAW)
    await play(lab, model, kit.user("u1"), output_schema=PERSON)
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert [m.get("structuredOutput") for m in rows][3:] == [None, part()]
    tags = [m["metadata"]["tanstack"]["run"]["id"] for m in rows if m["role"] == "assistant"]
    assert tags == ["r1", "r1", "r1"]


@pytest.mark.parametrize("own", [True, False])
async def test_an_answer_by_event_is_with_its_prose_or_behind_it(
    lab: Any, kit: Any, own: bool
) -> None:
    class Events(Says):
        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            name = {} if own else {"messageId": request.message_id}
            value = {"object": ADA, "raw": RAW, **name}
            self.turns = [["Prose.", CustomEvent(name="structured-output.complete", value=value)]]
            async for event in super().stream(request):
                yield event

    await play(lab, Events(mode="event"), kit.user("u1"), output_schema=PERSON)
    body = await hydrate_thread(lab.persistence, "t1")
    text = {"type": "text", "content": "Prose."}
    expected = [[text], [part()]] if own else [[text, part()]]
    assert [m["parts"] for m in body["messages"][1:]] == expected


async def test_the_stored_answer_survives_that_a_client_posts_it_as_text(
    lab: Any, kit: Any
) -> None:
    """Clients send a complete part as the text of its message, and nothing else of it."""
    model = Says(("show",), "I looked.", RAW)
    await play(lab, model, kit.user("u1"), output_schema=PERSON)
    rows = await lab.stored()
    posted = [{k: v for k, v in m.items() if k != "structuredOutput"} for m in rows]
    second = Says("more")
    await play(lab, second, *posted, kit.user("u2"))
    assert (await lab.stored())[: len(rows)] == rows
    assert [m.get("content") for m in second.requests[0].messages][-2:] == [RAW, "hello"]
    # … and when only the new turn is posted, or one of text and part that stand in one message.
    await play(lab, Says("most"), kit.user("u3"))
    assert await parts(lab, "structured-output") == [part()]


async def test_an_answer_with_prose_survives_its_text_with_the_raw_behind_it(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("u1"), {**kit.assistant("a1", "Prose."), "structuredOutput": part()})
    posted = [kit.user("u1"), kit.assistant("a1", "Prose." + RAW), kit.user("u2")]
    await play(lab, Says("more"), *posted)
    assert (await lab.stored())[1] == {
        **kit.assistant("a1", "Prose."),
        "structuredOutput": part(),
    }


async def test_a_wrong_answer_is_kept_as_a_failed_part(lab: Any, kit: Any) -> None:
    """As its reader saw it; the next turn's model does not see it."""
    events = await play(lab, Says("nope"), kit.user("u1"), output_schema=PERSON, tools=[])
    last = kit.terminal(events)
    assert isinstance(last, RunErrorEvent)
    assert last.code == "structured-output-parse-failed"
    (failed,) = await parts(lab, "structured-output")
    assert (failed["status"], failed["raw"], failed["errorMessage"]) == (
        "error", "nope", last.message,
    )  # fmt: skip
    run = await lab.run("r1")
    assert run is not None
    assert run.error is not None
    assert (run.status, run.error.code) == ("failed", "structured-output-parse-failed")
    second = Says("more")
    await play(lab, second, kit.user("u2"))
    assert [m.get("role") for m in second.requests[0].messages] == ["user", "user"]
    assert await parts(lab, "structured-output") == [failed]


async def test_a_regenerate_whose_answer_is_wrong_leaves_the_old_one(lab: Any, kit: Any) -> None:
    await play(lab, Says(RAW), kit.user("u1"), output_schema=PERSON, tools=[])
    before = await lab.stored()
    events = await play(lab, Says("nope"), kit.user("u1"), output_schema=PERSON, tools=[])
    assert isinstance(kit.terminal(events), RunErrorEvent)
    assert await lab.stored() == before


async def test_an_answer_after_a_pause_is_given_by_the_continuation(lab: Any, kit: Any) -> None:
    model = Says(("ask",), RAW, mode="native")
    events = await play(lab, model, kit.user("u1"), output_schema=PERSON)
    last = kit.terminal(events)
    assert last.outcome.type == "interrupt"
    assert await parts(lab, "structured-output") == []
    answer = [resume_output("client_tool_c1", 1)]
    await play(lab, model, resume=answer, output_schema=PERSON)
    assert await parts(lab, "structured-output") == [part()]


async def test_a_draft_of_an_answer_is_text_until_the_answer_is_there(lab: Any, kit: Any) -> None:
    go, said = asyncio.Event(), asyncio.Event()

    class Slow(Says):
        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            yield TextMessageStartEvent(message_id="m1")
            yield TextMessageContentEvent(message_id="m1", delta=RAW[:10])
            said.set()
            await go.wait()
            yield TextMessageContentEvent(message_id="m1", delta=RAW[10:])
            yield TextMessageEndEvent(message_id="m1")
            yield model_finished(request, "stop")

    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    task = lab.start(
        kit.user("u1"), adapter=Slow(mode="native"), middleware=keep, output_schema=PERSON
    )
    await said.wait()
    await lab.until(lambda: keep.counters["drafts_saved"] > 0)
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["messages"][1]["parts"] == [{"type": "text", "content": RAW[:10]}]
    go.set()
    await task
    assert await parts(lab, "structured-output") == [part()]
