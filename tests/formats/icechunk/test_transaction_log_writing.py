"""Transaction logs that are written tell the library what it would have told itself."""

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from app.formats.icechunk.transaction_log_writing import write_transaction_log
from tests.formats.icechunk.peer import Peer, array, delete, read_id, write

ID = b"snapshot  id"
LIMIT = 2**26

NODE_IDS = st.binary(min_size=8, max_size=8)
SETS = st.frozensets(NODE_IDS, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray[Any, np.dtype[np.uint32]], ...]:
    """Coords of several numbers of dimensions, some of them twice and in no order."""
    ndims = draw(st.lists(st.integers(0, 3), max_size=2))
    found = []
    for ndim in ndims:
        coords = st.tuples(*[st.sampled_from([0, 1, 2, 2**32 - 1])] * ndim)
        rows = draw(st.lists(coords, max_size=9))
        found.append(np.array(rows, np.uint32).reshape(len(rows), ndim))
    return tuple(found)


LOGS = st.builds(
    TransactionLog,
    *[SETS] * 6,
    st.dictionaries(NODE_IDS, batches(), max_size=4),
    st.just(()),
)


def decode(data: bytes) -> TransactionLog:
    """Read a log."""
    return TransactionLogDecoder(encode_id(ID), LIMIT)(data)


def chunks(log: TransactionLog) -> dict[bytes, list[tuple[int, ...]]]:
    """Give the changed chunks of a log in their order."""
    return {
        node_id: [tuple(row) for batch in found for row in batch.tolist()]
        for node_id, found in log.updated_chunks.items()
    }


@given(LOGS)
def test_a_log_is_read_as_it_was_written(log: TransactionLog) -> None:
    """Each chunk once, in order, of few dimensions first."""
    found = decode(write_transaction_log(ID, log))

    for name in ("new_groups", "new_arrays", "deleted_groups", "deleted_arrays"):
        assert getattr(found, name) == getattr(log, name)
    assert (found.updated_groups, found.updated_arrays) == (log.updated_groups, log.updated_arrays)
    assert chunks(found) == {
        node_id: sorted(set(rows), key=lambda row: (len(row), row))
        for node_id, rows in chunks(log).items()
    }


def _replace(peer: Peer) -> tuple[Any, Any]:
    """Write the log of the last commit again; give what the library tells before and after."""
    file = peer.folder / "transactions" / peer.tip()
    object_id = read_id(peer.tip())
    before: Any = peer.repository.inspect_transaction_log(peer.tip())
    log = TransactionLogDecoder(peer.tip(), LIMIT)(file.read_bytes())
    file.write_bytes(write_transaction_log(object_id, log))
    peer.reopen()
    after: Any = peer.repository.inspect_transaction_log(peer.tip())
    del before["header"], after["header"]
    return before, after


def _diff(peer: Peer) -> Any:
    parent = list(peer.repository.ancestry(branch="main"))[1]
    diff = peer.repository.diff(from_snapshot_id=parent.id, to_branch="main")
    members = {name: getattr(diff, name) for name in dir(diff) if not name.startswith("_")}
    return {name: value for name, value in members.items() if not callable(value)}


def test_the_library_is_told_the_same_as_by_itself(tmp_path: Path) -> None:
    """Of new, changed and deleted nodes, of chunks set, deleted and cut off."""
    peer = Peer(tmp_path)
    session = peer.session()
    for name in ("g/a", "g/b", "h/c/d", "s"):
        array(session, name, (12, 12) if name != "s" else ())[...] = 1
    session.commit("new")
    before, after = _replace(peer)
    assert before == after
    session = peer.session()
    array(session, "n", (300,))[:] = 1
    delete(session, "g/a/c/1/1")
    write(session, "g/a/c/11/2", b"2")
    write(session, "h/zarr.json", peer.document("/h").replace(b"{}", b'{"x": 1}', 1))
    zarr.open_array(session.store, path="g/b").resize((3, 3))
    del zarr.open_group(session.store)["h/c"]
    session.commit("changed")
    diff = _diff(peer)
    before, after = _replace(peer)

    assert before == after
    assert _diff(peer) == diff
    assert after["deleted_arrays"]
    assert after["updated_arrays"]
