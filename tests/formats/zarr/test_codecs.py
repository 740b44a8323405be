"""Codec chains, flattened, and the form of the chunks that they encode."""

from typing import Any

import pytest

from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.codecs import (
    ChunkForm,
    chunk_form,
    has_sharding,
    shape_of,
    unshard,
)
from shardgate.formats.zarr.index import IndexLocation
from tests.formats.zarr.building import BIG, CRC, LITTLE, checksum, sharding

_GZIP = {"name": "gzip", "configuration": {"level": 1}}


def _transpose(*order: int) -> dict[str, Any]:
    return {"name": "transpose", "configuration": {"order": list(order)}}


def _configured(**members: Any) -> Any:
    """Write a sharding codec with other members in its configuration."""
    codec = sharding([2])
    return {**codec, "configuration": {**codec["configuration"], **members}}


def test_codecs_of_a_chunk_are_those_before_and_those_inside() -> None:
    """What transposes shards transposes their chunks; what follows a shard is about shards."""
    codecs = [_transpose(1, 0), sharding([2, 1], [BIG, _GZIP]), CRC]

    assert unshard(codecs, (4, 4))[1] == (_transpose(1, 0), BIG, _GZIP)


def test_the_index_is_described_as_it_is_encoded() -> None:
    """Location, byte order, checksum, number of entries and trailing checksums are told."""
    codec = sharding([2, 1], index_location="start", index_codecs=[BIG, CRC])
    (level,), _ = unshard([codec, CRC, CRC], (4, 4))
    index = level.index

    assert (index.location, index.big_endian, index.has_checksum) == (
        IndexLocation.START,
        True,
        True,
    )
    assert (index.entry_count, index.trailer_nbytes) == (8, 8)


def test_codecs_may_be_spelled_otherwise() -> None:
    """The index is at the end unless told; a codec may be a name, and ``bytes`` was ``endian``."""
    older = {**BIG, "name": "endian"}
    codec = sharding([2], [older], index_codecs=[older, CRC])
    del codec["configuration"]["index_location"]
    transposed = [{"name": "transpose", "configuration": {"order": "F"}}, sharding([1, 1])]
    (old,), old_codecs = unshard([codec], (4,))
    (new,), codecs = unshard([sharding([2], ["crc32c"], index_codecs=[LITTLE, "crc32c"])], (4,))

    assert old.index.location is IndexLocation.END
    assert (old.index.big_endian, old_codecs) == (True, (BIG,))
    assert (codecs, new.index.has_checksum) == (("crc32c",), True)
    assert unshard(transposed, (2, 2))[1] == (_transpose(1, 0), LITTLE)


@pytest.mark.parametrize(
    ("codecs", "reason"),
    [
        ([sharding([2]), _GZIP], "gzip after sharding_indexed"),
        ([sharding([2]), CRC, _GZIP], "gzip after sharding_indexed"),
        ([{"name": "delta"}, sharding([2])], "delta before sharding_indexed"),
        ([sharding([2], index_codecs=[LITTLE, _GZIP])], r"encoded by bytes \+ gzip"),
        ([sharding([2], index_codecs=[_transpose(0), LITTLE])], r"encoded by transpose \+ bytes"),
        ([sharding([2]), sharding([1])], "sharding_indexed after sharding_indexed"),
    ],
)
def test_what_hides_the_chunks_is_served_sharded(codecs: list[Any], reason: str) -> None:
    """Where a chunk cannot be read by range the reason is told."""
    with pytest.raises(DecodeError, match=reason):
        unshard(codecs, (4,))


def test_an_inner_chain_that_hides_its_chunks_stays() -> None:
    """Compressed shards inside of readable shards are chunks by themselves."""
    hidden = [sharding([1], [LITTLE]), _GZIP]
    levels, codecs = unshard([sharding([2], hidden)], (4,))

    assert (len(levels), list(codecs)) == (1, hidden)


_NO_ORDERS: list[Any] = [[0], [0, 0], [0, 2], [-1, 0], "A", None, [0, 1, 2], {}]


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        (sharding([3]), r"inner chunks of \[3\] do not divide shards of \[4\]"),
        (sharding([8]), "do not divide"),
        (sharding([0]), "chunk_shape is no list of sizes"),
        (sharding([-2]), "chunk_shape is no list of sizes"),
        (sharding([True]), "chunk_shape is no list of sizes"),
        (sharding([2, 2]), "chunk_shape has 2 dimensions instead of 1"),
        (sharding([2], index_location="middle"), "neither start nor end: middle"),
        (sharding([2], index_location=["end"]), "neither start nor end"),
        (sharding([2], index_codecs=[]), "index_codecs is no list"),
        (sharding([2], index_codecs=["bytes"]), "neither little nor big: None"),
        (
            sharding([2], index_codecs=[{"name": "bytes", "configuration": {"endian": {}}}]),
            "neither little nor big",
        ),
        (_configured(index_codecs=None), "index_codecs is no list"),
        (_configured(predefined_index=[]), "unknown member predefined_index"),
        (_configured(codecs={}), "no list of codecs"),
        (_configured(codecs=[]), "no list of codecs"),
        (sharding([2]) | {"configuration": []}, "configuration of sharding_indexed is no object"),
    ],
)
def test_what_contradicts_the_specification_is_refused(codec: Any, reason: str) -> None:
    """Wrong metadata is an error that says what is wrong."""
    with pytest.raises(DecodeError, match=reason):
        unshard([codec], (4,))
    for order in _NO_ORDERS:
        transpose = {"name": "transpose", "configuration": {"order": order}}
        with pytest.raises(DecodeError, match="order"):
            unshard([transpose, sharding([2, 2])], (4, 4))


