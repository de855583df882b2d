"""Producers: runs that go on without their viewers, and end in an orderly way."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import BaseEvent, CustomEvent, EventType

from chatkeep.delivery import Delivery, RunKey, RunLog, with_terminal
from chatkeep.errors import BackendUnavailable, RunConflict, StoreClosed

from .conftest import finished, started, stream_of, text

pytestmark = pytest.mark.anyio
KEY = RunKey(run_id="r")


class Chat:
    """A stream that says how it was ended; one delta for each word, then it may hang."""

    def __init__(self, *words: str, hang: bool = False) -> None:
        self.words = words
        self.hang = hang
        self.aborted = 0
        self.closed = 0

    async def _events(self) -> AsyncIterator[BaseEvent]:
        try:
            yield started()
            for word in self.words:
                yield text(word)
            if self.hang:
                await asyncio.Event().wait()
            yield finished()
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise

    def __aiter__(self) -> Chat:
        self.events = self._events()
        return self

    async def __anext__(self) -> BaseEvent:
        return await anext(self.events)

    async def aclose(self) -> None:
        self.closed += 1
        if hasattr(self, "events"):
            await self.events.aclose()  # type: ignore[attr-defined]


class Signal:
    """An abort signal as the engine's: the stream ends by itself when it is raised."""

    def __init__(self) -> None:
        self.raised = asyncio.Event()
        self.reason: str | None = None

    def abort(self, reason: str | None = None) -> None:
        self.reason = reason
        self.raised.set()

    async def stream(self) -> AsyncIterator[BaseEvent]:
        yield started()
        await self.raised.wait()
        yield text("closing")
        yield finished()


async def logged(delivery: Delivery, key: RunKey = KEY) -> list[dict[str, Any]]:
    batches = await delivery.follow(key)
    return [json.loads(event.body) async for batch in batches for event in batch]


async def test_a_run_is_driven_without_anybody_watching() -> None:
    """Nobody follows; the whole run is in the log afterwards."""
    async with Delivery() as delivery:
        producer = await delivery.start(Chat("a", "b"), key=KEY, thread_id="t")
        await producer.task
        types = [event["type"] for event in await logged(delivery)]
    assert types == ["RUN_STARTED", *["TEXT_MESSAGE_CONTENT"] * 2, "RUN_FINISHED"]


async def test_a_viewer_who_leaves_stops_nothing() -> None:
    """The one viewer goes after the first event; the run finishes, a second viewer sees all."""
    async with Delivery() as delivery:
        await delivery.start(Chat(*"abcdef"), key=KEY, thread_id="t")
        viewer = await delivery.follow(KEY)
        await anext(viewer)
        await viewer.aclose()  # type: ignore[attr-defined]
        assert [e.get("delta") for e in await logged(delivery)] == [None, *"abcdef", None]


async def test_viewers_see_events_while_the_model_never_waits() -> None:
    """A model that yields without pausing does not hold its events back until the end."""

    async def greedy() -> AsyncIterator[BaseEvent]:
        yield started()
        for i in range(100):
            yield text(str(i))
        yield finished()

    async with Delivery() as delivery:
        await delivery.start(greedy(), key=KEY, thread_id="t")
        sizes = [len(batch) async for batch in await delivery.follow(KEY)]
    assert len(sizes) > 50


async def test_a_stream_that_raises_ends_with_run_error(caplog: pytest.LogCaptureFixture) -> None:
    """Viewers get a terminal and no internals; the log of the server has them."""

    async def broken() -> AsyncIterator[BaseEvent]:
        yield started()
        raise RuntimeError("password=hunter2")

    async with Delivery() as delivery:
        await delivery.start(broken(), key=KEY, thread_id="t")
        events = await logged(delivery)
    assert [e["type"] for e in events] == ["RUN_STARTED", "RUN_ERROR"]
    assert events[-1]["code"] == "internal"
    assert events[-1]["metadata"]["tanstack"] == {"threadId": "t", "runId": "r"}
    assert "hunter2" not in json.dumps(events)
    assert "hunter2" in caplog.text


async def test_a_stream_that_panics_gets_a_terminal() -> None:
    """Also what is no ``Exception`` ends the run for its viewers."""

    class Panic(BaseException):
        pass

    async def broken() -> AsyncIterator[BaseEvent]:
        yield started()
        raise Panic

    async with Delivery() as delivery:
        await delivery.start(broken(), key=KEY, thread_id="t")
        events = await logged(delivery)
    assert [e["type"] for e in events] == ["RUN_STARTED", "RUN_ERROR"]


async def test_an_error_of_ours_keeps_its_code() -> None:
    """The code is the stable part that clients branch on."""

    async def down() -> AsyncIterator[BaseEvent]:
        yield started()
        raise BackendUnavailable("db-7.internal is down")

    async with Delivery() as delivery:
        await delivery.start(down(), key=KEY, thread_id="t")
        events = await logged(delivery)
    assert events[-1]["code"] == "backend-unavailable"
    assert "db-7" not in json.dumps(events)


