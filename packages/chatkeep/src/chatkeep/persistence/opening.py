"""What a turn reads to begin: one read a backend, one call a foreign store."""

from __future__ import annotations

from collections.abc import Mapping

from chatkeep.persistence.boundary import Opening
from chatkeep.persistence.claims import with_claims, without_stand_ins
from chatkeep.persistence.foreign import answered, load_messages
from chatkeep.persistence.layout import Layout
from chatkeep.persistence.reading import read_view
from chatkeep.records import ActivityRecord, InterruptRecord, RunRecord
from chatkeep.stores import NO_THREAD, StoreKey, ThreadView, Transcript, ViewQuery

__all__ = ["read_gate", "read_opening", "transcript_of"]

_Views = Mapping[StoreKey, ThreadView]


async def read_opening(layout: Layout, thread_id: str, run_id: str) -> Opening:
    """Messages, the run, pending interrupts and activities."""
    return await _read(layout, thread_id, run_id, transcript=True)


async def read_gate(layout: Layout, thread_id: str, run_id: str) -> Opening:
    """The run and the pending interrupts alone."""
    return await _read(layout, thread_id, run_id, transcript=False)


async def _read(layout: Layout, thread_id: str, run_id: str, *, transcript: bool) -> Opening:
    keys: tuple[StoreKey, ...] = ("runs", "interrupts", "messages", "activities")
    views: dict[StoreKey, ThreadView] = {}
    for backend, served in layout.readers(keys):
        claims = layout.shows_claims(served)
        if not (transcript or claims or "runs" in served):
            continue
        query = ViewQuery(
            messages="bodies" if transcript and "messages" in served else "none",
            run_id=run_id if "runs" in served else None,
            runs="active" if "runs" in served else "none",
            interrupts="pending" if claims else "none",
            activities=transcript and "activities" in served,
        )
        views.update(dict.fromkeys(served, await read_view(backend, thread_id, query)))
    run, foreign = await _run(layout, views, thread_id, run_id)
    pending = await _pending(layout, views, thread_id)
    state = views.get("runs")
    return Opening(
        transcript=await _messages(layout, views, thread_id) if transcript else _NOTHING,
        now=None if state is None else state.now,
        run=run,
        foreign_run=foreign,
        live=[] if state is None else [other for other in state.runs if other.run_id != run_id],
        pending=pending,
        activities=await _activities(layout, views, thread_id) if transcript else [],
    )


_NOTHING = Transcript(messages=[], numbers=[], revision=NO_THREAD)


async def _run(
    layout: Layout, views: _Views, thread_id: str, run_id: str
) -> tuple[RunRecord | None, bool]:
    """The run, and whether the id is of another thread."""
    if "runs" in views:
        return views["runs"].run, views["runs"].foreign_run
    runs = layout.stores.runs
    found = None if runs is None else await answered(runs.get(run_id))
    if found is not None and found.thread_id != thread_id:
        return None, True
    return found, False


async def _pending(layout: Layout, views: _Views, thread_id: str) -> list[InterruptRecord]:
    if "interrupts" in views:
        return without_stand_ins(views["interrupts"].interrupts)
    interrupts = layout.stores.interrupts
    if interrupts is None:
        return []
    stand_ins = [record for view in views.values() for record in view.interrupts]
    return with_claims(await answered(interrupts.list_pending(thread_id)), stand_ins)


async def _messages(layout: Layout, views: _Views, thread_id: str) -> Transcript:
    if "messages" in views:
        return transcript_of(views["messages"])
    return await load_messages(layout.messages, thread_id)


async def _activities(layout: Layout, views: _Views, thread_id: str) -> list[ActivityRecord]:
    if "activities" in views:
        return list(views["activities"].activities)
    activities = layout.stores.activities
    return [] if activities is None else list(await answered(activities.load_activities(thread_id)))


def transcript_of(view: ThreadView) -> Transcript:
    """The transcript of a view."""
    return Transcript(messages=view.messages, numbers=view.numbers, revision=view.revision)
