"""Work that goes on to its end even when its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["quietly", "to_the_end"]

_T = TypeVar("_T")


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end, then deliver a cancellation that came meanwhile.

    Chats are cancelled all the time (a closed tab); a boundary of several calls must not stop
    between two of them. Store calls have timeouts, those of foreign stores too, so the wait is
    bounded.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # retrieved: the caller gets the cancellation, not this
        raise asyncio.CancelledError
    return task.result()


async def quietly(task: asyncio.Task[None]) -> None:
    """Wait until a cancelled background task is gone."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
