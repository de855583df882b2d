"""Delivery logs (a head for each run's log, and its events), and locks."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger()
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def required(name: str, kind: Any) -> sa.Column[Any]:
    """A column that is never null."""
    return sa.Column(name, kind, nullable=False)


def upgrade() -> None:
    """Create them."""
    schema = op.get_context().version_table_schema
    place = f"{schema}." if schema else ""
    op.create_table(
        "chatkeep_logs",
        sa.Column("log_no", SERIAL, sa.Identity(), primary_key=True),
        required("key", sa.LargeBinary),
        required("thread_key", sa.LargeBinary),
        required("tenant_id", sa.Text),
        required("user_id", sa.Text),
        required("thread_id", sa.Text),
        required("run_id", sa.Text),
        required("incarnation", sa.Text),
        required("epoch", BIG),
        required("token", sa.Text),
        required("first_number", BIG),
        required("next_number", BIG),
        required("lease_until", BIG),
        sa.Column("closed_at", BIG),
        required("format", sa.SmallInteger),
        schema=schema,
        sqlite_autoincrement=True,
    )

    def index(name: str, column: str, *, unique: bool = False, where: str = "") -> None:
        clause = sa.text(where) if where else None
        op.create_index(
            name,
            "chatkeep_logs",
            [column],
            unique=unique,
            schema=schema,
            postgresql_where=clause,
            sqlite_where=clause,
        )

    index("uq_chatkeep_logs_key", "key", unique=True)
    index("ix_chatkeep_logs_thread", "thread_key")
    index("ix_chatkeep_logs_open", "log_no", where="closed_at is null")
    index("ix_chatkeep_logs_closed", "closed_at", where="closed_at is not null")
    op.create_table(
        "chatkeep_log_events",
        required("log_no", BIG),
        required("number", BIG),
        required("body", sa.Text),
        required("format", sa.SmallInteger),
        sa.PrimaryKeyConstraint("log_no", "number"),
        sa.ForeignKeyConstraint(["log_no"], [f"{place}chatkeep_logs.log_no"], ondelete="CASCADE"),
        schema=schema,
    )
    op.create_table(
        "chatkeep_locks",
        required("key", sa.LargeBinary),
        required("tenant_id", sa.Text),
        required("user_id", sa.Text),
        required("name", sa.Text),
        required("token", sa.Text),
        required("fence", BIG),
        required("lease_until", BIG),
        required("format", sa.SmallInteger),
        sa.PrimaryKeyConstraint("key"),
        schema=schema,
    )


def downgrade() -> None:
    """Drop them."""
    schema = op.get_context().version_table_schema
    for name in ("locks", "log_events", "logs"):
        op.drop_table(f"chatkeep_{name}", schema=schema)
