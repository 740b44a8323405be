"""Arithmetic on regular grids: smooth noise, and copies of half and of twice the size."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

type Field = npt.NDArray[np.floating[Any]]
"""Of 32 bits, wherever there are many elements."""


def smooth(field: Field) -> Field:
    """Blur each axis by the weights 1, 2, 1; the first and the last element are neighbours."""
    for axis in range(field.ndim):
        around = np.roll(field, 1, axis)
        around += np.roll(field, -1, axis)
        around += 2 * field
        field = around / 4
    return field


def halved[T: np.generic](values: npt.NDArray[T], axes: Iterable[int]) -> npt.NDArray[T]:
    """Take the mean of each two elements along *axes*, which have an even number of them."""
    mean: Field = values.astype(np.float32)
    for axis in axes:
        pairs = np.moveaxis(mean, axis, 0)
        mean = np.moveaxis((pairs[::2] + pairs[1::2]) / 2, 0, axis)
    return mean.astype(values.dtype)


def doubled(field: Field, axes: Iterable[int]) -> Field:
    """Interpolate between the elements along *axes*; the last one is repeated."""
    for axis in axes:
        middle = (field + following(field, axis)) / 2
        field = interleaved(field, middle, axis)
    return field


def following[T: np.generic](values: npt.NDArray[T], axis: int) -> npt.NDArray[T]:
    """Return the next element of each along *axis*; the last one is repeated."""
    rows = np.arange(1, values.shape[axis] + 1).clip(max=values.shape[axis] - 1)
    return values.take(rows, axis)


def interleaved(even: npt.NDArray[Any], odd: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Return the elements of *even* and *odd* by turns along *axis*."""
    shape = [*even.shape]
    shape[axis] *= 2
    both = np.empty(shape, even.dtype)
    turned = np.moveaxis(both, axis, 0)
    turned[::2] = np.moveaxis(even, axis, 0)
    turned[1::2] = np.moveaxis(odd, axis, 0)
    return both


def noise(random: np.random.Generator, shape: Sequence[int], doublings: int) -> Field:
    """Return smooth noise with a deviation of 1, and bumps of 2 ** *doublings* elements.

    It goes on seamlessly at the other side, where a size is a multiple of the bumps.
    """
    coarse = [-(-size // 2**doublings) for size in shape]
    field = random.standard_normal(coarse, np.float32)
    for _ in range(doublings):
        for axis in range(field.ndim):
            field = interleaved(field, (field + np.roll(field, -1, axis)) / 2, axis)
        field = smooth(field)
    field = field[tuple(map(slice, shape))]
    return field / field.std()
