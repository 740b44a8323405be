"""`shardgate.formats.icechunk.manifest`: references by their coordinates."""

import gc
import struct
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.manifest import (
    InlineChunk,
    Manifest,
    ManifestDecoder,
    Native,
    Reference,
    Virtual,
)
from shardgate.formats.reading import DecodeError
from shardgate.model import ByteRange, ETag, UnmodifiedSince
from tests.support.formats.icechunk.building import (
    MANIFEST,
    Number,
    Numbers,
    Ref,
    envelope,
    manifest,
)

_ID = b"manifest  id"
_NODE = b"the node"
_CHUNK_ID = b"the chunk id"
_URLS = [f"s3://archive/era5/{n // 7}/file-{n:05d}.nc" for n in range(1000)]
_DICTIONARY = zstandard.train_dictionary(1024, [url.encode() for url in _URLS]).as_bytes()


def _compress(text: bytes, *, told: bool = True) -> bytes:
    trained = zstandard.ZstdCompressionDict(_DICTIONARY)
    return zstandard.ZstdCompressor(dict_data=trained, write_content_size=told).compress(text)


def _decode_payload(payload: bytes) -> Manifest:
    return ManifestDecoder(_ID, 2**26)(envelope(payload, MANIFEST))


def _decode(*refs: Any, **options: Any) -> Manifest:
    return _decode_payload(manifest(_ID, [(_NODE, refs)], **options))


def _native(index: Sequence[int], offset: int = 0) -> Ref:
    return Ref(index=index, chunk_id=_CHUNK_ID, offset=offset, length=1)


def _lookup(ref: Ref, **options: Any) -> Reference | None:
    return _decode(ref, **options).lookup(_NODE, tuple(ref.index))  # type: ignore[arg-type]


def _is(reference: Reference | None, ref: Ref) -> bool:
    """Return whether *reference* equals *ref* as written."""
    start = ref.offset or 0
    byte_range = ByteRange(start, start + (ref.length or 0))
    match reference:
        case Native():
            return reference == (ref.chunk_id, byte_range)
        case Virtual():
            return reference == (ref.location, byte_range, None)
        case InlineChunk(data):
            return data == ref.inline
    return False


_PARTS = st.sampled_from([(0, 0), (7, 0), (2**63 - 2, 1), (None, None)]) | st.tuples(
    st.integers(0, 2**62), st.integers(0, 2**62 - 1)
)
"""Offset and length: absent ones are 0, and the end is 2^63 - 1 at most."""
_any_u32 = st.integers(0, 2**32 - 1)
_far = st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1])
_indexes = st.one_of(
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(_any_u32 | _far, max_size=4),
    st.tuples(*[_far] * 9),
)


@st.composite
def _refs(draw: st.DrawFn) -> Ref:
    index = draw(_indexes)
    if draw(st.booleans()):
        return Ref(index=index, inline=draw(st.binary(max_size=9)))
    offset, length = draw(_PARTS)
    where: Any = {"chunk_id": draw(st.sampled_from([_CHUNK_ID, bytes(12)]))}
    if draw(st.booleans()):
        where = {"location": draw(st.text(max_size=5))}
    return Ref(index=index, offset=offset, length=length, **where)


_arrays = st.tuples(st.sampled_from([b"aaaaaaaa", b"bbbbbbbb"]), st.lists(_refs(), max_size=12))


