"""Figures with their goals, the machine, and the table that shows them."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, Self

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of a figure."""

    sense: Literal["at least", "at most"]
    bound: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table: a value, mostly a median, with its range and related values."""

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
        """Return the figure of the median of *values*."""
        return cls(part, what, unit, median(values), min(values), max(values), goal=goal)

    @classmethod
    def least(cls, *told: Any) -> Self:
        """Return the figure of the least value, as other load on the machine only adds to it."""
        figure = cls.over(*told)
        return replace(figure, value=figure.low)

    @property
    def is_met(self) -> bool:
        """Whether the value keeps its bound."""
        if self.goal is None:
            return True
        if self.goal.sense == "at least":
            return self.value >= self.goal.bound
        return self.value <= self.goal.bound


def show(figures: Sequence[Figure], machine: dict[str, str]) -> None:
    """Print the table."""
    table = Table(title=", ".join(machine.values()), title_style="dim", title_justify="left")
    table.add_column()
    table.add_column("what", no_wrap=True)
    for heading in "value", "range", "p50 ms", "p99 ms", "CPU µs", "goal":
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(*_cells(figure))
    Console(width=None if Console().is_terminal else 132).print(table)


def write_json(path: Path, figures: Sequence[Figure], machine: dict[str, str]) -> None:
    """Write the contents of the table as JSON."""
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


_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, str]:
    """Return the facts of the machine that are needed to compare figures."""
    return {
        "cpu": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "python": f"Python {platform.python_version()}",
        "kernel": f"Linux {platform.release()}",
        "nginx": _version("nginx", "-v").removeprefix("nginx version: "),
        "wrk": _version("wrk", "-v"),
    }


def cpu_seconds(pid: int) -> float:
    """Return the processor time that *pid* and its descendants have used."""
    return sum(_cpu_ticks(each) for each in _family(pid)) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Return the resident memory of *pid* and its descendants."""
    files = (Path(f"/proc/{each}/statm") for each in _family(pid))
    return sum(int(file.read_text().split()[1]) for file in files) * os.sysconf("SC_PAGE_SIZE")


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]


def _cpu_ticks(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return (answer.stdout + answer.stderr).splitlines()[0].split(" Copyright")[0].strip()
