"""Canonical JSON and hashes equal what a browser computes, byte for byte."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.engine.interrupts import canonical_hash, canonical_json, schema_hash
from chatkeep.errors import InvalidValue

HERE = Path(__file__).parent
BROWSER: dict[str, list[list[str]]] = json.loads((HERE / "ecmascript.json").read_text())
"""``doubles``: the bits of a double and what a browser prints; ``values``: JSON text and the
canonical text that the browser's library made of it."""

TRACE = (HERE.parent / "golden" / "trace-c.txt").read_text().splitlines()

SEND_EMAIL = {
    "type": "object",
    "properties": {"to": {"type": "string"}, "subject": {"type": "string"}},
    "required": ["to", "subject"],
    "additionalProperties": False,
}
LOCATION = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_doubles_print_as_in_a_browser() -> None:
    assert len(BROWSER["doubles"]) > 300
    for bits, text in BROWSER["doubles"]:
        (double,) = struct.unpack(">d", bytes.fromhex(bits))
        assert canonical_json(double) == text


def test_values_print_as_in_a_browser() -> None:
    assert len(BROWSER["values"]) == 40
    for text, canonical in BROWSER["values"]:
        assert canonical_json(json.loads(text)) == canonical


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1e21}, '{"a":1e+21}'),
        ({"a": 0.1}, '{"a":0.1}'),
        ({"a": -0.0}, '{"a":0}'),
        ({"a": 1e-7}, '{"a":1e-7}'),
        ({"z": 2, "é": 1, "😀": 3, "\ufffd": 4}, '{"z":2,"é":1,"😀":3,"\ufffd":4}'),
        ({"b": 1, "a": [1, "é", None, True], "c": {}}, '{"a":[1,"é",null,true],"b":1,"c":{}}'),
    ],
)
def test_the_values_of_the_recorded_trace(value: Any, text: str) -> None:
    """Each of these texts stands in a recording of the browser's library."""
    assert canonical_json(value) == text
    assert any(text in line for line in TRACE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (1.0, "1"),
        (2**53, "9007199254740992"),
        (2**53 + 1, "9007199254740992"),
        (-(2**63), "-9223372036854776000"),
        (10**21, "1e+21"),
        (10**20, "100000000000000000000"),
        (123456789012345678901234567890, "1.2345678901234568e+29"),
        ([], "[]"),
        ((1, 2), "[1,2]"),
        ({}, "{}"),
        ('"\\/\b\f\n\r\t\x00\x1f\x7f\u2028', '"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\u2028"'),
        ("\ud800", '"\\ud800"'),
        ("a\ude00\ud83d", '"a\\ude00\\ud83d"'),
        ("\ud83d\ude00", '"😀"'),
        ({"\ufffd": 1, "😀": 2}, '{"😀":2,"\ufffd":1}'),
        ({"\ud800": 1}, '{"\\ud800":1}'),
        ({"10": 1, "9": 2}, '{"10":1,"9":2}'),
        ({"": 1}, '{"":1}'),
    ],
)
def test_every_rule_of_the_canonical_form(value: Any, text: str) -> None:
    assert canonical_json(value) == text


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), "$"),
        ({"a": [1, float("inf")]}, "$.a[1]"),
        ({"a b": {"c": -float("inf")}}, "$['a b'].c"),
        (10**400, "$"),
        (b"bytes", "$"),
        ({1, 2}, "$"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "$"),
        (decimal.Decimal(1), "$"),
        (Colour.RED, "$"),
        ([object()], "$[0]"),
        ({1: 2}, "$"),
        ({None: 2}, "$"),
        (1j, "$"),
    ],
)
def test_what_json_has_not_is_refused_by_its_place(value: Any, path: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        canonical_json(value)
    assert caught.value.path == path


def test_deep_nesting_is_refused_instead_of_exhausting_the_stack() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    assert canonical_json(value) == "[" * 200 + "1" + "]" * 200
    for deeper in ([value], {"a": value}):
        with pytest.raises(InvalidValue, match="nested deeper"):
            canonical_json(deeper)
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidValue, match="nested deeper"):
        canonical_json(value)


