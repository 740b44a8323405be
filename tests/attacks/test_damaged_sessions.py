"""Sessions whose stored documents are no metadata any more."""

from pathlib import Path

import httpx
import zstandard

from app.settings import DatasetSettings, Settings
from tests.formats.icechunk.building_repo import Repo, ref
from tests.serving import serving
from tests.sessions import GROUP, array_document


def test_a_node_that_is_damaged_is_told(tmp_path: Path) -> None:
    """With the object of the session, whatever is asked; another session is not harmed."""
    data = DatasetSettings(url=tmp_path.as_uri(), writable=True)
    with (
        serving(Settings(datasets={"data": data})) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        client.post("/api/datasets", json={"name": "data"})
        damaged, whole = begin(client), begin(client)
    (stored,) = tmp_path.glob(f"sessions/{damaged}.session")
    document = zstandard.decompress(stored.read_bytes())
    stored.write_bytes(zstandard.compress(document.replace(b"zarr_format", b"zarr-format")))
    with (
        serving(Settings(datasets={"data": data})) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        base = f"/data/@session.{damaged}"
        answers = [
            client.get(f"{base}/a/zarr.json"),
            client.get(f"{base}/a/c/0"),
            client.put(f"{base}/a/c/0", content=b"ab"),
            client.get(f"/data?list-type=2&prefix=@session.{damaged}/"),
        ]

        for answer in answers:
            assert answer.status_code == 502, (str(answer.url), answer.text)
            assert f"{damaged}.session" in answer.text
        assert client.get(f"/data/@session.{whole}/a/zarr.json").is_success


def test_no_session_begins_at_a_branch_that_is_damaged(tmp_path: Path) -> None:
    """The answer names `repo` and the branch, which is at a snapshot that is not listed."""
    (tmp_path / "repo").write_bytes(Repo(branches=[ref("main", 9)]).file())
    data = DatasetSettings(url=tmp_path.as_uri(), writable=True)
    with serving(Settings(datasets={"data": data})) as url:
        answer = httpx.post(f"{url}/api/datasets/data/sessions")

    assert answer.status_code == 502
    assert "repo: the ref 'main' is damaged: there is no snapshot 9" in answer.json()["detail"]


def begin(client: httpx.Client) -> str:
    """Begin a session with an array in it."""
    session_id: str = client.post("/api/datasets/data/sessions").json()["session_id"]
    base = f"/data/@session.{session_id}"
    assert client.put(f"{base}/zarr.json", content=GROUP).is_success
    assert client.put(f"{base}/a/zarr.json", json=array_document((6,), (2,))).is_success
    return session_id
