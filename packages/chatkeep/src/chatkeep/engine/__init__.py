"""The chat engine: a model, tools and middleware become one stream of AG-UI 1.0 events.

It knows nothing of stores: :mod:`chatkeep.persistence` is one of its middlewares.
"""

from __future__ import annotations

from chatkeep.engine.abort import CANCEL_REQUESTED, HAND_OVER, AbortSignal
from chatkeep.engine.adapter import ModelAdapter, ModelRequest, model_finished
from chatkeep.engine.chat import DEFAULT_MAX_TURNS, ChatStream, chat
from chatkeep.engine.failure import Failure, failure_of
from chatkeep.engine.interrupts import (
    Decision,
    GenericAnswer,
    InterruptDefinition,
    InterruptRequest,
    Resolutions,
    ResumeEntry,
    ResumeState,
    define_interrupt,
    resume_answer,
    resume_approve,
    resume_cancel,
    resume_deny,
    resume_error,
    resume_output,
)
from chatkeep.engine.middleware import (
    DROP,
    AbortInfo,
    BeforeToolDecision,
    Capability,
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    ErrorInfo,
    Event,
    FinishInfo,
    FinishReason,
    InterruptBoundary,
    LoopState,
    Phase,
    ResumePolicy,
    ToolCallInfo,
    ToolOutcome,
    ToolPhaseInfo,
    Usage,
    WaitingCall,
)
from chatkeep.engine.options import LoopStrategy
from chatkeep.engine.structured_answer import StructuredMode
from chatkeep.engine.tool_phase import ToolExecution
from chatkeep.engine.tools import Tool, ToolContext, client_tool, define_tool, tool
from chatkeep.engine.usage import add_usage

__all__ = [
    "CANCEL_REQUESTED",
    "DEFAULT_MAX_TURNS",
    "DROP",
    "HAND_OVER",
    "AbortInfo",
    "AbortSignal",
    "BeforeToolDecision",
    "Capability",
    "ChatConfig",
    "ChatContext",
    "ChatMiddleware",
    "ChatStream",
    "Decision",
    "ErrorInfo",
    "Event",
    "Failure",
    "FinishInfo",
    "FinishReason",
    "GenericAnswer",
    "InterruptBoundary",
    "InterruptDefinition",
    "InterruptRequest",
    "LoopState",
    "LoopStrategy",
    "ModelAdapter",
    "ModelRequest",
    "Phase",
    "Resolutions",
    "ResumeEntry",
    "ResumePolicy",
    "ResumeState",
    "StructuredMode",
    "Tool",
    "ToolCallInfo",
    "ToolContext",
    "ToolExecution",
    "ToolOutcome",
    "ToolPhaseInfo",
    "Usage",
    "WaitingCall",
    "add_usage",
    "chat",
    "client_tool",
    "define_interrupt",
    "define_tool",
    "failure_of",
    "model_finished",
    "resume_answer",
    "resume_approve",
    "resume_cancel",
    "resume_deny",
    "resume_error",
    "resume_output",
    "tool",
]
