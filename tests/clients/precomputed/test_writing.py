"""Volumes and segments are written through the service, and libraries read the shards."""

import json
import shutil
import struct
from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore

from shardgate.formats.contract import LARGE_NBYTES
from tests.support.clients.filling import KEYS
from tests.support.clients.precomputed.cases import BY_NAME, pyramid
from tests.support.clients.precomputed.reading import SKELETONS, opened, read_annotations
from tests.support.clients.precomputed.segments import IDS, LARGE_IDS, skeleton_bytes
from tests.support.clients.precomputed.volumes import (
    IDENTITY,
    LOSSY,
    MURMUR,
    Volume,
    Written,
    by_tensorstore,
    document,
    read_tensorstore,
    sharding,
    write_shards,
)
from tests.support.clients.services import Files, Taker, chunks_in, lay_out, mixed, s3_kvstore
from tests.support.clients.writing import Values, same
from tests.support.deferred import Deferred
from tests.support.formats.neuroglancer_precomputed.shards import chunks_of, decoded

cloudfiles: Any = Deferred("cloudfiles")
cloudvolume: Any = Deferred("cloudvolume")
cloud_shards: Any = Deferred("cloudvolume.datasource.precomputed.sharding")


def other_values(values: Values) -> Values:
    """Return *values* reversed along each axis, so that other chunks are all zero."""
    return values[::-1, ::-1, ::-1].copy()


def check(volume: Volume, taker: Taker, twin: Path, *, exact: Volume | None = None) -> None:
    """Compare each stored scale with the twin's, and with the values of *exact*."""
    url = f"file://{taker.folder / volume.name}"
    for index, scale in enumerate(volume.scales):
        found = read_tensorstore(f"{url}/", index)
        same(found, read_tensorstore(f"file://{twin}/", index))
        if exact is not None and scale.encoding not in LOSSY:
            same(found, exact.scales[index].values)


def write_through(name: str, written: Written, taker: Taker, twin: Path) -> None:
    """Push a mix of old, new and absent chunks, then all new ones, then delete all."""
    volume = BY_NAME[name]
    taker.place(written.bucket / name, name)
    before = chunks_in(written.twins / name)
    other = replace(
        volume, scales=[replace(s, values=other_values(s.values)) for s in volume.scales]
    )
    other.write(other, twin, False)  # noqa: FBT003  # a Writer
    after: Files = chunks_in(twin)

    some = mixed(before, after)
    lay_out(twin, after, some)
    taker.push(name, before, some)
    check(volume, taker, twin)
    lay_out(twin, some, after)
    taker.push(name, some, after)
    check(volume, taker, twin, exact=other)
    taker.push(name, after, {})
    assert taker.stored(name) == set()
    assert not np.any(read_tensorstore(f"file://{taker.folder / name}/"))


USUAL: Final = (
    "bits/murmurhash3_x86_128_1_0_63", "shards/identity_index_gzip_data_gzip",
    "grid/one_chunk", "scales/all", "plain/cloudvolume",
)  # fmt: skip
"""Volumes that differ in how a shard is written; soak runs have all."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.soak) for n in BY_NAME]
)
def test_stored_volume_has_the_last_put_chunks(
    name: str, written: Written, taker: Taker, tmp_path: Path
) -> None:
    """Stored volumes of each case have the chunks that were put last; deletion leaves no shard."""
    write_through(name, written, taker, tmp_path / "twin")


NEW_ID: Final = 2**63 + 5


@pytest.mark.parametrize("name", ["sharded", "murmur_64"])
def test_skeletons_are_replaced_added_and_deleted(
    written: Written, taker: Taker, name: str
) -> None:
    """Skeletons are replaced, added and deleted by single requests; cloud-volume reads them."""
    source, target = written.bucket / "segments" / name, f"skeletons/{name}"
    taker.place(source, target)
    first, second, third = IDS if name == "sharded" else LARGE_IDS[-3:]
    old = {segment: skeleton_bytes(source, segment) for segment in (first, second, third)}
    before = {f"{SKELETONS}/{segment}": body for segment, body in old.items()}
    placed = {first: old[second], second: old[first], NEW_ID: old[third]}
    after = {f"{SKELETONS}/{segment}": body for segment, body in placed.items()}
    taker.push(target, before, after)

    path = taker.folder / target
    found, expected = (opened(f"file://{each}").skeleton for each in (path, source))
    assert {segment: skeleton_bytes(path, segment) for segment in placed} == placed
    for segment, former in ((first, second), (second, first), (NEW_ID, third)):
        np.testing.assert_array_equal(found.get(segment).vertices, expected.get(former).vertices)
        np.testing.assert_array_equal(found.get(segment).edges, expected.get(former).edges)
    with pytest.raises(cloudvolume.exceptions.EmptyFileException):
        found.get(third)


@pytest.mark.parametrize(
    "name", ["boxes", *(pytest.param(n, marks=pytest.mark.soak) for n in ("points", "lines"))]
)
def test_annotations_are_replaced_and_deleted(
    written: Written, taker: Taker, tmp_path: Path, name: str
) -> None:
    """Annotation files are replaced and deleted; neuroglancer reads the shards so."""
    path = f"annotations/{name}"
    taker.place(written.bucket / path, path)
    twin = tmp_path / "twin"
    shutil.copytree(written.twins / path, twin)
    before = chunks_in(twin)
    after = shifted(before)
    lay_out(twin, before, after)
    taker.push(path, before, after)

    assert len(before) > len(after) > 10
    found = read_annotations(f"file://{taker.folder / path}/", before)
    assert {key for key, value in found.items() if value is not None} == set(after)
    assert found == read_annotations(f"file://{twin}/", before)
    taker.push(path, after, {})
    assert taker.stored(path) == set()


def shifted(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Give each file the content of its predecessor in its folder, and remove the first."""
    by_folder = groupby(sorted(files), key=lambda key: key.rpartition("/")[0])
    return {after: files[key] for _, keys in by_folder for key, after in pairwise(keys)}


