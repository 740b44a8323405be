"""Shards and documents that the service writes are those that their own libraries expect."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import tensorstore
from cloudvolume import CloudVolume
from cloudvolume.datasource.precomputed.sharding import (
    ShardingSpecification,
    synthesize_shard_files,
)

from app.formats.contract import LARGE_NBYTES
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import LARGE_IDS
from tests.clients.precomputed.volumes import IDENTITY, MURMUR, document, sharding, write_shards
from tests.clients.services import Taker
from tests.formats.neuroglancer_precomputed.shards import chunks_of, decoded

HOWS: Final = (
    sharding((1, 2, 3)),
    sharding((0, 3, 61), MURMUR, index="gzip"),
    sharding((2, 0, 2), MURMUR, data="gzip"),
    sharding((0, 1, 0), index="gzip", data="gzip"),
)
VALUES: Final = {number: b"value %d" % number for number in [*range(40), *LARGE_IDS, 2**40 + 7]}
SKELETONS: Final[dict[str, Any]] = {"@type": "neuroglancer_skeletons", "vertex_attributes": []}


def named(values: Mapping[int, bytes]) -> dict[str, bytes]:
    """Name values by their keys."""
    return {str(number): value for number, value in values.items()}


@pytest.fixture
def name(taker: Taker, tmp_path: Path) -> str:
    """Make a folder for skeletons of the dataset that takes them."""
    (taker.folder / tmp_path.name).mkdir()
    return tmp_path.name


@pytest.mark.parametrize(
    ("how", "nbytes"), [*((how, 0) for how in HOWS), (sharding((0, 2, 0)), LARGE_NBYTES)]
)
def test_tensorstore_finds_all_ids(taker: Taker, name: str, how: Any, nbytes: int) -> None:
    """Those that it wrote itself and that stay, those that were put, and not those that went.

    The last shard is so large that most of it is copied as it is.
    """
    padding, path = bytes(nbytes // len(VALUES) * 3), taker.folder / name
    before = {n: VALUES[n] + padding for n in list(VALUES)[::2]}
    write_shards(path, how, before)
    (path / "info").write_text(json.dumps(SKELETONS | {"sharding": how}))
    put = {n: b"put %d" % n for n in list(VALUES)[::-3]}
    gone = set(list(VALUES)[::5])
    after = {n: value for n, value in (before | put).items() if n not in gone}
    taker.push(name, named(before), named(after))
    spec = {"driver": "neuroglancer_uint64_sharded", "base": f"file://{path}/", "metadata": how}
    store = tensorstore.KvStore.open(spec).result()

    for number in VALUES:
        found = store.read(struct.pack(">Q", number)).result()
        assert (found.value if found.state == "value" else None) == after.get(number)


ONE_SHARD: Final = [
    sharding((0, 2, 0), name, index=index)
    for name in (IDENTITY, MURMUR)
    for index in ("raw", "gzip")
]


def one_shard(taker: Taker, name: str, how: Any) -> bytes:
    """Put all values, and read the shard that they come to."""
    path = taker.folder / name
    path.mkdir(exist_ok=True)
    (path / "info").write_text(json.dumps(SKELETONS | {"sharding": how}))
    taker.push(name, {}, named(VALUES))
    return (path / "0.shard").read_bytes()


@pytest.mark.parametrize("how", ONE_SHARD)
def test_shards_are_those_of_cloudvolume(taker: Taker, name: str, how: Any) -> None:
    """To the byte, but for gzip, which it compresses otherwise: then all but that is the same.

    It puts minishards into the order in which it is given them.
    """
    spec = ShardingSpecification.from_dict(how)
    ids = sorted(VALUES, key=lambda n: (int(spec.compute_shard_location(n).minishard_number), n))
    (expected,) = synthesize_shard_files(spec, {n: VALUES[n] for n in ids}).values()
    found = one_shard(taker, name, how)

    if how["minishard_index_encoding"] == "raw":
        assert found == expected
    assert decoded(found, how) == decoded(expected, how)
    end = max(stop for each in decoded(found, how) for _, stop in each.values())
    assert found[64:end] == expected[64:end]


@pytest.mark.parametrize("how", ONE_SHARD)
def test_shards_hold_what_those_of_tensorstore_do(
    taker: Taker, name: str, tmp_path: Path, how: Any
) -> None:
    """It puts each minishard index right behind its chunks, and here they all come at the end."""
    write_shards(tmp_path, how, VALUES)
    expected = (tmp_path / "0.shard").read_bytes()
    found = one_shard(taker, name, how)

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
        ours = one_shard(taker, f"{name}-one", single)
        assert (ours == theirs) == (how["minishard_index_encoding"] == "raw")


def served(taker: Taker, source: Path, name: str, folder: Path) -> None:
    """Place the ``info`` at *source* in the store, and what clients see of it in *folder*."""
    for path, data in (
        (taker.folder / name, (source / "info").read_bytes()),
        (folder, None),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "info").write_bytes(data or taker.client.get(f"/data/{name}/info").content)


def written_back(taker: Taker, name: str, folder: Path) -> Any:
    """Put the ``info`` that a client left in *folder*, and read what is stored then."""
    answer = taker.client.put(f"/data/{name}/info", content=(folder / "info").read_bytes())
    assert answer.is_success, answer.text
    return document(taker.folder / name)


@pytest.mark.parametrize(
    "volume_name", ["scales/all", "cloudvolume/identity_index_raw_data_raw", "igneous/image"]
)
def test_cloudvolume_adds_a_scale(
    written: Written, taker: Taker, name: str, tmp_path: Path, volume_name: str
) -> None:
    """The others keep their sharding, and the new one has none."""
    served(taker, written.bucket / volume_name, name, tmp_path / "seen")
    cloud = CloudVolume(f"file://{tmp_path}/seen", progress=False, compress=False)
    cloud.add_scale((128, 128, 64))
    cloud.commit_info()
    found = written_back(taker, name, tmp_path / "seen")

    assert found["scales"][:-1] == document(written.bucket / volume_name)["scales"]
    assert "sharding" not in found["scales"][-1]


@pytest.mark.parametrize(("kind", "source"), [("mesh", "mesh"), ("skeletons", "skeleton")])
def test_cloudvolume_commits_meshes_and_skeletons(
    written: Written, taker: Taker, name: str, tmp_path: Path, *, kind: str, source: str
) -> None:
    """Their own documents keep their sharding."""
    segments = written.bucket / "segments/sharded"
    part = document(segments)[kind]
    served(taker, segments, name, tmp_path / "seen")
    served(taker, segments / part, f"{name}/{part}", tmp_path / "seen" / part)
    cloud = CloudVolume(f"file://{tmp_path}/seen", progress=False, compress=False)
    getattr(cloud, source).meta.commit_info()

    stored = written_back(taker, f"{name}/{part}", tmp_path / "seen" / part)
    assert stored == document(segments / part)
