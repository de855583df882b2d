"""The lease of a run: renewed while it streams, lost when somebody else drives it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from ag_ui.core import RunFinishedEvent

from chatkeep.engine import ChatMiddleware
from chatkeep.engine.middleware import ChatContext
from chatkeep.persistence import DETACHABLE, PERSISTENCE_COMPLETION, RunCompletion
from chatkeep.records import RunPatch

pytestmark = pytest.mark.anyio


class Watch(ChatMiddleware):
    """Remembers the completion of every run."""

    requires = (PERSISTENCE_COMPLETION,)

    def __init__(self) -> None:
        self.completions: list[RunCompletion] = []

    async def setup(self, ctx: ChatContext) -> None:
        self.completions.append(ctx.get(PERSISTENCE_COMPLETION))


class Detachable(ChatMiddleware):
    provides = (DETACHABLE,)

    async def setup(self, ctx: ChatContext) -> None:
        ctx.provide(DETACHABLE, value=True)


def tasks() -> list[str]:
    return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("chatkeep")]


async def test_the_lease_is_renewed_while_the_run_streams_and_not_after(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=lab.middleware(lease_ms=30))
    await model.began.wait()
    first = (await lab.run("r1")).lease.until
    await lab.until(lambda: lab.faults.applied["renew_lease"] >= 3)
    assert (await lab.run("r1")).lease.until > first
    model.go.set()
    await task
    renewals = lab.faults.calls["renew_lease"]
    await asyncio.sleep(0.05)
    assert lab.faults.calls["renew_lease"] == renewals
    assert tasks() == []


async def test_a_short_run_renews_nothing(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"))
    assert lab.faults.calls["renew_lease"] == 0
    assert tasks() == []


async def test_a_lost_lease_stops_the_run_and_it_writes_nothing_more(lab: Any, kit: Any) -> None:
    model, watch = kit.Paced(), Watch()
    middleware = lab.middleware(lease_ms=30)
    task = lab.start(kit.user("u1"), adapter=model, middleware=[middleware, watch])
    await model.began.wait()
    # Its process hung, and another driver has taken the run over: in one step here, so that no
    # renewal can come in between.
    lease = (await lab.run("r1")).lease
    theirs = lease.model_copy(update={"token": "theirs", "until": lease.until + 60_000})
    await lab.persistence.stores.runs.update("r1", RunPatch(lease=theirs))
    events = await task
    assert events[-1].outcome.type == "cancelled"
    assert await lab.ids() == ["u1"]
    run = await lab.run("r1")
    assert (run.status, run.lease.token) == ("running", "theirs")
    (completion,) = watch.completions
    assert await completion.wait() == "failed"
    assert completion.error.reason == "lease-lost"
    assert middleware.counters["leases_lost"] == 1


async def test_a_renewal_that_fails_for_want_of_a_database_is_tried_again(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced()
    middleware = lab.middleware(lease_ms=30)
    task = lab.start(kit.user("u1"), adapter=model, middleware=middleware)
    await model.began.wait()
    lab.faults.refuse("renew_lease", times=2)
    await lab.until(lambda: lab.faults.applied["renew_lease"] > 0)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunFinishedEvent)
    assert middleware.counters["lease_failures"] == 2
    assert (await lab.run("r1")).status == "completed"


async def test_a_recorded_wish_to_cancel_stops_the_run(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, middleware=lab.middleware(lease_ms=30))
    await model.began.wait()
    await lab.persistence.stores.runs.update("r1", RunPatch(cancel_requested=True))
    events = await task
    assert events[-1].outcome.type == "cancelled"
    assert (await lab.run("r1")).status == "aborted"


async def test_a_dropped_stream_ends_its_run(lab: Any, kit: Any) -> None:
    from chatkeep.engine import chat

    model = kit.Paced()
    stream = chat(
        adapter=model,
        messages=[kit.user("u1")],
        thread_id="t1",
        run_id="r1",
        middleware=[lab.middleware(lease_ms=30)],
    )
    await anext(stream)
    await model.said.wait()
    del stream
    gc.collect()
    await lab.until(lambda: not tasks())
    assert (await lab.run("r1")).status == "aborted"
    assert tasks() == []


# --------------------------------------------------------------- the decision on abort


async def test_a_viewer_who_leaves_a_detachable_run_ends_nothing(lab: Any, kit: Any) -> None:
    model, watch = kit.Paced(), Watch()
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=[Detachable(), lab.middleware(), watch]
    )
    await model.said.wait()
    writes = lab.faults.applied["commit_turn"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = await lab.run("r1")
    assert run.status == "running"
    assert run.finished_at is None
    assert lab.faults.applied["commit_turn"] == writes
    assert await watch.completions[0].wait() == "detached"


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_cancel_ends_a_detachable_run(lab: Any, kit: Any, recorded: bool) -> None:
    from chatkeep.engine import CANCEL_REQUESTED, AbortSignal

    model, watch, signal = kit.Paced(), Watch(), AbortSignal()
    task = lab.start(
        kit.user("u1"),
        adapter=model,
        middleware=[Detachable(), lab.middleware(), watch],
        abort=signal,
    )
    await model.said.wait()
    if recorded:
        await lab.persistence.stores.runs.update("r1", RunPatch(cancel_requested=True))
        signal.abort("gone")
    else:
        signal.abort(CANCEL_REQUESTED)
    await task
    assert (await lab.run("r1")).status == "aborted"
    assert await watch.completions[0].wait() == "aborted"


async def test_a_cancel_flag_that_cannot_be_read_counts_as_unset(lab: Any, kit: Any) -> None:
    model, middleware = kit.Paced(), lab.middleware()
    task = lab.start(kit.user("u1"), adapter=model, middleware=[Detachable(), middleware])
    await model.said.wait()
    lab.faults.refuse("read_view", times=9)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lab.faults.heal()
    assert (await lab.run("r1")).status == "running"
    assert middleware.counters["cancel_read_failures"] == 1


# --------------------------------------------------------------------------- completion


async def test_completion_settles_after_the_last_write(lab: Any, kit: Any) -> None:
    model, watch = kit.Paced(), Watch()
    task = lab.start(kit.user("u1"), adapter=model, middleware=[lab.middleware(), watch])
    await model.began.wait()
    (completion,) = watch.completions
    assert completion.outcome is None
    lab.faults.stall("commit_turn", seconds=0.02)
    model.go.set()
    assert await completion.wait() == "completed"
    assert (await lab.run("r1")).status == "completed"
    assert completion.error is None
    await task


async def test_completion_carries_the_runs_own_error(lab: Any, kit: Any) -> None:
    watch = Watch()
    model = kit.Paced(error=RuntimeError("the run's own"))
    task = lab.start(kit.user("u1"), adapter=model, middleware=[lab.middleware(), watch])
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=99)  # the write that records it fails as well
    model.go.set()
    await task
    (completion,) = watch.completions
    assert await completion.wait() == "failed"
    assert str(completion.error) == "the run's own"


async def test_completion_of_a_refused_run_is_failed(lab: Any, kit: Any) -> None:
    watch = Watch()
    await lab.turn(kit.user("u1"), run_id="r1", middleware=[lab.middleware(), watch])
    await lab.turn(kit.user("u1"), run_id="r1", middleware=[lab.middleware(), watch])
    assert [await c.wait() for c in watch.completions] == ["completed", "failed"]


async def test_a_middleware_in_front_is_told_to_stand_behind(lab: Any, kit: Any) -> None:
    events = await lab.turn(kit.user("u1"), middleware=[Watch(), lab.middleware()])
    assert "persistence-completion" in kit.terminal(events).message
