"""One consistent read of a thread."""

from __future__ import annotations

from typing import Any

from chatkeep.errors import CorruptRecord
from chatkeep.records import InterruptRecord
from chatkeep.rules import active_runs, visible_interrupt
from chatkeep.stores import ThreadView, ViewQuery
from chatkeep_redis.lookups import load_runs
from chatkeep_redis.rows import (
    activity_from,
    draft_from,
    interrupt_from,
    messages_from,
    numbers_from,
    ranges_from,
    run_from,
)
from chatkeep_redis.runner import Argument
from chatkeep_redis.space import Space

__all__ = ["PAGE_BYTES", "read_view"]

PAGE_BYTES = 4 * 1024 * 1024
"""About how much of a transcript one answer brings: a server keeps an answer in memory."""

_WHOLE = 2**53
_TRIES = 5
"""How often a long transcript is read again when entries went while it was read in pages; then it
is read at once."""


async def read_view(space: Space, thread_id: str, query: ViewQuery) -> ThreadView:
    """See :meth:`chatkeep.backends.Backend.read_view`. One round trip, unless the transcript is
    longer than a page."""
    for attempt in range(_TRIES + 1):
        budget = PAGE_BYTES if attempt < _TRIES else _WHOLE
        view = await _try_read(space, thread_id, query, budget)
        if view is not None:
            return view
    raise AssertionError("what is read at once is whole")


async def _try_read(
    space: Space, thread_id: str, query: ViewQuery, budget: int
) -> ThreadView | None:
    arguments: list[Argument] = [
        query.run_id or "",
        query.messages,
        "" if query.limit is None else query.limit,
        "" if query.before is None else query.before,
        query.runs,
        query.interrupts,
        int(query.activities),
        int(query.drafts),
        budget,
    ]
    answer, owner = await _ask(space, thread_id, query, arguments)
    now: int = answer[1]
    space.hints.saw_clock(now)
    own = answer[8] if answer[0] == b"ok" else None
    foreign = False
    if query.run_id is not None and own is None and owner is not None and owner != thread_id:
        foreign = bool(await load_runs(space, owner, [query.run_id]))
    if answer[0] == b"none":
        return ThreadView(thread_id=thread_id, exists=False, now=now, foreign_run=foreign)

    _, _, _, revision, newest, line, older, values, _, runs, interrupts, rows, drafts = answer
    numbers = numbers_from(line)
    if query.messages != "numbers" and not await _more_pages(
        space, thread_id, query.messages, revision, numbers, values, budget
    ):
        return None
    bodies, digests = query.messages == "bodies", query.messages == "digests"
    found_runs = sorted(
        (run_from(run_id.decode(), thread_id, raw) for run_id, raw in _pairs(runs)),
        key=lambda row: (row[0].started_at, row[1]),
    )
    records = [record for record, _ in found_runs]
    return ThreadView(
        thread_id=thread_id,
        exists=True,
        now=now,
        revision=revision.decode(),
        newest=newest,
        messages=messages_from(values, numbers, thread_id) if bodies else [],
        numbers=numbers,
        digests=_present(values, numbers, thread_id) if digests else [],
        truncated=older == 1,
        run=None
        if own is None or query.run_id is None
        else run_from(query.run_id, thread_id, own)[0],
        foreign_run=foreign,
        runs=active_runs(records, now) if query.runs == "active" else records,
        interrupts=_interrupts(interrupts, thread_id),
        activities=[
            activity_from(position, thread_id, body)
            for position, body in sorted((int(p), body) for p, body in _pairs(rows))
        ],
        drafts=[draft_from(run_id.decode(), thread_id, raw) for run_id, raw in _pairs(drafts)],
    )


async def _ask(
    space: Space, thread_id: str, query: ViewQuery, arguments: list[Argument]
) -> tuple[list[Any], str | None]:
    """The answer, and the thread that the look-up of the asked run names."""
    if query.run_id is None:
        return await space.of_thread("view", thread_id, arguments), None
    owner_key = space.keys.owner(space.scope, query.run_id)
    if not space.apart:
        answer = await space.of_thread("view", thread_id, arguments, near=[owner_key])
        owner = answer[2]
    else:

        async def ask(what: str) -> Any:
            if what == "view":
                return await space.of_thread("view", thread_id, arguments)
            return await space.runner.run("owner", [owner_key], ["get", "", "", 0, 0, ""])

        answer, (owner,) = await space.runner.each(["view", "owner"], ask)
    return answer, None if owner is None else owner.decode()


async def _more_pages(
    space: Space,
    thread_id: str,
    what: str,
    revision: bytes,
    numbers: list[int],
    values: list[bytes | None],
    budget: int,
) -> bool:
    """Read on until there is a value for every number; False if the thread has moved under it."""
    while len(values) < len(numbers):
        rest = ranges_from(numbers[len(values) :])
        answer = await space.of_thread("page", thread_id, [revision, what, budget, rest])
        if answer[0] == b"moved":
            return False
        values += answer[1]
    return True


def _present(values: list[bytes | None], numbers: list[int], thread_id: str) -> list[bytes]:
    found: list[bytes] = []
    for number, value in zip(numbers, values, strict=True):
        if value is None:
            raise CorruptRecord(f"message {number} of thread {thread_id!r}", "is missing")
        found.append(value)
    return found


def _interrupts(flat: list[Any], thread_id: str) -> list[InterruptRecord]:
    found: list[tuple[InterruptRecord, int]] = []
    for key, raw, lives in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        record, order = interrupt_from(key, thread_id, raw)
        found.append((visible_interrupt(record, claim_live=lives == 1), order))
    found.sort(key=lambda row: (row[0].requested_at, row[1]))
    return [record for record, _ in found]


def _pairs(flat: list[bytes]) -> zip[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
