"""Drawings of the chunks of an array: which are stored, and in which shards they lie."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import cachetools

from shardgate.concurrency import SingleFlight, bounded_gather, yield_to_loop
from shardgate.errors import BadParameterError, BusyError, ShardgateError
from shardgate.formats.reading import DecodeError
from shardgate.model import VirtualKey, join_path
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.web.looks import READS, PictureName, Planner
from shardgate.web.rendering import template, visible
from shardgate.web.sections import Drawing, Indices

_WAIT_S: Final = 1.0  # for the chunks that a drawing shows; others follow in the next one
_LONGEST_S: Final = 60.0
_CACHED_S: Final = 20.0
_MOST_GRIDS: Final = 64
_SIDE: Final = 320  # of a drawing, in pixels
_LEAST_SIDE: Final = 24

STORED: Final = "stored"
MISSING: Final = "not stored"
UNREAD: Final = "not read yet"
FAULTY: Final = "cannot be read"
_STATES: Final = (STORED, MISSING, FAULTY, UNREAD)

type Cell = tuple[int, int]
"""Row and column in the grid of chunks."""


class _Side(NamedTuple):
    """The chunks along one side of a drawing."""

    cells: range
    count: int
    """Chunks along that axis of the whole array."""
    size: int
    """Elements of a chunk."""
    length: int
    """Elements of the array."""

    @classmethod
    def of(cls, drawing: Drawing, axis: int) -> "_Side":
        part = drawing.section.ranges[axis]
        size = drawing.chunk_shape[axis]
        length = drawing.shape[axis]
        cells = range(part.start // size, (part.stop - 1) // size + 1)
        return cls(cells, -(-length // size), size, length)

    @property
    def extent(self) -> int:
        """Elements of all chunks that are drawn."""
        return min(self.cells.stop * self.size, self.length) - self.cells.start * self.size

    def edges(self, pixels: float) -> Mapping[int, float]:
        """Return where each chunk begins, and the last one ends, in a drawing of *pixels*."""
        scale = pixels / self.extent
        first = self.cells.start
        edges = {cell: (cell - first) * self.size * scale for cell in self.cells}
        return edges | {self.cells.stop: pixels}


@dataclass(slots=True)
class ChunkGrid:
    """The chunks of a plane, whose states become known one by one."""

    drawing: Drawing
    path: str
    """Of the array or image that was asked for."""
    states: dict[Cell, str] = field(default_factory=dict)
    shards: dict[Cell, str | None] = field(default_factory=dict)
    """Name of the shard of each chunk; `None` for one that is an object of its own."""

    @property
    def sides(self) -> tuple[_Side, _Side]:
        """Rows and columns."""
        rows, columns, *_ = self.drawing.section.order
        return _Side.of(self.drawing, rows), _Side.of(self.drawing, columns)

    @property
    def cells(self) -> Sequence[Cell]:
        """Chunks that are drawn, row by row."""
        rows, columns = self.sides
        return [(row, column) for row in rows.cells for column in columns.cells]

    @property
    def is_complete(self) -> bool:
        """Return whether the states of all are known."""
        return len(self.states) == len(self.cells)

    def name_of(self, cell: Cell) -> str:
        """Return the name of the chunk at *cell*, at the first of all other positions."""
        parts = zip(self.drawing.section.ranges, self.drawing.chunk_shape, strict=True)
        position = [part.start // size for part, size in parts]
        for axis, at in zip(self.drawing.section.order[:2], cell, strict=True):
            position[axis] = at
        return self.drawing.name(tuple(position))


class ChunkGrids:
    """Looks at the chunks of the planes that pictures show, up to some 1,024 of each."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        wait_s: float = _WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._planner = Planner(resolver)
        self._wait_s = wait_s
        self._clock = clock
        self._looks = SingleFlight[PictureName](outlasts=True)
        self.aclose = self._looks.aclose
        self._turns = asyncio.Semaphore(4)
        self._under_way: set[PictureName] = set()
        self._known = cachetools.LRUCache[PictureName, tuple[ChunkGrid, float]](_MOST_GRIDS)

    async def get(self, dataset: Dataset, path: str, ref: str | None, at: Indices) -> ChunkGrid:
        """Return the grid of the plane that `Previews.get` shows, as far as it is known in time.

        Raises: `BadParameterError` if there is none, `BusyError`, any other `ShardgateError`.
        """
        name = await self._planner.name(dataset, path, ref, at)
        grid, expires_at = self._known.get(name, (None, 0.0))
        if grid is None or self._clock() >= expires_at:
            if name not in self._under_way and len(self._under_way) >= _MOST_GRIDS:
                raise BusyError("too many grids of chunks are read at the same time")
            look = partial(self._look, dataset, name)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._looks.run(name, look)
            grid, _ = self._known.get(name, (None, 0.0))
        if grid is None:
            raise BusyError("the chunks are not read yet")
        return grid

    async def _look(self, dataset: Dataset, name: PictureName) -> None:
        self._under_way.add(name)
        try:
            async with self._turns, asyncio.timeout(_LONGEST_S):
                path, drawing = await self._planner.plan(dataset, name)
                grid = ChunkGrid(drawing, path)
                self._known[name] = grid, 0.0
                await self._read(dataset, grid)
            self._known[name] = grid, self._clock() + _CACHED_S
        except DecodeError as error:
            raise BadParameterError(f"path: {error}") from error
        finally:
            self._under_way.discard(name)

    async def _read(self, dataset: Dataset, grid: ChunkGrid) -> None:
        drawing = grid.drawing
        first = VirtualKey(join_path(drawing.directory, grid.name_of(grid.cells[0])))
        layout, rest, *_ = await self._resolver.find_container(dataset, first)
        container = first.removesuffix(rest)
        tracker = self._resolver.new_tracker()
        for number, cell in enumerate(grid.cells):
            key = join_path(drawing.directory, grid.name_of(cell)).removeprefix(container)
            grid.shards[cell] = await layout.shard(VirtualKey(key), tracker)
            await yield_to_loop(number)

        async def look(cell: Cell) -> None:
            try:
                found = await self._planner.locate_chunk(dataset, drawing, grid.name_of(cell))
                grid.states[cell] = MISSING if found is None else STORED
            except ShardgateError:
                grid.states[cell] = FAULTY

        await bounded_gather(look, grid.cells, limit=READS)


