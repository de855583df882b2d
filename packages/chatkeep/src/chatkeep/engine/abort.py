"""Stopping a run: the signal, and the places where it may strike.

An abort interrupts what may take long and leaves nothing half done: the model's stream, running
tools, and waiting for a slow reader. Hooks are never interrupted: a store call that has begun
ends, and the run stops when the hook returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from anyio import CancelScope

__all__ = ["CANCEL_REQUESTED", "HAND_OVER", "AbortSignal", "Aborted", "Gate"]

CANCEL_REQUESTED: Final = "tanstack-ai:cancel-requested"
"""The abort reason that says: somebody asked for it, as opposed to a viewer who left."""

HAND_OVER: Final = "chatkeep:hand-over"
"""The abort reason of a driver that goes while its run can go on elsewhere."""


class AbortSignal:
    """A switch that goes off once. Use it from the thread of the event loop.

    From other threads: ``loop.call_soon_threadsafe(signal.abort, reason)``.
    """

    __slots__ = ("_aborted", "_callbacks", "_event", "_reason")

    def __init__(self) -> None:
        self._aborted = False
        self._reason: str | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._event: asyncio.Event | None = None

    @property
    def aborted(self) -> bool:
        """Whether :meth:`abort` was called."""
        return self._aborted

    @property
    def reason(self) -> str | None:
        """What the first call of :meth:`abort` gave."""
        return self._reason

    def abort(self, reason: str | None = None) -> None:
        """Go off. The first call wins; later ones change nothing."""
        if self._aborted:
            return
        self._aborted = True
        self._reason = reason
        callbacks, self._callbacks = self._callbacks, []
        if self._event is not None:
            self._event.set()
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the signal goes off; at once when it has."""
        if self._aborted:
            callback()
        else:
            self._callbacks.append(callback)

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Forget ``callback``; unknown ones are no error."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    async def wait(self) -> None:
        """Return when the signal has gone off."""
        if self._aborted:
            return
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()


class Aborted(Exception):
    """Inside the engine: the run is being stopped. Never reaches a caller."""


class Gate:
    """Decides when an abort interrupts the driver of a run.

    ``with gate.interruptible():`` marks work that an abort cuts short; inside it ``with gate:``
    marks what must run to its end (hooks). Leaving the outermost such block lets a waiting abort
    strike. All of it happens in tasks of one event loop.
    """

    __slots__ = ("_closed", "_depth", "_scope", "signal")

    def __init__(self, signal: AbortSignal) -> None:
        self.signal = signal
        self._scope: CancelScope | None = None
        self._depth = 0
        self._closed = False
        signal.add_callback(self._strike)

    def _strike(self) -> None:
        if self._scope is not None and self._depth == 0:
            self._scope.cancel()

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self.signal.aborted:
            self._strike()

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Work that an abort cuts short. Does not raise by itself: :meth:`check` does."""
        with CancelScope() as scope:
            self._scope = scope
            try:
                self.check()
                yield
            finally:
                self._scope = None

    def close(self) -> None:
        """From now on aborts come too late: the run has begun to end."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether the run has begun to end."""
        return self._closed

    def check(self) -> None:
        """Raise when the run is to stop.

        Raises:
            Aborted: the signal has gone off.
        """
        if self.signal.aborted and not self._closed:
            raise Aborted
