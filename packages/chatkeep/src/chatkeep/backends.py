"""What a backend implements, and what it gets for it.

A backend author subclasses :class:`Backend` and writes the primitives (the ``_…`` methods):
one consistent read, one atomic commit, a draft slot, a lease, look-ups, metadata and thread
administration. The five stores and every tier come from the core, on top of those, the
same for every backend; so do id checks, timeouts, retries of idempotent commits, shielding
from cancellation and the mapping of driver errors.

Guarantees that hold for every primitive call:

* ids and values were checked before the call; nothing invalid reaches a driver;
* set-up (``_open``) has run once; a failed set-up is tried again by the next call;
* the call is finished or timed out before a cancelled caller goes on, so no connection is
  left half-used;
* anything a driver raises passes :meth:`Backend._translate`.
"""

from __future__ import annotations

import abc
import asyncio
import importlib.metadata
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast
from urllib.parse import urlsplit

from chatkeep._bag import Persistence, Stores
from chatkeep._checks import (
    check_commit,
    check_integer,
    check_limit,
    check_metadata_key,
    check_query,
    check_revision,
    check_scope,
    check_token,
)
from chatkeep._facade import build_stores
from chatkeep._saved import Fingerprints
from chatkeep.codec import JsonValue
from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    InvalidValue,
    MissingExtra,
    StoreClosed,
)
from chatkeep.records import CutRecord, ModelMessage, RunRecord
from chatkeep.rules import ANY_REVISION, check_transition, new_commit_id, new_revision
from chatkeep.scope import EMPTY_SCOPE, Scope, check_id
from chatkeep.stores import (
    LostRun,
    ThreadList,
    ThreadView,
    TurnCommit,
    TurnReceipt,
    VersionedValue,
    ViewQuery,
)

__all__ = [
    "ANY_REVISION",
    "Backend",
    "Persistence",
    "Stores",
    "check_transition",
    "new_commit_id",
    "new_revision",
    "open_persistence",
]

_T = TypeVar("_T")
_log = logging.getLogger("chatkeep.backend")


