"""Locks: one hash for each, in a slot of its own."""

from __future__ import annotations

from typing import Any

from chatkeep.codec import FORMAT_VERSION
from chatkeep.locks import lock_key
from chatkeep_redis.rows import check_format
from chatkeep_redis.space import Space

__all__ = ["acquire", "release", "renew"]


async def _run(space: Space, what: str, name: str, token: str, lease_ms: int) -> list[Any]:
    key = space.keys.lock(lock_key(space.scope, name))
    answer: list[Any] = await space.runner.run(
        "lock", [key], [what, FORMAT_VERSION, token, lease_ms]
    )
    if answer[0] == b"format":
        check_format(answer[1], f"lock {name!r}")
    return answer


async def acquire(space: Space, name: str, token: str, lease_ms: int) -> int | None:
    """Take the lock, if it is free."""
    answer = await _run(space, "acquire", name, token, lease_ms)
    return int(answer[1]) if answer[0] == b"ok" else None


async def renew(space: Space, name: str, token: str, lease_ms: int) -> bool:
    """Extend the lease, if the lock is still this holder's."""
    return bool((await _run(space, "renew", name, token, lease_ms))[0] == b"ok")


async def release(space: Space, name: str, token: str) -> None:
    """Let go."""
    await _run(space, "release", name, token, 0)
