"""What an interrupt says about itself: the binding that a descriptor carries, and who owns it.

A *descriptor* is the JSON object of one interrupt: in the terminal event of a pause, in the
store, and in what a reload gets. Its *binding* ties it to a run, to a call or a definition, and
to hashes of the schemas that its answer must fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from chatkeep.engine.text import whole_text
from chatkeep.scope import MAX_ID_BYTES, key_digest

__all__ = [
    "APPROVAL_REASON",
    "BINDING_KEY",
    "BOUNDARY_KEY",
    "CLIENT_TOOL_REASON",
    "CONTINUATION_KEY",
    "PAYLOAD_KEY",
    "PROOF_KEY",
    "Binding",
    "BindingKind",
    "Descriptor",
    "approval_id",
    "client_tool_id",
    "is_descriptor",
    "owned",
    "parse_binding",
]

BINDING_KEY: Final = "tanstack:interruptBinding"
"""Metadata key of a descriptor that a chat engine of this family raised."""

PAYLOAD_KEY: Final = "tanstack:interruptPayload"
"""Metadata key of what a generic interrupt shows to the person who answers."""

CONTINUATION_KEY: Final = "tanstack:interruptContinuation"
"""Metadata key of a resume entry: what a client repeats of a generic interrupt."""

PROOF_KEY: Final = "chatkeep:approvalProof"
"""Metadata key of a client tool's descriptor: the approval that went before it."""

BOUNDARY_KEY: Final = "chatkeep:boundary"
"""Metadata key of a generic descriptor: the boundary at which it was asked."""

APPROVAL_REASON: Final = "tool_call"
CLIENT_TOOL_REASON: Final = "tanstack:client_tool_execution"

BindingKind: TypeAlias = Literal["tool-approval", "client-tool-execution", "generic"]

Descriptor: TypeAlias = dict[str, Any]
"""``id``, ``reason``, ``message``, ``toolCallId``?, ``responseSchema``?, ``expiresAt``? (ISO
8601), ``metadata``. Nothing is null for being absent."""

_OWN_KINDS: Final = frozenset({"approval", "client_tool"})
_KINDS: Final = frozenset({"tool-approval", "client-tool-execution", "generic"})


_LONGEST: Final = MAX_ID_BYTES - 24
"""Room for the number of a question that a run asks again under its own id."""


def approval_id(call_id: str) -> str:
    """The id of the interrupt that asks whether a call may be executed."""
    return _of_call("approval", call_id)


def client_tool_id(call_id: str) -> str:
    """The id of the interrupt that waits for what a browser's tool returns."""
    return _of_call("client_tool", call_id)


def _of_call(kind: str, call_id: str) -> str:
    """Ids of calls are the provider's, of any length: one that makes no id that a store takes is
    stood for by its digest."""
    name = f"{kind}_{call_id}"
    raw = name.encode("utf-8", "surrogatepass")
    if len(raw) <= _LONGEST and "\x00" not in name:
        return name
    return f"{kind}_{key_digest(whole_text(call_id)).hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A binding as read back. Tool interrupts have ``tool_name`` and ``tool_call_id``, generic
    ones ``definition_id``, ``key`` and ``batch_index`` (-1: it says none); a hash that a kind
    has not is None."""

    kind: BindingKind
    interrupt_id: str
    interrupted_run_id: str
    generation: int = 0
    tool_name: str = ""
    tool_call_id: str = ""
    original_args: Any = None
    input_schema_hash: str | None = None
    output_schema_hash: str | None = None
    approval_schema_hash: str | None = None
    response_schema_hash: str | None = None
    payload_schema_hash: str | None = None
    definition_id: str = ""
    key: str = ""
    batch_index: int = -1
    expires_at: Any = None


def is_descriptor(value: object) -> bool:
    """Whether ``value`` is a descriptor: an object with text ``id``, ``reason``, ``message``."""
    if not isinstance(value, Mapping):
        return False
    row = cast("Mapping[str, Any]", value)
    return all(isinstance(row.get(key), str) for key in ("id", "reason", "message"))


def metadata_of(descriptor: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata of a descriptor; empty where it has none that is an object."""
    metadata = descriptor.get("metadata")
    return cast("Mapping[str, Any]", metadata) if isinstance(metadata, Mapping) else {}


def owned(descriptor: Mapping[str, Any]) -> bool:
    """Whether a pending interrupt gates the chat. Only a well-formed descriptor with none of
    our marks is somebody else's; an opaque record is ours."""
    if not is_descriptor(descriptor) or isinstance(descriptor.get("toolCallId"), str):
        return True
    marks = metadata_of(descriptor)
    kind = marks.get("kind")
    return (isinstance(kind, str) and kind in _OWN_KINDS) or BINDING_KEY in marks


def parse_binding(descriptor: Mapping[str, Any]) -> Binding | None:
    """The binding of a descriptor; None when it has none, or one that is incomplete, of an
    unknown kind or of another version than 1."""
    raw = metadata_of(descriptor).get(BINDING_KEY)
    if not isinstance(raw, Mapping):
        return None
    row = cast("Mapping[str, Any]", raw)
    version, kind = row.get("v"), row.get("kind")
    if not _is_int(version) or version != 1 or not isinstance(kind, str) or kind not in _KINDS:
        return None
    if not _texts(row, _REQUIRED[kind]) or not _is_int(row.get("generation")):
        return None
    if not _texts(row, _OPTIONAL[kind] & row.keys()):
        return None
    if kind == "tool-approval" and "originalArgs" not in row:
        return None
    index = row.get("batchIndex")
    return Binding(
        kind=cast("BindingKind", kind),
        interrupt_id=row["interruptId"],
        interrupted_run_id=row["interruptedRunId"],
        generation=row["generation"],
        tool_name=row.get("toolName", ""),
        tool_call_id=row.get("toolCallId", ""),
        original_args=row.get("originalArgs"),
        input_schema_hash=row.get("inputSchemaHash"),
        output_schema_hash=row.get("outputSchemaHash"),
        approval_schema_hash=row.get("approvalSchemaHash"),
        response_schema_hash=row.get("responseSchemaHash"),
        payload_schema_hash=row.get("payloadSchemaHash"),
        definition_id=row.get("definitionId", ""),
        key=row.get("key", ""),
        batch_index=cast("int", index) if _is_int(index) else -1,
        expires_at=row.get("expiresAt"),
    )


_COMMON: Final = frozenset({"interruptId", "interruptedRunId"})
_TOOL: Final = _COMMON | {"toolName", "toolCallId", "responseSchemaHash"}
_REQUIRED: Final[Mapping[str, frozenset[str]]] = {
    "tool-approval": _TOOL | {"inputSchemaHash", "approvalSchemaHash"},
    "client-tool-execution": _TOOL | {"outputSchemaHash"},
    "generic": _COMMON | {"definitionId", "key"},
}
_OPTIONAL: Final[Mapping[str, frozenset[str]]] = {
    "tool-approval": frozenset(),
    "client-tool-execution": frozenset({"inputSchemaHash"}),
    "generic": frozenset({"responseSchemaHash", "payloadSchemaHash"}),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(row: Mapping[str, Any], keys: frozenset[str]) -> bool:
    return all(isinstance(row.get(key), str) for key in keys)
