"""Bags of stores: put together, checked once, and what an entry point may ask of them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol, TypeAlias, cast

from typing_extensions import get_protocol_members

from chatkeep._admin import store_name
from chatkeep._bag import Persistence, Stores
from chatkeep.backends import Backend
from chatkeep.errors import CompositionError
from chatkeep.stores import (
    STORE_KEYS,
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
    StoreKey,
    TurnBackend,
    VersionedMetadata,
)

__all__ = [
    "STORE_PROTOCOLS",
    "STORE_TIERS",
    "capabilities",
    "compose_persistence",
    "define_activity_store",
    "define_interrupt_store",
    "define_message_store",
    "define_metadata_store",
    "define_persistence",
    "define_run_store",
    "require",
]

_Function: TypeAlias = Callable[..., Awaitable[Any]]

STORE_PROTOCOLS: Final[Mapping[StoreKey, type]] = {
    "messages": MessageStore,
    "runs": RunStore,
    "interrupts": InterruptStore,
    "activities": ActivityStore,
    "metadata": MetadataStore,
}
"""What a store under each key must have, whole."""

STORE_TIERS: Final[Mapping[StoreKey, tuple[type, ...]]] = {
    "messages": (RevisionedMessages, PagedMessages, CutArchive),
    "runs": (RunHistory, RunTree, ReclaimableRuns),
    "interrupts": (BatchCommit,),
    "activities": (),
    "metadata": (VersionedMetadata,),
}
"""What a store under each key may have on top, each tier whole or absent."""

_OF_BACKENDS: Final = frozenset(
    {"lease_token", "lease_ms", "status", "subagent_run_id", "name", "extra", "archive"}
)
"""Options of the contract that a store of your own is never given: leases need the clock of a
backend, the rest is passed by its callers only."""


class _HasStores(Protocol):
    """Anything with stores and the backends behind them."""

    @property
    def stores(self) -> Stores: ...


# ---------------------------------------------------------------------------- composing


def compose_persistence(
    base: Persistence | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Persistence:
    """A new bag: the stores of ``base``, each replaced, inherited or removed.

    Per key of ``overrides``: a store replaces, a missing key or None inherits, False removes.
    Neither input changes. The bag has the backends of both sides without repeats: closing it
    closes them. Stores on different backends are not committed together; see the order that
    :func:`chatkeep.with_persistence` promises.

    Raises:
        CompositionError: an unknown key (named, with whether it is a store or an override),
            a class in place of a store, a store that is not whole or has a method that cannot
            be called as the contract says (the method is named).
    """
    stores = base.stores if isinstance(base, Persistence) else Stores.of(base)
    given = dict(overrides or {})
    _check_keys(given, "override")
    chosen = cast("dict[str, Any]", stores.present())
    for key, value in given.items():
        if value is None:
            continue
        if value is False:
            chosen.pop(key, None)
        elif value is True:
            raise CompositionError(f"override {key!r} is True: give a store, None or False")
        else:
            chosen[key] = value
    backends = list(base.backends) if isinstance(base, Persistence) else []
    return _bag(chosen, backends)


def define_persistence(stores: Mapping[str, Any]) -> Persistence:
    """The bag of these stores, by key; None counts as absent.

    Raises:
        CompositionError: an unknown key, a store that is not whole.
    """
    return compose_persistence(stores)


def _bag(stores: Mapping[str, Any], backends: list[Backend]) -> Persistence:
    for key, store in stores.items():
        _check_store(cast("StoreKey", key), store)
        backend = getattr(store, "backend", None)
        if isinstance(backend, Backend) and not any(backend is known for known in backends):
            backends.append(backend)
    return Persistence(Stores.of(stores), backends=backends)


def _check_keys(keys: Mapping[str, Any], what: str) -> None:
    for key in keys:
        if key not in STORE_KEYS:
            raise CompositionError(f"unknown {what} {key!r}; stores are {', '.join(STORE_KEYS)}")


def _check_store(key: StoreKey, store: object) -> None:
    """A store is an object with every method of its protocol, and of each tier all or none;
    its methods are async, and take what they will be called with."""
    what = f"the {key} store ({store_name(store)})"
    if isinstance(store, type):
        raise CompositionError(
            f"the {key} store is the class {store.__name__}: give an instance, {store.__name__}(…)"
        )
    protocol = STORE_PROTOCOLS[key]
    for name in sorted(get_protocol_members(protocol)):
        if not callable(getattr(store, name, None)):
            raise CompositionError(f"{what} has no method {name}(): a store is whole")
        _check_method(store, protocol, name, what)
    for tier in STORE_TIERS[key]:
        members = sorted(get_protocol_members(tier))
        there = [name for name in members if callable(getattr(store, name, None))]
        if there and there != members:
            missing = next(name for name in members if name not in there)
            raise CompositionError(
                f"{what} has {there[0]}() but no method {missing}(): "
                f"{tier.__name__} is whole or absent"
            )
        for name in there:
            _check_method(store, tier, name, what)


def _check_method(store: object, protocol: type, name: str, what: str) -> None:
    method = getattr(store, name)
    _check_async(method, f"{name}() of {what}")
    try:
        takes = inspect.signature(method)
    except (TypeError, ValueError):
        return  # written in C: nothing is known of what it takes
    for args, options in _call_shapes(protocol, name):
        try:
            takes.bind(*args, **dict.fromkeys(options))
        except TypeError as error:
            asked = ", ".join([*args, *(f"{option}=…" for option in options)])
            raise CompositionError(
                f"{name}() of {what} cannot be called as {name}({asked}): {error}"
            ) from None


@cache
def _call_shapes(protocol: type, name: str) -> tuple[tuple[list[str], list[str]], ...]:
    """How a method is called: with what it must be given, and with all that a store which
    does not keep leases may be given. Each is the names by position, and those by keyword."""
    given = list(inspect.signature(getattr(protocol, name)).parameters.values())[1:]
    shapes: list[tuple[list[str], list[str]]] = []
    for everything in (False, True):
        used = [
            p for p in given if p.default is p.empty or (everything and p.name not in _OF_BACKENDS)
        ]
        shapes.append(
            (
                [p.name for p in used if p.kind is not p.KEYWORD_ONLY],
                [p.name for p in used if p.kind is p.KEYWORD_ONLY],
            )
        )
    return tuple(shapes)


def _check_async(function: object, what: str) -> None:
    plain = inspect.isfunction(function) or inspect.ismethod(function)
    if plain and not inspect.iscoroutinefunction(inspect.unwrap(cast("Any", function))):
        raise CompositionError(f"{what} is not async: write it with async def")


# ----------------------------------------------------------------------- user's stores


_DEFINERS: Final[Mapping[StoreKey, str]] = {
    "messages": "define_message_store",
    "runs": "define_run_store",
    "interrupts": "define_interrupt_store",
    "activities": "define_activity_store",
    "metadata": "define_metadata_store",
}


class _DefinedStore:
    """A store made of functions; ``__name__`` is how messages call it."""

    def __init__(self, name: str, functions: Mapping[str, _Function]) -> None:
        self.__dict__.update(functions)
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<{self.__name__}: {', '.join(sorted(self.__dict__.keys() - {'__name__'}))}>"


def _define(key: StoreKey, store: object, functions: Mapping[str, _Function | None]) -> Any:
    name = _DEFINERS[key]
    given = {method: function for method, function in functions.items() if function is not None}
    if store is not None:
        if given:
            raise CompositionError(f"{name}: give an object or functions, not both")
        _check_store(key, store)
        return store
    known = {
        method
        for protocol in (STORE_PROTOCOLS[key], *STORE_TIERS[key])
        for method in get_protocol_members(protocol)
    }
    for method in given:
        if method not in known:
            raise CompositionError(f"{name}: no store has a method {method}()")
    made = _DefinedStore(name, given)
    _check_store(key, made)
    return made


def define_message_store(
    store: MessageStore | None = None,
    /,
    *,
    load_thread: _Function | None = None,
    save_thread: _Function | None = None,
    **tiers: _Function,
) -> MessageStore:
    """A message store from async functions, or an object, checked. ``tiers`` are the methods
    of :class:`RevisionedMessages`, :class:`PagedMessages` and :class:`CutArchive`.

    Raises:
        CompositionError: names the method that is missing, unknown, not async, or that cannot
            take what it will be called with.
    """
    functions = {"load_thread": load_thread, "save_thread": save_thread, **tiers}
    return cast("MessageStore", _define("messages", store, functions))


def define_run_store(
    store: RunStore | None = None,
    /,
    *,
    create_or_resume: _Function | None = None,
    update: _Function | None = None,
    get: _Function | None = None,
    find_active_run: _Function | None = None,
    **tiers: _Function,
) -> RunStore:
    """A run store; like :func:`define_message_store`. ``tiers`` are the methods of
    :class:`RunHistory`, :class:`RunTree` and :class:`ReclaimableRuns`."""
    functions = {
        "create_or_resume": create_or_resume,
        "update": update,
        "get": get,
        "find_active_run": find_active_run,
        **tiers,
    }
    return cast("RunStore", _define("runs", store, functions))


def define_interrupt_store(
    store: InterruptStore | None = None,
    /,
    *,
    create: _Function | None = None,
    resolve: _Function | None = None,
    cancel: _Function | None = None,
    get: _Function | None = None,
    list: _Function | None = None,  # noqa: A002  (the store's word)
    list_pending: _Function | None = None,
    list_by_run: _Function | None = None,
    list_pending_by_run: _Function | None = None,
    **tiers: _Function,
) -> InterruptStore:
    """An interrupt store; like :func:`define_message_store`. The tier is
    :class:`BatchCommit`; without it a batch is checked first, then settled one by one."""
    functions = {
        "create": create,
        "resolve": resolve,
        "cancel": cancel,
        "get": get,
        "list": list,
        "list_pending": list_pending,
        "list_by_run": list_by_run,
        "list_pending_by_run": list_pending_by_run,
        **tiers,
    }
    return cast("InterruptStore", _define("interrupts", store, functions))


def define_activity_store(
    store: ActivityStore | None = None,
    /,
    *,
    load_activities: _Function | None = None,
    save_activities: _Function | None = None,
) -> ActivityStore:
    """An activity store; like :func:`define_message_store`. Two functions are all of it."""
    functions = {"load_activities": load_activities, "save_activities": save_activities}
    return cast("ActivityStore", _define("activities", store, functions))


def define_metadata_store(
    store: MetadataStore | None = None,
    /,
    *,
    get: _Function | None = None,
    set: _Function | None = None,  # noqa: A002  (the store's word)
    delete: _Function | None = None,
    **tiers: _Function,
) -> MetadataStore:
    """A metadata store; like :func:`define_message_store`. The tier is
    :class:`VersionedMetadata`."""
    functions = {"get": get, "set": set, "delete": delete, **tiers}
    return cast("MetadataStore", _define("metadata", store, functions))


# ----------------------------------------------------------------- what an entry point asks


def require(
    persistence: _HasStores,
    what: str,
    *,
    stores: Sequence[StoreKey] = (),
    pairs: Mapping[StoreKey, StoreKey] | None = None,
    tiers: Mapping[StoreKey, Sequence[type]] | None = None,
) -> None:
    """Check a bag for ``what`` (an entry point's name), once, at construction.

    ``with_persistence`` asks for messages, and for runs where there are interrupts;
    ``reconstruct_chat`` for messages.

    Args:
        persistence: the bag.
        what: the entry point, for the message.
        stores: must be there.
        pairs: a key that is there needs its partner; checked after ``stores``.
        tiers: what a store must have, if it is there.

    Raises:
        CompositionError: says what is missing and for whom.
    """
    present = persistence.stores.present()
    for key in stores:
        if key not in present:
            raise CompositionError(f"{what} needs a {key} store")
    for key, partner in (pairs or {}).items():
        if key in present and partner not in present:
            raise CompositionError(
                f"{what}: the {key} store needs a {partner} store beside it (or remove it: False)"
            )
    for key, needed in (tiers or {}).items():
        for tier in needed:
            if key in present and not isinstance(present[key], tier):
                raise CompositionError(
                    f"{what} needs {tier.__name__} of the {key} store, which "
                    f"{store_name(present[key])} does not have"
                )


def capabilities(persistence: _HasStores) -> dict[StoreKey, frozenset[str]]:
    """The names of the tiers that each present store has. ``TurnBackend`` is among them when
    the store's ``backend`` commits whole turns."""
    return {
        key: frozenset(tier.__name__ for tier in STORE_TIERS[key] if isinstance(store, tier))
        | ({"TurnBackend"} if isinstance(getattr(store, "backend", None), TurnBackend) else set())
        for key, store in persistence.stores.present().items()
    }
