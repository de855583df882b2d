"""Rows to records and back. Columns are named here once, in the order that reads use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from chatkeep.codec import FORMAT_VERSION, decode, encode
from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep.records import (
    UNSET,
    ActivityRecord,
    DraftRecord,
    InterruptRecord,
    Lease,
    ModelMessage,
    RunError,
    RunPatch,
    RunRecord,
    is_run_status,
)
from chatkeep.rules import decode_message
from chatkeep.scope import Scope, key_digest
from chatkeep.stores import RunStart

__all__ = [
    "INTERRUPT_COLUMNS",
    "RUN_COLUMNS",
    "activities_from_rows",
    "check_format",
    "draft_from_row",
    "interrupt_from_row",
    "interrupt_key",
    "interrupt_values",
    "messages_from_bodies",
    "patch_values",
    "run_from_row",
    "run_key",
    "run_values",
    "start_values",
    "thread_key",
]

RUN_COLUMNS = (
    "run_id",
    "status",
    "started_at",
    "finished_at",
    "parent_run_id",
    "subagent_run_id",
    "name",
    "lease_token",
    "lease_until",
    "hide_from",
    "detached_since",
    "cancel_requested",
    "error",
    "usage",
    "extra",
    "format",
)
INTERRUPT_COLUMNS = (
    "run_id",
    "interrupt_id",
    "status",
    "requested_at",
    "resolved_at",
    "claimed_by",
    "payload",
    "response",
    "extra",
    "format",
)
_RUN_JSON = {
    "run_id": "runId",
    "status": "status",
    "started_at": "startedAt",
    "finished_at": "finishedAt",
    "parent_run_id": "parentRunId",
    "subagent_run_id": "subagentRunId",
    "name": "name",
    "hide_from": "hideFrom",
    "detached_since": "detachedSince",
    "cancel_requested": "cancelRequested",
}


def thread_key(scope: Scope, thread_id: str) -> bytes:
    """Digest that finds a thread's head."""
    return key_digest("thread", *scope.key, thread_id)


def run_key(scope: Scope, run_id: str) -> bytes:
    """Digest that finds a run: its id is unique in its scope, over all threads."""
    return key_digest("run", *scope.key, run_id)


def interrupt_key(run_id: str, interrupt_id: str) -> bytes:
    """Digest that finds an interrupt within its thread."""
    return key_digest("interrupt", run_id, interrupt_id)


def check_format(version: int, what: str) -> None:
    """Refuse a row of a later format.

    Raises:
        SchemaOutOfDate: a newer chatkeep wrote it.
        CorruptRecord: no version at all.
    """
    if version > FORMAT_VERSION:
        raise SchemaOutOfDate(
            f"{what} is stored in format {version}, by a newer chatkeep; this one reads up to "
            f"{FORMAT_VERSION}: upgrade chatkeep-sql",
            found=str(version),
            expected=str(FORMAT_VERSION),
        )
    if version < 1:
        raise CorruptRecord(what, f"format {version!r} does not exist")


def _object(body: str, what: str) -> dict[str, Any]:
    value = decode(body, what)
    if not isinstance(value, dict):
        raise CorruptRecord(what, "is not a JSON object")
    return cast("dict[str, Any]", value)


def _optional(value: Any) -> str | None:
    return None if value is None else encode(value).decode()


# --------------------------------------------------------------------------------- runs


def run_values(run: RunRecord) -> dict[str, Any]:
    """The columns of ``run`` that a write sets (not its keys)."""
    data = run.to_json()
    data.pop("threadId")
    lease = data.pop("lease", None)
    error = data.pop("error", None)
    usage = data.pop("usage", None)
    values = {column: data.pop(name, None) for column, name in _RUN_JSON.items()}
    return {
        **values,
        "lease_token": lease["token"] if lease else None,
        "lease_until": lease["until"] if lease else None,
        "error_code": _code_of(error),
        "error": _optional(error),
        "usage": _optional(usage),
        "extra": _optional(data or None),
        "format": FORMAT_VERSION,
    }


def _code_of(error: dict[str, Any] | None) -> str | None:
    """The code in a column of its own, for people who query the table; ``error`` is what is read
    back. No text column of PostgreSQL takes NUL, and an odd code must not keep a run from
    ending."""
    code = error.get("code") if error else None
    return code.replace("\x00", "\ufffd") if isinstance(code, str) else None


def patch_values(patch: RunPatch) -> dict[str, Any] | None:
    """The columns that ``patch`` sets; None if a field has no column of its own, or a value is
    not plainly what it should be: then the rules of the core must judge.

    Raises:
        InvalidValue: a value that cannot be stored.
    """
    if patch.extra:
        return None
    values: dict[str, Any] = {}
    for name, value in patch.changes().items():
        match name:
            case "status" if is_run_status(value):
                values[name] = value
            case "finished_at" | "detached_since" | "hide_from" if type(value) in _INTEGER:
                values[name] = value
            case "cancel_requested" if value is None or type(value) is bool:
                values[name] = value
            case "usage" if value is None or isinstance(value, dict):
                values[name] = _optional(value)
            case "error" if value is None or isinstance(value, RunError):
                plain = None if value is None else value.to_json()
                values["error"] = _optional(plain)
                values["error_code"] = _code_of(plain)
            case "lease" if value is None or isinstance(value, Lease):
                values["lease_token"] = value and value.token
                values["lease_until"] = value and value.until
            case _:
                return None
    return values


