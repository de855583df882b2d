"""The in-process delivery log: order, offsets, tails, bounds."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Sequence

import pytest
from ag_ui.core import CustomEvent, MessagesSnapshotEvent, RunErrorEvent
from hypothesis import given
from hypothesis import strategies as st

from chatkeep.delivery import (
    FROM_NOW,
    DeliveryLog,
    LoggedEvent,
    RunKey,
    RunLog,
    encode_event,
    offset_run,
)
from chatkeep.errors import EventsTrimmed, InvalidValue, RunConflict, UnknownOffset, UnknownRun
from chatkeep.scope import Scope

from .conftest import Clock, finished, started, text

pytestmark = pytest.mark.anyio
KEY = RunKey(run_id="r")


def deltas(events: Sequence[LoggedEvent]) -> list[str]:
    return [json.loads(event.body)["delta"] for event in events]


async def collect(batches: AsyncIterator[Sequence[LoggedEvent]]) -> list[LoggedEvent]:
    return [event async for batch in batches for event in batch]


async def test_it_is_a_delivery_log() -> None:
    """The in-process log has every method of the protocol."""
    assert isinstance(RunLog(), DeliveryLog)


async def test_events_come_back_in_order_under_offsets_that_are_unique() -> None:
    """What was appended is read back in order; the offsets are those that append returned."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    offsets = await writer.append([text("a"), text("b")]) + await writer.append([text("c")])
    events = await log.read(KEY)
    assert deltas(events) == ["a", "b", "c"]
    assert [event.offset for event in events] == offsets
    assert len(set(offsets)) == 3


async def test_a_read_begins_strictly_after_its_offset() -> None:
    """Whoever names an event gets the ones behind it; the last one leaves nothing."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    first, second, third = await writer.append([text("a"), text("b"), text("c")])
    assert deltas(await log.read(KEY, first)) == ["b", "c"]
    assert deltas(await log.read(KEY, second)) == ["c"]
    assert await log.read(KEY, third) == []
    assert await log.read(KEY, FROM_NOW) == []


@pytest.mark.parametrize(
    "run_id", ["a:1", "räksmörgås ", "x\r\ny", "-1", "now", "a%3A1", "r" * 1024]
)
async def test_offsets_of_any_run_id_are_header_safe(run_id: str) -> None:
    """An offset is printable ASCII without spaces at its ends, and names its run."""
    log = RunLog()
    writer = await log.open(RunKey(run_id=run_id), "t")
    (offset,) = await writer.append([text("a")])
    assert offset.isascii()
    assert offset.isprintable()
    assert offset == offset.strip()
    assert offset_run(offset) == run_id


@given(st.text())
def test_a_text_that_is_no_offset_names_no_run(offset: str) -> None:
    """Only the one spelling that the log hands out is read as an offset."""
    run_id = offset_run(offset)
    if run_id is not None:
        assert ":" in offset
        assert offset.rpartition(":")[2] == str(int(offset.rpartition(":")[2]))


@pytest.mark.parametrize(
    "offset",
    [
        "",
        "r",
        "r:",
        "r:x",
        "r:0",
        "r:01",
        "r:3",
        "r:99999999999999999999",
        "q:1",
        "memory:v1:r:1",
        "r:-1",
        "r:²",
    ],
)
async def test_an_offset_that_names_no_event_of_the_run_is_refused(offset: str) -> None:
    """Nothing is guessed from an odd, a foreign or a future offset."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    await writer.append([text("a"), text("b")])
    with pytest.raises(UnknownOffset):
        await log.read(KEY, offset)
    with pytest.raises(UnknownOffset):
        await log.follow(KEY, offset)


