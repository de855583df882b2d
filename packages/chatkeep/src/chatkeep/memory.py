"""The reference backend: everything in this process, with the rules of a database.

Values go in and out through the codec, so nothing is shared with the caller and a value that
a database would refuse is refused here. One head per thread, entries that never change, cuts
that keep their entries without copying them. A primitive checks everything first and only
then writes; a lock makes each one atomic for other threads too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from chatkeep._memory import (
    Draft,
    Run,
    ScopeData,
    State,
    Thread,
    check_revision,
    cut_record,
    decide_activities,
    decide_interrupts,
    draft_record,
    drafts_of,
    erase_entries,
    erase_messages,
    in_order,
    message_of,
    own_receipt,
    visible_interrupts,
    window,
    write_transcript,
)
from chatkeep._memory_log import MemoryLogs
from chatkeep.backends import Persistence
from chatkeep.codec import JsonValue, decode, encode
from chatkeep.errors import (
    CompositionError,
    RunConflict,
)
from chatkeep.locks import LockBackend, lock_key
from chatkeep.logs import LogBackend, LogHead, LogPage
from chatkeep.records import (
    CutRecord,
    ModelMessage,
    RunPatch,
    RunRecord,
    ThreadInfo,
)
from chatkeep.rules import (
    ANY_REVISION,
    active_runs,
    check_driver,
    check_writer,
    copy_record,
    decode_cursor,
    encode_cursor,
    encode_messages,
    holds_lease,
    is_child_thread,
    new_revision,
    patch_run,
    pending_interrupt,
    renewed_run,
    start_run,
)
from chatkeep.scope import EMPTY_SCOPE, Scope
from chatkeep.stores import (
    LostRun,
    RunStart,
    ThreadList,
    ThreadView,
    TurnCommit,
    TurnReceipt,
    VersionedValue,
    ViewQuery,
)

__all__ = ["MemoryBackend", "memory_persistence", "open_url"]

_RECENT_COMMITS = 16


def memory_persistence(
    *, clock: Callable[[], int] | None = None, timeout: float | None = 30.0
) -> Persistence:
    """A persistence of this process, empty and shared with nobody.

    Args:
        clock: epoch milliseconds; leases, cuts and lists are timed by it.
        timeout: seconds for one store call.
    """
    return MemoryBackend(clock=clock, timeout=timeout).persistence()


def open_url(url: str, **options: Any) -> Persistence:
    """The factory behind ``open_persistence("memory://")``.

    Raises:
        CompositionError: a URL that names something: memory has no places.
    """
    parts = urlsplit(url)
    if parts.netloc or parts.path.strip("/") or parts.query:
        raise CompositionError(f"{url!r}: a memory persistence has no name, use memory://")
    return memory_persistence(**options)


def _system_clock() -> int:
    return time.time_ns() // 1_000_000


# ------------------------------------------------------------------------------ backend


class MemoryBackend(LogBackend, LockBackend):
    """A handle of the reference backend; see :func:`memory_persistence`."""

    name: ClassVar[str] = "memory"

    def __init__(
        self,
        *,
        scope: Scope = EMPTY_SCOPE,
        clock: Callable[[], int] | None = None,
        timeout: float | None = 30.0,
    ) -> None:
        super().__init__(scope=scope, timeout=timeout)
        self._clock = clock or _system_clock
        self._state = State()
        self._logs = MemoryLogs()
        self._locks: dict[bytes, tuple[str, int, int]] = {}  # token, fence, lease

    def _clone(self) -> Self:
        clone = type(self)(clock=self._clock, timeout=self._timeout)
        clone._state = self._state  # noqa: SLF001  (the same class)
        clone._logs = self._logs  # noqa: SLF001
        clone._locks = self._locks  # noqa: SLF001
        return clone

    @property
    def _mine(self) -> ScopeData:
        return self._state.of(self._scope)

    # -- life ---------------------------------------------------------------------

    async def _open(self) -> None:
        pass

    async def _close(self) -> None:
        with self._state.lock:
            self._state.scopes.clear()
            self._logs.clear()

    async def _ping(self) -> None:
        pass

    async def _setup(self) -> None:
        pass

    async def _check_schema(self) -> None:
        pass

    def _translate(self, error: Exception) -> Exception:
        return error

    # -- one read -----------------------------------------------------------------

    async def _read_view(self, thread_id: str, query: ViewQuery) -> ThreadView:
        with self._state.lock:
            now = self._clock()
            thread = self._mine.threads.get(thread_id)
            owner = self._mine.thread_of.get(query.run_id) if query.run_id is not None else None
            foreign = owner is not None and owner != thread_id
            if thread is None:
                return ThreadView(thread_id=thread_id, exists=False, now=now, foreign_run=foreign)
            numbers, truncated = window(thread.live, query)
            bodies, digests = query.messages == "bodies", query.messages == "digests"
            runs: list[RunRecord] = []
            if query.runs != "none":
                runs = thread.runs_in_order()
                if query.runs == "active":
                    runs = active_runs(runs, now)
            run = thread.run(query.run_id)
            return ThreadView(
                thread_id=thread_id,
                exists=True,
                now=now,
                revision=thread.revision,
                newest=thread.newest,
                messages=[message_of(thread.entries[n]) for n in numbers] if bodies else [],
                numbers=numbers,
                digests=[thread.entries[n].digest for n in numbers] if digests else [],
                truncated=truncated,
                run=None if run is None else copy_record(run),
                foreign_run=foreign,
                runs=[copy_record(run) for run in runs],
                interrupts=visible_interrupts(thread, query, now),
                activities=[copy_record(a) for a in thread.activities] if query.activities else [],
                drafts=drafts_of(thread_id, thread) if query.drafts else [],
            )

    # -- one write ----------------------------------------------------------------

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        # Values are judged first, before the lock: what cannot be stored meets no rule.
        tail = encode_messages(commit.splice.tail, "splice.tail") if commit.splice else []
        extra = encode_messages(commit.cut_append.messages) if commit.cut_append else []
        created = [pending_interrupt(record) for record in commit.interrupts]
        puts = (
            {i: copy_record(row) for i, row in commit.activities.puts.items()}
            if commit.activities is not None
            else {}
        )
        with self._state.lock:
            scope = self._mine
            now = self._clock()
            thread = scope.threads.get(commit.thread_id)
            if thread is None:
                thread = Thread(created_at=now, updated_at=now, order=0)
            elif (known := thread.recent.get(commit.commit_id)) is not None:
                return replace(own_receipt(known), replayed=True)

            run, created_run = self._decide_run(scope, thread, commit, now)
            interrupts = decide_interrupts(thread, commit, created, run, now)
            activities = decide_activities(thread, commit, puts)
            check_revision(thread, commit)

            # Nothing is refused from here on.
            if thread.order == 0:
                thread.order = self._state.count()
                scope.threads[commit.thread_id] = thread
            numbers, cut_id = write_transcript(thread, commit, tail, extra, now)
            thread.interrupts.update(interrupts)
            thread.activities = activities
            if run is not None:
                order = self._state.count() if created_run else thread.runs[run.run_id].order
                thread.runs[run.run_id] = Run(run, order)
                scope.thread_of[run.run_id] = commit.thread_id
            if commit.drop_draft and commit.run_id is not None:
                thread.drafts.pop(commit.run_id, None)
            thread.version += 1
            thread.updated_at = now
            receipt = TurnReceipt(
                revision=thread.revision,
                newest=thread.newest,
                numbers=numbers,
                run=run,
                created_run=created_run,
                cut_id=cut_id,
            )
            thread.recent[commit.commit_id] = receipt
            if len(thread.recent) > _RECENT_COMMITS:
                del thread.recent[next(iter(thread.recent))]
            return own_receipt(receipt)

    def _decide_run(
        self, scope: ScopeData, thread: Thread, commit: TurnCommit, now: int
    ) -> tuple[RunRecord | None, bool]:
        """The run after the commit if it writes one, and whether it is new."""
        stored = thread.run(commit.run_id)
        check_driver(commit, stored, now)
        if isinstance(commit.run, RunStart):
            owner = scope.thread_of.get(commit.run.run_id)
            known = scope.threads[owner].run(commit.run.run_id) if owner is not None else None
            return start_run(known, commit.thread_id, commit.run, now), known is None
        if isinstance(commit.run, RunPatch):
            if stored is None:
                raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
            holds = holds_lease(stored, commit.lease_token)
            return patch_run(stored, commit.run, holds_lease=holds), False
        if commit.claims and stored is None:
            raise RunConflict(commit.run_id or "", "unknown", thread_id=commit.thread_id)
        return None, False

    # -- drafts and leases --------------------------------------------------------

    async def _save_draft(
        self,
        thread_id: str,
        run_id: str,
        messages: Sequence[ModelMessage],
        lease_token: str | None,
    ) -> None:
        bodies = encode_messages(messages)
        with self._state.lock:
            thread = self._mine.thread(thread_id)
            check_writer(thread.run(run_id), run_id, thread_id, lease_token)
            thread.drafts[run_id] = Draft(self._clock(), bodies)

    async def _renew_lease(
        self, thread_id: str, run_id: str, lease_token: str, lease_ms: int
    ) -> RunRecord:
        with self._state.lock:
            thread = self._mine.thread(thread_id)
            run = renewed_run(
                thread.run(run_id), run_id, thread_id, lease_token, lease_ms, self._clock()
            )
            thread.runs[run_id].record = run
            return copy_record(run)

    # -- look-ups -----------------------------------------------------------------

    async def _find_run(self, run_id: str) -> RunRecord | None:
        with self._state.lock:
            owner = self._mine.thread_of.get(run_id)
            run = self._mine.threads[owner].run(run_id) if owner is not None else None
            return None if run is None else copy_record(run)

    async def _list_child_runs(
        self, parent_run_ids: Sequence[str]
    ) -> Mapping[str, list[RunRecord]]:
        asked: dict[str, list[Run]] = {parent: [] for parent in parent_run_ids}
        with self._state.lock:
            for thread in self._mine.threads.values():
                for run in thread.runs.values():
                    if run.record.parent_run_id in asked:
                        asked[run.record.parent_run_id].append(run)
            return {
                parent: [copy_record(run) for run in in_order(runs)]
                for parent, runs in asked.items()
            }

    async def _list_reclaimable(
        self, detached_before: int, limit: int, every_scope: bool
    ) -> list[LostRun]:
        def due(run: RunRecord) -> int | None:
            since = run.detached_since
            return since if since is not None and since <= detached_before else None

        scopes = list(self._state.scopes) if every_scope else [self._scope]
        return self._scan(scopes, due, limit)

    async def _list_lost(self, limit: int) -> list[LostRun]:
        now = self._clock()

        def due(run: RunRecord) -> int | None:
            return run.lease.until if run.lease is not None and run.lease.until <= now else None

        return self._scan(list(self._state.scopes), due, limit)

    def _scan(
        self, scopes: Sequence[Scope], due: Callable[[RunRecord], int | None], limit: int
    ) -> list[LostRun]:
        """Running runs that are due, the oldest first; ties in order of creation."""
        found: list[tuple[int, int, LostRun]] = []
        with self._state.lock:
            for scope in scopes:
                for thread_id, thread in self._state.of(scope).threads.items():
                    for run_id, run in thread.runs.items():
                        when = due(run.record) if run.record.status == "running" else None
                        if when is None:
                            continue
                        draft = thread.drafts.get(run_id)
                        lost = LostRun(
                            scope=scope,
                            run=copy_record(run.record),
                            draft=draft_record(thread_id, run_id, draft) if draft else None,
                        )
                        found.append((when, run.order, lost))
        found.sort(key=lambda row: row[:2])
        return [row[2] for row in found[:limit]]

    # -- metadata -----------------------------------------------------------------

    async def _metadata_get(self, namespace: str, key: str) -> VersionedValue | None:
        with self._state.lock:
            found = self._mine.metadata.get((namespace, key))
            if found is None:
                return None
            return VersionedValue(value=decode(found[0], "metadata"), revision=found[1])

    async def _metadata_put(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        body = encode(value, "value")
        with self._state.lock:
            found = self._mine.metadata.get((namespace, key))
            if expected != ANY_REVISION and expected != (found and found[1]):
                return None
            revision = new_revision(self._state.count())
            self._mine.metadata[namespace, key] = (body, revision)
            return revision

    async def _metadata_delete(self, namespace: str, key: str) -> None:
        with self._state.lock:
            self._mine.metadata.pop((namespace, key), None)

    async def _metadata_of(self, key: str) -> dict[str, JsonValue]:
        with self._state.lock:
            return {
                namespace: decode(body, "metadata")
                for (namespace, own), (body, _) in self._mine.metadata.items()
                if own == key
            }

    # -- cuts and threads -----------------------------------------------------------

    async def _list_cuts(self, thread_id: str) -> list[CutRecord]:
        with self._state.lock:
            thread = self._mine.thread(thread_id)
            return [cut_record(thread_id, thread, cut) for cut in thread.cuts.values()]

    async def _load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        with self._state.lock:
            thread = self._mine.thread(thread_id)
            cut = thread.cuts.get(cut_id)
            return [message_of(thread.entries[n]) for n in cut.numbers] if cut else []

    async def _purge_cuts(self, thread_id: str, before: int) -> int:
        with self._state.lock:
            thread = self._mine.thread(thread_id)
            old = [cut for cut in thread.cuts.values() if cut.cut_at < before]
            for cut in old:
                del thread.cuts[cut.cut_id]
                erase_entries(thread, cut.numbers)
            return len(old)

    async def _delete_thread(self, thread_id: str) -> bool:
        with self._state.lock:
            self._logs.erase(self._scope, thread_id, only_closed=False)
            scope = self._mine
            thread = scope.threads.pop(thread_id, None)
            for run_id in thread.runs if thread is not None else ():
                del scope.thread_of[run_id]
            notes = [key for key in scope.metadata if key[1] == thread_id]
            for key in notes:
                del scope.metadata[key]
            return thread is not None or bool(notes)

    async def _list_threads(self, limit: int, cursor: str | None, children: bool) -> ThreadList:
        after = decode_cursor(cursor, int, int) if cursor is not None else None
        with self._state.lock:
            rows = sorted(
                (
                    (thread.updated_at, thread.order, thread_id, thread)
                    for thread_id, thread in self._mine.threads.items()
                    if (children or not is_child_thread(thread_id))
                    and (after is None or (thread.updated_at, thread.order) < after)
                ),
                key=lambda row: row[:2],
                reverse=True,
            )
            page = rows[:limit]
            return ThreadList(
                threads=[
                    ThreadInfo(
                        thread_id=thread_id,
                        created_at=thread.created_at,
                        updated_at=updated_at,
                        message_count=len(thread.live),
                    )
                    for updated_at, _, thread_id, thread in page
                ],
                cursor=encode_cursor(*page[-1][:2]) if len(rows) > limit else None,
            )

    async def _erase_messages(self, thread_id: str, message_ids: Sequence[str]) -> int:
        with self._state.lock:
            self._logs.erase(self._scope, thread_id, only_closed=True)
            return erase_messages(self._mine.thread(thread_id), set(message_ids))

    async def _list_idle(self, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
        with self._state.lock:
            before = self._clock() - idle_ms
            rows = sorted(
                (
                    (thread.updated_at, thread.order, scope, thread_id)
                    for scope, data in self._state.scopes.items()
                    for thread_id, thread in data.threads.items()
                    if thread.updated_at <= before and not is_child_thread(thread_id)
                ),
                key=lambda row: row[:2],
            )
            return [(scope, thread_id) for _, _, scope, thread_id in rows[:limit]]

    async def _list_cut_threads(self, before: int, limit: int) -> list[tuple[Scope, str]]:
        with self._state.lock:
            rows = sorted(
                (
                    (cut.cut_at, thread.order, scope, thread_id)
                    for scope, data in self._state.scopes.items()
                    for thread_id, thread in data.threads.items()
                    for cut in [min(thread.cuts.values(), key=lambda c: c.cut_at, default=None)]
                    if cut is not None and cut.cut_at < before
                ),
                key=lambda row: row[:2],
            )
            return [(scope, thread_id) for _, _, scope, thread_id in rows[:limit]]

    # -- delivery logs ----------------------------------------------------------------

    async def _log_open(self, run_id: str, thread_id: str, token: str, lease_ms: int) -> LogHead:
        with self._state.lock:
            return self._logs.open(self._scope, run_id, thread_id, token, lease_ms, self._clock())

    async def _log_append(
        self,
        run_id: str,
        token: str,
        number: int,
        bodies: Sequence[bytes],
        lease_ms: int,
        keep_from: int,
    ) -> None:
        with self._state.lock:
            until = self._clock() + lease_ms
            self._logs.append(self._scope, run_id, token, number, bodies, until, keep_from)

    async def _log_close(self, run_id: str, token: str) -> bool:
        with self._state.lock:
            return self._logs.close(self._scope, run_id, token, self._clock())

    async def _log_take(
        self, run_id: str, token: str, lease_ms: int, only_lost: bool
    ) -> LogHead | None:
        with self._state.lock:
            now = self._clock()
            return self._logs.take(self._scope, run_id, token, lease_ms, now, only_lost=only_lost)

    async def _log_read(
        self, run_id: str, number: int, limit: int, max_bytes: int
    ) -> LogPage | None:
        with self._state.lock:
            now = self._clock()
            return self._logs.read(self._scope, run_id, number, limit, max_bytes, now)

    async def _log_heads(self, keys: Sequence[bytes]) -> dict[bytes, LogHead]:
        with self._state.lock:
            return self._logs.heads(keys, self._clock())

    async def _log_lost(self, limit: int) -> list[tuple[Scope, LogHead]]:
        with self._state.lock:
            return self._logs.lost(limit, self._clock())

    async def _log_trim(self, closed_ms: int, limit: int) -> int:
        with self._state.lock:
            return self._logs.trim(self._clock() - closed_ms, limit)

    # -- locks ------------------------------------------------------------------------

    async def _lock_acquire(self, name: str, token: str, lease_ms: int) -> int | None:
        key = lock_key(self._scope, name)
        with self._state.lock:
            now = self._clock()
            holder, fence, until = self._locks.get(key, ("", now - 1, 0))
            if holder != token:
                if until > now:
                    return None
                fence = max(fence + 1, now)
            self._locks[key] = (token, fence, now + lease_ms)
            return fence

    async def _lock_renew(self, name: str, token: str, lease_ms: int) -> bool:
        key = lock_key(self._scope, name)
        with self._state.lock:
            holder, fence, _ = self._locks.get(key, ("", 0, 0))
            if holder != token:
                return False
            self._locks[key] = (token, fence, self._clock() + lease_ms)
            return True

    async def _lock_release(self, name: str, token: str) -> None:
        key = lock_key(self._scope, name)
        with self._state.lock:
            holder, fence, _ = self._locks.get(key, ("", 0, 0))
            if holder != token:
                return
            if fence < self._clock():  # the clock alone gives the next holder a higher fence
                del self._locks[key]
            else:
                self._locks[key] = ("", fence, 0)
