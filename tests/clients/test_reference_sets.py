"""Reference sets of kerchunk behind the service: read, listed, replaced, and hostile ones."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import zarr

from shardgate.settings import DatasetSettings, LimitSettings, Settings, VirtualPrefix
from shardgate.storage.contract import ObjectStore
from tests.support.clients.reading import OPENERS, open_tensorstore
from tests.support.clients.services import Watched, ask, connect, sizes_of
from tests.support.deferred import Deferred
from tests.support.formats.kerchunk.sets import (
    kerchunk_of,
    read_by_fsspec,
    write_hdf5,
    write_json,
    write_parquet,
)
from tests.support.formats.zarr.building import LITTLE, build
from tests.support.serving import serving

xarray: Any = Deferred("xarray")

VALUES: Final = np.arange(600, dtype="f4").reshape(20, 30)
PARTLY: Final = np.full(400, 9, "i2")
PARTLY[10:20] = PARTLY[110:120] = np.arange(10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an HDF5 file, and sets that refer to it and to other places."""
    root = tmp_path_factory.mktemp("references")
    (root / "sources").mkdir()
    (root / "sets" / "deep").mkdir(parents=True)
    (root / "sources" / "six").write_bytes(b"whole!")
    (root / "sources" / "out").symlink_to(root / "sets" / "refs.json")
    write_hdf5(source := root / "sources" / "a.h5")
    refs = kerchunk_of(source)
    write_json(root / "sets" / "refs.json", refs)
    write_json(root / "sets" / "deep" / "flat.json", refs["refs"])
    write_parquet(root / "sets" / "refs.parq", refs)
    write_json(
        root / "sets" / "hostile.json",
        {
            "outside": [f"{root}/sets/refs.json", 0, 9],
            "climbing": [f"{root}/sources/../sets/refs.json", 0, 9],
            "elsewhere": ["s3://bucket/key", 0, 9],
            "internal": ["http://169.254.169.254/latest", 0, 9],
            "absent": [f"{root}/sources/absent.h5", 0, 9],
            "absent-whole": [f"{root}/sources/absent.h5"],
            "linked-out": [f"{root}/sources/out"],
            "past": [str(source), 10**6, 9],
            "relative": ["sources/a.h5", 0, 9],
            "good": [str(source), 1, 3],
            "whole": [f"{root}/sources/six"],
        },
    )
    write_json(root / "sets" / "notes.json", {"title": 1})
    gen = {"key": "{{i}}", "url": "s3://b/x", "dimensions": {"i": {"stop": 10**15}}}
    write_json(root / "sets" / "bomb.json", {"version": 1, "gen": [gen]})
    return root


def set_at(path: Path, sources: Path) -> DatasetSettings:
    """Return settings of reference sets at *path* that may refer to *sources*."""
    prefix = VirtualPrefix(url=sources.as_uri())
    return DatasetSettings(url=str(path), format="kerchunk", virtual_chunk_prefixes=(prefix,))


@pytest.fixture(scope="module")
def url(folder: Path) -> Generator[str]:
    """Serve the folder of sets, and two sets as roots."""
    sets, sources = folder / "sets", folder / "sources"
    datasets = {
        "sets": set_at(sets, sources),
        "json": set_at(sets / "refs.json", sources),
        "parquet": set_at(sets / "refs.parq", sources),
    }
    with serving(Settings(datasets=datasets)) as served:
        yield served


SETS: Final = ("sets/refs.json", "sets/deep/flat.json", "sets/refs.parq", "json", "parquet")
in_each_set = pytest.mark.parametrize("root", SETS)


@in_each_set
def test_clients_read_arrays_of_a_set(url: str, root: str) -> None:
    """zarr-python and TensorStore read the arrays of a set, without codecs that they do not know.

    Chunks without a reference have the fill value.
    """
    for opener in OPENERS.values():
        group = opener(f"{url}/{root}")
        np.testing.assert_array_equal(group["t"][...], VALUES)
        np.testing.assert_array_equal(group["g/u"][...], PARTLY)
    values = open_tensorstore(f"{url}/{root}/g/u", "zarr").read().result()
    np.testing.assert_array_equal(values, PARTLY)


@pytest.mark.parametrize(
    ("root", "consolidated"), [("json", True), ("sets/deep/flat.json", False), ("parquet", True)]
)
def test_xarray_reads_a_set(url: str, root: str, *, consolidated: bool) -> None:
    """Xarray opens a set, with consolidated metadata or without, and reads all values."""
    options: Any = {"drop_variables": ["c", "e"], "mask_and_scale": False, "chunks": None}
    with xarray.open_zarr(f"{url}/{root}", consolidated=consolidated, **options) as opened:
        assert set(opened.data_vars) == {"s", "t"}
        np.testing.assert_array_equal(opened["t"].values, VALUES)
        assert opened["s"].item() == 3.5


