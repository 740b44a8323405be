"""The chunks of one array: found by their keys, or listed."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import floordiv, lt
from typing import Final

from app.errors import DamagedError, NotAllowedError
from app.formats.icechunk.index import Manifest
from app.formats.icechunk.listing import make_grid
from app.formats.icechunk.metadata import Chunks, Node
from app.formats.icechunk.references import Reference, Virtual
from app.formats.icechunk.repository import Repository
from app.formats.listing import Item, RunInThread, Window
from app.formats.reading import DecodeError, Fetch
from app.formats.zarr.layout import Shard, ShardReader
from app.model import MISSING, Inline, Missing, ObjectRef, Part, Referenced, Stored

_BATCH: Final = 500
_NOWHERE: Final = ObjectRef("", "")


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Finds chunks; the inner ones, where the array is sharded."""

    repository: Repository
    node: Node
    chunks: Chunks
    whole_index_nbytes: int
    """A larger shard index is read one entry at a time."""
    fetch: Fetch

    async def locate(self, key: str) -> Referenced | Missing:
        """Find the chunk *key*, which is relative to the array.

        Raises: `DamagedError`, `NotAllowedError`.
        """
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
        """Find what refers to the chunk *key*, or to the shard that it is in, by its coords.

        Raises: `DamagedError`.
        """
        if (address := self._parse(key)) is None:
            return None
        coords, _ = address
        node_id = self.node.node_id
        found = await self.repository.lookup(node_id, self.chunks, coords, self.fetch)
        return None if found is None else (coords, *found)

    def shard(self, key: str) -> tuple[int, ...] | None:
        """Give the coords of what is stored for *key*."""
        address = self._parse(key)
        return address and address[0]

    def _parse(self, key: str) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
        """Read the coords of what is stored for *key*, and the origin of an inner chunk."""
        coords, array = self.chunks.keys.parse(key), self.node.document.array
        origin = None if array is None or coords is None else array.origin(coords)
        if array is not None:
            coords = origin and tuple(map(floordiv, origin, array.shard_shape))
        if coords is None or not all(map(lt, coords, self.chunks.grid)):
            return None
        return coords, origin

    async def items(self, folder: str, window: Window, aside: RunInThread) -> AsyncGenerator[Item]:
        """Give the chunks there may be, whose keys begin with *folder*."""
        manifests = [
            await self.repository.manifest(object_id, self.fetch)
            for object_id, _ in self.chunks.manifests
        ]
        grid = await aside(make_grid, self.node, self.chunks, manifests, folder)
        walk = grid.walk(window)
        while batch := await aside(_take, walk):
            for coords in batch:
                key = grid.spell(coords)
                if (folded := window.fold(key)) is not None:
                    if window.opens(folded):
                        yield Item(folded, None)
                elif window.admits(key):
                    yield Item(key, await self._show(key.removeprefix(folder)))

    async def _show(self, key: str) -> Referenced | Missing:
        """Find the chunk *key*; of what may not be followed the length is known all the same."""
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
