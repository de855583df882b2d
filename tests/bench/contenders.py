"""What is timed: chatkeep's backends and the references, behind one small face."""

from __future__ import annotations

import abc
import copy
import itertools
import time
from collections.abc import Sequence

from bench.data import answer, question
from bench.references import Reference
from chatkeep.backends import Backend, new_commit_id
from chatkeep.records import ModelMessage, RunPatch
from chatkeep.stores import MessageStore, RunStart, Splice, TurnCommit, TurnReceipt, ViewQuery

__all__ = ["Chatkeep", "Contender", "Floor"]

_runs = itertools.count()


class Contender(abc.ABC):
    """Something that keeps conversations."""

    name: str

    @abc.abstractmethod
    async def seed(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        """Store a history."""

    @abc.abstractmethod
    async def turn(self, thread: str) -> tuple[float, float]:
        """One turn, the history being loaded already: ms of its start boundary, and of both."""

    @abc.abstractmethod
    async def load(self, thread: str) -> int:
        """Load the whole history; how many messages."""


class Floor(Contender):
    """A bare driver."""

    def __init__(self, reference: Reference) -> None:
        self.name = reference.name
        self._reference = reference

    async def seed(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        await self._reference.append(thread, messages)

    async def turn(self, thread: str) -> tuple[float, float]:
        asked, answered = [question()], answer()
        begin = time.perf_counter()
        await self._reference.append(thread, asked)
        middle = time.perf_counter()
        await self._reference.append(thread, answered)
        end = time.perf_counter()
        return (middle - begin) * 1e3, (end - begin) * 1e3

    async def load(self, thread: str) -> int:
        return len(await self._reference.load(thread))


class Chatkeep(Contender):
    """A backend of chatkeep, with everything a turn does: revision check, run record with its
    lease, commit id, atomic boundary."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.backend = backend
        self._heads: dict[str, TurnReceipt] = {}

    @property
    def messages(self) -> MessageStore:
        """The plain store over the backend."""
        store = self.backend.persistence().stores.messages
        if store is None:
            raise TypeError("the backend has no messages store")
        return store

    async def seed(self, thread: str, messages: Sequence[ModelMessage]) -> None:
        self._heads[thread] = await self.backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                splice=Splice(keep_through=0, tail=messages, expected=None),
            )
        )

    async def turn(self, thread: str) -> tuple[float, float]:
        head = self._heads[thread]
        run, token, now = f"run-{next(_runs)}", new_commit_id(), int(time.time() * 1e3)
        asked, answered = [question()], answer()
        begin = time.perf_counter()
        started = await self.backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                run=RunStart(run_id=run, started_at=now, lease_token=token),
                splice=Splice(keep_through=head.newest, tail=asked, expected=head.revision),
            )
        )
        middle = time.perf_counter()
        self._heads[thread] = await self.backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                lease_token=token,
                run=RunPatch(
                    status="completed",
                    finished_at=now,
                    usage={"promptTokens": 1000, "completionTokens": 100, "totalTokens": 1100},
                ),
                splice=Splice(
                    keep_through=started.newest, tail=answered, expected=started.revision
                ),
            )
        )
        end = time.perf_counter()
        return (middle - begin) * 1e3, (end - begin) * 1e3

    async def load(self, thread: str) -> int:
        view = await self.backend.read_view(thread, ViewQuery())
        return len(view.messages)

    async def save(self, thread: str, *, equal: bool) -> float:
        """ms of a plain ``save_thread`` of the whole history with one turn more."""
        loaded = await self.messages.load_thread(thread)
        grown = [*(copy.deepcopy(loaded) if equal else loaded), question(), *answer()]
        begin = time.perf_counter()
        await self.messages.save_thread(thread, grown)
        return (time.perf_counter() - begin) * 1e3
