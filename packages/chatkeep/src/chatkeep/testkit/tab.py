"""A browser tab against a chat URL: hydrate, send, regenerate, answer, join, reconnect.

It speaks HTTP only, through an ``httpx.AsyncClient`` that it is given, and posts what the
browser client posts. ``httpx`` is not imported here: the caller has it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatkeep.testkit._answers import Answers
from chatkeep.testkit._client_rows import bag_of
from chatkeep.testkit.client import ChatView, SseReader, wire_rows

if TYPE_CHECKING:
    import httpx

__all__ = ["Exchange", "Tab", "user_message"]


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One streamed answer: its run, HTTP status, and the events with their offsets.

    ``body`` is what was posted, None for a join; ``refusal`` the text of a status other than 200.
    """

    run_id: str
    status: int
    headers: Mapping[str, str]
    body: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    offsets: list[str | None] = field(default_factory=list["str | None"])
    refusal: str = ""

    @property
    def types(self) -> list[str]:
        """The event types, in order."""
        return [event["type"] for event in self.events]

    @property
    def terminal(self) -> dict[str, Any] | None:
        """The last event, if it ends a run."""
        last = self.events[-1] if self.events else None
        return last if last and last["type"] in ("RUN_FINISHED", "RUN_ERROR") else None

    @property
    def outcome(self) -> str | None:
        """How the run ended: ``success``, ``interrupt``, ``cancelled`` or ``error``; None: it
        did not."""
        last = self.terminal
        if last is None or last["type"] == "RUN_ERROR":
            return None if last is None else "error"
        outcome: Mapping[str, Any] = last.get("outcome") or {}
        return str(outcome.get("type", "success"))

    @property
    def interrupts(self) -> list[dict[str, Any]]:
        """The descriptors that the run paused with."""
        outcome: Mapping[str, Any] = (self.terminal or {}).get("outcome") or {}
        return list(outcome.get("interrupts", ()))

    @property
    def interrupt_errors(self) -> list[dict[str, Any]]:
        """Why answers were refused: item errors, then batch errors."""
        return list(bag_of(self.terminal or {}).get("interruptErrors", ()))


