"""Answers in an interrupt store of the application, and chats that keep no interrupts at all."""

from __future__ import annotations

from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

from chatkeep.compose import compose_persistence, define_interrupt_store
from chatkeep.engine.interrupts import resume_approve
from chatkeep.errors import InterruptConflict
from chatkeep.memory import memory_persistence
from chatkeep.persistence import hydrate_thread
from chatkeep.records import InterruptRecord

pytestmark = pytest.mark.anyio

TWO = [("c1", "pay", {"n": 1}), ("c2", "pay", {"n": 2})]
BOTH = [resume_approve("approval_c1"), resume_approve("approval_c2")]


class Table:
    """The smallest interrupt store: rows in a dict, no batches, no claims."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], InterruptRecord] = {}
        self.fails_at: str | None = None
        self.writes: list[str] = []

    async def create(self, record: InterruptRecord) -> bool:
        key = (record.thread_id, record.run_id, record.interrupt_id)
        self.writes.append(f"create {record.interrupt_id}")
        return self.rows.setdefault(key, record) is record

    async def _settle(self, thread_id: str, name: str, run_id: str | None, **change: Any) -> None:
        if name == self.fails_at:
            raise OSError("disk full")
        found = await self.get(thread_id, name, run_id=run_id)
        if found is None:
            return
        if found.status != "pending":
            raise InterruptConflict(thread_id, [name], "is settled")
        self.writes.append(f"settle {name}")
        key = (thread_id, found.run_id, name)
        self.rows[key] = found.model_copy(update={"resolved_at": 1, **change})

    async def resolve(
        self, thread_id: str, interrupt_id: str, response: Any = None, *, run_id: str | None = None
    ) -> None:
        change = {"status": "resolved", "response": response}
        await self._settle(thread_id, interrupt_id, run_id, **change)

    async def cancel(self, thread_id: str, interrupt_id: str, *, run_id: str | None = None) -> None:
        await self._settle(thread_id, interrupt_id, run_id, status="cancelled")

    async def get(
        self, thread_id: str, interrupt_id: str, *, run_id: str | None = None
    ) -> InterruptRecord | None:
        found = [
            r for r in await self.list(thread_id)
            if r.interrupt_id == interrupt_id and run_id in (None, r.run_id)
        ]  # fmt: skip
        return ([r for r in found if r.status == "pending"] or found or [None])[-1]

    async def list(self, thread_id: str) -> Any:
        return [r for r in self.rows.values() if r.thread_id == thread_id]

    async def list_pending(self, thread_id: str) -> Any:
        return [r for r in await self.list(thread_id) if r.status == "pending"]

    async def list_by_run(self, thread_id: str, run_id: str) -> Any:
        return [r for r in await self.list(thread_id) if r.run_id == run_id]

    async def list_pending_by_run(self, thread_id: str, run_id: str) -> Any:
        return [r for r in await self.list_pending(thread_id) if r.run_id == run_id]


def table(kit: Any) -> tuple[Any, Table]:
    own = Table()
    lab = kit.Lab(memory_persistence())
    overrides = {"interrupts": define_interrupt_store(own)}
    lab.persistence = compose_persistence(lab.persistence, overrides=overrides)
    return lab, own


async def test_a_store_of_the_application_pauses_and_continues_runs(kit: Any) -> None:
    lab, own = table(kit)
    await lab.pause(TWO)
    assert own.writes == ["create approval_c1", "create approval_c2"]
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c1", "approval_c2"]
    assert isinstance(await lab.resume(*BOTH, turns=[TWO]), RunFinishedEvent)
    assert own.writes[2:] == ["settle approval_c1", "settle approval_c2"]
    assert lab.bank.paid == [1, 2]


async def test_a_failure_between_two_answers_leaves_the_rest_to_be_sent_alone(kit: Any) -> None:
    """What is settled stays settled; what the tools did is not done again."""
    lab, own = table(kit)
    await lab.pause(TWO)
    own.fails_at = "approval_c2"
    end = await lab.resume(*BOTH, turns=[TWO], parent_run_id="r1")
    assert isinstance(end, RunErrorEvent)
    assert end.code == "interrupt-conflict"
    assert (await lab.persistence.stores.runs.get("r2")).status == "failed"
    own.fails_at = None
    whole = await lab.resume(*BOTH, turns=[TWO], parent_run_id="r1")
    assert whole.code == "unknown-interrupt"
    body = await hydrate_thread(lab.persistence, "t1")
    assert [p["id"] for p in body["interrupts"]["pending"]] == ["approval_c2"]
    rest = await lab.resume(BOTH[1], turns=[TWO], parent_run_id="r1")
    assert isinstance(rest, RunFinishedEvent)
    assert lab.bank.paid == [1, 2]
    assert await lab.waiting() == []
    assert [m["role"] for m in await lab.stored()].count("tool") == 2


async def test_a_batch_that_a_store_refuses_leaves_all_of_it_to_be_sent_again(kit: Any) -> None:
    lab, own = table(kit)
    refusals = [InterruptConflict("t1", ["approval_c1"], "not now")]
    batches: list[list[str]] = []

    async def commit_batch(thread_id: str, answers: Any) -> None:
        batches.append([answer.interrupt_id for answer in answers])
        if refusals:
            raise refusals.pop()
        for answer in answers:
            await own.resolve(thread_id, answer.interrupt_id, answer.response, run_id=answer.run_id)

    own.commit_batch = commit_batch  # type: ignore[attr-defined]
    await lab.pause(TWO)
    end = await lab.resume(*BOTH, turns=[TWO], parent_run_id="r1")
    assert end.code == "interrupt-conflict"
    assert (await lab.persistence.stores.runs.get("r2")).status == "failed"
    assert await lab.waiting() == ["approval_c1", "approval_c2"]
    again = await lab.resume(*BOTH, turns=[TWO], parent_run_id="r1")
    assert isinstance(again, RunFinishedEvent)
    assert batches == [["approval_c1", "approval_c2"]] * 2
    assert lab.bank.paid == [1, 2]


async def test_an_interrupt_that_is_there_already_fails_the_pause(kit: Any) -> None:
    lab, own = table(kit)
    taken = InterruptRecord(
        interrupt_id="approval_c1",
        run_id="r1",
        thread_id="t1",
        requested_at=1,
        status="resolved",
        payload={"id": "approval_c1"},
    )
    await own.create(taken)
    end = await lab.pause([("c1", "pay", {"n": 1})])
    assert isinstance(end, RunErrorEvent)
    assert end.code == "interrupt-conflict"
    assert (await lab.persistence.stores.runs.get("r1")).status == "failed"
    assert await lab.waiting() == []


# ------------------------------------------------------------------- without interrupt store


def bare(kit: Any, **more: Any) -> Any:
    lab = kit.Lab(memory_persistence())
    lab.persistence = compose_persistence(lab.persistence, overrides={"interrupts": False, **more})
    return lab


async def test_without_an_interrupt_store_the_posted_history_decides(kit: Any) -> None:
    lab = bare(kit)
    await lab.pause(TWO)
    assert (await lab.persistence.stores.runs.get("r1")).status == "interrupted"
    body = await hydrate_thread(lab.persistence, "t1")
    assert body["interrupts"] is None
    end = await lab.resume(*BOTH, turns=[TWO], messages=await lab.stored(), parent_run_id="r1")
    assert isinstance(end, RunFinishedEvent)
    assert lab.bank.paid == [1, 2]
    assert [m["role"] for m in await lab.stored()][-3:] == ["tool", "tool", "assistant"]


@pytest.mark.parametrize("named", ["nobody", "done", "elsewhere"])
async def test_without_an_interrupt_store_the_named_run_must_be_paused_here(
    kit: Any, named: str
) -> None:
    lab = bare(kit)
    await lab.turn(kit.user("u0"), run_id="done")
    await lab.pause(TWO, run_id="elsewhere", thread_id="t2")
    await lab.pause(TWO)
    before = await lab.stored()
    end = await lab.resume(*BOTH, turns=[TWO], messages=before, parent_run_id=named)
    assert isinstance(end, RunErrorEvent)
    assert end.code == "stale"
    errors = end.metadata["tanstack"]["interruptErrors"]
    assert {e["interruptedRunId"] for e in errors} == {named}
    assert await lab.stored() == before
    assert lab.bank.paid == []


async def test_without_runs_nobody_knows_which_run_was_paused(kit: Any) -> None:
    lab = bare(kit, runs=False)
    await lab.pause(TWO)
    end = await lab.resume(
        *BOTH, turns=[TWO], messages=await lab.stored(), parent_run_id="whatever"
    )
    assert isinstance(end, RunFinishedEvent)
    assert lab.bank.paid == [1, 2]


async def test_an_answer_without_an_interrupt_store_needs_its_run(kit: Any) -> None:
    lab = bare(kit)
    await lab.pause(TWO)
    end = await lab.resume(*BOTH, turns=[TWO], messages=await lab.stored())
    assert isinstance(end, RunErrorEvent)
    assert end.code == "stale"
    assert lab.bank.paid == []
