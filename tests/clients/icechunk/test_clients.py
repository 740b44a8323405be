"""Clients that know nothing of Icechunk open a version of a repository over HTTP."""

from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import obstore.store
import pytest
import tensorstore
import xarray
import zarr
import zarr.storage

from tests.clients.arrays import BY_NAME
from tests.clients.icechunk.conftest import from_each_store
from tests.clients.icechunk.repositories import SHARDED, VERSIONS
from tests.clients.writing import counted, quiet, same

UNKNOWN_TO_TENSORSTORE: Final = {"dtype/string", "after/gzip"}


def over_fsspec(url: str) -> Any:
    """Open *url* as most people do."""
    return zarr.open(url, mode="r")


def over_obstore(url: str) -> Any:
    """Open *url* through the client written in Rust."""
    options: Any = {"allow_http": True}
    store = obstore.store.HTTPStore.from_url(url, client_options=options)
    return zarr.open(zarr.storage.ObjectStore(store, read_only=True), mode="r")


OPENERS: Final = {"fsspec": over_fsspec, "obstore": over_obstore}


@pytest.fixture(params=list(OPENERS))
def opener(request: pytest.FixtureRequest) -> Any:
    """Return each way to open a URL."""
    return OPENERS[request.param]


@pytest.fixture(params=VERSIONS)
def root(request: pytest.FixtureRequest, service: str) -> str:
    """Return the URL of the eventful repository in each version."""
    return f"{service}/bucket/eventful/{request.param}"


@from_each_store
@pytest.mark.parametrize("ref", ["@tag.first", "@branch.main", "@branch.reset", ""])
def test_zarr_python_opens_a_ref(root: str, opener: Any, ref: str) -> None:
    """The root of a ref is a group with consolidated metadata; its arrays read."""
    with quiet():
        group = opener(f"{root}/{ref}".rstrip("/"))
        members = dict(group.members(max_depth=None))
    is_first = ref == "@tag.first"

    assert group.attrs["title"] == "µ"
    assert group.metadata.consolidated_metadata is not None
    assert ("deleted" in members) == is_first
    expected = counted((7, 5), "i8")
    if not is_first:
        expected[0, 0] = -1
    if ref in {"", "@branch.main"} and not root.endswith("v1"):
        expected[6, 4] = -2
    same(group["native"][...], expected)
    same(members["inline"][...], counted((7, 5), "u1"))


def test_lists_nested_groups(root: str) -> None:
    """A group without consolidated metadata tells its members by its page.

    fsspec gives names as they are spelled in links.
    """
    with quiet():
        group = over_fsspec(f"{root}/@tag.first/group")
        names = {unquote(name) for name, _ in group.members(max_depth=None)}

    assert group.metadata.consolidated_metadata is None
    assert names == {"x", "below", "below/é 日本", "below/é 日本/y"}
    same(group["below/é 日本/y"][...], np.full((5, 5), 9, "u1"))


def test_lists_the_root_of_main(root: str) -> None:
    """The page of `main` names its nodes, beside the refs."""
    with quiet():
        names = {name for name, _ in zarr.open_group(root, use_consolidated=False).members()}

    assert {"native", "group", "transpose"} <= names
    assert "deleted" not in names


@pytest.mark.parametrize("branch", ["main", "native"])
@pytest.mark.parametrize("name", [name for name in SHARDED if name not in UNKNOWN_TO_TENSORSTORE])
def test_tensorstore_reads(local: str, branch: str, name: str) -> None:
    """TensorStore's `zarr3` driver reads all that it can decode."""
    url = f"{local}/bucket/placed/v2/@branch.{branch}/{name}/"
    array = tensorstore.open({"driver": "zarr3", "kvstore": url}, open=True).result()

    same(array.read().result(), BY_NAME[name].values)


def test_xarray_opens_a_tag(service: str) -> None:
    """`open_zarr` finds the variables in the consolidated metadata of a ref, or of a listing."""
    for consolidated in (True, False):
        url = f"{service}/bucket/dataset"
        with xarray.open_zarr(f"{url}/@tag.v1", consolidated=consolidated, chunks=None) as opened:
            assert set(opened.variables) == {"t", "x", "rain"}
            assert opened.attrs == {"title": "weather"}
            np.testing.assert_array_equal(opened["rain"].values, counted((4, 6), "f4"))
        with xarray.open_zarr(url, consolidated=consolidated, chunks=None) as now:
            assert now.sizes == {"t": 6, "x": 6}
