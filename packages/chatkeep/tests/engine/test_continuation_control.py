"""Runs that continue a paused one: policies, pausing again, aborts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from chatkeep.engine import (
    AbortSignal,
    ChatContext,
    ChatMiddleware,
    InterruptBoundary,
    ResumePolicy,
    ToolOutcome,
    client_tool,
    define_tool,
)
from chatkeep.engine.interrupts import (
    Decision,
    InterruptRequest,
    Resolutions,
    resume_approve,
    resume_cancel,
)
from chatkeep.messages import wire_to_model

from .continuing import (
    GO,
    REVIEW,
    Answers,
    Executed,
    answer,
    asked,
    calls,
    generic,
    run,
)

pytestmark = pytest.mark.anyio


# -------------------------------------------------------------------------------- policies


class Says(ChatMiddleware):
    def __init__(self, word: Any) -> None:
        self.word = word
        self.given: Resolutions | None = None

    async def on_interrupt_resolution(
        self, ctx: ChatContext, resolutions: Resolutions
    ) -> ResumePolicy | None:
        self.given = resolutions
        answer: ResumePolicy | None = self.word
        return answer


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ([None, None], "executed"),
        (["continue", None], "executed"),
        (["continue", "cancel"], "cancelled"),
        (["cancel", "continue"], "cancelled"),
        (["stop", "cancel"], "open"),
        (["cancel", "stop"], "open"),
    ],
)
async def test_the_strongest_word_about_generic_answers_wins(
    words: list[Any], outcome: str
) -> None:
    executed = Executed()
    done = await run(
        asked(("c", "look", "{}"), ("d", "send", "{}")),
        *([] if outcome == "open" else [answer()]),
        tools=[executed.tool("look"), executed.tool("send", needs_approval=True)],
        interrupts=[REVIEW],
        middleware=[
            Answers(generic=(generic(),), approvals={"d": Decision(approved=True)}),
            *[Says(word) for word in words],
        ],
    )
    assert bool(executed) == (outcome == "executed")
    if outcome == "cancelled":
        cancelled = '{"error":"Tool execution cancelled"}'
        assert done.results == [("c", cancelled), ("d", cancelled)]
    if outcome == "open":
        assert done.results == []
        assert done.types == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "RUN_FINISHED"]
        assert done.last["metadata"]["tanstack"]["finishReason"] == "stop"
        assert done.trace.finish is not None


async def test_answers_are_given_to_middleware_before_anything_starts() -> None:
    says = Says(None)
    done = await run(
        [GO],
        answer(),
        interrupts=[REVIEW],
        middleware=[Answers(generic=(generic(),)), says],
    )
    assert says.given is not None
    assert [a.response for a in says.given.for_(REVIEW)] == [{"ok": True}]
    lines = done.trace.lines
    before = lines.index("onInterruptResolution:init")
    assert lines.index("onConfig:init") < before < lines.index("onStart:init")


async def test_without_generic_answers_nobody_is_asked_for_a_policy() -> None:
    executed = Executed()
    done = await run(
        asked(("c", "send", "{}")),
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        middleware=[Says("stop")],
        resume=[resume_approve("approval_c")],
    )
    assert executed == [("send", {})]
    assert "onInterruptResolution:init" not in done.trace.lines


async def test_a_policy_that_is_none_fails_the_run() -> None:
    failed = await run(
        [GO],
        interrupts=[REVIEW],
        middleware=[Answers(generic=(generic(),)), Says("halt")],
    )
    assert failed.last["type"] == "RUN_ERROR"
    assert "halt" in failed.last["message"]


# -------------------------------------------------------------------------- pausing again


class Asks(ChatMiddleware):
    def __init__(self, at: InterruptBoundary) -> None:
        self.at = at

    async def on_interrupt_boundary(
        self, ctx: ChatContext, boundary: InterruptBoundary
    ) -> Sequence[InterruptRequest] | None:
        if boundary != self.at:
            return None
        return [REVIEW.request(key="again", reason="review", message="?")]


async def test_a_question_before_open_calls_keeps_results_and_asks_approvals_again() -> None:
    """Answers count at the next pause, so what is not done by then has to be answered anew; what
    a browser returned is not asked for twice."""
    executed = Executed()
    again = await run(
        asked(("a", "cli", "{}"), ("b", "send", "{}"), ("c", "look", "{}"), ("d", "send", "{}")),
        tools=[
            client_tool("cli"),
            executed.tool("send", needs_approval=True),
            executed.tool("look"),
        ],
        interrupts=[REVIEW],
        middleware=[
            Answers(
                client_results={"a": 7},
                approvals={"b": Decision(approved=True), "d": Decision(approved=False)},
            ),
            Asks("beforeTools"),
        ],
    )
    assert executed == []
    assert [call for call, _ in again.results] == ["a", "d"]
    assert again.ids[0] == "approval_b"
    assert len(again.ids) == 2
    shown = [e for e in again.events if e["type"] == "MESSAGES_SNAPSHOT"][-1]["messages"]
    assert [row.get("toolCallId") for row in shown if row["role"] == "tool"] == ["a", "d"]


async def test_a_continuation_passes_the_boundary_before_tools_and_none_behind_them() -> None:
    executed = Executed()
    done = await run(
        asked(("c", "send", "{}")),
        answer(),
        tools=[executed.tool("send", needs_approval=True)],
        resume=[resume_approve("approval_c")],
    )
    passed = [line for line in done.trace.lines if line.startswith("onInterruptBoundary")]
    assert passed == [
        "onInterruptBoundary:beforeTools",
        "onInterruptBoundary:beforeModel",
        "onInterruptBoundary:afterModel",
    ]


async def test_the_turns_of_a_continuation_are_counted_anew() -> None:
    executed = Executed()
    look = executed.tool("look")
    done = await run(
        asked(("c", "send", "{}")),
        calls(("d", "look", "{}")),
        tools=[executed.tool("send", needs_approval=True), look],
        resume=[resume_approve("approval_c")],
        loop=1,
    )
    assert [name for name, _ in executed] == ["send", "look"]
    assert done.last["metadata"]["tanstack"]["finishReason"] == "length"


# ------------------------------------------------------------------------- aborts, failures


async def test_an_abort_in_a_continuation_keeps_results_and_leaves_the_rest_open() -> None:
    """Its questions wait again, so a call that did not finish is no failed one."""
    executed, signal, quick_done = Executed(), AbortSignal(), asyncio.Event()

    async def slow(_: Any) -> None:
        await quick_done.wait()
        signal.abort("no")
        await asyncio.sleep(60)

    class Watches(ChatMiddleware):
        async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
            quick_done.set()

    stopped = await run(
        asked(("a", "send", "{}"), ("b", "slow", "{}"), ("c", "look", "{}")),
        tools=[
            executed.tool("send", needs_approval=True),
            define_tool(name="slow", execute=slow, needs_approval=True),
            executed.tool("look", needs_approval=True),
        ],
        resume=[
            resume_approve("approval_a"),
            resume_approve("approval_b"),
            resume_cancel("approval_c"),
        ],
        middleware=[Watches()],
        abort=signal,
    )
    assert stopped.last["outcome"] == {"type": "cancelled"}
    assert [call for call, _ in stopped.results] == ["a", "c"]
    assert {row.get("toolCallId") for row in stopped.rows if row["role"] == "tool"} == {"a", "c"}
    assert stopped.trace.abort is not None


@pytest.mark.parametrize("hook", ["on_interrupt_resolution", "on_start"])
async def test_an_abort_before_the_answers_are_acted_on_executes_nothing(hook: str) -> None:
    executed, signal = Executed(), AbortSignal()

    async def stop(*_: Any) -> None:
        signal.abort("no")

    stops = ChatMiddleware()
    setattr(stops, hook, stop)
    stopped = await run(
        asked(("c", "send", "{}")),
        tools=[executed.tool("send", needs_approval=True)],
        interrupts=[REVIEW],
        middleware=[
            Answers(generic=(generic(),), approvals={"c": Decision(approved=True)}),
            stops,
        ],
        abort=signal,
    )
    assert executed == []
    assert stopped.types == ["RUN_STARTED", "RUN_FINISHED"]
    assert stopped.last["outcome"] == {"type": "cancelled"}


async def test_a_hook_that_fails_in_a_continuation_shows_what_was_done() -> None:
    class Fails(ChatMiddleware):
        async def on_after_tool_call(self, ctx: ChatContext, outcome: ToolOutcome) -> None:
            raise RuntimeError("observer")

    executed = Executed()
    failed = await run(
        asked(("c", "send", "{}")),
        tools=[executed.tool("send", needs_approval=True)],
        middleware=[Fails()],
        resume=[resume_approve("approval_c")],
    )
    assert executed == [("send", {})]
    assert [call for call, _ in failed.results] == ["c"]
    assert failed.last["type"] == "RUN_ERROR"


async def test_the_rows_that_a_pause_showed_are_the_ones_that_a_continuation_starts_from() -> None:
    """A browser may post them back as they came."""
    executed = Executed()
    send = executed.tool("send", needs_approval=True)
    look = executed.tool("look")
    first = await run(
        [GO],
        calls(("a", "look", "{}")),
        calls(("c", "send", "{}")),
        tools=[send, look],
        parent_run_id=None,
    )
    (shown,) = [e["messages"] for e in first.events if e["type"] == "MESSAGES_SNAPSHOT"]
    posted = [dict(row) for row in wire_to_model(shown).messages]
    assert [row.get("id") for row in posted] == [row["id"] for row in first.rows]
    second = await run(shown, answer(), tools=[send, look], resume=[resume_approve("approval_c")])
    assert second.events[1]["messages"] == shown
    assert [row["id"] for row in second.rows[:-2]] == [row["id"] for row in first.rows]
