"""The format on disk is a contract: what version 1 wrote stays readable, and stays what we
write until there is a version 2. The files in ``data`` are never made anew."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import select

from chatkeep import Persistence
from chatkeep.errors import ChatkeepError, CorruptRecord, SchemaOutOfDate
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
from chatkeep_sql import postgres_persistence, sqlite_persistence
from chatkeep_sql.schema import tables_for
from servers import Database

pytestmark = pytest.mark.anyio

DATA = Path(__file__).parent / "data"

CLOCKS = {"created_at", "updated_at", "cut_at", "resolved_at", "lease_until", "closed_at"}
"""Columns that the database's clock fills."""

RANDOM = {"incarnation", "revision", "fence"}

LOGS = {"chatkeep_logs", "chatkeep_log_events", "chatkeep_locks"}
"""Tables that came with revision 0002."""

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
    """Something in every table, from fixed ids and values."""
    mine = persistence.scoped(Scope(tenant_id="acme", user_id="ann"))
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
    await commit(
        5,
        cut_append=CutAppend(cut_id=cut.cut_id, messages=[{"id": "late", "role": "assistant"}]),
    )
    await commit(
        6,
        run_id="r2",
        run=RunPatch(status="failed", finished_at=9, error=RunError(message="no", code="e")),
    )
    await commit(7, answers=[InterruptAnswer(interrupt_id="i1", response=None)])
    await backend.metadata_put("space", "thread 1", {"k": [None, True]}, None)


async def read_everything(persistence: Persistence) -> dict[str, Any]:
    """The same, as the contract shows it; clocks and random names left out."""
    mine = persistence.scoped(Scope(tenant_id="acme", user_id="ann"))
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
    }


