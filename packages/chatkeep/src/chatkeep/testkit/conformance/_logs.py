"""The events of runs: written by one, read by many, in any process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ag_ui.core import BaseEvent, RunFinishedEvent, TextMessageContentEvent

from chatkeep.codec import decode
from chatkeep.delivery import (
    FROM_NOW,
    DeliveryLog,
    LoggedEvent,
    RunKey,
    StoredLog,
)
from chatkeep.errors import (
    CompositionError,
    EventsTrimmed,
    InvalidValue,
    RunConflict,
    UnknownOffset,
    UnknownRun,
)
from chatkeep.logs import LogBackend
from chatkeep.scope import Scope
from chatkeep.testkit.conformance._base import ConformanceCase, Ids, gather, left_out, outcomes

__all__ = ["TestDeliveryLog"]

_LONG = 600_000


def _text(delta: str) -> BaseEvent:
    return TextMessageContentEvent(message_id="m", delta=delta)


def _finished(run_id: str) -> BaseEvent:
    return RunFinishedEvent(thread_id="t", run_id=run_id)


def _deltas(events: list[LoggedEvent]) -> list[str]:
    return [decode(event.body, "event").get("delta", "(end)") for event in events]


async def _followed(log: DeliveryLog, key: RunKey, after: str = "-1") -> list[LoggedEvent]:
    return [event async for batch in await log.follow(key, after) for event in batch]


async def _some(log: DeliveryLog, key: RunKey, count: int) -> list[LoggedEvent]:
    """Follow until there are ``count`` events, then leave."""
    seen: list[LoggedEvent] = []
    batches: Any = await log.follow(key)
    async for batch in batches:
        seen += batch
        if len(seen) >= count:
            break
    await batches.aclose()
    return seen


class TestDeliveryLog(ConformanceCase):
    """Tier DeliveryLog: a :class:`~chatkeep.delivery.StoredLog` on the persistence. Two of them
    are two workers: they share nothing but the database."""

    @pytest.fixture
    def store(self, persistence: Any, declared: frozenset[str]) -> LogBackend:
        for backend in getattr(persistence, "backends", ()):
            if isinstance(backend, LogBackend) and "DeliveryLog" not in declared:
                return backend
        raise left_out("DeliveryLog", declared, "no backend keeps logs")

    @pytest.fixture
    async def worker(
        self, persistence: Any, store: LogBackend
    ) -> AsyncIterator[Callable[..., StoredLog]]:
        """Makes logs on the persistence; closes them."""
        logs: list[StoredLog] = []

        def make(**options: Any) -> StoredLog:
            logs.append(StoredLog(persistence, **({"lease_ms": _LONG} | options)))
            return logs[-1]

        yield make
        for log in logs:
            await log.aclose()

    @pytest.fixture
    def log(self, worker: Callable[..., StoredLog]) -> StoredLog:
        return worker()

    @pytest.fixture
    def other(self, worker: Callable[..., StoredLog]) -> StoredLog:
        return worker()

    @pytest.fixture
    def key(self, ids: Ids) -> RunKey:
        return RunKey(run_id=ids.run())

    async def test_another_worker_reads_what_was_published(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """In order, byte for byte, under the offsets that the writer was given."""
        writer = await log.open(key, "t")
        text = 'caf\u00e9 \U0001f600 \x00 "quoted"\r\n\u2028'
        offsets = await writer.append([_text("a"), _text(text)])
        offsets += await writer.append([_finished(key.run_id)])
        events = await other.read(key)
        assert [event.offset for event in events] == offsets
        assert len(set(offsets)) == 3
        assert _deltas(events) == ["a", text, "(end)"]
        assert all(b"\n" not in event.body and b"\r" not in event.body for event in events)
        assert events == await log.read(key)
        found = await other.find(key)
        assert found is not None
        assert (found.thread_id, found.finished, found.complete) == ("t", False, True)
        await writer.close()

    async def test_a_reader_begins_strictly_behind_its_offset(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """Behind the last there is nothing, and an offset of another run names nothing here."""
        writer = await log.open(key, "t")
        offsets = await writer.append([_text(str(i)) for i in range(5)])
        await writer.close()
        for i, offset in enumerate(offsets):
            assert _deltas(await other.read(key, offset)) == [str(n) for n in range(i + 1, 5)]
            assert await _followed(other, key, offset) == await other.read(key, offset)
        assert await other.read(key, FROM_NOW) == []
        for wrong in (
            offsets[-1][:-1] + "6",
            offsets[-1][:-1] + "0",
            offsets[0] + "0",
            f"{key.run_id}:1",
            f"{key.run_id}:00000000.1",
            f"another:{offsets[0].rpartition(':')[2]}",
            "",
            "x",
        ):
            with pytest.raises(UnknownOffset):
                await other.read(key, wrong)
            with pytest.raises(UnknownOffset):
                await other.follow(key, wrong)

    async def test_a_reader_in_another_worker_tails_to_the_end(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """Whenever it joins: every event once, in order, and the end."""
        writer = await log.open(key, "t")
        readers: list[asyncio.Task[list[LoggedEvent]]] = []
        for i in range(20):
            await writer.append([_text(str(i))])
            readers += [asyncio.create_task(_followed(where, key)) for where in (log, other)]
            await asyncio.sleep(0)
        live = asyncio.create_task(_followed(other, key, (await other.read(key))[9].offset))
        await asyncio.sleep(0.05)
        await writer.append([_finished(key.run_id)])
        await writer.close()
        expected = [*map(str, range(20)), "(end)"]
        for reader in readers:
            assert _deltas(await reader) == expected
        assert _deltas(await live) == expected[10:]

    async def test_a_reader_waits_while_the_run_lives(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """An empty log is no end, and a pause is none."""
        writer = await log.open(key, "t")
        reader = asyncio.create_task(_followed(other, key))
        await asyncio.sleep(0.3)
        assert not reader.done()
        await writer.append([_text("late")])
        assert _deltas(await _some(other, key, 1)) == ["late"]
        assert not reader.done()
        await writer.close()
        assert _deltas(await reader) == ["late"]

    async def test_fifty_appenders_at_once(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """Every batch is there once and together, no number twice, each offset where it says."""
        writer = await log.open(key, "t")
        watched = asyncio.create_task(_followed(other, key))
        batches = [[f"{i}.{n}" for n in range(1 + i % 3)] for i in range(50)]
        offsets = await gather([writer.append([_text(d) for d in batch]) for batch in batches])
        await writer.close()
        events = await other.read(key)
        assert await watched == events
        by_offset = {event.offset: decode(event.body, "event")["delta"] for event in events}
        assert len(by_offset) == len(events) == sum(map(len, batches))
        for batch, given in zip(batches, offsets, strict=True):
            assert [by_offset[offset] for offset in given] == batch
        found = _deltas(events)
        for batch in batches:
            start = found.index(batch[0])
            assert found[start : start + len(batch)] == batch

    async def test_fifty_runs_at_once(self, log: StoredLog, other: StoredLog, ids: Ids) -> None:
        """Logs have nothing to do with each other."""
        keys = [RunKey(run_id=ids.run()) for _ in range(50)]

        async def drive(i: int, key: RunKey) -> None:
            writer = await log.open(key, f"t{i}")
            for n in range(3):
                await writer.append([_text(f"{i}.{n}")])
            await writer.close()

        await gather([drive(i, key) for i, key in enumerate(keys)])
        for i, found in enumerate(await gather([_followed(other, key) for key in keys])):
            assert _deltas(found) == [f"{i}.{n}" for n in range(3)]

    async def test_of_fifty_that_open_one_run_one_writes(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """The others are told that it runs, whichever worker asks."""
        writers, refused = await outcomes([(log, other)[i % 2].open(key, "t") for i in range(50)])
        assert len(writers) == 1
        assert [getattr(error, "reason", error) for error in refused] == ["running"] * 49
        await writers[0].close()
        with pytest.raises(RunConflict, match="already ended"):
            await other.open(key, "t")
        with pytest.raises(RunConflict, match="another thread"):
            await other.open(key, "elsewhere")

    async def test_closing_is_idempotent_and_ends_appending(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """Nothing comes behind an end."""
        writer = await log.open(key, "t")
        await writer.append([_text("a")])
        await writer.close()
        await writer.close()
        with pytest.raises(RunConflict) as caught:
            await writer.append([_text("b")])
        assert caught.value.reason == "terminal"
        assert _deltas(await other.read(key)) == ["a"]
        found = await other.find(key)
        assert found is not None
        assert found.finished

    async def test_a_superseded_writer_appends_nothing(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """Nor does it close. Numbers go on where it stopped, and a viewer sees one log."""
        first = await log.open(key, "t")
        await first.append([_text("a")])
        watched = [asyncio.create_task(_followed(where, key)) for where in (log, other)]
        await asyncio.sleep(0.05)
        second = await other.take_over(key)
        assert second is not None
        with pytest.raises(RunConflict) as caught:
            await first.append([_text("lost")])
        assert caught.value.reason == "lease-lost"
        await first.close()
        await second.append([_text("b")])
        await second.close()
        assert _deltas(await log.read(key)) == ["a", "b"]
        for reader in watched:
            assert _deltas(await reader) == ["a", "b"]
        assert await log.take_over(key) is None

    async def test_of_many_that_take_a_lost_run_over_one_wins(
        self, worker: Callable[..., StoredLog], log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """The losers write nothing; while a writer lives nobody takes anything."""
        writer = await log.open(key, "t")
        assert await other.take_over(key, only_lost=True) is None
        await writer.append([_text("a")])
        await writer.close()
        lost = RunKey(run_id=key.run_id + "-lost")
        dead = await worker(lease_ms=1).open(lost, "t")
        await dead.leave()
        await asyncio.sleep(0.02)
        taken = await gather(
            [(log, other)[i % 2].take_over(lost, only_lost=True) for i in range(20)]
        )
        winners = [writer for writer in taken if writer is not None]
        assert len(winners) == 1
        with pytest.raises(RunConflict):
            await dead.append([_text("late")])
        await winners[0].append([_text("on")])
        await winners[0].close()
        assert _deltas(await other.read(lost)) == ["on"]

    async def test_a_batch_is_there_whole_or_not_at_all(
        self, store: LogBackend, log: StoredLog, key: RunKey
    ) -> None:
        """Also one that is sent again because its reply was lost; a gap is refused."""
        await store.log_open(key.run_id, "t", "token", _LONG)
        bodies = [b'{"delta":"a"}', b'{"delta":"b"}']
        for _ in range(2):
            await store.log_append(key.run_id, "token", 1, bodies, lease_ms=_LONG)
        for number in (1, 2, 4, 9):
            with pytest.raises(RunConflict):
                await store.log_append(
                    key.run_id, "token", number, [b"{}", b"{}", b"{}"], lease_ms=_LONG
                )
        with pytest.raises(RunConflict):
            await store.log_append(key.run_id, "another", 3, bodies, lease_ms=_LONG)
        assert _deltas(await log.read(key)) == ["a", "b"]
        with pytest.raises(RunConflict) as caught:
            await store.log_append(key.run_id + "-unknown", "token", 1, bodies, lease_ms=_LONG)
        assert caught.value.reason == "unknown"

    async def test_opening_and_taking_are_the_same_when_sent_again(
        self, store: LogBackend, key: RunKey
    ) -> None:
        """With the same token; the count of writers does not move."""
        first = await store.log_open(key.run_id, "t", "one", _LONG)
        assert await store.log_open(key.run_id, "t", "one", _LONG) == first
        assert (first.epoch, first.first, first.end, first.closed) == (1, 1, 1, False)
        taken = await store.log_take(key.run_id, "two", _LONG, only_lost=False)
        assert taken is not None
        assert taken.epoch == 2
        assert await store.log_take(key.run_id, "two", _LONG, only_lost=True) == taken
        assert not await store.log_close(key.run_id, "one")
        assert await store.log_close(key.run_id, "two")
        assert await store.log_close(key.run_id, "two")
        assert not await store.log_close(key.run_id + "-unknown", "two")

    async def test_an_event_that_is_no_json_is_refused_whole(
        self, log: StoredLog, key: RunKey
    ) -> None:
        """With the rest of its batch; the next one is published."""
        writer = await log.open(key, "t")
        wrong = TextMessageContentEvent(message_id="m", delta="x", raw_event={"n": float("nan")})
        with pytest.raises(InvalidValue):
            await writer.append([_text("a"), wrong])
        await writer.append([_text("b")])
        await writer.close()
        assert _deltas(await log.read(key)) == ["b"]

    async def test_one_read_is_bounded(self, store: LogBackend, key: RunKey) -> None:
        """By number and by bytes, but it gets at least one; the log knows how far it goes."""
        await store.log_open(key.run_id, "t", "token", _LONG)
        bodies = [b'"%s"' % (b"x" * 1000) for _ in range(30)]
        await store.log_append(key.run_id, "token", 1, bodies, lease_ms=_LONG)
        page = await store.log_read(key.run_id, 1, limit=10, max_bytes=1 << 20)
        assert page is not None
        assert (page.number, len(page.bodies), page.head.end) == (1, 10, 31)
        page = await store.log_read(key.run_id, 4, limit=10, max_bytes=3500)
        assert page is not None
        assert page.bodies == bodies[3:6]
        page = await store.log_read(key.run_id, 30, limit=10, max_bytes=1)
        assert page is not None
        assert page.bodies == bodies[29:]
        for number in (0, 31, 99):
            page = await store.log_read(key.run_id, number, limit=10, max_bytes=1 << 20)
            assert page is not None
            assert page.bodies == []
        assert await store.log_read(key.run_id + "-no", 1, limit=1, max_bytes=1) is None

    async def test_a_long_log_is_read_in_batches_to_its_end(
        self, log: StoredLog, other: StoredLog, key: RunKey
    ) -> None:
        """More events than one read gives."""
        writer = await log.open(key, "t")
        for start in range(0, 1500, 300):
            await writer.append([_text(str(start + i)) for i in range(300)])
        await writer.close()
        batches = [batch async for batch in await other.follow(key)]
        assert max(map(len, batches)) <= 512
        assert _deltas([event for batch in batches for event in batch]) == [
            str(i) for i in range(1500)
        ]

    async def test_a_long_run_is_trimmed_at_its_head(
        self, worker: Callable[..., StoredLog], other: StoredLog, key: RunKey
    ) -> None:
        """Offsets of what is left do not change; a replay from before is refused by name."""
        writer = await worker(max_run_bytes=20_000).open(key, "t")
        watched = asyncio.create_task(_followed(other, key))
        offsets: list[str] = []
        for i in range(40):
            offsets += await writer.append([_text(f"{i} {'x' * 1000}")])
            if i % 10 == 0:
                await asyncio.sleep(0.01)
        found = await other.find(key)
        assert found is not None
        assert not found.complete
        with pytest.raises(EventsTrimmed):
            await other.read(key)
        with pytest.raises(EventsTrimmed):
            await other.follow(key, offsets[0])
        rest = await other.read(key, offsets[34])
        assert [event.offset for event in rest] == offsets[35:]
        assert [delta.split()[0] for delta in _deltas(rest)] == ["35", "36", "37", "38", "39"]
        await writer.close()
        watched.cancel()
        await asyncio.wait({watched})

    async def test_an_unknown_run_is_refused_before_a_reader_is_handed_out(
        self, log: StoredLog, key: RunKey
    ) -> None:
        """It is not there to be found, read, followed or taken over."""
        assert await log.find(key) is None
        with pytest.raises(UnknownRun):
            await log.read(key)
        with pytest.raises(UnknownRun):
            await log.follow(key)
        assert await log.take_over(key) is None

    async def test_finished_logs_are_kept_for_a_while_and_then_swept(
        self, worker: Callable[..., StoredLog], ids: Ids
    ) -> None:
        """What runs is never swept; a run id may have a log again, whose offsets are others."""
        log = worker(keep_seconds=0)
        kept, gone, running = (RunKey(run_id=ids.run()) for _ in range(3))
        open_writer = await log.open(running, "t")
        writer = await log.open(gone, "t")
        (offset,) = await writer.append([_text("old")])
        await writer.close()
        other = await worker().open(kept, "t")
        await worker().sweep()
        await other.close()
        assert await log.find(gone) is not None
        await asyncio.sleep(0.01)
        await log.sweep()
        assert await log.find(gone) is None
        assert await log.find(running) is not None
        again = await log.open(gone, "t")
        await again.append([_text("new")])
        with pytest.raises(UnknownOffset):
            await log.read(gone, offset)
        await again.close()
        await open_writer.close()

    async def test_viewers_of_a_lost_writer_are_told(
        self, worker: Callable[..., StoredLog], other: StoredLog, ids: Ids
    ) -> None:
        """By RUN_ERROR worker_lost as the last event, once, whoever sweeps; the log is closed."""
        key = RunKey(run_id=ids.run())
        dying = await worker(lease_ms=1).open(key, "t")
        await dying.append([_text("a")])
        await dying.leave()
        await asyncio.sleep(0.02)
        swept = await gather([worker().sweep() for _ in range(5)])
        ended = [run.key.run_id for runs in swept for run in runs]
        assert ended.count(key.run_id) == 1
        events = await _followed(other, key)
        assert _deltas(events) == ["a", "(end)"]
        end = decode(events[-1].body, "event")
        assert (end["type"], end["code"]) == ("RUN_ERROR", "worker_lost")
        with pytest.raises(RunConflict):
            await dying.append([_text("late")])

    async def test_a_viewer_need_not_wait_for_a_sweep(
        self, worker: Callable[..., StoredLog], other: StoredLog, key: RunKey
    ) -> None:
        """Who follows a run whose writer dies closes its log."""
        dying = await worker(lease_ms=300).open(key, "t")
        await dying.append([_text("a")])
        watched = asyncio.create_task(_followed(other, key))
        await asyncio.sleep(0.05)
        await dying.leave()
        assert _deltas(await watched) == ["a", "(end)"]

    async def test_a_writer_that_died_behind_its_terminal_adds_no_second_one(
        self, worker: Callable[..., StoredLog], log: StoredLog, key: RunKey
    ) -> None:
        """Its log is closed, that is all."""
        dying = await worker(lease_ms=1).open(key, "t")
        await dying.append([_text("a"), _finished(key.run_id)])
        await dying.leave()
        await asyncio.sleep(0.02)
        await log.sweep()
        events = await _followed(log, key)
        assert [decode(event.body, "event")["type"] for event in events] == [
            "TEXT_MESSAGE_CONTENT",
            "RUN_FINISHED",
        ]

    async def test_a_writer_that_lives_is_not_lost(
        self, worker: Callable[..., StoredLog], other: StoredLog, key: RunKey
    ) -> None:
        """It renews its lease while it has nothing to say."""
        writer = await worker(lease_ms=600).open(key, "t")
        for _ in range(5):
            await asyncio.sleep(0.3)
            await other.sweep()
        await writer.append([_text("a")])
        await writer.close()
        assert _deltas(await other.read(key)) == ["a"]

    async def test_logs_of_another_scope_are_not_there(self, log: StoredLog, ids: Ids) -> None:
        """One run id in two scopes is two runs; a sweep sees all scopes."""
        name = ids.run()
        here = RunKey(run_id=name, scope=Scope(user_id="ann"))
        there = RunKey(run_id=name, scope=Scope(user_id="bob"))
        writer = await log.open(here, "t")
        (offset,) = await writer.append([_text("ann's")])
        assert await log.find(there) is None
        assert await log.take_over(there) is None
        other = await log.open(there, "t2")
        await other.append([_text("bob's")])
        await writer.close()
        await other.close()
        assert _deltas(await log.read(here)) == ["ann's"]
        assert _deltas(await log.read(there)) == ["bob's"]
        with pytest.raises(UnknownOffset):
            await log.read(there, offset)

    async def test_erasing_a_thread_erases_its_logs(
        self, persistence: Any, store: LogBackend, log: StoredLog, ids: Ids
    ) -> None:
        """Also a running one; readers are not left waiting."""
        thread, other_thread = ids.thread(), ids.thread()
        keys = [RunKey(run_id=ids.run()) for _ in range(3)]
        writers = [
            await log.open(key, name)
            for key, name in zip(keys, (thread, thread, other_thread), strict=True)
        ]
        for writer in writers:
            await writer.append([_text("secret")])
        await writers[0].close()
        await store.delete_thread(thread)
        assert [await log.find(key) is None for key in keys] == [True, True, False]
        with pytest.raises(RunConflict):
            await writers[1].append([_text("more")])
        await writers[2].close()

    async def test_erasing_messages_erases_the_finished_logs_of_their_thread(
        self, store: LogBackend, log: StoredLog, ids: Ids
    ) -> None:
        """They are copies too."""
        thread, key = ids.thread(), RunKey(run_id=ids.run())
        writer = await log.open(key, thread)
        await writer.append([_text("secret")])
        await writer.close()
        await store.erase_messages(thread, ["m"])
        assert await log.find(key) is None

    @pytest.mark.parametrize("odd", ["a b", "%", "é\U0001f600", "x:1", "/../", "a\nb", "x" * 1000])
    async def test_any_id_will_do(self, log: StoredLog, ids: Ids, odd: str) -> None:
        """Offsets are header-safe whatever the run is called."""
        key = RunKey(run_id=odd + ids.run()[:20])
        writer = await log.open(key, odd)
        (offset,) = await writer.append([_text("a")])
        await writer.append([_text("b")])
        await writer.close()
        assert offset.isascii()
        assert offset.isprintable()
        assert " " not in offset
        assert _deltas(await log.read(key, offset)) == ["b"]

    async def test_options_that_mean_nothing_are_refused(
        self, persistence: Any, store: LogBackend
    ) -> None:
        """At construction."""
        options: list[dict[str, Any]] = [
            {"lease_ms": 0},
            {"keep_seconds": -1},
            {"poll_seconds": 0},
            {"max_run_bytes": 0},
        ]
        for wrong in options:
            with pytest.raises(CompositionError):
                StoredLog(persistence, **wrong)
