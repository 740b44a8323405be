"""`xarray.open_zarr` reads groups, with consolidated metadata and by listing."""

from collections.abc import Generator

import pytest
import xarray

from tests.clients.arrays import BY_NAME, VALUES
from tests.clients.conftest import IN_GROUPS, from_each_store, member
from tests.clients.writing import quiet, same


@pytest.fixture(scope="module", params=["consolidated", "listed"])
def dataset(request: pytest.FixtureRequest, service: str) -> Generator[xarray.Dataset]:
    """Open the group of all cases, once for each store and each way to know its members."""
    with quiet():
        opened = xarray.open_zarr(
            f"{service}/bucket/groups/{request.param}",
            consolidated=request.param == "consolidated",
            zarr_format=3,
            chunks=None,
            decode_cf=False,
        )
    with opened:
        yield opened


@from_each_store
@pytest.mark.parametrize("name", [case.name for case in IN_GROUPS])
def test_reads_values_in_inner_chunks(dataset: xarray.Dataset, name: str) -> None:
    """Each variable reads as written; its encoding has the inner chunk shape and no shards."""
    case = BY_NAME[name]
    encoding = dataset[member(case)].encoding

    with quiet():
        same(dataset[member(case)].values, case.values)
    assert (encoding["chunks"], encoding["shards"]) == (case.served, None)


def test_finds_all_variables(dataset: xarray.Dataset) -> None:
    """No variable of the group is missing, and none is added."""
    assert set(dataset.variables) == {member(case) for case in IN_GROUPS}


def test_keeps_the_attributes(dataset: xarray.Dataset) -> None:
    """The group's attributes arrive."""
    assert dataset.attrs == {"title": "all cases"}


@pytest.mark.parametrize("name", ["consolidated", "listed"])
def test_opens_as_most_people_do(service: str, name: str) -> None:
    """Without any option, a nested group opens with its variable."""
    with (
        quiet(),
        xarray.open_zarr(f"{service}/bucket/groups/{name}/below/deeper", chunks=None) as opened,
    ):
        same(opened["v"].values, VALUES)


def test_opens_a_nested_group_by_name(service: str) -> None:
    """`group=` leads through groups to their variables."""
    url = f"{service}/bucket/groups/listed"
    with (
        quiet(),
        xarray.open_zarr(url, group="below/deeper", consolidated=False, chunks=None) as opened,
    ):
        same(opened["v"].values, VALUES)


def test_v2_passes_through(service: str) -> None:
    """A consolidated group of format 2 reads, as it is."""
    url = f"{service}/bucket/groups/v2"
    with quiet(), xarray.open_zarr(url, chunks=None, mask_and_scale=False) as opened:
        same(opened["v"].values, VALUES)
        assert opened["v"].dims == ("z", "y", "x")
