"""What makes the stream of a request: a callable, or the options of a chat."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

from ag_ui.core import BaseEvent

from chatkeep.backends import Persistence
from chatkeep.delivery._terminal import aclose, check_stream
from chatkeep.engine import ChatStream, chat
from chatkeep.errors import CompositionError
from chatkeep.persistence import (
    DETACHABLE,
    PERSISTENCE,
    PersistenceMiddleware,
    with_persistence,
)
from chatkeep.scope import EMPTY_SCOPE, Scope
from chatkeep.web._params import ChatParams

__all__ = ["Agent", "Runner", "detachable"]

Agent: TypeAlias = Callable[
    [ChatParams], "AsyncIterator[BaseEvent] | Awaitable[AsyncIterator[BaseEvent]]"
]
"""Makes the stream of a request, usually with :func:`chatkeep.engine.chat`."""

_log = logging.getLogger("chatkeep.web")

_OPTIONS = frozenset(inspect.signature(chat).parameters)
_OF_REQUEST = frozenset(ChatParams(thread_id="t", run_id="r").chat_kwargs())
"""What the router takes from the request; an agent's own would be every request's."""


class Runner:
    """A checked agent: makes the streams of requests, and looks at what it has made.

    Args:
        agent: a callable, or the options of a chat; options are tried out here, so that what is
            wrong with them is said when the app is built.
        persistence: the router's.
        scoped: whether requests work on rows of their own.

    Raises:
        CompositionError: no agent; options that a chat does not know or that the request sets;
            no adapter; options that keep the chat in one scope beside ``scope=``.
        ToolError: tools that are wrong.
    """

    def __init__(self, agent: object, persistence: Persistence, *, scoped: bool) -> None:
        self._warned = False
        if callable(agent):
            self._make = cast("Agent", agent)
            return
        if not isinstance(agent, Mapping):
            raise CompositionError(
                f"an agent is a callable that takes ChatParams, or a mapping of the options of "
                f"chat(), not {type(agent).__name__}"
            )
        options = dict(cast("Mapping[str, Any]", agent))
        _check_options(options)
        if scoped and _keeps(options.get("middleware", ())):
            raise CompositionError(
                "with scope= leave with_persistence out of the agent's middleware: the router "
                "adds one for the scope of every request"
            )
        _chat(options, ChatParams(thread_id="t", run_id="r", store=persistence))
        self._make = partial(_chat, options)

    async def stream(self, params: ChatParams, scope: Scope) -> AsyncIterator[BaseEvent]:
        """The stream of a request.

        Raises:
            CompositionError: the agent returned no stream, or one that keeps its runs in
                another scope than the request's.
        """
        made = self._make(params)
        stream = check_stream(await made if inspect.isawaitable(made) else made)
        if isinstance(stream, ChatStream):
            if scope != EMPTY_SCOPE and _keeps_elsewhere(stream, scope):
                await aclose(stream)
                raise CompositionError(
                    "the agent keeps its runs in another scope than the request's: give "
                    "with_persistence the params.persistence of the request"
                )
            self._warn_once(stream)
        return stream

    def _warn_once(self, stream: ChatStream) -> None:
        if self._warned or _keeps(stream.middleware):
            return
        self._warned = True
        _log.warning(
            "the agent's runs are streamed but not stored: add "
            "with_persistence(params.persistence) to the middleware of its chat()"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    if taken := sorted(_OF_REQUEST & options.keys()):
        raise CompositionError(
            f"the agent's options must leave out what every request says itself: {', '.join(taken)}"
        )
    if unknown := sorted(str(key) for key in options.keys() - _OPTIONS):
        known = ", ".join(sorted(_OPTIONS - _OF_REQUEST))
        raise CompositionError(f"chat() has no option {', '.join(unknown)}; it has {known}")
    if not isinstance(options.get("middleware", ()), (list, tuple)):
        raise CompositionError("the agent's middleware is a list: every request reads it again")
    if "adapter" not in options:
        raise CompositionError("the agent's options have no adapter, the model to talk to")


def _chat(options: Mapping[str, Any], params: ChatParams) -> ChatStream:
    """The agent that is described by the options of a chat."""
    own = dict(options)
    if not _keeps(options.get("middleware", ())):
        keep = with_persistence(params.persistence)
        own["middleware"] = [keep, *options.get("middleware", ())]
    return chat(**params.chat_kwargs(), **own)


def _keeps(middleware: Iterable[object]) -> bool:
    """Whether one of them stores the chat. What is no middleware is for ``chat()`` to refuse."""
    return any(PERSISTENCE in getattr(item, "provides", ()) for item in middleware)


def _keeps_elsewhere(stream: ChatStream, scope: Scope) -> bool:
    """Whether an agent's stream would read and write rows of another scope than ``scope``: of
    another tenant, if thread ids meet."""
    return any(
        backend.scope != scope
        for middleware in stream.middleware
        if isinstance(middleware, PersistenceMiddleware)
        for backend in middleware.persistence.backends
    )


def detachable(stream: object) -> bool:
    """Whether a middleware of the chat says that its run can go on in another process."""
    return isinstance(stream, ChatStream) and any(
        DETACHABLE in item.provides for item in stream.middleware
    )
