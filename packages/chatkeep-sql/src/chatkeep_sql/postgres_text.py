# ruff: noqa: S608  (names of tables and columns of ours; values are always bound)
"""Pieces of SQL text for PostgreSQL's two big statements."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from sqlalchemy import Table
from sqlalchemy.dialects.postgresql.base import PGDialect

from chatkeep_sql.schema import Tables

__all__ = ["NOW", "Names", "live_claim", "names_of"]

NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
"""The database's clock, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class Names:
    """The tables' names, quoted and with their schema."""

    threads: str
    entries: str
    cuts: str
    runs: str
    drafts: str
    interrupts: str
    activities: str


@lru_cache(maxsize=64)
def names_of(tables: Tables) -> Names:
    """The names of ``tables``, as they stand in SQL text."""
    preparer = PGDialect(paramstyle="named").identifier_preparer  # type: ignore[no-untyped-call]

    def name(table: Table) -> str:
        return preparer.format_table(table).replace(":", "\\:")

    return Names(**{f.name: name(getattr(tables, f.name)) for f in fields(Names)})


def live_claim(names: Names, interrupt: str, *, now: str = NOW) -> str:
    """Condition: the run that claims ``interrupt`` (an alias) is live."""
    return (
        f"({interrupt}.claimed_by IS NOT NULL AND EXISTS (SELECT 1 FROM {names.runs} AS c"
        f" WHERE c.thread_no = {interrupt}.thread_no AND c.run_id = {interrupt}.claimed_by"
        " AND c.status IN ('running', 'interrupted')"
        f" AND (c.lease_until IS NULL OR c.lease_until > {now})))"
    )
