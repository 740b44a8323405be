"""Transaction logs read, written and merged."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import ConflictError
from shardgate.formats.icechunk.coords import Coords
from shardgate.formats.icechunk.transaction_log import (
    MoveOperation,
    TransactionLog,
    TransactionLogDecoder,
    merge_logs,
    write_transaction_log,
)
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk.building import TRANSACTION_LOG, Struct, Structs, envelope
from tests.support.formats.icechunk.building_repo import (
    FIRST,
    U8,
    Fields,
    U32s,
    changed_chunks,
    transaction_log,
)

DECODE = TransactionLogDecoder(FIRST, 1 << 20)
A, B, C = b"node   a", b"node   b", b"node   c"


def _decode(more: Fields) -> TransactionLog:
    return DECODE(envelope(transaction_log(more=more), TRANSACTION_LOG))


def test_chunks_of_an_array_listed_twice_are_joined() -> None:
    """An array that is listed twice in a log has the chunks of both entries."""
    arrays = [changed_chunks(A, [[1]]), changed_chunks(B, []), changed_chunks(A, [[2], [3]])]

    assert chunks(_decode({7: arrays})) == {A: [(1,), (2,), (3,)], B: []}


def test_size_of_a_log_includes_its_coordinates() -> None:
    """The counted size of a log is about four bytes for each index of a chunk."""
    log = _decode({1: Structs([A, B], 8), 7: [changed_chunks(C, [[i, i] for i in range(1000)])]})

    assert 8000 < log.nbytes < 10000


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        *[({slot: None}, "it has no") for slot in range(8)],
        ({0: Struct(b"another one!")}, "transaction log C5Q6YX38CNS20VVECMGG, not"),
        ({7: [{1: []}]}, "no node_id"),
        ({7: [{0: Struct(A)}]}, "no chunks"),
        ({7: [{0: Struct(A), 1: [{}]}]}, "no coordinates"),
        ({7: [{0: Struct(A), 1: [{1: U8(1)}]}]}, "no coordinates"),
        ({8: [{1: "/a", 2: Struct(A), 3: U8(0)}]}, "no path before"),
        ({8: [{0: "/a", 2: Struct(A), 3: U8(0)}]}, "no path after"),
        ({8: [{0: "/a", 1: "/b", 3: U8(0)}]}, "no id of a moved node"),
    ],
)
def test_log_without_a_required_field_is_refused(more: Fields, reason: str) -> None:
    """A log without a required field, or of another snapshot, raises DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        _decode(more)


@pytest.mark.parametrize(
    "arrays",
    [[{0: Struct(A), 1: [{0: U32s([7] * 1000)}] * 1000}], [changed_chunks(A, [[7]] * 1000)] * 1000],
)
def test_log_with_excessive_sharing_is_refused(arrays: list[Any]) -> None:
    """A small log that spells out millions of coordinates raises DecodeError."""
    with pytest.raises(DecodeError, match="for its size"):
        _decode({7: arrays})


NODE_IDS = st.binary(min_size=8, max_size=8)
SETS = st.frozensets(NODE_IDS, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray[Any, np.dtype[np.uint32]], ...]:
    """Draw coordinates of several dimensions, unsorted and with duplicates."""
    ndims = draw(st.lists(st.integers(0, 3), max_size=2))
    found = []
    for ndim in ndims:
        coords = st.tuples(*[st.sampled_from([0, 1, 2, 2**32 - 1])] * ndim)
        rows = draw(st.lists(coords, max_size=9))
        found.append(np.array(rows, np.uint32).reshape(len(rows), ndim))
    return tuple(found)


PATHS = st.lists(st.sampled_from(["a", "a-", "b", "é"]), min_size=1, max_size=3).map(
    lambda names: "/" + "/".join(names)
)
MOVES = st.lists(st.builds(MoveOperation, PATHS, PATHS, NODE_IDS, st.booleans()), max_size=4).map(
    lambda moves: tuple(sorted(moves, key=lambda move: move.target.encode().split(b"/")))
)
LOGS = st.builds(
    TransactionLog, *[SETS] * 6, st.dictionaries(NODE_IDS, batches(), max_size=4), MOVES
)


def chunks(log: TransactionLog) -> dict[bytes, list[tuple[int, ...]]]:
    """Return the changed chunks of a log in order."""
    return {
        node_id: [tuple(row) for batch in found for row in batch.tolist()]
        for node_id, found in log.updated_chunks.items()
    }


@settings(max_examples=40)
@given(LOGS)
def test_written_log_is_read_back(log: TransactionLog) -> None:
    """A written log is read back with each chunk once, sorted by dimensions and coordinates."""
    found = DECODE(write_transaction_log(FIRST, log))

    assert replace(found, updated_chunks={}) == replace(log, updated_chunks={})
    assert chunks(found) == {
        node_id: sorted(set(rows), key=lambda row: (len(row), row))
        for node_id, rows in chunks(log).items()
    }


NO: frozenset[bytes] = frozenset()
NOTHING = TransactionLog(NO, NO, NO, NO, NO, NO, {}, ())


def coords(*rows: int) -> tuple[Coords, ...]:
    """Return coordinates of chunks in an array of one dimension."""
    return (np.array(rows, np.uint32).reshape(-1, 1),)


merging = partial(replace, NOTHING)


@pytest.mark.parametrize(
    ("first", "then", "merged", "told"),
    [
        (
            merging(new_arrays=frozenset([A, B]), updated_chunks={A: coords(1), B: coords(2)}),
            merging(deleted_arrays=frozenset([A])),
            merging(new_arrays=frozenset([B])),
            {B: [(2,)]},
        ),
        (
            merging(
                updated_arrays=frozenset([A]),
                updated_groups=frozenset([B]),
                updated_chunks={A: coords(1)},
            ),
            merging(deleted_arrays=frozenset([A]), deleted_groups=frozenset([B])),
            merging(deleted_arrays=frozenset([A]), deleted_groups=frozenset([B])),
            {},
        ),
        (
            merging(new_arrays=frozenset([A])),
            merging(updated_arrays=frozenset([A, B]), updated_chunks={A: coords(3)}),
            merging(new_arrays=frozenset([A]), updated_arrays=frozenset([B])),
            {A: [(3,)]},
        ),
        (
            merging(updated_chunks={A: coords(4, 5)}),
            merging(updated_chunks={A: coords(1, 5)}),
            NOTHING,
            {A: [(1,), (4,), (5,)]},
        ),
    ],
    ids=["new and deleted", "updated and deleted", "new and updated", "chunks of both"],
)
def test_merged_logs_list_each_node_and_chunk_once(
    first: TransactionLog, then: TransactionLog, merged: TransactionLog, told: Any
) -> None:
    """Merged logs list each node in one list, and each chunk once, in order."""
    found = merge_logs(first, then)

    assert replace(found, updated_chunks={}) == merged
    assert chunks(found) == told


def test_amending_a_commit_with_moves_is_refused() -> None:
    """Merging a log with moved nodes with any other raises ConflictError."""
    moved = merging(moves=(MoveOperation("/a", "/b", A, is_array=True),))
    for logs in ((moved, NOTHING), (NOTHING, moved)):
        with pytest.raises(ConflictError, match="moves nodes"):
            merge_logs(*logs)
