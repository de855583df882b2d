"""Any interleaving of tabs on one thread: what was said is never lost, and turns stay whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chatkeep.memory import memory_persistence

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "say-all", "again", "edit", "end", "end", "end", "fail", "stop"]),
        st.integers(min_value=0, max_value=99),
    ),
    min_size=3,
    max_size=25,
)


@dataclass
class Running:
    run_id: str
    model: Any
    task: asyncio.Task[Any]
    question: str | None
    answers: str
    cuts: set[str]
    ended: str = ""


@dataclass
class World:
    """One thread, the tabs that write to it, and what they were told."""

    lab: Any
    paced: Callable[..., Any]
    runs: list[Running] = field(default_factory=list)
    said: set[str] = field(default_factory=set)

    async def step(self, what: str, number: int) -> None:
        if what in ("end", "fail", "stop"):
            going = [run for run in self.runs if not run.ended]
            if going:
                await self.end(going[number % len(going)], what)
            return
        rows = await self.lab.stored()
        questions = [i for i, m in enumerate(rows) if m["role"] == "user"]
        if what == "say":
            await self.start([], set(), ask=True)
        elif what == "say-all":
            await self.start(rows, set(), ask=True)
        elif questions:
            at = questions[number % len(questions)] + (what == "again")
            if at or what == "again":  # a post of nothing but new rows is no edit
                cuts = {m["content"] for m in rows[at:]}
                await self.start(rows[:at], cuts, ask=what == "edit")

    async def start(self, history: list[Any], cuts: set[str], *, ask: bool) -> None:
        name = f"r{len(self.runs)}"
        posted = [{k: m[k] for k in ("id", "role", "content")} for m in history]
        question = f"q-{name}" if ask else None
        if question is not None:
            posted.append({"id": question, "role": "user", "content": question})
            self.said.add(question)
        model = self.paced(before=("an",), after=(f"swer of {name}",))
        task = self.lab.start(*posted, adapter=model, run_id=name)
        await model.began.wait()
        answers = posted[-1]["content"] if posted else ""
        self.runs.append(Running(name, model, task, question, answers, cuts))

    async def end(self, run: Running, how: str) -> None:
        run.ended = how
        if how == "stop":
            await run.model.said.wait()
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
            return
        if how == "fail":
            run.model.error = RuntimeError("scripted")
        run.model.go.set()
        await run.task

    async def check(self) -> None:
        live = await self.lab.stored()
        messages = self.lab.persistence.stores.messages
        archived: list[Any] = []
        for cut in await messages.list_cuts("t1"):
            archived += await messages.load_cut("t1", cut.cut_id)
        assert len({m["id"] for m in live}) == len(live)
        everything = [m["content"] for m in [*live, *archived]]
        # Nobody's turn is cut by accident: by an edit, by a regenerate that was answered, or
        # because the question went before the answer came.
        meant = {
            text
            for run in self.runs
            if run.question is not None or run.ended == "end"
            for text in run.cuts
        }
        gone = {m["content"] for m in archived}
        late = {f"answer of {run.run_id}" for run in self.runs if run.answers in gone}
        assert gone <= meant | late
        for question in self.said:
            assert everything.count(question) == 1, question
        for run in self.runs:
            answer = f"answer of {run.run_id}"
            stored = await self.lab.run(run.run_id)
            expected = {"end": "completed", "fail": "failed", "stop": "aborted"}[run.ended]
            assert stored.status == expected
            assert everything.count(answer) == (1 if run.ended == "end" else 0), answer
            texts = [m["content"] for m in live]
            if run.question in texts and answer in texts:
                start, stop = texts.index(run.question), texts.index(answer)
                between = live[start + 1 : stop]
                assert start < stop
                assert all(m["role"] != "user" for m in between), (texts, run.run_id)


@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_no_interleaving_loses_a_message_or_tears_a_turn(
    kit: Any, steps: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        world = World(kit.Lab(memory_persistence()), kit.Paced)
        for what, number in steps:
            await world.step(what, number)
        for run in world.runs:
            if not run.ended:
                await world.end(run, "end")
        await world.check()

    asyncio.run(play())