@settings(max_examples=50)
@given(st.lists(_arrays, max_size=4), st.lists(_any_u32, max_size=3))
def test_lookup_returns_the_written_references(
    arrays: list[tuple[bytes, list[Ref]]], other: list[int]
) -> None:
    """Lookup returns the first reference of each node and coordinates, in any order.

    An array may be listed several times, with references of other dimensions.
    """
    decoded = _decode_payload(manifest(_ID, arrays))
    first: dict[tuple[bytes, tuple[int, ...]], Ref] = {}
    for node_id, refs in arrays:
        for ref in refs:
            assert isinstance(ref.index, Sequence)
            first.setdefault((node_id, tuple(ref.index)), ref)

    for (node_id, coords), ref in first.items():
        assert _is(decoded.lookup(node_id, coords), ref)
    for node_id in (b"aaaaaaaa", b"bbbbbbbb"):
        if other and (node_id, tuple(other)) not in first:
            assert decoded.lookup(node_id, tuple(other)) is None
        for ndim in (1, 2, 3, 4, 9):
            found = [coords for node, coords in first if (node, len(coords)) == (node_id, ndim)]
            assert decoded.coords(node_id, ndim).tolist() == sorted(map(list, found))


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("backwards", [False, True])
def test_references_of_a_sparse_grid_are_found(*, step: int, backwards: bool) -> None:
    """References of a grid with any stride and order are found, and none between them."""
    grid = [(step * i, step * j) for i in range(4) for j in range(5)]
    written = grid[::-1] if backwards else grid
    decoded = _decode(*(_native(coords, offset) for offset, coords in enumerate(written)))

    for offset, coords in enumerate(written):
        assert decoded.lookup(_NODE, coords) == (_CHUNK_ID, (offset, offset + 1))
    for i, j in grid:
        for near in ((i + step * 4, j), (i, j + step * 5), (i - step * 4, j), (-1, j), (i, -1)):
            assert decoded.lookup(_NODE, near) is None
        assert step == 1 or decoded.lookup(_NODE, (i + 1, j)) is None
    assert list(map(tuple, decoded.coords(_NODE, 2).tolist())) == grid


@pytest.mark.parametrize("index", [[], [0]])
def test_scalar_has_one_chunk(index: list[int]) -> None:
    """A scalar has one chunk, which may have a dimension, as old writers gave it."""
    decoded = _decode(_native(index))

    assert decoded.lookup(_NODE, ()) == (_CHUNK_ID, (0, 1))
    assert decoded.coords(_NODE, 0).shape == (1, 0)
    assert decoded.lookup(b"another.", ()) is None
    assert _decode(_native([1])).lookup(_NODE, ()) is None
    assert _decode(_native([0, 0])).coords(_NODE, 0).shape == (0, 0)


def test_empty_manifest_has_no_references() -> None:
    """A manifest without arrays or references has none; one above the limit is refused."""
    for payload in (manifest(_ID, []), manifest(_ID, [(_NODE, [])])):
        decoded = _decode_payload(payload)
        assert decoded.lookup(_NODE, (0,)) is None
        assert not decoded.arrays
        assert decoded.coords(_NODE, 1).shape == (0, 1)
        with pytest.raises(DecodeError, match="more than 20"):
            ManifestDecoder(_ID, 20)(envelope(payload, MANIFEST))


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (manifest(b"another's id", []), "it is the manifest C5Q6YX38CNS2EWS0D5J0"),
        (manifest(None, []), "it has no id"),
        (manifest(_ID, None), "it has no arrays"),
        (manifest(_ID, [(None, [])]), "it has no node_id"),
        (manifest(_ID, [(_NODE, None)]), "it has no refs"),
        (manifest(_ID, [(_NODE, [Ref(index=None, inline=b"")])]), "no coordinates"),
        (manifest(_ID, [(_NODE, [_native([1]), {}])]), "no coordinates"),
        (b"", "leads out"),
        (manifest(_ID, [], dictionary=b"\x37\xa4\x30\xec" + bytes(20)), "dictionary"),
    ],
)
def test_manifest_without_a_required_field_is_refused(payload: bytes, fault: str) -> None:
    """A manifest with another id, or without a required field, raises DecodeError."""
    with pytest.raises(DecodeError, match=fault):
        _decode_payload(payload)


