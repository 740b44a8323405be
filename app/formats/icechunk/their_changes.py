"""What others committed since a parent, as far as it matters to who made changes against it."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from app.formats.icechunk.coords_set import CoordsSet
from app.formats.icechunk.stored_nodes import StoredNode, StoredSnapshot
from app.formats.icechunk.transaction_log import TransactionLog
from app.formats.icechunk.tree import by_id
from app.formats.icechunk.updated_chunks import Coords


class TheirChanges:
    """The way from *parent* to *tip*.

    Which nodes there are, the two snapshots tell: what came and went between them is in nobody's
    way. What was done to them, the logs tell.
    """

    def __init__(
        self, parent: StoredSnapshot, logs: Sequence[TransactionLog], tip: StoredSnapshot
    ) -> None:
        self.before = by_id(parent.nodes)
        self.now = by_id(tip.nodes)
        self.paths = tip.nodes
        self._logs = logs

    def is_gone(self, node_id: bytes) -> bool:
        """Tell whether they deleted a node, or replaced it by another."""
        return node_id not in self.now

    def is_updated(self, node_id: bytes) -> bool:
        """Tell whether they changed the metadata of a node that is still there."""
        return (
            node_id in self._updated or self.now[node_id].document != self.before[node_id].document
        )

    def arrived(self) -> Iterator[StoredNode]:
        """Give the nodes that they made."""
        return (node for node in self.now.values() if node.node_id not in self.before)

    def moved(self) -> str | None:
        """Give the path that they moved a node away from, if there is one."""
        for log in self._logs:
            for path in log.moved_paths:
                return path
        both = self.now.keys() & self.before.keys()
        moved = (self.before[node_id].path for node_id in both if self._is_moved(node_id))
        return min(moved, default=None)

    def chunks(self, node_id: bytes) -> tuple[Coords, ...]:
        """Give the chunks that they changed, those of each number of dimensions apart."""
        found = CoordsSet()
        for log in self._logs:
            for coords in log.updated_chunks.get(node_id, ()):
                found.add(coords)
        return found.distinct()

    def _is_moved(self, node_id: bytes) -> bool:
        return self.before[node_id].path != self.now[node_id].path

    @cached_property
    def _updated(self) -> frozenset[bytes]:
        return frozenset().union(*(log.updated_arrays | log.updated_groups for log in self._logs))
