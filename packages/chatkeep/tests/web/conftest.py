"""An ASGI client that can leave in the middle, and streams to watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlencode

import pytest
from ag_ui.core import BaseEvent, RunFinishedEvent, RunStartedEvent, TextMessageContentEvent

from chatkeep.testkit.client import SseReader


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Answer:
    """One response as it grows. ``leave`` drops the socket."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for _, event in SseReader().feed(self.body)]

    @property
    def offsets(self) -> list[str | None]:
        return [offset for offset, _ in SseReader().feed(self.body)]

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    async def until(self, ready: Callable[[Answer], bool]) -> None:
        """Wait for what is to come; five seconds at most."""
        async with asyncio.timeout(5):
            while not ready(self):
                await self.news.wait()
                self.news.clear()


App = Callable[..., Awaitable[None]]


def open_request(
    app: App,
    method: str = "GET",
    path: str = "/",
    *,
    query: Mapping[str, str] | None = None,
    json_body: Any = None,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    spec_version: str = "2.3",
) -> tuple[Answer, asyncio.Task[None]]:
    """Begin a request; the answer grows while the task runs."""
    answer = Answer()
    payload = json.dumps(json_body).encode() if json_body is not None else body
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": urlencode(query or {}).encode(),
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()],
        "server": ("test", 80),
        "client": ("test", 1),
        "state": {},
    }
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": payload, "more_body": False}
        await answer.leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            if answer.leave.is_set() and spec_version >= "2.4":
                raise OSError("the socket is closed")
            answer.body += message.get("body", b"")
            if message.get("body"):
                answer.chunks.append(message["body"])
            answer.over = not message.get("more_body", False)
        answer.news.set()
        await asyncio.sleep(0)

    return answer, asyncio.ensure_future(app(scope, receive, send))  # type: ignore[return-value]


async def request(app: App, method: str = "GET", path: str = "/", **options: Any) -> Answer:
    """A request from its beginning to its end."""
    answer, task = open_request(app, method, path, **options)
    async with asyncio.timeout(10):
        await task
    return answer


class Gate(Protocol):
    """What a stream waits for: an event of the test's, or a run's abort signal."""

    async def wait(self) -> Any: ...


class Watched:
    """A stream that says how it ended. With ``gate`` it waits before its last two events."""

    def __init__(self, *words: str, gate: Gate | None = None, run_id: str = "r") -> None:
        self.words = words
        self.gate = gate
        self.thread_id = "t"
        self.run_id = run_id
        self.end = "never started"
        self.saved = False
        self._events = self._make()

    async def _make(self) -> AsyncIterator[BaseEvent]:
        self.end = "running"
        try:
            yield RunStartedEvent(thread_id=self.thread_id, run_id=self.run_id)
            for word in self.words:
                yield TextMessageContentEvent(message_id="m", delta=word)
            if self.gate is not None:
                await self.gate.wait()
            yield TextMessageContentEvent(message_id="m", delta="end")
            yield RunFinishedEvent(thread_id=self.thread_id, run_id=self.run_id)
            self.end = "finished"
        except (asyncio.CancelledError, GeneratorExit):
            self.end = "aborted"
            await asyncio.sleep(0.01)  # a store that takes its time
            self.saved = True
            raise

    def __aiter__(self) -> Watched:
        return self

    async def __anext__(self) -> BaseEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]
