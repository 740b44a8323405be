"""Repositories written by the icechunk library, for a million references partly by hand.

The library would take an hour for a million native references. Their manifest is encoded as the
library encodes its own, and replaces one that the library wrote.
"""

import random
import struct
from pathlib import Path
from typing import Final

import icechunk
import numpy as np
import zarr
import zstandard

from shardgate.formats.icechunk.ids import decode_id, encode_id
from tests.support.formats.icechunk.building import Struct
from tests.support.formats.icechunk.building_repo import Repo, ref, snapshot, update

from .data import INNER, REPOSITORY, SHAPE, SHARD_SHAPE, add_array

GRID: Final = (1000, 1000)
COUNT: Final = 1_000_000
PLACE: Final = (500, 300)
"""The chunk that is read."""
CHUNK_NBYTES: Final = 1024
ARRAY: Final = "a"

_LAYOUT: Final = ((GRID[0], GRID[1] * CHUNK_NBYTES), (1, CHUNK_NBYTES))
"""Shapes of an array of a million chunks, and of its chunks."""

_UPDATES: Final = 1000
"""Most operations that a file lists."""
_HEADER_NBYTES: Final = 39
_VTABLE: Final = struct.pack("<7H2x", 14, 28, 4, 0, 0, 20, 8)
"""Vtable of a reference: index, length, chunk_id."""
_RECORD: Final = np.dtype(
    [
        ("vtable", "<i4"),
        ("index", "<u4"),
        ("chunk_id", "V12"),
        ("length", "<u8"),
        ("ndim", "<u4"),
        ("coords", "<u4", 2),
    ]
)
"""A reference and its index behind it."""
_INDEX_AT: Final = 28


def write_virtual(root: Path) -> bytes:
    """Write an array whose chunks lie in 1,000 files, and return the chunk at `PLACE`."""
    files, chunk = root / "files", _random(0)
    files.mkdir(parents=True)
    row, column = PLACE
    (files / f"row-{row:04d}.bin").write_bytes(bytes(column * CHUNK_NBYTES) + chunk)
    prefix = f"{files.as_uri()}/"
    store = icechunk.local_filesystem_store(f"{files}/")
    config = icechunk.RepositoryConfig()
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, store))
    session = create_repository(root / "repository", config)
    add_array(session.store, ARRAY, *_LAYOUT)
    columns = np.arange(COUNT, dtype=np.uint64) % GRID[1]
    session.store.set_virtual_refs_arr(
        ARRAY,
        GRID,
        [f"{prefix}row-{number // GRID[1]:04d}.bin" for number in range(COUNT)],
        columns * CHUNK_NBYTES,
        np.full(COUNT, CHUNK_NBYTES, np.uint64),
    )
    session.commit("Refer to all chunks")
    return chunk


def write_native(root: Path) -> bytes:
    """Write an array whose chunks have a file each, of which only that at `PLACE` exists."""
    repository, chunk = root / "repository", _random(1)
    session = create_repository(
        repository, icechunk.RepositoryConfig(inline_chunk_threshold_bytes=0)
    )
    array = add_array(session.store, ARRAY, *_LAYOUT)
    for corner in (0, 0), (GRID[0] - 1, GRID[1] - 1):  # the extents of the manifest
        array.blocks[corner] = 1
    snapshot_id = session.commit("Write two corners")
    ids = np.random.default_rng(2).bytes(12 * COUNT)
    number = int(np.ravel_multi_index(PLACE, GRID))
    name = encode_id(ids[12 * number : 12 * number + 12])
    (repository / "chunks" / name).write_bytes(chunk)
    _replace_manifest(repository, snapshot_id, ids)
    return chunk


def write_same(root: Path) -> None:
    """Write the arrays below *root* to a repository beside them, sharded and not."""
    session = create_repository(root / REPOSITORY)
    data = zarr.open_array(root / "plain", mode="r")[...]
    for name, shards in ("morton", SHARD_SHAPE), ("plain", None):
        add_array(session.store, name, SHAPE, INNER, shards)[...] = data
    session.commit("Write what the other arrays have")


