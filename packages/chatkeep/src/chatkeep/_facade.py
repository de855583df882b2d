"""The five stores over a backend's primitives, with every tier of :mod:`chatkeep.stores`.

Whatever writes goes through ``Backend.commit_turn`` (metadata and administration apart), so
that a user's own call is guarded by the same head as a turn of chatkeep's. Each store names
its handle as ``backend``: stores of one handle are committed together.
"""

from __future__ import annotations

import asyncio
import builtins
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from chatkeep._bag import Stores
from chatkeep._saved import Known, json_of, known_list, top_level_nones
from chatkeep.codec import JsonValue, digest, encode
from chatkeep.errors import InterruptConflict, InvalidValue, RunConflict, ThreadConflict
from chatkeep.records import (
    UNSET,
    ActivityRecord,
    CutRecord,
    InterruptRecord,
    ModelMessage,
    RunPatch,
    RunRecord,
    RunStatus,
    Unset,
)
from chatkeep.rules import ANY_REVISION, find_interrupt, new_commit_id
from chatkeep.scope import check_id
from chatkeep.stores import (
    ActivitiesWrite,
    AnswerStatus,
    InterruptAnswer,
    InterruptRef,
    MessagePage,
    RunStart,
    Splice,
    SpliceResult,
    Transcript,
    TurnCommit,
    TurnReceipt,
    VersionedValue,
    ViewQuery,
)

if TYPE_CHECKING:
    from chatkeep.backends import Backend

__all__ = [
    "ActivitiesFacade",
    "InterruptsFacade",
    "MessagesFacade",
    "MetadataFacade",
    "RunsFacade",
    "build_stores",
]

_BODIES = ViewQuery(messages="bodies", runs="none", interrupts="none")
_NUMBERS = ViewQuery(messages="numbers", runs="none", interrupts="none")
_REVISION = ViewQuery(messages="none", runs="none", interrupts="none")
_DIGESTS = ViewQuery(messages="digests", runs="none", interrupts="none")
_ACTIVITIES = ViewQuery(messages="none", runs="none", interrupts="none", activities=True)
_ACTIVE_RUNS = ViewQuery(messages="none", runs="active", interrupts="none")
_ALL_RUNS = ViewQuery(messages="none", runs="all", interrupts="none")
_ALL_INTERRUPTS = ViewQuery(messages="none", runs="none", interrupts="all")
_PENDING_INTERRUPTS = ViewQuery(messages="none", runs="none", interrupts="pending")


def build_stores(backend: Backend) -> Stores:
    """The stores of ``backend``."""
    return Stores(
        messages=MessagesFacade(backend),
        runs=RunsFacade(backend),
        interrupts=InterruptsFacade(backend),
        activities=ActivitiesFacade(backend),
        metadata=MetadataFacade(backend),
    )


class _Facade:
    __slots__ = ("backend",)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.backend.name}>"


# ----------------------------------------------------------------------------- messages


