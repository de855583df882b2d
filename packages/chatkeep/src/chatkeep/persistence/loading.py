"""What a page load reads, one read a backend, and what it knows about runs.

Across backends the run is read before the transcript: a finish writes the transcript first, so
"no active run" means that the transcript read afterwards is final.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chatkeep.engine.interrupts import owned
from chatkeep.persistence.claims import with_claims, without_stand_ins
from chatkeep.persistence.foreign import answered, load_messages
from chatkeep.persistence.layout import Layout
from chatkeep.persistence.paging import Cursor
from chatkeep.persistence.reading import read_view
from chatkeep.records import (
    ActivityRecord,
    DraftRecord,
    InterruptRecord,
    ModelMessage,
    RunRecord,
)
from chatkeep.stores import RevisionedMessages, RunHistory, StoreKey, ThreadView, ViewQuery

__all__ = ["Loader", "Rows", "ThreadState"]


@dataclass(slots=True)
class Rows:
    """Rows of the transcript, oldest first."""

    messages: list[ModelMessage] = field(default_factory=list[ModelMessage])
    numbers: list[int] = field(default_factory=list[int])
    from_start: bool = True


@dataclass(slots=True)
class ThreadState:
    """A thread as it was read. ``newest`` is its highest number, whatever rows were read;
    ``numbered``: the numbers are sequence numbers, not places."""

    rows: Rows = field(default_factory=Rows)
    numbered: bool = True
    newest: int = 0
    now: int | None = None
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    drafts: list[DraftRecord] = field(default_factory=list[DraftRecord])
    pending: list[InterruptRecord] = field(default_factory=list[InterruptRecord])
    stand_ins: list[InterruptRecord] = field(default_factory=list[InterruptRecord])
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])

    def live(self, run: RunRecord) -> bool:
        """Whether somebody may be driving the run."""
        return run.live(self.now) if self.now is not None else not run.terminal

    def active_run(self) -> dict[str, Any] | None:
        """``{"runId"}`` of the run to join: the one that claimed an answer, else the running
        one that started last."""
        for record in self.pending:
            if record.claimed_by is not None:
                return {"runId": record.claimed_by}
        running = [run for run in self.runs if run.status == "running" and self.live(run)]
        return {"runId": running[-1].run_id} if running else None

    def interrupts(self) -> dict[str, Any] | None:
        """The questions that wait, each with ``owner``; None if there are none.

        Where several runs wait, the one that asked first: a client takes the answers of one
        run at a time, and sends nothing while it shows a question that it cannot answer.
        """
        waiting = [record for record in self.pending if record.claimed_by is None]
        own = [record for record in waiting if owned(record.payload)]
        if not waiting:
            return None
        run_id = (own or waiting)[0].run_id
        return {
            "runId": run_id,
            "pending": [
                {**record.payload, "owner": owned(record.payload)}
                for record in waiting
                if record.run_id == run_id or not owned(record.payload)
            ],
        }


class Loader:
    """Reads a thread for a page of ``size`` UI messages before ``before`` (None: all of it)."""

    def __init__(
        self,
        layout: Layout,
        thread_id: str,
        *,
        size: int | None,
        before: str | None,
        every_run: bool,
    ) -> None:
        self._layout = layout
        self._thread_id = thread_id
        self._size = size
        self._newest_page = before is None
        self.cursor = None if before is None else Cursor.parse(before)
        self.nothing_older = before is not None and (self.cursor is None or self.cursor.number < 1)
        """The cursor is none, or nothing can stand before it."""
        self._every_run = every_run

    async def load(self) -> ThreadState:
        """Everything that the first page needs."""
        state = ThreadState()
        keys: tuple[StoreKey, ...] = ("runs", "activities", "messages", "interrupts")
        wanted: list[StoreKey] = [key for key in keys if key in self._layout.stores.present()]
        readers = self._layout.readers(wanted)
        done: set[StoreKey] = set()
        for key in wanted:
            if key in done:
                continue
            backend = self._layout.backend(key)
            if backend is None:
                await self._read_foreign(key, state)
                continue
            served = next(keys for _, keys in readers if key in keys)
            view = await read_view(backend, self._thread_id, self._query(served))
            _take(view, served, state)
            done |= served
        await self._find_lost_runs(state)
        return state

    async def older(self, rows: Rows) -> Rows:
        """``rows`` with at least as many older ones in front."""
        backend = self._layout.backend("messages")
        if backend is None:
            raise AssertionError("a foreign store is read whole")
        query = ViewQuery(
            messages="bodies",
            runs="none",
            interrupts="none",
            before=rows.numbers[0] if rows.numbers else self._before,
            limit=max(64, len(rows.numbers)),
        )
        view = await read_view(backend, self._thread_id, query)
        return Rows(
            [*view.messages, *rows.messages],
            [*view.numbers, *rows.numbers],
            from_start=not view.truncated,
        )

    @property
    def _before(self) -> int | None:
        return None if self.cursor is None else self.cursor.number

    def _query(self, served: set[StoreKey]) -> ViewQuery:
        messages = "messages" in served and not self.nothing_older
        runs = "runs" in served
        # Tool rows and segments make a message of several rows.
        chunk = None if self._size is None else 2 * self._size + 8
        return ViewQuery(
            messages="bodies" if messages else "none",
            limit=chunk if messages else None,
            before=self._before if messages else None,
            runs="none" if not runs else "all" if self._every_run else "active",
            interrupts="pending" if self._layout.shows_claims(served) else "none",
            activities="activities" in served,
            drafts=runs and self._newest_page,
        )

    async def _read_foreign(self, key: StoreKey, state: ThreadState) -> None:
        stores, thread_id = self._layout.stores, self._thread_id
        if key == "messages":
            found = await load_messages(self._layout.messages, thread_id)
            state.rows = Rows(found.messages, found.numbers)
            state.numbered = isinstance(self._layout.messages, RevisionedMessages)
        elif key == "runs" and stores.runs is not None:
            active = await answered(stores.runs.find_active_run(thread_id))
            state.runs = [] if active is None else [active]
            if self._every_run and isinstance(stores.runs, RunHistory):
                every = await answered(stores.runs.list_by_thread(thread_id))
                state.runs = [run for run in every if run.terminal] + state.runs
        elif key == "interrupts" and stores.interrupts is not None:
            state.pending = with_claims(
                await answered(stores.interrupts.list_pending(thread_id)), state.stand_ins
            )
        elif key == "activities" and stores.activities is not None:
            state.activities = list(await answered(stores.activities.load_activities(thread_id)))

    async def _find_lost_runs(self, state: ThreadState) -> None:
        """Drafts of runs whose process died are shown too, until a sweep has settled them;
        their records are none of the active ones."""
        backend = self._layout.backend("runs")
        known = {run.run_id for run in state.runs}
        for draft in state.drafts:
            if backend is not None and draft.run_id not in known:
                query = ViewQuery(
                    messages="none", run_id=draft.run_id, runs="none", interrupts="none"
                )
                run = (await read_view(backend, self._thread_id, query)).run
                if run is not None:
                    state.runs.append(run)


def _take(view: ThreadView, served: set[StoreKey], state: ThreadState) -> None:
    if "runs" in served:
        state.now, state.runs, state.drafts = view.now, list(view.runs), view.drafts
    if "interrupts" in served:
        state.pending = without_stand_ins(view.interrupts)
    else:
        state.stand_ins += view.interrupts
    if "activities" in served:
        state.activities = view.activities
    if "messages" in served:
        state.newest = view.newest
        state.rows = Rows(view.messages, view.numbers, from_start=not view.truncated)
