"""The Icechunk repository that a request means, and the snapshot in it."""

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
from app.formats.icechunk.refs import REPO, RepoRefs
from app.formats.icechunk.repo_info import Availability, RepoInfo, SnapshotInfo
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.snapshot import SnapshotHeaderDecoder
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.surveying import Listing
from app.model import ByteRange, ObjectRef, VirtualKey
from app.resolve.listing import Root, list_names

_AT_ONCE: Final = 64
"""So many snapshots are looked at before others get their turn."""


@dataclass(frozen=True, slots=True)
class OpenedRepository:
    """A repository, and all that is needed to look around in it."""

    repository: Repository
    fetch: Fetch
    listing: Listing

    @property
    def directory(self) -> ObjectRef:
        """Where it is."""
        return self.repository.directory

    @property
    def repo(self) -> ObjectRef:
        """Name the file ``repo``."""
        return self.directory.join(REPO)

    async def info(self) -> RepoInfo | None:
        """Read ``repo``; `None` for a repository of version 1, which has none.

        Raises: `OfflineError`, `UnknownRepositoryError` if it is gone.
        """
        if not isinstance(self.repository.refs, RepoRefs):
            return None
        if (info := await self.repository.refs.info(self.fetch)) is None:
            raise UnknownRepositoryError(f"there is no repository any more at {self.directory}")
        return info

    async def writable_info(self) -> RepoInfo:
        """Read ``repo`` of a repository that may be changed.

        Raises: `LockedError`, also for one that is offline, `ReadOnlyError` for version 1 of the
        format, `UnknownRepositoryError`.
        """
        try:
            info = await self.info()
        except OfflineError as error:
            raise LockedError(str(error)) from error
        if info is None:
            raise ReadOnlyError(f"{self.directory} follows version 1 of Icechunk's format")
        demand_unlocked(info, self.repo)
        return info

    async def think[T](self, ref: ObjectRef, call: Callable[[], T]) -> T:
        """Make a *call* that reads on in the decoded file *ref*, beside the event loop.

        Raises: `DamagedError` where the call raises `DecodeError`.
        """
        try:
            return await asyncio.to_thread(call)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error

    async def find(self, spelled: str) -> str:
        """Find the id of the snapshot that *spelled* means, which may not exist.

        Refs are spelled as in keys: ``@branch.NAME``, ``@tag.NAME``, ``@SNAPSHOTID``. What begins
        otherwise is the name of a branch or, if there is no such branch, the id of a snapshot;
        nothing at all is ``main``.

        Raises: `UnknownRefError`.
        """
        await self.info()
        for ref, _ in parse_ref(spelled or MAIN.name):
            if (found := await self.repository.refs.resolve(ref, self.fetch)) is not None:
                return found.snapshot_id
        raise UnknownRefError(f"there is no {spelled or MAIN.name} in {self.directory}")

    async def ancestry(self, snapshot_id: str) -> AsyncGenerator[SnapshotInfo]:
        """Give a snapshot, its parent and so on.

        Raises: `UnknownRefError` if there is no such snapshot.
        """
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
        ancestors = await self.think(self.repo, partial(info.ancestry, snapshot_id)) or iter(())
        while some := await self.think(self.repo, lambda: list(islice(ancestors, _AT_ONCE))):
            for each in some:
                yield each

    async def _read_ancestry(self, snapshot_id: str) -> AsyncGenerator[SnapshotInfo]:
        """Read one snapshot after the other: in version 1 each tells its parent.

        Expiration writes those anew that lose their parents, so none is good for ever.
        """
        wanted: str | None = snapshot_id
        seen: set[str] = set()
        while wanted is not None and (object_id := decode_id(wanted)) is not None:
            limit = self.repository.limit_nbytes
            name = self.repository.file("snapshots", object_id)
            decode = SnapshotHeaderDecoder(wanted, limit)
            request = ByteRange(0, limit + 1)
            read = Read("snapshot-header", name, request, decode, memory_nbytes=memory_nbytes)
            found = await self.fetch(read)
            if found is None and seen:
                raise DamagedError(name, "does not exist, and is the parent of a snapshot")
            if found is None:
                return
            yield found.value.info
            seen.add(wanted)
            if (wanted := found.value.info.parent_id) in seen:
                raise DamagedError(name, "a snapshot is its own ancestor")


async def open_repository(root: Root, path: str) -> OpenedRepository:
    """Open the repository that lies at *path* below *root*.

    Raises: `UnknownRepositoryError`.
    """
    key = VirtualKey(f"{path}/" if path else "")
    layout, rest = await root.containers.find(root.ref, key, root.fetch)
    if not isinstance(layout, RepositoryLayout) or rest:
        place = f"at {path}" if path else "at its root; tell its path"
        raise UnknownRepositoryError(f"the dataset has no Icechunk repository {place}")
    repository = layout.repository
    listing = partial(list_names, root.store, repository.directory)
    return OpenedRepository(repository, root.fetch, listing)


def demand_unlocked(info: RepoInfo, ref: ObjectRef) -> None:
    """Return if *info*, read from *ref*, lets its repository be written to.

    Raises: `LockedError`.
    """
    availability, reason = info.status.availability, info.status.reason
    if availability is not Availability.ONLINE:
        name = availability.name.lower().replace("_", "-")
        raise LockedError(f"{ref}: the repository is {name}: {reason or 'no reason is told'}")
