"""The conformance suite on DynamoDB."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chatkeep import Persistence
from chatkeep.testkit.conformance import *  # noqa: F403
from chatkeep_dynamodb import open_url
from conformance.bags import SHAPES, bag
from servers.dynamodb import DynamoDB

pytestmark = pytest.mark.dynamodb


@pytest.fixture(scope="module", params=SHAPES)
async def persistence(
    request: pytest.FixtureRequest, dynamodb: DynamoDB
) -> AsyncIterator[Persistence]:
    with dynamodb.table() as table:
        async with bag(request.param, lambda: open_url(table.url())) as persistence:
            yield persistence
