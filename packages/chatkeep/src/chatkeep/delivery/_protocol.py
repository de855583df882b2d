"""What a delivery log is: the seam between the in-process log and a stored one.

A log keeps the events of each run in the order in which they were published, every one under
an *offset*: an opaque text, unique within the run, that names the event for ever. A run has one
writer and any number of readers; a reader asks for what comes strictly after an offset.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ag_ui.core import BaseEvent

from chatkeep.scope import EMPTY_SCOPE, Scope

__all__ = [
    "FROM_NOW",
    "FROM_START",
    "DeliveryLog",
    "LogWriter",
    "LoggedEvent",
    "LoggedRun",
    "RunKey",
]

FROM_START = "-1"
"""As ``after``: everything that was published, then the live tail."""

FROM_NOW = "now"
"""As ``after``: the live tail only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Names a run: ids are unique within a scope, so a foreign scope's run is not there."""

    run_id: str
    scope: Scope = EMPTY_SCOPE


class LoggedEvent(NamedTuple):
    """One published event: its offset, and its JSON in UTF-8 on one line."""

    offset: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run that a log knows. ``complete``: nothing was trimmed, a replay from the start is
    possible. ``finished``: the writer has closed it."""

    key: RunKey
    thread_id: str
    finished: bool
    complete: bool


@runtime_checkable
class LogWriter(Protocol):
    """The one writer of a run."""

    async def append(self, events: Sequence[BaseEvent]) -> list[str]:
        """Publish; the offsets, in order. Nothing is published when one cannot be encoded.

        Raises:
            InvalidValue: an event holds what JSON cannot carry; names the place.
            RunConflict: ``lease-lost``, another writer took the run; ``terminal``, closed.
        """
        ...

    async def close(self) -> None:
        """No more events: readers end once they have read everything. Idempotent. A writer that
        lost the run to another closes nothing."""
        ...

    async def leave(self, *, wait_ms: int = 0) -> None:
        """Write no more, and leave the log open: for so long readers wait for whoever takes the
        run over, before they are told that its writer is gone."""
        ...


@runtime_checkable
class DeliveryLog(Protocol):
    """Tier: the events of runs, kept long enough for whoever comes late."""

    async def open(self, key: RunKey, thread_id: str) -> LogWriter:
        """Begin the log of a new run.

        Raises:
            RunConflict: the run is known: ``running``, ``terminal`` or ``foreign-thread``.
        """
        ...

    async def take_over(self, key: RunKey, *, only_lost: bool = False) -> LogWriter | None:
        """Become the writer of a run that goes on: its former writer appends nothing from then
        on, and of several that try at once with ``only_lost`` one gets it. None: the log is not
        there or closed, or ``only_lost`` and its writer lives."""
        ...

    async def sweep(self, *, limit: int = 100) -> list[LoggedRun]:
        """Tell the viewers of runs whose writers have died, with a RUN_ERROR ``worker_lost``,
        and close these logs; drop what has been kept long enough. The runs that were closed."""
        ...

    async def aclose(self) -> None:
        """Stop what runs beside the readers. Idempotent; used again, it starts again."""
        ...

    async def find(self, key: RunKey) -> LoggedRun | None:
        """The run, or None when it is unknown or no longer kept."""
        ...

    async def read(self, key: RunKey, after: str = FROM_START) -> list[LoggedEvent]:
        """What was published after ``after``, as of now; does not wait.

        Raises:
            UnknownRun, UnknownOffset, EventsTrimmed: see :meth:`follow`.
        """
        ...

    async def follow(
        self, key: RunKey, after: str = FROM_START
    ) -> AsyncIterator[Sequence[LoggedEvent]]:
        """Batches of what was and will be published after ``after``; ends when the run's
        writer has closed it and everything was read.

        Refusals come before the iterator does. The iterator itself raises ``EventsTrimmed``
        in a reader that was so slow that its next event was trimmed meanwhile.

        Raises:
            UnknownRun: the log does not know the run, or no longer.
            UnknownOffset: ``after`` names no event of the run.
            EventsTrimmed: what comes after ``after`` is no longer complete.
        """
        ...
