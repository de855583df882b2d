"""Connections die, replies are lost, callers are cancelled: nothing twice, nothing half, no
connection left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chatkeep import Persistence, Scope
from chatkeep.errors import BackendUnavailable, CompositionError, StoreClosed
from chatkeep.stores import ViewQuery
from chatkeep_sql import postgres_persistence, sqlite_persistence
from servers import Database, PostgresProcess, TcpProxy

pytestmark = pytest.mark.anyio

KILL = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


async def test_a_connection_that_died_between_calls_costs_nobody_a_turn(
    on_postgres: Persistence, postgres_database: Database, tools: Any
) -> None:
    """The model thinks for a minute, the firewall forgets the connection, the save succeeds: a
    commit, a read, and writes of several statements."""
    stores, backend = on_postgres.stores, tools.backend(on_postgres)

    def kill() -> None:
        postgres_database.server.execute(KILL, database=postgres_database.name)

    await backend.commit_turn(tools.said("t", "a"))
    kill()
    await backend.commit_turn(tools.said("t", "b", keep=9))
    kill()
    assert [m["id"] for m in await stores.messages.load_thread("t")] == ["a", "b"]
    kill()
    await stores.metadata.set("n", "k", 1)
    kill()
    await stores.runs.create_or_resume("r", "t", started_at=1)
    kill()
    await backend.save_draft("t", "r", [])
    kill()
    assert await backend.list_cuts("t") == []


async def test_a_commit_that_waits_when_its_session_is_killed_is_sent_again(
    on_postgres: Persistence, postgres_database: Database, tools: Any
) -> None:
    """Killed in the middle of its statement, behind another writer's lock."""
    backend = tools.backend(on_postgres)
    await backend.commit_turn(tools.said("t", "a"))
    engine = backend._runner.engine
    async with engine.connect() as holder:
        await holder.execution_options(isolation_level="READ COMMITTED")
        await holder.exec_driver_sql("select * from chatkeep_threads for update")
        work = asyncio.create_task(backend.commit_turn(tools.said("t", "b", keep=9)))
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        while (await tools.execute(on_postgres, waiting)) == [(0,)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        postgres_database.server.execute(
            KILL + " and wait_event_type = 'Lock'", database=postgres_database.name
        )
        await holder.rollback()
        receipt = await work
    assert receipt.numbers == [2]
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["a", "b"]


@pytest.fixture
def proxy(postgres_database: Database) -> Any:
    with postgres_database.server.proxy() as proxy:
        yield proxy


@pytest.fixture(params=["psycopg", "asyncpg"])
async def through_proxy(
    request: pytest.FixtureRequest, postgres_database: Database, proxy: TcpProxy, tools: Any
) -> AsyncIterator[Persistence]:
    url = postgres_database.url(request.param, proxy=proxy)
    async with postgres_persistence(url, timeout=10, pool_size=1) as persistence:
        await persistence.migrate()
        await persistence.ping()
        yield persistence
        assert tools.checked_out(persistence) == 0


async def test_a_commit_whose_reply_was_lost_is_applied_once(
    through_proxy: Persistence, proxy: TcpProxy, tools: Any
) -> None:
    """The database answered; nobody heard it; the same commit is sent again and recognised."""
    backend = tools.backend(through_proxy)
    known = await backend.commit_turn(tools.said("t", "m0", expected=""))
    # A driver that meets a statement for the first or second time says more than its execution.
    for number in (1, 2, 3):
        known = await backend.commit_turn(
            tools.said("t", f"m{number}", keep=number, expected=known.revision)
        )
    proxy.lose_reply(b"SELECT 1")
    receipt = await backend.commit_turn(tools.said("t", "m4", keep=4, expected=known.revision))
    assert proxy.losses == 1
    assert receipt.replayed
    assert receipt.numbers == [5]
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["m0", "m1", "m2", "m3", "m4"]
    assert view.revision == receipt.revision


async def test_a_commit_that_never_arrived_is_applied_once(
    through_proxy: Persistence, proxy: TcpProxy, tools: Any
) -> None:
    backend = tools.backend(through_proxy)
    await backend.commit_turn(tools.said("t", "a"))
    proxy.lose_request()
    receipt = await backend.commit_turn(tools.said("t", "b", keep=1))
    assert proxy.losses == 1
    assert not receipt.replayed
    assert (await backend.read_view("t", ViewQuery())).numbers == [1, 2]


async def test_a_database_that_does_not_answer_is_unavailable_in_time(
    postgres_database: Database, proxy: TcpProxy, tools: Any
) -> None:
    """And the outcome is unknown; later calls work."""
    url = postgres_database.url("asyncpg", proxy=proxy)
    async with postgres_persistence(url, timeout=1) as persistence:
        await persistence.stores.messages.load_thread("t")
        proxy.stall()
        with pytest.raises(BackendUnavailable, match="within 1 s") as caught:
            await tools.backend(persistence).commit_turn(tools.said("t", "a"))
        assert caught.value.outcome_unknown
        proxy.flow()
        proxy.cut()
        await persistence.stores.messages.save_thread("t", [])
        assert tools.checked_out(persistence) == 0


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_server_that_is_down_is_unavailable_and_then_is_back(
    own_postgres: PostgresProcess, driver: Any, tools: Any
) -> None:
    """Killed with SIGKILL: what was acknowledged is there afterwards."""
    async with postgres_persistence(own_postgres.url(driver), timeout=15) as persistence:
        backend = tools.backend(persistence)
        await backend.commit_turn(tools.said("t", "a"))
        own_postgres.kill()
        with pytest.raises(BackendUnavailable):
            await backend.commit_turn(tools.said("t", "b", keep=1))
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        own_postgres.start()
        await backend.commit_turn(tools.said("t", "c", keep=1))
        view = await backend.read_view("t", ViewQuery())
        assert [m["id"] for m in view.messages] == ["a", "c"]
        assert tools.checked_out(persistence) == 0


async def test_cancelled_callers_leave_no_connection_and_no_half_turn(
    persistence: Persistence, tools: Any
) -> None:
    """Each commit is there whole or not at all, and the store goes on working."""
    backend = tools.backend(persistence)
    await backend.ping()

    async def say(thread: str) -> None:
        await persistence.stores.messages.save_thread(
            thread, [{"id": "a", "role": "user"}, {"id": "b", "role": "user"}]
        )

    for step in range(40):
        task = asyncio.create_task(say(f"t{step}"))
        await asyncio.sleep(step * 0.0002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for step in range(40):
        found = await persistence.stores.messages.load_thread(f"t{step}")
        assert [m["id"] for m in found] in ([], ["a", "b"])
    await say("after")
    assert tools.checked_out(persistence) == 0


async def test_a_full_pool_is_unavailable_not_a_hang(
    postgres_database: Database, tools: Any
) -> None:
    url = postgres_database.url("psycopg")
    async with postgres_persistence(url, timeout=2, pool_size=1, max_overflow=0) as persistence:
        await persistence.migrate()
        async with tools.backend(persistence)._runner.engine.connect():
            with pytest.raises(BackendUnavailable):
                await persistence.stores.messages.load_thread("t")
        assert await persistence.stores.messages.load_thread("t") == []


async def test_a_closed_persistence_says_so(opened: Any) -> None:
    """Every handle of it; closing twice is fine."""
    persistence = opened("sqlite")
    await persistence.stores.messages.load_thread("t")
    await persistence.aclose()
    await persistence.aclose()
    with pytest.raises(StoreClosed):
        await persistence.stores.messages.load_thread("t")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("psycopg", marks=pytest.mark.postgres),
        pytest.param("asyncpg", marks=pytest.mark.postgres),
    ],
)
async def test_another_event_loop_is_refused_at_once(opened: Any, kind: str) -> None:
    """Connections belong to one loop: elsewhere they would hang until the timeout. Of every
    handle, and without harm to the loop that uses it."""
    async with opened(kind) as persistence:
        await persistence.stores.messages.load_thread("t")

        async def elsewhere() -> None:
            other = persistence.scoped(Scope(user_id="u"))
            for bag in (persistence, other):
                with pytest.raises(CompositionError, match="another event loop"):
                    await bag.stores.messages.load_thread("t")

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert await persistence.stores.messages.load_thread("t") == []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("psycopg", marks=pytest.mark.postgres),
        pytest.param("asyncpg", marks=pytest.mark.postgres),
    ],
)
async def test_setting_up_in_a_loop_of_its_own_comes_before_the_servers_loop(
    opened: Any, kind: str
) -> None:
    """``asyncio.run(persistence.migrate())``, then a server: a usual way to start."""
    async with opened(kind) as persistence:

        async def before() -> None:
            await persistence.migrate()
            await persistence.check_schema()

        await asyncio.to_thread(asyncio.run, before())
        await persistence.stores.messages.save_thread("t", [{"role": "user", "content": "hi"}])
        await persistence.check_schema()  # in use by now: what it uses is kept
        assert len(await persistence.stores.messages.load_thread("t")) == 1


