"""Every error of redis-py, as one of chatkeep's."""

from __future__ import annotations

from redis import exceptions as driver

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    CorruptRecord,
    RecordTooLarge,
    StoreError,
)

__all__ = ["MAX_VALUE_BYTES", "is_lost_connection", "translate"]

MAX_VALUE_BYTES = 512 * 1024 * 1024
"""Longest value that a server takes (``proto-max-bulk-len``, unless it is configured otherwise)."""

_NOT_DONE = (
    "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOAUTH", "NOREPLICAS", "OOM",
    "READONLY", "TRYAGAIN", "UNKILLABLE", "WRONGPASS", "max number of clients",
)  # fmt: skip
"""How answers begin with which a server says that it did nothing, and may do it later."""

_UNAVAILABLE: tuple[type[Exception], ...] = (
    driver.AskError,
    driver.BusyLoadingError,
    driver.AuthenticationError,
    driver.AuthorizationError,
    driver.AuthenticationWrongNumberOfArgsError,
    driver.ClusterDownError,
    driver.MasterDownError,
    driver.MaxConnectionsError,
    driver.MovedError,
    driver.NoScriptError,
    driver.OutOfMemoryError,
    driver.ReadOnlyError,
    driver.SlotNotCoveredError,
    driver.TryAgainError,
)
"""Nothing was done, and the same may succeed later or once the server is set up."""


def translate(error: Exception, *, cluster: bool = False) -> Exception:
    """The chatkeep error for ``error``; ``error`` itself if it comes from no database.

    ``cluster``: it is raised by a client of a cluster, which follows a move by itself.
    The caller chains it (``raise translate(error) from error``).
    """
    if isinstance(error, ChatkeepError):
        return error
    text = _text(error)
    if isinstance(error, driver.MovedError) and not cluster:
        return CompositionError(
            f"this server is part of a cluster: use a redis+cluster:// URL ({text})"
        )
    if isinstance(error, _UNAVAILABLE):
        return BackendUnavailable(text)
    if isinstance(error, driver.ConnectionError | driver.TimeoutError | driver.InvalidResponse):
        return BackendUnavailable(text, outcome_unknown=not _before_sending(error))
    if isinstance(error, driver.ResponseError):
        return _from_answer(str(error), text)
    if isinstance(error, driver.ClusterError):
        return BackendUnavailable(text, outcome_unknown=True)
    if type(error) is driver.RedisClusterException:
        return BackendUnavailable(text)
    if isinstance(error, OSError | EOFError):
        refused = isinstance(error, ConnectionRefusedError)
        return BackendUnavailable(text, outcome_unknown=not refused)
    if _from_driver(error):
        return StoreError(text)
    return error


def is_lost_connection(error: BaseException) -> bool:
    """Whether a connection broke, as those do that a server left behind when it was restarted."""
    known = isinstance(error, driver.ConnectionError | OSError)
    return known and not isinstance(error, driver.MaxConnectionsError | driver.AuthenticationError)


def _from_answer(answer: str, text: str) -> Exception:
    if "CHATKEEP-CORRUPT" in answer:
        what = answer.partition("CHATKEEP-CORRUPT ")[2].partition(" script:")[0]
        return CorruptRecord(f"a stored {what}", "is not as it was written")
    if "user_script" in answer and ("attempt to" in answer or "bad argument" in answer):
        # Scripts judge what they read before they write: what they stumble over was not theirs.
        return CorruptRecord("a thread", answer)
    if "WRONGTYPE" in answer:
        return CorruptRecord("a key of chatkeep's", "holds a value of another kind")
    if any(word in answer for word in _NOT_DONE):
        return BackendUnavailable(text)
    if "invalid bulk length" in answer or "string exceeds maximum" in answer:
        return RecordTooLarge("a value", MAX_VALUE_BYTES, MAX_VALUE_BYTES)
    return StoreError(text)


def _before_sending(error: Exception) -> bool:
    return str(error).startswith("Error ") and " connecting to " in str(error)


def _from_driver(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "redis"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(":")
