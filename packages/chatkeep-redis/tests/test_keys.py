"""Names of keys and the values in them: no two ids meet, and what is packed is what is unpacked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.cluster import key_slot

from chatkeep import Persistence, Scope
from chatkeep.errors import CorruptRecord
from chatkeep.records import InterruptRecord, RunRecord
from chatkeep_redis import redis_persistence
from chatkeep_redis.keys import Keys, place_of_cut, place_of_run, place_of_thread, read_place
from chatkeep_redis.rows import (
    fields_of_interrupt,
    fields_of_run,
    interrupt_from,
    numbers_from,
    pack,
    ranges_from,
    run_from,
    unpack,
)
from chatkeep_redis.scripts import ABOUT_A_THREAD, ELSEWHERE, script
from servers.redis import RedisSpace

ODD = [
    "}", "{", "}x", "{}", "{a}b", "/", "a/b", "%7D", "%", " ", "\n", ":", "*", "?", "[a]", "ü",
    "\U0001f600",
    "\u2028", "a" * 1024, "é" * 512, "t/x", "..", "format", "-", "=", "0",
]  # fmt: skip

ids = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), min_size=1)
scopes = st.builds(
    Scope, tenant_id=st.none() | ids.filter(bool), user_id=st.none() | ids.filter(bool)
)


@given(scopes, ids, ids)
def test_a_place_is_read_back_as_what_it_was_made_of(scope: Scope, thread: str, run: str) -> None:
    place = place_of_thread(scope, thread)
    assert read_place(place.encode()) == (scope, thread, [])
    assert read_place(place_of_run(place, run).encode()) == (scope, thread, [run])
    assert read_place(place_of_cut(place, "mark").encode()) == (scope, thread, ["mark"])


@given(scopes, ids)
def test_all_keys_of_a_thread_are_in_one_slot(scope: Scope, thread: str) -> None:
    keys = Keys("chat:keep").thread(place_of_thread(scope, thread))
    assert len(set(keys)) == 12
    assert len({key_slot(key) for key in keys}) == 1
    tag = keys[0][keys[0].index(b"{") + 1 :]
    assert tag.index(b"}") == tag.rindex(b"}")  # the first brace that closes is ours


@given(st.lists(st.tuples(scopes, ids), unique=True))
def test_no_two_threads_share_a_key(threads: list[tuple[Scope, str]]) -> None:
    keys = Keys("c")
    names = [key for thread in threads for key in keys.thread(place_of_thread(*thread))]
    names += [keys.owner(*thread) for thread in threads]
    names += [keys.children(*thread) for thread in threads]
    names += {keys.threads_of(scope, children=kind) for scope, _ in threads for kind in (0, 1)}
    names += [keys.idle, keys.lost, keys.cuts, keys.detached(None), keys.ping]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("place", [b"", b"t", b"t/a/b", b"x/a/b/c", b"\xff\xfe"])
def test_what_is_no_place_is_corrupt(place: bytes) -> None:
    with pytest.raises(CorruptRecord):
        read_place(place)


@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), st.binary()))
def test_fields_are_unpacked_as_they_were_packed(fields: dict[str, bytes]) -> None:
    assert unpack(pack(fields.items()), "x") == fields


@given(st.binary(max_size=40))
def test_bytes_are_fields_or_corrupt(raw: bytes) -> None:
    """Never an error of another kind."""
    try:
        fields = unpack(raw, "x")
    except CorruptRecord:
        return
    assert sum(map(len, fields.values())) <= len(raw)


@given(st.sets(st.integers(1, 500)))
def test_ranges_are_the_numbers_they_were_made_of(numbers: set[int]) -> None:
    line = ranges_from(sorted(numbers))
    assert numbers_from(line) == sorted(numbers)
    assert line.count(b",") == max(0, sum(n - 1 not in numbers for n in numbers) - 1)


@pytest.mark.parametrize("line", [b"1", b"1-x", b"-", b"1-2,", b"\xff-1"])
def test_what_are_no_ranges_is_corrupt(line: bytes) -> None:
    with pytest.raises(CorruptRecord):
        numbers_from(line)


RUN: dict[str, Any] = {
    "runId": "r", "threadId": "t", "status": "failed", "startedAt": 1, "finishedAt": 2,
    "error": {"message": "m\x00", "code": "c", "more": [1]}, "usage": {"n": 2**70, "f": 1.0},
    "parentRunId": "p", "subagentRunId": "s", "name": "n", "cancelRequested": False,
    "detachedSince": 3, "sandboxKey": "k", "driverEpoch": 4, "hideFrom": 5, "detached": True,
    "lease": {"token": "ü", "until": 6}, "order": "mine", "mark": {"a": []}, "leaseToken": 7,
    "": "no name", "+": None, "errorCode": [],
}  # fmt: skip


def test_every_field_of_a_run_comes_back_also_those_with_names_of_ours() -> None:
    run = RunRecord.from_json(RUN)
    raw = pack([*fields_of_run(run).items(), ("order", b"9"), ("mark", b"x")])
    found, order = run_from("r", "t", raw)
    assert found == run
    assert found.to_json() == run.to_json()
    assert order == 9


@pytest.mark.parametrize("response", [None, {"a": [1.0, 1]}, ...])
def test_every_field_of_an_interrupt_comes_back(response: Any) -> None:
    data: dict[str, Any] = {
        "interruptId": "i", "runId": "r", "threadId": "t", "status": "resolved", "requestedAt": 1,
        "payload": {"x": [None]}, "resolvedAt": 2, "claimedBy": "ü", "custom": [], "order": 5,
    }  # fmt: skip
    if response is not ...:
        data["response"] = response
    record = InterruptRecord.from_json(data)
    raw = pack([*fields_of_interrupt(record).items(), ("order", b"3")])
    found, order = interrupt_from(b"r\x00i", "t", raw)
    assert found.to_json() == record.to_json()
    assert order == 3


@pytest.mark.parametrize("name", [*ABOUT_A_THREAD, *ELSEWHERE])
def test_no_script_searches_the_keyspace_or_touches_json(name: str) -> None:
    """No KEYS, SCAN or FLUSH; and Lua's JSON would change big integers and empty lists."""
    text = script(name).text
    for word in ("cjson", "cmsgpack", "'KEYS'", "'SCAN'", "FLUSH", "RANDOMKEY", "'SELECT'"):
        assert word not in text


