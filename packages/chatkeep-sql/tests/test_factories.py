"""How a persistence is made, and what of it is closed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from chatkeep import open_persistence
from chatkeep.errors import BackendUnavailable, CompositionError, MissingExtra
from chatkeep_sql import postgres_persistence, sqlite_persistence
from servers import Database

pytestmark = pytest.mark.anyio

MESSAGE: Any = {"id": "m", "role": "user", "content": "x"}


@pytest.mark.sqlite
async def test_a_path_a_url_and_an_engine_open_the_same_file(tmp_path: Path, tools: Any) -> None:
    """The engine stays open, and keeps its settings."""
    path = tmp_path / "a file.db"
    async with sqlite_persistence(path) as persistence:
        await persistence.stores.messages.save_thread("t", [MESSAGE])
    for url in (f"sqlite:///{path}", f"sqlite+aiosqlite:///{path}"):
        async with open_persistence(url) as persistence:
            assert await persistence.stores.messages.load_thread("t") == [MESSAGE]
    async with sqlite_persistence(str(path)) as persistence:
        assert await persistence.stores.messages.load_thread("t") == [MESSAGE]
    engine = create_async_engine(make_url(f"sqlite+aiosqlite:///{path}"))
    async with engine.connect() as connection:
        before = (await connection.execute(text("pragma busy_timeout"))).scalar()
    async with sqlite_persistence(engine) as persistence:
        await persistence.stores.messages.save_thread("t", [MESSAGE, MESSAGE])
        await persistence.backends[0].delete_thread("gone")
        assert tools.checked_out(persistence) == 0
    async with engine.connect() as connection:
        assert (await connection.execute(text("pragma busy_timeout"))).scalar() == before
        count = await connection.execute(text("select count(*) from chatkeep_entries"))
        assert count.scalar() == 2
    await engine.dispose()


@pytest.mark.sqlite
async def test_deleting_a_thread_leaves_nothing_where_foreign_keys_are_off(
    tmp_path: Path, tools: Any
) -> None:
    """SQLite minds them only on connections that were told to."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")
    async with sqlite_persistence(engine) as persistence:
        await persistence.stores.messages.save_thread("t", [MESSAGE])
        await persistence.stores.messages.save_thread("t", [])
        await persistence.stores.runs.create_or_resume("r", "t", started_at=1)
        assert await persistence.backends[0].delete_thread("t")
        for table in ("threads", "entries", "cuts", "runs", "drafts", "interrupts", "activities"):
            rows = await tools.execute(persistence, f"select * from chatkeep_{table}")  # noqa: S608
            assert rows == [], table
    await engine.dispose()


@pytest.mark.sqlite
async def test_settings_of_a_file(tmp_path: Path, tools: Any) -> None:
    """Write-ahead logging; full sync unless asked otherwise."""
    for synchronous, code in (("FULL", 2), ("NORMAL", 1)):
        path = tmp_path / f"{synchronous}.db"
        async with sqlite_persistence(path, synchronous=synchronous) as persistence:
            for pragma, value in (
                ("journal_mode", "wal"),
                ("synchronous", code),
                ("foreign_keys", 1),
            ):
                assert await tools.execute(persistence, f"pragma {pragma}") == [(value,)]
    with pytest.raises(CompositionError):
        sqlite_persistence(":memory:", synchronous="OFF")


@pytest.mark.sqlite
async def test_two_databases_in_memory_are_two(tools: Any) -> None:
    async with sqlite_persistence(":memory:") as one, open_persistence("sqlite://") as two:
        await one.stores.messages.save_thread("t", [MESSAGE])
        assert await one.stores.messages.load_thread("t") == [MESSAGE]
        assert await two.stores.messages.load_thread("t") == []


@pytest.mark.postgres
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("level", [None, "AUTOCOMMIT", "SERIALIZABLE", "REPEATABLE READ"])
async def test_an_engine_of_the_application_is_used_and_left_alone(
    postgres_database: Database, tools: Any, driver: Any, level: Any
) -> None:
    """Whatever its isolation level, which its other users keep; it is not closed."""
    options = {} if level is None else {"isolation_level": level}
    engine = create_async_engine(postgres_database.url(driver), pool_size=1, **options)
    closed: list[Any] = []
    event.listen(engine.sync_engine, "engine_disposed", closed.append)

    async def current() -> Any:
        async with engine.connect() as connection:
            level = (await connection.execute(text("show transaction_isolation"))).scalar()
            await connection.execute(text("create temp table if not exists mine (n int)"))
            await connection.rollback()
            return level, connection.sync_connection.default_isolation_level

    before = await current()
    async with postgres_persistence(engine) as persistence:
        for number in range(8):
            await tools.backend(persistence).commit_turn(tools.said("t", f"m{number}", keep=99))
        assert len(await persistence.stores.messages.load_thread("t")) == 8
        assert await tools.backend(persistence).list_cuts("t") == []
        assert tools.checked_out(persistence) == 0
    assert await current() == before
    assert closed == []
    await engine.dispose()


