"""zarr-python, xarray and TensorStore write arrays through the service, and their metadata."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from tests.clients.filling import CLIENTS
from tests.clients.taking import Taker, files_in, taking_into_folder
from tests.clients.writing import Json, counted, quiet, same

VALUES: Final = counted((16, 16), "u4")
type Open = Callable[[str], Any]


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Take data sets into a folder, in which a sharded array of zeros is stored."""
    zarr.create_array(tmp_path / "array", shape=(16, 16), shards=(8, 8), chunks=(4, 4), dtype="u4")
    with taking_into_folder(tmp_path) as taker:
        yield taker


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, taker: Taker) -> Open:
    """Open stores of zarr-python with each client of S3."""
    return lambda path: CLIENTS[request.param](taker.url, path)


def test_an_array_is_written(taker: Taker, client: Open) -> None:
    """All of it, and then a part that crosses chunks and shards."""
    array = zarr.open_array(client("array"), mode="r+")
    array[...] = VALUES
    array[3:9, 2:14] = VALUES[3:9, 2:14] + 1
    expected = VALUES.copy()
    expected[3:9, 2:14] += 1

    same(array[...], expected)
    same(zarr.open_array(taker.folder / "array", mode="r")[...], expected)


@pytest.mark.parametrize("named", ["auto", "zarr"])
@pytest.mark.parametrize("client", CLIENTS)
def test_an_array_takes_the_place_of_another(tmp_path: Path, client: str, named: str) -> None:
    """One that is sharded and was read is deleted with its chunks, and another one made at once."""
    old = zarr.create_array(
        tmp_path / "a", shape=(16, 16), shards=(8, 8), chunks=(4, 4), dtype="u4"
    )
    old[...] = VALUES
    with taking_into_folder(tmp_path, format=named) as taker:
        store = CLIENTS[client](taker.url, "a")
        same(zarr.open_array(store, mode="r")[...], VALUES)
        versions: tuple[Literal[2, 3], ...] = (3, 2, 3)
        for least, zarr_format in enumerate(versions):
            new = zarr.create_array(
                store,
                shape=(16, 16),
                chunks=(8, 8),
                dtype="u4",
                overwrite=True,
                zarr_format=zarr_format,
            )
            new[...] = VALUES + least

            same(zarr.open_array(store, mode="r")[...], VALUES + least)
            same(zarr.open_array(taker.folder / "a", mode="r")[...], VALUES + least)


def test_attributes_and_shape_change(taker: Taker, client: Open) -> None:
    """The stored array keeps its shards; chunks beyond a smaller shape are gone for good."""
    array = zarr.open_array(client("array"), mode="r+")
    array[...] = VALUES
    array.attrs["units"] = "µm"
    array.append(VALUES[:3])
    stored = zarr.open_array(taker.folder / "array", mode="r")

    assert (stored.shape, stored.shards, stored.chunks) == ((19, 16), (8, 8), (4, 4))
    assert stored.attrs.asdict() == {"units": "µm"}
    same(stored[...], np.concatenate([VALUES, VALUES[:3]]))
    array.resize((4, 16))
    assert taker.stored("array") == {"c/0/0", "c/0/1"}
    array.resize((16, 16))
    stored = zarr.open_array(taker.folder / "array", mode="r")
    assert stored.shards == (8, 8)
    same(stored[:4], VALUES[:4])
    assert not np.any(np.asarray(stored[4:]))


def test_an_array_takes_the_place_of_one_with_more_dimensions(taker: Taker, client: Open) -> None:
    """Chunks are written where folders of chunks were, also by xarray."""
    for ndim in (3, 2, 1):
        array = zarr.create_array(
            client("new"), shape=(4,) * ndim, chunks=(2,) * ndim, dtype="u1", overwrite=True
        )
        array[...] = ndim
        dataset = xarray.Dataset({"v": (list("zyx"[:ndim]), np.full((4,) * ndim, ndim))})
        with quiet():
            encoding = {"v": {"chunks": (2,) * ndim}}
            dataset.to_zarr(client("dataset"), mode="w", zarr_format=3, encoding=encoding)

    assert taker.stored("new") == taker.stored("dataset/v") == {"c/0", "c/1"}
    same(zarr.open_array(taker.folder / "new", mode="r")[...], np.full(4, 1, "u1"))
    same(zarr.open_array(taker.folder / "dataset/v", mode="r")[...], np.full(4, 1))


