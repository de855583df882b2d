"""Server-sent events, framed the way browser clients of this protocol read them.

The clients read lines, they are no full SSE parsers: an ``id:`` line is followed directly by
one ``data:`` line with the whole JSON, then an empty line; lines that begin with a colon are
skipped. Nothing else is ever sent.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ag_ui.core import BaseEvent, RunStartedEvent
from starlette.responses import Response

from chatkeep.delivery import (
    Delivery,
    LoggedEvent,
    RunKey,
    encode_event,
    with_terminal,
)
from chatkeep.delivery._terminal import aclose, check_stream, failed
from chatkeep.errors import ChatkeepError, EventsTrimmed
from chatkeep.scope import EMPTY_SCOPE, Scope

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from chatkeep.engine import AbortSignal

__all__ = ["HEARTBEAT", "SSE_HEADERS", "encode_sse", "follow_response", "sse_response"]

_log = logging.getLogger("chatkeep.web")

HEARTBEAT: Final = 15.0
"""Seconds of silence after which a comment line shows proxies that the stream lives."""

SSE_HEADERS: Final[Mapping[str, str]] = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
"""No proxy may keep, compress or collect the stream."""

_KEEP_ALIVE = b": keep-alive\n\n"


def encode_sse(body: bytes, offset: str | None = None) -> bytes:
    """One frame; ``body`` is the JSON of an event on one line."""
    head = b"" if offset is None else b"id: " + offset.encode("ascii") + b"\n"
    return head + b"data: " + body + b"\n\n"


def sse_response(
    stream: AsyncIterator[BaseEvent],
    *,
    delivery: Delivery | None = None,
    scope: Scope = EMPTY_SCOPE,
    abort: AbortSignal | None = None,
    heartbeat: float = HEARTBEAT,
) -> Response:
    """The response that streams a chat.

    Without a delivery the response drives the stream: a client that leaves aborts the run, and the
    response is over only when the run has been saved as aborted. Events carry no ids, because
    nothing could serve a reconnect.

    With one the stream is driven into its log in a task of its own and the response follows
    it: a client that leaves only stops watching, and every event has the id to come back to.

    Args:
        stream: what :func:`chatkeep.engine.chat` returns, or any iterator of AG-UI events.
        delivery: the process's :class:`Delivery`.
        scope: whose run it is; with a delivery only.
        abort: the signal that the stream obeys; with a delivery only.
        heartbeat: seconds of silence before a comment line is sent.

    Raises:
        CompositionError: ``stream`` is no async iterator.
    """
    check_stream(stream)
    if delivery is None:
        return EventStream(_direct(stream), heartbeat=heartbeat)
    return EventStream(_driven(stream, delivery, scope, abort), heartbeat=heartbeat)


def follow_response(
    batches: AsyncIterator[Sequence[LoggedEvent]],
    *,
    heartbeat: float = HEARTBEAT,
    on_leave: Callable[[], Awaitable[object]] | None = None,
) -> Response:
    """The response that follows a log: what ``await delivery.follow(key, after)`` returns.
    ``on_leave`` is called when the client leaves before the end."""
    return EventStream(_framed(batches), heartbeat=heartbeat, on_leave=on_leave)


def _ids(stream: Any) -> dict[str, str]:
    """The thread and run of a stream; foreign iterators have none to tell."""
    return {
        "thread_id": getattr(stream, "thread_id", ""),
        "run_id": getattr(stream, "run_id", "") or f"run-{uuid.uuid4()}",
    }


async def _direct(stream: AsyncIterator[BaseEvent]) -> AsyncIterator[bytes]:
    ids = _ids(stream)
    try:
        async for event in with_terminal(stream, **ids):
            yield encode_sse(encode_event(event))
    except ChatkeepError as error:
        _log.exception("an event of run %r could not be published", ids["run_id"])
        await aclose(stream)
        message = "An event of the run could not be published."
        yield encode_sse(encode_event(failed(message, error.code, **ids)))
    finally:
        await aclose(stream)


async def _driven(
    stream: AsyncIterator[BaseEvent], log: Delivery, scope: Scope, abort: AbortSignal | None
) -> AsyncIterator[bytes]:
    ids = _ids(stream)
    key = RunKey(run_id=ids["run_id"], scope=scope)
    try:
        await log.start(stream, key=key, thread_id=ids["thread_id"] or key.run_id, abort=abort)
        batches = await log.follow(key)
    except ChatkeepError as error:
        yield encode_sse(
            encode_event(RunStartedEvent(thread_id=ids["thread_id"], run_id=key.run_id))
        )
        yield encode_sse(encode_event(failed(str(error), error.code, **ids)))
        return
    async for frames in _framed(batches):
        yield frames


async def _framed(batches: AsyncIterator[Sequence[LoggedEvent]]) -> AsyncIterator[bytes]:
    try:
        async for batch in batches:
            yield b"".join(encode_sse(event.body, event.offset) for event in batch)
    except EventsTrimmed as error:
        # Without an id: it is no event of the run, and nothing to come back to.
        ids = {"thread_id": "", "run_id": error.run_id}
        yield encode_sse(encode_event(failed(str(error), error.code, **ids)))
    finally:
        await aclose(batches)


class EventStream(Response):
    """An SSE response over an iterator of frames, with heartbeats.

    The iterator is closed on every way out, and the response waits for that: what a client's
    leaving sets off has happened when the request is over.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        heartbeat: float = HEARTBEAT,
        on_leave: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(None, 200, headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._heartbeat = heartbeat
        self._on_leave = on_leave
        self._complete = False

    async def __call__(self, _scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Stream until the frames end or the client is gone."""
        gone = asyncio.ensure_future(_disconnected(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({gone, pump}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({gone, pump})
            if self._on_leave is not None and not self._complete:
                await self._on_leave()
        for task in (gone, pump):
            if not task.cancelled():
                task.result()

    async def _pump(self, send: Send) -> None:
        turn: asyncio.Future[bytes | None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                turn = asyncio.ensure_future(anext(self._frames, None))
                while not (await asyncio.wait({turn}, timeout=self._heartbeat))[0]:
                    await send(_body(_KEEP_ALIVE))
                frames = turn.result()
                if frames is None:
                    self._complete = True
                    break
                await send(_body(frames))
            await send(_body(b"", more=False))
        except OSError as error:  # how a server says, while sending, that the client is gone
            _log.debug("the client left: %s", error)
        finally:
            if turn is not None and not turn.done():
                turn.cancel()
                await asyncio.wait({turn})
            await aclose(self._frames)


def _body(chunk: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
