"""Timing loops and counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.contenders import Chatkeep, Contender
from bench.data import history
from servers import TcpProxy

__all__ = [
    "Costs",
    "concurrent_turns",
    "costs",
    "lower_quartile",
    "round_trips",
    "saves",
    "written_by_process",
]


@dataclass
class Costs:
    """Lower quartiles in ms, by number of stored messages: what the code costs while nothing else
    wants the machine."""

    start: dict[int, float] = field(default_factory=dict[int, float])
    turn: dict[int, float] = field(default_factory=dict[int, float])
    reload: dict[int, float] = field(default_factory=dict[int, float])
    written: dict[int, float] = field(default_factory=dict[int, float])
    """Bytes per turn, as the counter of the backend sees them."""


def lower_quartile(values: Iterable[float]) -> float:
    """A quarter of the values is smaller."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


_THREADS = {10: 10, 100: 5}
"""Small histories are measured on several threads, or they would not stay small."""


async def costs(
    contenders: Sequence[Contender],
    sizes: Sequence[int],
    rounds: int,
    written: Callable[[], Awaitable[int]] | None = None,
) -> dict[str, Costs]:
    """Costs of every contender. They take turns within a round, so that a slow moment of the
    machine is everybody's."""
    found = {c.name: Costs() for c in contenders}
    for size in sizes:
        threads = [f"bench-{size}-{i}" for i in range(_THREADS.get(size, 2))]
        for thread in threads:
            messages = history(size)
            for contender in contenders:
                await contender.seed(f"{contender.name}/{thread}", messages)
        timed: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contenders}
        loads: dict[str, list[float]] = {c.name: [] for c in contenders}
        for number in range(rounds + 3):
            thread = threads[number % len(threads)]
            for contender in contenders:
                spent = await contender.turn(f"{contender.name}/{thread}")
                if number >= 3:  # the first ones fill caches and pools
                    timed[contender.name].append(spent)
        for number in range(max(5, min(rounds, 20_000 // size))):
            thread = threads[number % len(threads)]
            for contender in contenders:
                begin = time.perf_counter()
                await contender.load(f"{contender.name}/{thread}")
                loads[contender.name].append((time.perf_counter() - begin) * 1e3)
        for contender in contenders:
            cost = found[contender.name]
            cost.start[size] = lower_quartile(s for s, _ in timed[contender.name])
            cost.turn[size] = lower_quartile(t for _, t in timed[contender.name])
            cost.reload[size] = lower_quartile(loads[contender.name])
            if written is not None:
                before = await written()
                for number in range(20):
                    await contender.turn(f"{contender.name}/{threads[number % len(threads)]}")
                cost.written[size] = (await written() - before) / 20
    return found


async def concurrent_turns(
    contenders: Sequence[Contender],
    *,
    conversations: int = 32,
    size: int = 1000,
    seconds: float = 1.5,
    rounds: int = 4,
) -> dict[str, float]:
    """Turns per second of each, with that many conversations at once: the best round of each,
    the contenders taking turns. The first round opens connections and does not count."""
    messages = history(size)
    threads = [f"many-{i}" for i in range(conversations)]
    for contender in contenders:
        for thread in threads:
            await contender.seed(f"{contender.name}/{thread}", messages)

    async def talk(contender: Contender, thread: str, until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await contender.turn(f"{contender.name}/{thread}")
            done += 1
        return done

    best = dict.fromkeys((c.name for c in contenders), 0.0)
    for number in range(rounds + 1):
        for contender in contenders:
            begin = time.perf_counter()
            done = await asyncio.gather(
                *(talk(contender, thread, begin + seconds) for thread in threads)
            )
            rate = sum(done) / (time.perf_counter() - begin)
            if number > 0:
                best[contender.name] = max(best[contender.name], rate)
    return best


async def saves(contender: Chatkeep, sizes: Sequence[int], *, equal: bool) -> dict[int, float]:
    """ms of a plain ``save_thread`` of the whole history, by its length."""
    found: dict[int, float] = {}
    for size in sizes:
        timed: list[float] = []
        for number in range(8):
            thread = f"{contender.name}/save-{equal}-{size}-{number}"
            await contender.seed(thread, history(size))
            timed.append(await contender.save(thread, equal=equal))
        found[size] = lower_quartile(timed[1:])
    return found


async def round_trips(
    contender: Contender, proxy: TcpProxy, turns: int = 20
) -> tuple[float, float]:
    """Requests and bytes that a turn sends, counted in front of the server."""
    thread = f"{contender.name}/counted"
    await contender.seed(thread, history(1000))
    for _ in range(5):  # statements are prepared, pools are filled
        await contender.turn(thread)
    trips, sent = proxy.chunks_sent, proxy.bytes_sent
    for _ in range(turns):
        await contender.turn(thread)
    return (proxy.chunks_sent - trips) / turns, (proxy.bytes_sent - sent) / turns


async def written_by_process() -> int:
    """Bytes that this process has handed to ``write`` so far (Linux)."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError("no wchar in /proc/self/io")
