"""The approval that went before a browser tool's question.

An approved browser tool pauses twice: for the approval, then for what it returns. The second
question names the first (its proof). What was decided is read from the stored record of the
approval, and holds only if it fits the proof and today's tools.
"""

from __future__ import annotations

from collections.abc import Mapping

from chatkeep.engine.interrupts import (
    Binding,
    Decision,
    PendingInterrupt,
    Refusal,
    approval_id,
    is_descriptor,
    parse_binding,
    parse_proof,
    replay_approval,
)
from chatkeep.engine.tools import Tool
from chatkeep.persistence.foreign import answered
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import InterruptRecord

__all__ = ["decided_before"]


async def decided_before(
    work: UnitOfWork, item: PendingInterrupt, tools: Mapping[str, Tool], refusal: Refusal
) -> Decision | None:
    """The approval of the call that ``item`` waits for; None for every interrupt that needs
    none.

    Raises:
        InterruptResumeError: the approval is not there or not resolved, does not fit the proof
            or today's tools, or was none.
    """
    binding = parse_binding(item.descriptor)
    if binding is None or binding.kind != "client-tool-execution":
        return None
    proof = parse_proof(item.descriptor)
    tool = tools.get(binding.tool_name)
    if proof is None and (tool is None or not tool.needs_approval):
        return None
    record = await _approval(
        work,
        binding,
        interrupt_id=None if proof is None else proof["interruptId"],
        run_id=None if proof is None else proof["interruptedRunId"],
    )
    if record is None:
        name = item.interrupt_id
        message = f"Interrupt {name} follows an approval, and there is none that was resolved."
        refusal.item(name, "stale", message, source="server")
        refusal.batch("item-validation-failed", "Some answers are not valid.")
        raise refusal.error()
    return replay_approval(
        item,
        PendingInterrupt(
            interrupt_id=record.interrupt_id, run_id=record.run_id, descriptor=record.payload
        ),
        thread_id=work.thread_id,
        response=record.response,
        resolved_at=record.resolved_at or 0,
        tools=tools,
        refusal=refusal,
    )


async def _approval(
    work: UnitOfWork, binding: Binding, *, interrupt_id: str | None, run_id: str | None
) -> InterruptRecord | None:
    """The resolved record of the approval: the one that the proof names, else the newest of
    the call."""
    store = work.layout.stores.interrupts
    if store is None:
        return None
    name = interrupt_id or approval_id(binding.tool_call_id)
    found = await answered(store.get(work.thread_id, name, run_id=run_id))
    if found is None or found.status != "resolved" or not is_descriptor(found.payload):
        return None
    same = found.thread_id == work.thread_id and run_id in (None, found.run_id)
    return found if same else None
