"""An answer that was taken: what it claims at the start and settles at the next boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chatkeep.engine.interrupts import Refusal, ResumeState, submitted_ids
from chatkeep.errors import InterruptResumeError
from chatkeep.records import UNSET, InterruptRecord
from chatkeep.stores import InterruptAnswer, InterruptRef

__all__ = ["Resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A batch that was found valid. ``run_id`` is the run that paused, ``state`` what the
    engine goes by.

    Every interrupt of the batch is claimed before anything executes, and settled with the next
    success boundary. A browser's tool that was left unanswered beside generic questions is
    settled as cancelled: the continuation asks it again.
    """

    thread_id: str
    run_id: str
    state: ResumeState
    sent: tuple[str, ...]
    claims: tuple[InterruptRef, ...]
    answers: tuple[InterruptAnswer, ...]

    @classmethod
    def of(
        cls,
        batch: Sequence[InterruptRecord],
        entries: Sequence[Mapping[str, Any]],
        state: ResumeState,
    ) -> Resume:
        """The resume of the records of one run whose entries are valid."""
        by_id = {entry.get("interruptId"): entry for entry in entries}
        return cls(
            thread_id=batch[0].thread_id,
            run_id=batch[0].run_id,
            state=state,
            sent=tuple(submitted_ids(entries)),
            claims=tuple(
                InterruptRef(interrupt_id=record.interrupt_id, run_id=record.run_id)
                for record in batch
            ),
            answers=tuple(_answer(record, by_id.get(record.interrupt_id)) for record in batch),
        )

    def lost_to_another(self, contested: Sequence[str]) -> InterruptResumeError:
        """The refusal when somebody else's answer came first. Nothing was executed here."""
        refusal = Refusal(self.thread_id, self.run_id, self.sent)
        named = [name for name in self.sent if name in contested]
        for name in named or self.sent:
            refusal.item(
                name,
                "conflict",
                f"Interrupt {name} was answered somewhere else.",
                source="server",
            )
        return refusal.batch(
            "conflict", "Another answer to these questions came first.", source="server"
        ).error()


def _answer(record: InterruptRecord, entry: Mapping[str, Any] | None) -> InterruptAnswer:
    resolved = entry is not None and entry.get("status") == "resolved"
    return InterruptAnswer(
        interrupt_id=record.interrupt_id,
        run_id=record.run_id,
        status="resolved" if resolved else "cancelled",
        response=entry.get("payload", UNSET) if entry is not None and resolved else UNSET,
    )
