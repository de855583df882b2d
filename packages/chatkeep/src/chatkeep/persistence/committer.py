"""Getting a boundary written although others write too, and although databases go away."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chatkeep.errors import BackendUnavailable, RecordTooLarge, ThreadConflict
from chatkeep.persistence.boundary import Boundary, QuestionErased
from chatkeep.persistence.reports import Reports
from chatkeep.persistence.transcript import CutAway, RunTranscript
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import ModelMessage, RunPatch
from chatkeep.stores import RunStart

__all__ = ["OUTAGE_PAUSES", "PLACE_TRIES", "Committer"]

_log = logging.getLogger("chatkeep.persistence")

PLACE_TRIES: Final = 30
"""How often a boundary is merged again after another writer came first."""

OUTAGE_PAUSES: Final = (0.2, 0.5, 1.0)
"""Seconds before the last commit of a run is sent again after an outage, on top of the
backend's own tries: the answer is already paid for."""


class Committer:
    """Commits boundaries of one run."""

    __slots__ = ("_reports", "_run_id", "_transcript", "_work")

    def __init__(
        self, work: UnitOfWork, transcript: RunTranscript, *, run_id: str, reports: Reports
    ) -> None:
        self._work = work
        self._transcript = transcript
        self._run_id = run_id
        self._reports = reports

    async def commit(
        self, boundary: Boundary, mine: Sequence[ModelMessage], *, patient: bool = False
    ) -> None:
        """Commit ``boundary``, whose change makes the stored transcript ``mine``.

        On ``ThreadConflict`` the thread is read again and this run's messages are put in
        place; the commit ids stay. ``patient``: a short outage is waited out. Activities that
        make the commit too large are left out of it.

        Raises:
            ThreadConflict: after :data:`PLACE_TRIES`.
            QuestionErased: there is no place for the answer any more.
            StoreError: as the store says.
        """
        pauses = list(OUTAGE_PAUSES) if patient else []
        starts = isinstance(boundary.run, RunStart)
        moved = self._transcript.needs_place or (self._work.blind and not starts)
        stale = moved and boundary.change is not None
        conflicts = 0
        while True:
            try:
                if stale:
                    await self._place(boundary, mine)
                    stale = False
                await self._work.commit(boundary)
            except QuestionErased:
                raise
            except ThreadConflict:
                conflicts += 1
                self._reports.count("conflicts")
                if conflicts == PLACE_TRIES:
                    raise
                stale = True
                await asyncio.sleep(random.random() * min(0.002 * conflicts, 0.05))
            except RecordTooLarge as error:
                if boundary.activities is None:
                    raise
                self._reports.failure("activities", error, run_id=self._run_id)
                boundary.activities = None
            except BackendUnavailable as error:
                if not pauses:
                    raise
                self._reports.count("retries")
                _log.warning("run %s: %s; trying again", self._run_id, error)
                await asyncio.sleep(pauses.pop(0))
            else:
                return

    async def _place(self, boundary: Boundary, mine: Sequence[ModelMessage]) -> None:
        now = await self._work.reload()
        change = self._transcript.place(mine, now, again=self._work.blind)
        if not isinstance(change, CutAway):
            boundary.change, boundary.cut = change, None
            if boundary.activities is not None:
                boundary.activities = await self._work.rebased(boundary.activities)
            return
        boundary.change = boundary.activities = None  # rows of a question that is gone
        boundary.cut = await self._work.cut_of(change) if change.answer else None
        if isinstance(boundary.run, RunPatch) and boundary.run.detached is not True:
            self._reports.count("detached")
            boundary.run = replace(boundary.run, detached=True)
