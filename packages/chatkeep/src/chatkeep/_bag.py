"""The bag of stores that everything else is handed: :class:`Persistence`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, cast

from chatkeep import _admin
from chatkeep._admin import store_name
from chatkeep._checks import check_scope
from chatkeep._maintenance import Maintenance
from chatkeep.errors import CompositionError
from chatkeep.scope import Scope
from chatkeep.stores import (
    STORE_KEYS,
    ActivityStore,
    InterruptStore,
    MessageStore,
    MetadataStore,
    RunStore,
    StoreKey,
    ThreadExport,
    ThreadList,
)

if TYPE_CHECKING:
    from types import TracebackType

    from chatkeep.backends import Backend

__all__ = ["Persistence", "Stores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Presence of a store switches its feature on; there are no flags."""

    messages: MessageStore | None = None
    runs: RunStore | None = None
    interrupts: InterruptStore | None = None
    activities: ActivityStore | None = None
    metadata: MetadataStore | None = None

    def present(self) -> dict[StoreKey, Any]:
        """The stores that are there, by key, in promise order."""
        return {
            cast("StoreKey", f.name): store
            for f in fields(self)
            if (store := getattr(self, f.name)) is not None
        }

    def __iter__(self) -> Iterator[StoreKey]:
        return iter(self.present())

    @classmethod
    def of(cls, stores: Mapping[str, Any], what: str = "store") -> Self:
        """From a mapping; None counts as absent.

        Raises:
            CompositionError: names an unknown key.
        """
        for key in stores:
            if key not in STORE_KEYS:
                raise CompositionError(
                    f"unknown {what} {key!r}; stores are {', '.join(STORE_KEYS)}"
                )
        return cls(**dict(stores))


class Persistence:
    """Stores, and the life of what is behind them. Use it with ``async with``.

    ``backends`` are the handles that ``aclose``, ``ping`` and set-up go to; a composed bag
    has those of every member, so closing it closes them all.
    """

    __slots__ = ("_backends", "stores")

    def __init__(self, stores: Stores, *, backends: Sequence[Backend] = ()) -> None:
        self.stores = stores
        self._backends = tuple(backends)

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backend handles behind the stores, without repeats."""
        return self._backends

    def scoped(self, scope: Scope) -> Persistence:
        """A view whose stores have ``scope`` in every key. A row of another scope does not
        exist in it. Closing the view closes the same connections.

        Raises:
            CompositionError: a store of the bag knows no scopes (named); ``scope`` is no
                :class:`~chatkeep.scope.Scope`.
        """
        check_scope(scope)
        handles = {id(b): b.scoped(scope) for b in self._backends}
        rebuilt: dict[int, Stores] = {}
        chosen: dict[str, Any] = {}
        for key, store in self.stores.present().items():
            backend = getattr(store, "backend", None)
            if id(backend) in handles:
                if id(backend) not in rebuilt:
                    rebuilt[id(backend)] = handles[id(backend)].persistence().stores
                chosen[key] = getattr(rebuilt[id(backend)], key)
            elif hasattr(store, "scoped"):
                chosen[key] = store.scoped(scope)
            else:
                raise CompositionError(
                    f"the {key} store ({store_name(store)}) knows no scopes: "
                    "give it a scoped(scope) method or keep it out of this persistence"
                )
        return Persistence(Stores(**chosen), backends=tuple(handles.values()))

    # -- whole threads (the tier ThreadAdmin) ---------------------------------------

    async def delete_thread(self, thread_id: str) -> bool:
        """Erase a thread for good, in every backend of the bag and in the user's own stores,
        its subagents' threads first; whether there was anything. Idempotent: a failed call
        is sent again and goes on where it stopped.

        Raises:
            CompositionError: a store that cannot forget a thread (named); nothing was erased.
        """
        return await _admin.delete_thread(self, thread_id)

    async def list_threads(
        self, *, limit: int = 50, cursor: str | None = None, children: bool = False
    ) -> ThreadList:
        """Threads, newest first; see :class:`~chatkeep.stores.ThreadAdmin`. A thread that
        only a user's own store knows is not among them.

        Raises:
            InvalidValue: a cursor that is not ours; a limit below 1.
            CompositionError: no backend of the bag can list threads.
        """
        return await _admin.list_threads(self, limit=limit, cursor=cursor, children=children)

    async def export_thread(self, thread_id: str) -> ThreadExport | None:
        """Everything that the bag keeps of a thread, or None for an unknown one.

        Raises:
            CompositionError: a store that cannot list what it keeps (named).
        """
        return await _admin.export_thread(self, thread_id)

    async def erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        """Erase every copy of these messages of one thread, archived ones and drafts too; how
        many entries. Nothing is left to restore.

        Raises:
            CompositionError: a message store that may keep copies (named).
        """
        return await _admin.erase_messages(self, thread_id, message_ids)

    def maintenance(self) -> Maintenance:
        """What runs beside the chats and crosses scopes: lost runs, retention."""
        return Maintenance(self)

    # -- life -----------------------------------------------------------------------

    async def ping(self) -> None:
        """One cheap round trip to every backend."""
        for backend in self._backends:
            await backend.ping()

    async def migrate(self) -> None:
        """Create or upgrade what every backend needs; safe when many processes race."""
        for backend in self._backends:
            await backend.setup()

    async def check_schema(self) -> None:
        """Raise ``SchemaOutOfDate`` if a backend's layout is not the one we read."""
        for backend in self._backends:
            await backend.check_schema()

    async def aclose(self) -> None:
        """Close what was opened from URLs. Clients that were passed in stay open."""
        for backend in self._backends:
            await backend.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
