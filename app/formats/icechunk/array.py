"""The chunks of one array: located by key, or listed."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import floordiv, lt
from typing import Final

import numpy as np

from app.errors import DamagedError, NotAllowedError
from app.formats.icechunk.coords import inside
from app.formats.icechunk.manifest import Manifest, Reference, Virtual
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.snapshot import Chunks, SnapshotNode
from app.formats.listing import Item, Rows, RunInThread, Steps, Window
from app.formats.reading import DecodeError, Fetch
from app.formats.zarr.layout import Shard, ShardReader
from app.model import MISSING, Inline, Missing, ObjectRef, Part, Referenced, Stored

_BATCH: Final = 500
_NOWHERE: Final = ObjectRef("", "")


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Locates and lists chunks: inner chunks, where the array is sharded."""

    repository: Repository
    node: SnapshotNode
    chunks: Chunks
    whole_index_nbytes: int
    fetch: Fetch

    async def locate(self, key: str) -> Referenced | Missing:
        """Locate the chunk *key* of the array. Raises: `DamagedError`, `NotAllowedError`."""
        if (address := self._parse(key)) is None:
            return MISSING
        coords, origin = address
        array = self.node.document.array
        found = await self.repository.find(self.node.node_id, self.chunks, coords, self.fetch)
        if found is None:
            return MISSING
        manifest, referenced = found
        place: Shard = referenced.place
        if array is not None and origin is not None:
            for level in array.unsharded.levels:
                shard = ShardReader(level.index, self.fetch, self.whole_index_nbytes)
                try:
                    place = await shard.locate(place, level.entry(origin))
                except DecodeError as error:
                    raise DamagedError(manifest, f"{key}: {error}") from error
        if not isinstance(place, Stored | Part | Inline):
            return MISSING
        return referenced._replace(place=place)

    async def refer(self, key: str) -> tuple[tuple[int, ...], Manifest, Reference] | None:
        """Return the coordinates and the reference of the chunk *key*, or of its shard."""
        if (address := self._parse(key)) is None:
            return None
        coords, _ = address
        node_id = self.node.node_id
        found = await self.repository.lookup(node_id, self.chunks, coords, self.fetch)
        return None if found is None else (coords, *found)

    def shard(self, key: str) -> tuple[int, ...] | None:
        """Return the coordinates of the chunk *key*, or of its shard."""
        address = self._parse(key)
        return address and address[0]

    def _parse(self, key: str) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the coordinates of the stored chunk, and the origin of an inner chunk."""
        coords, array = self.chunks.keys.parse(key), self.node.document.array
        origin = None if array is None or coords is None else array.origin(coords)
        if array is not None:
            coords = origin and tuple(map(floordiv, origin, array.shard_shape))
        if coords is None or not all(map(lt, coords, self.chunks.grid)):
            return None
        return coords, origin

    async def items(self, folder: str, window: Window, run: RunInThread) -> AsyncGenerator[Item]:
        """Yield the chunks that references allow for; *folder* is the prefix of their keys."""
        manifests = [
            await self.repository.manifest(object_id, self.fetch)
            for object_id, _ in self.chunks.manifests
        ]
        grid = await run(make_grid, self.node, self.chunks, manifests, folder)
        walk = grid.walk(window)
        while batch := await run(_take, walk):
            for coords in batch:
                key = grid.spell(coords)
                if (folded := window.fold(key)) is not None:
                    if window.opens(folded):
                        yield Item(folded, None)
                elif window.admits(key):
                    yield Item(key, await self._show(key.removeprefix(folder)))

    async def _show(self, key: str) -> Referenced | Missing:
        """Locate the chunk *key*; of a virtual chunk that is not allowed, return the length."""
        try:
            return await self.locate(key)
        except NotAllowedError:
            found = await self.refer(key)
            if found is None or self.node.document.array is not None:
                raise
            _, _, reference = found
            if not isinstance(reference, Virtual):
                raise
            return Referenced(Part(_NOWHERE, reference.byte_range), "", is_lasting=False)


def _take(walk: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(islice(walk, _BATCH))


@dataclass(frozen=True, slots=True)
class Grid:
    """Chunks of an array that may exist: all in stored chunks or shards."""

    stored: Rows
    """Coordinates of stored chunks or shards, of shape ``(count, ndim)``, in C order."""
    chunks_per_stored: tuple[int, ...]
    shape: tuple[int, ...]
    spell: Callable[[tuple[int, ...]], str]
    """Returns the prefix of the keys of all chunks with these first coordinates."""

    def walk(self, window: Window) -> Iterator[tuple[int, ...]]:
        """Iterate in key order over the coordinates in *window*; shorter ones for folded keys."""
        return self._walk(window, (), self.stored)

    def _walk(
        self, window: Window, coords: tuple[int, ...], stored: Rows
    ) -> Iterator[tuple[int, ...]]:
        start, dim = self.spell(coords), len(coords)
        if not len(stored) or not window.meets(start):
            return
        if dim == len(self.shape) or window.fold(start) is not None:
            yield coords
            return
        column, size = stored[:, dim], self.chunks_per_stored[dim]
        after = window.after.removeprefix(start) if window.after.startswith(start) else ""
        for at in Steps(np.unique(column), size, self.shape[dim]).walk(after):
            place = np.array([at // size, at // size + 1], np.uint64)
            low, high = np.searchsorted(column, place)
            yield from self._walk(window, (*coords, at), stored[low:high])


def make_grid(
    node: SnapshotNode, chunks: Chunks, manifests: Sequence[Manifest], folder: str
) -> Grid:
    """Collect the chunks of *node* in its *manifests*; *folder* is the prefix of their keys."""
    stored = [manifest.coords(node.node_id, len(chunks.grid)) for manifest in manifests]
    rows = stored[0] if len(stored) == 1 else np.unique(np.concatenate(stored), axis=0)
    rows = rows[inside(rows, chunks.grid)]
    each, shape = (1,) * len(chunks.grid), chunks.grid
    if (array := node.document.array) is not None:
        inner = array.inner_chunk_shape
        each = tuple(map(floordiv, array.shard_shape, inner))
        shape = tuple(-(-size // chunk) for size, chunk in zip(array.shape, inner, strict=True))
    return Grid(rows, each, shape, lambda coords: folder + chunks.keys.beginning(coords))
