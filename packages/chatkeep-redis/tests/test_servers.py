"""Servers that change under a persistence: demoted, restricted, killed one of three, moved."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import Redis
from redis.cluster import key_slot

from chatkeep.errors import BackendUnavailable, StoreError
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_redis import redis_persistence
from servers.redis import RedisClusterProcesses, RedisProcess

pytestmark = pytest.mark.anyio


async def test_a_primary_that_was_demoted_refuses_and_has_written_nothing(
    own_redis: RedisProcess, tools: Any
) -> None:
    """A failover: until the client meets the new primary, calls are unavailable, and safe to send
    again."""
    async with redis_persistence(own_redis.url(), timeout=5) as persistence:
        backend = tools.backend(persistence)
        await backend.commit_turn(tools.said("t", "a"))
        with own_redis.client() as client:
            client.config_set("replica-serve-stale-data", "yes")
            client.replicaof("127.0.0.1", 1)
        refused = tools.said("t", "b", keep=9)
        with pytest.raises(BackendUnavailable) as caught:
            await backend.commit_turn(refused)
        assert not caught.value.outcome_unknown
        with own_redis.client() as client:
            client.replicaof("NO", "ONE")
        receipt = await backend.commit_turn(refused)
        assert not receipt.replayed
        assert (await backend.read_view("t", ViewQuery())).numbers == [1, 2]


async def test_the_rights_that_are_documented_are_enough(
    own_redis: RedisProcess, tools: Any
) -> None:
    """A user with its own prefix and nothing else; another prefix is out of reach."""
    with own_redis.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "chat", "on", ">secret", "~support:*",
            "+@read", "+@write", "+@scripting", "+time", "+info", "+ping",
        )  # fmt: skip
    url = own_redis.url().replace("redis://", "redis://chat:secret@")
    async with redis_persistence(url, prefix="support", thread_ttl_ms=100_000) as persistence:
        backend = tools.backend(persistence)
        await persistence.stores.runs.create_or_resume("r", "t", started_at=1, lease_token="l")
        await backend.commit_turn(tools.said("t", "a"))
        await backend.commit_turn(tools.said("t", "b"))
        await backend.save_draft("t", "r", [])
        await backend.renew_lease("t", "r", "l", 1)
        await persistence.stores.metadata.set("n", "t", 1)
        assert len((await persistence.list_threads()).threads) == 1
        await persistence.maintenance().sweep()
        await persistence.maintenance().purge_cuts(before=2**50)
        await persistence.erase_messages("t", ["b"])
        assert await persistence.delete_thread("t")
    async with redis_persistence(url, prefix="other") as persistence:
        with pytest.raises(StoreError, match=r"(?i)permission"):
            await persistence.stores.messages.save_thread("t", [{"role": "user"}])
    wrong = own_redis.url().replace("redis://", "redis://chat:wrong@")
    async with redis_persistence(wrong, timeout=5) as persistence:
        with pytest.raises(BackendUnavailable):
            await persistence.ping()


def _slot_of(cluster: RedisClusterProcesses, thread: str) -> int:
    return key_slot(f"chatkeep:{{t///{thread}}}:head".encode())


def _node_of(cluster: RedisClusterProcesses, slot: int) -> int:
    return next(i for i in range(3) if slot < 16_384 * (i + 1) // 3)


async def test_a_node_that_is_killed_takes_its_threads_away_and_brings_them_back(
    own_redis_cluster: RedisClusterProcesses, tools: Any
) -> None:
    """The others go on meanwhile as far as the cluster lets them; afterwards all is there."""
    async with redis_persistence(own_redis_cluster.url(), timeout=20) as persistence:
        backend = tools.backend(persistence)
        names = [f"thread-{n}" for n in range(12)]
        for name in names:
            await backend.commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id=name,
                    run=RunStart(run_id=f"r-{name}", started_at=1, lease_token="l"),
                    splice=Splice(keep_through=0, tail=[{"id": "a", "role": "user"}]),
                )
            )
        of_node = [_node_of(own_redis_cluster, _slot_of(own_redis_cluster, name)) for name in names]
        assert set(of_node) == {0, 1, 2}
        lost = names[of_node.index(1)]
        await asyncio.to_thread(own_redis_cluster.nodes[1].kill)
        short = redis_persistence(own_redis_cluster.url(), timeout=3)
        with pytest.raises(BackendUnavailable):
            await short.stores.messages.load_thread(lost)
        await short.aclose()
        await asyncio.to_thread(own_redis_cluster.nodes[1].start)
        await asyncio.to_thread(own_redis_cluster.await_ok)
        for name in names:
            await backend.commit_turn(tools.said(name, "b", keep=9))
            view = await backend.read_view(name, ViewQuery())
            assert [message["id"] for message in view.messages] == ["a", "b"]
            assert (await backend.find_run(f"r-{name}")).thread_id == name
        listed = (await persistence.list_threads()).threads
        assert {info.thread_id for info in listed} == set(names)
        assert tools.in_use(persistence) == 0


async def test_a_thread_that_moves_to_another_node_is_followed(
    own_redis_cluster: RedisClusterProcesses, tools: Any
) -> None:
    """Its slot is given to another node between two boundaries: one thread, no break."""
    async with redis_persistence(own_redis_cluster.url()) as persistence:
        backend = tools.backend(persistence)
        first = await backend.commit_turn(tools.said("moving", "a", expected=""))
        slot = _slot_of(own_redis_cluster, "moving")
        source = own_redis_cluster.nodes[_node_of(own_redis_cluster, slot)]
        target = next(node for node in own_redis_cluster.nodes if node is not source)
        _move_slot(own_redis_cluster, slot, source, target)
        second = await backend.commit_turn(
            tools.said("moving", "b", keep=1, expected=first.revision)
        )
        assert second.numbers == [2]
        view = await backend.read_view("moving", ViewQuery())
        assert [message["id"] for message in view.messages] == ["a", "b"]


def _move_slot(
    cluster: RedisClusterProcesses, slot: int, source: RedisProcess, target: RedisProcess
) -> None:
    with source.client() as old, target.client() as new:
        old_id, new_id = _id(old), _id(new)
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert keys
        old.execute_command("MIGRATE", target.host, target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *cluster.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)


def _id(client: Redis) -> str:
    found: Any = client.execute_command("CLUSTER", "MYID")
    return found.decode() if isinstance(found, bytes) else str(found)
