"""Mesh manifests."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.neuroglancer_precomputed.lookup import MeshManifestDecoder
from app.formats.reading import DecodeError
from tests.formats.neuroglancer_precomputed.case import encode_manifest
from tests.zipped import zipped

_decode = MeshManifestDecoder(is_gzip=False, most_nbytes=2**16)
_inflate = MeshManifestDecoder(is_gzip=True, most_nbytes=2**16)
_lods = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=6), max_size=5)


@given(_lods)
def test_the_fragments_are_as_long_as_their_sizes_together(lods: list[list[int]]) -> None:
    """Of all levels of detail, whatever is in the manifest besides; sums pass 32 bits."""
    manifest = encode_manifest(lods)

    assert _decode(manifest).fragments_nbytes == sum(map(sum, lods))
    assert _inflate(zipped(manifest)).fragments_nbytes == sum(map(sum, lods))


@given(_lods, st.binary(max_size=20))
def test_what_follows_a_manifest_changes_nothing(lods: list[list[int]], more: bytes) -> None:
    """Room for later additions."""
    manifest = encode_manifest(lods)

    assert _decode(manifest + more) == _decode(manifest)


@given(_lods)
def test_a_truncated_manifest_is_refused(lods: list[list[int]]) -> None:
    """At whatever byte it ends, it is not taken for one of fewer fragments."""
    manifest = encode_manifest(lods)
    for length in range(len(manifest)):
        with pytest.raises(DecodeError, match=f"ends after {length} bytes, early"):
            _decode(manifest[:length])


@pytest.mark.parametrize("count", [2, 2**16, 2**31, 2**32 - 1])
def test_absurd_counts_are_refused(count: int) -> None:
    """More levels, or fragments, than there is room for are not read."""
    manifest = encode_manifest([[5]])
    levels = manifest[:24] + struct.pack("<I", count) + manifest[28:]
    fragments = manifest[:44] + struct.pack("<I", count) + manifest[48:]

    for damaged in (levels, fragments):
        with pytest.raises(DecodeError, match="early"):
            _decode(damaged)


@pytest.mark.parametrize(("count", "is_read"), [(1024, True), (1025, False), (5000, False)])
def test_levels_of_detail_are_few(count: int, *, is_read: bool) -> None:
    """Each takes time; a manifest of millions is small once it is gzip."""
    manifest = encode_manifest([[1]] * count)
    if is_read:
        assert _decode(manifest).fragments_nbytes == count
    else:
        with pytest.raises(DecodeError, match=f"is of {count} levels of detail"):
            _decode(manifest)
