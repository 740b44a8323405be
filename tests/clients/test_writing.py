"""Clients write sharded arrays through the service, and libraries read the stored shards."""

import json
from collections.abc import Callable, Generator
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import tensorstore
import zarr

from shardgate.settings import CacheSettings, Settings
from tests.support.clients.arrays import BY_NAME
from tests.support.clients.filling import CLIENTS, over_obstore
from tests.support.clients.reading import BEYOND
from tests.support.clients.services import (
    Taker,
    chunks_in,
    lay_out,
    mixed,
    s3_kvstore,
    taking_into_folder,
)
from tests.support.clients.writing import (
    Case,
    Values,
    by_tensorstore,
    counted,
    quiet,
    read_tensorstore,
    read_zarr,
    same,
)
from tests.support.deferred import Deferred
from tests.support.files import read_files
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS, stored_in
from tests.support.serving import serving

xarray: Any = Deferred("xarray")

VALUES: Final = counted((16, 16), "u4")
_numbers: Final = count()
type Open = Callable[[str], Any]
in_each_client = pytest.mark.parametrize("client", CLIENTS, indirect=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve a writable folder."""
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        yield taker


@pytest.fixture
def path(folder: Taker) -> str:
    """Return an unused path of the dataset, with a sharded array of zeros below it."""
    path = f"test-{next(_numbers)}"
    array = folder.folder / path / "array"
    zarr.create_array(array, shape=(16, 16), shards=(8, 8), chunks=(4, 4), dtype="u4")
    return path


@pytest.fixture
def below(folder: Taker, path: str) -> Path:
    """Return the folder of *path*."""
    return folder.folder / path


@pytest.fixture
def client(request: pytest.FixtureRequest, folder: Taker, path: str) -> Open:
    """Return a way of zarr-python to open a name below *path*, by default over obstore."""
    open_store = CLIENTS[getattr(request, "param", "obstore")]
    return lambda name: open_store(folder.url, f"{path}/{name}".rstrip("/"))


@pytest.mark.parametrize(("named", "client"), [("auto", "s3fs"), ("zarr", "obstore")])
def test_zarr_python_overwrites_an_array(tmp_path: Path, named: str, client: str) -> None:
    """zarr-python overwrites a sharded array by arrays of formats 3, 2 and 3 at once."""
    zarr.create_array(tmp_path / "a", data=VALUES, shards=(8, 8), chunks=(4, 4))
    with taking_into_folder(tmp_path, format=named) as taker:
        store = CLIENTS[client](taker.url, "a")
        same(zarr.open_array(store, mode="r")[...], VALUES)
        versions: tuple[Literal[2, 3], ...] = (3, 2, 3)
        for least, zarr_format in enumerate(versions):
            expected = VALUES + np.uint32(least)
            zarr.create_array(
                store, data=expected, chunks=(8, 8), overwrite=True, zarr_format=zarr_format
            )

            same(zarr.open_array(store, mode="r")[...], expected)
            same(zarr.open_array(taker.folder / "a", mode="r")[...], expected)


def test_zarr_python_changes_attributes_and_shape(
    folder: Taker, path: str, below: Path, client: Open
) -> None:
    """An array keeps its shards when its attributes and shape change; cut chunks are deleted."""
    array = zarr.open_array(client("array"), mode="r+")
    array[...] = VALUES
    array.attrs["units"] = "µm"
    array.append(VALUES[:3])
    stored = zarr.open_array(below / "array", mode="r")

    assert (stored.shape, stored.shards, stored.chunks) == ((19, 16), (8, 8), (4, 4))
    assert stored.attrs.asdict() == {"units": "µm"}
    same(stored[...], np.concatenate([VALUES, VALUES[:3]]))
    array.resize((4, 16))
    assert folder.stored(f"{path}/array") == {"c/0/0", "c/0/1"}
    array.resize((16, 16))
    stored = zarr.open_array(below / "array", mode="r")
    assert stored.shards == (8, 8)
    same(stored[:4], VALUES[:4])
    assert not np.any(np.asarray(stored[4:]))


@in_each_client
def test_overwriting_by_an_array_of_fewer_dimensions_succeeds(
    folder: Taker, path: str, below: Path, client: Open
) -> None:
    """zarr-python and xarray overwrite an array by one of fewer dimensions."""
    for ndim in (2, 1):
        filled = np.full((4,) * ndim, ndim, "u1")
        zarr.create_array(client("new"), data=filled, chunks=(2,) * ndim, overwrite=True)
        dataset = xarray.Dataset({"v": (list("yx"[:ndim]), np.full((4,) * ndim, ndim))})
        with quiet():
            encoding = {"v": {"chunks": (2,) * ndim}}
            dataset.to_zarr(client("dataset"), mode="w", zarr_format=3, encoding=encoding)

    for name in ("new", "dataset/v"):
        assert folder.stored(f"{path}/{name}") == {"c/0", "c/1"}
    same(zarr.open_array(below / "new", mode="r")[...], np.full(4, 1, "u1"))
    same(zarr.open_array(below / "dataset/v", mode="r")[...], np.full(4, 1))


def test_consolidated_metadata_is_stored_with_shards(below: Path, client: Open) -> None:
    """Consolidated metadata is stored with shards, and served without them."""
    zarr.create_group(client(""))
    with quiet():
        zarr.consolidate_metadata(client(""))
    opened: list[Any] = [zarr.open_consolidated(store) for store in (client(""), below)]
    served, stored = (group.metadata.consolidated_metadata for group in opened)

    assert served.metadata["array"].chunk_grid.chunk_shape == (4, 4)
    assert stored.metadata["array"].chunk_grid.chunk_shape == (8, 8)


def test_creation_of_a_sharded_array_is_refused(below: Path, client: Open) -> None:
    """Creating a sharded array through the service fails with a reason and stores nothing."""
    with pytest.raises(Exception, match="arrays are served without shards here"):
        zarr.create_array(client("new"), shape=(8,), shards=(4,), chunks=(2,), dtype="u1")

    assert not (below / "new/zarr.json").exists()


def test_xarray_writes_regions_and_appends(below: Path, client: Open) -> None:
    """Xarray writes a region of a sharded variable and appends to it; the shards stay."""
    stored_at = below / "dataset"
    whole = xarray.Dataset(
        {"v": (("y", "x"), np.zeros((16, 16), "f4"))}, coords={"y": np.arange(16)}
    )
    encoding = {"v": {"shards": (8, 8), "chunks": (4, 4)}}
    more = xarray.Dataset(
        {"v": (("y", "x"), np.full((8, 16), 9, "f4"))}, coords={"y": np.arange(16, 24)}
    )
    with quiet():
        whole.to_zarr(stored_at, encoding=encoding, zarr_format=3)
        part = xarray.Dataset({"v": (("y", "x"), np.ones((4, 16), "f4"))})
        part.to_zarr(client("dataset"), region={"y": slice(4, 8), "x": slice(0, 16)})
        more.to_zarr(client("dataset"), append_dim="y")
        stored = xarray.open_zarr(stored_at, chunks=None)
    with stored:
        assert stored["v"].values[::4, 5].tolist() == [0, 1, 0, 0, 9, 9]
        same(stored["y"].values, np.arange(24))
        assert stored["v"].encoding["shards"] == (8, 8)


def test_tensorstore_writes_a_sharded_array_over_s3(folder: Taker, path: str, below: Path) -> None:
    """TensorStore fills and extends a sharded array over S3; its HTTP driver cannot write."""
    spec = {"driver": "zarr3", "kvstore": s3_kvstore(folder.url, f"{path}/array/")}
    array = tensorstore.open(spec).result()
    array.write(VALUES).result()
    array.resize(exclusive_max=[20, 16]).result()
    stored = zarr.open_array(below / "array", mode="r")

    assert (stored.shape, stored.shards) == ((20, 16), (8, 8))
    same(stored[:16], VALUES)
    over_http = {"driver": "zarr3", "kvstore": f"{folder.url}/data/{path}/array/"}
    with pytest.raises(NotImplementedError):
        tensorstore.open(over_http).result().write(3).result()


def test_tensorstore_creates_an_array_over_s3(folder: Taker, path: str, below: Path) -> None:
    """TensorStore creates an array without shards over S3, and replaces it."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    metadata = {"shape": [8], "data_type": "uint8", "chunk_grid": grid}
    kvstore = s3_kvstore(folder.url, f"{path}/new/")
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(3).result()
    assert folder.stored(f"{path}/new") == {"c/0", "c/1"}
    tensorstore.open(spec, create=True, delete_existing=True).result()
    assert set(read_files(below / "new")) == {"zarr.json"}


TTL_S: Final = 0.2
LATE_S: Final = 60.0
"""Tolerance for busy machines."""


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), "seaweedfs"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[tuple[str, str]]:
    """Store a sharded array of ones, and run two services before it."""
    zarr.create_array(tmp_path / "array", data=np.ones(8, "u1"), shards=(8,), chunks=(2,))
    seaweedfs: SeaweedFS | None = None
    if request.param == "seaweedfs":
        seaweedfs = request.getfixturevalue("seaweedfs")
        seaweedfs.upload_folder(tmp_path, "pair")
    stores, data = stored_in(tmp_path, seaweedfs, "pair", writable=True)
    settings = Settings(stores=stores, datasets={"data": data}, cache=CacheSettings(ttl_s=TTL_S))
    with serving(settings) as one, serving(settings) as other:
        yield one, other


