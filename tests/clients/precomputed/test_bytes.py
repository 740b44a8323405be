"""The service gives, byte for byte, the files that an unsharded volume would be made of."""

import json
from pathlib import Path

import httpx
import pytest

from tests.clients.asking import ask
from tests.clients.conftest import from_each_store
from tests.clients.precomputed.annotations import COLLECTIONS
from tests.clients.precomputed.cases import CASES
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import RESHARDED
from tests.clients.precomputed.volumes import Volume, document
from tests.clients.writing import Json

DOCUMENTS = [
    *(volume.name for volume in CASES),
    *(f"annotations/{name}" for name in COLLECTIONS),
    *(
        f"segments/{name}{part}"
        for name in ("sharded", "gzip_manifests", "legacy")
        for part in ("", "/mesh", "/properties")
    ),
    "segments/sharded/skeletons_mip_0",
    *(f"segments/{name}/skeletons_mip_0" for name in RESHARDED),
]


def unsharded(stored: Json) -> Json:
    """Take the member *sharding* out of the places where the documents allow it."""
    found: Json = json.loads(json.dumps(stored))
    parts = [found, *found.get("scales", []), *found.get("spatial", [])]
    parts += [*found.get("relationships", []), found.get("by_id", {})]
    for part in parts:
        part.pop("sharding", None)
    return found


def test_chunks_are_the_files_of_the_twin(
    client: httpx.Client, written: Written, volume: Volume
) -> None:
    """Each chunk is the twin's file, and where the twin has none there is no chunk."""
    for scale in volume.scales:
        folder = written.twins / volume.name / scale.path
        names = {name for name, _ in scale.chunks()} | {file.name for file in _files(folder)}
        for name in names:
            answer = ask(client, f"/bucket/{volume.name}/{scale.path}/{name}")
            twin = folder / name
            expected = (200, twin.read_bytes()) if twin.exists() else (404, None)

            assert "content-encoding" not in answer.headers
            assert answer.status_code == expected[0], name
            assert expected[1] in {None, answer.content}, name


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


@from_each_store
@pytest.mark.parametrize("name", DOCUMENTS)
def test_info_loses_its_sharding_and_nothing_else(
    client: httpx.Client, written: Written, name: str
) -> None:
    """The document that is served is the stored one, but for the members *sharding*."""
    answer = ask(client, f"/bucket/{name}/info")
    stored = document(written.bucket / name)

    assert answer.status_code == 200
    assert answer.json() == unsharded(stored)


@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_are_the_files_of_the_twin(
    client: httpx.Client, written: Written, name: str
) -> None:
    """Each annotation, relationship and spatial cell is the file that `neuroglancer` wrote."""
    twin = written.twins / f"annotations/{name}"
    files = [file for file in twin.rglob("*") if file.is_file() and file.name != "info"]
    for file in files:
        answer = ask(client, f"/bucket/annotations/{name}/{file.relative_to(twin)}")
        assert (answer.status_code, answer.content) == (200, file.read_bytes()), file.name
    assert len(files) > 40
