"""Real clients read hierarchies in which one array has NaN and an infinity in its attributes."""

import json
import math
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.filling import over_obstore
from tests.support.clients.reading import JS, open_tensorstore, over_fsspec, run_node
from tests.support.clients.services import connect
from tests.support.clients.writing import quiet
from tests.support.deferred import Deferred
from tests.support.formats.kerchunk.sets import write_json
from tests.support.lacking import need
from tests.support.serving import serving

xarray: Any = Deferred("xarray")

VALUES: Final = np.arange(6, dtype="i4")
PLACES: Final = {
    "v2": "plain/v2",
    "v3": "plain/v3",
    "sharded": "plain/sharded",
    "repository": "repository",
    "references": "references",
}
_OPEN_GROUP: Final = """
import * as zarr from "zarrita";
const group = await zarr.open(new zarr.FetchStore(process.argv[1]), { kind: "group" });
process.stdout.write(JSON.stringify(group.attrs));
"""


def _fill(group: zarr.Group, **options: Any) -> None:
    """Write arrays `a` and `b`; the attributes of `a` are not all finite."""
    is_v2 = group.metadata.zarr_format == 2
    for name, numbers in ("a", {"low": math.nan, "high": math.inf}), ("b", {}):
        named: Any = {} if is_v2 else {"dimension_names": ["x"]}
        array = group.create_array(name, shape=6, dtype="i4", chunks=3, **named, **options)
        array[:] = VALUES
        array.attrs.update(numbers | ({"_ARRAY_DIMENSIONS": ["x"]} if is_v2 else {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write plain groups with consolidated metadata, a reference set and an empty repository."""
    root = tmp_path_factory.mktemp("finite")
    groups: dict[str, Any] = {"v2": (2, {}), "v3": (3, {}), "sharded": (3, {"shards": 6})}
    with quiet():
        for name, (version, options) in groups.items():
            path = root / "plain" / name
            _fill(zarr.create_group(path, zarr_format=version), **options)
            zarr.consolidate_metadata(path)
    plain = root / "plain/v2"
    refs: dict[str, Any] = {f"{name}/{n}": [f"{plain}/{name}/{n}"] for name in "ab" for n in (0, 1)}
    for document in plain.rglob(".z[ga]*"):
        refs[str(document.relative_to(plain))] = document.read_text()
    write_json(root / "set.json", {"version": 1, "refs": refs})
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(root / "repository")))
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Generator[str]:
    """Serve all; the repository is filled in a session, since the library refuses NaN."""
    options: Any = {"format": "kerchunk", "virtual_chunk_prefixes": (f"file://{folder}/plain",)}
    datasets = {
        "plain": DatasetSettings(url=f"{folder}/plain"),
        "references": DatasetSettings.model_validate({"url": f"{folder}/set.json"} | options),
        "repository": DatasetSettings(url=f"{folder}/repository", writable=True),
    }
    with serving(Settings(datasets=datasets)) as served, httpx.Client(base_url=served) as client:
        sessions = "/api/datasets/repository/sessions"
        session = client.post(sessions).raise_for_status().json()["session_id"]
        store = over_obstore(served, f"@session.{session}", "repository")
        _fill(zarr.create_group(store))
        commit = {"message": "both arrays"}
        client.post(f"{sessions}/{session}/commit", json=commit).raise_for_status()
        yield served


@pytest.fixture(scope="module")
def read_by_zarrita(url: str) -> dict[str, Any]:
    """Read each array `b` with zarrita, all in one process of node."""
    return run_node(f"{url}/{path}/b" for path in PLACES.values())


@pytest.mark.parametrize("place", PLACES)
def test_clients_read_arrays_with_and_beside_nan(
    url: str, read_by_zarrita: dict[str, Any], place: str
) -> None:
    """zarr-python reads NaN and infinities in attributes through a group of each format.

    TensorStore and zarrita, which are strict, read the array beside.
    """
    found = over_fsspec(f"{url}/{PLACES[place]}")["a"]
    assert math.isnan(found.attrs["low"])
    assert found.attrs["high"] == math.inf
    np.testing.assert_array_equal(found[:], VALUES)

    array = f"{url}/{PLACES[place]}/b"
    driver = "zarr" if place in {"v2", "references"} else "zarr3"
    np.testing.assert_array_equal(open_tensorstore(array, driver).read().result(), VALUES)
    assert read_by_zarrita[array]["shape"] == [6]


@pytest.mark.parametrize("place", ["repository", "references"])
def test_xarray_reads_attributes_that_are_not_finite(url: str, place: str) -> None:
    """Xarray finds all arrays of a hierarchy that is not consolidated because of NaN."""
    with xarray.open_zarr(f"{url}/{place}", consolidated=False, chunks=None) as opened:
        assert set(opened.data_vars) == {"a", "b"}
        assert math.isnan(opened["a"].attrs["low"])


def test_zarrita_opens_the_root_of_a_repository_with_nan(url: str) -> None:
    """Zarrita opens the root of a repository that has NaN in the attributes of an array."""
    command = [need("node"), "--input-type=module", "-e", _OPEN_GROUP, f"{url}/repository"]
    process = subprocess.run(command, cwd=JS, capture_output=True, text=True, check=False)

    assert process.stdout == "{}", process.stderr


@pytest.mark.parametrize("key", ["v2/a/.zattrs", "v2/.zmetadata", "v3/a/zarr.json", "v3/zarr.json"])
def test_stored_document_with_nan_is_served_as_its_bytes(folder: Path, url: str, key: str) -> None:
    """A document that is stored with NaN, and has no sharded arrays, is served byte for byte."""
    stored = (folder / "plain" / key).read_bytes()
    with connect(url) as client:
        assert client.get(f"/plain/{key}").content == stored
    assert b"NaN" in stored


@pytest.mark.parametrize("key", ["zarr.json", "a/zarr.json"])
def test_rewritten_document_keeps_nan(folder: Path, url: str, key: str) -> None:
    """A document that is served without shards differs from the stored one in shards only."""
    served = httpx.get(f"{url}/plain/sharded/{key}").json()
    stored = json.loads((folder / "plain/sharded" / key).read_text())
    for document in (served, stored):
        nested = document.get("consolidated_metadata", {}).get("metadata", {})
        for node in (document, *nested.values()):
            node.pop("codecs", None)
            node.pop("chunk_grid", None)

    assert repr(served) == repr(stored).replace("\n", "")


def test_consolidated_metadata_of_a_set_with_nan_are_absent(url: str) -> None:
    """A reference set with NaN in a document has no generated consolidated metadata."""
    assert httpx.get(f"{url}/references/.zmetadata").status_code == 404
