"""The conformance suite on SQLite files."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from chatkeep_sql import sqlite_persistence
from conformance.bags import SHAPES, bag

pytestmark = pytest.mark.sqlite


@pytest.fixture(scope="module", params=SHAPES)
async def persistence(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Persistence]:
    path = tmp_path_factory.mktemp("sqlite") / "chatkeep.db"
    async with bag(request.param, lambda: sqlite_persistence(path)) as persistence:
        yield persistence
