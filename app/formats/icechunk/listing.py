"""The keys of a snapshot in the order of their bytes: documents, and the chunks that are there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, floordiv
from typing import Final, NamedTuple

import numpy as np

from app.formats.icechunk.index import Manifest
from app.formats.icechunk.metadata import Chunks, Node, Snapshot
from app.formats.listing import Rows, Steps, Window
from app.formats.reading import DecodeError

DOCUMENT: Final = "zarr.json"


class Block(NamedTuple):
    """Keys of a node that follow one another: its document, or all its chunks."""

    start: str
    """How all the keys begin."""
    folder: str
    """The path of the node, with a slash behind it unless that is the root."""
    node: Node
    chunks: Chunks | None
    """`None` for the document."""


def make_grid(node: Node, chunks: Chunks, manifests: Sequence[Manifest], folder: str) -> "Grid":
    """Put together what *chunks* may be there, as its *manifests* have them."""
    stored = [manifest.coords(node.node_id, len(chunks.grid)) for manifest in manifests]
    rows = stored[0] if len(stored) == 1 else np.unique(np.concatenate(stored), axis=0)
    rows = rows[(rows < np.array(chunks.grid, np.uint64)).all(axis=1)]
    each, shape = (1,) * len(chunks.grid), chunks.grid
    if (array := node.document.array) is not None:
        inner = array.inner_chunk_shape
        each = tuple(map(floordiv, array.shard_shape, inner))
        shape = tuple(-(-size // chunk) for size, chunk in zip(array.shape, inner, strict=True))
    return Grid(rows, each, shape, lambda coords: folder + chunks.keys.beginning(coords))


def blocks(snapshot: Snapshot, window: Window) -> list[Block]:
    """Order by their keys the parts of *snapshot* that can have wanted ones.

    What is in no group is left out, and so is what is damaged.
    """
    found = []
    for path, node in snapshot.nodes.items():
        if path in snapshot.orphans or isinstance(node, DecodeError):
            continue
        folder = f"{path}/" if path else ""
        found.append(Block(folder + DOCUMENT, folder, node, None))
        if (chunks := node.chunks) is not None and chunks.manifests:
            found.append(Block(folder + chunks.keys.beginning(), folder, node, chunks))
    wanted = (block for block in found if window.meets(block.start))
    return sorted(wanted, key=attrgetter("start"))


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunks of an array that may be there: all in what is stored, chunks or shards."""

    stored: Rows
    """The coordinates of that, a row each, in C order."""
    chunks_per_stored: tuple[int, ...]
    shape: tuple[int, ...]
    """How many chunks the array has along each dimension."""
    spell: Callable[[tuple[int, ...]], str]
    """Writes the beginning of the keys of all chunks whose first coordinates are given."""

    def walk(self, window: Window) -> Iterator[tuple[int, ...]]:
        """Give the coordinates of the wanted chunks by their keys, the first ones of a prefix."""
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
