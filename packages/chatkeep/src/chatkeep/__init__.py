"""Durable AI chat: conversations, runs and human decisions, kept in your own database.

Everything public is importable from here and loaded when first asked for, so that
``import chatkeep`` costs next to nothing and a helper whose package is not installed says
which extra brings it (:class:`~chatkeep.errors.MissingExtra`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatkeep._maintenance import Maintenance
    from chatkeep.backends import Backend, Persistence, Stores, open_persistence
    from chatkeep.compose import (
        capabilities,
        compose_persistence,
        define_activity_store,
        define_interrupt_store,
        define_message_store,
        define_metadata_store,
        define_persistence,
        define_run_store,
        require,
    )
    from chatkeep.errors import (
        BackendUnavailable,
        BadRequest,
        ChatkeepError,
        CompositionError,
        CorruptRecord,
        DeliveryError,
        EventsTrimmed,
        InterruptConflict,
        InterruptResumeError,
        InvalidValue,
        MissingExtra,
        ProviderError,
        RecordTooLarge,
        RunConflict,
        RunConflictReason,
        SchemaOutOfDate,
        StoreClosed,
        StoreError,
        ThreadConflict,
        ToolError,
        UnknownOffset,
        UnknownRun,
        UnseenMessages,
    )
    from chatkeep.memory import MemoryBackend, memory_persistence
    from chatkeep.records import (
        UNSET,
        ActivityRecord,
        CutRecord,
        DraftRecord,
        InterruptRecord,
        InterruptStatus,
        Lease,
        ModelMessage,
        Record,
        RunError,
        RunPatch,
        RunRecord,
        RunStatus,
        ThreadInfo,
        Unset,
    )
    from chatkeep.scope import EMPTY_SCOPE, Scope
    from chatkeep.stores import (
        ActivityStore,
        BatchCommit,
        CutArchive,
        InterruptAnswer,
        InterruptRef,
        InterruptStore,
        MessagePage,
        MessageStore,
        MetadataStore,
        PagedMessages,
        ReclaimableRuns,
        RevisionedMessages,
        RunHistory,
        RunStore,
        RunTree,
        SpliceResult,
        ThreadAdmin,
        ThreadExport,
        ThreadList,
        Transcript,
        TurnBackend,
        VersionedMetadata,
        VersionedValue,
    )

__all__ = [
    "EMPTY_SCOPE",
    "UNSET",
    "ActivityRecord",
    "ActivityStore",
    "Backend",
    "BackendUnavailable",
    "BadRequest",
    "BatchCommit",
    "ChatkeepError",
    "CompositionError",
    "CorruptRecord",
    "CutArchive",
    "CutRecord",
    "DeliveryError",
    "DraftRecord",
    "EventsTrimmed",
    "InterruptAnswer",
    "InterruptConflict",
    "InterruptRecord",
    "InterruptRef",
    "InterruptResumeError",
    "InterruptStatus",
    "InterruptStore",
    "InvalidValue",
    "Lease",
    "Maintenance",
    "MemoryBackend",
    "MessagePage",
    "MessageStore",
    "MetadataStore",
    "MissingExtra",
    "ModelMessage",
    "PagedMessages",
    "Persistence",
    "ProviderError",
    "ReclaimableRuns",
    "Record",
    "RecordTooLarge",
    "RevisionedMessages",
    "RunConflict",
    "RunConflictReason",
    "RunError",
    "RunHistory",
    "RunPatch",
    "RunRecord",
    "RunStatus",
    "RunStore",
    "RunTree",
    "SchemaOutOfDate",
    "Scope",
    "SpliceResult",
    "StoreClosed",
    "StoreError",
    "Stores",
    "ThreadAdmin",
    "ThreadConflict",
    "ThreadExport",
    "ThreadInfo",
    "ThreadList",
    "ToolError",
    "Transcript",
    "TurnBackend",
    "UnknownOffset",
    "UnknownRun",
    "UnseenMessages",
    "Unset",
    "VersionedMetadata",
    "VersionedValue",
    "capabilities",
    "compose_persistence",
    "define_activity_store",
    "define_interrupt_store",
    "define_message_store",
    "define_metadata_store",
    "define_persistence",
    "define_run_store",
    "memory_persistence",
    "open_persistence",
    "require",
]

_HOMES = {
    "chatkeep._maintenance": ("Maintenance",),
    "chatkeep.backends": (
        "Backend",
        "Persistence",
        "Stores",
        "open_persistence",
    ),
    "chatkeep.compose": (
        "capabilities",
        "compose_persistence",
        "define_activity_store",
        "define_interrupt_store",
        "define_message_store",
        "define_metadata_store",
        "define_persistence",
        "define_run_store",
        "require",
    ),
    "chatkeep.errors": (
        "BackendUnavailable",
        "BadRequest",
        "ChatkeepError",
        "CompositionError",
        "CorruptRecord",
        "DeliveryError",
        "EventsTrimmed",
        "InterruptConflict",
        "InterruptResumeError",
        "InvalidValue",
        "MissingExtra",
        "ProviderError",
        "RecordTooLarge",
        "RunConflict",
        "RunConflictReason",
        "SchemaOutOfDate",
        "StoreClosed",
        "StoreError",
        "ThreadConflict",
        "ToolError",
        "UnknownOffset",
        "UnknownRun",
        "UnseenMessages",
    ),
    "chatkeep.memory": (
        "MemoryBackend",
        "memory_persistence",
    ),
    "chatkeep.records": (
        "ActivityRecord",
        "CutRecord",
        "DraftRecord",
        "InterruptRecord",
        "InterruptStatus",
        "Lease",
        "ModelMessage",
        "Record",
        "RunError",
        "RunPatch",
        "RunRecord",
        "RunStatus",
        "ThreadInfo",
        "UNSET",
        "Unset",
    ),
    "chatkeep.scope": (
        "EMPTY_SCOPE",
        "Scope",
    ),
    "chatkeep.stores": (
        "ActivityStore",
        "BatchCommit",
        "CutArchive",
        "InterruptAnswer",
        "InterruptRef",
        "InterruptStore",
        "MessagePage",
        "MessageStore",
        "MetadataStore",
        "PagedMessages",
        "ReclaimableRuns",
        "RevisionedMessages",
        "RunHistory",
        "RunStore",
        "RunTree",
        "SpliceResult",
        "ThreadAdmin",
        "ThreadExport",
        "ThreadList",
        "Transcript",
        "TurnBackend",
        "VersionedMetadata",
        "VersionedValue",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_EXTRAS = {"postgres_persistence": "postgres", "sqlite_persistence": "sqlite"}


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'chatkeep' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS or error.name != module:
            raise
        from chatkeep.errors import MissingExtra

        raise MissingExtra(f"{name}()", _EXTRAS[name]) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
