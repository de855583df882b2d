"""What the base class does around every primitive, and what it refuses before one."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from chatkeep import (
    ActivityRecord,
    BackendUnavailable,
    InterruptAnswer,
    InterruptConflict,
    InterruptRecord,
    InterruptRef,
    InvalidValue,
    MemoryBackend,
    RunConflict,
    RunPatch,
    Scope,
    StoreClosed,
    ThreadConflict,
)
from chatkeep.stores import (
    NO_THREAD,
    ActivitiesWrite,
    CutAppend,
    RunStart,
    Splice,
    TurnCommit,
    TurnReceipt,
    ViewQuery,
)

pytestmark = pytest.mark.anyio


class DriverError(Exception):
    """What a driver raises."""


class Flaky(MemoryBackend):
    """Raises what it is given, one error a call, before or after the work is done."""

    commit_retries = 2

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opening: list[Exception] = []
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.commits: list[str] = []

    async def _open(self) -> None:
        if self.opening:
            raise self.opening.pop(0)

    async def _ping(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.before:
            raise self.before.pop(0)

    async def _commit_turn(self, commit: TurnCommit) -> TurnReceipt:
        self.commits.append(commit.commit_id)
        if self.before:
            raise self.before.pop(0)
        receipt = await super()._commit_turn(commit)
        if self.after:
            raise self.after.pop(0)
        return receipt

    def _translate(self, error: Exception) -> Exception:
        return BackendUnavailable("down") if isinstance(error, DriverError) else error


@pytest.fixture
def flaky() -> Flaky:
    return Flaky()


def user(name: str) -> Any:
    return {"id": name, "role": "user", "content": name}


def commit(commit_id: str = "c", **parts: Any) -> TurnCommit:
    return TurnCommit(commit_id=commit_id, thread_id="t", **parts)


# --------------------------------------------------------------------------- the guard


async def test_a_failed_set_up_is_tried_again_by_the_next_call(flaky: Flaky) -> None:
    flaky.opening = [DriverError()]
    with pytest.raises(BackendUnavailable):
        await flaky.ping()
    await flaky.ping()


async def test_a_driver_error_is_mapped_and_chained_and_others_pass(flaky: Flaky) -> None:
    flaky.before = [DriverError("x"), ZeroDivisionError("bug")]
    with pytest.raises(BackendUnavailable) as caught:
        await flaky.ping()
    assert isinstance(caught.value.__cause__, DriverError)
    with pytest.raises(ZeroDivisionError, match="bug"):
        await flaky.ping()


async def test_a_commit_whose_reply_was_lost_is_sent_again_and_applied_once(flaky: Flaky) -> None:
    flaky.before = [DriverError()]
    flaky.after = [DriverError()]
    receipt = await flaky.commit_turn(commit(splice=Splice(keep_through=0, tail=[user("a")])))
    assert receipt.replayed
    assert receipt.numbers == [1]
    assert flaky.commits == ["c"] * 3
    assert len((await flaky.read_view("t", ViewQuery())).messages) == 1


async def test_a_commit_is_given_up_after_its_retries(flaky: Flaky) -> None:
    flaky.before = [DriverError() for _ in range(9)]
    with pytest.raises(BackendUnavailable):
        await flaky.commit_turn(commit())
    assert len(flaky.commits) == 3


async def test_a_call_ends_at_its_timeout_and_its_outcome_is_unknown() -> None:
    flaky = Flaky(timeout=0.01)
    flaky.gate = asyncio.Event()
    with pytest.raises(BackendUnavailable, match=r"within 0\.01 s") as caught:
        await flaky.ping()
    assert caught.value.outcome_unknown


async def test_a_call_is_finished_before_its_cancelled_caller_goes_on(
    flaky: Flaky, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.gate = asyncio.Event()
    flaky.before = [DriverError()]
    task = asyncio.create_task(flaky.ping())
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    with caplog.at_level(logging.WARNING, "chatkeep.backend"):
        flaky.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert flaky.before == []
    assert "while its caller was cancelled: down" in caplog.text


async def test_every_handle_of_a_closed_backend_says_so(flaky: Flaky) -> None:
    other = flaky.scoped(Scope(tenant_id="x"))
    await other.aclose()
    await flaky.aclose()
    for handle in (flaky, other):
        with pytest.raises(StoreClosed, match="memory persistence is closed"):
            await handle.read_view("t", ViewQuery())
        with pytest.raises(StoreClosed):
            await handle.persistence().stores.messages.save_thread("t", [])


async def test_handles_share_the_backend_and_not_the_scope(flaky: Flaky) -> None:
    other = flaky.scoped(Scope(tenant_id="x"))
    assert other.resource is flaky.resource
    assert (flaky.scope, other.scope) == (Scope(), Scope(tenant_id="x"))
    await flaky.setup()
    await flaky.check_schema()


# ------------------------------------------------------------------- what is refused first

INTERRUPT = InterruptRecord(interrupt_id="i", run_id="r", thread_id="t", requested_at=1, payload={})
START = RunStart(run_id="r", started_at=1)


@pytest.mark.parametrize(
    "bad",
    [
        commit(""),
        commit(run_id=""),
        commit(run=RunStart(run_id="", started_at=1)),
        commit(run=RunStart(run_id="r", started_at=1, parent_run_id="\x00")),
        commit(run=RunStart(run_id="r", started_at=1, status="asleep")),  # type: ignore[arg-type]
        commit(run=RunStart(run_id="r", started_at=1, extra={"runId": "x"})),
        commit(run_id="other", run=START),
        commit(run=RunPatch()),
        commit(claims=[InterruptRef(interrupt_id="i")]),
        commit(lease_token="x"),
        commit(run_id="r", lease_expired=True),
        commit(splice=Splice(keep_through=-1)),
        commit(splice=Splice(keep_through=0), restore="c"),
        commit(restore="c", cut_append=CutAppend(cut_id="c", messages=[])),
        commit(interrupts=[INTERRUPT.model_copy(update={"thread_id": "other"})]),
        commit(interrupts=[INTERRUPT, INTERRUPT]),
        commit(interrupts=[INTERRUPT.model_copy(update={"payload": {"n": float("nan")}})]),
        commit(answers=[InterruptAnswer(interrupt_id="")]),
        commit(answers=[InterruptAnswer(interrupt_id="i", status="pending")]),  # type: ignore[arg-type]
        commit(activities=ActivitiesWrite(puts={}, length=1)),
        commit(
            activities=ActivitiesWrite(
                puts={0: ActivityRecord(id="a", activity_type="x", content={"s": {1}}, index=0)},
                length=1,
            )
        ),
        commit(splice=Splice(keep_through=0, tail=[{"n": object()}])),  # type: ignore[typeddict-unknown-key]
    ],
)
async def test_a_commit_that_cannot_be_meant_is_refused_and_writes_nothing(
    flaky: Flaky, bad: TurnCommit
) -> None:
    with pytest.raises(InvalidValue):
        await flaky.commit_turn(bad)
    assert not (await flaky.read_view("t", ViewQuery())).exists


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.read_view("", ViewQuery()),
        lambda b: b.read_view("t", ViewQuery(run_id="")),
        lambda b: b.read_view("t", ViewQuery(limit=0)),
        lambda b: b.save_draft("t", "", []),
        lambda b: b.renew_lease("", "r", "x", 1),
        lambda b: b.find_run("\ud800"),
        lambda b: b.list_child_runs(["a", ""]),
        lambda b: b.metadata_get("", "k"),
        lambda b: b.metadata_put("n", "\x00", 1, None),
        lambda b: b.load_cut("", "c"),
        lambda b: b.purge_cuts("", before=1),
        lambda b: b.list_threads(limit=0, cursor=None, children=False),
        lambda b: b.erase_messages("", ["m"]),
    ],
)
async def test_a_bad_id_or_limit_never_reaches_a_primitive(flaky: Flaky, call: Any) -> None:
    flaky.opening = [DriverError("a primitive was reached")]
    with pytest.raises(InvalidValue):
        await call(flaky)


# ----------------------------------------------------------------- the order of refusals


async def test_reasons_come_in_one_order_run_interrupt_thread(flaky: Flaky) -> None:
    await flaky.commit_turn(
        commit("1", run=START, interrupts=[INTERRUPT], splice=Splice(keep_through=0))
    )
    wrong = {
        "splice": Splice(keep_through=0, tail=[user("x")], expected="other"),
        "interrupts": [INTERRUPT],
        "run": START,
    }
    for parts, error in ((3, RunConflict), (2, InterruptConflict), (1, ThreadConflict)):
        with pytest.raises(error):
            await flaky.commit_turn(commit("2", **dict(list(wrong.items())[:parts])))
    known = await flaky.commit_turn(commit("1", **wrong))
    assert known.replayed
    view = await flaky.read_view("t", ViewQuery())
    assert (view.revision, view.messages) == (NO_THREAD, [])


async def test_a_thread_remembers_its_last_16_commits(flaky: Flaky) -> None:
    for n in range(17):
        splice = Splice(keep_through=n, tail=[user(str(n))])
        await flaky.commit_turn(commit(str(n), splice=splice))
    for n in range(1, 17):
        again = await flaky.commit_turn(commit(str(n)))
        assert (again.replayed, again.numbers) == (True, [n + 1])
    assert not (await flaky.commit_turn(commit("0"))).replayed


async def test_a_claim_needs_its_run_and_is_seen_while_that_run_lives(flaky: Flaky) -> None:
    claims = [InterruptRef(interrupt_id="i")]
    await flaky.commit_turn(commit("1", run=START, interrupts=[INTERRUPT]))
    with pytest.raises(RunConflict):
        await flaky.commit_turn(commit("2", run_id="none", claims=claims))
    start = RunStart(run_id="r2", started_at=2)
    await flaky.commit_turn(commit("3", run_id="r2", run=start, claims=claims))
    [pending] = (await flaky.read_view("t", ViewQuery())).interrupts
    assert pending.claimed_by == "r2"
    await flaky.commit_turn(commit("4", run_id="r2", run=RunPatch(status="failed")))
    [pending] = (await flaky.read_view("t", ViewQuery())).interrupts
    assert pending.claimed_by is None


async def test_a_detached_result_goes_to_the_cut_and_comes_back_with_it(flaky: Flaky) -> None:
    await flaky.commit_turn(commit("1", splice=Splice(keep_through=0, tail=[user("a")])))
    cut = await flaky.commit_turn(commit("2", splice=Splice(keep_through=0, tail=[user("b")])))
    assert cut.cut_id is not None
    before = (await flaky.read_view("t", ViewQuery())).revision
    append = CutAppend(cut_id=cut.cut_id, messages=[user("answer")])
    await flaky.commit_turn(commit("3", cut_append=append))
    with pytest.raises(ThreadConflict, match="no cut"):
        await flaky.commit_turn(commit("4", cut_append=CutAppend(cut_id="none", messages=[])))
    assert (await flaky.read_view("t", ViewQuery())).revision == before
    [record] = await flaky.list_cuts("t")
    assert (record.numbers, record.message_ids, record.extra) == ([1, 3], ["a", "answer"], 1)
    await flaky.commit_turn(commit("5", restore=cut.cut_id))
    view = await flaky.read_view("t", ViewQuery())
    assert view.messages == [user("a"), user("answer")]
