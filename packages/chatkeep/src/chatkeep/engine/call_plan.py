"""What is to become of each call of a batch, before anything is executed.

Read from top to bottom, the first that applies:

1. its question was cancelled, or everything is: a failed result that says so;
2. it was refused: what was said along with no, or the default, as a failed result;
3. a browser has given its result, or its error: that;
4. the tool is unknown, or the arguments are no JSON or do not fit: a failed result;
5. it needs an approval that nobody gave yet: it asks for one;
6. the tool runs in the browser: it asks for that, with edited arguments in place;
7. another call of the batch asks for an approval, and this one needs none: it waits. People
   approve or refuse a whole turn, so nothing of it runs behind their back;
8. it is executed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from chatkeep.engine.calls import Call, ResultOutcome
from chatkeep.engine.failure import error_text, is_foreign
from chatkeep.engine.interrupts import CANCELLED_TEXT, Decision, ResumeState, denial_result
from chatkeep.engine.tools import Tool
from chatkeep.records import UNSET

__all__ = ["CallPlan", "Planner", "Verdict"]

_MAX_QUOTED: Final = 500


class Verdict(enum.Enum):
    """What a call waits for, or gets."""

    EXECUTE = "execute"
    RESULT = "result"
    FAILED = "failed"
    ASK_APPROVAL = "ask-approval"
    ASK_CLIENT = "ask-client"
    LATER = "later"


@dataclass(slots=True)
class CallPlan:
    """One call of a batch. ``args`` are what it is executed or asked with; ``value`` is the
    result of a call that has one already, ``outcome`` what was decided about it. ``decision``
    is the approval it was given."""

    call: Call
    tool: Tool | None
    verdict: Verdict
    args: Any = None
    value: Any = None
    outcome: ResultOutcome | None = None
    decision: Decision | None = None

    @property
    def asks(self) -> bool:
        """Whether it pauses the run."""
        return self.verdict in {Verdict.ASK_APPROVAL, Verdict.ASK_CLIENT}


class Planner:
    """Plans batches for one set of tools and answers.

    ``report`` is told of an exception that a tool's own validator raised.
    """

    __slots__ = ("_answers", "_cancel_all", "_report", "_tools")

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        answers: ResumeState | None,
        cancel_all: bool,
        report: Callable[[Call, BaseException], None],
    ) -> None:
        self._tools = tools
        self._answers = answers or ResumeState(interrupted_run_id="")
        self._cancel_all = cancel_all
        self._report = report

    def plan(self, calls: Sequence[Call]) -> list[CallPlan]:
        """The plan of each call, in call order."""
        plans = [self._given(call) or self._fresh(call) for call in calls]
        if any(plan.verdict is Verdict.ASK_APPROVAL for plan in plans):
            for plan in plans:
                # What was approved already is not held back: its answer counts only once.
                if plan.verdict is Verdict.EXECUTE and plan.decision is None:
                    plan.verdict = Verdict.LATER
        return plans

    def _given(self, call: Call) -> CallPlan | None:
        """The plan of a call whose result is there already."""
        answers, name = self._answers, call.identity
        decision = answers.approvals.get(name)
        tool = self._tools.get(call.name)
        if self._cancel_all or name in answers.cancelled:
            error = {"error": CANCELLED_TEXT}
            return CallPlan(call, tool, Verdict.FAILED, value=error, outcome="cancelled")
        if decision is not None and not decision.approved:
            said = denial_result(decision)
            return CallPlan(call, tool, Verdict.FAILED, value=said, outcome="denied")
        if name in answers.client_errors:
            return CallPlan(
                call, tool, Verdict.FAILED, value={"error": answers.client_errors[name]}
            )
        if name in answers.client_results and tool is not None:
            return CallPlan(call, tool, Verdict.RESULT, value=answers.client_results[name])
        return None

    def _fresh(self, call: Call) -> CallPlan:
        tool = self._tools.get(call.name)
        if tool is None:
            return _failed(call, None, f"Unknown tool: {call.name}")
        decision = self._answers.approvals.get(call.identity)
        plan = CallPlan(call, tool, Verdict.EXECUTE, decision=decision)
        if decision is not None and decision.edited_args is not UNSET:
            plan.args = decision.edited_args
        else:
            try:
                plan.args = call.parse()
            except ValueError as error:
                text = call.text
                quoted = text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"
                said = f"Arguments of tool {call.name} are not JSON ({error}): {quoted}"
                return _failed(call, tool, said)
        issue = self.issue(call, tool, plan.args)
        if issue is not None:
            return _failed(call, tool, issue)
        if tool.needs_approval and decision is None:
            plan.verdict = Verdict.ASK_APPROVAL
        elif tool.is_client:
            plan.verdict = Verdict.ASK_CLIENT
        return plan

    def issue(self, call: Call, tool: Tool, args: Any) -> str | None:
        """Why ``tool`` cannot be called with ``args``; None when it can."""
        if tool.from_request:
            return None  # a browser's schema is not to be trusted with our time
        try:
            tool.check_input(args)
        except Exception as error:  # noqa: BLE001 - validators are the tool's own code
            if is_foreign(error):
                self._report(call, error)
            return f"Input validation failed for tool {tool.name}: {error_text(error)}"
        return None


def _failed(call: Call, tool: Tool | None, message: str) -> CallPlan:
    return CallPlan(call, tool, Verdict.FAILED, value={"error": message})
