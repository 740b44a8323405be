"""From the name of a chunk to the place of its bytes; listings of the names."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from operator import itemgetter
from typing import Final

import numpy as np

from shardgate.errors import BadKeyError, ConflictError, DamagedError, ReadOnlyError
from shardgate.formats.contract import Layout, Slot, StoredContainer, Target, Translator
from shardgate.formats.documents import Json, may_contain, show
from shardgate.formats.listing import (
    PLAIN,
    Cell,
    Grid,
    GridAxis,
    GridWalk,
    Item,
    ListingIO,
    ListingRules,
    Rows,
    Walk,
    Wanted,
)
from shardgate.formats.neuroglancer_precomputed.keys import (
    ID_NAMES,
    LIKE_A_CHUNK,
    IdNames,
    VoxelBounds,
)
from shardgate.formats.neuroglancer_precomputed.metadata import (
    Info,
    InfoTranslator,
    Kind,
    ShardedPart,
    describe,
    parse_info,
)
from shardgate.formats.neuroglancer_precomputed.rewrite import ChunkRewriter
from shardgate.formats.neuroglancer_precomputed.survey import PrecomputedShard, PrecomputedShards
from shardgate.formats.reading import DecodeError, Fetch, Opaque, Read, RunInThread, Versioned
from shardgate.formats.surveying import ChunkCollection, Listing, Survey
from shardgate.model import (
    MISSING,
    SHARDED,
    ByteRange,
    Coded,
    Location,
    ObjectRef,
    Stored,
    VirtualKey,
    Whole,
)

MARKER: Final = VirtualKey("info")
_SHARDED: Final = re.compile(rb'"sharding"\s*:')
_PAGE: Final = 1001  # one more than any page has


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Every directory with an ``info`` of a precomputed volume, mesh … is a container."""

    whole_index_nbytes: int
    decoded_nbytes: int
    """A larger minishard index or manifest is refused, before and after it is inflated."""

    def parse(self, document: Json, data: bytes) -> Info | None:
        return parse_info(document, data)

    def may_rewrite(self, data: bytes) -> bool:
        return may_contain(data, _SHARDED)

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
        """Locate a chunk by its name in the unsharded container; serve other objects whole.
        Raises: `DamagedError` for a chunk of a malformed member.
        """
        if key == MARKER:
            return show(self.directory.join(MARKER), self.info)
        if (found := await self._find(key, fetch)) is not None:
            return await self._locate_chunk(*found, fetch)
        path, _, name = key.rpartition("/")
        if any(part.names.owns(name) for part in self.info.value.parts_at.get(path, ())):
            return MISSING
        self._check_part(path, name)
        return Whole(self.directory.join(key))

    async def _find(self, key: VirtualKey, fetch: Fetch) -> tuple[ShardedPart, int] | None:
        """Return the part and the chunk id if *key* is the name of a possible chunk, or its id
        alone and no object is served under that name.
        """
        path, _, name = key.rpartition("/")
        for each in self.info.value.parts_at.get(path, ()):
            if (chunk_id := each.names.parse(name)) is not None:
                return each, chunk_id
        if (chunk_id := ID_NAMES.parse(name)) is None:
            return None
        parts = self._parts_at(path)
        part = next((each for each in parts if each.may_have(chunk_id)), None)
        if part is None:
            return None
        # Numbers are like the names of cells, and such a name is never that of an object.
        if any(each.names.owns(name) for each in self.info.value.parts_at.get(path, ())):
            return part, chunk_id
        try:
            found = await fetch(Read("object", self.directory.join(key), ByteRange(0, 1), Opaque))
        except DamagedError:  # it exists, and is empty
            return None
        return (part, chunk_id) if found is None else None

    def _parts_at(self, path: str) -> Sequence[ShardedPart]:
        """Return the parts at *path*, that of values last."""
        info = self.info.value
        values = [info.values] if info.values is not None and not path else []
        return [*info.parts_at.get(path, ()), *values]

    def _check_part(self, path: str, name: str) -> None:
        """Raise `DamagedError` where *name* may be that of a chunk of a malformed member."""
        fault = self.info.value.faults_at.get(path)
        if fault is not None and LIKE_A_CHUNK.fullmatch(name):
            raise DamagedError(self.directory.join(MARKER), fault)

    async def _locate_chunk(self, part: ShardedPart, chunk_id: int, fetch: Fetch) -> Location:
        number, within = part.sharding.address(chunk_id)
        shard = PrecomputedShard(self.directory, part, number, self.options.decoded_nbytes)
        minishard = await shard.open_minishard(within, self.options.whole_index_nbytes, fetch)
        if minishard is None or (chunk := minishard.locate(chunk_id)) is None:
            return MISSING
        if part.kind is Kind.FRAGMENTS:
            return await shard.locate_fragments(minishard, chunk, fetch)
        return _coded(part, chunk)

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        """Find where *key* is written; shards themselves cannot be, as chunks would be lost."""
        if (found := await self._find(key, fetch)) is not None:
            return self._slot(*found)
        path, _, name = key.rpartition("/")
        for part in self.info.value.parts_at.get(path, ()):
            if part.names.owns(name):
                raise BadKeyError(f"{key} is the name of no chunk: {part.names.rule}")
        if any(self._shards(part).hides(name) for part in self._parts_at(path)):
            raise ConflictError(
                f"{key} is a shard: its chunks are written by their own keys, and the whole object"
                f' below {SHARDED}, or through a dataset with view = "raw"'
            )
        self._check_part(path, name)
        return Whole(self.directory.join(key))

    def _slot(self, part: ShardedPart, chunk_id: int) -> Slot:
        sharding = part.sharding
        most_nbytes = self.options.decoded_nbytes
        if part.kind in {Kind.MANIFESTS, Kind.FRAGMENTS}:
            raise ReadOnlyError("sharded multi-resolution meshes can only be read")
        if len(self.info.value.parts_at.get(part.path, ())) > 1:
            raise ReadOnlyError(
                f"{part.path or '.'}: several scales share one shard directory; not writable"
            )
        if sharding.index_nbytes > most_nbytes:
            raise ReadOnlyError(
                f"a shard index of {sharding.index_nbytes} bytes, over {most_nbytes}"
            )
        number, _ = sharding.address(chunk_id)
        return Slot(ChunkRewriter(self._shards(part).numbered(number)), (chunk_id,))

    def encloses(self, key: VirtualKey) -> bool:
        paths = self.info.value.paths
        return any(key[:at] in paths for at, letter in enumerate(key) if letter == "/")

    async def listing_rules(self, directory: VirtualKey, _: Fetch) -> ListingRules:
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

        return ListingRules(shows, tuple(self._walks(parts)))

    def _walks(self, parts: Sequence[ShardedPart]) -> Iterator[Walk]:
        for part in parts:
            if isinstance(part.names, VoxelBounds):
                walk = VolumeWalk(part.names, self._shards(part))
                yield GridWalk(walk, walk.grid(), walk.stored, part.sharding.index_nbytes)
            elif part.kind is not Kind.FRAGMENTS:
                yield IdWalk(part, parts, self._shards(part))

    async def collections(
        self, _: Fetch, __: Listing, ___: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        found: list[ChunkCollection | DamagedError] = []
        for each in describe(self.info.value):
            if isinstance(each, DecodeError):
                found.append(DamagedError(self.directory.join(MARKER), str(each)))
            else:
                shards = None if each.part is None else self._shards(each.part)
                found.append(ChunkCollection(each.description, shards))
        return found

    async def shards_at(self, key: VirtualKey, __: Fetch) -> PrecomputedShards | None:
        """Return the shards below the path of *key*, preferably those for such names."""
        path, _, name = key.rpartition("/")
        parts = self._parts_at(path)
        named = [part for part in parts if part.names.parse(name) is not None]
        return next(map(self._shards, [*named, *parts]), None)

    def as_stored(self) -> Layout:
        return StoredContainer(self.directory, self)

    async def explain_absence(self, key: VirtualKey, _: Fetch) -> str:
        """Return the rule for the names of chunks that *key* does not follow."""
        path, _slash, name = key.rpartition("/")
        parts = self.info.value.parts_at.get(path, ())
        if any(part.names.parse(name) is not None for part in parts):
            return ""
        return next((part.names.rule for part in parts if part.names.owns(name)), "")

    def names_below(self) -> Sequence[str]:
        return self.info.value.below

    def _shards(self, part: ShardedPart) -> PrecomputedShards:
        return PrecomputedShards(self.directory, part, self.options.decoded_nbytes)


def _coded(part: ShardedPart, place: Stored) -> Stored | Coded:
    return Coded(place, "gzip") if part.sharding.data_encoding == "gzip" else place


@dataclass(frozen=True, slots=True)
class VolumeWalk:
    """Walks the stored chunks of a volume; without a hash a shard holds a box of the grid."""

    names: VoxelBounds
    shards: PrecomputedShards

    def grid(self, size: Cell = (1, 1, 1)) -> Grid:
        """Return the grid of chunks, with shards of *size*."""
        names = self.names
        lead = self.shards.prefix
        axes = tuple(map(GridAxis, names.grid.shape, size, names.voxel_offset, names.chunk_size))
        return Grid(axes, lambda cell: lead + names.beginning(cell))

    async def stored(self, io: ListingIO) -> AsyncIterator[AsyncIterator[Rows]]:
        """Find the stored shards; see `GridWalk`."""
        for number in await self.shards.stored(io.list_objects):
            yield self._cells(self.shards.numbered(number), io)

    async def _cells(self, shard: PrecomputedShard, io: ListingIO) -> AsyncIterator[Rows]:
        if (survey := await shard.survey(io.fetch)) is not None:
            table = await io.run_in_thread(survey.table)
            yield self.names.grid.cells(table.sound(survey.whole.ref)[0])

    async def __call__(self, wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str]:
        names = self.names
        lead = self.shards.prefix
        sharding = self.shards.part.sharding
        if not wanted().meets(lead) or not (stored := await self.shards.stored(io.list_names)):
            return
        size: Cell = tuple(max(1, count) for count in names.grid.shape)
        first_cells = {(0,) * len(size)}
        low_bits = sharding.preshift_bits + sharding.minishard_bits
        # With fewer bits several boxes share a shard.
        is_enough = low_bits + sharding.shard_bits >= names.grid.bit_count
        if is_enough and sharding.hash == "identity":
            size = names.grid.box(low_bits)
            first_cells = {names.grid.decode(number << low_bits) for number in stored}
        boxes = np.array(sorted(first_cells), np.uint64) // np.array(size, np.uint64)

        async def read(_: Cell) -> Rows:
            return np.unique(boxes, axis=0)

        grid = self.grid(size)
        async for cell in grid.walk(wanted, read):
            number, _ = sharding.address(names.grid.encode(cell))
            key = grid.spell(cell)
            yield key if number in stored else Item(key, MISSING)


@dataclass(frozen=True, slots=True)
class IdWalk:
    """Walks the chunks of *part* by their ids, and the fragments of manifests. As shards do not
    have them in order of their texts, all indexes are read for each page of keys.
    """

    part: ShardedPart
    parts: Sequence[ShardedPart]
    """All parts in the same directory: a name belongs to the first that parses it."""
    shards: PrecomputedShards

    async def __call__(self, wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str]:
        lead = self.shards.prefix
        rest = wanted().rest(lead)
        if not wanted().meets(lead) or rest[:1] > "9":  # no name begins so
            return
        numbers = sorted(await self.shards.stored(io.list_names))
        shards = [self.shards.numbered(number) for number in numbers]
        low = rest[: len(rest) - len(rest.lstrip("0123456789_"))]
        is_last = False
        while not is_last:
            page = await self._page(shards, low.encode(), io)
            is_last = len(page) < _PAGE
            for name, place in page:
                low = name.decode()
                if wanted().is_past(lead + low) or not wanted().meets(lead):
                    return
                for item in self._items(lead, low, place):
                    yield item
            low += "!"  # sorts before all characters of names

    def _items(self, lead: str, text: str, place: Stored) -> Iterator[Item | str]:
        part = self.part
        if part.kind is Kind.MANIFESTS and self._owner(text) is Kind.FRAGMENTS:
            yield lead + text
        name = text + part.names.suffix if isinstance(part.names, IdNames) else text
        if self._owner(name) is part.kind:
            yield Item(lead + name, _coded(part, place))

    def _owner(self, name: str) -> Kind | None:
        for part in self.parts:
            if part.names.parse(name) is not None:
                return part.kind if part.member is self.part.member else None
        return None

    async def _page(
        self, shards: Sequence[PrecomputedShard], low: bytes, io: ListingIO
    ) -> list[tuple[bytes, Stored]]:
        """Read all indexes, and keep the first chunks from *low* on by their names."""
        page: list[tuple[bytes, Stored]] = []
        for some in batched(shards, 8):  # so many shards' indexes are held encoded
            for survey in await io.bounded_gather(lambda shard: shard.survey(io.fetch), some):
                if survey is not None:
                    page += await io.run_in_thread(self._first, survey, low)
                    page = sorted(page, key=itemgetter(0))[:_PAGE]
        return page

    def _first(self, survey: Survey, low: bytes) -> list[tuple[bytes, Stored]]:
        ids, (starts, stops) = survey.table().sound(survey.whole.ref)
        if isinstance(self.part.names, IdNames):
            names = ids.astype("S20")  # the digits of 2^64
        else:
            names = np.array([self.part.names.format(each).encode() for each in ids.tolist()], "S")
        at = np.flatnonzero(names >= low)
        at = at[np.argsort(names[at], kind="stable")][:_PAGE]
        columns = (column[at].tolist() for column in (names, starts, stops))
        return [
            (name, survey.whole._replace(byte_range=ByteRange(start, stop)))
            for name, start, stop in zip(*columns, strict=True)
        ]
