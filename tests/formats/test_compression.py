"""`shardgate.formats.compression`: gzip and other codings, and not more of it than is allowed."""

import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.compression import announced_nbytes, decode_content, inflate, inflated_nbytes
from shardgate.formats.reading import DecodeError
from tests.support.zipped import ENCODERS, encoded, zipped

_MOST_NBYTES = 2**20
_contents = st.binary(max_size=2000) | st.integers(0, 2**17).map(bytes)


@given(st.lists(_contents, min_size=1, max_size=5))
def test_members_are_inflated_one_after_the_other(contents: list[bytes]) -> None:
    """A gzip file may be several, one behind the other (RFC 1952 §2.2)."""
    data = b"".join(map(zipped, contents))

    assert inflate(data, _MOST_NBYTES) == b"".join(contents)


@given(_contents)
def test_a_member_tells_how_much_it_holds(content: bytes) -> None:
    """In its last four bytes (RFC 1952 §2.3.1)."""
    assert inflated_nbytes(zipped(content)) == len(content)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_what_ends_early_is_refused(first: bytes, second: bytes) -> None:
    """At whatever byte, except between two members."""
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
def test_what_is_no_gzip_is_refused(data: bytes) -> None:
    """Neither another format nor anything behind a member passes."""
    with pytest.raises(DecodeError, match="no gzip"):
        inflate(data, _MOST_NBYTES)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_of_the_data_is_noticed(content: bytes, data: st.DataObject) -> None:
    """The checksum and the size at the end are checked."""
    damaged = bytearray(zipped(content))
    bit = data.draw(st.integers(8 * 10, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with suppress(DecodeError):  # but for one that pads the data
        assert inflate(bytes(damaged), _MOST_NBYTES) == content


@given(st.integers(0, 2**17), st.integers(1, 5))
def test_the_limit_is_one_of_all_members_together(most_nbytes: int, count: int) -> None:
    """So much is inflated, and not a byte more."""
    data = b"".join(zipped(bytes(most_nbytes // count)) for _ in range(count))
    spare = zipped(bytes(most_nbytes % count))

    assert inflate(data + spare, most_nbytes) == bytes(most_nbytes)
    with pytest.raises(DecodeError, match=f"more than {most_nbytes} bytes once inflated"):
        inflate(data + spare + zipped(b"x"), most_nbytes)


def test_a_great_many_members_are_read() -> None:
    """Two megabytes of empty ones would be work of minutes if each cost what is left."""
    assert inflate(zipped(b"") * 100_000, 100) == b""


@given(st.sampled_from(list(ENCODERS)), _contents)
def test_content_codings_are_removed(coding: str, content: bytes) -> None:
    """Decoding returns all of the content, or fails if that is a byte longer than the limit."""
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
    raw = zlib.compressobj(wbits=-15)
    data = raw.compress(content) + raw.flush()

    assert decode_content("deflate", data, _MOST_NBYTES) == content
