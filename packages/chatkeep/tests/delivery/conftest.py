"""Streams and a clock for the delivery tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from ag_ui.core import (
    BaseEvent,
    RunFinishedEvent,
    RunStartedEvent,
    TextMessageContentEvent,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def started() -> BaseEvent:
    return RunStartedEvent(thread_id="t", run_id="r")


def finished() -> BaseEvent:
    return RunFinishedEvent(thread_id="t", run_id="r")


def text(delta: str) -> BaseEvent:
    return TextMessageContentEvent(message_id="m", delta=delta)


async def stream_of(*events: BaseEvent) -> AsyncIterator[BaseEvent]:
    for event in events:
        yield event
