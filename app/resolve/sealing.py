"""Checksums over pieces of a shard, of which some are still where they were."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import crc32c

from app.errors import VersionChangedError
from app.formats.writing import Sealed
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import Found, ObjectReader
from app.storage.parts import nbytes_of
from app.storage.spans import assemble, plan_spans
from app.storage.together import together

_CHECKSUM_NBYTES: Final = 4
_READS_AT_ONCE: Final = 4


async def seal(
    store: ObjectReader, ref: ObjectRef, etag: ETag | None, pieces: Sequence[Piece | Sealed]
) -> list[Piece]:
    """Turn what is `Sealed` into bytes; ranges in it are read from the version *etag* of *ref*.

    Raises: `VersionChangedError`, `StorageError`.
    """
    spans = plan_spans(_ranges(piece for piece in pieces if isinstance(piece, Sealed)))
    reads = [partial(_read, store, ref, span, etag) for span in spans]
    read = await together(_READS_AT_ONCE, reads)

    def sealed(piece: Sealed) -> bytes:
        inside = [sealed(each) if isinstance(each, Sealed) else each for each in piece.pieces]
        body = assemble(inside, spans, read)
        return body + crc32c.crc32c(body).to_bytes(_CHECKSUM_NBYTES, "little")

    return [sealed(piece) if isinstance(piece, Sealed) else piece for piece in pieces]


def length_of(pieces: Sequence[Piece | Sealed]) -> int:
    """Tell how many bytes *pieces* make."""
    return sum(
        length_of(each.pieces) + _CHECKSUM_NBYTES if isinstance(each, Sealed) else nbytes_of(each)
        for each in pieces
    )


def _ranges(sealed: Iterator[Sealed]) -> Iterator[ByteRange]:
    """Give all ranges that are to be read."""
    for each in sealed:
        for piece in each.pieces:
            if isinstance(piece, ByteRange):
                yield piece
        yield from _ranges(piece for piece in each.pieces if isinstance(piece, Sealed))


async def _read(store: ObjectReader, ref: ObjectRef, span: ByteRange, etag: ETag | None) -> bytes:
    found = await store.get(ref, span, if_match=etag)
    if not isinstance(found, Found) or found.byte_range != span:
        raise VersionChangedError(ref)
    return found.data
