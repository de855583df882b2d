"""Every stream ends with one terminal event, whatever its source does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Final, cast

from ag_ui.core import (
    BaseEvent,
    EventType,
    RunErrorEvent,
    RunFinishedCancelledOutcome,
    RunFinishedEvent,
)

from chatkeep.errors import ChatkeepError, CompositionError

__all__ = [
    "TERMINAL_TYPES",
    "aclose",
    "cancelled",
    "check_stream",
    "failed",
    "is_cancelled",
    "is_terminal",
    "with_terminal",
]

_log = logging.getLogger("chatkeep.delivery")


TERMINAL_TYPES: Final = frozenset({EventType.RUN_FINISHED.value, EventType.RUN_ERROR.value})
"""As they stand in the JSON of an event."""


def check_stream(stream: object) -> AsyncIterator[BaseEvent]:
    """``stream`` if it is an async iterator: what an agent forgot to return is none.

    Raises:
        CompositionError: says what it is instead.
    """
    if not isinstance(stream, AsyncIterator):
        raise CompositionError(
            "a run is an async iterator of events, like the one that chat() returns, not "
            f"{type(stream).__name__}; does the agent return it?"
        )
    return cast("AsyncIterator[BaseEvent]", stream)


def is_terminal(event: BaseEvent) -> bool:
    """Whether ``event`` ends a run on the wire."""
    return event.type.value in TERMINAL_TYPES


def is_cancelled(event: BaseEvent) -> bool:
    """Whether ``event`` says that its run was stopped."""
    return isinstance(event, RunFinishedEvent) and isinstance(
        event.outcome, RunFinishedCancelledOutcome
    )


def failed(message: str, code: str, *, thread_id: str, run_id: str) -> RunErrorEvent:
    """A RUN_ERROR; browser clients read the ids from the ``tanstack`` bag."""
    return RunErrorEvent(
        message=message,
        code=code,
        timestamp=time.time_ns() // 1_000_000,
        metadata={"tanstack": {"threadId": thread_id, "runId": run_id}},
    )


def cancelled(*, thread_id: str, run_id: str) -> RunFinishedEvent:
    """A RUN_FINISHED with outcome ``cancelled``."""
    return RunFinishedEvent(
        thread_id=thread_id,
        run_id=run_id,
        timestamp=time.time_ns() // 1_000_000,
        outcome=RunFinishedCancelledOutcome(),
    )


async def with_terminal(
    stream: AsyncIterator[BaseEvent], *, thread_id: str, run_id: str
) -> AsyncIterator[BaseEvent]:
    """The events of ``stream``, with exactly one terminal, last.

    An exception becomes RUN_ERROR and is logged: its text may name what a viewer must not
    read, so only an error's code of ours goes out. A stream that just stops gets RUN_ERROR
    ``incomplete-run``; what comes after a terminal is not published. Cancellation passes.
    """
    ids = {"thread_id": thread_id, "run_id": run_id}
    ended = False
    try:
        async for event in stream:
            if ended:
                _log.error("run %r published %s after its terminal", run_id, event.type)
                await aclose(stream)
                return
            ended = is_terminal(event)
            yield event
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the source raises ends the run, visibly
        _log.exception("the stream of run %r failed", run_id)
        if not ended:
            code = error.code if isinstance(error, ChatkeepError) else "internal"
            yield failed("The run failed.", code, **ids)
    else:
        if not ended:
            _log.error("the stream of run %r ended without a terminal", run_id)
            yield failed("The run ended early.", "incomplete-run", **ids)


async def aclose(stream: AsyncIterator[object]) -> None:
    """Close ``stream`` if it can be closed: what it holds open is settled when this returns."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
