"""Documents that real clients read, changed and wrote back."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tensorstore
import zarr

from app.formats.zarr.metadata import NodeTranslator, parse_node
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.clients.arrays import BY_NAME
from tests.clients.writing import (
    Case,
    quiet,
    write,
)
from tests.resolving import ROOT

_ONLY_ZARR = ("after/", "dtype/string", "dtype/fixed", "dtype/time")
_CASES = [case for case in BY_NAME.values() if not case.name.startswith("plain/")]


def _copy_of_what_is_seen(folder: Path, copy: Path) -> None:
    """Write the documents that clients see of the nodes in *folder*."""
    for file in folder.rglob("zarr.json"):
        data = file.read_bytes()
        seen = copy / file.relative_to(folder)
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.write_bytes(parse_node(json.loads(data), data).served)


def _write_back(copy: Path, folder: Path) -> None:
    """Store each document of *copy* as the service does."""
    store = MemoryStore()
    for file in folder.rglob("zarr.json"):
        store.place(ROOT.join(file.relative_to(folder).as_posix()), file.read_bytes())
    for file in copy.rglob("zarr.json"):
        path = file.relative_to(copy)
        directory = ROOT.join(path.parent.as_posix()) if len(path.parts) > 1 else ROOT
        translator = NodeTranslator(directory, 2**20)
        stored = folder / path
        given = translator.translate(file.read_bytes(), stored.read_bytes(), DirectFetch(store))
        stored.write_bytes(asyncio.run(given))


def _same_but_for(one: Path, other: dict[str, Any], *members: str) -> None:
    document = json.loads(one.read_bytes())
    for member in (*members, "storage_transformers", "attributes", "chunk_key_encoding"):
        document.pop(member, None)
        other.pop(member, None)
    assert document == other


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_an_array_that_zarr_python_changed_keeps_its_shards(case: Case, tmp_path: Path) -> None:
    """Its attributes and its shape are the new ones."""
    write(case, tmp_path / "stored")
    before = json.loads((tmp_path / "stored" / "zarr.json").read_bytes())
    _copy_of_what_is_seen(tmp_path / "stored", tmp_path / "seen")
    with quiet():
        array: Any = zarr.open_array(tmp_path / "seen", mode="r+")
        array.attrs.update({"of": "zarr"})
        array.resize(tuple(n + 9 for n in array.shape))

    _write_back(tmp_path / "seen", tmp_path / "stored")

    document = json.loads((tmp_path / "stored" / "zarr.json").read_bytes())
    assert document["attributes"]["of"] == "zarr"
    assert document["shape"] == [n + 9 for n in before["shape"]]
    _same_but_for(tmp_path / "stored" / "zarr.json", before, "shape")


@pytest.mark.parametrize(
    "case",
    [case for case in _CASES if not case.name.startswith(_ONLY_ZARR) and case.values.ndim],
    ids=lambda case: case.name,
)
def test_an_array_that_tensorstore_resized_keeps_its_shards(case: Case, tmp_path: Path) -> None:
    """It leaves out what has a default."""
    write(case, tmp_path / "stored")
    before = json.loads((tmp_path / "stored" / "zarr.json").read_bytes())
    _copy_of_what_is_seen(tmp_path / "stored", tmp_path / "seen")
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/seen/"}
    array = tensorstore.open(spec).result()
    array.resize(exclusive_max=[n + 9 for n in case.values.shape]).result()

    _write_back(tmp_path / "seen", tmp_path / "stored")

    document = json.loads((tmp_path / "stored" / "zarr.json").read_bytes())
    assert document["shape"] == [n + 9 for n in before["shape"]]
    _same_but_for(tmp_path / "stored" / "zarr.json", before, "shape")
