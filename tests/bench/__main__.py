"""``python -m bench``: run the benchmarks and print the tables."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Callable, Sequence

from bench.contenders import Chatkeep, Floor
from bench.data import answer, question, size
from bench.fields import FIELDS, Field
from bench.measure import Costs, concurrent_turns, costs, round_trips, saves
from bench.report import figure, ratio, table, verdict
from bench.talk import chat_turns, two_at_once

_NEW_KB = size([question(), *answer()]) / 1024
"""What a turn adds, as JSON."""

Targets = list[tuple[str, str]]


async def bench(field: Field, sizes: Sequence[int], rounds: int) -> Targets:
    """Measure one database and print its tables; what the targets say about it."""
    settings = ", ".join(f"{name} {value}" for name, value in field.settings.items())
    print(f"\n== {field.title}" + (f": {settings}" if settings else ""))
    found = await costs(field.contenders, sizes, rounds, field.written)
    _cost_tables(found, sizes, field)
    targets: Targets = []
    for ours, floor in field.ours:
        targets += _against_floor(ours, floor, found, sizes)
    targets += await _round_trips(field)
    targets += await _saves(field, sizes)
    targets += await _many(field)
    targets += await _chats(field, sizes, rounds)
    return targets


def _cost_tables(found: dict[str, Costs], sizes: Sequence[int], field: Field) -> None:
    header = ["", *(f"N={n}" for n in sizes), "growth"]
    kinds: list[tuple[str, Callable[[Costs], dict[int, float]]]] = [
        ("start boundary, ms", lambda c: c.start),
        ("turn (start and finish boundary), ms", lambda c: c.turn),
        ("reload of the whole thread, ms", lambda c: c.reload),
    ]
    for title, values in kinds:
        rows = [
            [
                name,
                *(figure(values(cost)[n]) for n in sizes),
                ratio(values(cost)[sizes[-1]], values(cost)[sizes[0]]),
            ]
            for name, cost in found.items()
        ]
        table(title, header, rows)
    if field.written is not None:
        rows = [
            [
                name,
                *(figure(cost.written[n] / 1024) for n in sizes),
                ratio(cost.written[sizes[-1]], cost.written[sizes[0]]),
            ]
            for name, cost in found.items()
        ]
        title = f"KB per turn: {field.written_is} (the new messages have {_NEW_KB:.1f} KB)"
        table(title, header, rows)


def _against_floor(
    ours: Chatkeep, floor: Floor | None, found: dict[str, Costs], sizes: Sequence[int]
) -> Targets:
    mine = found[ours.name]
    first, last = sizes[0], sizes[-1]
    targets = [
        (
            f"{ours.name}: turn at N={last} over N={first}",
            verdict(mine.turn[last] / mine.turn[first], 1.15),
        )
    ]
    if floor is None:
        return targets
    theirs = found[floor.name]
    limit = 2.5 if "sqlite" in floor.name else 1.3
    targets += [
        (
            f"{ours.name}: turn at N={n} over {floor.name}",
            verdict(mine.turn[n] / theirs.turn[n], limit),
        )
        for n in (first, last)
    ]
    n = 1000 if 1000 in sizes else last
    targets.append(
        (
            f"{ours.name}: reload at N={n} over {floor.name} (raw rows and orjson)",
            verdict(mine.reload[n] / theirs.reload[n], 1.3),
        )
    )
    if mine.written and "sqlite" not in floor.name:
        most = max(mine.written[n] for n in sizes) / 1024
        targets.append(
            (
                f"{ours.name}: KB written per turn, at any N",
                verdict(most, round(1.5 * _NEW_KB + 2, 1)),
            )
        )
    return targets


async def _round_trips(field: Field) -> Targets:
    targets: Targets = []
    rows: list[list[str]] = []
    for ours, _ in field.ours:
        if field.behind is None:
            continue
        async with field.behind(ours.name) as (contender, proxy):
            trips, sent = await round_trips(contender, proxy)
        rows.append([ours.name, figure(trips), figure(sent / 1024)])
        targets.append((f"{ours.name}: round trips per turn beyond the load", verdict(trips, 2)))
    if rows:
        table("on the network, per turn", ["", "round trips", "KB sent"], rows)
    return targets


async def _saves(field: Field, sizes: Sequence[int]) -> Targets:
    targets: Targets = []
    rows: list[list[str]] = []
    first, last = sizes[0], sizes[-1]
    for ours, _ in field.ours:
        for equal, what, limit in ((False, "same objects", 2), (True, "equal objects", 5)):
            found = await saves(ours, sizes, equal=equal)
            growth = found[last] / found[first]
            rows.append(
                [f"{ours.name}, {what}", *(figure(found[n]) for n in sizes), f"{growth:.2f}"]
            )
            targets.append(
                (
                    f"{ours.name}: save_thread, {what}, N={last} over N={first}",
                    verdict(growth, limit),
                )
            )
    title = "plain save_thread of the whole history and one turn more, ms"
    table(title, ["", *(f"N={n}" for n in sizes), "growth"], rows)
    return targets


async def _many(field: Field) -> Targets:
    rates = await concurrent_turns(field.contenders)
    best = max(rates.values())
    table(
        "turns per second, 32 conversations at once (N=1000)",
        ["", "turns/s", "of the best"],
        [[name, figure(rate), f"{rate / best:.2f}"] for name, rate in rates.items()],
    )
    return [
        (
            f"{ours.name}: turns per second with 32 conversations over {floor.name}",
            verdict(rates[ours.name] / rates[floor.name], 0.6, at_least=True),
        )
        for ours, floor in field.ours
        if floor is not None
    ]


async def _chats(field: Field, sizes: Sequence[int], rounds: int) -> Targets:
    few = max(5, rounds // 4)
    alone = await chat_turns(None, sizes, few)
    rows = [["engine alone, no store", *(figure(alone[n]) for n in sizes)]]
    targets: Targets = []
    for ours, _ in field.ours:
        found = await chat_turns(ours, sizes, few)
        rows.append([ours.name, *(figure(found[n]) for n in sizes)])
        kept = await two_at_once(ours)
        targets.append(
            (
                f"{ours.name}: two turns at once keep both, whole and in order, of 20 rounds",
                verdict(kept, 20, at_least=True),
            )
        )
    title = "a whole turn over chat(), loading included, ms"
    table(title, ["", *(f"N={n}" for n in sizes)], rows)
    return targets


async def main(databases: Sequence[str], sizes: Sequence[int], rounds: int) -> None:
    """Run and print."""
    begin = time.monotonic()
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()}; "
        f"{rounds} rounds, lower quartiles; messages of about 1 KB, a third of them tool calls"
    )
    targets: Targets = []
    for name in databases:
        async with FIELDS[name]() as field:
            targets += await bench(field, sizes, rounds)
    print("\n== Targets")
    for what, result in targets:
        print(f"  {what}: {result}")
    print(f"\n{time.monotonic() - begin:.0f} s")


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument(
        "databases", nargs="*", default=list(FIELDS), help=f"of {', '.join(FIELDS)}"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10, 100, 1000, 5000], help="stored messages"
    )
    parser.add_argument("--rounds", type=int, default=60, help="turns per size")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    asyncio.run(main(given.databases, given.sizes, given.rounds))
