"""The codec: what goes in comes out, or is refused with the place named."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import tracemalloc
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from chatkeep import codec
from chatkeep.errors import CorruptRecord, InvalidValue

text = st.text(st.characters(exclude_categories=["Cs"]))
integers = st.one_of(st.integers(), st.integers(min_value=2**63, max_value=10**60))
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(st.none(), st.booleans(), integers, floats, text)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Equal with types and key order: 1, 1.0 and True are three values, 0.0 and -0.0 two."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right


@given(json_values)
def test_every_json_value_round_trips_with_types_and_key_order(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


@given(json_values)
def test_a_body_is_json_that_any_reader_understands(value: Any) -> None:
    assert same(json.loads(codec.encode(value)), value)


@given(json_values)
def test_encoding_is_stable_so_digests_can_be_compared(value: Any) -> None:
    body = codec.encode(value)
    assert codec.encode(codec.decode(body)) == body
    assert codec.digest(codec.encode(codec.decode(body))) == codec.digest(body)


@given(json_values)
def test_normalising_copies_deeply(value: Any) -> None:
    copy = codec.normalize(value)
    assert same(copy, value)
    if isinstance(value, dict | list):
        assert copy is not value


@given(st.text(st.characters()))
def test_text_is_kept_but_for_lone_surrogates_which_become_the_replacement_character(
    value: str,
) -> None:
    stored = codec.decode(codec.encode({"t": value}))["t"]
    expected = "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in value)
    assert stored == expected


@pytest.mark.parametrize(
    "value",
    ["", "\x00", "a\x00b", [], {}, [[]], {"": ""}, 0, -0.0, 2**53 + 1, 2**64, -(2**63) - 1, 1e-320],
    ids=repr,
)
def test_the_values_that_databases_like_to_change_are_kept(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


def test_a_body_beyond_64_bits_is_marked_and_read_back_exactly() -> None:
    value = {"big": 10**4000, "text": "é", "n": 1.5}
    body = codec.encode(value)
    assert body.startswith(b" ")
    assert same(codec.decode(body), value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_none_can_be_stored(value: float) -> None:
    with pytest.raises(InvalidValue) as caught:
        codec.encode({"a": [0, {"b c": value}]})
    assert caught.value.path == "$.a[1]['b c']"


@pytest.mark.parametrize("bad", [decimal.Decimal("NaN"), object(), {1, 2}, 1j, lambda: 0], ids=repr)
def test_what_has_no_documented_conversion_is_refused_with_its_path(bad: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        codec.encode([bad], "message")
    assert caught.value.path == "message[0]"


def test_keys_must_be_text() -> None:
    with pytest.raises(InvalidValue, match="keys must be text, not int"):
        codec.encode({"a": {1: 2}})


def test_two_keys_that_become_one_are_refused() -> None:
    with pytest.raises(InvalidValue, match="two keys become"):
        codec.encode({"\ud800": 1, chr(0xFFFD): 2})


def test_an_integer_has_at_most_4300_digits() -> None:
    top = 10**4300 - 1
    assert codec.decode(codec.encode(top)) == top
    for value in (top + 1, -top - 1):
        with pytest.raises(InvalidValue, match="4300 digits"):
            codec.encode(value)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_ends_at_200_levels() -> None:
    assert codec.decode(codec.encode(nested(200))) == nested(200)
    with pytest.raises(InvalidValue, match="200 levels"):
        codec.encode(nested(201))


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidValue, match="200 levels"):
        codec.encode(loop)


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Model(BaseModel):
    name: str
    left_out: str | None = None


@dataclasses.dataclass
class Point:
    x: int
    _hidden: int


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC), "2026-01-02T03:04:05.000006+00:00"),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (dt.time(3, 4), "03:04:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (decimal.Decimal("1.10"), "1.10"),
        (b"\x00\xff", "AP8="),
        (bytearray(b"a"), "YQ=="),
        (memoryview(b"a"), "YQ=="),
        (Colour.RED, "red"),
        (Size.BIG, 3),
        (Model(name="n"), {"name": "n"}),
        (Point(1, 2), {"x": 1, "_hidden": 2}),
        ((1, (2,)), [1, [2]]),
        (Text("t"), "t"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_type_that_is_not_json_has_one_conversion(value: Any, stored: Any) -> None:
    assert same(codec.decode(codec.encode({"v": value}))["v"], stored)


@pytest.mark.parametrize("body", [b"", b"{", b"nul", b" 1 2", b"\xff", "{", b"NaN", b'{"a":1}x'])
def test_bytes_that_are_no_json_are_an_error_and_never_read_as_empty(body: bytes | str) -> None:
    with pytest.raises(CorruptRecord, match="run r1 cannot be read"):
        codec.decode(body, "run r1")


def test_a_digest_tells_bodies_apart_and_has_16_bytes() -> None:
    assert len(codec.digest(b"1")) == 16
    assert codec.digest(codec.encode(1)) != codec.digest(codec.encode(1.0))


def test_bytes_that_are_kept_cost_no_more_than_they_hold() -> None:
    """Event logs and the memory backend keep them by the thousand."""
    value = {"type": "TEXT_MESSAGE_CONTENT", "delta": "word"}
    tracemalloc.start()
    kept = [codec.encode(value) for _ in range(1_000)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 1_000 * (len(kept[0]) + 100)
