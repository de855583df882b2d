"""Which stores share a backend, and what must be read from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from chatkeep._bag import Persistence, Stores
from chatkeep.compose import require
from chatkeep.errors import CompositionError
from chatkeep.stores import MessageStore, StoreKey, TurnBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLAIMING_PARTS", "PARTS", "Layout", "Part", "chat_layout", "same_backend"]

Part: TypeAlias = Literal["claims", "transcript", "answers", "interrupts", "run", "activities"]
"""A piece of a boundary."""

PARTS: Final[tuple[Part, ...]] = ("transcript", "answers", "interrupts", "run", "activities")
"""In promise order: a reader that sees a later part sees the earlier ones too."""

CLAIMING_PARTS: Final[tuple[Part, ...]] = ("claims", "run", "transcript", "activities")
"""The order of a start that claims answers. Claims first: whoever comes too late has written
nothing anywhere. The run with them: a claim lives as long as its run."""

_STORE_OF: Final[dict[Part, StoreKey]] = {
    "transcript": "messages",
    "answers": "interrupts",
    "interrupts": "interrupts",
    "run": "runs",
    "activities": "activities",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The stores of a chat and the backend behind each; None for a foreign store."""

    stores: Stores
    messages: MessageStore
    backends: dict[StoreKey, TurnBackend | None]

    def backend(self, key: StoreKey) -> TurnBackend | None:
        """The turn backend behind a store; None when it has none, or is not there."""
        return self.backends.get(key)

    def backend_of(self, part: Part) -> TurnBackend | None:
        """The turn backend that a part of a boundary is written through."""
        return self.desk if part == "claims" else self.backends.get(_STORE_OF[part])

    @property
    def desk(self) -> TurnBackend | None:
        """Where answers are claimed: the backend of the interrupts, else that of the runs, else
        that of the messages. None: no interrupts, or no backend of ours among the three, and
        then nothing is claimed."""
        if self.stores.interrupts is None:
            return None
        keys: tuple[StoreKey, ...] = ("interrupts", "runs", "messages")
        return next((b for key in keys if (b := self.backend(key)) is not None), None)

    @property
    def lends_records(self) -> bool:
        """Whether stand-ins for the interrupts are claimed: they are kept in a foreign store."""
        return self.desk is not None and self.backend("interrupts") is None

    @property
    def lends_run(self) -> bool:
        """Whether a stand-in for the run holds the claims: it is kept somewhere else."""
        desk, runs = self.desk, self.backend("runs")
        return desk is not None and (runs is None or not same_backend(desk, runs))

    def shows_claims(self, served: set[StoreKey]) -> bool:
        """Whether a read that serves these stores is to bring pending interrupts, or their
        stand-ins."""
        key: StoreKey = "runs" if self.backend("runs") is not None else "messages"
        return "interrupts" in served or (self.lends_records and key in served)

    def stretches(self, parts: Sequence[Part]) -> list[list[Part]]:
        """``parts`` (in promise order) grouped: neighbours of one backend are one commit. A
        part of a foreign store stands alone."""
        groups: list[list[Part]] = []
        for part in parts:
            backend = self.backend_of(part)
            if groups and backend is not None:
                last = self.backend_of(groups[-1][-1])
                if last is not None and same_backend(last, backend):
                    groups[-1].append(part)
                    continue
            groups.append([part])
        return groups

    def readers(self, keys: Sequence[StoreKey]) -> list[tuple[TurnBackend, set[StoreKey]]]:
        """The backends behind ``keys``, each with the stores it serves; in the order given."""
        found: list[tuple[TurnBackend, set[StoreKey]]] = []
        for key in keys:
            backend = self.backend(key)
            if backend is None:
                continue
            for known, served in found:
                if same_backend(known, backend):
                    served.add(key)
                    break
            else:
                found.append((backend, {key}))
        return found

    def shares(self, one: StoreKey, other: StoreKey) -> bool:
        """Whether two stores are committed together."""
        left, right = self.backend(one), self.backend(other)
        return left is not None and right is not None and same_backend(left, right)


def same_backend(one: TurnBackend, other: TurnBackend) -> bool:
    """Whether two handles are the same backend in the same scope."""
    if one is other:
        return True
    resource: Any = getattr(one, "resource", None)
    return (
        resource is not None
        and resource is getattr(other, "resource", None)
        and one.scope == other.scope
    )


def chat_layout(
    persistence: Persistence, who: str, *, hydrate: bool = False, runs: bool = False
) -> Layout:
    """The layout of ``persistence``.

    Raises:
        CompositionError: no persistence; no messages store; interrupts without runs (unless
            only reading); no runs where ``runs`` are needed.
    """
    if not isinstance(getattr(persistence, "stores", None), Stores):
        raise CompositionError(
            f"{who} needs a persistence, not {type(persistence).__name__}: make one with "
            "sqlite_persistence(…), memory_persistence() or open_persistence(url)"
        )
    stores = persistence.stores
    pairs: dict[StoreKey, StoreKey] = {} if hydrate else {"interrupts": "runs"}
    needed: list[StoreKey] = ["messages", "runs"] if runs else ["messages"]
    require(persistence, who, stores=needed, pairs=pairs)
    backends: dict[StoreKey, TurnBackend | None] = {}
    for key, store in stores.present().items():
        backend = getattr(store, "backend", None)
        backends[key] = backend if isinstance(backend, TurnBackend) else None
    messages = cast("MessageStore", stores.messages)
    return Layout(stores=stores, messages=messages, backends=backends)
