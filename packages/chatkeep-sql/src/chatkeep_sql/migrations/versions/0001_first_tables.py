"""The first tables: heads, entries, cuts, runs, drafts, interrupts, activities, metadata."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = ("chatkeep",)
depends_on = None

BIG = sa.BigInteger()
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def schema() -> str | None:
    """Tables live where the version table does."""
    return op.get_context().version_table_schema


def table(name: str, *parts: Any, serial: bool = False) -> None:
    """A table of ours; every row has its format."""
    op.create_table(
        f"chatkeep_{name}",
        *parts,
        sa.Column("format", sa.SmallInteger, nullable=False),
        schema=schema(),
        sqlite_autoincrement=serial,
    )


def required(name: str, kind: Any) -> sa.Column[Any]:
    """A column that is never null."""
    return sa.Column(name, kind, nullable=False)


def serial(name: str) -> sa.Column[Any]:
    """A number that the database gives."""
    return sa.Column(name, SERIAL, sa.Identity(), primary_key=True)


def references(column: str, target: str) -> sa.ForeignKeyConstraint:
    """A row goes with the one that it belongs to."""
    place = f"{schema()}." if schema() else ""
    return sa.ForeignKeyConstraint(
        [column], [f"{place}chatkeep_{target}.{column}"], ondelete="CASCADE"
    )


def index(name: str, on: str, *columns: str, unique: bool = False, where: str = "") -> None:
    """An index, partial where ``where`` says so."""
    clause = sa.text(where) if where else None
    op.create_index(
        name,
        f"chatkeep_{on}",
        list(columns),
        unique=unique,
        schema=schema(),
        postgresql_where=clause,
        sqlite_where=clause,
    )


def upgrade() -> None:
    """Create them."""
    table(
        "threads",
        serial("thread_no"),
        required("key", sa.LargeBinary),
        required("owner_key", sa.LargeBinary),
        required("tenant_id", sa.Text),
        required("user_id", sa.Text),
        required("thread_id", sa.Text),
        required("child", sa.Boolean),
        required("incarnation", sa.Text),
        required("version", BIG),
        required("transcript_version", BIG),
        required("next_number", BIG),
        required("newest", BIG),
        required("message_count", BIG),
        required("commits", sa.Text),
        required("created_at", BIG),
        required("updated_at", BIG),
        serial=True,
    )
    index("uq_chatkeep_threads_key", "threads", "key", unique=True)
    index("ix_chatkeep_threads_owner", "threads", "owner_key", "updated_at", "thread_no")
    table(
        "entries",
        required("thread_no", BIG),
        required("number", BIG),
        sa.Column("message_id", sa.Text),
        required("digest", sa.LargeBinary),
        required("body", sa.Text),
        sa.Column("cut", BIG),
        sa.PrimaryKeyConstraint("thread_no", "number"),
        references("thread_no", "threads"),
    )
    table(
        "cuts",
        required("thread_no", BIG),
        required("cut", BIG),
        required("after", BIG),
        required("cut_at", BIG),
        sa.Column("run_id", sa.Text),
        required("extra", sa.Integer),
        sa.PrimaryKeyConstraint("thread_no", "cut"),
        references("thread_no", "threads"),
    )
    index("ix_chatkeep_cuts_age", "cuts", "cut_at")
    table(
        "runs",
        serial("run_no"),
        required("key", sa.LargeBinary),
        required("thread_no", BIG),
        required("run_id", sa.Text),
        required("status", sa.Text),
        required("started_at", BIG),
        sa.Column("finished_at", BIG),
        sa.Column("parent_key", sa.LargeBinary),
        sa.Column("parent_run_id", sa.Text),
        sa.Column("subagent_run_id", sa.Text),
        sa.Column("name", sa.Text),
        sa.Column("lease_token", sa.Text),
        sa.Column("lease_until", BIG),
        sa.Column("hide_from", BIG),
        sa.Column("detached_since", BIG),
        sa.Column("cancel_requested", sa.Boolean),
        sa.Column("error_code", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("usage", sa.Text),
        sa.Column("extra", sa.Text),
        references("thread_no", "threads"),
        serial=True,
    )
    index("uq_chatkeep_runs_key", "runs", "key", unique=True)
    index("ix_chatkeep_runs_thread", "runs", "thread_no")
    index("ix_chatkeep_runs_parent", "runs", "parent_key", where="parent_key is not null")
    index("ix_chatkeep_runs_running", "runs", "run_no", where="status = 'running'")
    table(
        "drafts",
        required("run_no", BIG),
        required("thread_no", BIG),
        required("updated_at", BIG),
        required("body", sa.Text),
        sa.PrimaryKeyConstraint("run_no"),
        references("run_no", "runs"),
        references("thread_no", "threads"),
    )
    index("ix_chatkeep_drafts_thread", "drafts", "thread_no")
    table(
        "interrupts",
        serial("sequence"),
        required("thread_no", BIG),
        required("key", sa.LargeBinary),
        required("run_id", sa.Text),
        required("interrupt_id", sa.Text),
        required("status", sa.Text),
        required("requested_at", BIG),
        sa.Column("resolved_at", BIG),
        sa.Column("claimed_by", sa.Text),
        required("payload", sa.Text),
        sa.Column("response", sa.Text),
        sa.Column("extra", sa.Text),
        references("thread_no", "threads"),
        serial=True,
    )
    index("uq_chatkeep_interrupts_key", "interrupts", "thread_no", "key", unique=True)
    table(
        "activities",
        required("thread_no", BIG),
        required("position", sa.Integer),
        required("body", sa.Text),
        sa.PrimaryKeyConstraint("thread_no", "position"),
        references("thread_no", "threads"),
    )
    table(
        "metadata",
        required("key_digest", sa.LargeBinary),
        required("owner_key", sa.LargeBinary),
        required("tenant_id", sa.Text),
        required("user_id", sa.Text),
        required("namespace", sa.Text),
        required("key", sa.Text),
        required("revision", sa.Text),
        required("value", sa.Text),
        sa.PrimaryKeyConstraint("key_digest"),
    )
    index("ix_chatkeep_metadata_owner", "metadata", "owner_key")


def downgrade() -> None:
    """Drop them, with everything in them."""
    for name in (
        "metadata", "activities", "interrupts", "drafts", "runs", "cuts", "entries", "threads"
    ):  # fmt: skip
        op.drop_table(f"chatkeep_{name}", schema=schema())
