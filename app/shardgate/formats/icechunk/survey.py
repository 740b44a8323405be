"""The references of one ref, and the shards and chunks behind them, for `inspect` and `verify`."""

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from operator import floordiv, itemgetter
from typing import cast

from shardgate.errors import DamagedError, NotAllowedError, StorageError, UnknownRefError
from shardgate.formats.icechunk.coords import inside
from shardgate.formats.icechunk.keys import parse_ref
from shardgate.formats.icechunk.manifest import Manifest
from shardgate.formats.icechunk.repository_files import Repository
from shardgate.formats.icechunk.snapshot import Chunks, Snapshot, SnapshotNode
from shardgate.formats.reading import DecodeError, Fetch, Opaque, Read, Versioned, Weighable
from shardgate.formats.surveying import (
    ABSENT_SOURCE,
    Enclosed,
    EntryTable,
    Finding,
    NeededObject,
    Ranges,
    Report,
    Shard,
    Survey,
    Unreadable,
    uncheckable,
)
from shardgate.formats.zarr.array_spec import ArraySpec
from shardgate.formats.zarr.codecs import ChunkForm, chunk_form
from shardgate.formats.zarr.survey import ZarrShard, describe
from shardgate.model import ByteRange, Inline, ObjectRef, Part, Stored, VirtualKey


@dataclass(frozen=True, slots=True)
class _SurveyedArray:
    key: str
    node: SnapshotNode
    chunks: Chunks
    form: ChunkForm = ChunkForm()  # noqa: RUF009  immutable
    """Of chunks that are checked."""
    why_unchecked: str = ""
    """Reason why chunks that should be checked cannot be."""

    @property
    def reads_chunks(self) -> bool:
        """Return whether chunks, or shards, have a checksum, frame or index to verify."""
        return self.node.document.array is not None or self.form.reads_bytes

    def chunk_key(self, coords: tuple[int, ...]) -> str:
        array = self.node.document.array
        if array is None:
            return f"{self.key}/{self.chunks.keys.format(coords)}"
        first = map(floordiv, array.shard_origin(coords), array.inner_chunk_shape)
        return f"{self.key}/{array.keys.format(tuple(first))}"


async def survey_ref(
    repository: Repository, ref: str, fetch: Fetch, *, chunks: bool
) -> AsyncGenerator[Finding]:
    """Follow every reference of a snapshot; with *chunks* yield unsharded ones with a frame too.

    Raises: `UnknownRefError`, `DamagedError` for the snapshot.
    """
    snapshot, spelled = await _snapshot(repository, ref, fetch)
    file = repository.file("snapshots", snapshot.object_id)
    for path, reason in snapshot.faults:
        yield Report.of_damage(file, f"{spelled}{path}", reason)
    arrays: defaultdict[bytes, list[_SurveyedArray]] = defaultdict(list)
    for array in _survey_arrays(snapshot, spelled, file, chunks=chunks):
        if isinstance(array, Report):
            yield array
            continue
        why = array.why_unchecked
        yield Report(arrays=1, not_checked={array.key: why} if why else {})
        for object_id, _ in array.chunks.manifests:
            arrays[object_id].append(array)
    containers = await repository.containers(fetch)
    for object_id, some in sorted(arrays.items(), key=itemgetter(0)):
        try:
            manifest = await repository.manifest(object_id, fetch)
        except (DamagedError, StorageError) as error:
            kind = Unreadable if isinstance(error, StorageError) else Report
            yield kind.of_damage(error.ref, some[0].key, error.reason)
            continue
        yield Report(counts={"manifests": 1})
        for array in some:
            for finding in _follow_references(repository, manifest, array, containers):
                yield finding


async def _snapshot(repository: Repository, ref: str, fetch: Fetch) -> tuple[Snapshot, str]:
    for parsed, spelled in parse_ref(ref):
        dated = await repository.dated_snapshot(parsed, fetch)
        if dated is not None:
            return dated[0], spelled
    hint = await repository.suggest_ref(ref, fetch)
    raise UnknownRefError(f"there is no ref {ref} in {repository.directory}: {hint}")


def _survey_arrays(
    snapshot: Snapshot, spelled: str, file: ObjectRef, *, chunks: bool
) -> Iterator[_SurveyedArray | Report]:
    for path, node in snapshot.nodes.items():
        key = f"{spelled}/{path}".rstrip("/")
        try:
            if isinstance(node, DecodeError):
                raise node
            if node.chunks is not None:
                form, why = _chunk_form(node) if chunks else (ChunkForm(), "")
                yield _SurveyedArray(key, node, node.chunks, form, why)
        except DecodeError as error:
            yield Report.of_damage(file, key, str(error))


def _chunk_form(node: SnapshotNode) -> tuple[ChunkForm, str]:
    """Return the form of the chunks of an array, of inner chunks if it is sharded, and why they
    cannot be checked. Raises: `DecodeError`.
    """
    found = describe(node.document)
    if (array := node.document.array) is not None:
        form = array.chunk
    else:
        shape = found.inner_chunk_shape or ()
        is_regular = len(shape) == len(found.shape or ())
        form = chunk_form(found.codecs, shape, found.data_type if is_regular else None)
    return form, "" if form.is_checked else uncheckable(found)