@pytest.mark.parametrize(
    ("ref", "fault"),
    [
        (Ref(index=[1]), "neither inline nor chunk_id nor location"),
        (Ref(index=[1], inline=b"", chunk_id=_CHUNK_ID), "both inline and chunk_id"),
        (Ref(index=[1], chunk_id=_CHUNK_ID, location="s3://a/b"), "both chunk_id and location"),
        (
            Ref(index=[1], inline=b"", chunk_id=_CHUNK_ID, location="", compressed_location=b""),
            "both inline and chunk_id and location and compressed_location",
        ),
        (Ref(index=[1], chunk_id=_CHUNK_ID, offset=2**64 - 1, length=2), r"past 2\^63"),
        (Ref(index=[1], location="a:b", offset=2**63, length=2**63 + 1), r"past 2\^63"),
        (Ref(index=[1], location=b"s3://\xff/a"), "not valid UTF-8"),
        (Ref(index=[1], location="x" * 10000), "too long"),
        (Ref(index=[1], location="a:b", checksum_etag=b"\xff"), "not valid UTF-8"),
        (Ref(index=[1], location="a:b", checksum_etag="x" * 10000), "too long"),
        *(
            (Ref(index=[1], location="a:b", checksum_etag=etag), "no strong entity tag")
            for etag in ('W/"abc"', "W/abc", "a b", 'a"b', "a\r\nX: y", "\x7f", "\0", "\u0100")
        ),
    ],
)
def test_contradictory_reference_raises_decode_error(ref: Ref, fault: str) -> None:
    """Lookup of a contradictory reference raises DecodeError; those beside it are found."""
    decoded = _decode(_native([0]), ref, _native([2]))

    with pytest.raises(DecodeError, match=rf"chunk \(1,\) is damaged: .*{fault}"):
        decoded.lookup(_NODE, (1,))
    assert isinstance(decoded.lookup(_NODE, (0,)), Native)
    assert isinstance(decoded.lookup(_NODE, (2,)), Native)


@pytest.mark.parametrize(
    ("etag", "last_modified", "checksum"),
    [(None, None, None), (None, 0, None), (None, 1, UnmodifiedSince(1)),
     (None, 2**32 - 1, UnmodifiedSince(2**32 - 1)), ("abc-1", None, ETag('"abc-1"')),
     ('"abc-1"', None, ETag('"abc-1"')), ("!#~\x80\xff", None, ETag('"!#~\x80\xff"')),
     ("abc", 7, ETag('"abc"')), ("*", None, None)],
)  # fmt: skip
def test_checksum_is_decoded_as_a_condition(
    etag: str | None, last_modified: int | None, checksum: object
) -> None:
    """A checksum is decoded as a quoted ETag or a time; the ETag has precedence, ``*`` is none."""
    found = _lookup(
        Ref(
            index=[0], location="s3://a/b", checksum_etag=etag, checksum_last_modified=last_modified
        )
    )

    assert isinstance(found, Virtual)
    assert found.checksum == checksum
    assert type(found.checksum) is type(checksum)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (_compress(_URLS[5].encode()), {"dictionary": _DICTIONARY, "algorithm": 1}),
        (_compress(_URLS[5].encode()), {"dictionary": _DICTIONARY}),
        (_compress(_URLS[5].encode(), told=False), {"dictionary": _DICTIONARY}),
        (zstandard.compress(_URLS[5].encode()), {"dictionary": _DICTIONARY}),
        (_URLS[5].encode(), {"algorithm": 0}),
        (_URLS[5].encode(), {"algorithm": 0, "dictionary": _DICTIONARY}),
    ],
    ids=["zstd", "default", "unsized", "without dictionary", "raw", "raw with dictionary"],
)
def test_compressed_location_is_decoded(data: bytes, options: dict[str, Any]) -> None:
    """A compressed location is decoded by the manifest's algorithm, by default zstd."""
    found = _lookup(Ref(index=[0], compressed_location=data, location="other"), **options)

    assert isinstance(found, Virtual)
    assert found.location == _URLS[5]


