"""A chat to drive: a persistence with faults in between, and models that wait when told to."""

from __future__ import annotations

import asyncio
import dataclasses
import json
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
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.backends import Persistence
from chatkeep.engine import (
    ChatContext,
    ChatMiddleware,
    Tool,
    chat,
    client_tool,
    define_tool,
)
from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.engine.interrupts import define_interrupt
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


@dataclass
class Calls:
    """Makes one turn of calls after the other, each ``(id, name, arguments)``, as soon as those
    before have results; then says what the results were. Only what follows the last user message
    counts. ``waits``: for ``go``, before it says anything; ``fails``: with an error then."""

    turns: Sequence[Sequence[tuple[str, str, dict[str, Any]]]] = ((("c1", "pay", {"n": 1}),),)
    waits: bool = False
    fails: bool = False
    provider: str = "calls"
    model: str = "calls-1"
    began: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[ModelRequest] = field(default_factory=list)

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        self.requests.append(request)
        self.began.set()
        if self.waits:
            await self.go.wait()
        if self.fails:
            raise RuntimeError("scripted")
        rows = list(request.messages)
        asked = max((i for i, m in enumerate(rows) if m["role"] == "user"), default=-1)
        results = {m["toolCallId"]: m for m in rows[asked + 1 :] if m["role"] == "tool"}
        identity = request.message_id
        yield TextMessageStartEvent(message_id=identity)
        turn = next((t for t in self.turns if any(c[0] not in results for c in t)), None)
        if turn is None:
            said = " | ".join(str(m["content"]) for m in results.values())
            yield TextMessageContentEvent(message_id=identity, delta=f"said {said}")
        yield TextMessageEndEvent(message_id=identity)
        for call_id, name, args in turn or ():
            yield ToolCallStartEvent(
                tool_call_id=call_id, tool_call_name=name, parent_message_id=identity
            )
            yield ToolCallArgsEvent(tool_call_id=call_id, delta=json.dumps(args))
            yield ToolCallEndEvent(tool_call_id=call_id)
        usage = {"promptTokens": 2, "completionTokens": 1, "totalTokens": 3}
        yield model_finished(request, "stop" if turn is None else "tool_calls", usage=usage)


NUMBER = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

REVIEW = define_interrupt(
    "review",
    response={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    payload={"type": "object"},
)


@dataclass
class Bank:
    """Tools, and what they did: ``pay`` needs an approval, ``look`` none, ``locate`` runs in the
    browser, ``sign`` runs there and needs an approval. ``gate`` holds ``pay`` back."""

    paid: list[Any] = field(default_factory=list)
    looked: list[Any] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    paying: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def tools(self) -> list[Tool]:
        async def pay(args: Any) -> Any:
            self.paid.append(args["n"])
            self.paying.set()
            await self.gate.wait()
            return {"paid": args["n"]}

        async def look(args: Any) -> Any:
            self.looked.append(args["n"])
            return {"seen": args["n"]}

        return [
            define_tool(
                name="pay", description="", input_schema=NUMBER, execute=pay, needs_approval=True
            ),
            define_tool(name="look", description="", input_schema=NUMBER, execute=look),
            client_tool(name="locate", description="", input_schema=NUMBER, output_schema=CITY),
            client_tool(
                name="sign",
                description="",
                input_schema=NUMBER,
                output_schema=CITY,
                needs_approval=True,
            ),
        ]


class Asks(ChatMiddleware):
    """Asks ``review`` at a boundary, in runs that answer nothing."""

    name = "asks"

    def __init__(self, boundary: str = "beforeModel", *keys: str, **options: Any) -> None:
        self.boundary, self.keys, self.options = boundary, keys or ("k",), options
        self.answers: list[Any] = []

    async def on_interrupt_boundary(self, ctx: ChatContext, boundary: Any) -> Any:
        seen = ctx.state(self, dict[str, bool])
        if boundary != self.boundary or seen or ctx.parent_run_id is not None:
            return None
        seen["asked"] = True
        return [
            REVIEW.request(
                key=key, reason="review", message="?", payload={"k": key}, **self.options
            )
            for key in self.keys
        ]

    async def on_interrupt_resolution(self, ctx: ChatContext, resolutions: Any) -> Any:
        self.answers += [(a.key, a.status, a.response) for a in resolutions.all()]
        return None


class Lab:
    """One thread of one persistence, and shorthands for what tests ask again and again."""

    def __init__(self, persistence: Persistence, thread_id: str = "t1") -> None:
        self.persistence, self.faults = with_faults(persistence)
        self.thread_id = thread_id
        self.runs = 0
        self.bank = Bank()

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
            tools=options.pop("tools", None) or [*scripted_tools(), *self.bank.tools()],
            interrupts=options.pop("interrupts", [REVIEW]),
            middleware=keep if isinstance(keep, list) else [keep],
            **options,
        )

        async def read() -> list[BaseEvent]:
            return [event async for event in stream]

        return asyncio.create_task(read())

    async def turn(self, *messages: dict[str, Any], **options: Any) -> list[BaseEvent]:
        """A whole turn; its events."""
        return await self.start(*messages, **options)

    async def pause(self, *turns: Any, **options: Any) -> Any:
        """A turn with a question ``u1`` that pauses; its terminal event."""
        posted = options.pop("messages", [user("u1")])
        adapter = options.pop("adapter", None) or (Calls(turns) if turns else Calls())
        return terminal(await self.turn(*posted, adapter=adapter, **options))

    async def resume(self, *entries: dict[str, Any], turns: Any = (), **options: Any) -> Any:
        """A continuation that posts no messages; its terminal event."""
        posted = options.pop("messages", [])
        adapter = options.pop("adapter", None) or (Calls(turns) if turns else Calls())
        return terminal(await self.turn(*posted, adapter=adapter, resume=list(entries), **options))

    async def waiting(self) -> list[str]:
        """Ids of the interrupts that are pending, claimed or not."""
        store = self.persistence.stores.interrupts
        assert store is not None
        return [record.interrupt_id for record in await store.list_pending(self.thread_id)]

    async def settled(self) -> dict[str, Any]:
        """Status and response of every settled interrupt."""
        store = self.persistence.stores.interrupts
        assert store is not None
        return {
            record.interrupt_id: (record.status, record.response)
            for record in await store.list(self.thread_id)
            if record.status != "pending"
        }

    async def everything(self) -> Any:
        """All that is kept of the thread."""
        export = await self.persistence.export_thread(self.thread_id)
        return None if export is None else dataclasses.asdict(export)

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
    Calls: type[Calls] = Calls
    Bank: type[Bank] = Bank
    Asks: type[Asks] = Asks
    Lab: type[Lab] = Lab
    Faults: type[Faults] = Faults


@pytest.fixture(scope="session")
def kit() -> Tools:
    return Tools()
