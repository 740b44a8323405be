"""Clients write sharded arrays through the service, and libraries read the stored shards."""

import json
import multiprocessing
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from shardgate.settings import CacheSettings, Settings
from tests.support.clients.arrays import BY_NAME
from tests.support.clients.filling import CLIENTS, fill, over_obstore, values
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
from tests.support.files import read_files
from tests.support.gateways import forked, of_dataset
from tests.support.labs import Lab, requested_lab
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS, stored_in
from tests.support.serving import serving

VALUES: Final = counted((16, 16), "u4")
type Open = Callable[[str], Any]


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Serve a folder with a sharded array of zeros."""
    zarr.create_array(tmp_path / "array", shape=(16, 16), shards=(8, 8), chunks=(4, 4), dtype="u4")
    with taking_into_folder(tmp_path) as taker:
        yield taker


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, taker: Taker) -> Open:
    """Return each way of zarr-python to open a path of the service."""
    return lambda path: CLIENTS[request.param](taker.url, path)


def test_zarr_python_writes_all_and_parts_of_an_array(taker: Taker, client: Open) -> None:
    """zarr-python writes a sharded array, and a part across chunks and shards."""
    array = zarr.open_array(client("array"), mode="r+")
    array[...] = VALUES
    array[3:9, 2:14] = VALUES[3:9, 2:14] + 1
    expected = VALUES.copy()
    expected[3:9, 2:14] += 1

    same(array[...], expected)
    same(zarr.open_array(taker.folder / "array", mode="r")[...], expected)


@pytest.mark.parametrize("named", ["auto", "zarr"])
@pytest.mark.parametrize("client", CLIENTS)
def test_zarr_python_overwrites_an_array(tmp_path: Path, client: str, named: str) -> None:
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


def test_zarr_python_changes_attributes_and_shape(taker: Taker, client: Open) -> None:
    """An array keeps its shards when its attributes and shape change; cut chunks are deleted."""
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


def test_overwriting_by_an_array_of_fewer_dimensions_succeeds(taker: Taker, client: Open) -> None:
    """zarr-python and xarray overwrite an array by one of fewer dimensions."""
    for ndim in (3, 2, 1):
        filled = np.full((4,) * ndim, ndim, "u1")
        zarr.create_array(client("new"), data=filled, chunks=(2,) * ndim, overwrite=True)
        dataset = xarray.Dataset({"v": (list("zyx"[:ndim]), np.full((4,) * ndim, ndim))})
        with quiet():
            encoding = {"v": {"chunks": (2,) * ndim}}
            dataset.to_zarr(client("dataset"), mode="w", zarr_format=3, encoding=encoding)

    assert taker.stored("new") == taker.stored("dataset/v") == {"c/0", "c/1"}
    same(zarr.open_array(taker.folder / "new", mode="r")[...], np.full(4, 1, "u1"))
    same(zarr.open_array(taker.folder / "dataset/v", mode="r")[...], np.full(4, 1))


def test_consolidated_metadata_is_stored_with_shards(taker: Taker, client: Open) -> None:
    """Consolidated metadata is stored with shards, and served without them."""
    zarr.create_group(client(""))
    with quiet():
        zarr.consolidate_metadata(client(""))
    opened: list[Any] = [zarr.open_consolidated(store) for store in (client(""), taker.folder)]
    served, stored = (group.metadata.consolidated_metadata for group in opened)

    assert served.metadata["array"].chunk_grid.chunk_shape == (4, 4)
    assert stored.metadata["array"].chunk_grid.chunk_shape == (8, 8)


def test_creation_of_a_sharded_array_is_refused(taker: Taker, client: Open) -> None:
    """Creating a sharded array through the service fails with a reason and stores nothing."""
    with pytest.raises(Exception, match="arrays are served without shards here"):
        zarr.create_array(client("new"), shape=(8,), shards=(4,), chunks=(2,), dtype="u1")

    assert not (taker.folder / "new/zarr.json").exists()


def test_xarray_writes_regions_and_appends(taker: Taker, client: Open) -> None:
    """Xarray writes a region of a sharded variable and appends to it; the shards stay."""
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


def test_tensorstore_writes_a_sharded_array_over_s3(taker: Taker) -> None:
    """TensorStore fills and extends a sharded array over S3; its HTTP driver cannot write."""
    spec = {"driver": "zarr3", "kvstore": s3_kvstore(taker.url, "array/")}
    array = tensorstore.open(spec).result()
    array.write(VALUES).result()
    array.resize(exclusive_max=[20, 16]).result()
    stored = zarr.open_array(taker.folder / "array", mode="r")

    assert (stored.shape, stored.shards) == ((20, 16), (8, 8))
    same(stored[:16], VALUES)
    over_http = {"driver": "zarr3", "kvstore": f"{taker.url}/data/array/"}
    with pytest.raises(NotImplementedError):
        tensorstore.open(over_http).result().write(3).result()


def test_tensorstore_creates_an_array_over_s3(taker: Taker) -> None:
    """TensorStore creates an array without shards over S3, and replaces it."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    metadata = {"shape": [8], "data_type": "uint8", "chunk_grid": grid}
    spec = {"driver": "zarr3", "kvstore": s3_kvstore(taker.url, "new/"), "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(3).result()
    assert taker.stored("new") == {"c/0", "c/1"}
    tensorstore.open(spec, create=True, delete_existing=True).result()
    assert set(read_files(taker.folder / "new")) == {"zarr.json"}


PAIRS: Final = (
    ("folder", "s3fs"),
    pytest.param("folder", "obstore", marks=pytest.mark.soak),
    ("seaweedfs", "obstore"),
    pytest.param("seaweedfs", "s3fs", marks=pytest.mark.soak),
)
"""Stores, and the client that fills an array in each."""
PROCESSES: Final = 8
SHAPE: Final = (30, 34)
SHARDS: Final = (16, 16)
"""Two by three shards, the last of which reach past the edge."""
CHUNKS: Final = (4, 4)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Store empty sharded arrays, one for each client."""
    lab = requested_lab(request, tmp_path_factory)
    for name in CLIENTS:
        path = lab.folder / name
        zarr.create_array(path, shape=SHAPE, shards=SHARDS, chunks=CHUNKS, dtype="u4")
        if lab.seaweedfs is not None:
            lab.seaweedfs.upload_folder(path, f"{lab.folder.name}/{name}")
    return lab


@pytest.mark.parametrize(("lab", "client"), PAIRS, indirect=["lab"])
def test_concurrent_processes_lose_no_chunk(lab: Lab, client: str) -> None:
    """Eight processes write chunks of the same shards concurrently, and no value is lost."""
    with forked(of_dataset(lab.url, lab.seaweedfs)) as running:
        fill_at_once(running.url, client)
    stored = lab.open(client)

    assert (stored.shards, stored.chunks) == (SHARDS, CHUNKS)
    np.testing.assert_array_equal(np.asarray(stored[...]), values(SHAPE), strict=True)


def fill_at_once(url: str, client: str) -> None:
    """Start processes that write from the same moment on, and wait for them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([fill.__module__])
    start = context.Barrier(PROCESSES)
    processes = [
        context.Process(
            target=fill, args=(client, url, client, start, slice(number, None, PROCESSES))
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES


TTL_S: Final = 1.5
LATE_S: Final = 60.0
"""Tolerance for busy machines."""


class Pair(NamedTuple):
    """URLs of two services before one store with the array ``array``."""

    writer: str
    reader: str


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), "seaweedfs"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Pair]:
    """Store a sharded array of ones, and run two services before it."""
    zarr.create_array(tmp_path / "array", data=np.ones(8, "u1"), shards=(8,), chunks=(2,))
    seaweedfs: SeaweedFS | None = None
    if request.param == "seaweedfs":
        seaweedfs = request.getfixturevalue("seaweedfs")
        seaweedfs.upload_folder(tmp_path, "pair")
    stores, data = stored_in(tmp_path, seaweedfs, "pair", writable=True)
    settings = Settings(stores=stores, datasets={"data": data}, cache=CacheSettings(ttl_s=TTL_S))
    with serving(settings) as writer, serving(settings) as reader:
        yield Pair(writer, reader)


def opened(url: str) -> Any:
    """Open the array with zarr-python through one of the services."""
    return zarr.open_array(over_obstore(url, "array"), mode="r+")


def test_other_replica_reads_a_write_after_the_ttl(pair: Pair) -> None:
    """Another service reads new chunks and metadata after the cache's TTL; the writer at once."""
    reader, writer = opened(pair.reader), opened(pair.writer)
    assert reader[:].tolist() == [1] * 8
    writer[4:6] = 7
    writer.attrs["x"] = 1
    writer.append(np.array([9, 9], "u1"))

    assert opened(pair.writer)[:].tolist() == [1, 1, 1, 1, 7, 7, 1, 1, 9, 9]
    read_in_time(pair.reader, [1, 1, 1, 1, 7, 7, 1, 1, 9, 9])
    assert opened(pair.reader).attrs.asdict() == {"x": 1}


def test_alternating_writes_through_two_services_are_kept(pair: Pair) -> None:
    """Two services that write to one shard in turns keep each other's chunks."""
    arrays = [opened(url) for url in pair]
    assert [array[:].tolist() for array in arrays] == [[1] * 8] * 2
    for number in range(4):
        arrays[number % 2][2 * number : 2 * number + 2] = 10 + number

    for url in pair:
        read_in_time(url, [10, 10, 11, 11, 12, 12, 13, 13])


def read_in_time(url: str, expected: list[int]) -> None:
    """Read until all values are as expected, at most for the TTL and the tolerance."""
    wait_until(lambda: opened(url)[:].tolist() == expected, TTL_S + LATE_S)


ONLY_TENSORSTORE: Final = ("transpose/outer_", "transpose/both", "nested/transposes_everywhere")
"""Sharded arrays that zarr-python cannot read."""
ONLY_ZARR: Final = ("after/", "rectilinear/", *BEYOND["tensorstore"])
"""Sharded arrays that TensorStore cannot read."""
OLD: Final = "document/endian"
"""Prefix of sharded arrays that neither reads, since both lack the codec's old name."""
TABLE: Final = [name for name in BY_NAME if not name.startswith(OLD)]
ON_SEAWEEDFS: Final = (
    "index/zarr_start_big_crc", "index/tensorstore_end_little_plain", "nested/two_tensorstore",
    "after/crc_after_both", "inside/zstd_crc_tensorstore", "keys/v2_dot", "fill/nan_zarr",
    "shape/0d_default_zarr", "rectilinear/end", "plain/v2",
)  # fmt: skip
FURTHER: Final = [
    name
    for name in TABLE
    if name.startswith(("dtype/", "fill/", "inside/", "rectilinear/inside_"))
    or name in {"rectilinear/crc", "rectilinear/start"}
    or (name.endswith("_tensorstore") and not name.startswith("nested/"))
]
"""Cases that differ in ways that do not affect shards, by their writer only, or from another grid
as regular grids do.
"""
STORED: Final = [
    pytest.param(store, name, marks=pytest.mark.soak if is_soak else (), id=f"{store}-{name}")
    for name in TABLE
    for store, is_soak in (("folder", name in FURTHER), ("remote", name not in ON_SEAWEEDFS))
]
"""Stores and cases; soak runs have all cases in both stores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve a writable folder."""
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        yield taker


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


RESIZED: Final = [
    pytest.param(client, name, marks=pytest.mark.soak if is_further else ())
    for name, case in BY_NAME.items()
    if not name.startswith(("plain/", "rectilinear/"))
    for client in ("zarr", "tensorstore")
    if client == "zarr" or (case.values.ndim and not name.startswith(ONLY_ZARR))
    for is_further in [client == "tensorstore" and name in FURTHER]
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
