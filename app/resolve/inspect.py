"""What is there: arrays with their shards, the place of a chunk, the state of a shard index."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.errors import BadKeyError, DamagedError
from app.formats.contract import DecodeError, Read, Versioned
from app.formats.zarr_sharding_indexed.index import IndexCodec, ShardIndex
from app.formats.zarr_sharding_indexed.layout import ZarrLayout
from app.formats.zarr_sharding_indexed.metadata import ArraySpec
from app.formats.zarr_sharding_indexed.unshard import codec_name
from app.model import ByteRange, Inline, Missing, ObjectRef, Stored, VirtualKey, Whole
from app.resolve.walk import Root, find_arrays


@dataclass(frozen=True, slots=True)
class ArrayReport:
    """An array as it is stored, and as it is served."""

    path: str
    shape: tuple[int, ...]
    data_type: str
    dimension_names: tuple[str | None, ...] | None
    inner_chunk_shape: tuple[int, ...]
    """Of the chunks that are served."""
    codecs: tuple[str, ...]
    """What encodes a chunk that is served."""
    shard_shape: tuple[int, ...] | None
    chunks_per_shard: tuple[int, ...] | None
    index_location: tuple[str, ...]
    """Of each sharding codec, outermost first."""
    why_sharded: str
    """Why a sharded array is served as it is."""


@dataclass(frozen=True, slots=True)
class DamageReport:
    """Metadata that cannot be understood."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The outermost index of a shard."""

    shard: str
    nbytes: int
    """Bytes of the whole shard."""
    index_nbytes: int
    index_location: str
    entries: int
    empty: int
    used_nbytes: int
    """Bytes that the entries name."""
    gaps: int
    """Stretches between chunks and index that nothing names."""
    gap_nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Where the bytes of a virtual key are."""

    key: str
    state: str
    """``stored``, ``inline`` (rewritten metadata) or ``absent``."""
    object: str | None = None
    start: int | None = None
    stop: int | None = None
    etag: str | None = None
    shard: IndexReport | None = None
    """The shard that holds the chunk, or would."""


async def inspect_root(
    root: Root, *, after: str = "", limit: int | None = None
) -> list[ArrayReport | DamageReport]:
    """Describe the arrays below *root*, up to *limit* of those behind the path *after*."""
    reports: list[ArrayReport | DamageReport] = []
    is_behind = not after
    async for visited in find_arrays(root):
        if not is_behind:
            is_behind = visited.path == after
            continue
        if len(reports) == limit:
            break
        match visited.found:
            case DamagedError() as damage:
                reports.append(DamageReport(visited.path, damage.reason))
            case layout:
                reports.append(describe(visited.path, layout))
    return reports


async def inspect_key(root: Root, key: VirtualKey) -> ChunkReport:
    """Find the bytes of *key*, and describe the shard that holds them."""
    layout, rest = await root.containers.find(root.ref, key, root.fetch)
    shard = None
    if isinstance(layout, ZarrLayout) and (array := layout.node.value.array) is not None:
        shard = await _inspect_shard(root, layout, array, rest)
    match await layout.locate(rest, root.fetch):
        case Stored(ref, place, etag):
            return ChunkReport(key, "stored", str(ref), place.start, place.stop, etag, shard)
        case Inline(data, etag):
            return ChunkReport(key, "inline", None, 0, len(data), etag)
        case Missing():
            return ChunkReport(key, "absent", shard=shard)
        case Whole(ref):
            if (stat := await root.store.stat(ref)) is None:
                return ChunkReport(key, "absent", str(ref))
            return ChunkReport(key, "stored", str(ref), 0, stat.size, stat.etag)


async def inspect_shard(root: Root, key: VirtualKey) -> IndexReport | None:
    """Describe the shard in the object *key*; `None` if there is none.

    Raises: `BadKeyError` if *key* is not spelled like a shard's.
    """
    layout, rest = await root.containers.find(root.ref, key, root.fetch)
    array = layout.node.value.array if isinstance(layout, ZarrLayout) else None
    if not isinstance(layout, ZarrLayout) or array is None or array.keys.parse(rest) is None:
        raise BadKeyError(f"{key}: is no key of a shard")
    return await _read_index(root, layout.directory.join(rest), array)


def describe(path: str, layout: ZarrLayout) -> ArrayReport:
    """Describe an opened array."""
    node = layout.node.value
    served: dict[str, Any] = json.loads(node.served)
    array = node.array
    levels = array.unsharded.levels if array else ()
    grid = served.get("chunk_grid", {}).get("configuration", {})
    inner = array.inner_chunk_shape if array else tuple(grid.get("chunk_shape", ()))
    names = served.get("dimension_names")
    return ArrayReport(
        path=path,
        shape=tuple(served.get("shape", ())),
        data_type=_name(served.get("data_type")),
        dimension_names=None if names is None else tuple(names),
        inner_chunk_shape=inner,
        codecs=tuple(map(codec_name, served.get("codecs", ()))),
        shard_shape=array.shard_shape if array else None,
        chunks_per_shard=(
            tuple(s // c for s, c in zip(array.shard_shape, inner, strict=True)) if array else None
        ),
        index_location=tuple(level.index.location.value for level in levels),
        why_sharded=node.why_sharded,
    )


def report_index(ref: ObjectRef, codec: IndexCodec, index: Versioned[ShardIndex]) -> IndexReport:
    """Count what *index* names, and what it leaves over.

    Raises: `DamagedError` for an entry that cannot be right.
    """
    try:
        places = [codec.find(index.value, entry, index.size) for entry in range(len(index.value))]
        ends = [codec.place(index.size), ByteRange(index.size - codec.trailer_nbytes, index.size)]
    except DecodeError as error:
        raise DamagedError(ref, str(error)) from error
    chunks = [place for place in places if place is not None]
    gaps = _gaps([*chunks, *ends])
    return IndexReport(
        shard=str(ref),
        nbytes=index.size,
        index_nbytes=codec.nbytes,
        index_location=codec.location.value,
        entries=len(places),
        empty=len(places) - len(chunks),
        used_nbytes=sum(place.length for place in chunks),
        gaps=len(gaps),
        gap_nbytes=sum(gaps),
    )


async def _inspect_shard(
    root: Root, layout: ZarrLayout, array: ArraySpec, key: VirtualKey
) -> IndexReport | None:
    """Describe the shard that the inner chunk *key* is in."""
    coords = array.keys.parse(key)
    if coords is None or (origin := array.origin(coords)) is None:
        return None
    return await _read_index(root, layout.directory.join(array.shard_key(origin)), array)


async def _read_index(root: Root, ref: ObjectRef, array: ArraySpec) -> IndexReport | None:
    codec = array.unsharded.levels[0].index
    index = await root.fetch(Read("shard-index", ref, codec.request, codec))
    return None if index is None else report_index(ref, codec, index)


def _gaps(places: Iterable[ByteRange]) -> list[int]:
    """Measure the stretches from 0 on that no place covers."""
    gaps, covered = [], 0
    for place in sorted(places):
        if place.start > covered:
            gaps.append(place.start - covered)
        covered = max(covered, place.stop)
    return gaps


def _name(named: Any) -> str:
    return str(named.get("name")) if isinstance(named, dict) else str(named)
