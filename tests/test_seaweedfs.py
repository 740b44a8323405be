"""The S3 server of the tests itself."""

from pathlib import Path

from tests.seaweedfs import SeaweedFS


def test_a_folder_is_stored_under_relative_names(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    """`upload_folder` keeps the names below the folder."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b c").write_bytes(b"data")

    seaweedfs.upload_folder(tmp_path, "folder/")

    answer = seaweedfs.client.get_object(Bucket=seaweedfs.bucket, Key="folder/a/b c")
    with answer["Body"] as body:
        assert body.read() == b"data"
