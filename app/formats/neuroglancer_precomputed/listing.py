"""Keys of the chunks of sharded volumes, and of sharded meshes, skeletons and annotations."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from app.formats.listing import Axis, Candidate, Cell, GridKeys, Item, KeySelection, ListingIO, Rows
from app.formats.neuroglancer_precomputed.keys import IdNames, VoxelBounds
from app.formats.neuroglancer_precomputed.metadata import Kind, ShardedPart
from app.formats.neuroglancer_precomputed.survey import (
    PrecomputedShard,
    PrecomputedShards,
    PrecomputedSurvey,
)
from app.formats.reading import Fetch
from app.model import MISSING, ByteRange, Gzipped, Stored

_PAGE: Final = 1001
"""One more than any page has."""
_CONCURRENT_SHARDS: Final = 8
"""So many shards' indexes are held encoded."""
_ID: Final = re.compile(rb"[0-9]*")
_AFTER_DIGITS: Final = b":"

type Texts = NDArray[np.bytes_]


@dataclass(frozen=True, slots=True)
class VolumeWalk:
    """Walks the stored chunks of a volume; without a hash a shard holds a box of the grid."""

    names: VoxelBounds
    shards: PrecomputedShards

    async def __call__(
        self, selection: KeySelection, io: ListingIO
    ) -> AsyncIterator[Item | Candidate]:
        """Yield the selected keys; see `Walk`."""
        if not selection.meets(self.shards.prefix):
            return
        stored = await self.shards.stored(io.list_names)

        async def boxes(_: Cell) -> Rows:
            return self._boxes(stored)

        names, lead = self.names, self.shards.prefix
        axes = tuple(map(Axis, names.grid.shape, self._box, names.voxel_offset, names.chunk_size))
        grid = GridKeys(axes, lambda cell: lead + names.beginning(cell), boxes, self._address)
        async for candidate in grid.walk(selection):
            number, _ = cast("tuple[int, int]", candidate.where)
            yield candidate if number in stored else Item(candidate.key, MISSING)

    @property
    def _low_bits(self) -> int | None:
        """Number of low bits of an id that do not select its shard, if there are such."""
        sharding = self.shards.parts[0].sharding
        below = sharding.preshift_bits + sharding.minishard_bits
        is_enough = below + sharding.shard_bits >= self.names.grid.bit_count
        return below if is_enough and not sharding.is_hashed else None

    @property
    def _box(self) -> Cell:
        bits, grid = self._low_bits, self.names.grid
        return tuple(max(1, count) for count in grid.shape) if bits is None else grid.box(bits)

    def _boxes(self, stored: frozenset[int]) -> Rows:
        bits, grid, box = self._low_bits, self.names.grid, self._box
        cells = {grid.decode(number << bits) if bits is not None else (0,) * 3 for number in stored}
        rows = np.array(sorted(cells), np.uint64).reshape(-1, len(box))
        return np.unique(rows // np.array(box, np.uint64), axis=0)

    def _address(self, cell: Cell) -> tuple[int, int]:
        return self.shards.parts[0].sharding.address(self.names.grid.encode(cell))


class _IdPage(NamedTuple):
    texts: Texts
    places: NDArray[np.uint64]
    """Start and stop in the object, shape ``(count, 2)``."""
    owners: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IdWalk:
    """Walks the chunks of *part* by their ids, and the fragments of manifests. As shards do not
    have them in order of their texts, all indexes are read for each page of keys.
    """

    part: ShardedPart
    parts: Sequence[ShardedPart]
    """All parts in the same directory: a name belongs to the first that parses it."""
    shards: PrecomputedShards
    fetch: Fetch

    async def __call__(
        self, selection: KeySelection, io: ListingIO
    ) -> AsyncIterator[Item | Candidate]:
        """Yield the selected keys; see `Walk`."""
        lead = self.shards.prefix
        rest = selection.rest(lead).encode()
        if not selection.meets(lead) or rest[:1] >= _AFTER_DIGITS:
            return
        numbers = sorted(await self.shards.stored(io.list_names))
        shards = [self.shards.numbered(number) for number in numbers]
        low, is_after = self._low(rest), False
        while True:
            page, wholes = await self._first(shards, low, io, is_after=is_after)
            for text, (start, stop), owner in zip(*map(np.ndarray.tolist, page), strict=True):
                place = wholes[owner]._replace(byte_range=ByteRange(start, stop))
                for item in self._items(lead, text.decode(), place):
                    yield item
                if not selection.meets(lead):
                    return
            if len(page.texts) < _PAGE:
                return
            low, is_after = bytes(page.texts[-1]), True

    def _items(self, lead: str, text: str, place: Stored) -> Iterator[Item | Candidate]:
        part = self.part
        if part.kind is Kind.MANIFESTS and self._owner(text) is Kind.FRAGMENTS:
            yield Candidate(lead + text, text)
        name = text + part.names.suffix if isinstance(part.names, IdNames) else text
        if self._owner(name) is part.kind:
            yield Item(lead + name, Gzipped(place) if part.sharding.is_data_gzip else place)

    def _owner(self, name: str) -> Kind | None:
        for part in self.parts:
            if part.names.parse(name) is not None:
                return part.kind if part.member is self.part.member else None
        return None

    def _low(self, rest: bytes) -> bytes:
        """Return the least text of an id whose keys may be *rest* or sort after it."""
        if not isinstance(self.part.names, IdNames):
            return rest
        found = _ID.match(rest)
        digits = found[0] if found else b""
        return digits + _AFTER_DIGITS if rest[len(digits) :][:1] >= _AFTER_DIGITS else digits

    async def _first(
        self, shards: Sequence[PrecomputedShard], low: bytes, io: ListingIO, *, is_after: bool
    ) -> tuple[_IdPage, list[Stored]]:
        """Read all indexes, and keep the first chunks from *low* on, or after it."""
        page = _IdPage(np.empty(0, "S1"), np.empty((0, 2), np.uint64), np.empty(0, np.int64))
        wholes: list[Stored] = []

        async def read(shard: PrecomputedShard) -> PrecomputedSurvey | None:
            return await shard.survey(self.fetch)

        for some in batched(shards, _CONCURRENT_SHARDS):
            for survey in await io.bounded_gather(read, some):
                if survey is not None:
                    owner = len(wholes)
                    page = await io.run_in_thread(self._add, page, survey, owner, low, is_after)
                    wholes.append(survey.whole)
        return page, wholes

    def _add(
        self,
        page: _IdPage,
        survey: PrecomputedSurvey,
        owner: int,
        low: bytes,
        is_after: bool,  # noqa: FBT001  called in a thread
    ) -> _IdPage:
        ids, places = survey.columns()
        if isinstance(self.part.names, IdNames):
            texts: Texts = ids.astype("S20")
        else:
            spelled = [self.part.names.format(each).encode() for each in ids.tolist()]
            texts = np.array(spelled, "S") if spelled else np.empty(0, "S1")
        wanted = texts > low if is_after else texts >= low
        texts = np.concatenate([page.texts, texts[wanted]])
        owners = np.concatenate([page.owners, np.full(wanted.sum(), owner, np.int64)])
        order = np.argsort(texts, kind="stable")[:_PAGE]
        places = np.concatenate([page.places, places[wanted]])
        return _IdPage(texts[order], places[order], owners[order])
