"""The conformance suite on the memory backend."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence, memory_persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from conformance.bags import OWN_SHAPES, SHAPES, bag

pytestmark = pytest.mark.memory


@pytest.fixture(scope="module", params=[*SHAPES, *OWN_SHAPES])
async def persistence(request: pytest.FixtureRequest) -> AsyncIterator[Persistence]:
    async with bag(request.param, memory_persistence) as persistence:
        yield persistence
