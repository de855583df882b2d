"""Turns that another run stored while a post was on its way.

A browser posts the history that it shows. Of a turn that another tab began a moment ago it can
show nothing, so leaving that turn out is no wish to cut it. A turn at the end of a thread whose
run began at most :data:`ON_ITS_WAY_MS` before this one, and had not ended then, is therefore set
aside before the merge and stays where it is. Older turns that a post leaves out are cut, as the
merge rule says (and archived): somebody who stops an answer and sends an edited question means
it. A client that tells what it has seen is believed instead of the clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from chatkeep.persistence.transcript import run_tag
from chatkeep.records import ModelMessage, RunRecord
from chatkeep.rules import anchor_of

__all__ = ["ON_ITS_WAY_MS", "concurrent_turns"]

ON_ITS_WAY_MS: Final = 2_000
"""How long a post may take from the tab to here. It is compared with the clocks of workers,
and a wrong guess costs no message: what is cut is archived, what is kept can be cut."""


async def concurrent_turns(
    cut: Sequence[ModelMessage],
    live: Sequence[RunRecord],
    find: Callable[[str], Awaitable[RunRecord | None]],
    *,
    since: int,
) -> int:
    """How many messages at the end of ``cut`` are turns of concurrent runs.

    ``live`` are the other runs that are being driven; ``find`` looks up another run, at most
    one for each turn; ``since`` is when this run began (ms).
    """
    end = len(cut)
    while end:
        start = _turn_start(cut, end)
        if start is None:
            break
        run = await _run_of(cut[start:end], live, find)
        if run is None or not _overlaps(run, since):
            break
        end = start
    return len(cut) - end


async def _run_of(
    turn: Sequence[ModelMessage],
    live: Sequence[RunRecord],
    find: Callable[[str], Awaitable[RunRecord | None]],
) -> RunRecord | None:
    asked = {m.get("id") for m in turn if m.get("role") == "user"}
    tag = next((tag for m in turn if (tag := run_tag(m)) is not None), None)
    for run in live:
        if run.run_id == tag or anchor_of(run) in asked:
            return run
    return None if tag is None else await find(tag)


def _overlaps(run: RunRecord, since: int) -> bool:
    ended = run.finished_at is not None and run.finished_at <= since
    return not ended and run.started_at >= since - ON_ITS_WAY_MS


def _turn_start(cut: Sequence[ModelMessage], end: int) -> int | None:
    """Where the turn that ends at ``end`` begins: at its user messages; None if they are not
    part of the cut (an answer that the post replaces is no turn of somebody else's)."""
    start = end
    while start and cut[start - 1].get("role") != "user":
        start -= 1
    if not start:
        return None
    while start and cut[start - 1].get("role") == "user":
        start -= 1
    return start
