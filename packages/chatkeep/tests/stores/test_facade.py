"""The five stores over a backend: what the plain methods do, and what they cost."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep import (
    UNSET,
    ActivityRecord,
    InterruptAnswer,
    InterruptConflict,
    InterruptRecord,
    InvalidValue,
    MemoryBackend,
    Persistence,
    RunConflict,
    RunPatch,
    Scope,
    ThreadConflict,
    codec,
    memory_persistence,
)
from chatkeep._facade import _digest_of
from chatkeep.stores import NO_THREAD, Splice, TurnCommit, TurnReceipt, ViewQuery

pytestmark = pytest.mark.anyio


class Probe(MemoryBackend):
    """A memory backend that counts reads and commits, and can be disturbed before a commit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commits: list[TurnCommit] = []
        self.reads: list[str] = []
        self.before_commit: Any = None

    async def _read_view(self, thread_id: str, query: ViewQuery) -> Any:
        self.reads.append(query.messages)
        return await super()._read_view(thread_id, query)

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        self.commits.append(commit)
        if self.before_commit is not None:
            await self.before_commit()
        return await super()._commit_turn(commit)


@pytest.fixture
def probe() -> Probe:
    return Probe()


def user(text: str, message_id: str | None = None) -> Any:
    message = {"role": "user", "content": text}
    return message if message_id is None else {"id": message_id, **message}


# ------------------------------------------------------------------------ save_thread


async def test_saving_an_equal_list_commits_nothing(probe: Probe) -> None:
    messages = probe.persistence().stores.messages
    rows = [user("a", "1"), {"role": "assistant", "content": None, "toolCalls": []}]
    await messages.save_thread("t", rows)
    await messages.save_thread("t", copy.deepcopy(rows))
    await messages.save_thread("none", [])
    assert len(probe.commits) == 1


async def test_saving_writes_only_what_follows_the_common_prefix(probe: Probe) -> None:
    messages = probe.persistence().stores.messages
    rows = [user(str(i), str(i)) for i in range(10)]
    await messages.save_thread("t", rows)
    await messages.save_thread("t", [*rows, user("new")])
    assert probe.commits[-1].splice.tail == [user("new")]
    await messages.save_thread("t", [*rows[:9], user("other", "9")])
    splice = probe.commits[-1].splice
    assert (splice.keep_through, splice.tail) == (9, [user("other", "9")])
    assert await messages.load_thread("t") == [*rows[:9], user("other", "9")]


async def test_a_message_changed_in_place_is_saved(probe: Probe) -> None:
    messages = probe.persistence().stores.messages
    rows = [user("a", "1"), user("b", "2")]
    await messages.save_thread("t", rows)
    rows[0]["content"] = "changed"
    await messages.save_thread("t", rows)
    assert (await messages.load_thread("t"))[0]["content"] == "changed"


async def test_what_an_overwrite_takes_off_is_archived_unless_told_otherwise(
    memory: Persistence,
) -> None:
    messages = memory.stores.messages
    await messages.save_thread("t", [user("a", "1"), user("b", "2")])
    await messages.save_thread("t", [user("c", "3")])
    [cut] = await messages.list_cuts("t")
    assert cut.message_ids == ["1", "2"]
    await messages.save_thread("t", [], archive=False)
    assert await messages.list_cuts("t") == [cut]
    assert await messages.load_thread("t") == []


async def test_a_save_that_meets_another_writer_reads_again_and_wins(probe: Probe) -> None:
    store = probe.persistence().stores.messages
    await store.save_thread("t", [user("a", "1")])
    rivals = iter([[user("x", "9")], [user("y", "8")]])

    async def disturb() -> None:
        probe.before_commit = None
        rival = next(rivals, None)
        if rival is not None:
            await store.save_thread("t", rival)
            probe.before_commit = disturb

    probe.before_commit = disturb
    await store.save_thread("t", [user("a", "1"), user("b", "2")])
    assert [m["id"] for m in await store.load_thread("t")] == ["1", "2"]


