"""Delivery logs of the reference backend."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkeep.errors import RunConflict
from chatkeep.logs import LogHead, LogPage, log_key
from chatkeep.scope import Scope

__all__ = ["MemoryLogs"]


@dataclass(slots=True)
class _Log:
    scope: Scope
    run_id: str
    thread_id: str
    token: str
    lease_until: int
    incarnation: str = field(default_factory=lambda: secrets.token_hex(4))
    epoch: int = 1
    first: int = 1
    bodies: list[bytes] = field(default_factory=list[bytes])
    closed_at: int | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.bodies)

    def head(self, now: int) -> LogHead:
        return LogHead(
            run_id=self.run_id,
            thread_id=self.thread_id,
            incarnation=self.incarnation,
            epoch=self.epoch,
            first=self.first,
            end=self.end,
            closed=self.closed_at is not None,
            lost=self.closed_at is None and self.lease_until <= now,
        )


class MemoryLogs:
    """All logs, by :func:`~chatkeep.logs.log_key`; the caller holds a lock."""

    def __init__(self) -> None:
        self._logs: dict[bytes, _Log] = {}

    def open(
        self, scope: Scope, run_id: str, thread_id: str, token: str, lease_ms: int, now: int
    ) -> LogHead:
        """A new log, or the one that this token opened."""
        key = log_key(scope, run_id)
        known = self._logs.get(key)
        if known is not None and (known.thread_id, known.token) != (thread_id, token):
            if known.thread_id != thread_id:
                raise RunConflict(run_id, "foreign-thread")
            ended = known.closed_at is not None
            raise RunConflict(run_id, "terminal" if ended else "running", thread_id=thread_id)
        if known is None:
            known = self._logs[key] = _Log(scope, run_id, thread_id, token, now + lease_ms)
        return known.head(now)

    def append(
        self,
        scope: Scope,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        lease_until: int,
        keep_from: int,
    ) -> None:
        """Add events, unless they are there."""
        log = self._logs.get(log_key(scope, run_id))
        if log is None:
            raise RunConflict(run_id, "unknown", detail="its log is no longer kept")
        if log.token != token:
            raise RunConflict(run_id, "lease-lost", thread_id=log.thread_id)
        if log.closed_at is not None:
            raise RunConflict(run_id, "terminal", detail="its log is closed")
        log.lease_until = lease_until
        if number == log.end:
            log.bodies += bodies
        elif number + len(bodies) != log.end:
            raise RunConflict(run_id, "lease-lost", detail=f"event {number} is not its next one")
        drop = min(keep_from, log.end) - log.first
        if drop > 0:
            del log.bodies[:drop]
            log.first += drop

    def close(self, scope: Scope, run_id: str, token: str, now: int) -> bool:
        """Close it, if it is this writer's."""
        log = self._logs.get(log_key(scope, run_id))
        if log is None or log.token != token:
            return False
        if log.closed_at is None:
            log.closed_at = now
        return True

    def take(
        self, scope: Scope, run_id: str, token: str, lease_ms: int, now: int, *, only_lost: bool
    ) -> LogHead | None:
        """Change the writer."""
        log = self._logs.get(log_key(scope, run_id))
        if log is None or log.closed_at is not None:
            return None
        if log.token != token:
            if only_lost and log.lease_until > now:
                return None
            log.token = token
            log.epoch += 1
        log.lease_until = now + lease_ms
        return log.head(now)

    def read(
        self, scope: Scope, run_id: str, number: int, limit: int, max_bytes: int, now: int
    ) -> LogPage | None:
        """A page."""
        log = self._logs.get(log_key(scope, run_id))
        if log is None:
            return None
        bodies: list[bytes] = []
        if number >= log.first:
            size = 0
            start = number - log.first
            for body in log.bodies[start : start + limit]:
                size += len(body)
                if bodies and size > max_bytes:
                    break
                bodies.append(body)
        return LogPage(head=log.head(now), number=number, bodies=bodies)

    def heads(self, keys: Sequence[bytes], now: int) -> dict[bytes, LogHead]:
        """Heads of these."""
        return {key: log.head(now) for key in keys if (log := self._logs.get(key)) is not None}

    def lost(self, limit: int, now: int) -> list[tuple[Scope, LogHead]]:
        """Whose writers are gone."""
        found = [
            log for log in self._logs.values() if log.closed_at is None and log.lease_until <= now
        ]
        found.sort(key=lambda log: log.lease_until)
        return [(log.scope, log.head(now)) for log in found[:limit]]

    def trim(self, closed_before: int, limit: int) -> int:
        """Erase what was closed by then."""
        old = [
            key
            for key, log in self._logs.items()
            if log.closed_at is not None and log.closed_at <= closed_before
        ][:limit]
        for key in old:
            del self._logs[key]
        return len(old)

    def erase(self, scope: Scope, thread_id: str, *, only_closed: bool) -> None:
        """Erase the logs of a thread."""
        for key, log in list(self._logs.items()):
            mine = log.scope == scope and log.thread_id == thread_id
            if mine and (log.closed_at is not None or not only_closed):
                del self._logs[key]

    def clear(self) -> None:
        """Forget all."""
        self._logs.clear()
