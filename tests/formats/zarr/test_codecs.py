"""`shardgate.formats.zarr.codecs`: codec chains, and the form of encoded chunks."""

from typing import Any, Final

import pytest
import zstandard

from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.codecs import ChunkForm, chunk_form, has_sharding, shape_of, unshard
from tests.support.formats.zarr.building import BIG, CRC, LITTLE, checksum, sharding

_GZIP = {"name": "gzip", "configuration": {"level": 1}}


def _transpose(*order: int) -> dict[str, Any]:
    return {"name": "transpose", "configuration": {"order": list(order)}}


def _configured(**members: Any) -> Any:
    """Return a sharding codec with other members in its configuration."""
    codec = sharding([2])
    return {**codec, "configuration": {**codec["configuration"], **members}}


def test_codecs_of_an_inner_chunk_are_the_outer_filters_and_the_inner_chain() -> None:
    """An inner chunk has the codecs before its sharding codec and those inside of it."""
    codecs = [_transpose(1, 0), sharding([2, 1], [BIG, _GZIP]), CRC]

    assert unshard(codecs, (4, 4))[1] == (_transpose(1, 0), BIG, _GZIP)


def test_alternative_spellings_of_codecs_are_understood() -> None:
    """Codecs given as names, as ``endian``, by order ``F`` or by defaults are understood."""
    older = {**BIG, "name": "endian"}
    codec = sharding([2], [older], index_codecs=[older, CRC])
    del codec["configuration"]["index_location"]
    transposed = [{"name": "transpose", "configuration": {"order": "F"}}, sharding([1, 1])]
    (old,), old_codecs = unshard([codec], (4,))
    (new,), codecs = unshard([sharding([2], ["crc32c"], index_codecs=[LITTLE, "crc32c"])], (4,))

    assert old.index.location == "end"
    assert (old.index.big_endian, old_codecs) == (True, (BIG,))
    assert (codecs, new.index.checksum_count) == (("crc32c",), 1)
    assert unshard(transposed, (2, 2))[1] == (_transpose(1, 0), LITTLE)


_UNDECLARED = _configured(chunk_shape=[1])
del _UNDECLARED["configuration"]["index_codecs"]


@pytest.mark.parametrize("hidden", [[sharding([1], [LITTLE]), _GZIP], [_UNDECLARED]])
def test_compressed_or_undeclared_inner_shard_is_a_chunk(hidden: list[Any]) -> None:
    """A shard inside a shard is a chunk if it is compressed, or if its index has no codecs."""
    levels, codecs = unshard([sharding([2], hidden)], (4,))

    assert (len(levels), list(codecs)) == (1, hidden)


_NO_ORDERS: list[Any] = [[0], [0, 0], [0, 2], [-1, 0], "A", None, [0, 1, 2], {}]


