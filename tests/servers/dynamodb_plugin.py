"""Fixtures of DynamoDB for every test directory (loaded by the root ``conftest.py``).

* ``dynamodb`` (session): the service of ``CHATKEEP_TEST_DYNAMODB_URL``, else a server that is
  started.
* ``dynamodb_table``: the name of a table that does not exist yet; dropped afterwards.
* ``own_dynamodb``: a server for one test, to kill, pause and start again (it comes back empty).
* ``dynalite`` (session): the server that is exact about limits, and knows no transactions.

A test that takes one of them carries the marker ``dynamodb`` by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest

from servers.dynamodb import DynaliteProcess, DynamoDB, DynamoTable, GivenDynamoDB, MotoProcess
from servers.marks import mark_by_fixture
from servers.process import ServerError, ServerProcess

_MARKS = {
    "dynamodb": "dynamodb",
    "dynamodb_table": "dynamodb",
    "own_dynamodb": "dynamodb",
    "dynalite": "dynamodb",
}

_Process = TypeVar("_Process", bound=ServerProcess)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the servers that they ask for."""
    mark_by_fixture(items, _MARKS)


@pytest.fixture(scope="session")
def aws_credentials() -> Iterator[None]:
    """What boto3 signs requests with: that of the environment, else words that mean nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("CHATKEEP_TEST_DYNAMODB_URL"):
            patch.setenv("AWS_ACCESS_KEY_ID", "testing")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
                patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def dynamodb(aws_credentials: None) -> Iterator[DynamoDB]:
    """A service for the whole test session."""
    if url := os.environ.get("CHATKEEP_TEST_DYNAMODB_URL"):
        yield GivenDynamoDB(url)
        return
    with _started(MotoProcess()) as server:
        yield server


@pytest.fixture
def own_dynamodb(aws_credentials: None) -> Iterator[MotoProcess]:
    """A server for one test, which may kill it."""
    with _started(MotoProcess()) as server:
        yield server


@pytest.fixture
def dynamodb_table(dynamodb: DynamoDB) -> Iterator[DynamoTable]:
    """A table that does not exist yet."""
    with dynamodb.table() as table:
        yield table


@pytest.fixture(scope="session")
def dynalite(aws_credentials: None) -> Iterator[DynaliteProcess]:
    """A server that is exact about limits."""
    with _started(DynaliteProcess()) as server:
        yield server


@contextlib.contextmanager
def _started(server: _Process) -> Generator[_Process]:
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