@in_each_set
def test_set_is_listed(client: httpx.Client, folder: Path, root: str) -> None:
    """The listed keys and sizes are those of the set, and each is read as by fsspec."""
    dataset, _, prefix = root.partition("/")
    sizes = sizes_of(client, dataset, prefix and f"{prefix}/")
    found = {key: client.get(f"/{root}/{key}").content for key in sizes}
    path = folder / "sets" / (prefix or {"json": "refs.json", "parquet": "refs.parq"}[dataset])
    chunks = [key for key in sizes if "/.z" not in f"/{key}"]

    assert sizes == {key: len(data) for key, data in found.items()}
    assert len(sizes) == 31
    assert {key: found[key] for key in chunks} == read_by_fsspec(path, chunks)


def test_folder_of_sets_is_listed(client: httpx.Client) -> None:
    """A set in JSON is an object of its folder, and one in Parquet the folder of its keys."""
    names = sizes_of(client, "sets", "").keys()
    in_parquet = {f"refs.parq/{key}" for key in sizes_of(client, "parquet", "")}

    assert {"refs.json", "deep/flat.json"} | in_parquet <= names
    assert not [name for name in names if name.endswith(".parq")]
    assert client.get("/sets/refs.json").json()["version"] == 1
    assert "refs" in client.get("/sets/").text


@pytest.mark.parametrize("root", ["json", "parquet"])
def test_chunk_is_read_in_parts_and_revalidated(client: httpx.Client, root: str) -> None:
    """A chunk has a length, a strong ETag and ranges; documents in the set too."""
    for key in ("t/0.0", "t/.zarray", ".zmetadata"):
        got = client.get(f"/{root}/{key}")
        head = client.head(f"/{root}/{key}")
        part = ask(client, f"/{root}/{key}", range="bytes=3-9")
        again = ask(client, f"/{root}/{key}", if_none_match=got.headers["etag"])

        assert head.headers["content-length"] == str(len(got.content))
        assert (part.status_code, part.content) == (206, got.content[3:10])
        assert part.headers["etag"] == got.headers["etag"]
        assert again.status_code == 304


@in_each_set
def test_key_without_a_reference_is_absent(client: httpx.Client, root: str) -> None:
    """A key that a set has no reference for is 404."""
    for key in ("t/9.9", "t/00.0", "x", "t", "g/u/0"):
        assert client.get(f"/{root}/{key}").status_code == 404, key


@pytest.mark.parametrize(
    ("key", "status", "reason"),
    [
        ("outside", 403, "virtual_chunk_prefixes lacks it"),
        ("climbing", 403, "virtual_chunk_prefixes lacks it"),
        ("elsewhere", 403, "virtual references below s3://bucket/ are not allowed"),
        ("internal", 403, "virtual references below http://169.254.169.254/ are not allowed"),
        ("linked-out", 403, "a link leads out of the folder"),
        ("absent", 424, "absent.h5: does not exist, though it is referred to"),
        ("absent-whole", 424, "absent.h5: does not exist, though it is referred to"),
        ("past", 424, "is referred to, and it has"),
        ("relative", 424, "hostile.json: relative: a reference to 'sources/a.h5': expected a URL"),
        ("good", 200, ""),
        ("whole", 200, ""),
    ],
)
def test_hostile_reference_is_refused_alone(
    client: httpx.Client, key: str, status: int, reason: str
) -> None:
    """References that lead out, or nowhere, are refused with the reason; never 404."""
    path = f"/sets/hostile.json/{key}"
    answer = client.get(path)

    assert (answer.status_code, client.head(path).status_code) == (status, status)
    assert reason in answer.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("notes.json", "no reference set: none of its members is a reference"),
        ("bomb.json", "decoding it takes more steps than an object of its length may"),
    ],
)
def test_other_document_is_damage_with_a_reason(
    client: httpx.Client, name: str, reason: str
) -> None:
    """Keys below JSON of another kind, or a hostile set, are 424; the object is served."""
    answer = client.get(f"/sets/{name}/a")

    assert answer.status_code == 424
    assert f"{name}: {reason}" in answer.json()["detail"]
    assert client.get(f"/sets/{name}").status_code == 200


def test_set_above_the_limit_is_refused(folder: Path) -> None:
    """Keys of a set that is larger than the limit are 424, with the limit."""
    limits = LimitSettings(repository_file_bytes=4000)
    datasets = {"sets": DatasetSettings(url=f"{folder}/sets", format="kerchunk")}
    with serving(Settings(datasets=datasets, limits=limits)) as url, connect(url) as client:
        for name in ("refs.json", "refs.parq"):
            answer = client.get(f"/sets/{name}/.zgroup")
            assert answer.status_code == 424
            assert "of more than 1000 bytes" in answer.json()["detail"]