async def test_a_save_gives_up_at_the_timeout() -> None:
    probe = Probe(timeout=0.05)
    other = probe.persistence().stores.messages
    count = 0

    async def disturb() -> None:
        nonlocal count
        count += 1
        splice = Splice(keep_through=0, tail=[user(str(count))])
        await MemoryBackend._commit_turn(
            probe, TurnCommit(commit_id=str(count), thread_id="t", splice=splice)
        )

    probe.before_commit = disturb
    with pytest.raises(ThreadConflict):
        await other.save_thread("t", [user("a")])
    assert count > 1


async def test_two_saves_at_once_leave_one_whole_list(memory: Persistence) -> None:
    messages = memory.stores.messages
    lists = [[user(f"{n}-{i}") for i in range(20)] for n in range(8)]
    await asyncio.gather(*(messages.save_thread("t", rows) for rows in lists))
    assert await messages.load_thread("t") in lists


async def test_an_unstorable_message_is_named_by_its_place_in_the_list(
    memory: Persistence,
) -> None:
    messages = memory.stores.messages
    await messages.save_thread("t", [user("a")])
    before = await messages.load_transcript("t")
    for bad in (float("nan"), object(), float("inf")):
        with pytest.raises(InvalidValue) as caught:
            await messages.save_thread("t", [user("a"), user("b"), {"role": "x", "n": [bad]}])
        assert caught.value.path == "messages[2].n[0]"
        tail = [{"role": "x", "n": bad}]
        with pytest.raises(InvalidValue) as caught:
            await messages.splice_thread("t", keep=1, tail=tail, expected=before.revision)
        assert caught.value.path == "tail[0].n"
    assert await messages.load_transcript("t") == before


@dataclasses.dataclass
class Part:
    _type: str


@pytest.mark.parametrize(
    "message",
    [
        {"n": [float("nan")], "content": None},
        {"content": float("nan")},
        {"content": Part("x")},
        {"content": "\ud800"},
        {"content": 2**70},
        {"content": ("a", None)},
        {"content": "null"},
        {"content": b"x"},
        [None],
    ],
    ids=repr,
)
def test_the_quick_digest_is_that_of_the_codec_or_refuses_like_it(message: Any) -> None:
    try:
        expected = codec.digest(codec.encode(message))
    except InvalidValue:
        with pytest.raises(InvalidValue):
            _digest_of(message, 0)
    else:
        assert _digest_of(message, 0) == expected


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(), plain, max_size=4))
def test_the_quick_digest_never_differs_from_the_codecs(message: dict[str, Any]) -> None:
    test_the_quick_digest_is_that_of_the_codec_or_refuses_like_it(message)


# ------------------------------------------------- saving what this process has seen


@pytest.mark.parametrize("seen", ["saved", "loaded"])
async def test_an_end_added_to_a_list_seen_before_is_one_commit_without_a_read(
    probe: Probe, seen: str
) -> None:
    store = probe.persistence().stores.messages
    rows = [user("a", "1"), {"role": "assistant", "content": None}]
    await store.save_thread("t", rows)
    if seen == "loaded":
        probe.fingerprints.put(probe.scope, "t", None)
        rows = await store.load_thread("t")
    probe.reads.clear()
    probe.commits.clear()
    for n in range(70):
        rows = [*copy.deepcopy(rows), user(f"n{n}")]
        await store.save_thread("t", rows)
    assert probe.reads == []
    assert [len(commit.splice.tail) for commit in probe.commits] == [1] * 70
    assert await store.load_thread("t") == rows


async def test_an_unchanged_list_seen_before_reads_the_revision_and_no_digest(
    probe: Probe,
) -> None:
    store = probe.persistence().stores.messages
    await store.save_thread("t", [user("a"), user("b")])
    probe.reads.clear()
    await store.save_thread("t", [user("a"), user("b")])
    assert (probe.reads, len(probe.commits)) == (["none"], 1)


