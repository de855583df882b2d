"""All routes of a chat under one path.

====== =============================================== ======================================
POST   a chat request                                  starts a run, streams it
POST   with ``Last-Event-ID``                          what comes after that event
GET    ``?threadId=T``                                 the thread, for a page load
GET    ``?offset=-1&runId=R``                          a run from its start, then live
GET    with ``Last-Event-ID``                          what comes after that event
DELETE ``?runId=R``                                    cancels a run, streaming or paused
====== =============================================== ======================================

Only a post without ``Last-Event-ID`` starts a run. Every route asks ``authorize`` for the
thread that it touches; one that names a run looks up the run's thread first.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, DeliveryLog, RunKey
from chatkeep.engine import AbortSignal
from chatkeep.errors import (
    BadRequest,
    ChatkeepError,
    CompositionError,
    RunConflict,
    RunConflictReason,
)
from chatkeep.scope import EMPTY_SCOPE, Scope
from chatkeep.web._agent import Agent, Runner, detachable
from chatkeep.web._cancel import cancel_response
from chatkeep.web._params import ChatParams, parse_chat_request
from chatkeep.web._problem import forbidden, problem, problem_of
from chatkeep.web._reconstruct import Authorize, allowed, reconstruct_chat
from chatkeep.web._sse import HEARTBEAT, follow_response
from chatkeep.web._sweep import Sweeper
from chatkeep.web._watch import watch_response

__all__ = ["ChatRouter", "OnDisconnect", "ScopeOf", "chat_router"]

OnDisconnect: TypeAlias = Literal["detach", "abort"]
"""What becomes of a run whose client has closed the connection of its post."""

ScopeOf: TypeAlias = Callable[[Request], "Scope | Awaitable[Scope | None] | None"]
"""Whose rows a request works on, from the trusted session; None or an empty scope is nobody."""


def chat_router(
    persistence: Persistence,
    agent: Agent | Mapping[str, Any],
    *,
    authorize: Authorize | None = None,
    scope: Scope | ScopeOf | None = None,
    allow_anonymous: bool = False,
    path: str = "/",
    log: DeliveryLog | None = None,
    on_disconnect: OnDisconnect = "detach",
    drain: float = 5.0,
    heartbeat: float = HEARTBEAT,
    max_body_bytes: int = 32 << 20,
    include_runs: bool = False,
    sweep_seconds: float | None = 60.0,
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
            middleware has one. Options are tried out here, so that a wrong one is said at once.
        authorize: whether the caller may see and continue a thread: True, False or a response.
        scope: whose rows requests work on; a scope, or a callable that finds it. If it finds
            nobody (None, an empty scope) the request is refused with 403, or works on the rows
            without a scope where ``authorize`` or ``allow_anonymous`` decides. An agent of
            your own stores with ``with_persistence(params.persistence)``, which is in that
            scope; one that stores in another is refused before anything is read.
        allow_anonymous: let everybody who knows a thread's id read and continue it.
        path: where the routes live.
        log: where events are kept for viewers; in this process by default, so that only the
            worker that drives a run can show it. ``StoredLog(persistence)`` keeps them in the
            database: any worker shows any run, and viewers survive the worker.
        on_disconnect: what it means when the client that posted a run closes its connection. A
            closed tab, a lost network and the Stop button of some clients look the same.
            ``"detach"``: the run goes on and can be joined; stopping it is a request (DELETE).
            ``"abort"``: the run is stopped, also if other tabs watch it.
        drain: seconds that runs get to finish by themselves at shutdown.
        heartbeat: seconds of silence before a stream sends a comment line.
        max_body_bytes: larger posts are refused with 413.
        include_runs: hydrated threads list their finished runs.
        sweep_seconds: seconds between two sweeps, which end the runs of servers that died;
            None: something else calls ``persistence.maintenance().sweep()``. It needs the
            router's ``lifespan`` (a mounted app has none of its own), and a runs store of a
            backend.

    Raises:
        CompositionError: neither ``authorize`` nor ``scope``, and anonymous use not allowed;
            an agent, ``authorize``, ``scope`` or ``path`` that is none; a persistence without
            a messages store, or with a store that knows no scopes; a ``scope`` beside a
            ``with_persistence`` of the agent's own, which would store every request's rows
            unscoped.
        ToolError: the agent's tools, or its definitions of interrupts, are wrong.
    """
    if authorize is None and scope in (None, EMPTY_SCOPE) and not allow_anonymous:
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
        on_disconnect=on_disconnect,
        heartbeat=heartbeat,
        max_body_bytes=max_body_bytes,
        include_runs=include_runs,
        unscoped=allow_anonymous or authorize is not None,
        sweep_seconds=sweep_seconds,
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
        on_disconnect: OnDisconnect,
        heartbeat: float,
        max_body_bytes: int,
        include_runs: bool,
        unscoped: bool,
        sweep_seconds: float | None,
    ) -> None:
        if persistence.stores.messages is None:
            raise CompositionError("a chat needs a messages store")
        _check_arguments(authorize, scope, path, sweep_seconds)
        if scope != EMPTY_SCOPE:
            persistence.scoped(Scope(user_id="anybody"))  # says now which store knows no scopes
        self.routes: list[BaseRoute] = [
            Route(path, self._post, methods=["POST"]),
            Route(path, self._get, methods=["GET"]),
            Route(path, self._delete, methods=["DELETE"]),
        ]
        if on_disconnect not in ("detach", "abort"):
            raise CompositionError(f"on_disconnect is 'detach' or 'abort', not {on_disconnect!r}")
        self.delivery = delivery
        self._stops = on_disconnect == "abort"
        self._app = Router(routes=self.routes, lifespan=self.lifespan)
        self._persistence = persistence
        self._runner = Runner(agent, persistence, scoped=scope != EMPTY_SCOPE)
        self._sweeper = Sweeper(persistence, delivery, sweep_seconds)
        self._authorize = authorize
        self._scope = scope
        self._heartbeat = heartbeat
        self._max_body = max_body_bytes
        self._include_runs = include_runs
        self._unscoped = unscoped

    async def aclose(self) -> None:
        """Take no more runs; wait until the running ones have finished, or have been aborted
        and saved; sweep no more. Idempotent."""
        # Together: a sweep that waits for its store must not keep runs from being told.
        await asyncio.gather(self._sweeper.aclose(), self.delivery.aclose())

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncGenerator[None]:
        """For ``Starlette(lifespan=…)`` and ``FastAPI(lifespan=…)``: sweeps lost
        runs, and closes this at shutdown."""
        async with self:
            yield

    async def __aenter__(self) -> Self:
        await self.delivery.__aenter__()
        self._sweeper.start()
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
            if scope is None:
                return forbidden()
            return await self._watch(request, scope) or await self._run(request, scope)
        except ChatkeepError as error:
            return problem_of(error)

    async def _get(self, request: Request) -> Response:
        try:
            scope = await self._scope_of(request)
            if scope is None:
                return forbidden()
            return await self._watch(request, scope) or await reconstruct_chat(
                self._scoped(scope),
                request,
                authorize=self._authorize,
                include_runs=self._include_runs,
            )
        except ChatkeepError as error:
            return problem_of(error)

    async def _delete(self, request: Request) -> Response:
        try:
            scope = await self._scope_of(request)
            if scope is None:
                return forbidden()
            return await cancel_response(
                request,
                self._scoped(scope),
                self.delivery,
                authorize=self._authorize,
                scope=scope,
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
        started = False
        if not await self._known_here(key, params.thread_id):
            persistence = self._scoped(scope)
            await _refuse_known(persistence, params)
            started = await self._start(key, replace(params, store=persistence, request=request))
        return follow_response(
            await self.delivery.follow(key),
            heartbeat=self._heartbeat,
            on_leave=partial(self.delivery.abort, key) if started and self._stops else None,
        )

    async def _start(self, key: RunKey, params: ChatParams) -> bool:
        """Whether it was this post that started the run."""
        signal = AbortSignal()
        stream = await self._runner.stream(replace(params, abort=signal), key.scope)
        try:
            await self.delivery.start(
                stream,
                key=key,
                thread_id=params.thread_id,
                abort=signal,
                detachable=detachable(stream),
            )
        except RunConflict:
            # The same post twice at once: the second one watches what the first one started.
            if not await self._known_here(key, params.thread_id):
                raise
            return False
        return True

    async def _known_here(self, key: RunKey, thread_id: str) -> bool:
        run = await self.delivery.find(key)
        if run is not None and run.thread_id != thread_id:
            raise RunConflict(key.run_id, "foreign-thread")
        return run is not None

    # -- scope --------------------------------------------------------------------

    async def _scope_of(self, request: Request) -> Scope | None:
        """Whose rows the request works on; None: nobody's, it is refused."""
        if isinstance(self._scope, Scope):
            return self._scope
        found = self._scope(request)
        scope: object = await found if inspect.isawaitable(found) else found
        if scope is not None and not isinstance(scope, Scope):
            kind = type(scope).__name__
            raise CompositionError(f"scope= must find a Scope(…) or None; it found {kind}")
        if scope is None or scope == EMPTY_SCOPE:
            return EMPTY_SCOPE if self._unscoped else None
        return scope

    def _scoped(self, scope: Scope) -> Persistence:
        return self._persistence if scope == EMPTY_SCOPE else self._persistence.scoped(scope)


def _check_arguments(authorize: object, scope: object, path: object, sweep_seconds: object) -> None:
    if authorize is not None and not callable(authorize):
        kind = type(authorize).__name__
        raise CompositionError(f"authorize is a callable (thread_id, request), not {kind}")
    if not isinstance(scope, Scope) and not callable(scope):
        kind = type(scope).__name__
        raise CompositionError(f"scope is a Scope(…) or a callable that finds it, not {kind}")
    if not isinstance(path, str) or not path.startswith("/"):
        raise CompositionError(f"path must begin with a slash, like /api/chat: {path!r}")
    seconds = 1 if sweep_seconds is None else sweep_seconds
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise CompositionError(f"sweep_seconds is a number above 0, or None: {sweep_seconds!r}")


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
