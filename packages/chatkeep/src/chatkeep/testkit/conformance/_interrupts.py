"""Human decisions: the interrupts store and its batch tier."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Awaitable
from typing import Any

import pytest

from chatkeep.errors import InterruptConflict, InvalidValue
from chatkeep.records import UNSET, InterruptRecord
from chatkeep.stores import BatchCommit, InterruptAnswer, InterruptStore
from chatkeep.testkit.conformance._base import (
    ConformanceCase,
    Ids,
    exact,
    gather,
    interrupt,
    now_ms,
    outcomes,
)

__all__ = ["TestBatchCommit", "TestInterrupts"]

_T0 = 1_700_000_000_000

_RESPONSES: dict[str, Any] = {
    "absent": UNSET,
    "null": None,
    "false": False,
    "zero": 0,
    "zero float": 0.0,
    "empty text": "",
    "empty list": [],
    "empty object": {},
    "deep": {"approved": True, "edited": {"a.b": [1, None]}},
}


class TestInterrupts(ConformanceCase):
    """The interrupts store: I1 to I3, and what upstream does not ask."""

    async def test_i1_an_unknown_interrupt_is_none(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Get answers None, lists are empty."""
        thread, run = ids.thread(), ids.run()
        assert await interrupts.get(thread, ids.interrupt()) is None
        assert await interrupts.get(thread, ids.interrupt(), run_id=run) is None
        assert await _lists(interrupts, thread, run) == [[], [], [], []]

    async def test_i1_what_is_created_is_pending(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Create says that it inserted; the record comes back equal and pending."""
        record = interrupt(
            ids.thread(), ids.run(), ids.interrupt(), payload={"tool": "x", "args": {"q": "é"}}
        )
        assert await interrupts.create(record) is True
        found = await interrupts.get(record.thread_id, record.interrupt_id)
        assert found is not None
        assert found == record
        assert exact(found.to_json()) == exact(record.to_json())
        assert found.response is UNSET
        assert found.resolved_at is None

    async def test_a_record_is_born_pending_whatever_it_says(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """A settled record cannot be created: it starts pending, unanswered."""
        record = interrupt(
            ids.thread(),
            ids.run(),
            ids.interrupt(),
            status="resolved",
            resolved_at=_T0,
            response={"x": 1},
            claimed_by="r",
        )
        assert await interrupts.create(record) is True
        found = await interrupts.get(record.thread_id, record.interrupt_id)
        assert found is not None
        assert (found.status, found.resolved_at, found.claimed_by) == ("pending", None, None)
        assert found.response is UNSET

    async def test_i1_three_are_listed_and_leave_pending_as_they_are_settled(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Resolve and cancel set status, time and response; pending lists shrink."""
        thread, run = ids.thread(), ids.run()
        made = [interrupt(thread, run, ids.interrupt(), at=_T0 + n) for n in range(3)]
        for record in made:
            await interrupts.create(record)
        names = [r.interrupt_id for r in made]
        assert await _lists(interrupts, thread, run) == [names] * 4
        before = now_ms()
        await interrupts.resolve(thread, names[0], {"approved": True})
        await interrupts.cancel(thread, names[1], run_id=run)
        assert await _lists(interrupts, thread, run) == [names, names[2:], names, names[2:]]
        yes = await interrupts.get(thread, names[0])
        no = await interrupts.get(thread, names[1])
        assert yes is not None
        assert no is not None
        assert (yes.status, yes.response) == ("resolved", {"approved": True})
        assert (no.status, no.response) == ("cancelled", UNSET)
        for settled in (yes, no):
            assert settled.resolved_at is not None
            assert abs(settled.resolved_at - before) < 20_000
        left = await interrupts.get(thread, names[2])
        assert left == made[2]

    async def test_i2_a_duplicate_create_changes_nothing(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """A taken identity, settled or not, stays as it is; create says False."""
        record = interrupt(ids.thread(), ids.run(), ids.interrupt())
        again = record.model_copy(update={"payload": {"other": 1}, "requested_at": _T0 + 9})
        assert await interrupts.create(record) is True
        assert await interrupts.create(again) is False
        assert await interrupts.get(record.thread_id, record.interrupt_id) == record
        await interrupts.resolve(record.thread_id, record.interrupt_id, "yes")
        settled = await interrupts.get(record.thread_id, record.interrupt_id)
        assert await interrupts.create(again) is False
        assert await interrupts.get(record.thread_id, record.interrupt_id) == settled
        assert settled is not None
        assert (settled.status, settled.response) == ("resolved", "yes")
        assert (settled.payload, settled.requested_at) == (record.payload, _T0)

    async def test_i3_lists_go_by_the_time_of_the_request(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Inserted out of order, listed by requested_at, in all four lists."""
        thread, run = ids.thread(), ids.run()
        names = {at: ids.interrupt() for at in (3, 1, 2)}
        for at, name in names.items():
            await interrupts.create(interrupt(thread, run, name, at=_T0 + at))
        want = [names[1], names[2], names[3]]
        assert await _lists(interrupts, thread, run) == [want] * 4

    async def test_equal_times_keep_the_order_of_insertion(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Interrupts of one millisecond are listed as they were created, always."""
        thread, run = ids.thread(), ids.run()
        names = [f"{c}{ids.interrupt()}" for c in "mzacbyd"]
        for name in names:
            await interrupts.create(interrupt(thread, run, name))
        for _ in range(3):
            assert await _lists(interrupts, thread, run) == [names] * 4
        await interrupts.resolve(thread, names[1])
        left = [names[0], *names[2:]]
        assert await _lists(interrupts, thread, run) == [names, left, names, left]

    async def test_a_settled_record_never_changes(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """First answer wins: resolve or cancel after it is a conflict and writes nothing."""
        thread, run = ids.thread(), ids.run()
        for settle in (_resolve_yes, _cancel):
            name = ids.interrupt()
            await interrupts.create(interrupt(thread, run, name))
            await settle(interrupts, thread, name)
            first = await interrupts.get(thread, name)
            for second in (_resolve_no, _cancel):
                with pytest.raises(InterruptConflict) as caught:
                    await second(interrupts, thread, name)
                assert caught.value.interrupt_ids == (name,)
                assert caught.value.thread_id == thread
            assert await interrupts.get(thread, name) == first

    async def test_settling_an_unknown_interrupt_is_a_no_op(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Nothing is raised and nothing is created."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        await interrupts.resolve(thread, name, "x")
        await interrupts.cancel(thread, name)
        await interrupts.resolve(thread, name, "x", run_id=run)
        assert await _lists(interrupts, thread, run) == [[], [], [], []]

    async def test_one_id_in_two_runs_and_two_threads_is_three_interrupts(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Identity is (thread, run, id): providers reuse tool call ids."""
        name, thread, other = ids.interrupt(), ids.thread(), ids.thread()
        one, two = ids.run(), ids.run()
        made = [
            interrupt(thread, one, name, at=_T0, payload={"n": 1}),
            interrupt(thread, two, name, at=_T0 + 1, payload={"n": 2}),
            interrupt(other, ids.run(), name, at=_T0, payload={"n": 3}),
        ]
        for record in made:
            assert await interrupts.create(record) is True
        await interrupts.resolve(thread, name, "first", run_id=one)
        first = await interrupts.get(thread, name, run_id=one)
        assert first is not None
        assert (first.status, first.response) == ("resolved", "first")
        assert await interrupts.get(thread, name, run_id=two) == made[1]
        assert await interrupts.get(other, name) == made[2]
        assert [r.run_id for r in await interrupts.list(thread)] == [one, two]
        assert [r.payload for r in await interrupts.list_by_run(thread, two)] == [{"n": 2}]

    async def test_without_a_run_the_pending_one_is_meant_else_the_newest(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Get by id alone finds what still waits; when nothing does, the last one asked."""
        thread, name = ids.thread(), ids.interrupt()
        old, new = ids.run(), ids.run()
        await interrupts.create(interrupt(thread, old, name, at=_T0))
        await interrupts.create(interrupt(thread, new, name, at=_T0 + 1))
        await interrupts.cancel(thread, name, run_id=new)
        found = await interrupts.get(thread, name)
        assert found is not None
        assert (found.run_id, found.status) == (old, "pending")
        await interrupts.resolve(thread, name, 1)
        found = await interrupts.get(thread, name)
        assert found is not None
        assert (found.run_id, found.status) == (new, "cancelled")
        settled = await interrupts.get(thread, name, run_id=old)
        assert settled is not None
        assert (settled.status, settled.response) == ("resolved", 1)

    @pytest.mark.parametrize("kind", _RESPONSES)
    async def test_responses_are_told_apart(
        self, interrupts: InterruptStore, ids: Ids, kind: str
    ) -> None:
        """Absent, null, false, zero and empty values are all different answers."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        value: Any = _RESPONSES[kind]
        await interrupts.create(interrupt(thread, run, name))
        await interrupts.resolve(thread, name, value)
        found = await interrupts.get(thread, name)
        assert found is not None
        if value is UNSET:
            assert found.response is UNSET
            assert "response" not in found.to_json()
        else:
            assert found.response is not UNSET
            assert exact(found.response) == exact(value)
            assert exact(found.to_json()["response"]) == exact(value)
        assert (await interrupts.list(thread)) == [found]

    async def test_odd_payloads_round_trip(self, interrupts: InterruptStore, ids: Ids) -> None:
        """Keys that mean something to a database are only text here."""
        payload: dict[str, Any] = {
            "$schema": "x",
            "a.b": 1,
            "": 2,
            "_id": 3,
            "$where": "1",
            "nul\x00key": "\x00",
            "null": None,
            "deep": [{"x": [1, 1.0, 2**60, []]}],
        }
        record = interrupt(ids.thread(), ids.run(), ids.interrupt(), payload=payload)
        await interrupts.create(record)
        found = await interrupts.get(record.thread_id, record.interrupt_id)
        assert found is not None
        assert exact(found.payload) == exact(payload)

    async def test_unknown_fields_of_a_record_are_kept(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """A field that chatkeep has no name for comes back, also after the answer."""
        record = InterruptRecord.from_json(
            {
                **interrupt(ids.thread(), ids.run(), ids.interrupt()).to_json(),
                "generation": 3,
                "expiresAt": None,
            }
        )
        await interrupts.create(record)
        await interrupts.resolve(record.thread_id, record.interrupt_id, "x")
        found = await interrupts.get(record.thread_id, record.interrupt_id)
        assert found is not None
        assert found.to_json().get("generation") == 3

    async def test_dates_and_uuids_are_converted_sets_refused(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """One documented conversion before anything is shown; else an error with the path."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        at = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        await interrupts.create(
            interrupt(thread, run, name, payload={"at": at, "id": uuid.UUID(int=1), "b": b"\xff"})
        )
        found = await interrupts.get(thread, name)
        assert found is not None
        assert found.payload == {
            "at": "2026-01-02T00:00:00+00:00",
            "id": "00000000-0000-0000-0000-000000000001",
            "b": "/w==",
        }
        with pytest.raises(InvalidValue):
            await interrupts.create(interrupt(thread, run, ids.interrupt(), payload={"s": {1}}))
        with pytest.raises(InvalidValue):
            await interrupts.resolve(thread, name, {1, 2})
        (left,) = await interrupts.list(thread)
        assert left.status == "pending"

    async def test_threads_and_runs_are_apart_whatever_their_ids(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Ids with separators never meet, in no list and no look-up."""
        tag = ids("x")
        keys = [
            (f"t{tag}:1", "r", "i"),
            (f"t{tag}", "1:r", "i"),
            (f"t{tag}", "1", "r:i"),
            (f"t{tag}", "1:r:i", "i"),
            (f"t{tag}#", "1", "i"),
            (f"t{tag}", "#1", "i"),
            (f"t{tag}%", "r", "i"),
            (f"t{tag}_", "r", "i"),
        ]
        for n, (thread, run, name) in enumerate(keys):
            assert await interrupts.create(
                interrupt(thread, run, name, at=_T0 + n, payload={"n": n})
            )
        for n, (thread, run, name) in enumerate(keys):
            found = await interrupts.get(thread, name, run_id=run)
            assert found is not None
            assert found.payload == {"n": n}
            assert [r.payload for r in await interrupts.list_by_run(thread, run)] == [{"n": n}]
        await interrupts.cancel(keys[0][0], keys[0][2])
        assert len(await interrupts.list_pending(f"t{tag}")) == 4

    async def test_of_two_answers_at_once_one_wins(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Approve against deny, ten rounds: one success, one conflict, the winner's answer."""
        thread, run = ids.thread(), ids.run()
        for _ in range(10):
            name = ids.interrupt()
            await interrupts.create(interrupt(thread, run, name))
            works: list[Awaitable[None]] = [
                interrupts.resolve(thread, name, "yes"),
                interrupts.cancel(thread, name),
            ]
            won, lost = await outcomes(works)
            assert (len(won), [type(e) for e in lost]) == (1, [InterruptConflict])
            found = await interrupts.get(thread, name)
            assert found is not None
            assert (found.status, found.response) in (("resolved", "yes"), ("cancelled", UNSET))

    async def test_of_concurrent_creates_one_inserts(
        self, interrupts: InterruptStore, ids: Ids
    ) -> None:
        """Ten callers, one identity: exactly one True, and its payload is stored."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        made = await gather(
            [interrupts.create(interrupt(thread, run, name, payload={"n": n})) for n in range(10)]
        )
        assert made.count(True) == 1
        (found,) = await interrupts.list(thread)
        assert found.payload == {"n": made.index(True)}

    @pytest.mark.parametrize("bad", ["", "a\x00b", "\ud800", "x" * 1025])
    async def test_an_id_that_is_none_is_refused(
        self, interrupts: InterruptStore, ids: Ids, bad: str
    ) -> None:
        """Thread, run and interrupt ids are checked before anything is read or written."""
        thread, run, name = ids.thread(), ids.run(), ids.interrupt()
        for record in (
            interrupt(bad, run, name),
            interrupt(thread, bad, name),
            interrupt(thread, run, bad),
        ):
            with pytest.raises(InvalidValue):
                await interrupts.create(record)
        with pytest.raises(InvalidValue):
            await interrupts.get(bad, name)
        with pytest.raises(InvalidValue):
            await interrupts.resolve(thread, bad)
        assert await interrupts.list(thread) == []


class TestBatchCommit(ConformanceCase):
    """Tier BatchCommit: settle a batch, all or nothing."""

    async def test_a_batch_settles_every_entry(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids
    ) -> None:
        """Resolved with a response, resolved without, cancelled: in one commit."""
        thread, run = ids.thread(), ids.run()
        names = await _three(interrupts, ids, thread, run)
        await batch.commit_batch(
            thread,
            [
                InterruptAnswer(interrupt_id=names[2], status="cancelled"),
                InterruptAnswer(interrupt_id=names[0], response={"ok": 1}, run_id=run),
                InterruptAnswer(interrupt_id=names[1]),
            ],
        )
        found = await interrupts.list(thread)
        assert [(r.status, r.response) for r in found] == [
            ("resolved", {"ok": 1}),
            ("resolved", UNSET),
            ("cancelled", UNSET),
        ]
        assert all(r.resolved_at is not None for r in found)
        assert await interrupts.list_pending(thread) == []

    @pytest.mark.parametrize("kind", _RESPONSES)
    async def test_responses_are_told_apart_in_a_batch(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids, kind: str
    ) -> None:
        """Absent, null, false, zero and empty values are all different answers."""
        thread, run = ids.thread(), ids.run()
        names = await _three(interrupts, ids, thread, run)
        value: Any = _RESPONSES[kind]
        await batch.commit_batch(thread, [InterruptAnswer(interrupt_id=names[1], response=value)])
        found = await interrupts.get(thread, names[1])
        assert found is not None
        if value is UNSET:
            assert found.response is UNSET
        else:
            assert found.response is not UNSET
            assert exact(found.response) == exact(value)
        assert len(await interrupts.list_pending(thread)) == 2

    @pytest.mark.parametrize("fault", ["duplicate", "unknown", "settled", "foreign run", "mixed"])
    async def test_one_bad_entry_refuses_the_whole_batch(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids, fault: str
    ) -> None:
        """Duplicate, unknown and settled entries: one typed error, nothing written."""
        thread, run = ids.thread(), ids.run()
        names = await _three(interrupts, ids, thread, run)
        await interrupts.cancel(thread, names[2])
        before = await interrupts.list(thread)
        bad = {
            "duplicate": [InterruptAnswer(interrupt_id=names[0], status="cancelled")],
            "unknown": [InterruptAnswer(interrupt_id=ids.interrupt())],
            "settled": [InterruptAnswer(interrupt_id=names[2])],
            "foreign run": [InterruptAnswer(interrupt_id=names[1], run_id=ids.run())],
        }
        entries = [e for rows in bad.values() for e in rows] if fault == "mixed" else bad[fault]
        with pytest.raises(InterruptConflict):
            await batch.commit_batch(
                thread, [InterruptAnswer(interrupt_id=names[0], response="x"), *entries]
            )
        assert await interrupts.list(thread) == before

    async def test_an_interrupt_of_another_thread_is_unknown(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids
    ) -> None:
        """A batch reaches its own thread only."""
        thread, other, run = ids.thread(), ids.thread(), ids.run()
        names = await _three(interrupts, ids, thread, run)
        with pytest.raises(InterruptConflict):
            await batch.commit_batch(other, [InterruptAnswer(interrupt_id=names[0])])
        assert len(await interrupts.list_pending(thread)) == 3

    async def test_an_empty_batch_is_a_no_op(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids
    ) -> None:
        """Nothing to settle: no error, nothing written."""
        thread = ids.thread()
        names = await _three(interrupts, ids, thread, ids.run())
        await batch.commit_batch(thread, [])
        assert [r.interrupt_id for r in await interrupts.list_pending(thread)] == names

    async def test_a_response_that_cannot_be_stored_settles_nothing(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids
    ) -> None:
        """InvalidValue in the last entry leaves the first one pending."""
        thread = ids.thread()
        names = await _three(interrupts, ids, thread, ids.run())
        with pytest.raises(InvalidValue):
            await batch.commit_batch(
                thread,
                [
                    InterruptAnswer(interrupt_id=names[0]),
                    InterruptAnswer(interrupt_id=names[1], response={"x": float("nan")}),
                ],
            )
        assert len(await interrupts.list_pending(thread)) == 3

    async def test_of_two_batches_at_once_exactly_one_is_applied(
        self, interrupts: InterruptStore, batch: BatchCommit, ids: Ids
    ) -> None:
        """Overlapping batches: the winner's answers everywhere, the loser wrote nothing."""
        thread, run = ids.thread(), ids.run()
        for _ in range(5):
            names = await _three(interrupts, ids, thread, run)
            won, lost = await outcomes(
                [
                    batch.commit_batch(
                        thread,
                        [InterruptAnswer(interrupt_id=n, response=who) for n in order],
                    )
                    for who, order in (("a", names), ("b", names[::-1]))
                ]
            )
            assert (len(won), [type(e) for e in lost]) == (1, [InterruptConflict])
            answers = [await interrupts.get(thread, n) for n in names]
            assert len({r.response for r in answers if r is not None}) == 1


async def _lists(interrupts: InterruptStore, thread: str, run: str) -> list[list[str]]:
    """Ids in all, pending, all of the run, pending of the run."""
    found = [
        await interrupts.list(thread),
        await interrupts.list_pending(thread),
        await interrupts.list_by_run(thread, run),
        await interrupts.list_pending_by_run(thread, run),
    ]
    return [[r.interrupt_id for r in rows] for rows in found]


async def _three(interrupts: InterruptStore, ids: Ids, thread: str, run: str) -> list[str]:
    names = [ids.interrupt() for _ in range(3)]
    for n, name in enumerate(names):
        await interrupts.create(interrupt(thread, run, name, at=_T0 + n))
    return names


async def _resolve_yes(interrupts: InterruptStore, thread: str, name: str) -> None:
    await interrupts.resolve(thread, name, {"a": 1})


async def _resolve_no(interrupts: InterruptStore, thread: str, name: str) -> None:
    await interrupts.resolve(thread, name, {"a": 2})


async def _cancel(interrupts: InterruptStore, thread: str, name: str) -> None:
    await interrupts.cancel(thread, name)
