"""Delivery logs: a head and a stream for each run, in a slot of their own.

Two indexes say where to look: open logs by the end of their writer's lease as it was when it was
last looked at, closed ones by when they were closed. They are in other slots of a cluster than the
log; who reads them looks at the log itself, and puts them right.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from chatkeep.codec import FORMAT_VERSION
from chatkeep.errors import RunConflict
from chatkeep.logs import LogHead, LogPage, log_key
from chatkeep.scope import Scope
from chatkeep_redis.encoded import check_size
from chatkeep_redis.rows import check_format
from chatkeep_redis.runner import Argument
from chatkeep_redis.space import Space

__all__ = [
    "append",
    "close",
    "erase_of_thread",
    "heads",
    "listen",
    "lost",
    "open_log",
    "read",
    "take",
    "trim",
]

_PATIENCE = 1.0
"""Seconds of silence after which the channel is asked again."""

_BATCH = 200
"""Places read at once."""


async def _run(
    space: Space, key: bytes, what: str, arguments: Sequence[Argument] = (), *, again: bool = True
) -> list[Any]:
    answer: list[Any] = await space.runner.run(
        "log", space.keys.log(key), [what, FORMAT_VERSION, *arguments], again=again
    )
    if answer[0] == b"format":
        check_format(answer[1], "a delivery log")
    return answer


def _head(now: bytes, row: Sequence[bytes]) -> LogHead:
    _, run_id, thread_id, _, _, incarnation, epoch, first, end, until, closed_at, _ = row
    closed = closed_at != b""
    return LogHead(
        run_id=run_id.decode(),
        thread_id=thread_id.decode(),
        incarnation=incarnation.decode(),
        epoch=int(epoch),
        first=int(first),
        end=int(end),
        closed=closed,
        lost=not closed and int(until) <= int(now),
    )


async def open_log(space: Space, run_id: str, thread_id: str, token: str, lease_ms: int) -> LogHead:
    """A new log, or the one that this token opened."""
    key = log_key(space.scope, run_id)
    tenant, user = space.scope.key
    # First the places that lead to it: without a log they are none.
    await _note(space, space.keys.open_logs, key, space.hints.now() + lease_ms)
    await _note(space, space.keys.logs_of(space.place(thread_id)), key, 0)
    arguments: list[Argument] = [
        run_id, thread_id, tenant, user, token, secrets.token_hex(4), lease_ms, space.ttl,
    ]  # fmt: skip
    _, now, row = await _run(space, key, "open", arguments)
    head = _head(now, row)
    if head.thread_id != thread_id:
        raise RunConflict(run_id, "foreign-thread")
    if row[-1] != token.encode():
        raise RunConflict(run_id, "terminal" if head.closed else "running", thread_id=thread_id)
    return head


async def append(
    space: Space,
    run_id: str,
    token: str,
    number: int,
    bodies: Sequence[bytes],
    lease_ms: int,
    keep_from: int,
) -> None:
    """Add events, unless they are there."""
    for body in bodies:
        check_size("an event", body)
    key = log_key(space.scope, run_id)
    channel, name = space.keys.log_channel, key.hex()
    arguments: list[Argument] = [token, number, keep_from, lease_ms, space.ttl, channel, name]
    answer = await _run(space, key, "append", [*arguments, *bodies])
    match answer[0]:
        case b"unknown":
            raise RunConflict(run_id, "unknown", detail="its log is no longer kept")
        case b"taken":
            raise RunConflict(run_id, "lease-lost", thread_id=answer[1].decode())
        case b"closed":
            raise RunConflict(run_id, "terminal", detail="its log is closed")
        case b"gap":
            detail = f"event {number} is not its next one"
            raise RunConflict(run_id, "lease-lost", detail=detail)
        case _:
            pass


async def close(space: Space, run_id: str, token: str) -> bool:
    """Close it, if it is this writer's."""
    key = log_key(space.scope, run_id)
    answer = await _run(space, key, "close", [token, space.keys.log_channel, key.hex()])
    if answer[0] != b"ok":
        return False
    await space.best_effort("noting a closed log", _closed(space, key, int(answer[1])))
    return True


async def take(
    space: Space, run_id: str, token: str, lease_ms: int, *, only_lost: bool
) -> LogHead | None:
    """Change the writer, in one conditional write."""
    key = log_key(space.scope, run_id)
    arguments: list[Argument] = [token, lease_ms, int(only_lost)]
    answer = await _run(space, key, "take", [*arguments, space.keys.log_channel, key.hex()])
    return _head(answer[1], answer[2]) if answer[0] == b"ok" else None


async def read(
    space: Space, run_id: str, number: int, limit: int, max_bytes: int
) -> LogPage | None:
    """A page, and the head of the same moment."""
    key = log_key(space.scope, run_id)
    answer = await _run(space, key, "read", [number, limit, max_bytes])
    if answer[0] != b"ok":
        return None
    return LogPage(head=_head(answer[1], answer[2]), number=number, bodies=list(answer[3]))


