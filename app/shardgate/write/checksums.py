"""Compute the checksums of a rewritten shard, of which some pieces are ranges of the old one.

The CRC-32C of joined bytes follows from those of their parts. So the old shard is read once, in any
order and with few bytes in memory, for the CRCs of its segments between all edges of ranges.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from crc32c import crc32c

from shardgate.concurrency import bounded_gather
from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.contract import Checksummed
from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.storage.contract import SPAN_NBYTES, Found, ObjectReader, nbytes_of, plan_spans

_CHECKSUM_NBYTES: Final = 4
_RESIDUE: Final = crc32c(bytes(_CHECKSUM_NBYTES))
"""The CRC-32C of any bytes followed by their own CRC-32C."""
_READS_AT_ONCE: Final = 4
_ZEROS: Final = memoryview(bytes(1024**2))

type Segments = Mapping[int, tuple[int, int]]
"""End and CRC of each segment of the old shard, by its start."""


async def write_checksums(
    store: ObjectReader,
    ref: ObjectRef,
    version: ETag | None,
    pieces: Sequence[Piece | Checksummed],
) -> list[Piece]:
    """Return *pieces*, whose ranges are of *version*, with checksums behind `Checksummed` ones.

    Raises: `DamagedError` if the old checksum of bytes that are kept does not match,
    `VersionChangedError`, `StorageError`.
    """
    plain = [each for each in pieces if not isinstance(each, Checksummed)]
    if len(plain) == len(pieces):
        return plain
    covered = [each for each in pieces if isinstance(each, Checksummed)]
    places = [each.replaces for each in covered if each.replaces and any(_kept(each.pieces))]
    spans = plan_spans(part for place in places for part in _split(place))
    edges = sorted({*_edges(covered), *(edge for span in spans for edge in span)})

    async def read(span: ByteRange) -> Segments:
        found = await store.get(ref, span, if_match=version)
        if not isinstance(found, Found) or found.byte_range != span:
            raise VersionChangedError(ref)
        return await asyncio.to_thread(_segments, found.data, span, edges)

    known = await bounded_gather(read, spans, limit=_READS_AT_ONCE)
    segments = {start: segment for each in known for start, segment in each.items()}
    return await asyncio.to_thread(_ChecksumWriter(ref, segments).join, pieces)


def length_of(pieces: Sequence[Piece | Checksummed]) -> int:
    """Return the length of *pieces* in bytes, checksums included."""
    return sum(
        length_of(each.pieces) + _CHECKSUM_NBYTES
        if isinstance(each, Checksummed)
        else nbytes_of(each)
        for each in pieces
    )


@dataclass(frozen=True, slots=True)
class _ChecksumWriter:
    ref: ObjectRef
    segments: Segments

    def join(self, pieces: Sequence[Piece | Checksummed]) -> list[Piece]:
        joined: list[Piece] = []
        for piece in pieces:
            joined += self._seal(piece)[0] if isinstance(piece, Checksummed) else (piece,)
        return joined

    def _seal(self, sealed: Checksummed) -> tuple[list[Piece], int]:
        """Return pieces and checksum, and the CRC of them all; verify the old one first."""
        replaces = sealed.replaces
        if replaces and any(_kept(sealed.pieces)) and self._crc_of(replaces) != _RESIDUE:
            raise DamagedError(self.ref, f"the checksum at the end of {replaces} does not match")
        joined: list[Piece] = []
        crc = 0
        for piece in sealed.pieces:
            match piece:
                case Checksummed():
                    inner, inner_crc = self._seal(piece)
                    joined += inner
                    crc = _append(crc, inner_crc, sum(map(nbytes_of, inner)))
                case ByteRange():
                    joined.append(piece)
                    crc = _append(crc, self._crc_of(piece), piece.length)
                case _:
                    joined.append(piece)
                    crc = crc32c(piece, crc)
        checksum = crc.to_bytes(_CHECKSUM_NBYTES, "little")
        return [*joined, checksum], crc32c(checksum, crc)

    def _crc_of(self, place: ByteRange) -> int:
        crc, at = 0, place.start
        while at < place.stop:
            stop, segment_crc = self.segments[at]
            crc = _append(crc, segment_crc, stop - at)
            at = stop
        return crc


def _append(before: int, crc: int, nbytes: int) -> int:
    """Return the CRC of bytes with that of *before*, and then *nbytes* bytes with that of *crc*.

    The CRC is linear: the bytes after change that of zeros in their place by their own.
    """
    nothing = 0
    for at in range(0, nbytes, len(_ZEROS)):
        zeros = _ZEROS[: nbytes - at]
        before, nothing = crc32c(zeros, before), crc32c(zeros, nothing)
    return before ^ nothing ^ crc


def _kept(pieces: Sequence[Piece | Checksummed]) -> Iterator[ByteRange]:
    for piece in pieces:
        if isinstance(piece, Checksummed):
            yield from _kept(piece.pieces)
        elif isinstance(piece, ByteRange):
            yield piece


def _edges(pieces: Sequence[Piece | Checksummed]) -> Iterator[int]:
    for piece in pieces:
        if isinstance(piece, Checksummed):
            yield from piece.replaces or ()
            yield from _edges(piece.pieces)
        elif isinstance(piece, ByteRange):
            yield from piece


def _split(place: ByteRange) -> Iterator[ByteRange]:
    for start in range(place.start, place.stop, SPAN_NBYTES):
        yield ByteRange(start, min(start + SPAN_NBYTES, place.stop))


def _segments(data: bytes, span: ByteRange, edges: Sequence[int]) -> Segments:
    """Return the segments of *data*, the bytes of *span*, between the sorted *edges*."""
    view = memoryview(data)
    inside = edges[bisect_left(edges, span.start) : bisect_right(edges, span.stop)]
    return {
        start: (stop, crc32c(view[start - span.start : stop - span.start]))
        for start, stop in pairwise(inside)
    }