async def stored_rows(persistence: Persistence) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, as stored; bytes as hex."""
    backend: Any = persistence.backends[0]
    tables = tables_for(None).metadata.sorted_tables
    found: dict[str, list[dict[str, Any]]] = {}
    async with backend._runner.engine.connect() as connection:
        for table in tables:
            result = await connection.execute(select(table).order_by(*table.primary_key.columns))
            found[table.name] = [
                {name: _stored(name, value) for name, value in row._mapping.items()}
                for row in result
            ]
        await connection.rollback()
    return found


def _stored(name: str, value: Any) -> Any:
    if name in CLOCKS and value is not None:
        return "a time"
    if name in RANDOM:
        return "random"
    return value.hex() if isinstance(value, bytes) else value


def kept(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


async def test_the_rows_that_are_written_are_those_of_version_1(persistence: Persistence) -> None:
    """Byte for byte: bodies, digests, keys, the lines of remembered commits."""
    await write_everything(persistence)
    rows = await stored_rows(persistence)
    assert {name: rows[name] for name in rows.keys() - LOGS} == kept("rows-v1.json")


async def write_logs(persistence: Persistence) -> None:
    """A running log that was taken over and trimmed, and a closed one."""
    mine = persistence.scoped(Scope(tenant_id="acme", user_id="ann"))
    backend: Any = mine.backends[0]
    bodies = [b'{"type":"CUSTOM","value":"caf\xc3\xa9 \\u0000"}', b"{}", b'{"type":"RUN_FINISHED"}']
    await backend.log_open("r1", "thread 1", "token", 60_000)
    await backend.log_append("r1", "token", 1, bodies, lease_ms=60_000)
    await backend.log_take("r1", "token 2", 60_000, only_lost=False)
    await backend.log_append("r1", "token 2", 4, bodies[:1], lease_ms=60_000, keep_from=3)
    await backend.log_open("r2", "thread 1", "token", 60_000)
    await backend.log_append("r2", "token", 1, bodies[2:], lease_ms=60_000)
    await backend.log_close("r2", "token")
    await backend.lock_acquire("a lock", "token", 60_000)


async def read_logs(persistence: Persistence) -> dict[str, Any]:
    """The same, as the contract shows it."""
    backend: Any = persistence.scoped(Scope(tenant_id="acme", user_id="ann")).backends[0]
    found: dict[str, Any] = {}
    for run_id in ("r1", "r2"):
        page = await backend.log_read(run_id, {"r1": 3, "r2": 1}[run_id], limit=9, max_bytes=999)
        head = page.head
        found[run_id] = [
            head.thread_id, head.epoch, head.first, head.end, head.closed,
            [body.decode() for body in page.bodies],
        ]  # fmt: skip
    return found


async def test_the_rows_of_logs_are_those_of_revision_2(persistence: Persistence) -> None:
    """Byte for byte too."""
    await write_logs(persistence)
    rows = await stored_rows(persistence)
    assert {name: rows[name] for name in LOGS} == kept("log-rows-v1.json")
    assert await read_logs(persistence) == kept("log-contents-v1.json")


async def test_what_is_read_back_is_what_was_written(persistence: Persistence) -> None:
    await write_everything(persistence)
    found = await read_everything(persistence)
    assert found == kept("contents-v1.json")
    assert found["messages"][0] == MESSAGES[0]
    assert found["cut messages"][:2] == MESSAGES[1:]
    assert list(found["cut messages"][0]) == list(MESSAGES[1])
    assert str(found["cut messages"][0]["unknownKey"]["a"]) == "[1.0, 1, -0.0, '', [], {}]"


@pytest.mark.sqlite
async def test_a_sqlite_file_of_version_1_opens(sqlite_path: Path) -> None:
    connection = sqlite3.connect(sqlite_path)
    connection.executescript((DATA / "v1.sqlite.sql").read_text(encoding="utf-8"))
    connection.close()
    async with sqlite_persistence(sqlite_path) as persistence:
        await persistence.migrate()
        assert await read_everything(persistence) == kept("contents-v1.json")
        await write_logs(persistence)
        assert await read_logs(persistence) == kept("log-contents-v1.json")


@pytest.mark.sqlite
async def test_a_sqlite_file_of_revision_2_opens(sqlite_path: Path) -> None:
    connection = sqlite3.connect(sqlite_path)
    connection.executescript((DATA / "v2.sqlite.sql").read_text(encoding="utf-8"))
    connection.close()
    async with sqlite_persistence(sqlite_path) as persistence:
        await persistence.migrate()
        assert await read_everything(persistence) == kept("contents-v1.json")
        assert await read_logs(persistence) == kept("log-contents-v1.json")


@pytest.mark.postgres
async def test_a_postgresql_database_of_version_1_opens(postgres_database: Database) -> None:
    with psycopg.connect(postgres_database.url("")) as connection:
        connection.execute((DATA / "v1.postgres.sql").read_bytes())
    async with postgres_persistence(postgres_database.url("psycopg")) as persistence:
        await persistence.migrate()
        assert await read_everything(persistence) == kept("contents-v1.json")
        # Numbers that the database gives go on behind those that are there.
        await persistence.stores.runs.create_or_resume("later", "another", started_at=1)
        await write_logs(persistence)
        assert await read_logs(persistence) == kept("log-contents-v1.json")


@pytest.mark.postgres
async def test_a_postgresql_database_of_revision_2_opens(postgres_database: Database) -> None:
    with psycopg.connect(postgres_database.url("")) as connection:
        connection.execute((DATA / "v2.postgres.sql").read_bytes())
    async with postgres_persistence(postgres_database.url("psycopg")) as persistence:
        await persistence.migrate()
        assert await read_everything(persistence) == kept("contents-v1.json")
        assert await read_logs(persistence) == kept("log-contents-v1.json")


# ------------------------------------------------------------------- rows that are no good


SPOILED: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("entries", "body", lambda b: b.read_view("thread 1", ViewQuery())),
    ("runs", "extra", lambda b: b.find_run("r1")),
    ("interrupts", "payload", lambda b: b.read_view("thread 1", ViewQuery(interrupts="all"))),
    ("activities", "body", lambda b: b.read_view("thread 1", ViewQuery(activities=True))),
    ("drafts", "body", lambda b: b.read_view("thread 1", ViewQuery(drafts=True))),
    ("metadata", "value", lambda b: b.metadata_get("space", "thread 1")),
]


@pytest.mark.parametrize(("table", "column", "read"), SPOILED, ids=lambda v: str(v)[:12])
async def test_a_row_that_is_not_json_is_an_error_and_never_empty(
    persistence: Persistence, tools: Any, table: str, column: str, read: Any
) -> None:
    await write_everything(persistence)
    backend: Any = persistence.scoped(Scope(tenant_id="acme", user_id="ann")).backends[0]
    for body in ("{", "", "[1]" if table != "metadata" else "\x01"):
        await tools.execute(
            persistence,
            f"update chatkeep_{table} set {column} = :body",  # noqa: S608
            body=body,
        )
        with pytest.raises(CorruptRecord):
            await read(backend)


@pytest.mark.parametrize(("table", "column", "read"), SPOILED, ids=lambda v: str(v)[:12])
async def test_a_row_of_a_later_format_is_refused(
    persistence: Persistence, tools: Any, table: str, column: str, read: Any
) -> None:
    """By name of the remedy; its contents are not looked at."""
    await write_everything(persistence)
    backend: Any = persistence.scoped(Scope(tenant_id="acme", user_id="ann")).backends[0]
    await tools.execute(persistence, f"update chatkeep_{table} set format = 2")  # noqa: S608
    with pytest.raises(SchemaOutOfDate, match="upgrade chatkeep-sql"):
        await read(backend)


async def test_a_head_of_a_later_format_is_neither_read_nor_written(
    persistence: Persistence, tools: Any
) -> None:
    await write_everything(persistence)
    backend: Any = persistence.scoped(Scope(tenant_id="acme", user_id="ann")).backends[0]
    await tools.execute(persistence, "update chatkeep_threads set format = 2")
    before = await stored_rows(persistence)
    for call in (
        lambda: backend.read_view("thread 1", ViewQuery()),
        lambda: backend.commit_turn(tools.said("thread 1", "m", keep=9)),
        lambda: backend.delete_thread("thread 1"),
    ):
        with pytest.raises(SchemaOutOfDate):
            await call()
    assert await stored_rows(persistence) == before


@pytest.mark.parametrize(
    "change",
    ["update chatkeep_runs set extra = '{'", "update chatkeep_runs set format = 2"],
)
async def test_a_lost_run_that_cannot_be_read_hinders_no_sweep(
    persistence: Persistence, tools: Any, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """It is logged and stays; the others are ended."""
    runs = persistence.stores.runs
    for name in ("spoiled", "sound"):
        await runs.create_or_resume(name, name, started_at=1, lease_token="l", lease_ms=-9)
    await tools.execute(persistence, f"{change} where run_id = 'spoiled'")
    swept = await persistence.maintenance().sweep()
    assert [lost.run.run_id for lost in swept] == ["sound"]
    assert "thread 'spoiled' cannot be read" in caplog.text
    rows = await tools.execute(persistence, "select run_id, status from chatkeep_runs")
    assert sorted(rows) == [("sound", "failed"), ("spoiled", "running")]


async def test_a_file_that_is_no_database_is_corrupt(sqlite_path: Path) -> None:
    sqlite_path.write_bytes(b"this is not a database, and it is long enough to tell" * 40)
    async with sqlite_persistence(sqlite_path) as persistence:
        with pytest.raises(ChatkeepError) as caught:
            await persistence.stores.messages.load_thread("t")
        assert isinstance(caught.value, CorruptRecord)


@pytest.mark.parametrize("body", ["not json", '{"x":1}', '["role"]', '{"role":7}', "null"])
async def test_a_run_on_a_corrupt_thread_ends_before_the_model_and_changes_no_byte(
    persistence: Persistence, tools: Any, body: str
) -> None:
    """Never read as empty, and so never written over."""
    from chatkeep.engine import chat
    from chatkeep.persistence import with_persistence
    from chatkeep.testkit.played import PlayedModel

    messages: Any = [{"id": f"m{n}", "role": "user", "content": "x"} for n in range(3)]
    await persistence.stores.messages.save_thread("t", messages)
    await tools.execute(
        persistence, "update chatkeep_entries set body = :body where message_id = 'm1'", body=body
    )
    model = PlayedModel([])
    stream = chat(
        adapter=model,
        messages=[{"id": "m9", "role": "user", "content": "hi"}],
        thread_id="t",
        run_id="r",
        middleware=[with_persistence(persistence)],
    )
    end: Any = [event async for event in stream][-1]
    assert end.code == "corrupt-record"
    assert model.requests == []
    found = await tools.execute(
        persistence, "select message_id, body from chatkeep_entries order by number"
    )
    assert [row[0] for row in found] == ["m0", "m1", "m2"]
    assert found[1][1] == body
    with pytest.raises(CorruptRecord, match="'t'"):
        await persistence.stores.messages.load_thread("t")
