"""Stores that refuse, stall, lose replies or die, at every moment of a turn."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

import chatkeep.persistence.committer as committer
from chatkeep.errors import BackendUnavailable
from chatkeep.memory import memory_persistence
from chatkeep.testkit.faults import Crashed

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "OUTAGE_PAUSES", (0.0, 0.0, 0.0))


async def test_a_store_that_is_down_at_the_read_fails_the_run_before_the_model(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced(waits=False)
    lab.faults.refuse("read_view", times=2)
    events = await lab.turn(kit.user("u1"), adapter=model)
    assert kit.terminal(events).code == "backend-unavailable"
    assert model.requests == []
    assert await lab.stored() == []


async def test_a_connection_that_died_while_idle_costs_a_second_read(lab: Any, kit: Any) -> None:
    lab.faults.refuse("read_view")
    assert isinstance(kit.terminal(await lab.turn(kit.user("u1"))), RunFinishedEvent)
    assert lab.faults.log == ["read_view", "read_view", "commit_turn", "commit_turn"]


async def test_an_outage_in_the_middle_of_a_merge_is_waited_out(lab: Any, kit: Any) -> None:
    first, second = kit.Paced(), kit.Paced(waits=False)
    task = lab.start(kit.user("uA"), adapter=first)
    await first.began.wait()
    await lab.turn(kit.user("uB"), adapter=second)
    lab.faults.refuse("read_view", times=2)
    first.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"] * 2


async def test_a_start_that_cannot_write_the_question_still_writes_the_run(
    lab: Any, kit: Any
) -> None:
    middleware = lab.middleware()
    model = kit.Paced()
    lab.faults.refuse("commit_turn", times=4)  # the first commit and its three repeats
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.began.wait()
    assert (await lab.run("r1")).status == "running"
    assert await lab.stored() == []
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert middleware.counters["start_failures"] == 1


async def test_a_run_that_cannot_be_recorded_does_not_run(lab: Any, kit: Any) -> None:
    model = kit.Paced(waits=False)
    lab.faults.refuse("commit_turn", times=8)
    events = await lab.turn(kit.user("u1"), adapter=model)
    assert kit.terminal(events).code == "backend-unavailable"
    assert model.requests == []


async def test_a_question_whose_start_failed_is_kept_when_the_run_fails(lab: Any, kit: Any) -> None:
    lab.faults.refuse("commit_turn", times=4)
    model = kit.Paced(waits=False, error=RuntimeError("no"))
    await lab.turn(kit.user("u1"), adapter=model)
    assert await lab.ids() == ["u1"]
    assert (await lab.run("r1")).status == "failed"


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
async def test_a_lost_reply_is_never_applied_twice(lab: Any, kit: Any, lost: int) -> None:
    lab.faults.lose_reply("commit_turn", times=lost)
    events = await lab.turn(kit.user("u1"))
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]
    assert (await lab.run("r1")).status == "completed"


async def test_a_finish_waits_out_a_short_outage(lab: Any, kit: Any) -> None:
    middleware = lab.middleware()
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=9)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert middleware.counters["retries"] == 2


async def test_a_finish_that_was_applied_but_never_heard_of_is_a_success(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    lab.faults.lose_reply("commit_turn", times=16)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert (await lab.run("r1")).status == "completed"


async def test_a_run_whose_start_was_never_heard_of_is_ended(lab: Any, kit: Any) -> None:
    lab.faults.lose_reply("commit_turn", times=8)
    events = await lab.turn(kit.user("u1"))
    assert isinstance(kit.terminal(events), RunErrorEvent)
    assert (await lab.run("r1")).status == "failed"
    assert await lab.ids() == ["u1"]


async def test_a_finish_that_cannot_be_written_ends_the_run_as_failed(lab: Any, kit: Any) -> None:
    told: list[tuple[str, BaseException]] = []
    middleware = lab.middleware(on_persistence_error=lambda *what: told.append(what))
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=16)
    model.go.set()
    events = await task
    end = kit.terminal(events)
    assert isinstance(end, RunErrorEvent)
    assert end.code == "backend-unavailable"
    # The run's end could be written a moment later, and the answer with it.
    assert await lab.said() == ["user: hello", "assistant: one two"]
    run = await lab.run("r1")
    assert (run.status, run.error.code) == ("failed", "backend-unavailable")
    assert [phase for phase, _ in told] == ["finish"]
    assert isinstance(told[0][1], BackendUnavailable)


async def test_a_store_that_stays_away_leaves_a_run_for_the_sweep(
    lab: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    middleware = lab.middleware()
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=1000)
    lab.faults.refuse("read_view", times=1000)
    model.go.set()
    with caplog.at_level(logging.WARNING, "chatkeep.persistence"):
        assert isinstance(kit.terminal(await task), RunErrorEvent)
    lab.faults.heal()
    assert (await lab.run("r1")).status == "running"
    assert middleware.counters["finish_failures"] == 3
    assert "finish: a write of run r1 failed" in caplog.text


async def test_an_alarm_that_raises_breaks_nothing(lab: Any, kit: Any) -> None:
    def broken(phase: str, error: BaseException) -> None:
        raise RuntimeError("the alarm is broken")

    lab.faults.refuse("commit_turn", times=4)
    events = await lab.turn(kit.user("u1"), middleware=lab.middleware(on_persistence_error=broken))
    assert isinstance(kit.terminal(events), RunFinishedEvent)


@pytest.mark.parametrize("writes", [0, 1, 2])
async def test_a_process_that_dies_after_any_write_leaves_all_or_nothing(
    kit: Any, writes: int
) -> None:
    now = 1_000_000
    lab = kit.Lab(memory_persistence(clock=lambda: now))
    lab.faults.crash_after(writes, "commit_turn")
    task = lab.start(kit.user("u1"))
    with pytest.raises(Crashed):
        await task
    lab.faults.heal()
    run = await lab.run("r1")
    state = (run.status if run else None, [m["role"] for m in await lab.stored()])
    assert (
        state
        == [
            (None, []),
            ("running", ["user"]),
            ("completed", ["user", "assistant"]),
        ][writes]
    )
    now += 30_001
    await lab.persistence.maintenance().sweep()
    if writes == 1:
        run = await lab.run("r1")
        assert (run.status, run.error.code) == ("failed", "worker_lost")
    # The thread is as good as new.
    events = await lab.turn(kit.user("u2"), run_id="next")
    assert isinstance(kit.terminal(events), RunFinishedEvent)


@pytest.mark.parametrize("at", range(1, 8))
async def test_a_reader_that_leaves_at_any_event_leaves_an_ended_run(
    lab: Any, kit: Any, at: int
) -> None:
    from chatkeep.engine import chat
    from chatkeep.testkit.scripted import ScriptedModel

    stream = chat(
        adapter=ScriptedModel(),
        messages=[kit.user("u1")],
        thread_id="t1",
        run_id="r1",
        middleware=[lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)],
    )
    count = 0
    async for _ in stream:
        count += 1
        if count == at:
            break
    await stream.aclose()
    run = await lab.run("r1")
    rows = [m["role"] for m in await lab.stored()]
    if run is None:
        assert rows == []
    else:
        assert run.terminal
        assert run.finished_at is not None
        assert rows in (["user"], ["user", "assistant"])
    (backend,) = lab.persistence.backends
    from chatkeep.stores import ViewQuery

    assert (await backend.read_view("t1", ViewQuery(drafts=True))).drafts == []
    assert [t for t in asyncio.all_tasks() if (t.get_name() or "").startswith("chatkeep")] == []


@pytest.mark.parametrize("moment", [1, 2])
async def test_a_cancelled_reader_does_not_stop_a_commit_half_way(
    lab: Any, kit: Any, moment: int
) -> None:
    model = kit.Paced(waits=False)
    lab.faults.stall("commit_turn", seconds=0.05, times=9)
    task = lab.start(kit.user("u1"), adapter=model)
    await lab.until(lambda: lab.faults.calls["commit_turn"] == moment)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = await lab.run("r1")
    if moment == 1:
        assert run.status == "aborted"
        assert await lab.ids() == ["u1"]
    else:
        assert run.status == "completed"
        assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]
