"""The arithmetic of rows: keys, sizes, chunks, ranges."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.errors import CorruptRecord, RecordTooLarge
from chatkeep.scope import MAX_ID_BYTES, Scope
from chatkeep_dynamodb import leading_key
from chatkeep_dynamodb import ranges as rg
from chatkeep_dynamodb.head import Head, Row, commit_line, commit_mark, new_head
from chatkeep_dynamodb.items import (
    CHUNK_BYTES,
    ITEM_BYTES,
    body_of,
    check_size,
    from_wire,
    item_size,
    split_body,
    to_wire,
    with_body,
)
from chatkeep_dynamodb.keys import (
    behind,
    chunk_sk,
    interrupt_sk,
    part,
    run_pk,
    sortable,
    thread_pk,
    value_pk,
)

ids = st.text(
    st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=300
).filter(lambda text: len(text.encode()) <= MAX_ID_BYTES)
numbers = st.sets(st.integers(1, 60)).map(sorted)


# --------------------------------------------------------------------------------- keys


@given(ids)
def test_a_part_of_a_key_is_short_plain_text(text: str) -> None:
    """No slash, no wildcard or variable of a policy, at most 256 bytes."""
    assert re.fullmatch(r"[A-Za-z0-9_.:@+=,%~-]{1,256}", part(text))


@given(ids, ids)
def test_two_ids_never_share_a_part(one: str, other: str) -> None:
    assert (part(one) == part(other)) == (one == other)


def test_a_long_id_and_an_id_that_looks_like_its_part_differ() -> None:
    long = "x" * 1024
    assert part(part(long)) != part(long)
    assert len(part(long)) < 64


@given(ids, ids, ids, ids)
def test_keys_stay_within_the_limits_of_the_service(a: str, b: str, c: str, d: str) -> None:
    """2 048 bytes of a partition key, 1 024 of a sort key, whatever the ids are."""
    scope = Scope(tenant_id=a, user_id=b)
    for pk in (thread_pk(scope, c), run_pk(scope, c), value_pk(scope, c)):
        assert pk.startswith(leading_key(scope))
        assert len(pk.encode()) <= 2048
    assert len(chunk_sk(interrupt_sk("0" * 12, c, d), 99_999).encode()) <= 1024


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Scope(tenant_id="a", user_id="b"), Scope(tenant_id="a/b")),
        (Scope(tenant_id="a/b"), Scope(tenant_id="a", user_id="b/")),
        (Scope(tenant_id="*"), Scope(tenant_id="a")),
        (Scope(), Scope(tenant_id="-")),
    ],
)
def test_no_scope_leads_the_keys_of_another(one: Scope, other: Scope) -> None:
    assert not leading_key(one).startswith(leading_key(other))
    assert not leading_key(other).startswith(leading_key(one))


@given(st.integers(-(2**53), 2**53), st.integers(-(2**53), 2**53))
def test_sortable_text_sorts_as_the_numbers(one: int, other: int) -> None:
    assert (sortable(one) < sortable(other)) == (one < other)


@given(st.text("ab/0-.", max_size=4), st.text("ab/0-.", max_size=4))
def test_behind_is_above_what_begins_so_and_nothing_else(prefix: str, rest: str) -> None:
    assert f"{prefix}/{rest}" < behind(prefix)
    assert f"{prefix}/" <= f"{prefix}/{rest}"
    assert behind(prefix) > f"{prefix}/~\U0010ffff"


# ------------------------------------------------------------------------ sizes and chunks


@given(st.binary(max_size=2000), st.integers(1, 400))
def test_chunks_are_the_body(body: bytes, size: int) -> None:
    chunks = split_body(body, size)
    assert b"".join(chunks) == body
    assert all(0 < len(chunk) <= size for chunk in chunks) or chunks == [b""]
    assert len(chunks) == max(1, -(-len(body) // size))


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 53])
def test_rows_of_a_long_body_fit_and_give_it_back(chunks: int, extra: int) -> None:
    """With the longest ids there are; a message of 20 MB among them."""
    body = ("é" * (CHUNK_BYTES * chunks // 2)).encode() + b"x" * extra if extra >= 0 else b""
    body = body or b"x" * (CHUNK_BYTES * chunks - 1)
    item = {
        "pk": "p" * 2048,
        "sk": "m/0123456789ab/0000000000000001",
        "kind": "message",
        "message_id": "é" * 512,
        "digest": b"d" * 16,
        "format": 1,
    }
    rows = with_body(item, body)
    assert all(check_size(row, "x") <= ITEM_BYTES for row in rows)
    assert len(rows) == max(1, -(-len(body) // CHUNK_BYTES))
    assert body_of(rows[0], rows[1:], "x") == body
    assert len({row["sk"] for row in rows}) == len(rows)
    assert [row["sk"] for row in rows] == sorted(row["sk"] for row in rows)


def test_a_missing_chunk_is_an_error() -> None:
    rows = with_body({"pk": "p", "sk": "s"}, b"x" * (CHUNK_BYTES + 1))
    with pytest.raises(CorruptRecord, match="1 of 2"):
        body_of(rows[0], [], "x")
    with pytest.raises(CorruptRecord, match="no body"):
        body_of({"pk": "p"}, [], "x")


def test_sizes_are_of_bytes_not_of_characters() -> None:
    """Half as many characters as the limit, and as many bytes: refused before it is sent."""
    assert item_size({"é": "é"}) == 4
    assert item_size({"n": 1234, "b": b"abc", "t": True}) == (1 + 4) + (1 + 3) + (1 + 1)
    text = "é" * (ITEM_BYTES // 2)
    assert len(text) < ITEM_BYTES
    with pytest.raises(RecordTooLarge) as caught:
        check_size({"text": text}, "a row")
    assert (caught.value.what, caught.value.limit) == ("a row", ITEM_BYTES)
    assert caught.value.size == ITEM_BYTES + 4
    assert check_size({"t": text[:-2]}, "a row") == ITEM_BYTES - 3


@given(
    st.dictionaries(
        st.text("ab", min_size=1, max_size=3),
        st.one_of(st.text(), st.integers(-(2**53), 2**53), st.binary(), st.booleans()),
    )
)
def test_attribute_values_give_back_what_they_are_made_of(item: dict[str, object]) -> None:
    again = from_wire(to_wire(item))
    assert again == item
    assert [type(value) for value in again.values()] == [type(value) for value in item.values()]


# -------------------------------------------------------------------------------- ranges


@given(numbers)
def test_ranges_are_their_numbers(given_: list[int]) -> None:
    ranges = rg.from_numbers(given_)
    assert rg.expand(ranges) == given_
    assert rg.count(ranges) == len(given_)
    assert rg.newest(ranges) == max(given_, default=0)
    assert rg.read_ranges(rg.write_ranges(ranges), "x") == ranges
    assert all(a <= b for a, b in ranges)
    assert all(one[1] + 1 < other[0] for one, other in pairwise(ranges))


@given(numbers, st.integers(0, 61))
def test_a_cut_parts_the_numbers(given_: list[int], through: int) -> None:
    kept, cut = rg.split_behind(rg.from_numbers(given_), through)
    assert rg.expand(kept) == [n for n in given_ if n <= through]
    assert rg.expand(cut) == [n for n in given_ if n > through]


@given(numbers, numbers)
def test_what_is_appended_follows(one: list[int], other: list[int]) -> None:
    above = [n + 100 for n in other]
    both = rg.append(rg.from_numbers(one), rg.from_numbers(above))
    assert both == rg.from_numbers([*one, *above])
    touching = [n + max(one, default=0) for n in other]
    both = rg.append(rg.from_numbers(one), rg.from_numbers(touching))
    assert both == rg.from_numbers([*one, *touching])


@given(numbers, st.sets(st.integers(1, 60)))
def test_what_is_taken_out_is_gone(given_: list[int], gone: set[int]) -> None:
    left = rg.without(rg.from_numbers(given_), gone)
    assert rg.expand(left) == [n for n in given_ if n not in gone]
    assert all(rg.holds(left, n) == (n in given_ and n not in gone) for n in range(62))


@given(numbers, st.none() | st.integers(1, 70), st.none() | st.integers(0, 70))
def test_a_window_is_the_newest_below(
    given_: list[int], limit: int | None, before: int | None
) -> None:
    inside = [n for n in given_ if before is None or n < before]
    wanted = inside if limit is None else inside[-limit:]
    assert rg.window(rg.from_numbers(given_), limit, before) == (
        wanted,
        len(wanted) < len(inside),
    )


@pytest.mark.parametrize("text", ["x", "1-", "1--2", "1,,2", "-"])
def test_ranges_that_are_none_are_an_error(text: str) -> None:
    with pytest.raises(CorruptRecord):
        rg.read_ranges(text, "x")


# ------------------------------------------------------------------------------ the head


@given(
    st.lists(st.builds(Row, st.integers(1, 30), st.integers(1, 3)), max_size=12),
    st.booleans(),
)
def test_a_head_is_what_was_written(rows: list[Row], unborn: bool) -> None:
    head = Head(
        scope=Scope(tenant_id="a"),
        thread_id="t",
        incarnation="0123456789ab",
        version=7,
        transcript_version=5,
        next_number=9,
        next_row=31,
        live=((1, 3), (5, 5)),
        rows=tuple(rows),
        open_runs={"r": 7, "é": 6},
        pending={("r", "i"): 7},
        created_at=1,
        created=2,
        updated_at=3,
        unborn=unborn,
    )
    item = from_wire(to_wire(head.to_item()))
    assert Head.from_item(item) == head
    assert ("list" in item, "due" in item) == (not unborn, not unborn)


def test_a_head_costs_a_kilobyte() -> None:
    """With UUIDs for ids, a run under way and sixteen commits remembered: one write unit of a
    plain write, two of a transaction's."""
    uuid = "7b0c8f0e-7d5b-4d55-8a1e-0d9f5c6b7a80"
    head = new_head(Scope(tenant_id="acme", user_id=uuid), uuid, 1_700_000_000_000, 2**60)
    for _ in range(16):
        fields = {"version": head.version + 1, "transcript_version": head.version + 1}
        head = Head(**{**{f: getattr(head, f) for f in head.__dataclass_fields__}, **fields})
        line = commit_line(
            commit_mark("x"), head, numbers=((2990, 2991),), created_run=True, cut=False
        )
        head = head.remember(line)
    fields = {"live": ((1, 2991),), "next_number": 2992, "open_runs": {uuid: 16}, "unborn": False}
    head = Head(**{**{f: getattr(head, f) for f in head.__dataclass_fields__}, **fields})
    assert head.commits.count("\n") == 15
    assert item_size(head.to_item()) <= 1024


def test_a_head_that_cannot_be_read_is_an_error() -> None:
    item = new_head(Scope(), "t", 1, 2).to_item()
    for spoiled in ({"live": "x"}, {"format": 0}, {"open": b"{"}, {"tenant": 1}):
        with pytest.raises(CorruptRecord):
            Head.from_item({**item, **spoiled})
    del item["version"]
    with pytest.raises(CorruptRecord):
        Head.from_item(item)