async def test_a_stream_that_just_stops_gets_a_terminal() -> None:
    """Every log ends with exactly one terminal."""
    async with Delivery() as delivery:
        await delivery.start(stream_of(started(), text("a")), key=KEY, thread_id="t")
        events = await logged(delivery)
    assert [e["type"] for e in events][-1] == "RUN_ERROR"
    assert events[-1]["code"] == "incomplete-run"


async def test_nothing_is_published_after_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """The terminal is last, whatever the stream does then."""
    events = [
        e
        async for e in with_terminal(
            stream_of(started(), finished(), text("late")), thread_id="t", run_id="r"
        )
    ]
    assert [e.type for e in events] == [EventType.RUN_STARTED, EventType.RUN_FINISHED]
    assert "after its terminal" in caplog.text


async def test_an_event_that_is_no_json_fails_the_run_visibly() -> None:
    """The stream is closed (so that the run is saved) and viewers get a RUN_ERROR."""

    class Bad(Chat):
        async def _events(self) -> AsyncIterator[BaseEvent]:
            try:
                yield started()
                yield CustomEvent(name="n", value=float("inf"))
                yield finished()
            except GeneratorExit:
                self.aborted += 1
                raise

    chat = Bad()
    async with Delivery() as delivery:
        await delivery.start(chat, key=KEY, thread_id="t")
        events = await logged(delivery)
    assert [e["type"] for e in events] == ["RUN_STARTED", "RUN_ERROR"]
    assert events[-1]["code"] == "invalid-value"
    assert chat.aborted == 1
    assert chat.closed >= 1


async def test_a_refused_start_closes_its_stream() -> None:
    """The stream of a second post of the same run is not left open."""
    async with Delivery() as delivery:
        await delivery.start(Chat(), key=KEY, thread_id="t")
        second = Chat()
        with pytest.raises(RunConflict):
            await delivery.start(second, key=KEY, thread_id="t")
    assert second.closed == 1


async def test_abort_with_a_signal_lets_the_stream_end_by_itself() -> None:
    """What the stream publishes while it ends is delivered, its own terminal included."""
    async with Delivery() as delivery:
        signal = Signal()
        await delivery.start(signal.stream(), key=KEY, thread_id="t", abort=signal)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert await delivery.abort(KEY, "enough")
        types = [e["type"] for e in await logged(delivery)]
    assert signal.reason == "enough"
    assert types == ["RUN_STARTED", "TEXT_MESSAGE_CONTENT", "RUN_FINISHED"]


async def test_abort_without_a_signal_cancels_and_says_cancelled() -> None:
    """The stream is closed before the terminal goes out: what is visible has been saved."""
    chat = Chat("a", hang=True)
    async with Delivery() as delivery:
        await delivery.start(chat, key=KEY, thread_id="t")
        await asyncio.sleep(0.01)
        assert await delivery.abort(KEY)
        events = await logged(delivery)
    assert chat.aborted == 1
    assert events[-1]["outcome"] == {"type": "cancelled"}


async def test_abort_of_a_run_that_is_not_driven_here_says_so() -> None:
    """Another process's run is not ours to stop."""
    async with Delivery() as delivery:
        assert not await delivery.abort(RunKey(run_id="elsewhere"))


async def test_shutdown_lets_short_runs_finish() -> None:
    """Within the drain time a run ends as if nothing happened."""
    release = asyncio.Event()

    async def short() -> AsyncIterator[BaseEvent]:
        yield started()
        await release.wait()
        yield finished()

    delivery = Delivery(drain=5)
    await delivery.start(short(), key=KEY, thread_id="t")
    asyncio.get_running_loop().call_later(0.05, release.set)
    await delivery.aclose()
    assert [e["type"] for e in await logged(delivery)] == ["RUN_STARTED", "RUN_FINISHED"]
    assert delivery.running == []


async def test_shutdown_aborts_long_runs_and_ends_their_viewers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the drain time every run is stopped, its log closed, and its viewers end."""
    caplog.set_level(logging.WARNING)
    delivery = Delivery(drain=0.05)
    chats = [Chat("a", hang=True) for _ in range(5)]
    keys = [RunKey(run_id=str(i)) for i in range(5)]
    for chat, key in zip(chats, keys, strict=True):
        await delivery.start(chat, key=key, thread_id="t")
    viewers = [asyncio.create_task(logged(delivery, key)) for key in keys]
    await delivery.aclose()
    for events in await asyncio.gather(*viewers):
        assert events[-1]["type"] == "RUN_FINISHED"
        assert events[-1]["outcome"] == {"type": "cancelled"}
    assert [chat.aborted for chat in chats] == [1] * 5
    assert "5 runs are aborted" in caplog.text
    with pytest.raises(StoreClosed):
        await delivery.start(Chat(), key=RunKey(run_id="new"), thread_id="t")


def test_the_end_of_the_loop_ends_runs_in_an_orderly_way() -> None:
    """A program that never closes its delivery still has its runs aborted, not torn off."""
    chat = Chat("a", hang=True)
    log = RunLog()

    async def main() -> None:
        await Delivery(log).start(chat, key=KEY, thread_id="t")
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert chat.aborted == 1
    events = [json.loads(e.body) for e in asyncio.run(log.read(KEY))]
    assert events[-1]["outcome"] == {"type": "cancelled"}