class MessagesFacade(_Facade):
    """``MessageStore`` with ``RevisionedMessages``, ``PagedMessages`` and ``CutArchive``."""

    __slots__ = ()

    async def load_thread(self, thread_id: str) -> list[ModelMessage]:
        """See :class:`~chatkeep.stores.MessageStore`."""
        return (await self.load_transcript(thread_id)).messages

    async def save_thread(
        self, thread_id: str, messages: Sequence[ModelMessage], *, archive: bool = True
    ) -> None:
        """See :class:`~chatkeep.stores.MessageStore`.

        Where this process knows what is stored and the list begins with it, the rest is
        spliced on at once. Else the digests of what is stored are read, the common prefix is
        kept and the rest spliced; on a conflict again, until the backend's timeout. Equal
        lists write nothing.

        Raises:
            InvalidValue: a message that cannot be stored.
            ThreadConflict: other writers won until the timeout ran out.
        """
        rows = list(messages)
        if await self._save_behind_known(thread_id, rows, archive=archive):
            return
        wanted = _Digests(rows)
        deadline = time.monotonic() + (self.backend.timeout or math.inf)
        attempt = 0
        while True:
            view = await self.backend.read_view(thread_id, _DIGESTS)
            same = wanted.common_prefix(view.digests)
            if same == len(view.digests) == len(rows):
                self._remember(thread_id, known_list(rows, view.revision, view.newest))
                return
            splice = Splice(
                keep_through=view.numbers[same - 1] if same else 0,
                tail=rows[same:],
                expected=view.revision,
                archive=archive,
            )
            known = known_list(rows, view.revision, view.newest)
            try:
                await self._splice(thread_id, splice, "messages", same, known)
            except ThreadConflict:
                pause = 0.002 * 2 ** min(attempt, 6) * (0.5 + random.random())
                attempt += 1
                if time.monotonic() + pause > deadline:
                    raise
                await asyncio.sleep(pause)
            else:
                return

    async def _save_behind_known(
        self, thread_id: str, rows: list[ModelMessage], *, archive: bool
    ) -> bool:
        """Save what stands behind the list that is known to be stored; whether that was all."""
        known = self.backend.fingerprints.get(self.backend.scope, thread_id)
        if known is None or not known.starts(rows):
            return False
        if len(rows) == known.count:
            return (await self.backend.read_view(thread_id, _REVISION)).revision == known.revision
        splice = Splice(
            keep_through=known.newest,
            tail=rows[known.count :],
            expected=known.revision,
            archive=archive,
        )
        grown = known.grown(rows, known.revision, known.newest)
        try:
            await self._splice(thread_id, splice, "messages", known.count, grown)
        except ThreadConflict:
            return False
        return True

    async def _splice(
        self, thread_id: str, splice: Splice, name: str, offset: int, known: Known | None
    ) -> TurnReceipt:
        """Commit a splice; ``known`` (of the whole list, taken before) is remembered as what
        is stored then. ``name`` and ``offset`` say where the tail stands for the caller."""
        self._remember(thread_id, None)
        try:
            receipt = await self.backend.commit_turn(_commit(thread_id, splice=splice))
        except InvalidValue as error:
            raise _of_list(error, name, offset) from error
        if known is not None:
            known = replace(known, revision=receipt.revision, newest=receipt.newest)
            self._remember(thread_id, known)
        return receipt

    def _remember(self, thread_id: str, known: Known | None) -> None:
        self.backend.fingerprints.put(self.backend.scope, thread_id, known)

    async def load_transcript(self, thread_id: str) -> Transcript:
        """See :class:`~chatkeep.stores.RevisionedMessages`."""
        view = await self.backend.read_view(thread_id, _BODIES)
        self._remember(thread_id, known_list(view.messages, view.revision, view.newest))
        return Transcript(messages=view.messages, numbers=view.numbers, revision=view.revision)

    async def splice_thread(
        self,
        thread_id: str,
        *,
        keep: int,
        tail: Sequence[ModelMessage],
        expected: str,
        archive: bool = True,
    ) -> SpliceResult:
        """See :class:`~chatkeep.stores.RevisionedMessages`."""
        if keep < 0:
            raise InvalidValue("keep", "must not be negative")
        view = await self.backend.read_view(thread_id, _NUMBERS)
        if view.revision != expected:
            raise ThreadConflict(thread_id, expected=expected, actual=view.revision)
        if keep > len(view.numbers):
            raise InvalidValue("keep", f"the thread has {len(view.numbers)} messages, not {keep}")
        splice = Splice(
            keep_through=view.numbers[keep - 1] if keep else 0,
            tail=tail,
            expected=expected,
            archive=archive,
        )
        receipt = await self._splice(thread_id, splice, "tail", 0, None)
        return SpliceResult(revision=receipt.revision, numbers=receipt.numbers)

    async def load_page(
        self, thread_id: str, *, limit: int, before: int | None = None
    ) -> MessagePage:
        """See :class:`~chatkeep.stores.PagedMessages`."""
        query = ViewQuery(runs="none", interrupts="none", limit=limit, before=before)
        view = await self.backend.read_view(thread_id, query)
        return MessagePage(
            messages=view.messages,
            numbers=view.numbers,
            truncated=view.truncated,
            cursor=view.numbers[0] if view.truncated else None,
        )

    async def list_cuts(self, thread_id: str) -> list[CutRecord]:
        """See :class:`~chatkeep.stores.CutArchive`."""
        return await self.backend.list_cuts(thread_id)

    async def load_cut(self, thread_id: str, cut_id: str) -> list[ModelMessage]:
        """See :class:`~chatkeep.stores.CutArchive`."""
        return await self.backend.load_cut(thread_id, cut_id)

    async def restore_cut(self, thread_id: str, cut_id: str, *, expected: str) -> SpliceResult:
        """See :class:`~chatkeep.stores.CutArchive`."""
        receipt = await self.backend.commit_turn(
            _commit(thread_id, restore=cut_id, restore_expected=expected)
        )
        return SpliceResult(revision=receipt.revision, numbers=receipt.numbers)

    async def purge_cuts(self, thread_id: str, *, before: int) -> int:
        """See :class:`~chatkeep.stores.CutArchive`."""
        return await self.backend.purge_cuts(thread_id, before=before)


