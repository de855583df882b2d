"""The conformance suite on MongoDB, through PyMongo's asyncio client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from chatkeep_mongo import mongo_persistence
from conformance.bags import SHAPES, bag
from servers.mongo import MongoServer

pytestmark = pytest.mark.mongo


@pytest.fixture(scope="module", params=SHAPES)
async def persistence(
    request: pytest.FixtureRequest, mongo: MongoServer
) -> AsyncIterator[Persistence]:
    with mongo.database() as database:
        async with bag(request.param, lambda: mongo_persistence(database.url())) as persistence:
            yield persistence
