"""What is there at all: whole stores, whole tiers, declared or failed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import get_protocol_members

from chatkeep.compose import STORE_PROTOCOLS, STORE_TIERS
from chatkeep.stores import STORE_KEYS
from chatkeep.testkit.conformance._base import ConformanceCase, need_store

__all__ = ["TestShape"]

_TIERS = sorted(tier.__name__ for tiers in STORE_TIERS.values() for tier in tiers)


def _tier_of(name: str) -> tuple[str, type[Any]]:
    found: Iterator[tuple[str, type[Any]]] = (
        (key, tier) for key, tiers in STORE_TIERS.items() for tier in tiers if tier.__name__ == name
    )
    return next(found)


class TestShape(ConformanceCase):
    """Declare or fail."""

    @pytest.mark.parametrize("key", STORE_KEYS)
    async def test_each_store_is_there_or_declared(
        self, persistence: Any, declared: frozenset[str], key: str
    ) -> None:
        """A store that is missing and not named in ``skip`` fails; a store is whole and async."""
        store = need_store(persistence, key, declared)
        for method in get_protocol_members(STORE_PROTOCOLS[key]):  # type: ignore[index]
            assert inspect.iscoroutinefunction(getattr(store, method)), f"{key}.{method}"

    @pytest.mark.parametrize("name", _TIERS)
    async def test_each_tier_is_whole_or_absent(
        self, persistence: Any, declared: frozenset[str], name: str
    ) -> None:
        """A store has every method of a tier, or none; an absent one is skipped by name."""
        key, tier = _tier_of(name)
        store = getattr(persistence.stores, key)
        members = get_protocol_members(tier)
        there = {m for m in members if callable(getattr(store, m, None))}
        assert there in (set(), set(members)), f"{name}: {sorted(members - there)} missing"
        if not there or name in declared:
            pytest.skip(f"tier {name} is {'declared as missing' if there else 'absent'}")
        for method in sorted(members):
            assert inspect.iscoroutinefunction(getattr(store, method)), f"{key}.{method}"

    async def test_skip_names_only_what_there_is(self, declared: frozenset[str]) -> None:
        """A misspelt declaration is found."""
        bags = {"ThreadAdmin", "TurnBackend", "DeliveryLog", "LockStore", "Scope", "Maintenance"}
        known = {*STORE_KEYS, *_TIERS, *bags}
        assert declared <= known
