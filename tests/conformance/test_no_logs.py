"""Backends without logs and locks say so at construction, and what to put beside them."""

from __future__ import annotations

import pytest

from chatkeep import Persistence, compose_persistence, memory_persistence, open_persistence
from chatkeep.delivery import StoredLocks, StoredLog
from chatkeep.errors import CompositionError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("mongodb://localhost/none", marks=pytest.mark.mongo),
        pytest.param("dynamodb://chatkeep?region=eu-west-1", marks=pytest.mark.dynamodb),
    ],
)
async def test_what_has_no_log_names_what_has(url: str) -> None:
    """Composed with a backend that can, it has one: where that one is."""
    alone: Persistence = open_persistence(url)
    for kind in (StoredLog, StoredLocks):
        with pytest.raises(CompositionError, match=r"PostgreSQL, SQLite or Redis"):
            kind(alone)
    memory = memory_persistence()
    mixed = compose_persistence(alone, overrides={"metadata": memory.stores.metadata})
    assert repr(StoredLog(mixed)) == "<StoredLog in memory>"
    assert repr(StoredLocks(mixed)) == "<StoredLocks in memory>"
    await alone.aclose()
