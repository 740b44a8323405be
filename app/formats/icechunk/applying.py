"""A change set put to a snapshot: the nodes, the log, and which manifests are to be rewritten.

The chunks that a smaller grid drops are known once the manifests that have them are read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from app.errors import ConflictError
from app.formats.icechunk.change_set import ChangeSet
from app.formats.icechunk.coords_set import CoordsSet
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.rewrites import ArrayRewrite, plan_rewrite
from app.formats.icechunk.stored_nodes import ManifestFile, StoredNode, StoredSnapshot
from app.formats.icechunk.transaction_log import TransactionLog
from app.formats.icechunk.tree import by_id, change_nodes
from app.formats.icechunk.updated_chunks import Coords
from app.formats.reading import DecodeError

type _Nodes = Mapping[bytes, StoredNode]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of the manifests of an array."""

    manifests: tuple[ManifestRef, ...]
    """All that it has references in, kept or new."""
    dropped: tuple[Coords, ...] = ()
    """As `ArrayRewrite.dropped` lists them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit stores of a snapshot, and beside it."""

    nodes: Mapping[str, StoredNode]
    manifest_files: Mapping[bytes, ManifestFile]
    """Those that *nodes* refer to, and no others."""
    log: TransactionLog


@dataclass(frozen=True, slots=True)
class Applied:
    """What a commit makes of a snapshot."""

    nodes: Mapping[str, StoredNode]
    """By their paths; those that are rewritten have the manifests that they had before."""
    rewrites: tuple[ArrayRewrite, ...]
    known: Mapping[bytes, ManifestFile]
    """The manifests of the snapshot before."""
    log: TransactionLog
    """But for chunks that are dropped."""

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing changes: what is replaced by the same is no change."""
        log = self.log
        nodes = (log.new_groups, log.new_arrays, log.deleted_groups, log.deleted_arrays)
        updates = (log.updated_arrays, log.updated_groups, log.updated_chunks)
        return not (any(nodes) or any(updates) or self.rewrites)

    def finish(
        self, rewritten: Mapping[bytes, Rewritten], files: Iterable[ManifestFile]
    ) -> Outcome:
        """Put in what became of all *rewrites*, by the ids of nodes; *files* are the new ones.

        Raises: `DecodeError` where the snapshot before does not list a manifest.
        """
        nodes = dict(self.nodes)
        chunks = dict(self.log.updated_chunks)
        for rewrite in self.rewrites:
            node_id, became = rewrite.node_id, rewritten[rewrite.node_id]
            nodes[rewrite.path] = _with_manifests(nodes[rewrite.path], became.manifests)
            if became.dropped:
                chunks[node_id] = _union(*chunks.get(node_id, ()), *became.dropped)
        known = {**self.known, **{file.object_id: file for file in files}}
        log = replace(self.log, updated_chunks=dict(sorted(chunks.items())))
        return Outcome(nodes, dict(_referred(nodes.values(), known)), log)


def apply_changes(changes: ChangeSet, before: StoredSnapshot) -> Applied:
    """Put *changes* to the snapshot *before* them.

    Raises: `BadBodyError` for what can never be, `ConflictError` for what does not go together
    with the snapshot; they name the path, and say why.
    """
    nodes = change_nodes(before.nodes, changes)
    then, now = by_id(before.nodes), by_id(nodes)
    for node_id in changes.chunks:
        if node_id not in now:
            raise ConflictError(f"there is no array {encode_id(node_id)}")
    touched = sorted({*changes.chunks, *changes.updated} & now.keys())
    plans = (
        plan_rewrite(now[node_id], changes.chunks.get(node_id), then.get(node_id))
        for node_id in touched
    )
    rewrites = tuple(plan for plan in plans if plan is not None)
    return Applied(nodes, rewrites, before.manifest_files, _log(changes, then, now))


def _log(changes: ChangeSet, then: _Nodes, now: _Nodes) -> TransactionLog:
    """Tell of each node once: what is new is not updated as well."""
    new_groups, new_arrays = _by_kind(now[node_id] for node_id in changes.new)
    deleted_groups, deleted_arrays = _by_kind(then[node_id] for node_id in changes.deleted)
    updated_groups, updated_arrays = _by_kind(
        now[node_id]
        for node_id, document in changes.updated.items()
        if node_id in now and document != then[node_id].document
    )
    return TransactionLog(
        new_groups,
        new_arrays,
        deleted_groups,
        deleted_arrays,
        updated_arrays,
        updated_groups,
        updated_chunks={
            node_id: (chunks.coords,)
            for node_id, chunks in sorted(changes.chunks.items())
            if len(chunks.coords)
        },
        moved_paths=(),
    )


def _by_kind(nodes: Iterable[StoredNode]) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Give the ids of groups and those of arrays."""
    every = list(nodes)
    groups = frozenset(node.node_id for node in every if node.array is None)
    return groups, frozenset(node.node_id for node in every) - groups


def _union(*batches: Coords) -> tuple[Coords, ...]:
    every = CoordsSet()
    for coords in batches:
        every.add(coords)
    return every.distinct()


def _with_manifests(node: StoredNode, manifests: tuple[ManifestRef, ...]) -> StoredNode:
    return (
        node
        if node.array is None
        else replace(node, array=replace(node.array, manifests=manifests))
    )


def _referred(
    nodes: Iterable[StoredNode], known: Mapping[bytes, ManifestFile]
) -> Iterator[tuple[bytes, ManifestFile]]:
    for node in nodes:
        for object_id, _ in () if node.array is None else node.array.manifests:
            if object_id not in known:
                name = encode_id(object_id)
                raise DecodeError(f"it does not list manifest {name}, which {node.path} refers to")
            yield object_id, known[object_id]
