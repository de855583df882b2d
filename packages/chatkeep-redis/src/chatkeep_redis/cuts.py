"""Cuts: what a regenerate, an edit or an overwrite took off a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatkeep.codec import encode
from chatkeep.records import CutRecord, ModelMessage
from chatkeep_redis.keys import place_of_cut
from chatkeep_redis.lookups import renew_pointers
from chatkeep_redis.rows import draft_from, messages_from, numbers_from, unpack
from chatkeep_redis.runner import Argument
from chatkeep_redis.space import Space

__all__ = ["cut_times", "erase_messages", "list_cuts", "load_cut", "purge_cuts"]


async def list_cuts(space: Space, thread_id: str) -> list[CutRecord]:
    """Cuts of the thread, oldest first."""
    records: list[tuple[int, CutRecord]] = []
    for cut_id, fields, ids in await _cuts(space, thread_id, with_ids=True):
        run_id = fields.get("runId")
        record = CutRecord(
            cut_id=cut_id,
            thread_id=thread_id,
            cut_at=int(fields["cutAt"]),
            run_id=None if run_id is None else run_id.decode(),
            numbers=numbers_from(fields["numbers"]),
            message_ids=[message_id.decode() or None for message_id in ids],
            extra=int(fields["extra"]),
        )
        records.append((int(cut_id.partition(".")[0]), record))
    return [record for _, record in sorted(records, key=lambda row: row[0])]


async def cut_times(space: Space, thread_id: str) -> dict[str, int]:
    """When each cut of the thread was made, by the mark of its commit."""
    return {
        fields["mark"].decode(): int(fields["cutAt"])
        for _, fields, _ in await _cuts(space, thread_id, with_ids=False)
    }


async def _cuts(
    space: Space, thread_id: str, *, with_ids: bool
) -> list[tuple[str, dict[str, bytes], list[bytes]]]:
    answer: list[Any] = await space.of_thread("cuts", thread_id, ["", int(with_ids)])
    if answer[0] == b"none":
        return []
    flat = answer[1]
    return [
        (cut_id.decode(), unpack(raw, f"cut {cut_id.decode()!r}"), ids)
        for cut_id, raw, ids in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


async def load_cut(space: Space, thread_id: str, cut_id: str) -> list[ModelMessage]:
    """The messages of a cut, in order."""
    answer = await space.of_thread("cuts", thread_id, [f"={cut_id}", 0])
    if answer[0] == b"none":
        return []
    return messages_from(answer[2], numbers_from(answer[1]), thread_id)


async def purge_cuts(space: Space, thread_id: str, before: int) -> int:
    """Erase the cuts made before ``before``; how many."""
    answer = await space.of_thread(
        "purge",
        thread_id,
        [space.ttl, space.place(thread_id), before],
        near=[space.keys.cuts],
    )
    _, marks, due = answer
    await _forget(space, thread_id, marks, due=due == 1)
    return len(marks)


async def erase_messages(space: Space, thread_id: str, message_ids: Sequence[str]) -> int:
    """Erase every copy of these messages: live, archived, and in drafts."""
    asked = set(message_ids)
    while True:
        drafts = await _drafts_without(space, thread_id, asked)
        answer = await space.of_thread(
            "erase",
            thread_id,
            [
                space.ttl,
                space.place(thread_id),
                len(asked),
                *sorted(asked),
                len(drafts) // 3,
                *drafts,
            ],
            near=[space.keys.cuts],
        )
        if answer[0] == b"moved":
            continue  # a draft was written meanwhile: look at that one
        _, count, marks, due = answer
        await _forget(space, thread_id, marks, due=due == 1)
        return int(count)


async def _drafts_without(space: Space, thread_id: str, asked: set[str]) -> list[Argument]:
    """Drafts that hold such messages: run, what is stored, and what is to be stored instead."""
    _, flat = await space.of_thread("drafts", thread_id)
    changed: list[Argument] = []
    for run_id, raw in zip(flat[::2], flat[1::2], strict=True):
        draft = draft_from(run_id.decode(), thread_id, raw)
        rest = [message for message in draft.messages if message.get("id") not in asked]
        if len(rest) < len(draft.messages):
            version, updated_at, _ = raw.split(b" ", 2)
            changed += [run_id, raw, b"%b %b %b" % (version, updated_at, encode(rest))]
    return changed


async def _forget(space: Space, thread_id: str, marks: list[bytes], *, due: bool) -> None:
    if marks and space.apart:
        place = space.place(thread_id)
        members = [place_of_cut(place, mark.decode()) for mark in marks]
        await space.best_effort(
            "taking cuts out of the index",
            space.runner.run("index", [space.keys.cuts], ["drop", *members]),
        )
    if due:
        await space.best_effort("renewing look-ups", renew_pointers(space, thread_id))
