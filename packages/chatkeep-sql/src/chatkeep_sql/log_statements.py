"""The statements on delivery logs, built once for each schema."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    Select,
    Update,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.sql.dml import Delete, Insert, ReturningUpdate

from chatkeep_sql.program import StoreNow
from chatkeep_sql.schema import Tables

__all__ = ["LOG_COLUMNS", "LogStatements", "log_statements_for"]

LOG_COLUMNS = (
    "run_id",
    "thread_id",
    "incarnation",
    "epoch",
    "first_number",
    "next_number",
    "closed_at",
    "lease_until",
    "format",
)
"""What a read of a head begins with; the clock follows."""


@lru_cache(maxsize=64)
def log_statements_for(tables: Tables) -> LogStatements:
    """The statements on ``tables``."""
    return LogStatements(tables)


class LogStatements:
    """Statements by what they do. Binds that find rows start with ``by_``."""

    def __init__(self, tables: Tables) -> None:
        self.t = tables

    @cached_property
    def head(self) -> Select[*tuple[Any, ...]]:
        """Head columns, the clock, token and number of a log, by ``by_key``."""
        t = self.t.logs
        columns = [t.c[name] for name in LOG_COLUMNS]
        return select(*columns, StoreNow(), t.c.token, t.c.log_no).where(
            t.c.key == bindparam("by_key")
        )

    @cached_property
    def lock_head(self) -> Select[*tuple[Any, ...]]:
        """The same, locked against other writers."""
        return self.head.with_for_update(key_share=True)

    @lru_cache(maxsize=8)  # noqa: B019  (statements live as long as the process)
    def heads(self, count: int) -> Select[*tuple[Any, ...]]:
        """The same of many, with their keys, by ``by_0``, ``by_1``, …"""
        t = self.t.logs
        columns = [t.c[name] for name in LOG_COLUMNS]
        keys: list[BindParameter[Any]] = [bindparam(f"by_{i}") for i in range(count)]
        return select(*columns, StoreNow(), t.c.key).where(t.c.key.in_(keys))

    @cached_property
    def insert_head(self) -> Insert:
        """A new log."""
        return insert(self.t.logs)

    @cached_property
    def update_head(self) -> Update:
        """Set columns of a log, by ``by_log``."""
        return update(self.t.logs).where(self.t.logs.c.log_no == bindparam("by_log"))

    @cached_property
    def close(self) -> ReturningUpdate[Any]:
        """Close what ``by_key`` and ``by_token`` name; a row if that writer has it."""
        t = self.t.logs
        return (
            update(t)
            .where(t.c.key == bindparam("by_key"), t.c.token == bindparam("by_token"))
            .values(closed_at=func.coalesce(t.c.closed_at, StoreNow()))
            .returning(t.c.log_no)
        )

    @lru_cache(maxsize=2)  # noqa: B019
    def take(self, *, only_lost: bool) -> ReturningUpdate[Any]:
        """Make ``new_token`` the writer of an open log: one conditional write."""
        t = self.t.logs
        mine = t.c.token == bindparam("new_token")
        statement = update(t).where(t.c.key == bindparam("by_key"), t.c.closed_at.is_(None))
        if only_lost:
            statement = statement.where(mine | (t.c.lease_until <= StoreNow()))
        return statement.values(
            token=bindparam("new_token"),
            epoch=t.c.epoch + case((mine, 0), else_=1),
            lease_until=StoreNow() + bindparam("lease_ms"),
        ).returning(*(t.c[name] for name in LOG_COLUMNS), StoreNow())

    @cached_property
    def insert_event(self) -> Insert:
        """One event."""
        return insert(self.t.log_events)

    @cached_property
    def drop_events(self) -> Delete:
        """The events below ``before``."""
        t = self.t.log_events
        return delete(t).where(t.c.log_no == bindparam("by_log"), t.c.number < bindparam("before"))

    @cached_property
    def events(self) -> Select[*tuple[Any, ...]]:
        """Number, body and format from ``start`` on."""
        t = self.t.log_events
        return (
            select(t.c.number, t.c.body, t.c.format)
            .where(t.c.log_no == bindparam("by_log"), t.c.number >= bindparam("start"))
            .order_by(t.c.number)
            .limit(bindparam("limit"))
        )

    @cached_property
    def lost(self) -> Select[*tuple[Any, ...]]:
        """Head columns, the clock, tenant and user of open logs whose lease has run out."""
        t = self.t.logs
        columns = [t.c[name] for name in LOG_COLUMNS]
        return (
            select(*columns, StoreNow(), t.c.tenant_id, t.c.user_id)
            .where(t.c.closed_at.is_(None), t.c.lease_until <= StoreNow())
            .order_by(t.c.lease_until, t.c.log_no)
            .limit(bindparam("limit"))
        )

    @cached_property
    def old(self) -> Select[*tuple[Any, ...]]:
        """Numbers of logs that were closed ``closed_ms`` ago or earlier."""
        t = self.t.logs
        return (
            select(t.c.log_no)
            .where(t.c.closed_at <= StoreNow() - bindparam("closed_ms"))
            .order_by(t.c.closed_at, t.c.log_no)
            .limit(bindparam("limit"))
        )

    @lru_cache(maxsize=2)  # noqa: B019
    def of_thread(self, *, only_closed: bool) -> Select[*tuple[Any, ...]]:
        """Numbers of the logs of a thread."""
        t = self.t.logs
        found = select(t.c.log_no).where(t.c.thread_key == bindparam("by_thread"))
        return found.where(t.c.closed_at.is_not(None)) if only_closed else found

    @cached_property
    def delete_log(self) -> tuple[Delete, Delete]:
        """A log's events, then the log. Foreign keys would do that too, but SQLite only minds
        them on connections that were told to."""
        events, logs = self.t.log_events, self.t.logs
        return (
            delete(events).where(events.c.log_no == bindparam("by_log")),
            delete(logs).where(logs.c.log_no == bindparam("by_log")),
        )
