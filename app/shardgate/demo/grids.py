"""Arithmetic on regular grids: noise, distances, and copies of half and of twice the size."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

type Field = npt.NDArray[np.floating[Any]]
"""Of 32 bits, wherever there are many elements."""
type Body = tuple[Field, Field]
"""A union of balls: middles of shape ``(count, 3)``, and radii."""

_FAR: Final = 1e3


def noise(random: np.random.Generator, shape: Sequence[int], bump: float) -> Field:
    """Return noise with a deviation of 1 and bumps of this many elements, seamless at the edges."""
    waves = np.fft.rfftn(random.standard_normal(shape, np.float32))
    for axis, count in enumerate(shape):
        frequencies = np.fft.fftfreq(count)[: waves.shape[axis]].astype(np.float32)
        damped = np.exp(-2 * (np.pi * bump * frequencies) ** 2)
        waves *= damped.reshape(-1, *[1] * (len(shape) - 1 - axis))
    field: Field = np.fft.irfftn(waves, shape, range(len(shape)))
    return field / field.std()


def nearest_two(
    bodies: Iterable[Body], shape: Sequence[int], steps: Sequence[float], reach: float, dents: Field
) -> tuple[npt.NDArray[np.uint16], Field, Field]:
    """Return the number of the nearest body of each element, how far it is, and how far the second.

    The first body has number 1; elements farther than *reach* from all of them have 0. *dents*
    are added to distances, for each body from another place.
    """
    labels = np.zeros(shape, np.uint16)
    nearest = np.full(shape, _FAR, np.float32)
    second = nearest.copy()
    for number, (points, radii) in enumerate(bodies, 1):
        own_dents = np.roll(dents, (7 * number, 13 * number, 29 * number), (0, 1, 2))
        for point, radius in zip(points, radii, strict=True):
            starts = ((point - radius - reach) / steps).astype(int).clip(min=0)
            stops = ((point + radius + reach) / steps).astype(int).clip(min=0) + 1
            box = tuple(map(slice, starts, stops))
            z2, y2, x2 = (
                ((np.arange(size, dtype=np.float32) * step - at)[rows]) ** 2
                for size, step, at, rows in zip(shape, steps, point, box, strict=True)
            )
            squares = z2[:, np.newaxis, np.newaxis] + (y2[:, np.newaxis] + x2)
            distance = np.sqrt(squares) - radius + own_dents[box]
            is_rival = labels[box] != number
            np.minimum(
                second[box], np.maximum(nearest[box], distance), out=second[box], where=is_rival
            )
            labels[box][distance < nearest[box]] = number
            np.minimum(nearest[box], distance, out=nearest[box])
    return labels, nearest, second


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
        field = interleaved(field, (field + following(field, axis)) / 2, axis)
    return field


def following[T: np.generic](values: npt.NDArray[T], axis: int) -> npt.NDArray[T]:
    """Return the next element of each along *axis*; the last one is repeated."""
    return values.take(range(1, values.shape[axis] + 1), axis, mode="clip")


def interleaved[T: np.generic](
    even: npt.NDArray[T], odd: npt.NDArray[T], axis: int
) -> npt.NDArray[T]:
    """Return the elements of *even* and *odd* by turns along *axis*."""
    shape = [*even.shape]
    shape[axis] *= 2
    return np.stack((even, odd), axis + 1).reshape(shape)
