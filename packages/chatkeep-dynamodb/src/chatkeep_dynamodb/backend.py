"""The DynamoDB backend: each primitive of :class:`chatkeep.backends.Backend`."""

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
from chatkeep_dynamodb import admin, lookups, values
from chatkeep_dynamodb.client import ClientSource, Table
from chatkeep_dynamodb.commit import apply
from chatkeep_dynamodb.encoded import encode_commit
from chatkeep_dynamodb.errors import translate
from chatkeep_dynamodb.keys import thread_pk
from chatkeep_dynamodb.read import read_view
from chatkeep_dynamodb.state import Memory, Place
from chatkeep_dynamodb.table import create_table, definition_text, has_table, require_table

__all__ = ["DynamoDBBackend"]


class DynamoDBBackend(Backend):
    """A handle of a DynamoDB table.

    Args:
        table: name of the table.
        source: where the boto3 client comes from.
        create: create the table on first use if there is none.
    """

    name: ClassVar[str] = "dynamodb"

    def __init__(
        self,
        table: str,
        source: ClientSource,
        *,
        create: bool = True,
        scope: Scope = EMPTY_SCOPE,
        timeout: float | None = 30.0,
    ) -> None:
        super().__init__(scope=scope, timeout=timeout)
        self._source = source
        self._create = create
        self._table = Table(table, source)
        self._memory = Memory()

    @property
    def _place(self) -> Place:
        return Place(self._table, self._memory, self._scope)

    def setup_script(self) -> str | None:
        """The table, as the input of ``aws dynamodb create-table --cli-input-json``."""
        return definition_text(self._table.name)

    def _clone(self) -> Self:
        clone = type(self)(
            self._table.name, self._source, create=self._create, timeout=self._timeout
        )
        clone._table = self._table  # noqa: SLF001  (the same class)
        clone._memory = self._memory  # noqa: SLF001
        return clone

    # -- life ---------------------------------------------------------------------

    async def _open(self) -> None:
        if self._create and not await has_table(self._table):
            await create_table(self._table)

    async def _close(self) -> None:
        await self._table.close()

    async def _ping(self) -> None:
        await self._table.get((thread_pk(self._scope, "ping"), "ping"))

    async def _setup(self) -> None:
        await create_table(self._table)

    async def _check_schema(self) -> None:
        await require_table(self._table)

    def _translate(self, error: Exception) -> Exception:
        return translate(error)

    # -- turns --------------------------------------------------------------------

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        return await read_view(self._place, thread_id, query)

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        return await apply(self._place, encode_commit(commit, self._scope))

    # -- drafts and leases --------------------------------------------------------

    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None:
        await lookups.save_draft(self._place, thread_id, run_id, messages, lease_token)

    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        return await lookups.renew_lease(self._place, thread_id, run_id, lease_token, lease_ms)

    # -- look-ups -----------------------------------------------------------------

    async def _find_run(self, run_id: str) -> RunRecord | None:
        return await lookups.find_run(self._place, run_id)

    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]:
        return await lookups.list_child_runs(self._place, parent_run_ids)

    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]:
        return await lookups.list_reclaimable(self._place, detached_before, limit, every_scope)

    async def _list_lost(self, limit: int) -> list[LostRun]:
        return await lookups.list_lost(self._place, limit)

    # -- metadata -----------------------------------------------------------------

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        return await values.get_value(self._place, namespace, key)

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        return await values.put_value(self._place, namespace, key, value, expected)

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        await values.delete_value(self._place, namespace, key)

    async def _metadata_of(self, key: str) -> dict[str, JsonValue]:
        return await values.values_of(self._place, key)

    # -- cuts and threads -----------------------------------------------------------

    async def _list_cuts(self, thread_id: str) -> list[CutRecord]:
        return await admin.list_cuts(self._place, thread_id)

    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        return await admin.load_cut(self._place, thread_id, cut_id)

    async def _purge_cuts(self, thread_id: str, before: int) -> int:
        return await admin.purge_cuts(self._place, thread_id, before)

    async def _delete_thread(self, thread_id: str) -> bool:
        return await admin.delete_thread(self._place, thread_id)

    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList:
        return await admin.list_threads(self._place, limit, cursor, children)

    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        return await admin.erase_messages(self._place, thread_id, message_ids)

    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        return await admin.list_idle(self._place, idle_ms, limit)

    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]:
        return await admin.list_cut_threads(self._place, before, limit)
