"""What a published event leaves behind: widgets, activity rows and the structured answer.

Most events are over once they are sent. A ``ui-resource`` and an activity are shown for as long
as the thread is, whoever emitted them: a tool, a middleware or the adapter's own stream. They
are taken as the hooks made them, right before they are published, so that what a reader saw is
what snapshots, stores and reloads have.
"""

from __future__ import annotations

import logging
from typing import Final

from ag_ui.core import ActivityDeltaEvent, ActivitySnapshotEvent, CustomEvent, EventType

from chatkeep.codec import normalize
from chatkeep.engine.activities import Activities
from chatkeep.engine.middleware import Event
from chatkeep.engine.structured_answer import StructuredAnswer
from chatkeep.engine.transcript import Transcript
from chatkeep.errors import InvalidValue

__all__ = ["RECORDED", "UI_RESOURCE", "Recorder"]

_LOG: Final = logging.getLogger("chatkeep.engine")

UI_RESOURCE: Final = "ui-resource"
"""Name of the CUSTOM event that shows a widget beside a tool call."""

RECORDED: Final = frozenset(
    {EventType.CUSTOM, EventType.ACTIVITY_SNAPSHOT, EventType.ACTIVITY_DELTA}
)
"""Kinds of events that :meth:`Recorder.admit` must see."""


class Recorder:
    """One per run. Nothing that is wrong with an event fails the run: it is logged."""

    __slots__ = ("_activities", "_answer", "_transcript")

    def __init__(
        self,
        transcript: Transcript,
        activities: Activities,
        answer: StructuredAnswer | None = None,
    ) -> None:
        self._transcript = transcript
        self._activities = activities
        self._answer = answer

    def admit(self, event: Event) -> bool:
        """Take note of ``event``. False: it contradicts what readers have, and is not to be
        published."""
        if isinstance(event, ActivitySnapshotEvent):
            return self._activities.snapshot(event)
        if isinstance(event, ActivityDeltaEvent):
            return self._activities.delta(event)
        if isinstance(event, CustomEvent):
            if event.name == UI_RESOURCE:
                self._widget(event)
            elif self._answer is not None and event.subagent_run_id is None:
                return self._answer.admit(event)
        return True

    def _widget(self, event: CustomEvent) -> None:
        if event.subagent_run_id is not None:
            return  # of a call that is in no message of this thread
        try:
            value = normalize(event.value, "$.value")
        except InvalidValue as error:
            _LOG.warning("a ui-resource is shown, but cannot be recorded: %s", error)
            return
        self._transcript.add_widget(value)
