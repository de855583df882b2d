"""The Redis backend: each primitive of :class:`chatkeep.backends.Backend` is one script, or few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Self

from chatkeep.codec import JsonValue
from chatkeep.errors import CompositionError
from chatkeep.locks import LockBackend
from chatkeep.logs import LogBackend, LogHead, LogPage
from chatkeep.records import CutRecord, ModelMessage, RunRecord
from chatkeep.scope import Scope
from chatkeep.stores import (
    LostRun,
    ThreadList,
    ThreadView,
    TurnCommit,
    TurnReceipt,
    VersionedValue,
    ViewQuery,
)
from chatkeep_redis import cuts, locks, logs, lookups, places, values
from chatkeep_redis.commit import commit_once
from chatkeep_redis.delete import delete_thread
from chatkeep_redis.encoded import encode_commit
from chatkeep_redis.errors import translate
from chatkeep_redis.read import read_view
from chatkeep_redis.space import Space

__all__ = ["RedisBackend"]


class RedisBackend(LogBackend, LockBackend):
    """A handle of a server or a cluster.

    Args:
        space: where keys are, and what runs scripts.
        timeout: seconds for one store call, all its retries included; None: no limit.
    """

    name: ClassVar[str] = "redis"
    one_loop = True

    def __init__(self, space: Space, *, timeout: float | None = 30.0) -> None:
        super().__init__(timeout=timeout)
        self._space = space

    def _clone(self) -> Self:
        return type(self)(self._space, timeout=self._timeout)

    @property
    def _here(self) -> Space:
        return self._space.scoped(self._scope)

    # -- life ---------------------------------------------------------------------

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
        if not self._shared.opened and await self._space.runner.rest():
            self._shared.loop = None

    async def _open(self) -> None:
        await self._probe()

    async def _close(self) -> None:
        await self._space.runner.close()

    async def _ping(self) -> None:
        await self._probe()

    async def _setup(self) -> None:
        """There is nothing to create."""
        await self._probe()

    async def _check_schema(self) -> None:
        """Each thread has the number of its format; there is no other."""
        await self._probe()

    async def _probe(self) -> None:
        runner = self._space.runner
        now, clustered = await runner.run("ping", [self._space.keys.ping])
        if clustered and not runner.cluster:
            raise CompositionError("this server is part of a cluster: use a redis+cluster:// URL")
        self._space.hints.saw_clock(int(now))

    def _translate(self, error: Exception) -> Exception:
        return translate(error, cluster=self._space.runner.cluster)

    # -- TurnBackend --------------------------------------------------------------

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        return await read_view(self._here, thread_id, query)

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        return await commit_once(self._here, encode_commit(commit))

    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None:
        await lookups.save_draft(self._here, thread_id, run_id, messages, lease_token)

    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        return await lookups.renew_lease(self._here, thread_id, run_id, lease_token, lease_ms)

    # -- look-ups -----------------------------------------------------------------

    async def _find_run(self, run_id: str) -> RunRecord | None:
        return await lookups.find_run(self._here, run_id)

    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]:
        return await lookups.list_child_runs(self._here, parent_run_ids)

    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]:
        return await places.list_reclaimable(
            self._here, detached_before, limit, every_scope=every_scope
        )

    async def _list_lost(self, limit: int) -> list[LostRun]:
        return await places.list_lost(self._here, limit)

    # -- metadata -----------------------------------------------------------------

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        return await values.get_value(self._here, namespace, key)

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        return await values.put_value(self._here, namespace, key, value, expected)

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        await values.delete_value(self._here, namespace, key)

    async def _metadata_of(self, key: str) -> dict[str, JsonValue]:
        return await values.values_of(self._here, key)

    # -- cuts and threads -----------------------------------------------------------

    async def _list_cuts(self, thread_id: str) -> list[CutRecord]:
        return await cuts.list_cuts(self._here, thread_id)

    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        return await cuts.load_cut(self._here, thread_id, cut_id)

    async def _purge_cuts(self, thread_id: str, before: int) -> int:
        return await cuts.purge_cuts(self._here, thread_id, before)

    async def _delete_thread(self, thread_id: str) -> bool:
        await logs.erase_of_thread(self._here, thread_id, only_closed=False)
        return await delete_thread(self._here, thread_id)

    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList:
        return await places.list_threads(self._here, limit, cursor, children=children)

    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        await logs.erase_of_thread(self._here, thread_id, only_closed=True)
        return await cuts.erase_messages(self._here, thread_id, message_ids)

    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        return await places.list_idle(self._here, idle_ms, limit)

    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]:
        return await places.list_cut_threads(self._here, before, limit)

    # -- delivery logs ----------------------------------------------------------------

    async def _log_open(self, run_id: str, thread_id: str, token: str, lease_ms: int) -> LogHead:
        return await logs.open_log(self._here, run_id, thread_id, token, lease_ms)

    async def _log_append(
        self,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        lease_ms: int,
        keep_from: int,
    ) -> None:
        await logs.append(self._here, run_id, token, number, bodies, lease_ms, keep_from)

    async def _log_close(self, run_id: str, token: str) -> bool:
        return await logs.close(self._here, run_id, token)

    async def _log_take(
        self, run_id: str, token: str, lease_ms: int, only_lost: bool
    ) -> LogHead | None:
        return await logs.take(self._here, run_id, token, lease_ms, only_lost=only_lost)

    async def _log_read(
        self, run_id: str, number: int, limit: int, max_bytes: int
    ) -> LogPage | None:
        return await logs.read(self._here, run_id, number, limit, max_bytes)

    async def _log_heads(self, keys: Sequence[bytes]) -> dict[bytes, LogHead]:
        return await logs.heads(self._here, keys)

    async def _log_lost(self, limit: int) -> list[tuple[Scope, LogHead]]:
        return await logs.lost(self._here, limit)

    async def _log_trim(self, closed_ms: int, limit: int) -> int:
        return await logs.trim(self._here, closed_ms, limit)

    async def _log_listen(self, heard: Callable[[bytes | None], None]) -> None:
        await logs.listen(self._here, heard)

    # -- locks ------------------------------------------------------------------------

    async def _lock_acquire(self, name: str, token: str, lease_ms: int) -> int | None:
        return await locks.acquire(self._here, name, token, lease_ms)

    async def _lock_renew(self, name: str, token: str, lease_ms: int) -> bool:
        return await locks.renew(self._here, name, token, lease_ms)

    async def _lock_release(self, name: str, token: str) -> None:
        await locks.release(self._here, name, token)
