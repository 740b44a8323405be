"""The hash ``murmurhash3_x86_128`` of ids: 8 bytes, little-endian, seed 0; its low 8 bytes."""

from typing import Final

import mmh3
import numpy as np
import numpy.typing as npt

from app.formats.neuroglancer_precomputed.keys import Ids

type _States = npt.NDArray[np.uint32]

_C1: Final = np.uint32(0x239B961B)
_C2: Final = np.uint32(0xAB0E9789)
_C3: Final = np.uint32(0x38B34AE5)
_MIX: Final = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
_NBYTES: Final = np.uint32(8)


def murmurhash3_x86_128(number: int) -> int:
    """Hash *number*."""
    return mmh3.hash64(number.to_bytes(8, "little"), 0, x64arch=False, signed=False)[0]


def murmurhash3_x86_128_each(numbers: Ids) -> Ids:
    """Hash each of *numbers*: they are all tail, which enters two of the four states."""
    low, high = numbers.astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)
    first = _rotated(low * _C1, 15) * _C2 ^ _NBYTES
    second = _rotated(high * _C2, 16) * _C3 ^ _NBYTES
    first += second + _NBYTES + _NBYTES
    second += first
    other = _finished(first + _NBYTES)
    first, second = _finished(first), _finished(second)
    first += second + other + other
    second += first
    return second.astype(np.uint64) << np.uint64(32) | first


def _rotated(states: _States, bits: int) -> _States:
    return states << np.uint32(bits) | states >> np.uint32(32 - bits)


def _finished(states: _States) -> _States:
    for shift, factor in zip((16, 13), _MIX, strict=True):
        states = (states ^ states >> np.uint32(shift)) * factor
    return states ^ states >> np.uint32(16)
