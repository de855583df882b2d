"""MongoDB for tests: one that a URL names, or a server of the same protocol that is started here.

The package ``secantusdb`` speaks MongoDB's protocol over WiredTiger and announces itself as the
primary of a replica set of one. It is no ``mongod``: ``CHATKEEP_TEST_MONGO_URL`` points the same
tests at one. It is only ever run as a program of its own, and never imported by what is shipped.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from servers.process import HOST, ServerError, ServerProcess
from servers.proxy import TcpProxy

__all__ = ["GivenMongo", "MongoDatabase", "MongoProcess", "MongoServer"]

_names = itertools.count()
_PROGRAM = "import sys; from secantus.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class MongoDatabase:
    """A database on a test server that does not exist yet."""

    server: MongoServer
    name: str

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        """Its URL; through ``proxy`` if one is given."""
        return self.server.url(self.name, proxy=proxy)

    @contextlib.contextmanager
    def opened(self) -> Generator[Any]:
        """The database through a client that blocks, for what tests do behind a persistence's
        back."""
        with self.server.client() as client:
            yield client[self.name]

    def drop(self) -> None:
        """Drop it."""
        with self.server.client() as client:
            client.drop_database(self.name)


class MongoServer(abc.ABC):
    """What tests need of a server, given or started."""

    drops: ClassVar[bool] = True
    """Whether databases are dropped after use."""

    @abc.abstractmethod
    def url(self, database: str = "", *, proxy: TcpProxy | None = None) -> str:
        """Its URL."""

    @contextlib.contextmanager
    def client(self, **options: Any) -> Generator[Any]:
        """A client that blocks, for the length of a ``with`` block."""
        with MongoClient(self.url(), **options) as client:
            yield client

    @contextlib.contextmanager
    def database(self) -> Generator[MongoDatabase]:
        """A database for the length of a ``with`` block."""
        database = MongoDatabase(self, f"ck_{os.getpid()}_{next(_names)}")
        try:
            yield database
        finally:
            if self.drops:
                database.drop()

    @abc.abstractmethod
    def proxy(self) -> TcpProxy:
        """A proxy in front of the server, not started yet."""


class GivenMongo(MongoServer):
    """The server of ``CHATKEEP_TEST_MONGO_URL``, standalone, a replica set or sharded."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in {"mongodb", "mongodb+srv"}:
            raise ServerError(f"not a MongoDB URL: {self._parts.scheme}://…")

    def url(self, database: str = "", *, proxy: TcpProxy | None = None) -> str:
        place, query = self._parts.netloc, self._parts.query
        if proxy is not None:
            login, at, _ = place.rpartition("@")
            place = f"{login}{at}{proxy.host}:{proxy.port}"
            query = f"{query}&directConnection=true".lstrip("&")
        return urlunsplit((self._parts.scheme, place, f"/{database}", query, ""))

    def proxy(self) -> TcpProxy:
        first = urlsplit(f"//{self._parts.netloc.rpartition('@')[2].partition(',')[0]}")
        return TcpProxy(first.hostname or HOST, first.port or 27017)


class MongoProcess(ServerProcess, MongoServer):
    """A server of our own.

    Each commit is synced to disk: otherwise this server forgets the last acknowledged writes when
    it is killed, also those that were to wait for the journal of a majority, which MongoDB keeps.
    """

    name = "mongo"
    # It takes some milliseconds for each document, and all its data goes with the process.
    drops = False

    def __init__(self) -> None:
        super().__init__()
        # It runs as whoever runs the tests: a virtual environment may be closed to others.
        self.uid = None

    def url(self, database: str = "", *, proxy: TcpProxy | None = None) -> str:
        port = self.port if proxy is None else proxy.port
        # Else the client would ask for the members of the set, and go around the proxy.
        return f"mongodb://{HOST}:{port}/{database}?directConnection=true"

    def _prepare(self) -> None:
        if importlib.util.find_spec("secantus") is None:
            raise ServerError(
                "no MongoDB for the tests: set CHATKEEP_TEST_MONGO_URL to a server whose user may "
                "create databases, or pip install secantusdb"
            )

    def _command(self) -> list[str]:
        return [
            sys.executable, "-P", "-c", _PROGRAM,
            "--host", HOST, "--port", str(self.port),
            "--storage-path", str(self.directory / "data"),
            "--cache-size", "256M", "--log-level", "WARNING",
            "--sync-on-commit", "--enable-test-commands",
        ]  # fmt: skip

    def _ready(self) -> bool:
        try:
            with self.client(serverSelectionTimeoutMS=100) as client:
                client.admin.command("ping")
        except PyMongoError:
            return False
        return True
