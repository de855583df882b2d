"""What the tests of batches share: tools, definitions, what waits for them, and the validator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from chatkeep.engine.interrupts import (
    BINDING_KEY,
    Decision,
    InterruptDefinition,
    PendingInterrupt,
    ResumeState,
    approval_descriptor,
    client_tool_descriptor,
    define_interrupt,
    generic_descriptor,
    validate_resume,
)
from chatkeep.engine.tools import Tool, client_tool, define_tool
from chatkeep.errors import InterruptResumeError
from chatkeep.records import UNSET

P = {
    "type": "object",
    "properties": {"p": {"type": "string"}},
    "required": ["p"],
    "additionalProperties": False,
}
N = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
NOW = 1_796_041_000_000


def server(name: str, **options: Any) -> Tool:
    return define_tool(name=name, execute=lambda args: args, needs_approval=True, **options)


DEL = server("del", input_schema=P)
BARE = server("bare")
PAY = server("pay", input_schema=P, approval_schema={"approve": N})
WHY = server("why", approval_schema={"reject": N})
CLI = client_tool("cli", output_schema=N)
FREE = client_tool("free")
TWO = client_tool("two", input_schema=P, needs_approval=True)
TOOLS = {t.name: t for t in (DEL, BARE, PAY, WHY, CLI, FREE, TWO)}
PLAN = define_interrupt("plan", response=OK)
SHOWN = define_interrupt("shown", response=OK, payload=N)
ANY = define_interrupt("any")
DEFINITIONS = {d.id: d for d in (PLAN, SHOWN, ANY)}


def asks(tool: Tool, call_id: str = "c1") -> PendingInterrupt:
    descriptor = approval_descriptor(tool, call_id, {"p": "a"}, "r1")
    return PendingInterrupt(interrupt_id=descriptor["id"], run_id="r1", descriptor=descriptor)


def waits(tool: Tool, call_id: str = "k1", decision: Decision | None = None) -> PendingInterrupt:
    descriptor = client_tool_descriptor(tool, call_id, {}, "r1")
    return PendingInterrupt(
        interrupt_id=descriptor["id"], run_id="r1", descriptor=descriptor, decision=decision
    )


def question(
    definition: InterruptDefinition = PLAN, index: int = 0, **options: Any
) -> PendingInterrupt:
    request = definition.request(**{"key": "k", "reason": "r", "message": "m", **options})
    descriptor = generic_descriptor(request, index, f"g{index}", "r1")
    return PendingInterrupt(interrupt_id=f"g{index}", run_id="r1", descriptor=descriptor)


def with_binding(item: PendingInterrupt, **changes: Any) -> PendingInterrupt:
    metadata = item.descriptor["metadata"]
    binding = {**metadata[BINDING_KEY], **changes}
    binding = {key: value for key, value in binding.items() if value is not UNSET}
    descriptor = {**item.descriptor, "metadata": {**metadata, BINDING_KEY: binding}}
    return dataclasses.replace(item, descriptor=descriptor)


def changed(item: PendingInterrupt, **changes: Any) -> PendingInterrupt:
    descriptor = {**item.descriptor, **changes}
    descriptor = {key: value for key, value in descriptor.items() if value is not UNSET}
    return dataclasses.replace(item, descriptor=descriptor)


def validate(
    pending: Sequence[PendingInterrupt], entries: Sequence[Mapping[str, Any]], **options: Any
) -> ResumeState:
    given: dict[str, Any] = {"tools": TOOLS, "definitions": DEFINITIONS, "now_ms": NOW, **options}
    return validate_resume(
        thread_id="t",
        interrupted_run_id="r1",
        pending=pending,
        entries=entries,
        **given,
    )


def refused(
    pending: Sequence[PendingInterrupt], entries: Sequence[Any], **options: Any
) -> list[dict[str, Any]]:
    with pytest.raises(InterruptResumeError) as caught:
        validate(pending, entries, **options)
    return [dict(error) for error in caught.value.errors]


def codes(
    pending: Sequence[PendingInterrupt], entries: Sequence[Any], **options: Any
) -> list[tuple[str, str]]:
    """``(interrupt id, code)`` of the item errors, then ``("batch", code)``."""
    return [
        (error.get("interruptId", "batch"), error["code"])
        for error in refused(pending, entries, **options)
    ]


def one(item: PendingInterrupt, entry: Any, **options: Any) -> tuple[str, str]:
    """Code and source of the one item error; the batch error that goes with it is checked."""
    item_error, batch = refused([item], [entry], **options)
    assert batch["code"] == "item-validation-failed"
    assert (item_error["scope"], batch["scope"]) == ("item", "batch")
    assert item_error["interruptId"] == item.interrupt_id
    return item_error["code"], item_error["source"]


def resolved(interrupt_id: str, payload: Any = UNSET, **more: Any) -> dict[str, Any]:
    entry = {"interruptId": interrupt_id, "status": "resolved", **more}
    return entry if payload is UNSET else {**entry, "payload": payload}
