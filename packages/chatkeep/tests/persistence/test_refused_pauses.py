"""Pauses that come to nothing: what was stored of them is taken back."""

from __future__ import annotations

from typing import Any

import pytest
from ag_ui.core import RunErrorEvent, RunFinishedEvent

import chatkeep.persistence.committer as committer
from chatkeep.compose import compose_persistence
from chatkeep.engine import ChatMiddleware
from chatkeep.engine.interrupts import resume_approve
from chatkeep.memory import memory_persistence
from chatkeep.persistence import PERSISTENCE_COMPLETION, hydrate_thread
from chatkeep.testkit.faults import with_faults

pytestmark = pytest.mark.anyio

PAY = [("c1", "pay", {"n": 1})]
AGAIN = [PAY, [("c2", "pay", {"n": 2})]]


class Refuses(ChatMiddleware):
    """Stands behind persistence and will not have the pause."""

    name = "refuses"

    async def on_interrupt(self, ctx: Any, event: Any) -> None:
        raise RuntimeError("no questions at night")


async def works_again(lab: Any, kit: Any) -> None:
    body = await hydrate_thread(lab.persistence, "t1")
    assert (body["activeRun"], body["interrupts"]) == (None, None)
    end = kit.terminal(await lab.turn(kit.user("later")))
    assert isinstance(end, RunFinishedEvent), end


async def test_a_stored_pause_that_a_later_hook_refuses_is_taken_back(lab: Any, kit: Any) -> None:
    end = await lab.pause(PAY, middleware=[lab.middleware(), Refuses()])
    assert isinstance(end, RunErrorEvent)
    run = await lab.run("r1")
    assert (run.status, run.error.message) == ("failed", "no questions at night")
    assert run.finished_at is not None
    assert {status for status, _ in (await lab.settled()).values()} == {"cancelled"}
    await works_again(lab, kit)


async def test_an_answer_before_a_refused_pause_has_been_given(lab: Any, kit: Any) -> None:
    """It was executed, and stored with the pause; only the new question is taken back."""
    await lab.pause(*AGAIN)
    end = await lab.resume(
        resume_approve("approval_c1"), turns=AGAIN, middleware=[lab.middleware(), Refuses()]
    )
    assert isinstance(end, RunErrorEvent)
    assert lab.bank.paid == [1]
    found = {name: status for name, (status, _) in (await lab.settled()).items()}
    assert found == {"approval_c1": "resolved", "approval_c2": "cancelled"}
    assert (await lab.run("r2")).status == "failed"
    await works_again(lab, kit)


@pytest.mark.parametrize("broken", ["interrupts", "runs"])
async def test_a_pause_that_is_stored_in_part_is_taken_back(
    kit: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transcript stays, since what the tools did is true; no question does."""
    monkeypatch.setattr(committer, "OUTAGE_PAUSES", ())
    lab = kit.Lab(memory_persistence())
    other, others = with_faults(memory_persistence())
    lab.persistence = compose_persistence(
        lab.persistence, overrides={broken: getattr(other.stores, broken)}
    )
    starts = 1 if broken == "runs" else 0
    others.refuse("commit_turn", times=4, after=starts)
    turn = [("c0", "look", {"n": 0})]
    end = await lab.pause(turn, PAY)
    assert isinstance(end, RunErrorEvent)
    assert end.code == "backend-unavailable"
    run = await lab.persistence.stores.runs.get("r1")
    assert run.status == "failed"
    assert await lab.waiting() == []
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant", "tool", "assistant"]
    await works_again(lab, kit)


async def test_a_pause_of_a_run_that_lost_its_lease_asks_nothing(lab: Any, kit: Any) -> None:
    model = kit.Calls([PAY], waits=True)
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    from chatkeep.records import RunPatch

    lease = (await lab.run("r1")).lease.model_copy(update={"token": "another's"})
    await lab.persistence.stores.runs.update("r1", RunPatch(lease=lease))
    model.go.set()
    end = kit.terminal(await task)
    assert end.code == "run-conflict"
    assert await lab.waiting() == []
    assert await lab.ids() == ["u1"]


async def test_a_pause_waits_out_a_short_outage(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "OUTAGE_PAUSES", (0.0, 0.0))
    lab.faults.refuse("commit_turn", times=6, after=1)
    end = await lab.pause(PAY)
    assert isinstance(end, RunFinishedEvent)
    assert await lab.waiting() == ["approval_c1"]


async def test_a_refused_pause_has_been_told_as_one_to_those_who_wait(lab: Any) -> None:
    """A completion settles once, with the last write of the run's own persistence: what hooks
    behind it do to the run is told by the stream."""

    class Waits(ChatMiddleware):
        name = "waits"
        completion: Any = None

        async def setup(self, ctx: Any) -> None:
            self.completion = ctx.get(PERSISTENCE_COMPLETION)

    waits = Waits()
    await lab.pause(PAY, middleware=[lab.middleware(), waits, Refuses()])
    assert waits.completion.outcome == "interrupted"
