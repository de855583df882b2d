"""Any backend beside the reference backend: the same random calls, the same answers.

:func:`run_state_machine` lets hypothesis draw sequences of calls (splices, saves, cuts and
restores, runs, leases, interrupts, claims and answers, drafts, activities, metadata, deletes,
pages, commits sent again) and makes each of them on the persistence under test and on memory.
After every call both must have given the same result or the same typed error, and a full view
of the thread must be equal. What may differ is mapped: revisions and ids of cuts are compared
by when they first appeared, sequence numbers by their order, times not at all::

    report = run_state_machine(my_persistence)      # prints what was run
    assert report.examples >= 200
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from chatkeep.errors import MissingExtra

if importlib.util.find_spec("hypothesis") is None:
    raise MissingExtra("chatkeep.testkit.state_machine", "testkit")

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from chatkeep.backends import Persistence
from chatkeep.memory import memory_persistence
from chatkeep.scope import Scope
from chatkeep.testkit._machine import Machine
from chatkeep.testkit._machine_sides import Pair

__all__ = ["StateMachineReport", "run_state_machine"]

_T = TypeVar("_T")

MakePersistence: TypeAlias = Callable[[], Persistence | Awaitable[Persistence]]


@dataclass(frozen=True, slots=True)
class StateMachineReport:
    """What was run: complete examples, calls in all of them, and the seed to run it again."""

    name: str
    examples: int
    steps: int
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.examples} examples, {self.steps} steps "
            f"({self.steps / max(self.examples, 1):.1f} each), seed {self.seed}"
        )


def run_state_machine(
    make_persistence: MakePersistence,
    *,
    max_examples: int = 200,
    stateful_step_count: int = 50,
    random_seed: int | None = None,
    name: str | None = None,
    shrink: bool = True,
) -> StateMachineReport:
    """Drive a persistence and memory side by side; raise at the first difference.

    Not for use inside a running event loop: it runs one of its own, for all examples, and
    closes the persistence at the end. Each example works in a scope of its own, so the
    persistence must know scopes; all five stores must be of one backend.

    Args:
        make_persistence: returns the persistence (or awaits to it); called once, in the loop.
        max_examples: how many sequences.
        stateful_step_count: calls in each of them.
        random_seed: to repeat a run; None draws one, which the report names.
        name: for the report; by default the name of the backend.
        shrink: after a difference, look for a shorter sequence that shows it (minutes).

    Raises:
        AssertionError: the two answered differently; hypothesis prints the shortest sequence
            that it found.
    """
    chosen = secrets.randbelow(2**32) if random_seed is None else random_seed
    with asyncio.Runner() as runner:
        subject = runner.run(_made(make_persistence))
        model = memory_persistence()
        counts = {"examples": 0, "steps": 0}

        class ThisMachine(Machine):
            def start(self) -> tuple[Pair, Callable[[Awaitable[Any]], Any]]:
                scope = Scope(tenant_id=f"machine-{secrets.token_hex(8)}")
                pair = Pair(model.scoped(scope), subject.scoped(scope))
                return pair, lambda work: runner.run(_awaited(work))

            def count(self, what: str) -> None:
                counts[what] += 1

        try:
            run_state_machine_as_test(
                seed(chosen)(ThisMachine),
                # Else hypothesis ends some examples early, and the count would be a wish.
                _min_steps=stateful_step_count,
                settings=settings(
                    max_examples=max_examples,
                    # The opening of an example counts as a step of hypothesis, not as a call.
                    stateful_step_count=stateful_step_count + 1,
                    deadline=None,
                    database=None,
                    suppress_health_check=[
                        HealthCheck.too_slow,
                        HealthCheck.data_too_large,
                        HealthCheck.filter_too_much,
                    ],
                    phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
                    print_blob=True,
                ),
            )
        finally:
            runner.run(subject.aclose())
            runner.run(model.aclose())
    report = StateMachineReport(
        name or subject.backends[0].name, counts["examples"], counts["steps"], chosen
    )
    print(report)
    return report


async def _made(make: MakePersistence) -> Persistence:
    made = make()
    return await made if inspect.isawaitable(made) else made


async def _awaited(work: Awaitable[_T]) -> _T:
    return await work
