"""The trees of `tree_model` as snapshots of Icechunk, with a manifest for each array."""

from dataclasses import replace
from hashlib import blake2b

from app.formats.icechunk.applying import Outcome, Rewritten, apply_changes
from app.formats.icechunk.change_set import ChangeSet
from app.formats.icechunk.index import Manifest, ManifestDecoder
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.metadata_items import Metadata
from app.formats.icechunk.rewrites import ArrayRewrite
from app.formats.icechunk.snapshot_reading import StoredSnapshotDecoder
from app.formats.icechunk.snapshot_writing import write_snapshot
from app.formats.icechunk.stored_nodes import ManifestFile, StoredSnapshot
from app.formats.icechunk.transaction_log import TransactionLog
from tests.formats.icechunk.building import MANIFEST, Ref, envelope, manifest
from tests.formats.icechunk.tree_model import Node, Tree

LIMIT = 2**24
EMPTY = StoredSnapshot(b"the first id", {}, {}, 1, "first", Metadata(2, ()))


class TreeStore:
    """Keeps manifests, and commits change sets as whoever writes them would."""

    def __init__(self) -> None:
        self.manifests: dict[bytes, Manifest] = {}
        self.chunks: dict[bytes, dict[int, int]] = {}
        """What is in each manifest."""

    def commit(
        self, changes: ChangeSet, before: StoredSnapshot, after: Tree
    ) -> tuple[StoredSnapshot, TransactionLog]:
        """Put *changes* to a snapshot, of which *after* is to become, and store what comes out."""
        applied = apply_changes(changes, before)
        rewritten: dict[bytes, Rewritten] = {}
        files: list[ManifestFile] = []
        for rewrite in applied.rewrites:
            node = after[rewrite.path]
            leaving = [self.manifests[ref.object_id] for ref in rewrite.leaving]
            dropped = rewrite.dropped(leaving)
            refs = self._write(node) if node.chunks else ()
            rewritten[rewrite.node_id] = Rewritten(refs, dropped)
            files += [ManifestFile(ref.object_id, 99, len(node.chunks)) for ref in refs]
            self._check(rewrite, before)
        return self._store(applied.finish(rewritten, files), before)

    def tree(self, snapshot: StoredSnapshot) -> Tree:
        """Read a snapshot back."""
        return {
            path: Node(
                node.node_id,
                int(node.document.split(b'"label": ')[1][:1]),
                node.array.dimensions[0].length if node.array else None,
                {
                    at: value
                    for ref in (node.array.manifests if node.array else ())
                    for at, value in self.chunks[ref.object_id].items()
                },
            )
            for path, node in snapshot.nodes.items()
        }

    def _write(self, node: Node) -> tuple[ManifestRef, ...]:
        object_id = blake2b(repr(node).encode(), digest_size=12).digest()
        refs = [Ref(index=[at], inline=bytes([node.chunks[at]])) for at in sorted(node.chunks)]
        data = envelope(manifest(object_id, [(node.node_id, refs)]), MANIFEST)
        self.manifests[object_id] = ManifestDecoder(object_id, LIMIT)(data)
        self.chunks[object_id] = dict(node.chunks)
        return (ManifestRef(object_id, ((min(node.chunks), max(node.chunks) + 1),)),)

    def _check(self, rewrite: ArrayRewrite, before: StoredSnapshot) -> None:
        """Compare what is said to be of the array until now."""
        known = {node.node_id: node for node in before.nodes.values()}
        old = known.get(rewrite.node_id)
        assert rewrite.manifests == (old.array.manifests if old and old.array else ())

    def _store(
        self, outcome: Outcome, before: StoredSnapshot
    ) -> tuple[StoredSnapshot, TransactionLog]:
        snapshot = replace(
            before, nodes=outcome.nodes, manifest_files=outcome.manifest_files, nbytes=0
        )
        data = write_snapshot(snapshot)
        found = StoredSnapshotDecoder(snapshot.object_id, LIMIT)(data)
        assert replace(found, nbytes=0) == snapshot
        return found, outcome.log
