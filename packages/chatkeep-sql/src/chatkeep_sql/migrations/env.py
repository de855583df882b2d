"""Alembic's environment. It only ever writes SQL: :mod:`chatkeep_sql.setup` runs that SQL on a
connection of its own, in one transaction and under a lock, and ``--sql`` prints it."""

from __future__ import annotations

from alembic import context

from chatkeep_sql.schema import VERSION_TABLE, metadata_for

schema = context.config.attributes["schema"]

if not context.is_offline_mode():
    raise RuntimeError("run `chatkeep migrate URL`, or `await persistence.migrate()`")

context.configure(
    dialect_name=context.config.attributes["dialect"],
    target_metadata=metadata_for(schema),
    version_table=VERSION_TABLE,
    version_table_schema=schema,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
