"""Drawings of the chunks of an array: which are stored, and in which shards they lie."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Final

import cachetools

from shardgate.concurrency import SingleFlight, bounded_gather, yield_to_loop
from shardgate.errors import BadParameterError, BusyError, ShardgateError
from shardgate.formats.reading import DecodeError
from shardgate.model import SHARDED, VirtualKey, join_path
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.web.looks import READS, PictureName, Planner
from shardgate.web.rendering import template, visible
from shardgate.web.sections import Drawing, Indices

_MOST_AT_ONCE: Final = 4  # of a dataset, whose store may hang

STORED: Final = "stored"
MISSING: Final = "not stored"
UNREAD: Final = "not read yet"
FAULTY: Final = "cannot be read"

type Cell = tuple[int, int]
"""Row and column in the grid of chunks."""


@dataclass(slots=True)
class ChunkGridView:
    """The chunks of a plane, whose states become known one by one."""

    drawing: Drawing
    path: str
    """Of the array or image that was asked for."""
    states: dict[Cell, str] = field(default_factory=dict)
    shards: dict[Cell, int | None] = field(default_factory=dict)
    """Number of the shard of each chunk; `None` for one that is an object of its own."""

    @property
    def axes(self) -> tuple[int, int]:
        """Axes of the rows and the columns."""
        rows, columns, *_ = self.drawing.section.order
        return rows, columns

    @property
    def cells(self) -> Sequence[Cell]:
        """Chunks that are drawn, row by row."""
        rows, columns = (self.drawing.cells[axis] for axis in self.axes)
        return list(product(rows, columns))

    @property
    def is_complete(self) -> bool:
        """Return whether the states of all are known."""
        return len(self.states) == len(self.cells)

    def name_of(self, cell: Cell) -> str:
        """Return the name of the chunk at *cell*, at the first of all other positions."""
        position = [part.start for part in self.drawing.cells]
        for axis, at in zip(self.axes, cell, strict=True):
            position[axis] = at
        return self.drawing.name(tuple(position))

    def edges(self, axis: int) -> Mapping[int, int]:
        """Return where each chunk begins along *axis*, from the first, and where the last ends."""
        cells = self.drawing.cells[axis]
        size = self.drawing.chunk_shape[axis]
        edges = {cell: (cell - cells.start) * size for cell in cells}
        end = min(cells.stop * size, self.drawing.shape[axis])
        return edges | {cells.stop: end - cells.start * size}


class ChunkGrids:
    """Looks at the chunks of the planes that pictures show, up to some 1,024 of each."""

    def __init__(self, resolver: Resolver, *, wait_s: float = 1.0) -> None:
        """Wait *wait_s* for the chunks that a drawing shows; others follow in the next one."""
        self._resolver = resolver
        self._planner = Planner(resolver)
        self._wait_s = wait_s
        self._looks = SingleFlight[PictureName](outlasts=True)
        self.aclose = self._looks.aclose
        self._under_way: set[PictureName] = set()
        # Each grid has 0.3 MB at most.
        self._known = cachetools.LRUCache[PictureName, tuple[ChunkGridView, float]](32)

    async def get(self, dataset: Dataset, path: str, ref: str | None, at: Indices) -> ChunkGridView:
        """Return the grid of the plane that `Previews.get` shows, as far as it is known in time.

        Raises: `BadParameterError` if there is none, `BusyError`, any other `ShardgateError`.
        """
        name = await self._planner.name(dataset, path, ref, at)
        grid, expires_at = self._known.get(name, (None, 0.0))
        if grid is None or time.monotonic() >= expires_at:
            others = self._under_way - {name}
            if sum(other.dataset == name.dataset for other in others) >= _MOST_AT_ONCE:
                raise BusyError(f"other grids of {dataset.name} are read at this time")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._looks.run(name, partial(self._look, dataset, name))
            grid, _ = self._known.get(name, (None, 0.0))
        if grid is None:
            raise BusyError("the chunks are not read yet")
        # It is drawn in a thread, while others become known.
        return replace(grid, states={**grid.states}, shards={**grid.shards})

    async def _look(self, dataset: Dataset, name: PictureName) -> None:
        self._under_way.add(name)
        try:
            async with asyncio.timeout(60):
                path, drawing = await self._planner.plan(dataset, name)
                grid = ChunkGridView(drawing, path)
                self._known.setdefault(name, (grid, 0.0))  # an older one shows more
                await self._read(dataset, grid)
            self._known[name] = grid, time.monotonic() + 20
        except DecodeError as error:
            raise BadParameterError(f"path: {error}") from error
        finally:
            self._under_way.discard(name)

    async def _read(self, dataset: Dataset, grid: ChunkGridView) -> None:
        drawing = grid.drawing
        first = VirtualKey(join_path(drawing.directory, grid.name_of(grid.cells[0])))
        layout, rest, *_ = await self._resolver.find_container(dataset, first)
        container = first.removesuffix(rest)
        # There the chunks of the drawing are shards, also in a ref.
        is_stored = f"/{SHARDED}" in f"/{first}"
        numbers: dict[str, int] = {}
        tracker = self._resolver.new_tracker()
        for number, cell in enumerate(grid.cells):
            key = join_path(drawing.directory, grid.name_of(cell)).removeprefix(container)
            shard = None if is_stored else await layout.shard(VirtualKey(key), tracker)
            grid.shards[cell] = None if shard is None else numbers.setdefault(shard, len(numbers))
            await yield_to_loop(number)

        async def look(cell: Cell) -> None:
            try:
                found = await self._planner.locate_chunk(dataset, drawing, grid.name_of(cell))
                grid.states[cell] = MISSING if found is None else STORED
            except ShardgateError:
                grid.states[cell] = FAULTY

        await bounded_gather(look, grid.cells, limit=READS)


def draw_grid(grid: ChunkGridView) -> bytes:
    """Return the drawing of *grid* in SVG."""
    down, across = (grid.edges(axis) for axis in grid.axes)
    extents = (max(down.values()), max(across.values()))
    # The longer side has 320 pixels, the other one at least 24.
    height, width = (max(each * 320 / max(extents), 24) for each in extents)
    y_scale = height / extents[0]
    x_scale = width / extents[1]
    paths: dict[str, list[str]] = {state: [] for state in (STORED, MISSING, FAULTY, UNREAD)}
    borders = []
    for cell in grid.cells:
        row, column = cell
        top, bottom = (down[at] * y_scale for at in (row, row + 1))
        left, right = (across[at] * x_scale for at in (column, column + 1))
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
        paths={state: "".join(paths[state]) for state in counts},
        borders="".join(borders),
        counts=counts,
        lines=_describe(grid, counts),
    )
    return text.encode()


def _describe(grid: ChunkGridView, counts: Mapping[str, int]) -> Sequence[str]:
    """Return the lines below a drawing."""
    drawing = grid.drawing
    shards = {shard for shard in grid.shards.values() if shard is not None}
    holding = {grid.shards[cell] for cell, state in grid.states.items() if state == STORED}
    kind = "inner chunks" if shards else "chunks"
    line = f"{counts.get(STORED, 0):,} of {len(grid.states):,} {kind} stored"
    if shards:
        line += f", in {len(holding):,} of {len(shards):,} shards"
    lines = [line]
    rows, columns = (-(-drawing.shape[axis] // drawing.chunk_shape[axis]) for axis in grid.axes)
    if len(grid.cells) < rows * columns:
        lines.append(f"the middle of {rows:,} × {columns:,} {kind}")
    if drawing.directory != grid.path:
        lines.append(f"array {visible(drawing.directory.removeprefix(grid.path).strip('/'), 40)}")
    return lines