_INTEGER = (int, type(None))
_RUN_NAMES = {
    name for field, info in RunRecord.model_fields.items() for name in (field, info.alias or field)
}


def start_values(start: RunStart) -> dict[str, Any] | None:
    """The columns of a new run but for its lease; None if the rules of the core must judge."""
    # Callers without a type checker send anything.
    status: Any = start.status
    integers = {type(start.started_at), type(start.hide_from)}
    if not is_run_status(status) or not integers.issubset(_INTEGER):
        return None
    if not _RUN_NAMES.isdisjoint(start.extra) or None in start.extra.values():
        return None
    return {
        "run_id": start.run_id,
        "status": start.status,
        "started_at": start.started_at,
        "parent_run_id": start.parent_run_id,
        "subagent_run_id": start.subagent_run_id,
        "name": start.name,
        "lease_token": start.lease_token,
        "hide_from": start.hide_from,
        "extra": _optional(dict(start.extra) or None),
    }


def run_from_row(row: Sequence[Any], thread_id: str) -> RunRecord:
    """The record of a row of :data:`RUN_COLUMNS`.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    data: dict[str, Any] = dict(zip(RUN_COLUMNS, row, strict=False))
    what = f"run {data['run_id']!r}"
    check_format(data["format"], what)
    plain = _object(data["extra"], what) if data["extra"] is not None else {}
    plain["threadId"] = thread_id
    for column, name in _RUN_JSON.items():
        if (value := data[column]) is not None:
            plain[name] = bool(value) if column == "cancel_requested" else value
    if data["lease_token"] is not None:
        plain["lease"] = {"token": data["lease_token"], "until": data["lease_until"]}
    for name in ("error", "usage"):
        if data[name] is not None:
            plain[name] = _object(data[name], what)
    return RunRecord.from_json(plain, what)


# --------------------------------------------------------------------------- interrupts


def interrupt_values(record: InterruptRecord) -> dict[str, Any]:
    """The columns of ``record`` that a write sets (not its keys)."""
    data = record.to_json()
    for name in ("interruptId", "runId", "threadId", "status", "requestedAt", "payload"):
        data.pop(name)
    for name in ("resolvedAt", "response", "claimedBy"):
        data.pop(name, None)
    return {
        "run_id": record.run_id,
        "interrupt_id": record.interrupt_id,
        "status": record.status,
        "requested_at": record.requested_at,
        "resolved_at": record.resolved_at,
        "claimed_by": record.claimed_by,
        "payload": encode(record.payload).decode(),
        "response": None if record.response is UNSET else encode(record.response).decode(),
        "extra": _optional(data or None),
        "format": FORMAT_VERSION,
    }


def interrupt_from_row(row: Sequence[Any], thread_id: str) -> InterruptRecord:
    """The record of a row of :data:`INTERRUPT_COLUMNS`.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    data: dict[str, Any] = dict(zip(INTERRUPT_COLUMNS, row, strict=False))
    what = f"interrupt {data['interrupt_id']!r}"
    check_format(data["format"], what)
    plain = _object(data["extra"], what) if data["extra"] is not None else {}
    plain |= {
        "interruptId": data["interrupt_id"],
        "runId": data["run_id"],
        "threadId": thread_id,
        "status": data["status"],
        "requestedAt": data["requested_at"],
        "payload": _object(data["payload"], what),
    }
    if data["resolved_at"] is not None:
        plain["resolvedAt"] = data["resolved_at"]
    if data["claimed_by"] is not None:
        plain["claimedBy"] = data["claimed_by"]
    if data["response"] is not None:
        plain["response"] = decode(data["response"], what)
    return InterruptRecord.from_json(plain, what)


# --------------------------------------------------------------- messages and UI rows


def messages_from_bodies(
    bodies: Sequence[str | None], numbers: Sequence[int], thread_id: str
) -> list[ModelMessage]:
    """The messages of stored bodies. A body is None where its format is too new.

    Raises:
        CorruptRecord: a body that is no JSON object with a role.
        SchemaOutOfDate: a body that a newer chatkeep wrote.
    """
    out: list[ModelMessage] = []
    for body, number in zip(bodies, numbers, strict=True):
        if body is None:
            check_format(FORMAT_VERSION + 1, f"message {number} of thread {thread_id!r}")
        try:
            out.append(decode_message(body or ""))
        except CorruptRecord as error:
            what = f"message {number} of thread {thread_id!r}"
            raise CorruptRecord(what, error.reason) from error
    return out


def activities_from_rows(rows: Sequence[Sequence[Any]], thread_id: str) -> list[ActivityRecord]:
    """The records of rows (body, format), in order."""
    found: list[ActivityRecord] = []
    for position, (body, version, *_) in enumerate(rows):
        what = f"activity {position} of thread {thread_id!r}"
        check_format(version, what)
        found.append(ActivityRecord.from_json(_object(body, what), what))
    return found


def draft_from_row(row: Sequence[Any], thread_id: str) -> DraftRecord:
    """The record of a row (run_id, updated_at, body, format)."""
    run_id, updated_at, body, version, *_ = row
    what = f"draft of run {run_id!r}"
    check_format(version, what)
    messages = decode(body, what)
    return DraftRecord.from_json(
        {"threadId": thread_id, "runId": run_id, "updatedAt": updated_at, "messages": messages},
        what,
    )
