"""The hooks of a run, found once: a hook that nobody overrides costs nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from chatkeep.engine.abort import Gate
from chatkeep.engine.middleware import (
    Capability,
    ChatContext,
    ChatMiddleware,
    Event,
    _Drop,
)
from chatkeep.errors import CompositionError

__all__ = ["Hooks", "check_capabilities", "label"]

_LOG: Final = logging.getLogger("chatkeep.engine")

Hook = Callable[..., Any]

_JUDGES: Final = frozenset({"on_chunk", "on_interrupt_boundary", "on_should_continue"})
"""Hooks that see what the model said before it counts as said."""


def label(middleware: ChatMiddleware) -> str:
    """How errors name a middleware."""
    return repr(middleware.name) if middleware.name else type(middleware).__name__


def check_capabilities(
    middleware: Sequence[ChatMiddleware], adapter_requires: Sequence[Capability[Any]] = ()
) -> dict[Capability[Any], str]:
    """Who provides what, by declaration.

    Raises:
        CompositionError: something is required that nobody declares to provide.
    """
    provided: dict[Capability[Any], str] = {}
    for item in middleware:
        for capability in item.provides:
            provided[capability] = label(item)
    wanted = [(label(item), capability) for item in middleware for capability in item.requires]
    wanted += [("the model adapter", capability) for capability in adapter_requires]
    for who, capability in wanted:
        if capability not in provided:
            raise CompositionError(
                f"{who} requires {capability.name!r}, and no middleware provides it: add one "
                "that does to middleware=[…]"
            )
    return provided


class Hooks:
    """Calls hooks in array order; every call runs to its end, whatever is aborted meanwhile."""

    __slots__ = ("_bound", "_context", "_gate", "middleware", "refusal")

    def __init__(
        self, middleware: Sequence[ChatMiddleware], context: ChatContext, gate: Gate
    ) -> None:
        self.middleware = tuple(middleware)
        self._context = context
        self._gate = gate
        self._bound: dict[str, list[tuple[ChatMiddleware, Hook]]] = {}
        self.refusal: Exception | None = None
        """What a hook raised that may refuse what the model said."""

    def of(self, name: str) -> list[tuple[ChatMiddleware, Hook]]:
        """The middlewares that override hook ``name``, and their bound methods."""
        found = self._bound.get(name)
        if found is None:
            base = getattr(ChatMiddleware, name)
            found = list[tuple[ChatMiddleware, Hook]]()
            for item in self.middleware:
                bound = getattr(item, name)
                if getattr(bound, "__func__", bound) is not base:
                    found.append((item, bound))
            self._bound[name] = found
        return found

    async def call(self, name: str, *args: Any) -> list[Any]:
        """Call hook ``name`` everywhere; what each returned. The first failure propagates."""
        found = self.of(name)
        if not found:
            return []
        with self._gate:
            try:
                return [await hook(self._context, *args) for _, hook in found]
            except Exception as error:
                self._note(name, error)
                raise

    def _note(self, name: str, error: Exception) -> None:
        if name in _JUDGES:
            self.refusal = error

    async def first(self, name: str, *args: Any) -> Any:
        """Call hook ``name`` until one returns something."""
        found = self.of(name)
        if found:
            with self._gate:
                for _, hook in found:
                    result = await hook(self._context, *args)
                    if result is not None:
                        return result
        return None

    async def every(self, name: str, *args: Any) -> list[Exception]:
        """Call hook ``name`` everywhere, also after a failure; the failures, logged.

        A hook that ends as cancelled (something it awaited was) has failed like any other.

        Raises:
            asyncio.CancelledError: the run's own task was cancelled meanwhile; every hook has
                been called.
        """
        failures: list[Exception] = []
        task = asyncio.current_task()
        asked = 0 if task is None else task.cancelling()
        with self._gate:
            for item, hook in self.of(name):
                try:
                    await hook(self._context, *args)
                except asyncio.CancelledError as error:
                    _LOG.exception("%s of middleware %s was cancelled", name, label(item))
                    failure = RuntimeError(f"{name} of middleware {label(item)} was cancelled")
                    failure.__cause__ = error
                    failures.append(failure)
                except Exception as error:  # noqa: BLE001 - returned, and logged
                    _LOG.exception("%s of middleware %s failed", name, label(item))
                    failures.append(error)
        if task is not None and task.cancelling() > asked:
            raise asyncio.CancelledError
        return failures

    async def setup(self, declared: dict[Capability[Any], str]) -> None:
        """Run every ``setup`` and check that it provided what it declares.

        Raises:
            CompositionError: a declared capability was not provided.
        """
        context = self._context
        context.declare(declared)
        overriding = dict(self.of("setup"))
        for item in self.middleware:
            hook = overriding.get(item)
            if hook is not None:
                with self._gate:
                    await hook(context)
            for capability in item.provides:
                if context.get(capability, optional=True) is None:
                    raise CompositionError(
                        f"{label(item)} declares that it provides {capability.name!r}, "
                        "but its setup did not"
                    )

    async def chunk(self, event: Event) -> list[Event]:
        """``event`` through every ``on_chunk``: what comes out, in order."""
        try:
            return await self._chunk(event)
        except Exception as error:
            self._note("on_chunk", error)
            raise

    async def _chunk(self, event: Event) -> list[Event]:
        events = [event]
        with self._gate:
            for item, hook in self.of("on_chunk"):
                out: list[Event] = []
                for one in events:
                    result = await hook(self._context, one)
                    if result is None:
                        out.append(one)
                    elif isinstance(result, Event):
                        out.append(result)
                    elif isinstance(result, list | tuple):
                        out.extend(cast("Sequence[Event]", result))
                    elif not isinstance(result, _Drop):
                        raise TypeError(
                            f"on_chunk of {label(item)} returned {type(result).__name__}; it may "
                            "return None, an event, a list of events or DROP"
                        )
                if not out:
                    return out
                events = out
        return events
