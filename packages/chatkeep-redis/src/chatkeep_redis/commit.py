"""One boundary of a turn: one script, one round trip.

On a single server the script writes look-ups and indexes too. On a cluster those are in other
slots. There they are *hints*, written before the boundary: the script refuses (``need``) to make
a thread, run or cut that no fresh hint points at. So a crash leaves a hint without its row,
which readers ignore, and never a row that no list shows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from chatkeep.errors import (
    CorruptRecord,
    InterruptConflict,
    InvalidValue,
    RunConflict,
    StoreError,
    ThreadConflict,
)
from chatkeep.records import RunPatch, RunRecord
from chatkeep.rules import is_child_thread, new_commit_id
from chatkeep.stores import NO_THREAD, RunStart, TurnReceipt
from chatkeep_redis.encoded import EncodedCommit
from chatkeep_redis.keys import place_of_cut, place_of_run
from chatkeep_redis.lookups import load_runs, renew_pointers, run_conflict
from chatkeep_redis.rows import numbers_from, run_from, unpack
from chatkeep_redis.runner import Argument
from chatkeep_redis.space import Space

__all__ = ["commit_once"]

_TRIES = 5
"""How often a commit is sent with the hints that the one before has asked for."""


@dataclass(slots=True)
class _Hinted:
    """What was written into other slots for a commit, and when.

    ``takeover``: which look-up of its run id it may take over. On a cluster the thread that it
    names, as long as no claim is young; elsewhere the claims on it, as long as they are those.
    """

    kinds: str = ""
    at: int = 0
    detached_since: bytes = b""
    takeover: str = ""


async def commit_once(space: Space, encoded: EncodedCommit) -> TurnReceipt:
    """Apply a commit, or raise what refuses it and write nothing.

    Raises:
        RunConflict, InterruptConflict, ThreadConflict: in this order.
    """
    hinted = _Hinted()
    try:
        receipt = await _with_hints(space, encoded, hinted)
    except (RunConflict, InterruptConflict, ThreadConflict, InvalidValue):
        if hinted.kinds:
            await space.best_effort("giving up a run id", _release_unused(space, encoded, hinted))
        raise
    if hinted.kinds and not receipt.created_run:
        await space.best_effort("giving up a run id", _release(space, encoded, hinted))
    return receipt


async def _with_hints(space: Space, encoded: EncodedCommit, hinted: _Hinted) -> TurnReceipt:
    start = encoded.commit.run
    if space.apart and isinstance(start, RunStart):
        # A new run nearly always: ask for its id at once, instead of being told to.
        kinds = "rl" if start.lease_token is not None else "r"
        if space.hints.now() - space.hints.of(_place(space, encoded)) > space.hint_ms // 2:
            kinds += "t"
        await _write_hints(space, encoded, hinted, kinds, space.hints.now())
    for _ in range(_TRIES):
        answer = await _send(space, encoded, hinted)
        kind = answer[0]
        if kind == b"need":
            hinted.detached_since = answer[3]
            await _write_hints(space, encoded, hinted, answer[2].decode(), answer[1])
        elif kind == b"foreign":
            await _unowned(space, encoded, answer[1].decode())
            hinted.takeover = answer[2].decode()
        elif kind in (b"ok", b"known"):
            space.hints.saw_clock(answer[1])
            receipt = _receipt(encoded, answer)
            if kind == b"ok":
                await _afterwards(space, encoded, receipt, due=answer[8] == 1)
            return receipt
        else:
            raise _refusal(encoded, answer)
    raise StoreError("the clocks of the cluster's servers differ by more than a minute")


def _place(space: Space, encoded: EncodedCommit) -> str:
    return space.place(encoded.commit.thread_id)


async def _send(space: Space, encoded: EncodedCommit, hinted: _Hinted) -> list[Any]:
    commit, scope, keys = encoded.commit, space.scope, space.keys
    place = _place(space, encoded)
    run_id = encoded.run_id or ""
    member = place_of_run(place, run_id) if run_id else ""
    arguments: list[Argument] = [
        encoded.mark,
        new_commit_id(),
        space.ttl,
        place,
        int(space.apart),
        space.hints.of(place),
        hinted.kinds,
        hinted.at,
        space.hint_ms,
        hinted.takeover,
        run_id,
        commit.lease_token or "",
        int(commit.lease_expired),
        commit.thread_id,
        int(is_child_thread(commit.thread_id)),
        commit.run_id or "",
        member,
        *encoded.parts,
    ]
    parent = commit.run.parent_run_id if isinstance(commit.run, RunStart) else None
    near = [
        keys.threads(scope, commit.thread_id),
        keys.idle,
        keys.lost,
        keys.detached(scope),
        keys.detached(None),
        keys.cuts,
        keys.owner(scope, run_id),
        keys.children(scope, parent or ""),
    ]
    # Not again: the core sends a commit again itself, and counts it.
    answer: list[Any] = await space.of_thread(
        "commit", commit.thread_id, arguments, near=near, again=False
    )
    return answer


# -------------------------------------------------------------------------------- answers


def _receipt(encoded: EncodedCommit, answer: list[Any]) -> TurnReceipt:
    commit = encoded.commit
    if answer[0] == b"ok":
        _, _, revision, newest, numbers, created, cut, raw, _ = answer
        return TurnReceipt(
            revision=revision.decode(),
            newest=newest,
            numbers=numbers_from(numbers),
            run=_run(encoded, raw),
            created_run=created == 1,
            cut_id=cut.decode() or None,
        )
    _, _, incarnation, line, raw = answer
    try:
        _, version, numbers, flags, transcript, newest = line.split(b" ")
        return TurnReceipt(
            revision=_named(transcript, incarnation),
            newest=int(newest),
            numbers=numbers_from(b"" if numbers == b"-" else numbers),
            run=_run(encoded, raw),
            created_run=bool(int(flags) & _CREATED_RUN),
            cut_id=_named(version, incarnation) if int(flags) & _MADE_CUT else None,
            replayed=True,
        )
    except ValueError as error:
        raise CorruptRecord(f"thread {commit.thread_id!r}", f"commit line {line!r}") from error


_CREATED_RUN, _MADE_CUT = 1, 2


def _named(version: bytes, incarnation: bytes) -> str:
    return NO_THREAD if version == b"0" else f"{version.decode()}.{incarnation.decode()}"


def _run(encoded: EncodedCommit, raw: bytes | None) -> RunRecord | None:
    if raw is None or encoded.run_id is None or encoded.commit.run is None:
        return None
    return run_from(encoded.run_id, encoded.commit.thread_id, raw)[0]


def _refusal(encoded: EncodedCommit, answer: list[Any]) -> Exception:
    commit = encoded.commit
    kind, *rest = answer
    if kind == b"run":
        return run_conflict(rest, encoded.run_id or "", commit.thread_id)
    words = [part.decode() if isinstance(part, bytes) else part for part in rest]
    if kind == b"interrupt":
        return InterruptConflict(commit.thread_id, [words[0]], words[1])
    if kind == b"rows":
        return InvalidValue("activities", f"row {words[0]} is neither stored nor sent")
    if kind == b"cut":
        return ThreadConflict(commit.thread_id, message=f"there is no cut {words[0]!r}")
    if kind == b"thread":
        splice = commit.splice
        expected = splice.expected if splice is not None else commit.restore_expected
        return ThreadConflict(commit.thread_id, expected=expected, actual=words[0])
    raise AssertionError(f"the commit script answered {kind!r}")


# ---------------------------------------------------------------------- what is elsewhere


async def _unowned(space: Space, encoded: EncodedCommit, owner: str) -> str:
    """``owner``, a thread that the look-up names, if it has no such run: it was deleted, or ran
    out, and its look-up is left.

    Raises:
        RunConflict: it has one.
    """
    run_id = encoded.run_id or ""
    if await load_runs(space, owner, [run_id]):
        raise RunConflict(run_id, "foreign-thread", thread_id=encoded.commit.thread_id)
    return owner


async def _write_hints(
    space: Space, encoded: EncodedCommit, hinted: _Hinted, kinds: str, at: int
) -> None:
    """Write hints for a commit, with those that were written before: all count from ``at``."""
    commit, scope, keys = encoded.commit, space.scope, space.keys
    place = _place(space, encoded)
    wanted = set(kinds) | set(hinted.kinds)
    work: list[Callable[[], Awaitable[object]]] = []
    if "r" in wanted:
        # Whatever becomes of the claim: a commit that is refused takes all of it back.
        hinted.kinds = "".join(sorted({*hinted.kinds, "r"}))
        work.append(lambda: _claim(space, encoded, hinted))
        if (child := _child(space, encoded)) is not None:
            parent, member = child
            work.append(lambda: space.runner.run("children", [parent], ["add", member, space.ttl]))
    places: list[tuple[bytes, str, bytes | int, bool]] = []
    if "t" in wanted:
        places.append((keys.threads(scope, commit.thread_id), place, at, True))
        if not is_child_thread(commit.thread_id):
            places.append((keys.idle, place, at, True))
    if "l" in wanted:
        places.append((keys.lost, place_of_run(place, encoded.run_id or ""), at, False))
    if "d" in wanted:
        member = place_of_run(place, encoded.run_id or "")
        since = hinted.detached_since
        places.append((keys.detached(scope), member, since, False))
        places.append((keys.detached(None), member, since, False))
    if "c" in wanted:
        places.append((keys.cuts, place_of_cut(place, encoded.mark), at, False))

    def hint(row: tuple[bytes, str, bytes | int, bool]) -> Awaitable[object]:
        key, member, score, raised = row
        return space.runner.run("index", [key], ["hint", member, score, space.ttl, int(raised)])

    work += [partial(hint, row) for row in places]
    await space.runner.each(work, lambda call: call())
    if "t" in wanted:
        space.hints.put(place, at)
    hinted.kinds, hinted.at = "".join(sorted(wanted - {"t"})), at


async def _claim(space: Space, encoded: EncodedCommit, hinted: _Hinted) -> None:
    """Claim the run id for the thread.

    Raises:
        RunConflict: it belongs to another thread, or is being created there.
    """
    run_id, thread_id = encoded.run_id or "", encoded.commit.thread_id
    key = space.keys.owner(space.scope, run_id)

    async def ask() -> str:
        (owner,) = await space.runner.run(
            "owner",
            [key],
            ["claim", thread_id, encoded.mark, space.ttl, space.hint_ms, hinted.takeover],
        )
        return str(owner.decode())

    if (owner := await ask()) != thread_id:
        hinted.takeover = await _unowned(space, encoded, owner)
        if await ask() != thread_id:
            raise RunConflict(run_id, "foreign-thread", thread_id=thread_id)


def _child(space: Space, encoded: EncodedCommit) -> tuple[bytes, str] | None:
    """The parent's look-up and the run's place in it, if the commit starts a child."""
    start = encoded.commit.run
    if not isinstance(start, RunStart) or start.parent_run_id is None:
        return None
    place = place_of_run(_place(space, encoded), start.run_id)
    return space.keys.children(space.scope, start.parent_run_id), f"{place}/{encoded.mark}"


async def _release_unused(space: Space, encoded: EncodedCommit, hinted: _Hinted) -> None:
    """Take back the claim of a commit that was refused, unless it was applied long before, and
    the thread has forgotten the commit and not its run."""
    run_id, thread_id = encoded.run_id or "", encoded.commit.thread_id
    _, _, found = await space.of_thread("runs", thread_id, [0, 1, run_id])
    run = {} if found[0] is None else unpack(found[0], f"run {run_id!r}")
    if run.get("mark") != encoded.mark.encode():
        await _release(space, encoded, hinted)


async def _release(space: Space, encoded: EncodedCommit, hinted: _Hinted) -> None:
    """Take back the claim of a commit that created no run. Those of others stay."""
    if "r" not in hinted.kinds:
        return
    key = space.keys.owner(space.scope, encoded.run_id or "")
    arguments: list[Argument] = ["release", encoded.commit.thread_id, encoded.mark, 0, 0, ""]
    await space.runner.run("owner", [key], arguments)
    if (child := _child(space, encoded)) is not None:
        await space.runner.run("children", [child[0]], ["remove", child[1], 0])


async def _afterwards(
    space: Space, encoded: EncodedCommit, receipt: TurnReceipt, *, due: bool
) -> None:
    """What may be put off: a reader copes with its absence."""
    run = receipt.run
    patched = space.apart and isinstance(encoded.commit.run, RunPatch)
    if patched and run is not None and run.status != "running":
        await space.best_effort("taking a run out of the index", _unindex_run(space, encoded, run))
    if due:
        await space.best_effort(
            "renewing look-ups", renew_pointers(space, encoded.commit.thread_id)
        )


async def _unindex_run(space: Space, encoded: EncodedCommit, run: RunRecord) -> None:
    member = place_of_run(_place(space, encoded), run.run_id)
    keys = [space.keys.lost] if run.lease is not None else []
    if run.detached_since is not None:
        keys += [space.keys.detached(space.scope), space.keys.detached(None)]
    await space.runner.each(keys, lambda key: space.runner.run("index", [key], ["drop", member]))
