"""Streaming snapshots: what a run has said so far, in its draft slot.

At most one write at a time and one an interval, the first at once, in the background: a slow
store slows no stream. A draft changes no transcript and conflicts with nobody; the last commit
of the run removes it, and a draft that comes later is refused by the store.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

from ag_ui.core import (
    RunStartedEvent,
    TextMessageChunkEvent,
    TextMessageContentEvent,
    TextMessageStartEvent,
    ToolCallStartEvent,
)

from chatkeep.engine.middleware import ChatContext, Event
from chatkeep.messages import new_message_id
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.shielding import quietly
from chatkeep.persistence.transcript import with_tanstack
from chatkeep.records import ModelMessage

__all__ = ["Drafts"]

_CALL_METADATA = ("model", "source", "responseId")
"""What a finished message keeps of its model call; a draft keeps these and nothing else."""

_CLOSE_SECONDS = 0.25
"""How long the end of a run waits for a draft that is on its way."""


class _DraftStore(Protocol):
    async def save_draft(self, rows: Sequence[ModelMessage]) -> None: ...


class Drafts:
    """The partial message of the model call in progress, and its way into the draft slot."""

    def __init__(
        self, store: _DraftStore, *, run_id: str, interval_ms: int, reports: Reports
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._interval = interval_ms / 1000
        self._reports = reports
        self._task: asyncio.Task[None] | None = None
        self._last: float | None = None
        self._closed = False
        self._since = 0
        self._message_id: str | None = None
        self._created_at = ""
        self._text: list[str] = []
        self._metadata: dict[str, Any] = {}

    def reset(self, produced: int) -> None:
        """A model call begins; ``produced`` messages of the run are finished."""
        self._since = produced
        self._message_id = None
        self._created_at = ""
        self._text = []
        self._metadata = {}

    def observe(self, event: Event) -> bool:
        """Take note of ``event``; whether a snapshot is due."""
        if _of_child(event):
            return False
        self._note_metadata(event)
        if isinstance(event, RunStartedEvent):
            self.reset(self._since)
        elif isinstance(event, TextMessageStartEvent):
            self._begin(event.message_id)
        elif isinstance(event, ToolCallStartEvent):
            if self._message_id is None and event.parent_message_id:
                self._message_id = event.parent_message_id
        elif isinstance(event, TextMessageContentEvent | TextMessageChunkEvent):
            if self._message_id is None and event.message_id:
                self._begin(event.message_id)
            if event.delta:
                self._text.append(event.delta)
                return self._due()
        return False

    def _begin(self, message_id: str) -> None:
        self._message_id = message_id or None
        self._created_at = _now()
        self._text = []

    def _note_metadata(self, event: Event) -> None:
        bag = (event.metadata or {}).get("tanstack")
        if not isinstance(bag, dict) or isinstance(event, RunStartedEvent):
            return
        values = cast("dict[str, Any]", bag)
        for key in _CALL_METADATA:
            if values.get(key) is not None:
                self._metadata[key] = values[key]

    def _due(self) -> bool:
        if self._closed or (self._task is not None and not self._task.done()):
            return False
        return self._last is None or time.monotonic() - self._last >= self._interval

    # -- writing --------------------------------------------------------------------------

    def save(self, produced: Sequence[ModelMessage], tag: str) -> None:
        """Write what there is, in the background."""
        rows = self.rows(produced, tag)
        if not rows:
            return
        self._last = time.monotonic()
        self._task = asyncio.create_task(self._save(rows), name=f"chatkeep draft of {tag}")

    async def _save(self, rows: list[ModelMessage]) -> None:
        try:
            await self._store.save_draft(rows)
        except Exception as error:  # noqa: BLE001 - reported; the run goes on
            if not self._closed:
                self._reports.failure("draft", error, run_id=self._run_id)
        else:
            self._reports.count("drafts_saved")

    async def close(self, ctx: ChatContext) -> None:
        """No more drafts: the run is about to end. One that is on its way gets a moment to
        arrive; after that it is left to the store, which drops or refuses it."""
        self._closed = True
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait({task}, timeout=_CLOSE_SECONDS)
        if not task.done():
            ctx.defer(quietly(task))

    # -- what is there --------------------------------------------------------------------

    def rows(
        self,
        produced: Sequence[ModelMessage],
        tag: str,
        *,
        stop_reason: Literal["error", "aborted"] | None = None,
    ) -> list[ModelMessage]:
        """The finished messages of the run and the partial one, as they are stored."""
        finished = any(m.get("role") == "assistant" for m in produced[self._since :])
        text = "".join(self._text)
        if finished or not text:
            return list(produced)
        if self._message_id is None:
            self._message_id = new_message_id()
        partial: dict[str, Any] = {
            "id": self._message_id,
            "role": "assistant",
            "content": text,
            "createdAt": self._created_at or _now(),
        }
        bag: dict[str, Any] = {**self._metadata, "run": {"id": tag}}
        if stop_reason is not None:
            bag["stopReason"] = stop_reason
        return [*produced, with_tanstack(cast("ModelMessage", partial), **bag)]


def _of_child(event: Event) -> bool:
    return (
        getattr(event, "subagent_run_id", None) is not None
        or (event.model_extra or {}).get("subagentRunId") is not None
    )


def _now() -> str:
    return dt.datetime.now(tz=dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
