"""Create, upgrade and check the tables.

Alembic writes the SQL; it is run here, statement by statement, in one transaction that first
takes a lock: 20 processes that start at once create the tables once.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Literal

from alembic import command
from alembic.config import Config
from sqlalchemy import column, select, table, text

from chatkeep.errors import SchemaOutOfDate
from chatkeep_sql.migrations import BRANCH, REVISIONS
from chatkeep_sql.program import Program
from chatkeep_sql.schema import VERSION_TABLE

__all__ = ["SchemaState", "migrate", "migration_sql", "require_current", "schema_state"]

Dialect = Literal["postgresql", "sqlite"]

_LOCK = 0x63686174_6B656570
"""Number of the advisory lock: "chatkeep" in ASCII."""

_alembic = threading.Lock()
# Alembic keeps the running migration in module globals.


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The revision that was found (None: no tables)."""

    found: str | None

    @property
    def current(self) -> bool:
        """Whether it is the one that this package reads and writes."""
        return self.found == REVISIONS[-1]


def schema_state(dialect: Dialect, schema: str | None) -> Program[SchemaState]:
    """Look which revision the tables have."""
    if dialect == "sqlite":
        exists = text("select 1 from sqlite_master where type = 'table' and name = :name")
        rows = yield exists, {"name": VERSION_TABLE}
    else:
        # Without a schema: one that an unqualified name would reach, as the queries will.
        visible = "pg_catalog.pg_table_is_visible(c.oid)"
        given = "n.nspname = cast(:schema as text)"
        exists = text(
            "select 1 from pg_catalog.pg_class c"  # noqa: S608  (both halves are constants)
            " join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
            " where c.relname = cast(:name as text) and c.relkind in ('r', 'p') and "
            + (visible if schema is None else given)
        )
        binds = {"name": VERSION_TABLE}
        if schema is not None:
            binds["schema"] = schema
        rows = yield exists, binds
    if not rows:
        return SchemaState(None)
    versions = table(VERSION_TABLE, column("version_num"), schema=schema)
    found = yield select(versions.c.version_num), {}
    return SchemaState(found[0][0] if found else None)


def migrate(dialect: Dialect, schema: str | None) -> Program[None]:
    """Bring the tables to the newest revision, or leave them if they are there."""
    if dialect == "postgresql":
        yield text("select pg_advisory_xact_lock(cast(:lock as bigint))"), {"lock": _LOCK}
    state = yield from schema_state(dialect, schema)
    if state.current:
        return
    require_known(state)
    if dialect == "postgresql" and schema is not None:
        found = yield (
            text("select 1 from pg_catalog.pg_namespace where nspname = cast(:schema as text)"),
            {"schema": schema},
        )
        if not found:
            quoted = schema.replace('"', '""')
            yield text(f'CREATE SCHEMA "{quoted}"'.replace(":", "\\:")), {}
    for statement in _statements(dialect, schema, state.found):
        yield text(statement.replace(":", "\\:")), {}


def migration_sql(dialect: Dialect, schema: str | None, found: str | None = None) -> str:
    """The SQL that brings tables from revision ``found`` (None: none) to the newest one."""
    target = f"{BRANCH}@head"
    buffer = io.StringIO()
    with as_file(files("chatkeep_sql") / "migrations") as folder, _alembic:
        config = Config(output_buffer=buffer)
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes["schema"] = schema
        config.attributes["dialect"] = dialect
        command.upgrade(config, target if found is None else f"{found}:{target}", sql=True)
    return buffer.getvalue()


def _statements(dialect: Dialect, schema: str | None, found: str | None) -> list[str]:
    """The same, without its own transaction, one statement each."""
    lines = [
        line
        for line in migration_sql(dialect, schema, found).splitlines()
        if not line.startswith("--")
    ]
    parts = [part.strip() for part in "\n".join(lines).split(";")]
    return [part for part in parts if part not in {"", "BEGIN", "COMMIT"}]


def require_known(state: SchemaState) -> None:
    """Refuse tables of a later version.

    Raises:
        SchemaOutOfDate: says so.
    """
    if state.found is not None and state.found not in REVISIONS:
        raise SchemaOutOfDate(
            f"the tables are at revision {state.found!r}, which this chatkeep-sql does not know "
            f"(its newest is {REVISIONS[-1]!r}): upgrade chatkeep-sql",
            found=state.found,
            expected=REVISIONS[-1],
        )


def require_current(state: SchemaState) -> None:
    """Refuse tables that are missing, behind or ahead.

    Raises:
        SchemaOutOfDate: says which, and what to run.
    """
    if state.current:
        return
    require_known(state)
    remedy = "run `chatkeep migrate URL` or `await persistence.migrate()` with a role that may"
    what = (
        "the chatkeep tables do not exist"
        if state.found is None
        else f"the chatkeep tables are at revision {state.found!r}, not {REVISIONS[-1]!r}"
    )
    raise SchemaOutOfDate(f"{what}: {remedy}", found=state.found, expected=REVISIONS[-1])
