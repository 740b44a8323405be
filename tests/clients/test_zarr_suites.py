"""The tests that zarr-python has for stores, run against the service over two clients of S3."""

from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import icechunk
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from s3fs import S3FileSystem
from zarr.core.buffer import Buffer, cpu
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore
from zarr.testing import strategies
from zarr.testing.store import StoreTests

from app.settings import DatasetSettings, Settings
from app.storage.contract import TEMPORARY
from tests.clients.filling import CLIENTS, over_obstore, s3fs_options
from tests.clients.writing import quiet
from tests.support.serving import serving

# Hypothesis draws constants of our code too, and such names are reserved for unfinished objects.
strategies.node_names = strategies.node_names.filter(lambda name: TEMPORARY not in name)

from zarr.testing.stateful import (  # noqa: E402  it takes the names when it is imported
    ZarrHierarchyStateMachine,
    ZarrStoreStateMachine,
)

SHORT: Final = settings(
    derandomize=True,
    max_examples=4,
    phases=[Phase.generate],
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
LONG: Final = settings(SHORT, derandomize=False, max_examples=20)

in_each_store = pytest.mark.parametrize(
    "root",
    [
        "folder",
        pytest.param("s3", marks=pytest.mark.soak),
        pytest.param("memory", marks=pytest.mark.soak),
    ],
    indirect=True,
)
for_each_length = pytest.mark.parametrize(
    "length",
    [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.soak)],
)
over_each_client = pytest.mark.parametrize(
    "client", ["obstore", pytest.param("s3fs", marks=pytest.mark.soak)]
)


class ClearedStore(FsspecStore):
    """A store that `clear` clears: that of zarr-python 3.4 stops at folders, in any S3."""

    async def clear(self) -> None:
        """Delete all keys."""
        await self.delete_dir("")


class LazyStore(ObjectStore[Any]):
    """A store whose `list_dir` waits for the event loop: that of zarr-python 3.4 fails without."""

    async def list_dir(self, prefix: str) -> AsyncGenerator[str]:
        """List names right below *prefix*."""
        async for name in super().list_dir(prefix):
            yield name


class KeysMachine(ZarrStoreStateMachine):
    """Reads no ranges: those of no bytes, which it draws, neither client can ask S3 for."""

    get_partial_values: Any = None


class S3fsKeysMachine(KeysMachine):
    """Adds up no sizes, and asks for no key that may be a folder.

    S3fs takes ``a/`` for the key ``a`` where nothing lies below it, and finds ``a`` where
    something does.
    """

    getsize_prefix: Any = None
    exists: Any = None


class SeaweedMachine(ZarrHierarchyStateMachine):
    """Lists no folders: SeaweedFS keeps and lists those whose last key was deleted."""

    check_list_dir: Any = None


def open_store(client: str, url: str, path: str) -> Any:
    """Open *path* of the dataset ``data``."""
    store = CLIENTS[client](url, path)
    if client == "s3fs":
        return ClearedStore(store.fs, path=store.path)
    return LazyStore(store.store)


def forget_filesystems() -> None:
    """Drop the file systems that s3fs caches by URL: another server may get the port.

    It does not close the connections of those that zarr-python uses.
    """

    async def close_all() -> None:
        for filesystem in S3FileSystem._cache.values():
            if (client := filesystem._s3) is not None:
                await client.close()

    sync(close_all())
    S3FileSystem.clear_instance_cache()


def _demand_no_folders(root: DatasetSettings, client: str) -> None:
    """Skip s3fs over SeaweedFS: it takes the folders for keys."""
    if root.store and client == "s3fs":
        pytest.skip("SeaweedFS lists folders whose last key was deleted")


def run(machine: Callable[[Any], RuleBasedStateMachine], store: Any, length: settings) -> None:
    """Make *machine* take random steps on *store*."""
    make: Any = partial(machine, store)
    with quiet(), pytest.MonkeyPatch.context() as patch:
        # Arrays with shards cannot be created through the service.
        patch.setattr("zarr.testing.strategies.shard_shapes", lambda **_: st.none())
        run_state_machine_as_test(make, settings=length)


