"""Every error chatkeep raises.

    ChatkeepError
    ├── StoreError                  a store refused or failed
    │   ├── ThreadConflict          another writer moved the thread (revision)
    │   │   └── UnseenMessages      the post would cut turns its client never saw
    │   ├── InterruptConflict       already answered, claimed, or already there
    │   ├── RunConflict             foreign thread, running, terminal, lease lost
    │   ├── RecordTooLarge          a record above the backend's hard limit
    │   ├── CorruptRecord           a stored row that cannot be read back
    │   ├── BackendUnavailable      down, timed out, connection lost
    │   ├── SchemaOutOfDate         tables are missing, behind or ahead
    │   └── StoreClosed             used after ``aclose()``
    ├── InvalidValue                a value that no backend may store
    ├── CompositionError            a bag of stores that cannot work together
    │   └── MissingExtra            a backend whose package is not installed
    ├── InterruptResumeError        a resume batch that was refused
    ├── DeliveryError               an event log that cannot serve what was asked
    │   ├── UnknownRun              a run that the log does not know, or no longer
    │   ├── UnknownOffset           an offset that names no event of the run
    │   └── EventsTrimmed           older events of the run are no longer kept
    ├── BadRequest                  a request that is not one of ours
    ├── ProviderError               a model call that failed
    └── ToolError                   a tool definition or call that is wrong

``code`` is the stable word that goes on the wire (``RUN_ERROR.code``, problem
details); messages are for people and may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

__all__ = [
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
    "StructuredOutputError",
    "StructuredOutputReason",
    "ThreadConflict",
    "ToolError",
    "UnknownOffset",
    "UnknownRun",
    "UnseenMessages",
]

RunConflictReason = Literal[
    "foreign-thread", "running", "terminal", "lease-lost", "transition", "unknown"
]
StructuredOutputReason = Literal["missing-result", "parse-failed", "validation-failed"]


_FAILED = "The server could not do this. Its log says why."
_UNREACHABLE = "The store cannot be reached at the moment. Try again."


class ChatkeepError(Exception):
    """Base of the tree."""

    code: ClassVar[str] = "chatkeep-error"


class StoreError(ChatkeepError):
    """A store refused the call or failed to carry it out.

    ``public`` is what a browser is told instead of the text, which may name hosts, tables or
    rows; None: the text may be shown.
    """

    code = "store-error"
    public: ClassVar[str | None] = _FAILED


class ThreadConflict(StoreError):
    """The thread is at another revision than the caller expected. Nothing was written."""

    code = "thread-conflict"
    public = None

    def __init__(
        self,
        thread_id: str,
        *,
        expected: str | None = None,
        actual: str | None = None,
        message: str | None = None,
    ) -> None:
        self.thread_id = thread_id
        self.expected = expected
        self.actual = actual
        super().__init__(
            message or f"thread {thread_id!r} is at revision {actual!r}, not {expected!r}"
        )


class UnseenMessages(ThreadConflict):
    """A post would cut entries above the sequence number its client has seen."""

    code = "unseen-messages"

    def __init__(self, thread_id: str, *, seen: int, newest: int) -> None:
        self.seen = seen
        self.newest = newest
        super().__init__(
            thread_id,
            message=(
                f"the post would cut messages of thread {thread_id!r} up to number {newest}, "
                f"but its client has only seen up to {seen}"
            ),
        )


class InterruptConflict(StoreError):
    """An interrupt is already answered, claimed by another run, or already exists.

    ``remaining`` lists the ids that are still pending (sequential fallback).
    """

    code = "interrupt-conflict"
    public = None

    def __init__(
        self,
        thread_id: str,
        interrupt_ids: Sequence[str],
        reason: str,
        *,
        remaining: Sequence[str] = (),
    ) -> None:
        self.thread_id = thread_id
        self.interrupt_ids = tuple(interrupt_ids)
        self.reason = reason
        self.remaining = tuple(remaining)
        names = ", ".join(repr(i) for i in self.interrupt_ids) or "(none)"
        super().__init__(f"interrupt {names} of thread {thread_id!r}: {reason}")


class RunConflict(StoreError):
    """A run id that this caller may not start, drive or change. Nothing was written."""

    code = "run-conflict"
    public = None

    def __init__(
        self,
        run_id: str,
        reason: RunConflictReason,
        *,
        thread_id: str | None = None,
        detail: str = "",
    ) -> None:
        self.run_id = run_id
        self.reason: RunConflictReason = reason
        self.thread_id = thread_id
        text = {
            "foreign-thread": "belongs to another thread",
            "running": "is already running",
            "terminal": "has already ended",
            "lease-lost": "is driven by somebody else: the lease was lost",
            "transition": "cannot change its status that way",
            "unknown": "does not exist",
        }[reason]
        super().__init__(f"run {run_id!r} {text}" + (f" ({detail})" if detail else ""))


class RecordTooLarge(StoreError):
    """A record above a hard limit of the backend. Sizes are bytes."""

    code = "record-too-large"
    public = None

    def __init__(self, what: str, size: int, limit: int) -> None:
        self.what = what
        self.size = size
        self.limit = limit
        super().__init__(f"{what} has {size} bytes; the limit is {limit}")


class CorruptRecord(StoreError):
    """A stored row cannot be read back. It is never treated as absent."""

    code = "corrupt-record"

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what} cannot be read: {reason}")


class BackendUnavailable(StoreError):
    """The database is down, timed out, or the connection broke.

    ``outcome_unknown`` is true when the write may have been applied. Sending the same
    ``TurnCommit`` again is safe: its commit id makes the second one a no-op.
    """

    code = "backend-unavailable"
    public = _UNREACHABLE

    def __init__(self, message: str, *, outcome_unknown: bool = False) -> None:
        self.outcome_unknown = outcome_unknown
        super().__init__(message)


class SchemaOutOfDate(StoreError):
    """Tables are missing, or their version is not the one this package reads."""

    code = "schema-out-of-date"

    def __init__(self, message: str, *, found: str | None = None, expected: str | None = None):
        self.found = found
        self.expected = expected
        super().__init__(message)


class StoreClosed(StoreError):
    """The persistence was used after ``aclose()``."""

    code = "store-closed"
    public = _UNREACHABLE

    def __init__(self, what: str = "this persistence") -> None:
        super().__init__(f"{what} is closed")


class InvalidValue(ChatkeepError, ValueError):
    """A value that no backend may store; ``path`` says where it stands (``$.a[0]``)."""

    code = "invalid-value"

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class CompositionError(ChatkeepError, TypeError):
    """A bag of stores that cannot do what is asked of it."""

    code = "composition-error"


class MissingExtra(CompositionError):
    """A backend or helper whose package is not installed; the message names the extra."""

    code = "missing-extra"

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f'{what} needs an extra: pip install "chatkeep[{extra}]"')


class InterruptResumeError(ChatkeepError):
    """A refused resume batch. ``errors`` are JSON objects, item errors first.

    Each has ``scope`` (``item`` or ``batch``), ``code``, ``message``, ``source``,
    ``retryable``, ``threadId``, ``interruptedRunId``, ``generation`` and ``interruptId`` or
    ``interruptIds``: what the browser client matches against the batch it sent.
    """

    code = "interrupt-resume"

    def __init__(self, errors: Sequence[dict[str, Any]]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(str(e.get("message", e.get("code"))) for e in self.errors))

    @property
    def first_code(self) -> str:
        """Code of the first error: what ``RUN_ERROR.code`` carries."""
        return str(self.errors[0]["code"]) if self.errors else self.code


class ProviderError(ChatkeepError):
    """A model call failed: the provider said so, or its stream broke the contract.

    ``provider_code`` is the provider's word for it (``429``); ``raw_event`` what it sent.
    """

    code = "provider-error"

    def __init__(
        self, message: str, *, provider_code: str | None = None, raw_event: Any = None
    ) -> None:
        self.provider_code = provider_code
        self.raw_event = raw_event
        super().__init__(message)


class StructuredOutputError(ChatkeepError):
    """A run ended without the object that it was asked for.

    ``reason`` says why; ``raw`` is what the model said instead, if anything.
    """

    code = "structured-output"

    def __init__(
        self, message: str, reason: StructuredOutputReason, *, raw: str | None = None
    ) -> None:
        self.reason: StructuredOutputReason = reason
        self.raw = raw
        super().__init__(message)

    @property
    def full_code(self) -> str:
        """What ``RUN_ERROR.code`` carries: ``structured-output-parse-failed``, …"""
        return f"{self.code}-{self.reason}"


class ToolError(ChatkeepError):
    """A tool definition that is wrong (duplicate name, bad schema)."""

    code = "tool-error"


class DeliveryError(ChatkeepError):
    """An event log cannot serve what was asked for. The transcript is not concerned."""

    code = "delivery-error"


class UnknownRun(DeliveryError):
    """The log does not know the run: never started here, or no longer kept."""

    code = "unknown-run"

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"no events of run {run_id!r} are kept here")


class UnknownOffset(DeliveryError):
    """An offset that names no event of the run."""

    code = "unknown-offset"

    def __init__(self, run_id: str, offset: str) -> None:
        self.run_id = run_id
        self.offset = offset
        super().__init__(f"{offset!r} names no event of run {run_id!r}")


class EventsTrimmed(DeliveryError):
    """The run published more than is kept of one run, and older events were asked for."""

    code = "events-trimmed"

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"older events of run {run_id!r} are no longer kept")


class BadRequest(ChatkeepError, ValueError):
    """A request that does not say what a chat request must say; ``path`` names the place
    (``$.messages[0].id``). Nothing was touched."""

    code = "bad-request"

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")
