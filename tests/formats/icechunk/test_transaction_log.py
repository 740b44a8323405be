"""Transaction logs as the specification has them, and as damage leaves them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from app.formats.reading import DecodeError
from tests.formats.icechunk.building_repo import (
    FIRST,
    REPO,
    TRANSACTION_LOG,
    U8,
    Fields,
    Shared,
    Struct,
    Structs,
    U32s,
    changed_chunks,
    in_envelope,
    transaction_log,
)

DECODE = TransactionLogDecoder(encode_id(FIRST), 1 << 20)
A, B, C = b"node   a", b"node   b", b"node   c"


def _decode(more: Fields, version: int = 2) -> TransactionLog:
    return DECODE(in_envelope(transaction_log(more=more), TRANSACTION_LOG, version))


def _batches(log: TransactionLog) -> dict[bytes, list[list[list[int]]]]:
    return {
        node_id: [batch.tolist() for batch in batches]
        for node_id, batches in log.updated_chunks.items()
    }


def test_nodes_are_told_of_by_what_happened_to_them() -> None:
    """Updated arrays come before updated groups, unlike all others."""
    ids = [b"%08d" % slot for slot in range(1, 7)]
    log = _decode({slot: Structs([A, ids[slot - 1]], 8) for slot in range(1, 7)})

    groups = [log.new_groups, log.new_arrays, log.deleted_groups, log.deleted_arrays]
    assert [*groups, log.updated_arrays, log.updated_groups] == [{A, data} for data in ids]


@pytest.mark.parametrize("version", [1, 2])
def test_an_empty_log_is_empty(version: int) -> None:
    """Logs of version 1 know no moves."""
    log = _decode({}, version)

    none = frozenset[bytes]()
    assert log == TransactionLog(none, none, none, none, none, none, {}, ())
    assert log.nbytes == 0


CHUNKS = st.integers(0, 4).flatmap(
    lambda ndim: st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=ndim, max_size=ndim))
)


@given(st.lists(CHUNKS, max_size=5))
def test_changed_chunks_are_batches_of_coords(arrays: list[list[list[int]]]) -> None:
    """Arrays may differ in ndim, and have no changed chunk at all."""
    chunks = {b"%08d" % number: array for number, array in enumerate(arrays)}
    log = _decode({7: [changed_chunks(node_id, array) for node_id, array in chunks.items()]})

    assert _batches(log) == {node_id: [a] if a else [] for node_id, a in chunks.items()}
    for batches in log.updated_chunks.values():
        assert all(batch.dtype == np.uint32 and not batch.flags.writeable for batch in batches)


@pytest.mark.parametrize(
    ("chunks", "batches"),
    [
        ([[1, 2], [3, 4], [5]], [[[1, 2], [3, 4]], [[5]]]),
        ([[], [1], [2]], [[[]], [[1], [2]]]),
    ],
)
def test_keys_of_another_ndim_make_a_batch_of_their_own(
    chunks: Sequence[Sequence[int]], batches: list[Any]
) -> None:
    """The library takes any number of indexes for a chunk of any array."""
    log = _decode({7: [changed_chunks(A, [[7, 7]]), changed_chunks(B, chunks)]})

    assert _batches(log) == {A: [[[7, 7]]], B: batches}


def test_an_array_told_of_twice_has_the_chunks_of_both() -> None:
    """No change is lost."""
    arrays = [changed_chunks(A, [[1]]), changed_chunks(B, []), changed_chunks(A, [[2], [3]])]

    assert _batches(_decode({7: arrays})) == {A: [[[1]], [[2], [3]]], B: []}


def _move(source: str | None, target: str | None, node_type: int = 0) -> Fields:
    fields = {0: source, 1: target, 2: Struct(A), 3: U8(node_type)}
    return {slot: value for slot, value in fields.items() if value is not None}


def test_moves_stay_in_order() -> None:
    """Of each the path before is told."""
    log = _decode({8: [_move("/b", "/a"), _move("/b/x", "/a/x", 1)]})

    assert log.moved_paths == ("/b", "/b/x")


def test_it_weighs_what_it_holds() -> None:
    """Four bytes for each index, and something for each node."""
    log = _decode({1: Structs([A, B], 8), 7: [changed_chunks(C, [[i, i] for i in range(1000)])]})

    assert 8000 < log.nbytes < 10000


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        *[({slot: None}, "it has no") for slot in range(8)],
        ({0: Struct(b"another one!")}, "transaction log C5Q6YX38CNS20VVECMGG, not"),
        ({7: [{1: []}]}, "no node_id"),
        ({7: [{0: Struct(A)}]}, "no chunks"),
        ({7: [{0: Struct(A), 1: [{}]}]}, "no coords"),
        ({7: [{0: Struct(A), 1: [{1: U8(1)}]}]}, "no coords"),
        ({8: [_move(None, "/a")]}, "no path before"),
    ],
)
def test_a_log_that_lacks_what_it_must_have_is_damaged(more: Fields, reason: str) -> None:
    """What cannot be read may be in the way of a commit."""
    with pytest.raises(DecodeError, match=reason):
        _decode(more)


def test_another_file_is_no_log() -> None:
    """The header tells."""
    with pytest.raises(DecodeError, match="no transaction log"):
        DECODE(in_envelope(transaction_log(), REPO))


@pytest.mark.parametrize(
    "arrays",
    [
        [{0: Struct(A), 1: [Shared({0: U32s([7] * 1000)})] * 1000}],
        [Shared(changed_chunks(A, [[7]] * 1000))] * 1000,
    ],
)
def test_parts_shared_beyond_measure_are_an_error(arrays: list[Any]) -> None:
    """A small log could tell of more coords than memory holds."""
    with pytest.raises(DecodeError, match="for its size"):
        _decode({7: arrays})


RICH = transaction_log(
    more={
        1: Structs([A, B], 8),
        7: [changed_chunks(A, [[1, 2], [3, 4]]), changed_chunks(B, []), changed_chunks(C, [[1]])],
        8: [_move("/b", "/a"), _move("/c", "/d", 1)],
    }
)


@given(st.data())
def test_changed_bytes_are_a_value_or_an_error(data: st.DataObject) -> None:
    """No damage raises anything else, or takes long."""
    payload = bytearray(RICH)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))

    with suppress(DecodeError):
        DECODE(in_envelope(bytes(payload), TRANSACTION_LOG))


@given(st.integers(0, len(RICH)))
def test_a_truncated_payload_is_a_value_or_an_error(length: int) -> None:
    """No length raises anything else."""
    with suppress(DecodeError):
        DECODE(in_envelope(RICH[:length], TRANSACTION_LOG))
