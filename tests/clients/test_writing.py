"""Arrays are written through the service by their clients and by plain PUT, and read past it."""

import json
import multiprocessing
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from shardgate.settings import CacheSettings, Settings
from tests.clients.arrays import BY_NAME
from tests.clients.filling import CLIENTS, fill, over_obstore, values
from tests.clients.services import (
    Files,
    Taker,
    chunks_in,
    files_in,
    lay_out,
    mixed,
    s3_kvstore,
    stored_in,
    taking_into_folder,
)
from tests.clients.test_reading import BEYOND
from tests.clients.writing import (
    Case,
    Values,
    by_tensorstore,
    counted,
    quiet,
    read_tensorstore,
    read_zarr,
    same,
)
from tests.support.gateways import forked, of_dataset
from tests.support.labs import Lab, requested_lab
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import serving

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


def test_tensorstore_writes(taker: Taker) -> None:
    """Over its driver of S3 it fills a sharded array, and makes it longer; HTTP has no writes."""
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


def test_tensorstore_creates(taker: Taker) -> None:
    """An array without shards of its own, twice in the same place."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    metadata = {"shape": [8], "data_type": "uint8", "chunk_grid": grid}
    spec = {"driver": "zarr3", "kvstore": s3_kvstore(taker.url, "new/"), "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(3).result()
    assert taker.stored("new") == {"c/0", "c/1"}
    tensorstore.open(spec, create=True, delete_existing=True).result()
    assert set(files_in(taker.folder / "new")) == {"zarr.json"}


PAIRS: Final = (
    ("folder", "s3fs"),
    pytest.param("folder", "obstore", marks=pytest.mark.soak),
    ("seaweedfs", "obstore"),
    pytest.param("seaweedfs", "s3fs", marks=pytest.mark.soak),
)
"""Stores, and clients that fill arrays in them."""
PROCESSES: Final = 8
SHAPE: Final = (30, 34)
SHARDS: Final = (16, 16)
"""Two by three, those at the end reach past the edge."""
CHUNKS: Final = (4, 4)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Store sharded arrays without any chunk, one for each client."""
    lab = requested_lab(request, tmp_path_factory)
    for name in CLIENTS:
        path = lab.folder / name
        zarr.create_array(path, shape=SHAPE, shards=SHARDS, chunks=CHUNKS, dtype="u4")
        if lab.seaweedfs is not None:
            lab.seaweedfs.upload_folder(path, f"{lab.folder.name}/{name}")
    return lab


@pytest.mark.parametrize(("lab", "client"), PAIRS, indirect=["lab"])
def test_eight_processes_lose_nothing(lab: Lab, client: str) -> None:
    """All write at once, neighbours in the same shards; every value is in the shards in the end."""
    with forked(of_dataset(lab.url, lab.seaweedfs)) as running:
        fill_at_once(running.url, client)
    stored = lab.open(client)

    assert (stored.shards, stored.chunks) == (SHARDS, CHUNKS)
    np.testing.assert_array_equal(np.asarray(stored[...]), values(SHAPE), strict=True)


def fill_at_once(url: str, client: str) -> None:
    """Make processes write, all from one moment on, and wait until they have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([fill.__module__])
    start = context.Barrier(PROCESSES)
    processes = [
        context.Process(
            target=fill,
            args=(client, url, client, start, slice(number, None, PROCESSES)),
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
"""What busy machines may add."""


class Pair(NamedTuple):
    """Two services before the array ``array`` of one store."""

    writer: str
    reader: str


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), "seaweedfs"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Pair]:
    """Store a sharded array of ones, and run the services."""
    array = zarr.create_array(tmp_path / "array", shape=(8,), shards=(8,), chunks=(2,), dtype="u1")
    array[:] = 1
    seaweedfs: SeaweedFS | None = None
    if request.param == "seaweedfs":
        seaweedfs = request.getfixturevalue("seaweedfs")
        seaweedfs.upload_folder(tmp_path, "pair")
    stores, data = stored_in(tmp_path, seaweedfs, "pair", writable=True)
    settings = Settings(stores=stores, datasets={"data": data}, cache=CacheSettings(ttl_s=TTL_S))
    with serving(settings) as writer, serving(settings) as reader:
        yield Pair(writer, reader)


def opened(url: str) -> Any:
    """Open the array as zarr-python does through one of the services."""
    return zarr.open_array(over_obstore(url, "array"), mode="r+")


def test_who_knows_the_old_reads_the_news_in_time(pair: Pair) -> None:
    """Chunks and metadata are the new ones after the time to live; the writer's are at once."""
    reader, writer = opened(pair.reader), opened(pair.writer)
    assert reader[:].tolist() == [1] * 8
    writer[4:6] = 7
    writer.attrs["x"] = 1
    writer.append(np.array([9, 9], "u1"))

    assert opened(pair.writer)[:].tolist() == [1, 1, 1, 1, 7, 7, 1, 1, 9, 9]
    read_in_time(pair.reader, [1, 1, 1, 1, 7, 7, 1, 1, 9, 9])
    assert opened(pair.reader).attrs.asdict() == {"x": 1}


