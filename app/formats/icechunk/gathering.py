"""Numbers read at many places of a buffer at once."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from app.formats.reading import DecodeError

type Places = NDArray[np.int64]
"""Positions in bytes."""

_OUTSIDE: Final = "damaged FlatBuffer: an offset leads out of it"


class Gather:
    """Reads what lies at many places, none of which has to be aligned."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def numbers(self, places: Places, dtype: str) -> Places:
        """Read the numbers of type *dtype* at *places*.

        Raises: `DecodeError` where one of them leads out of the data.
        """
        return self.raw(places, dtype).astype(np.int64)

    def raw(self, places: Places, dtype: str) -> NDArray[Any]:
        """Read what is at *places* as it is."""
        nbytes = np.dtype(dtype).itemsize
        if not places.size:
            return np.empty(0, dtype)
        if places.min() < 0 or places.max() > len(self.data) - nbytes:
            raise DecodeError(_OUTSIDE)
        every = len(self.data) - nbytes + 1
        return np.ndarray((every,), dtype, self.data, strides=(1,))[places]
