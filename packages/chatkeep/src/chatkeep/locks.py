"""Tier: locks by name that every worker respects.

A backend that can keep them subclasses :class:`LockBackend` too and writes its ``_lock_…``
primitives; :class:`chatkeep.delivery.StoredLocks` waits, renews and lets go.

A lock is held under a token until its lease runs out by the store's clock. Each new holder gets a
*fence*: a number above that of every earlier holder, for a resource that can compare.
"""

from __future__ import annotations

import abc

from chatkeep._checks import check_integer, check_token
from chatkeep.backends import Backend
from chatkeep.scope import Scope, check_id, key_digest

__all__ = ["LockBackend", "lock_key"]


def lock_key(scope: Scope, name: str) -> bytes:
    """What names a lock in a store."""
    return key_digest("lock", *scope.key, name)


class LockBackend(Backend):
    """A backend with locks."""

    async def lock_acquire(self, name: str, token: str, lease_ms: int) -> int | None:
        """Take a lock that nobody holds, or whose lease has run out, in one conditional write;
        its fence, or None. Asked again with the same token, the answer is the same."""
        _check(name, token, lease_ms)
        return await self._call(lambda: self._lock_acquire(name, token, lease_ms))

    async def lock_renew(self, name: str, token: str, lease_ms: int) -> bool:
        """Extend the lease; False: somebody else has the lock, or it was let go."""
        _check(name, token, lease_ms)
        return await self._call(lambda: self._lock_renew(name, token, lease_ms))

    async def lock_release(self, name: str, token: str) -> None:
        """Let go; a lock that somebody else holds is left alone."""
        _check(name, token, 0)
        await self._call(lambda: self._lock_release(name, token), retries=self.commit_retries)

    # -- primitives -------------------------------------------------------------------

    @abc.abstractmethod
    async def _lock_acquire(self, name: str, token: str, lease_ms: int) -> int | None: ...

    @abc.abstractmethod
    async def _lock_renew(self, name: str, token: str, lease_ms: int) -> bool: ...

    @abc.abstractmethod
    async def _lock_release(self, name: str, token: str) -> None: ...


def _check(name: str, token: str, lease_ms: int) -> None:
    check_id(name, "name")
    check_token(token, "token")
    check_integer(lease_ms, "lease_ms")