class Tab(Answers):
    """One page showing one thread.

    Answers are staged (:meth:`approve`, :meth:`deny`, :meth:`output`, :meth:`fail`,
    :meth:`answer`, :meth:`cancel`) and go out together with :meth:`resume`.

    Args:
        http: does the requests.
        url: the chat URL.
        thread_id: which conversation the page shows.
        headers: sent with every request (a session, a user).
        tools: the ``tools[]`` of every post: what the page has registered.
        page_size: load so many messages, and post only those that the server does not know;
            None: load and post everything.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        thread_id: str,
        *,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        page_size: int | None = None,
    ) -> None:
        super().__init__()
        self.hydrated: dict[str, Any] = {}
        self.thread_id = thread_id
        self.tools = [dict(tool) for tool in tools]
        self._http = http
        self._url = url
        self._headers = dict(headers or {})
        self._page_size = page_size
        self._known: set[str] = set()

    @property
    def text(self) -> str:
        """The text of the last assistant message."""
        last = next((m for m in reversed(self.messages) if m["role"] == "assistant"), None)
        if last is None:
            return ""
        return "".join(p["content"] for p in last["parts"] if p["type"] == "text")

    async def load(self, **query: Any) -> dict[str, Any]:
        """Page load: ask for the thread and show it; the body of the answer.

        Raises:
            httpx.HTTPStatusError: the server refused.
        """
        if self._page_size is not None:
            query = {"limit": self._page_size, **query}
        answer = await self._http.get(
            self._url, params={"threadId": self.thread_id, **query}, headers=self._headers
        )
        answer.raise_for_status()
        self.hydrated = answer.json()
        self.show(ChatView(self.hydrated["messages"], interrupts=self.hydrated["interrupts"]))
        self._known = {message["id"] for message in self.messages}
        return self.hydrated

    async def send(self, text: str, **fields: Any) -> Exchange:
        """Show and post a user message, apply the answer until it ends."""
        self.view.messages.append(user_message(text))
        return await self._post(**fields)

    async def regenerate(self, **fields: Any) -> Exchange:
        """Take everything after the last user message off the page and post what is left."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return await self._post(**fields)

    async def resume(self, **fields: Any) -> Exchange:
        """Post what was staged, as one batch, and apply the answer until it ends. Staged
        answers are gone afterwards; questions that were refused still wait."""
        return await self._post(**{**self.batch(), **fields})

    async def cancel_run(self, run_id: str) -> httpx.Response:
        """Ask the server to stop a run, or to give up a paused one with its questions."""
        query = {"threadId": self.thread_id, "runId": run_id}
        return await self._http.delete(self._url, params=query, headers=self._headers)

    async def _post(self, **fields: Any) -> Exchange:
        return await _last(self.stream(self.body(**fields)))

    def _posted(self) -> list[dict[str, Any]]:
        """The messages of a post: all, or in a page with a window what is new; where nothing
        is, everything from the last user message on."""
        if self._page_size is None:
            return self.messages
        new = [message for message in self.messages if message["id"] not in self._known]
        if new:
            return new
        users = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        return self.messages[users[-1] :] if users else []

    def body(self, **fields: Any) -> dict[str, Any]:
        """What the browser posts for the page as it is; ``fields`` replace."""
        return {
            "threadId": self.thread_id,
            "runId": f"run-{uuid.uuid4()}",
            "state": {},
            "messages": wire_rows(self._posted()),
            "tools": self.tools,
            "context": [],
            "forwardedProps": {},
            **fields,
        }

    async def stream(
        self, body: dict[str, Any], *, last_event_id: str | None = None
    ) -> AsyncIterator[Exchange]:
        """Post ``body`` and apply the answer; yields the growing exchange after every piece
        that arrived, so that the caller may stop in the middle (which drops the socket)."""
        headers = {**self._headers, "x-run-id": body["runId"]}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        request = self._http.build_request("POST", self._url, json=body, headers=headers)
        async for exchange in self._exchange(request, body["runId"], body):
            yield exchange

    async def join(
        self, run_id: str, *, offset: str = "-1", last_event_id: str | None = None
    ) -> Exchange:
        """Watch a run: from its start the last shown assistant message is built anew."""
        if last_event_id is None and self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        headers = dict(self._headers)
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        request = self._http.build_request(
            "GET", self._url, params={"offset": offset, "runId": run_id}, headers=headers
        )
        return await _last(self._exchange(request, run_id, None))

    async def _exchange(
        self, request: httpx.Request, run_id: str, body: dict[str, Any] | None
    ) -> AsyncIterator[Exchange]:
        response = await self._http.send(request, stream=True)
        exchange = Exchange(
            run_id=run_id, status=response.status_code, headers=response.headers, body=body
        )
        try:
            if response.status_code != 200:
                exchange.refusal = (await response.aread()).decode()
                yield exchange
                return
            reader = SseReader()
            async for chunk in response.aiter_raw():
                self._take(exchange, reader.feed(chunk))
                yield exchange
            reader.close()
            yield exchange
        finally:
            await response.aclose()

    def _take(
        self, exchange: Exchange, events: Sequence[tuple[str | None, dict[str, Any]]]
    ) -> None:
        for offset, event in events:
            exchange.offsets.append(offset)
            exchange.events.append(event)
            self.view.apply(event)
            if event["type"] == "RUN_FINISHED":
                self.live_pause = bool(self.view.interrupts)
                self._known |= {message["id"] for message in self.messages}


async def _last(growing: AsyncIterator[Exchange]) -> Exchange:
    return [exchange async for exchange in growing][-1]


def user_message(text: str) -> dict[str, Any]:
    """A message as the browser makes it when the user presses enter."""
    now = time.time_ns() // 1_000_000
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1000))
    return {
        "id": f"msg-{uuid.uuid4()}",
        "role": "user",
        "parts": [{"type": "text", "content": text}],
        "createdAt": f"{stamp}.{now % 1000:03d}Z",
    }
