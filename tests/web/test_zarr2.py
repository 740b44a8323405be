"""Pages, code, pictures and links of Zarr v2, in folders and in reference sets of kerchunk."""

import io
import json
import zlib
from collections.abc import Generator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import h5py
import httpx
import numcodecs
import numpy as np
import pytest
import xarray
import zarr
from PIL import Image

from shardgate.settings import DatasetSettings, Settings, VirtualPrefix
from shardgate.web.previews import PLACEHOLDER
from tests.support.files import write_files
from tests.support.formats.kerchunk.sets import kerchunk_of, write_json, write_parquet
from tests.support.pages import open_page
from tests.support.serving import client_of

TIMES: Final = " \N{MULTIPLICATION SIGN} "
VALUES: Final = np.add.outer(np.arange(90), np.arange(70)).astype("f4")
WRITTEN: Final[dict[str, dict[str, Any]]] = {
    "plain": {"compressors": None},
    "blosc": {"compressors": numcodecs.Blosc()},
    "bz2": {"compressors": numcodecs.BZ2(), "fill_value": None},
    "gzip": {"compressors": numcodecs.GZip(), "order": "F"},
    "lz4": {"compressors": numcodecs.LZ4(), "dtype": ">i2"},
    "lzma": {"compressors": numcodecs.LZMA(), "dtype": "<f8"},
    "zlib": {"compressors": numcodecs.Zlib(), "dtype": ">f4"},
    "zstd": {"compressors": numcodecs.Zstd(), "dtype": "|u1"},
    "packed": {
        "filters": [
            numcodecs.FixedScaleOffset(offset=0, scale=1, dtype="<f4", astype="<u2"),
            numcodecs.Delta("<u2"),
        ],
        "compressors": numcodecs.Zlib(),
    },
    "checked": {
        "filters": [numcodecs.Shuffle(4), numcodecs.Fletcher32()],
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    },
}
"""Arrays of the same values, by what their writer was told."""
FILTERED: Final = {"packed", "checked", "lz4", "lzma", "bz2"}
"""Those that neither Neuroglancer nor TensorStore is offered."""
AXES: Final = [
    {"name": "y", "type": "space", "unit": "micrometer"},
    {"name": "x", "type": "space", "unit": "micrometer"},
]


def write_arrays(folder: Path) -> None:
    """Write all arrays into a consolidated group, an image of OME-Zarr 0.4, and texts."""
    group = zarr.open_group(folder / "v2", mode="w", zarr_format=2)
    for name, options in WRITTEN.items():
        told = {"dtype": "<f4", "attributes": {"_ARRAY_DIMENSIONS": ["y", "x"]}} | options
        group.create_array(name, shape=VALUES.shape, chunks=(32, 32), **told)[...] = VALUES
    zarr.consolidate_metadata(group.store, zarr_format=2)
    twin = zarr.create_array(folder / "v3", shape=VALUES.shape, dtype="f4", chunks=(32, 32))
    twin[...] = VALUES

    scale = {"type": "scale", "scale": [0.5, 0.5]}
    levels = [{"path": "s0", "coordinateTransformations": [scale]}]
    image: dict[str, Any] = {"version": "0.4", "axes": AXES, "datasets": levels}
    ome = zarr.open_group(folder / "image", mode="w", zarr_format=2)
    ome.attrs["multiscales"] = [image]
    ome.create_array("s0", data=VALUES.astype("u2"), chunks=(32, 32))

    odd = zarr.open_group(folder / "odd", mode="w", zarr_format=2)
    odd.create_array("text", data=np.array([["ab", "c"], ["d", "e"]]))
    odd.create_array("record", data=np.zeros((4, 4), [("a", "<i4"), ("b", "<f8")]))
    unknown = json.loads((folder / "v2/plain/.zarray").read_text())
    (folder / "odd/codec").mkdir()
    unknown["compressor"] = {"id": "pickle"}
    (folder / "odd/codec/.zarray").write_text(json.dumps(unknown))


