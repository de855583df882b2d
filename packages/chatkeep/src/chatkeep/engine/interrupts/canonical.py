"""Canonical JSON and its hashes, byte for byte what a browser computes.

A browser knows that an interrupt means its own tool by hashes of JSON Schemas. They are taken of
one spelling of a value: keys sorted by UTF-16 code unit, no spaces, numbers as ECMAScript
prints them, text escaped as ``JSON.stringify`` does. Python's ``json`` differs in all four.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from chatkeep.codec import MAX_DEPTH
from chatkeep.errors import InvalidValue

__all__ = ["canonical_hash", "canonical_json", "schema_hash"]

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_EXACT: Final = 2**53
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_quote: Final = json.JSONEncoder(ensure_ascii=False).encode


def canonical_json(value: Any) -> str:
    """The canonical JSON text of ``value``: None, booleans, numbers, text, lists, tuples and
    mappings with text keys.

    Integers are doubles, as in a browser: beyond 2**53 the nearest one.

    Raises:
        InvalidValue: anything that JSON has not (NaN, infinities, integers beyond the doubles,
            dates, bytes, objects), nesting beyond 200 levels; ``path`` names the place.
    """
    out: list[str] = []
    _write(value, out, "$", 0)
    return "".join(out)


def canonical_hash(value: Any) -> str:
    """``sha256:`` and the hexadecimal SHA-256 of the canonical JSON of ``value``.

    Raises:
        InvalidValue: see :func:`canonical_json`.
    """
    return _digest(canonical_json(value))


def schema_hash(schema: Mapping[str, Any] | None) -> str:
    """The hash of a JSON Schema as it is; without a schema that of the bare word ``undefined``.

    Raises:
        InvalidValue: see :func:`canonical_json`.
    """
    return _digest("undefined") if schema is None else canonical_hash(schema)


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _write(value: Any, out: list[str], path: str, depth: int) -> None:
    if value is None:
        out.append("null")
    elif isinstance(value, bool):
        out.append("true" if value else "false")
    elif isinstance(value, str):
        out.append(_text(value))
    elif isinstance(value, int | float):
        out.append(_number(value, path))
    elif depth >= MAX_DEPTH:
        raise InvalidValue(path, f"nested deeper than {MAX_DEPTH} levels")
    elif isinstance(value, Mapping):
        _write_object(value, out, path, depth)
    elif isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        out.append("[")
        for index, item in enumerate(items):
            if index:
                out.append(",")
            _write(item, out, f"{path}[{index}]", depth + 1)
        out.append("]")
    else:
        raise InvalidValue(path, f"{type(value).__name__} is not JSON")


def _write_object(value: Any, out: list[str], path: str, depth: int) -> None:
    rows: Mapping[Any, Any] = value
    for key in rows:
        if not isinstance(key, str):
            raise InvalidValue(path, f"keys must be text, not {type(key).__name__}")
    out.append("{")
    for index, key in enumerate(sorted(rows, key=_utf16)):
        if index:
            out.append(",")
        out.append(_text(key))
        out.append(":")
        place = f"{path}.{key}" if _PLAIN_KEY.match(key) else f"{path}[{key!r}]"
        _write(rows[key], out, place, depth + 1)
    out.append("}")


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _text(value: str) -> str:
    text = _quote(str(value))
    if text.isascii():
        return text
    # Pairs of surrogates are one character; what is left alone is escaped.
    whole = text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")
    return _SURROGATES.sub(lambda match: f"\\u{ord(match[0]):04x}", whole)


def _number(value: float, path: str) -> str:
    """The shortest text that reads back as the same double, laid out as ECMAScript does."""
    if isinstance(value, int) and -_EXACT <= value <= _EXACT:
        return int.__repr__(value)
    try:
        double = float(value)
    except OverflowError:
        double = math.inf
    if not math.isfinite(double):
        raise InvalidValue(path, "NaN and infinities are not JSON")
    if double == 0:
        return "0"
    sign = "-" if double < 0 else ""
    mantissa, _, exponent = float.__repr__(abs(double)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    digits = (whole + fraction).lstrip("0")
    # The number is 0.<digits> times ten to the power of `point`.
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    return sign + _layout(digits, point)


def _layout(digits: str, point: int) -> str:
    count = len(digits)
    if count <= point <= 21:
        return digits + "0" * (point - count)
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    power = point - 1
    head = digits if count == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{head}e{'+' if power > 0 else '-'}{abs(power)}"
