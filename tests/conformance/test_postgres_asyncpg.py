"""The conformance suite on PostgreSQL, through asyncpg."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from chatkeep_sql import postgres_persistence
from conformance.bags import SHAPES, bag
from servers import Postgres

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module", params=SHAPES)
async def persistence(
    request: pytest.FixtureRequest, postgres: Postgres
) -> AsyncIterator[Persistence]:
    with postgres.database() as database:
        url = database.url("asyncpg")
        async with bag(request.param, lambda: postgres_persistence(url)) as persistence:
            yield persistence