def test_every_script_that_is_shipped_has_a_name() -> None:
    from importlib.resources import files

    shipped = {entry.name for entry in (files("chatkeep_redis") / "lua").iterdir()}
    assert shipped == {f"{name}.lua" for name in (*ABOUT_A_THREAD, *ELSEWHERE, "common")}


@pytest.mark.anyio
async def test_odd_ids_live_side_by_side(persistence: Persistence) -> None:
    """As threads, runs, parents, interrupts, tenants and keys of metadata; none takes another's."""
    stores: Any = persistence.stores
    for name in ODD:
        await stores.messages.save_thread(name, [{"id": name, "role": "user"}])
        await stores.runs.create_or_resume(name, name, started_at=1, parent_run_id=name)
        await stores.metadata.set(name, name, name)
        await stores.interrupts.create(
            InterruptRecord(
                interrupt_id=name, run_id=name, thread_id=name, requested_at=1, payload={}
            )
        )
    for name in ODD:
        assert await stores.messages.load_thread(name) == [{"id": name, "role": "user"}]
        assert (await stores.runs.get(name)).thread_id == name
        assert [run.run_id for run in await stores.runs.list_by_parent_run(name)] == [name]
        assert [row.interrupt_id for row in await stores.interrupts.list(name)] == [name]
        assert await stores.metadata.get(name, name) == name
        inner = persistence.scoped(Scope(tenant_id=name))
        assert await inner.stores.messages.load_thread(name) == []
    page = await persistence.list_threads(limit=100)
    assert sorted(info.thread_id for info in page.threads) == sorted(ODD)
    for name in ODD:
        assert await persistence.delete_thread(name)
    assert (await persistence.list_threads()).threads == []


@pytest.mark.anyio
async def test_an_empty_script_cache_is_filled_again(redis_space: RedisSpace) -> None:
    """SCRIPT FLUSH, a failover, a restart: the text is sent once more."""
    client = Redis.from_url(redis_space.server.url())
    async with redis_persistence(redis_space.url()) as persistence:
        for number in range(3):
            await client.script_flush()
            await persistence.stores.messages.save_thread(f"t{number}", [{"role": "user"}])
            await client.script_flush()
            assert len(await persistence.stores.messages.load_thread(f"t{number}")) == 1
    await client.aclose()
