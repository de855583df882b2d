"""The MongoDB backend: each primitive of :class:`chatkeep.backends.Backend` is one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from chatkeep.backends import Backend
from chatkeep.codec import JsonValue
from chatkeep.records import CutRecord, ModelMessage, RunRecord
from chatkeep.scope import EMPTY_SCOPE, Scope
from chatkeep.stores import (
    LostRun,
    ThreadList,
    ThreadView,
    TurnCommit,
    TurnReceipt,
    VersionedValue,
    ViewQuery,
)
from chatkeep_mongo import admin, lookups, setup, values
from chatkeep_mongo.commit import commit_turn
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.encoded import encode_commit
from chatkeep_mongo.errors import translate
from chatkeep_mongo.hints import Hints
from chatkeep_mongo.read import read_view

__all__ = ["MongoBackend"]


class MongoBackend(Backend):
    """A handle of a MongoDB database.

    Args:
        driver: sends the commands.
        database: its name.
        create: create the indexes on first use.
        owned: close the client in ``aclose()``.
        scope: in every key of this handle.
        timeout: seconds for one store call.
    """

    name: ClassVar[str] = "mongodb"
    one_loop = True

    def __init__(
        self,
        driver: Driver,
        *,
        database: str,
        create: bool = True,
        owned: bool = False,
        scope: Scope = EMPTY_SCOPE,
        timeout: float | None = 30.0,
    ) -> None:
        super().__init__(scope=scope, timeout=timeout)
        self._db = driver
        self._database = database
        self._create = create
        self._owned = owned
        self._hints = Hints()

    def setup_script(self) -> str | None:
        """The commands for ``mongosh``."""
        return setup.script(self._database)

    def _clone(self) -> Self:
        clone = type(self)(
            self._db,
            database=self._database,
            create=self._create,
            owned=self._owned,
            timeout=self._timeout,
        )
        clone._hints = self._hints  # noqa: SLF001  (the same class)
        return clone

    # -- before the first chat ------------------------------------------------------

    async def setup(self) -> None:
        """See :class:`~chatkeep.backends.Backend`. Keeps no connection if nothing else was
        asked yet: ``asyncio.run(persistence.migrate())`` may come before the server's loop."""
        await super().setup()
        await self._leave_unused()

    async def check_schema(self) -> None:
        """See :class:`~chatkeep.backends.Backend`; like :meth:`setup` it keeps no connection."""
        await super().check_schema()
        await self._leave_unused()

    async def _leave_unused(self) -> None:
        if self._owned and not self._shared.opened:
            await self._db.start_over()
            self._shared.loop = None

    # -- life ---------------------------------------------------------------------

    async def _open(self) -> None:
        if await setup.check_open(self._db):
            return
        if not self._create:
            raise setup.missing("the chatkeep collections are not there")
        await setup.create(self._db)

    async def _close(self) -> None:
        if self._owned:
            await self._db.close()

    async def _ping(self) -> None:
        await self._db.ping()

    async def _setup(self) -> None:
        await setup.create(self._db)

    async def _check_schema(self) -> None:
        await setup.check_layout(self._db)

    def _translate(self, error: Exception) -> Exception:
        return translate(error)

    # -- one read, one write --------------------------------------------------------

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        return await read_view(self._db, self._scope, thread_id, query, self._hints)

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        return await commit_turn(self._db, encode_commit(commit, self._scope), self._hints)

    # -- drafts and leases --------------------------------------------------------

    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None:
        await lookups.save_draft(self._db, self._scope, thread_id, run_id, messages, lease_token)

    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        return await lookups.renew_lease(
            self._db, self._scope, thread_id, run_id, lease_token, lease_ms
        )

    # -- look-ups -----------------------------------------------------------------

    async def _find_run(self, run_id: str) -> RunRecord | None:
        return await lookups.find_run(self._db, self._scope, run_id)

    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]:
        return await lookups.list_child_runs(self._db, self._scope, parent_run_ids)

    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]:
        return await lookups.list_reclaimable(
            self._db, self._scope, detached_before, limit, every_scope
        )

    async def _list_lost(self, limit: int) -> list[LostRun]:
        return await lookups.list_lost(self._db, limit)

    # -- metadata -----------------------------------------------------------------

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        return await values.get_value(self._db, self._scope, namespace, key)

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        return await values.put_value(self._db, self._scope, namespace, key, value, expected)

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        await values.delete_value_at(self._db, self._scope, namespace, key)

    async def _metadata_of(self, key: str) -> dict[str, JsonValue]:
        return await values.values_of(self._db, self._scope, key)

    # -- cuts and threads -----------------------------------------------------------

    async def _list_cuts(self, thread_id: str) -> list[CutRecord]:
        return await admin.list_cuts(self._db, self._scope, thread_id)

    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        return await admin.load_cut(self._db, self._scope, thread_id, cut_id)

    async def _purge_cuts(self, thread_id: str, before: int) -> int:
        return await admin.purge_cuts(self._db, self._scope, thread_id, before)

    async def _delete_thread(self, thread_id: str) -> bool:
        return await admin.delete_thread(self._db, self._scope, thread_id)

    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList:
        return await admin.list_threads(self._db, self._scope, limit, cursor, children)

    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        return await admin.erase_messages(self._db, self._scope, thread_id, message_ids)

    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        return await admin.list_idle(self._db, idle_ms, limit)

    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]:
        return await admin.list_cut_threads(self._db, before, limit)
