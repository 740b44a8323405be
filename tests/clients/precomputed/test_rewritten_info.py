"""Programs write an ``info`` back that they were served, and its sharding stays."""

import json
from pathlib import Path
from typing import Any

import pytest
from cloudvolume import CloudVolume

from app.formats.neuroglancer_precomputed.layout import Precomputed
from app.formats.neuroglancer_precomputed.metadata import parse_info
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.volumes import document
from tests.resolving import ROOT

VOLUMES = ("scales/all", "cloudvolume/identity_index_raw_data_raw", "igneous/image")


def serve(stored: Path, folder: Path) -> None:
    """Put into *folder* what clients see of the ``info`` in *stored*."""
    data = (stored / "info").read_bytes()
    parsed = parse_info(json.loads(data), data)
    assert parsed is not None
    folder.mkdir(parents=True)
    (folder / "info").write_bytes(parsed.served)


async def take(stored: Path, folder: Path) -> Any:
    """Give what is stored for the ``info`` that a client left in *folder*."""
    before, given = ((path / "info").read_bytes() for path in (stored, folder))
    translator = Precomputed(2**20, 2**20).translator(ROOT)
    return json.loads(await translator.translate(given, before, DirectFetch(MemoryStore())))


@pytest.mark.parametrize("name", VOLUMES)
async def test_cloudvolume_adds_a_scale(written: Written, tmp_path: Path, name: str) -> None:
    """The others keep their sharding, and the new one has none."""
    stored, folder = written.bucket / name, tmp_path / "served"
    serve(stored, folder)
    cloud = CloudVolume(f"file://{folder}", progress=False, compress=False)
    cloud.add_scale((128, 128, 64))
    cloud.commit_info()
    found, expected = await take(stored, folder), document(stored)

    assert found["scales"][:-1] == expected["scales"]
    assert "sharding" not in found["scales"][-1]


@pytest.mark.parametrize(("kind", "source"), [("mesh", "mesh"), ("skeletons", "skeleton")])
async def test_cloudvolume_commits_meshes_and_skeletons(
    written: Written, tmp_path: Path, kind: str, source: str
) -> None:
    """Their own documents keep their sharding."""
    segments = written.bucket / "segments/sharded"
    path = document(segments)[kind]
    serve(segments, tmp_path / "served")
    serve(segments / path, tmp_path / "served" / path)
    cloud = CloudVolume(f"file://{tmp_path}/served", progress=False, compress=False)
    getattr(cloud, source).meta.commit_info()

    found = await take(segments / path, tmp_path / "served" / path)
    assert found == document(segments / path)