def _find_misplaced(file: ObjectRef, manifest: Manifest, array: _SurveyedArray) -> Iterator[Report]:
    node_id = array.node.node_id
    grid = array.chunks.grid
    for found, ndim in manifest.arrays:
        # Old writers give the chunk of an array without dimensions one coordinate.
        if found == node_id and ndim not in {len(grid), len(grid) or 1}:
            reason = f"references with {ndim} coordinates to an array of {len(grid)} dimensions"
            yield Report.of_damage(file, array.key, reason)
    coords = manifest.coords(node_id, len(grid))
    for each in coords[~inside(coords, grid)].tolist():
        reason = f"it is out of the chunk grid {list(grid)}"
        yield Report.of_damage(file, array.chunk_key(tuple(each)), reason)


def _follow_references(
    repository: Repository, manifest: Manifest, array: _SurveyedArray, containers: Mapping[str, str]
) -> Iterator[Finding]:
    """Follow the references of one array in one manifest."""
    file = repository.file("manifests", manifest.object_id)
    node_id = array.node.node_id
    grid = array.chunks.grid
    yield from _find_misplaced(file, manifest, array)
    every = manifest.coords(node_id, len(grid))
    yield Report(counts={"references": len(every)})
    last: dict[tuple[ObjectRef, object], NeededObject] = {}
    refused: Counter[str] = Counter()
    for coords in map(tuple, every[inside(every, grid)].tolist()):
        try:
            if (reference := manifest.lookup(node_id, coords)) is None:
                continue
            found = repository.refer(manifest, reference, containers).place
        except DecodeError as error:
            yield Report.of_damage(file, array.chunk_key(coords), str(error))
            continue
        except NotAllowedError as error:
            refused[str(error)] += 1
            continue
        data = found.data if isinstance(found, Inline) else None
        place = Part(file, ByteRange(0, len(found.data))) if isinstance(found, Inline) else found
        if array.reads_chunks:
            shard = enclose(array.node, coords, place, array.form)
            yield Enclosed(array.key, shard, data)
        elif data is None:
            known = last.get((place.ref, place.version))
            if known is None or known.place.byte_range.stop < place.byte_range.stop:
                needed = NeededObject(array.chunk_key(coords), place)
                last[place.ref, place.version] = needed
    yield from last.values()
    for reason, count in refused.items():
        yield Report(not_checked={array.key: f"{count} of its chunks: {reason}"})


def enclose(
    node: SnapshotNode,
    coords: tuple[int, ...],
    place: Stored | Part,
    form: ChunkForm = ChunkForm(),  # noqa: B008  immutable
) -> Shard:
    """Return the shard, or unsharded chunk, at the grid position *coords*, stored at *place*."""
    array = node.document.array
    if array is None:
        key = VirtualKey(node.chunks.keys.format(coords) if node.chunks else "")
        return PlainChunk(key, place, form)
    return enclose_shard(array, coords, place)


def enclose_shard(array: ArraySpec, coords: tuple[int, ...], place: Stored | Part) -> ZarrShard:
    """Return the shard of *array* at the grid position *coords*, stored at *place*."""
    return ZarrShard(place.ref, array, array.shard_origin(coords), inside=place)


@dataclass(frozen=True, slots=True)
class InlineFetch:
    """Implementation of `Fetch` that reads parts of a shard in a manifest."""

    shard: Inline

    async def __call__[T: Weighable](self, read: Read[T], /, **_: bool) -> Versioned[T]:
        data = self.shard.data
        part = cast("ByteRange", read.request)
        try:
            return Versioned(read.decode(data[part.start : part.stop]), self.shard.etag, len(data))
        except DecodeError as error:
            raise DamagedError(read.ref, str(error)) from error


@dataclass(frozen=True, slots=True)
class PlainChunk:
    """An unsharded chunk, seen as a shard of one chunk without index."""

    key: VirtualKey
    place: Stored | Part
    form: ChunkForm

    @property
    def ref(self) -> ObjectRef:
        return self.place.ref

    async def survey(self, fetch: Fetch) -> Survey:
        """Read the version of the object where the reference does not name it."""
        whole = self.place
        if not isinstance(whole, Stored):
            found = await fetch(Read("chunk", self.ref, ByteRange(0, 1), Opaque, whole.version))
            if found is None:
                raise DamagedError(self.ref, ABSENT_SOURCE)
            whole = Stored(self.ref, whole.byte_range, found.etag)
        only = Ranges.of(ByteRange(0, whole.byte_range.length))
        return Survey(
            whole=whole,
            table=lambda: EntryTable(only.starts, only),
            key=lambda _: self.key,
            check=lambda _, data: self.form.check(data),
            indexes=Ranges.of(),
            index_location="end",
        )
