"""Any interleaving of tabs that ask, answer, cancel and leave on one thread that pauses.

No call is executed twice, no answer is taken twice, nothing that was said is cut, and the thread
can always be brought back to work.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ag_ui.core import RunErrorEvent, RunFinishedEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep.compose import compose_persistence
from chatkeep.engine.interrupts import resume_approve, resume_cancel, resume_deny
from chatkeep.memory import memory_persistence
from chatkeep.persistence import cancel_run, hydrate_thread

WORDS = [
    "ask", "ask", "ask-slow", "say", "yes", "yes", "no", "cancel", "old-yes", "old-no",
    "same-id", "go", "go", "fail", "stop", "cancel-run",
]  # fmt: skip
STEPS = st.lists(
    st.tuples(st.sampled_from(WORDS), st.integers(min_value=0, max_value=99)),
    min_size=4,
    max_size=22,
)
PLACES = st.sampled_from(["together", "interrupts", "runs", "messages"])

REFUSED = {"conflict", "unknown-interrupt", "stale", "run-conflict"}


@dataclass
class Going:
    run_id: str
    model: Any
    task: asyncio.Task[Any]


@dataclass
class World:
    lab: Any
    kit: Any
    asked: list[str] = field(default_factory=list)
    going: list[Going] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    count: int = 0

    async def step(self, word: str, number: int) -> None:
        body = await hydrate_thread(self.lab.persistence, "t1")
        view = body["interrupts"]
        if view is not None:
            self.views.append(view)
        if word in ("ask", "ask-slow", "say"):
            await self.ask(word)
        elif word in ("go", "fail", "stop"):
            if self.going:
                await self.end(self.going.pop(number % len(self.going)), word)
        elif word.startswith("old-"):
            if self.views:
                old = self.views[number % len(self.views)]
                await self.answer(old, word.removeprefix("old-"), named=True)
        elif view is None:
            return
        elif word == "cancel-run":
            await cancel_run(self.lab.persistence, "t1", view["runId"])
        elif word == "same-id":
            await self.answer(view, "yes", run_id=view["runId"])
        else:
            await self.answer(view, word, named=bool(number % 2))

    async def ask(self, word: str) -> None:
        self.count += 1
        name = f"q{self.count}"
        turns = [] if word == "say" else [[(f"c-{name}", "pay", {"n": self.count})]]
        model = self.kit.Calls(turns, waits=word == "ask-slow")
        task = self.lab.start(self.kit.user(name, name), adapter=model, run_id=f"r{self.count}")
        if word == "ask-slow":
            await self.settle(f"r{self.count}", model, task)
            return
        end = self.kit.terminal(await task)
        if isinstance(end, RunFinishedEvent):
            self.asked.append(name)
        else:
            assert end.code in REFUSED, end

    async def answer(
        self, view: Any, word: str, *, run_id: str | None = None, named: bool = False
    ) -> None:
        self.count += 1
        make = {"yes": resume_approve, "no": resume_deny, "cancel": resume_cancel}[word]
        entries = [make(item["id"]) for item in view["pending"]]
        calls = [item["toolCallId"] for item in view["pending"]]
        turns = [[(c, "pay", {"n": int(c.removeprefix("c-q"))}) for c in calls]]
        model = self.kit.Calls(turns, waits=True)
        run_id = run_id or f"r{self.count}"
        task = self.lab.start(
            adapter=model,
            run_id=run_id,
            resume=entries,
            parent_run_id=view["runId"] if named else None,
        )
        await self.settle(run_id, model, task)

    async def settle(self, run_id: str, model: Any, task: asyncio.Task[Any]) -> None:
        """Until the model is called, or the request is refused."""
        began = asyncio.create_task(model.began.wait())
        await asyncio.wait({began, task}, return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        if not task.done():
            self.going.append(Going(run_id, model, task))
            return
        end = self.kit.terminal(await task)
        assert isinstance(end, RunErrorEvent), end
        assert end.code in REFUSED, end

    async def end(self, going: Going, how: str) -> None:
        if how == "fail":
            going.model.fails = True
        elif how == "stop":
            going.task.cancel()
        going.model.go.set()
        await asyncio.gather(going.task, return_exceptions=True)
        name = going.run_id.replace("r", "q", 1)
        rows = await self.lab.ids()
        if name in rows and name not in self.asked:
            self.asked.append(name)

    async def check(self) -> None:
        while self.going:
            await self.end(self.going.pop(), "go")
        for _ in range(50):
            view = (await hydrate_thread(self.lab.persistence, "t1"))["interrupts"]
            if view is None:
                break
            await self.answer(view, "cancel", named=True)
            while self.going:
                await self.end(self.going.pop(), "go")
        assert await self.lab.waiting() == []
        before = len(self.asked)
        await self.ask("say")
        assert len(self.asked) == before + 1

        paid = self.lab.bank.paid
        assert len(set(paid)) == len(paid), paid
        for record in await self.lab.persistence.stores.interrupts.list("t1"):
            if record.status == "resolved" and record.response == {"approved": True}:
                assert record.payload["metadata"]["input"]["n"] in paid
        rows = await self.lab.stored()
        assert len({m["id"] for m in rows}) == len(rows)
        questions = [m["id"] for m in rows if m["role"] == "user"]
        assert sorted(questions) == sorted(self.asked)
        # What gives way is a decision that a failed continuation left, never what was said.
        messages = self.lab.persistence.stores.messages
        for cut in await messages.list_cuts("t1"):
            assert {m["role"] for m in await messages.load_cut("t1", cut.cut_id)} == {"tool"}
        turn, results = "", []
        for row in rows:
            if row["role"] == "user":
                turn = row["id"]
            for call in row.get("toolCalls") or ():
                assert call["id"] == f"c-{turn}"
            if row["role"] == "tool":
                assert row["toolCallId"] == f"c-{turn}"
                results.append(row["toolCallId"])
        assert len(set(results)) == len(results)
        assert {f"c-q{n}" for n in paid} <= set(results)
        for run in await self.lab.persistence.stores.runs.list_by_thread("t1"):
            assert run.status != "running"


def place(kit: Any, where: str) -> Any:
    lab = kit.Lab(memory_persistence())
    if where != "together":
        other = memory_persistence()
        overrides = {where: getattr(other.stores, where)}
        lab.persistence = compose_persistence(lab.persistence, overrides=overrides)
    return lab


@given(steps=STEPS, where=PLACES)
@settings(max_examples=150, deadline=None)
def test_no_interleaving_executes_twice_or_blocks_the_thread(
    kit: Any, steps: list[tuple[str, int]], where: str
) -> None:
    async def play() -> None:
        world = World(place(kit, where), kit)
        for word, number in steps:
            await world.step(word, number)
        await world.check()

    asyncio.run(play())
