"""Chunks that real writers encoded, given to the service one by one, and where it puts them."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from app.settings import DatasetSettings, Settings
from tests.clients.asking import connect
from tests.clients.writing import Json
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

METADATA: Final = ("zarr.json", ".zarray", ".zattrs", "info", "provenance")

type Files = Mapping[str, bytes]
"""What lies in a folder by its relative name."""


@dataclass(frozen=True, slots=True)
class Taker:
    """A service that takes data sets into a folder or SeaweedFS, where others read them."""

    url: str
    client: httpx.Client
    folder: Path
    seaweedfs: SeaweedFS | None = None

    def place(self, source: Path, name: str) -> None:
        """Copy what is at *source* into the store, as *name*."""
        if self.seaweedfs is None:
            shutil.copytree(source, self.folder / name)
        else:
            self.seaweedfs.upload_folder(source, f"taken/{name}")

    def push(self, name: str, before: Files, after: Files) -> None:
        """PUT what is new or other in *after*, and DELETE what is only in *before*."""
        for key in before.keys() | after.keys():
            path = f"/data/{name}/{key}"
            if key not in after:
                answer = self.client.delete(path)
            elif before.get(key) != after[key]:
                answer = self.client.put(path, content=after[key])
            else:
                continue
            assert answer.is_success, f"{key}: {answer.text}"

    def stored(self, name: str) -> set[str]:
        """Name the objects of *name* that are no metadata."""
        if self.seaweedfs is None:
            found = set(files_in(self.folder / name))
        else:
            listed = self.seaweedfs.store(f"taken/{name}").list().collect()
            found = {each["path"] for each in listed}
        return {key for key in found if not key.endswith(METADATA)}

    def zarr_store(self, name: str) -> Any:
        """Give what zarr-python opens *name* with, past the service."""
        if self.seaweedfs is None:
            return self.folder / name
        return self.seaweedfs.zarr_store(f"taken/{name}")

    def kvstore(self, name: str) -> Json | str:
        """Give what TensorStore opens it with; the keys of SeaweedFS are in the environment."""
        if self.seaweedfs is None:
            return f"file://{self.folder / name}/"
        return {
            "driver": "s3",
            "bucket": self.seaweedfs.bucket,
            "path": f"taken/{name}/",
            "endpoint": self.seaweedfs.endpoint_url,
            "aws_region": self.seaweedfs.region,
            "aws_credentials": {"type": "environment"},
        }


@contextmanager
def taking_into_folder(folder: Path, **dataset: Any) -> Generator[Taker]:
    """Serve the writable dataset ``data`` out of *folder*."""
    data = DatasetSettings(url=str(folder), writable=True, **dataset)
    settings = Settings(datasets={"data": data})
    with serving(settings) as url, connect(url) as client:
        yield Taker(url, client, folder)


@contextmanager
def taking_into_seaweedfs(seaweedfs: SeaweedFS, folder: Path) -> Generator[Taker]:
    """Serve it out of a prefix of SeaweedFS; *folder* is not used."""
    data = DatasetSettings(url=f"s3://{seaweedfs.bucket}/taken", store="lab", writable=True)
    settings = Settings(stores={"lab": seaweedfs.settings}, datasets={"data": data})
    with serving(settings) as url, connect(url) as client:
        yield Taker(url, client, folder, seaweedfs)


def files_in(folder: Path) -> dict[str, bytes]:
    """Read all files below *folder*."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def chunks_in(folder: Path) -> dict[str, bytes]:
    """Read all files but the metadata."""
    return {key: data for key, data in files_in(folder).items() if not key.endswith(METADATA)}


def lay_out(folder: Path, before: Files, after: Files) -> None:
    """Make the files of *folder*, which were *before*, those of *after*."""
    for key in before.keys() - after.keys():
        (folder / key).unlink()
    for key, data in after.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


def mixed(before: Files, after: Files) -> dict[str, bytes]:
    """Keep every third file, replace every third, and leave every third away."""
    found: dict[str, bytes] = {}
    for number, key in enumerate(sorted(before.keys() | after.keys())):
        source = (before, after, {})[number % 3]
        if key in source:
            found[key] = source[key]
    return found
