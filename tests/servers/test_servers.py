"""The test servers and the proxy do what the fault tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from servers import Database, GivenPostgres, Postgres, PostgresDriver, PostgresProcess, TcpProxy

pytestmark = pytest.mark.postgres


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def connect(database: Database, proxy: TcpProxy | None = None) -> psycopg.Connection:
    url = database.url("", proxy=proxy)
    return psycopg.connect(url, autocommit=True, connect_timeout=5)


def test_a_killed_server_comes_back_on_its_port_with_its_data(
    own_postgres: PostgresProcess,
) -> None:
    own_postgres.execute("create table t (n int)")
    own_postgres.execute("insert into t values (1)")
    first = own_postgres.pid
    own_postgres.kill()
    assert not psutil.pid_exists(first)
    with pytest.raises(psycopg.OperationalError):
        own_postgres.execute("select 1")
    own_postgres.start()
    with psycopg.connect(own_postgres.url("")) as connection:
        assert connection.execute("select n from t").fetchall() == [(1,)]


def test_an_orderly_stop_keeps_the_data(own_postgres: PostgresProcess) -> None:
    own_postgres.execute("create table t (n int)")
    own_postgres.stop()
    own_postgres.start()
    own_postgres.execute("insert into t values (1)")


def test_a_paused_server_answers_once_it_is_resumed(own_postgres: PostgresProcess) -> None:
    with psycopg.connect(own_postgres.url(""), autocommit=True) as connection:
        own_postgres.pause()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_postgres.url(""), connect_timeout=2)
        own_postgres.resume()
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_server_dies_with_the_process_that_started_it() -> None:
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import servers\n"
        "s = servers.PostgresProcess().start(); print(s.pid, s.directory, flush=True)\n"
        "time.sleep(60)"
    )
    tests = str(Path(__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", script, tests], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().decode().split()
    server = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, alive = psutil.wait_procs([server], timeout=10)
    subprocess.run(["rm", "-rf", directory], check=True)
    assert gone
    assert not alive


def test_databases_are_empty_and_separate(postgres: Postgres) -> None:
    with postgres.database() as one, postgres.database() as two:
        with connect(one) as connection:
            connection.execute("create table t (n int)")
        with connect(two) as connection, pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("select * from t")


@pytest.mark.anyio
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_both_drivers_reach_a_database(
    postgres_database: Database, driver: PostgresDriver
) -> None:
    url = postgres_database.url(driver)
    assert url.startswith(f"postgresql+{driver}://")
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        name = (await connection.execute(text("select current_database()"))).scalar()
    await engine.dispose()
    assert name == postgres_database.name


def test_a_given_url_keeps_its_login_and_options() -> None:
    given = GivenPostgres("postgres://me:secret@db.example:6543/app?sslmode=require")
    assert (
        given.url("asyncpg") == "postgresql+asyncpg://me:secret@db.example:6543/app?sslmode=require"
    )
    assert given.url("", "other") == "postgresql://me:secret@db.example:6543/other?sslmode=require"


def test_a_missing_server_is_a_failure_that_says_how_to_get_one(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(postgres): pass\n")
    env = {**os.environ, "CHATKEEP_TEST_POSTGRES_BIN": str(tmp_path / "nothing")}
    env.pop("CHATKEEP_TEST_POSTGRES_URL", None)
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "servers.plugin", "-p", "no:cacheprovider",
         str(test), "--rootdir", str(tmp_path)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CHATKEEP_TEST_POSTGRES_URL" in done.stdout
    assert "1 error" in done.stdout


class TestProxy:
    def test_it_passes_bytes_both_ways_and_counts_them(
        self, postgres: Postgres, postgres_database: Database
    ) -> None:
        with postgres.proxy() as proxy, connect(postgres_database, proxy) as connection:
            before = proxy.bytes_received
            row = connection.execute("select repeat('x', 300000)").fetchone()
            assert row is not None
            assert len(str(row[0])) == 300_000
            assert proxy.bytes_received - before > 300_000
            assert proxy.accepted == 1

    def test_a_cut_breaks_what_is_open_and_takes_new_connections(
        self, postgres: Postgres, postgres_database: Database
    ) -> None:
        with postgres.proxy() as proxy:
            with connect(postgres_database, proxy) as connection:
                proxy.cut()
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("select 1")
            with connect(postgres_database, proxy) as connection:
                connection.execute("select 1")

    def test_it_refuses_connections(self, postgres: Postgres, postgres_database: Database) -> None:
        with postgres.proxy() as proxy:
            proxy.refuse = True
            with pytest.raises(psycopg.OperationalError):
                connect(postgres_database, proxy)

    def test_a_stalled_connection_goes_on_when_the_bytes_flow_again(
        self, postgres: Postgres, postgres_database: Database
    ) -> None:
        with postgres.proxy() as proxy, connect(postgres_database, proxy) as connection:
            proxy.stall()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(postgres_database.url("", proxy=proxy), connect_timeout=2)
            proxy.flow()
            assert connection.execute("select 1").fetchone() == (1,)

    def test_a_lost_reply_has_been_applied(
        self, postgres: Postgres, postgres_database: Database
    ) -> None:
        with connect(postgres_database) as direct, postgres.proxy() as proxy:
            direct.execute("create table t (n int)")
            with connect(postgres_database, proxy) as connection:
                proxy.lose_reply(b"INSERT 0 1")
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("insert into t values (1)")
            assert proxy.losses == 1
            assert direct.execute("select n from t").fetchall() == [(1,)]

    def test_a_lost_request_has_not_been_applied(
        self, postgres: Postgres, postgres_database: Database
    ) -> None:
        with connect(postgres_database) as direct, postgres.proxy() as proxy:
            direct.execute("create table t (n int)")
            with connect(postgres_database, proxy) as connection:
                proxy.lose_request(b"insert into t")
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("insert into t values (1)")
            assert proxy.losses == 1
            assert direct.execute("select n from t").fetchall() == []

    def test_latency_is_added_each_way(
        self, postgres: Postgres, postgres_database: Database
    ) -> None:
        with postgres.proxy() as proxy, connect(postgres_database, proxy) as connection:
            proxy.latency = 0.05
            start = time.monotonic()
            connection.execute("select 1")
            assert time.monotonic() - start > 0.09
