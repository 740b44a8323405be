"""The builder of files for tests, read by the library Icechunk."""

import json
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from tests.formats.icechunk.building import (
    MANIFEST,
    SNAPSHOT,
    Node,
    Ref,
    envelope,
    manifest,
    snapshot,
)

_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_MANIFEST_ID = b"\xff\x01 manifest."
_CHUNK_ID = b"\0\xfethe chunk "
_ARRAY = json.dumps(
    {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, 4],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 2]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {},
    }
).encode()


def _text(data: bytes) -> str:
    bits = "".join(f"{byte:08b}" for byte in data)
    bits += "0" * (-len(bits) % 5)
    return "".join(_LETTERS[int(bits[at : at + 5], 2)] for at in range(0, len(bits), 5))


def _bytes(text: str, nbytes: int) -> bytes:
    bits = "".join(f"{_LETTERS.index(letter):05b}" for letter in text)
    return int(bits[: 8 * nbytes], 2).to_bytes(nbytes)


@pytest.mark.parametrize("version", [1, 2])
def test_the_library_reads_what_is_built(tmp_path: Path, version: int) -> None:
    """A snapshot, and a manifest with an inline reference and a native one, of either version."""
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    session = icechunk.Repository.create(storage).writable_session("main")
    zarr.create_group(session.store)
    zarr.create_array(
        session.store, name="a", shape=(3, 4), chunks=(3, 2), dtype="u1", compressors=None
    )
    snapshot_id = session.commit("to be written again")
    inspected: Any = icechunk.Repository.open(storage).inspect_snapshot(snapshot_id)
    node_ids = {node["path"]: _bytes(node["id"], 8) for node in inspected["nodes"]}
    refs = [
        Ref(index=[0, 0], inline=bytes(range(6))),
        Ref(index=[0, 1], chunk_id=_CHUNK_ID, offset=2, length=6),
    ]
    written = manifest(_MANIFEST_ID, [(node_ids["/a"], refs)], algorithm=0)
    file = envelope(written, MANIFEST, version=version)
    (tmp_path / "manifests").mkdir(exist_ok=True)
    (tmp_path / "manifests" / _text(_MANIFEST_ID)).write_bytes(file)
    (tmp_path / "chunks").mkdir(exist_ok=True)
    (tmp_path / "chunks" / _text(_CHUNK_ID)).write_bytes(bytes(range(100, 110)))
    nodes = [
        Node(node_id=node_ids["/"], path="/", user_data=b'{"zarr_format":3,"node_type":"group"}'),
        Node(
            node_id=node_ids["/a"],
            path="/a",
            user_data=_ARRAY,
            shape=[(3, 1), (4, 2)],
            chunk_shape=[3, 2] if version == 1 else None,
            dimension_names=["y", None],
            manifests=[(_MANIFEST_ID, [(0, 1), (0, 2)])],
        ),
    ]
    payload = snapshot(
        _bytes(snapshot_id, 12),
        nodes,
        manifest_files=[(_MANIFEST_ID, len(file), len(refs))],
        flushed_at=1,
        message="built",
        version=version,
    )
    target = tmp_path / "snapshots" / snapshot_id
    target.write_bytes(envelope(payload, SNAPSHOT, version=version))

    store = icechunk.Repository.open(storage).readonly_session("main").store
    found = zarr.open_array(store, path="a", mode="r")
    expected = np.hstack([np.arange(6).reshape(3, 2), np.arange(102, 108).reshape(3, 2)])
    assert np.array_equal(found[...], expected)
