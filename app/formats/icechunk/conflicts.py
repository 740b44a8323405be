"""Our changes put on top of theirs, who committed first; or why that cannot be.

Stricter than the library, whose own rebase can leave nodes in no group, two nodes at one path, or
chunks that nobody can read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.formats.icechunk.change_set import ChangeSet
from app.formats.icechunk.chunk_conflicts import find_chunk_conflicts, settle_chunks
from app.formats.icechunk.conflict_kinds import Conflict, ConflictKind, Policy
from app.formats.icechunk.node_conflicts import find_node_conflicts
from app.formats.icechunk.stored_nodes import StoredSnapshot
from app.formats.icechunk.their_changes import TheirChanges
from app.formats.icechunk.transaction_log import TransactionLog


def rebase(
    ours: ChangeSet,
    parent: StoredSnapshot,
    logs: Sequence[TransactionLog],
    tip: StoredSnapshot,
    policy: Policy = Policy.FAIL,
) -> ChangeSet | list[Conflict]:
    """Make *ours*, which are changes of *parent*, changes of *tip*.

    The *logs* are those of all commits since *parent*, earliest first. Nothing may be left of the
    changes. Conflicts are ordered by path, one of each kind at each.
    """
    theirs = TheirChanges(parent, logs, tip)
    if (source := theirs.moved()) is not None:
        return [Conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, source)]
    found = {(each.path, each.kind): each for each in _find(ours, theirs, policy)}
    if found:
        return [found[at] for at in sorted(found)]
    return replace(
        ours,
        deleted=frozenset(node_id for node_id in ours.deleted if not theirs.is_gone(node_id)),
        chunks=settle_chunks(ours.chunks, theirs, policy),
    )


def _find(ours: ChangeSet, theirs: TheirChanges, policy: Policy) -> Iterator[Conflict]:
    yield from find_node_conflicts(ours, theirs)
    yield from find_chunk_conflicts(ours, theirs, policy)
