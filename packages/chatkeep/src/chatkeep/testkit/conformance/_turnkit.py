"""Builders for the cases about commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    RunStart,
    Splice,
    ThreadView,
    TurnBackend,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)
from chatkeep.testkit.conformance._base import user

__all__ = ["T0", "see", "start_turn", "still", "turn"]

T0 = 1_700_000_000_000
_EVERYTHING = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)


def turn(thread: str, commit_id: str | None = None, **parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=commit_id or new_commit_id(), thread_id=thread, **parts)


async def see(backend: TurnBackend, thread: str, run: str | None = None) -> ThreadView:
    query = _EVERYTHING
    if run is not None:
        query = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True, run_id=run)
    return await backend.read_view(thread, query)


def still(view: ThreadView) -> ThreadView:
    """A view without the clock: to compare two."""
    return replace(view, now=0)


async def start_turn(
    backend: TurnBackend, thread: str, run: str, token: str | None = None, lease_ms: int = 60_000
) -> TurnReceipt:
    """Run ``run`` with one user message."""
    return await backend.commit_turn(
        turn(
            thread,
            run_id=run,
            splice=Splice(keep_through=0, tail=[user("q", "q1")]),
            run=RunStart(run_id=run, started_at=T0, lease_token=token, lease_ms=lease_ms),
        )
    )
