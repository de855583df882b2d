"""Every error of redis-py becomes one of chatkeep's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from redis import exceptions as driver
from redis.asyncio import Redis

from chatkeep.errors import (
    BackendUnavailable,
    ChatkeepError,
    CompositionError,
    CorruptRecord,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreError,
)
from chatkeep_redis import redis_persistence
from chatkeep_redis.errors import translate
from servers.redis import RedisServer, RedisSpace


def _classes() -> list[type[Any]]:
    members = inspect.getmembers(driver, inspect.isclass)
    found = {kind for _, kind in members if issubclass(kind, Exception)}
    return sorted(found, key=lambda kind: kind.__name__)


def _instance(kind: type[Any]) -> Exception:
    for arguments in (("x",), ("1234 127.0.0.1:7000",), ("x", "y"), ()):
        try:
            return kind(*arguments)
        except (TypeError, ValueError, IndexError):
            continue
    return kind.__new__(kind)


@pytest.mark.memory
@pytest.mark.parametrize("kind", _classes())
@pytest.mark.parametrize("cluster", [False, True])
def test_no_error_of_the_driver_gets_out(kind: type[Any], cluster: bool) -> None:
    known = translate(_instance(kind), cluster=cluster)
    assert isinstance(known, StoreError | CompositionError), known
    assert str(known)


def test_what_is_no_database_error_is_left_alone() -> None:
    for error in (ValueError("x"), KeyError("x"), RuntimeError("x"), SchemaOutOfDate("x")):
        assert translate(error) is error


@pytest.mark.parametrize(
    ("error", "kind", "unknown"),
    [
        (driver.ConnectionError("Connection closed by server."), BackendUnavailable, True),
        (driver.ConnectionError("Error 111 connecting to h:1. No."), BackendUnavailable, False),
        (driver.TimeoutError("Timeout reading from h:1"), BackendUnavailable, True),
        (driver.AuthenticationError("WRONGPASS"), BackendUnavailable, False),
        (driver.BusyLoadingError("loading"), BackendUnavailable, False),
        (driver.MaxConnectionsError("Too many"), BackendUnavailable, False),
        (driver.ReadOnlyError("READONLY"), BackendUnavailable, False),
        (driver.OutOfMemoryError("OOM"), BackendUnavailable, False),
        (driver.ClusterDownError("CLUSTERDOWN"), BackendUnavailable, False),
        (driver.TryAgainError("TRYAGAIN"), BackendUnavailable, False),
        (driver.InvalidResponse("garbage"), BackendUnavailable, True),
        (driver.ResponseError("NOREPLICAS Not enough good replicas"), BackendUnavailable, False),
        (driver.ResponseError("MISCONF Redis is configured to"), BackendUnavailable, False),
        (driver.ResponseError("BUSY Redis is busy running a script"), BackendUnavailable, False),
        (ConnectionResetError(104, "reset"), BackendUnavailable, True),
        (ConnectionRefusedError(111, "no"), BackendUnavailable, False),
        (driver.ResponseError("WRONGTYPE Operation against a key"), CorruptRecord, None),
        (driver.ResponseError("Protocol error: invalid bulk length"), RecordTooLarge, None),
        (driver.NoPermissionError("this user has no permissions"), StoreError, None),
        (driver.DataError("no"), StoreError, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_an_error_means(error: Exception, kind: type[Exception], unknown: Any) -> None:
    """And whether what was asked may have been done."""
    known = translate(error)
    assert type(known) is kind
    assert getattr(known, "outcome_unknown", None) is unknown


@pytest.mark.anyio
async def test_a_server_of_a_cluster_wants_the_client_of_a_cluster(
    redis_cluster: RedisServer,
) -> None:
    """Found out before anything is written."""
    url = redis_cluster.url().replace("+cluster", "")
    async with redis_persistence(url) as persistence:
        for _ in range(2):
            with pytest.raises(CompositionError, match=r"redis\+cluster://"):
                await persistence.stores.messages.load_thread("t")


@pytest.mark.anyio
async def test_a_key_of_another_kind_is_corrupt(redis_space: RedisSpace) -> None:
    """Somebody else's value under our key: an error, never "empty"."""
    async with redis_persistence(redis_space.url()) as persistence:
        await persistence.stores.messages.save_thread("t", [{"role": "user"}])
        (head,) = [key for key in redis_space.names() if key.endswith(":head")]
        client = Redis.from_url(redis_space.server.url())
        await client.set(head, "x")
        for call in (
            lambda: persistence.stores.messages.load_thread("t"),
            lambda: persistence.stores.messages.save_thread("t", []),
        ):
            with pytest.raises(CorruptRecord):
                await call()
        await client.aclose()


@pytest.mark.anyio
async def test_a_full_server_refuses_and_nothing_is_half_written(own_redis: Any) -> None:
    """``maxmemory`` with ``noeviction``: the whole boundary or none of it."""
    async with redis_persistence(own_redis.url()) as persistence:
        await persistence.stores.messages.save_thread("t", [{"id": "a", "role": "user"}])
        with own_redis.client() as client:
            client.config_set("maxmemory", "1")
        with pytest.raises(BackendUnavailable):
            await persistence.stores.messages.save_thread("t", [{"id": "b", "role": "user"}])
        with own_redis.client() as client:
            client.config_set("maxmemory", "0")
        found = await persistence.stores.messages.load_thread("t")
        assert [message["id"] for message in found] == ["a"]


def test_a_known_error_is_kept() -> None:
    error = ChatkeepError("x")
    assert translate(error) is error
