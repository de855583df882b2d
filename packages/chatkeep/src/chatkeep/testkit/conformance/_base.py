"""What every conformance class shares: the fixtures, declare-or-fail, and small builders."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import pytest

from chatkeep.errors import CompositionError, StoreError
from chatkeep.records import ActivityRecord, InterruptRecord, ModelMessage
from chatkeep.scope import Scope
from chatkeep.stores import (
    ActivityStore,
    BatchCommit,
    CutArchive,
    InterruptStore,
    MessageStore,
    MetadataStore,
    PagedMessages,
    ReclaimableRuns,
    RevisionedMessages,
    RunHistory,
    RunStore,
    RunTree,
    ThreadAdmin,
    TurnBackend,
    VersionedMetadata,
)

__all__ = [
    "ConformanceCase",
    "Ids",
    "activity",
    "assistant",
    "exact",
    "find_tier",
    "gather",
    "interrupt",
    "left_out",
    "message_ids",
    "need_store",
    "now_ms",
    "outcomes",
    "retrying",
    "tool_row",
    "user",
]

_T = TypeVar("_T")

_TIERS: dict[str, tuple[str, type[Any]]] = {
    "RevisionedMessages": ("messages", RevisionedMessages),
    "PagedMessages": ("messages", PagedMessages),
    "CutArchive": ("messages", CutArchive),
    "RunHistory": ("runs", RunHistory),
    "RunTree": ("runs", RunTree),
    "ReclaimableRuns": ("runs", ReclaimableRuns),
    "BatchCommit": ("interrupts", BatchCommit),
    "VersionedMetadata": ("metadata", VersionedMetadata),
}
"""Tiers that sit on a store: name, store key, protocol."""


class Ids:
    """Ids that no other case uses: one persistence may be shared by the whole suite."""

    def __init__(self) -> None:
        self._tag = secrets.token_hex(5)
        self._count = 0

    def __call__(self, word: str) -> str:
        self._count += 1
        return f"{word}-{self._tag}-{self._count}"

    def thread(self) -> str:
        return self("t")

    def run(self) -> str:
        return self("r")

    def interrupt(self) -> str:
        return self("i")


def find_tier(persistence: Any, name: str) -> Any | None:
    """Who implements tier ``name``: its store, or the bag itself; None if nobody does."""
    key, protocol = _TIERS[name]
    store = getattr(persistence.stores, key)
    return store if isinstance(store, protocol) else None


class ConformanceCase:
    """Base of all conformance classes.

    Override one fixture, ``persistence`` (async or not, of any scope): anything with a
    ``stores`` attribute, such as :class:`chatkeep.Persistence`. Name what your backend does
    not have in ``skip``, a class attribute or a variable of the test module: store keys
    (``"metadata"``) or tiers (``"RunTree"``).
    """

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [
        pytest.mark.anyio,
        pytest.mark.parametrize("anyio_backend", ["asyncio"], scope="session"),
    ]
    skip: ClassVar[Collection[str]] = ()

    @pytest.fixture
    def ids(self) -> Ids:
        return Ids()

    @pytest.fixture
    def declared(self, request: pytest.FixtureRequest) -> frozenset[str]:
        """What the user of the suite said is missing."""
        test: Any = request
        by_module: Collection[str] = getattr(test.module, "skip", ())
        return frozenset(type(self).skip) | frozenset(by_module)

    @pytest.fixture
    def messages(self, persistence: Any, declared: frozenset[str]) -> MessageStore:
        return cast("MessageStore", need_store(persistence, "messages", declared))

    @pytest.fixture
    def runs(self, persistence: Any, declared: frozenset[str]) -> RunStore:
        return cast("RunStore", need_store(persistence, "runs", declared))

    @pytest.fixture
    def interrupts(self, persistence: Any, declared: frozenset[str]) -> InterruptStore:
        return cast("InterruptStore", need_store(persistence, "interrupts", declared))

    @pytest.fixture
    def activities(self, persistence: Any, declared: frozenset[str]) -> ActivityStore:
        return cast("ActivityStore", need_store(persistence, "activities", declared))

    @pytest.fixture
    def metadata(self, persistence: Any, declared: frozenset[str]) -> MetadataStore:
        return cast("MetadataStore", need_store(persistence, "metadata", declared))

    @pytest.fixture
    def revisioned(self, persistence: Any, declared: frozenset[str]) -> RevisionedMessages:
        return cast("RevisionedMessages", _tier(persistence, "RevisionedMessages", declared))

    @pytest.fixture
    def paged(self, persistence: Any, declared: frozenset[str]) -> PagedMessages:
        return cast("PagedMessages", _tier(persistence, "PagedMessages", declared))

    @pytest.fixture
    def cuts(self, persistence: Any, declared: frozenset[str]) -> CutArchive:
        return cast("CutArchive", _tier(persistence, "CutArchive", declared))

    @pytest.fixture
    def history(self, persistence: Any, declared: frozenset[str]) -> RunHistory:
        return cast("RunHistory", _tier(persistence, "RunHistory", declared))

    @pytest.fixture
    def tree(self, persistence: Any, declared: frozenset[str]) -> RunTree:
        return cast("RunTree", _tier(persistence, "RunTree", declared))

    @pytest.fixture
    def reclaimable(self, persistence: Any, declared: frozenset[str]) -> ReclaimableRuns:
        return cast("ReclaimableRuns", _tier(persistence, "ReclaimableRuns", declared))

    @pytest.fixture
    def batch(self, persistence: Any, declared: frozenset[str]) -> BatchCommit:
        return cast("BatchCommit", _tier(persistence, "BatchCommit", declared))

    @pytest.fixture
    def versioned(self, persistence: Any, declared: frozenset[str]) -> VersionedMetadata:
        return cast("VersionedMetadata", _tier(persistence, "VersionedMetadata", declared))

    @pytest.fixture
    def admin(self, persistence: Any, declared: frozenset[str]) -> ThreadAdmin:
        if not isinstance(persistence, ThreadAdmin):
            raise left_out("ThreadAdmin", declared, "the persistence is no ThreadAdmin")
        if "ThreadAdmin" in declared:
            raise left_out("ThreadAdmin", declared, "declared as skipped")
        return persistence

    @pytest.fixture
    def backend(self, persistence: Any, declared: frozenset[str]) -> TurnBackend:
        """What the messages store (or the first store there is) commits through."""
        for store in persistence.stores.present().values():
            backend = getattr(store, "backend", None)
            if isinstance(backend, TurnBackend):
                if "TurnBackend" in declared:
                    raise left_out("TurnBackend", declared, "declared as skipped")
                return backend
        raise left_out("TurnBackend", declared, "no store has a TurnBackend behind it")

    @pytest.fixture
    def scoped(self, persistence: Any, declared: frozenset[str]) -> Callable[[Scope], Any]:
        """``persistence.scoped``, where every store of the bag knows scopes."""
        scoped: Callable[[Scope], Any] | None = getattr(persistence, "scoped", None)
        if scoped is None or "Scope" in declared:
            raise left_out("Scope", declared, "the persistence has no scoped()")
        try:
            scoped(Scope(tenant_id="probe"))
        except CompositionError as error:
            raise left_out("Scope", declared, str(error)) from None
        return scoped


def need_store(persistence: Any, key: str, declared: frozenset[str]) -> Any:
    """The store, or the end of the case: skipped if declared, failed if missing."""
    store = getattr(persistence.stores, key)
    if key in declared:
        if store is not None:
            pytest.fail(f"skip declares the {key} store as missing, but it is there")
        pytest.skip(f"declared: no {key} store")
    if store is None:
        pytest.fail(f"the {key} store is missing: name it in `skip` if that is meant")
    return store


def _tier(persistence: Any, name: str, declared: frozenset[str]) -> Any:
    need_store(persistence, _TIERS[name][0], declared)
    found = find_tier(persistence, name)
    if found is None or name in declared:
        raise left_out(name, declared, f"the {_TIERS[name][0]} store does not have it")
    return found


def left_out(name: str, declared: frozenset[str], why: str) -> BaseException:
    """What to raise for a tier that is not there: a skip that names it."""
    if name in declared:
        return pytest.skip.Exception(f"declared: no {name}")
    return pytest.skip.Exception(f"tier {name} is absent: {why}")


# ---------------------------------------------------------------------------- builders


def user(text: str, message_id: str | None = None, **more: Any) -> ModelMessage:
    """A user message; without an id when none is given."""
    return _message("user", text, message_id, more)


def assistant(text: str | None, message_id: str | None = None, **more: Any) -> ModelMessage:
    """An assistant message."""
    return _message("assistant", text, message_id, more)


def tool_row(call_id: str, text: str, message_id: str | None = None, **more: Any) -> ModelMessage:
    """The result of a tool call."""
    return _message("tool", text, message_id, {"toolCallId": call_id, **more})


def _message(role: str, content: Any, message_id: str | None, more: dict[str, Any]) -> ModelMessage:
    row: dict[str, Any] = {} if message_id is None else {"id": message_id}
    row |= {"role": role, "content": content, **more}
    return cast("ModelMessage", row)


def interrupt(
    thread_id: str,
    run_id: str,
    interrupt_id: str,
    *,
    at: int = 1_700_000_000_000,
    payload: dict[str, Any] | None = None,
    **more: Any,
) -> InterruptRecord:
    """A pending interrupt."""
    return InterruptRecord(
        interrupt_id=interrupt_id,
        run_id=run_id,
        thread_id=thread_id,
        requested_at=at,
        payload={"kind": "approval"} if payload is None else payload,
        **more,
    )


def activity(row_id: str, index: int = 0, **more: Any) -> ActivityRecord:
    """A UI row."""
    fields: dict[str, Any] = {"activity_type": "card", "content": {"n": index}} | more
    return ActivityRecord(id=row_id, index=index, **fields)


def message_ids(messages: Iterable[ModelMessage]) -> list[str | None]:
    """Ids in order; None for a message without one."""
    return [m.get("id") for m in messages]


def exact(value: Any) -> str:
    """``value`` as text that tells 1, 1.0 and true apart and keeps the order of keys."""
    return json.dumps(value, ensure_ascii=True)


def now_ms() -> int:
    """This process's clock, epoch milliseconds."""
    return time.time_ns() // 1_000_000


# ------------------------------------------------------------------------- concurrency


async def gather(works: Sequence[Awaitable[_T]]) -> list[_T]:
    """All results, in order; the first error is raised once everything has ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)


async def outcomes(works: Sequence[Awaitable[_T]]) -> tuple[list[_T], list[StoreError]]:
    """What succeeded, and what was refused with a store error; other errors are raised."""
    won: list[_T] = []
    lost: list[StoreError] = []
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, StoreError):
            lost.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            won.append(result)
    return won, lost


async def retrying(
    work: Callable[[], Awaitable[_T]], conflict: type[StoreError], tries: int = 200
) -> _T:
    """Run ``work`` again for as long as it is refused with ``conflict``."""
    for _ in range(tries - 1):
        try:
            return await work()
        except conflict:
            await asyncio.sleep(0)
    return await work()
