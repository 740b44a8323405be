"""Which files of chunks there are, in little memory: there may be millions."""

from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np

from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id

_ID: Final = np.dtype(f"S{OBJECT_ID_NBYTES}")
_LARGEST: Final = 2**64 - 1


class ChunkFiles:
    """The files in the folder ``chunks``, their sizes, and which of them are referred to."""

    def __init__(self, ids: bytes, sizes: "array[int]") -> None:
        found = np.frombuffer(ids, _ID)
        order = np.argsort(found, kind="stable")
        self._ids = found[order]
        self._sizes = np.array(sizes, np.uint64)[order]
        self._is_used = np.zeros(len(found), np.bool_)

    @property
    def unused(self) -> int:
        """How many files nothing refers to that was looked up."""
        return int(np.count_nonzero(~self._is_used))

    def too_short(
        self, chunk_ids: Sequence[bytes], stops: Sequence[int]
    ) -> list[tuple[int, int | None]]:
        """Find which of *chunk_ids* have less than *stops* bytes: their places in the sequence.

        With each comes the size of the file, or `None` if there is no such file.
        """
        if not chunk_ids:
            return []
        wanted = np.frombuffer(b"".join(chunk_ids), _ID)
        needed = np.array([min(stop, _LARGEST) for stop in stops], np.uint64)
        if not len(self._ids):
            return [(at, None) for at in range(len(wanted))]
        at = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
        exists = self._ids[at] == wanted
        self._is_used[at[exists]] = True
        bad = np.flatnonzero(~exists | (self._sizes[at] < needed))
        return [(i, int(self._sizes[at[i]]) if exists[i] else None) for i in bad.tolist()]


async def list_files(listed: AsyncIterator[tuple[str, int]]) -> ChunkFiles:
    """Take those of *listed*, keys and sizes, whose names are ids."""
    ids, sizes = bytearray(), array("Q")
    async for key, size in listed:
        if (chunk_id := decode_id(key.removeprefix("chunks/"))) is not None:
            ids += chunk_id
            sizes.append(size)
    return ChunkFiles(bytes(ids), sizes)
