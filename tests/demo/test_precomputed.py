"""`shardgate.demo.precomputed`: the tissue, as cloud-volume reads it from the service."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shardgate.settings import Settings
from tests.support.deferred import Deferred
from tests.support.examples import datasets_of
from tests.support.serving import serving

cloudvolume: Any = Deferred("cloudvolume")

SEGMENTS: Final = (1, 8, 59)
VOXEL_NM: Final = (20, 20, 40)
LONGEST_NM: Final = 200


@pytest.fixture(scope="module")
def cells(demo_paths: dict[str, Path]) -> Generator[Any]:
    """Open the segmentation without shards."""
    with serving(Settings(datasets=datasets_of(demo_paths))) as url:
        yield cloudvolume.CloudVolume(f"precomputed://{url}/cells", progress=False)


@pytest.fixture(scope="module")
def labels(cells: Any) -> Any:
    """Return the segments on every fourth voxel."""
    return cloudvolume.CloudVolume(cells.cloudpath, mip=2, progress=False)[:][..., 0]


@pytest.mark.parametrize(("level", "tolerance"), [(0, 0.1), (1, 0.4)])
def test_meshes_enclose_their_segments(
    cells: Any, labels: Any, level: int, tolerance: float
) -> None:
    """The volume in the mesh of a segment is that of its voxels, and its triangles face outside."""
    for segment in SEGMENTS:
        mesh = cells.mesh.get(segment, lod=level)
        mesh = mesh[segment] if isinstance(mesh, dict) else mesh
        a, b, c = np.moveaxis(mesh.vertices.astype(float)[mesh.faces], 1, 0)
        inside = np.einsum("ij,ij->", a, np.cross(b, c)) / 6

        voxels = (labels == segment).sum() * 4**3 * np.prod(VOXEL_NM)
        assert inside == pytest.approx(voxels, rel=tolerance)


def test_skeletons_lie_in_their_segments(cells: Any) -> None:
    """All points of a skeleton are in its segment, and edges lead along the neurite."""
    labels = cells[:][..., 0]
    for segment in SEGMENTS:
        skeleton = cells.skeleton.get(segment)
        voxels = (skeleton.vertices / VOXEL_NM).astype(int).clip(max=np.array(labels.shape) - 1)
        starts, ends = skeleton.vertices[skeleton.edges.T]

        assert (labels[tuple(voxels.T)] == segment).all()
        assert np.linalg.norm(starts - ends, axis=1).max() < LONGEST_NM
