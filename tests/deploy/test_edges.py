"""Varnish and nginx before a gateway, as a CDN is: what they keep, for how long, and for whom."""

import time
from collections.abc import Generator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from shardgate.settings import Settings
from tests.support.deploy.balancer import EXPIRED_S, cached
from tests.support.deploy.edges import EDGES, Edge, edging
from tests.support.processes import wait_until

_TOKENS: Final = ("token-of-ana", "token-of-ben")
_CACHING: Final = {
    "lasting": "public, max-age=1, s-maxage=3600",
    "brief": "public, max-age=0, s-maxage=1",
    "stale": "public, max-age=1, stale-while-revalidate=3600",
}
"""Cache-Control by the name of a dataset."""


def settings(root: Path) -> Settings:
    """Return the settings of a gateway of *root*, once for each Cache-Control and once private."""
    where: dict[str, Any] = {"url": str(root), "writable": True}
    digests = [sha256(token.encode()).hexdigest() for token in _TOKENS]
    datasets = {name: where | {"cache_control": control} for name, control in _CACHING.items()}
    datasets["private"] = where | {"read": ["ana", "ben"], "write": ["ana"]}
    datasets["repository"] = {"url": f"{root}/repository", "cache_control": "no-cache"}
    return Settings.model_validate({
        "callers": {
            name: {"token_sha256": [digest]}
            for name, digest in zip(("ana", "ben"), digests, strict=True)
        },
        "datasets": datasets,
    })  # fmt: skip


@pytest.fixture(scope="module", params=EDGES)
def edge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Edge]:
    """Start Varnish or nginx before a gateway."""
    root = tmp_path_factory.mktemp("root")
    values = np.arange(1, 65, dtype="u1")
    zarr.create_array(root / "array", data=values, shards=(32,), chunks=(8,), compressors=None)
    storage = icechunk.local_filesystem_storage(str(root / "repository"))
    session = icechunk.Repository.create(storage).writable_session("main")
    zarr.create_array(session.store, name="array", data=values, chunks=(8,), compressors=None)
    session.commit("values")
    with edging(request.param, tmp_path_factory.mktemp("edge"), settings(root)) as running:
        yield running


@pytest.fixture
def key() -> str:
    """Return a key of an object that no other test uses."""
    return f"objects/{uuid4().hex}"


def put(edge: Edge, path: str, body: bytes, **headers: str) -> None:
    """Store *body* through the gateway, past the cache."""
    url = f"{edge.gateway_url}{path}"
    httpx.put(url, content=body, headers=headers, timeout=20).raise_for_status()


@pytest.mark.parametrize("path", ["/lasting/array/c/3", "/lasting/array/zarr.json"])
def test_second_answer_is_the_first_from_the_cache(edge: Edge, path: str) -> None:
    """The second GET has the bytes and the ETag of the gateway, which it does not reach."""
    own = httpx.get(f"{edge.gateway_url}{path}", timeout=20)
    answers = [edge.client.get(path) for _ in range(2)]
    known = edge.client.get(path, headers={"if-none-match": own.headers["etag"]})

    assert [cached(each) for each in answers] == ["miss", "hit"]
    assert {each.content for each in answers} == {own.content}
    assert {each.headers["etag"] for each in (*answers, known)} == {own.headers["etag"]}
    assert known.status_code == 304
    assert edge.passed.count(("GET", path)) == 2


def test_pages_of_all_origins_share_an_answer(edge: Edge) -> None:
    """A page of another origin gets the answer that is kept, which every page may read."""
    path = "/lasting/array/c/4"
    origins = ("https://one.example", "https://two.example")
    answers = [edge.client.get(path, headers={"origin": each}) for each in origins]

    assert [cached(each) for each in answers] == ["miss", "hit"]
    assert {each.headers["access-control-allow-origin"] for each in answers} == {"*"}


def test_write_is_seen_once_s_maxage_is_over(edge: Edge, key: str) -> None:
    """An object that was replaced is seen anew after s-maxage, without a purge."""
    path = f"/brief/{key}"
    put(edge, path, b"old")
    assert edge.client.get(path).content == b"old"
    put(edge, path, b"new")

    wait_until(lambda: edge.client.get(path).content == b"new")


def test_purge_shows_a_write_at_once(edge: Edge, key: str) -> None:
    """An answer is kept for s-maxage, not max-age, and a purge ends that."""
    path = f"/lasting/{key}"
    put(edge, path, b"old")
    edge.client.get(path)
    put(edge, path, b"new")
    time.sleep(EXPIRED_S)
    kept = edge.client.get(path)
    edge.purge(path)

    assert (cached(kept), kept.content) == ("hit", b"old")
    assert edge.client.get(path).content == b"new"


def test_snapshot_is_kept_where_its_branch_is_not(edge: Edge) -> None:
    """A chunk below its snapshot is kept, whatever `cache_control` says of the branch."""
    [branch] = edge.client.get("/api/datasets/repository/branches").json()["branches"]
    refs = ("@branch.main", f"@{branch['snapshot_id']}")
    of_branch, of_snapshot = (
        [cached(edge.client.get(f"/repository/{ref}/array/c/0")) for _ in range(2)] for ref in refs
    )

    assert of_snapshot == ["miss", "hit"]
    assert "hit" not in of_branch


def test_absence_is_over_after_max_age(edge: Edge, key: str) -> None:
    """The first GET after max-age sees an object that was absent, whatever `cache_control` allows.

    An expired 404 would be fill value in the place of its bytes.
    """
    paths = [f"/{dataset}/{key}" for dataset in ("stale", "lasting")]
    assert {edge.client.get(path).status_code for path in paths} == {404}
    put(edge, paths[0], b"new")
    time.sleep(EXPIRED_S)

    assert [edge.client.get(path).content for path in paths] == [b"new", b"new"]


def test_private_bytes_are_not_kept(edge: Edge, key: str) -> None:
    """Two callers read a private object from the gateway, and nobody else does after them."""
    public, private = uuid4().bytes, uuid4().bytes
    path = f"/private/{key}"
    put(edge, f"/lasting/{key}.public", public)
    put(edge, path, private, authorization=f"Bearer {_TOKENS[0]}")
    before = len(edge.passed)
    for token in _TOKENS:
        assert edge.client.get(path).status_code == 401
        bearer = {"authorization": f"Bearer {token}"}
        assert edge.client.get(path, headers=bearer).content == private
        assert edge.client.get(f"/~{token}{path}").content == private
    assert edge.client.get(path).status_code == 401
    assert edge.client.get(f"/lasting/{key}.public").content == public

    assert len(edge.passed) == before + 8
    assert edge.holds(public)
    assert not edge.holds(private)
    assert not any(edge.holds(token.encode()) for token in _TOKENS)
