"""How much is asked of a server: one script a boundary and a read, bytes of the new messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import Persistence, Scope
from chatkeep.engine import chat
from chatkeep.errors import InterruptConflict, RunConflict, ThreadConflict
from chatkeep.persistence import with_persistence
from chatkeep.records import ActivityRecord, InterruptRecord, RunPatch
from chatkeep.rules import new_commit_id
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
from chatkeep.testkit.played import PlayedModel
from chatkeep_redis import redis_persistence
from chatkeep_redis.read import PAGE_BYTES
from servers.redis import RedisSpace

pytestmark = pytest.mark.anyio


def commit(**parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=new_commit_id(), thread_id="t", **parts)


def start(run_id: str, **parts: Any) -> RunStart:
    return RunStart(run_id=run_id, started_at=1, lease_token=f"lease of {run_id}", **parts)


def user(message_id: str, content: str = "hello") -> Any:
    return {"id": message_id, "role": "user", "content": content}


async def test_every_boundary_of_a_turn_is_one_script(single: Persistence, tools: Any) -> None:
    """Start, interrupt, resume, regenerate, restore, error and finish, with everything they may
    carry; a refusal too, and a commit that is sent again."""
    backend = tools.backend(single)
    await backend.ping()
    asked = InterruptRecord(
        interrupt_id="i", run_id="r1", thread_id="t", requested_at=5, payload={"a": [1]}
    )
    row = ActivityRecord(id="a", activity_type="plan", content={"n": 1}, index=0)
    held = {"run_id": "r1", "lease_token": "lease of r1"}
    with tools.calls(single) as sent:

        async def one(given: TurnCommit) -> Any:
            sent.clear()
            try:
                return await backend.commit_turn(given)
            finally:
                assert sent == ["commit"]

        begin = commit(
            run_id="r1",
            run=start("r1", parent_run_id="p"),
            splice=Splice(keep_through=0, tail=[user("u")], expected=""),
        )
        first = await one(begin)
        assert (first.numbers, first.newest, first.created_run) == ([1], 1, True)
        assert (await one(begin)).replayed
        paused = await one(
            commit(
                **held,
                run=RunPatch(status="interrupted"),
                interrupts=[asked],
                splice=Splice(keep_through=1, tail=[user("a"), user("b")], expected=first.revision),
                activities=ActivitiesWrite(puts={0: row}, length=1),
                drop_draft=True,
            )
        )
        assert paused.run.status == "interrupted"
        await one(commit(run_id="r2", run=start("r2"), claims=[InterruptRef(interrupt_id="i")]))
        with pytest.raises(InterruptConflict):
            await one(commit(run_id="r3", run=start("r3"), claims=[InterruptRef(interrupt_id="i")]))
        cut = await one(
            commit(
                run_id="r2",
                lease_token="lease of r2",
                answers=[InterruptAnswer(interrupt_id="i", response=True)],
                splice=Splice(keep_through=1, tail=[user("c")], expected=paused.revision),
                run=RunPatch(status="completed", finished_at=2),
            )
        )
        assert cut.cut_id is not None
        await one(commit(cut_append=CutAppend(cut_id=cut.cut_id, messages=[user("late")])))
        with pytest.raises(ThreadConflict):
            await one(commit(splice=Splice(keep_through=0, tail=[], expected="other")))
        with pytest.raises(RunConflict):
            await one(commit(run_id="r2", run=start("r2")))
        await one(commit(restore=cut.cut_id))
        for call in (
            backend.read_view("t", ViewQuery(runs="all", interrupts="all", run_id="r1")),
            backend.save_draft("t", "r1", [user("d")]),
            backend.renew_lease("t", "r1", "lease of r1", 1000),
            backend.metadata_put("n", "t", 1, None),
            backend.list_cuts("t"),
        ):
            sent.clear()
            await call
            assert len(sent) == 1


async def test_a_turn_is_two_boundaries_and_one_load(single: Persistence, tools: Any) -> None:
    await single.ping()
    with tools.calls(single) as sent:
        stream = chat(
            adapter=PlayedModel([]),
            messages=[user("m1")],
            thread_id="t",
            run_id="r",
            middleware=[with_persistence(single)],
        )
        assert [event async for event in stream]
    assert sent.count("commit") == 2
    assert set(sent) <= {"view", "commit", "draft", "lease"}
    assert sent.count("view") <= 2


async def test_on_a_cluster_a_new_run_costs_one_trip_more_and_an_end_none(
    clustered: Persistence, tools: Any
) -> None:
    """Look-up and hints are written side by side, before the start. Then a boundary is one
    script, and what it leaves in the indexes is taken out after the last one."""
    backend = tools.backend(clustered)
    await backend.read_view("t", ViewQuery())
    with tools.calls(clustered) as sent:
        first = await backend.commit_turn(
            commit(
                run_id="r",
                run=start("r"),
                splice=Splice(keep_through=0, tail=[user("u")], expected=""),
            )
        )
        assert sent == ["owner", "index", "index", "index", "commit"]
        sent.clear()
        held = {"run_id": "r", "lease_token": "lease of r"}
        second = await backend.commit_turn(
            commit(
                **held,
                splice=Splice(keep_through=1, tail=[user("a")], expected=first.revision),
            )
        )
        assert sent == ["commit"]
        sent.clear()
        await backend.commit_turn(
            commit(
                **held,
                splice=Splice(keep_through=2, tail=[user("b")], expected=second.revision),
                run=RunPatch(status="completed"),
            )
        )
        assert sent == ["commit", "index"]


async def test_bytes_of_a_boundary_are_those_of_the_new_messages(
    redis_space: RedisSpace, tools: Any
) -> None:
    """The same with ten stored messages as with two thousand, on the wire and in the log."""
    with redis_space.server.proxy() as proxy:  # type: ignore[attr-defined]
        async with redis_persistence(redis_space.url(proxy=proxy)) as persistence:
            backend = tools.backend(persistence)
            costs: list[tuple[int, int]] = []
            for thread, count in (("small", 10), ("large", 2000)):
                rows = [user(f"m{n}", "x" * 1000) for n in range(count)]
                await persistence.stores.messages.save_thread(thread, rows)
                view = await backend.read_view(thread, ViewQuery(messages="none"))
                sent, received, log = (
                    proxy.bytes_sent,
                    proxy.bytes_received,
                    _log_bytes(redis_space),
                )
                await backend.commit_turn(
                    TurnCommit(
                        commit_id=new_commit_id(),
                        thread_id=thread,
                        splice=Splice(
                            keep_through=view.newest,
                            tail=[user("new", "y" * 4000)],
                            expected=view.revision,
                        ),
                    )
                )
                costs.append((proxy.bytes_sent - sent, _log_bytes(redis_space) - log))
                assert proxy.bytes_received - received < 500
            (small, large) = costs
            assert abs(small[0] - large[0]) < 50
            assert small[0] < 4000 + 2500
            if small[1]:
                assert abs(small[1] - large[1]) < 50
                assert small[1] < 4000 * 1.5 + 2000


def _log_bytes(space: RedisSpace) -> int:
    with space.server.client() as client:
        return int(client.info("persistence").get("aof_current_size", 0))


async def test_a_long_transcript_is_read_in_pages(persistence: Persistence, tools: Any) -> None:
    """Twenty thousand messages: no answer is much longer than a page, all are there, in order."""
    rows = [user(f"m{n}", "x" * 1000) for n in range(20_000)]
    await persistence.stores.messages.save_thread("t", rows)
    sizes: list[int] = []
    runner: Any = tools.space(persistence).runner
    send = runner._send

    async def measured(name: str, keys: Any, values: Any) -> Any:
        answer = await send(name, keys, values)
        if name in ("view", "page"):
            bodies = answer[7] if name == "view" else answer[1]
            sizes.append(sum(map(len, bodies)))
        return answer

    runner._send = measured
    found = await persistence.stores.messages.load_thread("t")
    del runner._send
    assert found == rows
    assert len(sizes) > 3
    assert max(sizes) < PAGE_BYTES + 200 * 1200
    # Pictures: a page holds as many as it has room for.
    long = [user(f"m{n}", "x" * 300_000) for n in range(60)]
    await persistence.stores.messages.save_thread("long", long)
    sizes.clear()
    runner._send = measured
    assert await persistence.stores.messages.load_thread("long") == long
    del runner._send
    assert max(sizes) < PAGE_BYTES + 400_000


@pytest.mark.parametrize("rewritten", [1, 100])
async def test_a_transcript_that_changes_while_it_is_read_is_of_one_moment(
    single: Persistence, tools: Any, monkeypatch: pytest.MonkeyPatch, rewritten: int
) -> None:
    """Replaced entries go; a reader that is behind reads again, and in the end at once."""
    monkeypatch.setattr("chatkeep_redis.read.PAGE_BYTES", 1000)
    backend = tools.backend(single)
    rows = [user(f"m{n}", "x" * 200) for n in range(1000)]
    await single.stores.messages.save_thread("t", rows)
    left = [rewritten]
    runner: Any = tools.space(single).runner
    send = runner._send

    async def meddled(name: str, keys: Any, values: Any) -> Any:
        answer = await send(name, keys, values)
        if name == "view" and left[0] and values[1] == b"bodies":
            left[0] -= 1
            other = [{**row, "content": f"v{left[0]}"} for row in rows]
            await backend.commit_turn(commit(splice=Splice(keep_through=0, tail=other)))
        return answer

    runner._send = meddled
    found: Any = await single.stores.messages.load_thread("t")
    del runner._send
    assert len(found) == 1000
    assert len({message["content"] for message in found}) == 1


async def test_lists_read_what_they_show(single: Persistence, tools: Any) -> None:
    """A page of a thousand threads is one read of the index and one of the heads on it."""
    for n in range(450):
        await single.stores.messages.save_thread(f"t{n}", [user("a")])
    with tools.calls(single) as sent:
        page = await single.list_threads(limit=10)
        assert len(page.threads) == 10
        assert sent == ["index", "heads"]
        sent.clear()
        next_page = await single.list_threads(limit=10, cursor=page.cursor)
        assert sent == ["index", "heads"]
    names = [info.thread_id for info in (*page.threads, *next_page.threads)]
    assert names == [f"t{n}" for n in range(449, 429, -1)]


async def test_a_scope_reads_nothing_of_the_others(single: Persistence, tools: Any) -> None:
    for n in range(30):
        other = single.scoped(Scope(tenant_id=f"other{n}"))
        await other.stores.messages.save_thread("t", [user("a")])
    mine = single.scoped(Scope(tenant_id="mine"))
    await mine.stores.messages.save_thread("t", [user("a")])
    found: list[int] = []
    runner: Any = tools.space(single).runner
    send = runner._send

    async def counted(name: str, keys: Any, values: Any) -> Any:
        if name == "heads":
            found.append(len(keys))
        return await send(name, keys, values)

    runner._send = counted
    assert len((await mine.list_threads()).threads) == 1
    del runner._send
    assert found == [1]


async def test_on_a_cluster_everything_before_a_start_is_sent_side_by_side(
    clustered: Persistence, tools: Any
) -> None:
    """Claim, parent and hints: one round trip, however many there are."""
    backend = tools.backend(clustered)
    await backend.read_view("t", ViewQuery())
    runner: Any = tools.space(clustered).runner
    send = runner._send
    together = asyncio.Barrier(5)

    async def meet(name: str, keys: Any, values: Any) -> Any:
        if name != "commit":
            async with asyncio.timeout(5):
                await together.wait()
        return await send(name, keys, values)

    runner._send = meet
    child = RunStart(run_id="c", started_at=1, lease_token="l", parent_run_id="p")
    await backend.commit_turn(commit(run_id="c", run=child))
    del runner._send
    assert [run.run_id for run in (await backend.list_child_runs(["p"]))["p"]] == ["c"]


async def test_on_a_cluster_a_start_under_a_taken_id_leaves_no_child(
    clustered: Persistence, redis_cluster_space: RedisSpace, tools: Any
) -> None:
    """Though its parent was told of it meanwhile."""
    backend = tools.backend(clustered)
    await clustered.stores.runs.create_or_resume("c", "other", started_at=1)
    child = RunStart(run_id="c", started_at=1, lease_token="l", parent_run_id="p")
    with pytest.raises(RunConflict):
        await backend.commit_turn(commit(run_id="c", run=child))
    assert not [key for key in redis_cluster_space.names() if "{p/" in key]
    assert (await backend.find_run("c")).thread_id == "other"
