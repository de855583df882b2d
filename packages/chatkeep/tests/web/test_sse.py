"""SSE responses: framing, heartbeats, and what a client's leaving does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import BaseEvent, CustomEvent, RunStartedEvent

from chatkeep.delivery import Delivery, LoggedEvent, RunKey
from chatkeep.web import encode_sse, follow_response, sse_response

from .conftest import Watched, open_request, request

pytestmark = pytest.mark.anyio


def test_a_frame_is_an_id_line_directly_followed_by_one_data_line() -> None:
    assert encode_sse(b'{"a":1}', "r:1") == b'id: r:1\ndata: {"a":1}\n\n'
    assert encode_sse(b"{}") == b"data: {}\n\n"


async def test_headers_keep_proxies_from_collecting_the_stream() -> None:
    """Status 200, an event stream that nobody may cache, change or buffer, no length."""
    answer = await request(sse_response(Watched()))
    assert answer.status == 200
    assert answer.headers == {
        "content-type": "text/event-stream",
        "cache-control": "no-cache, no-transform",
        "x-accel-buffering": "no",
    }


async def test_without_a_log_events_have_no_ids() -> None:
    """A client must not come back with an id that nobody can serve."""
    answer = await request(sse_response(Watched("a")))
    assert set(answer.offsets) == {None}
    assert answer.types[0] == "RUN_STARTED"
    assert answer.types[-1] == "RUN_FINISHED"
    assert answer.body.endswith(b"\n\n")


async def test_with_a_log_every_event_has_an_id_of_its_own() -> None:
    async with Delivery() as delivery:
        answer = await request(sse_response(Watched("a", "b"), delivery=delivery))
    assert None not in answer.offsets
    assert len(set(answer.offsets)) == len(answer.offsets) == 5


async def test_silence_is_filled_with_comments() -> None:
    """A proxy sees a byte from time to time; clients skip the line."""
    gate = asyncio.Event()
    answer, task = open_request(sse_response(Watched(gate=gate), heartbeat=0.01))
    await answer.until(lambda a: a.body.count(b": keep-alive\n\n") >= 3)
    gate.set()
    await task
    assert answer.types[-1] == "RUN_FINISHED"


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_without_a_log_leaving_aborts_the_run_and_waits_until_it_is_saved(
    spec_version: str,
) -> None:
    """When the request is over, the abort has been committed."""
    stream = Watched("a", gate=asyncio.Event())
    answer, task = open_request(sse_response(stream, heartbeat=0.01), spec_version=spec_version)
    await answer.until(lambda a: b'"a"' in a.body)
    answer.leave.set()
    async with asyncio.timeout(5):
        await task
    assert (stream.end, stream.saved) == ("aborted", True)
    assert not answer.over


async def test_without_a_log_a_cancelled_request_aborts_the_run_too() -> None:
    """A server that shuts down cancels its requests: the run is saved all the same."""
    stream = Watched("a", gate=asyncio.Event())
    answer, task = open_request(sse_response(stream))
    await answer.until(lambda a: b'"a"' in a.body)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (stream.end, stream.saved) == ("aborted", True)


async def test_leaving_before_the_first_event_closes_the_stream() -> None:
    """A client that is gone at once starts nothing that goes on."""
    started = asyncio.Event()
    ended = asyncio.Event()

    async def slow() -> AsyncIterator[BaseEvent]:
        try:
            started.set()
            await asyncio.Event().wait()
            yield RunStartedEvent(thread_id="t", run_id="r")
        finally:
            ended.set()

    answer, task = open_request(sse_response(slow()))
    await started.wait()
    answer.leave.set()
    await task
    assert ended.is_set()


async def test_with_a_log_leaving_stops_nothing() -> None:
    """The run goes on without its viewer and finishes."""
    gate = asyncio.Event()
    stream = Watched("a", gate=gate)
    async with Delivery() as delivery:
        answer, task = open_request(sse_response(stream, delivery=delivery))
        await answer.until(lambda a: b'"a"' in a.body)
        answer.leave.set()
        await task
        assert stream.end == "running"
        gate.set()
        batches = await delivery.follow(RunKey(run_id="r"))
        assert [e async for batch in batches for e in batch]
    assert stream.end == "finished"


async def test_with_a_log_a_second_response_for_the_same_run_is_a_refusal() -> None:
    """The stream has begun, so the refusal is RUN_STARTED and RUN_ERROR with the code."""
    async with Delivery() as delivery:
        await request(sse_response(Watched(), delivery=delivery))
        second = Watched()
        answer = await request(sse_response(second, delivery=delivery))
    assert answer.types == ["RUN_STARTED", "RUN_ERROR"]
    assert answer.events[-1]["code"] == "run-conflict"
    assert second.end == "never started"


async def test_an_event_that_is_no_json_becomes_a_run_error() -> None:
    """The stream is closed and the body still ends with a terminal."""

    async def bad() -> AsyncIterator[BaseEvent]:
        yield RunStartedEvent(thread_id="t", run_id="r")
        yield CustomEvent(name="n", value=object())

    answer = await request(sse_response(bad()))
    assert answer.types == ["RUN_STARTED", "RUN_ERROR"]
    assert answer.events[-1]["code"] == "invalid-value"


async def test_a_stream_that_raises_ends_with_a_run_error() -> None:
    """Headers are out already: the failure is an event, without internals."""

    async def broken() -> AsyncIterator[BaseEvent]:
        yield RunStartedEvent(thread_id="t", run_id="r")
        raise RuntimeError("secret")

    answer = await request(sse_response(broken()))
    assert answer.types == ["RUN_STARTED", "RUN_ERROR"]
    assert b"secret" not in answer.body


async def test_half_a_surrogate_pair_does_not_break_the_stream() -> None:
    """Models cut emoji in two; the frame stays UTF-8."""
    answer = await request(sse_response(Watched("\ud83d")))
    assert answer.events[1]["delta"] == "\ufffd"


async def test_a_reader_of_the_log_is_gone_when_its_response_is_over() -> None:
    """Also if the client leaves while it takes no bytes: nothing is left to a collector."""
    closed: list[int] = []
    offered = asyncio.Event()

    async def batches() -> AsyncIterator[list[LoggedEvent]]:
        try:
            yield [LoggedEvent("r:1", b"{}")]
        finally:
            closed.append(1)

    async def receive() -> dict[str, str]:
        await offered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            offered.set()
            await asyncio.sleep(60)

    follower = batches()
    await follow_response(follower)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert closed == [1]
