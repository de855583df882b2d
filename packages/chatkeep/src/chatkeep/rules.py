"""What a commit means: the pure rules that every backend applies, each written once.

Nothing here does I/O or reads a clock. A backend reads what a :class:`TurnCommit` touches,
asks these functions what becomes of it, and writes the answer in the same guard; one whose
database decides in a single statement (PostgreSQL) writes the same rules in SQL and is held
to them by the conformance suite.

Three rules about a thread that no record shows:

* its revision is :data:`~chatkeep.stores.NO_THREAD` until a transcript is first written: a
  run, an interrupt or an activity creates the thread but moves no revision;
* live entries are always in ascending order of their numbers. A cut remembers the number it
  was made behind (``after``); a restore cuts what is numbered above that, then puts its
  own entries back;
* a splice that keeps everything and adds nothing leaves the revision alone.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import orjson
from pydantic import ValidationError

from chatkeep.codec import decode, digest, encode
from chatkeep.errors import CorruptRecord, InterruptConflict, InvalidValue, RunConflict
from chatkeep.records import (
    InterruptRecord,
    Lease,
    ModelMessage,
    Record,
    RunPatch,
    RunRecord,
    RunStatus,
    is_terminal,
)
from chatkeep.scope import check_id
from chatkeep.stores import InterruptAnswer, InterruptRef, RunStart, TurnCommit

__all__ = [
    "ANCHOR",
    "ANY_REVISION",
    "CHILD_PREFIX",
    "Entry",
    "active_runs",
    "anchor_of",
    "check_driver",
    "check_transition",
    "check_writer",
    "claim_interrupt",
    "copy_record",
    "decode_cursor",
    "decode_message",
    "encode_cursor",
    "encode_messages",
    "find_interrupt",
    "holds_lease",
    "is_child_thread",
    "new_commit_id",
    "new_revision",
    "patch_run",
    "pending_interrupt",
    "renewed_run",
    "settle_interrupt",
    "split_cut",
    "start_run",
    "visible_interrupt",
]

_R = TypeVar("_R", bound=Record)

ANY_REVISION = "*"
"""As ``expected`` of ``_metadata_put``: write whatever the revision is."""

ANCHOR = "anchorId"
"""Extra field of a run: id of the message that it answers."""

CHILD_PREFIX = "subagent:"
"""Threads of subagents are named ``subagent:<run id of the child>``."""


def is_child_thread(thread_id: str) -> bool:
    """Whether the thread is a subagent's."""
    return thread_id.startswith(CHILD_PREFIX)


def new_commit_id() -> str:
    """A fresh id for a boundary; keep it through retries."""
    return secrets.token_urlsafe(12)


def new_revision(version: int) -> str:
    """A revision that no earlier incarnation of the thread can have had."""
    return f"{version:x}.{secrets.token_hex(8)}"


# ----------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Entry:
    """One message as it is stored. ``message_id`` is None for a message without one."""

    message_id: str | None
    digest: bytes
    body: bytes


def encode_messages(messages: Sequence[ModelMessage], what: str = "messages") -> list[Entry]:
    """The entries for ``messages``. An empty ``id`` counts as none.

    Raises:
        InvalidValue: not an object, no role, an id that may not be one, a value that cannot be
            stored.
    """
    return [_encode_message(message, f"{what}[{i}]") for i, message in enumerate(messages)]


def _encode_message(message: ModelMessage, path: str) -> Entry:
    # Only the type checker knows that a message is a mapping; callers send anything.
    value = cast("Any", message)
    if not isinstance(value, Mapping):
        raise InvalidValue(path, f"a message is an object, not {type(value).__name__}")
    if not isinstance(cast("Mapping[str, Any]", value).get("role"), str):
        raise InvalidValue(f"{path}.role", "a message has a role, which is text")
    message_id = cast("Mapping[str, Any]", value).get("id")
    if message_id is None or message_id == "":
        message_id = None
    else:
        check_id(message_id, f"{path}.id")
    body = encode(cast("Any", value), path)
    return Entry(message_id, digest(body), body)


def decode_message(body: bytes | str, what: str = "message") -> ModelMessage:
    """The message of a body.

    Raises:
        CorruptRecord: no JSON (see :func:`chatkeep.codec.decode`), or no object with a role.
    """
    message: Any = decode(body, what)
    if type(message) is not dict or type(cast("Any", message).get("role")) is not str:
        raise CorruptRecord(what, "is no JSON object with a role")
    return cast("ModelMessage", message)


def split_cut(
    cut: Iterable[tuple[int, str | None]], tail: Sequence[Entry], *, archive: bool
) -> tuple[list[int], list[int]]:
    """Of the cut entries (number, message id): those to archive, and those to erase.

    An entry whose message id returns in the tail is a replacement: its old copy goes.
    """
    returning = {entry.message_id for entry in tail} - {None}
    kept: list[int] = []
    gone: list[int] = []
    for number, message_id in cut:
        (kept if archive and message_id not in returning else gone).append(number)
    return kept, gone


# --------------------------------------------------------------------------------- runs


