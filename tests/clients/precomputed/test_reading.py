"""TensorStore, cloud-volume and neuroglancer read volumes and segments without shards."""

from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import tensorstore
from cloudvolume import CloudVolume
from cloudvolume.exceptions import EmptyVolumeException, SkeletonDecodeError

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.precomputed.cases import BY_NAME, FURTHER, VALUES
from tests.support.clients.precomputed.reading import SKELETONS, opened, read_annotations
from tests.support.clients.precomputed.segments import (
    ABSENT,
    COLLECTIONS,
    COUNT,
    IDS,
    LARGE_IDS,
    LAST_ID,
    RESHARDED,
    SEGMENTS,
    labels,
    mesh_parts,
    skeleton_bytes,
)
from tests.support.clients.precomputed.volumes import (
    LOSSY,
    Volume,
    Written,
    read_cloudvolume,
    read_tensorstore,
)
from tests.support.clients.services import ask, chunks_in, from_each_store
from tests.support.clients.writing import same
from tests.support.files import read_files
from tests.support.serving import serving


@pytest.mark.parametrize(
    ("service", "volume"),
    [
        pytest.param(store, name, marks=pytest.mark.soak if name in further else ())
        for store, further in (("local", ()), ("remote", FURTHER))
        for name in BY_NAME
    ],
    indirect=True,
)
def test_chunks_equal_the_files_of_the_unsharded_twin(
    client: httpx.Client, written: Written, volume: Volume
) -> None:
    """Each chunk equals the file of the unsharded twin, and gets 404 if there is no file."""
    for scale in volume.scales:
        folder = written.twins / volume.name / scale.path
        names = {name for name, _ in scale.chunks()} | {file.name for file in folder.glob("*")}
        for name in names:
            answer = ask(client, f"/bucket/{volume.name}/{scale.path}/{name}")
            twin = folder / name
            expected = (200, twin.read_bytes()) if twin.exists() else (404, None)

            assert "content-encoding" not in answer.headers
            assert answer.status_code == expected[0], name
            assert expected[1] in {None, answer.content}, name


@pytest.mark.parametrize("compress", ["gzip", "br", "zstd"])
def test_folder_compressed_by_cloudvolume_is_read(tmp_path: Path, compress: str) -> None:
    """Chunk files with the suffix of their compression are read by their plain names."""
    values = np.arange(70 * 64 * 2, dtype="u2").reshape(70, 64, 2, 1)
    info = CloudVolume.create_new_info(
        1, "image", "uint16", "raw", (1, 1, 1), (0, 0, 0), (70, 64, 2), chunk_size=(64, 64, 2)
    )
    volume = CloudVolume(f"precomputed://{tmp_path.as_uri()}", info=info, compress=compress)
    volume.commit_info()
    volume[:] = values
    assert not (tmp_path / "1_1_1/0-64_0-64_0-2").exists()

    with serving(Settings(datasets={"em": DatasetSettings(url=tmp_path.as_uri())})) as url:
        np.testing.assert_array_equal(CloudVolume(f"precomputed://{url}/em")[:], values)


@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_equal_the_files_of_the_unsharded_twin(
    client: httpx.Client, written: Written, name: str
) -> None:
    """Each annotation, relationship and spatial cell equals the file that neuroglancer wrote."""
    twin = written.twins / f"annotations/{name}"
    files = chunks_in(twin)
    for key, data in files.items():
        answer = ask(client, f"/bucket/annotations/{name}/{key}")
        assert (answer.status_code, answer.content) == (200, data), key
    assert len(files) > 40


each_but_further = pytest.mark.parametrize(
    "volume",
    [pytest.param(n, marks=pytest.mark.soak if n in FURTHER else ()) for n in BY_NAME],
    indirect=True,
)
"""For readers of values, since other tests compare all chunks with the twin's files."""
_CHANNELS: Final = "takes the channels of such a picture in another order than TensorStore"
OWN_WAY: Final = {
    f"encoding/{name}_{data}": _CHANNELS
    for name in ("jpeg_uint8_3", "png_uint8_3", "png_uint8_4")
    for data in ("raw", "gzip")
}
"""Volumes that cloud-volume decodes to other values than written, sharded or not."""
_DEPTH: Final = "takes every png for one of eight bits"
BEYOND: Final = {"encoding/png_uint16_1_raw": _DEPTH, "encoding/png_uint16_1_gzip": _DEPTH}
"""Volumes that cloud-volume cannot decode from any server, with the reason."""


