"""The one terminal event of a run, and what it has to say about its model calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ag_ui.core import RunErrorEvent, RunFinishedEvent, TokenUsage

from chatkeep.engine import events
from chatkeep.engine.failure import Failure
from chatkeep.engine.middleware import ChatContext, Event, FinishReason, Usage
from chatkeep.engine.usage import add_usage, leftovers, usage_to_wire

__all__ = ["Terminal"]


class Terminal:
    """Gathers during the run; one of :meth:`finished`, :meth:`paused`, :meth:`failed` and
    :meth:`cancelled` ends it."""

    __slots__ = ("_context", "_entries", "_last_metadata", "usage")

    def __init__(self, context: ChatContext) -> None:
        self._context = context
        self._entries: list[TokenUsage] = []
        self._last_metadata: Mapping[str, Any] = {}
        self.usage: Usage | None = None
        """Sum over the model calls; None while none reported any."""

    def count(self, usage: Usage, ended: RunFinishedEvent | RunErrorEvent) -> None:
        """Add the usage of one model call: its own entry on the terminal."""
        self.usage = add_usage(self.usage, usage)
        named = ended.usage[0] if ended.usage else TokenUsage()
        entry = usage_to_wire(usage, provider=named.provider, model=named.model)
        self._entries.append(entry)

    def remember(self, last: Event) -> None:
        """Keep the metadata of the latest model call's end, as hooks left it."""
        self._last_metadata = last.metadata or {}

    def finished(self, reason: FinishReason | None) -> Event:
        """RUN_FINISHED of a run that ended well."""
        return events.run_finished(
            thread_id=self._context.thread_id,
            run_id=self._context.run_id,
            usage=self._entries,
            metadata=self._metadata({} if reason is None else {"finishReason": reason}),
        )

    def cancelled(self) -> Event:
        """RUN_FINISHED of a run that was stopped."""
        return events.run_finished(
            thread_id=self._context.thread_id,
            run_id=self._context.run_id,
            usage=self._entries,
            metadata=self._metadata({}),
            cancelled=True,
        )

    def paused(self, interrupts: Sequence[Mapping[str, Any]]) -> Event:
        """RUN_FINISHED of a run that waits for answers."""
        return events.run_interrupted(
            thread_id=self._context.thread_id,
            run_id=self._context.run_id,
            interrupts=interrupts,
            usage=self._entries,
            metadata=self._metadata({}),
        )

    def failed(self, failure: Failure) -> Event:
        """RUN_ERROR; the bag says which run and thread it ends."""
        own = {
            "runId": self._context.run_id,
            "threadId": self._context.thread_id,
            **failure.details,
        }
        return events.run_error(
            message=failure.message,
            code=failure.code,
            usage=self._entries,
            metadata=self._metadata(own),
            raw_event=failure.raw_event,
        )

    def _metadata(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The last call's, the model's name, usage that has no place elsewhere, ``own``, and
        what hooks put into ``terminal_metadata``; the later wins."""
        last = dict(self._last_metadata)
        inner = last.get("tanstack")
        bag = dict(cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else {}
        bag.pop("finishReason", None)
        bag.pop("usage", None)
        if self._context.model:
            bag["model"] = self._context.model
        rest = leftovers(self.usage) if self.usage else {}
        if rest:
            bag["usage"] = rest
        bag.update(own)
        last["tanstack"] = bag
        merged = events.merge_metadata(last, self._context.terminal_metadata)
        if not merged["tanstack"]:
            del merged["tanstack"]
        return merged
