"""Repositories of Icechunk before 2.1 at the root of a bucket, over requests of S3."""

from pathlib import Path
from typing import Final

from shardgate.settings import DatasetSettings, Settings
from tests.support.icechunk.sessions.replicas import files_of_repository
from tests.support.serving import client_of
from tests.support.storage.ministack import MiniStack

_SESSIONS: Final = "/api/datasets/root/sessions"


def test_keys_that_begin_with_a_slash_are_read_and_committed_in_s3(
    ministack: MiniStack, tmp_path: Path
) -> None:
    """A repository in S3 whose keys begin with a slash is read and committed to, and no key of its
    bucket begins otherwise. Clients can write no such keys.
    """
    bucket = "rooted"
    ministack.client.create_bucket(Bucket=bucket)
    for name, data in files_of_repository(tmp_path).items():
        ministack.client.put_object(Bucket=bucket, Key=f"/{name}", Body=data)
    root = DatasetSettings(url=f"s3://{bucket}", store="lab", writable=True)
    settings = Settings(stores={"lab": ministack.settings}, datasets={"root": root})
    with client_of(settings) as client:
        session_id = client.post(_SESSIONS, json={}).json()["session_id"]
        chunk = f"/root/@session.{session_id}/a/c/1"
        assert client.get("/root/a/c/0").content == b"\x01\x02"
        assert client.put(chunk, content=b"\x09" * 600).status_code == 200
        for key in ("/root//repo", "/root/%2Frepo"):
            assert client.put(key, content=b"1").is_client_error
        made = client.post(f"{_SESSIONS}/{session_id}/commit", json={"message": "changed"})
        assert made.status_code == 201, made.text
        assert client.get(f"/root/@{made.json()['snapshot_id']}/a/c/1").content == b"\x09" * 600

    listed = ministack.client.list_objects_v2(Bucket=bucket)["Contents"]
    keys = [each["Key"] for each in listed]
    assert "/repo" in keys
    assert [key for key in keys if not key.startswith("/")] == []
