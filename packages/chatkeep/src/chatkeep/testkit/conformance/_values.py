"""One way in, one way out: values through real round trips, wherever a value may stand."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
from pydantic import BaseModel, ConfigDict

from chatkeep.errors import InvalidValue
from chatkeep.records import ModelMessage, RunPatch
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    activity,
    exact,
    interrupt,
    need_store,
    user,
)

__all__ = ["TestValues"]

PLACES = ("messages", "runs", "payload", "response", "activities", "metadata")

KEPT: dict[str, Any] = {
    "NUL": "a\x00b",
    "NUL in a key": {"k\x00": {"\x00": "\x00"}},
    "astral text": "\U0001d4b3😀\U0010ffff",
    "line separators": "\u2028\u2029\r\n\t\x7f\x1b",
    "empty text": "",
    "empties": [[], {}, [[]], {"a": {}, "b": []}],
    "nulls": [None, {"a": None}],
    "booleans and numbers": [True, 1, 1.0, False, 0, 0.0, -0.0],
    "53 bits": [2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1],
    "64 bits": [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1],
    "huge integers": [10**400, -(10**400), 10**4299],
    "floats": [0.1, 1e-200, 1.7976931348623157e308, 5e-324, 1e22, -1.5, 100.0],
    "text like numbers": ["1", "1.0", "1e400", "NaN", "null", "true"],
    "key order": {"b": 1, "a": 2, "10": 3, "9": 4, "": 5},
    "odd keys": {"$schema": 1, "a.b": 2, "_id": 3, "$where": 4, "__proto__": 5, "%s": 6, "é": 7},
    "quotes": "'\"`\\'; drop table x; --",
    "nested": [[[[[[{"a": [{"b": [1]}]}]]]]]],
    "long text": "0123456789" * 10_000,
    "deep": None,
}
_deep: Any = 1
for _ in range(150):
    _deep = [_deep]
KEPT["deep"] = _deep

_too_deep: Any = 1
for _ in range(250):
    _too_deep = {"x": _too_deep}

REFUSED: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "1e400": 1e400,
    "decimal NaN": decimal.Decimal("NaN"),
    "a set": {1},
    "a number as key": {1: "x"},
    "None as key": {None: "x"},
    "an object": object(),
    "a function": len,
    "4301 digits": 10**4300,
    "nested too deep": _too_deep,
    "keys that become one": dict.fromkeys(["\ud800", "\ufffd"], 1),
}


class _Colour(enum.Enum):
    RED = "red"


@dataclass
class _Point:
    x: int
    y: float


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow")
    some_name: str
    missing: str | None = None


CONVERTED: dict[str, tuple[Any, Any]] = {
    "lone surrogate": ("a\ud800b", "a\ufffdb"),
    "lone surrogate in a key": ({"\udfff": 1}, {"\ufffd": 1}),
    "datetime": (dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), "2026-01-02T03:04:05+00:00"),
    "date": (dt.date(2026, 1, 2), "2026-01-02"),
    "time": (dt.time(3, 4, 5), "03:04:05"),
    "uuid": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "decimal": (decimal.Decimal("1.10"), "1.10"),
    "bytes": (b"\xff\x00", "/wA="),
    "enum": (_Colour.RED, "red"),
    "tuple": ((1, (2,)), [1, [2]]),
    "dataclass": (_Point(1, 2.0), {"x": 1, "y": 2.0}),
    "pydantic model": (_Model(some_name="a"), {"some_name": "a"}),
}

_Write = Callable[[Any], Awaitable[None]]
_Read = Callable[[], Awaitable[Any]]


class TestValues(ConformanceCase):
    """A value that one database would refuse is refused, or normalised, by all."""

    @pytest.fixture(params=PLACES)
    async def place(
        self,
        request: pytest.FixtureRequest,
        persistence: Any,
        declared: frozenset[str],
        ids: Ids,
    ) -> tuple[_Write, _Read]:
        """How to store ``{"v": value}`` in one of the places, and read it back."""
        name: str = request.param
        key = "interrupts" if name in ("payload", "response") else name
        store = need_store(persistence, key, declared)
        return await _PLACES[name](store, ids)

    @pytest.mark.parametrize("kind", KEPT)
    async def test_a_value_comes_back_exactly(self, place: tuple[_Write, _Read], kind: str) -> None:
        """Same value, same type, same order of keys, digit for digit."""
        write, read = place
        value = {"v": KEPT[kind]}
        await write(value)
        assert exact(await read()) == exact(value)

    async def test_values_are_converted_in_the_documented_way(
        self, place: tuple[_Write, _Read]
    ) -> None:
        """Dates, UUIDs, decimals, bytes, models and surrogates: one form on every backend."""
        write, read = place
        await write({"v": {kind: given for kind, (given, _) in CONVERTED.items()}})
        want = {"v": {kind: stored for kind, (_, stored) in CONVERTED.items()}}
        assert exact(await read()) == exact(want)

    @pytest.mark.parametrize("kind", REFUSED)
    async def test_a_value_that_cannot_be_stored_is_refused(
        self, place: tuple[_Write, _Read], kind: str
    ) -> None:
        """A typed error that names the path; what was stored before is untouched."""
        write, read = place
        before = await read()
        with pytest.raises(InvalidValue) as caught:
            await write({"v": {"inner": [0, REFUSED[kind]]}})
        if kind != "nested too deep":
            assert "inner" in caught.value.path
        assert exact(await read()) == exact(before)


async def _in_messages(store: Any, ids: Ids) -> tuple[_Write, _Read]:
    thread = ids.thread()

    async def write(value: Any) -> None:
        await store.save_thread(thread, [user("x", "m1"), user("x", "m2", x_new=value)])

    async def read() -> Any:
        rows = cast("list[ModelMessage]", await store.load_thread(thread))
        return cast("Any", rows[-1])["x_new"] if rows else None

    return write, read


async def _in_runs(store: Any, ids: Ids) -> tuple[_Write, _Read]:
    run, thread = ids.run(), ids.thread()
    await store.create_or_resume(run, thread, started_at=1)

    async def write(value: Any) -> None:
        await store.update(run, RunPatch(usage=value), thread_id=thread)

    async def read() -> Any:
        return (await store.get(run)).usage

    return write, read


async def _in_payload(store: Any, ids: Ids) -> tuple[_Write, _Read]:
    thread, run, name = ids.thread(), ids.run(), ids.interrupt()

    async def write(value: Any) -> None:
        assert await store.create(interrupt(thread, run, name, payload=value))

    async def read() -> Any:
        found = await store.get(thread, name)
        return found.payload if found is not None else None

    return write, read


async def _in_response(store: Any, ids: Ids) -> tuple[_Write, _Read]:
    thread, run, name = ids.thread(), ids.run(), ids.interrupt()
    await store.create(interrupt(thread, run, name))

    async def write(value: Any) -> None:
        await store.resolve(thread, name, value)

    async def read() -> Any:
        found = await store.get(thread, name)
        return found.to_json().get("response", "absent")

    return write, read


async def _in_activities(store: Any, ids: Ids) -> tuple[_Write, _Read]:
    thread = ids.thread()

    async def write(value: Any) -> None:
        await store.save_activities(thread, [activity("a", 0), activity("b", 1, content=value)])

    async def read() -> Any:
        rows = await store.load_activities(thread)
        return rows[-1].content if rows else None

    return write, read


async def _in_metadata(store: Any, ids: Ids) -> tuple[_Write, _Read]:
    name = ids("n")

    async def write(value: Any) -> None:
        await store.set(name, "k", value)

    async def read() -> Any:
        return await store.get(name, "k")

    return write, read


_PLACES: dict[str, Callable[[Any, Ids], Awaitable[tuple[_Write, _Read]]]] = {
    "messages": _in_messages,
    "runs": _in_runs,
    "payload": _in_payload,
    "response": _in_response,
    "activities": _in_activities,
    "metadata": _in_metadata,
}
