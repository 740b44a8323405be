"""The references of one ref, and the shards and chunks behind them, for `inspect` and `verify`."""

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from operator import mul

from app.errors import DamagedError, NotAllowedError, StorageError, UnknownRefError
from app.formats.icechunk.coords import inside
from app.formats.icechunk.keys import parse_ref
from app.formats.icechunk.manifest import Inlined, Manifest, Native, Reference, Virtual
from app.formats.icechunk.repository import Repository, foreign_place, named_by
from app.formats.icechunk.snapshot import Chunks, Snapshot, SnapshotNode
from app.formats.icechunk.virtual import resolve
from app.formats.reading import DecodeError, Fetch, Opaque, Read
from app.formats.surveying import (
    ARRAYS,
    Counted,
    Enclosed,
    Entry,
    EntryTable,
    Finding,
    Flaw,
    NeededObject,
    Ranges,
    Shard,
    Survey,
    Unchecked,
)
from app.formats.zarr.codecs import has_intact_checksum
from app.formats.zarr.survey import ZarrShard, describe
from app.model import ByteRange, Condition, Fixed, ObjectRef, Part, Stored, VirtualKey

type Follow = Callable[[str], ObjectRef]
"""Returns the object of a virtual reference; raises `DecodeError`, `NotAllowedError`."""
type _Version = tuple[ObjectRef, Condition | Fixed | None]


