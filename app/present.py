"""What ``inspect`` and ``verify`` found, for people."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from app.resolve.inspect import ArrayReport, ChunkReport, DamageReport
from app.resolve.verify import Report


def arrays(reports: Iterable[ArrayReport | DamageReport]) -> RenderableType:
    """Draw one row for each array."""
    table = Table("array", "shape", "type", "inner chunk", "shard", "per shard", "index", "codecs")
    for report in reports:
        match report:
            case DamageReport(path, reason):
                table.add_row(escape(path or "."), f"[red]damaged: {escape(reason)}[/red]")
            case ArrayReport():
                table.add_row(*map(escape, _cells(report)))
    return table


def chunk(report: ChunkReport) -> RenderableType:
    """Draw where the bytes of a key are, and the index of their shard."""
    table = Table(show_header=False, box=None)
    table.add_row("key", escape(report.key))
    table.add_row("state", report.state)
    if report.object is not None:
        table.add_row("object", escape(report.object))
    if report.start is not None and report.stop is not None:
        length = report.stop - report.start
        table.add_row("bytes", f"{report.start}-{report.stop - 1} ({length:,})")
    if report.etag is not None:
        table.add_row("stored ETag", escape(report.etag))
    shard = report.shard
    if shard is None:
        return table
    index = Table(show_header=False, box=None)
    index.add_row("shard", f"{escape(shard.shard)} ({shard.nbytes:,} bytes)")
    index.add_row("index", f"{shard.index_nbytes:,} bytes at the {shard.index_location}")
    index.add_row("entries", f"{shard.entries:,}, {shard.empty:,} of them empty")
    index.add_row("used", f"{shard.used_nbytes:,} bytes")
    index.add_row("gaps", f"{shard.gaps:,} of {shard.gap_nbytes:,} bytes in all")
    return Group(table, "", index)


def verified(report: Report) -> str:
    """Say what was read, one line for each damage last."""
    lines = [f"not checked: {path or '.'}: {why}" for path, why in report.not_checked.items()]
    lines.append(
        f"{report.arrays} arrays, {report.shards:,} shards, {report.chunks:,} inner chunks "
        f"of {report.nbytes:,} bytes: {len(report.damages) or 'no'} damaged"
    )
    lines += [f"damaged: {d.object}: {d.key}: {d.reason}" for d in report.damages]
    return "\n".join(lines)


def _cells(report: ArrayReport) -> list[str]:
    names = report.dimension_names or (None,) * len(report.shape)
    shape = " ".join(
        f"{name}={n}" if name else str(n) for name, n in zip(names, report.shape, strict=False)
    )
    return [
        report.path or ".",
        shape or "()",
        report.data_type,
        _by(report.inner_chunk_shape),
        _by(report.shard_shape) if report.shard_shape else report.why_sharded or "not sharded",
        _by(report.chunks_per_shard) if report.chunks_per_shard else "",
        ", ".join(report.index_location),
        " ".join(report.codecs),
    ]


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
