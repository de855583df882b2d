"""The page load: a thread as a freshly opened client needs it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response

from chatkeep.backends import Persistence
from chatkeep.codec import encode
from chatkeep.errors import ChatkeepError, CompositionError
from chatkeep.persistence import hydrate_thread
from chatkeep.web._problem import forbidden, problem_of

__all__ = ["Authorize", "allowed", "reconstruct_chat"]

Authorize: TypeAlias = Callable[[str, Request], "bool | Response | Awaitable[bool | Response]"]
"""Whether the caller of ``request`` may see and continue a thread: True or False, nothing that
is merely true. A response is sent as it is; what it raises is the application's to handle."""

_MAX_PAGE = 500
_NO_STORE = {"cache-control": "no-store"}


async def allowed(authorize: Authorize | None, thread_id: str, request: Request) -> Response | None:
    """None when the caller may go on, else the refusal to send.

    Raises:
        CompositionError: the verdict is neither True, False nor a response. A text, a number or
            a forgotten return says nothing about who may read, so nobody may.
    """
    if authorize is None:
        return None
    answer = authorize(thread_id, request)
    verdict: object = await answer if inspect.isawaitable(answer) else answer
    if isinstance(verdict, Response):
        return verdict
    if not isinstance(verdict, bool):
        kind = type(verdict).__name__
        raise CompositionError(
            f"authorize must return True, False or a response; it returned {kind}"
        )
    return None if verdict else forbidden()


async def reconstruct_chat(
    persistence: Persistence,
    request: Request,
    *,
    authorize: Authorize | None = None,
    param: str = "threadId",
    include_runs: bool = False,
) -> Response:
    """Answer ``GET ?threadId=T[&limit=N][&before=C]`` with the thread's messages, its active
    run and its pending interrupts, as JSON that nobody may cache.

    An unknown thread and a missing id are an empty chat. A ``limit`` that is no positive
    integer is ignored, a large one counts as 500. ``authorize`` is asked before any store is
    read; without it anybody who knows an id reads everything. Store failures are problem
    responses (503 when the database is down).

    Args:
        persistence: where the thread is; scope it first when tenants share a database.
        request: its query is read.
        authorize: called with the thread id and the request.
        param: name of the query parameter with the thread id.
        include_runs: add the thread's finished runs.
    """
    thread_id = request.query_params.get(param, "")
    if not thread_id:
        return _json({"messages": [], "activeRun": None, "interrupts": None})
    try:
        refusal = await allowed(authorize, thread_id, request)
        if refusal is not None:
            return refusal
        body = await hydrate_thread(
            persistence,
            thread_id,
            limit=_limit(request.query_params.get("limit", "")),
            before=request.query_params.get("before") or None,
            include_runs=include_runs,
        )
        return _json(body)
    except ChatkeepError as error:
        return problem_of(error)


def _limit(text: str) -> int | None:
    digits = text.lstrip("0")
    if not digits.isascii() or not digits.isdigit():
        return None
    return min(int(digits), _MAX_PAGE) if len(digits) <= len(str(_MAX_PAGE)) else _MAX_PAGE


def _json(body: dict[str, Any]) -> Response:
    try:
        # What a store returned went through the codec when it was written.
        data = orjson.dumps(body)
    except TypeError:  # integers beyond 64 bits
        data = encode(body)
    return Response(data, headers=_NO_STORE, media_type="application/json")