@dataclass(frozen=True, slots=True)
class _SurveyedArray:
    key: str
    node: SnapshotNode
    chunks: Chunks
    reads_chunks: bool
    """`True` if chunks, or shards, hold a checksum or an index to verify."""

    def chunk_key(self, coords: tuple[int, ...]) -> str:
        array = self.node.document.array
        if array is None:
            return f"{self.key}/{self.chunks.keys.format(coords)}"
        shape = zip(coords, array.shard_shape, array.inner_chunk_shape, strict=True)
        inner = tuple(at * shard // inner for at, shard, inner in shape)
        return f"{self.key}/{array.keys.format(inner)}"


async def survey_ref(
    repository: Repository, ref: str, fetch: Fetch, *, chunks: bool
) -> AsyncGenerator[Finding]:
    """Follow every reference of a snapshot; with *chunks* yield unsharded ones with checksum too.

    Raises: `UnknownRefError`, `DamagedError` for the snapshot.
    """
    snapshot, spelled = await _snapshot(repository, ref, fetch)
    file = repository.file("snapshots", snapshot.object_id)
    for path, reason in snapshot.faults:
        yield Flaw(file, f"{spelled}{path}", reason)
    arrays: dict[bytes, list[_SurveyedArray]] = {each: [] for each in sorted(snapshot.manifests)}
    for path, node in snapshot.nodes.items():
        key = f"{spelled}/{path}".rstrip("/")
        try:
            array = _survey_array(key, node, chunks=chunks)
        except DecodeError as error:
            yield Flaw(file, key, str(error))
            continue
        if array is not None:
            yield Counted(ARRAYS, 1)
            for object_id, _ in array.chunks.manifests:
                arrays.setdefault(object_id, []).append(array)
    follow = await _follower(repository, fetch)
    for object_id, some in arrays.items():
        try:
            manifest = await repository.manifest(object_id, fetch)
        except (DamagedError, StorageError) as error:
            yield Flaw(error.ref, some[0].key if some else spelled, error.reason)
            continue
        yield Counted("manifests", 1)
        for array in some:
            for finding in _References(repository, manifest, array, follow).findings():
                yield finding


async def _follower(repository: Repository, fetch: Fetch) -> Follow:
    containers = await repository.refs.containers(fetch)
    prefixes = {each.name: each.url_prefix for each in containers if each.name is not None}
    return lambda location: resolve(location, repository.allowed, prefixes)


async def _snapshot(repository: Repository, ref: str, fetch: Fetch) -> tuple[Snapshot, str]:
    for parsed, spelled in parse_ref(ref):
        snapshot = await repository.snapshot(parsed, fetch)
        if snapshot is not None:
            return snapshot, spelled
    raise UnknownRefError(f"there is no ref {ref} in {repository.directory}")


def _survey_array(
    key: str, node: SnapshotNode | DecodeError, *, chunks: bool
) -> _SurveyedArray | None:
    if isinstance(node, DecodeError):
        raise node
    if node.chunks is None:
        return None
    is_checked = chunks and describe(node.document).codecs[-1:] == ("crc32c",)
    return _SurveyedArray(key, node, node.chunks, node.document.array is not None or is_checked)


@dataclass(frozen=True, slots=True)
class _References:
    """The references of one array in one manifest."""

    _repository: Repository
    _manifest: Manifest
    _array: _SurveyedArray
    _follow: Follow
    _needed: dict[_Version, NeededObject] = field(default_factory=dict)
    """Of each object the reference that ends last."""
    _refused: dict[str, int] = field(default_factory=dict)

    @property
    def _file(self) -> ObjectRef:
        return self._repository.file("manifests", self._manifest.object_id)

    def findings(self) -> Iterator[Finding]:
        node_id, grid = self._array.node.node_id, self._array.chunks.grid
        yield from self._misplaced(node_id, len(grid))
        coords = self._manifest.coords(node_id, len(grid))
        yield Counted("references", len(coords))
        within = inside(coords, grid)
        for each in coords[~within].tolist():
            yield Flaw(self._file, self._key(each), f"it is out of the chunk grid {list(grid)}")
        for each in coords[within].tolist():
            yield from self._follow_reference(tuple(each))
        yield from self._needed.values()
        for reason, count in self._refused.items():
            yield Unchecked(self._array.key, f"{count} of its chunks: {reason}")

    def _misplaced(self, node_id: bytes, ndim: int) -> Iterator[Flaw]:
        for found, other in self._manifest.arrays:
            # Old writers give the chunk of an array without dimensions one coordinate.
            if found == node_id and other not in {ndim, ndim or 1}:
                reason = f"references with {other} coordinates to an array of {ndim} dimensions"
                yield Flaw(self._file, self._array.key, reason)

    def _follow_reference(self, coords: tuple[int, ...]) -> Iterator[Finding]:
        try:
            reference = self._manifest.lookup(self._array.node.node_id, coords)
            if reference is None:
                return
            place, data = self._place(reference)
        except DecodeError as error:
            yield Flaw(self._file, self._key(coords), str(error))
            return
        except NotAllowedError as error:
            reason = str(error)
            self._refused[reason] = self._refused.get(reason, 0) + 1
            return
        if self._array.reads_chunks:
            yield Enclosed(self._array.key, enclose(self._array.node, coords, place), data)
        elif data is None:
            known = self._needed.get((place.ref, place.version))
            if known is None or known.place.byte_range.stop < place.byte_range.stop:
                expected = NeededObject(self._key(coords), place)
                self._needed[place.ref, place.version] = expected

    def _place(self, reference: Reference) -> tuple[Stored | Part, bytes | None]:
        match reference:
            case Native(chunk_id, byte_range):
                name = self._repository.file("chunks", chunk_id)
                return Stored(name, byte_range, named_by(chunk_id)), None
            case Inlined(place):
                data = self._manifest.read(place)
                return Part(self._file, ByteRange(0, len(data))), data
            case Virtual(location, byte_range, checksum):
                return foreign_place(self._follow(location), byte_range, checksum), None

    def _key(self, coords: tuple[int, ...]) -> str:
        return self._array.chunk_key(tuple(coords))


def enclose(node: SnapshotNode, coords: tuple[int, ...], place: Stored | Part) -> Shard:
    """Return the shard, or unsharded chunk, at the grid position *coords*, stored at *place*."""
    array = node.document.array
    if array is None:
        key = VirtualKey(node.chunks.keys.format(coords) if node.chunks else "")
        return PlainChunk(key, place)
    return ZarrShard(place.ref, array, tuple(map(mul, coords, array.shard_shape)), inside=place)


@dataclass(frozen=True, slots=True)
class OnlyShard:
    """The shard that a key was asked for in."""

    shard: Shard
    prefix: str = ""

    def named(self, _: str) -> Shard | None:
        return None

    def holding(self, _: VirtualKey) -> Shard | None:
        return self.shard

    def every(self) -> Iterator[Shard] | None:
        return iter((self.shard,))


@dataclass(frozen=True, slots=True)
class PlainChunk:
    """An unsharded chunk that ends in a checksum, seen as a shard of one chunk without index."""

    key: VirtualKey
    place: Stored | Part

    @property
    def ref(self) -> ObjectRef:
        return self.place.ref

    async def survey(self, fetch: Fetch) -> Survey:
        """Read the version of the object where the reference does not name it."""
        whole = self.place
        if not isinstance(whole, Stored):
            found = await fetch(Read("chunk", self.ref, ByteRange(0, 1), Opaque, whole.version))
            if found is None:
                raise DamagedError(self.ref, "does not exist, though it is referred to")
            whole = Stored(self.ref, whole.byte_range, found.etag)
        only = Ranges.of(ByteRange(0, whole.byte_range.length))
        return Survey(
            whole=whole,
            table=lambda: EntryTable(only.starts, only),
            key=lambda _: self.key,
            check=_check_chunk,
            indexes=Ranges.of(),
            index_location="end",
        )


def _check_chunk(_: Entry, data: bytes) -> str | None:
    return None if has_intact_checksum(data) else "the checksum of the chunk does not match"
