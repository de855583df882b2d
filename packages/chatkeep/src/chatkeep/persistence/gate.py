"""Who may start: the run id, and the questions that still wait for a human.

Nothing here writes. A refusal leaves the store, the paused run and its questions as they were.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatkeep.engine.interrupts import (
    PendingInterrupt,
    Refusal,
    definitions_by_id,
    owned,
    posted_failures,
    submitted_ids,
    validate_resume,
)
from chatkeep.engine.middleware import ChatConfig
from chatkeep.engine.tools import tools_by_name
from chatkeep.errors import InterruptResumeError, RunConflict
from chatkeep.persistence.boundary import Opening
from chatkeep.persistence.foreign import answered
from chatkeep.persistence.proof import decided_before
from chatkeep.persistence.resume import Resume
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import InterruptRecord

__all__ = ["admit", "check_run"]


def check_run(opening: Opening, run_id: str, thread_id: str, *, claimed: str | None = None) -> None:
    """A run id is driven once: refuse one of another thread, one that is being driven, and
    one that has ended. ``claimed`` is the lease token of a run that is driven on.

    Raises:
        RunConflict: ``foreign-thread``, ``running``, ``terminal`` or ``lease-lost``.
    """
    if opening.foreign_run:
        raise RunConflict(run_id, "foreign-thread", thread_id=thread_id)
    run = opening.run
    if claimed is not None:
        if run is None or run.lease is None or run.lease.token != claimed:
            raise RunConflict(run_id, "lease-lost", thread_id=thread_id)
        if not run.terminal:
            return
    if run is None:
        return
    if run.terminal:
        raise RunConflict(run_id, "terminal", thread_id=thread_id)
    now = opening.now
    driven = run.lease is not None and (now is None or run.lease.until > now)
    if driven or (run.status == "running" and run.lease is None):
        raise RunConflict(run_id, "running", thread_id=thread_id)


async def admit(
    work: UnitOfWork, opening: Opening, config: ChatConfig, *, parent_run_id: str | None
) -> Resume | None:
    """What the post answers; None when it answers nothing and nothing waits.

    With an interrupt store the records decide. The batch is for one paused run and answers
    all of its questions; those of another run wait on. Without one, the entries are left to the
    engine, which goes by the posted history; only the run that they name is checked.

    Raises:
        InterruptResumeError: with the item and batch errors that the client expects.
        RunConflict: ``terminal``: the run paused, and its questions are answered.
    """
    entries = config.resume
    if work.layout.stores.interrupts is None:
        if entries and parent_run_id is not None:
            await _check_parent(work, entries, parent_run_id)
        return None
    await _check_parked(opening, work)
    waiting = [record for record in opening.pending if owned(record.payload)]
    if not waiting and not entries:
        return None
    sent = submitted_ids(entries)
    named = parent_run_id or (waiting[0].run_id if waiting else work.run_id)
    _check_batch(waiting, entries, Refusal(work.thread_id, named, sent))
    batch = _of_one_run(waiting, sent, parent_run_id, Refusal(work.thread_id, named, sent))
    paused = batch[0].run_id
    tools = tools_by_name(config.tools)
    cancelled = set(submitted_ids([e for e in entries if e.get("status") == "cancelled"]))
    pending: list[PendingInterrupt] = []
    for record in batch:
        item = PendingInterrupt(
            interrupt_id=record.interrupt_id, run_id=record.run_id, descriptor=record.payload
        )
        if record.interrupt_id not in cancelled:
            refusal = Refusal(work.thread_id, paused, sent)
            try:
                item = replace(item, decision=await decided_before(work, item, tools, refusal))
            except InterruptResumeError:
                # Left out beside answered questions: the continuation asks for the approval anew.
                if record.interrupt_id in sent:
                    raise
        pending.append(item)
    state = validate_resume(
        thread_id=work.thread_id,
        interrupted_run_id=paused,
        pending=pending,
        entries=entries,
        tools=tools,
        definitions=definitions_by_id(config.interrupts),
        failed_outputs=posted_failures(config.messages),
        now_ms=opening.now if opening.now is not None else time.time_ns() // 1_000_000,
    )
    if opening.run is not None:
        state = replace(state, taken=await _asked_before(work))
    resume = Resume.of(batch, entries, state)
    claimed = [record.interrupt_id for record in batch if record.claimed_by is not None]
    if claimed:
        raise resume.lost_to_another(claimed)
    return resume


async def _check_parked(opening: Opening, work: UnitOfWork) -> None:
    """A paused run goes on under its own id while something of it waits. Once all is answered,
    another run has carried its work on, and the request that began it must not ask anew."""
    run = opening.run
    if run is None or run.status != "interrupted":
        return
    if any(record.run_id == run.run_id for record in opening.pending):
        return
    if await _asked_before(work):
        raise RunConflict(run.run_id, "terminal", thread_id=work.thread_id)


def _check_batch(
    waiting: Sequence[InterruptRecord], entries: Sequence[Mapping[str, Any]], refusal: Refusal
) -> None:
    """What can be said before it is known which run the answers are for."""
    sent = submitted_ids(entries)
    for name in sorted(name for name, times in Counter(sent).items() if times > 1):
        refusal.item(name, "conflict", f"Interrupt {name} is answered twice.")
    if refusal:
        refusal.batch("conflict", "A batch has one answer for each interrupt.")
    elif not waiting:
        for name in sent[:1]:
            refusal.item(name, "unknown-interrupt", f"Interrupt {name} is not pending.")
        refusal.batch("incomplete-batch", "Nothing of this thread waits for an answer.")
    elif not entries:
        first = waiting[0].interrupt_id
        refusal.item(first, "unknown-interrupt", f"Interrupt {first} waits for an answer.")
        refusal.batch("incomplete-batch", "Answer what is pending before sending more.")
    refusal.check()


def _of_one_run(
    waiting: Sequence[InterruptRecord],
    sent: Sequence[str],
    parent_run_id: str | None,
    refusal: Refusal,
) -> list[InterruptRecord]:
    """The records of the run that the answers are for."""
    runs = list(dict.fromkeys(record.run_id for record in waiting))
    if parent_run_id is not None:
        if parent_run_id not in runs:
            raise _stale(refusal, sent, "that run does not wait for it")
        runs = [parent_run_id]
    elif len(runs) > 1:
        ids = {run: {w.interrupt_id for w in waiting if w.run_id == run} for run in runs}
        runs = [run for run in runs if ids[run].intersection(sent)]
        if len(runs) != 1:
            raise refusal.batch(
                "stale", "More than one run waits: say which by parentRunId.", source="server"
            ).error()
    return [record for record in waiting if record.run_id == runs[0]]


async def _asked_before(work: UnitOfWork) -> frozenset[str]:
    """Ids of all interrupts of this run, which goes on under its own id."""
    store = work.layout.stores.interrupts
    if store is None:
        return frozenset()
    asked = await answered(store.list_by_run(work.thread_id, work.run_id))
    return frozenset(record.interrupt_id for record in asked)


async def _check_parent(
    work: UnitOfWork, entries: Sequence[Mapping[str, Any]], parent_run_id: str
) -> None:
    """Without an interrupt store a paused run is known by its record, if runs are kept."""
    if work.layout.stores.runs is None:
        return
    run = await work.find_run(parent_run_id)
    if run is None or run.status != "interrupted":
        sent = submitted_ids(entries)
        refusal = Refusal(work.thread_id, parent_run_id, sent)
        raise _stale(refusal, sent, "that run is not paused")


def _stale(refusal: Refusal, sent: Sequence[str], why: str) -> InterruptResumeError:
    for name in sent:
        refusal.item(name, "stale", f"Interrupt {name} is not pending: {why}.", source="server")
    return refusal.batch("stale", "The answers are for another run.", source="server").error()
