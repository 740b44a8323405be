"""Storage keys (Zarr v3 core draft of 2022, "Storage keys") and chunk identifiers in them."""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from app.model import VirtualKey

CONSOLIDATED: Final = VirtualKey("meta/root/consolidated/.zmetadata")
"""Where zarr-python 2 gathers the metadata of a hierarchy; no draft knows it."""
METADATA: Final = "meta/"
"""Below which all metadata are."""
_META: Final = "meta/root"
_DATA: Final = "data/root"
_NUMBER: Final = re.compile("0|[1-9][0-9]{0,18}")
_IDENTIFIER: Final = re.compile("c(?:[0-9]+(?:[/.][0-9]+)*)?")


@dataclass(frozen=True, slots=True)
class MetadataKeys:
    """Where the arrays of a hierarchy have their metadata."""

    suffix: str
    """The ``metadata_key_suffix`` of the entry point."""

    def format(self, path: str) -> VirtualKey:
        """Spell the metadata key of the array at *path*, which is empty for the root."""
        return VirtualKey(f"{_META}/{path}".rstrip("/") + f".array{self.suffix}")

    def parse(self, key: str) -> str | None:
        """Read the path of the array in *key*; `None` if it is no metadata key of an array."""
        stem = key.removesuffix(f".array{self.suffix}")
        path = stem.removeprefix(_META).removeprefix("/")
        return path if stem != key and key == self.format(path) else None

    def owns(self, key: str) -> bool:
        """Tell whether *key* is the metadata key of an array."""
        return self.parse(key) is not None


class DataKey(NamedTuple):
    """A key of chunk data: the path of an array, empty for the root, and a chunk identifier."""

    path: str
    identifier: str

    def format(self) -> VirtualKey:
        """Spell the key."""
        return VirtualKey("/".join(filter(None, (_DATA, *self))))


def array_path(directory: str) -> str | None:
    """Read the path of the array whose chunks would be in *directory*, which ends in a slash."""
    if not directory.startswith(f"{_DATA}/"):
        return None
    return directory[len(_DATA) + 1 : -1]


def is_chunk_name(name: str) -> bool:
    """Tell whether *name*, of an object or a folder, is spelled as identifiers begin."""
    return _IDENTIFIER.fullmatch(name.removesuffix("/")) is not None and name != "c/"


def split_data_key(key: str) -> DataKey | None:
    """Tell array from chunk in *key*; `None` if it is not like a key of chunk data.

    Only the last segment with a ``c`` in front can begin the identifier: no index has one.
    """
    node, _, rest = key.rpartition("/c")
    identifier = f"c{rest}"
    if not f"{node}/".startswith(f"{_DATA}/") or "//" in key:
        return None
    if not _IDENTIFIER.fullmatch(identifier):
        return None
    return DataKey(node[len(_DATA) + 1 :], identifier)


@dataclass(frozen=True, slots=True)
class ChunkIdentifiers:
    """Names chunks of *ndim* dimensions ("Regular grids"): ``c1/23/45``, or ``c`` without any."""

    separator: str
    ndim: int

    def parse(self, identifier: str) -> tuple[int, ...] | None:
        """Read the coordinates in *identifier*, or `None` if it is not spelled canonically."""
        numbers = identifier[1:].split(self.separator) if identifier != "c" else []
        if not identifier.startswith("c") or len(numbers) != self.ndim:
            return None
        return tuple(map(int, numbers)) if all(map(_NUMBER.fullmatch, numbers)) else None

    def format(self, coords: tuple[int, ...]) -> str:
        """Spell the identifier of the chunk at *coords*."""
        return "c" + self.separator.join(map(str, coords))

    def beginning(self, coords: tuple[int, ...] = ()) -> str:
        """Spell how the identifiers begin of chunks whose first coordinates are *coords*."""
        return self.format(coords) + (self.separator if 0 < len(coords) < self.ndim else "")
