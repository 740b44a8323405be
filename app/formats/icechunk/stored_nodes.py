"""The nodes of a snapshot as they are stored, to be written again with others in their place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.metadata_items import Metadata


class Dimension(NamedTuple):
    """One dimension of an array."""

    length: int
    """In elements."""
    num_chunks: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """What only arrays have."""

    dimensions: tuple[Dimension, ...]
    names: tuple[str | None, ...] | None
    manifests: tuple[ManifestRef, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredNode:
    """An array or a group."""

    node_id: bytes
    path: str
    """Absolute."""
    document: bytes
    """Its ``zarr.json``, byte for byte."""
    array: StoredArray | None = None
    """`None` for a group."""
    extra: bytes | None = None


class ManifestFile(NamedTuple):
    """What a snapshot tells of a manifest."""

    object_id: bytes
    size_bytes: int
    """Of the whole file."""
    num_chunk_refs: int
    extra: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot as it is stored, in version 1 or 2 of the format."""

    object_id: bytes
    nodes: Mapping[str, StoredNode]
    """By their absolute paths; of two at one path the first."""
    manifest_files: Mapping[bytes, ManifestFile]
    flushed_at_us: int
    """Microseconds since 1970 began, UTC."""
    message: str
    metadata: Metadata
    extra: bytes | None = None
    nbytes: int = 0