@from_each_store
@each_but_further
def test_cloudvolume_reads_written_values(service: str, written: Written, volume: Volume) -> None:
    """cloud-volume reads each scale of each volume as written, as from the unsharded twin."""
    if volume.name in BEYOND:
        with pytest.raises(ValueError, match="reshape"):
            read_cloudvolume(f"precomputed://{service}/bucket/{volume.name}")
        return
    for index, scale in enumerate(volume.scales):
        found = read_cloudvolume(f"precomputed://{service}/bucket/{volume.name}", index)

        same(found, read_cloudvolume(f"file://{written.twins / volume.name}", index))
        if scale.encoding not in LOSSY and volume.name not in OWN_WAY:
            same(found, scale.values)


def test_cloudvolume_reads_parts_and_sees_no_shards(service: str) -> None:
    """cloud-volume reads a box across chunks, sees no shards, and reports absent chunks."""

    def cloud(name: str) -> Any:
        return CloudVolume(f"precomputed://{service}/bucket/{name}", progress=False)

    scales, holes = cloud("scales/all"), cloud("holes/identity_raw")
    expected = BY_NAME["holes/identity_raw"].scales[0].values

    same(cloud("grid/negative_offset")[-4:7, -98:-91, -3:2], VALUES[3:14, 2:9, 1:6])
    assert not any(scales.image.is_sharded(mip) for mip in scales.available_mips)
    same(holes[:8, :4, :4], expected[:8, :4, :4])
    with pytest.raises(EmptyVolumeException):
        holes[8:12, :4, :4]


@from_each_store
@each_but_further
def test_tensorstore_reads_written_values_in_chunks(
    service: str, written: Written, volume: Volume
) -> None:
    """TensorStore reads each scale as written, in chunks and not in shards."""
    for index, scale in enumerate(volume.scales):
        spec = {"driver": "neuroglancer_precomputed", "scale_index": index}
        spec["kvstore"] = f"{service}/bucket/{volume.name}/"
        array = tensorstore.open(spec, open=True).result()
        expected = scale.values
        if scale.encoding in LOSSY:
            expected = read_tensorstore(f"file://{written.twins / volume.name}/", index)
        same(array.read().result(), expected)
        layout = array.chunk_layout
        channels = scale.values.shape[3]
        shapes = [tuple(chunk.shape or ()) for chunk in (layout.read_chunk, layout.write_chunk)]

        assert shapes == [(*scale.chunk, channels)] * 2


def test_tensorstore_detects_a_precomputed_volume(service: str) -> None:
    """TensorStore without a driver detects a precomputed volume by its ``info``."""
    array = tensorstore.open(f"{service}/bucket/bits/identity_1_2_3/").result()

    same(array.read().result(), VALUES)


MESHES: Final = ("sharded", "gzip_manifests")


@pytest.mark.parametrize("name", [*MESHES, "legacy"])
def test_cloudvolume_reads_labels(service: str, name: str) -> None:
    """cloud-volume reads the labels of a segmentation, sharded or not."""
    same(read_cloudvolume(f"precomputed://{service}/bucket/segments/{name}"), labels())


@pytest.mark.parametrize("name", [*MESHES, "legacy"])
def test_cloudvolume_reads_meshes(service: str, written: Written, name: str) -> None:
    """cloud-volume reads each level of each mesh as from the shards or legacy files."""
    served = opened(f"precomputed://{service}/bucket/segments/{name}").mesh
    stored = opened(f"file://{written.bucket}/segments/{name}").mesh
    assert name == "legacy" or "Unsharded" in type(served).__name__
    for segment in IDS:
        if name == "legacy":
            pairs = [[mesh.get(segment) for mesh in (served, stored)]]
        else:
            lods = range(stored.get_manifest(segment).num_lods)
            pairs = [
                [mesh.get(segment, lod=lod)[segment] for mesh in (served, stored)] for lod in lods
            ]
        for found, expected in pairs:
            assert len(expected.vertices) > 100
            assert found == expected


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("segment", IDS)
def test_mesh_is_served_as_manifest_and_fragments(
    client: httpx.Client, written: Written, name: str, segment: int
) -> None:
    """A mesh is served as a decoded manifest and its fragments, of which ranges can be read."""
    manifest, fragments = mesh_parts(written.bucket / "segments" / name, segment)
    path = f"/bucket/segments/{name}/mesh/{segment}"
    part = ask(client, path, range="bytes=7-99", accept_encoding="gzip")

    assert ask(client, f"{path}.index").content == manifest
    assert ask(client, path).content == fragments
    assert (part.status_code, part.content) == (206, fragments[7:100])
    assert part.headers["content-range"] == f"bytes 7-99/{len(fragments)}"
    for kind in ("HEAD", "GET"):
        assert ask(client, path, kind).headers["content-length"] == str(len(fragments))


