"""Checksums over pieces of a shard, of which some are still where they were."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import crc32c

from app.concurrency import bounded_gather
from app.errors import DamagedError, VersionChangedError
from app.formats.contract import Sealed
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.resolve.steps import Begin, End, Old, Outside, Step, places_in, steps_of, windows_of
from app.storage.contract import Found, ObjectReader
from app.storage.spans import Spans, nbytes_of, plan_spans

_CHECKSUM_NBYTES: Final = 4
_OF_SEALED: Final = crc32c.crc32c(bytes(_CHECKSUM_NBYTES))
"""The checksum of whatever has its own behind it."""
_READS_AT_ONCE: Final = 4
_KEPT_NBYTES: Final = 64 * 1024**2
"""Where more is to be read it goes through memory bit by bit, and the store copies it then."""


@dataclass(frozen=True, slots=True)
class Sealing:
    """How checksums are put behind what is `Sealed`: what is read for that, and how much at once.

    Each window is read whole. If there is just one, its bytes are kept to be written; ranges of
    several stay ranges.
    """

    windows: Sequence[tuple[Sequence[Step], Sequence[ByteRange]]]
    """With the spans that hold the ranges in them."""

    @classmethod
    def of(cls, pieces: Sequence[Piece | Sealed]) -> Self:
        """Plan; it may take long."""
        steps = list(steps_of(pieces))
        whole = plan_spans(places_in(steps))
        if _length(whole) <= _KEPT_NBYTES:
            return cls([(steps, whole)])
        return cls([(window, plan_spans(places_in(window))) for window in windows_of(steps)])

    @property
    def read_nbytes(self) -> int:
        """How many bytes that were read are in memory at a time."""
        return max(_length(spans) for _, spans in self.windows)

    @property
    def kept_nbytes(self) -> int:
        """How many bytes that were read stay in memory until they are written."""
        if len(self.windows) > 1:
            return 0
        steps, _ = self.windows[0]
        return _length(step.place for step in steps if isinstance(step, Old) and step.is_kept)

    async def seal(self, store: ObjectReader, ref: ObjectRef, etag: ETag | None) -> list[Piece]:
        """Give bytes, and ranges of the version *etag* of *ref*; other versions are never read.

        Raises: `DamagedError` where the old checksum is not that of what it was over, of which a
        part would be kept; `VersionChangedError`, `StorageError`.
        """
        checksums = _Checksums(ref, keeps_ranges=len(self.windows) > 1)
        for steps, spans in self.windows:
            read = await bounded_gather(
                lambda span: _read(store, ref, span, etag), spans, limit=_READS_AT_ONCE
            )
            await asyncio.to_thread(checksums.take, steps, Spans(spans, read))
        return checksums.pieces


def length_of(pieces: Sequence[Piece | Sealed]) -> int:
    """Tell how many bytes *pieces* make."""
    return sum(
        length_of(each.pieces) + _CHECKSUM_NBYTES if isinstance(each, Sealed) else nbytes_of(each)
        for each in pieces
    )


class _Open:
    """Checksums so far, of what has begun: the new one, and the old one up to where it has got."""

    def __init__(self, replaces: ByteRange | None) -> None:
        self.replaces = replaces
        self.new = self.old = 0
        self.at = None if replaces is None else replaces.start

    @property
    def is_damaged(self) -> bool:
        """Whether all of what is replaced went by, and was not as its checksum says."""
        return self.replaces is not None and self.old != _OF_SEALED


class _Checksums:
    """Goes through steps, and notes what is to be written."""

    def __init__(self, ref: ObjectRef, *, keeps_ranges: bool) -> None:
        self.pieces: list[Piece] = []
        self._ref = ref
        self._keeps_ranges = keeps_ranges
        self._open: list[_Open] = []
        """What is in one another."""
        self._damaged: ByteRange | None = None

    def take(self, steps: Sequence[Step], read: Spans) -> None:
        """Go on with *steps*, whose ranges were *read*.

        Raises: `DamagedError`.
        """
        for step in steps:
            match step:
                case Begin(replaces):
                    self._open.append(_Open(replaces))
                case End():
                    self._end()
                case Outside(piece):
                    self.pieces.append(piece)
                case Old():
                    self._take_old(step, read)
                case _:
                    self._sum(step)
                    self.pieces.append(step)

    def _take_old(self, step: Old, read: Spans) -> None:
        place, is_kept = step
        goes_on = [each for each in self._open if each.at == place.start]
        for bit in read.take(place):
            for each in goes_on:
                each.old = crc32c.crc32c(bit, each.old)
            if is_kept:
                self._sum(bit)
            if is_kept and not self._keeps_ranges:
                self.pieces.append(bit)
        for each in goes_on:
            each.at = place.stop
        if is_kept and self._keeps_ranges:
            self.pieces.append(place)

    def _end(self) -> None:
        ended = self._open.pop()
        if ended.is_damaged:
            self._damaged = ended.replaces
        if self._damaged is not None and not self._open:  # that is the outermost
            raise DamagedError(
                self._ref, f"the checksum at the end of {self._damaged} does not match"
            )
        checksum = ended.new.to_bytes(_CHECKSUM_NBYTES, "little")
        self._sum(checksum)
        self.pieces.append(checksum)

    def _sum(self, bit: bytes) -> None:
        for each in self._open:
            each.new = crc32c.crc32c(bit, each.new)


def _length(ranges: Iterable[ByteRange]) -> int:
    return sum(each.length for each in ranges)


async def _read(store: ObjectReader, ref: ObjectRef, span: ByteRange, etag: ETag | None) -> bytes:
    found = await store.get(ref, span, if_match=etag)
    if not isinstance(found, Found) or found.byte_range != span:
        raise VersionChangedError(ref)
    return found.data
