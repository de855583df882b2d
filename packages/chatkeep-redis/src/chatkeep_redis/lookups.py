"""Drafts, leases, and finding runs from other places than their thread.

A look-up by run id or by parent is an entry in a slot of its own. It says where to look, never
what there is: whoever follows one reads the thread, and a look-up without its run is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from chatkeep.codec import decode, encode
from chatkeep.errors import RunConflict, RunConflictReason
from chatkeep.records import DraftRecord, ModelMessage, RunRecord
from chatkeep_redis.encoded import check_size
from chatkeep_redis.keys import place_of_run, read_place
from chatkeep_redis.rows import draft_from, run_from
from chatkeep_redis.space import Space

__all__ = [
    "FoundRun",
    "find_run",
    "list_child_runs",
    "load_runs",
    "owner_of",
    "renew_lease",
    "renew_pointers",
    "run_conflict",
    "save_draft",
]


class FoundRun:
    """A run of a thread, with its place in the order of creation and, if asked for, its draft."""

    __slots__ = ("draft", "now", "order", "record")

    def __init__(self, record: RunRecord, order: int, draft: DraftRecord | None, now: int) -> None:
        self.record = record
        self.order = order
        self.draft = draft
        self.now = now


async def save_draft(
    space: Space,
    thread_id: str,
    run_id: str,
    messages: Sequence[ModelMessage],
    lease_token: str | None,
) -> None:
    """Put the draft into the run's slot; nothing else of the thread is touched."""
    body = encode(list(messages), "messages")
    check_size("the draft", body)
    answer = await space.of_thread("draft", thread_id, [space.ttl, run_id, lease_token or "", body])
    if answer[0] == b"run":
        raise run_conflict(answer[1:], run_id, thread_id)
    if answer[1] == 1:
        await space.best_effort("renewing look-ups", renew_pointers(space, thread_id))


async def renew_lease(
    space: Space, thread_id: str, run_id: str, lease_token: str, lease_ms: int
) -> RunRecord:
    """Extend the lease from the server's clock."""
    member = place_of_run(space.place(thread_id), run_id)
    answer = await space.of_thread(
        "lease",
        thread_id,
        [space.ttl, run_id, lease_token, lease_ms, member],
        near=[space.keys.lost],
    )
    if answer[0] == b"run":
        raise run_conflict(answer[1:], run_id, thread_id)
    if answer[2] == 1:
        await space.best_effort("renewing look-ups", renew_pointers(space, thread_id))
    return run_from(run_id, thread_id, answer[1])[0]


def run_conflict(words: Sequence[bytes], run_id: str, thread_id: str) -> RunConflict:
    """The refusal that a script gives as a reason and, for some, a detail."""
    reason = cast("RunConflictReason", words[0].decode())
    detail = words[1].decode() if len(words) > 1 else ""
    return RunConflict(run_id, reason, thread_id=thread_id, detail=detail)


# -------------------------------------------------------------------------------- look-ups


async def owner_of(space: Space, run_id: str) -> str | None:
    """The thread that the look-up of a run id names; whether it has the run is another matter."""
    key = space.keys.owner(space.scope, run_id)
    (owner,) = await space.runner.run("owner", [key], ["get", "", "", 0, 0, ""])
    return None if owner is None else owner.decode()


async def load_runs(
    space: Space, thread_id: str, run_ids: Sequence[str], *, drafts: bool = False
) -> dict[str, FoundRun]:
    """Those of the runs that the thread has."""
    answer = await space.of_thread("runs", thread_id, [int(drafts), len(run_ids), *run_ids])
    _, now, found = answer
    runs: dict[str, FoundRun] = {}
    for i, run_id in enumerate(run_ids):
        raw, draft = found[2 * i], found[2 * i + 1]
        if raw is None:
            continue
        record, order = run_from(run_id, thread_id, raw)
        overlaid = None if draft is None else draft_from(run_id, thread_id, draft)
        runs[run_id] = FoundRun(record, order, overlaid, now)
    return runs


async def find_run(space: Space, run_id: str) -> RunRecord | None:
    """The run, in whichever thread of the scope."""
    thread_id = await owner_of(space, run_id)
    if thread_id is None:
        return None
    found = (await load_runs(space, thread_id, [run_id])).get(run_id)
    return None if found is None else found.record


async def list_child_runs(space: Space, parents: Sequence[str]) -> dict[str, list[RunRecord]]:
    """Children by parent id, each ascending by start; ties in order of creation."""
    asked = sorted(set(parents))

    async def members(parent: str) -> list[bytes]:
        key = space.keys.children(space.scope, parent)
        found: list[bytes] = await space.runner.run("children", [key], ["get", "", 0])
        return found

    by_thread: dict[str, set[str]] = {}
    for row in await space.runner.each(asked, members):
        for member in row:
            _, thread_id, rest = read_place(member)
            by_thread.setdefault(thread_id, set()).add(rest[0])

    async def load(thread_id: str) -> list[FoundRun]:
        return list((await load_runs(space, thread_id, sorted(by_thread[thread_id]))).values())

    runs = [run for row in await space.runner.each(sorted(by_thread), load) for run in row]
    runs.sort(key=lambda run: (run.record.started_at, run.order))
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.record.parent_run_id in asked:
            found.setdefault(run.record.parent_run_id, []).append(run.record)
    return found


async def renew_pointers(space: Space, thread_id: str) -> None:
    """Keep what points at the thread, and the lists that may show it, for as long as the thread
    and longer."""
    answer = await space.of_thread("pointers", thread_id)
    if answer[0] == b"none":
        return
    _, found, now = answer
    lists = (
        space.keys.threads(space.scope, thread_id),
        space.keys.idle,
        space.keys.lost,
        space.keys.detached(space.scope),
        space.keys.detached(None),
        space.keys.cuts,
    )
    keys = [("index", key) for key in lists]
    for run_id, parent in zip(found[::2], found[1::2], strict=True):
        keys.append(("owner", space.keys.owner(space.scope, run_id.decode())))
        if parent is not None:
            keys.append(("children", space.keys.children(space.scope, _json_text(parent))))

    async def keep(row: tuple[str, bytes]) -> None:
        name, key = row
        if name == "index":
            await space.runner.run(name, [key], ["keep", space.ttl])
        elif name == "owner":
            await space.runner.run(name, [key], ["keep", "", "", space.ttl, 0, ""])
        else:
            await space.runner.run(name, [key], ["keep", "", space.ttl])

    await space.runner.each(keys, keep)
    await space.of_thread("renewed", thread_id, [now if space.ttl else 0])


def _json_text(raw: bytes) -> str:
    return str(decode(raw, "the id of a parent run"))
