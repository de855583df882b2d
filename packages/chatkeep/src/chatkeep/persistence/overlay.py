"""What running runs make of the transcript that a reader sees: hidden rows, drafts, times."""

from __future__ import annotations

from itertools import takewhile
from typing import cast

from chatkeep.messages import before_each, model_to_ui, stable_ids
from chatkeep.persistence.loading import Rows, ThreadState
from chatkeep.persistence.transcript import run_tag, with_tanstack
from chatkeep.records import ActivityRecord, DraftRecord, ModelMessage, RunRecord
from chatkeep.rules import anchor_of

__all__ = ["Overlay"]


class Overlay:
    """The view of one page load. ``timed``: put the times of ended runs on their messages."""

    def __init__(self, state: ThreadState, *, timed: bool) -> None:
        self._state = state
        self._replacing = [
            run
            for run in state.runs
            if run.hide_from is not None and run.status == "running" and state.live(run)
        ]
        self._ended = {run.run_id: run for run in state.runs if timed and run.terminal}

    def visible(self, rows: Rows) -> Rows:
        """Without what a regenerate that is being driven is about to replace."""
        if not self._replacing and not self._ended:
            return rows
        kept = [
            (self.timed(message), number)
            for message, number in zip(rows.messages, rows.numbers, strict=True)
            if not any(_hides(run, number) for run in self._replacing)
        ]
        return Rows([m for m, _ in kept], [n for _, n in kept], rows.from_start)

    def activities(self, rows: Rows) -> list[ActivityRecord]:
        """Without those of the answers that :meth:`visible` leaves out. A row right before such
        an answer was shown for it, unless the run made it that is about to replace it."""
        shown = self._state.activities
        if not self._replacing or not shown:
            return shown
        messages = stable_ids(rows.messages, numbers=rows.numbers)
        names = [m["id"] for m in model_to_ui(messages)]
        places = before_each(names, shown)
        gone: set[str] = set()
        for run in self._replacing:
            numbered = zip(messages, rows.numbers, strict=True)
            hidden = {m.get("id") for m, number in numbered if _hides(run, number)}
            found = [place for place, name in enumerate(names) if name in hidden]
            gone |= {
                record.id
                for record, before in places
                if found and found[0] <= before <= found[-1] + 1 and record.run_id != run.run_id
            }
        return [record for record in shown if record.id not in gone]

    def timed(self, message: ModelMessage) -> ModelMessage:
        """With start and finish of the run that made it, if that was asked for."""
        tag = run_tag(message) if self._ended and message.get("role") == "assistant" else None
        run = self._ended.get(tag) if tag is not None else None
        if run is None:
            return message
        times = {"id": run.run_id, "startedAt": run.started_at, "finishedAt": run.finished_at}
        return with_tanstack(message, run={k: v for k, v in times.items() if v is not None})

    def drafts(self, rows: Rows) -> dict[int, list[ModelMessage]]:
        """Draft messages by the number of the row they stand behind (0: the end)."""
        if not self._state.drafts:
            return {}
        runs = {run.run_id: run for run in self._state.runs}
        shown = self.visible(rows)
        found: dict[int, list[ModelMessage]] = {}
        for draft in self._state.drafts:
            run = runs.get(draft.run_id)
            if run is None or run.terminal or (run.hide_from is not None and not self._live(run)):
                continue  # ended meanwhile, or a regenerate that died: the old answer is back
            messages = _not_stored(draft, rows)
            place = _behind(shown, run)
            if place is not None and messages:
                found.setdefault(place, []).extend(messages)
        return found

    def with_results(self, rows: Rows) -> tuple[Rows, dict[int, list[ModelMessage]]]:
        """What is visible, with the results that a continuation has drafted for stored calls in
        the messages that made them; and the rest of the drafts, as :meth:`drafts` gives them."""
        shown, drafts = self.visible(rows), self.drafts(rows)
        if not drafts:
            return shown, drafts
        held = {call["id"] for m in shown.messages for call in m.get("toolCalls") or ()}
        whole = Rows(from_start=shown.from_start)
        rest: dict[int, list[ModelMessage]] = {0: drafts[0]} if 0 in drafts else {}
        for message, number in zip(shown.messages, shown.numbers, strict=True):
            draft = drafts.get(number, [])
            results = list(takewhile(lambda m: m.get("toolCallId") in held, draft))
            whole.messages += [message, *results]
            whole.numbers += [number] * (1 + len(results))
            if draft[len(results) :]:
                rest[number] = draft[len(results) :]
        return whole, rest

    def _live(self, run: RunRecord) -> bool:
        return self._state.live(run)


def _not_stored(draft: DraftRecord, rows: Rows) -> list[ModelMessage]:
    stored = {m.get("id") for m in rows.messages if run_tag(m) == draft.run_id}
    return [cast("ModelMessage", m) for m in draft.messages if m.get("id") not in stored]


def _behind(shown: Rows, run: RunRecord) -> int | None:
    """Number of the last row of the turn that the run answers; None: not in sight."""
    anchor = anchor_of(run)
    if anchor is None:
        return shown.numbers[-1] if shown.numbers else 0
    ids = [m.get("id") for m in shown.messages]
    if anchor not in ids:
        return None
    at = ids.index(anchor)
    while at + 1 < len(ids) and shown.messages[at + 1].get("role") in ("assistant", "tool"):
        at += 1
    return shown.numbers[at]


def _hides(run: RunRecord, number: int) -> bool:
    first, last = run.hide_from, _extra_int(run, "hideThrough")
    return (
        first is not None and number >= first and (last is None or last < first or number <= last)
    )


def _extra_int(run: RunRecord, name: str) -> int | None:
    value = (run.model_extra or {}).get(name)
    return value if isinstance(value, int) else None
