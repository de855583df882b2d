"""Descriptors of interrupts as they go on the wire and into the store, and their batch."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from chatkeep.engine.interrupts.bindings import (
    APPROVAL_REASON,
    BINDING_KEY,
    BOUNDARY_KEY,
    CLIENT_TOOL_REASON,
    PAYLOAD_KEY,
    PROOF_KEY,
    Descriptor,
    approval_id,
    client_tool_id,
    metadata_of,
)
from chatkeep.engine.interrupts.canonical import canonical_hash, schema_hash
from chatkeep.engine.interrupts.definitions import InterruptRequest
from chatkeep.engine.interrupts.resume import Decision
from chatkeep.engine.tools import Tool
from chatkeep.errors import ToolError
from chatkeep.records import UNSET

__all__ = [
    "Batch",
    "approval_descriptor",
    "approval_hash",
    "approval_proof",
    "approval_response_schema",
    "client_tool_descriptor",
    "generic_descriptor",
    "input_hash",
    "output_hash",
]


def input_hash(tool: Tool) -> str:
    """Hash of a tool's input schema, or the one that it was given."""
    return tool.input_schema_hash or schema_hash(tool.input_schema)


def output_hash(tool: Tool) -> str:
    """Hash of a tool's output schema, or the one that it was given."""
    return tool.output_schema_hash or schema_hash(tool.output_schema)


def approval_hash(tool: Tool) -> str:
    """Hash of what may be said along with yes and no."""
    approve, reject = tool.approval_branches
    return canonical_hash({"approve": approve, "reject": reject})


def approval_response_schema(tool: Tool) -> dict[str, Any]:
    """The JSON Schema of an approval's answer: yes, perhaps with other arguments, or no."""
    approve, reject = tool.approval_branches
    return {
        "oneOf": [
            _branch(approved=True, payload=approve, edited_args=tool.input_schema),
            _branch(approved=False, payload=reject, edited_args=None),
        ]
    }


def _branch(
    *, approved: bool, payload: Mapping[str, Any] | None, edited_args: Mapping[str, Any] | None
) -> dict[str, Any]:
    properties: dict[str, Any] = {"approved": {"const": approved}}
    if edited_args is not None:
        properties["editedArgs"] = edited_args
    if payload is not None:
        properties["payload"] = payload
    return {
        "type": "object",
        "properties": properties,
        "required": ["approved"] if payload is None else ["approved", "payload"],
        "additionalProperties": False,
    }


def approval_descriptor(tool: Tool, call_id: str, args: Any, run_id: str) -> Descriptor:
    """The question whether ``tool`` may be executed with ``args`` (parsed JSON).

    ``run_id`` is the id of the run that pauses: of its request, always.
    """
    schema = approval_response_schema(tool)
    interrupt_id = approval_id(call_id)
    return {
        "id": interrupt_id,
        "reason": APPROVAL_REASON,
        "message": f"Approval required to run {tool.name}",
        "toolCallId": call_id,
        "responseSchema": schema,
        "metadata": {
            "kind": "approval",
            "toolName": tool.name,
            "input": args,
            BINDING_KEY: {
                "v": 1,
                "kind": "tool-approval",
                "interruptId": interrupt_id,
                "toolName": tool.name,
                "toolCallId": call_id,
                "originalArgs": args,
                "inputSchemaHash": input_hash(tool),
                "approvalSchemaHash": approval_hash(tool),
                "responseSchemaHash": schema_hash(schema),
                "interruptedRunId": run_id,
                "generation": 0,
            },
        },
    }


def client_tool_descriptor(
    tool: Tool, call_id: str, args: Any, run_id: str, *, decision: Decision | None = None
) -> Descriptor:
    """The wait for what ``tool`` returns in the browser, executed with ``args`` (parsed JSON,
    edited ones already in place).

    ``decision`` is the approval that went before it, if there was one: its proof is kept in
    the descriptor, so that the answer can be checked against it.
    """
    schema = {} if tool.output_schema is None else tool.output_schema
    interrupt_id = client_tool_id(call_id)
    metadata: dict[str, Any] = {
        "kind": "client_tool",
        "toolName": tool.name,
        "input": args,
        BINDING_KEY: {
            "v": 1,
            "kind": "client-tool-execution",
            "interruptId": interrupt_id,
            "toolName": tool.name,
            "toolCallId": call_id,
            "outputSchemaHash": output_hash(tool),
            "responseSchemaHash": schema_hash(schema),
            "interruptedRunId": run_id,
            "generation": 0,
        },
    }
    if decision is not None and decision.proof is not None:
        metadata[PROOF_KEY] = dict(decision.proof)
    return {
        "id": interrupt_id,
        "reason": CLIENT_TOOL_REASON,
        "message": f"Client tool {tool.name} is ready to run",
        "toolCallId": call_id,
        "responseSchema": schema,
        "metadata": metadata,
    }


