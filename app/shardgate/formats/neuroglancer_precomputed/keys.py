"""Names of chunks and the 64-bit chunk ids that shards know them by."""

import re
from dataclasses import dataclass, field
from math import prod
from operator import add, sub
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

_NUMBER: Final = "(0|[1-9][0-9]{0,19})"
_SIGNED: Final = "(0|-?[1-9][0-9]{0,19})"
_ID: Final = re.compile(_NUMBER, re.ASCII)
_BOUNDS: Final = re.compile("_".join([f"{_SIGNED}-{_SIGNED}"] * 3), re.ASCII)
_CELL: Final = re.compile(f"{_NUMBER}(?:_{_NUMBER})*", re.ASCII)
LIKE_A_CHUNK: Final = re.compile(r"-?[0-9][0-9_:-]*(?:\.index)?", re.ASCII)
"""Names of chunks of every kind, and others."""
MAX_ID: Final = 2**64 - 1

type Ids = npt.NDArray[np.uint64]
type Mask = npt.NDArray[np.bool_]


class Names(Protocol):
    """The names of the chunks of one kind, right below one directory."""

    def owns(self, name: str) -> bool:
        """Return whether *name* is spelled like those of chunks, of the grid or not."""

    def parse(self, name: str) -> int | None:
        """Return the chunk id in *name*, or `None` if it names no possible chunk."""

    def format(self, chunk_id: int) -> str:
        """Return the name of *chunk_id*, a result of `parse`."""

    def covers(self, ids: Ids) -> Mask:
        """Return which of *ids*, shape ``(count,)``, are of possible chunks."""

    @property
    def rule(self) -> str:
        """Explanation of the spelling, for errors."""


