"""The page load: everything that a freshly opened client needs to show a thread.

Across backends the run is read before the transcript: a finish writes the transcript first, so
"no active run" means that the transcript read afterwards is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from chatkeep._bag import Persistence
from chatkeep.messages import interleave_activities, model_to_ui
from chatkeep.persistence.gate import owned
from chatkeep.persistence.layout import Layout, chat_layout
from chatkeep.persistence.paging import (
    MAX_PAGE,
    Cursor,
    Page,
    Unit,
    group_rows,
    newest_units,
    units_of,
)
from chatkeep.persistence.reading import read_view
from chatkeep.persistence.transcript import run_tag, with_tanstack
from chatkeep.records import (
    ActivityRecord,
    DraftRecord,
    InterruptRecord,
    ModelMessage,
    RunRecord,
)
from chatkeep.stores import (
    RunHistory,
    StoreKey,
    ThreadView,
    TurnBackend,
    ViewQuery,
)

__all__ = ["hydrate_thread"]


async def hydrate_thread(
    persistence: Persistence,
    thread_id: str,
    *,
    limit: int | None = None,
    before: str | None = None,
    include_runs: bool = False,
) -> dict[str, Any]:
    """The JSON body of a page load.

    ``messages`` are UI messages, oldest first, with activity rows in their places and what
    running runs have drafted so far. ``activeRun`` is ``{"runId"}`` of the run that is being
    driven, or None; a continuation is reported through its claim instead of the question it
    answers. ``interrupts`` is None or ``{"runId", "pending"}``: the stored descriptors, each with
    ``owner``: whether it is this chat's own, which gates new input. ``seen`` is the highest
    sequence number shown. ``page`` stands there when a limit was given: ``{"truncated": False}`` or
    ``{"truncated": True, "cursor"}``; pass the cursor as ``before`` for the older page.

    An unknown thread is an empty one. A cursor that is none of this thread's gives an empty last
    page.

    Args:
        persistence: the stores; scope them first where tenants share a database.
        thread_id: the thread.
        limit: UI messages in the window, at most 500 (more counts as 500); None, or less
            than 1: the whole thread.
        before: a cursor; only with a limit.
        include_runs: add ``runs``: the ended runs, and their times on the messages they made.

    Raises:
        CompositionError: there is no messages store.
        StoreError: a store could not be read.
    """
    layout = chat_layout(persistence, "hydrate_thread", hydrate=True)
    size = min(limit, MAX_PAGE) if limit is not None and limit >= 1 else None
    reader = _Reader(layout, thread_id, size, before if size is not None else None)
    return await reader.body(include_runs=include_runs)


@dataclass(slots=True)
class _State:
    """What stands beside the messages."""

    now: int | None = None
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    drafts: list[DraftRecord] = field(default_factory=list[DraftRecord])
    pending: list[InterruptRecord] = field(default_factory=list[InterruptRecord])
    activities: list[ActivityRecord] = field(default_factory=list[ActivityRecord])


@dataclass(slots=True)
class _Rows:
    """Rows of the transcript, oldest first; ``numbers`` only where the store has them."""

    messages: list[ModelMessage]
    numbers: list[int]
    from_start: bool


class _Reader:
    def __init__(
        self, layout: Layout, thread_id: str, size: int | None, before: str | None
    ) -> None:
        self._layout = layout
        self._thread_id = thread_id
        self._size = size
        self._before = before
        self._cursor = None if before is None else Cursor.parse(before)
        self._backend = layout.backend("messages")
        self._state = _State()
        self._seen = 0
        self._newest = 0
        self._timings: dict[str, RunRecord] = {}

    async def body(self, *, include_runs: bool) -> dict[str, Any]:
        rows = await self._read(include_runs)
        await self._find_lost_runs()
        ended = [run for run in self._state.runs if run.terminal]
        if include_runs:
            self._timings = {run.run_id: run for run in ended}
        page = await self._page(rows)
        body: dict[str, Any] = {
            "messages": page.ui,
            "activeRun": self._active_run(),
            "interrupts": self._interrupts(),
            "seen": self._seen,
        }
        if self._size is not None:
            body["page"] = (
                {"truncated": False}
                if page.cursor is None
                else {"truncated": True, "cursor": page.cursor}
            )
        if include_runs:
            body["runs"] = [_timing(run) for run in ended]
        return body

    # -- reading ----------------------------------------------------------------------

    async def _read(self, include_runs: bool) -> _Rows:
        rows: _Rows | None = None
        keys: tuple[StoreKey, ...] = ("runs", "activities", "messages", "interrupts")
        wanted: list[StoreKey] = [key for key in keys if key in self._layout.stores.present()]
        views: dict[StoreKey, ThreadView] = {}
        readers = self._layout.readers(wanted)
        for key in wanted:
            backend = self._layout.backend(key)
            if backend is None:
                if key == "messages":
                    rows = await self._foreign_rows()
                else:
                    await self._read_foreign(key, include_runs)
            elif key not in views:
                served = next(s for _, s in readers if key in s)
                view = await read_view(backend, self._thread_id, self._query(served, include_runs))
                views.update(dict.fromkeys(served, view))
                self._take(view, served)
                if "messages" in served:
                    rows = self._rows_of(view)
        if rows is None:
            raise AssertionError("a layout always has messages")
        return rows

    def _query(self, served: set[StoreKey], include_runs: bool) -> ViewQuery:
        wants_messages = "messages" in served and not self._nothing_older
        runs = "runs" in served
        return ViewQuery(
            messages="bodies" if wants_messages else "none",
            limit=self._chunk if wants_messages else None,
            before=self._read_before if wants_messages else None,
            runs="none" if not runs else "all" if include_runs else "active",
            interrupts="pending" if "interrupts" in served else "none",
            activities="activities" in served,
            drafts=runs and self._before is None,
        )

    @property
    def _nothing_older(self) -> bool:
        return self._before is not None and (self._cursor is None or self._cursor.number < 1)

    @property
    def _chunk(self) -> int | None:
        """Rows to read at once: tool rows and segments make a message of several rows."""
        return None if self._size is None else 2 * self._size + 8

    @property
    def _read_before(self) -> int | None:
        return None if self._cursor is None else self._cursor.number

    def _take(self, view: ThreadView, served: set[StoreKey]) -> None:
        state = self._state
        if "runs" in served:
            state.now, state.runs, state.drafts = view.now, view.runs, view.drafts
        if "interrupts" in served:
            state.pending = view.interrupts
        if "activities" in served:
            state.activities = view.activities

    def _rows_of(self, view: ThreadView) -> _Rows:
        self._newest = view.newest
        return _Rows(view.messages, view.numbers, from_start=not view.truncated)

    async def _foreign_rows(self) -> _Rows:
        messages = await self._layout.messages.load_thread(self._thread_id)
        return _Rows(list(messages), [], from_start=True)

    async def _read_foreign(self, key: StoreKey, include_runs: bool) -> None:
        stores, state = self._layout.stores, self._state
        if key == "runs" and stores.runs is not None:
            active = await stores.runs.find_active_run(self._thread_id)
            state.runs = [] if active is None else [active]
            if include_runs and isinstance(stores.runs, RunHistory):
                every = await stores.runs.list_by_thread(self._thread_id)
                state.runs = [run for run in every if run.terminal] + state.runs
        elif key == "interrupts" and stores.interrupts is not None:
            state.pending = list(await stores.interrupts.list_pending(self._thread_id))
        elif key == "activities" and stores.activities is not None:
            state.activities = list(await stores.activities.load_activities(self._thread_id))

    async def _find_lost_runs(self) -> None:
        """Drafts of runs whose process died are shown too, until a sweep has settled them;
        their records are none of the active ones."""
        backend = self._layout.backend("runs")
        known = {run.run_id for run in self._state.runs}
        for draft in self._state.drafts:
            if backend is not None and draft.run_id not in known:
                query = ViewQuery(
                    messages="none", run_id=draft.run_id, runs="none", interrupts="none"
                )
                run = (await read_view(backend, self._thread_id, query)).run
                if run is not None:
                    self._state.runs.append(run)

    # -- runs and interrupts ------------------------------------------------------------

    def _live(self, run: RunRecord) -> bool:
        return run.live(self._state.now) if self._state.now is not None else not run.terminal

    def _active_run(self) -> dict[str, Any] | None:
        for record in self._state.pending:
            if record.claimed_by is not None:
                return {"runId": record.claimed_by}
        running = [r for r in self._state.runs if r.status == "running" and self._live(r)]
        return {"runId": running[-1].run_id} if running else None

    def _interrupts(self) -> dict[str, Any] | None:
        waiting = [record for record in self._state.pending if record.claimed_by is None]
        if not waiting:
            return None
        own = [record for record in waiting if owned(record)] or waiting
        return {
            "runId": own[0].run_id,
            "pending": [{**record.payload, "owner": owned(record)} for record in waiting],
        }

    # -- messages -----------------------------------------------------------------------

    async def _page(self, rows: _Rows) -> _TextPage:
        if self._backend is None:
            return self._foreign_page(rows)
        if rows.numbers:
            # What a running regenerate hides was on the screen of whoever asked for it.
            self._seen = rows.numbers[-1]
        if self._size is None:
            return _TextPage(self._everything(rows), None)
        if self._nothing_older:
            return _TextPage([], None)
        if self._state.activities:
            return _shown(await self._with_activities(rows))
        return _shown(await self._window(self._backend, rows, self._size))

    async def _window(self, backend: TurnBackend, rows: _Rows, size: int) -> Page:
        while True:
            shown = self._visible(rows)
            groups, sure = group_rows(shown.messages, shown.numbers, from_start=rows.from_start)
            drafts = self._draft_ui(rows)
            units = units_of(groups[sure:], drafts)
            if 0 in drafts:
                units.append(Unit(drafts[0], Cursor(rows.numbers[-1] + 1 if rows.numbers else 1)))
            enough = sum(len(unit.ui) for unit in units[1:]) >= size
            if enough or rows.from_start:
                return newest_units(units, size, more=not rows.from_start)
            rows = await self._older(backend, rows)

    async def _older(self, backend: TurnBackend, rows: _Rows) -> _Rows:
        query = ViewQuery(
            messages="bodies",
            runs="none",
            interrupts="none",
            before=rows.numbers[0] if rows.numbers else self._read_before,
            limit=max(64, len(rows.numbers)),
        )
        view = await read_view(backend, self._thread_id, query)
        return _Rows(
            [*view.messages, *rows.messages],
            [*view.numbers, *rows.numbers],
            from_start=not view.truncated,
        )

    def _everything(self, rows: _Rows) -> list[dict[str, Any]]:
        shown = self._visible(rows)
        drafts = self._draft_rows(rows)
        if drafts:
            messages: list[ModelMessage] = []
            numbers: list[int] = []
            for message, number in zip(shown.messages, shown.numbers, strict=True):
                messages.append(message)
                numbers.append(number)
                messages.extend(drafts.get(number, ()))
                numbers.extend([0] * len(drafts.get(number, ())))
            messages.extend(drafts.get(0, ()))
            numbers.extend([0] * len(drafts.get(0, ())))
            shown = _Rows(messages, numbers, from_start=True)
        ui = model_to_ui(shown.messages, numbers=shown.numbers)
        return interleave_activities(ui, self._state.activities)

    async def _with_activities(self, rows: _Rows) -> Page:
        """Positions of activities count from the start of the thread, so all of it is read."""
        while not rows.from_start and self._backend is not None:
            rows = await self._older(self._backend, rows)
        shown = self._visible(rows)
        groups, _ = group_rows(shown.messages, shown.numbers, from_start=True)
        cursor = self._cursor
        to_the_end = cursor is None or cursor.number > self._newest
        end = self._newest + 1 if cursor is None else cursor.number
        units = _interleaved(
            units_of(groups, self._draft_ui(rows)),
            self._state.activities,
            end=end,
            to_the_end=to_the_end,
        )
        if cursor is not None:
            units = [unit for unit in units if _is_before(unit.cursor, cursor)]
        return newest_units(units, self._size or MAX_PAGE, more=False)

    def _visible(self, rows: _Rows) -> _Rows:
        """Without what a regenerate that is being driven is about to replace; with the times
        of ended runs where they were asked for."""
        hidden = [
            (run.hide_from, _extra_int(run, "hideThrough"))
            for run in self._state.runs
            if run.hide_from is not None and run.status == "running" and self._live(run)
        ]
        if not hidden and not self._timings:
            return rows
        kept = [
            (self._timed(message), number)
            for message, number in zip(rows.messages, rows.numbers, strict=True)
            if not any(_hides(first, last, number) for first, last in hidden)
        ]
        return _Rows([m for m, _ in kept], [n for _, n in kept], rows.from_start)

    def _timed(self, message: ModelMessage) -> ModelMessage:
        tag = run_tag(message) if self._timings and message.get("role") == "assistant" else None
        run = self._timings.get(tag) if tag is not None else None
        if run is None:
            return message
        times = {"id": run.run_id, "startedAt": run.started_at, "finishedAt": run.finished_at}
        return with_tanstack(message, run={k: v for k, v in times.items() if v is not None})

    # -- drafts -------------------------------------------------------------------------

    def _draft_ui(self, rows: _Rows) -> dict[int, list[dict[str, Any]]]:
        return {
            number: model_to_ui(messages, numbers=[0] * len(messages))
            for number, messages in self._draft_rows(rows).items()
        }

    def _draft_rows(self, rows: _Rows) -> dict[int, list[ModelMessage]]:
        """Draft messages by the number of the row they stand behind (0: the end)."""
        if not self._state.drafts or self._before is not None:
            return {}
        runs = {run.run_id: run for run in self._state.runs}
        found: dict[int, list[ModelMessage]] = {}
        for draft in self._state.drafts:
            run = runs.get(draft.run_id)
            if run is None or run.terminal or (run.hide_from is not None and not self._live(run)):
                continue  # ended meanwhile, or a regenerate that died: the old answer is back
            stored = {m.get("id") for m in rows.messages if run_tag(m) == run.run_id}
            messages = [
                cast("ModelMessage", m) for m in draft.messages if m.get("id") not in stored
            ]
            place = self._behind(rows, run)
            if place is not None and messages:
                found.setdefault(place, []).extend(messages)
        return found

    def _behind(self, rows: _Rows, run: RunRecord) -> int | None:
        """Number of the last shown row of the turn that the run answers; None: not in sight."""
        anchor = (run.model_extra or {}).get("anchorId")
        shown = self._visible(rows)
        if anchor is None:
            return shown.numbers[-1] if shown.numbers else 0
        ids = [m.get("id") for m in shown.messages]
        if anchor not in ids:
            return None
        at = ids.index(anchor)
        while at + 1 < len(ids) and shown.messages[at + 1].get("role") in ("assistant", "tool"):
            at += 1
        return shown.numbers[at]

    # -- foreign plain stores ---------------------------------------------------------------

    def _foreign_page(self, rows: _Rows) -> _TextPage:
        """A store of whole lists: cut by the ids of UI messages."""
        messages = [self._timed(m) for m in rows.messages]
        ui = interleave_activities(model_to_ui(messages), self._state.activities)
        if self._size is None:
            return _TextPage(ui, None)
        end = len(ui)
        if self._before is not None:
            places = [i for i, message in enumerate(ui) if message.get("id") == self._before]
            end = places[0] if places else 0
        start = max(0, end - self._size)
        cursor = ui[start].get("id") if start > 0 else None
        return _TextPage(ui[start:end], cursor)


@dataclass(frozen=True, slots=True)
class _TextPage:
    ui: list[dict[str, Any]]
    cursor: str | None


def _shown(page: Page) -> _TextPage:
    return _TextPage(page.ui, None if page.cursor is None else str(page.cursor))


def _interleaved(
    units: Sequence[Unit], activities: Sequence[ActivityRecord], *, end: int, to_the_end: bool
) -> list[Unit]:
    """Activity rows as units of their own, at their positions among the UI messages.

    ``units`` are those of the messages numbered below ``end``; ``to_the_end``: there are no
    others. Rows that stand behind a message from ``end`` on are left out.
    """
    out: list[Unit] = []
    waiting = sorted(activities, key=lambda record: record.index)
    position = 0
    for unit in units:
        due = _due(waiting, position)
        del waiting[: len(due)]
        out.extend(_activity_units(due, unit.cursor.number))
        out.append(unit)
        position += len(due) + len(unit.ui)
    out.extend(_activity_units(waiting if to_the_end else _due(waiting, position), end))
    return out


def _due(waiting: Sequence[ActivityRecord], position: int) -> list[ActivityRecord]:
    """The rows that stand at ``position``: each one moves the place by one."""
    count = 0
    while count < len(waiting) and waiting[count].index <= position + count:
        count += 1
    return list(waiting[:count])


def _activity_units(records: Sequence[ActivityRecord], number: int) -> list[Unit]:
    rows = interleave_activities([], records)
    return [Unit([row], Cursor(number, len(rows) - i)) for i, row in enumerate(rows)]


def _is_before(one: Cursor, other: Cursor) -> bool:
    if one.number != other.number:
        return one.number < other.number
    return one.activities > other.activities


def _hides(first: int, last: int | None, number: int) -> bool:
    return number >= first and (last is None or last < first or number <= last)


def _extra_int(run: RunRecord, name: str) -> int | None:
    value = (run.model_extra or {}).get(name)
    return value if isinstance(value, int) else None


def _timing(run: RunRecord) -> dict[str, Any]:
    times: dict[str, Any] = {
        "runId": run.run_id,
        "status": run.status,
        "startedAt": run.started_at,
    }
    if run.finished_at is not None:
        times["finishedAt"] = run.finished_at
    return times
