"""The files of a commit that nobody knows of yet: manifests, then snapshot and log."""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

from app.concurrency import bounded_gather
from app.errors import BusyError
from app.formats.icechunk.commit import Applied, ArrayRewrite, Rewritten
from app.formats.icechunk.config import Config
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.icechunk.manifest import Manifest
from app.formats.icechunk.manifest_writer import (
    ManifestsRewrite,
    RewrittenManifests,
    needed_manifests,
    rewrite_manifests,
)
from app.formats.icechunk.snapshot import ManifestFile, StoredNode, StoredSnapshot
from app.formats.icechunk.snapshot_writer import write_snapshot
from app.formats.icechunk.splitting import Splits, Splitting, parse_splitting
from app.formats.icechunk.transaction_log import TransactionLog, write_transaction_log
from app.model import ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.icechunk.repo_swap import demand_readable
from app.resolve.icechunk.repositories import OpenedRepository
from app.storage.contract import ABSENT, Conflict, ObjectStore

_MEMORY_PER_BYTE: Final = 16
"""Of a compressed manifest, while it is rewritten."""
_MEMORY_PER_CHANGE: Final = 256


class Staged(NamedTuple):
    """What became of the manifests of an array."""

    rewrite: ArrayRewrite
    rewritten: Rewritten
    files: tuple[ManifestFile, ...]


class _Rewriting(NamedTuple):
    rewrite: ArrayRewrite
    splits: Splits
    level: int

    def needs(self) -> frozenset[bytes]:
        """Name the manifests that have to be read."""
        leaving = {ref.object_id for ref in self.rewrite.leaving}
        return needed_manifests(self._described()) | leaving

    def make(self, read: Mapping[bytes, Manifest]) -> tuple[RewrittenManifests, Rewritten]:
        """Write the manifests anew that are among those *read*; it may take long."""
        made = rewrite_manifests(self._described(), read, new_object_id, self.level)
        leaving = [read[ref.object_id] for ref in self.rewrite.leaving]
        return made, Rewritten(made.refs, self.rewrite.dropped(leaving))

    def _described(self) -> ManifestsRewrite:
        rewrite = self.rewrite
        return ManifestsRewrite(
            rewrite.node_id, rewrite.grid, rewrite.manifests, rewrite.changes, self.splits
        )


class Staging:
    """Writes the files of one commit; what is begun anew on another tip uses them again."""

    def __init__(self, opened: OpenedRepository, store: ObjectStore, budget: ByteBudget) -> None:
        self._opened = opened
        self._store = store
        self._budget = budget
        self._staged: dict[bytes, Staged] = {}

    async def write_manifests(self, applied: Applied, config: Config) -> list[Staged]:
        """Write the manifests of all arrays that need others.

        Raises: `DamagedError`, `ConflictError`, `BusyError`, `StorageError`.
        """
        opened = self._opened
        splitting = await opened.think(opened.repo, lambda: parse_splitting(config.splitting))

        async def stage(rewrite: ArrayRewrite) -> Staged:
            before = self._staged.get(rewrite.node_id)
            if before is None or not _is_same(before.rewrite, rewrite):
                node = applied.nodes[rewrite.path]
                splits = await asyncio.to_thread(_splits, splitting, node, len(rewrite.grid))
                rewriting = _Rewriting(rewrite, splits, config.compression_level)
                before = await self._rewrite(rewriting, applied.known)
                self._staged[rewrite.node_id] = before
            return before

        return await bounded_gather(stage, applied.rewrites)

    async def _rewrite(self, rewriting: _Rewriting, known: Mapping[bytes, ManifestFile]) -> Staged:
        """Read what has to be read of the manifests of an array, and write the new ones."""
        opened, rewrite = self._opened, rewriting.rewrite
        needed = sorted(await asyncio.to_thread(rewriting.needs))
        nbytes = _MEMORY_PER_CHANGE * len(rewrite.changes.coords)
        nbytes += sum(_MEMORY_PER_BYTE * known[each].size_bytes for each in needed if each in known)
        async with self._budget.room(nbytes):
            read = await bounded_gather(
                lambda each: opened.repository.manifest(each, opened.fetch), needed
            )
            manifests = dict(zip(needed, read, strict=True))
            place = opened.directory.join(f"manifests ({rewrite.path})")
            made, rewritten = await opened.think(place, lambda: rewriting.make(manifests))
            new = [
                (opened.repository.file("manifests", each.file.object_id), each.data)
                for each in made.new
            ]
            await bounded_gather(self.put, new)
        return Staged(rewrite, rewritten, tuple(each.file for each in made.new))

    async def write_snapshot(self, snapshot: StoredSnapshot, log: TransactionLog) -> None:
        """Write a snapshot and its log, which nothing refers to as yet.

        Raises: `ConflictError` for one that nobody here could read, `BusyError`, `StorageError`.
        """
        opened, object_id = self._opened, snapshot.object_id
        files = await asyncio.to_thread(
            lambda: (write_snapshot(snapshot), write_transaction_log(object_id, log))
        )
        kinds = ("snapshots", "transactions")
        names = [opened.repository.file(kind, object_id) for kind in kinds]
        await bounded_gather(self.put, list(zip(names, files, strict=True)))

    async def put(self, new: tuple[ObjectRef, bytes]) -> None:
        """Write a file under a name that no other has.

        Raises: `ConflictError` for one that nobody here could read, `BusyError`, `StorageError`.
        """
        name, data = new
        demand_readable(name, data, self._opened.repository.limit_nbytes)
        if isinstance(await self._store.put(name, [data], expected=ABSENT), Conflict):
            raise BusyError(f"{name}: the id is taken")


def new_object_id() -> bytes:
    """Make the id of a file."""
    return secrets.token_bytes(OBJECT_ID_NBYTES)


def _splits(splitting: Splitting, node: StoredNode, ndim: int) -> Splits:
    names = None if node.array is None else node.array.names
    return splitting.splits(node.path, names, ndim)


def _is_same(one: ArrayRewrite, other: ArrayRewrite) -> bool:
    """Tell whether the same becomes of both; changes are compared by what they are, not say."""
    alike = one.changes is other.changes and one.path == other.path and one.grid == other.grid
    return alike and one.manifests == other.manifests and one.leaving == other.leaving
