"""What a process remembers of threads, so that a boundary needs no read before its write.

A :class:`State` is a head and the rows that were met under it. Every write has the head's
version as its condition, so a memory that is out of date costs one refused request, never a
wrong row. Nothing is *refused* on the strength of a memory: a refusal is decided on rows that
were read for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from chatkeep.scope import Scope
from chatkeep_dynamodb.client import Table
from chatkeep_dynamodb.head import Head
from chatkeep_dynamodb.items import Item
from chatkeep_dynamodb.rows import StoredInterrupt, StoredRun

__all__ = ["InterruptKey", "Memory", "Place", "Rows", "State"]

_THREADS = 1024

Rows: TypeAlias = Sequence[Item]
"""A row and the chunks behind it."""

InterruptKey: TypeAlias = tuple[str, str]
"""Run id and interrupt id."""

_Thread: TypeAlias = tuple[Scope, str]


@dataclass(frozen=True, slots=True)
class State:
    """A head, and of its open runs and pending interrupts the rows that were met: as rows, so
    that nobody shares a record with it."""

    head: Head
    runs: Mapping[str, Rows] = field(default_factory=dict[str, "Rows"])
    interrupts: Mapping[InterruptKey, Rows] = field(default_factory=dict["InterruptKey", "Rows"])

    def run(self, run_id: str) -> StoredRun | None:
        """An open run as this head knows it; None if that was not met."""
        rows = self.runs.get(run_id)
        if rows is None or rows[0]["version"] != self.head.open_runs.get(run_id):
            return None
        return StoredRun.from_item(rows[0], rows[1:])

    def interrupt(self, key: InterruptKey) -> StoredInterrupt | None:
        """A pending interrupt as this head knows it; None if that was not met."""
        rows = self.interrupts.get(key)
        if rows is None or rows[0]["version"] != self.head.pending.get(key):
            return None
        return StoredInterrupt.from_item(rows[0], rows[1:])


class Memory:
    """The threads seen last, and whose turn it is to commit to one; shared by all handles."""

    def __init__(self) -> None:
        self._states: OrderedDict[_Thread, State] = OrderedDict()
        self._queues: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[_Thread, _Queue]
        ] = weakref.WeakKeyDictionary()

    def get(self, scope: Scope, thread_id: str) -> State | None:
        """What is remembered of a thread."""
        found = self._states.get((scope, thread_id))
        if found is not None:
            self._states.move_to_end((scope, thread_id))
        return found

    def put(self, state: State) -> None:
        """Remember what was read or written, unless more is known already; of one version the
        rows met before are kept."""
        head = state.head
        key = (head.scope, head.thread_id)
        known = self._states.get(key)
        if known is not None and known.head.incarnation == head.incarnation:
            if known.head.version > head.version:
                return
            state = replace(
                state,
                runs={
                    **{r: v for r, v in known.runs.items() if r in head.open_runs},
                    **state.runs,
                },
                interrupts={
                    **{i: v for i, v in known.interrupts.items() if i in head.pending},
                    **state.interrupts,
                },
            )
        self._states[key] = state
        self._states.move_to_end(key)
        if len(self._states) > _THREADS:
            self._states.popitem(last=False)

    def forget(self, scope: Scope, thread_id: str) -> None:
        """The next commit reads first."""
        self._states.pop((scope, thread_id), None)

    def renewed(self, scope: Scope, thread_id: str, run_id: str, rows: Rows) -> None:
        """A lease was extended: a driver's next boundary expects the new end."""
        known = self._states.get((scope, thread_id))
        if known is not None and run_id in known.runs:
            runs = {**known.runs, run_id: rows}
            self._states[scope, thread_id] = replace(known, runs=runs)

    @contextlib.asynccontextmanager
    async def turn(self, scope: Scope, thread_id: str) -> AsyncGenerator[None]:
        """Commits of one process to one thread go one by one: each knows what the last left."""
        queues = self._queues.setdefault(asyncio.get_running_loop(), {})
        queue = queues.setdefault((scope, thread_id), _Queue())
        queue.users += 1
        try:
            async with queue.lock:
                yield
        finally:
            queue.users -= 1
            if not queue.users:
                queues.pop((scope, thread_id), None)


class _Queue:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a primitive works: a table, what is remembered of it, and a scope."""

    table: Table
    memory: Memory
    scope: Scope

    def now(self) -> int:
        """This machine's clock, epoch ms: DynamoDB has none to ask."""
        return time.time_ns() // 1_000_000

    def moment(self) -> int:
        """The same in ns: it orders what was made in different threads."""
        return time.time_ns()
