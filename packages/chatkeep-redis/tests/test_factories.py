"""URLs and clients: what is opened, what is closed, what is refused."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import Sentinel

from chatkeep import Persistence, Scope, open_persistence, redis_persistence
from chatkeep.errors import BackendUnavailable, CompositionError, StoreClosed
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from servers.process import ServerProcess
from servers.redis import RedisProcess, RedisSpace, find_redis

pytestmark = pytest.mark.anyio

DATA = Path(__file__).parent / "data"


async def use(persistence: Persistence, thread: str = "t") -> None:
    """A turn with ids and values that an encoding could spoil; what is read is what was written."""
    backend: Any = persistence.backends[0]
    message: Any = {"id": "ü-1", "role": "user", "content": 'é\x00😀 "\n', "n": 2**70}
    receipt = await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id=thread,
            run=RunStart(run_id="rün", started_at=1, lease_token="tökén", name="ñ"),
            splice=Splice(keep_through=0, tail=[message], expected=""),
        )
    )
    await backend.save_draft(thread, "rün", [{"id": "ü-2", "role": "assistant"}])
    view = await backend.read_view(
        thread, ViewQuery(messages="bodies", runs="all", drafts=True, run_id="rün")
    )
    assert view.messages == [message]
    assert view.run == receipt.run
    assert view.runs == [receipt.run]
    assert view.drafts[0].messages == [{"id": "ü-2", "role": "assistant"}]
    digests = await backend.read_view(thread, ViewQuery(messages="digests"))
    assert len(digests.digests[0]) == 16
    await persistence.stores.messages.save_thread(thread, [message])
    assert (await backend.find_run("rün")).thread_id == thread
    await persistence.stores.metadata.set("ö", thread, {"ä": [1, None]})
    assert await persistence.stores.metadata.get("ö", thread) == {"ä": [1, None]}
    assert [info.thread_id for info in (await persistence.list_threads()).threads] == [thread]
    assert await persistence.delete_thread(thread)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"decode_responses": True},
    {"decode_responses": True, "encoding": "latin-1"},
    {"protocol": 2},
    {"protocol": 2, "decode_responses": True},
    {"protocol": 3},
    {"protocol": 3, "decode_responses": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_a_client_of_ones_own_may_be_set_up_any_way(
    anywhere: RedisSpace, options: dict[str, Any]
) -> None:
    """Decoding or not, in any encoding, with either protocol: the same results; and it is neither
    closed nor changed."""
    url = anywhere.server.url()
    client: Any
    if "cluster" in url:
        client = RedisCluster.from_url(url.replace("+cluster", ""), **options)
    else:
        client = Redis.from_url(url, **options)
    before = _settings(client)
    async with redis_persistence(client, prefix=anywhere.prefix) as persistence:
        await use(persistence)
    assert _settings(client) == before
    decoded = options.get("decode_responses", False)
    await client.set(f"{anywhere.prefix}:mine", "x")
    assert await client.get(f"{anywhere.prefix}:mine") == ("x" if decoded else b"x")
    await client.aclose()


def _settings(client: Any) -> Any:
    if isinstance(client, RedisCluster):
        return (client.retry, dict(client.connection_kwargs), client.read_from_replicas)
    pool = client.connection_pool
    return (type(pool), pool.max_connections, dict(pool.connection_kwargs))


async def test_a_client_whose_pool_is_small_is_not_overrun(redis_space: RedisSpace) -> None:
    """Its pool refuses what is above its limit; ``max_connections`` keeps below."""
    client = Redis.from_url(redis_space.server.url(), max_connections=4)
    async with redis_persistence(
        client, prefix=redis_space.prefix, max_connections=4
    ) as persistence:
        load = persistence.stores.messages.load_thread
        found = await asyncio.gather(*(load(f"t{n}") for n in range(300)))
        assert found == [[]] * 300
    await client.aclose()


async def test_many_calls_at_once_wait_for_a_connection(anywhere: RedisSpace) -> None:
    """Five hundred on a cold client: the driver's pools would refuse above a hundred, and a
    cluster's client would fail before it knows its nodes."""
    async with redis_persistence(anywhere.url(), max_connections=20) as persistence:
        save = persistence.stores.messages.save_thread
        await asyncio.gather(*(save(f"t{n}", [{"role": "user"}]) for n in range(500)))
        page = await persistence.list_threads(limit=1000)
        assert len(page.threads) == 500


