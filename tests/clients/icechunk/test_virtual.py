"""References that lead out of a repository are followed as the library follows them."""

from collections.abc import Generator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.clients.asking import connect
from tests.clients.icechunk.library import compare_documents, compare_nodes, nodes_of
from tests.clients.icechunk.repositories import VERSIONS, storage
from tests.clients.icechunk.virtual import DATA, MANY, UNREAD, Elsewhere, open_virtual

PLACES = ("file", "s3", "http")
KEPT = "public, max-age=31536000, immutable"


@pytest.fixture(scope="module")
def client(following: str) -> Generator[httpx.Client]:
    """Talk to the service."""
    with connect(following) as opened:
        yield opened


@pytest.mark.parametrize(
    ("following", "version"),
    [
        *(("local", version) for version in VERSIONS),
        *(
            pytest.param("remote", v, marks=() if v == "migrated" else pytest.mark.soak)
            for v in VERSIONS
        ),
    ],
    indirect=["following"],
)
def test_is_what_the_library_reads(
    client: httpx.Client, version: str, virtual: dict[str, Path], places: Mapping[str, Elsewhere]
) -> None:
    """Every reference gives the bytes that the library gives; sharded arrays are unsharded."""
    session = open_virtual(storage(virtual[version]), places).readonly_session("main")
    nodes = nodes_of(session, without_chunks=UNREAD)

    compare_documents(client, f"/{version}/@tag.v1", nodes)
    compare_nodes(client, f"/{version}/@tag.v1", nodes, session.store)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["none", "etag", "modified"])
def test_checksum_holds(client: httpx.Client, version: str, place: str, kind: str) -> None:
    """With an ETag, a time, or neither, the bytes are those that are referred to."""
    for at in range(2):
        answer = client.get(f"/{version}/@tag.v1/{place}/{kind}/c/{at}")

        assert answer.content == DATA[100 * at + 7 : 100 * at + 11]
        assert (answer.headers["cache-control"] == KEPT) == (kind == "etag")
    assert client.get(f"/{version}/@tag.v1/{place}/{kind}/c/2").status_code == 404


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("place", PLACES)
def test_many_references(client: httpx.Client, version: str, place: str) -> None:
    """Locations that are compressed with a dictionary are told apart."""
    for at in (0, 1, 2, 511, 512, 777, MANY - 1):
        answer = client.get(f"/{version}/{place}/many/c/{at}")

        assert (answer.status_code, answer.content) == (200, DATA[4 * at : 4 * at + 4])
    assert client.get(f"/{version}/{place}/many/c/{MANY}").status_code == 404
