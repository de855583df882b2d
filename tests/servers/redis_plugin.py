"""Fixtures for Redis (loaded by the root ``conftest.py``).

* ``redis_server`` (session): the server of ``CHATKEEP_TEST_REDIS_URL``, else one that is started.
* ``redis_cluster`` (session): the cluster of ``CHATKEEP_TEST_REDIS_CLUSTER_URL``, else one of
  three nodes that is started.
* ``redis_space``, ``redis_cluster_space``: a prefix on them without a key, cleared afterwards.
* ``own_redis``, ``own_redis_cluster``: a server, or a cluster, for one test, to kill, pause and
  start again.

A test that takes one of them carries the marker ``redis`` by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeVar

import pytest

from servers.marks import mark_by_fixture
from servers.process import ServerError
from servers.redis import (
    GivenRedis,
    GivenRedisCluster,
    RedisClusterProcesses,
    RedisProcess,
    RedisServer,
    RedisSpace,
)

_S = TypeVar("_S", RedisProcess, RedisClusterProcesses)

_MARKS = {
    "redis_server": "redis",
    "redis_cluster": "redis",
    "redis_space": "redis",
    "redis_cluster_space": "redis",
    "own_redis": "redis",
    "own_redis_cluster": "redis",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the servers that they ask for."""
    mark_by_fixture(items, _MARKS)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[GivenRedis | RedisProcess]:
    """A server for the whole test session."""
    if url := os.environ.get("CHATKEEP_TEST_REDIS_URL"):
        yield GivenRedis(url)
        return
    server = RedisProcess()
    yield from _started(server)


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisServer]:
    """A cluster for the whole test session."""
    if url := os.environ.get("CHATKEEP_TEST_REDIS_CLUSTER_URL"):
        yield GivenRedisCluster(url)
        return
    yield from _started(RedisClusterProcesses())


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A server for one test, which may kill it."""
    yield from _started(RedisProcess())


@pytest.fixture
def own_redis_cluster() -> Iterator[RedisClusterProcesses]:
    """A cluster for one test, which may kill nodes and move slots."""
    yield from _started(RedisClusterProcesses())


@pytest.fixture
def redis_space(redis_server: RedisServer) -> Iterator[RedisSpace]:
    """A prefix without a key."""
    with redis_server.space() as space:
        yield space


@pytest.fixture
def redis_cluster_space(redis_cluster: RedisServer) -> Iterator[RedisSpace]:
    """A prefix on the cluster without a key."""
    with redis_cluster.space() as space:
        yield space


def _started(server: _S) -> Iterator[_S]:
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
