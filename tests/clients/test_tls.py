"""Clients read and write arrays and repositories in a store that speaks TLS."""

from collections.abc import Generator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import trustme
import zarr

from tests.support.clients.filling import CLIENTS
from tests.support.clients.writing import read_tensorstore, read_zarr, same
from tests.support.committing import put_array, put_chunks, put_group
from tests.support.faults.sites import DEADLINE_S, client_of, configured
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.labs import LARGE, SMALL, Lab, Shape, value
from tests.support.processes import free_ports
from tests.support.seaweedfs import SeaweedFS, own_ports, running
from tests.support.writable_repositories import new_place


class Vault(NamedTuple):
    """A store that tests reach over plain HTTP, and gateways over TLS by the variables."""

    seaweedfs: SeaweedFS
    environ: dict[str, str]


@pytest.fixture(scope="module")
def vault(
    weed: Path, authority: trustme.CA, ca_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Vault]:
    """Run SeaweedFS with a certificate."""
    folder = tmp_path_factory.mktemp("vault")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    files = [f"-s3.key.file={folder}/tls.key", f"-s3.cert.file={folder}/tls.crt"]
    port, listening = own_ports(folder)
    [safe_port] = free_ports(1)
    ports = port, [*listening, *files, f"-s3.port.https={safe_port}"]
    url = f"https://127.0.0.1:{safe_port}"
    with running(weed, folder, ports) as server:
        yield Vault(server, {"AWS_ENDPOINT_URL": url, "AWS_CA_BUNDLE": ca_file})


@pytest.fixture(scope="module")
def lab(vault: Vault, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Create the folder of arrays."""
    return Lab(tmp_path_factory.mktemp("lab"), vault.seaweedfs)


@pytest.fixture(scope="module")
def gateway(vault: Vault, lab: Lab) -> Generator[Gateway]:
    """Start a gateway that trusts the certificate."""
    with forked(of_dataset(lab.url, vault.seaweedfs) | vault.environ) as started:
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


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_chunk_put_over_tls_is_read_back(lab: Lab, gateway: Gateway, shape: Shape) -> None:
    """A chunk that is put into a shard behind TLS is read back, and its neighbours are kept.

    A large shard is copied by the store, in parts.
    """
    old = {at: value(shape, 1, at) for at in range(shape.chunks - 1)}
    name, new = lab.new_array(shape, old), value(shape, 2, 0)
    url = f"{gateway.url}/data/{name}/c/1"
    assert httpx.put(url, content=new, timeout=DEADLINE_S).is_success

    assert httpx.get(url, timeout=DEADLINE_S).content == new
    chunks = {at: old.get(at) for at in range(shape.chunks)} | {1: new}
    assert lab.read(name) == {f"{name}/c/{at}": data for at, data in chunks.items()}


def test_library_reads_a_commit_behind_tls(vault: Vault, tmp_path: Path) -> None:
    """The icechunk library reads what was committed to a repository behind TLS."""
    place = new_place(tmp_path, vault.seaweedfs)
    place.create()
    with forked(configured(place) | vault.environ) as started, client_of(started, place) as client:
        chunk = put_chunks("/a", client.chunk(b"\1\2"), [1], length=2)
        changes = put_group("/"), put_array("/a", 4), chunk
        made = client.commit(*changes, key="k", message="over TLS")

        assert client.tip == made
        assert client.messages() == ["over TLS"]
        assert client.values("/a") == [0, 0, 1, 2]
        served = client.api.client.get("/repo/a/c/1")
        assert (served.status_code, served.content) == (HTTPStatus.OK, b"\1\2")


def test_untrusted_certificate_of_a_store_is_424(vault: Vault, lab: Lab) -> None:
    """Reads and writes get 424 while the gateway does not trust the store's certificate."""
    name = lab.new_array(SMALL, {0: value(SMALL, 1, 0)})
    environ = of_dataset(lab.url, vault.seaweedfs) | vault.environ
    del environ["AWS_CA_BUNDLE"]
    with forked(environ) as started:
        for method in "GET", "PUT":
            url = f"{started.url}/data/{name}/c/0"
            answer = httpx.request(method, url, content=value(SMALL, 3, 0), timeout=DEADLINE_S)
            assert answer.status_code == HTTPStatus.FAILED_DEPENDENCY, answer.text
