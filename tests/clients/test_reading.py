"""zarr-python, xarray, TensorStore and zarrita.js read arrays of the table, and random ones."""

import base64
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import tensorstore
import zarr
import zarr.storage
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.arrays import BY_NAME, IN_GROUPS, SHARDS, VALUES, member
from tests.support.clients.reading import (
    BEYOND,
    OPENERS,
    open_tensorstore,
    over_fsspec,
    over_obstore,
    run_node,
)
from tests.support.clients.writing import (
    Case,
    Json,
    Shape,
    Values,
    by_tensorstore,
    by_zarr,
    default_keys,
    quiet,
    same,
    v2_keys,
    write,
)
from tests.support.deferred import Deferred
from tests.support.formats.zarr.nesting import nestings
from tests.support.serving import serving

xarray: Any = Deferred("xarray")


class Seen(NamedTuple):
    """Values and chunk shape of an array as a client reads them."""

    values: Any
    chunks: Shape


@dataclass(frozen=True)
class Memory:
    """Groups and results of node that several tests share."""

    stack: ExitStack
    groups: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, dict[str, Json]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def memory() -> Generator[Memory]:
    """Close shared groups after the module."""
    with ExitStack() as stack:
        yield Memory(stack)


def seen_by_zarr(opener: Callable[[str], Any], root: str, case: Case) -> Seen:
    """Read with zarr-python, and assert that there are no shards and the written fill value."""
    array = opener(f"{root}/{case.name}")
    assert array.shards is None
    fill_value = (
        array.dtype.type(case.fill_value) if array.dtype.kind != "M" else np.datetime64("NaT")
    )
    np.testing.assert_equal(array.fill_value, fill_value)
    return Seen(array[...], array.chunks)


def seen_by_tensorstore(root: str, case: Case) -> Seen:
    """Read with TensorStore, and assert that read and write chunks are equal."""
    array = open_tensorstore(f"{root}/{case.name}")
    layout = array.chunk_layout
    chunks, written = (tuple(each.shape or ()) for each in (layout.read_chunk, layout.write_chunk))
    assert chunks == written
    return Seen(array.read().result(), chunks)


def by_xarray(memory: Memory, root: str, case: Case, *, consolidated: bool) -> Seen:
    """Read a variable of the group of all cases with xarray."""
    url = f"{root}/groups/{'consolidated' if consolidated else 'listed'}"
    if url not in memory.groups:
        opened = xarray.open_zarr(
            url, consolidated=consolidated, zarr_format=3, chunks=None, decode_cf=False
        )
        memory.groups[url] = memory.stack.enter_context(opened)
        assert set(opened.variables) == {member(each) for each in IN_GROUPS}
        assert opened.attrs == {"title": "all cases"}
    variable = memory.groups[url][member(case)]
    assert variable.encoding["shards"] is None
    return Seen(variable.values, variable.encoding["chunks"])


def by_zarrita(memory: Memory, root: str, case: Case) -> Seen:
    """Read with zarrita.js, all arrays in one process of node."""
    if root not in memory.answers:
        memory.answers[root] = run_node(f"{root}/{name}" for name in BY_NAME)
    answer = memory.answers[root][f"{root}/{case.name}"]
    if "error" in answer:
        raise ValueError(answer["error"])
    if "strings" in answer:
        values = np.array(answer["strings"], dtype=np.dtypes.StringDType())
    else:
        flat = np.frombuffer(base64.b64decode(answer["base64"]), answer["dtype"])
        strides = [step * flat.itemsize for step in answer["stride"]]
        values = np.lib.stride_tricks.as_strided(flat, answer["shape"], strides)
    return Seen(values, tuple(answer["chunks"]))


READERS: Final[dict[str, Callable[[Memory, str, Case], Seen]]] = {
    "fsspec": lambda _, root, case: seen_by_zarr(over_fsspec, root, case),
    "obstore": lambda _, root, case: seen_by_zarr(over_obstore, root, case),
    "tensorstore": lambda _, root, case: seen_by_tensorstore(root, case),
    "consolidated": lambda memory, root, case: by_xarray(memory, root, case, consolidated=True),
    "listed": lambda memory, root, case: by_xarray(memory, root, case, consolidated=False),
    "zarrita": by_zarrita,
}
SOME: Final = (
    "index/zarr_start_big_crc", "index/tensorstore_end_little_plain", "nested/two",
    "rectilinear/part", "after/crc_after_both", "keys/v2_dot", "shape/0d_default", "fill/nan",
)  # fmt: skip
USUAL: Final = {
    ("obstore", "local"): tuple(BY_NAME),
    ("tensorstore", "local"): tuple(BY_NAME),
    ("zarrita", "local"): tuple(BY_NAME),
    ("fsspec", "remote"): SOME,
    ("consolidated", "local"): SOME,
    ("listed", "local"): SOME[:2],
}
"""Cases that a client reads from a store; soak runs have all from both."""