async def test_an_unchanged_list_overwrites_what_others_wrote_meanwhile(probe: Probe) -> None:
    store = probe.persistence().stores.messages
    rows = [user("a", "1")]
    await store.save_thread("t", rows)
    splice = Splice(keep_through=1, tail=[user("theirs", "2")])
    await probe.commit_turn(TurnCommit(commit_id="x", thread_id="t", splice=splice))
    await store.save_thread("t", rows)
    assert await store.load_thread("t") == rows
    await probe.commit_turn(TurnCommit(commit_id="y", thread_id="t", splice=splice))
    await store.save_thread("t", [*rows, user("mine", "3")])
    assert await store.load_thread("t") == [*rows, user("mine", "3")]
    assert [cut.message_ids for cut in await store.list_cuts("t")] == [["2"], ["2"]]


async def test_a_deleted_thread_is_saved_whole_again(probe: Probe) -> None:
    store = probe.persistence().stores.messages
    rows = [user("a"), user("b")]
    await store.save_thread("t", rows)
    await probe.delete_thread("t")
    await store.save_thread("t", rows)
    assert await store.load_thread("t") == rows
    await probe.delete_thread("t")
    await store.save_thread("t", [*rows, user("c")])
    assert await store.load_thread("t") == [*rows, user("c")]


async def test_what_a_scope_has_seen_says_nothing_about_another(probe: Probe) -> None:
    rows = [user("a"), user("b")]
    await probe.persistence().stores.messages.save_thread("t", rows)
    other = probe.persistence().scoped(Scope(tenant_id="x")).stores.messages
    await other.save_thread("t", rows)
    assert await other.load_thread("t") == rows


values = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
rows_of_any = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
lists = st.lists(rows_of_any.map(lambda row: {"role": "user", **row}), max_size=5)


@settings(max_examples=100)
@given(st.lists(st.tuples(lists, st.integers(0, 5)), max_size=8))
def test_any_sequence_of_saves_leaves_the_last_list(steps: Any) -> None:
    async def run() -> None:
        store = memory_persistence().stores.messages
        rows: list[Any] = []
        for tail, keep in steps:
            rows = copy.deepcopy(rows[:keep]) + tail
            await store.save_thread("t", rows)
            assert await store.load_transcript("t") == await store.load_transcript("t")
            stored = await store.load_thread("t")
            assert codec.encode(stored) == codec.encode(rows)
            if rows:
                rows[0]["a"] = len(rows)
                await store.save_thread("t", rows)
                assert codec.encode(await store.load_thread("t")) == codec.encode(rows)

    asyncio.run(run())


# ---------------------------------------------------------------- revisions and windows


async def test_a_splice_is_counted_in_messages_and_compared_by_revision(
    memory: Persistence,
) -> None:
    messages = memory.stores.messages
    first = await messages.splice_thread("t", keep=0, tail=[user("a")], expected=NO_THREAD)
    with pytest.raises(ThreadConflict):
        await messages.splice_thread("t", keep=0, tail=[], expected=NO_THREAD)
    for keep in (-1, 2):
        with pytest.raises(InvalidValue, match="keep"):
            await messages.splice_thread("t", keep=keep, tail=[], expected=first.revision)
    second = await messages.splice_thread("t", keep=1, tail=[user("b")], expected=first.revision)
    assert (first.numbers, second.numbers) == ([1], [2])
    same = await messages.splice_thread("t", keep=2, tail=[], expected=second.revision)
    assert same.revision == second.revision


async def test_a_run_or_an_interrupt_leaves_the_revision_alone(memory: Persistence) -> None:
    await memory.stores.runs.create_or_resume("r", "t", started_at=1)
    assert (await memory.stores.messages.load_transcript("t")).revision == NO_THREAD
    await memory.stores.messages.splice_thread("t", keep=0, tail=[user("a")], expected=NO_THREAD)
    before = (await memory.stores.messages.load_transcript("t")).revision
    await memory.stores.runs.update("r", RunPatch(status="completed"))
    await memory.stores.activities.save_activities("t", [])
    assert (await memory.stores.messages.load_transcript("t")).revision == before


async def test_pages_chain_without_gap_or_repeat_also_after_a_cut(memory: Persistence) -> None:
    messages = memory.stores.messages
    rows = [user(str(i), str(i)) for i in range(7)]
    await messages.save_thread("t", rows)
    newest = await messages.load_page("t", limit=3)
    assert (newest.messages, newest.truncated, newest.cursor) == (rows[4:], True, 5)
    await messages.save_thread("t", rows[:3])
    older = await messages.load_page("t", limit=3, before=newest.cursor)
    assert (older.messages, older.truncated, older.cursor) == (rows[:3], False, None)


