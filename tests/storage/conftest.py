"""The stores on which the conformance suite runs."""

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from pathlib import Path
from uuid import uuid4

import pytest

from shardgate.model import ObjectRef
from shardgate.settings import LimitSettings, StoreSettings
from shardgate.storage.contract import ObjectReader, ObjectStore
from shardgate.storage.http_store import HttpStore
from shardgate.storage.local import LocalStore
from shardgate.storage.memory import MemoryStore
from shardgate.storage.obstore import CloudStore
from shardgate.storage.s3 import S3Store
from shardgate.storage.stores import Stores
from shardgate.storage.wrappers import RetryingStore, RetryPolicy
from tests.support.clouds import Azurite, FakeGcs
from tests.support.lacking import lack
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.faulty import LONGEST_S, FaultyServer, timeout_of
from tests.support.storage.google import ENVIRON, GoogleServer
from tests.support.storage.ministack import MiniStack, NotInstalledError, installed, running
from tests.support.storage.reading import DATA, SECRET, Backend, Remote, az_settings


def memory(_: pytest.FixtureRequest) -> Backend:
    """Return a store in memory, which has every bucket."""
    store = MemoryStore()
    root = ObjectRef("memory://bucket", "root")
    return Backend(
        store,
        root,
        lambda key, data: store.place(ObjectRef(root.bucket, key), data),
        lambda key: store.remove(ObjectRef(root.bucket, key)),
        None,
    )


def local(request: pytest.FixtureRequest) -> Backend:
    """Return a store of a folder whose name needs quoting."""
    folder: Path = request.getfixturevalue("tmp_path") / "a b%ü"
    folder.mkdir()

    def put(key: str, data: bytes) -> None:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / "new").write_bytes(data)
        (folder / "new").rename(folder / key)

    missing = ObjectRef((folder / "missing").as_uri(), "key")
    root = ObjectRef(folder.as_uri(), "root")
    return Backend(LocalStore(), root, put, lambda key: (folder / key).unlink(), missing)


def http(request: pytest.FixtureRequest) -> Backend:
    """Return a store of a small HTTP server."""
    server: FaultyServer = request.getfixturevalue("faulty")
    return Backend(
        HttpStore(timeout_s=LONGEST_S),
        ObjectRef(server.url, "bucket/root"),
        lambda key, data: server.put("bucket", key.removeprefix("bucket/"), data),
        lambda key: server.objects.pop(f"/{key}"),
        None,
    )


def in_bucket(
    store: ObjectStore,
    scheme: str,
    server: SeaweedFS | FakeGcs | GoogleServer | Azurite,
    bucket: str = "bucket",
) -> Backend:
    """Return *store*, which reads a bucket of *server*."""
    root = ObjectRef(f"{scheme}+lab://{bucket}", f"conformance/{uuid4().hex}")
    missing = ObjectRef(f"{scheme}+lab://no-such-bucket", "key")
    return Backend(store, root, server.put, server.delete, missing)


def s3(request: pytest.FixtureRequest, server_name: str = "seaweedfs") -> Backend:
    """Return a store of the bucket of SeaweedFS, or of another S3 server."""
    server: SeaweedFS = request.getfixturevalue(server_name)
    return in_bucket(S3Store(server.settings, timeout_s=LONGEST_S), "s3", server, server.bucket)


def mini(request: pytest.FixtureRequest) -> Backend:
    """Return a store of the bucket of MiniStack."""
    return s3(request, "ministack")


def gs(request: pytest.FixtureRequest) -> Backend:
    """Return a store of the bucket of a server that emulates Google's.

    The server closes connections that are about to be reused, so reads are retried as they are in
    the service: obstore does not report the age of a connection.
    """
    server: FakeGcs = request.getfixturevalue("fake_gcs")
    settings = StoreSettings(endpoint_url=server.url, anonymous=True)
    store = CloudStore("gs", settings, timeout_s=LONGEST_S)
    return in_bucket(RetryingStore(store, RetryPolicy(LONGEST_S)), "gs", server)


def google(request: pytest.FixtureRequest) -> Backend:
    """Return a store of the bucket of a server that compares generations as Google's does."""
    server: GoogleServer = request.getfixturevalue("google_server")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    settings = StoreSettings(endpoint_url=server.url)
    return in_bucket(CloudStore("gs", settings, timeout_s=LONGEST_S), "gs", server)


def az(request: pytest.FixtureRequest) -> Backend:
    """Return a store of the container of Azurite."""
    server: Azurite = request.getfixturevalue("azurite")
    return in_bucket(CloudStore("az", az_settings(server), timeout_s=LONGEST_S), "az", server)


@pytest.fixture(params=[memory, local, http, s3, gs, az], ids=lambda make: make.__name__)
async def backend(request: pytest.FixtureRequest) -> AsyncGenerator[Backend]:
    """Open a store of each kind."""
    made: Backend = request.param(request)
    yield made
    await made.store.aclose()


@pytest.fixture(params=[memory, local, s3, mini, google, az], ids=lambda make: make.__name__)
async def writable(request: pytest.FixtureRequest) -> AsyncGenerator[Backend]:
    """Open a store of each kind that can be written."""
    made: Backend = request.param(request)
    yield made
    await made.store.aclose()


@pytest.fixture(params=["http", "s3"])
async def remote(request: pytest.FixtureRequest, faulty: FaultyServer) -> AsyncGenerator[Remote]:
    """Open a store of each kind, or of ``gs``, for the faulty server with an object of `DATA`."""
    faulty.put("bucket", "key", DATA)
    timeout_s, cloud = timeout_of(request), StoreSettings(endpoint_url=faulty.url, anonymous=True)
    opened: tuple[ObjectReader, ObjectRef]
    match request.param:
        case "http":
            opened = HttpStore(timeout_s=timeout_s), ObjectRef(faulty.url, "bucket/key")
        case "gs":
            opened = CloudStore("gs", cloud, timeout_s=timeout_s), ObjectRef("gs://bucket", "key")
        case _:
            settings = faulty.settings(secret_access_key=SECRET)
            ref = ObjectRef("s3+lab://bucket", "key")
            opened = S3Store(settings, timeout_s=timeout_s), ref
    yield Remote(faulty, *opened)
    await opened[0].aclose()


@pytest.fixture
async def store() -> AsyncGenerator[LocalStore]:
    """Open a store of local files."""
    async with aclosing(LocalStore()) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a secret file beside it."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
async def stores() -> AsyncGenerator[Stores]:
    """Open the stores of all kinds."""
    async with Stores(LimitSettings(timeout_s=LONGEST_S, deadline_s=LONGEST_S)) as opened:
        yield opened


@pytest.fixture(scope="session")
def ministack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[MiniStack]:
    """Run a MiniStack with an empty bucket for the whole session."""
    cache = getattr(request.config, "cache", None)  # which it lacks with -p no:cacheprovider
    folder = tmp_path_factory.mktemp("made") if cache is None else cache.mkdir("ministack")
    try:
        python = installed(folder)
    except NotInstalledError as error:
        lack(str(error))
    with running(python, tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove cloud settings of this machine from the environment."""
    clouds = ("AWS_", "AZURE_", "GOOGLE_")
    for name in [name for name in os.environ if name.startswith(clouds)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
