"""A batch of answers against what waits for them: all of it fits, or all of it is refused.

The rules are collected, not failed at the first: whoever sent the batch learns everything that
is wrong with it. Cancelled entries are held to less: what they ask for can be done also when
the interrupt has expired, its tool is gone, or its schemas have changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from chatkeep.codec import normalize
from chatkeep.engine.interrupts.bindings import (
    BINDING_KEY,
    BOUNDARY_KEY,
    CLIENT_TOOL_REASON,
    PAYLOAD_KEY,
    Binding,
    metadata_of,
    parse_binding,
)
from chatkeep.engine.interrupts.canonical import schema_hash
from chatkeep.engine.interrupts.decisions import read_decision
from chatkeep.engine.interrupts.definitions import InterruptDefinition, iso_ms
from chatkeep.engine.interrupts.descriptors import (
    approval_hash,
    approval_proof,
    input_hash,
    output_hash,
)
from chatkeep.engine.interrupts.outputs import Output, read_output
from chatkeep.engine.interrupts.refusals import ItemCode, Refusal, Source, named, submitted_ids
from chatkeep.engine.interrupts.resume import (
    Decision,
    GenericAnswer,
    PendingInterrupt,
    ResumeState,
)
from chatkeep.engine.schema import Problem
from chatkeep.engine.tools import Tool
from chatkeep.errors import InvalidValue
from chatkeep.records import UNSET

__all__ = ["check_generic", "may_be_missing", "validate_resume"]

_LOG: Final = logging.getLogger("chatkeep.engine")


def validate_resume(
    *,
    thread_id: str,
    interrupted_run_id: str,
    pending: Sequence[PendingInterrupt],
    entries: Sequence[Mapping[str, Any]],
    tools: Mapping[str, Tool],
    definitions: Mapping[str, InterruptDefinition],
    now_ms: int,
    failed_outputs: Mapping[str, str] | None = None,
) -> ResumeState:
    """What the answers in ``entries`` come to, when they are one each for ``pending``.

    ``interrupted_run_id`` is the run that paused. ``failed_outputs`` are
    :func:`~chatkeep.engine.interrupts.posted_failures` of the request. ``now_ms`` (epoch
    milliseconds) decides what has expired.

    A browser's tool may be left out where the batch has generic questions and all of those are
    answered: the continuation asks for it again.

    Raises:
        InterruptResumeError: everything that is wrong with the batch. Nothing of it counts.
    """
    refusal = Refusal(thread_id, interrupted_run_id, submitted_ids(entries))
    reader = _Reader(interrupted_run_id, tools, definitions, failed_outputs or {}, now_ms, refusal)
    reader.read(pending, entries)
    refusal.check()
    return reader.state()


def may_be_missing(pending: Sequence[PendingInterrupt], answered: set[str]) -> set[str]:
    """Ids of interrupts that a batch may leave out: browser tools, once every generic question
    beside them is answered."""
    generic = {item.interrupt_id for item in pending if _kind(item) == "generic"}
    if not generic or generic - answered:
        return set()
    return {item.interrupt_id for item in pending if _kind(item) == "client-tool-execution"}


def _kind(item: PendingInterrupt) -> str | None:
    binding = parse_binding(item.descriptor)
    return None if binding is None else binding.kind


def check_generic(
    binding: Binding,
    descriptor: Mapping[str, Any],
    definitions: Mapping[str, InterruptDefinition],
) -> str | None:
    """Why a generic interrupt cannot be answered any more, as one sentence; None when it can:
    its definition is here, and asks for and shows what it did when the question was put."""
    name = named(binding.interrupt_id)
    definition = definitions.get(binding.definition_id)
    if definition is None:
        return f"Interrupt {name} belongs to a definition that is not registered here."
    if (
        binding.response_schema_hash != definition.response_hash
        or binding.payload_schema_hash != definition.payload_hash
    ):
        return f"The schemas of interrupt {name} have changed since it was asked."
    shown = metadata_of(descriptor).get(PAYLOAD_KEY, UNSET)
    if shown is UNSET:
        return (
            None
            if definition.payload_schema is None
            else f"What interrupt {name} showed is missing."
        )
    if definition.payload_problem(shown) is not None:
        return f"What interrupt {name} showed does not fit its definition."
    return None


class _Reader:
    def __init__(
        self,
        run_id: str,
        tools: Mapping[str, Tool],
        definitions: Mapping[str, InterruptDefinition],
        failed_outputs: Mapping[str, str],
        now_ms: int,
        refusal: Refusal,
    ) -> None:
        self._run_id = run_id
        self._tools = tools
        self._definitions = definitions
        self._failed_outputs = failed_outputs
        self._now = now_ms
        self._refusal = refusal
        self._approvals: dict[str, Decision] = {}
        self._results: dict[str, Any] = {}
        self._errors: dict[str, str] = {}
        self._cancelled: set[str] = set()
        self._generic: list[GenericAnswer] = []
        self._superseded: set[str] = set()

    def state(self) -> ResumeState:
        return ResumeState(
            interrupted_run_id=self._run_id,
            approvals=self._approvals,
            client_results=self._results,
            client_errors=self._errors,
            cancelled=frozenset(self._cancelled),
            generic=tuple(sorted(self._generic, key=lambda answer: answer.batch_index)),
            superseded=frozenset(self._superseded),
        )

    # ------------------------------------------------------------------------- the batch

    def read(
        self, pending: Sequence[PendingInterrupt], entries: Sequence[Mapping[str, Any]]
    ) -> None:
        if not _well_formed(entries):
            self._refusal.batch("protocol", "Every answer needs an interruptId, as text.")
            return
        by_id: dict[str, Mapping[str, Any]] = {}
        twice: set[str] = set()
        for entry in entries:
            name = cast("str", entry["interruptId"])
            if name in by_id:
                twice.add(name)
            by_id[name] = entry
        for name in twice:
            self._refuse(name, "conflict", f"Interrupt {named(name)} is answered twice.")
        self._check_complete(pending, by_id)
        indexes: set[int] = set()
        for item in pending:
            answer = by_id.get(item.interrupt_id)
            if answer is not None and item.interrupt_id not in twice:
                self._item(item, answer, indexes)
        if self._refusal.items:
            self._refusal.batch("item-validation-failed", "Some answers are not valid.")

    def _check_complete(
        self, pending: Sequence[PendingInterrupt], by_id: Mapping[str, Mapping[str, Any]]
    ) -> None:
        waiting = {item.interrupt_id: item for item in pending}
        skipped = may_be_missing(pending, set(by_id))
        missing = [name for name in waiting if name not in by_id and name not in skipped]
        unknown = [name for name in by_id if name not in waiting]
        for name in missing:
            self._refuse(name, "unknown-interrupt", f"Interrupt {named(name)} is not answered.")
        for name in unknown:
            self._refuse(name, "unknown-interrupt", f"Interrupt {named(name)} is not pending.")
        if missing or unknown:
            self._refusal.batch(
                "incomplete-batch", "A batch answers or cancels everything that is pending."
            )
        for name in skipped - by_id.keys():
            item = waiting[name]
            self._superseded.add(name)
            if item.decision is not None:
                call_id = cast("Binding", parse_binding(item.descriptor)).tool_call_id
                self._approvals[call_id] = item.decision

    def _refuse(
        self,
        name: str,
        code: ItemCode,
        message: str,
        *,
        source: Source = "client",
        path: Sequence[str | int] = (),
    ) -> None:
        self._refusal.item(name, code, message, source=source, path=path)

    # --------------------------------------------------------------------------- one item

    def _item(self, item: PendingInterrupt, entry: Mapping[str, Any], indexes: set[int]) -> None:
        name, descriptor = item.interrupt_id, item.descriptor
        if not self._check_status(name, entry):
            return
        cancelled = entry["status"] == "cancelled"
        if BINDING_KEY not in metadata_of(descriptor):
            self._unbound(item, entry, cancelled=cancelled)
            return
        binding = parse_binding(descriptor)
        if binding is None or not self._correlates(item, binding):
            self._refuse(
                name, "stale", f"Interrupt {named(name)} is not of this run.", source="server"
            )
            return
        if not cancelled and not self._check_expiry(name, descriptor, binding):
            return
        if not _same_schema(descriptor, binding):
            self._refuse(
                name,
                "invalid-response-schema",
                f"The response schema of interrupt {named(name)} is not the one it was bound to.",
                source="server",
            )
            return
        try:
            if binding.kind == "generic":
                self._question(binding, descriptor, entry, indexes, cancelled=cancelled)
            elif cancelled:
                self._cancelled.add(binding.tool_call_id)
            elif binding.kind == "tool-approval":
                self._approval(item, binding, entry)
            else:
                self._client_tool(item, binding, entry)
        except Exception as error:  # noqa: BLE001 - an application's validator raises what it likes
            _LOG.exception("the answer to interrupt %s could not be checked", named(name))
            message = f"The answer to {named(name)} cannot be checked: {type(error).__name__}."
            self._refuse(name, "invalid-response-schema", message, source="server")

    def _check_status(self, name: str, entry: Mapping[str, Any]) -> bool:
        status = entry.get("status")
        if status not in ("resolved", "cancelled"):
            message = f"The status of interrupt {named(name)} is neither resolved nor cancelled."
        elif status == "cancelled" and entry.get("payload") is not None:
            message = f"Interrupt {named(name)} is cancelled; it cannot have a payload as well."
        else:
            return True
        self._refuse(name, "invalid-payload", message)
        return False

    def _correlates(self, item: PendingInterrupt, binding: Binding) -> bool:
        return (
            item.descriptor.get("id") == item.interrupt_id == binding.interrupt_id
            and binding.interrupted_run_id == item.run_id == self._run_id
            and binding.generation == 0
            and (
                binding.kind == "generic"
                or item.descriptor.get("toolCallId") == binding.tool_call_id
            )
        )

    def _check_expiry(self, name: str, descriptor: Mapping[str, Any], binding: Binding) -> bool:
        for moment in (descriptor.get("expiresAt"), binding.expires_at):
            if moment is None:
                continue
            end = iso_ms(moment) if isinstance(moment, str) else None
            if end is None:
                message = f"When interrupt {named(name)} expires cannot be read."
                self._refuse(name, "invalid-payload", message, source="server")
                return False
            if end <= self._now:
                message = f"Interrupt {named(name)} has expired; it can only be cancelled."
                self._refuse(name, "expired", message, source="server")
                return False
        return True

    # ---------------------------------------------------------------------- generic ones

    def _question(
        self,
        binding: Binding,
        descriptor: Mapping[str, Any],
        entry: Mapping[str, Any],
        indexes: set[int],
        *,
        cancelled: bool,
    ) -> None:
        name = binding.interrupt_id
        if binding.batch_index < 0 or binding.batch_index in indexes:
            message = f"The place of interrupt {named(name)} in its batch is not its own."
            self._refuse(name, "stale", message, source="server")
            return
        indexes.add(binding.batch_index)
        response = None
        if not cancelled:
            drift = check_generic(binding, descriptor, self._definitions)
            if drift is not None:
                self._refuse(name, "stale", drift, source="server")
                return
            definition = self._definitions[binding.definition_id]
            response, problem = _response(definition, entry.get("payload"))
            if problem is not None:
                self._invalid(name, "invalid-payload", "The answer does not fit", problem)
                return
        marks = metadata_of(descriptor)
        boundary = marks.get(BOUNDARY_KEY)
        self._generic.append(
            GenericAnswer(
                definition_id=binding.definition_id,
                key=binding.key,
                interrupt_id=name,
                batch_index=binding.batch_index,
                status="cancelled" if cancelled else "resolved",
                response=response,
                reason=str(descriptor.get("reason", "")),
                message=str(descriptor.get("message", "")),
                payload=marks.get(PAYLOAD_KEY, UNSET),
                expires_at=binding.expires_at,
                boundary=boundary if isinstance(boundary, str) else None,
            )
        )

    # ------------------------------------------------------------------------- approvals

    def _approval(self, item: PendingInterrupt, binding: Binding, entry: Mapping[str, Any]) -> None:
        name = item.interrupt_id
        tool = self._tools.get(binding.tool_name)
        if tool is None:
            self._stale_tool(name, binding, "is not registered here")
            return
        asked = (binding.input_schema_hash, binding.approval_schema_hash)
        if asked != (input_hash(tool), approval_hash(tool)):
            self._stale_tool(name, binding, "has other schemas now")
            return
        decision = read_decision(tool, entry.get("payload"))
        if isinstance(decision, list):
            for fault in decision:
                self._invalid(name, fault.code, "The decision", fault.problem)
            return
        if decision.approved and tool.is_client:
            decision = replace(decision, proof=approval_proof(item.descriptor, decision))
        self._approvals[binding.tool_call_id] = decision

    # ---------------------------------------------------------------------- client tools

    def _client_tool(
        self, item: PendingInterrupt, binding: Binding, entry: Mapping[str, Any]
    ) -> None:
        name, call_id = item.interrupt_id, binding.tool_call_id
        tool = self._tools.get(binding.tool_name)
        if tool is None:
            self._stale_tool(name, binding, "is not registered here")
        elif not tool.is_client:
            self._stale_tool(name, binding, "does not run in the browser any more")
        elif binding.output_schema_hash != output_hash(tool):
            self._stale_tool(name, binding, "has another output schema now")
        elif tool.needs_approval and not (item.decision and item.decision.approved):
            self._stale_tool(name, binding, "needs an approval, and there is none for this call")
        elif self._take_output(name, tool, call_id, entry) and item.decision is not None:
            self._approvals[call_id] = item.decision

    def _take_output(
        self, name: str, tool: Tool | None, call_id: str, entry: Mapping[str, Any]
    ) -> bool:
        output = read_output(tool, entry, self._failed_outputs.get(call_id))
        if isinstance(output, Problem):
            self._invalid(name, "invalid-tool-output", "The output of the tool", output)
            return False
        if isinstance(output, Output):
            self._results[call_id] = output.value
        else:
            self._errors[call_id] = output.text
        return True

    def _stale_tool(self, name: str, binding: Binding, why: str) -> None:
        self._refuse(name, "stale", f"Tool {named(binding.tool_name)} {why}.", source="server")

    # --------------------------------------------------------------------------- the rest

    def _unbound(
        self, item: PendingInterrupt, entry: Mapping[str, Any], *, cancelled: bool
    ) -> None:
        """A record without a binding, as older writers left them: doubt means no."""
        descriptor = item.descriptor
        call_id = descriptor.get("toolCallId")
        if not isinstance(call_id, str):
            return
        marks, reason = metadata_of(descriptor), descriptor.get("reason")
        if cancelled:
            self._cancelled.add(call_id)
        elif marks.get("kind") == "approval" or reason == "approval_required":
            payload = entry.get("payload")
            if isinstance(payload, Mapping):
                payload = cast("Mapping[str, Any]", payload).get("approved")
            self._approvals[call_id] = Decision(approved=payload is True)
        elif marks.get("kind") == "client_tool" or reason in (
            CLIENT_TOOL_REASON,
            "client_tool_input",
        ):
            tool_name = marks.get("toolName")
            tool = self._tools.get(tool_name) if isinstance(tool_name, str) else None
            self._take_output(item.interrupt_id, tool, call_id, entry)

    def _invalid(self, name: str, code: ItemCode, what: str, problem: Problem) -> None:
        message = f"{what} ({named(name)}): {problem}"
        if problem.broken:
            self._refuse(name, "invalid-response-schema", message, source="server")
        else:
            self._refuse(name, code, message, path=problem.path)


def _well_formed(entries: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        isinstance(entry, Mapping)
        and isinstance(cast("Mapping[str, Any]", entry).get("interruptId"), str)
        for entry in cast("Sequence[object]", entries)
    )


def _response(definition: InterruptDefinition, payload: Any) -> tuple[Any, Problem | None]:
    """An answer as JSON, and what is wrong with it."""
    try:
        response = normalize(payload, "$.payload")
    except InvalidValue as error:
        return None, Problem(str(error))
    return response, definition.response_problem(response)


def _same_schema(descriptor: Mapping[str, Any], binding: Binding) -> bool:
    schema = descriptor.get("responseSchema")
    if schema is None:
        return binding.kind == "generic" and binding.response_schema_hash is None
    if not isinstance(schema, Mapping):
        return False
    try:
        return schema_hash(cast("Mapping[str, Any]", schema)) == binding.response_schema_hash
    except InvalidValue:
        return False
