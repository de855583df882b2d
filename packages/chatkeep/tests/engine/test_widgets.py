"""``ui-resource`` events: recorded once on the message that owns the call, whoever emits them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from ag_ui.core import (
    CustomEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import (
    DROP,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    Event,
    FinishInfo,
    ModelRequest,
    ToolContext,
    chat,
    define_tool,
    model_finished,
)
from chatkeep.messages import model_to_ui, model_to_wire
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

RESOURCE = {"uri": "ui://a/b", "mimeType": "text/html", "text": "<p>1</p>"}


def widget(call: str = "c1", text: str = "<p>1</p>", **more: Any) -> dict[str, Any]:
    return {
        "resource": {**RESOURCE, "text": text},
        "serverId": "s",
        "toolName": "show",
        "toolCallId": call,
        **more,
    }


def calling(*between: Event, call: str = "c1") -> Any:
    async def turn(request: ModelRequest) -> Any:
        yield ToolCallStartEvent(tool_call_id=call, tool_call_name="show")
        yield ToolCallArgsEvent(tool_call_id=call, delta="{}")
        yield ToolCallEndEvent(tool_call_id=call)
        for event in between:
            yield event
        yield model_finished(request, "tool_calls")

    return turn


async def said(request: ModelRequest) -> Any:
    yield model_finished(request, "stop")


async def show(_: Any, ctx: ToolContext) -> str:
    await ctx.emit_custom_event("ui-resource", widget(call="forged"))
    return "widget shown"


SHOW = define_tool(name="show", execute=show)
PLAIN = define_tool(name="show", execute=lambda _: "plain")


async def run(
    *turns: Any, tools: Any = (PLAIN,), middleware: Any = (), messages: Any = None
) -> tuple[list[Event], TraceMiddleware]:
    trace = TraceMiddleware()
    stream = chat(
        adapter=PlayedModel(*turns),
        messages=messages or [{"id": "u1", "role": "user", "content": "go"}],
        tools=list(tools),
        middleware=[*middleware, trace],
    )
    return await collect(stream), trace


def recorded(trace: TraceMiddleware) -> list[list[dict[str, Any]]]:
    """The widgets of each message that has some."""
    assert trace.context is not None
    bags = [(m.get("metadata") or {}).get("tanstack", {}) for m in trace.context.messages]
    return [bag["uiResources"] for bag in bags if "uiResources" in bag]


def shown(events: list[Event]) -> list[Any]:
    return [e.value for e in events if isinstance(e, CustomEvent) and e.name == "ui-resource"]


class AtFinish(ChatMiddleware):
    """What a store would be given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    async def on_finish(self, ctx: ChatContext, info: FinishInfo) -> None:
        self.rows = copy.deepcopy([dict(m) for m in ctx.messages])


async def test_a_widget_of_a_tool_is_on_the_message_of_its_call_before_anything_is_stored() -> None:
    """A tool cannot name another call than its own."""
    store = AtFinish()
    events, trace = await run(calling(), said, tools=(SHOW,), middleware=[store])
    part = {"type": "ui-resource", **widget()}
    assert recorded(trace) == [[part]]
    assert [m["role"] for m in store.rows] == ["user", "assistant", "tool"]
    assert store.rows[1]["metadata"]["tanstack"]["uiResources"] == [part]
    kinds = [type(e) for e in events]
    assert kinds.index(CustomEvent) < kinds.index(ToolCallResultEvent)


async def test_it_is_in_every_form_that_the_message_takes() -> None:
    _, trace = await run(calling(), said, tools=(SHOW,))
    assert trace.context is not None
    rows = trace.context.messages
    part = {"type": "ui-resource", **widget()}
    (anchor,) = [r for r in model_to_wire(rows) if r["role"] == "assistant"]
    assert anchor["metadata"]["tanstack"]["uiResources"] == [part]
    (painted,) = [m for m in model_to_ui(rows) if m["role"] == "assistant"]
    assert [p for p in painted["parts"] if p["type"] == "ui-resource"] == [part]


async def test_a_widget_in_the_adapters_stream_is_kept_until_its_message_is_there() -> None:
    event = CustomEvent(name="ui-resource", value=widget())
    events, trace = await run(calling(event), said)
    assert recorded(trace) == [[{"type": "ui-resource", **widget()}]]
    assert len(shown(events)) == 1


async def test_a_widget_of_a_call_that_was_renamed_follows_it() -> None:
    """The provider used a call id again; the browser finds the new call only by its new id."""
    history = [
        {"id": "u1", "role": "user", "content": "go"},
        {
            "id": "a1",
            "role": "assistant",
            "toolCalls": [
                {"id": "c1", "type": "function", "function": {"name": "show", "arguments": "{}"}}
            ],
        },
        {"id": "t1", "role": "tool", "toolCallId": "c1", "content": "old"},
        {"id": "u2", "role": "user", "content": "again"},
    ]
    event = CustomEvent(name="ui-resource", value=widget())
    events, trace = await run(calling(event), said, messages=history)
    assert trace.context is not None
    new = trace.context.messages[4]
    assert new["toolCalls"][0]["id"] != "c1"
    ((part,),) = recorded(trace)
    assert part["toolCallId"] == new["toolCalls"][0]["id"] == shown(events)[0]["toolCallId"]
    assert "uiResources" in new["metadata"]["tanstack"]


