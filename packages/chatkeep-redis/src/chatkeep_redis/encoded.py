"""A commit with its values already judged, as the arguments of its script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatkeep.codec import encode
from chatkeep.errors import RecordTooLarge
from chatkeep.records import UNSET, RunError, RunPatch, RunRecord, is_run_status
from chatkeep.rules import Entry, encode_messages, patch_run, pending_interrupt, start_run
from chatkeep.stores import RunStart, TurnCommit
from chatkeep_redis.errors import MAX_VALUE_BYTES
from chatkeep_redis.rows import fields_of_interrupt, fields_of_run, pack
from chatkeep_redis.runner import Argument

__all__ = ["EncodedCommit", "check_size", "commit_mark", "encode_commit"]

_FIELDS = {
    "status": ("status",),
    "finished_at": ("finishedAt",),
    "error": ("error", "errorCode"),
    "usage": ("usage",),
    "cancel_requested": ("cancelRequested",),
    "detached_since": ("detachedSince",),
    "sandbox_key": ("sandboxKey",),
    "driver_epoch": ("driverEpoch",),
    "hide_from": ("hideFrom",),
    "detached": ("detached",),
    "lease": ("leaseToken", "leaseUntil"),
}
"""Fields of a patch, by the names under which they are stored."""


@dataclass(frozen=True, slots=True)
class EncodedCommit:
    """A commit; ``run_id`` is the run that it starts, patches or commits for."""

    commit: TurnCommit
    mark: str
    run_id: str | None
    parts: list[Argument]


def commit_mark(commit_id: str) -> str:
    """12 characters that stand for a commit id of any length, without space or line break."""
    return base64.urlsafe_b64encode(
        hashlib.blake2b(commit_id.encode(), digest_size=9).digest()
    ).decode()


def encode_commit(commit: TurnCommit) -> EncodedCommit:
    """Judge and encode everything in ``commit``, before anything is sent.

    Raises:
        InvalidValue: a part that cannot be stored.
        RecordTooLarge: a part longer than a server takes.
    """
    run_id = commit.run.run_id if isinstance(commit.run, RunStart) else commit.run_id
    # In the order of refusals: what cannot be stored meets no rule.
    tail = encode_messages(commit.splice.tail, "splice.tail") if commit.splice else []
    extra = encode_messages(commit.cut_append.messages) if commit.cut_append else []
    parts: list[Argument] = [
        *_run(commit),
        *_interrupts(commit),
        *_activities(commit),
        int(commit.drop_draft and commit.run_id is not None),
        *_transcript(commit, tail),
        *_cut_append(commit, extra),
    ]
    for part in parts:
        check_size("a part of the commit", part)
    return EncodedCommit(commit, commit_mark(commit.commit_id), run_id, parts)


def check_size(what: str, value: Argument) -> None:
    """Refuse what a server would answer by closing the connection.

    Raises:
        RecordTooLarge: longer than any server takes.
    """
    if isinstance(value, bytes) and len(value) > MAX_VALUE_BYTES:
        raise RecordTooLarge(what, len(value), MAX_VALUE_BYTES)


# --------------------------------------------------------------------------------- parts


def _run(commit: TurnCommit) -> list[Argument]:
    if isinstance(commit.run, RunStart):
        return _start(commit.thread_id, commit.run)
    if isinstance(commit.run, RunPatch):
        return _patch(commit, commit.run)
    return [""]


def _start(thread_id: str, start: RunStart) -> list[Argument]:
    fields = _plain_start(start)
    if fields is None:
        new = fields_of_run(start_run(None, thread_id, start, 0))
        # The lease is the script's: it has the clock.
        fields = [(name, value) for name, value in new.items() if not name.startswith("lease")]
    return [
        "start",
        start.lease_token or "",
        start.lease_ms,
        "" if start.hide_from is None else start.hide_from,
        int(start.parent_run_id is not None),
        pack(fields),
    ]


def _plain_start(start: RunStart) -> list[tuple[str, bytes]] | None:
    """The fields of a new run without what records check; None if a value is not plainly what it
    should be: then the rules of the core must judge."""
    # Callers without a type checker send anything.
    status: Any = start.status
    if not is_run_status(status) or start.extra or type(start.started_at) is not int:
        return None
    fields = [
        ("status", encode(status)),
        ("startedAt", encode(start.started_at)),
        ("parentRunId", start.parent_run_id),
        ("subagentRunId", start.subagent_run_id),
        ("name", start.name),
        ("hideFrom", start.hide_from),
    ]
    return [
        (name, value if isinstance(value, bytes) else encode(value))
        for name, value in fields
        if value is not None
    ]


def _plain_patch(patch: RunPatch) -> dict[str, bytes] | None:
    """The fields that a patch sets, without what records check; None as above."""
    fields: dict[str, bytes] = {}
    for name, value in patch.changes().items():
        match name:
            case "status" if is_run_status(value):
                fields[name] = encode(value)
            case "finished_at" | "detached_since" | "hide_from" if type(value) is int:
                fields[_FIELDS[name][0]] = encode(value)
            case "cancel_requested" if type(value) is bool:
                fields["cancelRequested"] = encode(value)
            case "usage" if type(value) is dict:
                fields[name] = encode(value, "run.usage")
            case "error" if isinstance(value, RunError):
                plain = value.to_json()
                fields[name] = encode(plain)
                if (code := plain.get("code")) is not None:
                    fields["errorCode"] = code.encode()
            case _ if value is not None:
                return None
            case "status":
                return None
            case _:
                pass  # cleared
    return None if patch.extra else fields


def _patch(commit: TurnCommit, patch: RunPatch) -> list[Argument]:
    # Only the rule of statuses depends on what is stored; the script applies that one.
    after = _plain_patch(patch)
    if after is None:
        blank = RunRecord(
            run_id=commit.run_id or "", thread_id=commit.thread_id, status="running", started_at=0
        )
        after = fields_of_run(patch_run(blank, patch, holds_lease=True))
    names = [name for field in patch.changes() for name in _FIELDS[field]]
    names += [f"+{name}" for name in patch.extra]
    sets = [name for name in names if name in after]
    drops = [name for name in names if name not in after]
    return [
        "patch",
        after["status"] if patch.status is not UNSET else "",
        len(sets),
        *(part for name in sets for part in (name, after[name])),
        len(drops),
        *drops,
    ]


def _interrupts(commit: TurnCommit) -> list[Argument]:
    parts: list[Argument] = [len(commit.answers)]
    for i, answer in enumerate(commit.answers):
        response = b""
        if answer.response is not UNSET:
            response = encode(answer.response, f"answers[{i}].response")
        parts += [answer.interrupt_id, answer.run_id or "", encode(answer.status), response]
    parts.append(len(commit.claims))
    for ref in commit.claims:
        parts += [ref.interrupt_id, ref.run_id or ""]
    parts.append(len(commit.interrupts))
    for record in commit.interrupts:
        fields = fields_of_interrupt(pending_interrupt(record))
        key = f"{record.run_id}\x00{record.interrupt_id}"
        parts += [key, record.interrupt_id, pack(fields.items())]
    return parts


def _activities(commit: TurnCommit) -> list[Argument]:
    write = commit.activities
    if write is None:
        return [""]
    needed = max((i + 1 for i in range(write.length) if i not in write.puts), default=0)
    bodies = [
        (position, encode(row.to_json(), f"activities[{position}]"))
        for position, row in write.puts.items()
        if position < write.length
    ]
    parts: list[Argument] = [write.length, needed, len(bodies)]
    for position, body in bodies:
        parts += [position, body]
    return parts


def _transcript(commit: TurnCommit, tail: Sequence[Entry]) -> list[Argument]:
    if commit.splice is not None:
        splice = commit.splice
        return [
            "splice",
            splice.keep_through,
            _expected(splice.expected),
            int(splice.archive),
            len(tail),
            *_entries(tail),
        ]
    if commit.restore is not None:
        return ["restore", f"={commit.restore}", _expected(commit.restore_expected)]
    if commit.restore_expected is not None:
        return ["check", _expected(commit.restore_expected)]
    return [""]


def _cut_append(commit: TurnCommit, extra: Sequence[Entry]) -> list[Argument]:
    if commit.cut_append is None:
        return [""]
    return [f"={commit.cut_append.cut_id}", len(extra), *_entries(extra)]


def _expected(revision: str | None) -> str:
    return "-" if revision is None else f"={revision}"


def _entries(entries: Sequence[Entry]) -> list[Argument]:
    found: list[Argument] = []
    for entry in entries:
        found += [entry.digest + (entry.message_id or "").encode(), entry.body]
    return found
