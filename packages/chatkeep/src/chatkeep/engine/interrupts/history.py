"""Resume without an interrupt store: what was pending is read from the posted history.

The browser decides here what was asked, so nothing is proved by it: use a store where an
approval has to mean something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from chatkeep.engine.calls import Call
from chatkeep.engine.interrupts.bindings import (
    CONTINUATION_KEY,
    approval_id,
    client_tool_id,
    parse_binding,
)
from chatkeep.engine.interrupts.definitions import InterruptDefinition
from chatkeep.engine.interrupts.descriptors import (
    approval_descriptor,
    client_tool_descriptor,
    generic_descriptor,
)
from chatkeep.engine.interrupts.refusals import Refusal, named, submitted_ids
from chatkeep.engine.interrupts.resume import Decision, PendingInterrupt, ResumeState
from chatkeep.engine.interrupts.validation import validate_resume
from chatkeep.engine.tools import InvalidArguments, Tool, client_tool
from chatkeep.errors import InvalidValue
from chatkeep.messages.parts import calls_of, is_placeholder
from chatkeep.records import UNSET, ModelMessage

__all__ = ["pending_from_history", "resume_from_history"]


def resume_from_history(
    *,
    thread_id: str,
    parent_run_id: str | None,
    run_id: str,
    messages: Sequence[ModelMessage],
    entries: Sequence[Mapping[str, Any]],
    tools: Mapping[str, Tool],
    definitions: Mapping[str, InterruptDefinition],
    now_ms: int,
    failed_outputs: Mapping[str, str] | None = None,
) -> ResumeState:
    """What the answers come to, with the pending interrupts read from ``messages``.

    ``run_id`` is this request's; ``parent_run_id`` names the run that paused and must be given:
    nothing else here says which run it was.

    Raises:
        InterruptResumeError: everything that is wrong with the batch.
    """
    if parent_run_id is None:
        refusal = Refusal(thread_id, run_id, submitted_ids(entries))
        refusal.batch("stale", "The request does not say which run it resumes.", source="server")
        raise refusal.error()
    pending = pending_from_history(
        messages,
        run_id=parent_run_id,
        entries=entries,
        tools=tools,
        definitions=definitions,
        thread_id=thread_id,
    )
    return validate_resume(
        thread_id=thread_id,
        interrupted_run_id=parent_run_id,
        pending=pending,
        entries=entries,
        tools=tools,
        definitions=definitions,
        now_ms=now_ms,
        failed_outputs=failed_outputs,
    )


def pending_from_history(
    messages: Sequence[ModelMessage],
    *,
    run_id: str,
    entries: Sequence[Mapping[str, Any]],
    tools: Mapping[str, Tool],
    definitions: Mapping[str, InterruptDefinition],
    thread_id: str = "",
) -> list[PendingInterrupt]:
    """What the paused run ``run_id`` must have asked.

    Open calls after the last user message that need an approval or run in the browser are
    pending, unless the first question of the batch was a generic one; calls that have a result
    already are, when the answers name them (browsers post what their tools returned along). An
    answer to the browser tool of a call that needs an approval says that it was approved. Generic
    questions come from what the answers repeat of them.

    Raises:
        InterruptResumeError: a repeated question that is none of ``definitions`` as they are now.
    """
    answered = set(submitted_ids(entries))
    questions = _questions(entries, definitions, run_id, thread_id)
    # Indexes count over the whole batch: a question that came first had no call before it.
    only_questions = any(
        binding is not None and binding.batch_index == 0
        for binding in (parse_binding(question.descriptor) for question in questions)
    )
    calls = [
        item
        for call, has_result in _calls(messages)
        for item in _of_call(call, has_result or only_questions, answered, tools, run_id)
    ]
    return [*calls, *questions]


def _calls(messages: Sequence[ModelMessage]) -> Iterator[tuple[Call, bool]]:
    """The calls after the last user row, each with whether it has a result."""
    turn: list[ModelMessage] = []
    for row in reversed(messages):
        if row.get("role") == "user":
            break
        turn.append(row)
    calls: dict[str, Call] = {}
    done: set[str] = set()
    for row in reversed(turn):
        for entry in calls_of(row):
            calls[entry["id"]] = Call.of_entry(entry)
            done.discard(entry["id"])
        if row.get("role") == "tool" and not is_placeholder(row.get("content")):
            done.add(row.get("toolCallId", ""))
    return ((call, name in done) for name, call in calls.items() if call.waiting)


def _of_call(
    call: Call,
    has_result: bool,
    answered: set[str],
    tools: Mapping[str, Tool],
    run_id: str,
) -> Iterator[PendingInterrupt]:
    asks, runs = approval_id(call.identity), client_tool_id(call.identity)
    is_named = asks in answered or runs in answered
    if has_result and not is_named:
        return
    tool = tools.get(call.name)
    if tool is None:
        if not is_named or not call.name or call.name != call.name.strip():
            return
        # Kept pending under a name that no tool has: it can be cancelled, and nothing else.
        tool = client_tool(call.name, needs_approval=asks in answered)
    args = _arguments(call, tool)
    if args is None:
        if not is_named:
            return  # never asked: such a call fails before anybody is asked
        args = {}
    if tool.needs_approval and runs not in answered:
        descriptor = approval_descriptor(tool, call.identity, args, run_id)
        yield PendingInterrupt(interrupt_id=asks, run_id=run_id, descriptor=descriptor)
    elif tool.is_client:
        yield PendingInterrupt(
            interrupt_id=runs,
            run_id=run_id,
            descriptor=client_tool_descriptor(tool, call.identity, args, run_id),
            decision=Decision(approved=True) if tool.needs_approval else None,
        )


def _arguments(call: Call, tool: Tool) -> Any:
    """The arguments of a call; None when they are none that the tool takes."""
    try:
        args = call.parse()
        if not tool.from_request:
            tool.check_input(args)
    except (InvalidArguments, ValueError):
        return None
    return args


def _questions(
    entries: Sequence[Mapping[str, Any]],
    definitions: Mapping[str, InterruptDefinition],
    run_id: str,
    thread_id: str,
) -> list[PendingInterrupt]:
    refusal = Refusal(thread_id, run_id, submitted_ids(entries))
    out: dict[str, PendingInterrupt] = {}
    for entry in cast("Sequence[object]", entries):
        repeated, name = _continuation(entry)
        if repeated is None or name in out:
            continue
        try:
            item = _question(name, repeated, definitions, run_id)
        except InvalidValue as error:
            message = f"Interrupt {named(name)} cannot be asked again: {error}"
            refusal.item(name, "stale", message, source="server")
        else:
            out[name] = item
    if refusal:
        refusal.batch("item-validation-failed", "Some answers are not valid.")
    refusal.check()
    return list(out.values())


def _continuation(entry: object) -> tuple[Mapping[str, Any] | None, str]:
    if not isinstance(entry, Mapping):
        return None, ""
    row = cast("Mapping[str, Any]", entry)
    name, metadata = row.get("interruptId"), row.get("metadata")
    if not isinstance(name, str) or not isinstance(metadata, Mapping):
        return None, ""
    bag = cast("Mapping[str, Any]", metadata)
    if CONTINUATION_KEY not in bag:
        return None, ""
    repeated = bag[CONTINUATION_KEY]
    return (cast("Mapping[str, Any]", repeated) if isinstance(repeated, Mapping) else {}), name


def _question(
    interrupt_id: str,
    repeated: Mapping[str, Any],
    definitions: Mapping[str, InterruptDefinition],
    run_id: str,
) -> PendingInterrupt:
    if repeated.get("v") != 1:
        raise InvalidValue("$.v", "is not 1")
    name, index = repeated.get("definitionId"), repeated.get("batchIndex")
    definition = definitions.get(name) if isinstance(name, str) else None
    if definition is None:
        raise InvalidValue("$.definitionId", "is not registered here")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise InvalidValue("$.batchIndex", "is not a position")
    if (
        repeated.get("responseSchemaHash") != definition.response_hash
        or repeated.get("payloadSchemaHash") != definition.payload_hash
    ):
        raise InvalidValue("$", "its schemas have changed since it was asked")
    expires_at = repeated.get("expiresAt")
    if expires_at is not None and not isinstance(expires_at, str):
        raise InvalidValue("$.expiresAt", "is no text")
    request = definition.repeat(
        key=cast("str", repeated.get("key")),
        reason=cast("str", repeated.get("reason")),
        message=cast("str", repeated.get("message")),
        payload=repeated.get("payload", UNSET),
        expires_at=expires_at,
    )
    return PendingInterrupt(
        interrupt_id=interrupt_id,
        run_id=run_id,
        descriptor=generic_descriptor(request, index, interrupt_id, run_id),
    )