def test_sets_are_not_opened_in_datasets_of_other_formats(folder: Path) -> None:
    """A set is an object like any other where the settings do not name its format."""
    datasets = {"all": DatasetSettings(url=f"{folder}/sets")}
    with serving(Settings(datasets=datasets)) as url, connect(url) as client:
        assert client.get("/all/refs.json").status_code == 200
        assert client.get("/all/refs.json/t/0.0").status_code == 404


def test_sharded_array_of_a_set_is_unsharded(tmp_path: Path) -> None:
    """Shards that a set refers to are read by their inner chunks, at their places in a source."""
    chunks = {"c/0/0": b"first", "c/1/1": b"second!", "c/2/3": b"3"}
    refs: dict[str, Any] = {}
    data = b"header"
    for name, stored in build(chunks).items():
        refs[f"a/{name}"] = [f"{tmp_path}/source", len(data), len(stored)]
        data += stored + b"between"
    (tmp_path / "source").write_bytes(data)
    write_json(tmp_path / "refs.json", refs)
    root = set_at(tmp_path / "refs.json", tmp_path)
    with serving(Settings(datasets={"set": root})) as url, connect(url) as client:
        metadata = client.get("/set/a/zarr.json").json()
        found = {key: client.get(f"/set/a/{key}").content for key in chunks}
        absent = client.get("/set/a/c/0/1").status_code
        listed = sizes_of(client, "set", "a/c/")

    assert metadata["codecs"] == [LITTLE]
    assert found == chunks
    assert absent == 404
    assert listed == {key.removeprefix("c/"): len(chunk) for key, chunk in chunks.items()}


@pytest.mark.parametrize("path", ["absent", "/absent"])
def test_metadata_that_cannot_be_read_hide_no_other_keys(tmp_path: Path, path: str) -> None:
    """Keys of a set whose `zarr.json` refers to no source, or is no reference, are served."""
    source = f"{tmp_path}{path}" if path.startswith("/") else path
    write_json(tmp_path / "refs.json", {"zarr.json": [source, 0, 9], "notes": "text"})
    root = set_at(tmp_path / "refs.json", tmp_path)
    with serving(Settings(datasets={"set": root})) as url, connect(url) as client:
        notes, page, metadata = (client.get(f"/set/{key}") for key in ("notes", "", "zarr.json"))

    assert ("notes" in page.text, notes.content) == (True, b"text")
    assert metadata.status_code == 424


def test_hostile_set_is_listed(client: httpx.Client) -> None:
    """References that are not followed are listed with their lengths, whole objects with their own,
    or with 0 if they do not exist or are denied.
    """
    sizes = sizes_of(client, "sets", "hostile.json/")

    assert sizes["outside"] == sizes["absent"] == 9
    assert (sizes["good"], sizes["whole"]) == (3, 6)
    assert sizes["absent-whole"] == sizes["linked-out"] == 0
    assert "relative" in client.get("/sets/hostile.json/").text


def test_marker_is_no_damaged_set(tmp_path: Path) -> None:
    """The metadata of a Zarr v3 group beside a set are not reported as a damaged set."""
    zarr.create_group(tmp_path / "b.zarr").create_array("a", shape=(2,), dtype="u1")
    array = (tmp_path / "b.zarr/a/zarr.json").read_text()
    write_json(tmp_path / "refs.json", {"version": 1, "refs": {"c/zarr.json": array}})
    root = DatasetSettings(url=str(tmp_path), format="kerchunk")
    with serving(Settings(datasets={"sets": root})) as url, connect(url) as client:
        described = client.get("/api/datasets/sets").json()

    assert described["damaged"] == []
    assert [each["path"] for each in described["arrays"]] == ["b.zarr/a", "refs.json/c"]


SOURCE: Final = "sources/a.h5"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("refs.json", ["sets/refs.json", SOURCE]),
        ("refs.parq", ["sets/refs.parq/.zmetadata", "sets/refs.parq/t/refs.1.parq", SOURCE]),
    ],
)
def test_first_chunk_costs_reads_of_its_set_and_source(
    folder: Path, name: str, expected: list[str]
) -> None:
    """The first chunk costs a read of the set, in Parquet one more, and one of the source; the next
    costs that alone.
    """
    root = set_at(folder / "sets" / name, folder / "sources")
    reads: list[str] = []

    def watch(store: ObjectStore) -> Watched:
        return Watched(store, lambda ref: reads.append(str(ref)))

    with serving(Settings(datasets={"set": root}), wrap=watch) as url, connect(url) as client:
        answers = [client.get(f"/set/t/{chunk}") for chunk in ("2.2", "2.1")]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert reads == [f"file://{folder}/{key}" for key in (*expected, SOURCE)]
