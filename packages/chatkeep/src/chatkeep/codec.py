"""One way in, one way out: how values become bytes, the same for every backend.

Rules (a value that one database would refuse is refused, or normalised, by all):

* text keeps NUL; a lone surrogate becomes U+FFFD;
* NaN and infinities are refused; integers keep every digit (up to 4 300); ``1`` and ``1.0``
  stay apart; key order, empty text, empty lists and empty objects stay;
* nesting up to 200 levels; keys must be text;
* datetimes, dates, times become ISO 8601 text, UUID and Decimal text, bytes base64 text,
  enums their value, pydantic models and dataclasses objects, tuples lists.

A body is UTF-8 JSON. A leading space marks one with integers beyond 64 bits: the fast
decoder would turn those into floats. Any JSON reader skips it.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import hashlib
import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import orjson
from pydantic import BaseModel

from chatkeep.errors import CorruptRecord, InvalidValue

__all__ = [
    "FORMAT_VERSION",
    "MAX_DEPTH",
    "MAX_INT_DIGITS",
    "JsonValue",
    "decode",
    "digest",
    "encode",
    "normalize",
]

JsonValue: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list or dict with text keys."""

FORMAT_VERSION = 1
"""Version of the record format that this package writes; older ones open, newer are refused."""

MAX_DEPTH = 200
MAX_INT_DIGITS = 4300

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_INT_LIMIT = 10**MAX_INT_DIGITS
_SURROGATES = re.compile("[\ud800-\udfff]")
_PLAIN_TEXT_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def normalize(value: Any, path: str = "$") -> JsonValue:
    """A deep copy of ``value`` made of plain JSON values only.

    Raises:
        InvalidValue: ``path`` names the place of what cannot be stored.
    """
    return _normalize(value, path, 0)


def encode(value: Any, path: str = "$") -> bytes:
    """``value``, normalised, as the bytes of a body.

    Raises:
        InvalidValue: see :func:`normalize`.
    """
    plain = _normalize(value, path, 0)
    try:
        # A copy: what orjson returns keeps the buffer that it was written in, 4 KB and more for
        # the smallest value, for as long as the bytes live (an event log, the memory backend).
        return bytes(memoryview(orjson.dumps(plain)))
    except (TypeError, RecursionError):
        # Only integers beyond 64 bits are left for orjson to refuse after _normalize.
        return b" " + json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def decode(body: bytes | str, what: str = "record") -> JsonValue:
    """The value of a body.

    Raises:
        CorruptRecord: the bytes are not JSON; never read as "empty".
    """
    try:
        if body[:1] in (b" ", " "):
            return json.loads(body)
        return orjson.loads(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptRecord(what, str(error)) from error


def digest(body: bytes) -> bytes:
    """16 bytes that tell whether a stored body equals another one."""
    return hashlib.blake2b(body, digest_size=16).digest()


def _child(path: str, key: str) -> str:
    return f"{path}.{key}" if _PLAIN_TEXT_KEY.match(key) else f"{path}[{key!r}]"


def _text(value: str) -> str:
    if value.isascii():
        return value if type(value) is str else str.__str__(value)
    return _SURROGATES.sub("\ufffd", value)


def _normalize(value: Any, path: str, depth: int) -> Any:
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if value.isascii() else _SURROGATES.sub("\ufffd", value)
    if kind is int:
        return _integer(value, path)
    if kind is float:
        if not math.isfinite(value):
            raise InvalidValue(path, "NaN and infinities cannot be stored")
        return value
    if depth >= MAX_DEPTH:
        raise InvalidValue(path, f"nested deeper than {MAX_DEPTH} levels")
    if kind is dict or isinstance(value, Mapping):
        return _mapping(cast("Mapping[Any, Any]", value), path, depth)
    if kind is list or kind is tuple:
        return [_normalize(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    return _convert(value, path, depth)


def _integer(value: int, path: str) -> int:
    if _INT64_MIN <= value <= _UINT64_MAX or abs(value) < _INT_LIMIT:
        return value
    raise InvalidValue(path, f"integers have at most {MAX_INT_DIGITS} digits")


def _mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidValue(path, f"keys must be text, not {type(key).__name__}")
        name = _text(key)
        if name in out:
            raise InvalidValue(path, f"two keys become {name!r} once surrogates are replaced")
        out[name] = _normalize(item, _child(path, key), depth + 1)
    return out


def _convert(value: Any, path: str, depth: int) -> Any:
    """The one documented conversion of each type that is not JSON itself."""
    if isinstance(value, enum.Enum):
        return _normalize(value.value, path, depth + 1)
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return _integer(int(value), path)
    if isinstance(value, float):
        return _normalize(float(value), path, depth)
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            raise InvalidValue(path, "NaN and infinities cannot be stored")
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(cast("bytes", value))).decode("ascii")
    if isinstance(value, BaseModel):
        dumped = value.model_dump(mode="python", by_alias=True, exclude_none=True)
        return _normalize(dumped, path, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _normalize(fields, path, depth)
    if isinstance(value, list | tuple):
        return [
            _normalize(item, f"{path}[{i}]", depth + 1)
            for i, item in enumerate(cast("list[Any]", value))
        ]
    raise InvalidValue(path, f"{type(value).__module__}.{type(value).__name__} cannot be stored")
