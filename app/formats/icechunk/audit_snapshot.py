"""What a snapshot says that cannot be right, and what it wants of manifests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.flatbuffer import Buffer
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id
from app.formats.icechunk.metadata import ManifestRef, Node, Snapshot, SnapshotDecoder
from app.formats.reading import DecodeError
from app.formats.zarr_sharding_indexed.describe import describe

_PARENT_ID: Final = 1
type Extents = tuple[tuple[int, int], ...]


class Wanted(NamedTuple):
    """The chunks of an array that a manifest may refer to."""

    node_id: bytes
    grid: tuple[int, ...]
    extents: Extents


class Source(NamedTuple):
    """An array in the first snapshot in which it wants something of a manifest."""

    snapshot_id: str
    path: str
    node: Node

    @property
    def key(self) -> str:
        """The virtual key of the array."""
        return f"@{self.snapshot_id}/{self.path}".rstrip("/")


@dataclass(frozen=True, slots=True)
class AuditedSnapshot:
    """A snapshot, and what an audit asks of it besides."""

    snapshot: Snapshot
    parent_id: str | None
    """Only those of version 1 tell theirs."""
    faults: Sequence[tuple[str, str]]
    """What is wrong with nodes, by their paths, which begin with a slash."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        return self.snapshot.nbytes


@dataclass(frozen=True, slots=True)
class AuditedSnapshotDecoder:
    """Decodes the snapshot *object_id*, whose FlatBuffer may have *limit_nbytes*."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> AuditedSnapshot:
        """Decode a file.

        Raises: `DecodeError`.
        """
        snapshot = SnapshotDecoder(self.object_id, self.limit_nbytes)(data)
        payload = open_envelope(data, FileType.SNAPSHOT, self.limit_nbytes).payload
        parent = Buffer(payload).root.struct(_PARENT_ID, OBJECT_ID_NBYTES)
        parent_id = None if parent is None else encode_id(parent)
        return AuditedSnapshot(snapshot, parent_id, tuple(_find_faults(snapshot)))


def _find_faults(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    yield from snapshot.faults
    for path, node in snapshot.nodes.items():
        if isinstance(node, DecodeError):
            yield f"/{path}", str(node)
        elif node.chunks is not None:
            try:
                describe(node.document)
            except DecodeError as error:
                yield f"/{path}", str(error)


def find_misfits(node: Node, listed: frozenset[bytes]) -> Iterator[str]:
    """Tell what is wrong with the manifests that *node* refers to; *listed* are known to be."""
    if node.chunks is None:
        return
    grid, manifests = node.chunks.grid, node.chunks.manifests
    fitting = [manifest for manifest in manifests if _fits(manifest.extents, len(grid))]
    for manifest in manifests:
        name = f"manifest {encode_id(manifest.object_id)}"
        if manifest.object_id not in listed:
            yield f"it refers to {name}, which the snapshot does not list"
        if manifest not in fitting:
            yield f"the extents of {name} have {len(manifest.extents)} dimensions"
    for one, other in _overlaps(fitting):
        first, second = (encode_id(manifest.object_id) for manifest in (one, other))
        yield f"the extents of manifests {first} and {second} overlap"


def _fits(extents: Extents, ndim: int) -> bool:
    return len(extents) == ndim or (ndim == 0 and extents == ((0, 1),))


def _overlaps(manifests: Sequence[ManifestRef]) -> Iterator[tuple[ManifestRef, ManifestRef]]:
    """Find each manifest whose extents share a chunk with those of another, and one such."""
    if len(manifests) < 2:  # noqa: PLR2004
        return
    if not manifests[0].extents:
        yield manifests[0], manifests[1]
        return
    ordered = sorted(manifests, key=lambda manifest: manifest.extents)
    boxes = np.array([manifest.extents for manifest in ordered], np.int64)
    starts, stops = boxes[:, :, 0], boxes[:, :, 1]
    ends = np.searchsorted(starts[:, 0], stops[:, 0])
    for at, end in enumerate(ends.tolist()):
        later = slice(at + 1, end)
        share = (starts[later] < stops[at]) & (starts[at] < stops[later])
        share &= (starts[later] < stops[later]) & (starts[at] < stops[at])
        found = np.flatnonzero(share.all(axis=1))
        if len(found):
            yield ordered[at], ordered[at + 1 + int(found[0])]
