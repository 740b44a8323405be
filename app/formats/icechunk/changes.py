"""What a run of commits changed, put together from their transaction logs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.formats.icechunk.coords_set import CoordsSet
from app.formats.icechunk.transaction_log import MovedNode, TransactionLog


@dataclass(frozen=True, slots=True)
class UpdatedChunks:
    """The changed chunks of an array."""

    count: int
    chunks: list[list[int]]
    """The coords of the first of them: of shards, where the array is sharded."""


@dataclass(frozen=True, slots=True)
class Diff:
    """The changes between two snapshots, by paths.

    Of nodes that both snapshots have, the paths are those in the later one.
    """

    new_groups: list[str]
    new_arrays: list[str]
    deleted_groups: list[str]
    deleted_arrays: list[str]
    updated_groups: list[str]
    updated_arrays: list[str]
    updated_chunks: dict[str, UpdatedChunks]
    moved_nodes: list[MovedNode]


class Changes:
    """Collects transaction logs, earliest first.

    A node that came and went again between two snapshots is in neither of them, and not told of.
    """

    def __init__(self) -> None:
        self._new_groups: set[bytes] = set()
        self._new_arrays: set[bytes] = set()
        self._deleted_groups: set[bytes] = set()
        self._deleted_arrays: set[bytes] = set()
        self._updated_groups: set[bytes] = set()
        self._updated_arrays: set[bytes] = set()
        self._updated_chunks: dict[bytes, CoordsSet] = {}
        self._moved_nodes: list[MovedNode] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the coords of chunks take."""
        return sum(coords.nbytes for coords in self._updated_chunks.values())

    def add(self, log: TransactionLog) -> None:
        """Add what one commit changed."""
        self._new_groups |= log.new_groups
        self._new_arrays |= log.new_arrays
        self._deleted_groups |= log.deleted_groups
        self._deleted_arrays |= log.deleted_arrays
        self._updated_groups |= log.updated_groups
        self._updated_arrays |= log.updated_arrays
        self._moved_nodes += log.moved_nodes
        for node_id, batches in log.updated_chunks.items():
            chunks = self._updated_chunks.setdefault(node_id, CoordsSet())
            for batch in batches:
                chunks.add(batch)

    def between(self, before: Mapping[bytes, str], after: Mapping[bytes, str], limit: int) -> Diff:
        """Name the changes from the nodes *before* to those *after*, with *limit* coords in all."""
        either = {**before, **after}
        return Diff(
            new_groups=_paths(self._new_groups, after),
            new_arrays=_paths(self._new_arrays, after),
            deleted_groups=_paths(self._deleted_groups, before),
            deleted_arrays=_paths(self._deleted_arrays, before),
            updated_groups=_paths(self._updated_groups, either),
            updated_arrays=_paths(self._updated_arrays, either),
            updated_chunks=_share(self._chunks_by_path(either), limit),
            moved_nodes=self._moved_nodes,
        )

    def _chunks_by_path(self, paths: Mapping[bytes, str]) -> dict[str, CoordsSet]:
        """Put the chunks of an array and of another that replaced it at its path together."""
        found: dict[str, CoordsSet] = {}
        for node_id, chunks in self._updated_chunks.items():
            if node_id in paths:
                found.setdefault(paths[node_id], CoordsSet()).update(chunks)
        return dict(sorted(found.items()))


def _paths(node_ids: Iterable[bytes], paths: Mapping[bytes, str]) -> list[str]:
    return sorted({paths[node_id] for node_id in node_ids if node_id in paths})


def _share(chunks: Mapping[str, CoordsSet], limit: int) -> dict[str, UpdatedChunks]:
    """Divide *limit* among arrays: what those with few changes leave over, the others get."""
    counts = {path: each.count() for path, each in chunks.items()}
    shares: dict[str, int] = {}
    for told, path in enumerate(sorted(counts, key=counts.__getitem__)):
        shares[path] = min(counts[path], limit // (len(counts) - told))
        limit -= shares[path]
    return {
        path: UpdatedChunks(counts[path], each.first(shares[path])) for path, each in chunks.items()
    }
