"""The middleware that asks the generic questions of the scripted scenarios."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from chatkeep.engine.interrupts import InterruptDefinition, InterruptRequest, define_interrupt
from chatkeep.engine.middleware import (
    ChatConfig,
    ChatContext,
    ChatMiddleware,
    InterruptBoundary,
)
from chatkeep.testkit._scripted_scenes import ANSWERS, direction

__all__ = ["ScriptedPauses", "scripted_interrupts"]

_REVIEW: Final = define_interrupt(
    "review-plan",
    payload={
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    },
    response={
        "type": "object",
        "properties": {"approved": {"type": "boolean"}},
        "required": ["approved"],
        "additionalProperties": False,
    },
)


def scripted_interrupts() -> list[InterruptDefinition]:
    """The definitions that a chat with :class:`ScriptedPauses` gives as ``interrupts``."""
    return [_REVIEW]


@dataclass(slots=True)
class _Asked:
    """What one run has asked and been told."""

    may_ask: bool = True
    boundaries: set[str] = field(default_factory=set[str])
    answers: list[Any] = field(default_factory=list[Any])


class ScriptedPauses(ChatMiddleware):
    """Asks ``review-plan`` in the scenario ``generic``, before the model, and in every other one
    at the boundaries that its option ``pause`` lists; once each, and never in a run that
    answers. Options: ``expiresInMs`` of the question, and ``policy``, what is returned when it
    has been answered (``continue``, ``cancel`` or ``stop``).
    """

    name = "scripted-pauses"

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
        """Take down whether this run answers; hand the answers to the model."""
        asked = ctx.state(self, _Asked)
        if ctx.phase == "init":
            asked.may_ask = not config.resume and config.resume_tool_state is None
        if asked.answers:
            return {"model_options": {**config.model_options, ANSWERS: asked.answers}}
        return None

    async def on_interrupt_resolution(
        self, ctx: ChatContext, resolutions: Any
    ) -> Literal["continue", "cancel", "stop"] | None:
        """Keep what was answered: the response, or the word cancelled."""
        asked = ctx.state(self, _Asked)
        for answer in resolutions.for_(_REVIEW):
            asked.answers.append(
                answer.response if answer.status == "resolved" else {"status": "cancelled"}
            )
        _, options, _ = direction(ctx.messages)
        return cast("Literal['continue', 'cancel', 'stop'] | None", options.get("policy"))

    async def on_interrupt_boundary(
        self, ctx: ChatContext, boundary: InterruptBoundary
    ) -> Sequence[InterruptRequest] | None:
        """The question, where the scenario wants it."""
        asked = ctx.state(self, _Asked)
        name, options, _ = direction(ctx.messages)
        wanted = options.get("pause", ["beforeModel"] if name == "generic" else [])
        if not asked.may_ask or boundary not in wanted or boundary in asked.boundaries:
            return None
        asked.boundaries.add(boundary)
        lifetime = options.get("expiresInMs")
        return [
            _REVIEW.request(
                key="initial-plan",
                reason="review-required",
                message="Review the proposed plan.",
                payload={"title": "Release plan"},
                expires_at=None if lifetime is None else time.time_ns() // 1_000_000 + lifetime,
            )
        ]
