"""The rows of the matrix: one backend, as a bag of its own or composed with others.

Every bag is checked when it closes: no connection may be in use by then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chatkeep.backends import Backend, Persistence
from chatkeep.codec import decode, encode
from chatkeep.compose import compose_persistence, define_activity_store
from chatkeep.memory import memory_persistence
from chatkeep.records import ActivityRecord, ModelMessage
from chatkeep.rules import decode_message, encode_messages
from chatkeep.scope import Scope, check_id
from chatkeep.stores import ActivityStore

SHAPES = ("plain", "scoped", "transcript apart", "decisions apart")
"""plain: one backend, unscoped. scoped: a tenant's user of it. transcript apart: messages in
memory, the rest on the backend. decisions apart: interrupts and metadata in memory,
activities in two functions of a user's own, the rest on the backend."""

OWN_SHAPES = ("own transcript", "own scoped transcript", "own transcript and activities")
"""Bags with a messages store of a user's own, of two methods: it has no backend, so no list of
threads can see what only it knows. The second knows scopes; the third has activities of a
user's own beside it."""


class OwnMessages:
    """The smallest messages store a user may write: a transcript per thread, saved whole."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Scope, str], list[bytes]] = {}
        self._scope = Scope()

    async def load_thread(self, thread_id: str) -> list[ModelMessage]:
        key = (self._scope, check_id(thread_id, "thread_id"))
        return [decode_message(body) for body in self._rows.get(key, [])]

    async def save_thread(self, thread_id: str, messages: Sequence[ModelMessage]) -> None:
        key = (self._scope, check_id(thread_id, "thread_id"))
        self._rows[key] = [entry.body for entry in encode_messages(messages)]


class OwnScopedMessages(OwnMessages):
    """The same store, with the scope in every key."""

    def scoped(self, scope: Scope) -> OwnScopedMessages:
        other = OwnScopedMessages()
        other._rows, other._scope = self._rows, scope
        return other


def minimal_activities() -> ActivityStore:
    """The smallest store a user may bring: two functions over a dict of bodies."""
    rows: dict[str, bytes] = {}

    async def load_activities(thread_id: str) -> list[ActivityRecord]:
        body = rows.get(check_id(thread_id, "thread_id"))
        return [] if body is None else [ActivityRecord.from_json(row) for row in decode(body)]

    async def save_activities(thread_id: str, activities: list[ActivityRecord]) -> None:
        check_id(thread_id, "thread_id")
        rows[thread_id] = encode([row.to_json() for row in activities])

    return define_activity_store(load_activities=load_activities, save_activities=save_activities)


@asynccontextmanager
async def bag(shape: str, make: Callable[[], Persistence]) -> AsyncIterator[Persistence]:
    """The persistence of one row; ``make`` opens the backend of the column."""
    async with make() as base:
        if shape == "plain":
            yield base
        elif shape == "scoped":
            yield base.scoped(Scope(tenant_id="acme: corp/1", user_id="ann%"))
        elif shape in OWN_SHAPES:
            yield compose_persistence(base, overrides=_own(shape))
        else:
            async with memory_persistence() as other:
                yield compose_persistence(base, overrides=_overrides(shape, other))
        for backend in base.backends:
            assert checked_out(backend) == 0, "a connection was left in use"


def _overrides(shape: str, other: Persistence) -> Mapping[str, Any]:
    if shape == "transcript apart":
        return {"messages": other.stores.messages}
    return {
        "interrupts": other.stores.interrupts,
        "metadata": other.stores.metadata,
        "activities": minimal_activities(),
    }


def _own(shape: str) -> Mapping[str, Any]:
    if shape == "own scoped transcript":
        return {"messages": OwnScopedMessages()}
    if shape == "own transcript":
        return {"messages": OwnMessages()}
    return {"messages": OwnMessages(), "activities": minimal_activities()}


def checked_out(backend: Backend) -> int:
    """Connections of a backend that are in use; 0 for one that has none."""
    if backend.name == "mongodb":
        client: Any = getattr(backend, "_db")._client  # noqa: B009
        # Of Motor's client, the one that it is wrapped around.
        topology = getattr(client, "_topology", None) or client.delegate._topology
        return sum(server.pool.active_sockets for server in topology._servers.values())
    space: Any = getattr(backend, "_space", None)
    if space is not None:
        return int(space.runner.in_use)
    table: Any = getattr(backend, "_table", None)
    if table is not None:
        return int(table.busy)
    runner = getattr(backend, "_runner", None)
    pool = getattr(getattr(runner, "engine", None), "pool", None)
    return pool.checkedout() if hasattr(pool, "checkedout") else 0
