"""The format in the database is a contract: what version 1 wrote stays readable, and stays what we
write until there is a version 2. The files in ``data`` are never made anew."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.errors import CorruptRecord, SchemaOutOfDate
from chatkeep.records import ActivityRecord, InterruptRecord, RunError, RunPatch
from chatkeep.scope import Scope
from chatkeep.stores import (
    ActivitiesWrite,
    CutAppend,
    InterruptAnswer,
    InterruptRef,
    RunStart,
    Splice,
    TurnCommit,
    ViewQuery,
)
from chatkeep_redis import redis_persistence
from servers.redis import RedisSpace

pytestmark = pytest.mark.anyio

DATA = Path(__file__).parent / "data"
SCOPE = Scope(tenant_id="acme", user_id="ann")

MESSAGES: list[Any] = [
    {"id": "u1", "role": "user", "content": 'caf\u00e9 \U0001f600 \x00 "quoted"\n'},
    {
        "id": "a1",
        "role": "assistant",
        "content": None,
        "toolCalls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
        "unknownKey": {"z": 1, "a": [1.0, 1, -0.0, "", [], {}]},
        "big": 12345678901234567890123,
    },
    {"role": "tool", "toolCallId": "c", "content": "no id"},
]


async def write_everything(persistence: Persistence) -> None:
    """Something under every key, from fixed ids and values."""
    mine = persistence.scoped(SCOPE)
    backend: Any = mine.backends[0]

    async def commit(number: int, **parts: Any) -> Any:
        return await backend.commit_turn(
            TurnCommit(commit_id=f"commit {number}", thread_id="thread 1", **parts)
        )

    asked = InterruptRecord.from_json(
        {
            "interruptId": "i1",
            "runId": "r1",
            "threadId": "thread 1",
            "requestedAt": 1_700_000_000_001,
            "payload": {"kind": "approval", "n": [1, 2.5]},
            "custom": {"kept": True},
        }
    )
    row = ActivityRecord(id="act", activity_type="plan", content={"steps": ["one"]}, index=0)
    await commit(
        1,
        run_id="r1",
        run=RunStart(
            run_id="r1", started_at=1_700_000_000_000, lease_token="token", name="agent",
            parent_run_id="r0", subagent_run_id="s0", extra={"mine": [1]},
        ),
        splice=Splice(keep_through=0, tail=MESSAGES, expected=""),
    )  # fmt: skip
    await backend.save_draft("thread 1", "r1", [{"id": "d", "role": "assistant"}])
    await commit(
        2,
        run_id="r1",
        lease_token="token",
        run=RunPatch(
            usage={"totalTokens": 3}, cancel_requested=False, detached=True, detached_since=5
        ),
        interrupts=[asked, asked.model_copy(update={"interrupt_id": "i2"})],
        activities=ActivitiesWrite(puts={0: row}, length=1),
    )
    await commit(
        3,
        run_id="r2",
        run=RunStart(run_id="r2", started_at=1_700_000_000_002),
        claims=[InterruptRef(interrupt_id="i1")],
    )
    cut = await commit(
        4,
        run_id="r2",
        splice=Splice(keep_through=1, tail=[{"id": "a2", "role": "assistant", "content": "new"}]),
    )
    await commit(
        5,
        cut_append=CutAppend(cut_id=cut.cut_id, messages=[{"id": "late", "role": "assistant"}]),
    )
    await commit(7, answers=[InterruptAnswer(interrupt_id="i2", response=None)])
    await commit(
        6,
        run_id="r2",
        run=RunPatch(status="failed", finished_at=9, error=RunError(message="no", code="e")),
    )
    await backend.metadata_put("space", "thread 1", {"k": [None, True]}, None)


async def read_everything(persistence: Persistence) -> dict[str, Any]:
    """The same, as the contract shows it; clocks and random names left out."""
    mine = persistence.scoped(SCOPE)
    backend: Any = mine.backends[0]
    view = await backend.read_view(
        "thread 1", ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)
    )

    def plain(record: Any) -> dict[str, Any]:
        data = {k: v for k, v in record.to_json().items() if k not in {"updatedAt", "resolvedAt"}}
        if "lease" in data:
            data["lease"] = data["lease"]["token"]
        return data

    (cut,) = await backend.list_cuts("thread 1")
    listed = await mine.list_threads()
    return {
        "messages": view.messages,
        "numbers": view.numbers,
        "newest": view.newest,
        "runs": [plain(record) for record in view.runs],
        "interrupts": [plain(record) for record in view.interrupts],
        "activities": [plain(record) for record in view.activities],
        "drafts": [plain(record) for record in view.drafts],
        "cut": [cut.numbers, cut.message_ids, cut.extra, cut.run_id],
        "cut messages": await backend.load_cut("thread 1", cut.cut_id),
        "metadata": await backend.metadata_of("thread 1"),
        "found": (await backend.find_run("r1")).thread_id,
        "children": [run.run_id for run in (await backend.list_child_runs(["r0"]))["r0"]],
        "again": (
            await backend.commit_turn(TurnCommit(commit_id="commit 1", thread_id="thread 1"))
        ).numbers,
        "listed": [(info.thread_id, info.message_count) for info in listed.threads],
        "lost": [row.run.run_id for row in await backend.list_lost(limit=9)],
        "detached": [
            row.run.run_id
            for row in await backend.list_reclaimable(detached_before=9, limit=9, every_scope=True)
        ],
        "idle": [name for _, name in await backend.list_idle(idle_ms=0, limit=9)],
        "cut threads": [name for _, name in await backend.list_cut_threads(before=2**50, limit=9)],
    }


# ------------------------------------------------------------------- what is stored, as data


def stored(space: RedisSpace) -> dict[str, Any]:
    """Every key below the prefix, with what it holds; bytes that are no text as base64."""
    found: dict[str, Any] = {}
    with space.server.client() as client:
        for name in space.names():
            kind = client.type(name).decode()
            if kind == "hash":
                rows = client.hgetall(name).items()
                value: Any = {_shown(key): _shown(value) for key, value in sorted(rows)}
            elif kind == "zset":
                rows = client.zrange(name, 0, -1, withscores=True)
                value = {_shown(key): int(score) for key, score in rows}
            else:
                assert kind == "set"
                value = sorted(_shown(member) for member in client.smembers(name))
            found[name.removeprefix(f"{space.prefix}:")] = [kind, value]
    return found


def _shown(raw: bytes) -> str:
    try:
        return "=" + raw.decode()
    except UnicodeDecodeError:
        return "b64:" + base64.b64encode(raw).decode()


def _raw(shown: str) -> bytes:
    return shown[1:].encode() if shown[0] == "=" else base64.b64decode(shown[4:])


def restore(space: RedisSpace, data: dict[str, Any]) -> None:
    """Put back what :func:`stored` has shown."""
    with space.server.client() as client:
        for name, (kind, value) in data.items():
            key = f"{space.prefix}:{name}"
            if kind == "hash":
                client.hset(key, mapping={_raw(k): _raw(v) for k, v in value.items()})
            elif kind == "zset":
                client.zadd(key, {_raw(k): v for k, v in value.items()})
            else:
                client.sadd(key, *map(_raw, value))


_CLOCKS = ("created", "updated", "born", "order", "resolvedAt", "leaseUntil", "cutAt")


def without_clocks(data: dict[str, Any]) -> dict[str, Any]:
    """Times and random names of what is stored, replaced by what they are."""
    head = next(value for name, (_, value) in data.items() if name.endswith(":head"))
    incarnation = head["=incarnation"][1:]
    found: dict[str, Any] = {}
    for name, (kind, value) in data.items():
        if kind == "zset":
            value = {k: score if score == 5 else "a time" for k, score in value.items()}
        if kind == "hash":
            value = {k: _steady(name, k, v, incarnation) for k, v in value.items()}
        found[name] = [kind, value]
    return found


def _steady(name: str, key: str, shown: str, incarnation: str) -> str:
    if key[1:] in _CLOCKS or key.startswith("=n:"):
        return "a time"
    if key == "=incarnation":
        return "random"
    if name.endswith(":drafts"):
        version, _, body = shown.split(" ", 2)
        return f"{version} a-time {body}"
    if name.endswith(":values"):
        version, _, body = shown.split(" ", 2)
        return f"{version} random {body}"
    if not name.endswith((":open", ":ended", ":asked", ":settled", ":cuts")):
        return shown
    assert incarnation not in shown
    raw, at, parts = _raw(shown), 0, []
    while at < len(raw):
        first, second = raw.index(b":", at), raw.index(b":", raw.index(b":", at) + 1)
        length, size = int(raw[at:first]), int(raw[first + 1 : second])
        field = raw[second + 1 : second + 1 + length].decode()
        value = raw[second + 1 + length : second + 1 + length + size].decode()
        parts.append(f"{field}={'a time' if field in _CLOCKS else value}")
        at = second + 1 + length + size
    return "; ".join(parts)


def kept(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


async def test_what_is_written_is_what_version_1_wrote(
    persistence: Persistence, anywhere: RedisSpace
) -> None:
    """Byte for byte, on a server as on a cluster: keys, bodies, digests, fields, the lines of
    remembered commits."""
    await write_everything(persistence)
    assert without_clocks(stored(anywhere)) == kept("keys-v1.json")


async def test_what_is_read_back_is_what_was_written(persistence: Persistence) -> None:
    await write_everything(persistence)
    found = await read_everything(persistence)
    assert json.loads(json.dumps(found)) == kept("contents-v1.json")
    assert found["messages"][0] == MESSAGES[0]
    assert found["cut messages"][:2] == MESSAGES[1:]
    assert list(found["cut messages"][0]) == list(MESSAGES[1])
    assert str(found["cut messages"][0]["unknownKey"]["a"]) == "[1.0, 1, -0.0, '', [], {}]"


async def test_a_database_of_version_1_opens(anywhere: RedisSpace) -> None:
    """What a server of version 1 held, put back key by key; and it can be written to."""
    restore(anywhere, kept("v1.json"))
    async with redis_persistence(anywhere.url()) as persistence:
        found = await read_everything(persistence)
        expected = kept("contents-v1.json")
        # The lease of the run that was alive then has run out since.
        expected["lost"] = ["r1"]
        assert json.loads(json.dumps(found)) == expected
        mine = persistence.scoped(SCOPE)
        await mine.stores.runs.update("r1", RunPatch(status="completed"), lease_token="token")
        await mine.stores.messages.save_thread("thread 1", MESSAGES)
        assert await mine.stores.messages.load_thread("thread 1") == MESSAGES
        assert await mine.delete_thread("thread 1")


# ------------------------------------------------------------------- rows that are no good

_VIEW = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)
_READS: dict[str, Callable[[Any], Any]] = {
    "body": lambda b: b.read_view("thread 1", ViewQuery()),
    "open": lambda b: b.read_view("thread 1", _VIEW),
    "ended": lambda b: b.find_run("r2"),
    "asked": lambda b: b.read_view("thread 1", _VIEW),
    "settled": lambda b: b.read_view("thread 1", _VIEW),
    "rows": lambda b: b.read_view("thread 1", _VIEW),
    "drafts": lambda b: b.read_view("thread 1", _VIEW),
    "cuts": lambda b: b.list_cuts("thread 1"),
    "values": lambda b: b.metadata_get("space", "thread 1"),
}


def spoil(space: RedisSpace, name: str, change: Callable[[bytes], bytes]) -> None:
    key = next(k for k in space.names() if k.endswith(f":{name}"))
    with space.server.client() as client:
        for field, value in client.hgetall(key).items():
            client.hset(key, field, change(value))


@pytest.mark.parametrize("name", _READS)
async def test_a_value_that_cannot_be_read_is_an_error_and_never_empty(
    persistence: Persistence, anywhere: RedisSpace, name: str
) -> None:
    backend: Any = persistence.scoped(SCOPE).backends[0]
    await write_everything(persistence)
    for body in (b"{", b"", b"[1]", b"5:5:statusxx", b"\xff\xfe"):
        spoil(anywhere, name, lambda _, body=body: body)  # type: ignore[misc]
        with pytest.raises(CorruptRecord):
            await _READS[name](backend)


@pytest.mark.parametrize("name", ["open", "asked"])
async def test_a_commit_that_meets_such_a_value_writes_nothing(
    persistence: Persistence, anywhere: RedisSpace, name: str
) -> None:
    backend: Any = persistence.scoped(SCOPE).backends[0]
    await write_everything(persistence)
    spoil(anywhere, name, lambda _: b"nonsense")
    before = stored(anywhere)
    commit = TurnCommit(
        commit_id="later",
        thread_id="thread 1",
        run_id="r1",
        lease_token="token" if name == "open" else None,
        answers=[] if name == "open" else [InterruptAnswer(interrupt_id="i1")],
        splice=Splice(keep_through=9, tail=MESSAGES),
    )
    with pytest.raises(CorruptRecord):
        await backend.commit_turn(commit)
    assert stored(anywhere) == before


async def test_a_lost_run_that_cannot_be_read_hinders_no_sweep(
    persistence: Persistence, anywhere: RedisSpace, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged, or of a later format: it is logged and keeps its place; the others are ended, also
    those of its thread."""
    runs = persistence.stores.runs
    names = {"spoiled": "t", "beside": "t", "newer": "v", "sound": "u"}
    for name, thread in names.items():
        await runs.create_or_resume(name, thread, started_at=1, lease_token="l", lease_ms=-9)
    head = tools.space(persistence).head_key("v")
    with anywhere.server.client() as client:
        (key,) = (
            k for k in anywhere.names() if k.endswith(":open") and client.hexists(k, "spoiled")
        )
        good = client.hget(key, "spoiled")
        client.hset(key, "spoiled", b"{")
        client.hset(head, "format", "2")
    swept = await persistence.maintenance().sweep()
    assert {lost.run.run_id for lost in swept} == {"beside", "sound"}
    for name in ("spoiled", "newer"):
        assert f"run '{name}' cannot be read" in caplog.text
    with anywhere.server.client() as client:
        client.hset(key, "spoiled", good)
        client.hset(head, "format", "1")
    swept = await persistence.maintenance().sweep()
    assert {lost.run.run_id for lost in swept} == {"spoiled", "newer"}


