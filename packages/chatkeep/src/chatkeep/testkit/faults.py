"""Faults on demand between a persistence and its backend.

:class:`FaultyBackend` is a backend that hands every primitive on to another one and does on
the way what :class:`Faults` says: refuse before the write, lose the reply after it, stall, or
die after so many calls. Everything above the primitives (retries of commits, timeouts, the
stores, with_persistence) is the real code and meets the fault as it would meet a database's::

    persistence, faults = with_faults(memory_persistence())
    faults.lose_reply("commit_turn")            # applied, but nobody hears of it
    await persistence.stores.messages.save_thread("t", messages)
    assert faults.calls["commit_turn"] == 2     # sent again, applied once
"""

# The wrapper stands where the base class stands: between public methods and primitives.
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self, TypeVar

from chatkeep.backends import Backend, Persistence
from chatkeep.codec import JsonValue
from chatkeep.errors import BackendUnavailable
from chatkeep.records import CutRecord, ModelMessage, RunRecord
from chatkeep.scope import Scope
from chatkeep.stores import (
    LostRun,
    ThreadList,
    ThreadView,
    TurnCommit,
    TurnReceipt,
    VersionedValue,
    ViewQuery,
)

__all__ = ["READS", "WRITES", "Crashed", "Faults", "FaultyBackend", "with_faults"]

_T = TypeVar("_T")

READS: frozenset[str] = frozenset(
    {
        "find_run",
        "list_child_runs",
        "list_cut_threads",
        "list_cuts",
        "list_idle",
        "list_lost",
        "list_reclaimable",
        "list_threads",
        "load_cut",
        "metadata_get",
        "metadata_of",
        "ping",
        "read_view",
    }
)
"""Primitives that only read, by the name of their public method."""

WRITES: frozenset[str] = frozenset(
    {
        "commit_turn",
        "delete_thread",
        "erase_messages",
        "metadata_delete",
        "metadata_put",
        "purge_cuts",
        "renew_lease",
        "save_draft",
    }
)
"""Primitives that write, by the name of their public method."""


class Crashed(BaseException):
    """The process is gone. No ``except Exception`` may survive it, so it is none."""


@dataclass(slots=True)
class _Fault:
    kind: Literal["refuse", "lose", "stall"]
    names: frozenset[str]
    times: int
    after: int = 0
    error: Exception | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Faults:
    """What goes wrong next, and what was called. Shared by all handles of one backend.

    Names are those of the public methods (``commit_turn``, ``read_view``, ``save_draft``, …);
    collections of them, such as :data:`WRITES`, name many. Faults are used up one call each, in
    the order in which they were given; ``after`` lets so many calls pass first. A call that is
    refused counts as a call.
    """

    calls: Counter[str] = field(default_factory=Counter[str])
    """Calls that reached the primitive level, refused ones included, by name."""

    applied: Counter[str] = field(default_factory=Counter[str])
    """Calls that the backend behind carried out without an error, by name."""

    log: list[str] = field(default_factory=list[str])
    """Names in the order of the calls."""

    crashed: bool = False
    """Whether :meth:`crash_after` has struck."""

    _faults: list[_Fault] = field(default_factory=list[_Fault])
    _left: int | None = None
    _deadly: frozenset[str] = frozenset()

    def refuse(
        self,
        names: str | Collection[str] = WRITES,
        *,
        times: int = 1,
        after: int = 0,
        error: Exception | None = None,
    ) -> None:
        """The next ``times`` calls fail and nothing is applied: ``error``, by default
        ``BackendUnavailable``."""
        self._faults.append(_Fault("refuse", _names(names), times, after, error))

    def lose_reply(
        self, names: str | Collection[str] = WRITES, *, times: int = 1, after: int = 0
    ) -> None:
        """The next ``times`` calls are applied, then the connection is gone:
        ``BackendUnavailable`` with ``outcome_unknown``."""
        self._faults.append(_Fault("lose", _names(names), times, after))

    def stall(
        self,
        names: str | Collection[str] = WRITES,
        *,
        seconds: float,
        times: int = 1,
        after: int = 0,
    ) -> None:
        """The next ``times`` calls wait before they are carried out."""
        self._faults.append(_Fault("stall", _names(names), times, after, seconds=seconds))

    def crash_after(self, count: int, names: str | Collection[str] = WRITES) -> None:
        """The ``count``-th call from now is applied, then the process is gone: that call and
        every later one, of any name, raise :class:`Crashed`. 0: at once, nothing is applied."""
        self._left, self._deadly = count, _names(names)
        self.crashed = count == 0

    def heal(self) -> None:
        """Forget all faults that have not struck; a crashed process lives again."""
        self._faults.clear()
        self._left, self.crashed = None, False

    async def _carry_out(self, name: str, call: Callable[[], Awaitable[_T]]) -> _T:
        self.calls[name] += 1
        self.log.append(name)
        if self.crashed:
            raise Crashed(name)
        fault = self._take(name)
        if fault is not None and fault.kind == "stall":
            await asyncio.sleep(fault.seconds)
        if fault is not None and fault.kind == "refuse":
            raise fault.error or BackendUnavailable(f"{name} was refused by a fault")
        result = await call()
        self.applied[name] += 1
        if self._left is not None and name in self._deadly:
            self._left -= 1
            if self._left <= 0:
                self.crashed = True
                raise Crashed(name)
        if fault is not None and fault.kind == "lose":
            raise BackendUnavailable(f"the reply to {name} was lost", outcome_unknown=True)
        return result

    def _take(self, name: str) -> _Fault | None:
        for fault in self._faults:
            if name in fault.names:
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
                return fault
        return None


