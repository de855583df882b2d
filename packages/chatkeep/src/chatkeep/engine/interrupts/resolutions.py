"""The generic answers of a resume, as ``on_interrupt_resolution`` gets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from chatkeep.engine.interrupts.definitions import InterruptDefinition
from chatkeep.engine.interrupts.resume import GenericAnswer

__all__ = ["Resolutions"]


class Resolutions:
    """Which generic questions were answered, and how."""

    __slots__ = ("_answers",)

    def __init__(self, answers: Iterable[GenericAnswer]) -> None:
        self._answers = tuple(answers)

    def __len__(self) -> int:
        return len(self._answers)

    def __repr__(self) -> str:
        return f"Resolutions({[(a.definition_id, a.key, a.status) for a in self._answers]!r})"

    def all(self) -> tuple[GenericAnswer, ...]:
        """Every answer in the order of the questions; ``response`` is JSON."""
        return self._answers

    def for_(self, definition: InterruptDefinition) -> tuple[GenericAnswer, ...]:
        """The answers to questions of ``definition``. Where it was made with a type, the
        ``response`` of a resolved one is of that type; of a cancelled one it is None."""
        return tuple(
            dataclasses.replace(answer, response=definition.parse(answer.response))
            if answer.status == "resolved"
            else answer
            for answer in self._answers
            if answer.definition_id == definition.id
        )
