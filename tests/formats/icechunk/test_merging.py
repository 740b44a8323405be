"""What two commits changed together, one of which takes the place of the other."""

from dataclasses import replace

import numpy as np
import pytest

from app.errors import ConflictError
from app.formats.icechunk.merging import merge_logs
from app.formats.icechunk.transaction_log import TransactionLog
from app.formats.icechunk.updated_chunks import Coords

NO: frozenset[bytes] = frozenset()
NOTHING = TransactionLog(NO, NO, NO, NO, NO, NO, {}, ())
A, B, C = (bytes([number]) * 8 for number in range(3))


def coords(*rows: int) -> tuple[Coords, ...]:
    """Name chunks of an array of one dimension."""
    return (np.array(rows, np.uint32).reshape(-1, 1),)


def ids(*nodes: bytes) -> frozenset[bytes]:
    """Name nodes."""
    return frozenset(nodes)


def test_what_came_and_went_did_neither() -> None:
    """Nor have its chunks changed."""
    first = replace(NOTHING, new_arrays=ids(A, B), updated_chunks={A: coords(1), B: coords(2)})

    merged = merge_logs(first, replace(NOTHING, deleted_arrays=ids(A)))

    assert merged.new_arrays == ids(B)
    assert not merged.deleted_arrays
    assert list(merged.updated_chunks) == [B]


def test_what_was_changed_and_then_deleted_is_deleted() -> None:
    """Nothing else is told of it."""
    first = replace(
        NOTHING, updated_arrays=ids(A), updated_groups=ids(B), updated_chunks={A: coords(1)}
    )

    merged = merge_logs(first, replace(NOTHING, deleted_arrays=ids(A), deleted_groups=ids(B)))

    assert merged == replace(NOTHING, deleted_arrays=ids(A), deleted_groups=ids(B))


def test_what_is_new_is_not_updated_as_well() -> None:
    """Its chunks are told."""
    then = replace(NOTHING, updated_arrays=ids(A, B), updated_chunks={A: coords(3)})

    merged = merge_logs(replace(NOTHING, new_arrays=ids(A)), then)

    assert merged.updated_arrays == ids(B)
    assert list(merged.updated_chunks) == [A]


def test_chunks_that_both_changed_are_told_once() -> None:
    """In order."""
    first = replace(NOTHING, updated_chunks={A: coords(4, 5)})

    merged = merge_logs(first, replace(NOTHING, updated_chunks={A: coords(1, 5)}))

    assert [batch.tolist() for batch in merged.updated_chunks[A]] == [[[1], [4], [5]]]


def test_a_commit_that_moved_nodes_is_not_amended() -> None:
    """Its log would no longer say from where."""
    with pytest.raises(ConflictError, match="moved nodes cannot be amended"):
        merge_logs(replace(NOTHING, moved_paths=("/a",)), NOTHING)
