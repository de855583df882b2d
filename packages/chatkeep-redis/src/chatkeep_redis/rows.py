"""Records to what is stored, and back.

A run, an interrupt or a cut is one hash value: fields one after another, each as ``<name
length>:<value length>:<name><value>``, so that a script changes one field and leaves the rest as
it is. Values are JSON, but for those that scripts compare or set (:data:`_PLAIN`), which are
plain text. A field that chatkeep has no name for has ``+`` in front of its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from chatkeep.codec import FORMAT_VERSION, decode, encode
from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep.records import (
    ActivityRecord,
    DraftRecord,
    InterruptRecord,
    ModelMessage,
    Record,
    RunRecord,
)
from chatkeep.rules import decode_message

__all__ = [
    "activity_from",
    "check_format",
    "draft_from",
    "fields_of_interrupt",
    "fields_of_run",
    "interrupt_from",
    "messages_from",
    "numbers_from",
    "pack",
    "ranges_from",
    "run_from",
    "unpack",
]

_PLAIN = {"order", "mark", "leaseToken", "leaseUntil", "errorCode", "claimedBy"}


def pack(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """Fields as one value."""
    parts: list[bytes] = []
    for name, value in fields:
        raw = name.encode()
        parts.append(b"%d:%d:" % (len(raw), len(value)) + raw + value)
    return b"".join(parts)


def unpack(raw: bytes, what: str) -> dict[str, bytes]:
    """The fields of a value.

    Raises:
        CorruptRecord: it is no such value.
    """
    fields: dict[str, bytes] = {}
    at = 0
    try:
        while at < len(raw):
            colon = raw.index(b":", at)
            second = raw.index(b":", colon + 1)
            name_end = second + 1 + int(raw[at:colon])
            end = name_end + int(raw[colon + 1 : second])
            if end > len(raw):
                raise CorruptRecord(what, "a field is cut short")
            fields[raw[second + 1 : name_end].decode()] = raw[name_end:end]
            at = end
    except ValueError as error:
        raise CorruptRecord(what, str(error)) from error
    return fields


def check_format(version: bytes | int, what: str) -> None:
    """Refuse what a later version wrote.

    Raises:
        SchemaOutOfDate: a newer chatkeep wrote it.
        CorruptRecord: no version at all.
    """
    try:
        number = int(version)
    except ValueError as error:
        raise CorruptRecord(what, f"{version!r} is no format") from error
    if number > FORMAT_VERSION:
        raise SchemaOutOfDate(
            f"{what} is stored in format {number}, by a newer chatkeep; this one reads up to "
            f"{FORMAT_VERSION}: upgrade chatkeep-redis",
            found=str(number),
            expected=str(FORMAT_VERSION),
        )
    if number < 1:
        raise CorruptRecord(what, f"format {number} does not exist")


def _extra_names(record: Record) -> set[str]:
    return set(record.model_extra or ())


def _plain_json(fields: Mapping[str, bytes], what: str) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in _PLAIN:
            plain[name.removeprefix("+")] = decode(value, what)
    return plain


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord(what, str(error)) from error


def _integer(value: bytes, what: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise CorruptRecord(what, str(error)) from error


# --------------------------------------------------------------------------------- runs


def fields_of_run(run: RunRecord) -> dict[str, bytes]:
    """The fields of a run, but for its ids, which its place gives."""
    data = run.to_json()
    extra = _extra_names(run)
    fields: dict[str, bytes] = {}
    for name, value in data.items():
        if name in ("runId", "threadId"):
            continue
        if name == "lease":
            fields["leaseToken"] = value["token"].encode()
            fields["leaseUntil"] = str(value["until"]).encode()
            continue
        fields[f"+{name}" if name in extra else name] = encode(value)
        if name == "error" and isinstance(code := value.get("code"), str):
            fields["errorCode"] = code.encode()
    return fields


def run_from(run_id: str, thread_id: str, raw: bytes) -> tuple[RunRecord, int]:
    """A stored run, and its place in the order of creation.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    what = f"run {run_id!r}"
    fields = unpack(raw, what)
    plain = _plain_json(fields, what)
    plain |= {"runId": run_id, "threadId": thread_id}
    if "leaseToken" in fields and "leaseUntil" in fields:
        plain["lease"] = {
            "token": _text(fields["leaseToken"], what),
            "until": _integer(fields["leaseUntil"], what),
        }
    return RunRecord.from_json(plain, what), _integer(fields.get("order", b"0"), what)


