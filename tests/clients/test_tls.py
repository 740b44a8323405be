"""Clients read and write arrays and repositories in a store that speaks TLS."""

from collections.abc import Generator
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
import zarr

from tests.support.clients.filling import CLIENTS
from tests.support.clients.writing import read_tensorstore, read_zarr, same
from tests.support.committing import put_array, put_chunks, put_group
from tests.support.faults.sites import DEADLINE_S, client_of, configured
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.labs import LARGE, SMALL, Lab, value
from tests.support.seaweedfs import SeaweedFS
from tests.support.writable_repositories import new_place


@pytest.fixture(scope="module")
def over_tls(seaweedfs: SeaweedFS, ca_file: str) -> dict[str, str]:
    """Return the variables of a gateway that reaches the store over TLS, and trusts it."""
    return {"AWS_ENDPOINT_URL": seaweedfs.safe_url, "AWS_CA_BUNDLE": ca_file}


@pytest.fixture(scope="module")
def lab(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Create the folder of arrays, which tests reach over plain HTTP."""
    return Lab(tmp_path_factory.mktemp("lab"), seaweedfs)


@pytest.fixture(scope="module")
def gateway(lab: Lab, over_tls: dict[str, str]) -> Generator[Gateway]:
    """Start a gateway before the store."""
    with forked(of_dataset(lab.url, lab.seaweedfs) | over_tls) as started:
        yield started


@pytest.mark.parametrize("client", CLIENTS)
def test_client_reads_and_writes_an_array_stored_behind_tls(
    lab: Lab, gateway: Gateway, client: str
) -> None:
    """zarr-python writes a part of a sharded array in a store that speaks TLS, and nothing else.

    TensorStore reads all values.
    """
    name = lab.new_array(SMALL, {at: value(SMALL, 1, at) for at in range(SMALL.chunks)})
    array = zarr.open_array(CLIENTS[client](gateway.url, name), mode="r+")
    expected = read_zarr(lab.folder / name)
    same(array[...], expected)
    expected[3:41] += 1
    array[3:41] = expected[3:41]

    same(lab.open(name)[:], expected)
    over_http = {"driver": "http", "base_url": f"{gateway.url}/data/{name}/"}
    same(read_tensorstore(over_http), expected)


def test_large_shard_behind_tls_is_copied_by_the_store(lab: Lab, gateway: Gateway) -> None:
    """A chunk that is put into a large shard behind TLS is read back, and its neighbours are kept.

    The store copies them, in parts.
    """
    old = {at: value(LARGE, 1, at) for at in range(LARGE.chunks - 1)}
    name, new = lab.new_array(LARGE, old), value(LARGE, 2, 0)
    url = f"{gateway.url}/data/{name}/c/1"
    assert httpx.put(url, content=new, timeout=DEADLINE_S).is_success

    assert httpx.get(url, timeout=DEADLINE_S).content == new
    chunks = {at: old.get(at) for at in range(LARGE.chunks)} | {1: new}
    assert lab.read(name) == {f"{name}/c/{at}": data for at, data in chunks.items()}


def test_library_reads_a_commit_behind_tls(
    seaweedfs: SeaweedFS, over_tls: dict[str, str], tmp_path: Path
) -> None:
    """The icechunk library reads what was committed to a repository behind TLS."""
    place = new_place(tmp_path, seaweedfs)
    place.create()
    with forked(configured(place) | over_tls) as started, client_of(started, place) as client:
        chunk = put_chunks("/a", client.chunk(b"\1\2"), [1], length=2)
        changes = put_group("/"), put_array("/a", 4), chunk
        made = client.commit(*changes, key="k", message="over TLS")

        assert client.tip == made
        assert client.messages() == ["over TLS"]
        assert client.values("/a") == [0, 0, 1, 2]
        served = client.api.client.get("/repo/a/c/1")
        assert (served.status_code, served.content) == (HTTPStatus.OK, b"\1\2")


def test_untrusted_certificate_of_a_store_is_424(lab: Lab) -> None:
    """Reads and writes get 424 while the gateway does not trust the store's certificate."""
    name = lab.new_array(SMALL, {0: value(SMALL, 1, 0)})
    assert lab.seaweedfs is not None
    environ = of_dataset(lab.url, lab.seaweedfs, endpoint_url=lab.seaweedfs.safe_url)
    with forked(environ) as started:
        for method in "GET", "PUT":
            url = f"{started.url}/data/{name}/c/0"
            answer = httpx.request(method, url, content=value(SMALL, 3, 0), timeout=DEADLINE_S)
            assert answer.status_code == HTTPStatus.FAILED_DEPENDENCY, answer.text
