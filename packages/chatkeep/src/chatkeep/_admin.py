"""Whole threads over a bag of stores: delete, list, export, erase.

A bag may have several backends and stores of the user's own. What a store cannot do is found
out, and said, before anything is erased.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from chatkeep._checks import check_limit
from chatkeep.errors import CompositionError
from chatkeep.records import ModelMessage, ThreadInfo
from chatkeep.rules import CHILD_PREFIX, decode_cursor, encode_cursor
from chatkeep.scope import check_id
from chatkeep.stores import (
    CutArchive,
    MessageStore,
    RunHistory,
    RunTree,
    StoreKey,
    ThreadExport,
    ThreadList,
    ThreadView,
    ViewQuery,
)

if TYPE_CHECKING:
    from chatkeep._bag import Stores
    from chatkeep.backends import Backend

__all__ = [
    "Bag",
    "backend_of",
    "delete_thread",
    "distinct_backends",
    "erase_messages",
    "export_thread",
    "list_threads",
    "store_name",
]

_EVERYTHING = ViewQuery(
    messages="bodies", runs="all", interrupts="all", activities=True, drafts=True
)
_FOREVER = 2**53 - 1
"""Later than any cut (epoch ms)."""

_LIST_PAGE = 200
"""How many threads a backend is asked for at a time when several are merged."""


class Bag(Protocol):
    """The part of :class:`~chatkeep.backends.Persistence` that this module needs."""

    @property
    def stores(self) -> Stores: ...

    @property
    def backends(self) -> tuple[Backend, ...]: ...


# ----------------------------------------------------------------------------- who is who


def backend_of(bag: Bag, store: object) -> Backend | None:
    """The bag's backend behind a store; None for a store of the user's own."""
    handle = getattr(store, "backend", None)
    return next((b for b in bag.backends if b is handle), None)


def _foreign(bag: Bag) -> dict[StoreKey, Any]:
    return {
        key: store for key, store in bag.stores.present().items() if backend_of(bag, store) is None
    }


def distinct_backends(bag: Bag) -> list[Backend]:
    """The distinct backends; that of the runs last: through it the children are found, also
    when a delete that broke off is sent again."""
    distinct: dict[tuple[int, Any], Backend] = {}
    for backend in bag.backends:
        distinct.setdefault((id(backend.resource), backend.scope), backend)
    runs = backend_of(bag, bag.stores.runs)
    return sorted(distinct.values(), key=lambda b: runs is not None and b.resource is runs.resource)


def store_name(store: object) -> str:
    """How messages call a store: its class, or the helper that made it from functions."""
    name = getattr(store, "__name__", None)
    return name if isinstance(name, str) else type(store).__name__


def _method(store: object, name: str) -> Any:
    found = getattr(store, name, None)
    return found if callable(found) else None


async def _children(bag: Bag, thread_id: str) -> list[str]:
    """The threads of the subagents that runs of this thread have started."""
    runs: object = bag.stores.runs
    if not isinstance(runs, RunHistory) or not isinstance(runs, RunTree):
        return []
    own = [run.run_id for run in await runs.list_by_thread(thread_id)]
    found = await runs.list_by_parent_runs(own) if own else {}
    threads = (run.thread_id for children in found.values() for run in children)
    return [t for t in dict.fromkeys(threads) if t.startswith(CHILD_PREFIX) and t != thread_id]


# -------------------------------------------------------------------------------- delete


async def delete_thread(bag: Bag, thread_id: str) -> bool:
    """See :meth:`chatkeep.backends.Persistence.delete_thread`."""
    check_id(thread_id, "thread_id")
    foreign = _foreign(bag)
    for key, store in foreign.items():
        if key not in ("messages", "activities") and _method(store, "delete_thread") is None:
            raise CompositionError(
                f"the {key} store ({store_name(store)}) cannot forget a thread: "
                "give it an async delete_thread(thread_id) method"
            )
    return await _delete_tree(bag, foreign, thread_id, set())


async def _delete_tree(
    bag: Bag, foreign: dict[StoreKey, Any], thread_id: str, seen: set[str]
) -> bool:
    seen.add(thread_id)
    found = False
    for child in await _children(bag, thread_id):
        if child not in seen:
            found |= await _delete_tree(bag, foreign, child, seen)
    # The user's run store goes last of the foreign ones, for the reason in distinct_backends.
    for key in sorted(foreign, key=lambda key: key == "runs"):
        found |= await _delete_foreign(key, foreign[key], thread_id)
    for backend in distinct_backends(bag):
        found |= await backend.delete_thread(thread_id)
    return found


async def _delete_foreign(key: StoreKey, store: Any, thread_id: str) -> bool:
    if (delete := _method(store, "delete_thread")) is not None:
        return bool(await delete(thread_id))
    if key == "activities":
        found = bool(await store.load_activities(thread_id))
        if found:
            await store.save_activities(thread_id, [])
        return found
    found = bool(await store.load_thread(thread_id))
    if found:
        await store.save_thread(thread_id, [])
    if isinstance(store, CutArchive):
        found |= bool(await store.purge_cuts(thread_id, before=_FOREVER))
    return found


# ---------------------------------------------------------------------------------- list


async def list_threads(bag: Bag, *, limit: int, cursor: str | None, children: bool) -> ThreadList:
    """See :meth:`chatkeep.backends.Persistence.list_threads`."""
    check_limit(limit)
    backends = distinct_backends(bag)
    if not backends:
        raise CompositionError("no backend of this persistence can list threads")
    messages = bag.stores.messages
    if len(backends) == 1 and (messages is None or backend_of(bag, messages) is not None):
        return await backends[0].list_threads(limit=limit, cursor=cursor, children=children)
    return await _list_merged(bag, backends, limit, cursor, children=children)


async def _list_merged(
    bag: Bag, backends: Sequence[Backend], limit: int, cursor: str | None, *, children: bool
) -> ThreadList:
    after = decode_cursor(cursor, int, str) if cursor is not None else None
    page: list[ThreadInfo] = []
    async for info in _merge(backends, children=children):
        if after is not None and _place(info) <= (-after[0], after[1]):
            continue
        if len(page) == limit:
            last = page[-1]
            return ThreadList(threads=page, cursor=encode_cursor(last.updated_at, last.thread_id))
        count = await _message_count(bag, info)
        page.append(info.model_copy(update={"message_count": count}))
    return ThreadList(threads=page)


def _place(info: ThreadInfo) -> tuple[int, str]:
    return (-info.updated_at, info.thread_id)


async def _merge(backends: Sequence[Backend], *, children: bool) -> AsyncIterator[ThreadInfo]:
    """Every thread once, where its newest copy stands, in the order of :func:`_place`.

    Only reading from the newest on tells which copy that is, so a late page of a composed
    list costs as much as all the pages before it.
    """
    rows = [_rows(backend, children=children) for backend in backends]
    heads = [await anext(each, None) for each in rows]
    seen: set[str] = set()
    while present := [head for head in heads if head is not None]:
        newest = max(head.updated_at for head in present)
        group: list[ThreadInfo] = []
        for i, each in enumerate(rows):
            while (head := heads[i]) is not None and head.updated_at >= newest:
                group.append(head)
                heads[i] = await anext(each, None)
        for info in sorted(group, key=_place):
            if info.thread_id not in seen:
                seen.add(info.thread_id)
                yield info


async def _rows(backend: Backend, *, children: bool) -> AsyncIterator[ThreadInfo]:
    cursor: str | None = None
    while True:
        page = await backend.list_threads(limit=_LIST_PAGE, cursor=cursor, children=children)
        for info in page.threads:
            yield info
        cursor = page.cursor
        if cursor is None:
            return


async def _message_count(bag: Bag, info: ThreadInfo) -> int:
    messages = bag.stores.messages
    if messages is None:
        return info.message_count
    backend = backend_of(bag, messages)
    if backend is None:
        return len(await messages.load_thread(info.thread_id))
    query = ViewQuery(messages="numbers", runs="none", interrupts="none")
    return len((await backend.read_view(info.thread_id, query)).numbers)


# -------------------------------------------------------------------------------- export


async def export_thread(bag: Bag, thread_id: str) -> ThreadExport | None:
    """See :meth:`chatkeep.backends.Persistence.export_thread`."""
    check_id(thread_id, "thread_id")
    for key, store in _foreign(bag).items():
        if key == "runs" and not isinstance(store, RunHistory):
            raise CompositionError(
                f"the runs store ({store_name(store)}) cannot be exported: "
                "give it an async list_by_thread(thread_id) method"
            )
        if key == "metadata" and _method(store, "metadata_of") is None:
            raise CompositionError(
                f"the metadata store ({store_name(store)}) cannot be exported: "
                "give it an async metadata_of(key) method, values by namespace"
            )
    return await _export_tree(bag, thread_id, set())


async def _export_tree(bag: Bag, thread_id: str, seen: set[str]) -> ThreadExport | None:
    seen.add(thread_id)
    stores = bag.stores
    handles = {id(b): b for store in stores.present().values() if (b := backend_of(bag, store))}
    views = {key: await b.read_view(thread_id, _EVERYTHING) for key, b in handles.items()}

    def view_of(store: object) -> ThreadView | None:
        backend = backend_of(bag, store)
        return None if backend is None else views[id(backend)]

    async def part(store: Any, field: str, load: str) -> list[Any]:
        if store is None:
            return []
        view = view_of(store)
        rows: list[Any] = (
            getattr(view, field) if view is not None else await _method(store, load)(thread_id)
        )
        return rows

    exported = ThreadExport(
        thread_id=thread_id,
        messages=await part(stores.messages, "messages", "load_thread"),
        # A lease is a secret of whoever drives the run, and none of the conversation.
        runs=[
            run.model_copy(update={"lease": None})
            for run in await part(stores.runs, "runs", "list_by_thread")
        ],
        interrupts=await part(stores.interrupts, "interrupts", "list"),
        activities=await part(stores.activities, "activities", "load_activities"),
        metadata=await _metadata_of(bag, thread_id),
        drafts=[draft for view in views.values() for draft in view.drafts],
        cuts=await _cuts_of(stores.messages, thread_id),
    )
    children = [
        child
        for name in await _children(bag, thread_id)
        if name not in seen and (child := await _export_tree(bag, name, seen)) is not None
    ]
    exists = any(view.exists for view in views.values()) or any(
        (
            exported.messages,
            exported.runs,
            exported.interrupts,
            exported.activities,
            exported.metadata,
            exported.cuts,
            children,
        )
    )
    return replace(exported, children=children) if exists else None


async def _metadata_of(bag: Bag, thread_id: str) -> dict[str, Any]:
    store = bag.stores.metadata
    if store is None:
        return {}
    owner = backend_of(bag, store) or store
    values: dict[str, Any] = await _method(owner, "metadata_of")(thread_id)
    return values


async def _cuts_of(messages: object, thread_id: str) -> dict[str, list[ModelMessage]]:
    if not isinstance(messages, CutArchive):
        return {}
    return {
        cut.cut_id: await messages.load_cut(thread_id, cut.cut_id)
        for cut in await messages.list_cuts(thread_id)
    }


# --------------------------------------------------------------------------------- erase


async def erase_messages(bag: Bag, thread_id: str, message_ids: Sequence[str]) -> int:
    """See :meth:`chatkeep.backends.Persistence.erase_messages`."""
    check_id(thread_id, "thread_id")
    messages = bag.stores.messages
    foreign = messages is not None and backend_of(bag, messages) is None
    erase = _method(messages, "erase_messages") if foreign else None
    if foreign and erase is None and isinstance(messages, CutArchive):
        raise CompositionError(
            f"the messages store ({store_name(messages)}) keeps cuts, which may hold copies: "
            "give it an async erase_messages(thread_id, message_ids) method"
        )
    count = 0
    if erase is not None:
        count += await erase(thread_id, message_ids)
    elif foreign and messages is not None:
        count += await _rewrite_without(messages, thread_id, set(message_ids))
    for backend in distinct_backends(bag):
        count += await backend.erase_messages(thread_id, message_ids)
    return count


async def _rewrite_without(messages: MessageStore, thread_id: str, asked: set[str]) -> int:
    stored = await messages.load_thread(thread_id)
    kept = [message for message in stored if message.get("id") not in asked]
    if len(kept) < len(stored):
        await messages.save_thread(thread_id, kept)
    return len(stored) - len(kept)