def check_transition(run: RunRecord, status: RunStatus, *, holds_lease: bool) -> None:
    """The state machine of a run, with its guards.

    ``running`` and ``interrupted`` go anywhere but back to ``running``; an ended run keeps its
    status (writing the same one again is allowed). One exception: a run that ``sweep`` marked
    ``failed`` with code ``worker_lost`` may still be ended by the worker that holds its token.

    Raises:
        RunConflict: ``transition``.
    """
    if run.status == status or not is_terminal(run.status):
        if run.status == "interrupted" and status == "running":
            raise RunConflict(run.run_id, "transition", detail="interrupted to running")
        return
    if holds_lease and _worker_lost(run):
        return
    raise RunConflict(run.run_id, "transition", detail=f"{run.status} to {status}")


def _worker_lost(run: RunRecord) -> bool:
    return run.status == "failed" and run.error is not None and run.error.code == "worker_lost"


def holds_lease(run: RunRecord | None, token: str | None) -> bool:
    """Whether ``token`` is the one on the run; one that ran out is held until taken over."""
    return (
        run is not None and token is not None and run.lease is not None and run.lease.token == token
    )


def check_driver(commit: TurnCommit, run: RunRecord | None, now: int) -> None:
    """The lease guard of a commit; ``run`` is the committing run as stored in this thread.

    A commit that starts its run is judged by :func:`start_run` instead.

    Raises:
        RunConflict: ``lease-lost`` (also when the run does not exist); ``running`` when the
            commit demands an expired lease and it has not expired.
    """
    if commit.lease_token is None or isinstance(commit.run, RunStart):
        return
    run_id = commit.run_id or ""
    if run is None or run.lease is None or run.lease.token != commit.lease_token:
        raise RunConflict(run_id, "lease-lost", thread_id=commit.thread_id)
    if commit.lease_expired and run.lease.until > now:
        raise RunConflict(run_id, "running", thread_id=commit.thread_id)


def start_run(stored: RunRecord | None, thread_id: str, start: RunStart, now: int) -> RunRecord:
    """The run after ``start``; ``stored`` is the run of this id in any thread of the scope.

    Raises:
        RunConflict: see :class:`~chatkeep.stores.RunStart`.
        InvalidValue: a field that no run can have.
    """
    lease = (
        Lease(token=start.lease_token, until=now + start.lease_ms)
        if start.lease_token is not None
        else None
    )
    if stored is None:
        return _valid_run(
            {
                **_extra_fields(start.extra),
                "run_id": start.run_id,
                "thread_id": thread_id,
                "status": start.status,
                "started_at": start.started_at,
                "parent_run_id": start.parent_run_id,
                "subagent_run_id": start.subagent_run_id,
                "name": start.name,
                "hide_from": start.hide_from,
                "lease": lease,
            }
        )
    if stored.thread_id != thread_id:
        raise RunConflict(start.run_id, "foreign-thread", thread_id=thread_id)
    if stored.terminal:
        raise RunConflict(start.run_id, "terminal", thread_id=thread_id)
    if stored.status == "running" and stored.live(now):
        raise RunConflict(start.run_id, "running", thread_id=thread_id)
    changes: dict[str, Any] = {"lease": lease}
    if start.hide_from is not None:
        changes["hide_from"] = start.hide_from
    return stored.model_copy(update=changes)


def patch_run(run: RunRecord, patch: RunPatch, *, holds_lease: bool) -> RunRecord:
    """The run after ``patch``. A run that leaves ``failed`` loses its error with it.

    Raises:
        RunConflict: ``transition``, see :func:`check_transition`.
        InvalidValue: a field that no run can have, or one that never changes.
    """
    changes = {**patch.changes(), **_extra_fields(patch.extra)}
    status = changes.get("status")
    if "status" in changes:
        if status is None:
            raise InvalidValue("run.status", "cannot be cleared")
        check_transition(run, status, holds_lease=holds_lease)
        if run.status == "failed" and status != "failed":
            changes.setdefault("error", None)
        if not is_terminal(status) and is_terminal(run.status):
            changes.setdefault("finished_at", None)
    data = run.model_dump(by_alias=False)
    for name, value in changes.items():
        if value is None:
            data.pop(name, None)
        else:
            data[name] = value
    return _valid_run(data)


def renewed_run(
    run: RunRecord | None, run_id: str, thread_id: str, token: str, lease_ms: int, now: int
) -> RunRecord:
    """The run with its lease extended.

    Raises:
        RunConflict: ``unknown``, ``terminal`` or ``lease-lost``, in this order.
    """
    check_writer(run, run_id, thread_id, token)
    lease = Lease(token=token, until=now + lease_ms)
    return cast("RunRecord", run).model_copy(update={"lease": lease})


def check_writer(run: RunRecord | None, run_id: str, thread_id: str, token: str | None) -> None:
    """The guard of drafts (``token`` may be absent) and of renewals.

    Raises:
        RunConflict: ``unknown``, ``terminal`` or ``lease-lost``, in this order.
    """
    if run is None:
        raise RunConflict(run_id, "unknown", thread_id=thread_id)
    if run.terminal:
        raise RunConflict(run_id, "terminal", thread_id=thread_id)
    if token is not None and not holds_lease(run, token):
        raise RunConflict(run_id, "lease-lost", thread_id=thread_id)