def test_omitted_codecs_have_defaults() -> None:
    """A chunk without codecs is little-endian, and an index without codecs may have a checksum."""
    codec = sharding([2])
    codec["configuration"] = {"chunk_shape": [2]}
    (level,), codecs = unshard([codec], (4,))

    assert codecs == (LITTLE,)
    assert (level.index.big_endian, level.index.has_checksum) == (False, None)


def test_nested_shard_without_index_codecs_is_a_chunk() -> None:
    """A shard inside a shard stays one chunk if it does not declare the codecs of its index."""
    inner = _configured(chunk_shape=[1])
    del inner["configuration"]["index_codecs"]
    levels, codecs = unshard([sharding([2], [inner])], (4,))

    assert (len(levels), list(codecs)) == (1, [inner])


def test_sizes_spelled_as_floats_are_integers() -> None:
    """Sizes that are spelled 4.0 are parsed as the integer 4."""
    shape = shape_of([4.0, 2], "shape")

    assert shape == (4, 2)
    assert {type(size) for size in shape} == {int}


@pytest.mark.parametrize(
    "value",
    [None, 4, "4", {}, [1.5], [float("inf")], [float("nan")], [1e19], ["1"], [None], [True], [-1],
     [2**63], [10**4000], [1] * 65],
)  # fmt: skip
def test_what_is_no_shape_is_refused(value: Any) -> None:
    """Neither other types nor sizes beyond all measure pass for a shape."""
    with pytest.raises(DecodeError, match="shape"):
        shape_of(value, "shape", least=0)


@pytest.mark.parametrize("codecs", [None, {}, "sharding_indexed", [], [None], [{}], [LITTLE, 3]])
def test_other_codecs_do_not_shard(codecs: Any) -> None:
    """Only a list with the codec in it shards, and nothing else makes it fail."""
    assert not has_sharding(codecs)


@pytest.mark.parametrize(
    ("data_type", "nbytes"),
    [("bool", 1), ("int8", 1), ("uint16", 2), ("int32", 4), ("uint64", 8), ("float16", 2),
     ("bfloat16", 2), ("float32", 4), ("float64", 8), ("complex64", 8), ("complex128", 16),
     ("r8", 1), ("r24", 3), ({"name": "int32"}, 4),
     ({"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 1}}, 8),
     ({"name": "numpy.timedelta64", "configuration": {"unit": "s", "scale_factor": 1}}, 8)],
)  # fmt: skip
def test_chunks_of_fixed_size_types_have_one_length(data_type: object, nbytes: int) -> None:
    """As many elements as the chunk shape says, each of so many bytes."""
    assert chunk_form([LITTLE], (2, 3), data_type) == ChunkForm(6 * nbytes)
    assert chunk_form([LITTLE], (), data_type) == ChunkForm(nbytes)


@pytest.mark.parametrize(
    "data_type",
    ["string", "variable_length_bytes", "r7", "r", "int", "int3", "uint128x", "", 7, None,
     {"name": 7}, {"name": "raw_bytes", "configuration": {"length_bytes": 3}}],
)  # fmt: skip
def test_chunks_of_other_types_are_of_any_length(data_type: object) -> None:
    """What is not known is not refused."""
    assert chunk_form([LITTLE], (2, 3), data_type) == ChunkForm()


@pytest.mark.parametrize(
    ("codecs", "expected"),
    [
        ([LITTLE], ChunkForm(12)),
        (["bytes"], ChunkForm(12)),
        ([_transpose(1, 0), BIG], ChunkForm(12)),
        ([LITTLE, CRC], ChunkForm(16, has_checksum=True)),
        ([LITTLE, "crc32c", CRC], ChunkForm(20, has_checksum=True)),
        ([LITTLE, _GZIP], ChunkForm(compressor="gzip", plain_nbytes=12)),
        (
            [LITTLE, _GZIP, CRC],
            ChunkForm(None, has_checksum=True, compressor="gzip", plain_nbytes=12),
        ),
        ([LITTLE, CRC, _GZIP], ChunkForm(compressor="gzip", plain_nbytes=16)),
        ([{"name": "packbits"}, "numcodecs.zstd"], ChunkForm(compressor="zstd")),
        ([{"name": "packbits"}], ChunkForm()),
    ],
)
def test_codecs_tell_the_length_and_the_checksum(codecs: list[Any], expected: ChunkForm) -> None:
    """Codecs tell what they make of six elements of two bytes."""
    assert chunk_form(codecs, (3, 2), "int16") == expected


def test_data_must_have_the_form() -> None:
    """The first thing that is wrong is told."""
    form = ChunkForm(8, has_checksum=True)

    assert form.fault(b"") == "the inner chunk is empty"
    assert form.fault(b"1234567") == "the inner chunk has 7 bytes instead of 8"
    assert form.fault(b"12345678") == "the checksum of the inner chunk does not match"
    assert form.fault(b"1234" + checksum(b"1234")) is None
    assert ChunkForm().fault(b"any") is None
