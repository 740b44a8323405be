"""Codec chains: flattened to what encodes the innermost chunks, and the form of those chunks.

Everything here is counted along the *array's* own axes. A ``transpose`` before a sharding codec
makes that codec count in other axes; it only permutes the strides of the index.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import crc32c

from shardgate.formats.compression import MEASURES
from shardgate.formats.documents import Json, as_integer
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.index import CHECKSUM_NBYTES, IndexCodec, ShardingLevel

MAX_SIZE: Final = 2**63 - 1  # along an axis, in numpy's int64
_MAX_NDIM: Final = 64  # of numpy
_LITTLE: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_MAX_TRANSPOSED: Final = 2**20  # a transposed index is always read whole: 16 MiB
_MAX_CHECKSUMS: Final = 16  # a rewrite nests as deep; writers append one
_ITEM_NBYTES: Final = {
    "bool": 1,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "numpy.datetime64": 8,
    "numpy.timedelta64": 8,
}
# Data types that are named after their bits; any whole number of bytes is a data type ``r*``.
_BY_BITS: Final = re.compile("(?:u?int|float|r)(8|[1-9][0-9]{1,5})")


def codec_name(codec: Json) -> str:
    """Return the name of a codec, or of another extension; a bare name stands for itself."""
    name = codec.get("name") if isinstance(codec, dict) else codec
    if not isinstance(name, str):
        raise DecodeError(f"a codec without a name: {str(codec)[:80]}")
    return name


def configuration(named: Json) -> dict[str, Json]:
    """Return the configuration of a codec, grid or encoding, empty by default."""
    found = named.get("configuration", {}) if isinstance(named, dict) else {}
    if not isinstance(found, dict):
        raise DecodeError(f"the configuration of {codec_name(named):.80} is no object")
    return found


def shape_of(value: Json, name: str, ndim: int | None = None, least: int = 1) -> tuple[int, ...]:
    """Read a list of *ndim* sizes of at least *least*; *name* is for errors."""
    if isinstance(value, list) and len(value) > _MAX_NDIM:
        raise DecodeError(f"{name} has {len(value)} dimensions, more than {_MAX_NDIM}")
    sizes: list[Json] = list(map(as_integer, value)) if isinstance(value, list) else [None]
    if any(type(size) is not int or size < least for size in sizes):
        raise DecodeError(f"{name} is no list of sizes: {str(value)[:80]}")
    if any(size > MAX_SIZE for size in sizes):
        raise DecodeError(f"{name} has a size above 2^63-1")
    if ndim is not None and len(sizes) != ndim:
        raise DecodeError(f"{name} has {len(sizes)} dimensions instead of {ndim}")
    return tuple(sizes)


def has_sharding(codecs: Json) -> bool:
    """Return whether the outermost codec chain has ``sharding_indexed``."""
    return isinstance(codecs, list) and "sharding_indexed" in _names(codecs)


def _names(codecs: Sequence[Json]) -> list[Json]:
    """Return the names of *codecs*, also of malformed ones."""
    return [codec.get("name") if isinstance(codec, dict) else codec for codec in codecs]


type Flat = tuple[tuple[ShardingLevel, ...], tuple[Json, ...]]
"""Sharding codecs, at least one, outermost first, and the codecs of the innermost chunks."""


def unshard(codecs: Json, shard_shape: tuple[int, ...]) -> Flat:
    """Flatten *codecs*, which encode chunks of *shard_shape* and contain a sharding codec. An inner
    chain that cannot be flattened further stays as the codecs of its chunks. Raises:
    `DecodeError` where the outermost shards cannot be read by range.
    """
    levels, flat = _flatten(codecs, shard_shape, tuple(range(len(shard_shape))))
    return levels, _merge_transposes(flat, len(shard_shape))


def _flatten(codecs: Json, shape: tuple[int, ...], axes: tuple[int, ...]) -> Flat:
    """Flatten a chain whose arrays have *shape*; *axes* are the array axes in their order."""
    names = [codec_name(codec) for codec in codecs]
    at = names.index("sharding_indexed")
    # Only transposes may stand before: they permute the axes in which the codec counts.
    for codec in codecs[:at]:
        order = _transpose_order(codec, len(shape))
        shape = _permute(shape, order)
        axes = _permute(axes, order)
    if unknown := set(names[at + 1 :]) - {"crc32c"}:
        raise DecodeError(f"{min(unknown):.80} after sharding_indexed hides where chunks lie")
    sharding = configuration(codecs[at])
    members = {"chunk_shape", "codecs", "index_codecs", "index_location"}
    if unknown := sharding.keys() - members:
        raise DecodeError(f"sharding_indexed has the unknown member {min(unknown):.80}")
    chunk_shape = shape_of(sharding.get("chunk_shape"), "chunk_shape", len(shape))
    if any(not n or n % size for n, size in zip(shape, chunk_shape, strict=True)):
        raise DecodeError(
            f"inner chunks of {list(chunk_shape)} do not divide shards of {list(shape)}"
        )
    counts = tuple(outer // inner for outer, inner in zip(shape, chunk_shape, strict=True))
    trailer_nbytes = CHECKSUM_NBYTES * _checksum_count(names[at + 1 :])
    index = _index_codec(sharding, counts, trailer_nbytes)
    back = tuple(axes.index(axis) for axis in range(len(axes)))  # to the axes of the array
    level = ShardingLevel.of(_permute(chunk_shape, back), _permute(counts, back), index, axes)
    inner_codecs = sharding.get("codecs", [_LITTLE])
    if not isinstance(inner_codecs, list) or not inner_codecs:
        raise DecodeError("sharding_indexed has no list of codecs")
    inner_levels: tuple[ShardingLevel, ...] = ()
    flat: tuple[Json, ...] = tuple(map(_current_spelling, inner_codecs))
    if has_sharding(inner_codecs):
        with suppress(DecodeError):
            found, deeper = _flatten(inner_codecs, chunk_shape, axes)
            # Only of outermost shards it is tried whether the index has a checksum.
            if found[0].index.checksum_count is not None:
                inner_levels = found
                flat = deeper
    return (level, *inner_levels), (*codecs[:at], *flat)


def _index_codec(
    sharding: dict[str, Json], counts: tuple[int, ...], trailer_nbytes: int
) -> IndexCodec:
    location = sharding.get("index_location", "end")
    if location not in ("start", "end"):
        raise DecodeError(f"index_location is neither start nor end: {str(location)[:80]}")
    big_endian = False
    checksum_count: int | None = None
    order: tuple[int, ...] = ()
    if "index_codecs" in sharding:
        codecs = sharding["index_codecs"]
        big_endian, checksum_count, order = _read_index_codecs(codecs, len(counts) + 1)
    elif (entry_count := math.prod(counts)) > 2**16:
        # As drafted until July 2023; such an index is always read whole.
        raise DecodeError(f"an index of {entry_count} entries has no index_codecs")
    if order and math.prod(counts) > _MAX_TRANSPOSED:
        raise DecodeError(f"an index of more than {_MAX_TRANSPOSED} entries is transposed")
    return IndexCodec(counts, location, big_endian, checksum_count, trailer_nbytes, order)


def _read_index_codecs(codecs: Json, ndim: int) -> tuple[bool, int, tuple[int, ...]]:
    """Return whether the numbers of an index of *ndim* axes are big-endian, how many checksums
    follow, and the axes in the order in which they are encoded, see `IndexCodec.order`.
    """
    if not isinstance(codecs, list) or not codecs:
        raise DecodeError("index_codecs is no list of codecs")
    names = [codec_name(codec) for codec in codecs]
    at = next((at for at, name in enumerate(names) if name != "transpose"), len(names))
    if names[at : at + 1] not in (["bytes"], ["endian"]) or set(names[at + 1 :]) - {"crc32c"}:
        raise DecodeError(f"the shard index is encoded by {' + '.join(names):.80}")
    endian = configuration(codecs[at]).get("endian")
    if endian not in ("little", "big"):
        raise DecodeError(f"the index codec's endian is neither little nor big: {endian!s:.80}")
    axes = order = tuple(range(ndim))
    for codec in codecs[:at]:
        order = _permute(order, _transpose_order(codec, ndim))
    return endian == "big", _checksum_count(names[at + 1 :]), () if order == axes else order


def _checksum_count(names: Sequence[str]) -> int:
    if len(names) > _MAX_CHECKSUMS:
        raise DecodeError(f"{len(names)} checksums follow one another, more than {_MAX_CHECKSUMS}")
    return len(names)


def _transpose_order(codec: Json, ndim: int) -> tuple[int, ...]:
    """Read the permutation of a ``transpose``: encoded axis *i* is axis ``order[i]``."""
    if (name := codec_name(codec)) != "transpose":
        raise DecodeError(f"{name:.80} before sharding_indexed changes whole shards")
    order = configuration(codec).get("order")
    axes = tuple(range(ndim))
    if order in ("C", "F"):
        return axes if order == "C" else axes[::-1]
    permutation = shape_of(order, "order", ndim, least=0)
    if sorted(permutation) != list(axes):
        raise DecodeError(f"the order of a transpose is no permutation: {order}")
    return permutation


def _merge_transposes(codecs: tuple[Json, ...], ndim: int) -> tuple[Json, ...]:
    """Spell transposes by their axes, and compose neighbours: zarrita silently applies one only."""
    merged: list[Json] = []
    for codec in codecs:
        if codec_name(codec) != "transpose":
            merged.append(codec)
            continue
        order = _transpose_order(codec, ndim)
        if merged and codec_name(merged[-1]) == "transpose":
            order = _permute(_transpose_order(merged.pop(), ndim), order)
        merged.append({"name": "transpose", "configuration": {"order": list(order)}})
    return tuple(merged)


def _permute[T](values: Sequence[T], order: tuple[int, ...]) -> tuple[T, ...]:
    return tuple(values[i] for i in order)


def _current_spelling(codec: Json) -> Json:
    """Rename ``endian``, as ZEP 2 calls it, to ``bytes``, which every reader knows."""
    if codec_name(codec) != "endian":
        return codec
    return {**codec, "name": "bytes"} if isinstance(codec, dict) else "bytes"


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """Properties of all encoded inner chunks of an array."""

    nbytes: int | None = None
    """Size of each, where no codec makes it depend on the values."""
    has_checksum: bool = False
    """True if the last codec appends a CRC-32C."""
    compressor: str = ""
    """The last other codec, if it makes frames that can be checked."""
    plain_nbytes: int | None = None
    """Size of what the compressor gets, where that does not depend on the values."""

    @property
    def is_checked(self) -> bool:
        """Return whether `check` looks at the bytes or their number."""
        return self.nbytes is not None or self.reads_bytes

    @property
    def reads_bytes(self) -> bool:
        """Return whether `check` looks at more than the number of bytes."""
        return self.has_checksum or bool(self.compressor)

    def fault(self, data: bytes) -> str | None:
        """Return why *data* cannot be an inner chunk, or `None` if it can."""
        if not data:
            return "the inner chunk is empty"
        if self.nbytes is not None and len(data) != self.nbytes:
            return f"the inner chunk has {len(data)} bytes instead of {self.nbytes}"
        if self.has_checksum and not has_intact_checksum(data):
            return "the checksum of the inner chunk does not match"
        return None

    def check(self, data: bytes) -> str | None:
        """Return the `fault` of *data*, or one of the compressor's frame, which is decoded."""
        if (fault := self.fault(data)) is not None or not self.compressor:
            return fault
        frame = data[:-CHECKSUM_NBYTES] if self.has_checksum else data
        expected = self.plain_nbytes
        most_nbytes = 2**30 if expected is None else expected
        try:
            found = MEASURES[self.compressor](frame, most_nbytes)
        except DecodeError as error:
            return str(error)
        is_known = found is not None and expected is not None
        if not is_known or found == expected:
            return None
        return f"{self.compressor} holds {found} bytes instead of {expected}"


