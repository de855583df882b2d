"""Tools: what becomes of a call, row by row, and how a batch runs."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from typing import Any

import pytest
from ag_ui.core import (
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)
from pydantic import BaseModel, field_validator

from chatkeep.engine import (
    BeforeToolDecision,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    Event,
    ToolCallInfo,
    ToolContext,
    ToolOutcome,
    ToolPhaseInfo,
    chat,
    client_tool,
    define_tool,
    tool,
)
from chatkeep.engine.tools import InvalidArguments, client_tools_of_request
from chatkeep.errors import BackendUnavailable, ToolError
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import PlayedModel, TraceMiddleware, collect

pytestmark = pytest.mark.anyio

Json = dict[str, Any]


def calls(*wanted: tuple[str, str, str]) -> list[Event]:
    """A turn that makes calls (id, tool, argument text)."""
    events: list[Event] = []
    for identity, name, arguments in wanted:
        events += [
            ToolCallStartEvent(tool_call_id=identity, tool_call_name=name),
            ToolCallArgsEvent(tool_call_id=identity, delta=arguments),
            ToolCallEndEvent(tool_call_id=identity),
        ]
    return [*events, RunFinishedEvent(thread_id="t", run_id="r", finishReason="tool_calls")]


def answer() -> list[Event]:
    return [
        TextMessageStartEvent(message_id="end"),
        TextMessageContentEvent(message_id="end", delta="done"),
        TextMessageEndEvent(message_id="end"),
        RunFinishedEvent(thread_id="t", run_id="r", finishReason="stop"),
    ]


class Batch:
    def __init__(self, events: list[Event], trace: TraceMiddleware) -> None:
        self.events: list[Json] = [e.model_dump(mode="json", by_alias=True) for e in events]
        self.trace = trace
        assert trace.context is not None
        rows: list[Any] = list(trace.context.messages)
        self.rows: list[Any] = [row for row in rows if row["role"] == "tool"]
        self.results = [e for e in self.events if e["type"] == "TOOL_CALL_RESULT"]
        self.customs = [e for e in self.events if e["type"] == "CUSTOM"]

    @property
    def result(self) -> Json:
        (only,) = self.results
        return only

    def failed(self) -> str:
        """The error of the one failed result, after checking that it says so everywhere."""
        (row,) = self.rows
        assert self.result["metadata"] == {"tanstack": {"state": "output-error"}}
        assert self.result["content"] == row["content"]
        assert row["error"]
        assert self.events[-1]["type"] == "RUN_FINISHED"
        return str(row["error"])

    def asked(self) -> list[str]:
        """The interrupts that the run paused with."""
        assert not self.results
        return [interrupt["id"] for interrupt in self.events[-1]["outcome"]["interrupts"]]


async def batch(
    turn: list[Event], *tools: Any, middleware: tuple[ChatMiddleware, ...] = (), **options: Any
) -> Batch:
    trace = TraceMiddleware()
    stream = chat(
        adapter=PlayedModel(turn, answer()),
        messages=[{"role": "user", "content": "go"}],
        thread_id="t",
        run_id="r",
        tools=tools,
        middleware=[*middleware, trace],
        **options,
    )
    events = await collect(stream)
    check_events(events)
    return Batch(events, trace)


async def one(tool_: Any, arguments: str = "{}", **options: Any) -> Batch:
    return await batch(calls(("c", tool_.name, arguments)), tool_, **options)


def returning(value: Any, **options: Any) -> Any:
    return define_tool(name="t", execute=lambda _: value, **options)


# ------------------------------------------------------------------------- the table


async def test_an_unknown_tool_is_a_failed_result_and_the_loop_goes_on() -> None:
    run = await batch(calls(("c", "nope", "{}")), returning(1))
    assert run.failed() == "Unknown tool: nope"
    assert run.result["content"] == '{"error":"Unknown tool: nope"}'


@pytest.mark.parametrize("text", ["{", "nope", '{"a": NaN}', "[" * 100_000])
async def test_arguments_that_are_not_json_are_a_failed_result(text: str) -> None:
    run = await one(returning(1), text)
    assert run.failed().startswith("Arguments of tool t are not JSON")
    assert len(run.failed()) < 1000


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ("3", {}),
        ('"x"', {}),
        ("[1]", [1]),
        ('{"a":1}', {"a": 1}),
    ],
)
async def test_blank_and_scalar_arguments_are_an_empty_object(text: str, seen: Any) -> None:
    got: list[Any] = []
    run = await one(define_tool(name="t", execute=lambda args: got.append(args)), text)
    assert got == [seen]
    assert "error" not in run.rows[0]


SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "when": {"type": "string", "format": "made-up"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "issue"),
    [
        ("{}", "'x' is a required property"),
        ('{"x":"1"}', "x: '1' is not of type 'integer'"),
        ('{"x":1,"y":2}', "Additional properties are not allowed"),
        ("[]", "[] is not of type 'object'"),
    ],
)
async def test_raw_json_schemas_validate_inputs(text: str, issue: str) -> None:
    run = await one(returning(1, input_schema=SCHEMA), text)
    assert run.failed().startswith(f"Input validation failed for tool t: {issue}")


@pytest.mark.parametrize("text", ['{"x":1' + "0" * 400 + "}", '{"x":1,"y":1}'])
async def test_a_check_that_breaks_is_a_failed_result(text: str) -> None:
    """Integers beyond floats and references that are no address break the checker, not the run."""
    schema = {"properties": {"x": {"multipleOf": 0.1}, "y": {"$id": "http://[", "$ref": "a"}}}
    run = await one(returning(1, input_schema=schema), text)
    assert "cannot be checked against the schema" in run.failed()
    result = {"x": 10**400}
    run = await one(returning(result, output_schema=schema))
    assert "cannot be checked against the schema" in run.failed()


async def test_unknown_formats_are_ignored() -> None:
    run = await one(returning(1, input_schema=SCHEMA), '{"x":1,"when":"?"}')
    assert run.result["content"] == "1"


async def test_a_reference_outside_the_schema_is_a_failed_result_and_fetches_nothing() -> None:
    schema = {"properties": {"x": {"$ref": "http://127.0.0.1:9/schema.json"}}}
    run = await one(returning(1, input_schema=schema), '{"x":1}')
    assert "refers to" in run.failed()


async def test_a_tool_that_needs_approval_is_never_executed_unasked() -> None:
    """Not even when a middleware brings it in, past the check of ``chat()``."""

    def send(_: Any) -> None:
        raise AssertionError("executed")

    needy = define_tool(name="t", execute=send, needs_approval=True)

    class Adds(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: ChatConfig) -> dict[str, Any]:
            return {"tools": [needy]}

    run = await batch(calls(("c", "t", "{}")), middleware=(Adds(),))
    assert run.asked() == ["approval_c"]


async def test_a_browsers_schema_costs_the_server_nothing() -> None:
    """A pattern that takes ages to match is not tried: the browser checks its own tools."""
    evil = {"properties": {"x": {"pattern": "^(a+)+$"}}}
    arguments = '{"x":"' + "a" * 40 + '!"}'
    run = await batch(
        calls(("c", "cli", arguments)),
        client_tools=[{"name": "cli", "description": "", "parameters": evil}],
    )
    assert run.asked() == ["client_tool_c"]


async def test_tools_of_the_request_are_client_tools_and_the_servers_win() -> None:
    offered = [
        {"name": "t", "description": "browser's", "parameters": {}},
        {"name": "cli", "description": "d", "parameters": {"type": "object"}},
    ]
    model = PlayedModel(calls(("c", "t", "{}"), ("d", "cli", "{}")), answer())
    stream = chat(adapter=model, messages=[], tools=[returning("mine")], client_tools=offered)
    events = [e.model_dump(by_alias=True) for e in await collect(stream)]
    contents = [e["content"] for e in events if e["type"] == "TOOL_CALL_RESULT"]
    assert contents == ["mine"]
    assert [i["id"] for i in events[-1]["outcome"]["interrupts"]] == ["client_tool_d"]
    names = {t.name: t for t in model.requests[0].tools}
    assert names["t"].is_client is False
    assert names["cli"].input_schema == {"type": "object"}


async def test_a_raising_tool_is_a_failed_result() -> None:
    def boom(_: Any) -> None:
        raise ValueError("bad")

    run = await one(define_tool(name="t", execute=boom))
    assert run.failed() == "bad"
    assert run.result["content"] == '{"error":"bad"}'
    (outcome,) = run.trace.outcomes
    assert (outcome.ok, outcome.error, outcome.result) == (False, "bad", None)


async def test_an_error_without_text_is_named_by_its_class() -> None:
    def boom(_: Any) -> None:
        raise KeyError

    assert (await one(define_tool(name="t", execute=boom))).failed() == "KeyError"


class Panic(BaseException):
    """How extensions in Rust fail."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even its text fails")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [(SystemExit(2), "SystemExit: 2"), (Panic("p"), "Panic: p"), (Mute(), "Mute")],
    ids=["exit", "panic", "mute"],
)
async def test_whatever_a_tool_raises_is_a_failed_result(
    error: BaseException, said: str, asynchronous: bool
) -> None:
    """A command line parser that exits ends its call, not the server."""

    def boom(_: Any) -> None:
        raise error

    async def aboom(_: Any) -> None:
        raise error

    run = await one(define_tool(name="t", execute=aboom if asynchronous else boom))
    assert run.failed() == said