def test_both_write_by_turns(pair: Pair) -> None:
    """Each keeps what the other one wrote, though it knows the shard from before."""
    arrays = [opened(url) for url in pair]
    assert [array[:].tolist() for array in arrays] == [[1] * 8] * 2
    for number in range(4):
        arrays[number % 2][2 * number : 2 * number + 2] = 10 + number

    for url in pair:
        read_in_time(url, [10, 10, 11, 11, 12, 12, 13, 13])


def read_in_time(url: str, expected: list[int]) -> None:
    """Read until all is as it was written, no longer than the time to live."""
    deadline = time.monotonic() + TTL_S + LATE_S
    while opened(url)[:].tolist() != expected:
        assert time.monotonic() < deadline
        time.sleep(0.05)


ONLY_TENSORSTORE: Final = ("transpose/outer_", "transpose/both", "nested/transposes_everywhere")
"""Arrays that zarr-python cannot read where they are sharded."""
ONLY_ZARR: Final = ("after/", *BEYOND["tensorstore"])
"""Arrays that TensorStore cannot read there."""
OLD: Final = "document/endian"
"""Arrays that neither reads there: the service alone knows the codec by its present name."""
TABLE: Final = [name for name in BY_NAME if not name.startswith(OLD)]
ON_SEAWEEDFS: Final = (
    "index/zarr_start_big_crc", "index/tensorstore_end_little_plain", "nested/two_tensorstore",
    "after/crc_after_both", "inside/zstd_crc_tensorstore", "keys/v2_dot", "fill/nan_zarr",
    "shape/0d_default_zarr", "plain/v2",
)  # fmt: skip
FURTHER: Final = [
    name
    for name in TABLE
    if name.startswith(("dtype/", "fill/", "inside/"))
    or (name.endswith("_tensorstore") and not name.startswith("nested/"))
]
"""Cases that differ in ways that shards and shapes know nothing of, or by a writer only."""
STORED: Final = [
    pytest.param(store, name, marks=pytest.mark.soak if is_soak else (), id=f"{store}-{name}")
    for name in TABLE
    for store, is_soak in (("folder", name in FURTHER), ("remote", name not in ON_SEAWEEDFS))
]
"""Stores, a folder and SeaweedFS, and cases; `soak` has all of them in both."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Take arrays into a folder."""
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        yield taker


@pytest.fixture(scope="module")
def remote(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Take them into SeaweedFS."""
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
    """Move each element on by one place; a single one is doubled."""
    if values.size == 1:
        return values + values
    return np.roll(values.reshape(-1), 1).reshape(values.shape)


def chunks_of(case: Case, twin: Path, values: Values) -> Files:
    """Write *values* without shards by the writer of the case, and return the chunks."""
    with quiet():
        open_twin(case, twin)[...] = values
    return chunks_in(twin)


def check(case: Case, taker: Taker, expected: Values) -> None:
    """Read the array with each reader that knows how, past the service."""
    with quiet():
        if not case.name.startswith(ONLY_TENSORSTORE):
            same(read_zarr(taker.zarr_store(case.name)), expected)
        if not case.name.startswith(ONLY_ZARR):
            same(read_tensorstore(taker.kvstore(case.name)), expected)


def write_through(case: Case, bucket: Path, taker: Taker, twin: Path) -> None:
    """Keep, replace and delete a third of the chunks each, put all anew, and delete them all."""
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
def test_shards_hold_what_was_put(
    request: pytest.FixtureRequest, bucket: Path, tmp_path: Path, store: str, name: str
) -> None:
    """Each value of each array is the one that was put last, and nothing is left of the others."""
    write_through(BY_NAME[name], bucket, request.getfixturevalue(store), tmp_path / "twin")


RESIZED: Final = [
    pytest.param(client, name, marks=pytest.mark.soak if is_further else ())
    for name, case in BY_NAME.items()
    if not name.startswith("plain/")
    for client in ("zarr", "tensorstore")
    if client == "zarr" or (case.values.ndim and not name.startswith(ONLY_ZARR))
    for is_further in [client == "tensorstore" and name in FURTHER]
]


def resize(client: str, url: str, name: str) -> None:
    """Make an array longer along each dimension; TensorStore leaves out what has a default."""
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
def test_an_array_that_was_resized_keeps_its_shards(
    folder: Taker, bucket: Path, client: str, name: str
) -> None:
    """Its attributes and its shape are the new ones, and all else is as it was."""
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
