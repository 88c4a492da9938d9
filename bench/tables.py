"""Markdown tables that are readable as text, too, and the format of their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

DASH = "–"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a Markdown table that is also readable as text. All columns but the first are aligned to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    text = [
        "| " + " | ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]) + " |"
        for line in lines
    ]
    return "\n".join([text[0], "| " + " | ".join(rule) + " |", *text[1:]]) + "\n"


def milliseconds(seconds: float | None) -> str:
    return DASH if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.1f}×" if ratio >= 9.95 else f"{ratio:.2f}×"


def percent(ratio: float | None) -> str:
    return DASH if ratio is None else f"{100 * ratio:.0f} %"
