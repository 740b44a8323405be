"""Shards that were planned anew, and those of other writers, id by id."""

import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorstore
from cloudvolume.datasource.precomputed.sharding import (
    ShardingSpecification,
    synthesize_shard_files,
)

from app.formats.contract import NewShard, ShardRewriter, Slot
from app.model import ByteRange, ObjectRef, VirtualKey
from app.resolve.containers import Containers
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.clients.precomputed.segments import LARGE_IDS
from tests.clients.precomputed.volumes import (
    IDENTITY,
    MURMUR,
    sharding,
    write_shards,
)
from tests.formats.neuroglancer_precomputed.shards import chunks_of, decoded
from tests.resolving import ROOT, known_formats

HOWS = [
    sharding((1, 2, 3)),
    sharding((0, 3, 61), MURMUR, index="gzip"),
    sharding((2, 0, 2), MURMUR, data="gzip"),
    sharding((0, 1, 0), index="gzip", data="gzip"),
]
SKELETONS: dict[str, Any] = {"@type": "neuroglancer_skeletons", "vertex_attributes": []}
VALUES = {number: b"value %d" % number for number in [*range(40), *LARGE_IDS, 2**40 + 7]}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("how", HOWS)
async def test_tensorstore_finds_all_ids(tmp_path: Path, how: Any, *, is_large: bool) -> None:
    """Those that it wrote itself and that stay, those that were put, and not those that went."""
    write_shards(tmp_path, how, dict(list(VALUES.items())[::2]))
    (tmp_path / "info").write_text(json.dumps(SKELETONS | {"sharding": how}))
    changes: dict[str, bytes | None] = {str(n): b"put %d" % n for n in list(VALUES)[::-3]}
    gone = [str(n) for n in list(VALUES)[::5]]
    await rewrite(tmp_path, changes | dict.fromkeys(gone), is_large=is_large)
    store = open_shards(tmp_path, how)
    expected = {str(n): value for n, value in list(VALUES.items())[::2]} | changes

    for number in VALUES:
        name = str(number)
        found = store.read(struct.pack(">Q", number)).result()
        if name in gone or name not in expected:
            assert found.state == "missing"
        else:
            assert found.value == expected[name]


def open_shards(path: Path, how: Any) -> Any:
    """Open shards as values by their ids, with TensorStore."""
    spec = {"driver": "neuroglancer_uint64_sharded", "base": f"file://{path}/", "metadata": how}
    return tensorstore.KvStore.open(spec).result()


ONE_SHARD = [
    sharding((0, 2, 0), name, index=index)
    for name in (IDENTITY, MURMUR)
    for index in ("raw", "gzip")
]


@pytest.mark.parametrize("how", ONE_SHARD)
async def test_shards_are_those_of_cloudvolume(tmp_path: Path, how: Any) -> None:
    """To the byte, but for gzip, which it compresses otherwise: then all but that is the same.

    It puts minishards into the order in which it is given them.
    """
    spec = ShardingSpecification.from_dict(how)
    ids = sorted(VALUES, key=lambda n: (int(spec.compute_shard_location(n).minishard_number), n))
    (expected,) = synthesize_shard_files(spec, {n: VALUES[n] for n in ids}).values()
    found = await _one_shard(tmp_path, how)

    if how["minishard_index_encoding"] == "raw":
        assert found == expected
    assert decoded(found, how) == decoded(expected, how)
    end = max(stop for each in decoded(found, how) for _, stop in each.values())
    assert found[64:end] == expected[64:end]


@pytest.mark.parametrize("how", ONE_SHARD)
async def test_shards_hold_what_those_of_tensorstore_do(tmp_path: Path, how: Any) -> None:
    """It puts each minishard index right behind its chunks, and here they all come at the end."""
    write_shards(tmp_path, how, VALUES)
    expected = (tmp_path / "0.shard").read_bytes()
    found = await _one_shard(tmp_path / "found", how)

    assert chunks_of(found, how) == chunks_of(expected, how) == VALUES
    assert [list(each) for each in decoded(found, how)] == [
        list(each) for each in decoded(expected, how)
    ]
    if how["minishard_index_encoding"] == "raw":
        assert len(found) == len(expected)
    if how["hash"] == IDENTITY:
        single = {**how, "minishard_bits": 0}
        write_shards(tmp_path / "one", single, VALUES)
        theirs = (tmp_path / "one/0.shard").read_bytes()
        ours = await _one_shard(tmp_path / "other", single)
        assert (ours == theirs) == (how["minishard_index_encoding"] == "raw")


async def _one_shard(path: Path, how: Any) -> bytes:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()  # noqa: ASYNC240  there is nothing else to wait for
    (path / "info").write_text(json.dumps(SKELETONS | {"sharding": how}))
    await rewrite(path, {str(number): value for number, value in VALUES.items()})
    return (path / "0.shard").read_bytes()


type Changes = Mapping[str, bytes | None]


async def rewrite(folder: Path, changes: Changes, *, is_large: bool = False) -> None:
    """Make *changes* by virtual keys; the objects of *folder* are what is stored.

    Shards are taken for small ones, or for large ones, however large they are.
    """
    fetch = DirectFetch(_load(folder))
    containers = Containers(known_formats(decoded_nbytes=2**24))
    waiting: dict[ShardRewriter[Any], dict[tuple[int, ...], bytes | None]] = {}
    for key, body in changes.items():
        slot = await containers.target(ROOT, VirtualKey(key), fetch)
        assert isinstance(slot, Slot)
        found: Any
        found, entry = slot
        shard = replace(found, large_nbytes=0) if is_large else found
        stored = None if body is None else shard.encode(entry, body, is_gzip=False)
        waiting.setdefault(shard, {})[entry] = stored
    for shard, entries in waiting.items():
        opened = await shard.open(entries, fetch)
        _store(folder, shard.ref, shard.plan(opened, entries))


def _load(folder: Path) -> MemoryStore:
    store = MemoryStore()
    for path in folder.rglob("*"):
        if path.suffix in {".shard", ".index", ".data"} or path.name == "info":
            store.place(ROOT.join(str(path.relative_to(folder))), path.read_bytes())
    return store


def _store(folder: Path, ref: ObjectRef, planned: NewShard | None) -> None:
    path = folder / ref.key.removeprefix(f"{ROOT.key}/")
    if planned is None:
        path.unlink(missing_ok=True)
        return
    old = path.read_bytes() if path.exists() else b""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(_bytes(old, planned.pieces)))


def _bytes(old: bytes, pieces: Iterable[Any]) -> Iterable[bytes]:
    return (old[slice(*piece)] if isinstance(piece, ByteRange) else piece for piece in pieces)
