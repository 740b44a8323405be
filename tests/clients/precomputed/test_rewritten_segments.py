"""Readers of meshes, skeletons and annotations find in new shards what was put there."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cloudvolume import CloudVolume
from cloudvolume.exceptions import EmptyFileException
from neuroglancer.read_precomputed_annotations import AnnotationReader

from tests.clients.precomputed.annotations import COLLECTIONS, SEGMENTS
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.rewriting import rewrite
from tests.clients.precomputed.segments import LARGE_IDS, RESHARDED, skeleton_bytes
from tests.clients.precomputed.volumes import (
    document,
)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("name", RESHARDED)
async def test_skeletons_change(
    written: Written, tmp_path: Path, name: str, *, is_large: bool
) -> None:
    """cloud-volume reads one that was replaced, one that is new, and those that stayed."""
    source = written.bucket / "segments" / name
    path = shutil.copytree(source, tmp_path / "segments")
    first, second, *others = LARGE_IDS
    folder = document(path)["skeletons"]
    bodies = {first: skeleton_bytes(source, second), 99: skeleton_bytes(source, second)}
    changes: dict[str, bytes | None] = {f"{folder}/{n}": body for n, body in bodies.items()}
    await rewrite(path, changes | {f"{folder}/{second}": None}, is_large=is_large)
    stored, found = opened(source).skeleton, opened(path).skeleton

    for new, old in [(first, second), (99, second), *zip(others, others, strict=True)]:
        skeleton, expected = found.get(new), stored.get(old)
        np.testing.assert_array_equal(skeleton.vertices, expected.vertices)
        np.testing.assert_array_equal(skeleton.edges, expected.edges)
    with pytest.raises(EmptyFileException):
        found.get(second)


def opened(path: Path) -> Any:
    """Open a segmentation with cloud-volume."""
    return CloudVolume(f"file://{path}", progress=False)


@pytest.mark.parametrize("name", COLLECTIONS)
async def test_annotations_made_of_nothing_but_chunks(
    written: Written, tmp_path: Path, name: str
) -> None:
    """TensorStore, which is what the reader of neuroglancer reads shards with, finds all."""
    twin, path = written.twins / f"annotations/{name}", tmp_path / "made"
    path.mkdir()
    shutil.copy(written.bucket / f"annotations/{name}/info", path)
    info = document(path)
    for part in (info["by_id"], *info["relationships"], *info["spatial"]):
        folder = twin / part["key"]
        if "sharding" not in part:
            shutil.copytree(folder, path / part["key"])
            continue
        bodies: dict[str, bytes | None] = {
            f"{part['key']}/{file.name}": file.read_bytes() for file in folder.iterdir()
        }
        for key, body in bodies.items():
            await rewrite(path, {key: body})
    found, expected = (AnnotationReader(f"file://{each}/") for each in (path, twin))
    for file in (twin / "by_id").iterdir():
        number = int(file.name)
        assert found.by_id[number].to_json() == expected.by_id[number].to_json()
    for relationship in found.relationships:
        for segment in SEGMENTS:
            one, other = (
                [a.to_json() for a in reader.relationships[relationship][segment]]
                for reader in (found, expected)
            )
            assert one == other
    for level, grid in enumerate(COLLECTIONS[name].grids):
        for cell in np.ndindex(*grid):
            assert (cell in found.spatial[level]) == (cell in expected.spatial[level])
            if cell in found.spatial[level]:
                one, other = (
                    [a.to_json() for a in reader.spatial[level][cell]]
                    for reader in (found, expected)
                )
                assert one == other
