"""What the tests that cross packages share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio: what drivers and servers run on."""
    return "asyncio"
