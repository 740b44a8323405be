"""Random histories of repositories that the library writes: branches, tags, amends, resets."""

import shutil
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import icechunk
import zarr
from hypothesis import strategies as st

from app.formats.icechunk.repo_info import RepoInfo, RepoInfoDecoder

LIMIT_NBYTES = 1 << 26
_CHUNKS = 6
_NAMES = ("main", "b1", "b2")


class Step(NamedTuple):
    """Something that is done to a repository."""

    kind: str
    name: str
    number: int
    """Chooses among what there is."""


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(
            ["commit"] * 6
            + ["amend", "flush", "branch", "tag", "reset", "drop branch", "drop tag"]
            + ["delete array", "expire", "collect"]
        ),
        st.sampled_from(_NAMES),
        st.integers(0, 99),
    ),
    min_size=2,
    max_size=14,
)


def storage(folder: Path) -> icechunk.Storage:
    """Name a folder to the library."""
    return icechunk.local_filesystem_storage(str(folder))


def opened(folder: Path) -> icechunk.Repository:
    """Open a repository as if for the first time."""
    return icechunk.Repository.open(storage(folder))


def copied(folder: Path, name: str) -> Path:
    """Copy a repository, times of files and all."""
    target = folder.with_name(name)
    shutil.copytree(folder, target)
    return target


def info_of(folder: Path) -> RepoInfo:
    """Decode the file ``repo``."""
    return RepoInfoDecoder(LIMIT_NBYTES)((folder / "repo").read_bytes())


def told_of(folder: Path) -> dict[str, Any]:
    """Tell all that the library does of ``repo``, but times and names of backups; and what it does
    not tell.
    """
    found: Any = opened(folder).inspect_repo_info()
    told = dict(found)
    told.pop("header")
    told["latest_updates"] = [each["update_type"] for each in told["latest_updates"]]
    told["pruned"] = {
        each.snapshot_id: each.pruned_ancestor_tx_logs for each in info_of(folder).snapshots()
    }
    return told


def written_at(folder: Path) -> list[datetime]:
    """Tell when the snapshots were written, in order."""
    return sorted(each.flushed_at for each in info_of(folder).snapshots())


class History:
    """A repository in *folder*, to which steps are done."""

    def __init__(self, folder: Path) -> None:
        config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=8)
        self.folder = folder
        self.repository = icechunk.Repository.create(storage(folder), config=config)
        self.repository.save_config()
        self._count = 0
        self._change_and("commit", "main", 0)

    def take(self, steps: Sequence[Step]) -> None:
        """Do *steps*; those that make no sense are left out."""
        for step in steps:
            try:
                self._take(step)
            except (icechunk.IcechunkError, KeyError):
                continue

    def _take(self, step: Step) -> None:
        kind, name, number = step
        repository = self.repository
        match kind:
            case "commit" | "amend" | "flush" | "delete array":
                self._change_and(kind, name, number)
            case "branch":
                repository.create_branch(name, self._snapshot(number))
            case "tag":
                repository.create_tag(f"t{number % 4}", self._snapshot(number))
            case "reset":
                repository.reset_branch(name, self._snapshot(number))
            case "drop branch":
                repository.delete_branch(name)
            case "drop tag":
                repository.delete_tag(f"t{number % 4}")
            case "collect":
                repository.garbage_collect(datetime.now(UTC))
            case _:
                times = written_at(self.folder)
                repository.expire_snapshots(times[number % len(times)])

    def _snapshot(self, number: int) -> str:
        listed = sorted(info_of(self.folder).snapshots(), key=lambda each: each.flushed_at)
        ids = [each.snapshot_id for each in listed]
        return ids[number % len(ids)]

    def _change_and(self, kind: str, branch: str, number: int) -> None:
        session = self.repository.writable_session(branch)
        self._count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._change(session, number, delete=kind == "delete array")
        message = f"{kind} {self._count}"
        if kind == "amend":
            session.amend(message)
        elif kind == "flush":
            session.flush(message)
        else:
            session.commit(message)

    def _change(self, session: icechunk.Session, number: int, *, delete: bool) -> None:
        group = zarr.open_group(session.store, mode="a")
        name = f"a{number % 2}"
        if delete:
            del group[name]
            return
        array: Any
        if name not in group:
            # The chunks of one are inline, those of the other are files.
            size = 1 + 15 * (number % 2)
            array = group.create_array(
                name, shape=(_CHUNKS * size,), chunks=(size,), dtype="u1", compressors=None
            )
        else:
            array = group[name]
        size = array.chunks[0]
        at = number % _CHUNKS
        array[at * size : (at + 1) * size] = self._count % 250 + 1
