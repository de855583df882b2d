"""The SQL backend: each primitive of :class:`chatkeep.backends.Backend` is one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from chatkeep.codec import JsonValue
from chatkeep.errors import BackendUnavailable, SchemaOutOfDate
from chatkeep.locks import LockBackend
from chatkeep.logs import LogBackend, LogHead, LogPage
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
from chatkeep_sql import admin, locks, logs, lookups, setup, values
from chatkeep_sql.commit_plain import commit_plain
from chatkeep_sql.commit_postgres import Hints, commit_postgres, fits_one_statement
from chatkeep_sql.encoded import EncodedCommit, encode_commit
from chatkeep_sql.engine import PostgresRunner, Runner
from chatkeep_sql.errors import may_run_again, sqlstate, translate
from chatkeep_sql.listen import listen
from chatkeep_sql.log_postgres import append_postgres
from chatkeep_sql.log_statements import log_statements_for
from chatkeep_sql.migrations import REVISIONS
from chatkeep_sql.program import Program, Rows
from chatkeep_sql.read_plain import read_plain
from chatkeep_sql.read_postgres import read_postgres
from chatkeep_sql.rows import run_key
from chatkeep_sql.schema import tables_for
from chatkeep_sql.sqlite_runner import SqliteRunner
from chatkeep_sql.statements import statements_for

__all__ = ["PostgresBackend", "SqlBackend", "SqliteBackend"]

_T = TypeVar("_T")

_NO_RIGHT = "42501"


class SqlBackend(LogBackend, LockBackend):
    """What both databases have in common.

    Args:
        runner: runs the programs.
        schema: where the tables are; None: where unqualified names lead.
        create: create the tables on first use if there are none.
        owned: close the engine in ``aclose()``.
    """

    dialect: ClassVar[setup.Dialect]
    one_loop = True
    _tell: ClassVar[staticmethod[[bytes], Program[None]]] = staticmethod(logs.tell_nobody)

    def __init__(
        self,
        runner: Runner,
        *,
        schema: str | None = None,
        create: bool = True,
        owned: bool = False,
        scope: Scope = EMPTY_SCOPE,
        timeout: float | None = 30.0,
    ) -> None:
        super().__init__(scope=scope, timeout=timeout)
        self._runner = runner
        self._schema = schema
        self._create = create
        self._owned = owned
        self._sql = statements_for(tables_for(schema))
        self._log_sql = log_statements_for(tables_for(schema))
        self._lock_sql = locks.lock_statements_for(tables_for(schema))

    def setup_script(self) -> str | None:
        """The migrations as SQL, from the first to the newest."""
        return setup.migration_sql(self.dialect, self._schema)

    def _clone(self) -> Self:
        return type(self)(
            self._runner,
            schema=self._schema,
            create=self._create,
            owned=self._owned,
            timeout=self._timeout,
        )

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
        if self._owned and not self._shared.opened and not self._in_memory():
            await self._runner.engine.dispose()
            self._shared.loop = None

    def _in_memory(self) -> bool:
        return False

    async def _read(self, program: Callable[..., Program[_T]], *arguments: Any) -> _T:
        return await self._runner.once(lambda: program(self._sql, *arguments))

    async def _write(self, program: Callable[..., Program[_T]], *arguments: Any) -> _T:
        return await self._runner.transaction(lambda: program(self._sql, *arguments))

    # -- life ---------------------------------------------------------------------

    async def _open(self) -> None:
        state = await self._runner.once(lambda: setup.schema_state(self.dialect, self._schema))
        if state.found is None and self._create:
            await self._setup()
        else:
            setup.require_current(state)

    async def _close(self) -> None:
        if self._owned:
            await self._runner.engine.dispose()

    async def _ping(self) -> None:
        await self._runner.once(_select_one)

    async def _setup(self) -> None:
        try:
            await self._runner.transaction(lambda: setup.migrate(self.dialect, self._schema))
        except DBAPIError as error:
            if sqlstate(error) != _NO_RIGHT:
                raise
            raise SchemaOutOfDate(
                "the chatkeep tables are missing or behind, and this role may not create them: "
                "run `chatkeep migrate URL` with one that may",
                expected=REVISIONS[-1],
            ) from error

    async def _check_schema(self) -> None:
        setup.require_current(
            await self._runner.once(lambda: setup.schema_state(self.dialect, self._schema))
        )

    def _translate(self, error: Exception) -> Exception:
        return translate(error)

    # -- drafts and leases --------------------------------------------------------

    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None:
        await self._write(lookups.save_draft, self._scope, thread_id, run_id, messages, lease_token)

    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        return await self._write(
            lookups.renew_lease, self._scope, thread_id, run_id, lease_token, lease_ms
        )

    # -- look-ups -----------------------------------------------------------------

    async def _find_run(self, run_id: str) -> RunRecord | None:
        return await self._read(lookups.find_run, self._scope, run_id)

    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]:
        return await self._read(lookups.list_child_runs, self._scope, parent_run_ids)

    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]:
        return await self._read(
            lookups.list_reclaimable, self._scope, detached_before, limit, every_scope
        )

    async def _list_lost(self, limit: int) -> list[LostRun]:
        return await self._read(lookups.list_lost, limit)

    # -- metadata -----------------------------------------------------------------

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        return await self._read(values.get_value, self._scope, namespace, key)

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        return await self._write(values.put_value, self._scope, namespace, key, value, expected)

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        await self._write(values.delete_value, self._scope, namespace, key)

    async def _metadata_of(self, key: str) -> dict[str, JsonValue]:
        return await self._read(values.values_of, self._scope, key)

    # -- cuts and threads -----------------------------------------------------------

    async def _list_cuts(self, thread_id: str) -> list[CutRecord]:
        return await self._read_at_once(admin.list_cuts, self._scope, thread_id)

    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        return await self._read_at_once(admin.load_cut, self._scope, thread_id, cut_id)

    async def _purge_cuts(self, thread_id: str, before: int) -> int:
        return await self._write(admin.purge_cuts, self._scope, thread_id, before)

    async def _delete_thread(self, thread_id: str) -> bool:
        return await self._runner.transaction(lambda: self._erase_thread(thread_id))

    def _erase_thread(self, thread_id: str) -> Program[bool]:
        yield from logs.erase_of_thread(self._log_sql, self._scope, thread_id, only_closed=False)
        return (yield from admin.delete_thread(self._sql, self._scope, thread_id))

    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList:
        return await self._read(admin.list_threads, self._scope, limit, cursor, children)

    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        return await self._runner.transaction(lambda: self._erase_copies(thread_id, message_ids))

    def _erase_copies(self, thread_id: str, message_ids: Sequence[str]) -> Program[int]:
        yield from logs.erase_of_thread(self._log_sql, self._scope, thread_id, only_closed=True)
        return (yield from admin.erase_messages(self._sql, self._scope, thread_id, message_ids))

    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        return await self._read(admin.list_idle, idle_ms, limit)

    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]:
        return await self._read(admin.list_cut_threads, before, limit)

    async def _read_at_once(self, program: Callable[..., Program[_T]], *arguments: Any) -> _T:
        """A read of several statements that must see one moment."""
        return await self._runner.snapshot(lambda: program(self._sql, *arguments))

    # -- delivery logs ----------------------------------------------------------------

    async def _log_open(self, run_id: str, thread_id: str, token: str, lease_ms: int) -> LogHead:
        arguments = (self._scope, run_id, thread_id, token, lease_ms)
        return await self._runner.transaction(lambda: logs.open_log(self._log_sql, *arguments))

    async def _log_append(
        self,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        lease_ms: int,
        keep_from: int,
    ) -> None:
        arguments = (self._scope, run_id, token, number, bodies, lease_ms, keep_from)
        await self._runner.transaction(lambda: logs.append(self._log_sql, self._tell, *arguments))

    async def _log_close(self, run_id: str, token: str) -> bool:
        arguments = (self._scope, run_id, token)
        return await self._runner.transaction(
            lambda: logs.close(self._log_sql, self._tell, *arguments)
        )

    async def _log_take(
        self, run_id: str, token: str, lease_ms: int, only_lost: bool
    ) -> LogHead | None:
        arguments = (self._scope, run_id, token, lease_ms, only_lost)
        return await self._runner.transaction(
            lambda: logs.take(self._log_sql, self._tell, *arguments)
        )

    async def _log_read(
        self, run_id: str, number: int, limit: int, max_bytes: int
    ) -> LogPage | None:
        arguments = (self._scope, run_id, number, limit, max_bytes)
        return await self._runner.snapshot(lambda: logs.read(self._log_sql, *arguments))

    async def _log_heads(self, keys: Sequence[bytes]) -> dict[bytes, LogHead]:
        return await self._runner.once(lambda: logs.heads(self._log_sql, keys))

    async def _log_lost(self, limit: int) -> list[tuple[Scope, LogHead]]:
        return await self._runner.once(lambda: logs.lost(self._log_sql, limit))

    async def _log_trim(self, closed_ms: int, limit: int) -> int:
        return await self._runner.transaction(lambda: logs.trim(self._log_sql, closed_ms, limit))

    # -- locks ------------------------------------------------------------------------

    async def _lock_acquire(self, name: str, token: str, lease_ms: int) -> int | None:
        arguments = (self._scope, name, token, lease_ms)
        return await self._runner.transaction(lambda: locks.acquire(self._lock_sql, *arguments))

    async def _lock_renew(self, name: str, token: str, lease_ms: int) -> bool:
        arguments = (self._scope, name, token, lease_ms)
        return await self._runner.transaction(lambda: locks.renew(self._lock_sql, *arguments))

    async def _lock_release(self, name: str, token: str) -> None:
        arguments = (self._scope, name, token)
        await self._runner.transaction(lambda: locks.release(self._lock_sql, *arguments))


def _select_one() -> Program[Rows]:
    return (yield text("select 1"), {})


class SqliteBackend(SqlBackend):
    """A handle of a SQLite file, or of one in memory."""

    name: ClassVar[str] = "sqlite"
    dialect: ClassVar[setup.Dialect] = "sqlite"

    def __init__(self, runner: SqliteRunner, **options: Any) -> None:
        super().__init__(runner, **options)

    async def _open(self) -> None:
        if not self._create:
            self._need_file()
        await super()._open()

    async def _check_schema(self) -> None:
        self._need_file()
        await super()._check_schema()

    def _in_memory(self) -> bool:
        return self._runner.engine.url.database in {None, "", ":memory:"}

    def _need_file(self) -> None:
        """Looking at a store makes nothing; a connection would leave an empty file behind."""
        name = self._runner.engine.url.database or ""
        if not self._in_memory() and not name.startswith("file:") and not Path(name).exists():
            raise SchemaOutOfDate(
                f"there is no file {name!r}: run `chatkeep migrate URL`", expected=REVISIONS[-1]
            )

    def _translate(self, error: Exception) -> Exception:
        told = super()._translate(error)
        name = self._runner.engine.url.database
        if name and isinstance(told, BackendUnavailable) and "unable to open" in str(told):
            # SQLite does not say which; a relative path depends on where the process was started.
            return BackendUnavailable(f"{told}: {Path(name).absolute()}")
        return told

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        return await self._read(read_plain, self._scope, thread_id, query)

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        return await self._write(commit_plain, encode_commit(commit, self._scope))


class PostgresBackend(SqlBackend):
    """A handle of a PostgreSQL database."""

    name: ClassVar[str] = "postgres"
    dialect: ClassVar[setup.Dialect] = "postgresql"
    _tell = staticmethod(logs.tell_postgres)

    def __init__(self, runner: PostgresRunner, **options: Any) -> None:
        super().__init__(runner, **options)
        self._postgres = runner
        self._hints = Hints()

    def _clone(self) -> Self:
        clone = super()._clone()
        clone._hints = self._hints  # noqa: SLF001  (the same class)
        return clone

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        view = await self._postgres.single(
            lambda: read_postgres(self._sql.t, self._scope, thread_id, query), again=True
        )
        self._hints.saw(view.revision, view.newest)
        if view.run is not None:
            self._hints.saw_run(run_key(self._scope, view.run.run_id))
        return view

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        encoded = encode_commit(commit, self._scope)
        if fits_one_statement(encoded):
            receipt = await self._in_one_statement(encoded)
            if receipt is not None:
                return receipt
        return await self._write(commit_plain, encoded)

    async def _in_one_statement(self, encoded: EncodedCommit) -> TurnReceipt | None:
        try:
            return await self._postgres.single(
                lambda: commit_postgres(self._sql.t, encoded, self._hints), again=False
            )
        except Exception as error:
            if may_run_again(error):
                return None
            raise

    async def _log_append(
        self,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        lease_ms: int,
        keep_from: int,
    ) -> None:
        arguments = (self._scope, run_id, token, number, bodies, lease_ms)
        if bodies and keep_from == 1:
            added = await self._postgres.single(
                lambda: append_postgres(self._sql.t, *arguments), again=False
            )
            if added:
                return
        await super()._log_append(run_id, token, number, bodies, lease_ms, keep_from)

    async def _log_listen(self, heard: Callable[[bytes | None], None]) -> None:
        if self._postgres.listens:
            await listen(self._postgres.engine, heard)
