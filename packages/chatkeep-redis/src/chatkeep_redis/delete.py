"""Deleting a thread, and what points at it from other slots."""

from __future__ import annotations

from collections.abc import Sequence

from chatkeep.codec import decode
from chatkeep.rules import is_child_thread
from chatkeep_redis.keys import place_of_cut, place_of_run
from chatkeep_redis.rows import unpack
from chatkeep_redis.runner import Argument
from chatkeep_redis.space import Space

__all__ = ["delete_thread"]


async def delete_thread(space: Space, thread_id: str) -> bool:
    """Erase the thread, all that hangs on it, and the metadata under its id.

    The thread itself goes in one step. Its look-ups go afterwards; until they have gone they are
    listed in the thread's slot, so that the next delete goes on where one broke off.
    """
    place, keys, scope = space.place(thread_id), space.keys, space.scope
    near = [keys.threads(scope, thread_id)]
    if not is_child_thread(thread_id):
        near.append(keys.idle)
    space.hints.drop(place)
    _, found, notes, gone = await space.of_thread(
        "delete", thread_id, [space.ttl, place, int(space.apart)], near=near
    )
    if gone:
        await _forget(space, thread_id, [unpack(raw, "what is to be forgotten") for raw in gone])
        await space.of_thread("forget", thread_id, [len(gone)])
    return bool(found or notes or gone)


async def _forget(space: Space, thread_id: str, items: list[dict[str, bytes]]) -> None:
    place, keys, scope = space.place(thread_id), space.keys, space.scope
    work: list[tuple[str, bytes, Sequence[Argument]]] = []
    places: list[str] = []
    cuts: list[str] = []
    for item in items:
        if "cut" in item:
            cuts.append(place_of_cut(place, item["cut"].decode()))
        if "runId" not in item:
            continue
        run_id, mark = item["runId"].decode(), item["mark"].decode()
        member = place_of_run(place, run_id)
        places.append(member)
        release: list[Argument] = ["release", thread_id, mark, 0, space.hint_ms, "old"]
        work.append(("owner", keys.owner(scope, run_id), release))
        if "parentRunId" in item:
            parent = decode(item["parentRunId"], "the id of a parent run")
            remove: list[Argument] = ["remove", f"{member}/{mark}", 0]
            work.append(("children", keys.children(scope, parent), remove))
    if places:
        indexes = (keys.lost, keys.detached(scope), keys.detached(None))
        work += [("index", key, ["drop", *places]) for key in indexes]
    if space.apart:
        # A commit under way may rely on a young place; then it is left to readers.
        left: list[Argument] = ["left", place, 2 * space.hint_ms]
        work.append(("index", keys.threads(scope, thread_id), left))
        if not is_child_thread(thread_id):
            work.append(("index", keys.idle, left))
    if cuts:
        work.append(("index", keys.cuts, ["drop", *cuts]))

    async def run(row: tuple[str, bytes, Sequence[Argument]]) -> None:
        name, key, arguments = row
        await space.runner.run(name, [key], arguments)

    await space.runner.each(work, run)