async def test_every_reader_tails_the_live_run_to_its_end() -> None:
    """Readers that come early, in the middle and late see the same events, each once."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    early = [asyncio.create_task(collect(await log.follow(KEY))) for _ in range(50)]
    for i in range(200):
        await writer.append([text(str(i))])
        if i == 100:
            middle = asyncio.create_task(collect(await log.follow(KEY)))
            ahead = asyncio.create_task(collect(await log.follow(KEY, FROM_NOW)))
        await asyncio.sleep(0)
    await writer.append([finished()])
    await writer.close()
    late = await collect(await log.follow(KEY))
    for events in [*await asyncio.gather(*early), await middle]:
        assert events == late
    assert (await ahead) == late[101:]


async def test_a_reader_waits_while_the_run_lives() -> None:
    """An empty log of a running run is held open, not answered with an end."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    reader = asyncio.create_task(collect(await log.follow(KEY)))
    done, _ = await asyncio.wait({reader}, timeout=0.05)
    assert not done
    await writer.append([text("a")])
    await writer.close()
    assert deltas(await reader) == ["a"]


async def test_closing_is_idempotent_and_ends_appending() -> None:
    """After close nothing is added, by anybody."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    await writer.close()
    await writer.close()
    with pytest.raises(RunConflict) as caught:
        await writer.append([text("late")])
    assert caught.value.reason == "terminal"
    assert await log.read(KEY) == []


async def test_a_run_has_one_log_and_one_writer() -> None:
    """A second open is refused and says why: running, over, or another thread's."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    with pytest.raises(RunConflict) as running:
        await log.open(KEY, "t")
    with pytest.raises(RunConflict) as foreign:
        await log.open(KEY, "other")
    await writer.close()
    with pytest.raises(RunConflict) as over:
        await log.open(KEY, "t")
    reasons = [caught.value.reason for caught in (running, foreign, over)]
    assert reasons == ["running", "foreign-thread", "terminal"]


async def test_runs_of_another_scope_are_not_there() -> None:
    """The same run id in two scopes is two runs."""
    log = RunLog()
    ada = RunKey(run_id="r", scope=Scope(user_id="ada"))
    writer = await log.open(ada, "t")
    await writer.append([text("a")])
    assert await log.find(KEY) is None
    with pytest.raises(UnknownRun):
        await log.follow(KEY)
    await log.open(KEY, "elsewhere")
    assert deltas(await log.read(ada)) == ["a"]


async def test_an_unknown_run_is_refused_before_a_reader_is_handed_out() -> None:
    """A response can still become a 404: the refusal comes from the call, not the iterator."""
    with pytest.raises(UnknownRun):
        await RunLog().follow(KEY)


async def test_finished_runs_go_by_age(clock: Clock) -> None:
    """A finished run is replayable for as long as configured, and no longer."""
    log = RunLog(keep_seconds=300, clock=clock)
    writer = await log.open(KEY, "t")
    clock.now = 1000.0
    await writer.close()
    clock.now = 1299.9
    assert await log.find(KEY) is not None
    clock.now = 1300.0
    assert await log.find(KEY) is None
    assert len(log) == 0


async def test_running_runs_are_never_evicted(clock: Clock) -> None:
    """Neither age nor number nor size of others touches a run that is still written."""
    log = RunLog(keep_runs=2, keep_bytes=100, clock=clock)
    alive = await log.open(KEY, "t")
    await alive.append([text("kept")])
    for i in range(20):
        writer = await log.open(RunKey(run_id=f"other-{i}"), "t")
        await writer.append([text("x" * 50)])
        await writer.close()
    clock.now = 10_000.0
    assert deltas(await log.read(KEY)) == ["kept"]


async def test_finished_runs_go_by_number_oldest_end_first(clock: Clock) -> None:
    """Of too many finished runs the ones that ended first are dropped."""
    log = RunLog(keep_runs=2, clock=clock)
    writers = {name: await log.open(RunKey(run_id=name), "t") for name in "abc"}
    for name in "cab":
        await writers[name].close()
    left = [name for name in "abc" if await log.find(RunKey(run_id=name))]
    assert left == ["a", "b"]


async def test_finished_runs_go_by_bytes() -> None:
    """All finished runs together stay below the byte limit."""
    log = RunLog(keep_bytes=5_000)
    for i in range(50):
        writer = await log.open(RunKey(run_id=str(i)), "t")
        await writer.append([text("x" * 400)])
        await writer.close()
    assert 0 < log.size <= 5_000
    assert await log.find(RunKey(run_id="49")) is not None