async def test_a_cut_goes_back_where_it_was_and_what_stood_there_becomes_a_cut(
    memory: Persistence,
) -> None:
    messages = memory.stores.messages
    a, b, c = user("a", "a"), user("b", "b"), user("c", "c")
    await messages.save_thread("t", [a, b])
    await messages.save_thread("t", [a, c])
    state = await messages.load_transcript("t")
    for want in ([a, b], [a, c], [a, b]):
        [cut] = await messages.list_cuts("t")
        with pytest.raises(ThreadConflict):
            await messages.restore_cut("t", cut.cut_id, expected="other")
        await messages.restore_cut("t", cut.cut_id, expected=state.revision)
        state = await messages.load_transcript("t")
        assert state.messages == want
        assert state.numbers == sorted(state.numbers)
    with pytest.raises(ThreadConflict, match="no cut"):
        await messages.restore_cut("t", "unknown", expected=state.revision)


# -------------------------------------------------------------------------------- runs


async def test_a_run_is_created_once_and_every_caller_gets_the_winners_row(
    memory: Persistence,
) -> None:
    runs = memory.stores.runs
    rows = await asyncio.gather(
        *(runs.create_or_resume("r", "t", started_at=n, name=f"n{n}") for n in range(8))
    )
    assert len({(row.started_at, row.name) for row in rows}) == 1


async def test_one_run_id_in_two_threads_belongs_to_one_of_them(memory: Persistence) -> None:
    runs = memory.stores.runs
    results = await asyncio.gather(
        *(runs.create_or_resume("r", f"t{n}", started_at=1) for n in range(4)),
        return_exceptions=True,
    )
    [row] = [r for r in results if not isinstance(r, BaseException)]
    lost = [r for r in results if isinstance(r, RunConflict)]
    assert len(lost) == 3
    assert {error.reason for error in lost} == {"foreign-thread"}
    assert (await runs.get("r")) == row
    assert [await runs.get("r", thread_id=f"t{n}") is None for n in range(4)].count(False) == 1


async def test_a_run_without_a_taker_is_returned_and_with_one_taken_over(
    memory: Persistence, clock: Any
) -> None:
    runs = memory.stores.runs
    first = await runs.create_or_resume("r", "t", started_at=1, lease_token="a", lease_ms=10)
    clock.forward(10)
    assert await runs.create_or_resume("r", "t", started_at=2) == first
    taken = await runs.create_or_resume("r", "t", started_at=2, lease_token="b", lease_ms=10)
    assert (taken.lease.token, taken.lease.until, taken.started_at) == ("b", clock.now + 10, 1)
    assert await runs.create_or_resume("r", "t", started_at=2, lease_token="c") == taken


async def test_updating_an_unknown_run_is_a_no_op_and_makes_no_thread(memory: Persistence) -> None:
    runs = memory.stores.runs
    await runs.update("r", RunPatch(status="completed"))
    await runs.update("r", RunPatch(status="completed"), thread_id="t", lease_token="x")
    assert await memory.list_threads() == type(await memory.list_threads())(threads=[])


async def test_an_update_with_another_lease_is_refused(memory: Persistence) -> None:
    runs = memory.stores.runs
    await runs.create_or_resume("r", "t", started_at=1, lease_token="a")
    with pytest.raises(RunConflict) as caught:
        await runs.update("r", RunPatch(status="completed"), lease_token="b")
    assert caught.value.reason == "lease-lost"
    with pytest.raises(RunConflict):
        await runs.update("r", RunPatch(status="completed"), lease_token="b", thread_id="t")
    assert (await runs.get("r")).status == "running"


