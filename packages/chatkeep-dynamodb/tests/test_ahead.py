"""Tails that do not fit one transaction: written ahead of it, live with the head, swept if their
writer died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence, Scope
from chatkeep.errors import BackendUnavailable, RecordTooLarge, RunConflict, ThreadConflict
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    ActivitiesWrite,
    CutAppend,
    RunStart,
    Splice,
    TurnCommit,
    ViewQuery,
)
from chatkeep_dynamodb import commit as commit_module
from chatkeep_dynamodb import leftovers
from chatkeep_dynamodb.state import Place
from servers.dynamodb import DynamoTable

pytestmark = pytest.mark.anyio

MANY = 130


def messages(word: str, count: int = MANY) -> list[Any]:
    return [{"id": f"{word}{n}", "role": "user", "content": word} for n in range(count)]


def commit(**parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id="t", **parts)


def many(word: str, *, keep: int = 0, expected: str | None = None) -> TurnCommit:
    return commit(splice=Splice(keep_through=keep, tail=messages(word), expected=expected))


def stored(tools: Any, table: DynamoTable, kind: str) -> list[Any]:
    return [row for row in tools.rows(table) if row.get("kind") == kind]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were written ahead are left over at once."""
    monkeypatch.setattr(commit_module, "STAGED_MS", -1)