def opened(url: str) -> Any:
    """Open the array with zarr-python through one of the services."""
    return zarr.open_array(over_obstore(url, "array"), mode="r+")


def test_two_services_keep_and_read_the_writes_of_each_other(pair: tuple[str, str]) -> None:
    """Two services that write to one shard in turns keep each other's chunks.

    Each reads the other's chunks and metadata after the cache's TTL, and its own at once.
    """
    arrays = [opened(url) for url in pair]
    assert [array[:].tolist() for array in arrays] == [[1] * 8] * 2
    for number in range(4):
        arrays[number % 2][2 * number : 2 * number + 2] = 10 + number
    arrays[1].attrs["x"] = 1
    arrays[1].append(np.array([9, 9], "u1"))
    expected = [10, 10, 11, 11, 12, 12, 13, 13, 9, 9]

    assert opened(pair[1])[:].tolist()[-4:] == expected[-4:]
    for url in pair:
        read_in_time(url, expected)
        assert opened(url).attrs.asdict() == {"x": 1}


def read_in_time(url: str, expected: list[int]) -> None:
    """Read until all values are as expected."""
    wait_until(lambda: opened(url)[:].tolist() == expected, LATE_S)


ONLY_TENSORSTORE: Final = ("transpose/",)
"""Sharded arrays that zarr-python cannot read."""
ONLY_ZARR: Final = ("after/", "rectilinear/", *BEYOND["tensorstore"])
"""Sharded arrays that TensorStore cannot read."""
OLD: Final = "document/endian"
"""A sharded array that neither reads, since both lack the codec's old name."""
IN_FOLDER: Final = (
    "index/zarr_transposed", "index/zarr_three_crcs", "transpose/everywhere", "plain/v2",
    "rectilinear/transpose", "after/gzip_after_nested", "fill/nan", "dtype/string",
)  # fmt: skip
USUAL: Final = {"folder": IN_FOLDER, "remote": ("after/crc_after_both",)}
STORED: Final = [
    pytest.param(store, name, marks=() if name in usual else pytest.mark.soak, id=f"{store}-{name}")
    for store, usual in USUAL.items()
    for name in BY_NAME
    if name != OLD
]
"""Stores and cases that differ in how a shard is written, unless random arrays have them too; soak
runs have all in both.
"""


