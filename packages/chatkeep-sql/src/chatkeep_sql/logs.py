"""Delivery logs: each primitive of :class:`chatkeep.logs.LogBackend` as a program."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import text

from chatkeep.codec import FORMAT_VERSION
from chatkeep.errors import RunConflict
from chatkeep.logs import LogHead, LogPage, log_key
from chatkeep.scope import Scope
from chatkeep_sql.log_statements import LOG_COLUMNS, LogStatements
from chatkeep_sql.program import Program, first
from chatkeep_sql.rows import check_format, thread_key
from chatkeep_sql.statements import in_chunks

__all__ = [
    "CHANNEL",
    "Tell",
    "append",
    "close",
    "erase_of_thread",
    "heads",
    "lost",
    "open_log",
    "read",
    "take",
    "tell_nobody",
    "tell_postgres",
    "trim",
]

CHANNEL = "chatkeep_log"
"""PostgreSQL's channel; the payload is the log's key in hexadecimal."""

_NOW = len(LOG_COLUMNS)
_TOKEN, _LOG_NO = _NOW + 1, _NOW + 2

_NOTIFY = text(f"SELECT pg_notify('{CHANNEL}', CAST(:key AS text))")

Tell = Callable[[bytes], Program[None]]
"""Tells other processes that a log has changed, once the transaction is committed."""


def tell_nobody(_key: bytes) -> Program[None]:
    """SQLite has no way to."""
    yield from ()


def tell_postgres(key: bytes) -> Program[None]:
    """By NOTIFY."""
    yield _NOTIFY, {"key": key.hex()}


def _head(row: Any) -> LogHead:
    run_id, thread_id, incarnation, epoch, kept, end, closed_at, lease_until, version, now = row[
        : _NOW + 1
    ]
    check_format(version, f"log of run {run_id!r}")
    return LogHead(
        run_id=run_id,
        thread_id=thread_id,
        incarnation=incarnation,
        epoch=epoch,
        first=kept,
        end=end,
        closed=closed_at is not None,
        lost=closed_at is None and lease_until <= now,
    )


def open_log(
    sql: LogStatements, scope: Scope, run_id: str, thread_id: str, token: str, lease_ms: int
) -> Program[LogHead]:
    """A new log, or the one that this token opened. Two that open it at once meet in the unique
    key: the slower one's transaction is run again, and then sees the other's."""
    by_key = {"by_key": log_key(scope, run_id)}
    row: Any = first((yield sql.head, by_key))
    if row is None:
        tenant, user = scope.key
        yield (
            sql.insert_head,
            {
                "key": by_key["by_key"],
                "thread_key": thread_key(scope, thread_id),
                "tenant_id": tenant,
                "user_id": user,
                "thread_id": thread_id,
                "run_id": run_id,
                "incarnation": secrets.token_hex(4),
                "epoch": 1,
                "token": token,
                "first_number": 1,
                "next_number": 1,
                # Its first renewal gives it the store's clock.
                "lease_until": 0,
                "format": FORMAT_VERSION,
            },
        )
        row = first((yield sql.head, by_key))
        yield sql.update_head, {"by_log": row[_LOG_NO], "lease_until": row[_NOW] + lease_ms}
        row = first((yield sql.head, by_key))
    head = _head(row)
    if head.thread_id != thread_id:
        raise RunConflict(run_id, "foreign-thread")
    if row[_TOKEN] != token:
        raise RunConflict(run_id, "terminal" if head.closed else "running", thread_id=thread_id)
    return head


def append(
    sql: LogStatements,
    tell: Tell,
    scope: Scope,
    run_id: str,
    token: str,
    number: int,
    bodies: Sequence[bytes],
    lease_ms: int,
    keep_from: int,
) -> Program[None]:
    """Add events, unless they are there."""
    key = log_key(scope, run_id)
    row: Any = first((yield sql.lock_head, {"by_key": key}))
    if row is None:
        raise RunConflict(run_id, "unknown", detail="its log is no longer kept")
    head = _head(row)
    if row[_TOKEN] != token:
        raise RunConflict(run_id, "lease-lost", thread_id=head.thread_id)
    if head.closed:
        raise RunConflict(run_id, "terminal", detail="its log is closed")
    end = number + len(bodies)
    if number != head.end and end != head.end:
        raise RunConflict(run_id, "lease-lost", detail=f"event {number} is not its next one")
    by_log = {"by_log": row[_LOG_NO]}
    if number == head.end and bodies:
        yield (
            sql.insert_event,
            [
                {
                    "log_no": row[_LOG_NO],
                    "number": number + i,
                    "body": body.decode(),
                    "format": FORMAT_VERSION,
                }
                for i, body in enumerate(bodies)
            ],
        )
    kept = max(head.first, min(keep_from, end))
    if kept > head.first:
        yield sql.drop_events, {**by_log, "before": kept}
    yield (
        sql.update_head,
        {
            **by_log,
            "next_number": end,
            "first_number": kept,
            "lease_until": row[_NOW] + lease_ms,
        },
    )
    if bodies:
        yield from tell(key)


def close(sql: LogStatements, tell: Tell, scope: Scope, run_id: str, token: str) -> Program[bool]:
    """Close it, if it is this writer's."""
    key = log_key(scope, run_id)
    rows = yield sql.close, {"by_key": key, "by_token": token}
    if rows:
        yield from tell(key)
    return bool(rows)


