"""Driving a run on that somebody else has left: one claimant wins, in one conditional write."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from chatkeep._bag import Persistence
from chatkeep.backends import new_commit_id
from chatkeep.errors import CompositionError, RunConflict
from chatkeep.persistence.layout import chat_layout
from chatkeep.persistence.reading import read_view
from chatkeep.records import Lease, RunPatch, RunRecord
from chatkeep.stores import TurnCommit, ViewQuery

__all__ = ["RunClaim", "claim_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaim:
    """The right to drive a run from now on. ``run`` is the record as the claim made it, with the
    new ``driver_epoch``; ``token`` is its lease's. Give it to ``with_persistence(…, claim=…)``."""

    run: RunRecord
    token: str


async def claim_run(
    persistence: Persistence, thread_id: str, run_id: str, *, lease_ms: int = 30_000
) -> RunClaim | None:
    """Claim a running run whose driver has gone: it was handed over, or its lease ran out.

    One conditional write changes the lease, counts ``driver_epoch`` up and clears
    ``detached_since``. Of several claimants one gets it; whoever drove the run before writes
    nothing any more, and neither do those that lost. Take its log over next:
    :meth:`chatkeep.delivery.Delivery.take_over`.

    Args:
        persistence: the stores; scope them first where tenants share a database.
        thread_id: the thread of the run.
        run_id: the run.
        lease_ms: how long the claimant counts as alive from now.

    Returns:
        None if there is nothing to claim: the run is unknown, has ended, waits for a human, is to
        be cancelled, or is driven.

    Raises:
        CompositionError: the runs store keeps no leases.
        StoreError: it could not be read or written.
    """
    layout = chat_layout(persistence, "claim_run", runs=True)
    backend = layout.backend("runs")
    if backend is None:
        raise CompositionError("claim_run needs a runs store of a backend: others keep no leases")
    query = ViewQuery(messages="none", run_id=run_id, runs="none", interrupts="none")
    view = await read_view(backend, thread_id, query)
    run = view.run
    if run is None or run.status != "running" or run.cancel_requested or run.lease is None:
        return None
    handed_over = run.detached_since is not None
    if run.live(view.now) and not handed_over:
        return None
    token = secrets.token_urlsafe(16)
    commit = TurnCommit(
        commit_id=new_commit_id(),
        thread_id=thread_id,
        run_id=run_id,
        lease_token=run.lease.token,
        lease_expired=not handed_over,
        run=RunPatch(
            lease=Lease(token=token, until=view.now + lease_ms),
            driver_epoch=(run.driver_epoch or 0) + 1,
            detached_since=None,
        ),
    )
    try:
        receipt = await backend.commit_turn(commit)
    except RunConflict:
        return None  # its driver came back, or another claimant was first
    if receipt.run is None:
        raise AssertionError("a commit that patches a run tells what became of it")
    return RunClaim(run=receipt.run, token=token)
