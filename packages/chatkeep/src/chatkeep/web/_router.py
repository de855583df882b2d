"""All routes of a chat under one path.

====== =============================================== ======================================
POST   a chat request                                  starts a run, streams it
POST   with ``Last-Event-ID``                          what comes after that event
GET    ``?threadId=T``                                 the thread, for a page load
GET    ``?offset=-1&runId=R``                          a run from its start, then live
GET    with ``Last-Event-ID``                          what comes after that event
====== =============================================== ======================================

Only a post without ``Last-Event-ID`` starts a run. Every route asks ``authorize`` for the
thread that it touches; one that names a run looks up the run's thread first.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

from ag_ui.core import BaseEvent
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, DeliveryLog, RunKey
from chatkeep.delivery._terminal import aclose
from chatkeep.engine import AbortSignal, ChatStream, chat
from chatkeep.errors import (
    BadRequest,
    ChatkeepError,
    CompositionError,
    RunConflict,
    RunConflictReason,
)
from chatkeep.persistence import PERSISTENCE, PersistenceMiddleware, with_persistence
from chatkeep.scope import EMPTY_SCOPE, Scope
from chatkeep.web._params import ChatParams, parse_chat_request
from chatkeep.web._problem import problem, problem_of
from chatkeep.web._reconstruct import Authorize, allowed, reconstruct_chat
from chatkeep.web._sse import HEARTBEAT, follow_response
from chatkeep.web._watch import watch_response

__all__ = ["Agent", "ChatRouter", "ScopeOf", "chat_router"]

Agent: TypeAlias = Callable[
    [ChatParams], "AsyncIterator[BaseEvent] | Awaitable[AsyncIterator[BaseEvent]]"
]
"""Makes the stream of a request, usually with :func:`chatkeep.engine.chat`."""

ScopeOf: TypeAlias = Callable[[Request], "Scope | Awaitable[Scope]"]
"""Whose rows a request works on, from the trusted session."""


def chat_router(
    persistence: Persistence,
    agent: Agent | Mapping[str, Any],
    *,
    authorize: Authorize | None = None,
    scope: Scope | ScopeOf | None = None,
    allow_anonymous: bool = False,
    path: str = "/",
    log: DeliveryLog | None = None,
    drain: float = 5.0,
    heartbeat: float = HEARTBEAT,
    max_body_bytes: int = 32 << 20,
    include_runs: bool = False,
) -> ChatRouter:
    """The routes of a chat, for Starlette and FastAPI::

        chats = chat_router(persistence, agent, authorize=owns, path="/api/chat")
        app = Starlette(routes=chats.routes, lifespan=chats.lifespan)

    or ``app.mount("/api", chat_router(…, path="/chat"))``. (Mounted exactly at
    ``/api/chat`` it works too, but Starlette then redirects every request to ``/api/chat/``.)

    Args:
        persistence: where threads and runs are kept.
        agent: called with the :class:`ChatParams` of every run; or the options of
            :func:`chatkeep.engine.chat`, to which ``with_persistence`` is added unless its
            middleware has one.
        authorize: whether the caller may see and continue a thread.
        scope: whose rows requests work on; a scope, or a callable that finds it. An agent of
            your own stores with ``with_persistence(params.persistence)``, which is in that
            scope; one that stores in another is refused before anything is read.
        allow_anonymous: let everybody who knows a thread's id read and continue it.
        path: where the routes live.
        log: where events are kept for viewers; in this process by default.
        drain: seconds that runs get to finish by themselves at shutdown.
        heartbeat: seconds of silence before a stream sends a comment line.
        max_body_bytes: larger posts are refused with 413.
        include_runs: hydrated threads list their finished runs.

    Raises:
        CompositionError: neither ``authorize`` nor ``scope``, and anonymous use not allowed;
            a persistence without a messages store, or with a store that knows no scopes; a
            ``scope`` beside a ``with_persistence`` of the agent's own, which would store every
            request's rows unscoped.
    """
    if authorize is None and scope is None and not allow_anonymous:
        raise CompositionError(
            "without authorize= or scope= anybody who knows a thread's id could read it: "
            "pass one of them, or allow_anonymous=True if that is what you want"
        )
    return ChatRouter(
        persistence,
        agent,
        authorize=authorize,
        scope=EMPTY_SCOPE if scope is None else scope,
        path=path,
        delivery=Delivery(log, drain=drain),
        heartbeat=heartbeat,
        max_body_bytes=max_body_bytes,
        include_runs=include_runs,
    )


class ChatRouter:
    """What :func:`chat_router` makes: an ASGI app, and its ``routes`` for an app of yours.

    It drives runs, so it has to be closed, before the persistence: with its ``lifespan``,
    with :meth:`aclose`, or ``async with persistence, chats``. An app that never closes it still
    saves every run: the loop's end cancels them, which aborts them in an orderly way.
    """

    def __init__(
        self,
        persistence: Persistence,
        agent: Agent | Mapping[str, Any],
        *,
        authorize: Authorize | None,
        scope: Scope | ScopeOf,
        path: str,
        delivery: Delivery,
        heartbeat: float,
        max_body_bytes: int,
        include_runs: bool,
    ) -> None:
        if persistence.stores.messages is None:
            raise CompositionError("a chat needs a messages store")
        if scope != EMPTY_SCOPE:
            persistence.scoped(Scope(user_id="anybody"))  # says now which store knows no scopes
        if scope != EMPTY_SCOPE and not callable(agent) and _keeps(agent):
            raise CompositionError(
                "with scope= leave with_persistence out of the agent's middleware: the router "
                "adds one for the scope of every request"
            )
        self.routes: list[BaseRoute] = [
            Route(path, self._post, methods=["POST"]),
            Route(path, self._get, methods=["GET"]),
        ]
        self.delivery = delivery
        self._app = Router(routes=self.routes, lifespan=self.lifespan)
        self._persistence = persistence
        self._agent = agent if callable(agent) else partial(_chat, agent)
        self._authorize = authorize
        self._scope = scope
        self._heartbeat = heartbeat
        self._max_body = max_body_bytes
        self._include_runs = include_runs

    async def aclose(self) -> None:
        """Take no more runs; wait until the running ones have finished, or have been aborted
        and saved. Idempotent."""
        await self.delivery.aclose()

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncGenerator[None]:
        """For ``Starlette(lifespan=…)`` and ``FastAPI(lifespan=…)``: closes this at shutdown."""
        async with self:
            yield

    async def __aenter__(self) -> Self:
        await self.delivery.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve ``routes`` as an app of its own."""
        await self._app(scope, receive, send)

    # -- requests -----------------------------------------------------------------

    async def _post(self, request: Request) -> Response:
        try:
            scope = await self._scope_of(request)
            return await self._watch(request, scope) or await self._run(request, scope)
        except ChatkeepError as error:
            return problem_of(error)

    async def _get(self, request: Request) -> Response:
        try:
            scope = await self._scope_of(request)
            return await self._watch(request, scope) or await reconstruct_chat(
                self._scoped(scope),
                request,
                authorize=self._authorize,
                include_runs=self._include_runs,
            )
        except ChatkeepError as error:
            return problem_of(error)

    async def _watch(self, request: Request, scope: Scope) -> Response | None:
        return await watch_response(
            request,
            self.delivery,
            authorize=self._authorize,
            scope=scope,
            heartbeat=self._heartbeat,
        )

    async def _run(self, request: Request, scope: Scope) -> Response:
        """A post: replay a run that is known here, else start it."""
        body = await _read(request, self._max_body)
        if body is None:
            limit = f"The body is larger than {self._max_body} bytes."
            return problem(413, "body-too-large", limit)
        params = parse_chat_request(body, request.headers)
        refusal = await allowed(self._authorize, params.thread_id, request)
        if refusal is not None:
            return refusal
        key = RunKey(run_id=params.run_id, scope=scope)
        if not await self._known_here(key, params.thread_id):
            persistence = self._scoped(scope)
            await _refuse_known(persistence, params)
            await self._start(key, replace(params, store=persistence, request=request))
        return follow_response(await self.delivery.follow(key), heartbeat=self._heartbeat)

    async def _start(self, key: RunKey, params: ChatParams) -> None:
        signal = AbortSignal()
        made = self._agent(replace(params, abort=signal))
        stream = await made if inspect.isawaitable(made) else made
        if key.scope != EMPTY_SCOPE and _keeps_elsewhere(stream, key.scope):
            await aclose(stream)
            raise CompositionError(
                "the agent keeps its runs in another scope than the request's: give "
                "with_persistence the params.persistence of the request"
            )
        try:
            await self.delivery.start(stream, key=key, thread_id=params.thread_id, abort=signal)
        except RunConflict:
            # The same post twice at once: the second one watches what the first one started.
            if not await self._known_here(key, params.thread_id):
                raise

    async def _known_here(self, key: RunKey, thread_id: str) -> bool:
        run = await self.delivery.find(key)
        if run is not None and run.thread_id != thread_id:
            raise RunConflict(key.run_id, "foreign-thread")
        return run is not None

    # -- scope --------------------------------------------------------------------

    async def _scope_of(self, request: Request) -> Scope:
        if isinstance(self._scope, Scope):
            return self._scope
        found = self._scope(request)
        return await found if inspect.isawaitable(found) else found

    def _scoped(self, scope: Scope) -> Persistence:
        return self._persistence if scope == EMPTY_SCOPE else self._persistence.scoped(scope)


