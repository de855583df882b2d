"""Joins and reconnects: requests that watch a run."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chatkeep.delivery import FROM_START, Delivery, RunKey, offset_run
from chatkeep.errors import BadRequest, UnknownRun
from chatkeep.scope import EMPTY_SCOPE, Scope, check_id
from chatkeep.web._reconstruct import Authorize, allowed
from chatkeep.web._sse import HEARTBEAT, follow_response

__all__ = ["watch_response"]


async def watch_response(
    request: Request,
    delivery: Delivery,
    *,
    authorize: Authorize | None = None,
    scope: Scope = EMPTY_SCOPE,
    heartbeat: float = HEARTBEAT,
) -> Response | None:
    """The answer to a request that only watches a run; None if it is not one.

    Ask it first in routes of your own, for posts and gets: a request that carries
    ``Last-Event-ID`` is a reconnect, also with the body of a new run, and must start nothing;
    ``?offset=-1&runId=R`` is a join. The header wins over the query; an empty one is a client
    that has seen nothing. The run is named by ``X-Run-Id``, ``runId`` or the offset.

    Args:
        request: its headers and query are read, never its body.
        delivery: the process's own.
        authorize: called with the thread of the run.
        scope: whose runs the caller may see.
        heartbeat: seconds of silence before a comment line is sent.

    Raises:
        BadRequest: no offset, or no run.
        UnknownRun, UnknownOffset, EventsTrimmed: nothing to show (404).
    """
    query, headers = request.query_params, request.headers
    reconnects = "last-event-id" in headers
    if not reconnects and "offset" not in query:
        if "runId" in query:
            raise BadRequest("offset", "say from where: offset=-1, or a Last-Event-ID header")
        return None
    after = headers.get("last-event-id", query.get("offset")) or FROM_START
    run_id = headers.get("x-run-id") or query.get("runId") or offset_run(after)
    if not run_id:
        raise BadRequest("runId", "is missing, and the offset names no run")
    key = RunKey(run_id=check_id(run_id, "runId"), scope=scope)
    run = await delivery.find(key)
    if run is None:
        raise UnknownRun(key.run_id)
    refusal = await allowed(authorize, run.thread_id, request)
    if refusal is not None:
        return refusal
    return follow_response(await delivery.follow(key, after), heartbeat=heartbeat)
