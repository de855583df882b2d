"""Rows to records and back: runs, interrupts, drafts, cuts, and what finds them.

The body of a row is the whole record as JSON, so fields that only a later version knows
survive. What people, conditions and indexes look at stands beside it as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatkeep.codec import FORMAT_VERSION, decode, encode
from chatkeep.errors import CorruptRecord
from chatkeep.records import (
    CutRecord,
    DraftRecord,
    InterruptRecord,
    Lease,
    ModelMessage,
    RunRecord,
)
from chatkeep.rules import Entry, decode_message
from chatkeep.scope import Scope
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.head import Head, version_name
from chatkeep_dynamodb.items import Item, body_of, check_format, object_of, with_body
from chatkeep_dynamodb.keys import (
    CUT,
    DRAFT,
    RUN,
    child_sk,
    due_partition,
    interrupt_sk,
    list_partition,
    number_sk,
    row_sk,
    run_pk,
    sortable,
    thread_pk,
)

__all__ = [
    "Cut",
    "StoredInterrupt",
    "StoredRun",
    "draft_expired",
    "draft_from_item",
    "draft_items",
    "entry_items",
    "lookup_items",
    "message_from_item",
    "scope_of",
]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and what only the table knows of it: its place in the order of creation (in its
    thread, and by the clock), the version that wrote it, and its chunks."""

    record: RunRecord
    order: int
    created: int
    version: int
    parts: int = 1

    @property
    def lease_until(self) -> int | None:
        """End of its lease, as the condition of a write names it."""
        return None if self.record.lease is None else self.record.lease.until

    def to_items(self, head: Head) -> list[Item]:
        """Its rows; the first is the run itself."""
        run = self.record
        plain = run.to_json()
        plain.pop("lease", None)
        tenant, user = head.scope.key
        pk = thread_pk(head.scope, head.thread_id)
        item: Item = {
            "pk": pk,
            "sk": row_sk(RUN, head.incarnation, run.run_id),
            "kind": "run",
            "tenant": tenant,
            "user": user,
            "thread": head.thread_id,
            "run_id": run.run_id,
            "status": run.status,
            "started_at": run.started_at,
            "order": self.order,
            "created": self.created,
            "version": self.version,
            "format": FORMAT_VERSION,
        }
        if run.parent_run_id is not None:
            item["parent_run_id"] = run.parent_run_id
        if run.lease is not None:
            item["lease_token"] = run.lease.token
            item["lease_until"] = run.lease.until
        if run.status == "running":
            item |= _due_of(run, pk)
            if run.detached_since is not None:
                item["list"] = list_partition(head.scope, "left")
                item["listed_at"] = f"{sortable(run.detached_since)}/{sortable(self.created)}"
        return with_body(item, encode(plain, "run"), {"version": self.version})

    @classmethod
    def from_item(cls, item: Item, chunks: Sequence[Item] = ()) -> StoredRun:
        """The run of its rows.

        Raises:
            CorruptRecord: it cannot be read back.
        """
        what = f"run {item.get('run_id')!r}"
        check_format(item, what)
        plain = object_of(body_of(item, chunks, what), what)
        if "lease_token" in item:
            plain["lease"] = {"token": item["lease_token"], "until": item["lease_until"]}
        try:
            return cls(
                RunRecord.from_json(plain, what),
                item["order"],
                item["created"],
                item["version"],
                item.get("parts", 1),
            )
        except KeyError as error:
            raise CorruptRecord(what, f"has no {error}") from error

    def renewed(self, until: int) -> StoredRun:
        """With its lease extended."""
        if self.record.lease is None:
            return self
        lease = Lease(token=self.record.lease.token, until=until)
        record = self.record.model_copy(update={"lease": lease})
        return StoredRun(record, self.order, self.created, self.version, self.parts)