def test_metadata_are_consolidated(taker: Taker, client: Open) -> None:
    """What is stored tells of shards; what the service tells does not."""
    zarr.create_group(client(""))
    with quiet():
        zarr.consolidate_metadata(client(""))
    served, stored = (
        _open_consolidated(store).metadata.consolidated_metadata
        for store in (client(""), taker.folder)
    )

    assert served.metadata["array"].chunk_grid.chunk_shape == (4, 4)
    assert stored.metadata["array"].chunk_grid.chunk_shape == (8, 8)


def _open_consolidated(store: Any) -> Any:
    return zarr.open_consolidated(store)


def test_a_sharded_array_is_refused(taker: Taker, client: Open) -> None:
    """Shards would be written under the names of chunks: the reason is told, and none is stored."""
    with pytest.raises(Exception, match="arrays are served without shards here"):
        zarr.create_array(client("new"), shape=(8,), shards=(4,), chunks=(2,), dtype="u1")

    assert not (taker.folder / "new/zarr.json").exists()


def test_xarray_writes_regions(taker: Taker, client: Open) -> None:
    """Into a sharded variable that is there, and then behind its end."""
    path = taker.folder / "dataset"
    whole = xarray.Dataset(
        {"v": (("y", "x"), np.zeros((16, 16), "f4"))}, coords={"y": np.arange(16)}
    )
    encoding = {"v": {"shards": (8, 8), "chunks": (4, 4)}}
    more = xarray.Dataset(
        {"v": (("y", "x"), np.full((8, 16), 9, "f4"))}, coords={"y": np.arange(16, 24)}
    )
    with quiet():
        whole.to_zarr(path, encoding=encoding, zarr_format=3)
        part = xarray.Dataset({"v": (("y", "x"), np.ones((4, 16), "f4"))})
        part.to_zarr(client("dataset"), region={"y": slice(4, 8), "x": slice(0, 16)})
        more.to_zarr(client("dataset"), append_dim="y")
        stored = xarray.open_zarr(path, chunks=None)
    with stored:
        assert stored["v"].values[::4, 5].tolist() == [0, 1, 0, 0, 9, 9]
        same(stored["y"].values, np.arange(24))
        assert stored["v"].encoding["shards"] == (8, 8)


def _bucket(taker: Taker, path: str) -> Json:
    return {
        "driver": "s3",
        "bucket": "data",
        "path": path,
        "endpoint": taker.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
    }


def test_tensorstore_writes(taker: Taker) -> None:
    """Over its driver of S3 it fills a sharded array, and makes it longer."""
    spec = {"driver": "zarr3", "kvstore": _bucket(taker, "array/")}
    array = tensorstore.open(spec).result()
    array.write(VALUES).result()
    array.resize(exclusive_max=[20, 16]).result()
    stored = zarr.open_array(taker.folder / "array", mode="r")

    assert (stored.shape, stored.shards) == ((20, 16), (8, 8))
    same(stored[:16], VALUES)


def test_tensorstore_creates(taker: Taker) -> None:
    """An array without shards of its own, twice in the same place."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    metadata = {"shape": [8], "data_type": "uint8", "chunk_grid": grid}
    spec = {"driver": "zarr3", "kvstore": _bucket(taker, "new/"), "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(3).result()
    assert taker.stored("new") == {"c/0", "c/1"}
    tensorstore.open(spec, create=True, delete_existing=True).result()
    assert set(files_in(taker.folder / "new")) == {"zarr.json"}


def test_tensorstore_only_reads_over_http(taker: Taker) -> None:
    """Its driver of HTTP has no writes."""
    spec = {"driver": "zarr3", "kvstore": f"{taker.url}/data/array/"}
    array = tensorstore.open(spec).result()

    with pytest.raises(NotImplementedError):
        array.write(VALUES).result()
