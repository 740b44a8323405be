"""What was measured, what was wanted of it, and how both are shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal, Self

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a figure has to keep."""

    sense: Literal["at least", "at most"]
    bound: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: a value, mostly a median, with its range and what belongs to it."""

    part: str
    what: str
    unit: str
    value: float
    low: float
    high: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    cpu_us: float | None = None
    goal: Goal | None = None

    @classmethod
    def over(
        cls, part: str, what: str, unit: str, values: Sequence[float], goal: Goal | None = None
    ) -> Self:
        """Take the median of *values*."""
        return cls(part, what, unit, median(values), min(values), max(values), goal=goal)

    @property
    def is_met(self) -> bool:
        """Tell whether the value keeps its bound."""
        if self.goal is None:
            return True
        if self.goal.sense == "at least":
            return self.value >= self.goal.bound
        return self.value <= self.goal.bound


def show(figures: Sequence[Figure], machine: dict[str, str]) -> None:
    """Print one table."""
    table = Table(title=", ".join(machine.values()), title_style="dim", title_justify="left")
    table.add_column()
    table.add_column("what", no_wrap=True)
    for heading in "value", "range", "p50 ms", "p99 ms", "CPU µs", "goal":
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(*_cells(figure))
    Console(width=None if Console().is_terminal else 132).print(table)


def write_json(path: Path, figures: Sequence[Figure], machine: dict[str, str]) -> None:
    """Write what the table shows for programs."""
    lines = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
    path.write_text(json.dumps({"machine": machine, "figures": lines}, indent=1) + "\n")


def _cells(figure: Figure) -> list[str]:
    return [
        figure.part,
        figure.what,
        f"{_number(figure.value)} {figure.unit}",
        f"{_number(figure.low)} – {_number(figure.high)}",  # noqa: RUF001
        *("" if v is None else f"{v:.2f}" for v in (figure.p50_ms, figure.p99_ms)),
        "" if figure.cpu_us is None else f"{figure.cpu_us:.0f}",
        _verdict(figure),
    ]


def _verdict(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    sign = "≥" if figure.goal.sense == "at least" else "≤"
    colour, word = ("green", "met") if figure.is_met else ("bold red", "MISSED")
    return f"{sign} {figure.goal.bound:g} [{colour}]{word}[/]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
