"""The conformance suite on MongoDB, through an application's Motor client.

Two shapes are enough here: what differs from PyMongo's client is one adapter of few lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from conformance.bags import bag
from conformance.mongo_clients import opened
from servers.mongo import MongoServer

pytestmark = pytest.mark.mongo


@pytest.fixture(scope="module", params=["plain", "scoped"])
async def persistence(
    request: pytest.FixtureRequest, mongo: MongoServer
) -> AsyncIterator[Persistence]:
    with mongo.database() as database:
        async with bag(request.param, lambda: opened("motor", database)) as persistence:
            yield persistence
