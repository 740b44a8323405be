"""What ``inspect`` and ``verify`` found, for people."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from app.formats.surveying import Description
from app.resolve.inspect import ChunkReport, DamageReport, IndexReport, RefReport
from app.resolve.verify import Report

_COLUMNS: Final = (
    "path",
    "kind",
    "shape",
    "type",
    "inner chunk",
    "shard",
    "per shard",
    "index",
    "codecs",
)


def arrays(
    reports: Iterable[Description | DamageReport], refs: Sequence[RefReport | DamageReport] = ()
) -> RenderableType:
    """Draw one row for each array, or whatever else is sharded, and for each ref."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for report in reports:
        match report:
            case DamageReport(path=path, object=name, reason=reason):
                told = escape(f"damaged: {name}: {reason}")
                table.add_row(escape(path or "."), f"[red]{told}[/red]")
            case Description():
                table.add_row(*map(escape, _cells(report)))
    return Group(table, _refs(refs)) if refs else table


def _refs(reports: Iterable[RefReport | DamageReport]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("path", "ref", "snapshot"):
        table.add_column(name, overflow="fold")
    for report in reports:
        match report:
            case DamageReport(path=path, object=name, reason=reason):
                told = escape(f"damaged: {name}: {reason}")
                table.add_row(escape(path or "."), f"[red]{told}[/red]")
            case RefReport(path=path, ref=ref, snapshot_id=snapshot_id):
                table.add_row(*map(escape, (path or ".", ref, snapshot_id)))
    return table


def chunk(report: ChunkReport) -> RenderableType:
    """Draw where the bytes of a key are, and the index of their shard."""
    rows = {"key": report.key, "state": report.state}
    if report.object is not None:
        rows["object"] = report.object
    if report.start is not None and report.stop is not None:
        rows["bytes"] = f"[{report.start}, {report.stop}): {report.stop - report.start:,}"
    if report.etag is not None:
        rows["version"] = report.etag
    told = {
        "reference": report.reference,
        "manifest": report.manifest,
        "location": report.location,
        "reason": report.reason,
    }
    rows |= {name: text for name, text in told.items() if text is not None}
    facts = _facts(rows)
    return facts if report.shard is None else Group(facts, "", shard(report.shard))


def shard(report: IndexReport) -> RenderableType:
    """Draw the state of a shard index."""
    return _facts(
        {
            "shard": f"{report.shard}: {report.nbytes:,} bytes",
            "index": f"{report.index_nbytes:,} bytes at the {report.index_location}",
            "entries": f"{report.entries:,}, {report.empty:,} of them empty",
            "used": f"{report.used_nbytes:,} bytes",
            "gaps": f"{report.gaps:,}, {report.gap_nbytes:,} bytes in all",
        }
    )


def _facts(rows: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def verified(report: Report) -> str:
    """Say what was read, one line for each damage last."""
    lines = [f"not checked: {path or '.'}: {why}" for path, why in report.not_checked.items()]
    lines.append(
        f"{report.arrays} collections, {report.shards:,} shards, {report.chunks:,} inner chunks "
        f"of {report.nbytes:,} bytes: {len(report.damages) or 'none'} damaged"
    )
    if report.counts:
        lines.append(", ".join(f"{number:,} {things}" for things, number in report.counts.items()))
    lines += [f"damaged: {d.object}: {d.key}: {d.reason}" for d in report.damages]
    return "\n".join(lines)


def _cells(report: Description) -> list[str]:
    return [
        report.path or ".",
        f"{report.format} {report.kind}",
        "" if report.shape is None else _axes(report.shape, report.dimension_names),
        report.data_type or "",
        _by(report.inner_chunk_shape),
        _by(report.shard_shape) or report.sharding or report.why_sharded or "not sharded",
        _by(report.chunks_per_shard),
        ", ".join(report.index_location),
        " ".join(report.codecs),
    ]


def _axes(shape: Sequence[int], names: Sequence[str | None] | None) -> str:
    named = zip(names or (None,) * len(shape), shape, strict=False)
    return " ".join(f"{name}={n}" if name else str(n) for name, n in named) or "()"


def _by(shape: Sequence[int] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape)) or "()"
