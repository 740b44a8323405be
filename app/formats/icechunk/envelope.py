"""Envelope of metadata files: a header, then a zstd frame ("Binary File Format")."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import zstandard

from app.formats.compression import decompress_zstd, zstd_capacity
from app.formats.icechunk.flatbuffers import (
    FlatBufferReader,
    TableType,
    decoded_nbytes,
    required,
)
from app.formats.icechunk.ids import encode_id
from app.formats.reading import DecodeError

HEADER_NBYTES: Final = 39
MAGIC: Final = "ICE🧊CHUNK".encode()
_VERSION_AT: Final = 36
_COMPRESSION_AT: Final = 38
_VERSIONS: Final = (1, 2)

_WRITER: Final = b"shardgate"
_LEVEL: Final = 3


class FileType(IntEnum):
    """Type of a metadata file."""

    SNAPSHOT = 1
    MANIFEST = 2
    TRANSACTION_LOG = 4
    REPO_INFO = 6

    @property
    def spelled(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class FileDecoder:
    """Decodes the file *object_id*, of at most *limit_nbytes* decompressed."""

    object_id: bytes
    limit_nbytes: int

    def open(
        self, data: bytes, file_type: FileType, root: TableType, most_nbytes: int = 2**63
    ) -> tuple[FlatBufferReader, list[Any]]:
        """Open a file, and read its *root*, a table whose first field is the id."""
        limit_nbytes = min(self.limit_nbytes, most_nbytes)
        version, payload = open_envelope(data, file_type, limit_nbytes)
        reader = FlatBufferReader(payload, limit_nbytes, version)
        row = reader.root(root)
        if (found := required(row[0], "id")) != self.object_id:
            wanted = encode_id(self.object_id)
            raise DecodeError(f"it is the {file_type.spelled} {encode_id(found)}, not {wanted}")
        return reader, row


class Envelope(NamedTuple):
    """Content of a file."""

    version: int
    """Version of the specification: 1, or 2 (also for 2.1)."""
    payload: bytes


def open_envelope(data: bytes, file_type: FileType, limit_nbytes: int) -> Envelope:
    """Open a file of *file_type* whose payload, compressed or not, has at most *limit_nbytes*."""
    if len(data) < HEADER_NBYTES or not data.startswith(MAGIC):
        raise DecodeError("not a file of Icechunk: the first bytes are not its magic number")
    version, found, compression = data[_VERSION_AT:HEADER_NBYTES]
    if version not in _VERSIONS:
        raise DecodeError(f"the file follows version {version} of the specification, not 1 or 2")
    if found != file_type:
        raise DecodeError(f"the file is of type {found}, not a {file_type.spelled}")
    if compression > 1:
        raise DecodeError(f"the file is compressed by unknown algorithm {compression}")
    body = memoryview(data)[HEADER_NBYTES:]
    if compression:
        return Envelope(version, decompress_zstd(body, limit_nbytes))
    if len(body) > limit_nbytes:
        raise DecodeError(f"the file holds more than {limit_nbytes} bytes")
    return Envelope(version, bytes(body))


def seal_envelope(file_type: FileType, payload: bytes | bytearray, level: int = _LEVEL) -> bytes:
    """Return a file of *payload*, a FlatBuffer, compressed as the library requires."""
    head = MAGIC + _WRITER.ljust(_VERSION_AT - len(MAGIC)) + bytes((2, file_type, 1))
    return head + zstandard.ZstdCompressor(level).compress(payload)


def memory_nbytes(data: bytes | None, limit_nbytes: int) -> int:
    """Return the bytes of memory that decoding *data* takes at most, or any file if `None`."""
    payload_nbytes = limit_nbytes if data is None else len(data)
    if data is not None and data[_COMPRESSION_AT:HEADER_NBYTES] == b"\1":
        payload_nbytes = zstd_capacity(memoryview(data)[HEADER_NBYTES:], limit_nbytes)
    return payload_nbytes + decoded_nbytes(payload_nbytes, limit_nbytes)


def fits(data: bytes, limit_nbytes: int) -> bool:
    """Return `True` if a file that was just sealed can be opened with *limit_nbytes*."""
    held = zstandard.frame_content_size(memoryview(data)[HEADER_NBYTES:])
    return max(len(data), held) <= limit_nbytes
