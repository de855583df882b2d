"""Interrupts: the rules of pauses and answers, without a loop, a store or any I/O.

A run that needs a person pauses with a *batch* of interrupts. Three kinds exist: approvals of
tool calls, tools that run in the browser, and generic questions of the application. A later
request resumes it with one answer for each.
"""

from __future__ import annotations

from chatkeep.engine.interrupts.bindings import (
    APPROVAL_REASON,
    BINDING_KEY,
    CLIENT_TOOL_REASON,
    CONTINUATION_KEY,
    PAYLOAD_KEY,
    PROOF_KEY,
    Binding,
    BindingKind,
    Descriptor,
    approval_id,
    client_tool_id,
    is_descriptor,
    owned,
    parse_binding,
)
from chatkeep.engine.interrupts.canonical import canonical_hash, canonical_json, schema_hash
from chatkeep.engine.interrupts.definitions import (
    InterruptDefinition,
    InterruptRequest,
    define_interrupt,
    definitions_by_id,
)
from chatkeep.engine.interrupts.descriptors import (
    Batch,
    approval_descriptor,
    approval_proof,
    client_tool_descriptor,
    generic_descriptor,
)
from chatkeep.engine.interrupts.resume import (
    CANCELLED_TEXT,
    DECLINED_TEXT,
    Decision,
    GenericAnswer,
    PendingInterrupt,
    ResumeEntry,
    ResumeState,
    denial_result,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)

__all__ = [
    "APPROVAL_REASON",
    "BINDING_KEY",
    "CANCELLED_TEXT",
    "CLIENT_TOOL_REASON",
    "CONTINUATION_KEY",
    "DECLINED_TEXT",
    "PAYLOAD_KEY",
    "PROOF_KEY",
    "Batch",
    "Binding",
    "BindingKind",
    "Decision",
    "Descriptor",
    "GenericAnswer",
    "InterruptDefinition",
    "InterruptRequest",
    "PendingInterrupt",
    "ResumeEntry",
    "ResumeState",
    "approval_descriptor",
    "approval_id",
    "approval_proof",
    "canonical_hash",
    "canonical_json",
    "client_tool_descriptor",
    "client_tool_id",
    "define_interrupt",
    "definitions_by_id",
    "denial_result",
    "generic_descriptor",
    "is_descriptor",
    "owned",
    "parse_binding",
    "resume_answer",
    "resume_approve",
    "resume_cancel",
    "resume_deny",
    "resume_error",
    "resume_output",
    "schema_hash",
]
