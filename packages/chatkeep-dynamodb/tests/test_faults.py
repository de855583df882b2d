"""Throttling, collisions, lost replies, stale pages, servers that stall or die: nothing twice,
nothing half, nothing acknowledged that is not stored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence, open_persistence
from chatkeep.errors import (
    BackendUnavailable,
    CorruptRecord,
    RunConflict,
    SchemaOutOfDate,
    StoreClosed,
    StoreError,
    ThreadConflict,
)
from chatkeep.records import InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_dynamodb import client as client_module
from servers.dynamodb import DynamoTable, MotoProcess

pytestmark = pytest.mark.anyio


def messages(count: int) -> list[Any]:
    return [{"id": f"m{n}", "role": "user", "content": "x"} for n in range(count)]


async def numbers(persistence: Persistence, tools: Any) -> list[int]:
    return (await tools.backend(persistence).read_view("t", ViewQuery())).numbers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of our own retries is reached soon."""
    monkeypatch.setattr(client_module, "_TRIES", 3)


# --------------------------------------------------------------------- throttling, collisions


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ("TransactWriteItems", "ProvisionedThroughputExceededException"),
        ("TransactWriteItems", "ThrottlingException"),
        ("TransactWriteItems", "TransactionInProgressException"),
        ("GetItem", "RequestLimitExceeded"),
    ],
)
async def test_throttled_requests_are_sent_again(
    persistence: Persistence, wire: Any, tools: Any, operation: str, code: str
) -> None:
    wire.refuse(operation, code, times=2)
    await tools.backend(persistence).commit_turn(tools.said("t", "a"))
    assert wire.counts[operation] == 3
    assert await numbers(persistence, tools) == [1]


@pytest.mark.parametrize("reasons", [[None, "TransactionConflict"], ["ThrottlingError", None]])
async def test_a_collision_of_transactions_is_never_a_conflict(
    persistence: Persistence, wire: Any, tools: Any, reasons: Any
) -> None:
    """It is sent again as it is, under the same token, and applied once."""
    wire.cancel(reasons, times=3)
    receipt = await tools.backend(persistence).commit_turn(tools.said("t", "a", expected=""))
    assert not receipt.replayed
    sent = [body for operation, body in wire.sent if operation == "TransactWriteItems"]
    assert len(sent) == 4
    assert len({body["ClientRequestToken"] for body in sent}) == 1
    assert len(sent[0]["ClientRequestToken"]) <= 36
    assert await numbers(persistence, tools) == [1]


