"""UI rows beside the transcript: what a post adds, what a cut takes, what a boundary writes.

Activities are best effort: a row that cannot be stored is dropped, logged and counted, and a
failure never fails the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatkeep.errors import InvalidValue
from chatkeep.messages import ui_length
from chatkeep.persistence.boundary import ActivityChange
from chatkeep.persistence.reports import Reports
from chatkeep.records import ActivityRecord, ModelMessage

__all__ = ["RunActivities", "before_cut", "merge_activities"]


def merge_activities(
    stored: Sequence[ActivityRecord], posted: Sequence[ActivityRecord]
) -> list[ActivityRecord]:
    """Stored rows in their order, then new ones. Content, type and metadata of a posted copy
    win; the stored position wins. A row that did not change is the stored object itself."""
    copies = {record.id: record for record in posted}
    merged: list[ActivityRecord] = []
    for record in stored:
        copy = copies.pop(record.id, None)
        if copy is not None and copy.to_json() != {**record.to_json(), "index": copy.index}:
            record = copy.model_copy(update={"index": record.index})
        merged.append(record)
    return [*merged, *copies.values()]


def before_cut(
    rows: Sequence[ActivityRecord], kept: Sequence[ModelMessage]
) -> list[ActivityRecord]:
    """The rows that stand before the cut, when only the messages ``kept`` stay."""
    length = ui_length(kept)
    staying: list[ActivityRecord] = []
    earlier = 0
    for record in sorted(rows, key=lambda r: r.index):
        if record.index - earlier < length:
            staying.append(record)
            earlier += 1
    return [record for record in rows if record in staying]


class RunActivities:
    """The rows of one run, and which of them are stored as they are."""

    __slots__ = ("_reports", "_run_id", "_stored")

    def __init__(self, run_id: str, reports: Reports) -> None:
        self._run_id = run_id
        self._reports = reports
        self._stored: list[ActivityRecord] = []

    def loaded(self, rows: Sequence[ActivityRecord]) -> None:
        """Take ``rows`` as what is stored."""
        self._stored = list(rows)

    def plan(self, rows: Sequence[ActivityRecord]) -> ActivityChange | None:
        """What makes the stored rows ``rows``; None if they are."""
        fit = self._storable(rows)
        changed = {
            i: record
            for i, record in enumerate(fit)
            if i >= len(self._stored) or self._stored[i] is not record
        }
        if not changed and len(fit) == len(self._stored):
            return None
        return ActivityChange(rows=fit, changed=changed)

    def _storable(self, rows: Sequence[ActivityRecord]) -> list[ActivityRecord]:
        known = {id(record) for record in self._stored}
        fit: list[ActivityRecord] = []
        for record in rows:
            if id(record) not in known:
                try:
                    record.to_json()
                except InvalidValue as error:
                    self._reports.failure("activities", error, run_id=self._run_id)
                    self._reports.count("activities_dropped")
                    continue
            fit.append(record)
        return fit
