"""What runs beside the chats and crosses scopes: lost runs, and retention.

Schedule :meth:`Maintenance.sweep` every half minute or so, the purges as your retention rules
say. Several processes may do so at once: every write is guarded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatkeep._admin import backend_of, distinct_backends, store_name
from chatkeep.errors import (
    CompositionError,
    CorruptRecord,
    InvalidValue,
    RecordTooLarge,
    RunConflict,
    ThreadConflict,
)
from chatkeep.records import ModelMessage, RunError, RunPatch, RunRecord
from chatkeep.rules import anchor_of
from chatkeep.scope import Scope, key_digest
from chatkeep.stores import (
    CutAppend,
    LostRun,
    MessageStore,
    Splice,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)

if TYPE_CHECKING:
    from chatkeep.backends import Backend, Persistence

__all__ = ["WORKER_LOST", "Maintenance"]

_log = logging.getLogger("chatkeep.maintenance")

WORKER_LOST = "worker_lost"
"""Error code of a run whose driver stopped renewing its lease."""

_KEEP_ALL = 2**53 - 1
"""Above every sequence number."""

_PAGE = 200
"""Messages read at once when the place of a draft is looked for."""

_PLACE_TRIES = 20
"""How often a draft is placed again after another writer came first."""


class Maintenance:
    """From :meth:`Persistence.maintenance`: its calls see every scope of the backends."""

    __slots__ = ("_bag",)

    def __init__(self, bag: Persistence) -> None:
        self._bag = bag

    # -- lost runs ------------------------------------------------------------------

    async def sweep(self, *, limit: int = 100) -> list[LostRun]:
        """End the runs whose lease has run out: ``failed`` with code ``worker_lost``.

        What such a run had streamed (its draft) becomes a part of the transcript, behind the
        message that the run answered, its last message marked
        ``metadata.tanstack.stopReason: "error"``, in the same commit where the backends allow.
        The draft of a regenerate is dropped: the old answer is there again. If the question was
        cut meanwhile, what was streamed goes to that cut.
        The lease token stays on the run, so a late worker may still complete it.

        Args:
            limit: most runs of one call, the longest lost first.

        Returns:
            The runs that this call ended, as they are now, each with its scope and the draft
            that it had. A run that cannot be ended is logged and left.

        Raises:
            CompositionError: the run store is no backend's: it keeps no leases.
        """
        runs = self._runs_backend()
        if runs is None:
            return []
        ended: list[LostRun] = []
        for lost in await runs.list_lost(limit=limit):
            try:
                row = await self._end(lost)
            except (CorruptRecord, InvalidValue, RecordTooLarge):
                _log.exception("run %r cannot be ended as lost", lost.run.run_id)
                continue
            if row is not None:
                ended.append(row)
        return ended

    async def _end(self, lost: LostRun) -> LostRun | None:
        bag = self._in_scope(lost.scope)
        handle = backend_of(bag, bag.stores.runs)
        thread_id, run_id = lost.run.thread_id, lost.run.run_id
        if handle is None or lost.run.lease is None:
            return None
        query = ViewQuery(
            messages="none", runs="none", interrupts="none", run_id=run_id, drafts=True
        )
        view = await handle.read_view(thread_id, query)
        run = view.run
        if run is None or run.status != "running" or run.live(view.now) or run.lease is None:
            return None
        draft = next((d for d in view.drafts if d.run_id == run_id), None)
        tail = _stopped(draft.messages) if draft is not None and run.hide_from is None else []
        commit = TurnCommit(
            commit_id=_sweep_id(run_id, run.lease.token),
            thread_id=thread_id,
            run_id=run_id,
            lease_token=run.lease.token,
            lease_expired=True,
            run=RunPatch(
                status="failed",
                finished_at=view.now,
                error=RunError(message="The worker that ran it is gone.", code=WORKER_LOST),
            ),
            drop_draft=True,
        )
        messages = bag.stores.messages
        together = messages is not None and backend_of(bag, messages) is handle
        if tail and messages is not None and not together:
            # The promised order: the transcript before the status of its run.
            await _keep_apart(bag, messages, commit.commit_id, run, tail)
        try:
            if tail and together:
                receipt = await _commit_with(handle, commit, run, tail)
            else:
                receipt = await handle.commit_turn(commit)
        except RunConflict:
            return None  # its driver came back, or another sweep was first
        if receipt.replayed or receipt.run is None:
            return None
        return LostRun(scope=lost.scope, run=receipt.run, draft=draft)

    async def list_reclaimable(
        self, *, ttl_ms: int, limit: int = 100, now: int | None = None
    ) -> list[LostRun]:
        """Running runs of every scope that were left at least ``ttl_ms`` ago
        (``detached_since``), oldest first.

        Args:
            ttl_ms: how long nobody may have watched.
            limit: most rows.
            now: epoch ms; this process's clock by default, as that stamped the runs.

        Raises:
            CompositionError: the run store is no backend's.
        """
        runs = self._runs_backend()
        if runs is None:
            return []
        moment = time.time_ns() // 1_000_000 if now is None else now
        return await runs.list_reclaimable(
            detached_before=moment - ttl_ms, limit=limit, every_scope=True
        )

    # -- retention --------------------------------------------------------------------

    async def purge_cuts(self, *, before: int, limit: int = 1000) -> list[tuple[Scope, str, int]]:
        """Erase for good what was cut before ``before`` (epoch ms by the store's clock).

        Returns:
            Scope, thread id and number of erased cuts, for at most ``limit`` threads of each
            backend, the oldest cuts first. Call again until it is empty.
        """
        purged: list[tuple[Scope, str, int]] = []
        for backend in distinct_backends(self._bag):
            for scope, thread_id in await backend.list_cut_threads(before=before, limit=limit):
                count = await backend.scoped(scope).purge_cuts(thread_id, before=before)
                purged.append((scope, thread_id, count))
        return purged

    async def purge_threads(self, *, idle_ms: int, limit: int = 100) -> list[tuple[Scope, str]]:
        """Delete threads that nothing was written to for ``idle_ms``, as
        :meth:`Persistence.delete_thread` does, subagents' threads included.

        A thread stays while a run with a lease is alive in it, or while another backend of
        the bag has it among the threads that are not idle.

        Returns:
            Scope and id of the deleted threads, at most ``limit`` of each backend, the
            longest idle first. Call again until it is empty.
        """
        backends = distinct_backends(self._bag)
        idle = [set(await b.list_idle(idle_ms=idle_ms, limit=limit)) for b in backends]
        purged: list[tuple[Scope, str]] = []
        for scope, thread_id in dict.fromkeys(row for rows in idle for row in rows):
            bag = self._in_scope(scope)
            busy = False
            for backend, rows in zip(backends, idle, strict=True):
                query = ViewQuery(messages="none", runs="active", interrupts="none")
                view = await backend.scoped(scope).read_view(thread_id, query)
                fresh = view.exists and (scope, thread_id) not in rows
                busy = busy or fresh or any(run.lease is not None for run in view.runs)
            if not busy and await bag.delete_thread(thread_id):
                purged.append((scope, thread_id))
        return purged

    # -- who ----------------------------------------------------------------------------

    def _runs_backend(self) -> Backend | None:
        store = self._bag.stores.runs
        if store is None:
            return None
        backend = backend_of(self._bag, store)
        if backend is None:
            raise CompositionError(f"the runs store ({store_name(store)}) keeps no leases")
        return backend

    def _in_scope(self, scope: Scope) -> Persistence:
        if all(backend.scope == scope for backend in self._bag.backends):
            return self._bag
        return self._bag.scoped(scope)


def _sweep_id(run_id: str, token: str) -> str:
    """One id for all sweeps of one lost run: what a broken-off sweep wrote is recognised."""
    return f"sweep-{key_digest(run_id, token).hex()[:32]}"


def _stopped(messages: Sequence[dict[str, Any]]) -> list[ModelMessage]:
    """The draft as messages; the last one was cut off if it is the assistant's."""
    rows: list[Any] = list(messages)
    if rows and rows[-1].get("role") == "assistant":
        metadata: dict[str, Any] = rows[-1].get("metadata") or {}
        own: dict[str, Any] = metadata.get("tanstack") or {}
        tanstack = {**own, "stopReason": "error"}
        rows[-1] = {**rows[-1], "metadata": {**metadata, "tanstack": tanstack}}
    return rows


async def _keep_apart(
    bag: Persistence,
    messages: MessageStore,
    commit_id: str,
    run: RunRecord,
    tail: Sequence[ModelMessage],
) -> None:
    """Add the draft to a message store apart from the runs; once, also when repeated."""
    backend = backend_of(bag, messages)
    if backend is not None:
        await _commit_with(
            backend, TurnCommit(commit_id=commit_id, thread_id=run.thread_id), run, tail
        )
        return
    stored = await messages.load_thread(run.thread_id)
    known = {message.get("id") for message in stored} - {None}
    new = [message for message in tail if message.get("id") not in known]
    if new:
        at = _behind_turn(stored, anchor_of(run))
        at = len(stored) if at is None else at
        await messages.save_thread(run.thread_id, [*stored[:at], *new, *stored[at:]])


async def _commit_with(
    backend: Backend, commit: TurnCommit, run: RunRecord, tail: Sequence[ModelMessage]
) -> TurnReceipt:
    """Commit with ``tail`` put behind the turn of ``run``, again while others write there.

    Raises:
        RunConflict: see :class:`~chatkeep.stores.TurnCommit`.
        ThreadConflict: others won :data:`_PLACE_TRIES` times.
    """
    tries = 0
    while True:
        placed = await _placed(backend, commit, run, tail)
        try:
            return await backend.commit_turn(placed)
        except ThreadConflict:
            tries += 1
            if tries == _PLACE_TRIES:
                raise


async def _placed(
    backend: Backend, commit: TurnCommit, run: RunRecord, tail: Sequence[ModelMessage]
) -> TurnCommit:
    anchor = anchor_of(run)
    if anchor is None:
        return replace(commit, splice=Splice(keep_through=_KEEP_ALL, tail=tail))
    rows: list[ModelMessage] = []
    numbers: list[int] = []
    while True:  # the turn is near the end: page back until it is in sight
        before = numbers[0] if numbers else None
        query = ViewQuery(runs="none", interrupts="none", limit=_PAGE, before=before)
        view = await backend.read_view(run.thread_id, query)
        rows, numbers = [*view.messages, *rows], [*view.numbers, *numbers]
        at = _behind_turn(rows, anchor)
        if at is not None:
            stored = {message.get("id") for message in rows} - {None}
            new = [message for message in tail if message.get("id") not in stored]
            behind = [*new, *rows[at:]]
            splice = Splice(keep_through=numbers[at - 1], tail=behind, expected=view.revision)
            return replace(commit, splice=splice)
        if not view.truncated:
            break
    for cut in reversed(await backend.list_cuts(run.thread_id)):
        if anchor in cut.message_ids:
            return replace(commit, cut_append=CutAppend(cut_id=cut.cut_id, messages=tail))
    return commit  # the question was erased: what was streamed has no place any more


def _behind_turn(rows: Sequence[ModelMessage], anchor: str | None) -> int | None:
    """Index behind the turn that answers the message ``anchor``; None: it is not there."""
    at = next((i for i in reversed(range(len(rows))) if rows[i].get("id") == anchor), None)
    if anchor is None or at is None:
        return None
    at += 1
    while at < len(rows) and rows[at].get("role") in ("assistant", "tool"):
        at += 1
    return at
