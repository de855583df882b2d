"""What boundaries, reads and look-ups cost: requests, rows and bytes, counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
from chatkeep.stores import (
    ActivitiesWrite,
    InterruptAnswer,
    RunStart,
    Splice,
    TurnCommit,
    ViewQuery,
)
from chatkeep_dynamodb.items import from_wire, item_size
from chatkeep_dynamodb.state import Place

pytestmark = pytest.mark.anyio


def message(name: str, text: str = "hello") -> Any:
    return {"id": name, "role": "user", "content": text}


def commit(**parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id="t", **parts)


def transaction(wire: Any) -> list[dict[str, Any]]:
    """The rows of the transaction that was sent last: its verb, and its attributes."""
    sent = [body for operation, body in wire.sent if operation == "TransactWriteItems"][-1]
    rows: list[dict[str, Any]] = []
    for action in sent["TransactItems"]:
        ((verb, part),) = action.items()
        rows.append({"verb": verb, **from_wire(part.get("Item") or part["Key"])})
    return rows


def kinds(wire: Any) -> list[str]:
    return sorted(row.get("kind", row["sk"].partition("/")[0]) for row in transaction(wire))


async def seeded(persistence: Persistence, tools: Any, count: int) -> Any:
    tail = [message(f"m{n}") for n in range(count)]
    return await tools.backend(persistence).commit_turn(
        commit(splice=Splice(keep_through=0, tail=tail))
    )


async def test_a_turn_is_one_load_and_one_transaction_for_each_boundary(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """The load is a query, and the look-up of the new run beside it; what it brought is enough
    for the boundaries."""
    backend = tools.backend(persistence)
    await seeded(persistence, tools, 5)
    backend._memory.forget(backend.scope, "t")
    wire.clear()
    view = await backend.read_view("t", ViewQuery(run_id="r"))
    assert wire.counts == {"Query": 1, "GetItem": 1}
    wire.clear()
    started = await backend.commit_turn(
        commit(
            run_id="r",
            run=RunStart(run_id="r", started_at=1, lease_token="k"),
            splice=Splice(keep_through=view.newest, tail=[message("q")], expected=view.revision),
        )
    )
    assert wire.counts == {"TransactWriteItems": 1}
    assert kinds(wire) == ["head", "lookup", "message", "run"]
    wire.clear()
    await backend.save_draft("t", "r", [message("d")], lease_token="k")
    assert wire.counts == {"TransactWriteItems": 1}
    wire.clear()
    await backend.renew_lease("t", "r", "k", 30_000)
    assert wire.counts == {"UpdateItem": 1}
    wire.clear()
    await backend.commit_turn(
        commit(
            run_id="r",
            lease_token="k",
            run=RunPatch(status="completed", finished_at=2),
            splice=Splice(
                keep_through=started.newest, tail=[message("a")], expected=started.revision
            ),
            drop_draft=True,
        )
    )
    assert wire.counts == {"TransactWriteItems": 1}
    assert kinds(wire) == ["d", "head", "message", "run"]


async def test_a_decision_is_one_transaction_a_boundary(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """Pause, and the answer in the next post: nothing is read that the load has brought."""
    backend = tools.backend(persistence)
    asked = InterruptRecord(interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={})
    await backend.commit_turn(
        commit(run_id="r", run=RunStart(run_id="r", started_at=1, lease_token="k"))
    )
    wire.clear()
    await backend.commit_turn(
        commit(
            run_id="r",
            lease_token="k",
            run=RunPatch(status="interrupted"),
            interrupts=[asked],
        )
    )
    assert wire.counts == {"TransactWriteItems": 1}
    backend._memory.forget(backend.scope, "t")
    wire.clear()
    await backend.read_view("t", ViewQuery(run_id="r"))
    # The head names what waits; it is read in one more request.
    assert wire.counts == {"Query": 1, "GetItem": 1, "BatchGetItem": 1}
    wire.clear()
    await backend.commit_turn(
        commit(
            run_id="r",
            answers=[InterruptAnswer(interrupt_id="i", response=True)],
            run=RunPatch(status="completed"),
        )
    )
    assert wire.counts == {"TransactWriteItems": 1}


@pytest.mark.parametrize("length", [10, 1500])
async def test_a_boundary_costs_the_same_in_a_long_thread(
    persistence: Persistence, wire: Any, tools: Any, length: int
) -> None:
    """Bytes and rows are those of what is new."""
    backend = tools.backend(persistence)
    known = await seeded(persistence, tools, length)
    wire.clear()
    await backend.commit_turn(
        commit(
            splice=Splice(keep_through=known.newest, tail=[message("q")], expected=known.revision)
        )
    )
    assert wire.counts == {"TransactWriteItems": 1}
    assert kinds(wire) == ["head", "message"]
    assert wire.bytes_sent < 2_500
    sizes = [item_size(row) - len("verbPut") for row in transaction(wire)]
    assert sum(sizes) < 1_200


async def test_saving_a_list_again_costs_what_is_new(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    stores = persistence.stores
    rows = [message(f"m{n}") for n in range(60)]
    await stores.messages.save_thread("t", rows)
    wire.clear()
    await stores.messages.save_thread("t", rows)
    assert wire.counts == {"GetItem": 1}
    wire.clear()
    await stores.messages.save_thread("t", [*rows, message("new")])
    assert wire.counts == {"TransactWriteItems": 1}


async def test_a_memory_that_is_out_of_date_costs_one_request(
    persistence: Persistence, opened: Any, wire: Any, tools: Any
) -> None:
    """Another process has written: the refused transaction brings the head with it."""
    backend = tools.backend(persistence)
    await seeded(persistence, tools, 2)
    async with opened() as other:
        await tools.backend(other).commit_turn(tools.said("t", "theirs", keep=9))
    wire.clear()
    receipt = await backend.commit_turn(tools.said("t", "mine", keep=9))
    assert wire.counts == {"TransactWriteItems": 2}
    assert receipt.numbers == [4]


async def test_a_reload_is_one_query_whatever_is_asked(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """Messages, UI rows and drafts sort side by side."""
    backend = tools.backend(persistence)
    await seeded(persistence, tools, 5)
    row = ActivityRecord(id="a", activity_type="card", content={}, index=0)
    await backend.commit_turn(commit(activities=ActivitiesWrite(puts={0: row}, length=1)))
    wire.clear()
    view = await backend.read_view("t", ViewQuery(activities=True, drafts=True))
    assert wire.counts == {"Query": 1}
    assert (len(view.messages), len(view.activities)) == (5, 1)
    wire.clear()
    page = await backend.read_view("t", ViewQuery(limit=2))
    assert wire.counts == {"GetItem": 1, "Query": 1}
    assert page.numbers == [4, 5]
    assert wire.bytes_received < 4_000


async def test_pages_of_a_megabyte_are_followed(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """A thread of 3 MB comes in as many answers as it takes, and is whole."""
    stores = persistence.stores
    rows = [message(f"m{n}", f"{n}" + "x" * 100_000) for n in range(30)]
    await stores.messages.save_thread("t", rows)
    wire.clear()
    assert await stores.messages.load_thread("t") == rows
    assert wire.counts["Query"] == 4


async def test_many_messages_are_written_in_batches(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """A hundred do not fit one transaction: four batches of 25 go ahead of it, at once."""
    stores = persistence.stores
    rows = [message(f"m{n}") for n in range(100)]
    await stores.messages.save_thread("t", rows)
    counts = wire.counts
    assert counts["BatchWriteItem"] == 4
    assert counts["TransactWriteItems"] == 2
    assert await stores.messages.load_thread("t") == rows


async def test_a_request_under_way_blocks_no_other_work(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """boto3 blocks; the event loop does not."""
    come, go = wire.hold("GetItem")
    work = asyncio.create_task(persistence.stores.metadata.get("n", "k"))
    assert await asyncio.to_thread(come.wait, 30)
    for _ in range(50):
        await asyncio.sleep(0)
    assert await persistence.stores.metadata.get("n", "other") is None
    assert not work.done()
    go.set()
    assert await work is None


async def test_no_more_requests_are_under_way_than_there_are_threads(
    opened: Any, tools: Any
) -> None:
    """A limiter of its own: 40 reads at once are made 3 at a time."""
    async with opened(threads=3) as persistence:
        await persistence.migrate()
        wire = tools.wire(persistence)
        await asyncio.gather(*(persistence.stores.metadata.get("n", f"k{i}") for i in range(40)))
        assert 1 < wire.most_at_once <= 3


async def test_retention_reads_what_it_returns_and_not_all_that_is_due(
    persistence: Persistence, wire: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread an hour, the first twelve with a cut: the oldest come first."""
    hour = 0
    monkeypatch.setattr(Place, "now", lambda _: 1_700_000_000_000 + hour * 3_600_000)
    backend = tools.backend(persistence)
    for hour in range(24):
        await backend.commit_turn(tools.said(f"t{hour}", "q"))
        if hour < 12:
            await backend.commit_turn(tools.said(f"t{hour}", "other"))
    hour = 1000
    wire.clear()
    idle = await backend.list_idle(idle_ms=1, limit=2)
    assert [thread_id for _, thread_id in idle] == ["t0", "t1"]
    looked_up = wire.counts["GetItem"] + sum(
        len(part["Keys"])
        for operation, body in wire.sent
        if operation == "BatchGetItem"
        for part in body["RequestItems"].values()
    )
    assert looked_up <= 4 * 4
    wire.clear()
    cut = await backend.list_cut_threads(before=2_000_000_000_000, limit=1)
    assert [thread_id for _, thread_id in cut] == ["t0"]
    assert wire.counts == {"Query": 4}


