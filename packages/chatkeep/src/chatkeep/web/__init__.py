"""HTTP for chats: read a request, stream a run, answer a page load; Starlette and FastAPI.

Needs the extra ``web``. :func:`chat_router` makes all routes; for routes of your own there are
:func:`parse_chat_request`, :func:`sse_response`, :func:`watch_response`,
:func:`reconstruct_chat`, :func:`cancel_response` and, for what they raise, :func:`problem_of`.
"""

from __future__ import annotations

import importlib.util

from chatkeep.errors import BadRequest, MissingExtra

if importlib.util.find_spec("starlette") is None:
    raise MissingExtra("chatkeep.web", "web")

from chatkeep.web._agent import Agent
from chatkeep.web._cancel import cancel_response
from chatkeep.web._cors import CORS_OPTIONS
from chatkeep.web._params import ChatParams, parse_chat_request
from chatkeep.web._problem import problem_of
from chatkeep.web._reconstruct import Authorize, reconstruct_chat
from chatkeep.web._router import ChatRouter, OnDisconnect, ScopeOf, chat_router
from chatkeep.web._sse import encode_sse, follow_response, sse_response
from chatkeep.web._watch import watch_response

__all__ = [
    "CORS_OPTIONS",
    "Agent",
    "Authorize",
    "BadRequest",
    "ChatParams",
    "ChatRouter",
    "OnDisconnect",
    "ScopeOf",
    "cancel_response",
    "chat_router",
    "encode_sse",
    "follow_response",
    "parse_chat_request",
    "problem_of",
    "reconstruct_chat",
    "sse_response",
    "watch_response",
]