async def test_a_sqlite_file_that_somebody_else_holds_is_unavailable_in_time(
    tmp_path: Any, tools: Any
) -> None:
    """Not forever, and not at once: a writer waits as long as a call may take."""
    import sqlite3

    async with sqlite_persistence(tmp_path / "a.db", timeout=1) as persistence:
        await persistence.migrate()
        other = sqlite3.connect(tmp_path / "a.db")
        other.execute("begin immediate")
        assert await persistence.stores.messages.load_thread("t") == []
        with pytest.raises(BackendUnavailable):
            await persistence.stores.metadata.set("n", "k", 1)
        other.rollback()
        other.close()
        await persistence.stores.metadata.set("n", "k", 2)
        assert await persistence.stores.metadata.get("n", "k") == 2


async def test_a_writer_waits_for_a_file_that_is_held_for_a_second(tmp_path: Any) -> None:
    """Another process checkpoints, or copies the file: nobody is told that it is locked."""
    import sqlite3

    async with sqlite_persistence(tmp_path / "a.db") as persistence:
        await persistence.migrate()
        other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
        other.execute("begin immediate")
        saves = [
            asyncio.ensure_future(
                persistence.stores.messages.save_thread(f"t{n}", [{"id": "m", "role": "user"}])  # type: ignore[list-item]
            )
            for n in range(8)
        ]
        await asyncio.sleep(1)
        other.execute("rollback")
        other.close()
        await asyncio.gather(*saves)
        assert len((await persistence.list_threads()).threads) == 8