class SentinelProcess(ServerProcess):
    name = "sentinel"

    def __init__(self, primary: RedisProcess) -> None:
        super().__init__()
        self._primary = primary

    def _prepare(self) -> None:
        self._file = self.directory / "sentinel.conf"
        self._file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n"
            f"sentinel monitor chat 127.0.0.1 {self._primary.port} 1\n"
        )
        self._file.chmod(0o666)

    def _command(self) -> list[str]:
        return [str(find_redis()), str(self._file), "--sentinel"]

    def _ready(self) -> bool:
        try:
            with redis.Redis(port=self.port, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


async def test_a_client_of_a_sentinel_finds_the_primary(own_redis: RedisProcess) -> None:
    with SentinelProcess(own_redis) as process:
        sentinel: Any = Sentinel([("127.0.0.1", process.port)])
        client = sentinel.master_for("chat")
        async with redis_persistence(client) as persistence:
            await use(persistence)
        await client.aclose()
        for node in sentinel.sentinels:
            await node.aclose()


@asynccontextmanager
async def tls_in_front_of(space: RedisSpace) -> AsyncIterator[int]:
    """A port that speaks TLS and passes what it gets to the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "localhost.pem", DATA / "localhost.key")
    port = redis.connection.parse_url(space.server.url())["port"]

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                target.write(data)
                await target.drain()
            target.close()

        await asyncio.gather(
            copy(reader, other_writer), copy(other_reader, writer), return_exceptions=True
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_tls_url_is_encrypted_and_the_certificate_is_checked(
    redis_space: RedisSpace,
) -> None:
    async with tls_in_front_of(redis_space) as port:
        place = f"rediss://127.0.0.1:{port}/0?prefix={redis_space.prefix}"
        async with redis_persistence(f"{place}&ssl_ca_certs={DATA / 'localhost.pem'}") as store:
            await use(store)
        async with redis_persistence(place) as store:
            with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
                await store.ping()


async def test_a_client_of_ours_is_closed(anywhere: RedisSpace) -> None:
    """By any of its handles; twice is fine; afterwards every handle says so."""
    persistence = open_persistence(anywhere.url())
    scoped = persistence.scoped(Scope(tenant_id="a"))
    await scoped.stores.messages.load_thread("t")
    await scoped.aclose()
    await persistence.aclose()
    with pytest.raises(StoreClosed):
        await persistence.stores.messages.load_thread("t")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "rediss+cluster"])
def test_construction_does_no_io(scheme: str) -> None:
    """No server need be there, with the oldest and the newest client."""
    for make in (redis_persistence, open_persistence):
        assert make(f"{scheme}://nobody:secret@127.0.0.1:1").backends[0].name == "redis"


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_server_that_is_not_there_is_unavailable(scheme: str) -> None:
    async with redis_persistence(f"{scheme}://127.0.0.1:1", timeout=10) as persistence:
        with pytest.raises(BackendUnavailable):
            await persistence.ping()


def test_the_driver_sends_no_command_of_ours_again() -> None:
    """A command whose reply was lost would be done twice: what may be sent again, we know."""
    for url in ("redis://h", "redis+cluster://h"):
        client: Any = redis_persistence(url).backends[0]._space.runner.client  # type: ignore[attr-defined]
        retry = getattr(client, "retry", None) or client.connection_pool.connection_kwargs["retry"]
        assert retry.get_retries() == 0


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("mysql://x/y", {}),
        ("not a url", {}),
        ("redis://h:notaport", {}),
        (None, {}),
        (redis.Redis(), {}),
        ("redis://h", {"prefix": ""}),
        ("redis://h", {"prefix": "a{b"}),
        ("redis://h", {"prefix": "a}"}),
        ("redis://h?prefix={x}", {}),
        ("redis://h?prefix=a", {"prefix": "b"}),
        ("redis://h", {"thread_ttl_ms": 0}),
        ("redis://h", {"thread_ttl_ms": 1.5}),
        ("redis://h", {"thread_ttl_ms": 2**62}),
        ("redis://h", {"max_connections": 0}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_is_refused_by_name(given: Any, options: dict[str, Any]) -> None:
    with pytest.raises(CompositionError) as caught:
        redis_persistence(given, **options)
    assert "secret" not in str(caught.value)


async def test_prefixes_share_nothing(redis_space: RedisSpace) -> None:
    async with (
        redis_persistence(redis_space.url()) as one,
        redis_persistence(redis_space.server.url(), prefix=f"{redis_space.prefix}:b") as other,
    ):
        await one.stores.messages.save_thread("t", [{"role": "user"}])
        assert await other.stores.messages.load_thread("t") == []
        assert (await other.list_threads()).threads == []


async def test_another_event_loop_is_refused_at_once(anywhere: RedisSpace) -> None:
    async with redis_persistence(anywhere.url()) as persistence:
        await persistence.stores.messages.load_thread("t")

        async def elsewhere() -> None:
            with pytest.raises(CompositionError, match="another event loop"):
                await persistence.stores.messages.load_thread("t")

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert await persistence.stores.messages.load_thread("t") == []


async def test_setting_up_in_a_loop_of_its_own_comes_before_the_servers_loop(
    anywhere: RedisSpace,
) -> None:
    async with redis_persistence(anywhere.url()) as persistence:

        async def before() -> None:
            await persistence.migrate()
            await persistence.check_schema()

        await asyncio.to_thread(asyncio.run, before())
        await persistence.stores.messages.save_thread("t", [{"role": "user", "content": "hi"}])
        await persistence.check_schema()
        assert len(await persistence.stores.messages.load_thread("t")) == 1


def test_importing_the_package_reads_no_script() -> None:
    code = (
        "import chatkeep_redis.scripts as s, chatkeep_redis\nprint(s.script.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
