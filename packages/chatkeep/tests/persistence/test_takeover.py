"""Runs that go on in another driver: one claimant wins, nobody else writes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
)

from chatkeep import compose_persistence, define_run_store
from chatkeep.backends import Persistence
from chatkeep.delivery import Delivery, RunKey, StoredLog
from chatkeep.engine import AbortSignal, ChatContext, ChatMiddleware, ChatStream, chat
from chatkeep.errors import CompositionError, RunConflict
from chatkeep.persistence import DETACHABLE, claim_run, with_persistence
from chatkeep.records import RunPatch
from chatkeep.testkit.event_order import check_events

pytestmark = pytest.mark.anyio
BACKENDS = ("memory", "sqlite", "psycopg")
KEY = RunKey(run_id="r1")


class Detachable(ChatMiddleware):
    """Says that the run goes on elsewhere when its driver leaves."""

    name = "detachable"
    provides = (DETACHABLE,)

    async def setup(self, ctx: ChatContext) -> None:
        ctx.provide(DETACHABLE, value=True)


async def running(persistence: Persistence, *, lease_ms: int) -> Any:
    runs: Any = persistence.stores.runs
    run = await runs.create_or_resume(
        "r1", "t1", started_at=1, lease_token="old", lease_ms=lease_ms
    )
    await asyncio.sleep(0.005)
    return run


async def stored(persistence: Persistence) -> Any:
    runs: Any = persistence.stores.runs
    return await runs.get("r1")


async def test_of_many_claimants_one_gets_a_lost_run(persistence: Persistence) -> None:
    """And its former driver writes nothing any more."""
    await running(persistence, lease_ms=1)
    claims = await asyncio.gather(*(claim_run(persistence, "t1", "r1") for _ in range(10)))
    won = [claim for claim in claims if claim is not None]
    assert len(won) == 1
    (claim,) = won
    run = await stored(persistence)
    assert (run.status, run.driver_epoch, run.lease.token) == ("running", 1, claim.token)
    assert claim.run == run
    backend: Any = persistence.backends[0]
    with pytest.raises(RunConflict) as caught:
        await backend.renew_lease("t1", "r1", "old", 60_000)
    assert caught.value.reason == "lease-lost"
    with pytest.raises(RunConflict):
        await backend.save_draft("t1", "r1", [{"role": "user"}], lease_token="old")
    assert await claim_run(persistence, "t1", "r1") is None


async def test_a_run_that_was_handed_over_is_claimed_at_once(persistence: Persistence) -> None:
    """``detached_since`` is cleared by the same write; each driver counts."""
    await running(persistence, lease_ms=60_000)
    assert await claim_run(persistence, "t1", "r1") is None
    runs: Any = persistence.stores.runs
    for epoch in (1, 2):
        await runs.update("r1", RunPatch(detached_since=time.time_ns() // 1_000_000))
        claims = await asyncio.gather(*(claim_run(persistence, "t1", "r1") for _ in range(5)))
        assert sum(claim is not None for claim in claims) == 1
        run = await stored(persistence)
        assert (run.detached_since, run.driver_epoch) == (None, epoch)
        assert run.lease.until > time.time() * 1000


@pytest.mark.parametrize("case", ["unknown", "ended", "parked", "cancelled", "driven", "own"])
async def test_what_there_is_nothing_of_to_claim(persistence: Persistence, case: str) -> None:
    runs: Any = persistence.stores.runs
    patch: dict[str, Any] = {
        "ended": {"status": "failed"},
        "parked": {"status": "interrupted"},
        "cancelled": {"cancel_requested": True},
    }.get(case, {})
    if case == "own":  # driven by its application, without a lease: it never runs out
        await runs.create_or_resume("r1", "t1", started_at=1)
    elif case != "unknown":
        await running(persistence, lease_ms=60_000 if case == "driven" else 1)
    if patch:
        await runs.update("r1", RunPatch(**patch))
    before = await stored(persistence)
    assert await claim_run(persistence, "t1", "r1") is None
    assert await claim_run(persistence, "another thread", "r1") is None
    assert await stored(persistence) == before


async def test_runs_without_leases_cannot_be_claimed(persistence: Persistence) -> None:
    whole: Any = persistence.stores.runs
    own = define_run_store(
        create_or_resume=whole.create_or_resume,
        update=whole.update,
        get=whole.get,
        find_active_run=whole.find_active_run,
    )
    mixed = compose_persistence(persistence, overrides={"runs": own})
    with pytest.raises(CompositionError, match="keep no leases"):
        await claim_run(mixed, "t1", "r1")


# ----------------------------------------------------------------------- driving it on


def talk(persistence: Persistence, model: Any, **options: Any) -> ChatStream:
    more = options.pop("middleware", [])
    keep = with_persistence(persistence, lease_ms=60_000, claim=options.pop("claim", None))
    return chat(adapter=model, thread_id="t1", run_id="r1", middleware=[*more, keep], **options)


async def test_the_winner_drives_the_run_on_and_the_old_driver_is_refused(
    persistence: Persistence, kit: Any
) -> None:
    """A process that stood still for longer than its lease comes back: its answer is refused,
    that of the winner is the transcript."""
    old = kit.Paced(after=("old",))
    stream = talk(persistence, old, messages=[kit.user("u1")])
    late = asyncio.create_task(events_of(stream))
    await old.said.wait()
    backend: Any = persistence.backends[0]
    token = (await stored(persistence)).lease.token
    await backend.renew_lease("t1", "r1", token, 0)
    claim = await claim_run(persistence, "t1", "r1")
    assert claim is not None
    new = kit.Paced(waits=False, after=("new",))
    events = await events_of(talk(persistence, new, messages=[], claim=claim))
    assert isinstance(events[-1], RunFinishedEvent)
    old.go.set()
    end: Any = (await late)[-1]
    assert end.code == "run-conflict"
    run = await stored(persistence)
    assert (run.status, run.driver_epoch) == ("completed", 1)
    messages: Any = await persistence.stores.messages.load_thread("t1")  # type: ignore[union-attr]
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "hello"),
        ("assistant", "one new"),
    ]


async def test_a_claim_that_was_lost_drives_nothing(persistence: Persistence, kit: Any) -> None:
    """The model is not called."""
    await running(persistence, lease_ms=1)
    first = await claim_run(persistence, "t1", "r1", lease_ms=1)
    assert first is not None
    await asyncio.sleep(0.005)
    assert await claim_run(persistence, "t1", "r1") is not None
    model = kit.Paced(waits=False)
    end: Any = (await events_of(talk(persistence, model, messages=[kit.user("u1")], claim=first)))[
        -1
    ]
    assert end.code == "run-conflict"
    assert model.requests == []


async def events_of(stream: AsyncIterator[BaseEvent]) -> list[BaseEvent]:
    return [event async for event in stream]


async def test_a_run_is_handed_over_at_shutdown_and_goes_on_in_the_same_log(
    persistence: Persistence, kit: Any
) -> None:
    """A viewer at another worker sees one run, from its start to its end; nothing in it says
    that its first worker went away."""
    first = Delivery(StoredLog(persistence), drain=0)
    second = Delivery(StoredLog(persistence))
    model, signal = kit.Paced(message_id="m1"), AbortSignal()
    stream = talk(
        persistence, model, messages=[kit.user("u1")], middleware=[Detachable()], abort=signal
    )
    await first.start(stream, key=KEY, thread_id="t1", abort=signal, detachable=True)
    batches = await second.follow(KEY)

    async def watch() -> list[dict[str, Any]]:
        return [json.loads(event.body) async for batch in batches for event in batch]

    watching = asyncio.create_task(watch())
    await model.said.wait()
    await first.aclose()
    run = await stored(persistence)
    assert run.status == "running"
    assert run.detached_since is not None
    assert await second.sweep() == []
    assert await persistence.maintenance().sweep() == []
    claim = await claim_run(persistence, "t1", "r1")
    assert claim is not None
    assert (await stored(persistence)).detached_since is None

    async def rest() -> AsyncIterator[BaseEvent]:
        """What the application knows of the run: the model's stream goes on elsewhere."""
        now = time.time_ns() // 1_000_000
        yield TextMessageContentEvent(message_id="m1", delta="two", timestamp=now)
        yield TextMessageEndEvent(message_id="m1", timestamp=now)
        runs: Any = persistence.stores.runs
        await runs.update("r1", RunPatch(status="completed"), lease_token=claim.token)
        yield RunFinishedEvent(thread_id="t1", run_id="r1", timestamp=now)

    producer = await second.take_over(rest(), key=KEY, thread_id="t1")
    events = await watching
    await producer.task
    check_events(events)
    assert "".join(event.get("delta", "") for event in events) == "one two"
    assert (await stored(persistence)).status == "completed"
    await second.aclose()


async def test_a_run_that_cannot_go_on_elsewhere_is_aborted_at_shutdown(
    persistence: Persistence, kit: Any
) -> None:
    """It is stored, and its viewers are told."""
    delivery = Delivery(StoredLog(persistence), drain=0)
    model, signal = kit.Paced(), AbortSignal()
    stream = talk(persistence, model, messages=[kit.user("u1")], abort=signal)
    await delivery.start(stream, key=KEY, thread_id="t1", abort=signal)
    await model.said.wait()
    await delivery.aclose()
    assert (await stored(persistence)).status == "aborted"
    (*_, last) = await StoredLog(persistence).read(KEY)
    assert json.loads(last.body)["outcome"] == {"type": "cancelled"}
