"""Locks by name, across workers: one holder at a time, and word when it is no longer one."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar, runtime_checkable

from chatkeep.backends import Persistence
from chatkeep.engine import AbortSignal, Capability, ChatContext, ChatMiddleware
from chatkeep.errors import ChatkeepError, CompositionError
from chatkeep.locks import LockBackend
from chatkeep.scope import check_id

__all__ = ["LOCKS", "LOCK_LOST", "HeldLock", "LockStore", "StoredLocks", "with_locks"]

_T = TypeVar("_T")
_log = logging.getLogger("chatkeep.delivery")

LOCK_LOST: Final = "chatkeep:lock-lost"
"""The reason with which the signal of a lost lock goes off."""

_SHORTEST, _LONGEST = 0.01, 0.25
"""Seconds between two tries, growing; other processes' locks are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLock:
    """A lock that is held. ``fence`` is higher than that of every earlier holder. ``signal`` goes
    off when the lease was lost: from then on somebody else may hold the lock."""

    name: str
    fence: int
    signal: AbortSignal = field(default_factory=AbortSignal)


@runtime_checkable
class LockStore(Protocol):
    """Tier: locks by name."""

    def hold(self, name: str) -> AbstractAsyncContextManager[HeldLock]:
        """Wait for the lock and hold it: ``async with locks.hold("thread 1") as held``. It is let
        go on every way out. It is not reentrant."""
        ...


LOCKS: Final = Capability[LockStore]("locks")
"""The locks of this run; provided by :func:`with_locks`."""


class StoredLocks:
    """Locks in the database of a persistence; implements :class:`LockStore`.

    Args:
        persistence: whose first backend that can keeps the locks, in its scope.
        lease_ms: how long a holder that has died keeps others out. Renewed every third of it.

    Raises:
        CompositionError: no backend of the persistence keeps locks.
    """

    def __init__(self, persistence: Persistence, *, lease_ms: int = 10_000) -> None:
        if lease_ms < 1:
            raise CompositionError("lease_ms must be at least 1")
        self._backend = _lock_backend(persistence)
        self._lease_ms = lease_ms
        self._queues: dict[str, tuple[asyncio.Lock, int]] = {}

    def __repr__(self) -> str:
        return f"<StoredLocks in {self._backend.name}>"

    async def with_lock(self, name: str, work: Callable[[HeldLock], Awaitable[_T]]) -> _T:
        """Do ``work`` while holding the lock; its result."""
        async with self.hold(name) as held:
            return await work(held)

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncGenerator[HeldLock]:
        """See :class:`LockStore`.

        Raises:
            BackendUnavailable: the database cannot be reached.
        """
        check_id(name, "name")
        async with self._turn(name):
            token = secrets.token_urlsafe(16)
            try:
                fence, asked = await self._acquire(name, token)
                held = HeldLock(name=name, fence=fence)
                keeper = asyncio.create_task(
                    self._keep(held, token, asked), name=f"chatkeep lock {name}"
                )
                try:
                    yield held
                finally:
                    keeper.cancel()
                    await asyncio.wait({keeper})
            finally:
                # Also after a wait that was cancelled: the last try may have been granted.
                await self._release(name, token)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncGenerator[None]:
        """Those of this process wait in line, and only the first of them asks the database."""
        queue, waiting = self._queues.get(name, (asyncio.Lock(), 0))
        self._queues[name] = (queue, waiting + 1)
        try:
            async with queue:
                yield
        finally:
            queue, waiting = self._queues[name]
            if waiting == 1:
                del self._queues[name]
            else:
                self._queues[name] = (queue, waiting - 1)

    async def _acquire(self, name: str, token: str) -> tuple[int, float]:
        """The fence, and the loop's time at which the lease began, or earlier."""
        pause = _SHORTEST
        while True:
            asked = asyncio.get_running_loop().time()
            fence = await self._backend.lock_acquire(name, token, self._lease_ms)
            if fence is not None:
                return fence, asked
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 1.5, _LONGEST)

    async def _keep(self, held: HeldLock, token: str, asked: float) -> None:
        """Renew the lease. If no answer comes until it is over, the lock is lost too: others may
        reach the database."""
        loop = asyncio.get_running_loop()
        lease = self._lease_ms / 1000
        over = loop.call_at(asked + lease, _lose, held)
        try:
            while not held.signal.aborted:
                await asyncio.sleep(lease / 3)
                asked = loop.time()
                try:
                    renewed = await self._backend.lock_renew(held.name, token, self._lease_ms)
                except ChatkeepError as error:
                    _log.warning("the lock %r could not be renewed: %s", held.name, error)
                    continue
                if not renewed:
                    _lose(held)
                over.cancel()
                over = loop.call_at(asked + lease, _lose, held)
        finally:
            over.cancel()

    async def _release(self, name: str, token: str) -> None:
        try:
            await self._backend.lock_release(name, token)
        except ChatkeepError as error:
            _log.warning("the lock %r could not be let go, its lease runs out: %s", name, error)


def _lose(held: HeldLock) -> None:
    if not held.signal.aborted:
        _log.warning("the lock %r was lost", held.name)
        held.signal.abort(LOCK_LOST)


def with_locks(store: LockStore) -> ChatMiddleware:
    """Provide ``store`` to the tools and middleware of a chat, as the capability
    :data:`LOCKS`. The engine itself takes no locks: turns of one thread are merged by revision."""
    return _Locks(store)


class _Locks(ChatMiddleware):
    name = "locks"
    provides = (LOCKS,)

    def __init__(self, store: LockStore) -> None:
        self._store = store

    async def setup(self, ctx: ChatContext) -> None:
        """Provide the store."""
        ctx.provide(LOCKS, self._store)


def _lock_backend(persistence: Persistence) -> LockBackend:
    for backend in persistence.backends:
        if isinstance(backend, LockBackend):
            return backend
    names = ", ".join(dict.fromkeys(b.name for b in persistence.backends)) or "a user's stores"
    raise CompositionError(
        f"{names}: no locks can be kept there. Give StoredLocks a persistence on PostgreSQL, "
        "SQLite or Redis, beside the one that keeps the chats"
    )
