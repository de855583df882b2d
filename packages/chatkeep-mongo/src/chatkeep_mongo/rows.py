"""Documents to records and back.

A record is kept as its whole JSON, so that fields which a later chatkeep adds survive. Beside it
stand copies of what is searched for. A run's lease and its draft are no part of its body: they
change without the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chatkeep.codec import FORMAT_VERSION, decode, encode
from chatkeep.errors import CorruptRecord
from chatkeep.records import (
    ActivityRecord,
    DraftRecord,
    InterruptRecord,
    ModelMessage,
    RunRecord,
)
from chatkeep.rules import Entry, decode_message
from chatkeep.scope import Scope
from chatkeep_mongo.bodies import check_format, object_of, put_body
from chatkeep_mongo.layout import (
    Document,
    entry_id,
    interrupt_id_of,
    row_id,
    run_key,
)

__all__ = [
    "NO_DRAFT",
    "OPEN",
    "activity_document",
    "activity_of",
    "body_of_run",
    "draft_of",
    "entry_document",
    "interrupt_document",
    "interrupt_of",
    "messages_of",
    "run_fields",
    "run_of",
]

OPEN = ["running", "interrupted"]
"""Statuses of a run that has not ended."""

NO_DRAFT = {"draft": 0}
"""Fields of a run without what may be large and is not asked for."""


# ----------------------------------------------------------------------------- messages


def entry_document(t: str, number: int, entry: Entry, mark: str) -> tuple[Document, list[Document]]:
    """A message, and the pieces to store before it. ``mark`` names the commit that wrote it."""
    document: Document = {
        "_id": entry_id(t, number),
        "t": t,
        "n": number,
        "id": entry.message_id,
        "digest": entry.digest,
        "mark": mark,
        "format": FORMAT_VERSION,
    }
    return document, put_body(document, entry.body, t=t, piece=f"m{number:x}.{mark}")


def messages_of(documents: Iterable[Document], thread_id: str) -> list[ModelMessage]:
    """The messages of entries whose bodies are loaded.

    Raises:
        CorruptRecord: a body that is no JSON object with a role.
        SchemaOutOfDate: a newer chatkeep wrote it.
    """
    found: list[ModelMessage] = []
    for document in documents:
        what = f"message {document['n']} of thread {thread_id!r}"
        check_format(document, what)
        found.append(decode_message(_body(document, what), what))
    return found


def _body(document: Document, what: str) -> str | bytes:
    body: Any = document.get("body")
    if not isinstance(body, str | bytes):
        raise CorruptRecord(what, "has no body")
    return body


# --------------------------------------------------------------------------------- runs


def body_of_run(run: RunRecord) -> bytes:
    """The body of a run: all of it but the lease.

    Raises:
        InvalidValue: a field that cannot be stored.
    """
    data = run.to_json()
    data.pop("lease", None)
    return encode(data)


def run_fields(run: RunRecord, scope: Scope) -> Document:
    """What stands beside the body of a run to be searched for, but for its lease."""
    fields: Document = {
        "status": run.status,
        "detached_since": run.detached_since,
        "format": FORMAT_VERSION,
    }
    if run.parent_run_id is not None:
        fields["parent"] = run_key(scope, run.parent_run_id)
    return fields


def run_of(document: Document) -> RunRecord:
    """The record of a run's document whose body is loaded.

    Raises:
        CorruptRecord: it cannot be read back.
        SchemaOutOfDate: a newer chatkeep wrote it.
    """
    what = f"run {document['run_id']!r}"
    check_format(document, what)
    plain = object_of(decode(_body(document, what), what), what)
    token: Any = document.get("lease_token")
    if token is not None:
        plain["lease"] = {"token": token, "until": document.get("lease_until")}
    return RunRecord.from_json(plain, what)


def draft_of(document: Document) -> DraftRecord | None:
    """The draft in a run's document, or None; ``draft`` is loaded.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    body: Any = document.get("draft")
    if body is None:
        return None
    what = f"draft of run {document['run_id']!r}"
    messages: Any = decode(body, what)
    if not isinstance(messages, list):
        raise CorruptRecord(what, "is not a list")
    return DraftRecord.from_json(
        {
            "threadId": document["thread_id"],
            "runId": document["run_id"],
            "updatedAt": document.get("draft_at"),
            "messages": messages,
        },
        what,
    )


# --------------------------------------------------------------------------- interrupts


def interrupt_document(
    t: str, record: InterruptRecord, *, mark: str, place: Sequence[int]
) -> tuple[Document, list[Document]]:
    """An interrupt, and the pieces to store before it.

    Args:
        t: the thread's incarnation.
        record: the interrupt.
        mark: names the commit.
        place: version of the commit that created it, and its position there: the order of
            insertion.

    Raises:
        InvalidValue: a field that cannot be stored.
    """
    key = interrupt_id_of(t, record.run_id, record.interrupt_id)
    document: Document = {
        "_id": key,
        "t": t,
        "id": record.interrupt_id,
        "run_id": record.run_id,
        "status": record.status,
        "place": list(place),
        "format": FORMAT_VERSION,
    }
    body = encode(record.to_json())
    return document, put_body(document, body, t=t, piece=f"i{key[-64:]}.{mark}")


def interrupt_of(document: Document) -> InterruptRecord:
    """The record of an interrupt's document whose body is loaded.

    Raises:
        CorruptRecord: it cannot be read back.
        SchemaOutOfDate: a newer chatkeep wrote it.
    """
    what = f"interrupt {document['id']!r}"
    check_format(document, what)
    plain = object_of(decode(_body(document, what), what), what)
    return InterruptRecord.from_json(plain, what)


# ------------------------------------------------------------------------------ UI rows


def activity_document(
    t: str, position: int, body: bytes, mark: str
) -> tuple[Document, list[Document]]:
    """A UI row, and the pieces to store before it."""
    document: Document = {
        "_id": row_id(t, position),
        "t": t,
        "position": position,
        "format": FORMAT_VERSION,
    }
    return document, put_body(document, body, t=t, piece=f"a{position:x}.{mark}")


def activity_of(document: Document, thread_id: str) -> ActivityRecord:
    """The record of a UI row whose body is loaded.

    Raises:
        CorruptRecord: it cannot be read back.
        SchemaOutOfDate: a newer chatkeep wrote it.
    """
    what = f"activity {document['position']} of thread {thread_id!r}"
    check_format(document, what)
    plain = object_of(decode(_body(document, what), what), what)
    return ActivityRecord.from_json(plain, what)
