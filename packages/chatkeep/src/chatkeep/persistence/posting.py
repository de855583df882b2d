"""What a post makes of the thread that is stored: the transcript that the run starts from.

A post shows what its browser had on the screen. What was stored meanwhile is not cut by it but
set aside, and stays where it is: turns that another tab began a moment ago, and, when the post
continues a paused run, everything behind the turn that paused. Nobody means to cut anything with
the answer to a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chatkeep.engine.middleware import ChatConfig, ChatContext
from chatkeep.errors import UnseenMessages
from chatkeep.messages import Merge, ensure_ids, merge_messages, stable_ids
from chatkeep.persistence.boundary import Opening
from chatkeep.persistence.concurrent import concurrent_turns
from chatkeep.persistence.transcript import run_tag
from chatkeep.persistence.unit_of_work import UnitOfWork
from chatkeep.records import ModelMessage
from chatkeep.rules import anchor_of
from chatkeep.stores import Transcript

__all__ = ["Posted", "merge_post"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """``messages`` is the transcript that the run starts from, ``stored`` what of it (and of
    what it replaces) is in the store. ``apart``: others' turns stand behind it; ``behind`` are
    those behind a turn that is continued. ``kept`` are the stored messages in front of a cut;
    None: nothing is cut. ``hide`` are the first and the last number that a regenerate will
    replace."""

    messages: list[ModelMessage]
    stored: Transcript
    apart: bool
    behind: Sequence[ModelMessage] = ()
    kept: list[ModelMessage] | None = None
    hide: tuple[int, int] | None = None


async def merge_post(
    work: UnitOfWork,
    opening: Opening,
    config: ChatConfig,
    ctx: ChatContext,
    *,
    began: int,
    continues: str | None,
) -> Posted:
    """Merge the posted messages into the stored ones.

    Args:
        work: for looking up other runs.
        opening: what was read.
        config: has the posted messages.
        ctx: says what the client has seen.
        began: when this run began (ms).
        continues: the paused run that the post answers; None: it answers none.

    Raises:
        UnseenMessages: the post would cut what its client never saw.
    """
    stored = Transcript(
        messages=stable_ids(opening.transcript.messages, numbers=opening.transcript.numbers),
        numbers=opening.transcript.numbers,
        revision=opening.transcript.revision,
    )
    if continues is not None:
        return await _continuation(work, opening, stored, config.messages, continues)
    merge = _merged(opening, stored, config.messages)
    aside = 0
    unseen = ctx.seen is None or (bool(stored.numbers) and stored.numbers[-1] > ctx.seen)
    if merge.cut and unseen and not _come_back(merge.appended, stored):
        aside = await concurrent_turns(merge.cut, opening.live, work.find_run, since=began)
    if aside:
        stored = _up_to(stored, len(stored.messages) - aside)
        merge = _merged(opening, stored, config.messages)
    if merge.cut:
        newest = stored.numbers[-1]
        if not work.blind and ctx.seen is not None and newest > ctx.seen:
            raise UnseenMessages(work.thread_id, seen=ctx.seen, newest=newest)
    regenerates = merge.kind == "regenerate"
    return Posted(
        messages=_front(merge),
        stored=stored,
        apart=aside > 0,
        kept=merge.messages[: merge.keep] if merge.cut else None,
        hide=(stored.numbers[merge.keep], stored.numbers[-1]) if regenerates else None,
    )


async def _continuation(
    work: UnitOfWork,
    opening: Opening,
    stored: Transcript,
    posted: Sequence[ModelMessage],
    run_id: str,
) -> Posted:
    calls = {
        call
        for record in opening.pending
        if record.run_id == run_id and isinstance(call := record.payload.get("toolCallId"), str)
    }
    end = await _end_of_turn(work, stored.messages, calls, run_id)
    aside = stored.messages[end:]
    ids = {m.get("id") for m in aside}
    elsewhere = {call["id"] for m in aside for call in m.get("toolCalls") or ()}
    fresh = [
        m
        for m in posted
        if m.get("id") not in ids
        and not (m.get("role") == "tool" and m.get("toolCallId") in elsewhere)
    ]
    stored = _up_to(stored, end)
    fresh = _unmade(fresh, stored.messages)
    merge = _merged(opening, stored, fresh)
    if merge.cut:
        there = {id(m) for m in stored.messages}
        added = [m for m in merge.appended if id(m) not in there]
        merge = _merged(opening, stored, [*stored.messages, *added])
    return Posted(messages=_front(merge), stored=stored, apart=bool(aside), behind=aside)


def _unmade(posted: Sequence[ModelMessage], stored: Sequence[ModelMessage]) -> list[ModelMessage]:
    """Without model turns and results that nobody stored. The open calls of a paused run are
    executed, so a client that answers must not be able to add some, nor to answer for a tool."""
    names = {m.get("id") for m in stored if m.get("id")}
    results = {m.get("toolCallId") for m in stored if m.get("role") == "tool"}

    def is_known(m: ModelMessage) -> bool:
        if m.get("role") == "tool":
            return m.get("toolCallId") in results
        return m.get("role") != "assistant" or m.get("id") in names

    return [m for m in posted if is_known(m)]


async def _end_of_turn(
    work: UnitOfWork, rows: Sequence[ModelMessage], calls: set[str], run_id: str
) -> int:
    """Where the turn of the paused run ends: behind the last row that it made, else behind the
    one that holds one of its open calls. Ids of calls may be used again, also by another tab at
    the same moment: then behind the message that the run was to answer."""
    made = [at for at, row in enumerate(rows) if run_tag(row) == run_id]
    holders = [
        at
        for at, row in enumerate(rows)
        if calls.intersection(call["id"] for call in row.get("toolCalls") or ())
    ]
    if made:
        return _turn_end(rows, made[-1] + 1)
    if len(holders) == 1:
        return _turn_end(rows, holders[0] + 1)
    paused = await work.find_run(run_id)
    anchor = None if paused is None else anchor_of(paused)
    ids = [m.get("id") for m in rows]
    if anchor in ids:
        return _turn_end(rows, ids.index(anchor) + 1)
    return _turn_end(rows, holders[-1] + 1) if holders else len(rows)


def _turn_end(rows: Sequence[ModelMessage], at: int) -> int:
    while at < len(rows) and rows[at].get("role") not in ("user", "system"):
        at += 1
    return at


def _up_to(stored: Transcript, end: int) -> Transcript:
    return Transcript(
        messages=stored.messages[:end], numbers=stored.numbers[:end], revision=stored.revision
    )


def _front(merge: Merge) -> list[ModelMessage]:
    return [*merge.messages[: merge.keep], *ensure_ids(merge.appended)]


def _merged(opening: Opening, stored: Transcript, posted: Sequence[ModelMessage]) -> Merge:
    calls = (record.payload.get("toolCallId") for record in opening.pending)
    return merge_messages(
        stored.messages,
        posted,
        pending_tool_calls=frozenset(call for call in calls if isinstance(call, str)),
        activity_ids=frozenset(record.id for record in opening.activities),
    )


def _come_back(appended: Sequence[ModelMessage], stored: Transcript) -> bool:
    """Whether stored messages are among the appended ones: the post has them in another order."""
    known = {id(m) for m in stored.messages}
    return any(id(m) in known for m in appended)