@pytest.mark.parametrize(
    ("value", "digest"),
    [
        ({}, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
        (
            {"approve": None, "reject": None},
            "22f76d9a1c618a3cfaa891208a14f6e5e6ab1be4ff1c38cc8a8cd1e8fd0c0e4e",
        ),
        (SEND_EMAIL, "e8c3c38ac148dedf4d54441277bf5359f83b76fae01c2c32eabaf431bbcc8fb5"),
        (LOCATION, "5f118feb63f080e5bd34bc71f32b2e9efba28cc852774cb88f549245301bb7b7"),
        (
            {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"p": {"type": "string"}},
                "required": ["p"],
            },
            "1e712b767d9335d8a2e2d79779182c3596efbba70951fccfbb6ad3fb757c113b",
        ),
    ],
)
def test_known_hashes_of_schemas(value: dict[str, Any], digest: str) -> None:
    assert canonical_hash(value) == schema_hash(value) == f"sha256:{digest}"


def test_the_hash_of_no_schema_is_that_of_the_bare_word_undefined() -> None:
    expected = "sha256:eb045d78d273107348b0300c01d29b7552d622abbc6faf81b3ec55359aa9950c"
    assert schema_hash(None) == expected
    assert any(expected in line for line in TRACE)


def test_resolutions_hash_as_the_browser_fingerprints_them() -> None:
    (line,) = (line for line in TRACE if line.startswith("canonicalize resolutions"))
    recorded = json.loads(line.removeprefix("canonicalize resolutions "))
    shuffled = [
        {"status": "cancelled", "interruptId": "a"},
        {"status": "resolved", "payload": {"z": 1, "a": 2}, "interruptId": "b"},
    ]
    assert canonical_json(shuffled) == recorded["canonicalResolutions"]
    assert canonical_hash(shuffled) == recorded["fingerprint"]


# ---------------------------------------------------------------- rules, told independently


def shortest(double: float) -> str:
    """Number.prototype.toString of ECMAScript, from its definition: the fewest digits *k* that
    read back as the same double (of two such the nearer), and the exponent *n*."""
    if double == 0:
        return "0"
    exact = decimal.Decimal(abs(double))
    near: list[decimal.Decimal] = []
    k = 0
    while not near:
        k += 1
        for rounding in (decimal.ROUND_FLOOR, decimal.ROUND_CEILING):
            rounded = decimal.Context(prec=k, rounding=rounding).create_decimal(exact)
            if float(rounded) == abs(double):
                near.append(rounded)
    best = min(near, key=lambda number: abs(number - exact))
    digits = "".join(map(str, best.as_tuple().digits)).rstrip("0")
    k, n = len(digits), best.adjusted() + 1
    sign = "-" if double < 0 else ""
    if k <= n <= 21:
        return sign + digits + "0" * (n - k)
    if 0 < n <= 21:
        return sign + digits[:n] + "." + digits[n:]
    if -6 < n <= 0:
        return sign + "0." + "0" * -n + digits
    point = "." + digits[1:] if k > 1 else ""
    return f"{sign}{digits[0]}{point}e{'+' if n > 0 else '-'}{abs(n - 1)}"


JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_have_the_fewest_digits_in_ecmascript_layout(double: float) -> None:
    assert canonical_json(double) == shortest(double)
    assert float(canonical_json(double)) == double


@given(st.integers(-(10**30), 10**30))
def test_integers_are_the_doubles_that_a_browser_makes_of_them(number: int) -> None:
    assert canonical_json(number) == shortest(float(number))


@given(JSON_VALUES)
def test_the_canonical_text_is_the_same_value(value: Any) -> None:
    assert json.loads(canonical_json(value), parse_int=float) == value


@given(JSON_VALUES)
def test_the_canonical_text_is_a_fixed_point_without_spaces(value: Any) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    outside = json.dumps(json.loads(text), ensure_ascii=True, separators=(",", ":"))
    assert text.count(" ") == outside.count(" ")


@given(st.dictionaries(JSON_TEXT, st.integers(), max_size=8), st.randoms())
def test_keys_stand_in_the_order_of_their_utf_16_units(rows: dict[str, int], shuffle: Any) -> None:
    def units(key: str) -> list[int]:
        raw = key.encode("utf-16-le")
        return [raw[i] + 256 * raw[i + 1] for i in range(0, len(raw), 2)]

    keys = list(json.loads(canonical_json(rows)))
    assert keys == sorted(rows, key=units)
    order = list(rows.items())
    shuffle.shuffle(order)
    assert canonical_json(dict(order)) == canonical_json(rows)
