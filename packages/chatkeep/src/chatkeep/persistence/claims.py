"""Claims where the stores of a chat do not share one backend.

A claim is judged by the backend that holds it: it lives as long as the run that took it, as far
as that backend knows. So whatever of the two is kept elsewhere gets a stand-in there:

* the interrupts are in a backend, the runs are not in the same one: a stand-in for the run, under
  its id, with a lease of its own that is renewed with the run's and ends with it. It is always
  parked (``interrupted``), so that nobody takes it for a run to join or to sweep;
* the interrupts are in a store of the application: stand-ins for them, beside the runs (or the
  messages). They are made when they are first claimed, say nothing, and are shown to nobody.

With no backend of ours among the three nothing is claimed; such stores keep two tabs apart by
themselves, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from chatkeep.backends import new_commit_id
from chatkeep.errors import InterruptConflict
from chatkeep.records import InterruptRecord, Lease, RunPatch
from chatkeep.stores import InterruptRef, RunStart, TurnBackend, TurnCommit

__all__ = [
    "STAND_IN",
    "is_stand_in",
    "lend_records",
    "stand_in_end",
    "stand_in_start",
    "with_claims",
    "without_stand_ins",
]

STAND_IN: Final = "chatkeepStandIn"
"""Mark of a stand-in: in the payload of an interrupt, an extra field of a run."""


def is_stand_in(record: InterruptRecord) -> bool:
    """Whether the record only carries a claim for one that is kept elsewhere."""
    return record.payload.get(STAND_IN) is True


def without_stand_ins(records: Iterable[InterruptRecord]) -> list[InterruptRecord]:
    """The interrupts themselves."""
    return [record for record in records if not is_stand_in(record)]


def with_claims(
    records: Iterable[InterruptRecord], stand_ins: Iterable[InterruptRecord]
) -> list[InterruptRecord]:
    """``records`` of a foreign store with the claims that their stand-ins carry."""
    claims = {(r.run_id, r.interrupt_id): r.claimed_by for r in stand_ins if is_stand_in(r)}
    return [
        record.model_copy(update={"claimed_by": claims.get((record.run_id, record.interrupt_id))})
        for record in records
    ]


async def lend_records(
    desk: TurnBackend, thread_id: str, claims: Sequence[InterruptRef], *, now: int
) -> None:
    """Make the stand-ins that are not there yet."""
    for ref in claims:
        record = InterruptRecord(
            interrupt_id=ref.interrupt_id,
            run_id=ref.run_id or "",
            thread_id=thread_id,
            requested_at=now,
            payload={STAND_IN: True},
        )
        commit = TurnCommit(commit_id=new_commit_id(), thread_id=thread_id, interrupts=[record])
        try:
            await desk.commit_turn(commit)
        except InterruptConflict:
            continue  # somebody made it before


def stand_in_start(run: RunStart, token: str) -> RunStart:
    """The start of the run's stand-in."""
    return RunStart(
        run_id=run.run_id,
        started_at=run.started_at,
        status="interrupted",
        lease_token=token,
        lease_ms=run.lease_ms,
        extra={STAND_IN: True},
    )


def stand_in_end(token: str | None) -> RunPatch:
    """What ends the stand-in, and with it every claim that it still holds: its lease is over. It
    stays parked, so that a run may go on under its own id."""
    return RunPatch(lease=None if token is None else Lease(token=token, until=0))
