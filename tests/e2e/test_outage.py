"""A database that is down, goes away in the middle of a turn, and comes back."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from chatkeep.testkit.client import comparable
from chatkeep.testkit.tab import Tab, user_message
from e2e.server import ChatServer, until
from servers.postgres import PostgresProcess
from servers.redis import RedisProcess

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("psycopg", marks=pytest.mark.postgres),
        pytest.param("asyncpg", marks=pytest.mark.postgres),
        pytest.param("redis", marks=pytest.mark.redis),
    ],
)
async def test_a_database_that_is_killed_in_the_middle_of_a_turn(
    request: pytest.FixtureRequest,
    http: httpx.AsyncClient,
    kind: str,
) -> None:
    """The run fails visibly, page loads and posts say 503 with a code, nothing half-written;
    when the database is back, the same server goes on."""
    database: PostgresProcess | RedisProcess
    if kind == "redis":
        database = request.getfixturevalue("own_redis")
        url = database.url()
    else:
        database = request.getfixturevalue("own_postgres")
        url = database.create_database().url(kind)  # type: ignore[arg-type, union-attr]
    server = ChatServer(url).start()
    try:
        tab = Tab(http, server.url, "t")
        await tab.send("SCENARIO:server-tool")
        whole = comparable(tab.messages)
        tab.messages.append(user_message('SCENARIO:slow {"chunks": 10, "delayMs": 50}'))
        killed = False
        terminal = None
        async for exchange in tab.stream(tab.body()):
            terminal = exchange.terminal
            if not killed and "w2 " in tab.text:
                killed = True
                await asyncio.to_thread(database.kill)
        assert terminal is not None
        assert (terminal["type"], terminal["code"]) == ("RUN_ERROR", "backend-unavailable")
        load = await http.get(server.url, params={"threadId": "t"})
        post = await http.post(server.url, json=tab.body())
        for answer in (load, post):
            assert answer.status_code == 503
            assert answer.json()["code"] == "backend-unavailable"
            assert "127.0.0.1" not in answer.text
        await asyncio.to_thread(database.start)
        fresh = Tab(http, server.url, "t")

        async def answers() -> bool:
            got = await http.get(server.url, params={"threadId": "t"})
            return got.status_code == 200

        await until(answers)
        await fresh.load()
        assert comparable(fresh.messages)[: len(whole)] == whole
        assert [m["id"] for m in fresh.messages][len(whole) :] == [tab.messages[-2]["id"]]
        again = await fresh.send("SCENARIO:text")
        assert again.terminal is not None
        assert again.terminal["type"] == "RUN_FINISHED"
        last = Tab(http, server.url, "t")
        await last.load()
        assert comparable(last.messages) == comparable(fresh.messages)
    finally:
        server.close()


@pytest.mark.postgres
async def test_a_server_that_never_reaches_its_database_does_not_start() -> None:
    """It says why and exits; it does not wait for requests that it cannot answer."""
    server = ChatServer("postgresql+asyncpg://nobody@127.0.0.1:9/none")
    with pytest.raises(RuntimeError, match="did not start"):
        server.start()
    server.close()
