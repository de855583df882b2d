"""Every error of PyMongo, Motor and BSON, as one of chatkeep's.

Motor raises PyMongo's errors. What a server says is told apart by its numeric code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from bson.errors import BSONError, InvalidBSON
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DocumentTooLarge,
    EncryptionError,
    ExecutionTimeout,
    InvalidOperation,
    NetworkTimeout,
    OperationFailure,
    ProtocolError,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
)

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CorruptRecord,
    InvalidValue,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)

__all__ = ["only_duplicates", "translate"]

_DUPLICATE = 11000
_DOCUMENT_LIMIT = 16 * 1024 * 1024

_UNAVAILABLE = {
    6,  # HostUnreachable
    7,  # HostNotFound
    13,  # Unauthorized
    18,  # AuthenticationFailed
    24,  # LockTimeout
    46,  # LockBusy
    50,  # MaxTimeMSExpired
    64,  # WriteConcernTimeout
    79,  # UnknownReplWriteConcern
    89,  # NetworkTimeout
    91,  # ShutdownInProgress
    100,  # UnsatisfiableWriteConcern
    112,  # WriteConflict
    133,  # FailedToSatisfyReadPreference
    134,  # ReadConcernMajorityNotAvailableYet
    136,  # CappedPositionLost
    175,  # QueryPlanKilled
    189,  # PrimarySteppedDown
    202,  # NetworkInterfaceExceededTimeLimit
    234,  # RetryChangeStream
    237,  # CursorKilled
    262,  # ExceededTimeLimit
    317,  # ConnectionPoolExpired
    358,  # InternalTransactionNotSupported
    384,  # ConnectionError
    462,  # IngressRequestRateLimitExceeded
    9001,  # SocketException
    10058,  # NotPrimary (legacy)
    10107,  # NotWritablePrimary
    11600,  # InterruptedAtShutdown
    11601,  # Interrupted
    11602,  # InterruptedDueToReplStateChange
    13388,  # StaleConfig
    13435,  # NotPrimaryNoSecondaryOk
    13436,  # NotPrimaryOrSecondary
    14031,  # OutOfDiskSpace
    43,  # CursorNotFound
    63,  # StaleShardVersion
    150,  # StaleEpoch
    249,  # StaleDbVersion
}
_NOT_APPLIED = {13, 18, 112, 10107, 13435, 462}
"""Of these: what the server says before it has done anything."""
_TOO_LARGE = {10334, 17280, 17419, 17420, 10}
_INVALID = {2, 9, 14, 16755, 22, 52}
_SCHEMA = {26, 27, 85, 86, 121}


def translate(error: Exception) -> Exception:
    """The chatkeep error for ``error``; ``error`` itself if it comes from no database.

    The caller chains it (``raise translate(error) from error``).
    """
    if isinstance(error, ChatkeepError) or not isinstance(error, PyMongoError | BSONError):
        return error
    text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    if isinstance(error, DocumentTooLarge):
        return RecordTooLarge("a document", _DOCUMENT_LIMIT, _DOCUMENT_LIMIT)
    if isinstance(error, InvalidBSON):
        return CorruptRecord("a document", text)
    if isinstance(error, BSONError):
        return InvalidValue("$", text)
    if isinstance(error, ServerSelectionTimeoutError | WaitQueueTimeoutError):
        return BackendUnavailable(text)
    if isinstance(error, AutoReconnect | NetworkTimeout | ConnectionFailure | ProtocolError):
        return BackendUnavailable(text, outcome_unknown=True)
    if isinstance(error, OperationFailure):
        return _from_server(error, text)
    if isinstance(error, InvalidOperation) and _closed(error):
        return BackendUnavailable(text)
    if isinstance(error, ConfigurationError | EncryptionError):
        return StoreError(text)
    return StoreError(text)


def _closed(error: InvalidOperation) -> bool:
    return "close" in str(error).lower()


def _from_server(error: OperationFailure, text: str) -> Exception:
    codes = _codes(error)
    if isinstance(error, WriteConcernError | ExecutionTimeout) or codes & _UNAVAILABLE:
        known = bool(codes) and codes <= _NOT_APPLIED
        return BackendUnavailable(text, outcome_unknown=not known)
    if error.has_error_label("RetryableWriteError") or _concern_failed(error):
        return BackendUnavailable(text, outcome_unknown=True)
    if codes & _TOO_LARGE:
        return RecordTooLarge("a document", _DOCUMENT_LIMIT, _DOCUMENT_LIMIT)
    if codes & _SCHEMA:
        return SchemaOutOfDate(f"{text}: run `chatkeep migrate URL` with a user who may")
    if codes & _INVALID:
        return InvalidValue("$", text)
    return StoreError(text)


def _codes(error: OperationFailure) -> set[int]:
    """The server's codes: of the command, and of each write in it."""
    found = {error.code}
    for kind in ("writeErrors", "writeConcernErrors"):
        found |= {row.get("code") for row in _rows(error, kind)}
    return {code for code in found if isinstance(code, int) and code != _BULK}


_BULK = 65
"""PyMongo's own code for a bulk write of which a part failed."""


def _rows(error: OperationFailure, kind: str) -> list[Mapping[str, Any]]:
    details = error.details or {}
    return cast("list[Mapping[str, Any]]", details.get(kind) or [])


def _concern_failed(error: OperationFailure) -> bool:
    return isinstance(error, BulkWriteError) and bool(_rows(error, "writeConcernErrors"))


def only_duplicates(error: BulkWriteError) -> bool:
    """Whether all that failed in a bulk write are keys that exist already."""
    rows = _rows(error, "writeErrors")
    return (
        bool(rows)
        and not _concern_failed(error)
        and all(row.get("code") == _DUPLICATE for row in rows)
    )