def anchor_of(run: RunRecord) -> str | None:
    """Id of the message that the run answers; None for a run that was not told."""
    value = (run.model_extra or {}).get(ANCHOR)
    return value if isinstance(value, str) else None


def active_runs(runs: Iterable[RunRecord], now: int) -> list[RunRecord]:
    """The running ones with a live lease, in the order given."""
    return [run for run in runs if run.status == "running" and run.live(now)]


_RUN_NAMES = {
    name for field, info in RunRecord.model_fields.items() for name in (field, info.alias or field)
}


def _extra_fields(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in extra:
        if name in _RUN_NAMES:
            raise InvalidValue(f"run.extra[{name!r}]", "is a field of its own")
    return extra


def _valid_run(data: Mapping[str, Any]) -> RunRecord:
    try:
        return copy_record(RunRecord.model_validate(data))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(["run", *(str(part) for part in first["loc"])])
        raise InvalidValue(path, first["msg"]) from error


# --------------------------------------------------------------------------- interrupts


def pending_interrupt(record: InterruptRecord) -> InterruptRecord:
    """``record`` as it is born: pending, without answer or claim, whatever it says."""
    plain = record.to_json()
    for name in ("response", "resolvedAt", "claimedBy"):
        plain.pop(name, None)
    return InterruptRecord.from_json({**plain, "status": "pending"})


def find_interrupt(
    records: Sequence[InterruptRecord], ref: InterruptRef | InterruptAnswer
) -> InterruptRecord | None:
    """What ``ref`` names among the interrupts of a thread (in list order): that of its run;
    without a run the pending one, else the newest."""
    named = [
        record
        for record in records
        if record.interrupt_id == ref.interrupt_id and ref.run_id in (None, record.run_id)
    ]
    pending = [record for record in named if record.status == "pending"]
    best = pending or named
    return best[-1] if best else None


def settle_interrupt(
    record: InterruptRecord | None,
    answer: InterruptAnswer,
    *,
    thread_id: str,
    run_id: str | None,
    claim_live: bool,
    now: int,
) -> InterruptRecord:
    """``record`` with its answer; ``claim_live``: the claiming run is live.

    Raises:
        InterruptConflict: unknown, settled, or claimed by a live run other than ``run_id``.
    """
    if record is None:
        raise InterruptConflict(thread_id, [answer.interrupt_id], "does not exist")
    if record.status != "pending":
        raise InterruptConflict(thread_id, [answer.interrupt_id], f"is already {record.status}")
    if record.claimed_by is not None and record.claimed_by != run_id and claim_live:
        raise InterruptConflict(thread_id, [answer.interrupt_id], "is claimed by another run")
    return record.model_copy(
        update={
            "status": answer.status,
            "resolved_at": now,
            "response": answer.response,
            "claimed_by": None,
        }
    )


def claim_interrupt(
    record: InterruptRecord | None,
    ref: InterruptRef,
    *,
    thread_id: str,
    run_id: str,
    claim_live: bool,
) -> InterruptRecord:
    """``record`` claimed for ``run_id``.

    A live claim of the same run refuses too: it is another driver's, since a driver's own
    retry carries the commit id that is recognised before.

    Raises:
        InterruptConflict: unknown, settled, or claimed by a live run.
    """
    if record is None:
        raise InterruptConflict(thread_id, [ref.interrupt_id], "does not exist")
    if record.status != "pending":
        raise InterruptConflict(thread_id, [ref.interrupt_id], f"is already {record.status}")
    if record.claimed_by is not None and claim_live:
        raise InterruptConflict(thread_id, [ref.interrupt_id], "is claimed by another run")
    return record.model_copy(update={"claimed_by": run_id})


def visible_interrupt(record: InterruptRecord, *, claim_live: bool) -> InterruptRecord:
    """``record`` as readers see it: a claim ends with its run."""
    if record.claimed_by is None or claim_live:
        return record
    return record.model_copy(update={"claimed_by": None})


# ------------------------------------------------------------------------------- values


def copy_record(record: _R) -> _R:
    """A copy that shares nothing with ``record``, through the codec.

    Raises:
        InvalidValue: a field holds what cannot be stored.
    """
    return type(record).from_json(record.to_json())


def encode_cursor(*parts: int | str) -> str:
    """An opaque text for a place in a list."""
    return base64.urlsafe_b64encode(orjson.dumps(parts)).decode().rstrip("=")


def decode_cursor(cursor: str, *kinds: type[int | str]) -> tuple[Any, ...]:
    """The parts of :func:`encode_cursor`, of these types.

    Raises:
        InvalidValue: a text that is no cursor of ours.
    """
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        parts = tuple[Any, ...](orjson.loads(raw))
    except (binascii.Error, ValueError, TypeError):
        raise InvalidValue("cursor", "is not a cursor of this list") from None
    if tuple(map(type, parts)) != kinds:
        raise InvalidValue("cursor", "is not a cursor of this list")
    return parts