@pytest.mark.usefixtures("impatient")
async def test_throttling_without_end_is_an_outage_and_writes_nothing(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """Bounded: ours, times the sends of a commit."""
    wire.refuse("TransactWriteItems", "ThrottlingException", times=12)
    with pytest.raises(BackendUnavailable, match="3 times in vain") as caught:
        await tools.backend(persistence).commit_turn(tools.said("t", "a"))
    assert not caught.value.outcome_unknown
    assert wire.counts["TransactWriteItems"] == 12
    assert not (await tools.backend(persistence).read_view("t", ViewQuery())).exists


@pytest.mark.usefixtures("impatient")
async def test_collisions_without_end_are_an_outage(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    wire.cancel([None, "TransactionConflict"], times=12)
    with pytest.raises(BackendUnavailable, match="TransactionCanceledException"):
        await tools.backend(persistence).commit_turn(tools.said("t", "a"))


async def test_a_renewal_meets_a_transaction(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    backend = tools.backend(persistence)
    await persistence.stores.runs.create_or_resume("r", "t", started_at=1, lease_token="k")
    wire.refuse("UpdateItem", "TransactionConflictException", times=2)
    renewed = await backend.renew_lease("t", "r", "k", 90_000)
    assert renewed.lease == (await backend.find_run("r")).lease


async def test_what_a_batch_leaves_undone_is_done(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """Never reported as written before it is; of reads too."""
    wire.leave_undone("BatchWriteItem", 5, times=3)
    wire.leave_undone("BatchWriteItem", 25)
    backend = tools.backend(persistence)
    await persistence.stores.messages.save_thread("t", messages(120))
    assert await persistence.stores.messages.load_thread("t") == messages(120)
    for name in ("r1", "r2", "r3"):
        await persistence.stores.runs.create_or_resume(name, "t", started_at=1)
    wire.leave_undone("BatchGetItem", 2)
    view = await backend.read_view("t", ViewQuery())
    assert [run.run_id for run in view.runs] == ["r1", "r2", "r3"]


@pytest.mark.usefixtures("impatient")
async def test_what_stays_undone_is_an_outage_and_no_run_is_completed(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    backend = tools.backend(persistence)
    await persistence.stores.runs.create_or_resume("r", "t", started_at=1, lease_token="k")

    wire.leave_undone("BatchWriteItem", 25)
    wire.always["BatchWriteItem"] = wire.faults.pop()[1]
    with pytest.raises(BackendUnavailable, match="left a part undone"):
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id="t",
                run_id="r",
                lease_token="k",
                run=RunPatch(status="completed"),
                splice=Splice(keep_through=0, tail=messages(120)),
            )
        )
    wire.always.clear()
    view = await backend.read_view("t", ViewQuery(run_id="r"))
    assert (view.run.status, view.messages) == ("running", [])


# ------------------------------------------------------------------------------ lost replies


async def test_a_boundary_whose_reply_was_lost_is_applied_once(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """The same commit is sent again, and recognised by the head that refuses it."""
    backend = tools.backend(persistence)
    known = await backend.commit_turn(tools.said("t", "a"))
    wire.lose_reply("TransactWriteItems")
    receipt = await backend.commit_turn(tools.said("t", "b", keep=1, expected=known.revision))
    assert receipt.replayed
    assert receipt.numbers == [2]
    view = await backend.read_view("t", ViewQuery())
    assert (view.numbers, view.revision) == ([1, 2], receipt.revision)


async def test_the_clients_own_retries_apply_a_boundary_once(opened: Any, tools: Any) -> None:
    """boto3 sends the same bytes with the same token: the service answers as before. What has no
    token is conditional on what it changes."""
    async with opened(client_retries={"mode": "standard", "total_max_attempts": 3}) as persistence:
        await persistence.migrate()
        wire, backend = tools.wire(persistence), tools.backend(persistence)
        stores = persistence.stores
        wire.lose_reply("TransactWriteItems")
        receipt = await backend.commit_turn(tools.said("t", "a"))
        assert not receipt.replayed
        assert (await backend.read_view("t", ViewQuery())).numbers == [1]
        wire.lose_reply("PutItem")
        revision = await stores.metadata.set_if("n", "k", 1, None)
        assert revision is not None
        assert (await stores.metadata.get_versioned("n", "k")).revision == revision
        wire.lose_reply("PutItem")
        assert await stores.metadata.set_if("n", "k", 2, revision) is not None
        assert await stores.metadata.set_if("n", "k", 3, revision) is None
        await stores.runs.create_or_resume("r", "t", started_at=1, lease_token="k")
        wire.lose_reply("UpdateItem")
        renewed = await backend.renew_lease("t", "r", "k", 50_000)
        assert (await backend.find_run("r")).lease == renewed.lease
        wire.lose_reply("TransactWriteItems")
        await backend.save_draft("t", "r", messages(1), lease_token="k")
        assert wire.faults == []


async def test_a_long_tail_whose_reply_was_lost_is_applied_once(
    persistence: Persistence, wire: Any, tools: Any, dynamodb_table: DynamoTable
) -> None:
    """Lost after numbers were taken, and after the commit itself."""
    wire.lose_reply("TransactWriteItems")
    await persistence.stores.messages.save_thread("t", messages(120))
    assert await persistence.stores.messages.load_thread("t") == messages(120)
    backend = tools.backend(persistence)

    def pass_on(own: Any, request: Any, _operation: str) -> Any:
        return own.inner.send(request)

    wire.faults.append(("TransactWriteItems", pass_on))
    wire.lose_reply("TransactWriteItems")
    commit = TurnCommit(
        commit_id=new_commit_id(),
        thread_id="t",
        splice=Splice(keep_through=10**6, tail=messages(110)),
    )
    receipt = await backend.commit_turn(commit)
    assert receipt.replayed
    view = await backend.read_view("t", ViewQuery())
    assert len(view.messages) == 230


async def test_a_refusal_after_a_lost_reply_is_still_a_refusal(
    persistence: Persistence, opened: Any, wire: Any, tools: Any
) -> None:
    """The request never arrived, and another writer was faster meanwhile."""
    backend = tools.backend(persistence)
    known = await backend.commit_turn(tools.said("t", "a"))
    async with opened() as other:
        await tools.backend(other).commit_turn(tools.said("t", "theirs", keep=9))
    wire.lose_request("TransactWriteItems")
    with pytest.raises(ThreadConflict):
        await backend.commit_turn(tools.said("t", "b", keep=1, expected=known.revision))


# ------------------------------------------------------------------------------- stale reads


def without(kind: str, word: str = "") -> Any:
    """Change a page: rows of a kind are not in it."""

    def change(page: Any) -> Any:
        page["Items"] = [
            item
            for item in page["Items"]
            if item.get("kind", {}).get("S") != kind or word not in item["sk"]["S"]
        ]
        return page

    return change


async def test_an_entry_that_a_query_lacks_is_read_again(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """A query is not isolated from a transaction: the head may name what the page lacks."""
    await persistence.stores.messages.save_thread("t", messages(3))
    wire.rewrite("Query", without("message", "000002"))
    assert await persistence.stores.messages.load_thread("t") == messages(3)


async def test_an_entry_that_is_not_there_is_an_error(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """Never "empty": the head names it, twice, and it is missing."""
    await persistence.stores.messages.save_thread("t", messages(3))
    wire.rewrite("Query", without("message", "000002"), times=2)
    with pytest.raises(CorruptRecord, match="message 2 of thread 't'"):
        await persistence.stores.messages.load_thread("t")


async def test_a_reader_never_mixes_two_states(
    persistence: Persistence, opened: Any, wire: Any, tools: Any
) -> None:
    """A commit falls between a head that was read and the run that it names: read again, so that
    the run, its answer and its interrupt are of one moment."""
    backend = tools.backend(persistence)
    await backend.commit_turn(
        TurnCommit(
            commit_id=new_commit_id(),
            thread_id="t",
            run_id="r",
            run=RunStart(run_id="r", started_at=1, lease_token="k"),
        )
    )
    async with opened() as other:
        writer = tools.backend(other)
        asked = InterruptRecord(
            interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={}
        )
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id="t",
                run_id="r2",
                run=RunStart(run_id="r2", started_at=2, lease_token="k2"),
            )
        )
        come, go = wire.hold("BatchGetItem")
        reading = asyncio.create_task(backend.read_view("t", ViewQuery()))
        assert await asyncio.to_thread(come.wait, 30)
        await writer.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id="t",
                run_id="r",
                lease_token="k",
                run=RunPatch(status="interrupted"),
                interrupts=[asked],
                splice=Splice(keep_through=0, tail=messages(2)),
            )
        )
        go.set()
        view = await reading
    assert [run.run_id for run in view.runs] == ["r2"]
    assert [i.interrupt_id for i in view.interrupts] == ["i"]
    assert len(view.messages) == 2


@pytest.mark.parametrize("whole", [False, True])
async def test_a_long_row_that_is_written_over_while_it_is_read_is_read_again(
    persistence: Persistence, opened: Any, wire: Any, tools: Any, whole: bool
) -> None:
    """Its first chunk is of one version, the others are of the next: no record is made of that,
    and none is called broken."""
    backend = tools.backend(persistence)
    start = RunStart(run_id="r", started_at=1, lease_token="k", extra={"own": "x" * 900_000})
    await backend.commit_turn(
        TurnCommit(commit_id=new_commit_id(), thread_id="t", run_id="r", run=start)
    )

    def without_a_chunk(page: Any) -> Any:
        page["Items"] = [item for item in page["Items"] if not item["sk"]["S"].endswith("/00002")]
        return page

    def older(page: Any) -> Any:
        for item in (item for items in page["Responses"].values() for item in items):
            item["version"]["N"] = "0"
        return page

    if whole:
        wire.rewrite("Query", without_a_chunk)
        view = await backend.read_view("t", ViewQuery(messages="none", runs="all"))
        assert len(view.runs) == 1
    async with opened() as fresh:
        beside = tools.wire(fresh)
        beside.rewrite("BatchGetItem", older)
        beside.faults.insert(0, ("BatchGetItem", lambda w, request, _: w.inner.send(request)))
        found = await tools.backend(fresh).find_run("r")
        assert found.model_extra == {"own": "x" * 900_000}
        assert beside.faults == []


async def test_a_thread_that_changes_during_every_read_is_an_outage(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """Not an endless loop, and no wrong answer."""
    backend = tools.backend(persistence)
    await backend.commit_turn(tools.said("t", "a"))
    version = 1

    def torn(page: Any) -> Any:
        nonlocal version
        version += 1
        for item in page["Items"]:
            if item["sk"]["S"] == "h":
                item["version"]["N"] = str(version)
                item["live"]["S"] = "1-2"
        return page

    wire.rewrite("Query", torn, times=10)
    with pytest.raises(BackendUnavailable, match="during each of 10 reads"):
        await backend.read_view("t", ViewQuery())


# ----------------------------------------------------------------------- the server itself


async def test_a_commit_whose_answer_never_came_through_the_network(
    dynamodb_table: DynamoTable, tools: Any
) -> None:
    """On a real connection: the server has applied it, and the connection is reset."""
    with dynamodb_table.server.proxy() as proxy:
        async with open_persistence(dynamodb_table.url(proxy=proxy)) as persistence:
            backend = tools.backend(persistence)
            await backend.commit_turn(tools.said("t", "a"))
            proxy.lose_reply(b"HTTP/1.1 200")
            await backend.commit_turn(tools.said("t", "b", keep=1))
            assert proxy.losses == 1
            assert await numbers(persistence, tools) == [1, 2]
            proxy.cut()
            await backend.commit_turn(tools.said("t", "c", keep=2))
            assert await numbers(persistence, tools) == [1, 2, 3]


async def test_a_server_that_does_not_answer_is_unavailable_in_time(
    dynamodb_table: DynamoTable, tools: Any
) -> None:
    """The outcome is unknown; later calls work, and no request is counted as under way."""
    with dynamodb_table.server.proxy() as proxy:
        url = dynamodb_table.url(proxy=proxy)
        async with open_persistence(url, timeout=1) as persistence:
            backend = tools.backend(persistence)
            await persistence.stores.messages.load_thread("t")
            proxy.stall()
            with pytest.raises(BackendUnavailable, match="within 1") as caught:
                await backend.commit_turn(tools.said("t", "a"))
            assert caught.value.outcome_unknown
            proxy.flow()
            proxy.cut()
            await persistence.stores.messages.save_thread("t", messages(1))
            assert backend._table.busy == 0


async def test_a_server_that_refuses_connections_is_unavailable(
    dynamodb_table: DynamoTable, tools: Any
) -> None:
    with dynamodb_table.server.proxy() as proxy:
        async with open_persistence(dynamodb_table.url(proxy=proxy)) as persistence:
            proxy.refuse = True
            with pytest.raises(BackendUnavailable):
                await persistence.ping()
            proxy.refuse = False
            await persistence.ping()  # a failed set-up is tried again


async def test_a_server_that_was_killed(own_dynamodb: MotoProcess, tools: Any) -> None:
    """Away: a typed outage. Back without its data: there is no table, and the error says so."""
    async with open_persistence(own_dynamodb.url("chats"), timeout=20) as persistence:
        backend = tools.backend(persistence)
        await backend.commit_turn(tools.said("t", "a"))
        own_dynamodb.kill()
        with pytest.raises(BackendUnavailable):
            await backend.commit_turn(tools.said("t", "b", keep=1))
        own_dynamodb.start()
        with pytest.raises(SchemaOutOfDate, match="chatkeep migrate"):
            await backend.commit_turn(tools.said("t", "b", keep=1))
        await persistence.migrate()
        await backend.commit_turn(tools.said("t", "b", keep=1))
        assert await numbers(persistence, tools) == [1]


# ------------------------------------------------------------------------------ cancellation


@pytest.mark.parametrize("step", range(4))
async def test_a_caller_that_goes_away_leaves_a_whole_boundary(
    persistence: Persistence, wire: Any, tools: Any, step: int
) -> None:
    """Cancelled while the k-th request of a long commit is on its way: the call is finished
    before the caller goes on."""
    backend = tools.backend(persistence)
    operations = ["GetItem", "TransactWriteItems", "BatchWriteItem", "TransactWriteItems"]

    def pass_on(own: Any, request: Any, _operation: str) -> Any:
        return own.inner.send(request)

    if step == 3:
        wire.faults.append(("TransactWriteItems", pass_on))
    come, go = wire.hold(operations[step])
    commit = TurnCommit(
        commit_id=new_commit_id(),
        thread_id="t",
        splice=Splice(keep_through=0, tail=messages(120)),
    )
    work = asyncio.create_task(backend.commit_turn(commit))
    assert await asyncio.to_thread(come.wait, 30)
    work.cancel()
    await asyncio.sleep(0)
    assert not work.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert len(await persistence.stores.messages.load_thread("t")) == 120
    assert (await backend.commit_turn(commit)).replayed


async def test_after_the_end_every_call_says_so(opened: Any, tools: Any) -> None:
    """And a client that was passed in is as it was: neither closed nor reconfigured."""
    async with opened() as persistence:
        client = tools.backend(persistence)._source.get()
        config = vars(client.meta.config).copy()
        await persistence.migrate()
    with pytest.raises(StoreClosed):
        await persistence.stores.messages.load_thread("t")
    assert vars(client.meta.config) == config
    assert "ck_" in str(client.list_tables()["TableNames"])


async def test_a_client_that_was_made_here_is_closed(
    dynamodb_table: DynamoTable, tools: Any
) -> None:
    async with open_persistence(dynamodb_table.url()) as persistence:
        await persistence.ping()
        source = tools.backend(persistence)._source
        closed: list[bool] = []
        client = source.get()
        close = client.close
        client.close = lambda: (close(), closed.append(True))
    assert closed == [True]


async def test_a_lost_lease_is_found_out_by_drafts_and_renewals(
    persistence: Persistence, opened: Any, tools: Any
) -> None:
    """Taken over by another process: what this one remembers of the run does not help it."""
    backend = tools.backend(persistence)
    runs = persistence.stores.runs
    await runs.create_or_resume("r", "t", started_at=1, lease_token="old", lease_ms=-1)
    async with opened() as other:
        await other.stores.runs.create_or_resume("r", "t", started_at=1, lease_token="new")
        for call in (
            lambda: backend.save_draft("t", "r", messages(1), lease_token="old"),
            lambda: backend.renew_lease("t", "r", "old", 1000),
            lambda: runs.update("r", RunPatch(status="completed"), lease_token="old"),
        ):
            with pytest.raises(RunConflict) as caught:
                await call()
            assert caught.value.reason == "lease-lost"
        await tools.backend(other).save_draft("t", "r", messages(2), lease_token="new")
    view = await backend.read_view("t", ViewQuery(drafts=True))
    assert len(view.drafts[0].messages) == 2


async def test_a_lease_that_was_extended_meanwhile_is_not_taken_over(
    persistence: Persistence, opened: Any, wire: Any, tools: Any
) -> None:
    """The taker has read that it has run out; its driver extends it before the write arrives."""
    runs = persistence.stores.runs
    await runs.create_or_resume("r", "t", started_at=1, lease_token="old", lease_ms=-1)
    async with opened() as other:
        come, go = wire.hold("TransactWriteItems")
        work = asyncio.create_task(
            tools.backend(persistence).commit_turn(
                TurnCommit(
                    commit_id=new_commit_id(),
                    thread_id="t",
                    run_id="r",
                    run=RunStart(run_id="r", started_at=1, lease_token="new"),
                )
            )
        )
        assert await asyncio.to_thread(come.wait, 30)
        await tools.backend(other).renew_lease("t", "r", "old", 60_000)
        go.set()
        with pytest.raises(RunConflict) as caught:
            await work
        assert caught.value.reason == "running"


async def test_an_odd_reason_names_the_row(persistence: Persistence, wire: Any, tools: Any) -> None:
    wire.cancel([None, "ValidationError"])
    with pytest.raises(StoreError, match=r"new row: ValidationError \(injected ValidationError\)"):
        await tools.backend(persistence).commit_turn(tools.said("t", "a"))
