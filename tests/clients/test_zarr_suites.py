"""zarr-python's own test suites for stores, run against the service over obstore."""

from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import icechunk
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu
from zarr.storage import ObjectStore
from zarr.testing import strategies
from zarr.testing.store import StoreTests

from shardgate import client, open_session
from shardgate.settings import DatasetSettings, Settings
from shardgate.storage.contract import TEMPORARY
from tests.support.clients.filling import over_obstore
from tests.support.clients.writing import quiet
from tests.support.serving import serving

# Hypothesis draws constants of our code too, and such names are reserved for unfinished objects.
strategies.node_names = strategies.node_names.filter(lambda name: TEMPORARY not in name)

from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine  # noqa: E402  it takes the names when it is imported

SHORT: Final = settings(
    derandomize=True,
    max_examples=2,
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


class LazyStore(ObjectStore[Any]):
    """A store whose `list_dir` yields to the event loop, as zarr-python 3.4 requires."""

    async def list_dir(self, prefix: str) -> AsyncGenerator[str]:
        """Yield the names directly below *prefix*."""
        async for name in super().list_dir(prefix):
            yield name


class KeysMachine(ZarrStoreStateMachine):
    """A machine without partial reads, since S3 has no ranges of zero bytes."""

    get_partial_values: Any = None


class SeaweedMachine(ZarrHierarchyStateMachine):
    """A machine that lists no folders, since SeaweedFS keeps empty ones."""

    check_list_dir: Any = None


def open_store(url: str, path: str) -> Any:
    """Open the prefix *path* of the dataset ``data``."""
    return LazyStore(over_obstore(url, path).store)


def run(machine: Callable[[Any], RuleBasedStateMachine], store: Any, length: settings) -> None:
    """Run *machine* on *store* with random steps."""
    make: Any = partial(machine, store)
    with quiet(), pytest.MonkeyPatch.context() as patch:
        # Arrays with shards cannot be created through the service.
        patch.setattr("zarr.testing.strategies.shard_shapes", lambda **_: st.none())
        run_state_machine_as_test(make, settings=length)


@pytest.fixture(scope="module")
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DatasetSettings:
    """Return settings of a writable dataset in one kind of store."""
    if request.param == "folder":
        return DatasetSettings(url=str(tmp_path_factory.mktemp("data")), writable=True)
    bucket = {"memory": "memory://", "s3": "s3://test/"}[request.param]
    store = "lab" if request.param == "s3" else None
    return DatasetSettings(url=f"{bucket}{uuid4().hex}", store=store, writable=True)


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, root: DatasetSettings) -> Generator[str]:
    """Serve the dataset as ``data`` and, with the raw view, as ``raw``."""
    stores = {"lab": request.getfixturevalue("seaweedfs").settings} if root.store else {}
    datasets = {"data": root, "raw": root.model_copy(update={"view": "raw"})}
    with serving(Settings(stores=stores, datasets=datasets)) as base:
        yield base


@pytest.fixture
def prefix() -> str:
    """Return an unused prefix."""
    return uuid4().hex


@in_each_store
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'")
class TestOverObstore(StoreTests[Any, cpu.Buffer]):
    """Tests that zarr-python has for every store, on the raw view."""

    buffer_cls = cpu.Buffer
    store_cls = ObjectStore

    @pytest.fixture(autouse=True)
    def _place(self, url: str, prefix: str) -> Generator[None]:
        with httpx.Client(base_url=f"{url}/raw/{prefix}/") as self.client:
            yield

    async def set(self, store: Any, key: str, value: Buffer) -> None:
        """Write a key directly."""
        self.client.put(key, content=value.to_bytes()).raise_for_status()

    async def get(self, store: Any, key: str) -> Buffer:
        """Read a key directly."""
        return cpu.Buffer.from_bytes(self.client.get(key).raise_for_status().content)

    @pytest.fixture
    def store_kwargs(self, url: str, prefix: str) -> dict[str, Any]:
        """Return the arguments of the store."""
        return {"store": over_obstore(url, prefix, "raw").store}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> Any:
        """Open the store."""
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: Any) -> None:
        """The text of a store is obstore's own and is not tested."""

    def test_store_supports_writes(self, store: Any) -> None:
        """A store over the service supports writes."""
        assert store.supports_writes

    def test_store_supports_listing(self, store: Any) -> None:
        """A store over the service supports listing."""
        assert store.supports_listing


class TestBelowAPrefix(TestOverObstore):
    """Tests that zarr-python has for every store, on that of a session, which adds a prefix."""

    store_cls: Any = client._PrefixedStore  # noqa: SLF001 - as it is pickled and made again

    @pytest.fixture
    def store_kwargs(self, url: str, prefix: str) -> dict[str, Any]:
        """Return the arguments of the store."""
        return {"store": client._open_store(url, "raw", None), "prefix": f"{prefix}/"}  # noqa: SLF001 - as above


@pytest.mark.soak
@in_each_store
def test_random_key_operations_agree_with_a_dict(
    root: DatasetSettings, url: str, prefix: str
) -> None:
    """After random writes, deletions and clears, the store has the keys of a dictionary."""
    run(KeysMachine, open_store(url, prefix), LONG)


@in_each_store
@for_each_length
def test_random_hierarchy_changes_agree_with_a_memory_store(
    root: DatasetSettings, url: str, prefix: str, length: settings
) -> None:
    """After random changes, groups and arrays read and list as in zarr's memory store."""
    machine = SeaweedMachine if root.store else ZarrHierarchyStateMachine
    run(machine, open_store(url, prefix), length)


@for_each_length
def test_random_changes_in_a_session_agree_with_a_memory_store(
    tmp_path: Path, length: settings
) -> None:
    """After random changes, a session reads and lists as zarr's memory store."""
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    root = DatasetSettings(url=str(tmp_path), writable=True)
    with (
        serving(Settings(datasets={"data": root})) as url,
        open_session(f"{url}/data") as session,
    ):
        run(ZarrHierarchyStateMachine, session.store, length)
