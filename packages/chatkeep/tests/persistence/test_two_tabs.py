"""Two tabs answer one question: one executes, the other is refused before anything runs.

Also where the stores of a chat are of different places, one of them the application's own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.compose import compose_persistence
from chatkeep.engine.interrupts import resume_approve, resume_cancel, resume_deny
from chatkeep.errors import RunConflict
from chatkeep.memory import memory_persistence
from chatkeep.persistence import hydrate_thread
from chatkeep.records import RunPatch, RunRecord
from chatkeep.scope import Scope
from chatkeep.testkit.faults import with_faults

pytestmark = pytest.mark.anyio

BACKENDS = ("memory", "sqlite", "psycopg")

YES = resume_approve("approval_c1")
PAY = [("c1", "pay", {"n": 1})]


async def race(lab: Any, entries: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """All entries at once, each in a request of its own: who came through, who was refused."""
    ends = await asyncio.gather(
        *(
            lab.resume(entry, run_id=f"tab{n}", parent_run_id="r1", **options)
            for n, entry in enumerate(entries)
        )
    )
    won = [end for end in ends if isinstance(end, RunFinishedEvent)]
    return won, [end for end in ends if isinstance(end, RunErrorEvent)]


def recognised(end: RunErrorEvent, run_id: str = "r1") -> None:
    """The browser takes the refusal as one of its own batch, and does not send it again."""
    assert end.metadata is not None
    errors = end.metadata["tanstack"]["interruptErrors"]
    # Too late for the claim, or even for the question.
    assert [(e["scope"], e["code"]) for e in errors] in (
        [("item", "conflict"), ("batch", "conflict")],
        [("item", "unknown-interrupt"), ("batch", "incomplete-batch")],
    )
    assert end.code == errors[0]["code"]
    for error in errors:
        assert (error["threadId"], error["interruptedRunId"]) == ("t1", run_id)
        assert (error["generation"], error["retryable"]) == (0, False)
    assert errors[0]["interruptId"] == "approval_c1"
    assert errors[1]["interruptIds"] == ["approval_c1"]


async def test_exactly_one_of_two_answers_executes(lab: Any) -> None:
    await lab.pause(PAY)
    for _ in range(3):
        won, lost = await race(lab, [YES, YES])
        if lab.bank.paid:
            break
    assert (len(won), len(lost)) == (1, 1)
    assert lab.bank.paid == [1]
    recognised(lost[0])
    statuses = [await lab.run(f"tab{n}") for n in range(2)]
    assert sorted(r.status for r in statuses if r is not None) == ["completed"]
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool", "assistant"]


async def test_of_a_yes_and_a_no_one_counts(lab: Any) -> None:
    await lab.pause(PAY)
    won, lost = await race(lab, [YES, resume_deny("approval_c1"), resume_cancel("approval_c1")])
    assert (len(won), len(lost)) == (1, 2)
    ((status, response),) = (await lab.settled()).values()
    assert lab.bank.paid == ([1] if (status, response) == ("resolved", {"approved": True}) else [])
    (row,) = [m for m in await lab.stored() if m["role"] == "tool"]
    assert ("paid" in row["content"]) == bool(lab.bank.paid)


async def test_an_answer_while_another_is_at_work_is_a_conflict_and_writes_nothing(
    lab: Any,
) -> None:
    await lab.pause(PAY)
    lab.bank.gate.clear()
    first = asyncio.create_task(lab.resume(YES, run_id="tab0", parent_run_id="r1"))
    await lab.bank.paying.wait()
    before = await lab.everything()
    late = await lab.resume(YES, run_id="tab1", parent_run_id="r1")
    recognised(late)
    assert late.code == "conflict"
    assert await lab.everything() == before
    lab.bank.gate.set()
    assert isinstance(await first, RunFinishedEvent)
    assert lab.bank.paid == [1]


async def test_the_claim_decides_also_between_reads_of_the_same_moment(lab: Any) -> None:
    """Both tabs have read the question as free; the start boundary lets one through."""
    await lab.pause(PAY)
    lab.faults.stall("commit_turn", seconds=0.05, times=1)
    first = asyncio.create_task(lab.resume(YES, run_id="tab0", parent_run_id="r1"))
    await lab.until(lambda: "commit_turn" in lab.faults.log[-2:])
    second = await lab.resume(YES, run_id="tab1", parent_run_id="r1")
    ends = [await first, second]
    lost = [end for end in ends if isinstance(end, RunErrorEvent)]
    assert len(lost) == 1
    recognised(lost[0])
    assert lost[0].code in ("conflict", "unknown-interrupt")
    assert lab.bank.paid == [1]


async def test_the_snapshots_of_a_continuation_show_what_others_stored_behind_its_turn(
    lab: Any, kit: Any
) -> None:
    """A browser shows nothing but the snapshot then; what it did not show, its next post would
    cut."""
    asking, other = kit.Calls([PAY], waits=True), kit.Paced(after=("B",))
    first = lab.start(kit.user("u1"), adapter=asking, run_id="r1")
    await asking.began.wait()
    second = lab.start(kit.user("uB"), adapter=other, run_id="rB")
    await other.began.wait()
    for model, tab in ((asking, first), (other, second)):
        model.go.set()
        await tab
    before = await lab.ids()
    again = [PAY, [("c2", "pay", {"n": 2})]]
    events = await lab.turn(resume=[YES], parent_run_id="r1", adapter=kit.Calls(again))
    began, paused = [
        [m.id for m in event.messages] for event in events if event.type == "MESSAGES_SNAPSHOT"
    ]
    assert began == before
    assert paused == await lab.ids()
    events = await lab.turn(
        resume=[resume_approve("approval_c2")], parent_run_id="r3", adapter=kit.Calls(again)
    )
    (shown,) = [event.messages for event in events if event.type == "MESSAGES_SNAPSHOT"]
    answer = next(e.message_id for e in events if e.type == "TEXT_MESSAGE_START")
    page = [m.model_dump(by_alias=True, exclude_none=True) for m in shown]
    page.append({"id": answer, "role": "assistant", "content": "said"})
    await lab.turn(*page, kit.user("u3"), adapter=kit.Calls([]))
    ids = await lab.ids()
    assert {*before, answer, "u3"} <= {*ids}
    assert await lab.persistence.stores.messages.list_cuts("t1") == []


async def test_two_continuations_under_the_paused_runs_own_id(lab: Any) -> None:
    await lab.pause(PAY)
    ends = await asyncio.gather(
        *(lab.resume(YES, run_id="r1", parent_run_id="r1") for _ in range(2))
    )
    assert sorted(type(end).__name__ for end in ends) == ["RunErrorEvent", "RunFinishedEvent"]
    assert lab.bank.paid == [1]
    assert (await lab.run("r1")).status == "completed"


async def test_new_input_while_an_answer_is_at_work_waits_its_turn(lab: Any, kit: Any) -> None:
    """The question is still pending: were it to fail, the thread would be gated again."""
    await lab.pause(PAY)
    lab.bank.gate.clear()
    first = asyncio.create_task(lab.resume(YES, run_id="tab0"))
    await lab.bank.paying.wait()
    end = kit.terminal(await lab.turn(kit.user("u2")))
    assert end.code == "unknown-interrupt"
    lab.bank.gate.set()
    await first


# ------------------------------------------------------------------- stores of several places


class Own:
    """An interrupt store of the application: the methods of the contract, and nothing else."""

    def __init__(self, *more: str) -> None:
        store = memory_persistence().stores.interrupts
        methods = (
            "create", "resolve", "cancel", "get", "list", "list_pending", "list_by_run",
            "list_pending_by_run", *more,
        )  # fmt: skip
        for name in methods:
            setattr(self, name, getattr(store, name))


class OwnRuns:
    """A runs store of the application: a dict, without leases."""

    def __init__(self) -> None:
        self.runs: dict[str, RunRecord] = {}

    async def create_or_resume(
        self, run_id: str, thread_id: str, *, started_at: int, status: Any = "running", **_: Any
    ) -> RunRecord:
        new = RunRecord(run_id=run_id, thread_id=thread_id, started_at=started_at, status=status)
        return self.runs.setdefault(run_id, new)

    async def update(self, run_id: str, patch: RunPatch, **_: Any) -> None:
        if run_id in self.runs:
            self.runs[run_id] = patch.apply(self.runs[run_id])

    async def get(self, run_id: str, *, thread_id: str | None = None) -> RunRecord | None:
        run = self.runs.get(run_id)
        return run if run and thread_id in (None, run.thread_id) else None

    async def find_active_run(self, thread_id: str) -> RunRecord | None:
        runs = [r for r in self.runs.values() if r.thread_id == thread_id]
        return next((r for r in reversed(runs) if r.status == "running"), None)


PLACES = ["interrupts apart", "runs apart", "messages apart", "all apart",
          "own interrupts", "own interrupts and batch", "own runs",
          "own interrupts and runs"]  # fmt: skip


def apart(kit: Any, where: str) -> Any:
    """A lab on stores of several places."""
    base = kit.Lab(memory_persistence())
    overrides: dict[str, Any] = {}
    if where.startswith("own"):
        if "interrupts" in where:
            overrides["interrupts"] = Own(*(["commit_batch"] if "batch" in where else []))
        if "runs" in where:
            overrides["runs"] = OwnRuns()
    else:
        keys = ["interrupts", "runs"] if where == "all apart" else [where.split()[0]]
        for key in keys:
            other, _ = with_faults(memory_persistence())
            overrides[key] = getattr(other.stores, key)
    base.persistence = compose_persistence(base.persistence, overrides=overrides)
    return base


async def status_of(lab: Any, run_id: str) -> str | None:
    run = await lab.persistence.stores.runs.get(run_id)
    return None if run is None else run.status


@pytest.mark.parametrize("where", PLACES)
async def test_wherever_the_stores_are_one_answer_executes(kit: Any, where: str) -> None:
    for _ in range(10):
        lab = apart(kit, where)
        await lab.pause(PAY)
        won, lost = await race(lab, [YES] * 3)
        assert (len(won), len(lost)) == (1, 2), (where, lost)
        assert lab.bank.paid == [1]
        for end in lost:
            recognised(end)
        assert await lab.settled() == {"approval_c1": ("resolved", {"approved": True})}
        statuses = [await status_of(lab, f"tab{n}") for n in range(3)]
        assert sorted(s for s in statuses if s) == ["completed"]


@pytest.mark.parametrize("where", PLACES)
async def test_wherever_the_stores_are_a_late_answer_has_written_nothing(
    kit: Any, where: str
) -> None:
    lab = apart(kit, where)
    await lab.pause(PAY)
    lab.bank.gate.clear()
    first = asyncio.create_task(lab.resume(YES, run_id="tab0", parent_run_id="r1"))
    await lab.bank.paying.wait()
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == ({"runId": "tab0"}, None)
    late = await lab.resume(YES, run_id="tab1", parent_run_id="r1", messages=[kit.user("late")])
    recognised(late)
    assert late.code == "conflict"
    assert await status_of(lab, "tab1") is None
    assert "late" not in await lab.ids()
    lab.bank.gate.set()
    assert isinstance(await first, RunFinishedEvent)
    assert (await hydrate_thread(lab.persistence, "t1"))["interrupts"] is None


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("end", ["failed", "aborted", "paused"])
async def test_wherever_the_stores_are_a_claim_ends_with_its_run(
    kit: Any, where: str, end: str
) -> None:
    lab = apart(kit, where)
    await lab.pause(PAY)
    if end == "paused":
        turns = [PAY, [("c2", "pay", {"n": 2})]]
        await lab.resume(YES, run_id="tab0", parent_run_id="r1", turns=turns)
        assert await lab.waiting() == ["approval_c2"]
        again = resume_approve("approval_c2")
        last = await lab.resume(again, run_id="tab1", parent_run_id="tab0", turns=turns)
        assert isinstance(last, RunFinishedEvent)
        assert lab.bank.paid == [1, 2]
        return
    model = kit.Paced(error=RuntimeError("no") if end == "failed" else None)
    entry = resume_deny("approval_c1")
    task = asyncio.create_task(lab.resume(entry, run_id="tab0", parent_run_id="r1", adapter=model))
    await model.began.wait()
    if end == "aborted":
        task.cancel()
    model.go.set()
    await asyncio.gather(task, return_exceptions=True)
    assert await status_of(lab, "tab0") == end
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1"]
    assert isinstance(await lab.resume(YES, run_id="tab1", parent_run_id="r1"), RunFinishedEvent)


@pytest.mark.parametrize("where", [*PLACES, "together"])
async def test_wherever_the_stores_are_a_claim_ends_with_its_process(kit: Any, where: str) -> None:
    """A lease runs out, and the same batch is answered again. The process that had only stood
    still finds its answer given, and adds nothing."""
    lab = apart(kit, where) if where != "together" else kit.Lab(memory_persistence())
    await lab.pause(PAY)
    stuck = lab.bank
    stuck.gate.clear()
    keep = lab.middleware(lease_ms=30)
    zombie = asyncio.create_task(
        lab.resume(YES, run_id="tab0", parent_run_id="r1", middleware=keep)
    )
    await stuck.paying.wait()
    for task in asyncio.all_tasks():
        if task.get_name().startswith("chatkeep lease"):
            task.cancel()
    lab.bank = kit.Bank()
    while (await hydrate_thread(lab.persistence, "t1"))["interrupts"] is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # a lease that runs out sets no event
    assert isinstance(await lab.resume(YES, run_id="tab1", parent_run_id="r1"), RunFinishedEvent)
    assert lab.bank.paid == [1]
    rows = await lab.stored()
    stuck.gate.set()
    assert isinstance(await zombie, RunErrorEvent)
    assert [m["role"] for m in rows] == ["user", "assistant", "tool", "assistant"]
    kept = [m for m in await lab.stored() if m.get("role") == "assistant"]
    assert kept == [m for m in rows if m["role"] == "assistant"]
    assert await lab.settled() == {"approval_c1": ("resolved", {"approved": True})}


async def test_a_claim_under_a_stand_in_is_renewed_with_the_run(kit: Any) -> None:
    lab = apart(kit, "interrupts apart")
    await lab.pause(PAY)
    lab.bank.gate.clear()
    keep = lab.middleware(lease_ms=60)
    first = asyncio.create_task(lab.resume(YES, run_id="tab0", parent_run_id="r1", middleware=keep))
    await lab.bank.paying.wait()
    await asyncio.sleep(0.2)  # several leases long
    late = await lab.resume(YES, run_id="tab1", parent_run_id="r1")
    assert late.code == "conflict"
    lab.bank.gate.set()
    assert isinstance(await first, RunFinishedEvent)


async def test_a_start_that_failed_elsewhere_can_be_tried_again_under_the_same_id(kit: Any) -> None:
    """The stand-in of the first try stands in nobody's way."""
    lab = apart(kit, "interrupts apart")
    await lab.pause(PAY)
    runs = lab.persistence.stores.runs.backend.faults
    for _ in range(2):
        runs.refuse("commit_turn", times=8)
        end = await lab.resume(YES, run_id="r1", parent_run_id="r1")
        assert end.code == "backend-unavailable"
        runs.heal()
    assert isinstance(await lab.resume(YES, run_id="r1"), RunFinishedEvent)
    assert lab.bank.paid == [1]


