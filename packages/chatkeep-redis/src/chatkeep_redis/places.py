"""Lists over many threads, from the indexes.

An index says where to look; what is listed is read from the threads. On a single server a place
stands at the exact time. On a cluster it may be too early by as much as a hint is good for, or
name what was never written, or is gone; then readers put it right, but only where no commit may
still rely on it, and only if nobody wrote it meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep.records import ThreadInfo
from chatkeep.rules import decode_cursor, encode_cursor
from chatkeep.scope import Scope
from chatkeep.stores import LostRun, ThreadList
from chatkeep_redis.cuts import cut_times
from chatkeep_redis.keys import read_place
from chatkeep_redis.lookups import FoundRun, load_runs
from chatkeep_redis.rows import check_format
from chatkeep_redis.space import Space

__all__ = ["list_cut_threads", "list_idle", "list_lost", "list_reclaimable", "list_threads"]

_log = logging.getLogger("chatkeep.redis")

_BATCH = 200
"""Places read at once."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an index, as it was read at ``now``."""

    raw: bytes
    score: int
    now: int
    scope: Scope
    thread_id: str
    rest: list[str]


@dataclass(frozen=True, slots=True)
class _Head:
    """What a list shows of a thread; ``born`` orders threads by creation."""

    created: int
    updated: int
    born: int
    count: int


class _Index:
    """An index, read from one end in batches.

    A batch begins at the score at which the one before ended, not behind so many places: others
    write meanwhile, and what they move would show a place twice, or not at all.
    """

    def __init__(self, space: Space, key: bytes, *, newest_first: bool, bound: str) -> None:
        self._space = space
        self._key = key
        self._way = "down" if newest_first else "up"
        self._lowest: str = "-inf"
        self._bound = bound
        self._from = ""
        self._at = 0
        self._seen: set[bytes] = set()
        self.done = False

    async def read(self) -> list[_Place]:
        now, flat = await self._space.runner.run(
            "index", [self._key], [self._way, self._bound, self._at, _BATCH, self._lowest]
        )
        rows: list[tuple[bytes, int]] = [
            (raw, int(float(score))) for raw, score in zip(flat[::2], flat[1::2], strict=True)
        ]
        self.done = len(rows) < _BATCH
        if rows:
            last = f"{rows[-1][1]}"
            # More than a batch at one time: by count, within that.
            self._at = self._at + len(rows) if last == self._from else 0
            self._from = last
            if self._way == "up":
                self._lowest = last
            else:
                self._bound = last
        found: list[_Place] = []
        for raw, score in rows:
            if raw not in self._seen:
                self._seen.add(raw)
                scope, thread_id, rest = read_place(raw)
                found.append(_Place(raw, score, now, scope, thread_id, rest))
        return found

    async def correct(self, changes: Sequence[tuple[_Place, int | None]]) -> None:
        """Move places, or take them out (None). Those on which a commit may rely stay."""
        settled = 2 * self._space.hint_ms if self._space.apart else 0
        arguments: list[bytes | int] = []
        for place, score in changes:
            if place.score + settled <= place.now:
                arguments += [place.raw, place.score, b"" if score is None else score]
                self._at = max(0, self._at - 1)
        if arguments:
            await self._space.best_effort(
                "correcting an index",
                self._space.runner.run("index", [self._key], ["correct", *arguments]),
            )


def _slack(space: Space) -> int:
    return space.hint_ms if space.apart else 0


# -------------------------------------------------------------------------------- threads


async def list_threads(
    space: Space, limit: int, cursor: str | None, *, children: bool
) -> ThreadList:
    """Newest first; equal times in reverse order of creation."""
    after = decode_cursor(cursor, int, int) if cursor is not None else None
    kinds = (False, True) if children else (False,)
    found: list[tuple[_Head, str]] = []
    for kind in kinds:
        key = space.keys.threads_of(space.scope, children=kind)
        found += await _newest(space, key, limit + 1, after)
    found.sort(key=lambda row: (row[0].updated, row[0].born), reverse=True)
    page = found[:limit]
    last = page[-1][0] if page else None
    return ThreadList(
        threads=[
            ThreadInfo(
                thread_id=thread_id,
                created_at=head.created,
                updated_at=head.updated,
                message_count=head.count,
            )
            for head, thread_id in page
        ],
        cursor=encode_cursor(last.updated, last.born)
        if last is not None and len(found) > limit
        else None,
    )


