# ruff: noqa: S608  (names of tables and columns of ours; values are always bound)
"""What every event of a live run waits for, as one statement (PostgreSQL)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.dialects.postgresql.base import PGDialect

from chatkeep.codec import FORMAT_VERSION
from chatkeep.logs import log_key
from chatkeep.scope import Scope
from chatkeep_sql.logs import CHANNEL
from chatkeep_sql.postgres_text import NOW
from chatkeep_sql.program import Program
from chatkeep_sql.schema import Tables

__all__ = ["append_postgres"]


@lru_cache(maxsize=64)
def _statement(tables: Tables) -> TextClause:
    preparer = PGDialect(paramstyle="named").identifier_preparer  # type: ignore[no-untyped-call]
    logs, events = (
        preparer.format_table(table).replace(":", "\\:")
        for table in (tables.logs, tables.log_events)
    )
    # The update locks the head: appends of one log are committed in the order of their numbers,
    # so whoever sees an event sees all before it.
    return text(
        f"WITH head AS (UPDATE {logs} SET next_number = next_number + CAST(:count AS bigint),"
        f" lease_until = {NOW} + CAST(:lease_ms AS bigint)"
        " WHERE key = CAST(:key AS bytea) AND token = CAST(:token AS text)"
        " AND closed_at IS NULL AND next_number = CAST(:number AS bigint)"
        " RETURNING log_no),"
        f" written AS (INSERT INTO {events} (log_no, number, body, format)"
        " SELECT head.log_no, CAST(:number AS bigint) + event.place - 1, event.body,"
        f" {FORMAT_VERSION} FROM head, unnest(CAST(:bodies AS text[]))"
        " WITH ORDINALITY AS event(body, place))"
        f" SELECT pg_notify('{CHANNEL}', encode(CAST(:key AS bytea), 'hex')) FROM head"
    )


def append_postgres(
    tables: Tables,
    scope: Scope,
    run_id: str,
    token: str,
    number: int,
    bodies: Sequence[bytes],
    lease_ms: int,
) -> Program[bool]:
    """Add the events; False if nothing was: :func:`chatkeep_sql.logs.append` tells why."""
    binds: dict[str, Any] = {
        "key": log_key(scope, run_id),
        "token": token,
        "number": number,
        "count": len(bodies),
        "bodies": [body.decode() for body in bodies],
        "lease_ms": lease_ms,
    }
    rows = yield _statement(tables), binds
    return bool(rows)
