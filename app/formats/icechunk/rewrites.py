"""Which arrays need other manifests, and what of the old ones has to be read for that."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from app.errors import BadBodyError
from app.formats.icechunk.array_grids import inside
from app.formats.icechunk.change_set import ChunkChanges
from app.formats.icechunk.coords_set import increases
from app.formats.icechunk.index import Manifest
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.payloads import Payloads
from app.formats.icechunk.stored_nodes import StoredArray, StoredNode
from app.formats.icechunk.updated_chunks import Coords


@dataclass(frozen=True, slots=True)
class ArrayRewrite:
    """An array whose manifests are to be rewritten."""

    node_id: bytes
    path: str
    grid: tuple[int, ...]
    """How many chunks there are along each dimension from now on."""
    changes: ChunkChanges
    """All inside of *grid*."""
    manifests: tuple[ManifestRef, ...]
    """Where its references are until now; none if it had another number of dimensions."""
    leaving: tuple[ManifestRef, ...] = ()
    """Manifests that may have chunks outside of *grid*: read them, for the log tells of those."""

    def dropped(self, manifests: Iterable[Manifest]) -> tuple[Coords, ...]:
        """List the chunks that *manifests*, which are those *leaving*, have outside of *grid*."""
        read = {manifest.object_id: manifest for manifest in manifests}
        found: list[Coords] = []
        for object_id, extents in self.leaving:
            coords = read[object_id].coords(self.node_id, len(extents))
            bounds = np.array(extents, np.uint64).reshape(len(extents), 2).T
            within = ((coords >= bounds[0]) & (coords < bounds[1])).all(axis=1)
            found.append(coords[within & ~inside(coords, self.grid)])
        return tuple(coords for coords in found if len(coords))


def plan_rewrite(
    node: StoredNode, chunks: ChunkChanges | None, before: StoredNode | None
) -> ArrayRewrite | None:
    """Tell what becomes of the manifests of *node*, which was *before*; `None` if they all stay.

    Raises: `BadBodyError` for *chunks* where none can be.
    """
    if node.array is None:
        if chunks is not None:
            raise BadBodyError(f"{node.path}: a group has no chunks")
        return None
    grid = tuple(dimension.num_chunks for dimension in node.array.dimensions)
    if chunks is None:
        chunks = ChunkChanges(np.empty((0, len(grid)), np.uint32), Payloads.gone(0))
    _check_chunks(node.path, grid, chunks)
    old = node.array.manifests
    if before is not None and before.array is not None and _ndim(before.array) != len(grid):
        leaving, old = old, ()
    else:
        leaving = tuple(ref for ref in old if not _fits(ref, grid))
    if not leaving and not len(chunks.coords):
        return None
    return ArrayRewrite(node.node_id, node.path, grid, chunks, old, leaving)


def _ndim(array: StoredArray) -> int:
    return len(array.dimensions)


def _fits(ref: ManifestRef, grid: tuple[int, ...]) -> bool:
    """Tell whether all chunks of *ref* are in *grid*; those it can have none of are not looked at.

    Early writers gave a dimension to arrays that have none.
    """
    if len(ref.extents) != len(grid):
        return True
    return all(stop <= count for (_, stop), count in zip(ref.extents, grid, strict=True))


def _check_chunks(path: str, grid: tuple[int, ...], chunks: ChunkChanges) -> None:
    coords = chunks.coords
    if len(coords) != len(chunks.payloads):
        raise ValueError(f"{path}: {len(coords)} chunks, and {len(chunks.payloads)} payloads")
    outside = np.flatnonzero(~inside(coords, grid))
    if len(outside):
        first = coords[outside[0]].tolist()
        raise BadBodyError(f"{path}: chunk {first} is outside of the grid of {list(grid)} chunks")
    if not (increases(coords).all() if grid else len(coords) <= 1):
        raise BadBodyError(f"{path}: chunks are told twice, or in no order")
