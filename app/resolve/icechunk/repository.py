"""Opened Icechunk repositories: repo info, snapshots and ancestry."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from app.errors import (
    DamagedError,
    LockedError,
    OfflineError,
    ReadOnlyError,
    UnknownRefError,
    UnknownRepositoryError,
)
from app.formats.icechunk.envelope import memory_nbytes
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.keys import MAIN, parse_ref
from app.formats.icechunk.layout import RepositoryLayout
from app.formats.icechunk.repo_info import Availability, RepoInfo, SnapshotInfo
from app.formats.icechunk.repository import REPO, RepoRefs, Repository
from app.formats.icechunk.snapshot import (
    SnapshotHeaderDecoder,
    StoredSnapshot,
    StoredSnapshotDecoder,
)
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.surveying import Listing
from app.model import ByteRange, ObjectRef, VirtualKey
from app.resolve.listing import Root, list_names

_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class OpenedRepository:
    """Repository with the means to read its files."""

    repository: Repository
    fetch: Fetch
    listing: Listing

    @property
    def directory(self) -> ObjectRef:
        return self.repository.directory

    @property
    def repo(self) -> ObjectRef:
        return self.directory.join(REPO)

    async def info(self) -> RepoInfo | None:
        """Read the file ``repo``; return `None` for format version 1, which has no such file."""
        if not isinstance(self.repository.refs, RepoRefs):
            return None
        if (info := await self.repository.refs.info(self.fetch)) is None:
            raise UnknownRepositoryError(f"{self.directory}: the repository no longer exists")
        return info

    async def writable_info(self) -> RepoInfo:
        """Read ``repo``; raise `LockedError` or `ReadOnlyError` if it accepts no writes."""
        try:
            info = await self.info()
        except OfflineError as error:
            raise LockedError(str(error)) from error
        if info is None:
            raise ReadOnlyError(f"{self.directory} follows version 1 of Icechunk's format")
        require_unlocked(info, self.repo)
        return info

    async def decode_in_thread[T](self, ref: ObjectRef, call: Callable[[], T]) -> T:
        """Run *call* in a worker thread; raise `DamagedError` of *ref* for a `DecodeError`."""
        try:
            return await asyncio.to_thread(call)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error

    async def find(self, spelled: str) -> str:
        """Return the id of the snapshot that *spelled* refers to; the snapshot may not exist.

        Refs are spelled as in keys: ``@branch.NAME``, ``@tag.NAME``, ``@SNAPSHOTID``. Without
        ``@`` it is the name of a branch or, if no such branch exists, the id of a snapshot. The
        empty string is ``main``.
        """
        await self.info()
        for ref, _ in parse_ref(spelled or MAIN.name):
            if (found := await self.repository.refs.resolve(ref, self.fetch)) is not None:
                return found.snapshot_id
        raise UnknownRefError(f"there is no {spelled or MAIN.name} in {self.directory}")

    async def ancestry(self, snapshot_id: str) -> AsyncGenerator[SnapshotInfo]:
        """Yield a snapshot and its ancestors; raise `UnknownRefError` if it does not exist."""
        info = await self.info()
        listed = self._read_ancestry(snapshot_id)
        if info is not None:
            listed = self._listed_ancestry(info, snapshot_id)
        is_any = False
        async for each in listed:
            is_any = True
            yield each
        if not is_any:
            raise UnknownRefError(f"there is no snapshot {snapshot_id} in {self.directory}")

    async def _listed_ancestry(
        self, info: RepoInfo, snapshot_id: str
    ) -> AsyncGenerator[SnapshotInfo]:
        listed = await self.decode_in_thread(self.repo, partial(info.ancestry, snapshot_id))
        ancestors = listed or iter(())
        while batch := await self.decode_in_thread(
            self.repo, lambda: list(islice(ancestors, _BATCH))
        ):
            for each in batch:
                yield each

    async def _read_ancestry(self, snapshot_id: str) -> AsyncGenerator[SnapshotInfo]:
        """Follow the snapshot files of version 1, which are mutable: expiration rewrites them."""
        wanted: str | None = snapshot_id
        visited: set[str] = set()
        while wanted is not None and (object_id := decode_id(wanted)) is not None:
            limit = self.repository.limit_nbytes
            name = self.repository.file("snapshots", object_id)
            decode = SnapshotHeaderDecoder(object_id, limit)
            request = ByteRange(0, limit + 1)
            read = Read("snapshot-header", name, request, decode, memory_nbytes=memory_nbytes)
            found = await self.fetch(read)
            if found is None and visited:
                raise DamagedError(name, "does not exist, and is the parent of a snapshot")
            if found is None:
                return
            yield found.value
            visited.add(wanted)
            if (wanted := found.value.parent_id) in visited:
                raise DamagedError(name, "a snapshot is its own ancestor")


async def open_repository(root: Root, path: str) -> OpenedRepository:
    """Open the repository at *path* below *root*. Raises: `UnknownRepositoryError`."""
    key = VirtualKey(f"{path}/" if path else "")
    layout, rest = await root.containers.find(root.ref, key, root.fetch)
    if not isinstance(layout, RepositoryLayout) or rest:
        place = f"at {path}" if path else "at its root; its path is needed"
        raise UnknownRepositoryError(f"the dataset has no Icechunk repository {place}")
    repository = layout.repository
    listing = partial(list_names, root.store, repository.directory)
    return OpenedRepository(repository, root.fetch, listing)


async def read_snapshot(
    repository: Repository, snapshot_id: str, fetch: Fetch
) -> StoredSnapshot | None:
    """Read a complete snapshot of *repository*; return `None` if it does not exist."""
    if (object_id := decode_id(snapshot_id)) is None:
        return None
    decode = StoredSnapshotDecoder(object_id, repository.limit_nbytes)
    return await repository.read("snapshots", object_id, decode, fetch)


def require_unlocked(info: RepoInfo, ref: ObjectRef) -> None:
    """Check that the status in *info*, read from *ref*, permits writes. Raises: `LockedError`."""
    availability, reason = info.status.availability, info.status.reason
    if availability is not Availability.ONLINE:
        name = availability.name.lower().replace("_", "-")
        raise LockedError(f"{ref}: the repository is {name}: {reason or 'no reason given'}")