SECRETS: Final = {"AWS_ACCESS_KEY_ID": KEYS, "AWS_SECRET_ACCESS_KEY": KEYS}


def place_zeros(taker: Taker, volume: Volume, name: str) -> None:
    """Store *volume* without any chunk."""
    scales = [replace(scale, values=np.zeros_like(scale.values)) for scale in volume.scales]
    by_tensorstore(replace(volume, scales=scales), taker.folder / name, sharded=True)


@pytest.mark.parametrize(
    "name",
    [
        "shards/identity_index_gzip_data_gzip",
        "encoding/compressed_segmentation_uint64_4",
        "scales/all",
    ],
)
def test_tensorstore_fills_a_sharded_volume(taker: Taker, name: str) -> None:
    """TensorStore fills each scale of a volume, whose shards and sharding are kept."""
    volume = BY_NAME[name]
    place_zeros(taker, volume, name)
    for index, scale in enumerate(volume.scales):
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": s3_kvstore(taker.url, f"{name}/"),
            "scale_index": index,
        }
        tensorstore.open(spec).result().write(scale.values).result()

    path = taker.folder / name
    expected = [scale.sharding for scale in volume.scales]
    assert [scale.get("sharding") for scale in document(path)["scales"]] == expected
    for index, scale in enumerate(volume.scales):
        same(read_tensorstore(f"file://{path}/", index), scale.values)


def test_tensorstore_adds_a_scale(taker: Taker) -> None:
    """TensorStore adds a scale to ``info``, and the other scales keep their sharding."""
    first, second = pyramid()[0], pyramid()[2]
    place_zeros(taker, Volume("", by_tensorstore, [first]), "grown")
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": s3_kvstore(taker.url, "grown/"),
        "scale_metadata": second.members | {"chunk_size": second.chunk},
        "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 2},
    }
    tensorstore.open(spec, create=True).result().write(second.values).result()
    tensorstore.open(spec | {"scale_metadata": {}, "scale_index": 0}).result().write(
        first.values
    ).result()

    info = document(taker.folder / "grown")
    assert [scale.get("sharding") for scale in info["scales"]] == [first.sharding, None]
    for index, scale in enumerate((first, second)):
        same(read_tensorstore(f"file://{taker.folder}/grown/", index), scale.values)


@pytest.fixture
def files(taker: Taker) -> Generator[str]:
    """Yield the URL by which cloud-files addresses the service as S3."""
    cloudfiles.paths.add_alias("gate", f"s3://{taker.url}/")
    yield "gate://data"
    cloudfiles.interfaces.reset_connection_pools()


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        pytest.param("shards/identity_index_gzip_data_gzip", None, marks=pytest.mark.soak),
        ("shards/murmurhash3_x86_128_index_raw_data_gzip", "gzip"),
    ],
)
def test_cloudvolume_fills_a_sharded_volume(
    taker: Taker, files: str, name: str, compress: Any
) -> None:
    """cloud-volume fills a sharded volume over S3 if it is given the ``info``."""
    volume, target = BY_NAME[name], f"cloud/{compress}/{name}"
    place_zeros(taker, volume, target)
    info = cloudvolume.CloudVolume(f"precomputed://{taker.url}/data/{target}", progress=False).info
    cloud = cloudvolume.CloudVolume(
        f"{files}/{target}", info=info, compress=compress, progress=False, secrets=SECRETS
    )
    cloud[:] = volume.scales[0].values
    cloud.commit_info()

    path = taker.folder / target
    assert document(path)["scales"][0]["sharding"] == volume.scales[0].sharding
    same(read_tensorstore(f"file://{path}/"), volume.scales[0].values)


HOWS: Final = (
    sharding((1, 2, 3)),
    sharding((0, 3, 61), MURMUR, index="gzip"),
    sharding((2, 0, 2), MURMUR, data="gzip"),
    sharding((0, 1, 0), index="gzip", data="gzip"),
)
VALUES: Final = {number: b"value %d" % number for number in [*range(40), *LARGE_IDS, 2**40 + 7]}
SKELETONS_INFO: Final[dict[str, Any]] = {"@type": "neuroglancer_skeletons", "vertex_attributes": []}