def chunk_form(codecs: Sequence[Json], chunk_shape: Sequence[int], data_type: Json) -> ChunkForm:
    """Return the form of chunks of *chunk_shape* that *codecs* have encoded."""
    names = _names(codecs)
    element = item_nbytes(data_type)
    nbytes = None if element is None else math.prod(chunk_shape) * element
    has_checksum = names[-1:] == ["crc32c"]
    before = names[:-1] if has_checksum else names
    compressor = str(before[-1]).removeprefix("numcodecs.") if before else ""
    if compressor in MEASURES:
        return ChunkForm(None, has_checksum, compressor, _encoded_nbytes(nbytes, before[:-1]))
    return ChunkForm(_encoded_nbytes(nbytes, names), has_checksum)


def _encoded_nbytes(nbytes: int | None, names: Sequence[Json]) -> int | None:
    """Return the size of *nbytes* after the codecs *names*, if it does not depend on the values."""
    if nbytes is None or not {"transpose", "bytes", "crc32c"}.issuperset(names):
        return None
    return nbytes + CHECKSUM_NBYTES * names.count("crc32c")


def has_intact_checksum(data: bytes) -> bool:
    """Return whether *data* ends in the CRC-32C of all before it, 4 bytes, little-endian."""
    checksum = data[-CHECKSUM_NBYTES:]
    expected = crc32c.crc32c(data[:-CHECKSUM_NBYTES])
    return checksum == expected.to_bytes(CHECKSUM_NBYTES, "little")


def item_nbytes(data_type: Json) -> int | None:
    """Return the bytes of an element after the codec ``bytes``, if the data type is known."""
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    if not isinstance(name, str):
        return None
    if (bits := _BY_BITS.fullmatch(name)) is not None:
        nbytes, rest = divmod(int(bits[1]), 8)
        return None if rest else nbytes
    return _ITEM_NBYTES.get(name)
