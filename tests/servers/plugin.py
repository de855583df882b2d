"""Fixtures for every test directory of the workspace (loaded by the root ``conftest.py``).

* ``postgres`` (session): the server of ``CHATKEEP_TEST_POSTGRES_URL``, else one that is started.
* ``postgres_database``: an empty database on it, dropped afterwards.
* ``own_postgres``: a server for one test, to kill, pause and start again.
* ``sqlite_path``: a file name for a database that does not exist yet.

A test that takes one of them carries the marker ``postgres`` or ``sqlite`` by itself; a test
that reaches them through ``request.getfixturevalue`` marks its parameters.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from servers.marks import mark_by_fixture
from servers.postgres import Database, GivenPostgres, Postgres, PostgresProcess
from servers.process import ServerError

_MARKS = {
    "postgres": "postgres",
    "postgres_database": "postgres",
    "own_postgres": "postgres",
    "sqlite_path": "sqlite",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the servers that they ask for."""
    mark_by_fixture(items, _MARKS)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the whole test session."""
    if url := os.environ.get("CHATKEEP_TEST_POSTGRES_URL"):
        yield GivenPostgres(url)
        return
    with _started() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresProcess]:
    """A PostgreSQL server for one test, which may kill it."""
    with _started() as server:
        yield server


@pytest.fixture
def postgres_database(postgres: Postgres) -> Iterator[Database]:
    """An empty database."""
    with postgres.database() as database:
        yield database


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    """Where a test may have its SQLite file."""
    return tmp_path / "chatkeep.db"


@contextlib.contextmanager
def _started() -> Generator[PostgresProcess]:
    server = PostgresProcess()
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