async def test_a_middleware_may_show_a_widget_of_its_own() -> None:
    """Here as soon as the call begins, long before the message is a row."""

    class Shows(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            if isinstance(event, ToolCallStartEvent):
                return [event, CustomEvent(name="ui-resource", value=widget(event.tool_call_id))]
            return None

    _, trace = await run(calling(), said, middleware=[Shows()])
    assert recorded(trace) == [[{"type": "ui-resource", **widget()}]]


async def test_a_widget_of_an_earlier_turn_goes_to_its_message_which_is_replaced() -> None:
    """What was posted is not changed in place, and a list that is being stored neither."""
    old = {
        "id": "a1",
        "role": "assistant",
        "content": "x",
        "toolCalls": [
            {"id": "c0", "type": "function", "function": {"name": "show", "arguments": "{}"}}
        ],
    }
    before = copy.deepcopy(old)
    lists: list[Any] = []

    class Late(ChatMiddleware):
        async def on_start(self, ctx: ChatContext) -> None:
            lists.append(ctx.messages)
            ctx.emit_custom_event("ui-resource", widget("c0"))

    history = [old, {"id": "t0", "role": "tool", "toolCallId": "c0", "content": "1"}]
    question = {"id": "u1", "role": "user", "content": "go"}
    _, trace = await run(said, middleware=[Late()], messages=[*history, question])
    assert recorded(trace) == [[{"type": "ui-resource", **widget("c0")}]]
    assert trace.context is not None
    assert trace.context.messages[0]["metadata"]["tanstack"]["uiResources"]
    assert old == before
    assert "metadata" not in lists[0][0]


async def test_what_a_hook_makes_of_a_widget_is_recorded() -> None:
    class Rewrites(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            if isinstance(event, CustomEvent):
                return CustomEvent(name="ui-resource", value=widget(text="rewritten"))
            return None

    events, trace = await run(calling(), said, tools=(SHOW,), middleware=[Rewrites()])
    ((part,),) = recorded(trace)
    assert part["resource"]["text"] == shown(events)[0]["resource"]["text"] == "rewritten"


async def test_a_widget_that_a_hook_drops_is_not_recorded() -> None:
    class Drops(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Any:
            return DROP if isinstance(event, CustomEvent) else None

    events, trace = await run(calling(), said, tools=(SHOW,), middleware=[Drops()])
    assert recorded(trace) == []
    assert shown(events) == []


async def test_the_first_widget_of_a_call_tool_and_uri_is_kept() -> None:
    """Later ones are shown live; another uri is another widget."""

    async def twice(_: Any, ctx: ToolContext) -> str:
        await ctx.emit_custom_event("ui-resource", widget(text="1"))
        await ctx.emit_custom_event("ui-resource", widget(text="2"))
        other = {"uri": "ui://other", "mimeType": "text/html"}
        await ctx.emit_custom_event("ui-resource", widget(resource=other))
        return "ok"

    events, trace = await run(calling(), said, tools=(define_tool(name="show", execute=twice),))
    assert len(shown(events)) == 3
    (parts,) = recorded(trace)
    assert [(p["resource"]["uri"], p["resource"].get("text")) for p in parts] == [
        ("ui://a/b", "1"), ("ui://other", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        "text",
        {},
        {"toolCallId": "c1", "toolName": "show"},
        {"toolCallId": "c1", "toolName": "show", "resource": {"uri": "ui://x"}},
        {"toolCallId": 1, "toolName": "show", "resource": RESOURCE},
        {"toolCallId": "nobody", "toolName": "show", "resource": RESOURCE},
    ],
)
async def test_what_is_no_widget_of_any_call_is_shown_and_not_recorded(value: Any) -> None:
    events, trace = await run(calling(CustomEvent(name="ui-resource", value=value)), said)
    assert recorded(trace) == []
    assert shown(events) == [value]


async def test_a_value_that_is_no_json_is_not_recorded_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    event = CustomEvent(name="ui-resource", value=widget(extra=object()))
    with caplog.at_level(logging.WARNING, logger="chatkeep.engine"):
        _, trace = await run(calling(event), said)
    assert recorded(trace) == []
    assert "cannot be recorded" in caplog.text


async def test_a_widget_of_a_child_run_is_none_of_this_threads_calls() -> None:
    event = CustomEvent(name="ui-resource", value=widget(), subagent_run_id="child")
    events, trace = await run(calling(event), said)
    assert recorded(trace) == []
    assert len(shown(events)) == 1


async def test_a_middleware_that_exchanges_the_messages_does_not_lose_widgets() -> None:
    class Exchanges(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
            if ctx.phase == "init":
                return None
            bare = [{k: v for k, v in m.items() if k != "metadata"} for m in config.messages]
            return {"messages": bare}

    _, trace = await run(calling(), said, tools=(SHOW,), middleware=[Exchanges()])
    assert recorded(trace) == [[{"type": "ui-resource", **widget()}]]


async def test_a_failing_run_keeps_the_widgets_of_its_finished_turns() -> None:
    async def fails(_: ModelRequest) -> Any:
        raise RuntimeError("provider down")
        yield

    _, trace = await run(calling(), fails, tools=(SHOW,))
    assert trace.error is not None
    assert recorded(trace) == [[{"type": "ui-resource", **widget()}]]
