"""Every error of SQLAlchemy and of the three drivers, as one of chatkeep's.

The drivers are not imported: errors are told apart by SQLSTATE (PostgreSQL) or by result code
(SQLite), and by the module that defines them.
"""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CorruptRecord,
    InvalidValue,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)

__all__ = ["ConnectionLost", "is_disconnect", "may_run_again", "sqlstate", "translate"]

_DRIVERS = ("psycopg", "psycopg_pool", "asyncpg", "sqlite3", "aiosqlite", "sqlalchemy", "alembic")

_RUN_AGAIN = {"40001", "40P01", "23505"}
"""Serialisation failure, deadlock, and a row that another writer inserted first."""

_UNAVAILABLE_CLASSES = {"08", "28", "53", "58"}
_UNAVAILABLE = {
    "25P03", "25P04", "3D000", "40001", "40P01", "55P03", "55006", "57014", "57P01", "57P02",
    "57P03", "57P04", "57P05",
}  # fmt: skip
_SCHEMA = {"3F000", "42P01", "42703", "42P10", "42804"}
_NOT_SENT = {"08001", "08004", "28000", "28P01", "3D000", "53300", "57P03", "40001", "40P01"}

_GIGABYTE = 1_000_000_000


class ConnectionLost(Exception):
    """A driver's connection is gone, told apart where SQLAlchemy does not (see ``direct``)."""


def translate(error: Exception) -> Exception:
    """The chatkeep error for ``error``; ``error`` itself if it comes from no database.

    The caller chains it (``raise translate(error) from error``).
    """
    if isinstance(error, ChatkeepError):
        return error
    if isinstance(error, PoolTimeout):
        return BackendUnavailable(f"no free connection: {error}")
    if isinstance(error, ConnectionLost):
        return BackendUnavailable(str(error), outcome_unknown=True)
    cause = _driver_error(error)
    if isinstance(cause, OverflowError) and "SQLite" in str(cause):
        return InvalidValue("$", str(cause))
    if (code := sqlstate(cause)) is not None:
        return _from_sqlstate(code, cause)
    if isinstance(cause, sqlite3.Error):
        return _from_sqlite(cause)
    if is_disconnect(error) or isinstance(cause, OSError | TimeoutError):
        return BackendUnavailable(_text(cause), outcome_unknown=not _before_sending(cause))
    if _is_closed_connection(cause):
        return BackendUnavailable(_text(cause), outcome_unknown=True)
    if isinstance(error, SQLAlchemyError) or _module(cause) in _DRIVERS:
        return _from_class(cause)
    return error


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of a PostgreSQL error, of SQLAlchemy's or of a driver's own."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def may_run_again(error: BaseException) -> bool:
    """Whether a transaction that failed so has written nothing and may well succeed now."""
    return sqlstate(error) in _RUN_AGAIN


def is_disconnect(error: BaseException) -> bool:
    """Whether the connection is gone; SQLAlchemy has emptied its pool already."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated
    return isinstance(error, ConnectionLost)


def _driver_error(error: Exception) -> BaseException:
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    return error


def _module(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(":")


def _before_sending(error: BaseException) -> bool:
    return isinstance(error, ConnectionRefusedError)


def _is_closed_connection(error: BaseException) -> bool:
    # aiosqlite says so with a plain ValueError.
    return isinstance(error, ValueError) and str(error).lower() in {
        "no active connection",
        "connection closed",
    }


def _from_sqlstate(code: str, cause: BaseException) -> Exception:
    text = f"{_text(cause)} (SQLSTATE {code})"
    group = code[:2]
    if code in _UNAVAILABLE or group in _UNAVAILABLE_CLASSES:
        return BackendUnavailable(text, outcome_unknown=code not in _NOT_SENT)
    if code in _SCHEMA:
        return SchemaOutOfDate(f"{text}: run `chatkeep migrate URL` with a role that may")
    if group == "54":
        return RecordTooLarge("a row", _GIGABYTE, _GIGABYTE)
    if group == "22":
        return InvalidValue("$", text)
    if code in {"XX001", "XX002"}:
        return CorruptRecord("a row", text)
    return StoreError(text)


def _from_sqlite(cause: sqlite3.Error) -> Exception:
    code = getattr(cause, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    text = _text(cause)
    if primary in {
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_NOLFS,
    }:  # fmt: skip
        return BackendUnavailable(text)
    if primary in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}:
        return CorruptRecord("the database file", text)
    if primary == sqlite3.SQLITE_TOOBIG or "too big" in str(cause):
        return RecordTooLarge("a row", _GIGABYTE, _GIGABYTE)
    if any(word in str(cause) for word in ("no such table", "no such column", "has no column")):
        return SchemaOutOfDate(f"{text}: run `chatkeep migrate URL`")
    if isinstance(cause, sqlite3.OperationalError) and primary is None:
        return BackendUnavailable(text)
    if isinstance(cause, sqlite3.DataError):
        return InvalidValue("$", text)
    return StoreError(text)


def _from_class(cause: BaseException) -> Exception:
    """Errors without a code: by the name that PEP 249 gives their class."""
    names = {kind.__name__ for kind in type(cause).__mro__}
    if names & {"OperationalError", "InterfaceError", "InternalClientError", "PoolTimeout"}:
        return BackendUnavailable(_text(cause), outcome_unknown=True)
    if "DataError" in names:
        return InvalidValue("$", _text(cause))
    if isinstance(cause, NoSuchModuleError):
        return StoreError(f"no such driver: {cause}")
    return StoreError(_text(cause))
