"""Getting a run's events to viewers: the delivery log, and the producers that fill it.

A run is driven by a :class:`Producer`, apart from every response; a response follows the
run's log. So a dropped socket stops nothing, a second tab sees the same events under the same
offsets, and a client that comes back asks for what comes after the last offset it has.

Beside them, locks by name: :class:`StoredLocks`, and :func:`with_locks` for tools and middleware.
"""

from __future__ import annotations

from chatkeep.delivery._locks import (
    LOCK_LOST,
    LOCKS,
    HeldLock,
    LockStore,
    StoredLocks,
    with_locks,
)
from chatkeep.delivery._offsets import offset_run
from chatkeep.delivery._producer import Delivery, Producer
from chatkeep.delivery._protocol import (
    FROM_NOW,
    FROM_START,
    DeliveryLog,
    LoggedEvent,
    LoggedRun,
    LogWriter,
    RunKey,
)
from chatkeep.delivery._runlog import RunLog, encode_event
from chatkeep.delivery._stored import StoredLog
from chatkeep.delivery._terminal import is_terminal, with_terminal

__all__ = [
    "FROM_NOW",
    "FROM_START",
    "LOCKS",
    "LOCK_LOST",
    "Delivery",
    "DeliveryLog",
    "HeldLock",
    "LockStore",
    "LogWriter",
    "LoggedEvent",
    "LoggedRun",
    "Producer",
    "RunKey",
    "RunLog",
    "StoredLocks",
    "StoredLog",
    "encode_event",
    "is_terminal",
    "offset_run",
    "with_locks",
    "with_terminal",
]
