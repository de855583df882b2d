"""A run that goes on where another was paused: its answers, and the calls that were left open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from chatkeep.engine.calls import Call
from chatkeep.engine.configuration import Configuration
from chatkeep.engine.events import now_ms
from chatkeep.engine.interrupts import (
    Resolutions,
    ResumeState,
    definitions_by_id,
    posted_failures,
    resume_from_history,
)
from chatkeep.engine.middleware import ResumePolicy
from chatkeep.engine.options import RunOptions
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.tools import Tool
from chatkeep.messages import bag_of, is_placeholder
from chatkeep.messages.parts import STOP_REASONS, calls_of
from chatkeep.records import ModelMessage

__all__ = ["answers_of", "open_calls", "policy_of"]

_STRENGTH: Final[Mapping[ResumePolicy, int]] = {"continue": 0, "cancel": 1, "stop": 2}


def answers_of(
    runtime: Runtime, options: RunOptions, configuration: Configuration
) -> ResumeState | None:
    """The answers that this run begins with; None when it continues nothing.

    A store's are taken as they are. Entries that no middleware took are checked against the
    history: that is how a chat without an interrupt store resumes, and there the browser's word
    is all there is. What it posted as results of the answered calls goes: the answers count.
    Placeholders for results to come go as well, and, when the calls are answered anew, results of
    an earlier continuation that failed: those that were decided, or given by a browser. What was
    executed stays.

    Raises:
        InterruptResumeError: the entries do not answer what is pending.
    """
    config = configuration.config
    messages = runtime.context.messages
    posted: set[str] = set()
    if config.resume:
        found = resume_from_history(
            thread_id=options.thread_id,
            parent_run_id=options.parent_run_id,
            run_id=options.run_id,
            messages=messages,
            entries=config.resume,
            tools=configuration.tools,
            definitions=definitions_by_id(config.interrupts),
            now_ms=now_ms(),
            failed_outputs=posted_failures(options.messages),
        )
        config.resume, config.resume_tool_state = [], found
        posted = _named(found)
    state = config.resume_tool_state
    if state is not None:
        named, holders = _named(state), _holders(messages)
        given = posted | (named & _browser_calls(messages, holders, configuration.tools))
        kept = [
            row
            for place, row in enumerate(messages)
            if place < holders.get(row.get("toolCallId", ""), 0)  # an earlier call's result
            or not _gives_way(row, given, named)
        ]
        if len(kept) < len(messages):
            runtime.transcript.replace(kept)
    return state


def _gives_way(row: ModelMessage, given: set[str], named: set[str]) -> bool:
    call = row.get("toolCallId")
    if row.get("role") != "tool" or call is None:
        return False
    decided = bag_of(row).get("toolResultOutcome") is not None
    return call in given or (call in named and decided) or is_placeholder(row.get("content"))


def _holders(messages: Sequence[ModelMessage]) -> dict[str, int]:
    """Where the last row stands that makes a call of this id: some providers use ids again, and
    what was asked is about the last one."""
    return {call["id"]: place for place, row in enumerate(messages) for call in calls_of(row)}


def _browser_calls(
    messages: Sequence[ModelMessage], holders: Mapping[str, int], tools: Mapping[str, Tool]
) -> set[str]:
    browser = {tool.name for tool in tools.values() if tool.is_client}
    return {
        call["id"]
        for place in set(holders.values())
        for call in calls_of(messages[place])
        if holders[call["id"]] == place and call["function"]["name"] in browser
    }


async def policy_of(runtime: Runtime, state: ResumeState) -> ResumePolicy:
    """What the middlewares make of the answers to generic interrupts: the strongest word."""
    if not state.generic:
        return "continue"
    words = await runtime.hooks.call("on_interrupt_resolution", Resolutions(state.generic))
    await runtime.publisher.flush()
    runtime.gate.check()
    for word in words:
        if word is not None and word not in _STRENGTH:
            raise TypeError(
                f"on_interrupt_resolution returned {word!r}; it may return None, 'continue', "
                "'cancel' or 'stop'"
            )
    return max((word for word in words if word), key=_STRENGTH.__getitem__, default="continue")


def open_calls(messages: Sequence[ModelMessage], state: ResumeState) -> list[Call]:
    """The calls of the paused turn that have no result, in call order.

    The paused turn is the one that has an answered call; where no call was answered (all
    questions were generic), the last turn, if nobody has spoken since and the run did not pause
    before its model was called. Calls of other turns stay as they are: a process that died left
    them, or a client made them up.
    """
    holders = _holders(messages)
    answered = {
        row.get("toolCallId")
        for place, row in enumerate(messages)
        if row.get("role") == "tool"
        and not is_placeholder(row.get("content"))
        and place > holders.get(row.get("toolCallId", ""), -1)
    }
    turns = [row for row in messages if row.get("role") == "assistant"]
    paused = [messages[place] for place in {holders[c] for c in _named(state) if c in holders}]
    if not paused and any(answer.boundary != "beforeModel" for answer in state.generic):
        paused = _last_turn(messages)
    names = {row.get("id") for row in paused if row.get("id")}
    found: dict[str, Call] = {}
    for row in turns:
        if not (row.get("id") in names or any(row is other for other in paused)):
            continue
        for entry in calls_of(row):
            call = Call.of_entry(entry)
            if call.identity not in answered and call.waiting:
                found.setdefault(call.identity, call)
    return list(found.values())


def _named(state: ResumeState) -> set[str]:
    """The calls that an answer names."""
    return {
        *state.approvals,
        *state.client_results,
        *state.client_errors,
        *state.cancelled,
    }


def _last_turn(messages: Sequence[ModelMessage]) -> list[ModelMessage]:
    for row in reversed(messages):
        if row.get("role") == "tool":
            continue
        failed = bag_of(row).get("stopReason") in STOP_REASONS
        return [row] if row.get("role") == "assistant" and not failed else []
    return []
