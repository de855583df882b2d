"""What a run's record becomes at its boundaries, and the questions that a pause leaves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ag_ui.core import RunFinishedEvent, RunFinishedInterruptOutcome

from chatkeep.engine.failure import error_text
from chatkeep.engine.middleware import Event
from chatkeep.records import InterruptRecord, ModelMessage, RunError, RunPatch
from chatkeep.stores import InterruptAnswer

__all__ = ["ended", "failure_of", "now_ms", "parked", "questions", "up_to_last_result", "withdrawn"]


def now_ms() -> int:
    """This worker's clock, epoch milliseconds."""
    return time.time_ns() // 1_000_000


def ended(
    status: Literal["completed", "failed", "aborted"],
    *,
    usage: Mapping[str, Any] | None,
    error: RunError | None = None,
) -> RunPatch:
    """The run has ended. It is no detached one any more."""
    values: dict[str, Any] = {
        "status": status,
        "finished_at": now_ms(),
        "detached_since": None,
    }
    if error is not None:
        values["error"] = error
    if usage is not None:
        values["usage"] = usage
    return RunPatch(**values)


def parked(usage: Mapping[str, Any] | None) -> RunPatch:
    """The run waits for a human: nobody drives it, and it has not ended."""
    values: dict[str, Any] = {"status": "interrupted", "lease": None}
    if usage is not None:
        values["usage"] = usage
    return RunPatch(**values)


def questions(event: Event, *, thread_id: str, run_id: str) -> list[InterruptRecord]:
    """The interrupts of a terminal event, each with its descriptor as it will be published."""
    outcome = event.outcome if isinstance(event, RunFinishedEvent) else None
    if not isinstance(outcome, RunFinishedInterruptOutcome):
        return []
    return [
        InterruptRecord(
            interrupt_id=interrupt.id,
            run_id=run_id,
            thread_id=thread_id,
            requested_at=now_ms(),
            payload=interrupt.model_dump(by_alias=True, exclude_none=True),
        )
        for interrupt in outcome.interrupts
    ]


def withdrawn(records: Iterable[InterruptRecord]) -> list[InterruptAnswer]:
    """What settles questions that nobody is to answer any more."""
    return [
        InterruptAnswer(interrupt_id=r.interrupt_id, run_id=r.run_id, status="cancelled")
        for r in records
    ]


def failure_of(error: BaseException) -> RunError:
    """An exception as a run's record keeps it."""
    code = getattr(error, "code", None)
    return RunError(message=error_text(error), code=code if isinstance(code, str) else None)


def up_to_last_result(produced: Sequence[ModelMessage]) -> list[ModelMessage]:
    """Without the answer at the end: what tools did stays, whatever was said about it."""
    end = len(produced)
    while end and produced[end - 1].get("role") != "tool":
        end -= 1
    return list(produced[:end])
