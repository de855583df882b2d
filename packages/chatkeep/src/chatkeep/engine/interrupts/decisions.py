"""What a person decided about a call: yes, perhaps with other arguments, or no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

from chatkeep.codec import normalize
from chatkeep.engine.interrupts.refusals import ItemCode
from chatkeep.engine.interrupts.resume import Decision
from chatkeep.engine.schema import Problem
from chatkeep.engine.tools import InvalidArguments, Tool
from chatkeep.errors import InvalidValue
from chatkeep.records import UNSET

__all__ = ["Fault", "read_decision"]

_ENVELOPE: Final = frozenset({"approved", "editedArgs", "payload"})


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a decision, and the code that says so."""

    code: ItemCode
    problem: Problem


def read_decision(tool: Tool, payload: Any) -> Decision | list[Fault]:
    """The decision that ``payload`` says about a call of ``tool``; otherwise everything that is
    wrong with it.

    A boolean decides where nothing has to be said along. Otherwise it is an object with
    ``approved`` and, where the tool's schemas ask for them, ``editedArgs`` and ``payload``: the
    same as the response schema of the interrupt.
    """
    try:
        said = normalize(payload, "$.payload")
    except InvalidValue as error:
        return [_payload(str(error))]
    if isinstance(said, bool):
        said = {"approved": said}
    approved = cast("dict[str, Any]", said).get("approved") if isinstance(said, dict) else None
    if not isinstance(approved, bool) or not cast("dict[str, Any]", said).keys() <= _ENVELOPE:
        return [_payload("it is neither a boolean nor {approved: boolean}")]
    envelope = cast("dict[str, Any]", said)
    edited_args = envelope.get("editedArgs", UNSET)
    beside = envelope.get("payload", UNSET)
    faults = [
        fault
        for fault in (
            _beside_fault(tool, beside, approved=approved),
            None if edited_args is UNSET else _edited_fault(tool, edited_args, approved=approved),
        )
        if fault is not None
    ]
    return faults or Decision(approved=approved, edited_args=edited_args, payload=beside)


def _payload(message: str) -> Fault:
    return Fault("invalid-payload", Problem(message))


def _beside_fault(tool: Tool, payload: Any, *, approved: bool) -> Fault | None:
    branch = tool.approval_branches[0 if approved else 1]
    word = "an approval" if approved else "a refusal"
    if payload is UNSET:
        return None if branch is None else _payload(f"{word} of {tool.name} needs a payload")
    if branch is None:
        return _payload(f"{word} of {tool.name} takes no payload")
    problem = tool.approval_problem(payload, approved=approved)
    return None if problem is None else Fault("invalid-payload", problem)


def _edited_fault(tool: Tool, edited_args: Any, *, approved: bool) -> Fault | None:
    if not approved:
        return _payload("a refusal cannot edit arguments")
    if tool.input_schema is None:
        message = f"tool {tool.name} has no input schema: its arguments cannot be edited"
        return Fault("invalid-edited-args", Problem(message))
    try:
        tool.check_input(edited_args)
    except InvalidArguments as error:
        return Fault("invalid-edited-args", Problem(str(error)))
    return None
