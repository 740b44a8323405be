"""zarr-python reads the service, through fsspec and through obstore."""

from typing import Any, Final

import numpy as np
import obstore.store
import pytest
import zarr
import zarr.storage

from tests.clients.arrays import BY_NAME, SHARDS, VALUES
from tests.clients.conftest import IN_GROUPS, member
from tests.clients.writing import Case, quiet, same


def over_fsspec(url: str) -> Any:
    """Open *url* as most people do."""
    return zarr.open(url, mode="r")


def over_obstore(url: str) -> Any:
    """Open *url* through the client written in Rust."""
    store = obstore.store.HTTPStore.from_url(url, client_options={"allow_http": True})
    return zarr.open(zarr.storage.ObjectStore(store, read_only=True), mode="r")


OPENERS: Final = {"fsspec": over_fsspec, "obstore": over_obstore}


@pytest.fixture(params=list(OPENERS))
def opener(request: pytest.FixtureRequest) -> Any:
    """Give each way to open a URL."""
    return OPENERS[request.param]


@pytest.mark.parametrize(
    ("opener", "service"),
    [
        ("fsspec", "remote"),
        ("obstore", "local"),
        pytest.param("fsspec", "local", marks=pytest.mark.soak),
        pytest.param("obstore", "remote", marks=pytest.mark.soak),
    ],
    indirect=True,
)
def test_reads_the_values(service: str, opener: Any, case: Case) -> None:
    """Each array reads as it was written, from each store, and with each client."""
    with quiet():
        same(opener(f"{service}/bucket/{case.name}")[...], case.values)


def test_sees_inner_chunks_for_chunks(local: str, case: Case) -> None:
    """Chunks have the inner chunk shape, and there are no shards."""
    with quiet():
        array = over_fsspec(f"{local}/bucket/{case.name}")

    assert (array.chunks, array.shards) == (case.served, None)


def test_keeps_the_fill_value(local: str, case: Case) -> None:
    """The fill value is the one that was written."""
    with quiet():
        array = over_fsspec(f"{local}/bucket/{case.name}")
        expected = case.fill_value
    if isinstance(expected, list):
        expected = complex(*expected)
    if expected == "NaT":
        assert np.isnat(array.fill_value)
    else:
        expected = array.dtype.type(float(expected) if expected == "NaN" else expected)
        np.testing.assert_equal(array.fill_value, expected)


def test_keeps_attributes_and_dimension_names(service: str, opener: Any) -> None:
    """What describes the array is untouched, whatever its members are called."""
    case = BY_NAME["document/names_and_attributes"]

    array = opener(f"{service}/bucket/{case.name}")

    assert array.attrs.asdict() == case.attributes
    assert list(array.metadata.dimension_names) == case.dimension_names


def test_keeps_unknown_members(local: str) -> None:
    """A member of ``zarr.json`` that nobody knows is untouched."""
    array = over_fsspec(f"{local}/bucket/document/unknown_member")

    assert array.metadata.extra_fields["x_lab"] == {"must_understand": False, "note": ["kept"]}


def test_v2_passes_through(service: str, opener: Any) -> None:
    """An array of format 2 is still one, with its attributes."""
    array = opener(f"{service}/bucket/plain/v2")

    assert array.metadata.zarr_format == 2
    assert array.attrs.asdict() == {"a": 1}


@pytest.mark.parametrize("group", ["consolidated", "listed"])
def test_lists_a_group_over_fsspec(service: str, group: str) -> None:
    """A group tells its members, with and without consolidated metadata."""
    with quiet():
        opened = over_fsspec(f"{service}/bucket/groups/{group}")
        names = {name for name, _ in opened.members()}

    assert names == {member(case) for case in IN_GROUPS} | {"below"}


@pytest.mark.parametrize("group", ["consolidated", "listed"])
def test_lists_nested_groups_over_fsspec(service: str, group: str) -> None:
    """Groups inside groups tell their members, too: fsspec asks for them without a final slash."""
    below = over_fsspec(f"{service}/bucket/groups/{group}")["below"]

    assert {name for name, _ in below.members(max_depth=None)} == {"deeper", "deeper/v"}


@pytest.mark.parametrize("group", ["consolidated", "listed"])
def test_reads_in_nested_groups(service: str, opener: Any, group: str) -> None:
    """A path through groups ends at an array that is not sharded."""
    with quiet():
        array = opener(f"{service}/bucket/groups/{group}")["below/deeper/v"]

    assert array.shards is None
    same(array[...], VALUES)


def test_consolidated_metadata_is_unsharded(service: str, opener: Any) -> None:
    """A member known from consolidated metadata alone has no shards."""
    with quiet():
        group = opener(f"{service}/bucket/groups/consolidated")
    members = group.metadata.consolidated_metadata.metadata

    array = members["index-zarr_start_big_crc"]
    assert array.shards is None
    assert array.chunks == (2, 3, 4)


def test_the_raw_view_is_sharded(service: str, opener: Any) -> None:
    """The same bucket as `raw` shows the shards, and reads."""
    array = opener(f"{service}/raw/index/zarr_start_big_crc")

    assert array.shards == SHARDS
    same(array[...], VALUES)