def _due_of(run: RunRecord, pk: str) -> Item:
    """When somebody should look at a running run: it was left, or its lease has run out."""
    moments = [run.detached_since, None if run.lease is None else run.lease.until]
    known = [moment for moment in moments if moment is not None]
    return {"due": due_partition("sweep", pk), "due_at": min(known)} if known else {}


@dataclass(frozen=True, slots=True)
class StoredInterrupt:
    """An interrupt, its place in the order of creation, the version that wrote it, its chunks."""

    record: InterruptRecord
    order: int
    version: int
    parts: int = 1

    @property
    def key(self) -> tuple[str, str]:
        """Run id and interrupt id."""
        return (self.record.run_id, self.record.interrupt_id)

    def to_items(self, head: Head) -> list[Item]:
        """Its rows; the first is the interrupt itself."""
        record = self.record
        item: Item = {
            "pk": thread_pk(head.scope, head.thread_id),
            "sk": interrupt_sk(head.incarnation, record.run_id, record.interrupt_id),
            "kind": "interrupt",
            "run_id": record.run_id,
            "interrupt_id": record.interrupt_id,
            "status": record.status,
            "requested_at": record.requested_at,
            "order": self.order,
            "version": self.version,
            "format": FORMAT_VERSION,
        }
        if record.resolved_at is not None:
            item["resolved_at"] = record.resolved_at
        if record.claimed_by is not None:
            item["claimed_by"] = record.claimed_by
        body = encode(record.to_json(), "interrupt")
        return with_body(item, body, {"version": self.version})

    @classmethod
    def from_item(cls, item: Item, chunks: Sequence[Item] = ()) -> StoredInterrupt:
        """The interrupt of its rows.

        Raises:
            CorruptRecord: it cannot be read back.
        """
        what = f"interrupt {item.get('interrupt_id')!r}"
        check_format(item, what)
        plain = object_of(body_of(item, chunks, what), what)
        try:
            return cls(
                InterruptRecord.from_json(plain, what),
                item["order"],
                item["version"],
                item.get("parts", 1),
            )
        except KeyError as error:
            raise CorruptRecord(what, f"has no {error}") from error


def lookup_items(head: Head, run: RunRecord, created: int) -> list[Item]:
    """What finds a new run by its bare id, and from its parent. Written once."""
    own: Item = {
        "pk": run_pk(head.scope, run.run_id),
        "sk": "run",
        "kind": "lookup",
        "run_id": run.run_id,
        "thread": head.thread_id,
        "incarnation": head.incarnation,
        "format": FORMAT_VERSION,
    }
    if run.parent_run_id is None:
        return [own]
    child: Item = {
        **own,
        "pk": run_pk(head.scope, run.parent_run_id),
        "sk": child_sk(run.run_id),
        "kind": "child",
        "started_at": run.started_at,
        "created": created,
    }
    return [own, child]


# ------------------------------------------------------------------- messages and UI rows


def entry_items(
    head: Head, letter: str, number: int, body: bytes, entry: Entry | None = None
) -> list[Item]:
    """The rows of a message (``entry``) or of a UI row; the first holds what is known of it."""
    item: Item = {
        "pk": thread_pk(head.scope, head.thread_id),
        "sk": number_sk(letter, head.incarnation, number),
        "kind": "activity" if entry is None else "message",
    }
    if entry is not None:
        if entry.message_id is not None:
            item["message_id"] = entry.message_id
        item["digest"] = entry.digest
    item["format"] = FORMAT_VERSION
    return with_body(item, body)


def message_from_item(
    item: Item, chunks: Sequence[Item], number: int, thread_id: str
) -> ModelMessage:
    """The message of its rows.

    Raises:
        CorruptRecord: no JSON object with a role.
        SchemaOutOfDate: a newer chatkeep wrote it.
    """
    what = f"message {number} of thread {thread_id!r}"
    check_format(item, what)
    return decode_message(body_of(item, chunks, what), what)


# ------------------------------------------------------------------------ drafts and cuts


