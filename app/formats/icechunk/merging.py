"""The log of a commit that takes the place of another: what both of them changed."""

from app.errors import ConflictError
from app.formats.icechunk.coords_set import CoordsSet
from app.formats.icechunk.transaction_log import TransactionLog
from app.formats.icechunk.updated_chunks import Coords

type _Chunks = dict[bytes, tuple[Coords, ...]]


def merge_logs(first: TransactionLog, then: TransactionLog) -> TransactionLog:
    """Tell what *first* and *then* changed together: what came and went did neither.

    Raises: `ConflictError` where the library moved nodes in *first*.
    """
    gone = then.deleted_groups | then.deleted_arrays
    came = first.new_groups | first.new_arrays | then.new_groups | then.new_arrays
    away = gone | came
    if first.moved_paths:
        raise ConflictError("a commit that moved nodes cannot be amended")
    return TransactionLog(
        new_groups=(first.new_groups - gone) | then.new_groups,
        new_arrays=(first.new_arrays - gone) | then.new_arrays,
        deleted_groups=first.deleted_groups | (then.deleted_groups - came),
        deleted_arrays=first.deleted_arrays | (then.deleted_arrays - came),
        updated_arrays=(first.updated_arrays | then.updated_arrays) - away,
        updated_groups=(first.updated_groups | then.updated_groups) - away,
        updated_chunks=_merge_chunks(first, then, gone),
        moved_paths=(),
    )


def _merge_chunks(first: TransactionLog, then: TransactionLog, gone: frozenset[bytes]) -> _Chunks:
    merged: _Chunks = {}
    for node_id in sorted((first.updated_chunks.keys() | then.updated_chunks.keys()) - gone):
        every = CoordsSet()
        for log in (first, then):
            for coords in log.updated_chunks.get(node_id, ()):
                every.add(coords)
        merged[node_id] = every.distinct()
    return merged
