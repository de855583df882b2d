"""A server on each store, and the official client to talk to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from e2e.conftest import STORES, new_store
from e2e.server import ChatServer
from wire.agui import Drive, drive_client

__all__ = ["drive", "new_store", "server"]


@pytest.fixture(scope="module", params=STORES)
def server(request: pytest.FixtureRequest, new_store: Callable[[str], str]) -> Iterator[ChatServer]:
    """A server on each store."""
    running = ChatServer(new_store(request.param), "--drafts").start()
    yield running
    running.close()


@pytest.fixture
def drive() -> Drive:
    """Runs the official client."""
    return drive_client
