"""cloud-volume and neuroglancer read meshes, skeletons and annotations of the service."""

from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from cloudvolume import CloudVolume
from cloudvolume.exceptions import SkeletonDecodeError
from neuroglancer.read_precomputed_annotations import AnnotationReader

from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import (
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
from tests.clients.precomputed.volumes import read_cloudvolume
from tests.clients.services import ask, from_each_store
from tests.clients.writing import same

SKELETONS: Final = "skeletons_mip_0"
MESHES: Final = ("sharded", "gzip_manifests")


def opened(url: str) -> Any:
    """Open the segmentation at *url*."""
    return CloudVolume(url, progress=False)


@pytest.mark.parametrize("name", [*MESHES, "legacy"])
def test_labels_read(service: str, name: str) -> None:
    """The segmentation reads, which is sharded but for the one with legacy meshes."""
    same(read_cloudvolume(f"precomputed://{service}/bucket/segments/{name}"), labels())


@pytest.mark.parametrize("name", MESHES)
def test_meshes_read(service: str, written: Written, name: str) -> None:
    """Each level of each mesh is what cloud-volume reads from the shards."""
    served = opened(f"precomputed://{service}/bucket/segments/{name}").mesh
    stored = opened(f"file://{written.bucket}/segments/{name}").mesh
    assert "Unsharded" in type(served).__name__
    for segment in IDS:
        for lod in range(stored.get_manifest(segment).num_lods):
            found, expected = (mesh.get(segment, lod=lod)[segment] for mesh in (served, stored))
            assert len(expected.vertices) > 100
            assert found == expected


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("segment", IDS)
def test_mesh_is_two_files(client: httpx.Client, written: Written, name: str, segment: int) -> None:
    """The manifest, decoded, and the fragments before it, of which any range can be had."""
    manifest, fragments = mesh_parts(written.bucket / "segments" / name, segment)
    path = f"/bucket/segments/{name}/mesh/{segment}"
    part = ask(client, path, range="bytes=7-99", accept_encoding="gzip")

    assert ask(client, f"{path}.index").content == manifest
    assert ask(client, path).content == fragments
    assert (part.status_code, part.content) == (206, fragments[7:100])
    assert part.headers["content-range"] == f"bytes 7-99/{len(fragments)}"
    for kind in ("HEAD", "GET"):
        assert ask(client, path, kind).headers["content-length"] == str(len(fragments))


def test_legacy_meshes_read(service: str, written: Written) -> None:
    """Meshes of the older kind, which are never sharded, read as they do from the folder."""
    served = opened(f"precomputed://{service}/bucket/segments/legacy").mesh
    stored = opened(f"file://{written.bucket}/segments/legacy").mesh
    for segment in IDS:
        found, expected = (mesh.get(segment) for mesh in (served, stored))
        assert len(expected.vertices) > 100
        assert found == expected


@pytest.mark.parametrize("name", ["sharded", "legacy"])
def test_other_files_beside_meshes_pass_through(
    client: httpx.Client, written: Written, name: str
) -> None:
    """What is no shard, igneous's indexes and legacy meshes among it, is served as it is."""
    root = written.bucket / "segments" / name
    for file in root.rglob("*"):
        if file.is_file() and file.name != "info" and file.suffix != ".shard":
            answer = ask(client, f"/bucket/segments/{name}/{file.relative_to(root)}")
            assert (answer.status_code, answer.content) == (200, file.read_bytes()), file.name


@pytest.mark.parametrize("name", ["sharded", *RESHARDED])
def test_skeletons_read(service: str, written: Written, name: str) -> None:
    """Each skeleton is what cloud-volume reads from the shards."""
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
def test_skeleton_is_a_file(client: httpx.Client, written: Written, name: str) -> None:
    """The file of a skeleton is what the shard holds, decoded for those who accept no gzip."""
    for segment in IDS if name == "sharded" else LARGE_IDS:
        answer = ask(client, f"/bucket/segments/{name}/{SKELETONS}/{segment}")
        expected = skeleton_bytes(written.bucket / "segments" / name, segment)
        assert (answer.status_code, answer.content) == (200, expected)
    for absent in (str(ABSENT[0]), "07", "-1", str(2**64), "7.index"):
        answer = ask(client, f"/bucket/segments/{name}/{SKELETONS}/{absent}")
        assert answer.status_code == 404


def test_absent_skeleton(service: str) -> None:
    """cloud-volume hears that a segment has no skeleton."""
    skeletons = opened(f"precomputed://{service}/bucket/segments/sharded").skeleton

    with pytest.raises(SkeletonDecodeError):
        skeletons.get(ABSENT[0])


NO_ID: Final = 2


def readers(service: str, written: Written, name: str) -> tuple[Any, Any]:
    """Open what is served, and the twin on disk."""
    path = Path("annotations") / name
    return (
        AnnotationReader(f"{service}/bucket/{path}/"),
        AnnotationReader(f"file://{written.twins / path}/"),
    )


def said(annotation: Any) -> str:
    """Spell all members out, so that annotations can be compared."""
    related = [list(map(int, ids)) for ids in annotation.segments or []]
    return f"{annotation.to_json()} {related}"


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_by_id(service: str, written: Written, name: str) -> None:
    """Each annotation reads with its properties and relationships."""
    served, twin = readers(service, written, name)
    ids = [int(file.name) for file in (written.twins / f"annotations/{name}/by_id").iterdir()]

    assert len(ids) == COUNT
    assert LAST_ID in ids
    for number in ids:
        assert said(served.by_id[number]) == said(twin.by_id[number])
    with pytest.raises(KeyError):
        served.by_id[NO_ID]


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_by_relationship(service: str, written: Written, name: str) -> None:
    """The annotations of each segment read, in their order."""
    served, twin = readers(service, written, name)

    assert list(served.relationships) == list(COLLECTIONS[name].relationships)
    for relationship in served.relationships:
        for segment in SEGMENTS:
            found, expected = (
                [said(a) for a in reader.relationships[relationship][segment]]
                for reader in (served, twin)
            )
            assert found == expected
        with pytest.raises(KeyError):
            served.relationships[relationship][NO_ID]


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_by_cell(service: str, written: Written, name: str) -> None:
    """Each cell of each spatial level reads, or is absent as in the twin; none is lost."""
    served, twin = readers(service, written, name)
    seen = 0
    for level, grid in enumerate(COLLECTIONS[name].grids):
        for cell in product(*map(range, grid)):
            found, expected = (_in_cell(reader.spatial[level], cell) for reader in (served, twin))
            assert found == expected
            seen += len(found)

    assert seen == COUNT


def _in_cell(level: Any, cell: tuple[int, ...]) -> list[str]:
    return [said(a) for a in level[cell]] if cell in level else []
