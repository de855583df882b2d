"""Pauses and continuations against recorded runs; every difference is data.

A section that continues another one is played behind it, with the rows that its pause showed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from ag_ui.core import (
    CustomEvent,
    ReasoningEndEvent,
    ReasoningMessageContentEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    StepFinishedEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import (
    ChatContext,
    ChatMiddleware,
    Event,
    InterruptBoundary,
    ResumePolicy,
    ToolContext,
    ToolOutcome,
    client_tool,
    define_tool,
)
from chatkeep.engine.interrupts import (
    BINDING_KEY,
    CONTINUATION_KEY,
    PAYLOAD_KEY,
    InterruptRequest,
    Resolutions,
    define_interrupt,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_output,
)
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import TraceMiddleware

from .golden_harness import (
    MODEL,
    Case,
    Json,
    Key,
    Section,
    anonymous,
    answer,
    begin,
    call,
    deviating,
    deviating_hooks,
    finish,
    plain,
    played,
    sections,
    text,
)

pytestmark = pytest.mark.anyio

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def one(name: str, kind: str, **more: Any) -> Json:
    return {**more, "type": "object", "properties": {name: {"type": kind}}, "required": [name]}


async def _shows(_: Any, ctx: ToolContext) -> str:
    widget = {"uri": "ui://a/b", "mimeType": "application/json", "text": "{}"}
    value: Json = {"type": "ui-resource", "resource": widget, "serverId": "s", "toolName": "pf"}
    await ctx.emit_custom_event("ui-resource", value)
    del value["type"]
    await ctx.emit_custom_event("ui-resource", {**value, "resource": {**widget, "text": "{2}"}})
    return "shown"


def _boom(_: Any) -> None:
    raise RuntimeError("boom")


SRV = define_tool(name="srv", execute=lambda _: {"y": 2})
DEL = define_tool(
    name="del",
    execute=lambda args: {"deleted": args["p"]},
    input_schema=one("p", "string", **{"$schema": DRAFT}),
    needs_approval=True,
)
CLI = client_tool(
    "cli",
    output_schema=one("a", "string"),
    output_schema_hash="sha256:39e085f98382990c5805a42f6085139a9b6dea06b3659eee8f31d26d7d054a51",
)
PF = define_tool(name="pf", execute=_shows)
ASKED_BROWSER = client_tool("ac", needs_approval=True)
QUIET_CLI = client_tool("cli")
TELLS = define_tool(name="srv", execute=lambda _: "r")

PLAN = define_interrupt("plan", response=one("ok", "boolean"), payload=one("t", "string"))
BARE = define_interrupt("plan", response=one("ok", "boolean"))


class Asks(ChatMiddleware):
    """Asks at one boundary, once; says what to do when it is answered."""

    def __init__(
        self, at: InterruptBoundary, *requests: InterruptRequest, then: ResumePolicy = "continue"
    ) -> None:
        self.at = at
        self.requests = requests
        self.then: ResumePolicy = then
        self.answered: Resolutions | None = None

    async def on_interrupt_boundary(
        self, ctx: ChatContext, boundary: InterruptBoundary
    ) -> Sequence[InterruptRequest] | None:
        return self.requests if boundary == self.at and self.answered is None else None

    async def on_interrupt_resolution(
        self, ctx: ChatContext, resolutions: Resolutions
    ) -> ResumePolicy | None:
        self.answered = resolutions
        return self.then


class StoreIsDown(ChatMiddleware):
    async def on_interrupt(self, ctx: ChatContext, event: Event) -> None:
        raise RuntimeError("store down")


class ShowsMore(ChatMiddleware):
    async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
        widget = {"uri": "ui://mw", "mimeType": "text/html"}
        value = {"toolCallId": "s1", "toolName": "srv", "resource": widget}
        ctx.emit_custom_event("ui-resource", value)


ASKED = PLAN.request(key="k", reason="review", message="please", payload={"t": "x"})
BARELY = BARE.request(key="k", reason="review", message="m")


def asks(at: InterruptBoundary, then: ResumePolicy = "continue") -> Callable[[], list[Any]]:
    return lambda: [Asks(at, ASKED, then=then)]


def mixed(at: InterruptBoundary) -> Case:
    calls = [*call("d1", "del", '{"p":"a"}'), *call("k1", "cli", "{}")]
    return paused(
        [begin(), *calls, finish("tool_calls")],
        tools=(DEL, QUIET_CLI),
        middleware=lambda: [Asks(at, BARELY)],
        interrupts=[BARE],
    )


def paused(*turns: Sequence[Event], **options: Any) -> Case:
    return Case(*turns, messages=[{"id": "u1", "role": "user", "content": "hi"}], **options)


@dataclass(frozen=True)
class Continues:
    """A section that answers what another one asked."""

    first: Key
    answers: Callable[[list[Json]], list[Json]]
    case: Case


def continues(
    first: Key,
    answers: Callable[[list[Json]], list[Json]],
    *turns: Sequence[Event],
    run_id: str = "r2",
    parent_run_id: str = "r1",
    **options: Any,
) -> Continues:
    case = Case(*turns, run_id=run_id, parent_run_id=parent_run_id, **options)
    return Continues(first, answers, case)


def every(entry: Callable[[str], Json]) -> Callable[[list[Json]], list[Json]]:
    return lambda pending: [entry(interrupt["id"]) for interrupt in pending]


def echoed(pending: list[Json]) -> list[Json]:
    """Generic answers as a browser sends them: with what was asked."""
    entries: list[Json] = []
    for asked in pending:
        binding = asked["metadata"][BINDING_KEY]
        kept = ("v", "definitionId", "key", "batchIndex", "responseSchemaHash", "payloadSchemaHash")
        repeated = {key: binding[key] for key in kept if key in binding}
        repeated |= {"reason": asked["reason"], "message": asked["message"]}
        repeated["payload"] = asked["metadata"][PAYLOAD_KEY]
        entry = resume_answer(asked["id"], {"ok": True})
        entries.append({**entry, "metadata": {CONTINUATION_KEY: repeated}})
    return entries


def mixed_answers(_: list[Json]) -> list[Json]:
    return [resume_approve("approval_d1"), resume_output("client_tool_k1", {"a": "yes"})]


def reasoning_turn() -> list[Event]:
    return [
        begin(),
        ReasoningStartEvent(message_id="rs1", **MODEL),
        ReasoningMessageStartEvent(message_id="rs1", role="reasoning", **MODEL),
        ReasoningMessageContentEvent(message_id="rs1", delta="think", **MODEL),
        ReasoningMessageEndEvent(message_id="rs1", **MODEL),
        StepFinishedEvent(step_name="rs1", stepId="rs1", signature="SIG", **MODEL),
        ReasoningEndEvent(message_id="rs1", **MODEL),
        *text("m1", "pre"),
        *call("b1", "bad", "{}", 0),
        ToolCallStartEvent(
            tool_call_id="k1",
            tool_call_name="cli",
            parent_message_id="m1",
            metadata={"thoughtSignature": "TS"},
            index=1,
            **MODEL,
        ),
        ToolCallEndEvent(tool_call_id="k1", toolCallName="cli", input={"q": 1}, **MODEL),
        finish("tool_calls"),
    ]


def widget_turn() -> list[Event]:
    resource = {"uri": "ui://adapter", "mimeType": "text/html"}
    value = {"toolCallId": "s1", "toolName": "srv", "resource": resource}
    shown = CustomEvent(name="ui-resource", value=value, **MODEL)
    calls = [*call("s1", "srv", "{}"), *call("k1", "cli", "{}")]
    return [begin(), *calls, shown, finish("tool_calls")]


APPROVAL = ("b", "approval interrupt")
BATCH = ("b", "server+client batch")
DONE = answer("m2", "ok")
DONE_3 = answer("m3", "ok")
PRE = [begin(), *text("m1", "pre"), *call("s1", "srv", '{"x":1}'), finish("tool_calls")]
SRV_CALL = call("s1", "srv", '{"x":1}', 0)
CLI_CALL = call("k1", "cli", '{"q":"a"}', 1)


def resumed(first: str, then: ResumePolicy = "continue") -> Continues:
    at: Any = first.removeprefix("generic @")
    return continues(
        ("d", first),
        echoed,
        DONE_3,
        tools=(SRV,),
        middleware=asks(at, then),
        interrupts=[PLAN],
    )


def generic(at: InterruptBoundary) -> Case:
    return paused(PRE, tools=(SRV,), middleware=asks(at), interrupts=[PLAN])


CASES: dict[Key, Case | Continues] = {
    APPROVAL: paused(
        [begin(), *text("m1", "let me"), *call("c1", "del", '{"p":"x"}'), finish("tool_calls")],
        tools=(DEL,),
        state={},
    ),
    ("b", "approve"): continues(APPROVAL, every(resume_approve), DONE, tools=(DEL,)),
    ("b", "approve edited"): continues(
        APPROVAL,
        every(lambda name: resume_approve(name, edited_args={"p": "z"})),
        DONE,
        tools=(DEL,),
    ),
    ("b", "deny"): continues(APPROVAL, every(resume_deny), DONE, tools=(DEL,)),
    ("b", "cancel"): continues(APPROVAL, every(resume_cancel), DONE, tools=(DEL,)),
    ("b", "bad status"): continues(
        APPROVAL,
        every(lambda name: {"interruptId": name, "status": "zzz"}),
        tools=(DEL,),
    ),
    ("b", "unknown id"): continues(
        APPROVAL, lambda _: [resume_approve("approval_zz")], tools=(DEL,)
    ),
    ("b", "wrong parent"): continues(
        APPROVAL, every(resume_cancel), DONE, tools=(DEL,), parent_run_id="r9"
    ),
    BATCH: paused(
        [begin(), *SRV_CALL, *CLI_CALL, finish("tool_calls")], tools=(SRV, CLI), state={}
    ),
    ("b", "client ok"): continues(
        BATCH, every(lambda name: resume_output(name, {"a": "yes"})), DONE, tools=(SRV, CLI)
    ),
    ("b", "client err payload"): continues(
        BATCH, every(lambda name: resume_output(name, {"error": "no"})), tools=(SRV, CLI)
    ),
    ("b", "client cancelled"): continues(BATCH, every(resume_cancel), DONE, tools=(SRV, CLI)),
    ("b", "server+approval+client batch"): paused(
        [
            begin(),
            *SRV_CALL,
            *call("d1", "del", '{"p":"a"}', 1),
            *call("k1", "cli", '{"q":"a"}', 2),
            finish("tool_calls"),
        ],
        tools=(SRV, DEL, CLI),
    ),
    ("b", "mixed resume"): continues(
        ("b", "server+approval+client batch"), mixed_answers, DONE, tools=(SRV, DEL, CLI)
    ),
    ("b", "ui resource + client tool"): paused(
        [
            begin(),
            *call("c0", "pf", "{}", 0),
            *call("c1", "cli", '{"q":"a"}', 1),
            finish("tool_calls"),
        ],
        tools=(PF, CLI),
        state={},
    ),
    ("d", "generic @beforeModel"): generic("beforeModel"),
    ("d", "resume beforeModel continue"): resumed("generic @beforeModel"),
    ("d", "generic @afterModel"): generic("afterModel"),
    ("d", "resume afterModel continue"): resumed("generic @afterModel"),
    ("d", "generic @beforeTools"): generic("beforeTools"),
    ("d", "resume beforeTools continue"): resumed("generic @beforeTools"),
    ("d", "resume beforeTools cancel"): resumed("generic @beforeTools", "cancel"),
    ("d", "resume beforeTools stop"): resumed("generic @beforeTools", "stop"),
    ("d", "generic @afterTools"): generic("afterTools"),
    ("d", "resume afterTools continue"): resumed("generic @afterTools"),
    ("d", "interrupt persist throws"): paused(
        [begin(), *call("c1", "del", '{"p":"x"}'), finish("tool_calls")],
        tools=(DEL,),
        middleware=lambda: [StoreIsDown()],
    ),
    ("h", "reasoning+fail+client"): paused(
        reasoning_turn(),
        tools=(define_tool(name="bad", execute=_boom), QUIET_CLI),
        state={},
    ),
    ("i", "afterModel text only"): paused(
        answer("m1", "pre"),
        middleware=lambda: [
            Asks(
                "afterModel",
                BARELY,
                BARE.request(
                    key="k2", reason="review", message="m", expires_at="2030-01-01T00:00:00.000Z"
                ),
            )
        ],
        interrupts=[BARE],
    ),
    ("i", "ui-resource sources"): paused(
        widget_turn(), tools=(TELLS, QUIET_CLI), middleware=lambda: [ShowsMore()]
    ),
    ("j", "mixed afterTools"): mixed("afterTools"),
    ("j", "mixed afterModel"): mixed("afterModel"),
    ("j", "mixed beforeTools"): mixed("beforeTools"),
    ("j", "client approval"): paused(
        [begin(), *call("q1", "ac", "{}"), finish("tool_calls")], tools=(ASKED_BROWSER,)
    ),
    ("j", "client approved"): continues(
        ("j", "client approval"), every(resume_approve), tools=(ASKED_BROWSER,)
    ),
    ("j", "client resolved"): continues(
        ("j", "client approved"),
        every(lambda name: resume_output(name, "out")),
        [begin(), finish("stop")],
        tools=(ASKED_BROWSER,),
        run_id="r3",
        parent_run_id="r2",
    ),
}
SECTIONS = sections("b", "d-pauses", "h", "i", "j")


async def of_section(key: Key, *middleware: ChatMiddleware) -> list[Event]:
    """The events of a section. What a continuation shows first is what the pause showed."""
    case = CASES[key]
    if isinstance(case, Case):
        return await played(case, *middleware)
    before = [
        event.model_dump(mode="json", by_alias=True) for event in await of_section(case.first)
    ]
    (rows,) = [e["messages"] for e in before if e["type"] == "MESSAGES_SNAPSHOT"][-1:]
    entries = case.answers(before[-1]["outcome"]["interrupts"])
    events = await played(case.case, *middleware, messages=rows, resume=entries)
    if events[1].type.value == "MESSAGES_SNAPSHOT":
        shown = events[1].model_dump(mode="json", by_alias=True)["messages"]
        assert anonymous(shown) == anonymous(rows)
        del events[1]
    return events


def known_calls(key: Key) -> list[str]:
    case = CASES[key]
    return ["c1", "s1", "d1", "k1", "q1"] if isinstance(case, Continues) else []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.key[0]}: {s.key[1]}")
async def test_the_stream_is_the_recorded_one_but_for_listed_deviations(section: Section) -> None:
    events = await of_section(section.key)
    check_events(events, known_calls=known_calls(section.key))
    actual = [plain(event) for event in events]
    if section.key[0] in "ij":
        # These recordings kept some kinds of events only, and cut what was long.
        kinds = {event["type"] for event in section.events}
        actual = [event for event in actual if event["type"] in kinds]
    expected, _ = deviating(section.events, section.key)
    assert actual == expected


@pytest.mark.parametrize(
    "section", [s for s in SECTIONS if s.hooks], ids=lambda s: f"{s.key[0]}: {s.key[1]}"
)
async def test_hooks_are_called_in_the_recorded_order(section: Section) -> None:
    trace = TraceMiddleware()
    await of_section(section.key, trace)
    lines = trace.lines
    if section.key[0] == "d":
        # These recordings kept some hooks only.
        some = {"onConfig", "onInterruptResolution", "onStart", "onShouldContinue", "onFinish"}
        kept = some if len(section.hooks) > 1 else {"onError"}
        lines = [line for line in lines if line.partition(":")[0] in kept]
    expected, _ = deviating_hooks(section.hooks, section.key)
    # Where no phase was recorded, none is compared.
    found = [
        line if ":" in other else line.partition(":")[0]
        for line, other in zip(lines, expected, strict=True)
    ]
    assert found == expected


@pytest.mark.parametrize(
    "section", [s for s in SECTIONS if s.notes], ids=lambda s: f"{s.key[0]}: {s.key[1]}"
)
async def test_a_batch_holds_and_counts_what_was_recorded(section: Section) -> None:
    """Approvals, then client tools, then generic questions; indexes count over all of them."""
    events = await of_section(section.key)
    asked = plain(events[-1])["outcome"]["interrupts"]
    (note,) = section.notes
    recorded = json.loads(note.partition(" ")[2])
    found = [[i["id"], i["metadata"][BINDING_KEY].get("batchIndex")] for i in asked]
    assert found == [["<interrupt>" if n == "interrupt-*" else n, index] for n, index in recorded]


@pytest.mark.parametrize(
    "section",
    [s for s in SECTIONS if s.rows and s.key[0] in "bd" and isinstance(CASES[s.key], Continues)],
    ids=lambda s: f"{s.key[0]}: {s.key[1]}",
)
async def test_the_history_is_the_recorded_one(section: Section) -> None:
    """But for ids, times, errors and models of rows, and the answer at the end."""
    trace = TraceMiddleware()
    await of_section(section.key, trace)
    assert trace.context is not None
    history = [bare(row) for row in trace.context.messages]
    (recorded,) = section.rows
    assert history[:-1] == [bare(row) for row in recorded]
    assert history[-1]["content"] == "ok"


def bare(row: Mapping[str, Any]) -> Json:
    left = {"createdAt", "metadata", "error"} | ({"id"} if row["role"] == "tool" else set())
    kept = {key: value for key, value in row.items() if key not in left}
    if kept["role"] == "assistant":
        kept.setdefault("content", None)
    return kept


def test_every_recorded_section_is_played() -> None:
    """No recording lies about unused."""
    assert {s.key for s in SECTIONS} == set(CASES)
