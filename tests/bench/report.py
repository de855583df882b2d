"""Plain tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["figure", "ratio", "table", "verdict"]


def figure(value: float | None, unit: str = "") -> str:
    """Three digits that matter."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def ratio(value: float, floor: float | None) -> str:
    """``value`` as a multiple of ``floor``."""
    return "-" if not floor else f"{value / floor:.2f}"


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    """Whether a figure is where it should be."""
    good = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    return f"{value:.2f} ({sign} {limit}: {'reached' if good else 'MISSED'})"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table; the first column is text, the others are figures."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells), flush=True)
