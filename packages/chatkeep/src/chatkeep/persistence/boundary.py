"""What a turn reads to begin, and what it writes at one moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chatkeep.backends import new_commit_id
from chatkeep.errors import ThreadConflict
from chatkeep.persistence.layout import CLAIMING_PARTS, PARTS, Part
from chatkeep.persistence.transcript import Change
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch, RunRecord
from chatkeep.stores import CutAppend, InterruptAnswer, InterruptRef, RunStart, Transcript

__all__ = ["ActivityChange", "Boundary", "Opening", "QuestionErased"]


class QuestionErased(ThreadConflict):
    """The message that a run answers was erased for good: there is no place for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """All that a turn needs to begin. ``live`` are the other runs of the thread that are being
    driven (where the runs store can tell with the same read)."""

    transcript: Transcript
    now: int | None = None
    run: RunRecord | None = None
    foreign_run: bool = False
    live: list[RunRecord] = field(default_factory=list[RunRecord])
    pending: list[InterruptRecord] = field(default_factory=list[InterruptRecord])
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityChange:
    """The rows as they shall be, and which of them differ from what is stored, by place.

    ``onto`` makes the same change to other stored rows (somebody else wrote meanwhile); None if
    they have it. ``settle`` is called once the change is written.
    """

    rows: list[ActivityRecord]
    changed: dict[int, ActivityRecord]
    onto: Callable[[Sequence[ActivityRecord]], ActivityChange | None]
    settle: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Boundary:
    """One moment of a turn. Made once and kept through retries; ``change``, ``cut`` and
    ``activities`` may be replaced between two tries, the rest stays."""

    change: Change | None = None
    cut: CutAppend | None = None
    answers: Sequence[InterruptAnswer] = ()
    claims: Sequence[InterruptRef] = ()
    interrupts: Sequence[InterruptRecord] = ()
    run: RunStart | RunPatch | None = None
    activities: ActivityChange | None = None
    drop_draft: bool = False
    record: RunRecord | None = None
    """The run after the commit, where the store tells."""
    ids: dict[Part, str] = field(default_factory=dict[Part, str])
    done: set[Part] = field(default_factory=set[Part])

    def parts(self) -> list[Part]:
        """What is still to be written, in the order of :data:`PARTS`; for a start that claims
        in that of :data:`CLAIMING_PARTS`."""
        wanted: dict[Part, bool] = {
            "claims": bool(self.claims),
            "transcript": self.change is not None or self.cut is not None,
            "answers": bool(self.answers),
            "interrupts": bool(self.interrupts),
            "run": self.run is not None or self.drop_draft,
            "activities": self.activities is not None,
        }
        order = CLAIMING_PARTS if self.claims else PARTS
        return [part for part in order if wanted[part] and part not in self.done]

    def commit_id(self, group: Sequence[Part]) -> str:
        """The id under which a group is committed: the one any of its parts had before."""
        known = [self.ids[part] for part in group if part in self.ids]
        commit_id = known[0] if known else new_commit_id()
        for part in group:
            self.ids[part] = commit_id
        return commit_id