def write_bombs(folder: Path) -> None:
    """Write a chunk that inflates to a gigabyte, and one that a filter would take for objects."""
    group = zarr.open_group(folder / "bombs", mode="w", zarr_format=2)
    compressing = zlib.compressobj()
    first, other = (
        compressing.compress(bytes(2**20)) + compressing.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    end = b"\x03\x00" + (2**30 % 65521 << 16 | 1).to_bytes(4, "big")  # RFC 1950 and 1951
    inflating = first + 1023 * other + end
    for name, changed, data in (
        ("inflating", {"compressor": {"id": "zlib"}}, inflating),
        ("objects", {"filters": [{"id": "delta", "dtype": "|O"}]}, bytes(64)),
    ):
        group.create_array(name, shape=(8, 8), chunks=(8, 8), dtype="u1", compressors=None)
        document = folder / f"bombs/{name}/.zarray"
        document.write_text(json.dumps(json.loads(document.read_text()) | changed))
        document.with_name("0.0").write_bytes(data)


def write_deep(folder: Path) -> None:
    """Write an array of 256 equal chunks, each of 4 MiB: a plane needs a gigabyte of them."""
    values = np.full((128, 128, 128), np.arange(128), "<u2")
    document = {
        "zarr_format": 2,
        "shape": [128, 2048, 2048],
        "chunks": [128, 128, 128],
        "dtype": "<u2",
        "fill_value": 0,
        "order": "C",
        "filters": None,
        "compressor": {"id": "zlib", "level": 1},
    }
    objects = {".zarray": json.dumps(document).encode()}
    chunk = zlib.compress(values.tobytes(), 1)
    objects |= {f"0.{row}.{column}": chunk for row in range(16) for column in range(16)}
    write_files(objects, folder)


def write_sets(folder: Path) -> None:
    """Write a field in NetCDF, as HDF5, and reference sets of it in JSON and Parquet."""
    with h5py.File(folder / "field.nc", "w") as file:
        for name, size in zip(("time", "lat", "lon"), (2, *VALUES.shape), strict=True):
            file[name] = np.arange(size, dtype="f8")
            file[name].make_scale(name)
        field = file.create_dataset(
            "t2m",
            data=np.stack([VALUES, -1 - VALUES]),
            chunks=(1, 32, 32),
            compression="gzip",
            shuffle=True,
        )
        field.attrs.update(units="K", long_name="air temperature")
        for dimension, name in zip(field.dims, ("time", "lat", "lon"), strict=True):
            dimension.attach_scale(file[name])
    references = kerchunk_of(folder / "field.nc")
    write_json(folder / "field.json", references)
    write_parquet(folder / "field.parq", references)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve the arrays and the sets."""
    folder = tmp_path_factory.mktemp("zarr2")
    write_arrays(folder)
    write_sets(folder)
    write_bombs(folder)
    prefixes = (VirtualPrefix(url=folder.as_uri()),)
    datasets = {
        name: DatasetSettings(
            url=str(folder / path), format="kerchunk", virtual_chunk_prefixes=prefixes
        )
        for name, path in {"json": "field.json", "parquet": "field.parq"}.items()
    }
    datasets["files"] = DatasetSettings(url=str(folder))
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


@pytest.mark.parametrize("dataset", ["json", "parquet"])
def test_page_of_a_field_in_a_set_describes_it(client: httpx.Client, dataset: str) -> None:
    """The page of a NetCDF variable has its shape, type, unit, codecs, axes and picture."""
    page = open_page(client, f"/{dataset}/t2m/")
    picture, histogram, grid = [image.attrib["src"] for image in page.all("img")]

    assert page.properties() == {
        "Shape": TIMES.join(["2", "90", "70"]),
        "Type": "float32",
        "Unit": "K",
        "Inner chunk": TIMES.join(["1", "32", "32"]),
        "Shard": "not sharded",
        "Codecs": "shuffle, zlib, bytes",
    }
    assert page.texts("tbody/tr/th") == ["time", "lat", "lon"]
    assert (
        client.get(f"/{dataset}/t2m/{picture}").content
        == client.get("/api/datasets/files/preview.png?path=v3").content
    )
    for drawing in histogram, grid:
        assert client.get(f"/{dataset}/t2m/{drawing}").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize("dataset", ["json", "parquet"])
def test_description_of_a_set_has_its_arrays(client: httpx.Client, dataset: str) -> None:
    """The API describes all arrays of a set."""
    described = client.get(f"/api/datasets/{dataset}").json()

    shapes = {each["path"]: each["shape"] for each in described["arrays"]}
    assert shapes == {"lat": [90], "lon": [70], "t2m": [2, 90, 70], "time": [2]}
    assert (described["is_all"], described["reason"]) == (True, "")


@pytest.mark.parametrize("dataset", ["json", "parquet"])
def test_group_code_opens_the_set_with_xarray(client: httpx.Client, dataset: str) -> None:
    """The code for xarray on the page of a set has the values of its NetCDF file."""
    code = open_page(client, f"/{dataset}/").snippets()["xarray"]
    names = run(code)

    field = names["dataset"]["t2m"]
    assert field.attrs["units"] == "K"
    np.testing.assert_array_equal(field[1], -1 - VALUES)


def run(code: str) -> dict[str, Any]:
    """Run *code* as a user would, and return its variables."""
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        exec(code, names)  # noqa: S102
    return names


@pytest.mark.parametrize("name", WRITTEN)
def test_array_code_has_the_values(client: httpx.Client, name: str) -> None:
    """All code on the page of an array reads its values; TensorStore is left out if it cannot."""
    snippets = open_page(client, f"/files/v2/{name}/").snippets()

    assert snippets.pop("curl").endswith(f"/v2/{name}/.zarray")
    expected = {"zarr-python", "dask", "xarray"} | (set() if name in FILTERED else {"TensorStore"})
    assert set(snippets) == expected
    for library in expected - {"dask", *([] if name == "plain" else ["xarray"])}:
        array = run(snippets[library])["array"]
        found = array.read().result() if library == "TensorStore" else np.asarray(array[...])
        np.testing.assert_array_equal(found, VALUES)


@pytest.mark.parametrize("name", WRITTEN)
def test_picture_equals_that_of_its_twin(client: httpx.Client, name: str) -> None:
    """Whatever the codecs, order and type, the picture is that of the same values in Zarr v3."""
    shown = client.get("/api/datasets/files/preview.png", params={"path": f"v2/{name}"})
    twin = client.get("/api/datasets/files/preview.png", params={"path": "v3"})

    assert shown.content != PLACEHOLDER.png
    assert shown.content == twin.content


@pytest.mark.parametrize("name", WRITTEN)
def test_viewer_is_linked_where_it_reads_the_codecs(client: httpx.Client, name: str) -> None:
    """Arrays are linked to Neuroglancer as `zarr2:` unless it lacks their codecs or type."""
    links = open_page(client, f"/files/v2/{name}/").links("article")
    answer = client.get(f"/api/datasets/files/viewer?path=v2/{name}")

    if name in FILTERED:
        assert (links, answer.status_code) == ([], 400)
    else:
        assert len(links) == 1
        assert f"/files/v2/{name}/|zarr2:" in httpx.URL(answer.headers["location"]).fragment


@pytest.mark.parametrize(
    ("name", "data_type", "reason"),
    [
        ("text", "U2", "No picture: U2 is no type of numbers that is drawn."),
        ("record", "struct of a, b", "No picture: struct of a, b is no type of numbers"),
        ("codec", "float32", "No picture: pickle is not decoded."),
    ],
)
def test_undrawable_array_has_a_page_with_the_reason(
    client: httpx.Client, name: str, data_type: str, reason: str
) -> None:
    """Texts, records and unknown codecs have a page that says why there is no picture."""
    page = open_page(client, f"/files/odd/{name}/")
    preview = client.get("/api/datasets/files/preview.png", params={"path": f"odd/{name}"})

    assert page.properties()["Type"] == data_type
    assert reason in " ".join(page.texts("p[@class='hint']"))
    assert not [each for each in page.all("img") if "preview.png" in each.attrib["src"]]
    assert preview.content == PLACEHOLDER.png


@pytest.mark.soak
def test_plane_of_deep_chunks_has_a_picture(tmp_path: Path) -> None:
    """A plane is drawn whose chunks, decoded, have more bytes than the worker may use."""
    write_deep(tmp_path)
    with client_of(Settings(datasets={"deep": DatasetSettings(url=str(tmp_path))})) as client:
        preview = client.get("/api/datasets/deep/preview.png")
    shown = np.asarray(Image.open(io.BytesIO(preview.content)))

    assert shown.shape == (250, 250)  # of 4 million values in the middle
    np.testing.assert_array_equal(shown[:, :16], shown[:, 16:32])
    assert len(np.unique(shown)) == 16


@pytest.mark.parametrize("name", ["inflating", "objects"])
def test_bomb_has_a_placeholder(client: httpx.Client, name: str) -> None:
    """A chunk that inflates to a gigabyte, or to objects of Python, has no picture."""
    preview = client.get("/api/datasets/files/preview.png", params={"path": f"bombs/{name}"})

    assert preview.status_code == 200
    assert preview.content == PLACEHOLDER.png


def test_image_of_ome_zarr_has_its_axes(client: httpx.Client) -> None:
    """An image of OME-Zarr 0.4 has axes with steps and units, on its page and those of levels."""
    for path, about in (("image", "OME-Zarr image"), ("image/s0", "Array")):
        page = open_page(client, f"/files/{path}/")
        rows = [" ".join(cell.text or "" for cell in row.iter("td")) for row in page.all("tr")]

        assert page.texts("p[@class='about']") == [about]
        assert {"space 90 0.5 micrometer", "space 70 0.5 micrometer"} <= set(rows)
    assert len(open_page(client, "/files/image/").links("article")) == 1


def test_group_page_lists_its_arrays(client: httpx.Client) -> None:
    """The page of a group links its arrays, and its code opens them as consolidated."""
    page = open_page(client, "/files/v2/")

    assert page.links("table") == [f"./{name}/" for name in sorted(WRITTEN)]
    opened = run(page.snippets()["xarray"])["dataset"]
    assert isinstance(opened, xarray.Dataset)
    assert set(opened) == set(WRITTEN)