async def test_the_active_run_is_the_one_that_started_last_and_ties_go_to_the_newest(
    memory: Persistence, clock: Any
) -> None:
    runs = memory.stores.runs
    assert await runs.find_active_run("t") is None
    await runs.create_or_resume("late", "t", started_at=9, lease_token="x", lease_ms=5)
    for name in ("first", "second"):
        await runs.create_or_resume(name, "t", started_at=3)
    assert (await runs.find_active_run("t")).run_id == "late"
    clock.forward(5)
    assert (await runs.find_active_run("t")).run_id == "second"
    assert [r.run_id for r in await runs.list_by_thread("t")] == ["first", "second", "late"]


async def test_children_are_listed_for_many_parents_at_once(memory: Persistence) -> None:
    runs = memory.stores.runs
    for n, parent in enumerate(["p", "q", "p"]):
        child = f"c{n}"
        await runs.create_or_resume(
            child,
            f"subagent:{child}",
            started_at=5 - n,
            parent_run_id=parent,
            subagent_run_id=child,
        )
    found = await runs.list_by_parent_runs(["p", "q", "none"])
    assert {k: [r.run_id for r in v] for k, v in found.items()} == {
        "p": ["c2", "c0"],
        "q": ["c1"],
        "none": [],
    }
    assert await runs.list_by_parent_runs([]) == {}


async def test_reclaimable_runs_are_running_and_left_long_enough_ago(memory: Persistence) -> None:
    runs = memory.stores.runs
    for name, since in (("b", 20), ("a", 10), ("new", 21), ("done", 1), ("watched", None)):
        await runs.create_or_resume(name, "t", started_at=1)
        await runs.update(name, RunPatch(detached_since=since))
    await runs.update("done", RunPatch(status="completed"))
    found = await runs.list_reclaimable(now=120, ttl_ms=100)
    assert [run.run_id for run in found] == ["a", "b"]
    assert len(await runs.list_reclaimable(now=120, ttl_ms=100, limit=1)) == 1


# --------------------------------------------------------------------------- interrupts


def asked(interrupt_id: str, run_id: str = "r", at: int = 1, **fields: Any) -> InterruptRecord:
    return InterruptRecord(
        interrupt_id=interrupt_id,
        run_id=run_id,
        thread_id="t",
        requested_at=at,
        payload={},
        **fields,
    )


async def test_the_first_answer_stays(memory: Persistence) -> None:
    interrupts = memory.stores.interrupts
    assert await interrupts.create(asked("i"))
    assert not await interrupts.create(asked("i"))
    await interrupts.resolve("t", "i", {"approved": True})
    settled = await interrupts.get("t", "i")
    with pytest.raises(InterruptConflict, match="already resolved"):
        await interrupts.cancel("t", "i")
    assert not await interrupts.create(asked("i"))
    assert await interrupts.get("t", "i") == settled


async def test_an_unknown_interrupt_is_answered_without_effect(memory: Persistence) -> None:
    interrupts = memory.stores.interrupts
    await interrupts.resolve("t", "i")
    await interrupts.cancel("t", "i", run_id="r")
    assert await interrupts.list("t") == []
    assert (await memory.list_threads()).threads == []


async def test_a_response_is_absent_null_or_a_value(memory: Persistence) -> None:
    interrupts = memory.stores.interrupts
    for name, response in (("absent", UNSET), ("null", None), ("value", False)):
        await interrupts.create(asked(name))
        await interrupts.resolve("t", name, response)
        assert (await interrupts.get("t", name)).response is response


async def test_lists_are_in_order_of_request_and_ties_in_order_of_insertion(
    memory: Persistence,
) -> None:
    interrupts = memory.stores.interrupts
    for name, run_id, at in (("c", "r1", 5), ("b", "r2", 1), ("a", "r1", 5), ("z", "r2", 5)):
        await interrupts.create(asked(name, run_id, at))
    await interrupts.cancel("t", "c")

    def ids(records: Any) -> list[str]:
        return [record.interrupt_id for record in records]

    assert ids(await interrupts.list("t")) == ["b", "c", "a", "z"]
    assert ids(await interrupts.list_pending("t")) == ["b", "a", "z"]
    assert ids(await interrupts.list_by_run("t", "r1")) == ["c", "a"]
    assert ids(await interrupts.list_pending_by_run("t", "r1")) == ["a"]


