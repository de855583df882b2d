"""The page load: everything that a freshly opened client needs to show a thread."""

from __future__ import annotations

from typing import Any, TypeAlias

from chatkeep._bag import Persistence
from chatkeep.messages import interleave_activities, model_to_ui
from chatkeep.persistence.layout import chat_layout
from chatkeep.persistence.loading import Loader, Rows, ThreadState
from chatkeep.persistence.overlay import Overlay
from chatkeep.persistence.paging import (
    MAX_PAGE,
    Cursor,
    Page,
    Unit,
    group_rows,
    interleaved,
    is_before,
    newest_units,
    units_of,
)
from chatkeep.records import ModelMessage, RunRecord

__all__ = ["hydrate_thread"]

_UiMessages: TypeAlias = list[dict[str, Any]]


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
    if size is None:
        before = None
    loader = Loader(layout, thread_id, size=size, before=before, every_run=include_runs)
    state = await loader.load()
    overlay = Overlay(state, timed=include_runs)
    cursor: str | None = None
    if layout.backend("messages") is None:
        ui, cursor = _foreign_page(state, overlay, size, before)
    elif size is None:
        ui = _everything(state, overlay)
    elif loader.nothing_older:
        ui = []
    elif any(record.anchor is None for record in state.activities):
        ui, cursor = _shown(await _among_activities(loader, state, overlay, size))
    else:
        ui, cursor = _shown(await _window(loader, state, overlay, size))
    body: dict[str, Any] = {
        "messages": ui,
        "activeRun": state.active_run(),
        "interrupts": state.interrupts(),
        # What a running regenerate hides was on the screen of whoever asked for it.
        "seen": state.rows.numbers[-1] if state.rows.numbers and state.numbered else 0,
    }
    if size is not None:
        body["page"] = (
            {"truncated": False} if cursor is None else {"truncated": True, "cursor": cursor}
        )
    if include_runs:
        body["runs"] = [_timing(run) for run in state.runs if run.terminal]
    return body


def _everything(state: ThreadState, overlay: Overlay) -> _UiMessages:
    shown = overlay.visible(state.rows)
    drafts = overlay.drafts(state.rows)
    if drafts:
        whole = Rows()
        for message, number in zip(shown.messages, shown.numbers, strict=True):
            whole.messages += [message, *drafts.get(number, ())]
            whole.numbers += [number] + [0] * len(drafts.get(number, ()))
        whole.messages += drafts.get(0, ())
        whole.numbers += [0] * len(drafts.get(0, ()))
        shown = whole
    ui = model_to_ui(shown.messages, numbers=shown.numbers)
    return interleave_activities(ui, overlay.activities(state.rows))


async def _window(loader: Loader, state: ThreadState, overlay: Overlay, size: int) -> Page:
    rows, cursor = state.rows, loader.cursor
    while True:
        shown, rest = overlay.with_results(rows)
        groups, sure = group_rows(shown.messages, shown.numbers, from_start=rows.from_start)
        drafts = _painted(rest)
        units = units_of(groups[sure:], drafts)
        if 0 in drafts:
            units.append(Unit(drafts[0], Cursor(state.newest + 1)))
        if state.activities:
            units = interleaved(
                units,
                overlay.activities(rows),
                end=state.newest + 1 if cursor is None else cursor.number,
                whole=cursor is None and rows.from_start,
            )
            units = [unit for unit in units if cursor is None or is_before(unit.cursor, cursor)]
        enough = sum(len(unit.ui) for unit in units[1:]) >= size
        if enough or rows.from_start:
            return newest_units(units, size, more=not rows.from_start)
        rows = await loader.older(rows)


async def _among_activities(
    loader: Loader, state: ThreadState, overlay: Overlay, size: int
) -> Page:
    """Rows without an anchor have positions that count from the start of the thread, so all of it
    is read."""
    rows = state.rows
    while not rows.from_start:
        rows = await loader.older(rows)
    shown, rest = overlay.with_results(rows)
    groups, _ = group_rows(shown.messages, shown.numbers, from_start=True)
    cursor = loader.cursor
    drafts = _painted(rest)
    units = units_of(groups, drafts)
    if 0 in drafts:
        units.append(Unit(drafts[0], Cursor(state.newest + 1)))
    units = interleaved(
        units,
        overlay.activities(rows),
        end=state.newest + 1 if cursor is None else cursor.number,
        whole=cursor is None or cursor.number > state.newest,
    )
    if cursor is not None:
        units = [unit for unit in units if is_before(unit.cursor, cursor)]
    return newest_units(units, size, more=False)


def _foreign_page(
    state: ThreadState, overlay: Overlay, size: int | None, before: str | None
) -> tuple[_UiMessages, str | None]:
    """A store of whole lists: cut by the ids of UI messages."""
    ui = _everything(state, overlay)
    if size is None:
        return ui, None
    end = len(ui)
    if before is not None:
        places = [i for i, message in enumerate(ui) if message.get("id") == before]
        end = places[0] if places else 0
    start = max(0, end - size)
    return ui[start:end], ui[start].get("id") if start > 0 else None


def _painted(drafts: dict[int, list[ModelMessage]]) -> dict[int, _UiMessages]:
    return {
        number: model_to_ui(messages, numbers=[0] * len(messages))
        for number, messages in drafts.items()
    }


def _shown(page: Page) -> tuple[_UiMessages, str | None]:
    return page.ui, None if page.cursor is None else str(page.cursor)


def _timing(run: RunRecord) -> dict[str, Any]:
    times: dict[str, Any] = {
        "runId": run.run_id,
        "status": run.status,
        "startedAt": run.started_at,
    }
    if run.finished_at is not None:
        times["finishedAt"] = run.finished_at
    return times
