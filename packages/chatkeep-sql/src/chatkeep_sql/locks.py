"""Locks: each primitive of :class:`chatkeep.locks.LockBackend` as a program.

Rows, not PostgreSQL's advisory locks: those belong to a connection, which a pooler hands around and
which nobody can look at; a row has a lease, and a fence that outlives its holder.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from sqlalchemy import Select, Update, bindparam, delete, insert, select, update
from sqlalchemy.sql.dml import Insert, ReturningDelete, ReturningUpdate

from chatkeep.codec import FORMAT_VERSION
from chatkeep.locks import lock_key
from chatkeep.scope import Scope
from chatkeep_sql.program import Program, StoreNow, first
from chatkeep_sql.rows import check_format
from chatkeep_sql.schema import Tables

__all__ = ["LockStatements", "acquire", "lock_statements_for", "release", "renew"]


@lru_cache(maxsize=64)
def lock_statements_for(tables: Tables) -> LockStatements:
    """The statements on ``tables``."""
    return LockStatements(tables)


class LockStatements:
    """Statements by what they do. Binds that find rows start with ``by_``."""

    def __init__(self, tables: Tables) -> None:
        self.t = tables.locks

    @cached_property
    def row(self) -> Select[*tuple[Any, ...]]:
        """Token, fence, lease and format of a lock, and the clock; the row is locked."""
        t = self.t
        found = select(t.c.token, t.c.fence, t.c.lease_until, t.c.format, StoreNow())
        return found.where(t.c.key == bindparam("by_key")).with_for_update()

    @cached_property
    def now(self) -> Select[*tuple[Any, ...]]:
        """The clock."""
        return select(StoreNow())

    @cached_property
    def insert_row(self) -> Insert:
        """A lock that nobody has held lately."""
        return insert(self.t)

    @cached_property
    def update_row(self) -> Update:
        """Set columns of a lock."""
        return update(self.t).where(self.t.c.key == bindparam("by_key"))

    @cached_property
    def renew(self) -> ReturningUpdate[Any]:
        """Extend the lease; a row if ``by_token`` holds the lock."""
        t = self.t
        return (
            update(t)
            .where(t.c.key == bindparam("by_key"), t.c.token == bindparam("by_token"))
            .values(lease_until=StoreNow() + bindparam("lease_ms"))
            .returning(t.c.fence)
        )

    @cached_property
    def forget(self) -> ReturningDelete[Any]:
        """Take the row away, if by now the clock alone gives the next holder a higher fence."""
        t = self.t
        return (
            delete(t)
            .where(
                t.c.key == bindparam("by_key"),
                t.c.token == bindparam("by_token"),
                t.c.fence < StoreNow(),
            )
            .returning(t.c.fence)
        )

    @cached_property
    def let_go(self) -> Update:
        """Leave the row, for its fence, to nobody."""
        t = self.t
        return (
            update(t)
            .where(t.c.key == bindparam("by_key"), t.c.token == bindparam("by_token"))
            .values(token="", lease_until=0)
        )


def acquire(
    sql: LockStatements, scope: Scope, name: str, token: str, lease_ms: int
) -> Program[int | None]:
    """Take the lock, if it is free. Two that find no row meet in the primary key: the slower one's
    transaction is run again, and then sees the other's row."""
    key = lock_key(scope, name)
    row: Any = first((yield sql.row, {"by_key": key}))
    if row is None:
        ((now,),) = yield sql.now, {}
        tenant, user = scope.key
        values: dict[str, Any] = {
            "key": key,
            "tenant_id": tenant,
            "user_id": user,
            "name": name,
            "token": token,
            "fence": now,
            "lease_until": now + lease_ms,
            "format": FORMAT_VERSION,
        }
        yield sql.insert_row, values
        return int(now)
    holder, fence, until, version, now = row
    check_format(version, f"lock {name!r}")
    if holder != token:
        if until > now:
            return None
        fence = max(fence + 1, now)
    changes = {"token": token, "fence": fence, "lease_until": now + lease_ms}
    yield sql.update_row, {"by_key": key, **changes}
    return int(fence)


def renew(sql: LockStatements, scope: Scope, name: str, token: str, lease_ms: int) -> Program[bool]:
    """Extend the lease, if the lock is still this holder's."""
    binds = {"by_key": lock_key(scope, name), "by_token": token, "lease_ms": lease_ms}
    return bool((yield sql.renew, binds))


def release(sql: LockStatements, scope: Scope, name: str, token: str) -> Program[None]:
    """Let go."""
    binds = {"by_key": lock_key(scope, name), "by_token": token}
    if not (yield sql.forget, binds):
        yield sql.let_go, binds