def take(
    sql: LogStatements,
    tell: Tell,
    scope: Scope,
    run_id: str,
    token: str,
    lease_ms: int,
    only_lost: bool,
) -> Program[LogHead | None]:
    """Change the writer, in one conditional write."""
    key = log_key(scope, run_id)
    binds = {"by_key": key, "new_token": token, "lease_ms": lease_ms}
    row = first((yield sql.take(only_lost=only_lost), binds))
    if row is None:
        return None
    yield from tell(key)
    return _head(row)


def read(
    sql: LogStatements, scope: Scope, run_id: str, number: int, limit: int, max_bytes: int
) -> Program[LogPage | None]:
    """A page, and the head of the same moment."""
    row: Any = first((yield sql.head, {"by_key": log_key(scope, run_id)}))
    if row is None:
        return None
    head = _head(row)
    bodies: list[bytes] = []
    if head.first <= number < head.end:
        binds = {"by_log": row[_LOG_NO], "start": number, "limit": min(limit, head.end - number)}
        size = 0
        for found, body, version in (yield sql.events, binds):
            check_format(version, f"event {found} of run {run_id!r}")
            encoded = body.encode()
            size += len(encoded)
            if found != number + len(bodies) or (bodies and size > max_bytes):
                break
            bodies.append(encoded)
    return LogPage(head=head, number=number, bodies=bodies)


def heads(sql: LogStatements, keys: Sequence[bytes]) -> Program[dict[bytes, LogHead]]:
    """Heads of these, of any scope."""
    found: dict[bytes, LogHead] = {}
    for chunk in in_chunks(keys):
        # Always as many binds, so that there are few statements to compile.
        count = 1 if len(chunk) == 1 else 100
        binds = {f"by_{i}": chunk[min(i, len(chunk) - 1)] for i in range(count)}
        for row in (yield sql.heads(count), binds):
            found[bytes(row[_NOW + 1])] = _head(row)
    return found


def lost(sql: LogStatements, limit: int) -> Program[list[tuple[Scope, LogHead]]]:
    """Whose writers are gone, the longest first."""
    rows = yield sql.lost, {"limit": limit}
    return [(Scope.from_key(row[_NOW + 1], row[_NOW + 2]), _head(row)) for row in rows]


def trim(sql: LogStatements, closed_ms: int, limit: int) -> Program[int]:
    """Erase what was closed that long ago."""
    rows = yield sql.old, {"closed_ms": closed_ms, "limit": limit}
    yield from _delete(sql, rows)
    return len(rows)


def erase_of_thread(
    sql: LogStatements, scope: Scope, thread_id: str, *, only_closed: bool
) -> Program[None]:
    """Erase the logs of a thread."""
    by_thread = {"by_thread": thread_key(scope, thread_id)}
    yield from _delete(sql, (yield sql.of_thread(only_closed=only_closed), by_thread))


def _delete(sql: LogStatements, rows: Sequence[Any]) -> Program[None]:
    if rows:
        for statement in sql.delete_log:
            yield statement, [{"by_log": row[0]} for row in rows]
