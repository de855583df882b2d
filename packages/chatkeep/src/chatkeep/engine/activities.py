"""Activity rows of a run: ACTIVITY_SNAPSHOT and ACTIVITY_DELTA become records.

The rows stand in ``ctx.activities``, beside the transcript: no model ever sees them. A record
is never changed, a row that changes is replaced, and so is the list: persistence finds what is
new by object identity.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import jsonpatch
from ag_ui.core import ActivityDeltaEvent, ActivitySnapshotEvent
from pydantic import BaseModel

from chatkeep.codec import normalize
from chatkeep.engine.events import merge_metadata, normalized
from chatkeep.engine.middleware import ChatContext, Event
from chatkeep.engine.transcript import Transcript
from chatkeep.errors import InvalidValue
from chatkeep.messages import ui_length
from chatkeep.records import ActivityRecord
from chatkeep.scope import check_id

__all__ = ["Activities"]

_LOG: Final = logging.getLogger("chatkeep.engine")
_E = TypeVar("_E", ActivitySnapshotEvent, ActivityDeltaEvent)


class Activities:
    """The rows of one run.

    A row is known by the event's ``messageId``. It stands behind the message that was the last
    one when it first came (its *anchor*), whatever changes in it later. An event that cannot
    be applied (another ``activityType``, a patch that fails, the id of a message) changes
    nothing and is not published: clients disagree about such events, and their rows would
    differ from the stored ones. A delta for a row that nobody here knows is published: its
    reader may know it.
    """

    __slots__ = ("_begun", "_context", "_early", "_names", "_transcript")

    def __init__(self, context: ChatContext, transcript: Transcript) -> None:
        self._context = context
        self._transcript = transcript
        self._begun = False
        self._names: set[str] = set()
        self._early: list[ActivitySnapshotEvent | ActivityDeltaEvent] = []

    def begin(self, rows: Sequence[ActivityRecord]) -> None:
        """The run starts from ``rows``. Events that came before are applied now."""
        self.replace(rows)
        self._begun = True
        early, self._early = self._early, []
        for event in early:
            if isinstance(event, ActivitySnapshotEvent):
                self.snapshot(event)
            else:
                self.delta(event)

    def replace(self, rows: Sequence[ActivityRecord]) -> None:
        """Exchange the rows (a middleware's ``on_config`` did). One with the id of a message is
        left out: a reader could not tell them apart."""
        kept: list[ActivityRecord] = []
        for row in rows:
            if row.id in self._names or self._transcript.reserve(row.id):
                self._names.add(row.id)
                kept.append(row)
            else:
                _LOG.warning("activity row %r is left out: a message has that id", row.id)
        self._context.activities = kept

    def snapshot(self, event: ActivitySnapshotEvent) -> bool:
        """Make the row, or replace its content unless ``replace`` is false; whether to publish."""
        if not self._begun:
            self._early.append(event)
            return True
        event = _wire_form(event)
        place = self._place(event.message_id)
        try:
            content = normalize(event.content, "$.content")
            metadata = normalize(event.metadata, "$.metadata")
        except InvalidValue as error:
            return _refuse(event, str(error))
        if place is None:
            return self._add(event, content, metadata)
        if event.replace is not False:
            old = self._context.activities[place]
            changes: dict[str, Any] = {"activity_type": event.activity_type, "content": content}
            self._put(place, old, changes, metadata)
        return True

    def _add(
        self, event: ActivitySnapshotEvent, content: dict[str, Any], metadata: dict[str, Any] | None
    ) -> bool:
        try:
            name = check_id(event.message_id, "messageId")
        except InvalidValue as error:
            return _refuse(event, str(error))
        context = self._context
        if name not in self._names and not self._transcript.reserve(name):
            return _refuse(event, "a message of this thread has that id")
        self._names.add(name)
        streaming = self._streaming()
        length = ui_length(context.messages) + len(context.activities)
        context.activities = [
            *context.activities,
            ActivityRecord(
                id=name,
                activity_type=event.activity_type,
                content=content,
                index=length if streaming is None else length + 1,
                metadata=metadata,
                subagent_run_id=event.subagent_run_id,
                anchor=streaming or self._transcript.last_shown,
                run_id=context.run_id,
            ),
        ]
        return True

    def _streaming(self) -> str | None:
        """Id of the message that is being streamed and is no row of the transcript yet."""
        current = self._context.current_message_id
        if current is None or any(m.get("id") == current for m in self._context.messages):
            return None
        return current

    def delta(self, event: ActivityDeltaEvent) -> bool:
        """Patch the row's content, all of it or nothing; whether to publish."""
        if not self._begun:
            self._early.append(event)
            return True
        event = _wire_form(event)
        place = self._place(event.message_id)
        if place is None:
            _LOG.debug("ACTIVITY_DELTA for %r, a row of nobody here", event.message_id)
            return True
        row = self._context.activities[place]
        if row.activity_type != event.activity_type:
            return _refuse(event, f"the row's activityType is {row.activity_type!r}")
        try:
            content = normalize(_patched(row.content, event.patch), "$.content")
            metadata = normalize(event.metadata, "$.metadata")
        except Exception as error:  # noqa: BLE001 - logged; a patch never fails the run
            return _refuse(event, str(error))
        if not isinstance(content, dict):
            return _refuse(event, "the patched content is no object")
        self._put(place, row, {"content": cast("dict[str, Any]", content)}, metadata)
        return True

    def _place(self, name: str) -> int | None:
        rows = self._context.activities
        return next((place for place, row in enumerate(rows) if row.id == name), None)

    def _put(
        self,
        place: int,
        old: ActivityRecord,
        changes: dict[str, Any],
        metadata: Mapping[str, Any] | None,
    ) -> None:
        if metadata:
            changes["metadata"] = merge_metadata(old.metadata or {}, metadata)
        rows = list(self._context.activities)
        rows[place] = old.model_copy(update=changes)
        self._context.activities = rows


def _wire_form(event: _E) -> _E:
    """As it is published: what AG-UI does not know is in the metadata."""
    return cast("_E", normalized(event))


def _patched(content: dict[str, Any], patch: Sequence[Any]) -> Any:
    """``content`` after an RFC 6902 patch; ``content`` itself stays as it is."""
    operations = [op.model_dump(by_alias=True) if isinstance(op, BaseModel) else op for op in patch]
    apply: Any = jsonpatch.apply_patch
    return apply(content, operations)


def _refuse(event: Event, why: str) -> bool:
    _LOG.warning(
        "%s for %r is ignored: %s", event.type.value, getattr(event, "message_id", None), why
    )
    return False
