"""The head of a thread: one row that says what of the others is live.

``version`` goes up by one with every commit and is, with the incarnation, the condition of each
write; ``transcript_version`` is the version of the commit that last changed the transcript. A
revision is that number and the thread's incarnation, random at birth, so a deleted and recreated
thread never repeats one. A cut is named the same way, after the commit that made it.

Open runs (not ended) and pending interrupts are named here with the version in which they were
last written: a reader knows by that whether it has met them as this head left them.

A remembered commit is one line, newest first: 10 characters that stand for its id, its version,
the numbers that it made live (``5-7``, ``2-3,5``, ``-`` for none), and marks (1: a run was created,
2: a cut was made). One that made none live goes on with how far the transcript's version was
behind, and the newest number. The head is written with every commit, and a kilobyte is what it
should cost: a line is short.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from chatkeep.codec import FORMAT_VERSION, decode
from chatkeep.errors import CorruptRecord
from chatkeep.rules import is_child_thread
from chatkeep.scope import Scope
from chatkeep.stores import NO_THREAD, TurnReceipt
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.items import Item, check_format
from chatkeep_dynamodb.keys import HEAD, due_partition, list_partition, sortable, thread_pk

__all__ = [
    "HOUR_MS",
    "REMEMBERED",
    "Head",
    "Row",
    "commit_line",
    "commit_mark",
    "new_head",
    "parse_cut_id",
    "version_name",
]

REMEMBERED = 16
"""How many commits a head remembers."""

HOUR_MS = 3_600_000
"""The index of idle threads knows their last write to the hour: a row of it changes once an
hour, not with every commit."""

_CREATED_RUN, _MADE_CUT = 1, 2


@dataclass(frozen=True, slots=True)
class Row:
    """A UI row: the number of its entry, and in how many chunks it is."""

    number: int
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A thread's head. ``unborn``: numbers were taken, but nobody has committed yet."""

    scope: Scope
    thread_id: str
    incarnation: str
    version: int = 0
    transcript_version: int = 0
    next_number: int = 1
    next_row: int = 1
    live: rg.Ranges = ()
    rows: tuple[Row, ...] = ()
    open_runs: Mapping[str, int] = field(default_factory=dict[str, int])
    pending: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    commits: str = ""
    created_at: int = 0
    created: int = 0
    updated_at: int = 0
    unborn: bool = False

    @property
    def revision(self) -> str:
        """The transcript's revision; :data:`NO_THREAD` until one was written."""
        if not self.transcript_version:
            return NO_THREAD
        return version_name(self.transcript_version, self.incarnation)

    @property
    def newest(self) -> int:
        """The highest live number."""
        return rg.newest(self.live)

    def remembered(self, mark: str) -> TurnReceipt | None:
        """The receipt of a commit that was applied before (without its run)."""
        for line in self.commits.split("\n"):
            if not line.startswith(mark):
                continue
            try:
                version, made_live, marks, *rest = line.split(" ")[1:]
                numbers = rg.expand(rg.read_ranges(made_live.strip("-"), line))
                behind, newest = (int(field) for field in rest or (0, numbers[-1]))
                transcript = int(version) - behind
                return TurnReceipt(
                    revision=version_name(transcript, self.incarnation)
                    if transcript
                    else NO_THREAD,
                    newest=newest,
                    numbers=numbers,
                    created_run=bool(int(marks) & _CREATED_RUN),
                    cut_id=version_name(int(version), self.incarnation)
                    if int(marks) & _MADE_CUT
                    else None,
                    replayed=True,
                )
            except (ValueError, IndexError) as error:
                what = f"thread {self.thread_id!r}"
                raise CorruptRecord(what, f"commit line {line!r}") from error
        return None

    def remember(self, line: str) -> Head:
        """With ``line`` in front, the oldest beyond :data:`REMEMBERED` dropped."""
        older = self.commits.split("\n")[: REMEMBERED - 1] if self.commits else []
        return replace(self, commits="\n".join([line, *older]))

    def to_item(self) -> Item:
        """The row. An unborn head is in no index: nobody may list it."""
        tenant, user = self.scope.key
        pk = thread_pk(self.scope, self.thread_id)
        item: Item = {
            "pk": pk,
            "sk": HEAD,
            "kind": "head",
            "tenant": tenant,
            "user": user,
            "thread": self.thread_id,
            "incarnation": self.incarnation,
            "version": self.version,
            "transcript_version": self.transcript_version,
            "next_number": self.next_number,
            "next_row": self.next_row,
            "messages": rg.count(self.live),
            "live": rg.write_ranges(self.live),
            "created": self.created,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "format": FORMAT_VERSION,
        }
        if self.commits:
            item["commits"] = self.commits
        if self.rows:
            item["activities"] = _write_rows(self.rows)
        if self.open_runs or self.pending:
            named: dict[str, Any] = {}
            if self.open_runs:
                named["runs"] = list(self.open_runs.items())
            if self.pending:
                named["interrupts"] = [[*key, version] for key, version in self.pending.items()]
            item["open"] = orjson.dumps(named)
        if self.unborn:
            item["unborn"] = True
            return item
        child = is_child_thread(self.thread_id)
        item["list"] = list_partition(self.scope, "subthreads" if child else "threads")
        item["listed_at"] = (
            f"{sortable(self.updated_at)}/{sortable(self.created)}/{self.incarnation}"
        )
        if not child:
            item["due"] = due_partition("idle", pk)
            item["due_at"] = self.updated_at // HOUR_MS * HOUR_MS
        return item

    @classmethod
    def from_item(cls, item: Item) -> Head:
        """The head of a row.

        Raises:
            CorruptRecord: it cannot be read back.
        """
        what = f"thread {item.get('thread')!r}"
        check_format(item, what)
        try:
            named: Any = decode(item["open"], what) if "open" in item else {}
            return cls(
                scope=Scope.from_key(item["tenant"], item["user"]),
                thread_id=item["thread"],
                incarnation=item["incarnation"],
                version=item["version"],
                transcript_version=item["transcript_version"],
                next_number=item["next_number"],
                next_row=item["next_row"],
                live=rg.read_ranges(item["live"], what),
                rows=_read_rows(item.get("activities", "")),
                open_runs=dict(named.get("runs", ())),
                pending={(run, name): v for run, name, v in named.get("interrupts", ())},
                commits=item.get("commits", ""),
                created_at=item["created_at"],
                created=item["created"],
                updated_at=item["updated_at"],
                unborn=item.get("unborn", False),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptRecord(what, f"{type(error).__name__}: {error}") from error


def new_head(scope: Scope, thread_id: str, now: int, created: int) -> Head:
    """The head of a thread that does not exist yet; ``created`` orders births (ns)."""
    return Head(
        scope=scope,
        thread_id=thread_id,
        incarnation=secrets.token_hex(6),
        created_at=now,
        created=created,
        updated_at=now,
        unborn=True,
    )


def version_name(version: int, incarnation: str) -> str:
    """The revision, or the cut id, of a commit."""
    return f"{version:x}.{incarnation}"


def parse_cut_id(cut_id: str, incarnation: str) -> int | None:
    """The version of the commit that made the cut; None for a name that is not one of ours."""
    version, _, rest = cut_id.partition(".")
    if rest != incarnation:
        return None
    try:
        number = int(version, 16)
    except ValueError:
        return None
    return number if version_name(number, incarnation) == cut_id else None


def commit_mark(commit_id: str) -> str:
    """10 characters that stand for a commit id of any length, without space or line break."""
    digest = hashlib.blake2b(commit_id.encode(), digest_size=9).digest()
    return base64.urlsafe_b64encode(digest).decode()[:10]


def commit_line(mark: str, head: Head, *, numbers: rg.Ranges, created_run: bool, cut: bool) -> str:
    """The line by which ``head``, as it is after the commit, remembers it."""
    marks = _CREATED_RUN * created_run + _MADE_CUT * cut
    line = f"{mark} {head.version} {rg.write_ranges(numbers) or '-'} {marks}"
    if numbers:
        return line
    return f"{line} {head.version - head.transcript_version} {head.newest}"


# A list of rows: numbers that follow each other are a range, a row in chunks is "number*parts".


def _write_rows(rows: tuple[Row, ...]) -> str:
    words: list[str] = []
    first = last = 0
    for row in (*rows, Row(0, 0)):
        if row.parts == 1 and last and row.number == last + 1:
            last = row.number
            continue
        if last:
            words.append(str(first) if first == last else f"{first}-{last}")
        first = last = row.number if row.parts == 1 else 0
        if row.parts > 1:
            words.append(f"{row.number}*{row.parts}")
    return ",".join(words)


def _read_rows(text: str) -> tuple[Row, ...]:
    rows: list[Row] = []
    for word in text.split(",") if text else ():
        if "*" in word:
            number, _, parts = word.partition("*")
            rows.append(Row(int(number), int(parts)))
        else:
            first, _, last = word.partition("-")
            rows.extend(Row(number) for number in range(int(first), int(last or first) + 1))
    return tuple(rows)
