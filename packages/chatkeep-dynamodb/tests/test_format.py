"""The rows of a table are a contract: what version 1 wrote stays readable, and stays what we write
until there is a version 2. The files in ``data`` are never made anew."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
from chatkeep_dynamodb.items import CHUNK_BYTES
from chatkeep_dynamodb.state import Place
from servers.dynamodb import DynamoTable

pytestmark = pytest.mark.anyio

DATA = Path(__file__).parent / "data"
SCOPE = Scope(tenant_id="acme", user_id="ann/1")

MESSAGES: list[Any] = [
    {"id": "u1", "role": "user", "content": 'café 😀 \x00 "quoted"\n'},
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


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still, and nothing random."""
    moments = itertools.count(1_700_000_000_000_000_000)
    monkeypatch.setattr(Place, "now", lambda _self: 1_700_000_000_123)
    monkeypatch.setattr(Place, "moment", lambda _self: next(moments))
    monkeypatch.setattr(secrets, "token_hex", lambda size=32: "ab" * size)


async def write_everything(persistence: Persistence) -> None:
    """A row of every kind, from fixed ids and values."""
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
        activities=ActivitiesWrite(puts={0: row, 1: row}, length=2),
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
    await commit(8, activities=ActivitiesWrite(puts={0: row}, length=2))
    await commit(
        9,
        run_id="r3",
        run=RunStart(run_id="r3", started_at=1_700_000_000_003, lease_token="k"),
    )
    await commit(10, run_id="r3", run=RunPatch(detached_since=1_700_000_000_004))
    await backend.metadata_put("space", "thread 1", {"k": [None, True]}, None)
    await backend.commit_turn(
        TurnCommit(
            commit_id="long",
            thread_id="long " + "x" * 300,
            splice=Splice(
                keep_through=0,
                tail=[{"role": "user", "content": "y" * CHUNK_BYTES}],
            ),
        )
    )


async def read_everything(persistence: Persistence) -> dict[str, Any]:
    """The same, as the contract shows it."""
    backend: Any = persistence.scoped(SCOPE).backends[0]
    query = ViewQuery(runs="all", interrupts="all", activities=True, drafts=True)
    view = await backend.read_view("thread 1", query)
    (cut,) = await backend.list_cuts("thread 1")
    listed = await backend.list_threads(limit=9, cursor=None, children=True)
    (left,) = await backend.list_reclaimable(detached_before=1_700_000_000_004, limit=9)
    (long,) = (await backend.read_view("long " + "x" * 300, ViewQuery())).messages
    return {
        "messages": view.messages,
        "numbers": view.numbers,
        "revision": view.revision,
        "runs": [record.to_json() for record in view.runs],
        "interrupts": [record.to_json() for record in view.interrupts],
        "activities": [record.to_json() for record in view.activities],
        "drafts": [record.to_json() for record in view.drafts],
        "cut": cut.to_json(),
        "cut messages": await backend.load_cut("thread 1", cut.cut_id),
        "metadata": await backend.metadata_of("thread 1"),
        "found": (await backend.find_run("r1")).thread_id,
        "children": [run.run_id for run in (await backend.list_child_runs(["r0"]))["r0"]],
        "again": (
            await backend.commit_turn(TurnCommit(commit_id="commit 1", thread_id="thread 1"))
        ).numbers,
        "threads": [thread.to_json() for thread in listed.threads],
        "left": left.run.run_id,
        "long": len(long["content"]),
    }


def as_json(rows: list[Any]) -> Any:
    """Rows with bytes as text where they are text, else as hex; the long body by its length."""

    def plain(value: Any) -> Any:
        if not isinstance(value, bytes):
            return value
        if len(value) > 1000:
            return f"{len(value)} bytes"
        try:
            return {"text": value.decode()}
        except UnicodeDecodeError:
            return {"hex": value.hex()}

    return [{name: plain(value) for name, value in sorted(row.items())} for row in rows]


