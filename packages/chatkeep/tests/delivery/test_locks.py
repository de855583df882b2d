"""Locks in a chat: the capability, and what is refused at construction."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import define_persistence, memory_persistence
from chatkeep.delivery import LOCKS, LockStore, StoredLocks, with_locks
from chatkeep.delivery._locks import LOCK_LOST
from chatkeep.engine import ChatContext, ChatMiddleware, chat
from chatkeep.errors import BackendUnavailable, CompositionError
from chatkeep.testkit.scripted import ScriptedModel

pytestmark = pytest.mark.anyio


async def test_the_locks_of_a_chat_are_a_capability() -> None:
    """For middleware behind it, which may require it."""
    locks = StoredLocks(memory_persistence())
    seen: list[Any] = []

    class Needs(ChatMiddleware):
        name = "needs"
        requires = (LOCKS,)

        async def setup(self, ctx: ChatContext) -> None:
            async with ctx.get(LOCKS).hold(ctx.thread_id) as held:
                seen.append(held.name)

    stream = chat(
        adapter=ScriptedModel(),
        messages=[{"id": "u", "role": "user", "content": "hi"}],
        thread_id="t",
        run_id="r",
        middleware=[with_locks(locks), Needs()],
    )
    events = [event async for event in stream]
    assert events[-1].type == "RUN_FINISHED"
    assert seen == ["t"]
    assert isinstance(locks, LockStore)


def test_a_persistence_without_locks_is_refused_by_name_of_what_helps() -> None:
    class Messages:
        async def load_thread(self, thread_id: str) -> list[Any]:
            return []

        async def save_thread(self, thread_id: str, messages: Any) -> None:
            """Keeps nothing."""

    with pytest.raises(CompositionError, match="a user's stores: no locks"):
        StoredLocks(define_persistence({"messages": Messages()}))


async def test_a_holder_that_cannot_renew_its_lock_is_told_when_its_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others reach the database, maybe: from then on they may hold the lock."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    hang = asyncio.Event()

    async def renew(*_: Any) -> bool:
        await hang.wait()
        raise BackendUnavailable("down")

    monkeypatch.setattr(backend, "_lock_renew", renew)
    async with StoredLocks(persistence, lease_ms=60).hold("x") as held:
        async with asyncio.timeout(5):
            await held.signal.wait()
        assert held.signal.reason == LOCK_LOST
        hang.set()
