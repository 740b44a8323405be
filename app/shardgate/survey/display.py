"""Tables, totals and progress that ``inspect`` and ``verify`` print."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardgate.formats.surveying import Description, RefDescription, Report
from shardgate.survey.inspect import DamageReport

NO_COLLECTIONS: Final = "no arrays or other collections in the containers found"


def show(*drawn: RenderableType) -> None:
    """Print tables; piped output is not wrapped, since a program or a pager reads it."""
    width = None if sys.stdout.isatty() else 500  # columns, wider than any table
    Console(width=width).print(Group(*drawn))


def make_progress(text: str) -> Progress:
    """Return a progress line on standard error, if that is a terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def draw_table(reports: Iterable[Description | RefDescription | DamageReport]) -> Table:
    """Draw a row for each report, with the columns that any of them has."""
    rows = list(map(_cells, reports))
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_visible(row.get(name, ""))) for name in names))
    return table


def draw_facts(document: Mapping[str, Any]) -> Table:
    """Draw a line for each member that is known; an object has a table of its own."""
    table = Table.grid(padding=(0, 2))
    for name, value in document.items():
        if isinstance(value, dict):
            table.add_row(name, draw_facts(value))
        elif value is not None:
            text = f"{value:,}" if isinstance(value, int) else _visible(value)
            table.add_row(name, Text(text))
    return table


def draw_report(report: Report, *, is_part: bool = False) -> str:
    """Format the totals, a line for each damage, and the extent of the check."""
    if not (report.arrays or report.counts or report.not_checked or report.damages or is_part):
        return NO_COLLECTIONS
    lines = [f"not checked: {path or '.'}: {why}" for path, why in report.not_checked.items()]
    lines.append(
        f"{_count(report.arrays, 'collections')}, {_count(report.shards, 'shards')}, "
        f"{_count(report.chunks, 'inner chunks')} of {_count(report.nbytes, 'bytes')}: "
        f"{len(report.damages) or 'none'} damaged"
    )
    if report.counts:
        lines.append(", ".join(_count(number, things) for things, number in report.counts.items()))
    lines += [f"damaged: {d.object}: {d.key}: {d.reason}" for d in report.damages]
    chunks = f" and {_count(report.chunks, 'chunks')}" if report.reads_chunks else ""
    lines.append(f"checked the indexes of {_count(report.shards, 'shards')}{chunks}")
    return "\n".join(map(_visible, lines))


def _visible(text: str) -> str:
    """Escape what a terminal would obey, and halves of characters, which no output can encode."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _count(number: int, things: str) -> str:
    """Format a number of *things*, whose plural ends in ``s``."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def _cells(report: Description | RefDescription | DamageReport) -> dict[str, str]:
    match report:
        case DamageReport(path, name, reason):
            return {"path": path or ".", "kind": f"damaged: {name}: {reason}"}
        case RefDescription(path, ref, snapshot_id):
            return {"path": path or ".", "ref": ref, "snapshot": snapshot_id}
    shards = _by(report.shard_shape) or report.sharding or report.why_sharded or "not sharded"
    return {
        "path": report.path or ".",
        "kind": f"{report.format} {report.kind}".lstrip(),
        "shape": "" if report.shape is None else _axes(report.shape, report.dimension_names),
        "type": report.data_type or "",
        "inner chunk": _by(report.inner_chunk_shape),
        "shard": shards,
        "per shard": _by(report.chunks_per_shard),
        "index": ", ".join(report.index_location),
        "codecs": " ".join(report.codecs),
    }


def _axes(shape: Sequence[int], names: Sequence[str | None] | None) -> str:
    named = zip(names or (None,) * len(shape), shape, strict=False)
    return " ".join(f"{name}={n}" if name else str(n) for name, n in named) or "()"


def _by(shape: Sequence[int] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape)) or "()"
