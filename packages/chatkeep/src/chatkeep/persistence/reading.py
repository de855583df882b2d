"""Reads that survive a connection which died while nobody used it."""

from __future__ import annotations

import logging
import time
from typing import Final

from chatkeep.errors import BackendUnavailable
from chatkeep.stores import ThreadView, TurnBackend, ViewQuery

__all__ = ["read_view"]

_log = logging.getLogger("chatkeep.persistence")

_QUICK: Final = 1.0
"""Seconds: what fails slower than this is an outage, not a stale connection."""


async def read_view(backend: TurnBackend, thread_id: str, query: ViewQuery) -> ThreadView:
    """``backend.read_view``, tried a second time when the first one failed at once.

    A database that was restarted leaves dead connections in every pool; the first call finds
    that out. Commits are repeated by the backend itself.
    """
    began = time.monotonic()
    try:
        return await backend.read_view(thread_id, query)
    except BackendUnavailable as error:
        if time.monotonic() - began > _QUICK:
            raise
        _log.warning("reading thread %s: %s; trying again", thread_id, error)
    return await backend.read_view(thread_id, query)