# --------------------------------------------------------------------------- interrupts


def fields_of_interrupt(record: InterruptRecord) -> dict[str, bytes]:
    """The fields of an interrupt, but for its ids, which its place gives."""
    extra = _extra_names(record)
    fields: dict[str, bytes] = {}
    for name, value in record.to_json().items():
        if name in ("interruptId", "runId", "threadId"):
            continue
        if name == "claimedBy":
            fields[name] = value.encode()
        else:
            fields[f"+{name}" if name in extra else name] = encode(value)
    return fields


def interrupt_from(key: bytes, thread_id: str, raw: bytes) -> tuple[InterruptRecord, int]:
    """A stored interrupt, and its place in the order of creation.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    run_id, nul, interrupt_id = _text(key, "an interrupt").partition("\x00")
    what = f"interrupt {interrupt_id!r}"
    if not nul:
        raise CorruptRecord("an interrupt", f"{key!r} names none")
    fields = unpack(raw, what)
    plain = _plain_json(fields, what)
    plain |= {"interruptId": interrupt_id, "runId": run_id, "threadId": thread_id}
    if "claimedBy" in fields:
        plain["claimedBy"] = _text(fields["claimedBy"], what)
    return InterruptRecord.from_json(plain, what), _integer(fields.get("order", b"0"), what)


# --------------------------------------------------------------- messages and UI rows


def messages_from(
    bodies: Iterable[bytes | None], numbers: Iterable[int], thread_id: str
) -> list[ModelMessage]:
    """The messages of stored bodies.

    Raises:
        CorruptRecord: a body that is missing, or no JSON object with a role.
    """
    out: list[ModelMessage] = []
    for body, number in zip(bodies, numbers, strict=True):
        try:
            out.append(decode_message(b"" if body is None else body))
        except CorruptRecord as error:
            what = f"message {number} of thread {thread_id!r}"
            reason = "is missing" if body is None else error.reason
            raise CorruptRecord(what, reason) from error
    return out


def activity_from(position: int, thread_id: str, body: bytes) -> ActivityRecord:
    """A stored row.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    what = f"activity {position} of thread {thread_id!r}"
    return ActivityRecord.from_json(_object(body, what), what)


def draft_from(run_id: str, thread_id: str, raw: bytes) -> DraftRecord:
    """A stored draft: format, time, and the messages as JSON.

    Raises:
        CorruptRecord: it cannot be read back.
        SchemaOutOfDate: a newer chatkeep wrote it.
    """
    what = f"draft of run {run_id!r}"
    try:
        version, updated_at, body = raw.split(b" ", 2)
    except ValueError as error:
        raise CorruptRecord(what, "has no head") from error
    check_format(version, what)
    data = {
        "threadId": thread_id,
        "runId": run_id,
        "updatedAt": _integer(updated_at, what),
        "messages": decode(body, what),
    }
    return DraftRecord.from_json(data, what)


def _object(body: bytes, what: str) -> dict[str, Any]:
    value = decode(body, what)
    if not isinstance(value, dict):
        raise CorruptRecord(what, "is not a JSON object")
    return cast("dict[str, Any]", value)


# ------------------------------------------------------------------------------- numbers


def numbers_from(line: bytes) -> list[int]:
    """The numbers of ``1-5,8-8``.

    Raises:
        CorruptRecord: it is no such text.
    """
    found: list[int] = []
    try:
        for part in line.decode().split(",") if line else ():
            first, last = part.split("-")
            found += range(int(first), int(last) + 1)
    except ValueError as error:
        raise CorruptRecord("a range of numbers", str(error)) from error
    return found


def ranges_from(numbers: Iterable[int]) -> bytes:
    """Ascending numbers as text, see :func:`numbers_from`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" for first, last in parts).encode()