async def _newest(
    space: Space, key: bytes, count: int, after: tuple[int, int] | None
) -> list[tuple[_Head, str]]:
    # On a cluster a place may stand too high: after a write that was refused.
    bound = str(after[0]) if after is not None and not space.apart else "+inf"
    index = _Index(space, key, newest_first=True, bound=bound)
    found: list[tuple[_Head, str]] = []
    while not index.done:
        places = await index.read()
        heads = await _heads(space, places)
        gone: list[tuple[_Place, int | None]] = []
        for place, head in zip(places, heads, strict=True):
            if head is None:
                gone.append((place, None))
            elif after is None or (head.updated, head.born) < after:
                found.append((head, place.thread_id))
        await index.correct(gone)
        found.sort(key=lambda row: (row[0].updated, row[0].born), reverse=True)
        enough = places and len(found) >= count
        if enough and found[count - 1][0].updated > places[-1].score + _slack(space):
            break
    return found[:count]


async def list_idle(space: Space, idle_ms: int, limit: int) -> list[tuple[Scope, str]]:
    """Threads of every scope that nobody has written for so long, the longest first."""
    now, _ = await space.runner.run("index", [space.keys.idle], ["up", 0, 0, 0])
    before = now - idle_ms
    index = _Index(space, space.keys.idle, newest_first=False, bound=str(before))
    found: list[tuple[int, int, Scope, str]] = []
    while not index.done:
        places = await index.read()
        heads = await _heads(space, places)
        gone: list[tuple[_Place, int | None]] = []
        for place, head in zip(places, heads, strict=True):
            if head is None:
                gone.append((place, None))
            elif head.updated <= before:
                found.append((head.updated, head.born, place.scope, place.thread_id))
        await index.correct(gone)
        found.sort(key=lambda row: row[:2])
        if places and len(found) >= limit and found[limit - 1][0] < places[-1].score:
            break
    return [(scope, thread_id) for _, _, scope, thread_id in found[:limit]]


async def _heads(space: Space, places: Sequence[_Place]) -> list[_Head | None]:
    keys = [space.scoped(p.scope).head_key(p.thread_id) for p in places]
    if not keys:
        return []
    if space.apart:

        async def one(key: bytes) -> list[bytes | None]:
            found: list[list[bytes | None]] = await space.runner.run("heads", [key])
            return found[0]

        rows = await space.runner.each(keys, one)
    else:
        rows = await space.runner.run("heads", keys)
    heads: list[_Head | None] = []
    for row, place in zip(rows, places, strict=True):
        if row[0] is None:
            heads.append(None)
            continue
        check_format(row[0], f"thread {place.thread_id!r}")
        _, created, updated, born, count = (int(value or 0) for value in row)
        heads.append(_Head(created, updated, born, count))
    return heads


# ----------------------------------------------------------------------------------- runs


async def list_lost(space: Space, limit: int) -> list[LostRun]:
    """Running runs of every scope whose lease has run out, the longest first."""

    def due(run: FoundRun) -> int | None:
        lease = run.record.lease
        if run.record.status != "running" or lease is None or lease.until > run.now:
            return None
        return lease.until

    def right(run: FoundRun) -> int | None:
        lease = run.record.lease
        return lease.until if run.record.status == "running" and lease is not None else None

    now, _ = await space.runner.run("index", [space.keys.lost], ["up", 0, 0, 0])
    return await _due_runs(space, space.keys.lost, now, due, right, limit)


async def list_reclaimable(
    space: Space, detached_before: int, limit: int, *, every_scope: bool
) -> list[LostRun]:
    """Running runs detached since then, the longest first."""

    def due(run: FoundRun) -> int | None:
        since = run.record.detached_since
        if run.record.status != "running" or since is None or since > detached_before:
            return None
        return since

    def right(run: FoundRun) -> int | None:
        return run.record.detached_since if run.record.status == "running" else None

    key = space.keys.detached(None if every_scope else space.scope)
    return await _due_runs(space, key, detached_before, due, right, limit)


