"""Keeping a chat: the middleware that writes, and the page load that reads."""

from __future__ import annotations

from chatkeep.persistence.cancel import CancelOutcome, cancel_run
from chatkeep.persistence.capabilities import (
    DETACHABLE,
    INTERRUPTS,
    METADATA,
    PERSISTENCE,
    PERSISTENCE_COMPLETION,
)
from chatkeep.persistence.completion import RunCompletion, RunOutcome
from chatkeep.persistence.hydrate import hydrate_thread
from chatkeep.persistence.lease import LEASE_LOST
from chatkeep.persistence.middleware import PersistenceMiddleware, with_persistence
from chatkeep.persistence.takeover import RunClaim, claim_run

__all__ = [
    "DETACHABLE",
    "INTERRUPTS",
    "LEASE_LOST",
    "METADATA",
    "PERSISTENCE",
    "PERSISTENCE_COMPLETION",
    "CancelOutcome",
    "PersistenceMiddleware",
    "RunClaim",
    "RunCompletion",
    "RunOutcome",
    "cancel_run",
    "claim_run",
    "hydrate_thread",
    "with_persistence",
]