@pytest.mark.parametrize(
    "batch", [["a", "a"], ["a", "none"], ["a", "done"]], ids=["twice", "unknown", "settled"]
)
async def test_a_batch_is_settled_whole_or_not_at_all(
    memory: Persistence, batch: list[str]
) -> None:
    interrupts = memory.stores.interrupts
    for name in ("a", "b", "done"):
        await interrupts.create(asked(name))
    await interrupts.cancel("t", "done")
    before = await interrupts.list("t")
    with pytest.raises(InterruptConflict):
        await interrupts.commit_batch("t", [InterruptAnswer(interrupt_id=n) for n in batch])
    assert await interrupts.list("t") == before
    await interrupts.commit_batch("t", [InterruptAnswer(interrupt_id=n) for n in ("b", "a")])
    assert await interrupts.list_pending("t") == []
    await interrupts.commit_batch("t", [])


async def test_one_interrupt_id_under_two_runs_is_two_interrupts(memory: Persistence) -> None:
    interrupts = memory.stores.interrupts
    await interrupts.create(asked("i", "r1"))
    await interrupts.create(asked("i", "r2"))
    await interrupts.resolve("t", "i", 1, run_id="r1")
    assert (await interrupts.get("t", "i")).run_id == "r2"
    assert (await interrupts.get("t", "i", run_id="r1")).response == 1


# ----------------------------------------------------------------- activities, metadata


async def test_activities_are_overwritten_whole_and_keep_their_order(memory: Persistence) -> None:
    store = memory.stores.activities
    rows = [
        ActivityRecord(id=n, activity_type="x", content={"n": n}, index=i)
        for n, i in (("b", 1), ("a", 1), ("c", 0))
    ]
    await store.save_activities("t", rows)
    assert await store.load_activities("t") == rows
    await store.save_activities("t", rows[:1])
    assert await store.load_activities("t") == rows[:1]
    await store.save_activities("t", [])
    assert await store.load_activities("t") == []


async def test_a_metadata_revision_is_compared_and_never_comes_back(memory: Persistence) -> None:
    store = memory.stores.metadata
    first = await store.set_if("ns", "k", 1, None)
    assert await store.set_if("ns", "k", 2, None) is None
    second = await store.set_if("ns", "k", 2, first)
    await store.delete("ns", "k")
    await store.delete("ns", "k")
    third = await store.set_if("ns", "k", 1, None)
    await store.set("ns", "k", 3)
    found = await store.get_versioned("ns", "k")
    assert len({first, second, third, found.revision}) == 4
    assert await store.set_if("ns", "k", 9, second) is None
    assert await store.set_if("ns", "k", 9, "*") is None
    assert await store.get("ns", "k") == 3


async def test_a_metadata_key_is_a_pair(memory: Persistence) -> None:
    store = memory.stores.metadata
    await store.set("a:b", "c", 1)
    await store.set("a", "b:c", 2)
    await store.set("a", "", 3)
    assert [await store.get(*key) for key in (("a:b", "c"), ("a", "b:c"), ("a", ""))] == [1, 2, 3]
    with pytest.raises(InvalidValue, match="null"):
        await store.set("a", "k", None)
    assert await store.get("a", "k") is None


async def test_each_store_names_its_backend(memory: Persistence) -> None:
    [backend] = memory.backends
    assert [store.backend for store in memory.stores.present().values()] == [backend] * 5
    view = await backend.read_view("t", ViewQuery())
    assert not view.exists


@pytest.mark.parametrize("name", ["", "a\x00b", "a\ud800", "x" * 1025])
async def test_no_id_is_taken_for_one_where_something_is_looked_up_or_erased(name: str) -> None:
    """Else what cannot have been written would read as "not there"."""
    async with memory_persistence() as persistence:
        interrupts = persistence.stores.interrupts
        assert interrupts is not None
        for call in (
            interrupts.get("t", name),
            interrupts.get("t", "i", run_id=name),
            interrupts.list_by_run("t", name),
            interrupts.list_pending_by_run("t", name),
            persistence.erase_messages("t", ["m", name]),
        ):
            with pytest.raises(InvalidValue):
                await call