async def test_children_of_many_runs_are_read_together(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """A query for each parent, and the runs in one request."""
    runs = persistence.stores.runs
    for parent in ("p1", "p2"):
        for n in range(3):
            await runs.create_or_resume(
                f"{parent}.{n}", f"subagent:{parent}.{n}", started_at=n, parent_run_id=parent
            )
    wire.clear()
    found = await runs.list_by_parent_runs(["p1", "p2", "p3"])
    assert wire.counts == {"Query": 3, "BatchGetItem": 1}
    assert [run.run_id for run in found["p2"]] == ["p2.0", "p2.1", "p2.2"]


async def test_a_run_is_found_in_two_reads(persistence: Persistence, wire: Any) -> None:
    runs = persistence.stores.runs
    await runs.create_or_resume("r", "t", started_at=1)
    wire.clear()
    assert (await runs.get("r")).thread_id == "t"
    assert wire.counts == {"GetItem": 1, "BatchGetItem": 1}
    wire.clear()
    assert await runs.get("unknown") is None
    assert wire.counts == {"GetItem": 1}


async def test_everything_that_gates_is_read_consistently(
    persistence: Persistence, wire: Any, tools: Any
) -> None:
    """No read of a turn is made from an index, or eventually consistent."""
    backend = tools.backend(persistence)
    await backend.commit_turn(
        commit(run_id="r", run=RunStart(run_id="r", started_at=1, lease_token="k"))
    )
    backend._memory.forget(backend.scope, "t")
    wire.clear()
    await backend.read_view(
        "t", ViewQuery(run_id="r", runs="all", interrupts="all", activities=True, drafts=True)
    )
    await backend.find_run("r")
    await backend.list_child_runs(["r"])
    assert len(wire.sent) > 4
    for operation, body in wire.sent:
        parts = body["RequestItems"].values() if operation == "BatchGetItem" else [body]
        assert all(part["ConsistentRead"] for part in parts), operation
        assert "IndexName" not in body
