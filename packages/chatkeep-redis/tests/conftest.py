"""Fixtures: a persistence on a server and on a cluster, and proof that no call was left open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from chatkeep import Persistence
from chatkeep.rules import new_commit_id
from chatkeep.stores import Splice, TurnCommit
from chatkeep_redis import redis_persistence
from chatkeep_redis.backend import RedisBackend
from chatkeep_redis.space import Space
from servers.redis import RedisSpace

BOTH = ("redis_space", "redis_cluster_space")
"""Fixtures of the two topologies."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class _Died(BaseException):
    """The process is gone: nothing handles it."""


class Crash:
    """Whether the work was over before the process died."""

    died = False


class Tools:
    """What tests do to a persistence behind its back."""

    @staticmethod
    def backend(persistence: Persistence) -> RedisBackend:
        return cast("RedisBackend", persistence.backends[0])

    def space(self, persistence: Persistence) -> Space:
        return self.backend(persistence)._here

    def in_use(self, persistence: Persistence) -> int:
        """Calls under way."""
        return self.backend(persistence)._space.runner.in_use

    def hints_last(self, persistence: Persistence, ms: int) -> None:
        """Let hints be good for ``ms`` only: nobody waits two minutes in a test."""
        backend = self.backend(persistence)
        backend._space = replace(backend._space, hint_ms=ms)

    @contextmanager
    def crash(self, persistence: Persistence, after: int) -> Iterator[Crash]:
        """The process dies once this many scripts have been run: no later one arrives."""
        runner: Any = self.backend(persistence)._space.runner
        crash = Crash()
        left = [after]
        send = runner._send

        async def die(name: str, keys: Any, values: Any) -> Any:
            if not left[0]:
                raise _Died
            left[0] -= 1
            return await send(name, keys, values)

        runner._send = die
        try:
            yield crash
        except _Died:
            crash.died = True
        finally:
            del runner._send

    @contextmanager
    def calls(self, persistence: Persistence) -> Iterator[list[str]]:
        """The scripts that are sent meanwhile, by name: each is one round trip."""
        runner: Any = self.backend(persistence)._space.runner
        sent: list[str] = []
        send = runner._send

        async def note(name: str, keys: Any, values: Any) -> Any:
            sent.append(name)
            return await send(name, keys, values)

        runner._send = note
        try:
            yield sent
        finally:
            del runner._send

    @staticmethod
    def said(thread_id: str, message_id: str, *, expected: str | None = None, keep: int = 0) -> Any:
        """A commit of one user message."""
        tail: Any = [{"id": message_id, "role": "user", "content": message_id}]
        return TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread_id,
            splice=Splice(keep_through=keep, tail=tail, expected=expected),
        )


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.redis) for name in BOTH])
def anywhere(request: pytest.FixtureRequest) -> RedisSpace:
    """An empty prefix, on a server and on a cluster."""
    space: RedisSpace = request.getfixturevalue(request.param)
    return space


@pytest.fixture
async def persistence(anywhere: RedisSpace, tools: Tools) -> AsyncIterator[Persistence]:
    """An empty persistence on each; no call may be under way when the test is over."""
    async with redis_persistence(anywhere.url()) as persistence:
        yield persistence
        assert tools.in_use(persistence) == 0


@pytest.fixture
async def single(redis_space: RedisSpace, tools: Tools) -> AsyncIterator[Persistence]:
    """The same, on a server only."""
    async with redis_persistence(redis_space.url()) as persistence:
        yield persistence
        assert tools.in_use(persistence) == 0


@pytest.fixture
async def clustered(redis_cluster_space: RedisSpace, tools: Tools) -> AsyncIterator[Persistence]:
    """The same, on a cluster only."""
    async with redis_persistence(redis_cluster_space.url()) as persistence:
        yield persistence
        assert tools.in_use(persistence) == 0