def named(values: Mapping[int, bytes]) -> dict[str, bytes]:
    """Return *values* by their keys as text."""
    return {str(number): value for number, value in values.items()}


@pytest.fixture
def name(taker: Taker, tmp_path: Path) -> str:
    """Create a folder for skeletons in the dataset."""
    (taker.folder / tmp_path.name).mkdir()
    return tmp_path.name


@pytest.mark.parametrize(
    ("how", "nbytes"), [*((how, 0) for how in HOWS), (sharding((0, 2, 0)), LARGE_NBYTES)]
)
def test_tensorstore_reads_changed_shards_by_id(
    taker: Taker, name: str, how: Any, nbytes: int
) -> None:
    """TensorStore reads kept, put and no deleted ids from shards changed by the service.

    The last shard is so large that most of it is copied as it is.
    """
    padding, path = bytes(nbytes // len(VALUES) * 3), taker.folder / name
    before = {n: VALUES[n] + padding for n in list(VALUES)[::2]}
    write_shards(path, how, before)
    (path / "info").write_text(json.dumps(SKELETONS_INFO | {"sharding": how}))
    put = {n: b"put %d" % n for n in list(VALUES)[::-3]}
    gone = set(list(VALUES)[::5])
    after = {n: value for n, value in (before | put).items() if n not in gone}
    taker.push(name, named(before), named(after))
    spec = {"driver": "neuroglancer_uint64_sharded", "base": f"file://{path}/", "metadata": how}
    store = tensorstore.KvStore.open(spec).result()

    for number in VALUES:
        found = store.read(struct.pack(">Q", number)).result()
        assert (found.value if found.state == "value" else None) == after.get(number)


@pytest.mark.parametrize(
    "how", [sharding((0, 2, 0), IDENTITY), sharding((0, 2, 0), MURMUR, index="gzip")]
)
def test_shards_equal_those_of_cloudvolume(taker: Taker, name: str, how: Any) -> None:
    """A written shard equals that of cloud-volume byte for byte, except gzip streams."""
    spec = cloud_shards.ShardingSpecification.from_dict(how)
    ids = sorted(VALUES, key=lambda n: (int(spec.compute_shard_location(n).minishard_number), n))
    (expected,) = cloud_shards.synthesize_shard_files(spec, {n: VALUES[n] for n in ids}).values()
    path = taker.folder / name
    (path / "info").write_text(json.dumps(SKELETONS_INFO | {"sharding": how}))
    taker.push(name, {}, named(VALUES))
    found = (path / "0.shard").read_bytes()

    if how["minishard_index_encoding"] == "raw":
        assert found == expected
    assert decoded(found, how) == decoded(expected, how)
    assert chunks_of(found, how) == VALUES
    end = max(stop for each in decoded(found, how) for _, stop in each.values())
    assert found[64:end] == expected[64:end]


def served(taker: Taker, source: Path, name: str, folder: Path) -> None:
    """Store the ``info`` at *source*, and write the served one to *folder*."""
    for path, data in ((taker.folder / name, (source / "info").read_bytes()), (folder, None)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "info").write_bytes(data or taker.client.get(f"/data/{name}/info").content)


def written_back(taker: Taker, name: str, folder: Path) -> Any:
    """Put the ``info`` in *folder*, and return the stored one."""
    answer = taker.client.put(f"/data/{name}/info", content=(folder / "info").read_bytes())
    assert answer.is_success, answer.text
    return document(taker.folder / name)


@pytest.mark.parametrize("volume_name", ["scales/all", "igneous/image"])
def test_cloudvolume_adds_a_scale(
    written: Written, taker: Taker, name: str, tmp_path: Path, volume_name: str
) -> None:
    """cloud-volume adds a scale without sharding, and the other scales keep their sharding."""
    served(taker, written.bucket / volume_name, name, tmp_path / "seen")
    cloud = cloudvolume.CloudVolume(f"file://{tmp_path}/seen", progress=False, compress=False)
    cloud.add_scale((128, 128, 64))
    cloud.commit_info()
    found = written_back(taker, name, tmp_path / "seen")

    assert found["scales"][:-1] == document(written.bucket / volume_name)["scales"]
    assert "sharding" not in found["scales"][-1]


@pytest.mark.parametrize(("kind", "source"), [("mesh", "mesh"), ("skeletons", "skeleton")])
def test_cloudvolume_rewrites_info_of_meshes_and_skeletons(
    written: Written, taker: Taker, name: str, tmp_path: Path, *, kind: str, source: str
) -> None:
    """Documents of meshes and skeletons keep their sharding when cloud-volume commits them."""
    segments = written.bucket / "segments/sharded"
    part = document(segments)[kind]
    served(taker, segments, name, tmp_path / "seen")
    served(taker, segments / part, f"{name}/{part}", tmp_path / "seen" / part)
    cloud = cloudvolume.CloudVolume(f"file://{tmp_path}/seen", progress=False, compress=False)
    getattr(cloud, source).meta.commit_info()

    stored = written_back(taker, f"{name}/{part}", tmp_path / "seen" / part)
    assert stored == document(segments / part)
