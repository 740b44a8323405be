"""The header and the compression of every metadata file."""

import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.icechunk.flatbuffers import FileType, open_envelope
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk.building import MANIFEST, REPO_INFO, SNAPSHOT, envelope, header

_LIMIT = 2**20
_PAYLOAD = bytes(range(256)) * 3000
"""A payload of several zstd blocks."""


def _frame(payload: bytes, *, told: bool = True, checksum: bool = False) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=told, write_checksum=checksum)
    return compressor.compress(payload)


def _streamed(payload: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(payload) + compressor.flush()


def _skippable(data: bytes, kind: int = 0) -> bytes:
    return struct.pack("<II", 0x184D2A50 + kind, len(data)) + data


def _open(body: bytes, limit_nbytes: int = _LIMIT) -> bytes:
    return open_envelope(header(SNAPSHOT) + body, FileType.SNAPSHOT, limit_nbytes).payload


@given(st.binary(max_size=300), st.sampled_from([1, 2]), st.sampled_from([0, 1]))
def test_payload_of_an_envelope_is_returned(payload: bytes, version: int, compression: int) -> None:
    """The payload of a file of either version, compressed or not, is returned."""
    data = envelope(payload, MANIFEST, version=version, compression=compression)

    assert open_envelope(data, FileType.MANIFEST, 300) == (version, payload)


@pytest.mark.parametrize(
    "body",
    [
        _frame(_PAYLOAD),
        _frame(_PAYLOAD, told=False),
        _frame(_PAYLOAD, checksum=True),
        _streamed(_PAYLOAD),
        _frame(_PAYLOAD[:500]) + _streamed(_PAYLOAD[500:]),
        _skippable(b"x") + _frame(_PAYLOAD) + _skippable(b"", 15),
        _frame(b"") + _frame(b"", told=False) + _frame(_PAYLOAD, checksum=True) + _frame(b""),
    ],
    ids=["sized", "unsized", "checksum", "streamed", "two", "skippable", "empty"],
)
def test_zstd_of_several_frames_is_decompressed(body: bytes) -> None:
    """Several zstd frames, with or without sizes and checksums, are decompressed."""
    assert _open(body) == _PAYLOAD


@pytest.mark.parametrize("is_full", [True, False])
def test_truncated_file_is_refused(*, is_full: bool) -> None:
    """A file truncated at any byte, with or without size and checksum, raises DecodeError."""
    data = header(SNAPSHOT) + _frame(b"payload" * 9, told=is_full, checksum=is_full)

    for stop in (*range(39), *range(40, len(data))):
        with pytest.raises(DecodeError):
            open_envelope(data[:stop], FileType.SNAPSHOT, _LIMIT)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not a file of Icechunk"),
        (b"\0" + header(SNAPSHOT)[1:], "not a file of Icechunk"),
        (header(SNAPSHOT, version=0), "version 0"),
        (header(SNAPSHOT, version=3), "version 3"),
        (header(MANIFEST), "type 2, not a snapshot"),
        (header(REPO_INFO), "type 6"),
        (header(SNAPSHOT, compression=2), "algorithm 2"),
    ],
)
def test_invalid_header_is_refused(data: bytes, fault: str) -> None:
    """A header of another magic, version, file type or algorithm raises DecodeError."""
    with pytest.raises(DecodeError, match=fault):
        open_envelope(data, FileType.SNAPSHOT, _LIMIT)


@pytest.mark.parametrize(
    "body",
    [
        _frame(_PAYLOAD, checksum=True)[:-1] + b"!",
        _frame(_PAYLOAD) + b"\0",
        _frame(_PAYLOAD) + b"garbage",
        _frame(_PAYLOAD)[:-9] + b"\xff" * 9,
        b"(\xb5/\xfd" + b"\xff" * 40,
        _skippable(b"abc")[:-1],
        zstandard.ZstdCompressor(
            dict_data=zstandard.ZstdCompressionDict(
                zstandard.train_dictionary(
                    1024, [b"s3://bucket/file-%d.nc" % n for n in range(999)]
                ).as_bytes()
            )
        ).compress(b"s3://bucket/file-7.nc"),
    ],
    ids=["checksum", "tail", "no frame", "block", "kind", "skip", "dictionary"],
)
def test_damaged_zstd_is_refused(body: bytes) -> None:
    """Zstd with a wrong checksum, trailing bytes, bad block or dictionary raises DecodeError."""
    with pytest.raises(DecodeError, match="damaged zstd"):
        _open(body)


@pytest.mark.parametrize("told", [True, False])
def test_payload_above_the_limit_is_refused(*, told: bool) -> None:
    """A payload of the limit's length is returned; a longer one raises DecodeError."""
    half = _frame(_PAYLOAD[:9], told=told)
    body = half + _frame(_PAYLOAD[9:], told=told)

    assert _open(body, len(_PAYLOAD)) == _PAYLOAD
    for refused in (body, _frame(_PAYLOAD, told=told)):
        with pytest.raises(DecodeError, match="more than"):
            _open(refused, len(_PAYLOAD) - 1)
    with pytest.raises(DecodeError, match="more than 4 bytes"):
        open_envelope(envelope(b"12345", SNAPSHOT, compression=0), FileType.SNAPSHOT, 4)