@pytest.mark.parametrize(
    ("codecs", "reason"),
    [
        ([sharding([2]), _GZIP], "gzip after sharding_indexed"),
        ([sharding([2]), CRC, _GZIP], "gzip after sharding_indexed"),
        ([{"name": "delta"}, sharding([2])], "delta before sharding_indexed"),
        ([sharding([2]), sharding([1])], "sharding_indexed after sharding_indexed"),
        (sharding([2], index_codecs=[LITTLE, _GZIP]), r"encoded by bytes \+ gzip"),
        (sharding([2], index_codecs=[LITTLE, _transpose(0)]), r"encoded by bytes \+ transpose"),
        (sharding([2], index_codecs=[_transpose(0, 1)]), "encoded by transpose"),
        (sharding([2], index_codecs=[_transpose(0), LITTLE]), "1 dimensions instead of 2"),
        (sharding([2], index_codecs=[_transpose(0, 0), LITTLE]), "is no permutation"),
        (sharding([2], index_codecs=[LITTLE, *[CRC] * 17]), "17 checksums follow one another"),
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
def test_invalid_or_unsupported_codecs_are_refused(codecs: Any, reason: str) -> None:
    """Codecs that are invalid, or prevent reads of inner chunks by range, raise DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        unshard(codecs if isinstance(codecs, list) else [codecs], (4,))
    for order in _NO_ORDERS:
        transpose = {"name": "transpose", "configuration": {"order": order}}
        with pytest.raises(DecodeError, match="order"):
            unshard([transpose, sharding([2, 2])], (4, 4))


def test_large_transposed_index_is_refused() -> None:
    """A transposed index of more entries than are read at once raises DecodeError."""
    codec = sharding([1], index_codecs=[_transpose(1, 0), LITTLE])
    with pytest.raises(DecodeError, match="1048576 entries is transposed"):
        unshard([codec], (2**20 + 1,))


def test_omitted_codecs_have_defaults() -> None:
    """A chunk without codecs is little-endian, and an index without codecs may have a checksum."""
    codec = sharding([2])
    codec["configuration"] = {"chunk_shape": [2]}
    (level,), codecs = unshard([codec], (4,))

    assert codecs == (LITTLE,)
    assert (level.index.big_endian, level.index.checksum_count) == (False, None)


@pytest.mark.parametrize(
    "value",
    [None, 4, "4", {}, [1.5], [float("inf")], [float("nan")], [1e19], ["1"], [None], [True], [-1],
     [2**63], [10**4000], [1] * 65],
)  # fmt: skip
def test_invalid_shape_is_refused(value: Any) -> None:
    """A shape of another type, or with a size out of range, raises DecodeError."""
    with pytest.raises(DecodeError, match="shape"):
        shape_of(value, "shape", least=0)


@pytest.mark.parametrize("codecs", [None, {}, "sharding_indexed", [], [None], [{}], [LITTLE, 3]])
def test_codecs_without_sharding_do_not_shard(codecs: Any) -> None:
    """A chain without the sharding codec, even a malformed one, does not shard."""
    assert not has_sharding(codecs)


@pytest.mark.parametrize(
    ("data_type", "nbytes"),
    [("bool", 1), ("int8", 1), ("uint16", 2), ("int32", 4), ("uint64", 8), ("float16", 2),
     ("bfloat16", 2), ("float32", 4), ("float64", 8), ("complex64", 8), ("complex128", 16),
     ("r8", 1), ("r24", 3), ({"name": "int32"}, 4),
     ({"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 1}}, 8),
     ({"name": "numpy.timedelta64", "configuration": {"unit": "s", "scale_factor": 1}}, 8)],
)  # fmt: skip
def test_chunks_of_fixed_size_types_have_a_fixed_length(data_type: object, nbytes: int) -> None:
    """A chunk of a fixed-size data type has the length of its elements."""
    assert chunk_form([LITTLE], (2, 3), data_type) == ChunkForm(6 * nbytes)
    assert chunk_form([LITTLE], (), data_type) == ChunkForm(nbytes)


@pytest.mark.parametrize(
    "data_type",
    ["string", "variable_length_bytes", "r7", "r", "int", "int3", "uint128x", "", 7, None,
     {"name": 7}, {"name": "raw_bytes", "configuration": {"length_bytes": 3}}],
)  # fmt: skip
def test_chunks_of_other_types_have_any_length(data_type: object) -> None:
    """A chunk of an unknown or variable-length data type may have any length."""
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
def test_codecs_determine_length_and_checksum_of_a_chunk(
    codecs: list[Any], expected: ChunkForm
) -> None:
    """The codecs of six elements of two bytes determine length, checksum and compressor."""
    assert chunk_form(codecs, (3, 2), "int16") == expected


def test_first_fault_of_a_chunk_is_returned() -> None:
    """A chunk's data has a fault for being empty, of a wrong length or checksum, or none."""
    form = ChunkForm(8, has_checksum=True)

    assert form.fault(b"") == "the inner chunk is empty"
    assert form.fault(b"1234567") == "the inner chunk has 7 bytes instead of 8"
    assert form.fault(b"12345678") == "the checksum of the inner chunk does not match"
    assert form.fault(b"1234" + checksum(b"1234")) is None
    assert ChunkForm().fault(b"any") is None


_ZEROS: Final = bytes(2**20)


def _framed(data: bytes, window_log: int = 20) -> bytes:
    """Return a zstd frame with a window of a given size."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("compressor", "frame", "fault"),
    [
        ("zstd", zstandard.compress(_ZEROS), None),
        ("zstd", zstandard.compress(_ZEROS[1:]), "zstd holds 1048575 bytes instead of 1048576"),
        ("zstd", _framed(_ZEROS, 28), None),
        ("zstd", zstandard.compress(b"12" * 400)[:-5] + bytes(5), "damaged zstd"),
        ("blosc", bytes(15), "damaged blosc: 15 bytes are too few for a header"),
    ],
    ids=["whole", "short", "wide window", "damaged", "cut"],
)
def test_frame_of_a_compressor_is_measured(
    compressor: str, frame: bytes, fault: str | None
) -> None:
    """A compressor's frame has a fault for damage or a wrong size; a very wide one is not read."""
    found = ChunkForm(compressor=compressor, plain_nbytes=len(_ZEROS)).check(frame)

    assert (found or "").startswith(fault or "")
    assert (found is None) == (fault is None)