def _names(reader: str) -> Collection[str]:
    if reader in {"consolidated", "listed"}:
        return [case.name for case in IN_GROUPS]
    return [name for name in BY_NAME if name not in BEYOND.get(reader, set())]


@pytest.mark.parametrize(
    ("reader", "place", "name"),
    [
        pytest.param(
            *(reader, place, name),
            marks=() if name in USUAL.get((reader, place), ()) else pytest.mark.soak,
        )
        for reader in READERS
        for place in ("local", "remote")
        for name in _names(reader)
    ],
)
def test_client_reads_written_values_in_inner_chunks(
    request: pytest.FixtureRequest, memory: Memory, reader: str, place: str, name: str
) -> None:
    """Each array that a client can decode reads as written, in chunks of the inner shape."""
    with quiet():
        found = READERS[reader](memory, f"{request.getfixturevalue(place)}/bucket", BY_NAME[name])

    same(found.values, BY_NAME[name].values)
    assert found.chunks == BY_NAME[name].served


@pytest.fixture(params=OPENERS)
def opener(request: pytest.FixtureRequest) -> Any:
    """Return each way of zarr-python to open a URL."""
    return OPENERS[request.param]


def test_attributes_and_unknown_members_are_kept(local: str, opener: Any) -> None:
    """Attributes, dimension names and unknown members of an array's metadata are kept."""
    case = BY_NAME["document/names_and_attributes"]
    array = opener(f"{local}/bucket/{case.name}")
    unknown = opener(f"{local}/bucket/document/unknown_member").metadata.extra_fields["x_lab"]

    assert array.attrs.asdict() == case.attributes
    assert list(array.metadata.dimension_names) == case.dimension_names
    assert unknown == {"must_understand": False, "note": ["kept"]}


def test_format_2_is_served_as_stored(local: str, opener: Any) -> None:
    """Arrays and consolidated groups of Zarr format 2 read as written."""
    array = opener(f"{local}/bucket/plain/v2")

    assert (array.metadata.zarr_format, array.attrs.asdict()) == (2, {"a": 1})
    same(open_tensorstore(f"{local}/bucket/plain/v2", "zarr").read().result(), VALUES)
    url = f"{local}/bucket/groups/v2"
    with quiet(), xarray.open_zarr(url, chunks=None, mask_and_scale=False) as opened:
        same(opened["v"].values, VALUES)
        assert opened["v"].dims == ("z", "y", "x")


in_each_group = pytest.mark.parametrize("group", ["consolidated", "listed"])


@in_each_group
def test_zarr_lists_members_of_groups_over_fsspec(service: str, group: str) -> None:
    """zarr-python lists the members of a group and of nested groups over fsspec."""
    with quiet():
        opened = over_fsspec(f"{service}/bucket/groups/{group}")
        names = {name for name, _ in opened.members()}
    below = opened["below"].members(max_depth=None)

    assert names == {member(case) for case in IN_GROUPS} | {"below"}
    assert {name for name, _ in below} == {"deeper", "deeper/v"}


@in_each_group
def test_zarr_reads_an_array_in_nested_groups(local: str, opener: Any, group: str) -> None:
    """zarr-python reads an array through nested groups, without shards."""
    with quiet():
        array = opener(f"{local}/bucket/groups/{group}")["below/deeper/v"]

    assert array.shards is None
    same(array[...], VALUES)


def test_raw_view_keeps_shards(service: str) -> None:
    """The raw view of an array has shards; consolidated metadata of the default view has none."""
    with quiet():
        group = over_fsspec(f"{service}/bucket/groups/consolidated")
    known = group.metadata.consolidated_metadata.metadata["index-zarr_start_big_crc"]
    array = over_fsspec(f"{service}/raw/index/zarr_start_big_crc")

    assert (known.shards, known.chunks) == (None, (2, 3, 4))
    assert array.shards == SHARDS
    same(array[...], VALUES)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("consolidated/below/deeper", {}),
        ("listed/below/deeper", {}),
        ("listed", {"group": "below/deeper", "consolidated": False}),
    ],
)
def test_xarray_opens_nested_groups(local: str, path: str, options: Any) -> None:
    """Xarray reads a nested group by its URL or by its name."""
    url = f"{local}/bucket/groups/{path}"
    with quiet(), xarray.open_zarr(url, chunks=None, **options) as opened:
        same(opened["v"].values, VALUES)