@pytest.fixture(scope="module")
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DatasetSettings:
    """Configure a writable dataset in one kind of store."""
    if request.param == "folder":
        return DatasetSettings(url=str(tmp_path_factory.mktemp("data")), writable=True)
    bucket = {"memory": "memory://", "s3": "s3://test/"}[request.param]
    store = "lab" if request.param == "s3" else None
    return DatasetSettings(url=f"{bucket}{uuid4().hex}", store=store, writable=True)


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, root: DatasetSettings) -> Generator[str]:
    """Serve it as the datasets ``data`` and, as it is stored, ``raw``."""
    stores = {"lab": request.getfixturevalue("seaweedfs").settings} if root.store else {}
    datasets = {"data": root, "raw": root.model_copy(update={"view": "raw"})}
    with serving(Settings(stores=stores, datasets=datasets)) as base:
        yield base
    forget_filesystems()


@pytest.fixture
def prefix() -> str:
    """Name a place where nothing is."""
    return uuid4().hex


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def s3fs(url: str) -> AsyncGenerator[S3FileSystem]:
    """Connect s3fs, which does not notice by itself what the tests write past it."""
    # By its own options, else others would get this one, which is of another event loop.
    filesystem = S3FileSystem(asynchronous=True, default_cache_type="none", **s3fs_options(url))
    session = await filesystem.set_session()
    yield filesystem
    await session.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'")
class Suite(StoreTests[Any, cpu.Buffer]):
    """What zarr-python expects of any store; it puts anything under the name of metadata."""

    buffer_cls = cpu.Buffer

    @pytest.fixture(autouse=True)
    def _place(self, url: str, prefix: str) -> Generator[None]:
        with httpx.Client(base_url=f"{url}/raw/{prefix}/") as self.client:
            yield

    async def set(self, store: Any, key: str, value: Buffer) -> None:
        """Write past the store."""
        self.client.put(key, content=value.to_bytes()).raise_for_status()

    async def get(self, store: Any, key: str) -> Buffer:
        """Read past the store."""
        return cpu.Buffer.from_bytes(self.client.get(key).raise_for_status().content)

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> Any:
        """Open the store."""
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: Any) -> None:
        """Leave the text to the client."""

    def test_store_supports_writes(self, store: Any) -> None:
        """It does."""
        assert store.supports_writes

    def test_store_supports_listing(self, store: Any) -> None:
        """It does."""
        assert store.supports_listing


@pytest.mark.soak
@in_each_store
class TestOverObstore(Suite):
    """The tests of stores, over obstore."""

    store_cls = ObjectStore

    @pytest.fixture
    def store_kwargs(self, url: str, prefix: str) -> dict[str, Any]:
        """Connect obstore."""
        return {"store": over_obstore(url, prefix, "raw").store}


@in_each_store
class TestOverS3fs(Suite):
    """The tests of stores, over s3fs."""

    store_cls = FsspecStore

    @pytest.fixture
    def store_kwargs(self, s3fs: S3FileSystem, prefix: str) -> dict[str, Any]:
        """Return the connection of s3fs."""
        return {"fs": s3fs, "path": f"raw/{prefix}"}


@pytest.mark.soak
@in_each_store
@over_each_client
def test_keys_are_those_of_a_model(
    root: DatasetSettings, url: str, prefix: str, client: str
) -> None:
    """Whatever is written, deleted and cleared, the store holds what a dictionary would."""
    _demand_no_folders(root, client)
    machine = S3fsKeysMachine if client == "s3fs" else KeysMachine
    run(machine, open_store(client, url, prefix), LONG)


@in_each_store
@over_each_client
@for_each_length
def test_hierarchy_is_that_of_a_model(
    root: DatasetSettings, url: str, prefix: str, client: str, length: settings
) -> None:
    """Whatever becomes of groups and arrays, they read and list as in zarr's memory."""
    _demand_no_folders(root, client)
    machine = SeaweedMachine if root.store else ZarrHierarchyStateMachine
    run(machine, open_store(client, url, prefix), length)


@over_each_client
@for_each_length
def test_hierarchy_of_a_session_is_that_of_a_model(
    tmp_path: Path, client: str, length: settings
) -> None:
    """So they do in a session of Icechunk."""
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    root = DatasetSettings(url=str(tmp_path), writable=True)
    with serving(Settings(datasets={"data": root})) as url:
        answer = httpx.post(f"{url}/api/datasets/data/sessions", json={}).raise_for_status()
        store = open_store(client, url, f"@session.{answer.json()['session_id']}")
        run(ZarrHierarchyStateMachine, store, length)
