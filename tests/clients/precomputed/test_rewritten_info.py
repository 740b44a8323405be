"""Programs write an ``info`` back that they were served, and its sharding stays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstore
from cloudvolume import CloudVolume

from app.errors import ConflictError
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


@pytest.mark.parametrize("name", [*VOLUMES, "segments/sharded"])
async def test_cloudvolume_commits_what_it_read(
    written: Written, tmp_path: Path, name: str
) -> None:
    """Nothing changes, but for members that it adds."""
    stored, folder = written.bucket / name, tmp_path / "served"
    serve(stored, folder)
    CloudVolume(f"file://{folder}", progress=False, compress=False).commit_info()
    found, expected = await take(stored, folder), document(stored)

    assert found["scales"] == expected["scales"]
    assert {name: found.get(name) for name in expected} == expected


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


def _tensorstore(folder: Path, **members: Any) -> None:
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{folder}/",
        "scale_metadata": members,
        "open": True,
        "create": True,
    }
    tensorstore.open(spec).result()


async def test_tensorstore_adds_a_scale(written: Written, tmp_path: Path) -> None:
    """It writes the whole document, with what it does not know of."""
    stored, folder = written.bucket / "scales/all", tmp_path / "served"
    serve(stored, folder)
    _tensorstore(
        folder,
        key="new",
        size=[2, 2, 2],
        chunk_size=[2, 2, 2],
        resolution=[512, 512, 256],
        encoding="raw",
    )
    found, expected = await take(stored, folder), document(stored)

    assert found["scales"][:-1] == expected["scales"]
    assert found["scales"][-1]["key"] == "new"


CHANGES: dict[str, Callable[[Any], None]] = {
    "encoding": lambda cloud: cloud.scale.update(encoding="png"),
    "chunk_sizes": lambda cloud: cloud.scale.update(chunk_sizes=[[8, 8, 8]]),
    "size": lambda cloud: cloud.scale.update(size=[20, 20, 20]),
    "data_type": lambda cloud: cloud.info.update(data_type="uint32"),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_cloudvolume_cannot_change_what_the_shards_hold(
    written: Written, tmp_path: Path, what: str
) -> None:
    """It would read something else from them."""
    stored, folder = written.bucket / VOLUMES[1], tmp_path / "served"
    serve(stored, folder)
    cloud = CloudVolume(f"file://{folder}", progress=False, compress=False)
    CHANGES[what](cloud)
    cloud.commit_info()

    with pytest.raises(ConflictError, match=f"{what} cannot change"):
        await take(stored, folder)
