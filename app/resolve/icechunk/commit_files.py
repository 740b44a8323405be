"""Files written before a commit: chunks, manifests, snapshots and transaction logs.

Nothing refers to them until the branch moves; those of failed commits are garbage.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

import cachetools

from app.concurrency import bounded_gather, take
from app.errors import BadBodyError, BusyError
from app.formats.icechunk.commit import Applied, ArrayRewrite, Rewritten
from app.formats.icechunk.config import Config
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.manifest import Manifest
from app.formats.icechunk.manifest_writer import (
    ManifestsRewrite,
    RewrittenManifests,
    needed_manifests,
    rewrite_manifests,
)
from app.formats.icechunk.repo_info import RepoInfo
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.snapshot import ManifestFile, StoredNode, StoredSnapshot, write_snapshot
from app.formats.icechunk.splitting import Splits, Splitting, parse_splitting
from app.formats.icechunk.transaction_log import TransactionLog, write_transaction_log
from app.model import ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.icechunk.repo_swap import demand_readable
from app.resolve.icechunk.repository import OpenedRepository
from app.storage.contract import ABSENT, Conflict, ObjectStore

_MEMORY_PER_BYTE: Final = 16
_MEMORY_PER_CHANGE: Final = 256
_MAX_REMEMBERED: Final = 2**18
_REMEMBERED: Final = timedelta(hours=1)
"""Older chunk files are checked again: garbage collection may have removed them."""
_MAX_STATS: Final = 256
"""More chunk files than this are looked up by listing instead of one request each."""
_PAGE: Final = 1000
_LISTED_PER_CHUNK: Final = 100
"""Names listed per wanted chunk file before single requests become cheaper."""


class StagedArray(NamedTuple):
    """Rewritten manifests of an array."""

    rewrite: ArrayRewrite
    rewritten: Rewritten
    files: tuple[ManifestFile, ...]


class CommitFiles:
    """Writes the files of one commit; a retry on another tip reuses unaffected manifests."""

    def __init__(self, opened: OpenedRepository, store: ObjectStore, budget: ByteBudget) -> None:
        self._opened = opened
        self._store = store
        self._budget = budget
        self._staged: dict[bytes, StagedArray] = {}

    async def write_manifests(self, applied: Applied, config: Config) -> list[StagedArray]:
        """Write the new manifests of all changed arrays."""
        opened = self._opened
        splitting = await opened.decode_in_thread(
            opened.repo, lambda: parse_splitting(config.splitting)
        )

        async def stage(rewrite: ArrayRewrite) -> StagedArray:
            before = self._staged.get(rewrite.node_id)
            if before is None or not _is_same(before.rewrite, rewrite):
                node = applied.nodes[rewrite.path]
                splits = await asyncio.to_thread(_splits, splitting, node, len(rewrite.grid))
                before = await self._rewrite(
                    rewrite, splits, config.compression_level, applied.known
                )
                self._staged[rewrite.node_id] = before
            return before

        return await bounded_gather(stage, applied.rewrites)

    async def _rewrite(
        self, rewrite: ArrayRewrite, splits: Splits, level: int, known: Mapping[bytes, ManifestFile]
    ) -> StagedArray:
        opened = self._opened
        merge = ManifestsRewrite(
            rewrite.node_id, rewrite.grid, rewrite.manifests, rewrite.changes, splits
        )
        leaving = [ref.object_id for ref in rewrite.leaving]
        needed = sorted({*leaving, *await asyncio.to_thread(needed_manifests, merge)})
        nbytes = _MEMORY_PER_CHANGE * len(rewrite.changes.coords)
        nbytes += sum(_MEMORY_PER_BYTE * known[each].size_bytes for each in needed if each in known)
        async with self._budget.room(nbytes):
            read = await bounded_gather(
                lambda each: opened.repository.manifest(each, opened.fetch), needed
            )
            manifests: Mapping[bytes, Manifest] = dict(zip(needed, read, strict=True))

            def merge_manifests() -> tuple[RewrittenManifests, Rewritten]:
                made = rewrite_manifests(merge, manifests, new_object_id, level)
                dropped = rewrite.dropped([manifests[each] for each in leaving])
                return made, Rewritten(made.refs, dropped)

            name = opened.directory.join(f"manifests ({rewrite.path})")
            made, rewritten = await opened.decode_in_thread(name, merge_manifests)
            new = [
                (opened.repository.file("manifests", each.file.object_id), each.data)
                for each in made.new
            ]
            await bounded_gather(self._put, new)
        return StagedArray(rewrite, rewritten, tuple(each.file for each in made.new))

    async def write_snapshot(self, snapshot: StoredSnapshot, log: TransactionLog) -> None:
        """Write a snapshot and its log; raise `ConflictError` for a file over the size limit."""
        opened, object_id = self._opened, snapshot.object_id
        files = await asyncio.to_thread(
            lambda: (write_snapshot(snapshot), write_transaction_log(object_id, log))
        )
        kinds = ("snapshots", "transactions")
        names = [opened.repository.file(kind, object_id) for kind in kinds]
        await bounded_gather(self._put, list(zip(names, files, strict=True)))

    async def _put(self, new: tuple[ObjectRef, bytes]) -> None:
        name, data = new
        demand_readable(name, data, self._opened.repository.limit_nbytes)
        await put_new(self._store, name, data)


class ChunkFiles:
    """Writes chunk files and looks up their lengths before a commit refers to them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: cachetools.TTLCache[tuple[ObjectRef, bytes], int] = cachetools.TTLCache(
            _MAX_REMEMBERED, _REMEMBERED.total_seconds()
        )

    async def put(self, opened: OpenedRepository, body: bytes) -> bytes:
        """Write a chunk file, which must not be empty, and return its id of 12 bytes."""
        if not body:
            raise BadBodyError(
                "a chunk must have at least one byte: the library refuses empty ones"
            )
        await opened.writable_info()
        chunk_id = await put_chunk_file(self._store, opened.repository, body)
        self._known[opened.directory, chunk_id] = len(body)
        return chunk_id

    async def lengths(
        self, opened: OpenedRepository, info: RepoInfo, wanted: Mapping[bytes, int]
    ) -> Mapping[bytes, int]:
        """Return the lengths in bytes of those chunk files of *wanted* that exist."""
        known = {each: self._known.get((opened.directory, each)) for each in wanted}
        found = {each: length for each, length in known.items() if length is not None}
        if found:
            is_stale = await opened.decode_in_thread(
                opened.repo, lambda: _was_collected_lately(info)
            )
            found = {} if is_stale else found
        missing = [chunk_id for chunk_id in wanted if chunk_id not in found]
        if len(missing) <= _MAX_STATS:
            return {**found, **await self._stat(opened, missing)}
        by_letter: dict[str, list[bytes]] = {}
        for chunk_id in missing:
            by_letter.setdefault(encode_id(chunk_id)[0], []).append(chunk_id)
        for part in await bounded_gather(partial(self._list, opened), list(by_letter.values())):
            found |= part
        return found

    async def _stat(self, opened: OpenedRepository, wanted: Sequence[bytes]) -> dict[bytes, int]:
        names = [opened.repository.file("chunks", chunk_id) for chunk_id in wanted]
        stats = zip(wanted, await bounded_gather(self._store.stat, names), strict=True)
        return {chunk_id: stat.size for chunk_id, stat in stats if stat is not None}

    async def _list(self, opened: OpenedRepository, wanted: Sequence[bytes]) -> dict[bytes, int]:
        """Find *wanted* of one first letter in a listing; after too many names ask one by one."""
        listed = self._store.list(opened.directory.join(f"chunks/{encode_id(wanted[0])[0]}"))
        found, left = dict[bytes, int](), set(wanted)
        for _ in range(1 + _LISTED_PER_CHUNK * len(wanted) // _PAGE):
            page = await take(listed, _PAGE)
            for each in page:
                chunk_id = decode_id(each.ref.key.rpartition("/")[2])
                if chunk_id in left and each.size is not None:
                    found[chunk_id] = each.size
                    left.remove(chunk_id)
            if len(page) < _PAGE:
                return found
        return {**found, **await self._stat(opened, sorted(left))}


async def put_chunk_file(store: ObjectStore, repository: Repository, data: bytes) -> bytes:
    """Write a chunk file under a new random id, and return the id."""
    chunk_id = new_object_id()
    await put_new(store, repository.file("chunks", chunk_id), data)
    return chunk_id


async def put_new(store: ObjectStore, name: ObjectRef, data: bytes) -> None:
    """Write an object whose name has a random id."""
    if isinstance(await store.put(name, [data], expected=ABSENT), Conflict):
        raise BusyError(f"{name}: an object of this random id exists already")


def new_object_id() -> bytes:
    """Return a random id for a file of a repository."""
    return secrets.token_bytes(OBJECT_ID_NBYTES)


def _splits(splitting: Splitting, node: StoredNode, ndim: int) -> Splits:
    names = None if node.array is None else node.array.names
    return splitting.splits(node.path, names, ndim)


def _is_same(one: ArrayRewrite, other: ArrayRewrite) -> bool:
    """Compare two rewrites; their changes by identity, since they are large."""
    alike = one.changes is other.changes and one.path == other.path and one.grid == other.grid
    return alike and one.manifests == other.manifests and one.leaving == other.leaving


def _was_collected_lately(info: RepoInfo) -> bool:
    """Return whether garbage collection may have run within `_REMEMBERED` of the last operation."""
    since: datetime | None = None
    for update in info.updates():
        since = since or update.updated_at - _REMEMBERED
        if update.updated_at < since:
            return False
        if update.kind == "gc_ran":
            return True
    return info.repo_before_updates is not None