def test_tensorstore_detects_the_format_and_revalidates(local: str) -> None:
    """TensorStore detects `zarr3` without a driver; a revalidated read has the same values."""
    found = tensorstore.open(f"{local}/bucket/index/zarr_end_little_crc/").result()
    spec = {
        "driver": "zarr3",
        "kvstore": f"{local}/bucket/inside/zstd_crc/",
        "context": {"cache_pool": {"total_bytes_limit": 10_000_000}},
        "recheck_cached_data": True,
    }
    array = tensorstore.open(spec, open=True).result()

    same(found.read().result(), VALUES)
    for _ in range(2):
        same(array.read().result(), VALUES)


MAX_CHUNKS: Final = 150
"""Most chunks of a random array."""
ENCODINGS: Final = (default_keys("/"), default_keys("."), v2_keys("/"), v2_keys("."))


@dataclass(frozen=True, slots=True)
class Service:
    """A served folder that gets new arrays."""

    folder: Path
    url: str
    numbers: Iterator[int]
    """Numbers for unique names of arrays, since caches may hold former ones."""


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """Serve an empty folder."""
    folder = tmp_path_factory.mktemp("random")
    with serving(Settings(datasets={"d": DatasetSettings(url=str(folder))})) as url:
        yield Service(folder, f"{url}/d", count())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a random nesting of shards, written by a library."""
    nesting = draw(nestings(letters=False, regular=True))
    writers = [by_zarr] if _has_checksum_after(nesting.codecs) else [by_tensorstore, by_zarr]
    return Case(
        name="a",
        write=draw(st.sampled_from(writers)),
        values=_values(draw, nesting.shape),
        shards=nesting.shard_shape,
        codecs=nesting.codecs,
        fill_value=7,
        key_encoding=draw(st.sampled_from(ENCODINGS)),
    )


def _values(draw: st.DrawFn, shape: Shape) -> Values:
    """Return an array with a share of fill values, so that chunks and shards are absent."""
    seed = draw(st.integers(0, 2**32 - 1))
    density = draw(st.sampled_from([0.02, 0.3, 1.0]))
    random = np.random.default_rng(seed)
    values = random.integers(0, 60000, shape, dtype=np.uint16)
    return np.where(random.random(shape) < density, values, np.uint16(7)).reshape(shape)


def _has_checksum_after(codecs: Any) -> bool:
    """Return whether a checksum follows a sharding codec, which TensorStore does not allow."""
    names = [codec["name"] for codec in codecs]
    if "sharding_indexed" not in names:
        return False
    at = names.index("sharding_indexed")
    return at + 1 < len(names) or _has_checksum_after(codecs[at]["configuration"]["codecs"])


def _written(case: Case, path: Path) -> bool:
    """Write *case*; return `False` if zarr-python cannot write it."""
    try:
        write(case, path)
    except ValueError:
        if case.write is by_tensorstore:
            raise
        return False
    return True


_PATIENT: Final = settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.soak)])
def test_random_array_reads_as_written(served_folder: Service, examples: int) -> None:
    """A random array of any shape, transposes, nesting and index reads as written."""

    @settings(_PATIENT, max_examples=examples)
    @given(case=cases(), data=st.data())
    def check(case: Case, data: st.DataObject) -> None:
        _read_back(served_folder, case, data)

    check()


def _read_back(served_folder: Service, case: Case, data: st.DataObject) -> None:
    grid = [-(-n // chunk) for n, chunk in zip(case.values.shape, case.served, strict=True)]
    assume(prod(grid) <= MAX_CHUNKS)
    name = f"{case.name}{next(served_folder.numbers)}"
    assume(_written(case, served_folder.folder / name))
    if data.draw(st.booleans(), label="read with TensorStore"):
        spec = {"driver": "zarr3", "kvstore": f"{served_folder.url}/{name}/"}
        array: Any = tensorstore.open(spec, open=True).result()
        chunks, values = tuple(array.chunk_layout.read_chunk.shape or ()), array.read().result()
    else:
        with quiet():
            array = zarr.open_array(f"{served_folder.url}/{name}", mode="r", zarr_format=3)
            assert array.shards is None
            chunks, values = array.chunks, np.asarray(array[...])

    assert chunks == case.served
    same(values, case.values)