class Backend(abc.ABC):
    """Base class for implementers. Constructors do no I/O.

    Args:
        scope: in every key of this handle.
        timeout: seconds for one store call, all its retries included; None: no limit.
    """

    name: ClassVar[str]
    """Short name for messages: ``sqlite``, ``postgres``, …"""

    commit_retries: ClassVar[int] = 3
    """How often a commit is sent again after ``BackendUnavailable`` (same commit id)."""

    one_loop: ClassVar[bool] = False
    """Whether connections belong to the event loop that opened them. Calls from another loop are
    refused then: drivers would wait for answers that wake the wrong loop."""

    def __init__(self, *, scope: Scope = EMPTY_SCOPE, timeout: float | None = 30.0) -> None:
        self._scope = scope
        self._timeout = timeout
        self._shared = _Shared()

    # -- handles ------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        """The scope of this handle."""
        return self._scope

    @property
    def timeout(self) -> float | None:
        """Seconds that one store call may take, all its retries included."""
        return self._timeout

    @property
    def fingerprints(self) -> Fingerprints:
        """What this process knows of transcripts; shared by all handles."""
        return self._shared.fingerprints

    @property
    def resource(self) -> object:
        """What two handles of one backend have in common, whatever their scope."""
        return self._shared

    def scoped(self, scope: Scope) -> Self:
        """A handle of the same backend with another scope; connections are shared.

        Raises:
            CompositionError: ``scope`` is no :class:`~chatkeep.scope.Scope`.
        """
        check_scope(scope)
        clone = self._clone()
        clone._scope = scope  # noqa: SLF001  (the same class)
        clone._shared = self._shared  # noqa: SLF001
        return clone

    def persistence(self) -> Persistence:
        """The bag of the five stores over this handle."""
        return Persistence(build_stores(self), backends=(self,))

    @abc.abstractmethod
    def _clone(self) -> Self:
        """A copy of this handle that shares clients and pools."""

    # -- life ---------------------------------------------------------------------

    async def ping(self) -> None:
        """One cheap round trip to the database.

        Raises:
            BackendUnavailable: no answer.
        """
        await self._call(self._ping)

    async def setup(self) -> None:
        """Create what is missing (tables, indexes); safe when many processes race.
        For SQL: run the migrations."""
        await self._call(self._setup, opened=False)

    def setup_script(self) -> str | None:
        """What :meth:`setup` would run on an empty database, for review; None: nothing that
        could be read."""
        return None

    async def check_schema(self) -> None:
        """Verify that the stored layout is the one this package reads.

        Raises:
            SchemaOutOfDate: says what to run.
        """
        await self._call(self._check_schema, opened=False)

    async def aclose(self) -> None:
        """Close what was opened here (never a client that was passed in). Idempotent."""
        if not self._shared.closed:
            self._shared.closed = True
            await self._close()

    # -- TurnBackend --------------------------------------------------------------

    async def read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        """See :class:`chatkeep.stores.TurnBackend`."""
        check_id(thread_id, "thread_id")
        check_query(query)
        return await self._call(lambda: self._read_view(thread_id, query))

    async def commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        """See :class:`chatkeep.stores.TurnBackend`. Sent again, with the same commit id,
        when the backend was unavailable."""
        check_commit(commit)
        return await self._call(lambda: self._commit_turn(commit), retries=self.commit_retries)

    async def save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        *,
        lease_token: str | None = None,
    ) -> None:
        """See :class:`chatkeep.stores.TurnBackend`."""
        check_id(thread_id, "thread_id")
        check_id(run_id, "run_id")
        check_token(lease_token, "lease_token")
        await self._call(lambda: self._save_draft(thread_id, run_id, messages, lease_token))

    async def renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        """See :class:`chatkeep.stores.TurnBackend`."""
        check_id(thread_id, "thread_id")
        check_id(run_id, "run_id")
        check_token(lease_token, "lease_token")
        check_integer(lease_ms, "lease_ms")
        return await self._call(lambda: self._renew_lease(thread_id, run_id, lease_token, lease_ms))

    # -- look-ups -----------------------------------------------------------------

    async def find_run(self, run_id: str) -> RunRecord | None:
        """The run with this id, in whichever thread of the scope."""
        check_id(run_id, "run_id")
        return await self._call(lambda: self._find_run(run_id))

    async def list_child_runs(self, parent_run_ids: Sequence[str]) -> dict[str, list[RunRecord]]:
        """Children by parent id, each ascending by start; one query."""
        for parent in parent_run_ids:
            check_id(parent, "parent_run_id")
        if not parent_run_ids:
            return {}
        found = await self._call(lambda: self._list_child_runs(parent_run_ids))
        return {parent: found.get(parent, []) for parent in parent_run_ids}

    async def list_reclaimable(
        self, *, detached_before: int, limit: int, every_scope: bool = False
    ) -> list[LostRun]:
        """Running runs with ``detached_since <= detached_before``, oldest first."""
        check_integer(detached_before, "detached_before")
        check_limit(limit)
        return await self._call(lambda: self._list_reclaimable(detached_before, limit, every_scope))

    async def list_lost(self, *, limit: int) -> list[LostRun]:
        """Of every scope: ``running`` runs whose lease has run out, oldest first."""
        check_limit(limit)
        return await self._call(lambda: self._list_lost(limit))

    # -- metadata -----------------------------------------------------------------

    async def metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        """Value and revision."""
        check_metadata_key(namespace, key)
        return await self._call(lambda: self._metadata_get(namespace, key))

    async def metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        """Write if the revision is ``expected`` (None: absent; :data:`ANY_REVISION`: always).
        The new revision, or None if it was not."""
        check_metadata_key(namespace, key)
        if value is None:
            raise InvalidValue("value", "null could not be told from absence")
        check_revision(expected, "expected")
        return await self._call(lambda: self._metadata_put(namespace, key, value, expected))

    async def metadata_delete(self, namespace: str, key: str) -> None:
        """Remove; absent is a no-op."""
        check_metadata_key(namespace, key)
        await self._call(lambda: self._metadata_delete(namespace, key))

    async def metadata_of(self, key: str) -> dict[str, JsonValue]:
        """All values under ``key``, by namespace (a thread's metadata)."""
        check_id(key, "key")
        return await self._call(lambda: self._metadata_of(key))

    # -- cuts and threads -----------------------------------------------------------

    async def list_cuts(self, thread_id: str) -> list[CutRecord]:
        """See :class:`chatkeep.stores.CutArchive`."""
        check_id(thread_id, "thread_id")
        return await self._call(lambda: self._list_cuts(thread_id))

    async def load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        """See :class:`chatkeep.stores.CutArchive`."""
        check_id(thread_id, "thread_id")
        check_revision(cut_id, "cut_id")
        return await self._call(lambda: self._load_cut(thread_id, cut_id))

    async def purge_cuts(self, thread_id: str, *, before: int) -> int:
        """See :class:`chatkeep.stores.CutArchive`."""
        check_id(thread_id, "thread_id")
        check_integer(before, "before")
        return await self._call(lambda: self._purge_cuts(thread_id, before))

    async def delete_thread(self, thread_id: str) -> bool:
        """This thread only: messages, runs, interrupts, activities, drafts, cuts and the
        metadata under its id. (Children are the caller's: see the façade.)"""
        check_id(thread_id, "thread_id")
        return await self._call(lambda: self._delete_thread(thread_id))

    async def list_threads(self, *, limit: int, cursor: str | None, children: bool) -> ThreadList:
        """See :class:`chatkeep.stores.ThreadAdmin`."""
        check_limit(limit)
        return await self._call(lambda: self._list_threads(limit, cursor, children))

    async def erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        """See :class:`chatkeep.stores.ThreadAdmin`."""
        check_id(thread_id, "thread_id")
        for message_id in message_ids:
            check_id(message_id, "message_id")
        if not message_ids:
            return 0
        return await self._call(lambda: self._erase_messages(thread_id, message_ids))

    async def list_idle(self, *, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        """Of every scope: threads not written for ``idle_ms``, oldest first (retention).
        Threads of subagents are left out: they go with their parents."""
        check_integer(idle_ms, "idle_ms")
        check_limit(limit)
        return await self._call(lambda: self._list_idle(idle_ms, limit))

    async def list_cut_threads(self, *, before: int, limit: int) -> list[tuple[Scope, str]]:
        """Of every scope: threads with a cut made before ``before`` (ms), oldest cut first
        (retention). Threads of subagents are among them."""
        check_integer(before, "before")
        check_limit(limit)
        return await self._call(lambda: self._list_cut_threads(before, limit))

    # -- primitives -------------------------------------------------------------------

    @abc.abstractmethod
    async def _open(self) -> None:
        """Run once before the first call (create on first use, probe, …)."""

    @abc.abstractmethod
    async def _close(self) -> None: ...

    @abc.abstractmethod
    async def _ping(self) -> None: ...

    @abc.abstractmethod
    async def _setup(self) -> None: ...

    @abc.abstractmethod
    async def _check_schema(self) -> None: ...

    @abc.abstractmethod
    def _translate(self, error: Exception) -> Exception:
        """The chatkeep error for a driver error; ``error`` itself if it is no driver error."""

    @abc.abstractmethod
    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView: ...

    @abc.abstractmethod
    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt: ...

    @abc.abstractmethod
    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None: ...

    @abc.abstractmethod
    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord: ...

    @abc.abstractmethod
    async def _find_run(self, run_id: str) -> RunRecord | None: ...

    @abc.abstractmethod
    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]: ...

    @abc.abstractmethod
    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]: ...

    @abc.abstractmethod
    async def _list_lost(self, limit: int) -> list[LostRun]: ...

    @abc.abstractmethod
    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None: ...

    @abc.abstractmethod
    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None: ...

    @abc.abstractmethod
    async def _metadata_delete(self, namespace: str, key: str) -> None: ...

    @abc.abstractmethod
    async def _metadata_of(self, key: str) -> dict[str, JsonValue]: ...

    @abc.abstractmethod
    async def _list_cuts(self, thread_id: str) -> list[CutRecord]: ...

    @abc.abstractmethod
    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]: ...

    @abc.abstractmethod
    async def _purge_cuts(self, thread_id: str, before: int) -> int: ...

    @abc.abstractmethod
    async def _delete_thread(self, thread_id: str) -> bool: ...

    @abc.abstractmethod
    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList: ...

    @abc.abstractmethod
    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int: ...

    @abc.abstractmethod
    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]: ...

    @abc.abstractmethod
    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]: ...

    # -- the guard around every primitive ----------------------------------------------

    async def _call(
        self, primitive: Callable[[], Awaitable[_T]], *, retries: int = 0, opened: bool = True
    ) -> _T:
        if self._shared.closed:
            raise StoreClosed(f"the {self.name} persistence")
        if self.one_loop:
            self._shared.enter_loop(self.name)
        return await _finish(self._guarded(primitive, retries, opened))

    async def _guarded(
        self, primitive: Callable[[], Awaitable[_T]], retries: int, opened: bool
    ) -> _T:
        try:
            async with asyncio.timeout(self._timeout):
                if opened:
                    await self._ensure_open()
                for attempt in range(retries + 1):
                    try:
                        return await self._translated(primitive)
                    except BackendUnavailable as error:
                        if attempt == retries:
                            raise
                        _log.warning("%s: %s; sending the commit again", self.name, error)
                        await asyncio.sleep(0.02 * 2**attempt * (0.5 + random.random()))
                raise AssertionError("unreachable")
        except TimeoutError as error:
            raise BackendUnavailable(
                f"{self.name} did not answer within {self._timeout} s", outcome_unknown=True
            ) from error

    async def _translated(self, primitive: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await primitive()
        except (ChatkeepError, TimeoutError):
            raise
        except Exception as error:
            known = self._translate(error)
            if known is error:
                raise
            raise known from error

    async def _ensure_open(self) -> None:
        shared = self._shared
        if shared.opened:
            return
        async with shared.lock:
            if not shared.opened:
                await self._translated(self._open)
                shared.opened = True


class _Shared:
    """State that all handles of one backend share."""

    __slots__ = ("closed", "fingerprints", "lock", "loop", "opened")

    def __init__(self) -> None:
        self.fingerprints = Fingerprints()
        self.closed = False
        self.opened = False
        self.lock = asyncio.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None

    def enter_loop(self, name: str) -> None:
        """Keep to the event loop of the first call.

        Raises:
            CompositionError: this is another one.
        """
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            raise CompositionError(
                f"the {name} persistence was used in another event loop, to which its "
                "connections belong: open one persistence per event loop"
            )


async def _finish(work: Awaitable[_T]) -> _T:
    """Await ``work`` to its end even if the caller is cancelled meanwhile; then cancel.

    Chats are cancelled all the time (a closed tab); a store call that stops half-way would
    leave a connection in the middle of a transaction. The call's own timeout bounds the wait.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("store call failed while its caller was cancelled: %s", error)
        raise


def open_persistence(url: str, **options: Any) -> Persistence:
    """The persistence for a URL; the scheme picks the installed sibling package.

    ``memory://``, ``sqlite:///path.db``, ``postgresql://…``, ``postgresql+asyncpg://…``;
    entry points of group ``chatkeep.backends`` name a scheme and a factory ``(url, **options)``.

    Raises:
        MissingExtra: names the extra that brings the scheme.
        CompositionError: no URL, or a scheme that nobody knows.
    """
    # What os.environ.get() found may be None. The text may hold a password: it is not repeated.
    given = cast("object", url)
    if not isinstance(given, str) or "://" not in given:
        what = "a text without ://" if isinstance(given, str) else type(given).__name__
        raise CompositionError(
            f"no backend for {what}: give a URL, like sqlite:///chat.db or "
            "postgresql://host/database"
        )
    scheme = urlsplit(url).scheme.lower()
    found = list(importlib.metadata.entry_points(group="chatkeep.backends", name=scheme))
    if not found:
        base = scheme.partition("+")[0]
        found = list(importlib.metadata.entry_points(group="chatkeep.backends", name=base))
        scheme_extra = _EXTRAS.get(base)
        if not found and scheme_extra is not None:
            raise MissingExtra(f"a {base}:// persistence", scheme_extra)
    if not found:
        known = sorted({e.name for e in importlib.metadata.entry_points(group="chatkeep.backends")})
        raise CompositionError(f"no backend for {scheme!r} URLs; installed: {', '.join(known)}")
    factory: Callable[..., Persistence] = found[0].load()
    return factory(url, **options)


_EXTRAS = {
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "dynamodb": "dynamodb",
    "mongodb": "mongo",
}
