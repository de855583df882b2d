"""A chat to drive: a persistence with faults in between, and models that wait when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    EventType,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
)

from chatkeep.backends import Persistence
from chatkeep.engine import chat
from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.memory import memory_persistence
from chatkeep.persistence import PersistenceMiddleware, with_persistence
from chatkeep.records import ModelMessage, RunRecord
from chatkeep.stores import ViewQuery
from chatkeep.testkit.faults import Faults, with_faults
from chatkeep.testkit.scripted import ScriptedModel, scripted_tools


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


_MARKS = {"sqlite": [pytest.mark.sqlite], "psycopg": [pytest.mark.postgres]}
_MARKS["asyncpg"] = _MARKS["psycopg"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Memory and SQLite, or what a module names in ``BACKENDS``: a real server is for those
    tests whose outcome may depend on one."""
    if "persistence" in metafunc.fixturenames:
        names = getattr(metafunc.module, "BACKENDS", ("memory", "sqlite"))
        params = [pytest.param(name, marks=_MARKS.get(name, [])) for name in names]
        metafunc.parametrize("persistence", params, indirect=True)


@pytest.fixture
async def persistence(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Persistence]:
    """An empty persistence on each backend."""
    if request.param == "memory":
        found = memory_persistence()
    elif request.param == "sqlite":
        from chatkeep_sql import sqlite_persistence

        found = sqlite_persistence(tmp_path / "chatkeep.db")
    else:
        from chatkeep_sql import postgres_persistence

        database = request.getfixturevalue("postgres_database")
        found = postgres_persistence(database.url(request.param))
    async with found:
        yield found


def user(message_id: str, text: str = "hello") -> dict[str, Any]:
    return {"id": message_id, "role": "user", "content": text}


def assistant(message_id: str, text: str = "answer") -> dict[str, Any]:
    return {"id": message_id, "role": "assistant", "content": text}


@dataclass
class Paced:
    """Says ``before``, waits for ``go``, says ``after``; then fails with ``error`` if given.

    ``began`` is set when the model is called, ``said`` when ``before`` is out.
    """

    before: Sequence[str] = ("one ",)
    after: Sequence[str] = ("two",)
    error: Exception | None = None
    usage: dict[str, Any] | None = None
    message_id: str | None = None
    waits: bool = True
    provider: str = "paced"
    model: str = "paced-1"
    began: asyncio.Event = field(default_factory=asyncio.Event)
    said: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[ModelRequest] = field(default_factory=list)

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        self.requests.append(request)
        self.began.set()
        identity = self.message_id or request.message_id
        yield TextMessageStartEvent(message_id=identity)
        for delta in self.before:
            yield TextMessageContentEvent(message_id=identity, delta=delta)
        self.said.set()
        if self.waits:
            await self.go.wait()
        for delta in self.after:
            yield TextMessageContentEvent(message_id=identity, delta=delta)
        if self.error is not None:
            raise self.error
        yield TextMessageEndEvent(message_id=identity)
        yield model_finished(request, "stop", usage=self.usage)


class Lab:
    """One thread of one persistence, and shorthands for what tests ask again and again."""

    def __init__(self, persistence: Persistence, thread_id: str = "t1") -> None:
        self.persistence, self.faults = with_faults(persistence)
        self.thread_id = thread_id
        self.runs = 0

    def middleware(self, **options: Any) -> PersistenceMiddleware:
        return with_persistence(self.persistence, **options)

    def start(
        self,
        *messages: dict[str, Any],
        adapter: Any = None,
        run_id: str | None = None,
        middleware: Any = None,
        **options: Any,
    ) -> asyncio.Task[list[BaseEvent]]:
        """A turn in a task of its own; it yields the events."""
        self.runs += 1
        run = run_id or f"r{self.runs}"
        keep = middleware if middleware is not None else self.middleware()
        stream = chat(
            adapter=adapter or ScriptedModel(),
            messages=list(messages),
            thread_id=options.pop("thread_id", self.thread_id),
            run_id=run,
            tools=scripted_tools(),
            middleware=keep if isinstance(keep, list) else [keep],
            **options,
        )

        async def read() -> list[BaseEvent]:
            return [event async for event in stream]

        return asyncio.create_task(read())

    async def turn(self, *messages: dict[str, Any], **options: Any) -> list[BaseEvent]:
        """A whole turn; its events."""
        return await self.start(*messages, **options)

    async def stored(self) -> list[ModelMessage]:
        assert self.persistence.stores.messages is not None
        return await self.persistence.stores.messages.load_thread(self.thread_id)

    async def ids(self) -> list[str]:
        return [str(m.get("id")) for m in await self.stored()]

    async def said(self) -> list[str]:
        """The thread as lines ``role: text``."""
        return [f"{m.get('role')}: {m.get('content')}" for m in await self.stored()]

    async def run(self, run_id: str) -> RunRecord | None:
        (backend,) = self.persistence.backends
        view = await backend.read_view(
            self.thread_id,
            ViewQuery(messages="none", run_id=run_id, runs="none", interrupts="none"),
        )
        return view.run

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``; the test's own timeout ends a wait for nothing."""
        while not ready():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)

    async def fill(self, *messages: dict[str, Any]) -> None:
        assert self.persistence.stores.messages is not None
        await self.persistence.stores.messages.save_thread(self.thread_id, list(messages))  # type: ignore[arg-type]


@pytest.fixture
def lab(persistence: Persistence) -> Lab:
    return Lab(persistence)


@pytest.fixture
def paced() -> Callable[..., Paced]:
    return Paced


def terminal(events: Sequence[BaseEvent]) -> BaseEvent:
    """The one terminal event, which is the last."""
    ends = [e for e in events if e.type in (EventType.RUN_FINISHED, EventType.RUN_ERROR)]
    assert len(ends) == 1
    assert events[-1] is ends[0]
    return ends[0]


@dataclass
class Tools:
    """Names that test modules need; ``conftest`` modules cannot be imported by name."""

    user: Callable[..., dict[str, Any]] = user
    assistant: Callable[..., dict[str, Any]] = assistant
    terminal: Callable[..., Any] = terminal
    Paced: type[Paced] = Paced
    Lab: type[Lab] = Lab
    Faults: type[Faults] = Faults


@pytest.fixture(scope="session")
def kit() -> Tools:
    return Tools()
