"""A gateway is killed at each request that a write into a session takes."""

import secrets
from collections.abc import Generator
from typing import Any, Final

import httpx
import icechunk
import pytest
import zarr

from tests.faults.sites import DEADLINE_S, Site, opened
from tests.gateways import Start
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Mishap

MOMENTS: Final = (
    pytest.param(Mishap.REQUEST_LOST, id="before", marks=pytest.mark.soak),
    pytest.param(Mishap.ANSWER_LOST, id="after"),
)
"""Before a request the session is as it was after the one before that."""


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start what lives on."""
    with opened(seaweedfs, tmp_path_factory.mktemp("killed"), start) as made:
        yield made


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x09" * 600, id="native"),
        pytest.param(None, id="gone", marks=pytest.mark.soak),
    ],
)
def test_a_write_is_done_or_not(site: Site, body: bytes | None, moment: Mishap) -> None:
    """The other gateway goes on with the session, and the library reads the commit."""
    nth, is_killed = 0, True
    while is_killed:
        path = f"repo-{secrets.token_hex(4)}"
        repo = created(site, path)
        session_id = begun(site, path)
        key, old = f"{path}/@session.{session_id}/a/c/1", b"\x01" * 600
        assert site.get(site.healthy, key) == old
        with site.behind_proxy() as doomed:
            assert site.put(doomed, key.replace("/c/1", "/c/0"), old).is_success
            site.proxy.between = doomed.kill
            site.proxy.spoil([nth], moment)
            try:
                assert site.put(doomed, key, body).is_success
                is_killed = False
            except httpx.TransportError:
                assert doomed.wait(DEADLINE_S)
        found = site.get(site.healthy, key)
        assert found == body or (is_killed and found == old)
        assert site.put(site.healthy, key.replace("/c/1", "/c/0"), b"\x07" * 600).is_success
        committed(site, path, session_id)
        read: Any = zarr.open_array(repo.readonly_session("main").store, path="a", mode="r")
        expected = b"\x07" * 600 + (found or bytes(600))
        assert read[:].tobytes() == expected
        nth += 1
    assert nth > 2


def created(site: Site, path: str) -> icechunk.Repository:
    """Let the library create a repository with the array ``a`` of two chunks."""
    weed = site.lab.seaweedfs
    assert weed is not None
    storage = icechunk.s3_storage(
        bucket=weed.bucket,
        prefix=f"{site.lab.url.removeprefix(f's3://{weed.bucket}/')}/{path}",
        endpoint_url=weed.endpoint_url,
        region=weed.region,
        access_key_id=weed.access_key_id,
        secret_access_key=weed.secret_access_key,
        allow_http=True,
        force_path_style=True,
    )
    repo = icechunk.Repository.create(storage)
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    options: Any = {"chunks": (600,), "dtype": "u1", "compressors": None}
    group.create_array("a", shape=(1200,), **options)[:] = 1
    session.commit("ones")
    return repo


def begun(site: Site, path: str) -> str:
    """Begin a session."""
    url = f"{site.healthy.url}/api/datasets/data/sessions"
    answer = httpx.post(url, json={}, params={"path": path}, timeout=DEADLINE_S)
    session_id: str = answer.json()["session_id"]
    return session_id


def committed(site: Site, path: str, session_id: str) -> None:
    """Commit it."""
    url = f"{site.healthy.url}/api/datasets/data/sessions/{session_id}/commit"
    answer = httpx.post(url, json={"message": "x"}, params={"path": path}, timeout=DEADLINE_S)
    assert answer.status_code == 201, answer.text
