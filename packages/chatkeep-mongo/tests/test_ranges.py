"""The arithmetic of ranges, against sets of numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep_mongo.ranges import (
    Ranges,
    covers,
    flatten,
    from_flat,
    join,
    newest_of,
    numbers_of,
    of_numbers,
    size,
    spans,
    split_behind,
    window,
    without,
)

NUMBERS = st.sets(st.integers(1, 60)).map(sorted)


def well_formed(ranges: Ranges) -> bool:
    """Ascending, and no two that touch."""
    return of_numbers(numbers_of(ranges)) == ranges


@given(NUMBERS)
def test_ranges_hold_exactly_their_numbers(numbers: list[int]) -> None:
    ranges = of_numbers(numbers)
    assert well_formed(ranges)
    assert numbers_of(ranges) == numbers
    assert size(ranges) == len(numbers)
    assert newest_of(ranges) == (numbers[-1] if numbers else 0)
    assert [n for n in range(62) if covers(ranges, n)] == numbers
    assert from_flat(flatten(ranges)) == ranges


@given(NUMBERS, st.integers(0, 61))
def test_a_split_keeps_what_is_up_to_a_number(numbers: list[int], at: int) -> None:
    low, high = split_behind(of_numbers(numbers), at)
    assert numbers_of(low) == [n for n in numbers if n <= at]
    assert numbers_of(high) == [n for n in numbers if n > at]
    assert well_formed(low)
    assert well_formed(high)
    assert join(low, high) == of_numbers(numbers)


@given(NUMBERS, NUMBERS)
def test_numbers_that_go_leave_the_others(numbers: list[int], gone: list[int]) -> None:
    left = without(of_numbers(numbers), gone)
    assert numbers_of(left) == sorted(set(numbers) - set(gone))
    assert well_formed(left)


@given(NUMBERS, st.one_of(st.none(), st.integers(1, 70)), st.one_of(st.none(), st.integers(0, 70)))
def test_a_window_is_the_end_of_a_list(
    numbers: list[int], limit: int | None, before: int | None
) -> None:
    below = [n for n in numbers if before is None or n < before]
    chosen, truncated = window(of_numbers(numbers), limit=limit, before=before)
    want = below if limit is None else below[max(0, len(below) - limit) :]
    assert numbers_of(chosen) == want
    assert truncated == (len(want) < len(below))


@given(NUMBERS, st.integers(1, 8))
def test_spans_hold_everything_in_few_queries(numbers: list[int], most: int) -> None:
    """And as little more as that allows: the widest gaps are left out."""
    ranges = of_numbers(numbers)
    found = spans(ranges, most)
    assert len(found) <= max(most, 1)
    assert set(numbers) <= set(numbers_of(found))
    gaps = sorted((b[0] - a[1] for a, b in pairwise(ranges)), reverse=True)
    spared = sum(gap - 1 for gap in gaps[: most - 1])
    whole = (numbers[-1] - numbers[0] + 1) if numbers else 0
    assert size(found) == whole - spared


@pytest.mark.parametrize("flat", [[1], [2, 1], [1, 3, 2, 4], [1, 2, 2, 3]])
def test_what_are_no_ranges_is_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError):
        from_flat(flat)
