"""What a resume is made of: entries that a caller sends, and the state that they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from chatkeep.codec import normalize
from chatkeep.engine.interrupts.bindings import Descriptor
from chatkeep.records import UNSET, Unset

__all__ = [
    "CANCELLED_TEXT",
    "DECLINED_TEXT",
    "Decision",
    "GenericAnswer",
    "PendingInterrupt",
    "ResumeEntry",
    "ResumeState",
    "denial_result",
    "resume_answer",
    "resume_approve",
    "resume_cancel",
    "resume_deny",
    "resume_error",
    "resume_output",
]

ResumeEntry: TypeAlias = dict[str, Any]
"""``interruptId``, ``status`` (``resolved`` or ``cancelled``), ``payload``?, ``metadata``?."""

DECLINED_TEXT: Final = "User declined tool execution"
"""The error of a call that a person refused without saying more."""

CANCELLED_TEXT: Final = "Tool execution cancelled"
"""The error of a call whose question was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a person decided about a call.

    ``edited_args`` replace the model's arguments; UNSET: they stay. ``payload`` is what was said
    along with yes or no. ``proof`` names the approval, for the second step of a browser's tool:
    :func:`client_tool_descriptor` puts it into the descriptor.
    """

    approved: bool
    edited_args: Any | Unset = UNSET
    payload: Any | Unset = UNSET
    proof: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericAnswer:
    """A generic interrupt that was answered: the question, and ``response``.

    ``response`` is None when ``status`` is ``cancelled``. ``payload`` is what was shown, or
    UNSET; ``expires_at`` ISO 8601 text, or None; ``boundary`` where it was asked, or None where
    nobody kept that.
    """

    definition_id: str
    key: str
    interrupt_id: str
    batch_index: int
    status: Literal["resolved", "cancelled"]
    response: Any = None
    reason: str = ""
    message: str = ""
    payload: Any | Unset = UNSET
    expires_at: str | None = None
    boundary: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingInterrupt:
    """One interrupt that waits: its identity, and its descriptor.

    ``decision`` is the earlier one of a browser's tool that needed an approval first.
    """

    interrupt_id: str
    run_id: str
    descriptor: Descriptor
    decision: Decision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What the tool phase and the middleware go by in a run that continues a paused one.

    Calls are named by their call id. ``client_results`` are what a browser's tools returned (JSON
    that fits the output schema), ``client_errors`` the texts of those that failed. ``cancelled``
    are calls whose question was cancelled. ``generic`` stand in the order in which they were
    asked. ``superseded`` are interrupts of browser tools that were left open, because the batch
    had generic questions: the continuation asks them again. ``taken`` are ids of interrupts that
    this run has asked before, where it goes on under its own id.
    """

    interrupted_run_id: str
    approvals: Mapping[str, Decision] = field(default_factory=dict[str, Decision])
    client_results: Mapping[str, Any] = field(default_factory=dict[str, Any])
    client_errors: Mapping[str, str] = field(default_factory=dict[str, str])
    cancelled: frozenset[str] = frozenset()
    generic: tuple[GenericAnswer, ...] = ()
    superseded: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()


def denial_result(decision: Decision) -> Any:
    """The result of a call that was refused: what was said along with no, else an error."""
    return {"error": DECLINED_TEXT} if decision.payload is UNSET else decision.payload


def resume_approve(
    interrupt_id: str, *, edited_args: Any = UNSET, payload: Any = UNSET
) -> ResumeEntry:
    """The entry that approves a call, perhaps with other arguments.

    Raises:
        InvalidValue: a value that is not JSON.
    """
    return _decided(interrupt_id, approved=True, edited_args=edited_args, payload=payload)


def resume_deny(interrupt_id: str, *, payload: Any = UNSET) -> ResumeEntry:
    """The entry that refuses a call.

    Raises:
        InvalidValue: a payload that is not JSON.
    """
    return _decided(interrupt_id, approved=False, edited_args=UNSET, payload=payload)


def resume_output(interrupt_id: str, output: Any) -> ResumeEntry:
    """The entry with what a browser's tool returned.

    Raises:
        InvalidValue: an output that is not JSON.
    """
    return _resolved(interrupt_id, output)


def resume_error(interrupt_id: str, text: str) -> ResumeEntry:
    """The entry that says that a browser's tool failed, and how."""
    return {
        **_resolved(interrupt_id, {"error": text}),
        "metadata": {"tanstack": {"state": "output-error"}},
    }


def resume_answer(interrupt_id: str, response: Any) -> ResumeEntry:
    """The entry that answers a generic interrupt.

    Raises:
        InvalidValue: a response that is not JSON.
    """
    return _resolved(interrupt_id, response)


def resume_cancel(interrupt_id: str) -> ResumeEntry:
    """The entry that cancels an interrupt: its call is not executed, its question goes."""
    return {"interruptId": interrupt_id, "status": "cancelled"}


def _resolved(interrupt_id: str, payload: Any) -> ResumeEntry:
    return {
        "interruptId": interrupt_id,
        "status": "resolved",
        "payload": normalize(payload, "$.payload"),
    }


def _decided(interrupt_id: str, *, approved: bool, edited_args: Any, payload: Any) -> ResumeEntry:
    said: dict[str, Any] = {"approved": approved}
    if edited_args is not UNSET:
        said["editedArgs"] = edited_args
    if payload is not UNSET:
        said["payload"] = payload
    return _resolved(interrupt_id, said)
