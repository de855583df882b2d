"""The two sides of the state machine, and how what they answer is compared."""

from __future__ import annotations

from typing import Any

from chatkeep.backends import Persistence
from chatkeep.errors import ChatkeepError, InterruptConflict, RunConflict
from chatkeep.records import InterruptRecord, RunRecord
from chatkeep.stores import NO_THREAD

__all__ = ["Failed", "Pair", "Side", "plain_interrupt", "plain_run"]


class Side:
    """One persistence, and the tokens that it has shown so far."""

    def __init__(self, persistence: Persistence) -> None:
        self.persistence = persistence
        self.stores: Any = persistence.stores
        self.backend: Any = persistence.stores.messages.backend  # type: ignore[union-attr]
        self.revisions: dict[str, list[str]] = {}
        self.numbers: dict[str, list[int]] = {}
        self.cuts: dict[str, list[str]] = {}
        self.metadata: list[str | None] = [None, "made-up"]

    def revision(self, thread: str, revision: str) -> int:
        """When this revision was first seen."""
        seen = self.revisions.setdefault(thread, [NO_THREAD, "made-up"])
        if revision not in seen:
            seen.append(revision)
        return seen.index(revision)

    def learn(self, thread: str, numbers: list[int]) -> None:
        """Take note of sequence numbers."""
        known = self.numbers.setdefault(thread, [0])
        known.extend(n for n in numbers if n not in known)
        known.sort()

    def rank(self, thread: str, number: int) -> int:
        """The place of a number among those seen."""
        return self.numbers[thread].index(number)

    def ranks(self, thread: str, numbers: list[int]) -> list[int]:
        """Take note of numbers, and their places."""
        self.learn(thread, numbers)
        return [self.rank(thread, n) for n in numbers]

    def number(self, thread: str, rank: int) -> int:
        """A number seen before, by its place (counted round)."""
        known = self.numbers.get(thread, [0])
        return known[rank % len(known)]

    def at(self, thread: str, back: int) -> str:
        """A revision seen before, ``back`` steps from the newest; the newest for 0."""
        seen = self.revisions.get(thread, [NO_THREAD, "made-up"])
        return seen[0] if len(seen) == 2 and not back else seen[-1 - back % len(seen)]

    def cut(self, thread: str, index: int) -> str:
        """The id of a cut that was listed before, or of none."""
        seen = ["no-such-cut", *self.cuts.get(thread, [])]
        return seen[index % len(seen)]


class Pair:
    """The model and the subject."""

    def __init__(self, model: Persistence, subject: Persistence) -> None:
        self.sides = (Side(model), Side(subject))


class Failed:
    """An error as it is compared: its type, and the reason of a RunConflict."""

    def __init__(self, error: ChatkeepError) -> None:
        self.error = error
        reason = error.reason if isinstance(error, RunConflict) else None
        ids = error.interrupt_ids if isinstance(error, InterruptConflict) else None
        self.key = (type(error).__name__, reason, ids)

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def plain_run(run: RunRecord | None) -> Any:
    """A run as it is compared: of its lease only the token, since times differ."""
    if run is None:
        return None
    plain = run.to_json()
    if run.lease is not None:
        plain["lease"] = run.lease.token
    return plain


def plain_interrupt(record: InterruptRecord) -> dict[str, Any]:
    """An interrupt as it is compared: whether it was settled, not when."""
    plain = record.to_json()
    if "resolvedAt" in plain:
        plain["resolvedAt"] = "some time"
    return plain
