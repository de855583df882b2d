"""UI rows beside the transcript: what a post adds, what a cut takes, what a boundary writes.

Activities are best effort: a row that cannot be stored is dropped, logged and counted, and a
failure never fails the run. Runs of one thread share the rows: each writes its own changes onto
what is stored at that time, never the list that it began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from chatkeep.errors import InvalidValue
from chatkeep.messages import before_each, model_to_ui, ui_length
from chatkeep.persistence.boundary import ActivityChange
from chatkeep.persistence.reports import Reports
from chatkeep.records import ActivityRecord, ModelMessage

__all__ = ["RunActivities", "before_cut", "merge_activities"]


def merge_activities(
    stored: Sequence[ActivityRecord], posted: Sequence[ActivityRecord]
) -> list[ActivityRecord]:
    """Stored rows in their order, then new ones. Content, type and metadata of a posted copy
    win; the stored place wins. A row that did not change is the stored object itself."""
    copies = {record.id: record for record in posted}
    merged: list[ActivityRecord] = []
    for record in stored:
        copy = copies.pop(record.id, None)
        if copy is not None:
            kept = {
                "index": record.index,
                "anchor": record.anchor,
                "run_id": record.run_id,
                "subagent_run_id": copy.subagent_run_id or record.subagent_run_id,
            }
            moved = copy.model_copy(update=kept)
            if moved.to_json() != record.to_json():
                record = moved
        merged.append(record)
    return [*merged, *copies.values()]


def before_cut(
    rows: Sequence[ActivityRecord],
    thread: Sequence[ModelMessage],
    *,
    kept: Sequence[ModelMessage],
    end: Sequence[ModelMessage],
    back: AbstractSet[str] = frozenset(),
) -> list[ActivityRecord]:
    """The rows that stay when a part of the thread is cut.

    ``thread`` is all of it (every message with an id), ``kept`` what stands before the cut,
    ``end`` what stands before it and in it. A row goes with the part that it stands in. One that
    stands right before the cut belongs to it when an answer is cut: it was shown for that
    answer. It belongs to what stays when a question is cut; of a row without an anchor nobody
    can tell, so it goes. ``back`` are ids of cut messages that the post brought back.
    """
    ui = model_to_ui(thread)
    first, last = ui_length(kept), ui_length(end)
    question = first < len(ui) and ui[first]["role"] in ("user", "system")
    names = [message["id"] for message in ui]
    returned = back & {*names[first:last]}
    staying = {
        record.id
        for record, before in before_each(names, rows)
        if before < first
        or before > last
        or (before == first and question and record.anchor in names)
        or (record.anchor is not None and record.anchor in returned)
    }
    return [record for record in rows if record.id in staying]


class RunActivities:
    """The rows of one run: what it began with, and what is stored as far as it knows."""

    __slots__ = ("_base", "_cut", "_reports", "_run_id", "_stored")

    def __init__(self, run_id: str, reports: Reports) -> None:
        self._run_id = run_id
        self._reports = reports
        self._stored: list[ActivityRecord] = []
        self._base: dict[str, ActivityRecord] = {}
        self._cut: frozenset[str] = frozenset()

    def loaded(self, stored: Sequence[ActivityRecord], staying: Sequence[ActivityRecord]) -> None:
        """Take ``stored`` as what is there, of which a cut leaves ``staying``."""
        self._stored = list(stored)
        self._base = {record.id: record for record in staying}
        self._cut = frozenset(record.id for record in stored) - self._base.keys()

    def plan(
        self,
        rows: Sequence[ActivityRecord],
        *,
        cutting: bool,
        mine: Sequence[ModelMessage] | None = None,
    ) -> ActivityChange | None:
        """What makes the stored rows ``rows``; None if they are.

        ``cutting``: with the transcript that is written the cut is made. ``mine`` is that
        transcript: a row of this run that follows a message which is not in it (nothing of a
        failed answer was kept) then follows its last one.
        """
        fit = self._storable(rows, mine)
        held = {record.id for record in rows}
        gone = {name for name in self._base if name not in held}
        if cutting:
            gone |= self._cut
        changed = {r.id: form for r, form in fit if self._base.get(r.id) is not r}

        def settle(target: list[ActivityRecord]) -> None:
            self._stored = target
            self._base = {record.id: record for record in rows}
            if cutting:
                self._cut = frozenset()

        def onto(stored: Sequence[ActivityRecord]) -> ActivityChange | None:
            fresh = dict(changed)
            target = [
                fresh.pop(record.id, record)
                for record in stored
                if record.id not in gone or record.id in fresh
            ]
            target += fresh.values()
            puts = {
                place: record
                for place, record in enumerate(target)
                if place >= len(stored) or stored[place] is not record
            }
            if not puts and len(target) == len(stored):
                return None
            return ActivityChange(
                rows=target, changed=puts, onto=onto, settle=lambda: settle(target)
            )

        return onto(self._stored)

    def _storable(
        self, rows: Sequence[ActivityRecord], mine: Sequence[ModelMessage] | None
    ) -> list[tuple[ActivityRecord, ActivityRecord]]:
        """The rows that a store takes, each with its stored form."""
        fit: list[tuple[ActivityRecord, ActivityRecord]] = []
        for record in rows:
            form = record
            if self._base.get(record.id) is not record:
                try:
                    record.to_json()
                except InvalidValue as error:
                    self._reports.failure("activities", error, run_id=self._run_id)
                    self._reports.count("activities_dropped")
                    continue
                if mine is not None and record.run_id == self._run_id:
                    form = _anchored(record, mine)
            fit.append((record, form))
        return fit


def _anchored(record: ActivityRecord, mine: Sequence[ModelMessage]) -> ActivityRecord:
    if record.anchor is None or any(m.get("id") == record.anchor for m in mine):
        return record
    shown = (m.get("id") for m in reversed(mine) if m.get("role") != "tool")
    return record.model_copy(update={"anchor": next(shown, None)})
