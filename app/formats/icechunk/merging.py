"""The log of a commit that takes the place of another: what both of them changed."""

from collections.abc import Iterable

from app.errors import ConflictError
from app.formats.icechunk.coords_set import CoordsSet
from app.formats.icechunk.transaction_log import MovedNode, TransactionLog
from app.formats.icechunk.updated_chunks import Coords

type _Chunks = dict[bytes, tuple[Coords, ...]]


def merge_logs(first: TransactionLog, then: TransactionLog) -> TransactionLog:
    """Tell what *first* and *then* changed together: what came and went did neither.

    Raises: `ConflictError` where nodes were moved, and something else was done.
    """
    gone = then.deleted_groups | then.deleted_arrays
    came = first.new_groups | first.new_arrays | then.new_groups | then.new_arrays
    away = gone | came
    merged = TransactionLog(
        new_groups=(first.new_groups - gone) | then.new_groups,
        new_arrays=(first.new_arrays - gone) | then.new_arrays,
        deleted_groups=first.deleted_groups | (then.deleted_groups - came),
        deleted_arrays=first.deleted_arrays | (then.deleted_arrays - came),
        updated_arrays=(first.updated_arrays | then.updated_arrays) - away,
        updated_groups=(first.updated_groups | then.updated_groups) - away,
        updated_chunks=_merge_chunks(first, then, gone),
        moved_nodes=tuple(_merge_moves(first.moved_nodes, then.moved_nodes)),
    )
    if (first.moved_nodes or then.moved_nodes) and not (_only_moves(first) and _only_moves(then)):
        raise ConflictError("a commit that moves nodes is amended by moves only, and no other is")
    return merged


def _only_moves(log: TransactionLog) -> bool:
    nodes = log.new_groups | log.new_arrays | log.deleted_groups | log.deleted_arrays
    return not (nodes or log.updated_arrays or log.updated_groups or log.updated_chunks)


def _merge_chunks(first: TransactionLog, then: TransactionLog, gone: frozenset[bytes]) -> _Chunks:
    merged: _Chunks = {}
    for node_id in sorted((first.updated_chunks.keys() | then.updated_chunks.keys()) - gone):
        every = CoordsSet()
        for log in (first, then):
            for coords in log.updated_chunks.get(node_id, ()):
                every.add(coords)
        merged[node_id] = every.distinct()
    return merged


def _merge_moves(first: Iterable[MovedNode], then: Iterable[MovedNode]) -> list[MovedNode]:
    """Tell of each node once, from where it was at first to where it is at last."""
    moves = {move.node_id: move for move in first}
    for move in then:
        before = moves.get(move.node_id, move)
        moves[move.node_id] = move._replace(source=before.source)
    found = [move for move in moves.values() if move.source != move.target]
    return sorted(found, key=lambda move: move.target.split("/"))
