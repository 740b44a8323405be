"""The garbage of repositories, collected by us or by the library."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import icechunk

from app.formats.icechunk.expiring import Expiring
from app.resolve.icechunk.collecting import Collector, GcReport
from app.resolve.icechunk.expiring import ExpireReport
from app.resolve.icechunk.expiring import expire as expire_snapshots
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository
from app.roots import with_repository
from tests.formats.icechunk.histories import opened

OLD_S, LIMIT_S, YOUNG_S = 1_500_000_000, 1_600_000_000, 1_700_000_000
FAR_S = 4_000_000_000
FOLDERS = ("snapshots", "transactions", "manifests", "chunks")


def collect(
    root: Path | str,
    limit_s: int = LIMIT_S,
    *,
    execute: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
) -> GcReport:
    """Collect the garbage of a repository."""

    async def run(swaps: RepoSwaps, repository: OpenedRepository) -> GcReport:
        ours = RepoSwaps(swaps.store, swaps.fetch, clock=clock)
        collector = Collector(ours, repository, limit_s * 1_000_000, on_progress)
        return await collector.run(execute=execute)

    return asyncio.run(with_repository(str(root), run))


def collect_theirs(folder: Path, limit_s: int = LIMIT_S) -> icechunk.GCSummary:
    """Let the library collect."""
    return opened(folder).garbage_collect(datetime.fromtimestamp(limit_s, UTC))


def expire(
    root: Path | str, limit_s: int = FAR_S, *, branches: bool = False, execute: bool = True
) -> ExpireReport:
    """Let the snapshots of a repository expire."""

    async def run(swaps: RepoSwaps, repository: OpenedRepository) -> ExpireReport:
        expiring = Expiring(limit_s * 1_000_000, branches)
        return await expire_snapshots(swaps, repository, expiring, execute=execute)

    return asyncio.run(with_repository(str(root), run))


def files_of(folder: Path) -> dict[str, int]:
    """Give the files of a repository by their names, and their sizes."""
    return {
        f"{name}/{each.name}": each.stat().st_size
        for name in FOLDERS
        if (folder / name).is_dir()
        for each in (folder / name).iterdir()
    }


def age(folder: Path, is_old: Mapping[str, bool] | None = None) -> None:
    """Let files be as old as is told; all are where nothing is told."""
    for name in files_of(folder):
        at_s = OLD_S if is_old is None or is_old[name] else YOUNG_S
        os.utime(folder / name, (at_s, at_s))
