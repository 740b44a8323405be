"""The ids of the chunk files that manifests refer to, in little memory: there may be millions."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import Buffer, required
from app.formats.icechunk.gathering import Gather, Places
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id

type Ids = NDArray[Any]
"""Ids of objects, 12 bytes each."""

_ID: Final = np.dtype(f"S{OBJECT_ID_NBYTES}")
_MAX_NBYTES: Final = 2**31 - 1
_CHUNK_ID_AT: Final = 4 + 2 * 4
"""Where a vtable tells of the field `chunk_id`, the fifth."""
_BLOCK: Final = 2**16
_PENDING: Final = 2**20


@dataclass(frozen=True, slots=True)
class ChunkIds:
    """The chunk files that one manifest refers to."""

    ids: Ids

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        return self.ids.nbytes


@dataclass(frozen=True, slots=True)
class ChunkIdsDecoder:
    """Reads of the manifest *object_id*, whose payload may have *limit_nbytes*, nothing else."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> ChunkIds:
        """Take the ids out of all references, also of those that no reader ever finds.

        Raises: `DecodeError`.
        """
        limit_nbytes = min(self.limit_nbytes, _MAX_NBYTES)
        payload = open_envelope(data, FileType.MANIFEST, limit_nbytes).payload
        root, gather = Buffer(payload).root, Gather(payload)
        check_object_id(root, "manifest", encode_id(self.object_id))
        required(root.vector(1, 4), "arrays")
        found = [np.empty(0, _ID)]
        for array in root.tables(1):
            start, count = required(array.vector(1, 4), "refs")
            for first in range(0, count, _BLOCK):
                rows = np.arange(first, min(first + _BLOCK, count), dtype=np.int64)
                found.append(_chunk_ids(gather, start + 4 * rows))
        return ChunkIds(np.unique(np.concatenate(found)))


def _chunk_ids(gather: Gather, slots: Places) -> Ids:
    """Read the field of those references, found by the offsets at *slots*, that have it."""
    tables = slots + gather.numbers(slots, "<u4")
    vtables, kinds = np.unique(tables - gather.numbers(tables, "<i4"), return_inverse=True)
    fields = np.zeros(len(vtables), np.int64)
    tells = gather.numbers(vtables, "<u2") >= _CHUNK_ID_AT + 2
    fields[tells] = gather.numbers(vtables[tells] + _CHUNK_ID_AT, "<u2")
    offsets = fields[kinds]
    return gather.raw((tables + offsets)[offsets > 0], _ID.str)


class UsedChunks:
    """A set of ids that grows."""

    def __init__(self) -> None:
        self._sorted: Ids = np.empty(0, _ID)
        self._added: list[Ids] = []
        self._pending = 0

    def add(self, ids: Ids) -> None:
        """Add *ids*."""
        self._added.append(ids)
        self._pending += len(ids)
        if self._pending > max(_PENDING, len(self._sorted) // 2):
            self._settle()

    def hold(self, ids: list[bytes]) -> NDArray[np.bool_]:
        """Tell which of *ids* are in the set."""
        self._settle()
        wanted = np.frombuffer(b"".join(ids), _ID)
        if not len(self._sorted):
            return np.zeros(len(wanted), np.bool_)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        held: NDArray[np.bool_] = self._sorted[at] == wanted
        return held

    def _settle(self) -> None:
        if self._added:
            self._sorted = np.unique(np.concatenate((self._sorted, *self._added)))
            self._added, self._pending = [], 0
