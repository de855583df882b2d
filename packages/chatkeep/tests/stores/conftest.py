"""A clock that tests move by hand, and a memory persistence that runs on it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence, memory_persistence


class Clock:
    """Epoch milliseconds that only move when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now

    def forward(self, ms: int) -> None:
        self.now += ms


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def memory(clock: Clock) -> AsyncIterator[Persistence]:
    async with memory_persistence(clock=clock) as persistence:
        yield persistence
