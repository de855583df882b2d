"""The delivery log in a database, and producers whose log is slow, out of reach or lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Any

import pytest
from ag_ui.core import BaseEvent, CustomEvent

from chatkeep import compose_persistence, define_persistence, memory_persistence
from chatkeep.delivery import Delivery, DeliveryLog, RunKey, StoredLog
from chatkeep.delivery._batch import Batcher
from chatkeep.errors import BackendUnavailable, CompositionError, InvalidValue, RunConflict
from chatkeep.logs import LogBackend, LogHead

from .conftest import finished, started, stream_of, text

pytestmark = pytest.mark.anyio
KEY = RunKey(run_id="r")


async def test_it_is_a_delivery_log() -> None:
    assert isinstance(StoredLog(memory_persistence()), DeliveryLog)


async def test_a_persistence_without_logs_is_refused_by_name_of_what_helps() -> None:
    """At construction: nobody finds out at the first join."""

    class Messages:
        async def load_thread(self, thread_id: str) -> list[Any]:
            return []

        async def save_thread(self, thread_id: str, messages: Sequence[Any]) -> None:
            """Keeps nothing."""

    with pytest.raises(CompositionError, match=r"a user's stores: no delivery log.*PostgreSQL"):
        StoredLog(define_persistence({"messages": Messages()}))


async def test_the_log_of_a_composed_persistence_is_where_its_runs_are() -> None:
    one, two = memory_persistence(), memory_persistence()
    mixed = compose_persistence(one, overrides={"runs": two.stores.runs})
    log = StoredLog(mixed)
    await (await log.open(KEY, "t")).close()
    assert await StoredLog(two).find(KEY) is not None
    assert await StoredLog(one).find(KEY) is None


async def test_nothing_runs_beside_a_closed_log() -> None:
    """Readers that are left end without an error; used again, it works again."""
    log = StoredLog(memory_persistence())
    writer = await log.open(KEY, "t")
    await writer.append([text("a")])

    async def watch() -> list[int]:
        return [len(batch) async for batch in await log.follow(KEY)]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.02)
    await log.aclose()
    await log.aclose()
    assert await watching == [1]
    assert [t for t in asyncio.all_tasks() if "log readers" in t.get_name()] == []
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.02)
    await writer.close()
    assert await watching == [1]
    await log.aclose()
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith("chatkeep log")] == []


# ------------------------------------------------------------------------------ batches


class Slow:
    """A writer whose appends wait for ``gate``; remembers the batches."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.batches: list[list[str]] = []
        self.closed = 0

    async def append(self, events: Sequence[BaseEvent]) -> list[str]:
        await self.gate.wait()
        for event in events:
            if getattr(event, "delta", "") == "bad":
                raise InvalidValue("$event", "is bad")
        self.batches.append([getattr(event, "delta", event.type.value) for event in events])
        return [""] * len(events)

    async def close(self) -> None:
        self.closed += 1

    async def leave(self) -> None:
        """Not used here."""


async def test_what_comes_while_an_append_is_under_way_goes_with_the_next() -> None:
    """Never more than 32, in order."""
    writer = Slow()
    batches = Batcher(writer)
    for i in range(40):
        await batches.put(text(str(i)))
        await asyncio.sleep(0)
    writer.gate.set()
    await batches.flush()
    assert [len(batch) for batch in writer.batches] == [1, 32, 7]
    assert list(chain.from_iterable(writer.batches)) == [str(i) for i in range(40)]


async def test_a_slow_log_slows_its_model_down() -> None:
    """So memory is bounded, however much a model says."""
    writer = Slow()
    said = 0

    async def talk() -> AsyncIterator[BaseEvent]:
        nonlocal said
        yield started()
        while said < 1000:
            said += 1
            yield text(str(said))
        yield finished()

    class Log:
        async def open(self, key: RunKey, thread_id: str) -> Slow:
            return writer

        async def aclose(self) -> None:
            """Nothing to do."""

    delivery = Delivery(Log())  # type: ignore[arg-type]
    producer = await delivery.start(talk(), key=KEY, thread_id="t")
    await asyncio.sleep(0.1)
    assert 250 < said < 260
    writer.gate.set()
    await producer.task
    assert sum(map(len, writer.batches)) == 1002
    assert writer.closed == 1


async def test_what_stands_before_an_event_that_is_none_is_published() -> None:
    writer = Slow()
    batches = Batcher(writer)
    for delta in ("a", "b", "bad", "c"):
        await batches.put(text(delta))
    writer.gate.set()
    with pytest.raises(InvalidValue):
        await batches.flush()
    assert list(chain.from_iterable(writer.batches)) == ["a", "b"]


# -------------------------------------------------------------------- a log out of reach