@pytest.mark.parametrize("where", ["together", *PLACES[:4]])
async def test_tenants_with_the_same_ids_answer_their_own_questions(kit: Any, where: str) -> None:
    whole = apart(kit, where) if where != "together" else kit.Lab(memory_persistence())
    labs = []
    for tenant in ("a", "b"):
        lab = kit.Lab(memory_persistence())
        lab.persistence = whole.persistence.scoped(Scope(tenant_id=tenant))
        labs.append(lab)
        await lab.pause(PAY)
    won, lost = await race(labs[0], [YES, YES])
    assert (len(won), len(lost)) == (1, 1)
    assert await labs[1].waiting() == ["approval_c1"]
    won, lost = await race(labs[1], [resume_deny("approval_c1")])
    assert len(won) == 1
    assert [lab.bank.paid for lab in labs] == [[1], []]
    assert (await hydrate_thread(whole.persistence, "t1"))["messages"] == []


async def test_a_stand_in_is_no_run_to_join_to_sweep_or_to_list(kit: Any) -> None:
    lab = apart(kit, "interrupts apart")
    await lab.pause(PAY)
    lab.bank.gate.clear()
    first = asyncio.create_task(lab.resume(YES, run_id="tab0", parent_run_id="r1"))
    await lab.bank.paying.wait()
    desk = lab.persistence.stores.interrupts.backend.persistence()
    assert await desk.stores.runs.find_active_run("t1") is None
    assert await desk.maintenance().sweep() == []
    lab.bank.gate.set()
    await first
    run = await desk.stores.runs.get("tab0")
    assert (run.status, run.lease.until) == ("interrupted", 0)
    export = await lab.persistence.export_thread("t1")
    assert [r.run_id for r in export.runs] == ["r1", "tab0"]


