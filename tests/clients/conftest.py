"""The bucket of all cases, served from a folder and from SeaweedFS."""

import json
import shutil
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
import zarr

from tests.support.clients.arrays import CASES, IN_GROUPS, VALUES, member
from tests.support.clients.services import connect, served_fixtures
from tests.support.clients.writing import consolidate, quiet, write, write_group


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every case, and groups of some, into one folder."""
    root = tmp_path_factory.mktemp("bucket")
    for case in CASES:
        write(case, root / case.name)
    for group in (root / "groups/consolidated", root / "groups/listed"):
        write_group(group, {"title": "some cases"})
        for name in IN_GROUPS:
            _copy_as_variable(root / name, group / member(name))
        write_group(group / "below", {"depth": 1})
        write_group(group / "below/deeper")
        _copy_as_variable(root / "index/zarr_start_big_crc", group / "below/deeper/v")
    consolidate(root / "groups/consolidated")
    _write_v2_group(root / "groups/v2")
    (root / "notes").mkdir()
    (root / "notes/read me.txt").write_text("belongs to no container\n")
    return root


def _copy_as_variable(source: Path, target: Path) -> None:
    """Copy an array and name its dimensions, as xarray requires."""
    shutil.copytree(source, target)
    file = target / "zarr.json"
    document = json.loads(file.read_text())
    document["dimension_names"] = [f"{target.name}_{i}" for i in range(len(document["shape"]))]
    file.write_text(json.dumps(document))


def _write_v2_group(path: Path) -> None:
    with quiet():
        group = zarr.create_group(path, zarr_format=2)
        array = group.create_array("v", shape=VALUES.shape, dtype=VALUES.dtype, chunks=(2, 3, 4))
        array[...] = VALUES
        array.attrs["_ARRAY_DIMENSIONS"] = ["z", "y", "x"]
        zarr.consolidate_metadata(path, zarr_format=2)


local, remote, service = served_fixtures("clients")


@pytest.fixture(scope="module")
def url(local: str) -> str:
    """Return the URL of the service before the folder."""
    return local


@pytest.fixture(scope="module")
def client(url: str) -> Generator[httpx.Client]:
    """Open a client that sends no default headers and decodes no content coding."""
    with connect(url) as opened:
        yield opened