class Cut:
    """Makes the appends of a memory backend fail while ``down``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, applied: bool = False) -> None:
        self.down = False
        self.persistence = memory_persistence()
        backend: Any = self.persistence.backends[0]
        kept = backend._log_append

        async def append(*arguments: Any) -> None:
            if self.down:
                if applied:
                    await kept(*arguments)
                raise BackendUnavailable("down", outcome_unknown=True)
            await kept(*arguments)

        monkeypatch.setattr(backend, "_log_append", append)
        monkeypatch.setattr(type(backend), "commit_retries", 0)


async def events_of(log: DeliveryLog) -> list[dict[str, Any]]:
    return [json.loads(event.body) for event in await log.read(KEY)]


async def test_a_batch_whose_reply_was_lost_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next append sends it again first."""
    for applied in (True, False):
        cut = Cut(monkeypatch, applied=applied)
        log = StoredLog(cut.persistence)
        writer = await log.open(KEY, "t")
        await writer.append([text("a")])
        cut.down = True
        with pytest.raises(BackendUnavailable):
            await writer.append([text("b")])
        cut.down = False
        await writer.append([text("c"), text("d")])
        await writer.close()
        assert [event["delta"] for event in await events_of(log)] == ["a", "b", "c", "d"]


async def test_a_run_goes_on_without_its_log_and_viewers_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tools have had effects: it is driven to its end. No event is left out silently."""
    cut = Cut(monkeypatch)
    ran: list[int] = []
    up = asyncio.Event()

    async def work() -> AsyncIterator[BaseEvent]:
        yield started()
        for i in range(10):
            yield text(str(i))
            if i == 3:
                await asyncio.sleep(0.02)
                cut.down = True
            if i == 8:
                await up.wait()
            ran.append(i)
        yield finished()

    log = StoredLog(cut.persistence)
    delivery = Delivery(log)
    producer = await delivery.start(work(), key=KEY, thread_id="t")
    await asyncio.sleep(0.1)
    cut.down = False
    up.set()
    await producer.task
    assert ran == list(range(10))
    events = await events_of(log)
    deltas = [event["delta"] for event in events if "delta" in event]
    assert deltas == [str(i) for i in range(len(deltas))]
    assert 4 <= len(deltas) < 10
    assert (events[-1]["type"], events[-1]["code"]) == ("RUN_ERROR", "events-lost")
    assert "goes on without viewers" in caplog.text
    found = await log.find(KEY)
    assert found is not None
    assert found.finished


async def test_a_run_whose_log_stays_away_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The task ends, nothing is raised, and everything is said in the log of the process."""
    cut = Cut(monkeypatch)
    delivery = Delivery(StoredLog(cut.persistence))
    with caplog.at_level(logging.ERROR):
        cut.down = True
        producer = await delivery.start(stream_of(started(), finished()), key=KEY, thread_id="t")
        await producer.task
    assert producer.task.exception() is None
    assert "has no terminal event" in caplog.text
    await delivery.aclose()


async def test_a_superseded_producer_writes_no_more_into_the_log() -> None:
    """Whether its run may still be written is for the run's lease to decide."""
    persistence = memory_persistence()
    mine, theirs = StoredLog(persistence), StoredLog(persistence)
    go, ran = asyncio.Event(), []

    async def work() -> AsyncIterator[BaseEvent]:
        yield started()
        await go.wait()
        yield text("late")
        ran.append(1)
        yield finished()

    producer = await Delivery(mine).start(work(), key=KEY, thread_id="t")
    await asyncio.sleep(0.02)
    writer = await theirs.take_over(KEY)
    assert writer is not None
    await writer.append([text("theirs")])
    go.set()
    await producer.task
    assert ran == [1]
    await writer.append([finished()])
    await writer.close()
    types = [event["type"] for event in await events_of(theirs)]
    assert types == ["RUN_STARTED", "TEXT_MESSAGE_CONTENT", "RUN_FINISHED"]


async def test_an_event_that_is_no_json_fails_the_run_in_a_stored_log_too() -> None:
    log = StoredLog(memory_persistence())
    bad = CustomEvent(name="x", value=float("nan"))
    producer = await Delivery(log).start(
        stream_of(started(), bad, finished()), key=KEY, thread_id="t"
    )
    await producer.task
    events = await events_of(log)
    assert [event["type"] for event in events] == ["RUN_STARTED", "RUN_ERROR"]
    assert events[-1]["code"] == "invalid-value"


async def test_a_log_that_cannot_be_read_for_a_while_loses_its_readers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait, and go on."""
    persistence = memory_persistence()
    backend: Any = persistence.backends[0]
    kept, failures = backend._log_heads, 0

    async def heads(keys: Sequence[bytes]) -> dict[bytes, LogHead]:
        nonlocal failures
        if failures < 1:
            failures += 1
            raise BackendUnavailable("down")
        return await kept(keys)

    monkeypatch.setattr(backend, "_log_heads", heads)
    writer = await StoredLog(persistence).open(KEY, "t")
    reader = StoredLog(persistence, poll_seconds=0.01)

    async def watch() -> list[str]:
        batches = await reader.follow(KEY)
        return [json.loads(event.body)["delta"] async for batch in batches for event in batch]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.05)
    await writer.append([text("a")])
    await writer.close()
    async with asyncio.timeout(10):
        assert await watching == ["a"]
    assert failures == 1
    await reader.aclose()


async def test_a_conflict_names_the_thread_of_the_run() -> None:
    log = StoredLog(memory_persistence())
    await log.open(KEY, "t")
    with pytest.raises(RunConflict) as caught:
        await log.open(KEY, "t")
    assert caught.value.thread_id == "t"


def test_a_memory_backend_keeps_logs() -> None:
    assert isinstance(memory_persistence().backends[0], LogBackend)
