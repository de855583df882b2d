"""Fixtures of MongoDB for every test directory (loaded by the root ``conftest.py``).

* ``mongo`` (session): the server of ``CHATKEEP_TEST_MONGO_URL``, else one that is started.
* ``mongo_database``: a database that does not exist yet; dropped afterwards.
* ``own_mongo``: a server for one test, to kill, pause and start again.

A test that takes one of them carries the marker ``mongo`` by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator

import pytest

from servers.marks import mark_by_fixture
from servers.mongo import GivenMongo, MongoDatabase, MongoProcess, MongoServer
from servers.process import ServerError

_MARKS = {"mongo": "mongo", "mongo_database": "mongo", "own_mongo": "mongo"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the servers that they ask for."""
    mark_by_fixture(items, _MARKS)


@pytest.fixture(scope="session")
def mongo() -> Iterator[MongoServer]:
    """A server for the whole test session."""
    if url := os.environ.get("CHATKEEP_TEST_MONGO_URL"):
        yield GivenMongo(url)
        return
    with _started() as server:
        yield server


@pytest.fixture
def own_mongo() -> Iterator[MongoProcess]:
    """A server for one test, which may kill it."""
    with _started() as server:
        yield server


@pytest.fixture
def mongo_database(mongo: MongoServer) -> Iterator[MongoDatabase]:
    """A database that does not exist yet."""
    with mongo.database() as database:
        yield database


@contextlib.contextmanager
def _started() -> Generator[MongoProcess]:
    server = MongoProcess()
    try:
        server.start()
    except ServerError as error:
        # Never a skip: a suite that ran on no server has proved nothing.
        server.close()
        pytest.fail(str(error), pytrace=False)
    try:
        yield server
    finally:
        server.close()
