"""The service in front of a bucket of test data, which lies in a folder or in SeaweedFS."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from app.settings import DatasetSettings, Settings
from tests.seaweedfs import SeaweedFS
from tests.serving import serving


@contextmanager
def from_folder(path: Path) -> Generator[str]:
    """Serve the folder *path* as the datasets `bucket` and `raw`; give the service's URL."""
    datasets = {
        "bucket": DatasetSettings(url=str(path)),
        "raw": DatasetSettings(url=str(path), view="raw"),
    }
    with serving(Settings(datasets=datasets)) as url:
        yield url


@contextmanager
def from_seaweedfs(path: Path, seaweedfs: SeaweedFS, prefix: str) -> Generator[str]:
    """Upload the folder *path* under *prefix*, and serve it from there."""
    seaweedfs.upload_folder(path, prefix)
    url = f"s3://{seaweedfs.bucket}/{prefix}"
    datasets = {
        "bucket": DatasetSettings(url=url, store="lab"),
        "raw": DatasetSettings(url=url, store="lab", view="raw"),
    }
    with serving(Settings(stores={"lab": seaweedfs.settings}, datasets=datasets)) as base:
        yield base
