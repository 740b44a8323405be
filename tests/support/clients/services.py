"""The service in front of test data, and clients that send requests and chunks to it."""

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import httpx
import pytest

from shardgate.model import ObjectRef
from shardgate.settings import Settings
from shardgate.storage.contract import ObjectStore
from shardgate.storage.wrappers import StoreWrapper
from tests.support.clients.writing import Json
from tests.support.files import read_files, write_files
from tests.support.seaweedfs import SeaweedFS, stored_in
from tests.support.serving import serving

ARRAY: Final = "/bucket/index/zarr_end_little_crc"
HOLES: Final = "/bucket/fill/zero"
KINDS: Final = {
    "chunk": f"{ARRAY}/c/0/0/0",
    "compressed chunk": "/bucket/inside/gzip/c/1/0/1",
    "metadata": f"{ARRAY}/zarr.json",
    "consolidated metadata": "/bucket/groups/consolidated/zarr.json",
    "chunk of an array that is not sharded": "/bucket/plain/v3/c/0/0/0",
    "format 2": "/bucket/plain/v2/.zarray",
    "outside of containers": "/bucket/notes/read%20me.txt",
    "raw": "/raw/index/zarr_end_little_crc/c/0/0/0",
}


class Watched(StoreWrapper):
    """Store that calls *on_read* with the object before each call; *on_read* may raise or wait."""

    def __init__(self, inner: ObjectStore, on_read: Callable[[ObjectRef], Any]) -> None:
        super().__init__(inner)
        self._on_read = on_read

    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Call *on_read* before the store is used."""
        self._on_read(ref)
        return super().store_of(ref)


def connect(url: str) -> httpx.Client:
    """Open a client that sends no header unasked, not even Accept-Encoding."""
    client = httpx.Client(base_url=url, timeout=30)
    del client.headers["accept-encoding"]
    return client


def ask(client: httpx.Client, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """Send a request with *headers*, in whose names underscores stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.request(method, path, headers=named)


@contextmanager
def from_folder(path: Path, seaweedfs: SeaweedFS | None = None, prefix: str = "") -> Generator[str]:
    """Serve the folder *path* as the datasets `bucket` and `raw`; yield the service's URL.

    With *seaweedfs*, the folder is uploaded to it and served from there.
    """
    if seaweedfs is not None:
        seaweedfs.upload_folder(path, prefix)
    stores, bucket = stored_in(path, seaweedfs, prefix)
    datasets = {"bucket": bucket, "raw": bucket.model_copy(update={"view": "raw"})}
    with serving(Settings(stores=stores, datasets=datasets)) as url:
        yield url


METADATA: Final = ("zarr.json", ".zarray", ".zattrs", "info", "provenance")

type Files = Mapping[str, bytes]
"""Contents of files by their paths relative to a folder."""


@dataclass(frozen=True, slots=True)
class Taker:
    """A service with a writable dataset in a folder or SeaweedFS."""

    url: str
    client: httpx.Client
    folder: Path
    seaweedfs: SeaweedFS | None = None

    def place(self, source: Path, name: str) -> None:
        """Copy the folder *source* into the store as *name*."""
        if self.seaweedfs is None:
            shutil.copytree(source, self.folder / name)
        else:
            self.seaweedfs.upload_folder(source, f"taken/{name}")

    def push(self, name: str, before: Files, after: Files) -> None:
        """PUT each file that is new or different in *after*, and DELETE each that is missing."""
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
        """Return the names of the stored objects of *name* other than metadata."""
        if self.seaweedfs is None:
            found = set(read_files(self.folder / name))
        else:
            listed = self.seaweedfs.store(f"taken/{name}").list().collect()
            found = {each["path"] for each in listed}
        return {key for key in found if not key.endswith(METADATA)}

    def zarr_store(self, name: str) -> Any:
        """Return the store by which zarr-python opens *name* directly."""
        if self.seaweedfs is None:
            return self.folder / name
        return self.seaweedfs.zarr_store(f"taken/{name}")

    def kvstore(self, name: str) -> Json | Path:
        """Return the kvstore of *name* for TensorStore, which takes keys from the environment."""
        if self.seaweedfs is None:
            return self.folder / name
        server = self.seaweedfs
        return s3_kvstore(server.endpoint_url, f"taken/{name}/", server.bucket, "environment")


def s3_kvstore(url: str, path: str, bucket: str = "data", credentials: str = "anonymous") -> Json:
    """Return TensorStore's specification of the prefix *path* of a bucket."""
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": path,
        "endpoint": url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": credentials},
    }


@contextmanager
def taking_into_folder(
    folder: Path, seaweedfs: SeaweedFS | None = None, **dataset: Any
) -> Generator[Taker]:
    """Serve the writable dataset ``data`` from *folder*, or from a prefix of SeaweedFS."""
    stores, data = stored_in(folder, seaweedfs, "taken", writable=True, **dataset)
    settings = Settings(stores=stores, datasets={"data": data})
    with serving(settings) as url, connect(url) as client:
        yield Taker(url, client, folder, seaweedfs)


def chunks_in(folder: Path) -> dict[str, bytes]:
    """Read all files below *folder* except metadata."""
    return {key: data for key, data in read_files(folder).items() if not key.endswith(METADATA)}


def lay_out(folder: Path, before: Files, after: Files) -> None:
    """Replace the files *before* in *folder* by the files *after*."""
    for key in before.keys() - after.keys():
        (folder / key).unlink()
    write_files(after, folder)


def mixed(before: Files, after: Files) -> dict[str, bytes]:
    """Return a third of the files from *before*, a third from *after*, and leave out a third."""
    found: dict[str, bytes] = {}
    for number, key in enumerate(sorted(before.keys() | after.keys())):
        source = (before, after, {})[number % 3]
        if key in source:
            found[key] = source[key]
    return found


def served_fixtures(prefix: str) -> tuple[Any, Any, Any]:
    """Return the fixtures ``local``, ``remote`` and ``service``, which serve ``bucket``."""

    @pytest.fixture(scope="session")
    def local(bucket: Path) -> Generator[str]:
        """Serve the folder; yield the URL of the service."""
        with from_folder(bucket) as url:
            yield url

    @pytest.fixture(scope="session")
    def remote(bucket: Path, seaweedfs: SeaweedFS) -> Generator[str]:
        """Serve the same from SeaweedFS; yield the URL of the service."""
        with from_folder(bucket, seaweedfs, prefix) as url:
            yield url

    @pytest.fixture(
        scope="session", params=["local", pytest.param("remote", marks=pytest.mark.soak)]
    )
    def service(request: pytest.FixtureRequest) -> str:
        """Return the URL of the service: before the folder, and in soak runs before each store."""
        url: str = request.getfixturevalue(request.param)
        return url

    return local, remote, service


def sizes_of(client: httpx.Client, dataset: str, prefix: str) -> dict[str, int]:
    """List the keys below *prefix* and their sizes, in pages of seven."""
    sizes: dict[str, int] = {}
    query = {"list-type": "2", "prefix": prefix, "max-keys": "7"}
    while True:
        page = ET.fromstring(client.get(f"/{dataset}", params=query).text)  # noqa: S314  our own answer
        for entry in page.iterfind("{*}Contents"):
            key, size = entry.findtext("{*}Key", ""), entry.findtext("{*}Size", "")
            sizes[key.removeprefix(prefix)] = int(size)
        if (after := page.findtext("{*}NextContinuationToken")) is None:
            return sizes
        query["continuation-token"] = after
