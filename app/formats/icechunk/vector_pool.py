"""Vectors of bytes and texts, gathered to be written behind the tables that lead to them."""

from typing import Final

import numpy as np

from app.errors import ConflictError
from app.formats.icechunk.columns import U32s
from app.formats.icechunk.flatbuffer import U32
from app.formats.icechunk.gathering import Gather, Places
from app.formats.reading import DecodeError

MAX_NBYTES: Final = 2**31 - 1
"""Of a FlatBuffer that the library reads."""
_BLOCK: Final = 2**18
_BYTES_MASKS: Final = np.array([0xFFFFFFFF, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_TEXT_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
"""What of the last word of a vector belongs to it, by the remainder of its length."""


class VectorPool:
    """Vectors one after the other, each in whole words of 4 bytes: its length, then its items."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._texts: dict[bytes, int] = {}

    @property
    def words(self) -> U32s:
        """All vectors."""
        return np.frombuffer(b"".join(self._pieces), "<u4")

    def add(self, data: bytes) -> int:
        """Add a vector of bytes, and tell its place."""
        return self._append(U32.pack(len(data)) + data + bytes(-len(data) % 4))

    def add_text(self, text: str) -> int:
        """Add a text, and tell its place; each is there once."""
        data = text.encode()
        if (place := self._texts.get(data)) is None:
            padded = U32.pack(len(data)) + data + bytes(4 - len(data) % 4)
            place = self._texts[data] = self._append(padded)
        return place

    def copy(self, gather: Gather, starts: Places, *, are_texts: bool) -> Places:
        """Add the vectors at *starts*, and tell their places; shared ones stay shared.

        Raises: `DecodeError` where one reaches out of the data.
        """
        distinct, inverse = starts, None
        if not _rises_or_falls(starts):
            distinct, inverse = np.unique(starts, return_inverse=True)
        counts = gather.numbers(distinct, "<u4")
        if (distinct & 3).any():
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        if (distinct + counts + U32.size > len(gather.data)).any():
            raise DecodeError("damaged FlatBuffer: a vector reaches out of it")
        lengths = counts // 4 + 2 if are_texts else (counts + 3) // 4 + 1
        stops = np.cumsum(lengths)
        self._check(4 * int(stops[-1]) if len(stops) else 0)
        words = _copy_words(gather.data, distinct >> 2, lengths, stops)
        words[stops - 1] &= (_TEXT_MASKS if are_texts else _BYTES_MASKS)[counts & 3]
        places = self._append(words.tobytes()) + 4 * (stops - lengths)
        return places if inverse is None else places[inverse]

    def _append(self, data: bytes) -> int:
        self._check(len(data))
        place = self._nbytes
        self._pieces.append(data)
        self._nbytes += len(data)
        return place

    def _check(self, more_nbytes: int) -> None:
        if self._nbytes + more_nbytes > MAX_NBYTES:
            raise ConflictError("a manifest would be larger than can be read: it has to be split")


def _rises_or_falls(starts: Places) -> bool:
    """Tell whether *starts* come one after the other, as writers write them, and so each once."""
    return bool((starts[1:] > starts[:-1]).all() or (starts[1:] < starts[:-1]).all())


def _copy_words(data: bytes, starts: Places, lengths: Places, stops: Places) -> U32s:
    """Copy *lengths* words of *data* from each of *starts*, block after block."""
    words = np.frombuffer(data + bytes(-len(data) % 4) if len(data) % 4 else data, "<u4")
    copied = np.empty(int(stops[-1]) if len(stops) else 0, np.uint32)
    turns = np.searchsorted(stops, np.arange(_BLOCK, len(copied), _BLOCK))
    edges = np.unique(np.concatenate(([0], turns, [len(stops)])))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        begin, end = int(stops[first] - lengths[first]), int(stops[last - 1])
        shifts = starts[first:last] - (stops[first:last] - lengths[first:last])
        at = np.repeat(shifts, lengths[first:last]) + np.arange(begin, end)
        copied[begin:end] = words.take(at, mode="clip")
    return copied
