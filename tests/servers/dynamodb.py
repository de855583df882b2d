"""DynamoDB for tests: what a URL names, moto behind a server of our own, or dynalite.

moto keeps everything in memory: a server that is killed comes back empty. dynalite has no
transactions, but is exact about limits, keys and numbers, and keeps its data.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import itertools
import os
import shutil
import socket
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from servers.process import HOST, ServerError, ServerProcess
from servers.proxy import TcpProxy

__all__ = [
    "DynaliteProcess",
    "DynamoDB",
    "DynamoTable",
    "GivenDynamoDB",
    "MotoProcess",
    "find_dynalite",
]

REGION = "us-east-1"

_names = itertools.count()


@dataclass(frozen=True)
class DynamoTable:
    """The name of a table that does not exist yet, on a test server."""

    server: DynamoDB
    name: str

    def url(self, *, proxy: TcpProxy | None = None) -> str:
        """Its URL for ``open_persistence``; through ``proxy`` if one is given."""
        return self.server.url(self.name, proxy=proxy)

    def client(self, *, proxy: TcpProxy | None = None, **config: Any) -> Any:
        """A boto3 client of the server, for the caller to close."""
        return self.server.client(proxy=proxy, **config)


class DynamoDB(abc.ABC):
    """What tests need of a server, given or started."""

    @abc.abstractmethod
    def endpoint(self, *, proxy: TcpProxy | None = None) -> str | None:
        """URL of the service; None: AWS's own."""

    region = REGION

    def url(self, table: str, *, proxy: TcpProxy | None = None) -> str:
        """A URL for ``open_persistence``."""
        endpoint = self.endpoint(proxy=proxy)
        behind = "" if endpoint is None else f"&endpoint={quote(endpoint, safe='')}"
        return f"dynamodb://{table}?region={self.region}{behind}"

    def client(self, *, proxy: TcpProxy | None = None, **config: Any) -> Any:
        """A boto3 client, for the caller to close."""
        import boto3
        from botocore.config import Config

        session: Any = boto3.Session()
        return session.client(
            "dynamodb",
            region_name=self.region,
            endpoint_url=self.endpoint(proxy=proxy),
            config=Config(**config),
        )

    @contextlib.contextmanager
    def table(self) -> Generator[DynamoTable]:
        """A table's name that nobody else has; the table, if it was made, goes at the end."""
        table = DynamoTable(self, f"ck_{os.getpid()}_{next(_names)}")
        try:
            yield table
        finally:
            client = self.client()
            with contextlib.suppress(client.exceptions.ResourceNotFoundException):
                client.delete_table(TableName=table.name)
            client.close()

    @abc.abstractmethod
    def proxy(self) -> TcpProxy:
        """A proxy in front of the server, not started yet."""


class GivenDynamoDB(DynamoDB):
    """The service of ``CHATKEEP_TEST_DYNAMODB_URL``:
    ``dynamodb://?region=…&endpoint=http://…``, without an endpoint AWS itself."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "dynamodb":
            raise ServerError(f"not a DynamoDB URL: {parts.scheme}://…")
        given = parse_qs(parts.query)
        self.region = given.get("region", [REGION])[0]
        self._endpoint = given.get("endpoint", [None])[0]

    def endpoint(self, *, proxy: TcpProxy | None = None) -> str | None:
        return f"http://{proxy.host}:{proxy.port}" if proxy is not None else self._endpoint

    def proxy(self) -> TcpProxy:
        parts = urlsplit(self._endpoint or "")
        if parts.scheme != "http":
            raise ServerError("tests that break connections need an endpoint of plain http")
        return TcpProxy(parts.hostname or HOST, parts.port or 80)


class _Process(ServerProcess, DynamoDB):
    """A server of our own."""

    def endpoint(self, *, proxy: TcpProxy | None = None) -> str:
        return f"http://{HOST}:{self.port if proxy is None else proxy.port}"

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
            return True
        return False


class MotoProcess(_Process):
    """moto's DynamoDB, one request at a time (see :mod:`servers._moto`)."""

    name = "moto"

    def __init__(self) -> None:
        super().__init__()
        self.uid = None  # it runs as root too, and finds the packages of whoever runs the tests

    def _prepare(self) -> None:
        if importlib.util.find_spec("moto") is None:
            self.close()
            raise ServerError(
                "no DynamoDB for the tests: pip install 'moto[dynamodb]', or set "
                "CHATKEEP_TEST_DYNAMODB_URL to dynamodb://?region=…&endpoint=…"
            )

    def _command(self) -> list[str]:
        return [sys.executable, "-P", str(Path(__file__).with_name("_moto.py")), str(self.port)]


class DynaliteProcess(_Process):
    """dynalite, on LevelDB files."""

    name = "dynalite"

    # It throws, and so ends, when a client goes away in the middle of a request.
    _GUARD = (
        "data:text/javascript,process.on('uncaughtException',e=>{if(e.code!=='ECONNRESET'"
        "%26%26e.code!=='EPIPE'){console.error(e);process.exit(1)}})"
    )

    def __init__(self) -> None:
        super().__init__()
        self.uid = None

    def _prepare(self) -> None:
        try:
            self._node, self._script = find_dynalite()
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        return [
            self._node, "--import", self._GUARD, str(self._script), "--host", HOST,
            "--port", str(self.port), "--path", str(self.directory / "data"),
            "--createTableMs", "0", "--deleteTableMs", "0", "--updateTableMs", "0",
        ]  # fmt: skip


def find_dynalite() -> tuple[str, Path]:
    """Node.js, and dynalite's program.

    Raises:
        ServerError: one is missing; says how to get it.
    """
    modules = os.environ.get("CHATKEEP_TEST_DYNALITE_MODULES")
    places = [Path(modules)] if modules else [Path(__file__).with_name("dynalite") / "node_modules"]
    node = shutil.which("node")
    for place in places:
        script = place / "dynalite" / "cli.js"
        if node is not None and script.exists():
            return node, script
    raise ServerError(
        "no dynalite for the tests: install Node.js 20 or later and run `npm ci` in "
        "tests/servers/dynalite, or set CHATKEEP_TEST_DYNALITE_MODULES to a node_modules with it"
    )