def test_locations_beyond_those_kept_are_decoded() -> None:
    """Compressed locations are decoded, also more of them than are kept."""
    refs = [
        Ref(index=[number], compressed_location=_compress(url.encode()))
        for number, url in enumerate(_URLS)
    ]
    decoded = _decode(*refs, dictionary=_DICTIONARY)

    for number, url in [*enumerate(_URLS), (0, _URLS[0])]:
        found = decoded.lookup(_NODE, (number,))
        assert isinstance(found, Virtual)
        assert found.location == url


@pytest.mark.parametrize(
    ("data", "options", "fault"),
    [
        (_compress(b"a:b"), {}, "no location_dictionary"),
        (_compress(b"a:b"), {"dictionary": b""}, "no location_dictionary"),
        (_compress(b"a:b"), {"algorithm": 2, "dictionary": _DICTIONARY}, "unknown algorithm 2"),
        (b"", {"dictionary": _DICTIONARY}, "cannot be decompressed"),
        (b"a:b", {"dictionary": _DICTIONARY}, "cannot be decompressed"),
        (_compress(b"a:b")[:-1], {"dictionary": _DICTIONARY}, "cannot be decompressed"),
        (_compress(b"a:b") * 2, {"dictionary": _DICTIONARY}, "cannot be decompressed"),
        (_compress(b"x" * 1025), {"dictionary": _DICTIONARY}, "more than 1024"),
        (_compress(bytes(2**24)), {"dictionary": _DICTIONARY}, "more than 1024"),
        (_compress(bytes(2**24), told=False), {"dictionary": _DICTIONARY}, "decompressed"),
        (
            struct.pack("<IBQ", 0xFD2FB528, 0xE0, 2**62) + b"\1\0\0",
            {"dictionary": _DICTIONARY},
            "more than 1024",
        ),
        (_compress(b"\xff"), {"dictionary": _DICTIONARY}, "not valid UTF-8"),
        (b"\xff", {"algorithm": 0}, "not valid UTF-8"),
        (b"x" * 10**4, {"algorithm": 0}, "too long"),
    ],
)
def test_invalid_compressed_location_is_refused(
    data: bytes, options: dict[str, Any], fault: str
) -> None:
    """A compressed location that is invalid or above 1024 bytes raises DecodeError."""
    with pytest.raises(DecodeError, match=fault):
        _lookup(Ref(index=[0], compressed_location=data), **options)


def test_references_with_different_vtables_are_found() -> None:
    """References with 70 different vtables, more than are kept, are found."""
    refs = [_native([0], 5).table | {9 + n: Number("B", 1)} for n in range(70)]
    for n, ref in enumerate(refs):
        ref[0] = Numbers("I", [n])
    decoded = _decode(*refs)

    for n in range(70):
        assert decoded.lookup(_NODE, (n,)) == (_CHUNK_ID, (5, 6))