def draw_grid(grid: ChunkGrid) -> bytes:
    """Return the drawing of *grid* in SVG."""
    rows, columns = grid.sides
    scale = _SIDE / max(rows.extent, columns.extent)
    width = max(columns.extent * scale, _LEAST_SIDE)
    height = max(rows.extent * scale, _LEAST_SIDE)
    down = rows.edges(height)
    across = columns.edges(width)
    paths: dict[str, list[str]] = {state: [] for state in _STATES}
    borders = []
    for cell in grid.cells:
        row, column = cell
        top, bottom = down[row], down[row + 1]
        left, right = across[column], across[column + 1]
        outline = f"M{left:.2f} {top:.2f}H{right:.2f}V{bottom:.2f}H{left:.2f}z"
        paths[grid.states.get(cell, UNREAD)].append(outline)
        shard = grid.shards.get(cell)
        if grid.shards.get((row, column + 1), shard) != shard:
            borders.append(f"M{right:.2f} {top:.2f}V{bottom:.2f}")
        if grid.shards.get((row + 1, column), shard) != shard:
            borders.append(f"M{left:.2f} {bottom:.2f}H{right:.2f}")
    counts = {state: len(parts) for state, parts in paths.items() if parts}
    text = template("grid.svg").render(
        width=width,
        height=height,
        paths={state: "".join(parts) for state, parts in paths.items() if parts},
        borders="".join(borders),
        counts=counts,
        lines=_describe(grid, counts),
    )
    return text.encode()


def _describe(grid: ChunkGrid, counts: Mapping[str, int]) -> Sequence[str]:
    """Return the lines below a drawing."""
    rows, columns = grid.sides
    shards = {name for name in grid.shards.values() if name is not None}
    holding = {grid.shards[cell] for cell, state in grid.states.items() if state == STORED}
    kind = "inner chunks" if shards else "chunks"
    line = f"{counts.get(STORED, 0):,} of {len(grid.states):,} {kind} stored"
    lines = [f"{line}, in {len(holding):,} of {len(shards):,} shards" if shards else line]
    if len(grid.cells) < rows.count * columns.count:
        lines.append(f"the middle of {rows.count:,} × {columns.count:,} {kind}")
    if (directory := grid.drawing.directory) != grid.path:
        lines.append(f"array {visible(directory.removeprefix(grid.path).strip('/'), 40)}")
    return lines
