"""What an array is without its shards: the codec chain flattened to the innermost chunks.

Everything here is counted along the *array's* own axes. A ``transpose`` before a sharding codec
makes that codec count in other axes; it only permutes the strides of the index.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.formats.reading import DecodeError
from app.formats.zarr_sharding_indexed.index import CHECKSUM_NBYTES, IndexCodec, IndexLocation

type Json = Any

_MAX_NDIM: Final = 64
_MAX_SIZE: Final = 2**63 - 1


class UnshardableError(Exception):
    """The array cannot be taken apart without decoding; the message says why."""


@dataclass(frozen=True, slots=True)
class ShardingLevel:
    """One sharding codec, outermost first."""

    inner_chunk_shape: tuple[int, ...]
    """Of the chunks inside this codec's shards, in array elements."""
    chunks_per_shard: tuple[int, ...]
    strides: tuple[int, ...]
    """How many index entries apart neighbours along each axis are."""
    index: IndexCodec

    def entry(self, origin: tuple[int, ...]) -> int:
        """Give the number, in its shard, of the inner chunk that holds the element *origin*."""
        return sum(
            at // chunk % count * stride
            for at, chunk, count, stride in zip(
                origin, self.inner_chunk_shape, self.chunks_per_shard, self.strides, strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The same array with its innermost chunks as chunks: never without a level."""

    levels: tuple[ShardingLevel, ...]
    codecs: tuple[Json, ...]
    """What encodes an innermost chunk."""

    @property
    def inner_chunk_shape(self) -> tuple[int, ...]:
        """Shape of the innermost chunks in array elements."""
        return self.levels[-1].inner_chunk_shape

    @property
    def indexes(self) -> tuple[IndexCodec, ...]:
        """How the index of each level is encoded."""
        return tuple(level.index for level in self.levels)

    def entry(self, origin: tuple[int, ...]) -> tuple[int, ...]:
        """Give the number, at each level, of what holds the element *origin*."""
        return tuple(level.entry(origin) for level in self.levels)


def codec_name(codec: Json) -> str:
    """Name of a codec, which may stand for itself without a configuration."""
    name = codec.get("name") if isinstance(codec, dict) else codec
    if not isinstance(name, str):
        raise DecodeError(f"a codec without a name: {str(codec)[:80]}")
    return name


def configuration(named: Json) -> dict[str, Json]:
    """Read the configuration of a codec, grid or encoding; none is an empty one."""
    found = named.get("configuration", {}) if isinstance(named, dict) else {}
    if not isinstance(found, dict):
        raise DecodeError(f"the configuration of {codec_name(named):.80} is no object")
    return found


def shape_of(value: Json, name: str, ndim: int | None = None, least: int = 1) -> tuple[int, ...]:
    """Read a list of *ndim* sizes of at least *least*."""
    if not isinstance(value, list) or any(type(n) is not int or n < least for n in value):
        raise DecodeError(f"{name} is no list of sizes: {str(value)[:80]}")
    if len(value) > _MAX_NDIM:
        raise DecodeError(f"{name} has {len(value)} dimensions, more than {_MAX_NDIM}")
    if any(n > _MAX_SIZE for n in value):
        raise DecodeError(f"{name} has a size above 2^63-1")
    if ndim is not None and len(value) != ndim:
        raise DecodeError(f"{name} has {len(value)} dimensions instead of {ndim}")
    return tuple(value)


def has_sharding(codecs: Json) -> bool:
    """Tell whether a codec chain shards on its outside."""
    if not isinstance(codecs, list):
        return False
    names = [c.get("name") if isinstance(c, dict) else c for c in codecs]
    return "sharding_indexed" in names


def unshard(codecs: Json, shard_shape: tuple[int, ...]) -> Unsharded:
    """Flatten *codecs*, which encode chunks of *shard_shape* and contain a sharding codec.

    An inner chain that cannot be flattened further stays as the codecs of its chunks.

    Raises: `UnshardableError` where the outermost shards cannot be read by range, `DecodeError`
    where the metadata contradicts itself or the specification.
    """
    axes = tuple(range(len(shard_shape)))
    flat = _flatten(codecs, shard_shape, axes)
    return Unsharded(flat.levels, _merge_transposes(flat.codecs, len(shard_shape)))


def _merge_transposes(codecs: tuple[Json, ...], ndim: int) -> tuple[Json, ...]:
    """Compose neighbouring transposes into one: zarrita applies only one of them, silently."""
    merged: list[Json] = []
    for codec in codecs:
        if merged and codec_name(codec) == codec_name(merged[-1]) == "transpose":
            outer = _transpose_order(merged.pop(), ndim)
            order = list(_permute(outer, _transpose_order(codec, ndim)))
            merged.append({"name": "transpose", "configuration": {"order": order}})
        else:
            merged.append(codec)
    return tuple(merged)


def _flatten(codecs: Json, shape: tuple[int, ...], axes: tuple[int, ...]) -> Unsharded:
    """Flatten a chain whose arrays have *shape*; *axes* names the array axis of each of theirs."""
    names = [codec_name(codec) for codec in codecs]
    at = names.index("sharding_indexed")
    for codec in codecs[:at]:
        order = _transpose_order(codec, len(shape))
        shape, axes = _permute(shape, order), _permute(axes, order)
    if unknown := set(names[at + 1 :]) - {"crc32c"}:
        raise UnshardableError(f"{min(unknown):.80} after sharding_indexed hides where chunks lie")
    trailer_nbytes = CHECKSUM_NBYTES * len(names[at + 1 :])

    sharding = configuration(codecs[at])
    chunk_shape = shape_of(sharding.get("chunk_shape"), "chunk_shape", len(shape))
    if any(outer % inner for outer, inner in zip(shape, chunk_shape, strict=True)):
        raise DecodeError(
            f"inner chunks of {list(chunk_shape)} do not divide shards of {list(shape)}"
        )
    index = _index_codec(sharding, shape, chunk_shape, trailer_nbytes)
    level = _level(shape, chunk_shape, axes, index)
    inner_codecs = sharding.get("codecs")
    if not isinstance(inner_codecs, list) or not inner_codecs:
        raise DecodeError("sharding_indexed has no list of codecs")
    before = tuple(codecs[:at])
    if has_sharding(inner_codecs):
        try:
            inner = _flatten(inner_codecs, chunk_shape, axes)
        except UnshardableError:
            pass
        else:
            return Unsharded((level, *inner.levels), (*before, *inner.codecs))
    return Unsharded((level,), (*before, *map(_current_spelling, inner_codecs)))


def _level(
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    axes: tuple[int, ...],
    index: IndexCodec,
) -> ShardingLevel:
    counts = tuple(outer // inner for outer, inner in zip(shape, chunk_shape, strict=True))
    strides = tuple(math.prod(counts[i + 1 :]) for i in range(len(counts)))
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    return ShardingLevel(
        inner_chunk_shape=_permute(chunk_shape, back),
        chunks_per_shard=_permute(counts, back),
        strides=_permute(strides, back),
        index=index,
    )


def _index_codec(
    sharding: dict[str, Json],
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    trailer_nbytes: int,
) -> IndexCodec:
    location = sharding.get("index_location", "end")
    if location not in ("start", "end"):
        raise DecodeError(f"index_location is neither start nor end: {str(location)[:80]}")
    codecs = sharding.get("index_codecs")
    if not isinstance(codecs, list) or not codecs:
        raise DecodeError("sharding_indexed has no list of index_codecs")
    match [codec_name(codec) for codec in codecs]:
        case ["bytes" | "endian"]:
            has_checksum = False
        case ["bytes" | "endian", "crc32c"]:
            has_checksum = True
        case names:
            raise UnshardableError(f"the shard index is encoded by {' + '.join(names):.80}")
    endian = configuration(codecs[0]).get("endian")
    if endian not in ("little", "big"):
        raise DecodeError(f"the index codec's endian is neither little nor big: {endian!s:.80}")
    return IndexCodec(
        entry_count=math.prod(shape) // math.prod(chunk_shape),
        location=IndexLocation(location),
        big_endian=endian == "big",
        has_checksum=has_checksum,
        trailer_nbytes=trailer_nbytes,
    )


def _transpose_order(codec: Json, ndim: int) -> tuple[int, ...]:
    """Read the permutation of a ``transpose``: encoded axis *i* is axis ``order[i]``."""
    if (name := codec_name(codec)) != "transpose":
        raise UnshardableError(f"{name:.80} before sharding_indexed changes whole shards")
    order = configuration(codec).get("order")
    axes = tuple(range(ndim))
    if order in ("C", "F"):
        return axes if order == "C" else axes[::-1]
    permutation = shape_of(order, "order", ndim, least=0)
    if sorted(permutation) != list(axes):
        raise DecodeError(f"the order of a transpose is no permutation: {order}")
    return permutation


def _permute[T](values: Sequence[T], order: tuple[int, ...]) -> tuple[T, ...]:
    return tuple(values[i] for i in order)


def _current_spelling(codec: Json) -> Json:
    """Spell ``endian``, as ZEP 2 calls it, the way every reader knows it: ``bytes``."""
    if codec_name(codec) != "endian":
        return codec
    return {**codec, "name": "bytes"} if isinstance(codec, dict) else "bytes"
