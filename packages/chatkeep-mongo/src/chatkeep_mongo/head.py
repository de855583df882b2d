"""The head of a thread: its revision, its live entries, the commits it remembers.

Every write of a head draws a new ``stamp``, and every writer names the stamp that it has read: of
two writers one wins, also where a failover took back what one of them had seen. ``version`` goes
up by one with every commit and is what the documents of a thread are compared with.

The counters (``runs``, ``open``, ``interrupts``, ``pending``, ``activities``) say what must be
found beside the head: a read that finds less has met another writer, and what is zero need not be
looked for.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from chatkeep.codec import FORMAT_VERSION
from chatkeep.errors import CorruptRecord
from chatkeep.rules import is_child_thread
from chatkeep.scope import Scope
from chatkeep.stores import NO_THREAD, TurnReceipt
from chatkeep_mongo.bodies import check_format
from chatkeep_mongo.layout import Document, new_incarnation, owner_key, thread_key
from chatkeep_mongo.ranges import Ranges, flatten, from_flat, numbers_of, of_numbers

__all__ = [
    "REMEMBERED",
    "Head",
    "commit_line",
    "commit_mark",
    "new_born",
    "new_head",
    "new_head_document",
    "new_stamp",
    "receipt_of",
]

REMEMBERED = 16
"""How many commits a head remembers."""


class _Births:
    """The last number that :func:`new_born` gave."""

    last = 0


def new_stamp() -> str:
    """What tells one state of a head from any other."""
    return secrets.token_hex(8)


def new_born(now: int) -> int:
    """Where something stands in the order of creation: the server's clock with 20 more bits, which
    differ between processes; never lower than before in this one."""
    _Births.last = max(_Births.last + 1, (now << 20) + secrets.randbelow(1 << 19))
    return _Births.last


def commit_mark(commit_id: str) -> str:
    """16 characters that stand for a commit id of any length."""
    return base64.urlsafe_b64encode(
        hashlib.blake2b(commit_id.encode(), digest_size=12).digest()
    ).decode()


@dataclass(frozen=True, slots=True)
class Head:
    """A thread's head as stored; ``stamp`` is empty for one that is not.

    ``live`` are the numbers of the transcript, ``count`` how many; ``cuts`` the ids of cuts, oldest
    first; ``open`` counts the runs that have not ended; ``big``: there may be bodies in pieces.
    """

    key: str
    t: str
    stamp: str = ""
    version: int = 0
    revision: str = NO_THREAD
    next: int = 1
    newest: int = 0
    count: int = 0
    live: Ranges = field(default_factory=Ranges)
    cuts: list[str] = field(default_factory=list[str])
    runs: int = 0
    open: int = 0
    interrupts: int = 0
    pending: int = 0
    activities: int = 0
    big: bool = False

    @property
    def exists(self) -> bool:
        """Whether a commit has written it."""
        return self.version > 0

    @classmethod
    def from_document(cls, document: Document, thread_id: str) -> Head:
        """From a document of ``chatkeep_threads``.

        Raises:
            CorruptRecord: it cannot be one.
            SchemaOutOfDate: a newer chatkeep wrote it.
        """
        what = f"thread {thread_id!r}"
        check_format(document, what)
        try:
            return cls(
                key=document["_id"],
                live=from_flat(document["live"]),
                **{name: document[name] for name in _PLAIN},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptRecord(what, f"{type(error).__name__}: {error}") from error

    def changes(self) -> Document:
        """What a commit sets in the document."""
        return {
            **{name: getattr(self, name) for name in _PLAIN if name != "t"},
            "live": flatten(self.live),
        }


_PLAIN = (
    "t",
    "stamp",
    "version",
    "revision",
    "next",
    "newest",
    "count",
    "cuts",
    "runs",
    "open",
    "interrupts",
    "pending",
    "activities",
    "big",
)


def new_head(scope: Scope, thread_id: str) -> Head:
    """The head of a thread that does not exist yet."""
    return Head(key=thread_key(scope, thread_id), t=new_incarnation())


def new_head_document(head: Head, scope: Scope, thread_id: str, now: int) -> Document:
    """The fields of a new head that never change, and those that only its first commit sets."""
    tenant, user = scope.key
    return {
        "_id": head.key,
        "t": head.t,
        "owner": owner_key(scope),
        "tenant": tenant,
        "user": user,
        "thread_id": thread_id,
        "child": is_child_thread(thread_id),
        "created_at": now,
        "born": new_born(now),
        "format": FORMAT_VERSION,
    }


# ------------------------------------------------------------------- remembered commits


def commit_line(mark: str, receipt: TurnReceipt) -> Document:
    """What a head remembers of a commit."""
    line: Document = {
        "mark": mark,
        "revision": receipt.revision,
        "newest": receipt.newest,
        "numbers": flatten(of_numbers(receipt.numbers)),
    }
    if receipt.created_run:
        line["created"] = True
    if receipt.cut_id is not None:
        line["cut"] = receipt.cut_id
    return line


def receipt_of(line: Document, thread_id: str) -> TurnReceipt:
    """The receipt of a commit that was applied before (without its run).

    Raises:
        CorruptRecord: no line of ours.
    """
    try:
        cut: Any = line.get("cut")
        return TurnReceipt(
            revision=line["revision"],
            newest=line["newest"],
            numbers=numbers_of(from_flat(line["numbers"])),
            created_run=bool(line.get("created")),
            cut_id=cut,
            replayed=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"thread {thread_id!r}", f"commit line {line!r}") from error
