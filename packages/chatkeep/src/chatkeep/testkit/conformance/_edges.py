"""Text and numbers at the edges: what one database would refuse or change, all refuse."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chatkeep.errors import InvalidValue
from chatkeep.records import ActivityRecord, Lease, RunError, RunPatch
from chatkeep.stores import (
    ActivityStore,
    CutAppend,
    CutArchive,
    InterruptAnswer,
    InterruptRef,
    MessageStore,
    PagedMessages,
    ReclaimableRuns,
    RunStart,
    RunStore,
    Splice,
    ThreadAdmin,
    TurnBackend,
    VersionedMetadata,
)
from chatkeep.testkit.conformance._base import ConformanceCase, Ids, interrupt, user
from chatkeep.testkit.conformance._turnkit import T0, see, start_turn, still, turn

__all__ = ["TestEdges"]

ODD_TEXT = {"NUL": "a\x00b", "half a character": "a\ud800b"}

BEYOND = {"54 bits": 2**53, "64 bits": -(2**63) - 1, "100 digits": 10**100}

_GIVEN, _STORED = "a\x00b\ud800c", "a\x00b\ufffdc"


class TestEdges(ConformanceCase):
    """One rule for every backend, before a driver sees the value."""

    async def test_the_text_of_a_run_is_kept(self, runs: RunStore, ids: Ids) -> None:
        """NUL stays, half a character becomes U+FFFD, in whatever field."""
        run, thread = ids.run(), ids.thread()
        await runs.create_or_resume(run, thread, started_at=T0, extra={"own": _GIVEN})
        patch = RunPatch(
            error=RunError(message=_GIVEN, code=_GIVEN),
            sandbox_key=_GIVEN,
            usage={_GIVEN: _GIVEN},
            extra={"more": _GIVEN},
        )
        await runs.update(run, patch, thread_id=thread)
        found = await runs.get(run)
        assert found is not None
        assert found.error == RunError(message=_STORED, code=_STORED)
        assert found.sandbox_key == _STORED
        assert found.usage == {_STORED: _STORED}
        assert found.model_extra == {"own": _STORED, "more": _STORED}

    async def test_the_text_of_an_activity_is_kept(
        self, activities: ActivityStore, ids: Ids
    ) -> None:
        """Its id and type are data, not keys."""
        thread = ids.thread()
        row = ActivityRecord(
            id=_GIVEN,
            activity_type=_GIVEN,
            content={_GIVEN: _GIVEN},
            index=0,
            metadata={"k": _GIVEN},
        )
        await activities.save_activities(thread, [row])
        (found,) = await activities.load_activities(thread)
        assert (found.id, found.activity_type) == (_STORED, _STORED)
        assert (found.content, found.metadata) == ({_STORED: _STORED}, {"k": _STORED})

    async def test_the_text_of_a_message_is_kept(self, messages: MessageStore, ids: Ids) -> None:
        """Names, call ids and errors too."""
        thread = ids.thread()
        row: Any = {"role": "tool", "content": _GIVEN, "toolCallId": _GIVEN, "error": _GIVEN}
        await messages.save_thread(thread, [row, user(_GIVEN, name=_GIVEN)])
        stored: Any = {"role": "tool", "content": _STORED, "toolCallId": _STORED, "error": _STORED}
        assert await messages.load_thread(thread) == [stored, user(_STORED, name=_STORED)]

    @pytest.mark.parametrize("role", [None, 7, ["user"], "absent"])
    async def test_a_message_without_a_role_is_refused(
        self, messages: MessageStore, ids: Ids, role: Any
    ) -> None:
        """What is stored can be read back as a message, or is corrupt."""
        thread = ids.thread()
        await messages.save_thread(thread, [user("a", "m1")])
        bad: Any = {"id": "m2", "content": "x"} | ({} if role == "absent" else {"role": role})
        with pytest.raises(InvalidValue, match="role"):
            await messages.save_thread(thread, [user("b", "m1"), bad])
        assert await messages.load_thread(thread) == [user("a", "m1")]

    @pytest.mark.parametrize("odd", ODD_TEXT)
    async def test_odd_text_names_nothing(self, backend: TurnBackend, ids: Ids, odd: str) -> None:
        """Lease tokens, revisions, cuts and links follow the rules of ids; nothing is written."""
        bad, thread, run = ODD_TEXT[odd], ids.thread(), ids.run()
        await start_turn(backend, thread, run, "mine")
        before = still(await see(backend, thread, run))
        tail = [user("z")]

        def commit(**parts: Any) -> Callable[[], Awaitable[Any]]:
            return lambda: backend.commit_turn(turn(thread, **parts))

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "token of a start": commit(
                run=RunStart(run_id=ids.run(), started_at=T0, lease_token=bad)
            ),
            "parent": commit(run=RunStart(run_id=ids.run(), started_at=T0, parent_run_id=bad)),
            "name": commit(run=RunStart(run_id=ids.run(), started_at=T0, name=bad)),
            "token of a patch": commit(run_id=run, run=RunPatch(lease=Lease(token=bad, until=T0))),
            "token of a commit": commit(
                run_id=run, lease_token=bad, splice=Splice(keep_through=0, tail=tail)
            ),
            "token of a draft": lambda: backend.save_draft(thread, run, tail, lease_token=bad),
            "token of a renewal": lambda: backend.renew_lease(thread, run, bad, 1000),
            "revision": commit(splice=Splice(keep_through=0, tail=tail, expected=bad)),
            "cut": commit(cut_append=CutAppend(cut_id=bad, messages=tail)),
            "restored cut": commit(restore=bad),
            "answer": commit(answers=[InterruptAnswer(interrupt_id=bad)]),
            "run of an answer": commit(answers=[InterruptAnswer(interrupt_id="i", run_id=bad)]),
            "claim": commit(run_id=run, claims=[InterruptRef(interrupt_id="i", run_id=bad)]),
        }
        taken: list[str] = []
        for what, call in calls.items():
            try:
                await call()
            except InvalidValue:
                continue
            taken.append(what)
        assert taken == []
        assert still(await see(backend, thread, run)) == before

    @pytest.mark.parametrize("odd", ODD_TEXT)
    async def test_an_odd_revision_of_a_value_is_refused(
        self, versioned: VersionedMetadata, ids: Ids, odd: str
    ) -> None:
        """A revision that no database could hold is a mistake, not a mismatch."""
        name = ids("n")
        with pytest.raises(InvalidValue):
            await versioned.set_if(name, "k", 1, ODD_TEXT[odd])
        assert await versioned.get_versioned(name, "k") is None

    @pytest.mark.parametrize("size", BEYOND)
    async def test_a_time_beyond_53_bits_is_refused(
        self, backend: TurnBackend, ids: Ids, size: str
    ) -> None:
        """So that each database, and a browser, reads the number that was written."""
        big, thread, run = BEYOND[size], ids.thread(), ids.run()
        await start_turn(backend, thread, run, "mine")
        before = still(await see(backend, thread, run))

        def commit(**parts: Any) -> Callable[[], Awaitable[Any]]:
            return lambda: backend.commit_turn(turn(thread, **parts))

        for call in (
            commit(run=RunStart(run_id=ids.run(), started_at=big)),
            commit(run=RunStart(run_id=ids.run(), started_at=T0, lease_token="t", lease_ms=big)),
            commit(run=RunStart(run_id=ids.run(), started_at=T0, hide_from=big)),
            commit(run_id=run, run=RunPatch(finished_at=big)),
            commit(run_id=run, run=RunPatch(detached_since=big)),
            commit(run_id=run, run=RunPatch(driver_epoch=big)),
            commit(run_id=run, run=RunPatch(lease=Lease(token="t", until=big))),
            commit(interrupts=[interrupt(thread, run, "i1", at=big)]),
            commit(splice=Splice(keep_through=big)),
            lambda: backend.renew_lease(thread, run, "mine", big),
        ):
            with pytest.raises(InvalidValue):
                await call()
        assert still(await see(backend, thread, run)) == before

    async def test_a_time_is_an_integer(self, runs: RunStore, ids: Ids) -> None:
        """Seconds with a fraction, and other numbers that are none, are refused."""
        for odd in (1.5, 1_700_000_000.0, True, "1", None):
            run: Any = ids.run()
            with pytest.raises(InvalidValue):
                await runs.create_or_resume(run, ids.thread(), started_at=odd)  # type: ignore[arg-type]
            assert await runs.get(run) is None

    async def test_a_page_may_be_asked_for_as_large_as_numbers_go(
        self,
        messages: MessageStore,
        paged: PagedMessages,
        admin: ThreadAdmin,
        reclaimable: ReclaimableRuns,
        cuts: CutArchive,
        ids: Ids,
    ) -> None:
        """Up to 53 bits it is only a large limit; more is refused, the same everywhere."""
        thread, most = ids.thread(), 2**53 - 1
        await messages.save_thread(thread, [user("a", "m1")])
        page = await paged.load_page(thread, limit=most)
        assert [m.get("id") for m in page.messages] == ["m1"]
        assert (await admin.list_threads(limit=most)).cursor is None
        assert await cuts.purge_cuts(thread, before=most) == 0
        for beyond in (2**53, sys.maxsize, 10**30):
            with pytest.raises(InvalidValue):
                await paged.load_page(thread, limit=beyond)
            with pytest.raises(InvalidValue):
                await paged.load_page(thread, limit=1, before=beyond)
            with pytest.raises(InvalidValue):
                await admin.list_threads(limit=beyond)
            with pytest.raises(InvalidValue):
                await reclaimable.list_reclaimable(now=beyond, ttl_ms=0)
            with pytest.raises(InvalidValue):
                await cuts.purge_cuts(thread, before=beyond)
