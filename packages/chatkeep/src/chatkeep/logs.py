"""Tier: the events of runs, kept where every worker sees them.

A backend that can keep them subclasses :class:`LogBackend` instead of ``Backend`` and writes its
``_log_…`` primitives; :class:`chatkeep.delivery.StoredLog` makes a delivery log of them.

A run's log is a *head* and its events, numbered from 1 without gaps. It has one writer at a time:
who holds its token. Whoever takes a log over changes the token in one conditional write, so that
the former writer appends nothing any more. A writer that has died lets its lease run out.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatkeep._checks import check_integer, check_limit, check_token
from chatkeep.backends import Backend
from chatkeep.errors import StoreClosed
from chatkeep.scope import Scope, check_id, key_digest

__all__ = ["LogBackend", "LogHead", "LogPage", "log_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHead:
    """A run's log as it is now.

    ``first`` is the number of the oldest event that is kept, ``end`` the one that the next event
    will get. ``incarnation`` tells logs of one run id apart of which the earlier was trimmed.
    ``lost``: nobody has closed it, and its writer's lease has run out by the store's clock.
    ``epoch`` counts its writers, from 1.
    """

    run_id: str
    thread_id: str
    incarnation: str
    epoch: int
    first: int
    end: int
    closed: bool
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Some events in order; ``bodies[0]`` has the number ``number``. ``head`` is of the same
    moment. No bodies: there is nothing there, yet or any more (see ``head``)."""

    head: LogHead
    number: int
    bodies: list[bytes]


def log_key(scope: Scope, run_id: str) -> bytes:
    """What names a log in a store, and in what a store tells its listeners."""
    return key_digest("log", *scope.key, run_id)


class LogBackend(Backend):
    """A backend with delivery logs."""

    async def log_open(self, run_id: str, thread_id: str, token: str, lease_ms: int) -> LogHead:
        """Begin the log of a run; ``token`` is its writer's. Sent again with the same token, it
        is the same log.

        Raises:
            RunConflict: there is one: ``running``, ``terminal`` or ``foreign-thread``.
        """
        _check_names(run_id, token)
        check_id(thread_id, "thread_id")
        check_integer(lease_ms, "lease_ms")
        return await self._call(
            lambda: self._log_open(run_id, thread_id, token, lease_ms), retries=self.commit_retries
        )

    async def log_append(
        self,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        *,
        lease_ms: int,
        keep_from: int = 1,
    ) -> None:
        """Add events, the first of which gets ``number``: all of them or none. Extends the lease,
        also without events. Sent again after a lost reply, it adds nothing twice.

        Args:
            run_id: the run.
            token: its writer's.
            number: of the first event; the writer knows how many there were.
            bodies: JSON of each event.
            lease_ms: how long the writer counts as alive from now.
            keep_from: events with lower numbers are dropped.

        Raises:
            RunConflict: ``terminal``: the log is closed; ``lease-lost``: it has another writer;
                ``unknown``: it is no longer kept. Nothing was added.
        """
        _check_names(run_id, token)
        check_integer(number, "number")
        check_integer(keep_from, "keep_from")
        check_integer(lease_ms, "lease_ms")
        await self._call(
            lambda: self._log_append(run_id, token, number, bodies, lease_ms, keep_from),
            retries=self.commit_retries,
        )

    async def log_close(self, run_id: str, token: str) -> bool:
        """No more events; whether the log was this writer's to close. Idempotent."""
        _check_names(run_id, token)
        return await self._call(lambda: self._log_close(run_id, token), retries=self.commit_retries)

    async def log_take(
        self, run_id: str, token: str, lease_ms: int, *, only_lost: bool
    ) -> LogHead | None:
        """Become the writer of an open log, in one conditional write; None if that was not to be.

        Args:
            run_id: the run.
            token: the new writer's. Asked again with it, the answer is the same.
            lease_ms: how long the new writer counts as alive from now.
            only_lost: only if the present writer's lease has run out.
        """
        _check_names(run_id, token)
        check_integer(lease_ms, "lease_ms")
        return await self._call(
            lambda: self._log_take(run_id, token, lease_ms, only_lost), retries=self.commit_retries
        )

    async def log_read(
        self, run_id: str, number: int, *, limit: int, max_bytes: int
    ) -> LogPage | None:
        """Events from ``number`` on (0: none, the head alone), at most ``limit``; about
        ``max_bytes`` of them, but at least one. None: there is no such log."""
        check_id(run_id, "run_id")
        check_integer(number, "number")
        check_limit(limit)
        return await self._call(lambda: self._log_read(run_id, number, limit, max_bytes))

    async def log_heads(self, keys: Sequence[bytes]) -> dict[bytes, LogHead]:
        """Heads by :func:`log_key`, of any scope; logs that are not there are left out."""
        if not keys:
            return {}
        return await self._call(lambda: self._log_heads(keys))

    async def log_lost(self, *, limit: int) -> list[tuple[Scope, LogHead]]:
        """Of every scope: logs whose writer is gone, the longest first."""
        check_limit(limit)
        return await self._call(lambda: self._log_lost(limit))

    async def log_trim(self, *, closed_ms: int, limit: int) -> int:
        """Of every scope: erase logs that were closed ``closed_ms`` ago or earlier; how many."""
        check_integer(closed_ms, "closed_ms")
        check_limit(limit)
        return await self._call(lambda: self._log_trim(closed_ms, limit))

    async def log_listen(self, heard: Callable[[bytes | None], None]) -> None:
        """Call ``heard`` with the :func:`log_key` of every log that changes, from any process,
        and with None once it listens. Goes on until it is cancelled or the connection is lost
        (``BackendUnavailable``); returns at once where the database tells nobody anything."""
        if self._shared.closed:
            raise StoreClosed(f"the {self.name} persistence")
        await self._ensure_open()
        await self._translated(lambda: self._log_listen(heard))

    # -- primitives -------------------------------------------------------------------

    @abc.abstractmethod
    async def _log_open(
        self, run_id: str, thread_id: str, token: str, lease_ms: int
    ) -> LogHead: ...

    @abc.abstractmethod
    async def _log_append(
        self,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        lease_ms: int,
        keep_from: int,
    ) -> None: ...

    @abc.abstractmethod
    async def _log_close(self, run_id: str, token: str) -> bool: ...

    @abc.abstractmethod
    async def _log_take(
        self, run_id: str, token: str, lease_ms: int, only_lost: bool
    ) -> LogHead | None: ...

    @abc.abstractmethod
    async def _log_read(
        self, run_id: str, number: int, limit: int, max_bytes: int
    ) -> LogPage | None: ...

    @abc.abstractmethod
    async def _log_heads(self, keys: Sequence[bytes]) -> dict[bytes, LogHead]: ...

    @abc.abstractmethod
    async def _log_lost(self, limit: int) -> list[tuple[Scope, LogHead]]: ...

    @abc.abstractmethod
    async def _log_trim(self, closed_ms: int, limit: int) -> int: ...

    async def _log_listen(self, heard: Callable[[bytes | None], None]) -> None:
        """A database that tells nobody anything: see :meth:`log_listen`."""


def _check_names(run_id: str, token: str) -> None:
    check_id(run_id, "run_id")
    check_token(token, "token")
