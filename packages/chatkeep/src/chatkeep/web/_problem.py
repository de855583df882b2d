"""Refusals and failures as responses: problem details (RFC 9457)."""

from __future__ import annotations

import logging
from http import HTTPStatus

import orjson
from starlette.responses import Response

from chatkeep.errors import (
    BackendUnavailable,
    BadRequest,
    ChatkeepError,
    DeliveryError,
    InterruptConflict,
    InvalidValue,
    RecordTooLarge,
    RunConflict,
    StoreClosed,
    ThreadConflict,
)

__all__ = ["forbidden", "problem", "problem_of"]

_log = logging.getLogger("chatkeep.web")

_STATUS: tuple[tuple[type[ChatkeepError], int], ...] = (
    (BadRequest, 400),
    (InvalidValue, 400),
    (DeliveryError, 404),
    (RunConflict, 409),
    (ThreadConflict, 409),
    (InterruptConflict, 409),
    (RecordTooLarge, 413),
    (BackendUnavailable, 503),
    (StoreClosed, 503),
)
"""What a refusal is to HTTP, the first match counts; every other error of ours is a 500."""

_DETAILS = {
    500: "The server could not do this. Its log says why.",
    503: "The store cannot be reached at the moment. Try again.",
}
"""What clients are told instead of an error text that may name hosts, tables or rows."""

_NO_STORE = {"cache-control": "no-store"}


def problem(status: int, code: str, detail: str) -> Response:
    """A problem response; ``code`` is the stable word to branch on."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
    }
    return Response(
        orjson.dumps(body), status, headers=_NO_STORE, media_type="application/problem+json"
    )


def problem_of(error: ChatkeepError) -> Response:
    """The problem response for an error; failures of ours are logged and not explained. What is
    closed is no failure: requests come in while a server shuts down."""
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), 500)
    if isinstance(error, StoreClosed):
        _log.warning("a chat request was refused: %s", error)
    elif status >= 500:
        _log.error("a chat request failed: %s", error, exc_info=error)
    return problem(status, error.code, _DETAILS.get(status) or str(error))


def forbidden() -> Response:
    """What a caller gets for a thread that is not theirs."""
    return Response(b'{"error":"Forbidden"}', 403, headers=_NO_STORE, media_type="application/json")
