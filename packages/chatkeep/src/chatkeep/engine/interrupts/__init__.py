"""Interrupts: the rules of pauses and answers, without a loop, a store or any I/O.

A run that needs a person pauses with a *batch* of interrupts. Three kinds exist: approvals of
tool calls, tools that run in the browser, and generic questions of the application. A later
request resumes it with one answer for each.
"""

from __future__ import annotations

from chatkeep.engine.interrupts.bindings import (
    APPROVAL_REASON,
    BINDING_KEY,
    BOUNDARY_KEY,
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
from chatkeep.engine.interrupts.history import pending_from_history, resume_from_history
from chatkeep.engine.interrupts.outputs import posted_failures
from chatkeep.engine.interrupts.proofs import parse_proof, replay_approval
from chatkeep.engine.interrupts.refusals import BatchCode, ItemCode, Refusal, Source, submitted_ids
from chatkeep.engine.interrupts.resolutions import Resolutions
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
from chatkeep.engine.interrupts.validation import (
    check_generic,
    may_be_missing,
    validate_resume,
)

__all__ = [
    "APPROVAL_REASON",
    "BINDING_KEY",
    "BOUNDARY_KEY",
    "CANCELLED_TEXT",
    "CLIENT_TOOL_REASON",
    "CONTINUATION_KEY",
    "DECLINED_TEXT",
    "PAYLOAD_KEY",
    "PROOF_KEY",
    "Batch",
    "BatchCode",
    "Binding",
    "BindingKind",
    "Decision",
    "Descriptor",
    "GenericAnswer",
    "InterruptDefinition",
    "InterruptRequest",
    "ItemCode",
    "PendingInterrupt",
    "Refusal",
    "Resolutions",
    "ResumeEntry",
    "ResumeState",
    "Source",
    "approval_descriptor",
    "approval_id",
    "approval_proof",
    "canonical_hash",
    "canonical_json",
    "check_generic",
    "client_tool_descriptor",
    "client_tool_id",
    "define_interrupt",
    "definitions_by_id",
    "denial_result",
    "generic_descriptor",
    "is_descriptor",
    "may_be_missing",
    "owned",
    "parse_binding",
    "parse_proof",
    "pending_from_history",
    "posted_failures",
    "replay_approval",
    "resume_answer",
    "resume_approve",
    "resume_cancel",
    "resume_deny",
    "resume_error",
    "resume_from_history",
    "resume_output",
    "schema_hash",
    "submitted_ids",
    "validate_resume",
]
