"""Chunk keys and chunk coordinates (Zarr v3 core, "Chunk key encoding")."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_NUMBER: Final = "(0|[1-9][0-9]{0,18})"


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Keys of the chunks of an array; only one spelling of a chunk is its key."""

    prefix: str
    """Stands before the coordinates: ``c/`` or ``c.`` in ``default``, nothing in ``v2``."""
    separator: str
    """Stands between the coordinates."""
    ndim: int
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = re.escape(self.separator).join([_NUMBER] * self.ndim)
        pattern = re.escape(self.prefix if self.ndim else self._scalar) + numbers
        object.__setattr__(self, "_pattern", re.compile(pattern, re.ASCII))

    @property
    def _scalar(self) -> str:
        """Key of the chunk of an array without dimensions: ``c`` or ``0``."""
        return self.prefix.removesuffix(self.separator) or "0"

    def parse(self, key: str) -> tuple[int, ...] | None:
        """Return the coordinates in *key*; `None` if it is no chunk key, such as ``c/07/3``."""
        found = self._pattern.fullmatch(key)
        return None if found is None else tuple(map(int, found.groups()))

    def format(self, coords: tuple[int, ...]) -> str:
        """Return the key of the chunk at *coords*."""
        return self.prefix + self.separator.join(map(str, coords)) if coords else self._scalar

    def beginning(self, coords: tuple[int, ...] = ()) -> str:
        """Return the common beginning of the keys whose first coordinates are *coords*."""
        if len(coords) == self.ndim:
            return self.format(coords)
        return self.prefix + "".join(f"{at}{self.separator}" for at in coords)

    def describe(self, counts: Sequence[int]) -> str:
        """Return the size of a grid of chunks, and the first and the last key."""
        if not self.ndim:
            return f"1 chunk, {self._scalar}"
        size = "×".join(map(str, counts))
        if 0 in counts:
            return f"{size} chunks"
        first, last = (
            self.format(tuple(n and n - 1 for n in each)) for each in ([0] * self.ndim, counts)
        )
        return f"{size} chunks, {first} to {last}"

    def owns(self, key: str) -> bool:
        """Return whether *key*, or a prefix of keys, is spelled like those of chunks."""
        if self.prefix:
            return f"{key}{self.separator}".startswith(self.prefix)
        return key.partition(self.separator)[0].isdigit()
