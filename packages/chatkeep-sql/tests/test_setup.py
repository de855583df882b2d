"""Tables are created once, checked always, and never by who may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

import chatkeep_sql
from chatkeep import Persistence
from chatkeep.errors import SchemaOutOfDate
from chatkeep_sql import (
    VERSION_TABLE,
    metadata_for,
    migration_sql,
    postgres_persistence,
    setup,
    sqlite_persistence,
)
from chatkeep_sql.migrations import REVISIONS
from servers import Database

pytestmark = pytest.mark.anyio

RACER = """
import asyncio
from chatkeep import open_persistence

async def main():
    async with open_persistence(url) as persistence:
        if how == "migrate":
            await persistence.migrate()
        message = {"id": name, "role": "user", "content": "here"}
        await persistence.stores.messages.save_thread(name, [message])

gate.wait()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["migrate", "create"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("psycopg", marks=pytest.mark.postgres),
    ],
)
async def test_twenty_processes_that_start_at_once_create_the_tables_once(
    kind: str, how: str, tmp_path: Path, request: pytest.FixtureRequest, processes: Any
) -> None:
    """Both by an explicit migrate and by first use; every one of them then works."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'race.db'}"
    else:
        url = request.getfixturevalue("postgres_database").url(kind)
    processes(RACER, [{"url": url, "how": how, "name": f"t{i}"} for i in range(20)])
    async with chatkeep_sql.open_url(url, create=False) as persistence:
        await persistence.check_schema()
        found = await persistence.backends[0].list_threads(limit=50, cursor=None, children=True)
        assert {thread.thread_id for thread in found.threads} == {f"t{i}" for i in range(20)}


async def test_missing_tables_are_refused_by_name_of_the_remedy(opened: Any) -> None:
    """``create=False`` creates nothing; ``migrate()`` does."""
    async with opened("sqlite", create=False) as persistence:
        for call in (
            persistence.check_schema,
            lambda: persistence.stores.messages.load_thread("t"),
        ):
            with pytest.raises(SchemaOutOfDate, match="chatkeep migrate") as caught:
                await call()
            assert caught.value.found is None
            assert caught.value.expected == REVISIONS[-1]
        await persistence.migrate()
        await persistence.migrate()
        await persistence.check_schema()
        assert await persistence.stores.messages.load_thread("t") == []


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("asyncpg", marks=pytest.mark.postgres)])
async def test_tables_of_a_later_version_are_refused(opened: Any, tools: Any, kind: str) -> None:
    """By check, by first use and by migrate, which must not touch them."""
    async with opened(kind) as persistence:
        await persistence.migrate()
        await tools.execute(persistence, "update chatkeep_alembic_version set version_num = '9999'")
    async with opened(kind) as persistence:
        for call in (
            persistence.check_schema,
            persistence.migrate,
            lambda: persistence.stores.messages.load_thread("t"),
        ):
            with pytest.raises(SchemaOutOfDate, match="upgrade chatkeep-sql") as caught:
                await call()
            assert caught.value.found == "9999"
        assert await tools.execute(persistence, "select * from chatkeep_alembic_version") == [
            ("9999",)
        ]


async def test_tables_of_an_earlier_version_wait_for_migrate(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First use upgrades nothing by itself: other processes may still run the old version."""
    async with opened("sqlite") as persistence:
        await persistence.migrate()
    monkeypatch.setattr(setup, "REVISIONS", (*REVISIONS, "0999"))
    async with opened("sqlite") as persistence:
        told = rf"'{REVISIONS[-1]}', not '0999'.*chatkeep migrate"
        with pytest.raises(SchemaOutOfDate, match=told):
            await persistence.stores.messages.load_thread("t")


async def test_a_failed_creation_does_not_poison_later_calls(tmp_path: Path) -> None:
    """The folder appears; the next call works."""
    folder = tmp_path / "later"
    async with sqlite_persistence(folder / "chat.db") as persistence:
        with pytest.raises(Exception, match="unable to open"):
            await persistence.stores.messages.load_thread("t")
        folder.mkdir()
        assert await persistence.stores.messages.load_thread("t") == []


def test_the_newest_revision_is_the_one_that_is_read() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(setup.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    revisions = [r.revision for r in script.walk_revisions()][::-1]
    assert tuple(revisions) == REVISIONS
    assert script.get_revision("chatkeep@head").revision == REVISIONS[-1]


@pytest.mark.postgres
async def test_migrations_and_metadata_agree_on_postgresql(postgres_database: Database) -> None:
    """So an application's autogenerate finds nothing to do."""
    url = postgres_database.url("psycopg")
    async with postgres_persistence(url) as persistence:
        await persistence.migrate()
    assert _differences(url) == []


@pytest.mark.sqlite
async def test_migrations_and_metadata_agree_on_sqlite(tmp_path: Path) -> None:
    async with sqlite_persistence(tmp_path / "a.db") as persistence:
        await persistence.migrate()
    assert _differences(f"sqlite:///{tmp_path / 'a.db'}") == []


def _differences(url: str) -> list[Any]:
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True}
        )
        found = compare_metadata(context, metadata_for())
    engine.dispose()
    # SQLAlchemy reads no partial indexes' clauses on SQLite; they are compared as text there.
    return found


