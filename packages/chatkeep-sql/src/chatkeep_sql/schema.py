"""The tables: one layout for PostgreSQL and SQLite.

A thread has a *head* (``chatkeep_threads``) and one row per message (``chatkeep_entries``).
Rows are found by digests of 32 bytes (:func:`chatkeep.scope.key_digest`), never by an index
over ids, which may have a kilobyte each; the ids stand beside them to be read by people.
Bodies are JSON *text*: ``jsonb`` would reorder keys, refuse NUL and rewrite numbers.

Every row carries the version of the format it was written in (``format``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.sql.schema import SchemaItem

__all__ = ["VERSION_TABLE", "Tables", "metadata_for", "tables_for"]

PREFIX = "chatkeep_"
VERSION_TABLE = "chatkeep_alembic_version"
"""Name of Alembic's version table for this package's own migrations."""

_BIG = BigInteger()
_SERIAL = BigInteger().with_variant(Integer(), "sqlite")


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The tables of one schema (``None``: the connection's default one)."""

    metadata: MetaData
    threads: Table
    entries: Table
    cuts: Table
    runs: Table
    drafts: Table
    interrupts: Table
    activities: Table
    values: Table
    logs: Table
    log_events: Table
    locks: Table


def metadata_for(schema: str | None = None) -> MetaData:
    """The tables as SQLAlchemy metadata: for ``target_metadata`` of your own Alembic set-up, so
    that autogenerate knows them and leaves them alone."""
    return tables_for(schema).metadata