def write_history(root: Path, count: int) -> None:
    """Write a repository of one array and *count* snapshots, of which only the last exists."""
    session = create_repository(root)
    add_array(session.store, ARRAY, (count,), (1,))
    tip = decode_id(session.commit("Create an array"))
    assert tip is not None
    rng = random.Random(0)
    ids = [*(rng.randbytes(len(tip)) for _ in range(count - 1)), tip]
    ordered = sorted(ids)
    places = {each: place for place, each in enumerate(ordered)}
    parents = dict(zip(ids[1:], ids[:-1], strict=True))
    snapshots = [
        snapshot(each, places[parents[each]] if each in parents else -1, "Put a chunk")
        for each in ordered
    ]
    commits = [update(10, {0: "main", 1: Struct(each)}) for each in reversed(ids[-_UPDATES:])]
    repo = Repo(branches=[ref("main", places[tip])], snapshots=snapshots, updates=commits)
    (root / "repo").write_bytes(repo.file())


def create_repository(
    path: Path, config: icechunk.RepositoryConfig | None = None
) -> icechunk.Session:
    """Create a repository in a folder, and open a session."""
    icechunk.set_logs_filter("error")  # it warns that several may write to a folder
    storage = icechunk.local_filesystem_storage(str(path))
    return icechunk.Repository.create(storage, config=config).writable_session("main")


def _replace_manifest(repository: Path, snapshot_id: str, ids: bytes) -> None:
    """Replace the only manifest by one of *ids*, and its size in the snapshot."""
    (manifest,) = (repository / "manifests").iterdir()
    old = manifest.read_bytes()
    payload = zstandard.decompress(old[_HEADER_NBYTES:])
    new = old[:_HEADER_NBYTES] + zstandard.compress(_encode(payload, ids), 3)
    manifest.write_bytes(new)
    snapshot = repository / "snapshots" / snapshot_id
    data = snapshot.read_bytes()
    payload = zstandard.decompress(data[_HEADER_NBYTES:])
    told = struct.pack("<Q", len(old))
    if payload.count(told) != 1:
        raise RuntimeError("it is not clear where the snapshot tells the size of its manifest")
    payload = payload.replace(told, struct.pack("<Q", len(new)))
    snapshot.write_bytes(data[:_HEADER_NBYTES] + zstandard.compress(payload, 3))


def _encode(old: bytes, ids: bytes) -> bytes:
    """Append references to *ids* to the head of *old*, the last one first, as the library does."""
    arrays = _follow(old, _field(old, _follow(old, 0), 1))
    refs = _follow(old, _field(old, _follow(old, arrays + 4), 1))
    slots = refs + 4 + 4 * np.arange(COUNT, dtype=np.int64)
    vtable = refs + 4 + 4 * COUNT
    first = vtable + len(_VTABLE)
    first += (4 - first) % 8  # a length is aligned
    tables = first + _RECORD.itemsize * np.arange(COUNT - 1, -1, -1, dtype=np.int64)
    records = np.zeros(COUNT, _RECORD)
    records["vtable"] = tables - vtable
    records["index"] = _INDEX_AT - 4
    records["chunk_id"] = np.frombuffer(ids, "V12")
    records["length"] = CHUNK_NBYTES
    records["ndim"] = len(GRID)
    records["coords"] = np.stack(np.unravel_index(np.arange(COUNT), GRID), axis=-1)
    head = old[:refs] + struct.pack("<I", COUNT) + (tables - slots).astype("<u4").tobytes()
    return (head + _VTABLE).ljust(first, b"\0") + records[::-1].tobytes()


def _follow(payload: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", payload, at)[0])


def _field(payload: bytes, table: int, slot: int) -> int:
    vtable = table - int(struct.unpack_from("<i", payload, table)[0])
    return table + int(struct.unpack_from("<H", payload, vtable + 4 + 2 * slot)[0])


def _random(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(CHUNK_NBYTES)