class _Digests:
    """The digests of a list of messages, each worked out once and only when asked for."""

    __slots__ = ("_known", "messages")

    def __init__(self, messages: list[ModelMessage]) -> None:
        self.messages = messages
        self._known: list[bytes] = []

    def common_prefix(self, stored: Sequence[bytes]) -> int:
        """How many messages in front have the stored digests."""
        known = self._known
        for i in range(min(len(stored), len(self.messages))):
            if i == len(known):
                known.append(_digest_of(self.messages[i], i))
            if known[i] != stored[i]:
                return i
        return min(len(stored), len(self.messages))


def _digest_of(message: ModelMessage, index: int) -> bytes:
    """The digest of ``encode(message)``, nearly always without its walk in Python.

    orjson alone writes the same bytes for plain JSON values and refuses most others. What it
    lets pass is NaN (as null), so a null that is no top-level None takes the long way; too
    deep a nesting gives a digest that nothing stored can have.
    """
    body = json_of(message)
    if body is None:
        return digest(encode(message, f"messages[{index}]"))
    nulls = body.count(b"null")
    if nulls and nulls != top_level_nones(message):
        return digest(encode(message, f"messages[{index}]"))
    return digest(body)


def _of_list(error: InvalidValue, name: str, offset: int) -> InvalidValue:
    """``error`` with the path that the caller knows: its list instead of the splice's tail."""
    found = re.match(r"splice\.tail\[(\d+)\]", error.path)
    if found is None:
        return error
    index = int(found[1]) + offset
    return InvalidValue(f"{name}[{index}]{error.path[found.end() :]}", error.reason)


def _commit(thread_id: str, **parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id=thread_id, **parts)


# --------------------------------------------------------------------------------- runs


