"""Browser tools that need an approval first: two pauses, and how the second knows the first.

A continuation that has an approved browser tool pauses again, to wait for what the tool returns.
The descriptor of that second pause keeps a proof of the approval: which one it was, the schemas
it was asked with, and what was decided. Where a store decides, the proof is held against the
approval's own record before the output counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from chatkeep.engine.interrupts.bindings import PROOF_KEY, metadata_of, parse_binding
from chatkeep.engine.interrupts.canonical import canonical_json
from chatkeep.engine.interrupts.descriptors import approval_proof
from chatkeep.engine.interrupts.refusals import Refusal, named
from chatkeep.engine.interrupts.resume import Decision, PendingInterrupt
from chatkeep.engine.interrupts.validation import validate_resume
from chatkeep.engine.tools import Tool
from chatkeep.errors import InterruptResumeError, InvalidValue

__all__ = ["parse_proof", "replay_approval"]

_IDENTITY = ("interruptId", "interruptedRunId", "toolName", "toolCallId")


def parse_proof(descriptor: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The proof in a descriptor: which approval (``interruptId``, ``interruptedRunId``) of which
    call (``toolName``, ``toolCallId``); None when there is none that can be read."""
    proof = metadata_of(descriptor).get(PROOF_KEY)
    if not isinstance(proof, Mapping):
        return None
    row = cast("Mapping[str, Any]", proof)
    if row.get("v") != 1 or not all(isinstance(row.get(key), str) for key in _IDENTITY):
        return None
    return row


def replay_approval(
    item: PendingInterrupt,
    approval: PendingInterrupt,
    *,
    thread_id: str,
    response: Any,
    resolved_at: int,
    tools: Mapping[str, Tool],
    refusal: Refusal,
) -> Decision:
    """The decision that let the browser tool of ``item`` run, read again from ``approval``: the
    resolved record that the proof names, with its stored ``response``.

    It must be about the same call of the same tool, must fit today's tools (as of
    ``resolved_at``, so that it cannot have expired since), must be what the proof says, and must
    have been a yes. What is wrong is said about ``item``: the browser that answers knows nothing
    of the older interrupt.

    Raises:
        InterruptResumeError: of ``refusal``, with what is wrong added.
    """
    binding, asked = parse_binding(item.descriptor), parse_binding(approval.descriptor)
    proof = parse_proof(item.descriptor)
    if (
        binding is None
        or asked is None
        or asked.kind != "tool-approval"
        or asked.tool_call_id != binding.tool_call_id
        or asked.tool_name != binding.tool_name
    ):
        raise _stale(item, refusal, "is not about the same call")
    entry = {"interruptId": approval.interrupt_id, "status": "resolved", "payload": response}
    try:
        state = validate_resume(
            thread_id=thread_id,
            interrupted_run_id=approval.run_id,
            pending=[approval],
            entries=[entry],
            tools=tools,
            definitions={},
            now_ms=resolved_at,
        )
    except InterruptResumeError as error:
        raise _stale(item, refusal, f"does not hold any more ({error})") from error
    decision = state.approvals[binding.tool_call_id]
    if not decision.approved:
        raise _stale(item, refusal, "was not given")
    if proof is not None and not _same(proof, approval_proof(approval.descriptor, decision)):
        raise _stale(item, refusal, "is not the one that its proof says")
    return decision


def _same(proof: Mapping[str, Any], replayed: Mapping[str, Any]) -> bool:
    try:
        return canonical_json(proof) == canonical_json(replayed)
    except InvalidValue:
        return False


def _stale(item: PendingInterrupt, refusal: Refusal, why: str) -> InterruptResumeError:
    message = f"The approval that interrupt {named(item.interrupt_id)} needs {why}."
    refusal.item(item.interrupt_id, "stale", message, source="server")
    refusal.batch("item-validation-failed", "Some answers are not valid.")
    return refusal.error()
