"""Sets of numbers as ranges: what of a thread is live, in the order of the transcript.

Always ascending and disjoint, so a thousand turns without a regenerate are one range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from chatkeep.errors import CorruptRecord

__all__ = [
    "Ranges",
    "append",
    "count",
    "expand",
    "from_numbers",
    "holds",
    "newest",
    "read_ranges",
    "split_behind",
    "window",
    "without",
    "write_ranges",
]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last number of each stretch."""


def from_numbers(numbers: Iterable[int]) -> Ranges:
    """The ranges of ascending numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return tuple((first, last) for first, last in parts)


def expand(ranges: Ranges) -> list[int]:
    """Every number, ascending."""
    return [number for first, last in ranges for number in range(first, last + 1)]


def count(ranges: Ranges) -> int:
    """How many numbers."""
    return sum(last - first + 1 for first, last in ranges)


def newest(ranges: Ranges) -> int:
    """The highest number; 0 for none."""
    return ranges[-1][1] if ranges else 0


def holds(ranges: Ranges, number: int) -> bool:
    """Whether ``number`` is one of them."""
    return any(first <= number <= last for first, last in ranges)


def append(ranges: Ranges, numbers: Ranges) -> Ranges:
    """``ranges`` followed by ``numbers``, which are all higher."""
    if ranges and numbers and ranges[-1][1] + 1 == numbers[0][0]:
        return (*ranges[:-1], (ranges[-1][0], numbers[0][1]), *numbers[1:])
    return (*ranges, *numbers)


def split_behind(ranges: Ranges, through: int) -> tuple[Ranges, Ranges]:
    """What is numbered up to ``through``, and what is above."""
    kept: list[tuple[int, int]] = []
    cut: list[tuple[int, int]] = []
    for first, last in ranges:
        if last <= through:
            kept.append((first, last))
        elif first > through:
            cut.append((first, last))
        else:
            kept.append((first, through))
            cut.append((through + 1, last))
    return tuple(kept), tuple(cut)


def without(ranges: Ranges, gone: Collection[int]) -> Ranges:
    """``ranges`` less some numbers."""
    return from_numbers(number for number in expand(ranges) if number not in gone)


def window(ranges: Ranges, limit: int | None, before: int | None) -> tuple[list[int], bool]:
    """The newest ``limit`` numbers below ``before``, ascending, and whether older ones exist."""
    inside = ranges if before is None else split_behind(ranges, before - 1)[0]
    if limit is None:
        return expand(inside), False
    taken: list[int] = []
    for first, last in reversed(inside):
        low = max(first, last - (limit - len(taken)) + 1)
        taken.extend(range(last, low - 1, -1))
        if len(taken) == limit:
            break
    taken.reverse()
    return taken, count(inside) > len(taken)


def write_ranges(ranges: Ranges) -> str:
    """As text: ``1-5,7``; empty for none."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def read_ranges(text: str, what: str) -> Ranges:
    """The ranges of such a text.

    Raises:
        CorruptRecord: it is none.
    """
    pairs = [part.partition("-") for part in text.split(",")] if text else []
    if not all(first.isdigit() and (last.isdigit() or not dash) for first, dash, last in pairs):
        raise CorruptRecord(what, f"ranges {text[:40]!r}")
    return tuple((int(first), int(last or first)) for first, _, last in pairs)
