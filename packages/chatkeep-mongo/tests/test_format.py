"""The format on disk is a contract: what version 1 wrote stays readable, and stays what we write
until there is a version 2. The files in ``data`` are never made anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bson import json_util

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
from chatkeep_mongo import mongo_persistence
from servers.mongo import MongoDatabase

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
LONG: Any = {"id": "long", "role": "user", "content": "0123456789" * 30}


async def write_everything(persistence: Persistence, tools: Any) -> None:
    """Something in every collection, from fixed ids and values: a finished thread, one with a body
    in pieces, one whose process died behind its commit, and one that died in a deletion."""
    backend: Any = persistence.scoped(SCOPE).backends[0]

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
            status="interrupted", usage={"totalTokens": 3}, cancel_requested=False, detached=True
        ),
        interrupts=[asked],
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
    late: Any = [{"id": "late", "role": "assistant"}]
    await commit(5, cut_append=CutAppend(cut_id=cut.cut_id, messages=late))
    await commit(
        6,
        run_id="r2",
        run=RunPatch(status="failed", finished_at=9, error=RunError(message="no", code="e")),
    )
    await commit(7, answers=[InterruptAnswer(interrupt_id="i1", response=None)])
    await backend.metadata_put("space", "thread 1", {"k": [None, True]}, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatkeep_mongo.bodies.INLINE", 150)
        patch.setattr("chatkeep_mongo.redo.STAGE_ABOVE", 300)
        patch.setattr("chatkeep_mongo.redo._short", lambda _redo: False)
        broken, _ = tools.watched(persistence, SCOPE, crash_at=5, after=True)
        with pytest.raises(tools.Crash):
            await broken.commit_turn(
                TurnCommit(
                    commit_id="large",
                    thread_id="thread 2",
                    run=RunStart(run_id="r3", started_at=3),
                    splice=Splice(keep_through=0, tail=[LONG], expected=""),
                    activities=ActivitiesWrite(puts={0: row, 1: row}, length=2),
                )
            )
    broken, _ = tools.watched(persistence, SCOPE, crash_at=4, after=True)
    with pytest.raises(tools.Crash):
        await broken.commit_turn(
            TurnCommit(
                commit_id="died",
                thread_id="thread 3",
                run_id="r4",
                run=RunStart(run_id="r4", started_at=4, status="interrupted"),
                splice=Splice(keep_through=0, tail=[MESSAGES[0]], expected=""),
                interrupts=[asked.model_copy(update={"thread_id": "thread 3"})],
                activities=ActivitiesWrite(puts={0: row}, length=1),
            )
        )
    await backend.commit_turn(
        TurnCommit(
            commit_id="to go", thread_id="thread 4", splice=Splice(keep_through=0, tail=[LONG])
        )
    )
    await backend.metadata_put("space", "thread 4", 1, None)
    broken, _ = tools.watched(persistence, SCOPE, crash_at=1, after=True)
    with pytest.raises(tools.Crash):
        await broken.delete_thread("thread 4")


async def read_everything(persistence: Persistence) -> dict[str, Any]:
    """The same, as the contract shows it; clocks and random names left out."""
    backend: Any = persistence.scoped(SCOPE).backends[0]
    threads: dict[str, Any] = {}
    for name in ("thread 1", "thread 2", "thread 3", "thread 4"):
        view = await backend.read_view(
            name, ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)
        )
        cuts = [
            [c.numbers, c.message_ids, c.extra, c.run_id, await backend.load_cut(name, c.cut_id)]
            for c in await backend.list_cuts(name)
        ]
        threads[name] = {
            "exists": view.exists,
            "messages": view.messages,
            "numbers": view.numbers,
            "newest": view.newest,
            "runs": [_plain(record) for record in view.runs],
            "interrupts": [_plain(record) for record in view.interrupts],
            "activities": [_plain(record) for record in view.activities],
            "drafts": [_plain(record) for record in view.drafts],
            "cuts": cuts,
        }
    again = {
        commit_id: (
            await backend.commit_turn(TurnCommit(commit_id=commit_id, thread_id=name))
        ).numbers
        for commit_id, name in (("commit 1", "thread 1"), ("large", "thread 2"))
    }
    listed = await backend.list_threads(limit=9, cursor=None, children=False)
    return {
        "threads": threads,
        "metadata": await backend.metadata_of("thread 1"),
        "found": [(await backend.find_run(f"r{n}")).thread_id for n in (1, 2, 3, 4)],
        "children": [run.run_id for run in (await backend.list_child_runs(["r0"]))["r0"]],
        "again": again,
        "listed": sorted([t.thread_id, t.message_count] for t in listed.threads),
    }


def _plain(record: Any) -> dict[str, Any]:
    data = {k: v for k, v in record.to_json().items() if k not in {"updatedAt", "resolvedAt"}}
    if "lease" in data:
        data["lease"] = data["lease"]["token"]
    return data


# -------------------------------------------------------------------------- as it is stored


def stored(database: MongoDatabase) -> dict[str, list[Any]]:
    """Every document, as extended JSON."""
    with database.opened() as opened:
        return {
            name: [json.loads(json_util.dumps(row)) for row in opened[name].find().sort("_id", 1)]
            for name in sorted(opened.list_collection_names())
        }


CLOCKS = {"created_at", "updated_at", "cut_at", "oldest_cut", "lease_until", "draft_at"}
RANDOM = {"stamp", "nonce", "born"}


def masked(documents: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Without clocks and random names; an incarnation or a cut is called by when it first appears
    in the threads, in order of their ids."""
    names: dict[str, str] = {}
    for head in sorted(documents["chatkeep_threads"], key=lambda row: row["thread_id"]):
        names[head["t"]] = f"<t of {head['thread_id']}>"
        names |= {cut: f"<cut {i}>" for i, cut in enumerate(head.get("cuts", []))}

    def mask(value: Any, field: str = "") -> Any:
        if field in CLOCKS | RANDOM and value is not None:
            return f"<{field}>"
        if isinstance(value, dict):
            return {key: mask(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [mask(item, field) for item in value]
        if isinstance(value, str):
            for name, word in names.items():
                value = value.replace(name, word)
            value = re.sub(r"\b[0-9a-f]{1,4}\.[0-9a-f]{16}\b", "<revision>", value)
            value = re.sub(r"redo\.[0-9a-f]{16}", "redo.<stamp>", value)
            value = re.sub(r'"resolvedAt":\d+', '"resolvedAt":0', value)
            if field in ("revision", "notes") and re.fullmatch(r"[0-9a-f]{24}", value):
                return "<revision>"
            return value
        return value

    return {
        name: sorted((mask(row) for row in rows), key=json.dumps)
        for name, rows in documents.items()
    }


def without_staged(documents: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Without the bytes of staged redo records: BSON with clocks and random names in it."""
    for row in documents["chatkeep_pieces"]:
        if row["piece"].startswith("redo."):
            row["data"] = "<bytes>"
    return documents


def kept(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


async def test_the_documents_that_are_written_are_those_of_version_1(
    persistence: Persistence, mongo_database: MongoDatabase, tools: Any
) -> None:
    """Field for field: bodies, digests, keys, remembered commits, redo records, tombstones."""
    await write_everything(persistence, tools)
    written = without_staged(masked(stored(mongo_database)))
    assert written == without_staged(masked(kept("v1.json")))


async def test_a_database_of_version_1_opens(
    persistence: Persistence, mongo_database: MongoDatabase
) -> None:
    """And what its commits and deletions had left to do is done."""
    with mongo_database.opened() as database:
        for name, rows in kept("v1.json").items():
            database[name].insert_many(json_util.loads(json.dumps(rows)))
    await persistence.migrate()
    await persistence.check_schema()
    found = await read_everything(persistence)
    assert json.loads(json.dumps(found)) == kept("contents-v1.json")
    assert found["threads"]["thread 1"]["messages"][0] == MESSAGES[0]
    (cut,) = found["threads"]["thread 1"]["cuts"]
    assert cut[4][:2] == MESSAGES[1:]
    assert list(cut[4][0]) == list(MESSAGES[1])
    assert str(cut[4][0]["unknownKey"]["a"]) == "[1.0, 1, -0.0, '', [], {}]"
    assert await persistence.maintenance().sweep() == []
    with mongo_database.opened() as database:
        left = [row["thread_id"] for row in database["chatkeep_threads"].find()]
        assert "thread 4" not in left
        assert database["chatkeep_metadata"].count_documents({}) == 1


# -------------------------------------------------------------- documents that are no good


SPOILED: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("entries", "body", lambda b: b.read_view("thread 1", ViewQuery())),
    ("runs", "body", lambda b: b.find_run("r1")),
    ("interrupts", "body", lambda b: b.read_view("thread 1", ViewQuery(interrupts="all"))),
    ("activities", "body", lambda b: b.read_view("thread 1", ViewQuery(activities=True))),
    ("runs", "draft", lambda b: b.read_view("thread 1", ViewQuery(drafts=True))),
    ("metadata", "body", lambda b: b.metadata_get("space", "thread 1")),
]


@pytest.mark.parametrize(("name", "field", "read"), SPOILED, ids=lambda v: str(v)[:12])
async def test_a_body_that_is_not_json_is_an_error_and_never_empty(
    plain: Persistence,
    mongo_database: MongoDatabase,
    tools: Any,
    name: str,
    field: str,
    read: Any,
) -> None:
    await write_everything(plain, tools)
    backend: Any = plain.scoped(SCOPE).backends[0]
    for body in ("{", "", "\x01" if name == "metadata" else '{"a":1}', 7):
        with mongo_database.opened() as database:
            database[f"chatkeep_{name}"].update_many({}, {"$set": {field: body}})
        with pytest.raises(CorruptRecord):
            await read(backend)


@pytest.mark.parametrize(("name", "field", "read"), SPOILED, ids=lambda v: str(v)[:12])
async def test_a_document_of_a_later_format_is_refused(
    plain: Persistence,
    mongo_database: MongoDatabase,
    tools: Any,
    name: str,
    field: str,
    read: Any,
) -> None:
    """By name of the remedy; its contents are not looked at."""
    await write_everything(plain, tools)
    backend: Any = plain.scoped(SCOPE).backends[0]
    with mongo_database.opened() as database:
        database[f"chatkeep_{name}"].update_many({}, {"$set": {"format": 2}})
    with pytest.raises(SchemaOutOfDate, match="upgrade chatkeep-mongo"):
        await read(backend)


@pytest.mark.parametrize("thread", ["thread 1", "thread 3", "thread 4"])
async def test_a_head_of_a_later_format_is_neither_read_nor_written(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any, thread: str
) -> None:
    """Nor is what its commit or its deletion left to do."""
    await write_everything(plain, tools)
    with mongo_database.opened() as database:
        database["chatkeep_threads"].update_many({}, {"$set": {"format": 2}})
    before = stored(mongo_database)
    async with mongo_persistence(mongo_database.url()) as other:
        backend: Any = other.scoped(SCOPE).backends[0]
        calls: list[Any] = [
            lambda: backend.commit_turn(tools.said(thread, "m", keep=9)),
            lambda: backend.delete_thread(thread),
        ]
        if thread != "thread 4":
            calls.append(lambda: backend.read_view(thread, ViewQuery()))
        for call in calls:
            with pytest.raises(SchemaOutOfDate):
                await call()
    assert stored(mongo_database) == before


async def test_a_head_that_is_damaged_is_an_error(
    plain: Persistence, mongo_database: MongoDatabase, tools: Any
) -> None:
    backend = tools.backend(plain)
    await backend.commit_turn(tools.said("t", "a"))
    for damage in ({"live": [2, 1]}, {"live": "x"}, {"format": 0}, {"format": None}):
        with mongo_database.opened() as database:
            database["chatkeep_threads"].update_many({}, {"$set": damage})
        with pytest.raises(CorruptRecord, match="thread 't'"):
            await backend.read_view("t", ViewQuery())
