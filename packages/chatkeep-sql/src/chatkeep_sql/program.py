"""A store primitive as a program: it yields statements and is sent their rows.

Written once and driven twice: on PostgreSQL by an ``await`` for each statement, on SQLite in
the connection's own thread, all statements in one visit. A program does no I/O itself and
keeps no state, so it may be run again from its start.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import BigInteger, Executable
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

__all__ = ["Parameters", "Program", "Rows", "Step", "StoreNow", "first"]

_T = TypeVar("_T")

Parameters: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Binds of one statement; a list runs it once for each."""

Step: TypeAlias = tuple[Executable, Parameters]
Rows: TypeAlias = list[Any]
"""Tuples, in order; empty for a statement that returns none."""

Program: TypeAlias = Generator[Step, Rows, _T]


class StoreNow(FunctionElement[int]):
    """The database's clock, in epoch milliseconds."""

    name = "store_now"
    type = BigInteger()
    inherit_cache = True


@compiles(StoreNow, "postgresql")
def _postgres_now(_element: StoreNow, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"


@compiles(StoreNow, "sqlite")
def _sqlite_now(_element: StoreNow, _compiler: SQLCompiler, **_: Any) -> str:
    # strftime('%f') has milliseconds; unixepoch('subsec') only exists since SQLite 3.42.
    return (
        "(CAST(strftime('%s', 'now') AS INTEGER) * 1000"
        " + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER))"
    )


def first(rows: Rows) -> Any | None:
    """The first row, or None."""
    return rows[0] if rows else None