@dataclass(frozen=True, slots=True)
class MortonGrid:
    """Compressed Morton codes of the cells of a grid: the bits of the coordinates are interleaved,
    the first axis lowest, without those that are zero for every cell.
    """

    shape: tuple[int, ...]
    _bits: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """For each bit of the code, lowest first, the axis and the bit of its coordinate."""

    def __post_init__(self) -> None:
        counts = [max(n - 1, 0).bit_length() for n in self.shape]
        bits = [
            (axis, bit)
            for bit in range(max(counts, default=0))
            for axis, count in enumerate(counts)
            if bit < count
        ]
        object.__setattr__(self, "_bits", tuple(bits))

    @property
    def bit_count(self) -> int:
        return len(self._bits)

    def encode(self, cell: tuple[int, ...]) -> int:
        code = 0
        for shift, (axis, bit) in enumerate(self._bits):
            code |= (cell[axis] >> bit & 1) << shift
        return code

    def decode(self, code: int) -> tuple[int, ...]:
        cell = [0] * len(self.shape)
        for shift, (axis, bit) in enumerate(self._bits):
            cell[axis] |= (code >> shift & 1) << bit
        return tuple(cell)

    def box(self, bit_count: int) -> tuple[int, ...]:
        """Return the shape of the box of cells that differ only in the lowest *bit_count* bits."""
        axes = [axis for axis, _ in self._bits[:bit_count]]
        return tuple(1 << axes.count(axis) for axis in range(len(self.shape)))

    def covers(self, codes: Ids) -> Mask:
        """Return which of *codes* are of cells on the grid."""
        # `cells` does not look at higher bits.
        on_grid = codes <= np.uint64((1 << self.bit_count) - 1)
        return on_grid & (self.cells(codes) < np.array(self.shape, np.uint64)).all(axis=1)

    def cells(self, codes: Ids) -> Ids:
        """Decode *codes* to coordinates of shape ``(count, ndim)``."""
        cells = np.zeros((len(codes), len(self.shape)), np.uint64)
        for shift, (axis, bit) in enumerate(self._bits):
            cells[:, axis] |= (codes >> np.uint64(shift) & np.uint64(1)) << np.uint64(bit)
        return cells

    def contains(self, cell: tuple[int, ...]) -> bool:
        return len(cell) == len(self.shape) and all(
            0 <= at < n for at, n in zip(cell, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class IdNames:
    """Decimal ids, as of segments and annotations, with a *suffix*."""

    suffix: str = ""

    def owns(self, name: str) -> bool:
        return name.endswith(self.suffix) and name.removesuffix(self.suffix).isdecimal()

    def parse(self, name: str) -> int | None:
        """Return the id in *name*; there is none in ``07``, or in more than 64 bits."""
        digits = name.removesuffix(self.suffix) if name.endswith(self.suffix) else ""
        if not _ID.fullmatch(digits) or (found := int(digits)) > MAX_ID:
            return None
        return found

    def format(self, chunk_id: int) -> str:
        return f"{chunk_id}{self.suffix}"

    def covers(self, ids: Ids) -> Mask:
        return np.ones(ids.shape, np.bool_)

    @property
    def rule(self) -> str:
        suffix = f", and {self.suffix} behind them" if self.suffix else ""
        return f"ids are decimal numbers below 2^64 without zeros before them{suffix}"


ID_NAMES: Final = IdNames()
"""Names of chunks of every kind in the key-value store that shards are."""


@dataclass(frozen=True, slots=True)
class CellNames:
    """Cells of a spatial index level of annotations: ``0_3_1``."""

    grid: MortonGrid

    def owns(self, name: str) -> bool:
        return all(part.isdecimal() for part in name.split("_"))

    def parse(self, name: str) -> int | None:
        if not _CELL.fullmatch(name):
            return None
        cell = tuple(map(int, name.split("_")))
        return self.grid.encode(cell) if self.grid.contains(cell) else None

    def format(self, chunk_id: int) -> str:
        return "_".join(map(str, self.grid.decode(chunk_id)))

    def covers(self, ids: Ids) -> Mask:
        return self.grid.covers(ids)

    @property
    def rule(self) -> str:
        return f"cells are numbers with _ between them, below {list(self.grid.shape)}"


@dataclass(frozen=True, slots=True)
class VoxelBounds:
    """Chunks of a volume by their voxels, x, y, z: ``0-64_64-100_-32-0``."""

    voxel_offset: tuple[int, ...]
    size: tuple[int, ...]
    chunk_size: tuple[int, ...]
    grid: MortonGrid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = (-(-n // chunk) for n, chunk in zip(self.size, self.chunk_size, strict=True))
        object.__setattr__(self, "grid", MortonGrid(tuple(counts)))

    def owns(self, name: str) -> bool:
        return _BOUNDS.fullmatch(name) is not None

    def parse(self, name: str) -> int | None:
        if (found := _BOUNDS.fullmatch(name)) is None:
            return None
        begins = map(int, found.groups()[::2])
        cell = tuple(
            (begin - offset) // chunk
            for begin, offset, chunk in zip(begins, self.voxel_offset, self.chunk_size, strict=True)
        )
        # A chunk at the edge ends with the volume, and has no other spelling.
        if not self.grid.contains(cell) or self._spell(cell) != name:
            return None
        return self.grid.encode(cell)

    def format(self, chunk_id: int) -> str:
        return self._spell(self.grid.decode(chunk_id))

    def beginning(self, cell: tuple[int, ...]) -> str:
        """Return the common beginning of the names whose first coordinates are *cell*."""
        return self._spell(cell) + ("_" if 0 < len(cell) < len(self.size) else "")

    def covers(self, ids: Ids) -> Mask:
        return self.grid.covers(ids)

    @property
    def rule(self) -> str:
        return (
            f"chunks have {list(self.chunk_size)} voxels, from {list(self.voxel_offset)} on, and"
            f" end where the {list(self.size)} voxels of the volume do"
        )

    def count_voxels(self, chunk_id: int) -> int:
        """Return the number of voxels of a chunk."""
        return prod(map(sub, *reversed(self._bounds(self.grid.decode(chunk_id)))))

    def _bounds(self, cell: tuple[int, ...]) -> tuple[list[int], list[int]]:
        # Not strict: `beginning` has the first coordinates only.
        begins = [at * chunk for at, chunk in zip(cell, self.chunk_size, strict=False)]
        ends = [
            min(begin + chunk, n)
            for begin, chunk, n in zip(begins, self.chunk_size, self.size, strict=False)
        ]
        return list(map(add, begins, self.voxel_offset)), list(map(add, ends, self.voxel_offset))

    def _spell(self, cell: tuple[int, ...]) -> str:
        begins, ends = self._bounds(cell)
        return "_".join(f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True))
