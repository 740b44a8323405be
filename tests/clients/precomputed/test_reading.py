"""TensorStore, cloud-volume and neuroglancer read volumes and segments without shards."""

from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import tensorstore

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.precomputed.cases import BY_NAME, VALUES
from tests.support.clients.precomputed.reading import SKELETONS, opened, read_annotations
from tests.support.clients.precomputed.segments import (
    ABSENT,
    COLLECTIONS,
    COUNT,
    IDS,
    LARGE_IDS,
    LAST_ID,
    RESHARDED,
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
from tests.support.clients.services import ask, chunks_in
from tests.support.clients.writing import same
from tests.support.deferred import Deferred
from tests.support.files import read_files
from tests.support.serving import serving

cloudvolume: Any = Deferred("cloudvolume")


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
    info = cloudvolume.CloudVolume.create_new_info(
        1, "image", "uint16", "raw", (1, 1, 1), (0, 0, 0), (70, 64, 2), chunk_size=(64, 64, 2)
    )
    volume = cloudvolume.CloudVolume(
        f"precomputed://{tmp_path.as_uri()}", info=info, compress=compress
    )
    volume.commit_info()
    volume[:] = values
    assert not (tmp_path / "1_1_1/0-64_0-64_0-2").exists()

    with serving(Settings(datasets={"em": DatasetSettings(url=tmp_path.as_uri())})) as url:
        np.testing.assert_array_equal(cloudvolume.CloudVolume(f"precomputed://{url}/em")[:], values)


DECODED: Final = (
    "encoding/", "dtype/", "scales/", "holes/murmur", "holes/cloud", "grid/negative", "grid/un",
)  # fmt: skip
in_each_volume = pytest.mark.parametrize(
    "volume",
    [pytest.param(n, marks=() if n.startswith(DECODED) else pytest.mark.soak) for n in BY_NAME],
    indirect=True,
)
"""Volumes that clients decode in their own way; of all, other tests compare the chunks."""
OWN_WAY: Final = ("encoding/jpeg_uint8_3", "encoding/png_uint8_3", "encoding/png_uint8_4")
"""Volumes whose channels cloud-volume takes in another order than TensorStore, sharded or not."""
BEYOND: Final = "encoding/png_uint16_1"
"""Volume that cloud-volume decodes from no server: it takes every png for one of eight bits."""


@in_each_volume
def test_cloudvolume_reads_written_values(service: str, written: Written, volume: Volume) -> None:
    """cloud-volume reads each scale of each volume as written, as from the unsharded twin."""
    if volume.name == BEYOND:
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
        return cloudvolume.CloudVolume(f"precomputed://{service}/bucket/{name}", progress=False)

    scales, holes = cloud("scales/all"), cloud("holes/identity_raw")
    expected = BY_NAME["holes/identity_raw"].scales[0].values

    same(cloud("grid/negative_offset")[-4:7, -98:-91, -3:2], VALUES[3:14, 2:9, 1:6])
    assert not any(scales.image.is_sharded(mip) for mip in scales.available_mips)
    same(holes[:8, :4, :4], expected[:8, :4, :4])
    with pytest.raises(cloudvolume.exceptions.EmptyVolumeException):
        holes[8:12, :4, :4]


@in_each_volume
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


@pytest.mark.parametrize("name", ["sharded", "gzip_manifests", "legacy"])
def test_cloudvolume_reads_labels_and_meshes(service: str, written: Written, name: str) -> None:
    """cloud-volume reads labels, and each level of each mesh as from the shards or legacy files."""
    same(read_cloudvolume(f"precomputed://{service}/bucket/segments/{name}"), labels())
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


@pytest.mark.parametrize(("name", "segment"), [("sharded", IDS[0]), ("gzip_manifests", IDS[1])])
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
def test_skeletons_are_served_as_decoded_files(
    client: httpx.Client, written: Written, name: str
) -> None:
    """A skeleton is served as its decoded bytes, which cloud-volume reads as from the shards.

    An absent or malformed id gets 404.
    """
    base, stored_at = f"/bucket/segments/{name}", written.bucket / "segments" / name
    served = opened(f"precomputed://{client.base_url}{base}").skeleton
    stored = opened(f"file://{stored_at}").skeleton
    assert "Unsharded" in type(served).__name__
    for segment in IDS if name == "sharded" else LARGE_IDS:
        answer = ask(client, f"{base}/{SKELETONS}/{segment}")
        assert (answer.status_code, answer.content) == (200, skeleton_bytes(stored_at, segment))
        found, expected = served.get(segment), stored.get(segment)
        assert len(expected.vertices) > 10
        np.testing.assert_array_equal(found.vertices, expected.vertices)
        np.testing.assert_array_equal(found.edges, expected.edges)
        np.testing.assert_array_equal(found.radius, expected.radius)
    for absent in (str(ABSENT[0]), "07", "-1", str(2**64), "7.index"):
        assert ask(client, f"{base}/{SKELETONS}/{absent}").status_code == 404
    with pytest.raises(cloudvolume.exceptions.SkeletonDecodeError):
        served.get(ABSENT[0])


NO_ID: Final = 2


@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_are_served_as_of_the_unsharded_twin(
    client: httpx.Client, written: Written, name: str
) -> None:
    """Each annotation, relationship and spatial cell equals the file that neuroglancer wrote.

    Neuroglancer reads them as from the twin, and those of absent ids and cells as absent.
    """
    twin, collection = written.twins / f"annotations/{name}", COLLECTIONS[name]
    files = chunks_in(twin)
    for key, data in files.items():
        answer = ask(client, f"/bucket/annotations/{name}/{key}")
        assert (answer.status_code, answer.content) == (200, data), key
    cells = [
        f"spatial{level}/{'_'.join(map(str, cell))}"
        for level, grid in enumerate(collection.grids)
        for cell in np.ndindex(*grid)
    ]
    absent = [f"by_id/{NO_ID}", *(f"rel_{n}/{NO_ID}" for n in collection.relationships)]
    keys = [*files, *cells, *absent]
    found = read_annotations(f"{client.base_url}/bucket/annotations/{name}/", keys)

    assert f"by_id/{LAST_ID}" in files
    assert sum(key.startswith("by_id/") for key in files) == COUNT
    assert found == read_annotations(f"file://{twin}/", keys)
    assert {key for key, value in found.items() if value is None} == {*keys} - {*files}
    assert sum(len(found[key] or ()) for key in cells) == COUNT
