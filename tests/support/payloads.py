"""Payloads of changed chunks, read from their columns."""

from collections.abc import Iterator

from shardgate.formats.icechunk.chunk_tables import vector_at
from shardgate.formats.icechunk.manifest import InlineChunk, Native, PayloadKind, Reference, Virtual
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.model import ByteRange, ETag, UnmodifiedSince


def references(payloads: Payloads) -> list[Reference | None]:
    """Return the reference of each chunk, or `None` for a deleted one."""
    return list(_read(payloads))


def _read(payloads: Payloads) -> Iterator[Reference | None]:
    data = payloads.data
    for start, length, value, etag, modified, chunk_id, kind in payloads.rows.tolist():
        match kind:
            case PayloadKind.GONE:
                yield None
            case PayloadKind.NATIVE:
                yield Native(chunk_id, ByteRange(start, start + length))
            case PayloadKind.INLINE:
                yield InlineChunk(vector_at(data, value))
            case _:
                checksum = UnmodifiedSince(modified) if modified else None
                version = ETag(vector_at(data, etag).decode()) if etag else checksum
                location = vector_at(data, value).decode()
                yield Virtual(location, ByteRange(start, start + length), version)