def _chat(options: Mapping[str, Any], params: ChatParams) -> ChatStream:
    """The agent that is described by the options of a chat."""
    middleware = list(options.get("middleware", ()))
    if not _keeps(options):
        middleware.insert(0, with_persistence(params.persistence))
    own: dict[str, Any] = {**options, "middleware": middleware}
    return chat(**params.chat_kwargs(), **own)


def _keeps(options: Mapping[str, Any]) -> bool:
    """Whether the options of a chat store it already."""
    return any(PERSISTENCE in m.provides for m in options.get("middleware", ()))


def _keeps_elsewhere(stream: AsyncIterator[BaseEvent], scope: Scope) -> bool:
    """Whether an agent's stream would read and write rows of another scope than ``scope``: of
    another tenant, if thread ids meet."""
    if not isinstance(stream, ChatStream):
        return False
    return any(
        backend.scope != scope
        for middleware in stream.middleware
        if isinstance(middleware, PersistenceMiddleware)
        for backend in middleware.persistence.backends
    )


async def _refuse_known(persistence: Persistence, params: ChatParams) -> None:
    """A run that is stored and not parked is never started again; its events are elsewhere."""
    runs = persistence.stores.runs
    stored = None if runs is None else await runs.get(params.run_id)
    if stored is None:
        return
    if stored.thread_id != params.thread_id:
        raise RunConflict(params.run_id, "foreign-thread")
    if stored.status != "interrupted":
        reason: RunConflictReason = "terminal" if stored.terminal else "running"
        raise RunConflict(params.run_id, reason, thread_id=params.thread_id)


async def _read(request: Request, limit: int) -> bytes | None:
    """The body, or None as soon as it is larger than ``limit``."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        return None
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                return None
            parts.append(part)
    except ClientDisconnect:
        raise BadRequest("$", "the client left before its body was complete") from None
    return b"".join(parts)
