"""Collections, indexes, and the names of documents.

A thread has a *head* (``chatkeep_threads``) and one document per message (``chatkeep_entries``).
What hangs on a thread carries ``t``, the thread's incarnation: 24 hexadecimal digits drawn when
the head is first written, so that nothing of a deleted thread can come back in a new one with the
same id. Documents that are found by ids have digests of 32 bytes as keys
(:func:`chatkeep.scope.key_digest`); the ids stand beside them to be read by people.

No rule depends on an index: what must be unique is a key (``_id``).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from bson import ObjectId
from pymongo import ASCENDING, DESCENDING, IndexModel

from chatkeep.scope import Scope, key_digest

__all__ = [
    "ACTIVITIES",
    "COLLECTIONS",
    "CUTS",
    "ENTRIES",
    "INDEXES",
    "INTERRUPTS",
    "LAYOUT",
    "METADATA",
    "OF_THREAD",
    "PIECES",
    "RUNS",
    "THREADS",
    "Document",
    "entry_id",
    "interrupt_id_of",
    "new_incarnation",
    "owner_key",
    "row_id",
    "run_key",
    "thread_key",
    "value_key",
    "values_key",
]

Document: TypeAlias = dict[str, Any]

THREADS: Final = "chatkeep_threads"
ENTRIES: Final = "chatkeep_entries"
RUNS: Final = "chatkeep_runs"
INTERRUPTS: Final = "chatkeep_interrupts"
ACTIVITIES: Final = "chatkeep_activities"
CUTS: Final = "chatkeep_cuts"
METADATA: Final = "chatkeep_metadata"
PIECES: Final = "chatkeep_pieces"
"""Parts of bodies that are too large for one document, and staged redo records."""
LAYOUT: Final = "chatkeep_layout"
"""One document: the version of this layout."""

OF_THREAD: Final = (ENTRIES, RUNS, INTERRUPTS, ACTIVITIES, CUTS, PIECES)
"""What a thread is deleted from, by ``t``; then its head, and the metadata under its id."""

COLLECTIONS: Final = (THREADS, *OF_THREAD, METADATA, LAYOUT)

INDEXES: Final[dict[str, list[IndexModel]]] = {
    THREADS: [
        IndexModel(
            [("owner", ASCENDING), ("updated_at", DESCENDING), ("born", DESCENDING)],
            name="chatkeep_listed",
        ),
        IndexModel([("updated_at", ASCENDING), ("born", ASCENDING)], name="chatkeep_idle"),
        IndexModel(
            [("oldest_cut", ASCENDING), ("born", ASCENDING)], name="chatkeep_cut", sparse=True
        ),
        IndexModel([("redo.version", ASCENDING)], name="chatkeep_undone", sparse=True),
    ],
    ENTRIES: [IndexModel([("t", ASCENDING), ("n", ASCENDING)], name="chatkeep_thread")],
    RUNS: [
        IndexModel([("t", ASCENDING), ("status", ASCENDING)], name="chatkeep_thread"),
        IndexModel([("parent", ASCENDING)], name="chatkeep_parent", sparse=True),
        IndexModel([("status", ASCENDING), ("lease_until", ASCENDING)], name="chatkeep_lost"),
        IndexModel([("status", ASCENDING), ("detached_since", ASCENDING)], name="chatkeep_left"),
    ],
    INTERRUPTS: [
        IndexModel([("t", ASCENDING), ("status", ASCENDING)], name="chatkeep_thread"),
        IndexModel([("t", ASCENDING), ("id", ASCENDING)], name="chatkeep_named"),
    ],
    ACTIVITIES: [IndexModel([("t", ASCENDING), ("position", ASCENDING)], name="chatkeep_thread")],
    CUTS: [IndexModel([("t", ASCENDING)], name="chatkeep_thread")],
    PIECES: [
        IndexModel(
            [("t", ASCENDING), ("piece", ASCENDING), ("i", ASCENDING)], name="chatkeep_piece"
        )
    ],
    METADATA: [IndexModel([("owner", ASCENDING)], name="chatkeep_owner")],
}


def new_incarnation() -> str:
    """What tells a thread from an earlier one with the same id."""
    return str(ObjectId())


def thread_key(scope: Scope, thread_id: str) -> str:
    """Finds a thread's head."""
    return key_digest("thread", *scope.key, thread_id).hex()


def owner_key(scope: Scope) -> str:
    """Finds the threads and runs of a scope."""
    return key_digest("owner", *scope.key).hex()


def run_key(scope: Scope, run_id: str) -> str:
    """Finds a run: its id is unique in its scope, over all threads."""
    return key_digest("run", *scope.key, run_id).hex()


def value_key(scope: Scope, namespace: str, key: str) -> str:
    """Finds a metadata value."""
    return key_digest("metadata", *scope.key, namespace, key).hex()


def values_key(scope: Scope, key: str) -> str:
    """Finds all values under a key (a thread's metadata)."""
    return key_digest("metadata-of", *scope.key, key).hex()


def entry_id(t: str, number: int) -> str:
    """Key of a message."""
    return f"{t}.{number:014x}"


def row_id(t: str, position: int) -> str:
    """Key of a UI row."""
    return f"{t}.{position:014x}"


def interrupt_id_of(t: str, run_id: str, interrupt_id: str) -> str:
    """Key of an interrupt: identity is (thread, run, interrupt id)."""
    return f"{t}.{key_digest('interrupt', run_id, interrupt_id).hex()}"