def test_manifest_of_excessive_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of excessive coordinates for its size, or too many arrays, raises DecodeError."""
    index = Numbers("I", range(50000))
    refs = [_native([3]).table]
    arrays = [(n.to_bytes(8), refs) for n in range(2**10 + 1)]
    monkeypatch.setattr("shardgate.formats.icechunk.manifest._MAX_ARRAYS", 2**10)

    with pytest.raises(DecodeError, match="for its size"):
        _decode(*(Ref(index=index, inline=b"") for _ in range(2000)))
    assert len(_decode_payload(manifest(_ID, arrays[1:])).arrays) == 2**10
    with pytest.raises(DecodeError, match="more than 1024 arrays"):
        _decode_payload(manifest(_ID, arrays))


def test_reference_of_100_000_dimensions_is_found() -> None:
    """A reference with 100,000 dimensions is found by its coordinates."""
    indexes = [[0] * 10**5, [2**32 - 1] * 10**5]
    decoded = _decode(_native([1]), *(_native(index, 5) for index in indexes))

    assert decoded.lookup(_NODE, (1,)) == (_CHUNK_ID, (0, 1))
    assert decoded.lookup(_NODE, tuple(indexes[1])) == (_CHUNK_ID, (5, 6))
    assert decoded.lookup(_NODE, (1, *indexes[1][1:])) is None


def _try_all(file: bytes) -> None:
    """Decode *file* and look up all keys, expecting no error but `DecodeError`."""
    try:
        decoded = ManifestDecoder(_ID, 2**20)(file)
    except DecodeError:
        return
    for node_id, asked in product({_NODE, *(each for each, _ in decoded.arrays)}, _ASKED):
        with suppress(DecodeError):
            decoded.lookup(node_id, asked)
        for row in decoded.coords(node_id, len(asked))[:20].tolist():
            with suppress(DecodeError):
                assert decoded.lookup(node_id, tuple(row)) is not None


_KINDS = [
    _native([0, 0], 7),
    Ref(index=[0, 1], location="s3://a/b", offset=1, length=2, checksum_etag="abc"),
    Ref(index=[0, 2], inline=b"inline"),
    Ref(index=[1, 0], compressed_location=_compress(b"s3://c/d"), checksum_last_modified=5),
    Ref(index=[9, 2**32 - 1], inline=b""),
    _native([2]),
]
_MIXED = manifest(_ID, [(_NODE, _KINDS), (b"node two", _KINDS[:2])], dictionary=_DICTIONARY)
_ASKED = [(0, 0), (0, 1), (0, 2), (1, 0), (9, 2**32 - 1), (2,), (), (0, 0, 0)]


@pytest.mark.parametrize(
    ("numbers", "step"),
    [
        ([1, 4, 2**31], 4),
        pytest.param([0, 1, 2, 2**16, 2**31 - 1, 2**32 - 8, 2**32 - 1], 2, marks=pytest.mark.soak),
    ],
)
def test_replaced_numbers_raise_nothing_but_decode_error(numbers: list[int], step: int) -> None:
    """A manifest with any number replaced is read or raises DecodeError."""
    for at, number in product(range(0, len(_MIXED) - 3, step), numbers):
        damaged = bytearray(_MIXED)
        damaged[at : at + 4] = struct.pack("<I", number)
        _try_all(envelope(bytes(damaged), MANIFEST))


def _weigh(payload: bytes) -> tuple[Manifest, int]:
    """Decode *payload*, and measure the memory that it keeps."""
    file = envelope(payload, MANIFEST)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        decoded = ManifestDecoder(_ID, 2**24)(file)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return decoded, after - before


@pytest.mark.parametrize("step", [1, 9])
def test_size_of_a_manifest_is_its_memory(step: int) -> None:
    """The counted size of a manifest is its measured memory, below 75 bytes per reference."""
    refs = [_native([n // 200 * step, n % 200 * step]) for n in range(4000)]
    decoded, nbytes = _weigh(manifest(_ID, [(_NODE, refs)]))
    arrays = [(n.to_bytes(8), [_native([n + 1000] * min(step, 4))]) for n in range(500)]
    many, many_nbytes = _weigh(manifest(_ID, arrays))

    assert nbytes == pytest.approx(decoded.nbytes, rel=0.05)
    assert nbytes < 75 * len(refs)
    assert many_nbytes == pytest.approx(many.nbytes, rel=0.1)


def test_dropped_manifest_is_freed_without_garbage_collection() -> None:
    """A dropped manifest is part of no reference cycle."""
    decoded = _decode(*_KINDS, dictionary=_DICTIONARY)
    for asked in _ASKED:
        decoded.lookup(_NODE, asked)
    gc.collect()
    gc.disable()
    try:
        del decoded
        assert gc.collect() == 0
    finally:
        gc.enable()