def generic_descriptor(
    request: InterruptRequest,
    batch_index: int,
    interrupt_id: str,
    run_id: str,
    *,
    boundary: str | None = None,
) -> Descriptor:
    """The question of the application; ``batch_index`` is its place in the whole batch,
    ``boundary`` where it is asked."""
    definition = request.definition
    binding: dict[str, Any] = {
        "v": 1,
        "kind": "generic",
        "interruptId": interrupt_id,
        "definitionId": definition.id,
        "key": request.key,
        "batchIndex": batch_index,
    }
    out: Descriptor = {
        "id": interrupt_id,
        "reason": request.reason,
        "message": request.message,
    }
    if definition.response_schema is not None:
        out["responseSchema"] = definition.response_schema
        binding["responseSchemaHash"] = definition.response_hash
    if definition.payload_schema is not None:
        binding["payloadSchemaHash"] = definition.payload_hash
    if request.expires_at is not None:
        out["expiresAt"] = binding["expiresAt"] = request.expires_at
    binding["interruptedRunId"] = run_id
    binding["generation"] = 0
    metadata: dict[str, Any] = {BINDING_KEY: binding}
    if request.payload is not UNSET:
        metadata[PAYLOAD_KEY] = request.payload
    if boundary is not None:
        metadata[BOUNDARY_KEY] = boundary
    return {**out, "metadata": metadata}


def approval_proof(descriptor: Mapping[str, Any], decision: Decision) -> dict[str, Any]:
    """What a browser tool's descriptor keeps of the approval before it: which one it was, the
    schemas it was asked with, and what was decided."""
    binding = cast("Mapping[str, Any]", metadata_of(descriptor)[BINDING_KEY])
    kept = ("interruptId", "interruptedRunId", "generation", "toolName", "toolCallId",
            "inputSchemaHash", "approvalSchemaHash", "responseSchemaHash")  # fmt: skip
    said: dict[str, Any] = {"approved": decision.approved}
    if decision.edited_args is not UNSET:
        said["editedArgs"] = decision.edited_args
    if decision.payload is not UNSET:
        said["payload"] = decision.payload
    return {"v": 1, **{key: binding[key] for key in kept}, "decision": said}


class Batch:
    """The interrupts of one pause: approvals, then client tools, then generic ones.

    ``run_id`` is the id of the run that pauses. ``taken`` are ids of interrupts that it asked
    earlier (a run that goes on under its own id): a question with such an id gets another one, as
    ``approval_c1~2``.
    """

    def __init__(self, run_id: str, taken: Collection[str] = ()) -> None:
        self.run_id = run_id
        self._taken = taken
        self._approvals: list[Descriptor] = []
        self._client_tools: list[Descriptor] = []
        self._generic: list[Callable[[int], Descriptor]] = []
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def approval(self, tool: Tool, call_id: str, args: Any) -> None:
        """Ask whether a call may be executed.

        Raises:
            ToolError: the batch has this interrupt already.
        """
        self._take(approval_id(call_id))
        self._approvals.append(self._free(approval_descriptor(tool, call_id, args, self.run_id)))

    def client_tool(
        self, tool: Tool, call_id: str, args: Any, *, decision: Decision | None = None
    ) -> None:
        """Wait for what a browser's tool returns.

        Raises:
            ToolError: the batch has this interrupt already.
        """
        self._take(client_tool_id(call_id))
        descriptor = client_tool_descriptor(tool, call_id, args, self.run_id, decision=decision)
        self._client_tools.append(self._free(descriptor))

    def generic(
        self,
        request: InterruptRequest,
        interrupt_id: str | None = None,
        *,
        boundary: str | None = None,
    ) -> None:
        """Ask a question of the application; without an id it gets a fresh one.

        Raises:
            ToolError: the batch has this interrupt already, or it is no request.
        """
        given: object = request
        if not isinstance(given, InterruptRequest):
            raise ToolError(f"not an interrupt request: {given!r}; use definition.request(…)")
        name = interrupt_id or f"interrupt-{uuid.uuid4()}"
        self._take(name)
        self._generic.append(
            lambda index: generic_descriptor(request, index, name, self.run_id, boundary=boundary)
        )

    def descriptors(self) -> list[Descriptor]:
        """The descriptors in their order; ``batchIndex`` counts over all of them."""
        tools = [*self._approvals, *self._client_tools]
        return tools + [make(len(tools) + place) for place, make in enumerate(self._generic)]

    def _free(self, descriptor: Descriptor) -> Descriptor:
        name: str = descriptor["id"]
        if name not in self._taken:
            return descriptor
        numbers = itertools.count(2)
        fresh = next(free for n in numbers if (free := f"{name}~{n}") not in self._taken)
        metadata = descriptor["metadata"]
        binding = {**metadata[BINDING_KEY], "interruptId": fresh}
        return {**descriptor, "id": fresh, "metadata": {**metadata, BINDING_KEY: binding}}

    def _take(self, interrupt_id: str) -> None:
        if interrupt_id in self._ids:
            raise ToolError(f"two interrupts of one pause are called {interrupt_id!r}")
        self._ids.add(interrupt_id)
