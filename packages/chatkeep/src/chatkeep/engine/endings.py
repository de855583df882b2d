"""The ends of a run: one terminal hook, then the one terminal event."""

from __future__ import annotations

import asyncio
import logging
import time

from chatkeep.engine.abort import CANCEL_REQUESTED
from chatkeep.engine.failure import failure_of, is_foreign, log_raised
from chatkeep.engine.middleware import AbortInfo, ErrorInfo, Event, FinishInfo, FinishReason
from chatkeep.engine.pause import Pause
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.terminal import Terminal

__all__ = ["Endings"]


class Endings:
    """Each method closes the gate (aborts come too late from then on), tells the hooks, and
    returns the terminal event, which is not published yet."""

    __slots__ = ("_began", "_runtime", "_terminal")

    def __init__(self, runtime: Runtime, terminal: Terminal) -> None:
        self._runtime = runtime
        self._terminal = terminal
        self._began = 0.0

    def begin(self) -> None:
        """The run begins: durations count from here."""
        self._began = time.perf_counter()

    def _elapsed(self) -> float:
        return (time.perf_counter() - self._began) * 1000

    def log(self, level: int, error: Exception, what: str) -> None:
        """What chatkeep raises itself is told by RUN_ERROR; of all else the log has more."""
        if is_foreign(error):
            context = self._runtime.context
            log_raised(level, error, what, run_id=context.run_id, thread_id=context.thread_id)

    async def finished(
        self, reason: FinishReason | None, content: str, *, told: FinishReason | None
    ) -> Event:
        """The run ended well: hooks are given ``reason``, readers ``told``. A hook that fails
        makes it a failed one."""
        runtime = self._runtime
        runtime.gate.close()
        runtime.publisher.close_spans()
        info = FinishInfo(
            finish_reason=reason,
            duration_ms=self._elapsed(),
            content=content,
            usage=self._terminal.usage,
        )
        failures = await runtime.hooks.every("on_finish", info)
        try:
            await runtime.publisher.flush()
        except Exception as late:  # noqa: BLE001 - becomes the terminal
            self.log(logging.ERROR, late, "the run failed at its end")
            failures.append(late)
        if failures:
            return self._terminal.failed(failure_of(failures[0]))
        return self._terminal.finished(told)

    async def paused(self, pause: Pause) -> Event:
        """The run waits for answers. What the hooks could not keep is not shown: a failure makes
        it a failed run. Hooks stand in the way of each other here: the first failure is the last
        call, so that a store that comes later keeps no pause that nobody hears of."""
        runtime = self._runtime
        runtime.gate.close()
        try:
            await runtime.hooks.call("on_interrupt", self._terminal.paused(pause.interrupts))
            await runtime.publisher.flush()
        except asyncio.CancelledError:
            # The task itself is cancelled. A store that has kept the pause leaves it there.
            runtime.gate.signal.abort("cancelled")
            return await self.aborted()
        except Exception as error:  # noqa: BLE001 - becomes RUN_ERROR and on_error
            return await self.failed(error)
        for event in pause.shown:
            runtime.publisher.put(event)
        return self._terminal.paused(pause.interrupts)

    async def failed(self, error: Exception) -> Event:
        """The run failed."""
        self._runtime.gate.close()
        failure = failure_of(error)
        self.log(logging.ERROR, error, "the run failed")
        info = ErrorInfo(
            error=error,
            message=failure.message,
            code=failure.code,
            duration_ms=self._elapsed(),
            refused=error is self._runtime.hooks.refusal,
        )
        await self._runtime.hooks.every("on_error", info)
        return self._terminal.failed(failure)

    async def aborted(self) -> Event:
        """The run was stopped."""
        self._runtime.gate.close()
        self._runtime.publisher.close_spans()
        reason = self._runtime.gate.signal.reason
        info = AbortInfo(
            reason=reason,
            cancel_requested=reason == CANCEL_REQUESTED,
            duration_ms=self._elapsed(),
        )
        await self._runtime.hooks.every("on_abort", info)
        return self._terminal.cancelled()
