"""The head of a thread: its counters, its revision, and the commits it remembers.

``version`` goes up by one with every commit; ``transcript_version`` is the version of the
commit that last changed the transcript. A revision is that number and the thread's
incarnation, random at birth, so a deleted and recreated thread never repeats one. A cut is
named the same way, after the commit that made it.

A remembered commit is one line, newest first: 12 characters that stand for its id, its version,
the numbers that it made live (``5-7``, ``2-3,5``, ``-`` for none), and marks (1: a run was created,
2: a cut was made). One that made none live goes on with how far the transcript's version was
behind, and the newest number. The head is written with every commit, so a line is short.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatkeep.errors import CorruptRecord
from chatkeep.records import RunRecord
from chatkeep.stores import NO_THREAD, TurnReceipt
from chatkeep_sql.rows import check_format

__all__ = [
    "HEAD_COLUMNS",
    "REMEMBERED",
    "Head",
    "commit_line",
    "commit_mark",
    "empty_head",
    "new_incarnation",
    "parse_cut_id",
    "remember",
    "replayed_run",
    "version_name",
]

HEAD_COLUMNS = (
    "thread_no",
    "incarnation",
    "version",
    "transcript_version",
    "next_number",
    "newest",
    "message_count",
    "commits",
    "format",
)
REMEMBERED = 16
"""How many commits a head remembers."""


def new_incarnation() -> str:
    """What tells this thread from an earlier one with the same id."""
    return secrets.token_hex(8)


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
    """12 characters that stand for a commit id of any length, without space or line break."""
    return base64.urlsafe_b64encode(
        hashlib.blake2b(commit_id.encode(), digest_size=9).digest()
    ).decode()


@dataclass(frozen=True, slots=True)
class Head:
    """A thread's head as stored."""

    thread_no: int
    incarnation: str
    version: int
    transcript_version: int
    next_number: int
    newest: int
    message_count: int
    commits: str

    @classmethod
    def from_row(cls, row: Sequence[Any], thread_id: str) -> Head:
        """From a row that starts with :data:`HEAD_COLUMNS`."""
        count = len(HEAD_COLUMNS)
        check_format(row[count - 1], f"thread {thread_id!r}")
        return cls(*row[: count - 1])

    @property
    def revision(self) -> str:
        """The transcript's revision; :data:`NO_THREAD` until one was written."""
        if not self.transcript_version:
            return NO_THREAD
        return version_name(self.transcript_version, self.incarnation)

    def remembered(self, mark: str, thread_id: str) -> TurnReceipt | None:
        """The receipt of a commit that was applied before (without its run)."""
        for line in self.commits.split("\n"):
            if not line.startswith(mark):
                continue
            try:
                version, ranges, marks, *rest = line.split(" ")[1:]
                numbers = _numbers(ranges)
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
                raise CorruptRecord(f"thread {thread_id!r}", f"commit line {line!r}") from error
        return None


def commit_line(mark: str, head: Head, *, numbers: list[int], created_run: bool, cut: bool) -> str:
    """The line by which ``head``, as it is after the commit, remembers it."""
    marks = _CREATED_RUN * created_run + _MADE_CUT * cut
    line = f"{mark} {head.version} {_ranges(numbers)} {marks}"
    if numbers:
        return line
    return f"{line} {head.version - head.transcript_version} {head.newest}"


_CREATED_RUN, _MADE_CUT = 1, 2


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" for first, last in parts) or "-"


def _numbers(ranges: str) -> list[int]:
    if ranges == "-":
        return []
    found: list[int] = []
    for part in ranges.split(","):
        first, last = part.split("-")
        found += range(int(first), int(last) + 1)
    return found


def remember(commits: str, line: str) -> str:
    """``commits`` with ``line`` in front, the oldest beyond :data:`REMEMBERED` dropped."""
    return "\n".join([line, *commits.split("\n")[: REMEMBERED - 1]]) if commits else line


def replayed_run(receipt: TurnReceipt, run: RunRecord | None) -> TurnReceipt:
    """``receipt`` with the run as it is now."""
    return TurnReceipt(
        revision=receipt.revision,
        newest=receipt.newest,
        numbers=receipt.numbers,
        run=run,
        created_run=receipt.created_run,
        cut_id=receipt.cut_id,
        replayed=True,
    )


def empty_head() -> Head:
    """The head of a thread that does not exist yet."""
    return Head(0, new_incarnation(), 0, 0, 1, 0, 0, "")
