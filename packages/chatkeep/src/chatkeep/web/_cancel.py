"""Giving up a run: a request of its own, because a closed connection says nothing."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, RunKey
from chatkeep.engine import CANCEL_REQUESTED
from chatkeep.errors import BadRequest, UnknownRun
from chatkeep.persistence import CancelOutcome, cancel_run
from chatkeep.scope import EMPTY_SCOPE, Scope, check_id
from chatkeep.web._reconstruct import Authorize, allowed

__all__ = ["cancel_response"]

_HEADERS = {"cache-control": "no-store"}


async def cancel_response(
    request: Request,
    persistence: Persistence,
    delivery: Delivery,
    *,
    authorize: Authorize | None = None,
    scope: Scope = EMPTY_SCOPE,
) -> Response:
    """Answer ``DELETE ?runId=R``: cancel a run, whoever drives it.

    A paused run ends, and its questions with it, so that its thread takes new input. A run that
    this process drives has stopped and is saved when the answer comes; one of another process is
    told. The answer is ``{"runId", "outcome"}`` with an outcome of
    :func:`chatkeep.persistence.cancel_run`; ``ended`` and ``continued`` changed nothing, so a
    request that is sent twice is no error.

    Args:
        request: its query names the run.
        persistence: where the run is stored, in the caller's scope.
        delivery: the process's own.
        authorize: called with the thread of the run.
        scope: whose runs the caller may cancel.

    Raises:
        BadRequest: no run is named.
        UnknownRun: there is no such run (404).
    """
    if not request.query_params.get("runId"):
        raise BadRequest("runId", "is missing")
    run_id = check_id(request.query_params["runId"], "runId")
    key = RunKey(run_id=run_id, scope=scope)
    thread_id = await _thread_of(persistence, delivery, key)
    named = request.query_params.get("threadId", thread_id)
    if thread_id is None or named != thread_id:
        raise UnknownRun(run_id)
    refusal = await allowed(authorize, thread_id, request)
    if refusal is not None:
        return refusal
    outcome: CancelOutcome = "unknown"
    if persistence.stores.runs is not None:
        outcome = await cancel_run(persistence, thread_id, run_id)
    if outcome in ("requested", "unknown"):
        driven = await delivery.abort(key, CANCEL_REQUESTED)
        if outcome == "unknown":
            outcome = "requested" if driven else "ended"
    return Response(
        orjson.dumps({"runId": run_id, "outcome": outcome}),
        headers=_HEADERS,
        media_type="application/json",
    )


async def _thread_of(persistence: Persistence, delivery: Delivery, key: RunKey) -> str | None:
    """The thread of a run: of its record, or of its log where nothing is stored (yet)."""
    runs = persistence.stores.runs
    stored = None if runs is None else await runs.get(key.run_id)
    if stored is not None:
        return stored.thread_id
    logged = await delivery.find(key)
    return None if logged is None else logged.thread_id