async def test_what_goes_ahead_is_live_with_its_commit(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Numbers, revision and the other parts as in one transaction; nothing is left over."""
    backend = tools.backend(persistence)
    first = await backend.commit_turn(tools.said("t", "q"))
    receipt = await backend.commit_turn(
        commit(
            run_id="r",
            run=RunStart(run_id="r", started_at=1),
            splice=Splice(keep_through=9, tail=messages("a"), expected=first.revision),
            interrupts=[
                InterruptRecord(
                    interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={}
                )
            ],
        )
    )
    assert receipt.numbers == list(range(2, MANY + 2))
    assert receipt.created_run
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["q", *(f"a{n}" for n in range(MANY))]
    assert (view.revision, view.newest) == (receipt.revision, MANY + 1)
    assert [i.interrupt_id for i in view.interrupts] == ["i"]
    assert stored(tools, dynamodb_table, "leftover") == []
    again = await backend.commit_turn(tools.said("t", "after", keep=10**6))
    assert again.numbers == [MANY + 2]


async def test_a_cut_that_grows_by_many(persistence: Persistence, tools: Any) -> None:
    """A detached run whose messages go to a cut, more than a transaction holds."""
    backend = tools.backend(persistence)
    await backend.commit_turn(tools.said("t", "q"))
    cut = await backend.commit_turn(tools.said("t", "other"))
    await backend.commit_turn(
        commit(cut_append=CutAppend(cut_id=cut.cut_id, messages=messages("late")))
    )
    (record,) = await backend.list_cuts("t")
    assert record.extra == MANY
    assert len(await backend.load_cut("t", cut.cut_id)) == MANY + 1
    assert [m["id"] for m in (await backend.read_view("t", ViewQuery())).messages] == ["other"]


async def test_many_ui_rows(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Written ahead, replaced by as many, and shortened: the old ones are gone."""
    backend = tools.backend(persistence)

    def rows(word: str, count: int) -> ActivitiesWrite:
        puts = {
            n: ActivityRecord(id=f"{word}{n}", activity_type="card", content={}, index=n)
            for n in range(count)
        }
        return ActivitiesWrite(puts=puts, length=count)

    for word, count in (("a", 120), ("b", 120), ("c", 3)):
        await backend.commit_turn(commit(activities=rows(word, count)))
        view = await backend.read_view("t", ViewQuery(activities=True))
        assert [row.id for row in view.activities] == [f"{word}{n}" for n in range(count)]
    assert len(stored(tools, dynamodb_table, "activity")) == 3
    assert stored(tools, dynamodb_table, "leftover") == []


@pytest.mark.parametrize("size", [400_000, 20_000_000])
async def test_a_long_message_is_kept_in_chunks(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable, size: int
) -> None:
    """An inline image of 20 MB; text whose bytes pass a limit that its characters do not."""
    backend = tools.backend(persistence)
    text = "é" * (size // 2)
    await backend.commit_turn(
        commit(splice=Splice(keep_through=0, tail=[{"id": "m", "role": "user", "content": text}]))
    )
    (found,) = (await backend.read_view("t", ViewQuery())).messages
    assert found["content"] == text
    page = await backend.read_view("t", ViewQuery(limit=1))
    assert page.messages[0]["content"] == text
    # Replaced and erased, all its rows go.
    await backend.commit_turn(tools.said("t", "m"))
    assert stored(tools, dynamodb_table, "chunk") == []
    assert len(stored(tools, dynamodb_table, "message")) == 1


async def test_long_records_are_kept_in_chunks(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """A run, an interrupt, a draft and a metadata value above 400 KB; shortened, the rest goes."""
    backend = tools.backend(persistence)
    text = "é" * 300_000
    asked = InterruptRecord(
        interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={"text": text}
    )
    start = RunStart(run_id="r", started_at=1, lease_token="k", extra={"own": text})
    await backend.commit_turn(commit(run_id="r", run=start, interrupts=[asked]))
    await backend.save_draft("t", "r", [{"role": "assistant", "content": text}], lease_token="k")
    for _ in range(2):
        backend._memory.forget(backend.scope, "t")
        view = await backend.read_view("t", ViewQuery(runs="all", interrupts="all", drafts=True))
        assert view.runs[0].model_extra == {"own": text}
        assert view.interrupts[0].payload == {"text": text}
        assert view.drafts[0].messages[0]["content"] == text
        assert (await backend.find_run("r")).model_extra == {"own": text}
        await backend.renew_lease("t", "r", "k", 40_000)
    await backend.save_draft("t", "r", [{"role": "assistant", "content": "short"}])
    view = await backend.read_view("t", ViewQuery(drafts=True))
    assert view.drafts[0].messages[0]["content"] == "short"
    await backend.metadata_put("n", "k", text, None)
    assert (await backend.metadata_get("n", "k")).value == text
    assert await backend.metadata_of("k") == {"n": text}
    await backend.metadata_put("n", "k", "short", "*")
    assert await backend.metadata_of("k") == {"n": "short"}
    chunks = stored(tools, dynamodb_table, "chunk")
    assert [row["pk"].split("/")[2] for row in chunks] == ["thread"] * len(chunks)


@pytest.mark.parametrize("ended", [False, True])
async def test_what_is_erased_from_a_long_draft_is_nowhere(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable, ended: bool
) -> None:
    """Nor in the chunks that a shorter draft, or the end of its run, leaves to the time to live."""
    backend = tools.backend(persistence)
    await backend.commit_turn(commit(run_id="r", run=RunStart(run_id="r", started_at=1)))
    await backend.commit_turn(tools.said("t", "q"))
    secret = {"id": "s", "role": "assistant", "content": "secret" * 150_000}
    await backend.save_draft("t", "r", [secret])
    if ended:
        await backend.commit_turn(
            commit(run_id="r", run=RunPatch(status="completed"), drop_draft=True)
        )
    await backend.erase_messages("t", ["s"])
    for row in tools.rows(dynamodb_table):
        assert b"secret" not in row.get("body", b"")


async def test_a_long_draft_that_expires_leaves_its_thread_readable(
    persistence: Persistence,
    tools: Any,
    dynamodb_table: DynamoTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody swept for a month: the service removes the rows of a draft in no order."""
    backend = tools.backend(persistence)
    await backend.commit_turn(commit(run_id="r", run=RunStart(run_id="r", started_at=1)))
    await backend.commit_turn(tools.said("t", "q"))
    await backend.save_draft("t", "r", [{"role": "assistant", "content": "x" * 900_000}])
    chunk = stored(tools, dynamodb_table, "chunk")[0]
    monkeypatch.setattr(Place, "now", lambda _: chunk["expires_at"] * 1000 + 1)
    await backend._table.delete((chunk["pk"], chunk["sk"]))
    view = await backend.read_view("t", ViewQuery(drafts=True))
    assert (view.numbers, view.drafts) == ([1], [])
    assert await backend.erase_messages("t", ["q"]) == 1


async def test_what_no_transaction_holds_is_refused_and_named(
    persistence: Persistence, tools: Any
) -> None:
    backend = tools.backend(persistence)
    huge = "x" * 5_000_000
    start = RunStart(run_id="r", started_at=1, extra={"own": huge})
    with pytest.raises(RecordTooLarge, match="run 'r'"):
        await backend.commit_turn(commit(run_id="r", run=start))
    await backend.commit_turn(commit(run_id="r", run=RunStart(run_id="r", started_at=1)))
    with pytest.raises(RecordTooLarge, match="draft of run 'r'"):
        await backend.save_draft("t", "r", [{"role": "assistant", "content": huge}])
    with pytest.raises(RecordTooLarge, match="metadata 'n'"):
        await backend.metadata_put("n", "k", huge, None)
    asked = [
        InterruptRecord(interrupt_id=f"i{n}", run_id="r", thread_id="t", requested_at=1, payload={})
        for n in range(100)
    ]
    with pytest.raises(RecordTooLarge, match="list of records has 101"):
        await backend.commit_turn(commit(interrupts=asked))
    await backend.commit_turn(commit(interrupts=asked[:99]))
    view = await backend.read_view("t", ViewQuery(interrupts="all"))
    assert len(view.interrupts) == 99


# ------------------------------------------------------------------------------ crashes


CRASHES = [
    ("TransactWriteItems", 0),  # before numbers are taken
    ("BatchWriteItem", 0),  # before the first rows
    ("BatchWriteItem", 3),  # half-way
    ("TransactWriteItems", 1),  # before they are made live
]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("operation", "after"), CRASHES)
@pytest.mark.parametrize("before", [0, 1])
async def test_a_writer_that_dies_leaves_the_thread_as_it_was(
    persistence: Persistence,
    opened: Any,
    tools: Any,
    dynamodb_table: DynamoTable,
    operation: str,
    after: int,
    before: int,
) -> None:
    """Killed before each step; what it wrote is seen by nobody, the next writer is not hindered,
    and a sweep removes it."""
    if before:
        await tools.backend(persistence).commit_turn(tools.said("t", "q"))
    seen = await tools.backend(persistence).read_view("t", ViewQuery())
    async with opened() as dying:
        await dying.ping()
        wire = tools.wire(dying)
        wire.die(operation, after=after)
        with pytest.raises(tools.Killed):
            await tools.backend(dying)._commit_turn(many("a", keep=1))
    backend = tools.backend(persistence)
    backend._memory.forget(backend.scope, "t")
    view = await backend.read_view("t", ViewQuery())
    assert (view.exists, view.revision, view.messages) == (
        seen.exists,
        seen.revision,
        seen.messages,
    )
    listed = await backend.list_threads(limit=9, cursor=None, children=True)
    assert len(listed.threads) == before
    await persistence.maintenance().sweep()
    kept = [row["kind"] for row in tools.rows(dynamodb_table)]
    assert kept == ["head", "message"] * before
    receipt = await backend.commit_turn(tools.said("t", "next", keep=10**6))
    assert [m["id"] for m in (await backend.read_view("t", ViewQuery())).messages] == [
        *["q"] * before,
        "next",
    ]
    assert not receipt.replayed


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("before", [0, 1])
async def test_a_sweep_between_the_steps_makes_the_writer_begin_again(
    persistence: Persistence,
    opened: Any,
    wire: Any,
    tools: Any,
    dynamodb_table: DynamoTable,
    before: int,
) -> None:
    """It has marked the rows as taken: the commit is refused, and written under new numbers. What
    arrived after the sweep is removed too."""
    backend = tools.backend(persistence)
    if before:
        await backend.commit_turn(tools.said("t", "q"))
    async with opened() as other:
        await other.ping()
        come, go = wire.hold("BatchWriteItem")
        work = asyncio.create_task(backend.commit_turn(many("a")))
        assert await asyncio.to_thread(come.wait, 30)
        await other.maintenance().sweep()
        go.set()
        receipt = await work
    view = await backend.read_view("t", ViewQuery())
    assert view.numbers == receipt.numbers
    assert [m["id"] for m in view.messages] == [f"a{n}" for n in range(MANY)]
    await persistence.maintenance().sweep()
    kinds = [row["kind"] for row in tools.rows(dynamodb_table)]
    # The question that was there is archived.
    assert sorted(kinds) == sorted(["head", *["message"] * (MANY + before), *["cut"] * before])


async def test_writers_between_the_steps_lose_nothing(
    persistence: Persistence, opened: Any, wire: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Another turn is stored while the rows are on their way: they go behind it, under numbers
    that are higher, and none is left under the old ones."""
    backend = tools.backend(persistence)
    async with opened() as other:
        come, go = wire.hold("BatchWriteItem")
        work = asyncio.create_task(backend.commit_turn(many("a", keep=10**6)))
        assert await asyncio.to_thread(come.wait, 30)
        await tools.backend(other).commit_turn(tools.said("t", "theirs", keep=10**6))
        go.set()
        await work
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == ["theirs", *(f"a{n}" for n in range(MANY))]
    assert len(stored(tools, dynamodb_table, "message")) == MANY + 1
    assert stored(tools, dynamodb_table, "leftover") == []


async def test_two_writers_of_one_millisecond_share_no_numbers(
    persistence: Persistence,
    opened: Any,
    wire: Any,
    tools: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ask for the same numbers, in requests that are alike to the last byte: to the service
    they are still two, and the second one is refused."""
    monkeypatch.setattr(Place, "now", lambda _: 1_700_000_000_000)
    backend = tools.backend(persistence)
    async with opened() as other:
        await backend.commit_turn(tools.said("t", "q"))
        await tools.backend(other).read_view("t", ViewQuery())
        come, go = wire.hold("BatchWriteItem")
        work = asyncio.create_task(backend.commit_turn(many("a", keep=10**6)))
        assert await asyncio.to_thread(come.wait, 30)
        await tools.backend(other).commit_turn(many("b", keep=10**6))
        go.set()
        await work
    view = await backend.read_view("t", ViewQuery())
    said = [m["id"] for m in view.messages]
    assert said == ["q", *(f"b{n}" for n in range(MANY)), *(f"a{n}" for n in range(MANY))]


async def test_a_writer_that_is_refused_after_the_first_step_leaves_nothing(
    persistence: Persistence, opened: Any, wire: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    backend = tools.backend(persistence)
    async with opened() as other:
        come, go = wire.hold("BatchWriteItem")
        work = asyncio.create_task(backend.commit_turn(many("a", expected="")))
        assert await asyncio.to_thread(come.wait, 30)
        await tools.backend(other).commit_turn(tools.said("t", "theirs"))
        go.set()
        with pytest.raises(ThreadConflict):
            await work
    assert [row["kind"] for row in tools.rows(dynamodb_table)] == ["head", "message"]


async def test_a_refusal_comes_before_anything_is_written(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    backend = tools.backend(persistence)
    with pytest.raises(RunConflict):
        await backend.commit_turn(
            commit(run_id="r", lease_token="k", splice=Splice(keep_through=0, tail=messages("a")))
        )
    assert "BatchWriteItem" not in wire.counts
    assert "TransactWriteItems" not in wire.counts


async def test_a_reader_beside_a_long_write_sees_all_or_nothing(
    persistence: Persistence, opened: Any, wire: Any, tools: Any
) -> None:
    """Looked at after each request of the writer."""
    backend = tools.backend(persistence)
    await backend.commit_turn(tools.said("t", "q"))
    async with opened() as other:
        reader = tools.backend(other)
        seen: set[int] = set()
        work = asyncio.create_task(backend.commit_turn(many("a", keep=1)))
        while not work.done():
            seen.add(len((await reader.read_view("t", ViewQuery())).messages))
        seen.add(len((await reader.read_view("t", ViewQuery())).messages))
        assert seen <= {1, MANY + 1}
        assert MANY + 1 in seen


# ------------------------------------------------------------------------------ deletion


@pytest.mark.parametrize("after", range(4))
async def test_a_deletion_that_dies_is_whole_for_everybody(
    persistence: Persistence, opened: Any, tools: Any, dynamodb_table: DynamoTable, after: int
) -> None:
    """The head goes first: the thread is unknown at once, a new one with its id meets none of the
    old rows, and a sweep takes what is left of the old one alone."""
    backend = tools.backend(persistence)
    start = RunStart(run_id="r", started_at=1, lease_token="k", parent_run_id="p")
    await backend.commit_turn(
        commit(run_id="r", run=start, splice=Splice(keep_through=0, tail=messages("old", 60)))
    )
    await backend.commit_turn(tools.said("t10", "neighbour"))
    async with opened() as dying:
        await dying.ping()
        wire = tools.wire(dying)
        wire.die("Query", "BatchWriteItem", after=after)
        with pytest.raises(tools.Killed):
            await tools.backend(dying)._delete_thread("t")
    backend._memory.forget(backend.scope, "t")
    assert not (await backend.read_view("t", ViewQuery())).exists
    assert await backend.find_run("r") is None
    assert await backend.list_child_runs(["p"]) == {"p": []}
    await backend.commit_turn(tools.said("t", "new"))
    await persistence.maintenance().sweep()
    view = await backend.read_view("t", ViewQuery(runs="all"))
    assert ([m["id"] for m in view.messages], view.runs) == (["new"], [])
    kinds = sorted(row["kind"] for row in tools.rows(dynamodb_table))
    assert kinds == ["head", "head", "message", "message"]


async def test_what_a_deletion_removed_before_its_time_was_up_is_gone(
    persistence: Persistence,
    wire: Any,
    tools: Any,
    dynamodb_table: DynamoTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However large the thread: each sweep goes on where the last one was stopped."""
    monkeypatch.setattr(leftovers, "_ROWS_AT_ONCE", 50)
    backend = tools.backend(persistence)
    await backend.commit_turn(many("a"))
    wire.clear()
    assert await persistence.delete_thread("t")
    assert tools.rows(dynamodb_table) == []
    # Rows go before the next ones are looked for.
    bodies = [body for operation, body in wire.sent if operation == "Query"]
    values = [body["ExpressionAttributeValues"] for body in bodies]
    messages_asked = [v for v in values if v.get(":low", {}).get("S", "").startswith("m/")]
    assert len(messages_asked) == 3


async def test_an_unreachable_service_leaves_old_rows_to_the_sweep(
    persistence: Persistence, wire: Any, tools: Any, dynamodb_table: DynamoTable,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The commit is done; what it replaced is named, and removed later. It is said in the log."""
    backend = tools.backend(persistence)
    await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=messages("a", 20))))
    wire.lose_request("BatchWriteItem")
    tail = messages("a", 20)
    receipt = await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=tail)))
    assert receipt.numbers == list(range(21, 41))
    assert "wait for a sweep" in caplog.text
    assert len(stored(tools, dynamodb_table, "message")) == 40
    await persistence.maintenance().sweep()
    assert len(stored(tools, dynamodb_table, "message")) == 20
    assert stored(tools, dynamodb_table, "leftover") == []


async def test_rows_that_cannot_be_removed_hinder_no_sweep(
    persistence: Persistence, wire: Any, tools: Any, dynamodb_table: DynamoTable,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """They are logged and stay; runs whose process died are found all the same."""
    backend = tools.backend(persistence)
    await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=messages("a", 20))))
    wire.lose_request("BatchWriteItem")
    await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=messages("a", 20))))
    with tools.raw(dynamodb_table) as client:
        (left,) = stored(tools, dynamodb_table, "leftover")
        client.update_item(
            TableName=dynamodb_table.name,
            Key={"pk": {"S": left["pk"]}, "sk": {"S": left["sk"]}},
            UpdateExpression="SET messages = :odd",
            ExpressionAttributeValues={":odd": {"S": "odd"}},
        )
    start = RunStart(run_id="r", started_at=1, lease_token="k", lease_ms=1)
    await backend.commit_turn(commit(run_id="r", run=start))
    await asyncio.sleep(0.01)
    swept = await persistence.maintenance().sweep()
    assert [lost.run.run_id for lost in swept] == ["r"]
    assert "cannot be removed" in caplog.text
    assert len(stored(tools, dynamodb_table, "leftover")) == 1


async def test_a_service_that_goes_away_between_the_steps_is_an_outage(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    backend = tools.backend(persistence)

    def away(_wire: Any, request: Any, _name: str) -> Any:
        from botocore.exceptions import EndpointConnectionError

        raise EndpointConnectionError(endpoint_url=request.url)

    wire.always["BatchWriteItem"] = away
    with pytest.raises(BackendUnavailable):
        await backend.commit_turn(many("a"))
    wire.always.clear()
    assert not (await backend.read_view("t", ViewQuery())).exists
    await backend.commit_turn(many("b"))
    view = await backend.read_view("t", ViewQuery())
    assert [m["id"] for m in view.messages] == [f"b{n}" for n in range(MANY)]


async def test_every_row_is_in_its_scope(
    persistence: Persistence, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """A policy on the leading key covers each row, and the index over a scope's threads."""
    from chatkeep_dynamodb import leading_key

    scope = Scope(tenant_id="acme", user_id="ann/1")
    backend: Any = persistence.scoped(scope).backends[0]
    start = RunStart(run_id="r", started_at=1, lease_token="k", parent_run_id="p")
    await backend.commit_turn(commit(run_id="r", run=start))
    await backend.commit_turn(many("a"))
    await backend.save_draft("t", "r", [{"role": "assistant", "content": "d"}])
    await backend.metadata_put("n", "k", 1, None)
    rows = tools.rows(dynamodb_table)
    assert len(rows) > MANY + 5
    assert leading_key(scope) == "acme/ann%2F1/"
    for row in rows:
        assert row["pk"].startswith("acme/ann%2F1/")
        assert row.get("list", row["pk"]).startswith("acme/ann%2F1/")
