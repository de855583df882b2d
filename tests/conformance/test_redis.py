"""The conformance suite on Redis, a single server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from chatkeep_redis import redis_persistence
from conformance.bags import SHAPES, bag
from servers.redis import RedisServer

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module", params=SHAPES)
async def persistence(
    request: pytest.FixtureRequest, redis_server: RedisServer
) -> AsyncIterator[Persistence]:
    with redis_server.space() as space:
        async with bag(request.param, lambda: redis_persistence(space.url())) as persistence:
            yield persistence
