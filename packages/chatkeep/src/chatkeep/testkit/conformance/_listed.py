"""Writes that a list of threads can see, whoever keeps the transcript."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from chatkeep.backends import Persistence
from chatkeep.records import ModelMessage
from chatkeep.testkit.conformance._base import Ids, activity, interrupt, now_ms

__all__ = ["ListedWrites"]

_MAKE_THREADS = ("messages", "runs", "interrupts", "activities")


class ListedWrites:
    """Saves transcripts so that ``list_threads`` of the bag shows their threads.

    A thread that only a store of the user's own knows is not listed, and that is no fault. So
    beside such a messages store the first store with a backend (runs, interrupts, activities)
    writes a row of the same thread, as a turn would. A ``ThreadAdmin`` that is not a
    :class:`chatkeep.backends.Persistence` has to list what its messages store keeps.

    Ends the case with a skip where no such store has a backend.
    """

    def __init__(self, persistence: Any, ids: Ids) -> None:
        self._stores: Any = persistence.stores
        self._ids = ids
        self._key = "messages"
        if isinstance(persistence, Persistence):
            self._key = self._seen(persistence)

    @staticmethod
    def _seen(persistence: Persistence) -> str:
        for key in _MAKE_THREADS:
            backend = getattr(getattr(persistence.stores, key), "backend", None)
            if any(backend is known for known in persistence.backends):
                return key
        pytest.skip(
            "tier ThreadAdmin lists nothing here: messages, runs, interrupts and activities "
            "are stores without a backend"
        )

    async def __call__(self, thread: str, rows: Sequence[ModelMessage]) -> None:
        """Save the transcript; move its thread to the front of the list."""
        stores, ids = self._stores, self._ids
        await stores.messages.save_thread(thread, rows)
        if self._key == "runs":
            await stores.runs.create_or_resume(ids.run(), thread, started_at=now_ms())
        elif self._key == "interrupts":
            await stores.interrupts.create(interrupt(thread, ids.run(), ids.interrupt()))
        elif self._key == "activities":
            await stores.activities.save_activities(thread, [activity(ids("a"))])
