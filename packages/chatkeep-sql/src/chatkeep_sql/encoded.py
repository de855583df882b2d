"""A commit with its values already judged and turned into what the columns take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chatkeep.codec import FORMAT_VERSION, encode
from chatkeep.records import UNSET, InterruptRecord
from chatkeep.rules import Entry, encode_messages, is_child_thread, pending_interrupt
from chatkeep.scope import Scope, key_digest
from chatkeep.stores import ActivitiesWrite, RunStart, TurnCommit
from chatkeep_sql.head import commit_mark
from chatkeep_sql.rows import interrupt_key, interrupt_values, run_key, thread_key

__all__ = ["EncodedCommit", "encode_commit", "entry_values", "new_thread_values"]


@dataclass(frozen=True, slots=True)
class EncodedCommit:
    """A commit and its encoded parts. ``run_key`` is that of the run it starts, patches or
    commits for; ``answers`` are (interrupt id, run id, status, response as JSON); ``needed_rows``
    is how many UI rows must be stored already."""

    commit: TurnCommit
    scope: Scope
    mark: str
    thread_key: bytes
    run_id: str | None
    run_key: bytes | None
    tail: list[Entry]
    extra: list[Entry]
    interrupts: list[tuple[InterruptRecord, dict[str, Any]]] = field(
        default_factory=list[tuple[InterruptRecord, dict[str, Any]]]
    )
    answers: list[tuple[str, str | None, str, str | None]] = field(
        default_factory=list[tuple[str, str | None, str, str | None]]
    )
    activities: dict[int, str] = field(default_factory=dict[int, str])
    needed_rows: int = 0


def encode_commit(commit: TurnCommit, scope: Scope) -> EncodedCommit:
    """Judge and encode everything in ``commit``, before any row is touched.

    Raises:
        InvalidValue: a part that cannot be stored.
    """
    run_id = commit.run.run_id if isinstance(commit.run, RunStart) else commit.run_id
    records = [pending_interrupt(record) for record in commit.interrupts]
    write = commit.activities or ActivitiesWrite(puts={}, length=0)
    return EncodedCommit(
        commit=commit,
        scope=scope,
        mark=commit_mark(commit.commit_id),
        thread_key=thread_key(scope, commit.thread_id),
        run_id=run_id,
        run_key=None if run_id is None else run_key(scope, run_id),
        tail=encode_messages(commit.splice.tail, "splice.tail") if commit.splice else [],
        extra=encode_messages(commit.cut_append.messages) if commit.cut_append else [],
        interrupts=[
            (
                record,
                {
                    "key": interrupt_key(record.run_id, record.interrupt_id),
                    **interrupt_values(record),
                },
            )
            for record in records
        ],
        answers=[
            (
                answer.interrupt_id,
                answer.run_id,
                answer.status,
                None
                if answer.response is UNSET
                else encode(answer.response, f"answers[{i}].response").decode(),
            )
            for i, answer in enumerate(commit.answers)
        ],
        activities={
            position: encode(row.to_json(), f"activities[{position}]").decode()
            for position, row in write.puts.items()
            if position < write.length
        },
        needed_rows=max((i + 1 for i in range(write.length) if i not in write.puts), default=0),
    )


def entry_values(
    thread_no: int, number: int, entry: Entry, cut: int | None = None
) -> dict[str, Any]:
    """The row of a message."""
    return {
        "thread_no": thread_no,
        "number": number,
        "message_id": entry.message_id,
        "digest": entry.digest,
        "body": entry.body.decode(),
        "cut": cut,
        "format": FORMAT_VERSION,
    }


def new_thread_values(encoded: EncodedCommit) -> dict[str, Any]:
    """The columns of a new head that never change."""
    tenant, user = encoded.scope.key
    return {
        "key": encoded.thread_key,
        "owner_key": key_digest("owner", tenant, user),
        "tenant_id": tenant,
        "user_id": user,
        "thread_id": encoded.commit.thread_id,
        "child": is_child_thread(encoded.commit.thread_id),
        "format": FORMAT_VERSION,
    }