@pytest.mark.postgres
async def test_an_engine_of_ours_is_closed(postgres_database: Database) -> None:
    """Once, by any of its handles."""
    from chatkeep.scope import Scope

    persistence = open_persistence(postgres_database.url("psycopg"))
    scoped = persistence.scoped(Scope(tenant_id="a"))
    await scoped.stores.messages.load_thread("t")
    closed: list[Any] = []
    backend: Any = persistence.backends[0]
    event.listen(backend._runner.engine.sync_engine, "engine_disposed", closed.append)
    await scoped.aclose()
    await persistence.aclose()
    assert len(closed) == 1


def test_construction_does_no_io() -> None:
    """Neither a folder nor a server need exist."""
    sqlite_persistence("/nowhere/at/all/chat.db")
    for driver in ("psycopg", "asyncpg"):
        postgres_persistence(f"postgresql+{driver}://nobody@127.0.0.1:1/none")


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    for driver in ("psycopg", "asyncpg"):
        url = f"postgresql+{driver}://nobody@127.0.0.1:1/none"
        async with postgres_persistence(url, timeout=5) as persistence:
            with pytest.raises(BackendUnavailable):
                await persistence.ping()


def test_a_plain_url_takes_the_driver_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg first."""
    find = importlib.util.find_spec

    def without(*missing: str) -> Any:
        return lambda name, *rest: None if name in missing else find(name, *rest)

    def driver(url: str) -> str:
        backend: Any = postgres_persistence(url).backends[0]
        return backend._runner.engine.dialect.driver

    url = "postgresql://nobody@127.0.0.1:1/none"
    assert driver(url) == "psycopg"
    assert driver(url.replace("postgresql", "postgres")) == "psycopg"
    monkeypatch.setattr(importlib.util, "find_spec", without("psycopg"))
    assert driver(url) == "asyncpg"
    with pytest.raises(MissingExtra, match=r"chatkeep\[postgres\]"):
        postgres_persistence(url.replace("postgresql", "postgresql+psycopg"))
    monkeypatch.setattr(importlib.util, "find_spec", without("psycopg", "asyncpg"))
    with pytest.raises(MissingExtra, match=r"chatkeep\[postgres\]"):
        postgres_persistence(url)
    with pytest.raises(MissingExtra, match=r"chatkeep\[asyncpg\]"):
        postgres_persistence(url.replace("postgresql", "postgresql+asyncpg"))
    monkeypatch.setattr(importlib.util, "find_spec", without("aiosqlite"))
    with pytest.raises(MissingExtra, match=r"chatkeep\[sqlite\]"):
        sqlite_persistence(":memory:")


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (postgres_persistence, "mysql://x/y"),
        (postgres_persistence, "postgresql+psycopg2://x/y"),
        (postgres_persistence, "not a url"),
        (postgres_persistence, create_async_engine("sqlite+aiosqlite://")),
        (sqlite_persistence, "postgresql://x/y"),
        (sqlite_persistence, "sqlite+pysqlite:///x"),
        (sqlite_persistence, create_async_engine("postgresql+asyncpg://x/y")),
    ],
)
def test_what_it_cannot_open_is_refused_by_name(make: Any, given: Any) -> None:
    with pytest.raises(CompositionError):
        make(given)


@pytest.mark.sqlite
@pytest.mark.parametrize("url", ["sqlite://rel.db", "sqlite+aiosqlite://host/chat.db"])
def test_a_sqlite_url_with_too_few_slashes_is_told_how_many(url: str) -> None:
    for make in (sqlite_persistence, open_persistence):
        with pytest.raises(CompositionError, match=r"three slashes .*sqlite:///chat\.db"):
            make(url)


@pytest.mark.sqlite
async def test_a_file_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, also when it was given relative to where the process was started."""
    monkeypatch.chdir(tmp_path)
    async with sqlite_persistence("nowhere/chat.db") as persistence:
        with pytest.raises(BackendUnavailable, match="unable to open") as caught:
            await persistence.stores.messages.load_thread("t")
        # The thread of the failed connection reports to this loop once more before it ends.
        (tmp_path / "nowhere").mkdir()
        assert await persistence.stores.messages.load_thread("t") == []
    assert str(tmp_path / "nowhere" / "chat.db") in str(caught.value)


def test_the_package_imports_no_driver() -> None:
    """Only what a URL asks for is imported, when it is asked for."""
    import subprocess

    code = (
        "import sys, chatkeep_sql;"
        "print([m for m in ('psycopg', 'asyncpg', 'aiosqlite') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
