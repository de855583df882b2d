"""Locks by name: one holder at a time, in any process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from chatkeep.delivery import LOCK_LOST, HeldLock, LockStore, StoredLocks
from chatkeep.errors import CompositionError, InvalidValue
from chatkeep.locks import LockBackend
from chatkeep.testkit.conformance._base import ConformanceCase, Ids, gather, left_out

__all__ = ["TestLockStore"]


class TestLockStore(ConformanceCase):
    """Tier LockStore: a :class:`~chatkeep.delivery.StoredLocks` on the persistence. Two of them
    are two workers: they share nothing but the database."""

    @pytest.fixture
    def store(self, persistence: Any, declared: frozenset[str]) -> LockBackend:
        for backend in getattr(persistence, "backends", ()):
            if isinstance(backend, LockBackend) and "LockStore" not in declared:
                return backend
        raise left_out("LockStore", declared, "no backend keeps locks")

    @pytest.fixture
    def worker(self, persistence: Any, store: LockBackend) -> Callable[..., StoredLocks]:
        def make(**options: Any) -> StoredLocks:
            return StoredLocks(persistence, **options)

        return make

    async def test_one_holds_it_at_a_time(
        self, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """Many of two workers: never two at once, each gets it, and fences only grow."""
        name, workers = ids("lock"), [worker(), worker()]
        inside = 0
        fences: list[int] = []

        async def work(held: HeldLock) -> int:
            nonlocal inside
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            assert inside == 1
            inside -= 1
            assert not held.signal.aborted
            fences.append(held.fence)
            return held.fence

        results = await gather([workers[i % 2].with_lock(name, work) for i in range(24)])
        assert sorted(results) == fences
        assert len(set(fences)) == 24

    async def test_locks_of_other_names_are_others(
        self, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """However alike they look."""
        locks, name = worker(), ids("lock")
        async with locks.hold(name), locks.hold(name + " "), locks.hold(name.upper()):
            async with asyncio.timeout(10):
                async with worker().hold(name + ":"):
                    assert isinstance(locks, LockStore)

    async def test_an_error_inside_lets_go(
        self, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """It is the caller's, and nobody waits for the lease."""
        name = ids("lock")
        with pytest.raises(KeyError, match="mine"):
            async with worker(lease_ms=600_000).hold(name):
                raise KeyError("mine")
        async with asyncio.timeout(10), worker().hold(name):
            pass

    async def test_who_gives_up_waiting_leaves_nothing_behind(
        self, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """Neither in the holder's process nor in another."""
        name, here = ids("lock"), worker()
        async with here.hold(name):
            waiting = [asyncio.create_task(self._once(locks, name)) for locks in (here, worker())]
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert all(task.cancelled() for task in waiting)
        async with asyncio.timeout(10):
            await self._once(worker(), name)
            await self._once(here, name)

    @staticmethod
    async def _once(locks: StoredLocks, name: str) -> int:
        async with locks.hold(name) as held:
            return held.fence

    async def test_a_lease_that_is_renewed_does_not_run_out(
        self, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """A holder that lives keeps others out for as long as it likes."""
        name = ids("lock")
        async with worker(lease_ms=900).hold(name) as held:
            waiting = asyncio.create_task(self._once(worker(), name))
            await asyncio.sleep(1.5)
            assert not waiting.done()
            assert not held.signal.aborted
        assert await waiting > held.fence

    async def test_a_holder_that_died_keeps_nobody_out_for_long(
        self, store: LockBackend, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """Its lease runs out; the next fence is higher."""
        name = ids("lock")
        fence = await store.lock_acquire(name, "dead", 50)
        assert fence is not None
        async with asyncio.timeout(10), worker().hold(name) as held:
            assert held.fence > fence

    async def test_a_holder_whose_lease_was_lost_is_told(
        self, store: LockBackend, worker: Callable[..., StoredLocks], ids: Ids
    ) -> None:
        """By its signal; and what it lets go then is not the lock of whoever has it now."""
        name = ids("lock")
        async with worker(lease_ms=300).hold(name) as held:
            told = asyncio.Event()
            held.signal.add_callback(told.set)
            fence = None
            while fence is None:
                # The whole process stands still, for longer than the lease. Then its renewal and
                # somebody else's try race.
                time.sleep(0.5)  # noqa: ASYNC251
                fence = await store.lock_acquire(name, "second", 60_000)
            assert fence > held.fence
            async with asyncio.timeout(10):
                await told.wait()
            assert held.signal.reason == LOCK_LOST
        assert await store.lock_acquire(name, "third", 1000) is None
        await store.lock_release(name, "second")

    async def test_asking_again_with_a_token_is_no_second_holder(
        self, store: LockBackend, ids: Ids
    ) -> None:
        """The same fence; letting go twice is no error."""
        name = ids("lock")
        fence = await store.lock_acquire(name, "one", 60_000)
        assert await store.lock_acquire(name, "one", 60_000) == fence
        assert await store.lock_acquire(name, "two", 60_000) is None
        assert await store.lock_renew(name, "one", 60_000)
        assert not await store.lock_renew(name, "two", 60_000)
        await store.lock_release(name, "two")
        assert await store.lock_acquire(name, "two", 60_000) is None
        for _ in range(2):
            await store.lock_release(name, "one")
        assert not await store.lock_renew(name, "one", 60_000)
        later = await store.lock_acquire(name, "two", 60_000)
        assert later is not None
        assert fence is not None
        assert later > fence
        await store.lock_release(name, "two")

    async def test_locks_that_mean_nothing_are_refused(
        self, persistence: Any, worker: Callable[..., StoredLocks]
    ) -> None:
        """Before anything is asked."""
        for wrong in ("", "a\x00b"):
            with pytest.raises(InvalidValue):
                async with worker().hold(wrong):
                    pytest.fail("it was held")
        with pytest.raises(CompositionError):
            StoredLocks(persistence, lease_ms=0)
