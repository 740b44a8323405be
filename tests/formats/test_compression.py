"""`shardgate.formats.compression`: decoding of gzip and other codings within a limit."""

import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.compression import (
    CODINGS,
    announced_nbytes,
    decode_content,
    inflate,
    is_sendable,
    raw_deflate,
)
from shardgate.formats.reading import DecodeError
from tests.support.formats.zip.archives import deflated
from tests.support.zipped import ENCODERS, encoded, zipped

_MOST_NBYTES = 2**20
_contents = st.binary(max_size=2000) | st.integers(0, 2**17).map(bytes)


@given(st.lists(_contents, min_size=1, max_size=5))
def test_gzip_members_are_inflated_in_sequence(contents: list[bytes]) -> None:
    """A gzip file of several members inflates to their concatenation (RFC 1952 §2.2)."""
    data = b"".join(map(zipped, contents))

    assert inflate(data, _MOST_NBYTES) == b"".join(contents)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_truncated_gzip_is_refused(first: bytes, second: bytes) -> None:
    """Gzip data truncated at any byte, except between two members, raises DecodeError."""
    one = zipped(first)
    data = one + zipped(second)
    for length in {*range(len(data))} - {len(one)}:
        with pytest.raises(DecodeError, match="the gzip data ends early"):
            inflate(data[:length], _MOST_NBYTES)


@pytest.mark.parametrize(
    "data",
    [b"plain text", bytes(18), b"\x1f\x8c", b"\x78\x9c\x03\x00\x00\x00\x00\x01",
     zipped(b"data") + b"trailing", zipped(b"data") + bytes(2)],
)  # fmt: skip
def test_other_formats_and_trailing_bytes_are_refused(data: bytes) -> None:
    """Data in another format, or with bytes behind a gzip member, raises DecodeError."""
    with pytest.raises(DecodeError, match="no gzip"):
        inflate(data, _MOST_NBYTES)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_flipped_bit_of_gzip_data_is_detected(content: bytes, data: st.DataObject) -> None:
    """Gzip data with a flipped bit raises DecodeError, unless the bit is padding."""
    damaged = bytearray(zipped(content))
    bit = data.draw(st.integers(8 * 10, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with suppress(DecodeError):  # but for one that pads the data
        assert inflate(bytes(damaged), _MOST_NBYTES) == content


@given(st.integers(0, 2**17), st.integers(1, 5))
def test_limit_applies_to_all_gzip_members_together(most_nbytes: int, count: int) -> None:
    """The limit of inflated bytes counts all members: it is reached exactly, and one more fails."""
    data = b"".join(zipped(bytes(most_nbytes // count)) for _ in range(count))
    spare = zipped(bytes(most_nbytes % count))

    assert inflate(data + spare, most_nbytes) == bytes(most_nbytes)
    with pytest.raises(DecodeError, match=f"more than {most_nbytes} bytes once inflated"):
        inflate(data + spare + zipped(b"x"), most_nbytes)


@pytest.mark.parametrize("most_nbytes", [100, _MOST_NBYTES])
def test_gzip_data_of_very_many_members_are_refused(most_nbytes: int) -> None:
    """Gzip data of one member for each KiB of the limit, and 4,096 more, inflate; others fail."""
    most = 4096 + most_nbytes // 1024

    assert inflate(zipped(b"") * most, most_nbytes) == b""
    with pytest.raises(DecodeError, match="more members than there can be"):
        inflate(zipped(b"") * (most + 1), most_nbytes)


@given(st.sampled_from(list(ENCODERS)), _contents)
def test_content_codings_are_removed(coding: str, content: bytes) -> None:
    """Decoding a content coding returns the content, or fails if it exceeds the limit by a byte."""
    data = encoded(coding, content)

    assert decode_content(coding, data, len(content)) == content
    if content:
        with pytest.raises(DecodeError, match=r"more than|declares"):
            decode_content(coding, data, len(content) - 1)
    if coding in ("gzip", "zstd") and content:
        assert announced_nbytes(coding, data) == len(content)


@given(st.sampled_from(list(ENCODERS)), st.binary(min_size=1, max_size=300), st.data())
def test_truncated_coded_body_is_refused(coding: str, content: bytes, data: st.DataObject) -> None:
    """A body with a content coding is refused without its last bytes."""
    whole = encoded(coding, content)
    length = data.draw(st.integers(1, len(whole) - 1))

    with pytest.raises(DecodeError):
        decode_content(coding, whole[:length], _MOST_NBYTES)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "compress"])
def test_body_without_its_coding_is_refused(coding: str) -> None:
    """A body that does not have its coding, or one without a decoder, is refused."""
    with pytest.raises(DecodeError):
        decode_content(coding, b"plain text", _MOST_NBYTES)


@given(_contents)
def test_deflate_without_its_frame_is_decoded(content: bytes) -> None:
    """Raw DEFLATE without a zlib frame is decoded, as browsers do."""
    assert decode_content("deflate", deflated(content), _MOST_NBYTES) == content


@given(_contents)
def test_raw_deflate_announces_its_size_and_is_checked(content: bytes) -> None:
    """Raw DEFLATE is decoded if its size and its CRC-32 are those that its coding announces."""
    nbytes, crc, data = len(content), zlib.crc32(content), deflated(content)
    coding = raw_deflate(nbytes, crc)

    assert announced_nbytes(coding, data) == nbytes
    assert decode_content(coding, data, nbytes) == content
    for wrong in (raw_deflate(nbytes + 1, crc), raw_deflate(nbytes, crc ^ 1)):
        with pytest.raises(DecodeError, match="bytes once inflated, instead of"):
            decode_content(wrong, data, _MOST_NBYTES)


def test_raw_deflate_beyond_a_limit_is_refused() -> None:
    """Raw DEFLATE that announces more than the limit, or holds more than announced, is refused."""
    data = deflated(bytes(1000))
    with pytest.raises(DecodeError, match="1000 bytes once inflated, more than 999"):
        decode_content(raw_deflate(1000, 0), data, 999)
    with pytest.raises(DecodeError, match="more than 999 bytes once inflated"):
        decode_content(raw_deflate(999, 0), data, _MOST_NBYTES)


def test_raw_deflate_is_no_coding_of_http() -> None:
    """Raw DEFLATE is never sent as such, whatever a client accepts, and no store can name it."""
    coding = raw_deflate(5, 7)

    assert not is_sendable(coding)
    assert all(map(is_sendable, CODINGS))
    assert coding != coding.lower()  # as `content_coding` spells the headers of a store
