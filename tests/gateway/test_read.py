"""`shardgate.gateway.read`: pages of links, types, and damage."""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urljoin

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.listing import Name
from shardgate.gateway.entity_headers import content_type
from shardgate.gateway.read import MOST_LINKS, listing_page
from shardgate.server.request import split_target
from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.files import write_files
from tests.support.formats.zarr.building import build, chunk_bytes
from tests.support.serving import client_of

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1)


@given(NAMES.filter(lambda name: name not in {".", ".."}), st.booleans())
def test_link_resolves_to_its_name(name: str, is_prefix: bool) -> None:  # noqa: FBT001
    """A link of a listing page resolves to its name, whatever characters it has, without markup."""
    slash = "/" * is_prefix
    listed = Name(f"{name}{slash}", None if is_prefix else 3)
    page = listing_page("/em/", [listed]).decode()
    (link,) = re.findall(r'<a href="([^"]*)">', page)

    assert unquote(urljoin("http://host/em/", link)) == f"http://host/em/{name}{slash}"
    assert page.count("<") == 17


@pytest.mark.parametrize("name", ["@branch.a%2Fb", "@tag.100%25", '@tag.é "<%0A', "@branch."])
def test_link_to_a_ref_resolves_to_its_key(name: str) -> None:
    """A link to a ref resolves to the key that the listing has, with its percent-encoding."""
    page = listing_page("/em/", [Name(f"{name}/")]).decode()
    (link,) = re.findall(r'<a href="([^"]*)">', page)
    path = urljoin("http://host/em/", link).removeprefix("http://host")

    assert split_target(path.encode()) == ("em", f"{name}/")
    assert page.count("<") == 17


@pytest.mark.parametrize(
    ("expected", "keys"),
    [
        (b"application/json", ("a/zarr.json", "a/.zattrs", "info", "vol/mesh/info")),
        (b"application/octet-stream", ("c/0/0", "page.html", "picture.svg", "vol/information")),
        (b"application/octet-stream", ("a.json/7",)),
        (b"text/plain; charset=utf-8", ("notes.txt",)),
    ],
)
def test_content_type_is_never_executable(expected: bytes, keys: tuple[str, ...]) -> None:
    """Metadata are JSON, and no type is one that browsers run."""
    assert {content_type(key) for key in keys} == {expected}


def test_long_listing_page_is_cut() -> None:
    """A listing page has at most `MOST_LINKS` links, and then names `list-type=2`."""
    page = listing_page("/em/c/", [Name(str(n)) for n in range(MOST_LINKS + 1)])

    assert page.count(b"<a href") == MOST_LINKS
    assert b"list-type=2" in page
    assert b"list-type=2" not in listing_page("/em/c/", [Name("0")])


CHUNKS: Final = {f"c/{i}/{j}": chunk_bytes(2 * i + j) for i in range(2) for j in range(2)}
"""Chunks of one shard."""
NEW: Final = chunk_bytes(9)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Store an array whose shard has a changed bit in its last chunk."""
    write_files(build(CHUNKS, trailer=True), tmp_path)
    path = tmp_path / "c/0/0"
    data = path.read_bytes()
    at = data.index(CHUNKS["c/1/1"])
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return path


@pytest.fixture
def client(tmp_path: Path, shard: Path) -> Generator[httpx.Client]:
    """Serve the damaged array, writable."""
    datasets = {"em": DatasetSettings(url=tmp_path.as_uri(), writable=True)}
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


@pytest.mark.parametrize("key", ["c/9/9", "c/3/0", "c/01/0", "c/0"])
def test_absent_chunk_off_the_grid_is_explained(client: httpx.Client, key: str) -> None:
    """The 404 of a chunk off the grid names the grid; that of any other key does not."""
    answers = [client.get(f"/em/{path}") for path in (key, "c/1/3", "other")]

    assert [answer.status_code for answer in answers] == [404] * 3
    off, absent, other = (answer.json()["detail"] for answer in answers)
    assert off == f"em has no {key}: the array has 3×4 chunks, c/0/0 to c/2/3"
    assert (absent, other) == ("em has no c/1/3", "em has no other")


@pytest.mark.parametrize("body", [NEW, None])
def test_write_to_a_damaged_shard_is_refused(
    client: httpx.Client, shard: Path, body: bytes | None
) -> None:
    """A write to a shard with a wrong checksum is 424 and leaves it unchanged.

    The shard can be deleted by prefix and written again.
    """
    before = shard.read_bytes()
    answer = client.request("PUT" if body else "DELETE", "/em/c/0/0", content=body)

    assert answer.status_code == 424
    assert f"{shard.as_uri()}: the checksum at the end of [0, " in answer.json()["detail"]
    assert shard.read_bytes() == before
    assert client.get("/em/c/0/0").content == CHUNKS["c/0/0"]
    assert client.delete("/em?prefix=c/").json() == {"deleted": 4}
    assert not shard.exists()
    assert client.put("/em/c/0/0", content=NEW).is_success


def test_deletion_of_a_prefix_is_answered_in_json(client: httpx.Client) -> None:
    """A deleted prefix is answered by the number of its keys, as a document of JSON."""
    answer = client.delete("/em?prefix=c/")

    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["deleted"] > 0


def test_missing_metadata_is_unavailable(tmp_path: Path, shard: Path) -> None:
    """While an array's metadata are missing that were read before, its chunks are 503."""
    datasets = {"em": DatasetSettings(url=tmp_path.as_uri(), writable=True)}
    settings = Settings(datasets=datasets, cache=CacheSettings(index_bytes=0))
    before = shard.read_bytes()
    with client_of(settings) as client:
        for method, path in (
            *(("GET", "/em/c/0/0"), ("HEAD", "/em/c/0/0"), ("PUT", "/em/c/0/1")),
            *(("DELETE", "/em/c/0/0"), ("DELETE", "/em?prefix=c/"), ("POST", "/em/c/0/1?uploads")),
            *(("GET", "/em?list-type=2&prefix=c/"), ("GET", "/em/c/"), ("GET", "/em/zarr.json")),
        ):
            assert client.get("/em/c/0/0").content == CHUNKS["c/0/0"]
            (tmp_path / "zarr.json").rename(tmp_path / "aside")
            for _ in range(2):
                answer = client.request(method, path, content=NEW if method == "PUT" else None)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
                assert method == "HEAD" or "zarr.json: was there before" in answer.text
            (tmp_path / "aside").rename(tmp_path / "zarr.json")
        assert client.get("/em/c/0/0").content == CHUNKS["c/0/0"]
    assert shard.read_bytes() == before
    assert [each.name for each in shard.parent.iterdir()] == ["0"]
