"""chatkeep on PostgreSQL and SQLite, over SQLAlchemy Core.

``metadata_for`` gives the tables as SQLAlchemy metadata, for autogenerate in an application's own
Alembic set-up; ``VERSION_TABLE`` is the version table of the migrations that are shipped here.
"""

from __future__ import annotations

from chatkeep_sql._factories import open_url, postgres_persistence, sqlite_persistence
from chatkeep_sql.backend import PostgresBackend, SqliteBackend
from chatkeep_sql.schema import VERSION_TABLE, metadata_for
from chatkeep_sql.setup import migration_sql

__all__ = [
    "VERSION_TABLE",
    "PostgresBackend",
    "SqliteBackend",
    "metadata_for",
    "migration_sql",
    "open_url",
    "postgres_persistence",
    "sqlite_persistence",
]