class FaultyBackend(Backend):
    """``inner``, with faults in between. It uses the inner backend's primitives only.

    Args:
        inner: any backend; its own retries and timeout are not used.
        faults: shared with all scoped handles.
        timeout: seconds for one store call, as in :class:`~chatkeep.backends.Backend`.
    """

    name: ClassVar[str] = "faulty"

    def __init__(
        self, inner: Backend, faults: Faults | None = None, *, timeout: float | None = 30.0
    ) -> None:
        super().__init__(scope=inner.scope, timeout=timeout)
        self.faults = faults or Faults()
        self._inner = inner

    def scoped(self, scope: Scope) -> Self:
        """A handle with another scope, with the same faults."""
        clone = super().scoped(scope)
        clone._inner = self._inner.scoped(scope)
        return clone

    def _clone(self) -> Self:
        return type(self)(self._inner, self.faults, timeout=self._timeout)

    # -- life ---------------------------------------------------------------------

    async def _open(self) -> None:
        await self._inner._ensure_open()

    async def _close(self) -> None:
        await self._inner.aclose()

    async def _ping(self) -> None:
        await self.faults._carry_out("ping", self._inner._ping)

    async def _setup(self) -> None:
        await self._inner._setup()

    async def _check_schema(self) -> None:
        await self._inner._check_schema()

    def _translate(self, error: Exception) -> Exception:
        return self._inner._translate(error)

    # -- primitives -----------------------------------------------------------------

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        return await self._via("read_view", lambda b: b._read_view(thread_id, query))

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        return await self._via("commit_turn", lambda b: b._commit_turn(commit))

    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None:
        await self._via(
            "save_draft", lambda b: b._save_draft(thread_id, run_id, messages, lease_token)
        )

    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        return await self._via(
            "renew_lease", lambda b: b._renew_lease(thread_id, run_id, lease_token, lease_ms)
        )

    async def _find_run(self, run_id: str) -> RunRecord | None:
        return await self._via("find_run", lambda b: b._find_run(run_id))

    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]:
        return await self._via("list_child_runs", lambda b: b._list_child_runs(parent_run_ids))

    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]:
        return await self._via(
            "list_reclaimable", lambda b: b._list_reclaimable(detached_before, limit, every_scope)
        )

    async def _list_lost(self, limit: int) -> list[LostRun]:
        return await self._via("list_lost", lambda b: b._list_lost(limit))

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        return await self._via("metadata_get", lambda b: b._metadata_get(namespace, key))

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        return await self._via(
            "metadata_put", lambda b: b._metadata_put(namespace, key, value, expected)
        )

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        await self._via("metadata_delete", lambda b: b._metadata_delete(namespace, key))

    async def _metadata_of(self, key: str) -> dict[str, JsonValue]:
        return await self._via("metadata_of", lambda b: b._metadata_of(key))

    async def _list_cuts(self, thread_id: str) -> list[CutRecord]:
        return await self._via("list_cuts", lambda b: b._list_cuts(thread_id))

    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        return await self._via("load_cut", lambda b: b._load_cut(thread_id, cut_id))

    async def _purge_cuts(self, thread_id: str, before: int) -> int:
        return await self._via("purge_cuts", lambda b: b._purge_cuts(thread_id, before))

    async def _delete_thread(self, thread_id: str) -> bool:
        return await self._via("delete_thread", lambda b: b._delete_thread(thread_id))

    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList:
        return await self._via("list_threads", lambda b: b._list_threads(limit, cursor, children))

    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        return await self._via(
            "erase_messages", lambda b: b._erase_messages(thread_id, message_ids)
        )

    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        return await self._via("list_idle", lambda b: b._list_idle(idle_ms, limit))

    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]:
        return await self._via("list_cut_threads", lambda b: b._list_cut_threads(before, limit))

    async def _via(self, name: str, call: Callable[[Backend], Awaitable[_T]]) -> _T:
        return await self.faults._carry_out(name, lambda: call(self._inner))


def with_faults(
    persistence: Persistence, *, timeout: float | None = 30.0
) -> tuple[Persistence, Faults]:
    """A persistence of the same backend with faults in between, and the faults.

    Args:
        persistence: one whose stores share one backend (not a composed bag).
        timeout: seconds for one store call; make it small to see a stall time out.
    """
    (inner,) = persistence.backends
    faulty = FaultyBackend(inner, timeout=timeout)
    return faulty.persistence(), faulty.faults


def _names(names: str | Collection[str]) -> frozenset[str]:
    found = frozenset({names}) if isinstance(names, str) else frozenset(names)
    unknown = found - READS - WRITES
    if unknown:
        raise ValueError(f"no such primitive: {', '.join(sorted(unknown))}")
    return found