async def test_stand_ins_of_interrupts_are_shown_to_nobody(kit: Any) -> None:
    lab = apart(kit, "own interrupts")
    await lab.pause(PAY)
    await lab.resume(YES, run_id="tab0", parent_run_id="r1")
    plain = compose_persistence(lab.persistence, overrides={"interrupts": False})
    base = next(iter(lab.persistence.backends)).persistence()
    assert len(await base.stores.interrupts.list_pending("t1")) == 1
    for persistence in (plain, base):
        body = await hydrate_thread(persistence, "t1")
        assert (body["activeRun"], body["interrupts"]) == (None, None)
    lab.persistence = base
    assert isinstance(kit.terminal(await lab.turn(kit.user("u2"))), RunFinishedEvent)


async def test_with_no_backend_of_ours_an_answer_still_counts_once(kit: Any) -> None:
    """Nothing can be claimed; the first answer that is stored wins, and the other run fails."""

    class OwnMessages:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        async def load_thread(self, thread_id: str) -> list[Any]:
            return list(self.rows)

        async def save_thread(self, thread_id: str, messages: Any) -> None:
            self.rows = list(messages)

    lab = apart(kit, "own interrupts and runs")
    lab.persistence = compose_persistence(
        lab.persistence, overrides={"messages": OwnMessages(), "activities": False}
    )
    await lab.pause(PAY)
    assert isinstance(await lab.resume(YES, run_id="tab0"), RunFinishedEvent)
    late = await lab.resume(YES, run_id="tab1", parent_run_id="r1")
    recognised(late)
    assert lab.bank.paid == [1]


async def test_a_run_conflict_after_the_claim_gives_it_back(kit: Any) -> None:
    """The claim is taken elsewhere than the run; when the run cannot start, it is released."""
    lab = apart(kit, "interrupts apart")
    await lab.pause(PAY)
    runs = lab.persistence.stores.runs
    (backend,) = [b for b in lab.persistence.backends if b is runs.backend]
    commits = backend.faults
    commits.refuse("commit_turn", times=1, error=RunConflict("tab0", "running", thread_id="t1"))
    end = await lab.resume(YES, run_id="tab0", parent_run_id="r1")
    assert end.code == "run-conflict"
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["interrupts"] is not None
    assert isinstance(await lab.resume(YES, run_id="tab1", parent_run_id="r1"), RunFinishedEvent)
    assert lab.bank.paid == [1]