async def test_a_result_that_cannot_be_read_is_a_failed_result() -> None:
    """Rows of a closed session and the like: reading them runs the tool's own code."""

    class Detached(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("the session is closed")

    run = await one(returning(Detached(a=1)))
    assert "cannot be written as JSON: the session is closed" in run.failed()


async def test_a_validator_that_breaks_is_a_failed_result() -> None:
    class Query(BaseModel):
        x: int = 0

        @field_validator("x", mode="before")
        @classmethod
        def _look_up(cls, value: Any) -> Any:
            return {}[value]

    def t(query: Query) -> int:
        return query.x

    run = await one(tool(t), '{"x":7}')
    assert run.failed() == "Input validation failed for tool t: 7"


async def test_a_tool_that_cancels_itself_fails_and_the_run_goes_on() -> None:
    async def cancels(_: Any) -> None:
        raise asyncio.CancelledError

    run = await one(define_tool(name="t", execute=cancels))
    assert run.failed() == "Tool execution cancelled"


OUTPUT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


async def test_an_output_that_fails_its_schema_is_a_failed_result() -> None:
    run = await one(returning({"n": "x"}, output_schema=OUTPUT))
    assert run.failed() == "Output validation failed for tool t: n: 'x' is not of type 'integer'"


async def test_an_output_that_fits_its_schema_is_kept() -> None:
    run = await one(returning('{"n": 1}', output_schema=OUTPUT))
    assert run.result["content"] == '{"n": 1}'
    assert run.trace.outcomes[0].result == {"n": 1}


@pytest.mark.parametrize("value", [object(), float("nan"), {1: "x"}, {"a": {1, 2}}])
async def test_an_output_that_is_no_json_is_a_failed_result(value: Any) -> None:
    run = await one(returning(value))
    assert run.failed().startswith("The result of tool t cannot be written as JSON")


class Weather(BaseModel):
    city: str
    temp: float | None = None


@pytest.mark.parametrize(
    ("value", "content", "seen"),
    [
        (None, "null", None),
        ("plain", "plain", "plain"),
        ("123", "123", 123),
        ('{"a": 1}', '{"a": 1}', {"a": 1}),
        ("NaN", "NaN", "NaN"),
        (7, "7", 7),
        ([], "[]", []),
        ({"ä": "✓"}, '{"ä":"✓"}', {"ä": "✓"}),
        (Weather(city="Paris"), '{"city":"Paris"}', {"city": "Paris"}),
        (dt.date(2026, 11, 30), "2026-11-30", "2026-11-30"),
        (2**80, str(2**80), 2**80),
        ("a\ud800b", "a\ufffdb", "a\ufffdb"),
    ],
)
async def test_values_become_text_and_hooks_see_json(value: Any, content: str, seen: Any) -> None:
    run = await one(returning(value))
    assert run.result["content"] == run.rows[0]["content"] == content
    assert run.trace.outcomes[0].result == seen
    assert "metadata" not in run.result


PARTS = [
    {"type": "text", "content": "see"},
    {"type": "image", "source": {"type": "url", "value": "https://x/y.png"}},
    {"type": "document", "source": {"type": "data", "value": "QQ==", "mimeType": "text/plain"}},
]


async def test_content_parts_stay_parts_in_history_and_are_text_on_the_wire() -> None:
    run = await one(returning(PARTS))
    assert run.rows[0]["content"] == PARTS
    assert run.result["content"].startswith('[{"type":"text","content":"see"}')


@pytest.mark.parametrize(
    "broken",
    [
        [{"type": "text", "text": "see"}],
        [{"type": "image"}],
        [{"type": "image", "source": {"type": "data", "value": "QQ=="}}],
        [*PARTS, "x"],
    ],
)
async def test_a_list_with_something_else_is_json_text(broken: Any) -> None:
    run = await one(returning(broken))
    assert isinstance(run.rows[0]["content"], str)


# ----------------------------------------------------------------------- how tools run


async def test_synchronous_tools_run_in_worker_threads() -> None:
    threads: list[int] = []
    run = await one(define_tool(name="t", execute=lambda _: threads.append(threading.get_ident())))
    assert threads[0] != threading.get_ident()
    assert "error" not in run.rows[0]


async def test_calls_run_together_and_results_stand_in_call_order() -> None:
    order: list[str] = []

    async def wait(args: Any) -> str:
        await asyncio.sleep(args["s"])
        order.append(args["n"])
        return str(args["n"])

    slow = define_tool(name="t", execute=wait)
    turn = calls(("a", "t", '{"s":0.06,"n":"first"}'), ("b", "t", '{"s":0.0,"n":"second"}'))
    run = await batch(turn, slow)
    assert order == ["second", "first"]
    assert [r["content"] for r in run.results] == ["first", "second"]
    assert [row["toolCallId"] for row in run.rows] == ["a", "b"]


async def test_synchronous_tools_run_together_too() -> None:
    barrier = threading.Barrier(2, timeout=10)
    meet = define_tool(name="t", execute=lambda _: barrier.wait() * 0)
    run = await batch(calls(("a", "t", "{}"), ("b", "t", "{}")), meet)
    assert [r["content"] for r in run.results] == ["0", "0"]


async def test_sequential_execution_runs_one_after_the_other() -> None:
    lines: list[str] = []

    async def step(args: Any) -> None:
        lines.append(f"begin {args['n']}")
        await asyncio.sleep(0.01)
        lines.append(f"end {args['n']}")

    turn = calls(("a", "t", '{"n":1}'), ("b", "t", '{"n":2}'))
    await batch(turn, define_tool(name="t", execute=step), tool_execution="sequential")
    assert lines == ["begin 1", "end 1", "begin 2", "end 2"]


async def test_one_failing_call_does_not_touch_the_others() -> None:
    def maybe(args: Any) -> str:
        if args["fail"]:
            raise RuntimeError("no")
        return "yes"

    turn = calls(("a", "t", '{"fail":true}'), ("b", "t", '{"fail":false}'), ("c", "x", "{}"))
    run = await batch(turn, define_tool(name="t", execute=maybe))
    assert [row.get("error") for row in run.rows] == ["no", None, "Unknown tool: x"]


async def test_the_context_says_who_calls() -> None:
    got: list[ToolContext] = []

    async def look(_: Any, ctx: ToolContext) -> None:
        got.append(ctx)

    await one(define_tool(name="t", execute=look), context={"user": 7})
    (ctx,) = got
    assert (ctx.tool_call_id, ctx.tool_name, ctx.thread_id, ctx.run_id) == ("c", "t", "t", "r")
    assert ctx.context == {"user": 7}
    assert not ctx.abort.aborted


async def test_custom_events_are_published_while_the_tool_runs() -> None:
    """A reader hears the event before the tool has returned, and cannot be fooled about whose."""
    heard = asyncio.Event()

    async def slow(_: Any, ctx: ToolContext) -> str:
        await ctx.emit_custom_event("progress", {"n": 1, "toolCallId": "forged"})
        await asyncio.wait_for(heard.wait(), 10)
        await ctx.emit_custom_event("progress", 2)
        await ctx.emit_custom_event("progress")
        return "ok"

    stream = chat(
        adapter=PlayedModel(calls(("c", "t", "{}")), answer()),
        messages=[],
        tools=[define_tool(name="t", execute=slow)],
    )
    values: list[Any] = []
    kinds: list[str] = []
    async for event in stream:
        data = event.model_dump(by_alias=True)
        kinds.append(data["type"])
        if data["type"] == "CUSTOM":
            values.append(data["value"])
            heard.set()
    assert values == [
        {"n": 1, "toolCallId": "c"},
        {"value": 2, "toolCallId": "c"},
        {"toolCallId": "c"},
    ]
    last = len(kinds) - 1 - kinds[::-1].index("CUSTOM")
    assert last < kinds.index("TOOL_CALL_RESULT")


async def test_a_synchronous_tool_emits_from_its_thread() -> None:
    def work(_: Any, ctx: ToolContext) -> str:
        ctx.emit_custom_event_from_thread("progress", {"n": 1})
        return "ok"

    run = await one(define_tool(name="t", execute=work))
    assert run.customs[0]["value"] == {"n": 1, "toolCallId": "c"}


async def test_an_event_that_is_no_json_fails_the_tool_not_the_run() -> None:
    async def work(_: Any, ctx: ToolContext) -> None:
        await ctx.emit_custom_event("bad", {"x": object()})

    assert "cannot be stored" in (await one(define_tool(name="t", execute=work))).failed()


async def test_custom_events_of_tools_pass_on_chunk() -> None:
    class Renames(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> Event | None:
            if event.type.value == "CUSTOM":
                return event.model_copy(update={"name": "renamed"})
            return None

    async def work(_: Any, ctx: ToolContext) -> None:
        await ctx.emit_custom_event("progress", {})

    run = await one(define_tool(name="t", execute=work), middleware=(Renames(),))
    assert run.customs[0]["name"] == "renamed"


async def test_a_hook_that_fails_on_a_tools_event_fails_the_run() -> None:
    class Fails(ChatMiddleware):
        async def on_chunk(self, ctx: ChatContext, event: Event) -> None:
            if event.type.value == "CUSTOM":
                raise RuntimeError("hook down")

    async def work(_: Any, ctx: ToolContext) -> str:
        try:
            await ctx.emit_custom_event("progress", {})
        except RuntimeError:
            return "swallowed"
        return "unreached"

    run = await one(define_tool(name="t", execute=work), middleware=(Fails(),))
    assert run.events[-1]["type"] == "RUN_ERROR"
    assert run.events[-1]["message"] == "hook down"
    assert run.rows[0]["content"] == "swallowed"


# ----------------------------------------------------------------------------- hooks


class Decides(ChatMiddleware):
    def __init__(self, *decisions: BeforeToolDecision | None) -> None:
        self.decisions = list(decisions)
        self.asked: list[str] = []

    async def on_before_tool_call(
        self, ctx: ChatContext, call: ToolCallInfo
    ) -> BeforeToolDecision | None:
        self.asked.append(call.tool_call_id)
        return self.decisions.pop(0) if self.decisions else None


async def test_transformed_arguments_are_validated_and_executed() -> None:
    got: list[Any] = []
    echo = define_tool(name="t", execute=got.append, input_schema=SCHEMA)
    good = Decides(BeforeToolDecision(action="transform", value={"x": 9}))
    await one(echo, '{"x":1}', middleware=(good,))
    assert got == [{"x": 9}]
    bad = Decides(BeforeToolDecision(action="transform", value={"x": "no"}))
    run = await one(echo, '{"x":1}', middleware=(bad,))
    assert run.failed().startswith("Input validation failed")


async def test_a_skipped_call_has_the_given_result_and_takes_no_time() -> None:
    def never(_: Any) -> None:
        raise AssertionError("executed")

    skip = Decides(BeforeToolDecision(action="skip", value={"cached": True}))
    run = await one(define_tool(name="t", execute=never), middleware=(skip,))
    (outcome,) = run.trace.outcomes
    assert (outcome.ok, outcome.duration_ms, outcome.result) == (True, 0.0, {"cached": True})
    assert run.result["content"] == '{"cached":true}'


async def test_the_first_decision_wins_and_later_hooks_are_not_asked() -> None:
    first = Decides(BeforeToolDecision(action="skip", value=1))
    second = Decides(BeforeToolDecision(action="skip", value=2))
    run = await one(returning(0), middleware=(first, second))
    assert run.result["content"] == "1"
    assert second.asked == []


async def test_hooks_are_asked_in_call_order_before_anything_executes() -> None:
    lines: list[str] = []

    class Asks(ChatMiddleware):
        async def on_before_tool_call(self, ctx: ChatContext, call: ToolCallInfo) -> None:
            lines.append(f"ask {call.tool_call_id}")

        async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
            lines.append(f"after {outcome.tool_call_id}")

        async def on_tool_phase_complete(self, ctx: ChatContext, info: ToolPhaseInfo) -> None:
            lines.append(f"complete {[r.tool_call_id for r in info.results]}")
            lines.append(f"calls {[c['id'] for c in info.tool_calls]}")

    async def work(_: Any) -> None:
        lines.append("execute")

    turn = calls(("a", "t", "{}"), ("b", "t", "{}"), ("c", "nope", "{}"))
    await batch(turn, define_tool(name="t", execute=work), middleware=(Asks(),))
    assert lines[:2] == ["ask a", "ask b"]
    assert sorted(lines[2:6]) == ["after a", "after b", "execute", "execute"]
    assert lines[6:] == ["complete ['a', 'b', 'c']", "calls ['a', 'b', 'c']"]


async def test_a_failing_after_hook_fails_the_run_but_keeps_what_the_tool_did() -> None:
    class Fails(ChatMiddleware):
        async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
            raise RuntimeError("hook down")

    turn = calls(("a", "t", "{}"), ("b", "t", "{}"))
    run = await batch(turn, returning("did it"), middleware=(Fails(),))
    assert run.events[-1]["message"] == "hook down"
    assert [row["toolCallId"] for row in run.rows] == ["a", "b"]
    assert len(run.results) == 2


# --------------------------------------------------------------- called by other code


async def test_a_decorated_function_is_called_as_it_was_written() -> None:
    """Unit tests call it; defaults and positions are the function's own."""

    @tool
    def add(a: int, b: int = 2) -> int:
        return a + b

    @tool(name="later")
    async def double(a: int, context: ToolContext) -> int:
        return 2 * a + len(context.tool_name)

    context: Any = type("Context", (), {"tool_name": "xyz"})()
    assert add(1) == 3
    assert add(1, b=1) == 2
    assert await double(2, context) == 7
    with pytest.raises(TypeError):
        add()
    assert (await one(add, '{"a":1}')).result["content"] == "3"


async def test_a_tool_of_schemas_is_called_as_its_execute() -> None:
    async def execute(args: Any) -> Any:
        return args["x"]

    assert await define_tool(name="t", execute=execute)({"x": 1}) == 1
    assert returning(5)({}) == 5


def test_a_client_tool_cannot_be_called_here() -> None:
    with pytest.raises(ToolError, match="tool pick runs in the browser"):
        client_tool("pick")()


# ------------------------------------------------------------------------------ the log


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, Any]]:
    return [
        (r.levelname, r.getMessage(), r.exc_info[1] if r.exc_info else None)
        for r in caplog.records
        if r.name == "chatkeep.engine"
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_a_tool_raised_is_logged_once_with_its_traceback(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = KeyError("here")

    def boom(_: Any) -> None:
        raise error

    async def aboom(_: Any) -> None:
        raise error

    await one(define_tool(name="t", execute=aboom if asynchronous else boom))
    assert logged(caplog) == [("WARNING", "tool 't' raised (run 'r' of thread 't')", error)]


async def test_refused_arguments_and_unknown_tools_are_no_matter_for_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {"type": "object", "required": ["x"]}
    await one(returning(1, input_schema=schema))
    await batch(calls(("c", "nope", "{}")), returning(1))
    await one(returning(float("nan")))
    assert logged(caplog) == []


async def test_what_a_validator_or_a_result_raised_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("closed")

    await one(returning(Broken(a=1)))
    assert [(level, str(error)) for level, _, error in logged(caplog)] == [("WARNING", "closed")]


async def test_a_store_that_fails_inside_a_tool_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def boom(_: Any) -> None:
        raise BackendUnavailable("db-7 is down")

    await one(define_tool(name="t", execute=boom))
    assert len(logged(caplog)) == 1


# ----------------------------------------------------------------- definitions by schema


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="two tools are called 't'"):
        chat(adapter=PlayedModel(), messages=[], tools=[returning(1), returning(2)])


def test_what_is_no_tool_is_refused() -> None:
    not_a_tool: Any = lambda: None  # noqa: E731
    with pytest.raises(ToolError, match="not a tool"):
        chat(adapter=PlayedModel(), messages=[], tools=[not_a_tool])


@pytest.mark.parametrize("name", ["", " ", " x", "x "])
def test_a_tool_needs_a_name(name: str) -> None:
    with pytest.raises(ToolError, match="needs a name"):
        define_tool(name=name, execute=lambda _: None)


def test_a_broken_schema_is_refused_at_definition() -> None:
    with pytest.raises(ToolError, match="input_schema of tool t is not a valid JSON Schema"):
        returning(1, input_schema={"type": "nonsense"})
    with pytest.raises(ToolError, match="output_schema of tool t"):
        returning(1, output_schema={"required": "x"})


@pytest.mark.parametrize(
    "schema",
    [{"$schema": 5}, {"$schema": []}, {"$id": 5}, {"minimum": "x"}, {"pattern": "("}],
    ids=str,
)
def test_a_broken_schema_is_a_short_refusal_whatever_is_broken(schema: Json) -> None:
    """Also keywords that the checker takes for granted."""
    with pytest.raises(ToolError, match=r"is not a valid JSON Schema: .") as caught:
        client_tools_of_request([{"name": "t", "parameters": schema}])
    assert "\n" not in str(caught.value)
    long = {"type": "x" * 100_000}
    with pytest.raises(ToolError) as caught:
        client_tools_of_request([{"name": "t", "parameters": long}])
    assert len(str(caught.value)) < 1000


def test_schemas_that_json_holds_apart_are_not_confused() -> None:
    """What was checked before is remembered by its JSON; a schema that is none still works."""
    for const, fits in ((1, 1), (True, True), ("1", "1"), (1, 1)):
        tool = define_tool(name="t", input_schema={"const": const}, execute=len)
        tool.check_input(fits)
        with pytest.raises(InvalidArguments):
            tool.check_input("other")
    odd = {"default": dt.date(2026, 1, 1), "type": "integer"}
    define_tool(name="t", input_schema=odd, execute=len).check_input(1)


def test_execute_takes_arguments_and_maybe_a_context() -> None:
    with pytest.raises(ToolError, match=r"\(args\) or \(args, context\)"):
        define_tool(name="t", execute=lambda: None)


@pytest.mark.parametrize(
    "entry", [{"description": "x"}, {"name": 3}, {"name": "a", "parameters": [1]}]
)
def test_broken_tools_of_a_request_are_refused(entry: Json) -> None:
    with pytest.raises(ToolError):
        chat(adapter=PlayedModel(), messages=[], client_tools=[entry])
