"""The Redis test servers do what the fault tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from servers.process import ServerError
from servers.redis import (
    GivenRedis,
    GivenRedisCluster,
    RedisClusterProcesses,
    RedisProcess,
    RedisServer,
    RedisSpace,
)

pytestmark = pytest.mark.redis


def test_a_killed_server_comes_back_on_its_port_with_its_data(own_redis: RedisProcess) -> None:
    with own_redis.client() as client:
        client.set("k", "v")
        first = own_redis.pid
        own_redis.kill()
        assert not psutil.pid_exists(first)
        with pytest.raises(redis.ConnectionError):
            client.get("k")
        own_redis.start()
        assert client.get("k") == b"v"


def test_a_paused_server_answers_once_it_is_resumed(own_redis: RedisProcess) -> None:
    impatient: Any = redis.Redis(port=own_redis.port, socket_timeout=0.3)
    with impatient as client:
        client.ping()
        own_redis.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        own_redis.resume()
        assert client.ping()


def test_a_killed_node_comes_back_into_its_cluster(
    own_redis_cluster: RedisClusterProcesses,
) -> None:
    with own_redis_cluster.space() as space, own_redis_cluster.client() as client:
        for number in range(30):
            client.set(f"{space.prefix}:{number}", number)
        own_redis_cluster.nodes[2].kill()
        own_redis_cluster.nodes[2].start()
        own_redis_cluster.await_ok()
        assert len(space.names()) == 30


def test_spaces_are_empty_and_separate(redis_server: RedisServer) -> None:
    with redis_server.space() as one, redis_server.space() as two:
        with redis_server.client() as client:
            client.set(f"{one.prefix}:k", 1)
        assert one.names() == [f"{one.prefix}:k"]
        assert two.names() == []
        assert one.url().endswith(f"?prefix={one.prefix}")
    assert one.names() == []


def test_a_cluster_is_reached_through_any_node(
    redis_cluster_space: RedisSpace, redis_cluster: RedisServer
) -> None:
    with redis_cluster.client() as client:
        for number in range(10):
            client.set(f"{redis_cluster_space.prefix}:{number}", number)
    assert len(redis_cluster_space.names()) == 10


def test_a_given_url_keeps_its_login_and_options() -> None:
    given = GivenRedis("rediss://me:secret@redis.example:6380/3?ssl_cert_reqs=none")
    assert given.url() == "rediss://me:secret@redis.example:6380/3?ssl_cert_reqs=none"
    assert RedisSpace(given, "p").url().endswith("/3?ssl_cert_reqs=none&prefix=p")
    for url in ("http://x", "redis+cluster://x"):
        with pytest.raises(ServerError):
            GivenRedis(url)
    with pytest.raises(ServerError):
        GivenRedisCluster("redis://x")


def test_a_missing_server_is_a_failure_that_says_how_to_get_one(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(redis_server): pass\ndef test_all(redis_cluster): pass\n")
    env = {**os.environ, "CHATKEEP_TEST_REDIS_BIN": str(tmp_path / "nothing")}
    for name in ("CHATKEEP_TEST_REDIS_URL", "CHATKEEP_TEST_REDIS_CLUSTER_URL"):
        env.pop(name, None)
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    markers = tmp_path / "pytest.ini"
    markers.write_text("[pytest]\nmarkers = redis: needs Redis\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "servers.redis_plugin", "-p", "no:cacheprovider",
         str(test), "--rootdir", str(tmp_path)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CHATKEEP_TEST_REDIS_URL" in done.stdout
    assert "2 errors" in done.stdout
