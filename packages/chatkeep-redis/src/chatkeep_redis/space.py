"""What every call needs to know: where keys are, how long they live, and what runs scripts."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chatkeep.errors import ChatkeepError
from chatkeep.scope import EMPTY_SCOPE, Scope
from chatkeep_redis.errors import translate
from chatkeep_redis.keys import Keys, place_of_thread
from chatkeep_redis.runner import Argument, Runner

__all__ = ["HINT_MS", "Hints", "Space"]

_log = logging.getLogger("chatkeep.redis")

HINT_MS = 60_000
"""How long what was written into other slots of a cluster counts as written "before" a commit.
Clocks of its servers may differ by as much."""

_REMEMBERED = 10_000
"""Threads whose place in the index this process knows to be fresh."""


class Hints:
    """What this process knows of a cluster's indexes: when each thread was last put into them, by
    the servers' clock."""

    __slots__ = ("_at", "_offset")

    def __init__(self) -> None:
        self._at: OrderedDict[str, int] = OrderedDict()
        self._offset: float | None = None

    def saw_clock(self, now: int) -> None:
        """Note the servers' time."""
        self._offset = now - time.monotonic() * 1000

    def now(self) -> int:
        """The servers' time, about; this machine's until one was seen."""
        if self._offset is None:
            return time.time_ns() // 1_000_000
        return round(time.monotonic() * 1000 + self._offset)

    def of(self, place: str) -> int:
        """When the thread was put into the indexes; 0 if that is not known."""
        return self._at.get(place, 0)

    def put(self, place: str, at: int) -> None:
        """The thread was put there."""
        self._at[place] = at
        self._at.move_to_end(place)
        if len(self._at) > _REMEMBERED:
            self._at.popitem(last=False)

    def drop(self, place: str) -> None:
        """The thread was deleted."""
        self._at.pop(place, None)


@dataclass(frozen=True, slots=True)
class Space:
    """A prefix on a server or cluster, seen from one scope.

    ``ttl`` is the time to live of a thread in ms, 0: for ever. ``hint_ms``: see :data:`HINT_MS`.
    """

    runner: Runner
    keys: Keys
    ttl: int = 0
    hint_ms: int = HINT_MS
    scope: Scope = EMPTY_SCOPE
    hints: Hints = field(default_factory=Hints)

    def scoped(self, scope: Scope) -> Space:
        """The same, seen from another scope."""
        return replace(self, scope=scope)

    @property
    def apart(self) -> bool:
        """Whether look-ups and indexes are in other slots than a thread, out of its script's
        reach."""
        return self.runner.cluster

    def place(self, thread_id: str) -> str:
        """The thread in an index."""
        return place_of_thread(self.scope, thread_id)

    def head_key(self, thread_id: str) -> bytes:
        """The key of the thread's head."""
        return self.keys.thread(self.place(thread_id))[0]

    async def of_thread(
        self,
        name: str,
        thread_id: str,
        arguments: Sequence[Argument] = (),
        *,
        near: Sequence[bytes] = (),
        again: bool = True,
    ) -> Any:
        """Run a script about a thread. ``near``: keys that it may write only where all keys are
        on one server."""
        keys = self.keys.thread(self.place(thread_id))
        if not self.apart:
            keys += near
        return await self.runner.run(name, keys, arguments, again=again)

    async def best_effort(self, what: str, work: Any) -> None:
        """Await ``work``, which leaves nothing wrong behind when it fails: readers verify."""
        try:
            await work
        except Exception as error:
            known = translate(error, cluster=self.runner.cluster)
            if not isinstance(known, ChatkeepError):
                raise
            _log.warning("redis: %s was put off: %s", what, known)
