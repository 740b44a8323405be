"""Repositories that several versions of the real library have written read as they say."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import pytest
from zarr.core.buffer import default_buffer_prototype

from app.settings import DatasetSettings, Settings, VirtualPrefix
from tests.clients.asking import connect
from tests.clients.icechunk.conftest import lab
from tests.clients.icechunk.library import compare_documents, compare_nodes, nodes_of, refs_of
from tests.clients.icechunk.repositories import storage
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

FIXTURES: Final = Path("../shared/fixtures")
OLD: Final = ("icechunk-test-repo-v1", "icechunk-test-repo-v2")
NAMES: Final = (*OLD, "icechunk-split-repo-v2", "icechunk-expire-repo-v2-by-working-copy")
BIG: Final = "group1/big_chunks"
DEEP: Final = ("@branch.my-branch", "@tag.it%20also%20works!")
REFS: Final = ("", *DEEP, "@tag.it%20works!")

pytestmark = pytest.mark.skipif(
    not FIXTURES.is_dir(), reason="the folder ../shared/fixtures is not on this machine"
)


@pytest.fixture(scope="module")
def url(seaweedfs: SeaweedFS) -> Generator[str]:
    """Serve them as they lie in their folder; what they refer to is put into SeaweedFS."""
    repo = icechunk.Repository.open(storage(FIXTURES / OLD[1]))
    native = read(repo.readonly_session("main").store, f"{BIG}/c/0/1")
    seaweedfs.client.create_bucket(Bucket="testbucket")
    seaweedfs.client.put_object(Bucket="testbucket", Key="can_read_old/chunk-1", Body=native)
    prefix = VirtualPrefix(url="s3://testbucket/can_read_old", store="lab")
    datasets = {
        "open": DatasetSettings(url=str(FIXTURES), virtual_chunk_prefixes=(prefix,)),
        "shut": DatasetSettings(url=str(FIXTURES)),
    }
    with serving(Settings(stores={"lab": lab(seaweedfs)}, datasets=datasets)) as base:
        yield base


def read(store: Any, key: str) -> bytes:
    """Read a key with the library."""
    data: bytes = asyncio.run(store.get(key, default_buffer_prototype())).to_bytes()
    return data


@pytest.fixture(scope="module")
def client(url: str) -> Generator[httpx.Client]:
    """Talk to the service."""
    with connect(url) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_is_what_the_library_reads(client: httpx.Client, name: str) -> None:
    """Every ref has the documents and chunks of the library."""
    folder = FIXTURES / name
    for ref, session in refs_of(icechunk.Repository.open(storage(folder)), folder):
        nodes = nodes_of(session, without_chunks=[BIG])
        if nodes:
            compare_documents(client, f"/open/{name}/{ref}", nodes)
            compare_nodes(client, f"/open/{name}/{ref}", nodes, session.store)


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("ref", REFS)
def test_virtual_chunk(client: httpx.Client, name: str, ref: str) -> None:
    """It is followed where that is allowed, and equals its native neighbour."""
    path = f"{name}/{ref}/{BIG}/c/0".replace("//", "/")

    assert client.get(f"/open/{path}/0").content == client.get(f"/open/{path}/1").content
    refused = client.get(f"/shut/{path}/0")
    assert (refused.status_code, client.get(f"/shut/{path}/1").status_code) == (403, 200)
    assert " s3://testbucket" in refused.json()["detail"]