async def _due_runs(
    space: Space,
    key: bytes,
    bound: int,
    due: Callable[[FoundRun], int | None],
    right: Callable[[FoundRun], int | None],
    limit: int,
) -> list[LostRun]:
    """Runs that are ``due``; places that stand elsewhere than where is ``right`` are moved."""
    index = _Index(space, key, newest_first=False, bound=str(bound))
    found: list[tuple[int, int, LostRun]] = []
    while not index.done:
        places = await index.read()
        wrong: list[tuple[_Place, int | None]] = []
        for place, run in await _runs(space, places):
            when = None if run is None else due(run)
            if run is not None and when is not None:
                lost = LostRun(scope=place.scope, run=run.record, draft=run.draft)
                found.append((when, run.order, lost))
            elif (score := None if run is None else right(run)) != place.score:
                wrong.append((place, score))
        await index.correct(wrong)
        found.sort(key=lambda row: row[:2])
        if places and len(found) >= limit and found[limit - 1][0] < places[-1].score:
            break
    return [row[2] for row in found[:limit]]


async def _runs(space: Space, places: Sequence[_Place]) -> list[tuple[_Place, FoundRun | None]]:
    """What stands at the places. A run that cannot be read is logged and left out: its place must
    stay, and must not keep the others from being found."""
    wanted: dict[tuple[Scope, str], list[str]] = {}
    for place in places:
        wanted.setdefault((place.scope, place.thread_id), []).append(place.rest[0])

    async def load(thread: tuple[Scope, str]) -> dict[str, FoundRun | None]:
        found: dict[str, FoundRun | None] = dict.fromkeys(wanted[thread])
        here = space.scoped(thread[0])
        try:
            found |= await load_runs(here, thread[1], wanted[thread], drafts=True)
        except (CorruptRecord, SchemaOutOfDate):
            for run_id in wanted[thread]:
                try:
                    found |= await load_runs(here, thread[1], [run_id], drafts=True)
                except (CorruptRecord, SchemaOutOfDate):
                    _log.exception("run %r cannot be read", run_id)
                    found.pop(run_id, None)
        return found

    rows = await space.runner.each(list(wanted), load)
    found = dict(zip(wanted, rows, strict=True))
    runs: list[tuple[_Place, FoundRun | None]] = []
    for place in places:
        here = found[place.scope, place.thread_id]
        if place.rest[0] in here:
            runs.append((place, here[place.rest[0]]))
    return runs


# ----------------------------------------------------------------------------------- cuts


async def list_cut_threads(space: Space, before: int, limit: int) -> list[tuple[Scope, str]]:
    """Threads of every scope with a cut made before ``before``, the oldest cut first."""
    index = _Index(space, space.keys.cuts, newest_first=False, bound=f"({before}")
    found: dict[tuple[Scope, str], int] = {}
    known: dict[tuple[Scope, str], dict[str, int]] = {}

    async def load(thread: tuple[Scope, str]) -> dict[str, int]:
        return await cut_times(space.scoped(thread[0]), thread[1])

    while not index.done:
        places = await index.read()
        new = [t for t in dict.fromkeys((p.scope, p.thread_id) for p in places) if t not in known]
        known |= zip(new, await space.runner.each(new, load), strict=True)
        gone: list[tuple[_Place, int | None]] = []
        for place in places:
            thread = (place.scope, place.thread_id)
            cut_at = known[thread].get(place.rest[0])
            if cut_at is None:
                gone.append((place, None))
            elif cut_at < before:
                found[thread] = min(cut_at, found.get(thread, cut_at))
        await index.correct(gone)
        enough = places and len(found) >= limit
        if enough and sorted(found.values())[limit - 1] < places[-1].score:
            break
    oldest = sorted(found, key=lambda thread: found[thread])
    return oldest[:limit]
