"""From the name of a chunk to the place of its bytes; listings of the names."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import BadKeyError, ConflictError, DamagedError, ReadOnlyError
from app.formats.contract import Layout, Slot, Target, Translator
from app.formats.documents import Json, show
from app.formats.listing import (
    PLAIN,
    Axis,
    Cell,
    Grid,
    Item,
    ListingIO,
    ListingRules,
    Rows,
    Walk,
    Wanted,
)
from app.formats.neuroglancer_precomputed.keys import IdNames, VoxelBounds
from app.formats.neuroglancer_precomputed.lookup import MinishardReader
from app.formats.neuroglancer_precomputed.metadata import (
    Info,
    InfoTranslator,
    Kind,
    ShardedPart,
    describe,
    parse_info,
    voxel_nbytes,
)
from app.formats.neuroglancer_precomputed.rewrite import ChunkRewriter
from app.formats.neuroglancer_precomputed.survey import (
    PrecomputedShard,
    PrecomputedShards,
)
from app.formats.reading import DecodeError, Fetch, Versioned
from app.formats.surveying import Collection, Listing, Ranges, Survey
from app.model import MISSING, ByteRange, Gzipped, Location, ObjectRef, Stored, VirtualKey, Whole

MARKER: Final = VirtualKey("info")
_PAGE: Final = 1001
"""One more than any page has."""
_CONCURRENT_SHARDS: Final = 8
"""So many shards' indexes are held encoded."""
_ID: Final = re.compile(rb"[0-9]*")
_AFTER_DIGITS: Final = b":"

type Texts = NDArray[np.bytes_]


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Every directory with an ``info`` of a precomputed volume, mesh … is a container."""

    whole_index_nbytes: int
    decoded_nbytes: int
    """A larger minishard index or manifest is refused, before and after it is inflated."""

    def parse(self, document: Json, data: bytes) -> Info | None:
        return parse_info(document, data)

    def layout(self, directory: ObjectRef, spec: Versioned[Info]) -> "PrecomputedLayout":
        return PrecomputedLayout(directory, spec, self)

    def translator(self, _: ObjectRef) -> Translator:
        return InfoTranslator()


@dataclass(frozen=True, slots=True)
class PrecomputedLayout(Layout):
    """A volume, or a directory of meshes, skeletons, annotations or properties."""

    directory: ObjectRef
    info: Versioned[Info]
    options: Precomputed

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate a chunk by its name in the unsharded container; serve other objects whole."""
        if key == MARKER:
            return show(self.info)
        path, _, name = key.rpartition("/")
        parts = self.info.value.parts_at.get(path, ())
        for part in parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return await self._locate_chunk(part, chunk_id, fetch)
        if any(part.names.owns(name) for part in parts):
            return MISSING
        return Whole(self.directory.join(key))

    async def _locate_chunk(self, part: ShardedPart, chunk_id: int, fetch: Fetch) -> Location:
        reader = MinishardReader(
            self.directory.join(part.path),
            part.sharding,
            fetch,
            self.options.whole_index_nbytes,
            self.options.decoded_nbytes,
        )
        if (minishard := await reader.open(chunk_id)) is None:
            return MISSING
        if (chunk := minishard.locate(chunk_id)) is None:
            return MISSING
        if part.kind is Kind.FRAGMENTS:
            return await reader.locate_fragments(minishard, chunk)
        return Gzipped(chunk) if part.sharding.is_data_gzip else chunk

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        """Find where *key* is written; shards themselves cannot be, as chunks would be lost."""
        path, _slash, name = key.rpartition("/")
        parts = self.info.value.parts_at.get(path, ())
        for part in parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return self._slot(part, chunk_id)
        for part in parts:
            if part.names.owns(name):
                raise BadKeyError(f"{key} is the name of no chunk: {part.names.rule}")
            if self._shards(part).hides(name):
                raise ConflictError(
                    f"{key} is a shard: its chunks are written by their own keys, and the whole "
                    'object through a dataset with view = "raw"'
                )
        return Whole(self.directory.join(key))

    def _slot(self, part: ShardedPart, chunk_id: int) -> Slot:
        info, sharding, most_nbytes = self.info.value, part.sharding, self.options.decoded_nbytes
        here = info.parts_at[part.path]
        if part.kind in {Kind.MANIFESTS, Kind.FRAGMENTS}:
            raise ReadOnlyError("sharded multi-resolution meshes can only be read")
        if len(here) > 1:
            raise ReadOnlyError(f"the shards in {part.path or '.'} are those of several things")
        if sharding.index_nbytes > most_nbytes:
            raise ReadOnlyError(
                f"a shard index of {sharding.index_nbytes} bytes, over {most_nbytes}"
            )
        number, _ = sharding.address(chunk_id)
        shard = PrecomputedShard(self.directory, here[0], number, most_nbytes)
        is_volume = part.kind is Kind.VOLUME
        nbytes = voxel_nbytes(info.document, part.member) if is_volume else None
        return Slot(ChunkRewriter(shard, nbytes), (chunk_id,))

    def encloses(self, key: VirtualKey) -> bool:
        paths = self.info.value.paths
        return any(key[:at] in paths for at, letter in enumerate(key) if letter == "/")

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        """Hide shards, whose chunks are listed, and objects that are named like chunks."""
        parts_at = self.info.value.parts_at
        parts = parts_at.get(directory.removesuffix("/"), ())
        if not parts:
            is_deepest = not any(path.startswith(directory) for path in parts_at)
            return PLAIN if is_deepest and self.encloses(directory) else ListingRules()
        shards = list(map(self._shards, parts))

        def shows(name: str) -> bool:
            is_owned = any(part.names.owns(name) for part in parts)
            return not is_owned and not any(each.hides(name) for each in shards)

        return ListingRules(shows, tuple(self._walks(parts, fetch)))

    def _walks(self, parts: Sequence[ShardedPart], fetch: Fetch) -> Iterator[Walk]:
        for part in parts:
            if isinstance(part.names, VoxelBounds):
                yield VolumeWalk(part.names, self._shards(part))
            elif part.kind is not Kind.FRAGMENTS:
                yield IdWalk(part, parts, self._shards(part), fetch)

    async def collections(self, _: Fetch, __: Listing) -> Sequence[Collection | DamagedError]:
        return [
            DamagedError(self.directory.join(MARKER), str(each))
            if isinstance(each, DecodeError)
            else Collection(each.description, self._shards(each.part) if each.part else None)
            for each in describe(self.info.value)
        ]

    async def shards_at(self, key: VirtualKey, __: Fetch) -> PrecomputedShards | None:
        """Return the shards below the path of *key*, preferably those for such names."""
        path, _, name = key.rpartition("/")
        parts = self.info.value.parts_at.get(path, ())
        named = [part for part in parts if part.names.parse(name) is not None]
        return next(map(self._shards, [*named, *parts]), None)

    def names_below(self) -> Sequence[str]:
        return self.info.value.below

    def _shards(self, part: ShardedPart) -> PrecomputedShards:
        return PrecomputedShards(self.directory, part, self.options.decoded_nbytes)


