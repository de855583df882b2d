"""How a run ended, for those who must wait until it is stored."""

from __future__ import annotations

import asyncio
from typing import Literal, TypeAlias

__all__ = ["RunCompletion", "RunOutcome"]

RunOutcome: TypeAlias = Literal["completed", "failed", "aborted", "interrupted", "detached"]
"""``interrupted``: the run waits for a human. ``detached``: it ended here and stays
``running`` in the store, for somebody else to take over."""


class RunCompletion:
    """Settles once, after the last write of the run, whichever way the run ended.

    Waiting never raises: the word says what happened, :attr:`error` says why.
    """

    __slots__ = ("_error", "_event", "_outcome")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._outcome: RunOutcome | None = None
        self._error: BaseException | None = None

    @property
    def outcome(self) -> RunOutcome | None:
        """How the run ended; None while it goes on."""
        return self._outcome

    @property
    def error(self) -> BaseException | None:
        """What the run failed with: its own error, not that of a write that recorded it."""
        return self._error

    async def wait(self) -> RunOutcome:
        """The outcome, as soon as there is one. Any number of callers may wait."""
        await self._event.wait()
        if self._outcome is None:
            raise AssertionError("the event is set together with the outcome")
        return self._outcome

    def settle(self, outcome: RunOutcome, error: BaseException | None = None) -> None:
        """Settle; the first call wins."""
        if self._outcome is None:
            self._outcome, self._error = outcome, error
            self._event.set()