def from_json(rows: Any) -> list[dict[str, Any]]:
    """The rows of such a file, in attribute values."""
    from chatkeep_dynamodb.items import to_wire

    def stored(row: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return bytes.fromhex(value["hex"]) if "hex" in value else value["text"].encode()
        if isinstance(value, str) and value.endswith(" bytes"):
            size = int(value.partition(" ")[0])
            body = b'{"role":"user","content":"' + b"y" * CHUNK_BYTES + b'"}'
            return body[:size] if row["kind"] == "message" else body[-size:]
        return value

    return [to_wire({name: stored(row, value) for name, value in row.items()}) for row in rows]


def kept(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.mark.usefixtures("fixed")
async def test_the_rows_that_are_written_are_those_of_version_1(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Byte for byte: keys, bodies, digests, what the indexes see, the lines of remembered
    commits."""
    await write_everything(persistence)
    assert as_json(tools.rows(dynamodb_table)) == kept("rows-v1.json")


@pytest.mark.usefixtures("fixed")
async def test_what_is_read_back_is_what_was_written(persistence: Persistence) -> None:
    await write_everything(persistence)
    found = await read_everything(persistence)
    assert found == kept("contents-v1.json")
    assert found["messages"][0] == MESSAGES[0]
    assert found["cut messages"][:2] == MESSAGES[1:]
    assert list(found["cut messages"][0]) == list(MESSAGES[1])
    assert str(found["cut messages"][0]["unknownKey"]["a"]) == "[1.0, 1, -0.0, '', [], {}]"


async def test_a_table_of_version_1_opens(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Read by a process that wrote none of it; and it can be written on."""
    with tools.raw(dynamodb_table) as client:
        for item in from_json(kept("rows-v1.json")):
            client.put_item(TableName=dynamodb_table.name, Item=item)
    assert await read_everything(persistence) == kept("contents-v1.json")
    backend: Any = persistence.scoped(SCOPE).backends[0]
    receipt = await backend.commit_turn(
        TurnCommit(
            commit_id="later",
            thread_id="thread 1",
            splice=Splice(keep_through=99, tail=MESSAGES[:1]),
        )
    )
    assert receipt.numbers == [6]


# ------------------------------------------------------------------- rows that are no good


SPOILED: list[tuple[str, Callable[[Any], Any]]] = [
    ("message", lambda b: b.read_view("thread 1", ViewQuery())),
    ("run", lambda b: b.read_view("thread 1", ViewQuery(runs="all"))),
    ("interrupt", lambda b: b.read_view("thread 1", ViewQuery(interrupts="all"))),
    ("activity", lambda b: b.read_view("thread 1", ViewQuery(activities=True))),
    ("draft", lambda b: b.read_view("thread 1", ViewQuery(drafts=True))),
    ("value", lambda b: b.metadata_get("space", "thread 1")),
]


async def spoil(tools: Any, table: DynamoTable, kind: str, **changes: Any) -> None:
    """Change every row of a kind behind everybody's back."""
    with tools.raw(table) as client:
        for row in tools.rows(table):
            if row.get("kind") == kind:
                client.update_item(
                    TableName=table.name,
                    Key={"pk": {"S": row["pk"]}, "sk": {"S": row["sk"]}},
                    UpdateExpression="SET " + ", ".join(f"#{n} = :{n}" for n in changes),
                    ExpressionAttributeNames={f"#{n}": n for n in changes},
                    ExpressionAttributeValues={
                        f":{n}": {"B": v} if isinstance(v, bytes) else {"N": str(v)}
                        for n, v in changes.items()
                    },
                )


@pytest.mark.parametrize(("kind", "read"), SPOILED, ids=[kind for kind, _ in SPOILED])
async def test_a_row_that_is_not_json_is_an_error_and_never_empty(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable, kind: str, read: Any
) -> None:
    await write_everything(persistence)
    backend: Any = persistence.scoped(SCOPE).backends[0]
    for body in (b"{", b"", b"[1]" if kind != "value" else b"\x01"):
        await spoil(tools, dynamodb_table, kind, body=body)
        with pytest.raises(CorruptRecord):
            await read(backend)


@pytest.mark.parametrize(("kind", "read"), SPOILED, ids=[kind for kind, _ in SPOILED])
async def test_a_row_of_a_later_format_is_refused(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable, kind: str, read: Any
) -> None:
    """By name of the remedy; its contents are not looked at."""
    await write_everything(persistence)
    backend: Any = persistence.scoped(SCOPE).backends[0]
    await spoil(tools, dynamodb_table, kind, format=2, body=b"{")
    with pytest.raises(SchemaOutOfDate, match="upgrade chatkeep-dynamodb"):
        await read(backend)


async def test_a_head_or_cut_of_a_later_format_is_refused(
    persistence: Persistence, opened: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Nothing is written over what cannot be understood."""
    await write_everything(persistence)
    await spoil(tools, dynamodb_table, "cut", format=2)
    backend: Any = persistence.scoped(SCOPE).backends[0]
    with pytest.raises(SchemaOutOfDate):
        await backend.list_cuts("thread 1")
    await spoil(tools, dynamodb_table, "head", format=2)
    async with opened() as other:
        fresh: Any = other.scoped(SCOPE).backends[0]
        before = tools.rows(dynamodb_table)
        for call in (
            lambda: fresh.read_view("thread 1", ViewQuery()),
            lambda: fresh.commit_turn(TurnCommit(commit_id="x", thread_id="thread 1")),
            lambda: fresh.delete_thread("thread 1"),
        ):
            with pytest.raises(SchemaOutOfDate):
                await call()
        assert tools.rows(dynamodb_table) == before


async def test_a_message_that_is_missing_is_an_error(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """To readers, to a cut that would archive it, and to whoever asks for the archive."""
    await write_everything(persistence)
    backend: Any = persistence.scoped(SCOPE).backends[0]
    with tools.raw(dynamodb_table) as client:
        for row in tools.rows(dynamodb_table):
            if row.get("kind") == "message" and "thread%201" in row["pk"]:
                key = {"pk": {"S": row["pk"]}, "sk": {"S": row["sk"]}}
                client.delete_item(TableName=dynamodb_table.name, Key=key)
    (cut,) = await backend.list_cuts("thread 1")
    calls: list[Callable[[], Any]] = [
        lambda: backend.read_view("thread 1", ViewQuery()),
        lambda: backend.load_cut("thread 1", cut.cut_id),
        lambda: backend.commit_turn(
            TurnCommit(commit_id="c", thread_id="thread 1", splice=Splice(keep_through=0))
        ),
    ]
    for call in calls:
        with pytest.raises(ChatkeepError) as caught:
            await call()
        assert isinstance(caught.value, CorruptRecord)
