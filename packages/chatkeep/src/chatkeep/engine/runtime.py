"""What the steps of one run share."""

from __future__ import annotations

from dataclasses import dataclass

from chatkeep.engine.abort import Gate
from chatkeep.engine.activities import Activities
from chatkeep.engine.hooks import Hooks
from chatkeep.engine.middleware import ChatContext
from chatkeep.engine.publish import Publisher
from chatkeep.engine.structured_answer import StructuredAnswer
from chatkeep.engine.transcript import Transcript

__all__ = ["Runtime"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """One per run: the context hooks see, and the engine's own tools around it."""

    context: ChatContext
    gate: Gate
    hooks: Hooks
    publisher: Publisher
    transcript: Transcript
    activities: Activities
    answer: StructuredAnswer | None = None