class RunsFacade(_Facade):
    """``RunStore`` with ``RunHistory``, ``RunTree`` and ``ReclaimableRuns``."""

    __slots__ = ()

    async def create_or_resume(
        self,
        run_id: str,
        thread_id: str,
        *,
        started_at: int,
        status: RunStatus = "running",
        parent_run_id: str | None = None,
        subagent_run_id: str | None = None,
        name: str | None = None,
        lease_token: str | None = None,
        lease_ms: int = 30_000,
        extra: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """See :class:`~chatkeep.stores.RunStore`."""
        start = RunStart(
            run_id=run_id,
            started_at=started_at,
            status=status,
            lease_token=lease_token,
            lease_ms=lease_ms,
            parent_run_id=parent_run_id,
            subagent_run_id=subagent_run_id,
            name=name,
            extra=extra or {},
        )
        query = ViewQuery(messages="none", runs="none", interrupts="none", run_id=run_id)
        while True:
            view = await self.backend.read_view(thread_id, query)
            if view.foreign_run:
                raise RunConflict(run_id, "foreign-thread", thread_id=thread_id)
            stored = view.run
            if stored is not None:
                lost = stored.status == "running" and not stored.live(view.now)
                if not (lost and lease_token is not None):
                    return stored
            try:
                receipt = await self.backend.commit_turn(
                    _commit(thread_id, run_id=run_id, run=start)
                )
            except RunConflict as error:
                if error.reason == "foreign-thread":
                    raise
                continue  # somebody else was first: what they wrote is the answer
            return cast("RunRecord", receipt.run)

    async def update(
        self,
        run_id: str,
        patch: RunPatch,
        *,
        thread_id: str | None = None,
        lease_token: str | None = None,
    ) -> None:
        """See :class:`~chatkeep.stores.RunStore`."""
        if thread_id is None:
            stored = await self.backend.find_run(run_id)
            if stored is None:
                return
            thread_id = stored.thread_id
        try:
            await self.backend.commit_turn(
                _commit(thread_id, run_id=run_id, lease_token=lease_token, run=patch)
            )
        except RunConflict:
            if await self.get(run_id, thread_id=thread_id) is not None:
                raise

    async def get(self, run_id: str, *, thread_id: str | None = None) -> RunRecord | None:
        """See :class:`~chatkeep.stores.RunStore`."""
        if thread_id is None:
            return await self.backend.find_run(run_id)
        query = ViewQuery(messages="none", runs="none", interrupts="none", run_id=run_id)
        return (await self.backend.read_view(thread_id, query)).run

    async def find_active_run(self, thread_id: str) -> RunRecord | None:
        """See :class:`~chatkeep.stores.RunStore`."""
        runs = (await self.backend.read_view(thread_id, _ACTIVE_RUNS)).runs
        return runs[-1] if runs else None

    async def list_by_thread(self, thread_id: str) -> list[RunRecord]:
        """See :class:`~chatkeep.stores.RunHistory`."""
        return (await self.backend.read_view(thread_id, _ALL_RUNS)).runs

    async def list_by_parent_run(self, parent_run_id: str) -> list[RunRecord]:
        """See :class:`~chatkeep.stores.RunTree`."""
        return (await self.list_by_parent_runs([parent_run_id]))[parent_run_id]

    async def list_by_parent_runs(
        self, parent_run_ids: Sequence[str]
    ) -> dict[str, list[RunRecord]]:
        """See :class:`~chatkeep.stores.RunTree`."""
        return await self.backend.list_child_runs(parent_run_ids)

    async def list_reclaimable(self, *, now: int, ttl_ms: int, limit: int = 100) -> list[RunRecord]:
        """See :class:`~chatkeep.stores.ReclaimableRuns`."""
        found = await self.backend.list_reclaimable(detached_before=now - ttl_ms, limit=limit)
        return [row.run for row in found]


# --------------------------------------------------------------------------- interrupts


class InterruptsFacade(_Facade):
    """``InterruptStore`` with ``BatchCommit``."""

    __slots__ = ()

    async def create(self, record: InterruptRecord) -> bool:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        try:
            await self.backend.commit_turn(_commit(record.thread_id, interrupts=[record]))
        except InterruptConflict:
            return False
        return True

    async def resolve(
        self,
        thread_id: str,
        interrupt_id: str,
        response: JsonValue | Unset = UNSET,
        *,
        run_id: str | None = None,
    ) -> None:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        await self._settle(thread_id, interrupt_id, "resolved", response, run_id)

    async def cancel(self, thread_id: str, interrupt_id: str, *, run_id: str | None = None) -> None:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        await self._settle(thread_id, interrupt_id, "cancelled", UNSET, run_id)

    async def _settle(
        self,
        thread_id: str,
        interrupt_id: str,
        status: AnswerStatus,
        response: JsonValue | Unset,
        run_id: str | None,
    ) -> None:
        answer = InterruptAnswer(
            interrupt_id=interrupt_id, status=status, response=response, run_id=run_id
        )
        try:
            await self.backend.commit_turn(_commit(thread_id, answers=[answer]))
        except InterruptConflict:
            if await self.get(thread_id, interrupt_id, run_id=run_id) is not None:
                raise

    async def get(
        self, thread_id: str, interrupt_id: str, *, run_id: str | None = None
    ) -> InterruptRecord | None:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        check_id(interrupt_id, "interrupt_id")
        if run_id is not None:
            check_id(run_id, "run_id")
        records = await self.list(thread_id)
        return find_interrupt(records, InterruptRef(interrupt_id=interrupt_id, run_id=run_id))

    async def list(self, thread_id: str) -> builtins.list[InterruptRecord]:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        return (await self.backend.read_view(thread_id, _ALL_INTERRUPTS)).interrupts

    async def list_pending(self, thread_id: str) -> builtins.list[InterruptRecord]:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        return (await self.backend.read_view(thread_id, _PENDING_INTERRUPTS)).interrupts

    async def list_by_run(self, thread_id: str, run_id: str) -> builtins.list[InterruptRecord]:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        check_id(run_id, "run_id")
        return [record for record in await self.list(thread_id) if record.run_id == run_id]

    async def list_pending_by_run(
        self, thread_id: str, run_id: str
    ) -> builtins.list[InterruptRecord]:
        """See :class:`~chatkeep.stores.InterruptStore`."""
        check_id(run_id, "run_id")
        return [r for r in await self.list_pending(thread_id) if r.run_id == run_id]

    async def commit_batch(self, thread_id: str, answers: Sequence[InterruptAnswer]) -> None:
        """See :class:`~chatkeep.stores.BatchCommit`."""
        if answers:
            await self.backend.commit_turn(_commit(thread_id, answers=list(answers)))


# ----------------------------------------------------------------- activities, metadata


class ActivitiesFacade(_Facade):
    """``ActivityStore``."""

    __slots__ = ()

    async def load_activities(self, thread_id: str) -> list[ActivityRecord]:
        """See :class:`~chatkeep.stores.ActivityStore`."""
        return (await self.backend.read_view(thread_id, _ACTIVITIES)).activities

    async def save_activities(self, thread_id: str, activities: Sequence[ActivityRecord]) -> None:
        """See :class:`~chatkeep.stores.ActivityStore`."""
        write = ActivitiesWrite(puts=dict(enumerate(activities)), length=len(activities))
        await self.backend.commit_turn(_commit(thread_id, activities=write))


class MetadataFacade(_Facade):
    """``MetadataStore`` with ``VersionedMetadata``."""

    __slots__ = ()

    async def get(self, namespace: str, key: str) -> JsonValue | None:
        """See :class:`~chatkeep.stores.MetadataStore`."""
        found = await self.backend.metadata_get(namespace, key)
        return None if found is None else found.value

    async def set(self, namespace: str, key: str, value: JsonValue) -> None:
        """See :class:`~chatkeep.stores.MetadataStore`."""
        await self.backend.metadata_put(namespace, key, value, ANY_REVISION)

    async def delete(self, namespace: str, key: str) -> None:
        """See :class:`~chatkeep.stores.MetadataStore`."""
        await self.backend.metadata_delete(namespace, key)

    async def get_versioned(self, namespace: str, key: str) -> VersionedValue | None:
        """See :class:`~chatkeep.stores.VersionedMetadata`."""
        return await self.backend.metadata_get(namespace, key)

    async def set_if(
        self, namespace: str, key: str, value: JsonValue, expected: str | None
    ) -> str | None:
        """See :class:`~chatkeep.stores.VersionedMetadata`."""
        if expected == ANY_REVISION:
            return None  # no revision of ours: it must not turn into "whatever it is"
        return await self.backend.metadata_put(namespace, key, value, expected)
