"""Sequence numbers as ranges: what a head keeps of its live entries, and a cut of its own.

Ranges are pairs (first, last), ascending, without overlap; neighbours that touch are one. In a
document they are flat: ``[1, 40, 43, 43]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

__all__ = [
    "Ranges",
    "covers",
    "flatten",
    "from_flat",
    "join",
    "newest_of",
    "numbers_of",
    "of_numbers",
    "size",
    "spans",
    "split_behind",
    "window",
    "without",
]

Ranges: TypeAlias = list[tuple[int, int]]


def of_numbers(numbers: Iterable[int]) -> Ranges:
    """The ranges of ascending numbers."""
    found: Ranges = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def numbers_of(ranges: Ranges) -> list[int]:
    """Every number, ascending."""
    return [number for first, last in ranges for number in range(first, last + 1)]


def flatten(ranges: Ranges) -> list[int]:
    """As a document holds them."""
    return [number for pair in ranges for number in pair]


def from_flat(flat: Sequence[int]) -> Ranges:
    """What :func:`flatten` was given.

    Raises:
        ValueError: no ranges: an odd count, or not ascending.
    """
    found = list(zip(flat[::2], flat[1::2], strict=True))
    ordered = all(a <= b for a, b in pairwise(flat)) and all(
        a[1] < b[0] for a, b in pairwise(found)
    )
    if not ordered:
        raise ValueError(f"{flat!r} are no ranges")
    return found


def size(ranges: Ranges) -> int:
    """How many numbers."""
    return sum(last - first + 1 for first, last in ranges)


def newest_of(ranges: Ranges) -> int:
    """The highest number; 0 for none."""
    return ranges[-1][1] if ranges else 0


def covers(ranges: Ranges, number: int) -> bool:
    """Whether ``number`` is one of them."""
    return any(first <= number <= last for first, last in ranges)


def join(low: Ranges, high: Ranges) -> Ranges:
    """Both, where everything in ``high`` is above everything in ``low``."""
    if low and high and low[-1][1] + 1 == high[0][0]:
        return [*low[:-1], (low[-1][0], high[0][1]), *high[1:]]
    return [*low, *high]


def split_behind(ranges: Ranges, number: int) -> tuple[Ranges, Ranges]:
    """Those up to ``number``, and those above it."""
    low: Ranges = []
    high: Ranges = []
    for first, last in ranges:
        if first <= number:
            low.append((first, min(last, number)))
        if last > number:
            high.append((max(first, number + 1), last))
    return low, high


def without(ranges: Ranges, gone: Iterable[int]) -> Ranges:
    """``ranges`` less some numbers, which need not be among them."""
    left = ranges
    for number in sorted(set(gone)):
        low, high = split_behind(left, number)
        left = [*split_behind(low, number - 1)[0], *high]
    return left


def window(ranges: Ranges, *, limit: int | None, before: int | None) -> tuple[Ranges, bool]:
    """The newest ``limit`` numbers (below ``before``), and whether there are older ones."""
    below = ranges if before is None else split_behind(ranges, before - 1)[0]
    if limit is None:
        return below, False
    chosen: Ranges = []
    wanted = limit
    for first, last in reversed(below):
        if not wanted:
            return chosen, True
        start = max(first, last - wanted + 1)
        chosen.insert(0, (start, last))
        wanted -= last - start + 1
        if start > first:
            return chosen, True
    return chosen, False


def spans(ranges: Ranges, most: int) -> Ranges:
    """At most ``most`` ranges that hold all numbers of ``ranges``: the closest are merged, with
    the numbers between them."""
    if len(ranges) <= most:
        return ranges
    gaps = sorted(range(1, len(ranges)), key=lambda i: ranges[i][0] - ranges[i - 1][1])
    apart = sorted(gaps[len(gaps) - most + 1 :])
    starts = [0, *apart]
    ends = [*apart, len(ranges)]
    return [(ranges[a][0], ranges[b - 1][1]) for a, b in zip(starts, ends, strict=True)]
