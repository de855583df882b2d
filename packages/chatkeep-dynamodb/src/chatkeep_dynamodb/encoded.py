"""A commit with its values turned to bytes, before any request: what cannot be stored meets no
rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chatkeep.codec import encode
from chatkeep.records import UNSET, InterruptRecord
from chatkeep.rules import Entry, encode_messages, pending_interrupt
from chatkeep.scope import Scope
from chatkeep.stores import RunStart, TurnCommit
from chatkeep_dynamodb.head import commit_mark

__all__ = ["EncodedCommit", "encode_commit"]


@dataclass(frozen=True, slots=True)
class EncodedCommit:
    """A commit; ``rows`` are the bodies of UI rows by position."""

    commit: TurnCommit
    scope: Scope
    mark: str
    tail: Sequence[Entry]
    extra: Sequence[Entry]
    interrupts: Sequence[InterruptRecord]
    rows: Mapping[int, bytes]

    @property
    def run_id(self) -> str | None:
        """The run that commits."""
        start = self.commit.run
        return start.run_id if isinstance(start, RunStart) else self.commit.run_id

    @property
    def named_interrupts(self) -> set[str]:
        """Ids of the interrupts that are answered or claimed."""
        commit = self.commit
        return {ref.interrupt_id for refs in (commit.answers, commit.claims) for ref in refs}


def encode_commit(commit: TurnCommit, scope: Scope) -> EncodedCommit:
    """Encode what a commit brings.

    Raises:
        InvalidValue: a value that cannot be stored; names its place.
    """
    splice, append, write = commit.splice, commit.cut_append, commit.activities
    encoded = EncodedCommit(
        commit=commit,
        scope=scope,
        mark=commit_mark(commit.commit_id),
        tail=encode_messages(splice.tail, "splice.tail") if splice is not None else [],
        extra=encode_messages(append.messages) if append is not None else [],
        interrupts=[pending_interrupt(record) for record in commit.interrupts],
        rows={
            position: encode(row.to_json(), f"activities[{position}]")
            for position, row in (write.puts.items() if write is not None else ())
            if write is not None and position < write.length
        },
    )
    for i, answer in enumerate(commit.answers):
        if answer.response is not UNSET:
            encode(answer.response, f"answers[{i}].response")
    return encoded
