"""Best effort is never silent: every failure that a run survives is logged and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

__all__ = ["CounterName", "Phase", "Reports"]

_log = logging.getLogger("chatkeep.persistence")

Phase: TypeAlias = Literal[
    "start",
    "draft",
    "lease",
    "claims",
    "activities",
    "finish",
    "error",
    "abort",
    "interrupt",
    "cancel-read",
]
"""Where a store failure happened. ``start``, ``draft``, ``lease``, ``claims`` (giving them up),
``activities`` and ``cancel-read`` are survived; the others also end the run as failed, or are
the record of an end that could not be written."""

CounterName: TypeAlias = Literal[
    "start_failures",
    "draft_failures",
    "lease_failures",
    "claims_failures",
    "activities_failures",
    "finish_failures",
    "error_failures",
    "abort_failures",
    "interrupt_failures",
    "cancel_read_failures",
    "drafts_saved",
    "conflicts",
    "retries",
    "leases_lost",
    "detached",
    "activities_dropped",
]
"""``conflicts``: commits that another run's commit came before, re-merged. ``retries``: commits
sent again after an outage. ``detached``: runs whose own turn was cut while they ran."""


class Reports:
    """Counters and the callback of one middleware, shared by all its runs."""

    __slots__ = ("_callback", "counters")

    def __init__(self, callback: Callable[[Phase, BaseException], object] | None) -> None:
        self._callback = callback
        self.counters: Counter[CounterName] = Counter()

    def count(self, name: CounterName, by: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] += by

    def failure(self, phase: Phase, error: BaseException, *, run_id: str) -> None:
        """A write failed and the run goes on without it, or ends because of it."""
        self.count(_FAILURES[phase])
        _log.warning("%s: a write of run %s failed: %s", phase, run_id, error)
        if self._callback is None:
            return
        try:
            self._callback(phase, error)
        except Exception:  # noqa: BLE001 - a broken alarm must not break what it watches over
            _log.exception("on_persistence_error raised")


_FAILURES: dict[Phase, CounterName] = {
    "start": "start_failures",
    "draft": "draft_failures",
    "lease": "lease_failures",
    "claims": "claims_failures",
    "activities": "activities_failures",
    "finish": "finish_failures",
    "error": "error_failures",
    "abort": "abort_failures",
    "interrupt": "interrupt_failures",
    "cancel-read": "cancel_read_failures",
}
