"""What ``gc`` and ``expire`` did, or would do, for people."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from app.resolve.icechunk.collecting import GcReport
from app.resolve.icechunk.expiring import ExpireReport
from app.resolve.icechunk.sweeping import Tally


def collected(report: GcReport) -> RenderableType:
    """Draw a row for each folder."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("folder")
    for name in ("removed" if report.executed else "to remove", "bytes", "kept", "bytes"):
        table.add_column(name, justify="right")
    for name, swept in report.folders.items():
        table.add_row(name, *_cells(swept.removed), *_cells(swept.kept))
    return Group(table, *_remarks(report))


def expired(report: ExpireReport) -> RenderableType:
    """Draw a row for each thing that goes."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("expired" if report.executed else "to expire")
    table.add_column("name", overflow="fold")
    kinds = {"snapshot": report.snapshots, "branch": report.branches, "tag": report.tags}
    for kind, names in kinds.items():
        for name in names:
            table.add_row(kind, escape(name))
    told = f"{len(report.snapshots)} snapshots from before {report.older_than}"
    remarks = [told, *_bound(report.oldest_session), *_advice(executed=report.executed)]
    return Group(table, *remarks)


def _remarks(report: GcReport) -> Iterator[str]:
    yield f"written before {report.older_than}, and nothing leads there"
    yield from _bound(report.oldest_session)
    yield f"{report.snapshots_dropped} snapshots are listed no longer"
    if report.sessions_removed:
        yield f"{report.sessions_removed} expired sessions"
    for name, swept in report.folders.items():
        if swept.failed:
            first = escape(swept.first_failure or "")
            yield f"[red]{name}: {swept.failed} could not be removed; the first: {first}[/red]"
        if not swept.is_complete:
            yield f"[red]{name}: given up after that[/red]"
    for name in report.skipped:
        yield f"{name}: not looked at; run it again once that is mended"
    yield from _advice(executed=report.executed)


def _bound(session_id: str | None) -> Iterator[str]:
    if session_id is not None:
        yield f"no later, because of the open session {session_id}"


def _advice(*, executed: bool) -> Iterator[str]:
    if not executed:
        yield "nothing was changed: --execute does it"


def _cells(tally: Tally) -> tuple[str, str]:
    return f"{tally.count:,}", f"{tally.nbytes:,}"
