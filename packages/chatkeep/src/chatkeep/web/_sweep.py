"""Ending the runs of servers that died, beside the requests."""

from __future__ import annotations

import asyncio
import logging
import random

from chatkeep._admin import backend_of
from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, RunLog
from chatkeep.errors import StoreClosed

__all__ = ["Sweeper"]

_log = logging.getLogger("chatkeep.web")

_FIRST = 5.0
"""Seconds in which the first sweep happens: soon, since a restart is when runs are lost."""


class Sweeper:
    """Sweeps runs, then the delivery log, every ``seconds``, in a task of its own: viewers of a
    lost run are told when its transcript has what there is of it.

    The first time soon after :meth:`start`; times vary a little, so that the processes of a
    deployment do not sweep together. A sweep that fails is logged, and the next one tried. With
    no interval, or a runs store that keeps no leases and a log of this process, there is
    nothing to do.
    """

    def __init__(self, persistence: Persistence, delivery: Delivery, seconds: float | None) -> None:
        self._persistence = persistence
        self._delivery = delivery
        runs = persistence.stores.runs
        self._leases = runs is not None and backend_of(persistence, runs) is not None
        useful = self._leases or not isinstance(delivery.log, RunLog)
        self._seconds = seconds if useful else None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it runs already."""
        if self._seconds is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(self._seconds), name="chatkeep sweeper")

    async def aclose(self) -> None:
        """Stop, and wait until a store call that is under way has come back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, _FIRST) * random.uniform(0.1, 1.0))
        while True:
            try:
                await self._sweep()
            except StoreClosed:
                _log.warning("the persistence is closed: lost runs are no longer swept")
                return
            except Exception:  # noqa: BLE001 - a chat server lives on; it is logged and tried again
                _log.exception("lost runs could not be swept; the next try comes")
            await asyncio.sleep(seconds * random.uniform(0.9, 1.1))

    async def _sweep(self) -> None:
        if self._leases:
            for lost in await self._persistence.maintenance().sweep():
                run = lost.run
                _log.warning("run %r of thread %r was lost", run.run_id, run.thread_id)
        await self._delivery.sweep()
