"""Real servers for tests, and a proxy that breaks the connections to them.

Every server listens on loopback only, keeps its data in a temporary directory of its own and
dies with the process that started it. Adding a database means one subclass of
:class:`~servers.process.ServerProcess` and one fixture in :mod:`servers.plugin`.

The fixtures (see :mod:`servers.plugin`) are available in every test directory of the
workspace; ``pythonpath = ["tests"]`` in ``pyproject.toml`` makes ``import servers`` work.
"""

from __future__ import annotations

from servers.postgres import (
    Database,
    GivenPostgres,
    Postgres,
    PostgresDriver,
    PostgresProcess,
    find_postgres,
)
from servers.process import ServerError, ServerProcess, free_port
from servers.proxy import TcpProxy

__all__ = [
    "Database",
    "GivenPostgres",
    "Postgres",
    "PostgresDriver",
    "PostgresProcess",
    "ServerError",
    "ServerProcess",
    "TcpProxy",
    "find_postgres",
    "free_port",
]