def draft_items(
    head: Head, run_id: str, body: bytes, now: int, stamp: str, expires_at: int
) -> list[Item]:
    """The rows of a run's draft. ``stamp`` tells one draft's chunks from another's; those of
    one that is long since replaced go by themselves at ``expires_at`` (seconds). So do those of
    one that is still there, hence its first row names that moment too (:func:`draft_expired`)."""
    item: Item = {
        "pk": thread_pk(head.scope, head.thread_id),
        "sk": row_sk(DRAFT, head.incarnation, run_id),
        "kind": "draft",
        "run_id": run_id,
        "stamp": stamp,
        "updated_at": now,
        "format": FORMAT_VERSION,
    }
    rows = with_body(item, body, {"stamp": stamp, "expires_at": expires_at})
    if len(rows) > 1:
        item["expires_at"] = expires_at
    return rows


def draft_expired(item: Item, now: int) -> bool:
    """Whether the service may be removing the rows of a draft, one by one."""
    return "expires_at" in item and item["expires_at"] * 1000 <= now


def draft_from_item(item: Item, chunks: Sequence[Item], thread_id: str) -> DraftRecord | None:
    """The draft of its rows; None if it was overwritten while it was read.

    Raises:
        CorruptRecord: it cannot be read back.
    """
    what = f"draft of run {item.get('run_id')!r}"
    check_format(item, what)
    own = [chunk for chunk in chunks if chunk.get("stamp") == item.get("stamp")]
    if len(own) != item.get("parts", 1) - 1:
        return None
    messages: Any = decode(body_of(item, own, what), what)
    return DraftRecord.from_json(
        {
            "threadId": thread_id,
            "runId": item.get("run_id"),
            "updatedAt": item.get("updated_at"),
            "messages": messages,
        },
        what,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut: the version of its commit, the number it was made behind, and what it took off."""

    version: int
    after: int
    cut_at: int
    run_id: str | None
    numbers: rg.Ranges
    extra: int = 0

    def to_item(self, head: Head) -> Item:
        """Its row."""
        tenant, user = head.scope.key
        pk = thread_pk(head.scope, head.thread_id)
        item: Item = {
            "pk": pk,
            "sk": number_sk(CUT, head.incarnation, self.version),
            "kind": "cut",
            "tenant": tenant,
            "user": user,
            "thread": head.thread_id,
            "cut": self.version,
            "after": self.after,
            "cut_at": self.cut_at,
            "numbers": rg.write_ranges(self.numbers),
            "extra": self.extra,
            "due": due_partition("cut", pk),
            "due_at": self.cut_at,
            "format": FORMAT_VERSION,
        }
        if self.run_id is not None:
            item["run_id"] = self.run_id
        return item

    @classmethod
    def from_item(cls, item: Item) -> Cut:
        """The cut of a row.

        Raises:
            CorruptRecord: it cannot be read back.
        """
        what = f"cut {item.get('cut')!r} of thread {item.get('thread')!r}"
        check_format(item, what)
        try:
            return cls(
                item["cut"],
                item["after"],
                item["cut_at"],
                item.get("run_id"),
                rg.read_ranges(item["numbers"], what),
                item["extra"],
            )
        except KeyError as error:
            raise CorruptRecord(what, f"has no {error}") from error

    def to_record(self, head: Head, message_ids: dict[int, str | None]) -> CutRecord:
        """The public record."""
        numbers = rg.expand(self.numbers)
        return CutRecord(
            cut_id=version_name(self.version, head.incarnation),
            thread_id=head.thread_id,
            cut_at=self.cut_at,
            run_id=self.run_id,
            numbers=numbers,
            message_ids=[message_ids.get(number) for number in numbers],
            extra=self.extra,
        )


def scope_of(item: Item) -> Scope:
    """The scope of a row that names it."""
    return Scope.from_key(item["tenant"], item["user"])