async def test_a_reader_keeps_an_evicted_run_until_it_has_read_it(clock: Clock) -> None:
    """Eviction ends what can be begun, not what is being read."""
    log = RunLog(keep_seconds=1, clock=clock)
    writer = await log.open(KEY, "t")
    await writer.append([text("a"), text("b")])
    batches = await log.follow(KEY)
    await writer.close()
    clock.now = 10.0
    assert await log.find(KEY) is None
    assert deltas(await collect(batches)) == ["a", "b"]


async def test_a_long_run_is_trimmed_at_its_head() -> None:
    """Above the limit the oldest events go: keeping up works, replays from before do not."""
    log = RunLog(max_run_bytes=10_000)
    writer = await log.open(KEY, "t")
    behind = await log.follow(KEY)
    (first,) = await writer.append([text("first")])
    live = await log.follow(KEY)
    seen: list[LoggedEvent] = []
    for i in range(500):
        await writer.append([text(f"{i:0100d}")])
        seen += await anext(live)
    assert log.size <= 10_000
    assert len(seen) == 501
    assert len({event.offset for event in seen}) == 501
    for after in ("-1", first):
        with pytest.raises(EventsTrimmed):
            await log.follow(KEY, after)
    with pytest.raises(EventsTrimmed):
        await collect(behind)
    found = await log.find(KEY)
    assert found is not None
    assert not found.complete
    assert deltas(await log.read(KEY, seen[-2].offset)) == [f"{499:0100d}"]


async def test_one_event_above_the_limit_is_still_delivered() -> None:
    """The newest event stays, however large it is."""
    log = RunLog(max_run_bytes=1_000)
    writer = await log.open(KEY, "t")
    before = await log.follow(KEY, FROM_NOW)
    await writer.append([text("x" * 100_000)])
    (event,) = await anext(before)
    assert len(event.body) > 100_000


async def test_viewers_cost_no_copies_of_the_events() -> None:
    """A thousand viewers who have read nothing yet cost less than one copy of a large run."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    for _ in range(1_000):
        await writer.append([text("x" * 5_000)])
    tracemalloc.start()
    try:
        viewers = [await log.follow(KEY) for _ in range(1_000)]
        for viewer in viewers:
            await anext(viewer)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for viewer in viewers:
        await viewer.aclose()  # type: ignore[attr-defined]
    assert held < 30 << 20 < 1_000 * log.size


async def test_batches_are_bounded() -> None:
    """A replay of a large run comes in pieces that a socket can take one at a time."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    await writer.append([text("x" * 100_000) for _ in range(100)])
    await writer.close()
    sizes = [sum(len(e.body) for e in batch) async for batch in await log.follow(KEY)]
    assert len(sizes) > 5
    assert max(sizes) <= 1 << 20


async def test_bytes_are_those_of_the_event_without_nulls() -> None:
    """An event is one line of JSON in camelCase; absent optional fields are not there."""
    body = encode_event(started())
    assert json.loads(body) == {"type": "RUN_STARTED", "threadId": "t", "runId": "r"}
    assert b"\n" not in encode_event(text("line\nbreak"))
    null_matters = encode_event(CustomEvent(name="n", value={"kept": None}))
    assert json.loads(null_matters)["value"] == {"kept": None}
    big = encode_event(CustomEvent(name="n", value=2**80))
    assert big.startswith(b"{")
    assert json.loads(big)["value"] == 2**80
    assert "messages" in json.loads(encode_event(MessagesSnapshotEvent(messages=[])))


async def test_an_event_that_is_no_json_is_refused_whole() -> None:
    """NaN is not sent as null; nothing of the batch is published."""
    log = RunLog()
    writer = await log.open(KEY, "t")
    with pytest.raises(InvalidValue, match="NaN"):
        await writer.append([text("a"), CustomEvent(name="n", value=[float("nan")])])
    assert await log.read(KEY) == []
    await writer.append([RunErrorEvent(message="half a pair: \ud800")])
    assert json.loads((await log.read(KEY))[0].body)["message"] == "half a pair: �"
