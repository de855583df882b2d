"""Stored logs at their edges: refused events, shutdown, lost connections, two loops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import BaseEvent

from chatkeep import memory_persistence
from chatkeep.delivery import Delivery, DeliveryLog, RunKey, StoredLog
from chatkeep.engine import AbortSignal
from chatkeep.errors import (
    BackendUnavailable,
    CorruptRecord,
    RecordTooLarge,
    SchemaOutOfDate,
    StoreClosed,
)

from .conftest import finished, started, stream_of, text

KEY = RunKey(run_id="r")


async def _types(log: DeliveryLog) -> list[str]:
    return [json.loads(event.body)["type"] for event in await log.read(KEY)]


def _keepers() -> list[str]:
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith("chatkeep log of")]


@pytest.mark.anyio
async def test_a_batch_that_the_store_refuses_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is too large now is too large for ever: the terminal event must get past it."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept = backend._log_append

    async def append(run_id: str, token: str, number: int, bodies: Any, *rest: Any) -> None:
        if any(len(body) > 1000 for body in bodies):
            raise RecordTooLarge("an event", 1001, 1000)
        await kept(run_id, token, number, bodies, *rest)

    monkeypatch.setattr(backend, "_log_append", append)
    log = StoredLog(persistence)
    producer = await Delivery(log).start(
        stream_of(started(), text("x" * 2000), finished()), key=KEY, thread_id="t"
    )
    await producer.task
    assert (await _types(log))[-1] == "RUN_ERROR"


@pytest.mark.anyio
async def test_a_batch_that_is_sent_again_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trimmed of a log that is small enough."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, down = backend._log_append, True

    async def append(*arguments: Any) -> None:
        if down:
            raise BackendUnavailable("down", outcome_unknown=True)
        await kept(*arguments)

    monkeypatch.setattr(backend, "commit_retries", 0)
    log = StoredLog(persistence, max_run_bytes=6000)
    writer = await log.open(KEY, "t")
    await writer.append([text("a")] * 10)
    monkeypatch.setattr(backend, "_log_append", append)
    for _ in range(4):
        with pytest.raises(BackendUnavailable):
            await writer.append([text("x" * 3000)])
    down = False
    await writer.append([text("b")])
    await writer.close()
    found = await log.find(KEY)
    assert found is not None
    assert found.complete


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [CorruptRecord("a log", "odd"), SchemaOutOfDate("a log of a newer chatkeep")]
)
async def test_a_log_that_cannot_be_read_hinders_no_sweep(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It is logged and stays; the others are ended, and old ones go."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    log = StoredLog(persistence, keep_seconds=0)
    old = await log.open(RunKey(run_id="old"), "t")
    await old.close()
    for name in ("spoiled", "sound"):
        writer = await log.open(RunKey(run_id=name), "t")
        await writer.leave(wait_ms=1)
    kept = backend._log_take

    async def take(run_id: str, *rest: Any, **options: Any) -> Any:
        if run_id == "spoiled":
            raise error
        return await kept(run_id, *rest, **options)

    monkeypatch.setattr(backend, "_log_take", take)
    await asyncio.sleep(0.01)
    assert [run.key.run_id for run in await log.sweep()] == ["sound"]
    assert "'spoiled' cannot be ended" in caplog.text
    assert await log.find(RunKey(run_id="old")) is None
    assert await log.find(RunKey(run_id="spoiled")) is not None


@pytest.mark.anyio
async def test_a_writer_that_leaves_without_its_database_keeps_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or its log would never be lost, and nobody would tell its viewers."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]

    async def append(*_: Any) -> None:
        raise BackendUnavailable("down")

    monkeypatch.setattr(backend, "_log_append", append)
    writer = await StoredLog(persistence).open(KEY, "t")
    with pytest.raises(BackendUnavailable):
        await writer.leave(wait_ms=1000)
    await asyncio.sleep(0)
    assert _keepers() == []


@pytest.mark.anyio
async def test_a_close_that_is_cancelled_keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was still waiting for a renewal that hangs."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    hangs, go = asyncio.Event(), asyncio.Event()

    async def append(*_: Any) -> None:
        hangs.set()
        await go.wait()

    monkeypatch.setattr(backend, "_log_append", append)
    writer = await StoredLog(persistence, lease_ms=30).open(KEY, "t")
    await hangs.wait()
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    go.set()
    await asyncio.wait({closing})
    await asyncio.sleep(0.05)
    assert _keepers() == []


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_out_of_sight_has_a_terminal_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, down = backend._log_append, True
    unseen = asyncio.Event()

    async def append(*arguments: Any) -> None:
        if down:
            raise BackendUnavailable("down")
        await kept(*arguments)

    async def work() -> AsyncIterator[BaseEvent]:
        yield started()
        await asyncio.sleep(0.02)
        yield text("a")
        unseen.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(backend, "commit_retries", 0)
    monkeypatch.setattr(backend, "_log_append", append)
    log = StoredLog(persistence)
    producer = await Delivery(log).start(work(), key=KEY, thread_id="t")
    await unseen.wait()
    await asyncio.sleep(0.02)
    down = False
    await producer.abort()
    types = await _types(log)
    assert types[-1] == "RUN_ERROR"
    assert types.count("RUN_ERROR") == 1


@pytest.mark.anyio
async def test_a_hand_over_out_of_sight_leaves_the_end_to_whoever_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, down = backend._log_append, True
    unseen = asyncio.Event()

    async def append(*arguments: Any) -> None:
        if down:
            raise BackendUnavailable("down")
        await kept(*arguments)

    signal = AbortSignal()

    async def work() -> AsyncIterator[BaseEvent]:
        yield started()
        await asyncio.sleep(0.02)
        yield text("a")
        unseen.set()
        await signal.wait()
        yield finished()

    monkeypatch.setattr(backend, "commit_retries", 0)
    monkeypatch.setattr(backend, "_log_append", append)
    log = StoredLog(persistence)
    producer = await Delivery(log).start(work(), key=KEY, thread_id="t", abort=signal)
    await unseen.wait()
    await asyncio.sleep(0.02)
    down = False
    await producer.hand_over(wait_ms=60_000)
    assert "RUN_ERROR" not in await _types(log)
    found = await log.find(KEY)
    assert found is not None
    assert not found.finished


@pytest.mark.anyio
async def test_a_run_whose_log_opens_while_a_delivery_closes_is_driven_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The persistence is closed behind the delivery: nothing may be left running then."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, opens, go = backend._log_open, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any) -> Any:
        opens.set()
        await go.wait()
        return await kept(*arguments)

    monkeypatch.setattr(backend, "_log_open", slowly)
    log = StoredLog(persistence)
    delivery = Delivery(log)
    starting = asyncio.create_task(
        delivery.start(stream_of(started(), finished()), key=KEY, thread_id="t")
    )
    await opens.wait()
    closing = asyncio.create_task(delivery.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done()
    go.set()
    await closing
    assert (await starting).task.done()
    assert await _types(log) == ["RUN_STARTED", "RUN_FINISHED"]
    with pytest.raises(StoreClosed):
        await delivery.start(stream_of(started()), key=RunKey(run_id="late"), thread_id="t")


@pytest.mark.anyio
async def test_a_run_that_is_taken_over_in_its_own_process_is_still_known_there() -> None:
    """When its former producer ends, the new one can be stopped all the same."""
    delivery = Delivery(StoredLog(memory_persistence()))
    go, stop = asyncio.Event(), asyncio.Event()

    async def work(until: asyncio.Event) -> AsyncIterator[BaseEvent]:
        yield text("a")
        await until.wait()
        yield finished()

    former = await delivery.start(work(go), key=KEY, thread_id="t")
    await delivery.take_over(work(stop), key=KEY, thread_id="t")
    go.set()
    await former.task
    await asyncio.sleep(0)
    assert delivery.running == [KEY]
    assert await delivery.abort(KEY)
    await delivery.aclose()


def test_a_log_that_is_closed_serves_another_loop() -> None:
    """Test suites start an app again, each time in a loop of its own."""
    log = StoredLog(memory_persistence(), poll_seconds=0.01)

    async def serve(key: RunKey) -> list[str]:
        writer = await log.open(key, "t")

        async def watch() -> list[str]:
            batches = await log.follow(key)
            return [json.loads(event.body)["delta"] async for batch in batches for event in batch]

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.05)
        await writer.append([text("a")])
        await writer.close()
        async with asyncio.timeout(5):
            got = await watching
        await log.aclose()
        return got

    assert asyncio.run(serve(RunKey(run_id="1"))) == ["a"]
    assert asyncio.run(serve(RunKey(run_id="2"))) == ["a"]


@pytest.mark.anyio
async def test_an_end_whose_reply_was_lost_is_the_only_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent again as it was; no second terminal event comes behind it."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, failures = backend._log_append, 0

    async def append(run_id: str, token: str, number: int, bodies: Any, *rest: Any) -> None:
        nonlocal failures
        if not failures and any(b"RUN_FINISHED" in body for body in bodies):
            failures += 1
            raise BackendUnavailable("down", outcome_unknown=True)
        await kept(run_id, token, number, bodies, *rest)

    monkeypatch.setattr(backend, "commit_retries", 0)
    monkeypatch.setattr(backend, "_log_append", append)
    log = StoredLog(persistence)
    producer = await Delivery(log).start(stream_of(started(), finished()), key=KEY, thread_id="t")
    await producer.task
    assert failures == 1
    assert await _types(log) == ["RUN_STARTED", "RUN_FINISHED"]
    found = await log.find(KEY)
    assert found is not None
    assert found.finished


@pytest.mark.anyio
async def test_a_log_that_misses_its_end_is_not_closed_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lease runs out, and who looks then tells its viewers."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, down = backend._log_append, True

    async def append(*arguments: Any) -> None:
        if down:
            raise BackendUnavailable("down")
        await kept(*arguments)

    monkeypatch.setattr(backend, "commit_retries", 0)
    monkeypatch.setattr(backend, "_log_append", append)
    log = StoredLog(persistence, lease_ms=20)
    producer = await Delivery(log).start(stream_of(started(), finished()), key=KEY, thread_id="t")
    await producer.task
    down = False
    await asyncio.sleep(0.05)
    await log.sweep()
    assert (await _types(log))[-1] == "RUN_ERROR"


@pytest.mark.anyio
async def test_a_replay_waits_for_a_log_that_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A response that breaks off, or ends empty, is an error to a client."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, failures = backend._log_read, 0
    log = StoredLog(persistence)
    writer = await log.open(KEY, "t")
    await writer.append([text("a"), finished()])
    await writer.close()
    batches = await log.follow(KEY)

    async def read(*arguments: Any) -> Any:
        nonlocal failures
        if not failures:
            failures += 1
            raise BackendUnavailable("down")
        return await kept(*arguments)

    monkeypatch.setattr(backend, "_log_read", read)
    bodies = [json.loads(event.body) async for batch in batches for event in batch]
    assert failures == 1
    assert [body["type"] for body in bodies] == ["TEXT_MESSAGE_CONTENT", "RUN_FINISHED"]
    await log.aclose()


@pytest.mark.anyio
async def test_a_run_that_ends_by_itself_while_it_is_handed_over_has_ended() -> None:
    """Nobody claims it, so its viewers would wait for nothing."""
    signal = AbortSignal()

    async def work() -> AsyncIterator[BaseEvent]:
        yield started()
        await signal.wait()
        yield text("a")
        yield finished()

    log = StoredLog(memory_persistence())
    producer = await Delivery(log).start(work(), key=KEY, thread_id="t", abort=signal)
    await asyncio.sleep(0.02)
    await producer.hand_over(wait_ms=60_000)
    assert await _types(log) == ["RUN_STARTED", "TEXT_MESSAGE_CONTENT", "RUN_FINISHED"]
    found = await log.find(KEY)
    assert found is not None
    assert found.finished
