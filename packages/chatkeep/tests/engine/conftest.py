"""What the tests of the engine share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio: what the engine runs on."""
    return "asyncio"
