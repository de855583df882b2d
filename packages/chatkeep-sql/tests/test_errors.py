"""Every error of SQLAlchemy and of the drivers becomes one of chatkeep's."""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Iterator
from typing import Any

import aiosqlite
import asyncpg
import asyncpg.exceptions
import psycopg
import psycopg.errors
import pytest
import sqlalchemy.exc as sa

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CorruptRecord,
    InvalidValue,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)
from chatkeep_sql.errors import translate


def classes(module: Any, base: type[BaseException]) -> Iterator[type[Any]]:
    for _, kind in sorted(inspect.getmembers(module, inspect.isclass)):
        if issubclass(kind, base) and issubclass(kind, Exception):
            yield kind


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CircularDependencyError": ("x", [], []),
    "NoReferencedColumnError": ("x", "a", "b", "c"),
    "NoReferencedTableError": ("x", "a"),
    "UnsupportedCompilationError": (None, object),
    "CompileError": ("x",),
}


def instance(kind: type[Any]) -> Exception:
    if issubclass(kind, sa.DBAPIError):
        return kind("select 1", {}, ValueError("x"))
    if issubclass(kind, sa.StatementError):
        return kind("x", "select 1", {}, ValueError("x"))
    for arguments in (ARGUMENTS.get(kind.__name__, ("x",)), ("x", "y"), ()):
        try:
            return kind(*arguments)
        except TypeError:
            continue
    return kind.__new__(kind)


DRIVER_ERRORS = [
    *classes(sa, sa.SQLAlchemyError),
    *classes(psycopg, psycopg.Error),
    *classes(psycopg.errors, psycopg.Error),
    *classes(asyncpg.exceptions, asyncpg.exceptions.PostgresError),
    *classes(asyncpg.exceptions, asyncpg.exceptions.InterfaceError),
    *classes(asyncpg.exceptions, asyncpg.exceptions.InternalClientError),
    *classes(sqlite3, sqlite3.Error),
    *classes(aiosqlite, aiosqlite.Error),
]


@pytest.mark.parametrize(
    "kind", sorted(set(DRIVER_ERRORS), key=lambda k: (k.__module__, k.__name__))
)
def test_no_error_of_a_driver_gets_out(kind: type[Any]) -> None:
    """Bare, and wrapped by SQLAlchemy as it arrives."""
    error = instance(kind)
    for given in (error, sa.DBAPIError("select 1", {}, error)):
        known = translate(given)
        assert isinstance(known, ChatkeepError), known
        assert isinstance(known, StoreError | InvalidValue)
        assert str(known)


def test_what_is_no_database_error_is_left_alone() -> None:
    for error in (ValueError("x"), KeyError("x"), RuntimeError("x"), SchemaOutOfDate("x")):
        assert translate(error) is error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("08006", BackendUnavailable),
        ("57P01", BackendUnavailable),
        ("57014", BackendUnavailable),
        ("53300", BackendUnavailable),
        ("53100", BackendUnavailable),
        ("55P03", BackendUnavailable),
        ("40P01", BackendUnavailable),
        ("28P01", BackendUnavailable),
        ("3D000", BackendUnavailable),
        ("42P01", SchemaOutOfDate),
        ("42703", SchemaOutOfDate),
        ("54000", RecordTooLarge),
        ("22003", InvalidValue),
        ("22021", InvalidValue),
        ("XX001", CorruptRecord),
        ("25006", StoreError),
        ("42501", StoreError),
        ("23514", StoreError),
    ],
)
def test_the_code_decides_on_postgresql(code: str, kind: type[Exception]) -> None:
    """The same of both drivers."""
    of_psycopg = psycopg.errors.lookup(code)("x")
    of_asyncpg = asyncpg.exceptions.PostgresError.new({"C": code, "M": "x"})
    for error in (of_psycopg, of_asyncpg):
        assert type(translate(sa.DBAPIError("s", {}, error))) is kind


def sqlite_error(statement: str) -> sqlite3.Error:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(statement)
    except sqlite3.Error as error:
        return error
    finally:
        connection.close()
    raise AssertionError("it did not fail")


def test_the_code_decides_on_sqlite() -> None:
    assert type(translate(sqlite_error("select * from no_table"))) is SchemaOutOfDate
    assert type(translate(sqlite_error("select zeroblob(3000000000)"))) is RecordTooLarge
    assert type(translate(sqlite_error("attach '/nowhere/at/all' as x"))) is BackendUnavailable
    assert type(translate(sqlite_error("selec"))) is StoreError


def test_a_refused_connection_was_not_applied() -> None:
    known = translate(ConnectionRefusedError(111, "no"))
    assert isinstance(known, BackendUnavailable)
    assert not known.outcome_unknown
    known = translate(ConnectionResetError(104, "reset"))
    assert isinstance(known, BackendUnavailable)
    assert known.outcome_unknown
