"""Compute the checksums of a rewritten shard, of which some pieces are ranges of the old one."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import crc32c

from app.concurrency import bounded_gather
from app.errors import DamagedError, VersionChangedError
from app.formats.contract import Checksummed
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import (
    GAP_NBYTES,
    SPAN_NBYTES,
    Found,
    ObjectReader,
    Spans,
    nbytes_of,
    plan_spans,
)

_CHECKSUM_NBYTES: Final = 4
_RESIDUE: Final = crc32c.crc32c(bytes(_CHECKSUM_NBYTES))
"""The CRC-32C of any bytes followed by their own CRC-32C."""
_READS_AT_ONCE: Final = 4
_MAX_KEPT_NBYTES: Final = 64 * 1024**2
"""Longer reads pass through memory window by window, and the store copies the ranges itself."""


class _Begin(NamedTuple):
    replaces: ByteRange | None
    """Bytes of the old checksum, which is at their end; `None` if it is not verified."""


class _End(NamedTuple):
    """End of the bytes of the checksum that began last."""


class _PlainPiece(NamedTuple):
    piece: Piece


class _OldRange(NamedTuple):
    place: ByteRange
    is_kept: bool
    """Whether it is written; else it is only read to verify an old checksum."""


type _Step = _Begin | _End | _PlainPiece | _OldRange | bytes


@dataclass(frozen=True, slots=True)
class ChecksumWriter:
    """Plan of the reads that put checksums behind `Checksummed` pieces.

    Each window is read as a whole. The bytes of a single window are kept and written; the kept
    ranges of several windows are left to the store to copy.
    """

    windows: Sequence[tuple[Sequence[_Step], Sequence[ByteRange]]]
    """With the spans that contain the old ranges of the window."""

    @classmethod
    def plan(cls, pieces: Sequence[Piece | Checksummed]) -> Self:
        """Plan the reads; for many pieces that may take long."""
        steps = list(_steps_of(pieces))
        whole = plan_spans(_places_in(steps))
        if _length(whole) <= _MAX_KEPT_NBYTES:
            return cls([(steps, whole)])
        return cls([(window, plan_spans(_places_in(window))) for window in _windows_of(steps)])

    @property
    def read_nbytes(self) -> int:
        return max(_length(spans) for _, spans in self.windows)

    @property
    def kept_nbytes(self) -> int:
        """Bytes read that stay in memory until they are written."""
        if len(self.windows) > 1:
            return 0
        steps, _ = self.windows[0]
        return _length(step.place for step in steps if isinstance(step, _OldRange) and step.is_kept)

    async def run(self, store: ObjectReader, ref: ObjectRef, etag: ETag | None) -> list[Piece]:
        """Return bytes with checksums, and ranges of version *etag*; verify old checksums."""

        async def read(span: ByteRange) -> bytes:
            found = await store.get(ref, span, if_match=etag)
            if not isinstance(found, Found) or found.byte_range != span:
                raise VersionChangedError(ref)
            return found.data

        checksums = _Checksums(ref, keeps_ranges=len(self.windows) > 1)
        for steps, spans in self.windows:
            data = await bounded_gather(read, spans, limit=_READS_AT_ONCE)
            await asyncio.to_thread(checksums.add, steps, Spans(spans, data))
        return checksums.pieces


def length_of(pieces: Sequence[Piece | Checksummed]) -> int:
    """Return the length of *pieces* in bytes, checksums included."""
    return sum(
        length_of(each.pieces) + _CHECKSUM_NBYTES
        if isinstance(each, Checksummed)
        else nbytes_of(each)
        for each in pieces
    )


def _length(ranges: Iterable[ByteRange]) -> int:
    return sum(each.length for each in ranges)


class _OpenChecksum:
    """A checksum in progress, and the old one that it replaces, up to the position *at*."""

    def __init__(self, replaces: ByteRange | None) -> None:
        self.replaces = replaces
        self.new = self.old = 0
        self.at = None if replaces is None else replaces.start


class _Checksums:
    def __init__(self, ref: ObjectRef, *, keeps_ranges: bool) -> None:
        self.pieces: list[Piece] = []
        self._ref = ref
        self._keeps_ranges = keeps_ranges
        self._open: list[_OpenChecksum] = []
        """Nested checksums, the outermost first."""
        self._damaged: ByteRange | None = None

    def add(self, steps: Sequence[_Step], read: Spans) -> None:
        for step in steps:
            match step:
                case _Begin(replaces):
                    self._open.append(_OpenChecksum(replaces))
                case _End():
                    self._end()
                case _PlainPiece(piece):
                    self.pieces.append(piece)
                case _OldRange():
                    self._add_old(step, read)
                case _:
                    self._update(step)
                    self.pieces.append(step)

    def _add_old(self, step: _OldRange, read: Spans) -> None:
        place, is_kept = step
        verified = [each for each in self._open if each.at == place.start]
        for data in read.take(place):
            for each in verified:
                each.old = crc32c.crc32c(data, each.old)
            if is_kept:
                self._update(data)
            if is_kept and not self._keeps_ranges:
                self.pieces.append(data)
        for each in verified:
            each.at = place.stop
        if is_kept and self._keeps_ranges:
            self.pieces.append(place)

    def _end(self) -> None:
        ended = self._open.pop()
        if ended.replaces is not None and ended.old != _RESIDUE:
            self._damaged = ended.replaces
        if self._damaged is not None and not self._open:  # report the outermost
            raise DamagedError(
                self._ref, f"the checksum at the end of {self._damaged} does not match"
            )
        checksum = ended.new.to_bytes(_CHECKSUM_NBYTES, "little")
        self._update(checksum)
        self.pieces.append(checksum)

    def _update(self, data: bytes) -> None:
        for each in self._open:
            each.new = crc32c.crc32c(data, each.new)


def _steps_of(pieces: Sequence[Piece | Checksummed], *, is_inside: bool = False) -> Iterator[_Step]:
    for piece in pieces:
        match piece:
            case Checksummed(inner, replaces):
                steps = _steps_of(inner, is_inside=True)
                if replaces is None or not _keeps_old(piece):
                    yield _Begin(None)
                    yield from steps
                else:
                    yield _Begin(replaces)
                    yield from _with_rest(steps, replaces)
                yield _End()
            case _ if not is_inside:
                yield _PlainPiece(piece)
            case ByteRange():
                yield _OldRange(piece, is_kept=True)
            case _:
                yield piece


def _places_in(steps: Iterable[_Step]) -> Iterator[ByteRange]:
    return (step.place for step in steps if isinstance(step, _OldRange))


def _windows_of(steps: Iterable[_Step]) -> Iterator[list[_Step]]:
    """Divide *steps* into windows of about `SPAN_NBYTES` to read, and ranges longer than that."""
    window: list[_Step] = []
    nbytes = end = 0
    for step in steps:
        for part in _split(step) if isinstance(step, _OldRange) else (step,):
            window.append(part)
            if isinstance(part, _OldRange):
                nbytes += part.place.length + min(abs(part.place.start - end), GAP_NBYTES)
                end = part.place.stop
            if nbytes >= SPAN_NBYTES:
                yield window
                window, nbytes = [], 0
    yield window


def _with_rest(steps: Iterator[_Step], whole: ByteRange) -> Iterator[_Step]:
    """Insert the ranges that are not kept; ranges kept in another order are read twice."""
    at = whole.start
    for step in steps:
        if isinstance(step, _OldRange):
            if step.place.start > at:
                yield _OldRange(ByteRange(at, step.place.start), is_kept=False)
            if step.place.start >= at:
                at = step.place.stop
        yield step
    if at < whole.stop:
        yield _OldRange(ByteRange(at, whole.stop), is_kept=False)


def _keeps_old(sealed: Checksummed) -> bool:
    return any(
        _keeps_old(piece) if isinstance(piece, Checksummed) else isinstance(piece, ByteRange)
        for piece in sealed.pieces
    )


def _split(old: _OldRange) -> Iterator[_OldRange]:
    for start in range(old.place.start, old.place.stop, SPAN_NBYTES):
        stop = min(start + SPAN_NBYTES, old.place.stop)
        yield _OldRange(ByteRange(start, stop), old.is_kept)
