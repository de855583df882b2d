"""A commit with its values already judged and turned into what documents take."""

from __future__ import annotations

from dataclasses import dataclass, field

from chatkeep.codec import encode
from chatkeep.records import UNSET, InterruptRecord
from chatkeep.rules import Entry, encode_messages, pending_interrupt
from chatkeep.scope import Scope
from chatkeep.stores import ActivitiesWrite, RunStart, TurnCommit
from chatkeep_mongo.head import commit_mark
from chatkeep_mongo.layout import run_key, thread_key

__all__ = ["EncodedCommit", "encode_commit"]


@dataclass(frozen=True, slots=True)
class EncodedCommit:
    """A commit and its encoded parts. ``run_key`` is that of the run it starts, patches or
    commits for; ``activities`` are bodies by position."""

    commit: TurnCommit
    scope: Scope
    mark: str
    thread_key: str
    run_id: str | None
    run_key: str | None
    tail: list[Entry]
    extra: list[Entry]
    interrupts: list[InterruptRecord]
    activities: dict[int, bytes] = field(default_factory=dict[int, bytes])


def encode_commit(commit: TurnCommit, scope: Scope) -> EncodedCommit:
    """Judge and encode everything in ``commit``, before any document is touched.

    Raises:
        InvalidValue: a part that cannot be stored.
    """
    run_id = commit.run.run_id if isinstance(commit.run, RunStart) else commit.run_id
    write = commit.activities or ActivitiesWrite(puts={}, length=0)
    for i, answer in enumerate(commit.answers):
        if answer.response is not UNSET:
            encode(answer.response, f"answers[{i}].response")
    return EncodedCommit(
        commit=commit,
        scope=scope,
        mark=commit_mark(commit.commit_id),
        thread_key=thread_key(scope, commit.thread_id),
        run_id=run_id,
        run_key=None if run_id is None else run_key(scope, run_id),
        tail=encode_messages(commit.splice.tail, "splice.tail") if commit.splice else [],
        extra=encode_messages(commit.cut_append.messages) if commit.cut_append else [],
        interrupts=[pending_interrupt(record) for record in commit.interrupts],
        activities={
            position: encode(row.to_json(), f"activities[{position}]")
            for position, row in write.puts.items()
            if position < write.length
        },
    )
