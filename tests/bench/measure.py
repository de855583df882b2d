"""Timing loops and counters."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.contenders import Chatkeep, Contender
from bench.data import history
from servers import TcpProxy

__all__ = ["Costs", "concurrent_turns", "costs", "round_trips", "saves", "written_by_process"]


@dataclass
class Costs:
    """Medians in ms, by number of stored messages."""

    start: dict[int, float] = field(default_factory=dict[int, float])
    turn: dict[int, float] = field(default_factory=dict[int, float])
    reload: dict[int, float] = field(default_factory=dict[int, float])
    written: dict[int, float] = field(default_factory=dict[int, float])
    """Bytes per turn, as the counter of the backend sees them."""


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
            cost.start[size] = statistics.median(s for s, _ in timed[contender.name])
            cost.turn[size] = statistics.median(t for _, t in timed[contender.name])
            cost.reload[size] = statistics.median(loads[contender.name])
            if written is not None:
                before = await written()
                for number in range(20):
                    await contender.turn(f"{contender.name}/{threads[number % len(threads)]}")
                cost.written[size] = (await written() - before) / 20
    return found


async def concurrent_turns(
    contender: Contender, *, conversations: int = 32, size: int = 1000, seconds: float = 4.0
) -> float:
    """Turns per second with that many conversations at once."""
    messages = history(size)
    threads = [f"{contender.name}/many-{i}" for i in range(conversations)]
    for thread in threads:
        await contender.seed(thread, messages)
    done = 0

    async def talk(thread: str, until: float) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await contender.turn(thread)
            done += 1

    for length in (0.5, seconds):  # the first round opens the connections
        done = 0
        begin = time.perf_counter()
        await asyncio.gather(*(talk(thread, begin + length) for thread in threads))
        elapsed = time.perf_counter() - begin
    return done / elapsed


async def saves(contender: Chatkeep, sizes: Sequence[int], *, equal: bool) -> dict[int, float]:
    """Median ms of a plain ``save_thread`` of the whole history, by its length."""
    found: dict[int, float] = {}
    for size in sizes:
        timed: list[float] = []
        for number in range(8):
            thread = f"{contender.name}/save-{equal}-{size}-{number}"
            await contender.seed(thread, history(size))
            timed.append(await contender.save(thread, equal=equal))
        found[size] = statistics.median(timed[1:])
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
