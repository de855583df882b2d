"""Who may start: the run id, and the questions that still wait for a human."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from chatkeep.errors import InterruptResumeError, RunConflict
from chatkeep.persistence.boundary import Opening
from chatkeep.records import InterruptRecord

__all__ = ["BINDING_KEY", "check_run", "check_waiting", "owned"]

BINDING_KEY = "tanstack:interruptBinding"
"""Metadata key of a descriptor that a chat engine of this family raised."""

_OWN_KINDS = frozenset({"approval", "client_tool"})


def check_run(opening: Opening, run_id: str, thread_id: str) -> None:
    """A run id is driven once: refuse one of another thread, one that is being driven, and
    one that has ended.

    Raises:
        RunConflict: ``foreign-thread``, ``running`` or ``terminal``.
    """
    if opening.foreign_run:
        raise RunConflict(run_id, "foreign-thread", thread_id=thread_id)
    run = opening.run
    if run is None:
        return
    if run.terminal:
        raise RunConflict(run_id, "terminal", thread_id=thread_id)
    now = opening.now
    driven = run.lease is not None and (now is None or run.lease.until > now)
    if driven or (run.status == "running" and run.lease is None):
        raise RunConflict(run_id, "running", thread_id=thread_id)


def owned(record: InterruptRecord) -> bool:
    """Whether a pending interrupt gates the chat. Only a well-formed descriptor with none of
    our marks is somebody else's; an opaque record is ours."""
    payload = record.payload
    if not all(isinstance(payload.get(key), str) for key in ("id", "reason", "message")):
        return True
    if isinstance(payload.get("toolCallId"), str):
        return True
    metadata = payload.get("metadata")
    if not isinstance(metadata, Mapping):
        return False
    marks = cast("Mapping[str, Any]", metadata)
    return marks.get("kind") in _OWN_KINDS or BINDING_KEY in marks


def check_waiting(
    thread_id: str,
    pending: Sequence[InterruptRecord],
    resume: Sequence[Mapping[str, Any]],
    *,
    run_id: str,
    parent_run_id: str | None,
) -> None:
    """Refuse a post that ignores a waiting question, and an answer to none.

    Nothing is written by either. An answer to a waiting question is refused as ``stale``:
    this engine raises no interrupts yet, so nobody here can say what a valid answer is.

    Raises:
        InterruptResumeError: with the item and batch errors that the client expects.
    """
    waiting = [record for record in pending if owned(record)]
    if not waiting and not resume:
        return
    sent = [str(entry.get("interruptId")) for entry in resume]
    if not waiting:
        raise _refusal(
            thread_id,
            parent_run_id or run_id,
            item=("unknown-interrupt", sent[0], "no interrupt of this thread is pending"),
            batch=("incomplete-batch", sent, "nothing of this thread waits for an answer"),
            source="client",
        )
    first = waiting[0]
    if not resume:
        raise _refusal(
            thread_id,
            first.run_id,
            item=("unknown-interrupt", first.interrupt_id, "the interrupt waits for an answer"),
            batch=("incomplete-batch", sent, "answer what is pending before sending more"),
            source="client",
        )
    raise _refusal(
        thread_id,
        first.run_id,
        item=("stale", first.interrupt_id, "nothing here knows how to take this answer"),
        batch=("item-validation-failed", sent, "the batch cannot be checked"),
        source="server",
    )


def _refusal(
    thread_id: str,
    interrupted_run_id: str,
    *,
    item: tuple[str, str, str],
    batch: tuple[str, list[str], str],
    source: str,
) -> InterruptResumeError:
    common = {
        "source": source,
        "retryable": False,
        "threadId": thread_id,
        "interruptedRunId": interrupted_run_id,
        "generation": 0,
    }
    code, interrupt_id, message = item
    batch_code, sent, batch_message = batch
    return InterruptResumeError(
        [
            {
                "scope": "item",
                "code": code,
                "message": message,
                "interruptId": interrupt_id,
                **common,
            },
            {
                "scope": "batch",
                "code": batch_code,
                "message": batch_message,
                "interruptIds": sent,
                **common,
            },
        ]
    )
