"""Icechunk repositories with all kinds of history, written by the icechunk library."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import icechunk
import zarr

ROOT_ID: Final = "1CECHNKREP0F1RSTCMT0"
METADATA: Final[dict[str, Any]] = {"who": "é🧊", "n": [1, 2.5, None, {"deep": True}]}
_CONTAINERS: Final = {
    "s3://lab/": ("lab", icechunk.s3_store(region="us-east-1")),
    "file:///data/": (None, icechunk.local_filesystem_store("/data")),
}


@dataclass(frozen=True)
class Written:
    """A repository of the library, and the folder it is in."""

    repo: icechunk.Repository
    folder: Path

    def commit(self, message: str, change: Callable[[Any], object], **more: Any) -> str:
        """Commit a change of `main`."""
        session = self.repo.writable_session("main")
        change(session.store)
        return session.commit(message, **more)

    def amend(self, message: str, change: Callable[[Any], object]) -> str:
        """Replace the tip of `main`."""
        session = self.repo.writable_session("main")
        change(session.store)
        return session.amend(message)

    def move(self, source: str, target: str) -> str:
        """Commit a move on `main`."""
        session = self.repo.rearrange_session("main")
        session.move(source, target)
        return session.commit(f"{source} to {target}")

    @property
    def snapshots(self) -> list[str]:
        """The ids of the snapshots of `main`, newest first."""
        return [each.id for each in self.repo.ancestry(branch="main")]


def create(folder: Path, *, spec_version: int | None = None) -> Written:
    """Create a repository that keeps three updates in a file."""
    config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=3)
    for prefix, (name, store) in _CONTAINERS.items():
        container = icechunk.VirtualChunkContainer(prefix, store, name=name)
        config.set_virtual_chunk_container(container)
    storage = icechunk.local_filesystem_storage(str(folder))
    repo = icechunk.Repository.create(storage, config=config, spec_version=spec_version)
    repo.save_config()
    return Written(repo, folder)


def array(name: str, shape: tuple[int, ...] = (6,)) -> Callable[[Any], object]:
    """Return a change that adds an array with chunks of two along each dimension."""

    def change(store: Any) -> None:
        group = zarr.open_group(store)
        added = group.create_array(name, shape=shape, chunks=(2,) * len(shape), dtype="u1")
        added[...] = 1

    return change


def group(name: str) -> Callable[[Any], object]:
    """Return a change that adds a group."""
    return lambda store: zarr.open_group(store).create_group(name)


def write(name: str, place: Any, value: int) -> Callable[[Any], object]:
    """Return a change of chunks."""
    return lambda store: zarr.open_array(store, path=name).set_basic_selection(place, value)


def attribute(name: str, value: int) -> Callable[[Any], object]:
    """Return a change of a node's attributes."""
    return lambda store: zarr.open(store, path=name, mode="r+").attrs.update({"n": value})


def resize(name: str, *shape: int) -> Callable[[Any], object]:
    """Return a change that resizes an array."""
    return lambda store: zarr.open_array(store, path=name).resize(shape)


def delete(name: str) -> Callable[[Any], object]:
    """Return a change that deletes a node."""
    return lambda store: zarr.open_group(store).__delitem__(name)


def every(*changes: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return several changes as one."""
    return lambda store: [change(store) for change in changes]


def plain(written: Written) -> Written:
    """Make all changes that both format versions support."""
    written.commit("one", every(array("a"), group("g"), array("g/x", (6, 4))), metadata=METADATA)
    written.commit("shape é🧊", every(write("a", 0, 7), attribute("g", 1), attribute("", 1)))
    written.commit("came", array("gone"))
    written.commit("and went", every(delete("gone"), write("g/x", (0, 3), 9)))
    written.commit("again", every(delete("a"), array("a", (4,))))
    written.commit("resized", every(resize("a", 8), resize("g/x", 2, 2)))
    written.commit("array to group", every(delete("a"), group("a"), array("a/y")))
    first = written.snapshots[-2]
    for name in ("v1", "gone", "b c"):
        written.repo.create_tag(name, first)
    written.repo.delete_tag("gone")
    written.repo.create_branch("dev", first)
    session = written.repo.writable_session("dev")
    write("a", 4, 4)(session.store)
    session.commit("on dev")
    return written


def eventful(folder: Path) -> Written:
    """Make the changes of `plain`, and those that only version 2 supports."""
    written = plain(create(folder))
    repo = written.repo
    second, first = written.snapshots[-3:-1]
    for name in ("", "a/b", "main", first):
        repo.create_tag(f"{name}", second)
    repo.create_branch("a%2Fb\n", second)
    repo.create_branch("reset", first)
    repo.reset_branch("reset", second)
    written.move("/g", "/h")
    written.move("/h/x", "/x")
    written.commit("after moves", every(write("x", (0, 0), 3), array("n")))
    written.amend("amended", every(delete("n"), array("m"), attribute("x", 5)))
    written.move("/x", "/h/z")
    written.move("/h", "/g")
    session = repo.writable_session("main")
    write("g/z", (0, 0), 5)(session.store)
    session.flush("on no branch")
    repo.set_metadata({"n": {"k": [1]}})
    repo.set_feature_flag("create_tag", setting=False)
    repo.set_feature_flag("create_tag", setting=None)
    written.commit("deleted", delete("g"))
    return written


def expired(folder: Path) -> Written:
    """Make an eventful repository whose early snapshots have expired."""
    written = eventful(folder)
    moments = [each.written_at for each in written.repo.ancestry(branch="main")]
    written.repo.expire_snapshots(moments[4] + timedelta(microseconds=1))
    written.repo.garbage_collect(datetime.now(UTC) - timedelta(days=1))
    read_only = icechunk.RepoAvailability.read_only
    written.repo.set_status(icechunk.RepoStatus(read_only, limited_availability_reason="moving"))
    return written


def version_1(folder: Path) -> Written:
    """Write a repository in version 1."""
    return plain(create(folder, spec_version=1))


def version_1_expired(folder: Path) -> Written:
    """Write a repository in version 1 whose early snapshots have expired."""
    written = version_1(folder)
    moments = [each.written_at for each in written.repo.ancestry(branch="main")]
    written.repo.expire_snapshots(moments[3] + timedelta(microseconds=1))
    return written


def migrated(folder: Path) -> Written:
    """Migrate a repository of version 1 to version 2, and commit to it."""
    repo = icechunk.upgrade_icechunk_repository(version_1(folder).repo, dry_run=False)
    written = Written(repo, folder)
    written.commit("migrated", every(array("after"), write("a/y", 2, 5)), metadata=METADATA)
    return written


BUILDERS: Final[dict[str, Callable[[Path], Written]]] = {
    "eventful": eventful,
    "expired": expired,
    "version-1": version_1,
    "version-1-expired": version_1_expired,
    "migrated": migrated,
}