async def heads(space: Space, keys: Sequence[bytes]) -> dict[bytes, LogHead]:
    """Heads of these, of any scope."""
    rows = await space.runner.each(keys, lambda key: _run(space, key, "read", [0, 1, 1]))
    return {
        key: _head(row[1], row[2]) for key, row in zip(keys, rows, strict=True) if row[0] == b"ok"
    }


async def lost(space: Space, limit: int) -> list[tuple[Scope, LogHead]]:
    """Whose writers are gone, the longest first."""
    index = space.keys.open_logs
    found: list[tuple[int, Scope, LogHead]] = []
    for key, score in await _due(space, index, "+inf", limit=None):
        answer = await _run(space, key, "read", [0, 1, 1])
        if answer[0] != b"ok":
            # Written before its log: one that is about to be opened has a lease ahead of it.
            if score <= space.hints.now() - space.hint_ms:
                await space.runner.run("index", [index], ["drop", key])
            continue
        now, row = answer[1], answer[2]
        head = _head(now, row)
        if head.closed:
            await _closed(space, key, int(row[-2]))
        elif head.lost:
            scope = Scope.from_key(row[3].decode(), row[4].decode())
            found.append((int(row[-3]), scope, head))
    found.sort(key=lambda item: item[0])
    return [(scope, head) for _, scope, head in found[:limit]]


async def trim(space: Space, closed_ms: int, limit: int) -> int:
    """Erase what was closed that long ago."""
    index = space.keys.closed_logs
    now, _ = await space.runner.run("index", [index], ["up", 0, 0, 0])
    old = await _due(space, index, str(now - closed_ms), limit=limit)
    for key, _ in old:
        await _erase(space, key)
    return len(old)


async def erase_of_thread(space: Space, thread_id: str, *, only_closed: bool) -> None:
    """Erase the logs of a thread."""
    for key, _ in await _due(space, space.keys.logs_of(space.place(thread_id)), "+inf", limit=None):
        answer = await _run(space, key, "read", [0, 1, 1])
        if answer[0] != b"ok" or not only_closed or _head(answer[1], answer[2]).closed:
            await _erase(space, key)


async def listen(space: Space, heard: Callable[[bytes | None], None]) -> None:
    """Hand what is published to ``heard``; not on a cluster, whose client offers no way to."""
    client: Any = space.runner.client
    if space.runner.cluster:
        return
    async with client.pubsub(ignore_subscribe_messages=False) as channel:
        await channel.subscribe(space.keys.log_channel)
        while True:
            # Not without a limit: a client that was passed in may have one of its own, which
            # would look like a lost connection.
            message: Any = await channel.get_message(timeout=_PATIENCE)
            if message is None:
                continue
            if message["type"] == "subscribe":
                heard(None)
            elif message["type"] == "message":
                name = message["data"]
                heard(bytes.fromhex(name if isinstance(name, str) else name.decode()))


# -------------------------------------------------------------------------------- places


async def _note(space: Space, index: bytes, key: bytes, score: int) -> None:
    await space.runner.run("index", [index], ["hint", key, score, space.ttl, 0])


async def _closed(space: Space, key: bytes, at: int) -> None:
    await _note(space, space.keys.closed_logs, key, at)
    await space.runner.run("index", [space.keys.open_logs], ["drop", key])


async def _due(
    space: Space, index: bytes, bound: str, *, limit: int | None
) -> list[tuple[bytes, int]]:
    """Places up to ``bound``, each once. A batch begins at the score at which the one before
    ended, not behind so many places: others write meanwhile."""
    found: dict[bytes, int] = {}
    lowest, at = "-inf", 0
    while limit is None or len(found) < limit:
        _, flat = await space.runner.run("index", [index], ["up", bound, at, _BATCH, lowest])
        rows = [(key, int(float(s))) for key, s in zip(flat[::2], flat[1::2], strict=True)]
        for key, score in rows:
            found.setdefault(key, score)
        if len(rows) < _BATCH:
            break
        last = str(rows[-1][1])
        # More than a batch at one time: by count, within that.
        at = at + len(rows) if last == lowest else 0
        lowest = last
    return list(found.items())[:limit]


async def _erase(space: Space, key: bytes) -> None:
    """The log, then what leads to it: a call that broke off is found again."""
    answer = await _run(space, key, "read", [0, 1, 1])
    await _run(space, key, "erase")
    indexes = [space.keys.closed_logs, space.keys.open_logs]
    if answer[0] == b"ok":
        row = answer[2]
        scope = Scope.from_key(row[3].decode(), row[4].decode())
        indexes.append(space.keys.logs_of(space.scoped(scope).place(row[2].decode())))
    for index in indexes:
        await space.runner.run("index", [index], ["drop", key])
