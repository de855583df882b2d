"""What this process last saw of heads: a commit behind a read or another commit need not read.

A hint decides nothing. The commit is written only where the head still has the stamp of the hint
and does not remember the commit; and nobody is refused because of a hint: then the head is read,
and all is judged again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from chatkeep.records import RunPatch, RunRecord
from chatkeep.stores import RunStart
from chatkeep_mongo.encoded import EncodedCommit
from chatkeep_mongo.found import Found
from chatkeep_mongo.head import Head

__all__ = ["Hints"]

_MOST = 1024
"""Threads of which something is kept."""

_SECONDS = 60.0
"""How long a hint is used: its clock is the database's, continued by this process's."""


@dataclass(frozen=True, slots=True)
class _Hint:
    head: Head
    now: int
    taken: float
    run_key: str | None = None
    run: RunRecord | None = None


class Hints:
    """Heads by key, the ones used last."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, _Hint] = OrderedDict()

    def saw(
        self, head: Head, now: int, run_key: str | None = None, run: RunRecord | None = None
    ) -> None:
        """Remember a head at rest, and a run of its thread as it is there."""
        known = self._by_key.pop(head.key, None)
        if run is None and known is not None and known.head.stamp == head.stamp:
            run_key, run = known.run_key, known.run
        self._by_key[head.key] = _Hint(head, now, time.monotonic(), run_key, run)
        while len(self._by_key) > _MOST:
            self._by_key.popitem(last=False)

    def forget(self, key: str) -> None:
        """What is known of a head was wrong."""
        self._by_key.pop(key, None)

    def found_for(self, encoded: EncodedCommit) -> Found | None:
        """What a read would find for a commit; None if it must be made."""
        hint = self._by_key.get(encoded.thread_key)
        if hint is None:
            return None
        age = time.monotonic() - hint.taken
        if age > _SECONDS:
            self.forget(encoded.thread_key)
            return None
        commit = encoded.commit
        own = hint.run if hint.run_key == encoded.run_key else None
        if isinstance(commit.run, RunStart):
            # Whether a known run may be taken over depends on its lease, which may be renewed.
            usable = own is None
        else:
            needs_run = isinstance(commit.run, RunPatch) or commit.lease_token or commit.claims
            usable = not commit.lease_expired and (own is not None or not needs_run)
        splice = commit.splice
        cuts = splice is not None and splice.keep_through < hint.head.newest
        if not usable or cuts or commit.restore is not None or commit.answers or commit.claims:
            # What goes on record with its time, or is judged by it, is timed by the database.
            return None
        return Found(now=hint.now + int(age * 1000), head=hint.head, known=own)