@dataclass(frozen=True, slots=True)
class VolumeWalk:
    """Walks the stored chunks of a volume; without a hash a shard holds a box of the grid."""

    names: VoxelBounds
    shards: PrecomputedShards

    async def __call__(self, wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str]:
        names, lead = self.names, self.shards.prefix
        if not wanted().meets(lead):
            return
        stored = await self.shards.stored(io.list_names)

        async def boxes(_: Cell) -> Rows:
            return self._boxes(stored)

        axes = tuple(map(Axis, names.grid.shape, self._box, names.voxel_offset, names.chunk_size))
        grid = Grid(axes, lambda cell: lead + names.beginning(cell))
        async for cell in grid.walk(wanted, boxes):
            number, _ = self.shards.part.sharding.address(names.grid.encode(cell))
            key = grid.spell(cell)
            yield key if number in stored else Item(key, MISSING)

    @property
    def _low_bits(self) -> int | None:
        """Number of low bits of an id that do not select its shard, if there are such."""
        sharding = self.shards.part.sharding
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


class _IdPage(NamedTuple):
    texts: Texts
    places: Ranges
    """In the objects."""
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

    async def __call__(self, wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str]:
        lead = self.shards.prefix
        rest = wanted().rest(lead).encode()
        if not wanted().meets(lead) or rest[:1] >= _AFTER_DIGITS:
            return
        numbers = sorted(await self.shards.stored(io.list_names))
        shards = [self.shards.numbered(number) for number in numbers]
        low, is_after = self._low(rest), False
        while True:
            page, wholes = await self._first(shards, low, io, is_after=is_after)
            columns = (page.texts, *page.places, page.owners)
            for text, start, stop, owner in zip(*(each.tolist() for each in columns), strict=True):
                place = wholes[owner]._replace(byte_range=ByteRange(start, stop))
                for item in self._items(lead, text.decode(), place):
                    yield item
                if not wanted().meets(lead):
                    return
            if len(page.texts) < _PAGE:
                return
            low, is_after = bytes(page.texts[-1]), True

    def _items(self, lead: str, text: str, place: Stored) -> Iterator[Item | str]:
        part = self.part
        if part.kind is Kind.MANIFESTS and self._owner(text) is Kind.FRAGMENTS:
            yield lead + text
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
        page = _IdPage(np.empty(0, "S1"), Ranges.of(), np.empty(0, np.int64))
        wholes: list[Stored] = []

        async def read(shard: PrecomputedShard) -> Survey | None:
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
        survey: Survey,
        owner: int,
        low: bytes,
        is_after: bool,  # noqa: FBT001  called in a thread
    ) -> _IdPage:
        ids, (starts, stops) = survey.table().sound(survey.whole.ref)
        if isinstance(self.part.names, IdNames):
            texts: Texts = ids.astype("S20")
        else:
            spelled = [self.part.names.format(each).encode() for each in ids.tolist()]
            texts = np.array(spelled, "S") if spelled else np.empty(0, "S1")
        wanted = texts > low if is_after else texts >= low
        texts = np.concatenate([page.texts, texts[wanted]])
        owners = np.concatenate([page.owners, np.full(wanted.sum(), owner, np.int64)])
        order = np.argsort(texts, kind="stable")[:_PAGE]
        starts = np.concatenate([page.places.starts, starts[wanted]])
        stops = np.concatenate([page.places.stops, stops[wanted]])
        return _IdPage(texts[order], Ranges(starts[order], stops[order]), owners[order])
