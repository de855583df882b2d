"""Cancelling a run from outside: the intent that no closed connection carries."""

from __future__ import annotations

from typing import Literal, TypeAlias

from chatkeep._bag import Persistence
from chatkeep.errors import InterruptConflict, RunConflict
from chatkeep.persistence.boundary import Boundary, Opening
from chatkeep.persistence.endings import ended, withdrawn
from chatkeep.persistence.foreign import answered
from chatkeep.persistence.layout import chat_layout
from chatkeep.persistence.opening import read_gate
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import RunPatch, RunRecord

__all__ = ["CancelOutcome", "cancel_run"]

CancelOutcome: TypeAlias = Literal["cancelled", "requested", "continued", "ended", "unknown"]
"""What :func:`cancel_run` did.

* ``cancelled``: the run was paused; it is ``aborted`` now, and its questions are cancelled;
* ``requested``: somebody drives the run; it will stop, and end as ``aborted``;
* ``continued``: the run is paused, and its questions are answered, or being answered by another
  run: cancel that one. Nothing changed;
* ``ended``: it had ended already. Nothing changed;
* ``unknown``: the thread has no such run.
"""


async def cancel_run(persistence: Persistence, thread_id: str, run_id: str) -> CancelOutcome:
    """Cancel a run of a thread, whoever drives it.

    A paused run ends in one commit with its questions, so that its thread takes new input again.
    A driven one is told: its lease is renewed every few seconds, and the renewal brings the word.

    Args:
        persistence: the stores; scope them first where tenants share a database.
        thread_id: the thread; ask beforehand whether the caller may write to it.
        run_id: the run.

    Raises:
        CompositionError: no messages or no runs store.
        StoreError: a store could not be read or written.
    """
    layout = chat_layout(persistence, "cancel_run", runs=True)
    work = UnitOfWork(layout, thread_id, run_id, lease_token=None, reports=Reports(None))
    opening = await read_gate(layout, thread_id, run_id)
    run = opening.run
    if run is None:
        return "unknown"
    if run.terminal:
        return "ended"
    if run.status == "interrupted" and not _continues_itself(run, opening):
        return await _cancel_paused(work, opening)
    runs = layout.stores.runs
    if runs is None:
        raise AssertionError("chat_layout was asked for a runs store")
    await answered(runs.update(run_id, RunPatch(cancel_requested=True), thread_id=thread_id))
    return "requested"


def _continues_itself(run: RunRecord, opening: Opening) -> bool:
    """Whether the run goes on under its own id: it keeps the word, and has a lease."""
    return run.lease is not None and (opening.now is None or run.lease.until > opening.now)


async def _cancel_paused(work: UnitOfWork, opening: Opening) -> CancelOutcome:
    mine = [record for record in opening.pending if record.run_id == work.run_id]
    if not mine or any(record.claimed_by is not None for record in mine):
        return "continued"
    boundary = Boundary(
        answers=withdrawn(mine),
        run=ended("aborted", usage=None),
    )
    try:
        await work.commit(boundary)
    except InterruptConflict:
        return "continued"  # an answer came first
    except RunConflict as conflict:
        if conflict.reason != "transition":
            raise
        return "ended"
    return "cancelled"
