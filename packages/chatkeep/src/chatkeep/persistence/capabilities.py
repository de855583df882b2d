"""What the persistence middleware hands to the others of a run."""

from __future__ import annotations

from typing import Final

from chatkeep._bag import Persistence
from chatkeep.engine.middleware import Capability
from chatkeep.persistence.completion import RunCompletion
from chatkeep.stores import InterruptStore, MetadataStore

__all__ = [
    "DETACHABLE",
    "INTERRUPTS",
    "METADATA",
    "PERSISTENCE",
    "PERSISTENCE_COMPLETION",
]

PERSISTENCE: Final = Capability[Persistence]("persistence")
"""The stores of this run. Always provided."""

PERSISTENCE_COMPLETION: Final = Capability[RunCompletion]("persistence-completion")
"""How the run ended, once its last write is done. Always provided."""

INTERRUPTS: Final = Capability[InterruptStore]("interrupts")
"""The interrupt store; provided when there is one."""

METADATA: Final = Capability[MetadataStore]("metadata")
"""The metadata store; provided when there is one."""

DETACHABLE: Final = Capability[bool]("detachable-run")
"""Provided as true by a middleware whose run goes on elsewhere when its viewer leaves: a plain
disconnect then ends nothing."""
