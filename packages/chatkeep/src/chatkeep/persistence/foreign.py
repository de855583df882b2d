"""Stores that have no turn backend: read and written through their plain methods.

A messages store with revisions is spliced, never saved whole. One without is saved whole, as it
must be; whoever writes reads it again right before.

No call of theirs may take longer than :data:`ANSWER_SECONDS`: boundaries are carried to their
end also when their run is cancelled, and a store that never answers would hold a server's
shutdown for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from chatkeep.errors import BackendUnavailable, CompositionError, InterruptConflict, RunConflict
from chatkeep.persistence.boundary import Boundary
from chatkeep.persistence.layout import Layout, Part
from chatkeep.records import RunPatch
from chatkeep.stores import (
    BatchCommit,
    InterruptStore,
    MessageStore,
    RevisionedMessages,
    RunStore,
    Transcript,
)

__all__ = ["ANSWER_SECONDS", "answered", "load_messages", "write_part"]

_T = TypeVar("_T")

ANSWER_SECONDS: Final = 30.0
"""How long a store without a backend of ours may take for one call."""


async def answered(call: Awaitable[_T]) -> _T:
    """What a call of a foreign store returns.

    Raises:
        BackendUnavailable: it took too long; whether it was carried out is unknown.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await call
    except TimeoutError as error:
        raise BackendUnavailable(
            f"a store of the application did not answer within {ANSWER_SECONDS} s",
            outcome_unknown=True,
        ) from error


async def load_messages(store: MessageStore, thread_id: str) -> Transcript:
    """The transcript; a store without numbers counts places from 1."""
    if isinstance(store, RevisionedMessages):
        return await answered(store.load_transcript(thread_id))
    messages = await answered(store.load_thread(thread_id))
    return Transcript(
        messages=list(messages), numbers=list(range(1, len(messages) + 1)), revision=""
    )


async def write_part(
    layout: Layout, part: Part, boundary: Boundary, *, thread_id: str, run_id: str
) -> None:
    """Write one part of ``boundary``.

    Raises:
        ThreadConflict: a revisioned messages store was moved by somebody else.
        InterruptConflict: an answer or an interrupt that the store refuses; ``remaining`` lists
            the answers that are not settled when one failed in between.
        RunConflict: the run is of another thread, or has ended.
    """
    stores = layout.stores
    if part == "transcript":
        await _write_messages(layout.messages, thread_id, boundary)
    elif part == "run":
        if stores.runs is not None:
            await _write_run(stores.runs, thread_id, run_id, boundary)
    elif part == "activities":
        if stores.activities is not None and boundary.activities is not None:
            rows = boundary.activities.rows
            await answered(stores.activities.save_activities(thread_id, rows))
    elif stores.interrupts is not None:
        # Claims have no method: no backend of ours is there that could hold them.
        if part == "answers":
            await _write_answers(stores.interrupts, thread_id, boundary)
        elif part == "interrupts":
            await _write_interrupts(stores.interrupts, thread_id, boundary)


async def _write_messages(store: MessageStore, thread_id: str, boundary: Boundary) -> None:
    if boundary.cut is not None:
        raise CompositionError("this messages store keeps no cuts")
    change = boundary.change
    if change is None:
        return
    if isinstance(store, RevisionedMessages):
        result = await answered(
            store.splice_thread(
                thread_id, keep=change.keep, tail=change.tail, expected=change.expected
            )
        )
        change.settle(result.numbers, result.revision)
        return
    await answered(store.save_thread(thread_id, change.whole()))
    numbers = range(change.keep + 1, change.keep + len(change.tail) + 1)
    change.settle(list(numbers), "")


async def _write_interrupts(store: InterruptStore, thread_id: str, boundary: Boundary) -> None:
    for record in boundary.interrupts:
        if not await answered(store.create(record)):
            raise InterruptConflict(thread_id, [record.interrupt_id], "is already there")


async def _write_answers(store: InterruptStore, thread_id: str, boundary: Boundary) -> None:
    answers = boundary.answers
    if not answers:
        return
    if isinstance(store, BatchCommit):
        await answered(store.commit_batch(thread_id, list(answers)))
        return
    listed = await answered(store.list_pending(thread_id))
    pending = {(r.run_id, r.interrupt_id) for r in listed}
    refused = [a.interrupt_id for a in answers if (a.run_id, a.interrupt_id) not in pending]
    if refused:
        raise InterruptConflict(thread_id, refused, "not pending")
    for index, answer in enumerate(answers):
        name, run_id = answer.interrupt_id, answer.run_id
        try:
            if answer.status == "resolved":
                await answered(store.resolve(thread_id, name, answer.response, run_id=run_id))
            else:
                await answered(store.cancel(thread_id, name, run_id=run_id))
        except Exception as error:
            raise InterruptConflict(
                thread_id,
                [name],
                f"could not be settled ({error}); earlier answers of the batch are",
                remaining=[rest.interrupt_id for rest in answers[index:]],
            ) from error


async def _write_run(store: RunStore, thread_id: str, run_id: str, boundary: Boundary) -> None:
    run = boundary.run
    if run is None:
        return
    if isinstance(run, RunPatch):
        await answered(store.update(run_id, run, thread_id=thread_id))
        return
    stored = await answered(
        store.create_or_resume(
            run_id, thread_id, started_at=run.started_at, parent_run_id=run.parent_run_id
        )
    )
    if stored.thread_id != thread_id:
        raise RunConflict(run_id, "foreign-thread", thread_id=thread_id)
    if stored.terminal:
        raise RunConflict(run_id, "terminal", thread_id=thread_id)
    boundary.record = stored
