"""zarr-python, xarray, TensorStore and zarrita.js read arrays of the table, and random ones."""

import base64
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import tensorstore

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
    quiet,
    same,
)
from tests.support.deferred import Deferred

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
    answers: dict[tuple[str, bool], dict[str, Json]] = field(default_factory=dict)


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
    """Read a variable of the group of some cases with xarray."""
    url = f"{root}/groups/{'consolidated' if consolidated else 'listed'}"
    if url not in memory.groups:
        opened = xarray.open_zarr(
            url, consolidated=consolidated, zarr_format=3, chunks=None, decode_cf=False
        )
        memory.groups[url] = memory.stack.enter_context(opened)
        assert set(opened.variables) == {member(each) for each in IN_GROUPS}
        assert opened.attrs == {"title": "some cases"}
    variable = memory.groups[url][member(case.name)]
    assert variable.encoding["shards"] is None
    return Seen(variable.values, variable.encoding["chunks"])


def by_zarrita(memory: Memory, root: str, case: Case) -> Seen:
    """Read with zarrita.js, the usual arrays in one process of node, and the others in another."""
    is_usual = case.name in IN_GROUPS
    if (root, is_usual) not in memory.answers:
        names = [name for name in BY_NAME if (name in IN_GROUPS) is is_usual]
        memory.answers[root, is_usual] = run_node(f"{root}/{name}" for name in names)
    answer = memory.answers[root, is_usual][f"{root}/{case.name}"]
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
BY_TENSORSTORE: Final = ("keys/", "fill/", "dtype/", "document/", "rectilinear/", "transpose/")
"""Begins the names of arrays whose served metadata differ."""
USUAL: Final = {
    ("obstore", "local"): tuple(BY_NAME),
    ("tensorstore", "local"): tuple(n for n in BY_NAME if n.startswith(BY_TENSORSTORE)),
    ("zarrita", "local"): IN_GROUPS,
    ("fsspec", "remote"): IN_GROUPS,
    ("consolidated", "local"): IN_GROUPS,
    ("listed", "local"): IN_GROUPS[:2],
}
"""Cases that a client reads from a store; soak runs have all from both."""


def _names(reader: str) -> Collection[str]:
    if reader in {"consolidated", "listed"}:
        return IN_GROUPS
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


@pytest.mark.parametrize(
    ("service", "group"), [("local", "consolidated"), ("remote", "listed")], indirect=["service"]
)
def test_zarr_opens_groups_over_fsspec(service: str, group: str) -> None:
    """zarr-python lists the members of groups, and reads an array in nested ones without shards."""
    with quiet():
        opened = over_fsspec(f"{service}/bucket/groups/{group}")
        names = {name for name, _ in opened.members()}
        array = opened["below/deeper/v"]
    below = opened["below"].members(max_depth=None)

    assert names == {member(case) for case in IN_GROUPS} | {"below"}
    assert {name for name, _ in below} == {"deeper", "deeper/v"}
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
