"""Chunk keys and chunk coordinates (Zarr v3 core, "Chunk key encoding")."""

import re
from dataclasses import dataclass, field
from typing import Final, Protocol

_NUMBER: Final = "(0|[1-9][0-9]{0,18})"


class Keys(Protocol):
    """Keys of the chunks of an array; only one spelling of a chunk is its key."""

    def parse(self, key: str) -> tuple[int, ...] | None:
        """Return the chunk coordinates in *key*, or `None` if it is not a chunk key."""

    def format(self, coords: tuple[int, ...]) -> str:
        """Return the key of the chunk at *coords*."""

    def beginning(self, coords: tuple[int, ...] = ()) -> str:
        """Return the common beginning of the keys whose first coordinates are *coords*."""

    def owns(self, key: str) -> bool:
        """Return whether *key*, or a prefix of keys, is spelled like those of chunks."""


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """A chunk key encoding: *prefix* (``c`` in ``default``, none in ``v2``) and coordinates, joined
    by *separator*. A chunk of no dimensions is ``c`` and ``0``.
    """

    prefix: str
    separator: str
    ndim: int
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        head = [re.escape(self.prefix)] if self.prefix else []
        parts = head + [_NUMBER] * self.ndim if self.ndim or head else ["0"]
        pattern = re.compile(re.escape(self.separator).join(parts), re.ASCII)
        object.__setattr__(self, "_pattern", pattern)

    def parse(self, key: str) -> tuple[int, ...] | None:
        """Return the chunk coordinates in *key*, or `None` if it is no chunk key; ``c/07/3`` is
        none.
        """
        found = self._pattern.fullmatch(key)
        return None if found is None else tuple(map(int, found.groups()))

    def format(self, coords: tuple[int, ...]) -> str:
        head = [self.prefix] if self.prefix else []
        return self.separator.join([*head, *map(str, coords)]) or "0"

    def beginning(self, coords: tuple[int, ...] = ()) -> str:
        if len(coords) == self.ndim:
            return self.format(coords)
        head = [self.prefix] if self.prefix else []
        return self.separator.join([*head, *map(str, coords), ""])

    def owns(self, key: str) -> bool:
        head = key.partition(self.separator)[0]
        return head == self.prefix if self.prefix else head.isdigit()