@lru_cache(maxsize=64)
def tables_for(schema: str | None = None) -> Tables:
    """The tables in ``schema``; the same objects for the same schema."""
    metadata = MetaData(schema=schema)

    def table(name: str, *columns: SchemaItem) -> Table:
        return Table(
            PREFIX + name,
            metadata,
            *columns,
            Column("format", SmallInteger, nullable=False),
            sqlite_autoincrement=name in {"threads", "runs", "interrupts", "logs"},
        )

    threads_key = f"{schema + '.' if schema else ''}{PREFIX}threads.thread_no"
    runs_key = f"{schema + '.' if schema else ''}{PREFIX}runs.run_no"
    logs_key = f"{schema + '.' if schema else ''}{PREFIX}logs.log_no"

    def of_thread(*, primary_key: bool = False) -> Column[int]:
        return Column(
            "thread_no",
            _BIG,
            ForeignKey(threads_key, ondelete="CASCADE"),
            nullable=False,
            primary_key=primary_key,
            autoincrement=False,
        )

    threads = table(
        "threads",
        Column("thread_no", _SERIAL, Identity(), primary_key=True),
        Column("key", LargeBinary, nullable=False),
        Column("owner_key", LargeBinary, nullable=False),
        Column("tenant_id", Text, nullable=False),
        Column("user_id", Text, nullable=False),
        Column("thread_id", Text, nullable=False),
        Column("child", Boolean, nullable=False),
        Column("incarnation", Text, nullable=False),
        Column("version", _BIG, nullable=False),
        Column("transcript_version", _BIG, nullable=False),
        Column("next_number", _BIG, nullable=False),
        Column("newest", _BIG, nullable=False),
        Column("message_count", _BIG, nullable=False),
        Column("commits", Text, nullable=False),
        Column("created_at", _BIG, nullable=False),
        Column("updated_at", _BIG, nullable=False),
    )
    Index(f"uq_{PREFIX}threads_key", threads.c.key, unique=True)
    Index(
        f"ix_{PREFIX}threads_owner", threads.c.owner_key, threads.c.updated_at, threads.c.thread_no
    )
    entries = table(
        "entries",
        of_thread(primary_key=True),
        Column("number", _BIG, primary_key=True, autoincrement=False),
        Column("message_id", Text),
        Column("digest", LargeBinary, nullable=False),
        Column("body", Text, nullable=False),
        Column("cut", _BIG),
    )
    cuts = table(
        "cuts",
        of_thread(primary_key=True),
        Column("cut", _BIG, primary_key=True, autoincrement=False),
        Column("after", _BIG, nullable=False),
        Column("cut_at", _BIG, nullable=False),
        Column("run_id", Text),
        Column("extra", Integer, nullable=False),
    )
    Index(f"ix_{PREFIX}cuts_age", cuts.c.cut_at)
    runs = table(
        "runs",
        Column("run_no", _SERIAL, Identity(), primary_key=True),
        Column("key", LargeBinary, nullable=False),
        of_thread(),
        Column("run_id", Text, nullable=False),
        Column("status", Text, nullable=False),
        Column("started_at", _BIG, nullable=False),
        Column("finished_at", _BIG),
        Column("parent_key", LargeBinary),
        Column("parent_run_id", Text),
        Column("subagent_run_id", Text),
        Column("name", Text),
        Column("lease_token", Text),
        Column("lease_until", _BIG),
        Column("hide_from", _BIG),
        Column("detached_since", _BIG),
        Column("cancel_requested", Boolean),
        Column("error_code", Text),
        Column("error", Text),
        Column("usage", Text),
        Column("extra", Text),
    )
    running = text("status = 'running'")
    Index(f"uq_{PREFIX}runs_key", runs.c.key, unique=True)
    Index(f"ix_{PREFIX}runs_thread", runs.c.thread_no)
    Index(
        f"ix_{PREFIX}runs_parent",
        runs.c.parent_key,
        postgresql_where=text("parent_key is not null"),
        sqlite_where=text("parent_key is not null"),
    )
    Index(
        f"ix_{PREFIX}runs_running",
        runs.c.run_no,
        postgresql_where=running,
        sqlite_where=running,
    )
    drafts = table(
        "drafts",
        Column(
            "run_no",
            _BIG,
            ForeignKey(runs_key, ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        of_thread(),
        Column("updated_at", _BIG, nullable=False),
        Column("body", Text, nullable=False),
    )
    Index(f"ix_{PREFIX}drafts_thread", drafts.c.thread_no)
    interrupts = table(
        "interrupts",
        Column("sequence", _SERIAL, Identity(), primary_key=True),
        of_thread(),
        Column("key", LargeBinary, nullable=False),
        Column("run_id", Text, nullable=False),
        Column("interrupt_id", Text, nullable=False),
        Column("status", Text, nullable=False),
        Column("requested_at", _BIG, nullable=False),
        Column("resolved_at", _BIG),
        Column("claimed_by", Text),
        Column("payload", Text, nullable=False),
        Column("response", Text),
        Column("extra", Text),
    )
    Index(f"uq_{PREFIX}interrupts_key", interrupts.c.thread_no, interrupts.c.key, unique=True)
    activities = table(
        "activities",
        of_thread(primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        Column("body", Text, nullable=False),
    )
    values = table(
        "metadata",
        Column("key_digest", LargeBinary, primary_key=True),
        Column("owner_key", LargeBinary, nullable=False),
        Column("tenant_id", Text, nullable=False),
        Column("user_id", Text, nullable=False),
        Column("namespace", Text, nullable=False),
        Column("key", Text, nullable=False),
        Column("revision", Text, nullable=False),
        Column("value", Text, nullable=False),
    )
    Index(f"ix_{PREFIX}metadata_owner", values.c.owner_key)
    logs = table(
        "logs",
        Column("log_no", _SERIAL, Identity(), primary_key=True),
        Column("key", LargeBinary, nullable=False),
        Column("thread_key", LargeBinary, nullable=False),
        Column("tenant_id", Text, nullable=False),
        Column("user_id", Text, nullable=False),
        Column("thread_id", Text, nullable=False),
        Column("run_id", Text, nullable=False),
        Column("incarnation", Text, nullable=False),
        Column("epoch", _BIG, nullable=False),
        Column("token", Text, nullable=False),
        Column("first_number", _BIG, nullable=False),
        Column("next_number", _BIG, nullable=False),
        Column("lease_until", _BIG, nullable=False),
        Column("closed_at", _BIG),
    )
    still_open, ended = text("closed_at is null"), text("closed_at is not null")
    Index(f"uq_{PREFIX}logs_key", logs.c.key, unique=True)
    Index(f"ix_{PREFIX}logs_thread", logs.c.thread_key)
    Index(
        f"ix_{PREFIX}logs_open",
        logs.c.log_no,
        postgresql_where=still_open,
        sqlite_where=still_open,
    )
    Index(f"ix_{PREFIX}logs_closed", logs.c.closed_at, postgresql_where=ended, sqlite_where=ended)
    log_events = table(
        "log_events",
        Column(
            "log_no",
            _BIG,
            ForeignKey(logs_key, ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        Column("number", _BIG, primary_key=True, autoincrement=False),
        Column("body", Text, nullable=False),
    )
    locks = table(
        "locks",
        Column("key", LargeBinary, primary_key=True),
        Column("tenant_id", Text, nullable=False),
        Column("user_id", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("token", Text, nullable=False),
        Column("fence", _BIG, nullable=False),
        Column("lease_until", _BIG, nullable=False),
    )
    return Tables(
        metadata, threads, entries, cuts, runs, drafts, interrupts, activities, values, logs,
        log_events, locks,
    )  # fmt: skip