@pytest.mark.parametrize("name", ["sharded", "legacy"])
def test_other_files_beside_meshes_are_served_as_stored(
    client: httpx.Client, written: Written, name: str
) -> None:
    """Other files beside meshes, such as igneous's indexes, are served as stored."""
    for key, data in read_files(written.bucket / "segments" / name).items():
        if not key.endswith(("/info", ".shard")) and key != "info":
            answer = ask(client, f"/bucket/segments/{name}/{key}")
            assert (answer.status_code, answer.content) == (200, data), key


@pytest.mark.parametrize("name", ["sharded", *RESHARDED])
def test_cloudvolume_reads_skeletons(service: str, written: Written, name: str) -> None:
    """cloud-volume reads each skeleton as from the shards."""
    served = opened(f"precomputed://{service}/bucket/segments/{name}").skeleton
    stored = opened(f"file://{written.bucket}/segments/{name}").skeleton
    assert "Unsharded" in type(served).__name__
    for segment in IDS if name == "sharded" else LARGE_IDS:
        found, expected = served.get(segment), stored.get(segment)
        assert len(expected.vertices) > 10
        np.testing.assert_array_equal(found.vertices, expected.vertices)
        np.testing.assert_array_equal(found.edges, expected.edges)
        np.testing.assert_array_equal(found.radius, expected.radius)


@pytest.mark.parametrize("name", ["sharded", *RESHARDED])
def test_skeleton_is_served_as_a_decoded_file(
    client: httpx.Client, written: Written, name: str
) -> None:
    """A skeleton is served as its decoded bytes; an absent or malformed id gets 404."""
    for segment in IDS if name == "sharded" else LARGE_IDS:
        answer = ask(client, f"/bucket/segments/{name}/{SKELETONS}/{segment}")
        expected = skeleton_bytes(written.bucket / "segments" / name, segment)
        assert (answer.status_code, answer.content) == (200, expected)
    for absent in (str(ABSENT[0]), "07", "-1", str(2**64), "7.index"):
        answer = ask(client, f"/bucket/segments/{name}/{SKELETONS}/{absent}")
        assert answer.status_code == 404
    with pytest.raises(SkeletonDecodeError):
        opened(f"precomputed://{client.base_url}/bucket/segments/{name}").skeleton.get(ABSENT[0])


NO_ID: Final = 2


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_neuroglancer_reads_annotations(service: str, written: Written, name: str) -> None:
    """Neuroglancer reads annotations by id, relationship and cell as from the unsharded twin."""
    twin, collection = written.twins / f"annotations/{name}", COLLECTIONS[name]
    ids = [int(file.name) for file in (twin / "by_id").iterdir()]
    keys = [f"by_id/{number}" for number in (*ids, NO_ID)]
    keys += [
        f"rel_{n}/{segment}" for n in collection.relationships for segment in (*SEGMENTS, NO_ID)
    ]
    for level, grid in enumerate(collection.grids):
        cells = product(*map(range, grid))
        keys += [f"spatial{level}/{'_'.join(map(str, cell))}" for cell in cells]
    found = read_annotations(f"{service}/bucket/annotations/{name}/", keys)

    assert len(ids) == COUNT
    assert LAST_ID in ids
    assert found == read_annotations(f"file://{twin}/", keys)
    absent = {key for key, value in found.items() if value is None}
    assert absent >= {key for key in keys if key.endswith(f"/{NO_ID}")}
    assert sum(len(value or ()) for key, value in found.items() if "spatial" in key) == COUNT