@pytest.mark.postgres
async def test_the_printed_sql_does_what_migrate_does(postgres_database: Database) -> None:
    """A reviewer's SQL, run by somebody else, is all that a role without rights needs."""
    with psycopg.connect(postgres_database.url("")) as connection:
        connection.execute('create schema "Of Chats"')
        connection.execute(migration_sql("postgresql", "Of Chats").encode())
    url = postgres_database.url("asyncpg")
    async with postgres_persistence(url, schema="Of Chats", create=False) as persistence:
        await persistence.check_schema()
        await persistence.stores.messages.save_thread("t", [{"role": "user", "content": "x"}])


async def test_a_schema_of_its_own(on_postgres: Persistence, tools: Any) -> None:
    """The tables are there and nowhere else, whatever the search path; two schemas are two
    stores in one database."""
    url = tools.backend(on_postgres)._runner.engine.url
    message: Any = {"id": "m", "role": "user", "content": "x"}
    async with postgres_persistence(url, schema='odd "one":x') as there:
        await there.stores.messages.save_thread("t", [message])
        await there.stores.runs.create_or_resume("r", "t", started_at=1)
        assert await there.stores.messages.load_thread("t") == [message]
        with pytest.raises(SchemaOutOfDate):
            await on_postgres.check_schema()
        assert await on_postgres.stores.messages.load_thread("t") == []
        assert tools.checked_out(there) == 0
    rows = await tools.execute(
        on_postgres,
        "select schemaname, count(*) from pg_tables where tablename like 'chatkeep\\_%'"
        " group by 1 order by 1",
    )
    assert rows == [('odd "one":x', 12), ("public", 12)]


# ------------------------------------------------------------------------------------ roles


@pytest.fixture
def role(postgres_database: Database) -> Any:
    """A login role without any right, and the grants for it."""
    name = f"{postgres_database.name}_role"
    server = postgres_database.server
    server.execute(f"create role {name} login password 'secret'")

    class Role:
        def grant(self, what: str) -> None:
            server.execute(f"grant {what} to {name}", database=postgres_database.name)

        def url(self, driver: Any) -> str:
            return postgres_database.url(driver).replace("postgres@", f"{name}:secret@")

    yield Role()
    server.execute(f"drop owned by {name}", database=postgres_database.name)
    server.execute(f"drop role {name}")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_role_without_rights_on_the_schema_needs_the_tables_first(
    postgres_database: Database, role: Any, driver: Any
) -> None:
    """It is told so, and works once somebody else has created them."""
    async with (
        postgres_persistence(role.url(driver)) as plain,
        postgres_persistence(postgres_database.url(driver)) as owner,
    ):
        with pytest.raises(SchemaOutOfDate, match="chatkeep migrate"):
            await plain.stores.messages.load_thread("t")
        with pytest.raises(SchemaOutOfDate, match="chatkeep migrate"):
            await plain.migrate()
        await owner.migrate()
        role.grant("select, insert, update, delete on all tables in schema public")
        message: Any = {"id": "m", "role": "user", "content": "x"}
        await plain.stores.messages.save_thread("t", [message])
        await plain.stores.runs.create_or_resume("r", "t", started_at=1)
        await plain.check_schema()
        assert await plain.stores.messages.load_thread("t") == [message]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_role_that_only_reads_reads_everything(
    postgres_database: Database, role: Any, driver: Any
) -> None:
    """What ``reconstruct_chat`` needs; a write is refused with a typed error."""
    from chatkeep.errors import StoreError
    from chatkeep.persistence import hydrate_thread

    message: Any = {"id": "m", "role": "user", "content": "x"}
    async with (
        postgres_persistence(role.url(driver)) as reader,
        postgres_persistence(postgres_database.url(driver)) as owner,
    ):
        await owner.stores.messages.save_thread("t", [message])
        await owner.stores.runs.create_or_resume("r", "t", started_at=1)
        role.grant("select on all tables in schema public")
        body = await hydrate_thread(reader, "t")
        assert [row["id"] for row in body["messages"]] == ["m"]
        assert (await reader.stores.runs.find_active_run("t")).run_id == "r"
        with pytest.raises(StoreError, match="42501"):
            await reader.stores.messages.save_thread("t", [])
        assert await owner.stores.messages.load_thread("t") == [message]