async def test_a_missing_body_is_an_error_and_never_a_gap(
    persistence: Persistence, anywhere: RedisSpace
) -> None:
    """A key that was evicted, say."""
    backend: Any = persistence.scoped(SCOPE).backends[0]
    await write_everything(persistence)
    for name, query in (("body", ViewQuery()), ("info", ViewQuery(messages="digests"))):
        key = next(k for k in anywhere.names() if k.endswith(f":{name}"))
        with anywhere.server.client() as client:
            client.delete(key)
        with pytest.raises(CorruptRecord, match="missing"):
            await backend.read_view("thread 1", query)


@pytest.mark.parametrize("rest", ["body", "open", "ended", "asked", "rows"])
async def test_a_missing_head_is_an_error_and_never_an_empty_thread(
    persistence: Persistence, anywhere: RedisSpace, rest: str
) -> None:
    """Neither read nor written over, whatever is left; a delete clears it away."""
    backend: Any = persistence.scoped(SCOPE).backends[0]
    await write_everything(persistence)
    with anywhere.server.client() as client:
        for key in anywhere.names():
            if "{t/" in key and not key.endswith((f":{rest}", ":values")):
                client.delete(key)
    before = stored(anywhere)
    with pytest.raises(CorruptRecord, match="head"):
        await backend.read_view("thread 1", ViewQuery())
    with pytest.raises(CorruptRecord, match="head"):
        await backend.commit_turn(TurnCommit(commit_id="x", thread_id="thread 1"))
    assert {k: v for k, v in stored(anywhere).items() if "{t/" in str(k)} == {
        k: v for k, v in before.items() if "{t/" in str(k)
    }
    await backend.delete_thread("thread 1")
    assert not (await backend.read_view("thread 1", ViewQuery())).exists


