"""The tests that zarr-python has for stores, run against the service over obstore's S3 client."""

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

from shardgate.settings import DatasetSettings, Settings
from shardgate.storage.contract import TEMPORARY
from tests.clients.filling import over_obstore
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


class LazyStore(ObjectStore[Any]):
    """A store whose `list_dir` waits for the event loop: that of zarr-python 3.4 fails without."""

    async def list_dir(self, prefix: str) -> AsyncGenerator[str]:
        """List names right below *prefix*."""
        async for name in super().list_dir(prefix):
            yield name


class KeysMachine(ZarrStoreStateMachine):
    """Reads no ranges: those of no bytes, which it draws, no client can ask S3 for."""

    get_partial_values: Any = None


class SeaweedMachine(ZarrHierarchyStateMachine):
    """Lists no folders: SeaweedFS keeps and lists those whose last key was deleted."""

    check_list_dir: Any = None


def open_store(url: str, path: str) -> Any:
    """Open *path* of the dataset ``data``."""
    return LazyStore(over_obstore(url, path).store)


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


@pytest.fixture
def prefix() -> str:
    """Name a place where nothing is."""
    return uuid4().hex


@in_each_store
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'")
class TestOverObstore(StoreTests[Any, cpu.Buffer]):
    """What zarr-python expects of any store; it puts anything under the name of metadata."""

    buffer_cls = cpu.Buffer
    store_cls = ObjectStore

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
    def store_kwargs(self, url: str, prefix: str) -> dict[str, Any]:
        """Connect obstore."""
        return {"store": over_obstore(url, prefix, "raw").store}

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
def test_keys_are_those_of_a_model(root: DatasetSettings, url: str, prefix: str) -> None:
    """Whatever is written, deleted and cleared, the store holds what a dictionary would."""
    run(KeysMachine, open_store(url, prefix), LONG)


@in_each_store
@for_each_length
def test_hierarchy_is_that_of_a_model(
    root: DatasetSettings, url: str, prefix: str, length: settings
) -> None:
    """Whatever becomes of groups and arrays, they read and list as in zarr's memory."""
    machine = SeaweedMachine if root.store else ZarrHierarchyStateMachine
    run(machine, open_store(url, prefix), length)


@for_each_length
def test_hierarchy_of_a_session_is_that_of_a_model(tmp_path: Path, length: settings) -> None:
    """So they do in a session of Icechunk."""
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    root = DatasetSettings(url=str(tmp_path), writable=True)
    with serving(Settings(datasets={"data": root})) as url:
        answer = httpx.post(f"{url}/api/datasets/data/sessions", json={}).raise_for_status()
        store = open_store(url, f"@session.{answer.json()['session_id']}")
        run(ZarrHierarchyStateMachine, store, length)
