"""Manifests of multi-resolution meshes, read for the size of their fragments only."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.formats.compression import inflate
from app.formats.reading import DecodeError

_UINT32_NBYTES: Final = 4
_NUM_LODS_AT: Final = 24
"""After chunk_shape and grid_origin."""
_LOD_NBYTES: Final = 16
"""A scale and the three coordinates of a vertex offset."""
_POSITION_NBYTES: Final = 12
_MAX_LODS: Final = 1024
"""Each takes time, and halves the resolution: a few dozen are possible."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Size of the fragment data, which lies right before the manifest in the shard."""

    fragments_nbytes: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ManifestDecoder:
    """Decodes a manifest ("Encoded manifest format" of the mesh documents)."""

    is_gzip: bool
    most_nbytes: int

    def __call__(self, data: bytes) -> Manifest:
        """Decode *data*."""
        if self.is_gzip:
            data = inflate(data, self.most_nbytes)
        (num_lods,) = map(int, _uint32s(data, 1, _NUM_LODS_AT))
        at = _NUM_LODS_AT + _UINT32_NBYTES + num_lods * _LOD_NBYTES
        counts = _uint32s(data, num_lods, at)
        if num_lods > _MAX_LODS:
            raise DecodeError(f"the mesh manifest is of {num_lods} levels of detail")
        at += counts.nbytes
        total = 0
        for count in map(int, counts):
            at += count * _POSITION_NBYTES
            sizes = _uint32s(data, count, at)
            total += int(sizes.sum(dtype=np.uint64))
            at += sizes.nbytes
        return Manifest(total)


def _uint32s(data: bytes, count: int, at: int) -> NDArray[np.uint32]:
    if len(data) < at + count * _UINT32_NBYTES:
        raise DecodeError(f"the mesh manifest ends after {len(data)} bytes, early")
    return np.frombuffer(data, "<u4", count, at)
