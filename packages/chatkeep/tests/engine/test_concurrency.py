"""Many conversations at once: each gets its own events, and memory stays bounded."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from ag_ui.core import (
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
)

from chatkeep.engine import ChatMiddleware, ChatStream, Event, ModelRequest, chat
from chatkeep.engine.chat import STREAM_BUFFER
from chatkeep.testkit.event_order import check_events
from chatkeep.testkit.played import collect
from chatkeep.testkit.scripted import ScriptedModel, scripted_tools

pytestmark = pytest.mark.anyio


class Talker:
    """Says ``count`` deltas of ``size`` characters; counts how many were asked for."""

    provider, model = "p", "m"

    def __init__(self, count: int, size: int = 5, *, pause: bool = True) -> None:
        self.count, self.size, self.pause = count, size, pause
        self.made = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        yield TextMessageStartEvent(message_id=request.message_id)
        for _ in range(self.count):
            if self.pause:
                await asyncio.sleep(0)
            self.made += 1
            yield TextMessageContentEvent(message_id=request.message_id, delta="x" * self.size)
        yield TextMessageEndEvent(message_id=request.message_id)
        yield RunFinishedEvent(thread_id="t", run_id="r", finishReason="stop")


async def test_a_thousand_conversations_at_once() -> None:
    async def one(number: int) -> None:
        scenario = ("text", "server-tool", "reasoning", "server-tool-error")[number % 4]
        stream = chat(
            adapter=model,
            messages=[{"role": "user", "content": f"SCENARIO:{scenario}"}],
            thread_id=f"t{number}",
            run_id=f"r{number}",
            tools=tools,
        )
        events = await collect(stream)
        check_events(events)
        assert {e.model_dump()["run_id"] for e in (events[0], events[-1])} == {f"r{number}"}

    model, tools = ScriptedModel(), scripted_tools()
    await asyncio.gather(*[one(n) for n in range(1000)])


async def test_a_slow_reader_holds_the_model_back() -> None:
    """The run is never more than its buffer ahead: there is no unbounded queue."""
    talker = Talker(10_000, pause=False)
    stream = chat(adapter=talker, messages=[])
    read = 0
    async for _ in stream:
        read += 1
        await asyncio.sleep(0)
        assert talker.made <= read + 2 * STREAM_BUFFER
        if read == 500:
            break
    await stream.aclose()


async def test_waiting_runs_hold_a_buffer_each_not_their_whole_answers() -> None:
    streams: list[ChatStream] = []
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(100):
            stream = chat(adapter=Talker(2000, 1000, pause=False), messages=[])
            await stream.__anext__()
            streams.append(stream)
        await asyncio.sleep(0.05)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for stream in streams:
        await stream.aclose()
    # The whole answers are 200 MB and more; two buffers of events each are a few MB.
    assert held < 20 * 1024 * 1024


async def test_nothing_of_a_finished_run_stays() -> None:
    class Holds(ChatMiddleware):
        pass

    async def once() -> None:
        await collect(
            chat(
                adapter=ScriptedModel(),
                messages=[{"role": "user", "content": "SCENARIO:server-tool"}],
                tools=scripted_tools(),
                middleware=[Holds()],
            )
        )

    await once()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        await once()
    gc.collect()
    assert len(gc.get_objects()) - before < 500