async def test_a_thread_of_a_later_format_is_neither_read_nor_written(
    persistence: Persistence, anywhere: RedisSpace
) -> None:
    """By name of the remedy; its contents are not looked at."""
    await write_everything(persistence)
    backend: Any = persistence.scoped(SCOPE).backends[0]
    key = next(k for k in anywhere.names() if k.endswith(":head"))
    with anywhere.server.client() as client:
        client.hset(key, "format", "2")
    before = stored(anywhere)
    said: Any = {"role": "user"}
    for call in (
        lambda: backend.read_view("thread 1", ViewQuery()),
        lambda: backend.commit_turn(
            TurnCommit(
                commit_id="x", thread_id="thread 1", splice=Splice(keep_through=9, tail=[said])
            )
        ),
        lambda: backend.save_draft("thread 1", "r1", []),
        lambda: backend.renew_lease("thread 1", "r1", "token", 1),
        lambda: backend.find_run("r1"),
        lambda: backend.list_cuts("thread 1"),
        lambda: backend.purge_cuts("thread 1", before=9),
        lambda: backend.erase_messages("thread 1", ["u1"]),
        lambda: backend.delete_thread("thread 1"),
        lambda: backend.list_threads(limit=9, cursor=None, children=False),
    ):
        with pytest.raises(SchemaOutOfDate, match="upgrade chatkeep-redis"):
            await call()
    assert stored(anywhere) == before


@pytest.mark.parametrize("name", ["drafts", "values"])
async def test_a_value_of_a_later_format_is_refused(
    persistence: Persistence, anywhere: RedisSpace, name: str
) -> None:
    await write_everything(persistence)
    backend: Any = persistence.scoped(SCOPE).backends[0]
    spoil(anywhere, name, lambda value: b"2" + value[1:])
    with pytest.raises(SchemaOutOfDate, match="upgrade chatkeep-redis"):
        await _READS[name](backend)