@pytest.fixture(scope="module")
def remote(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve a writable prefix of SeaweedFS."""
    with (
        pytest.MonkeyPatch.context() as patch,
        taking_into_folder(tmp_path_factory.mktemp("taken"), seaweedfs) as taker,
    ):
        for name, value in seaweedfs.environ.items():
            patch.setenv(name, value)
        yield taker


def open_twin(case: Case, twin: Path) -> Any:
    """Open the unsharded twin with the writer of *case*."""
    if case.write is by_tensorstore:
        spec = {"driver": "zarr3", "kvstore": f"file://{twin}/"}
        return tensorstore.open(spec).result()
    return zarr.open_array(twin, mode="r+")


def other_values(values: Values) -> Values:
    """Return *values* moved on by one element; a single element is doubled."""
    if values.size == 1:
        return values + values
    return np.roll(values.reshape(-1), 1).reshape(values.shape)


def chunks_of(case: Case, twin: Path, values: Values) -> dict[str, bytes]:
    """Write *values* without shards by the case's writer; return the chunks."""
    with quiet():
        open_twin(case, twin)[...] = values
    return chunks_in(twin)


def check(case: Case, taker: Taker, expected: Values) -> None:
    """Assert the stored values with each reader that can decode the array."""
    with quiet():
        if not case.name.startswith(ONLY_TENSORSTORE):
            same(read_zarr(taker.zarr_store(case.name)), expected)
        if not case.name.startswith(ONLY_ZARR):
            same(read_tensorstore(taker.kvstore(case.name)), expected)


def write_through(case: Case, bucket: Path, taker: Taker, twin: Path) -> None:
    """Push a mix of old, new and absent chunks, then all new ones, then delete all."""
    taker.place(bucket / case.name, case.name)
    twin.mkdir()
    for name in ("zarr.json", ".zarray", ".zattrs"):
        if (answer := taker.client.get(f"/data/{case.name}/{name}")).is_success:
            (twin / name).write_bytes(answer.content)
    before = chunks_of(case, twin, case.values)
    other = other_values(case.values)
    after = chunks_of(case, twin, other)

    some = mixed(before, after)
    lay_out(twin, after, some)
    taker.push(case.name, before, some)
    with quiet():
        check(case, taker, np.asarray(open_twin(case, twin)[...]))
    taker.push(case.name, some, after)
    check(case, taker, other)
    taker.push(case.name, after, {})
    assert taker.stored(case.name) == set()


@pytest.mark.parametrize(("store", "name"), STORED)
def test_stored_shards_have_the_last_put_values(
    request: pytest.FixtureRequest, bucket: Path, tmp_path: Path, store: str, name: str
) -> None:
    """Stored arrays of each case have the values that were put last; deletion leaves no shard."""
    write_through(BY_NAME[name], bucket, request.getfixturevalue(store), tmp_path / "twin")


RESIZED_BY_ZARR: Final = (
    "after/crc_after_both", "keys/v2_dot", "document/defaults_left_out", OLD, "nested/three",
    "transpose/both", "dtype/string", "fill/complex", "fill/nan", "shape/0d_default",
)  # fmt: skip
RESIZED: Final = [
    *(
        pytest.param("zarr", name, marks=() if name in RESIZED_BY_ZARR else pytest.mark.soak)
        for name in BY_NAME
        if name in RESIZED_BY_ZARR
        or name.startswith(("after/", "keys/", "document/", "nested/", "transpose/"))
    ),
    *(("tensorstore", name) for name in ("keys/v2_unsaid", "fill/nan", "transpose/everywhere")),
]


def resize(client: str, url: str, name: str) -> None:
    """Extend an array along each dimension."""
    if client == "tensorstore":
        spec = {"driver": "zarr3", "kvstore": s3_kvstore(url, f"{name}/")}
        array: Any = tensorstore.open(spec).result()
        array.resize(exclusive_max=[n + 9 for n in array.shape]).result()
        return
    with quiet():
        array = zarr.open_array(over_obstore(url, name), mode="r+")
        array.attrs.update({"of": "zarr"})
        array.resize(tuple(n + 9 for n in array.shape))


@pytest.mark.parametrize(("client", "name"), RESIZED)
def test_resized_array_keeps_its_sharding(
    folder: Taker, bucket: Path, client: str, name: str
) -> None:
    """A client that resizes an array changes shape and attributes, and nothing else."""
    path = f"resized-{client}/{name}"
    folder.place(bucket / name, path)
    resize(client, folder.url, path)
    before, after = (
        json.loads((root / "zarr.json").read_bytes())
        for root in (bucket / name, folder.folder / path)
    )

    assert after["shape"] == [n + 9 for n in before["shape"]]
    assert client == "tensorstore" or after["attributes"]["of"] == "zarr"
    for document in (before, after):
        for member in ("shape", "storage_transformers", "attributes", "chunk_key_encoding"):
            document.pop(member, None)
    assert after == before
