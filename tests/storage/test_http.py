"""What only plain HTTP servers do."""

from collections.abc import AsyncGenerator, Callable, Generator

import httpx
import pytest

from app.errors import StorageDeniedError, StorageRedirectError, StorageUnavailableError
from app.model import ByteRange, ObjectRef
from app.settings import DatasetSettings, LimitSettings, Settings
from app.storage.contract import Found
from app.storage.http import HttpStore
from app.storage.stores import Stores
from tests.serving import serving
from tests.storage.faulty import Fault, FaultyServer


@pytest.fixture
async def store() -> AsyncGenerator[HttpStore]:
    """Open a store with little patience."""
    opened = HttpStore(timeout_s=1)
    yield opened
    await opened.aclose()


async def test_a_redirect_is_followed(faulty: FaultyServer, store: HttpStore) -> None:
    """The object may have moved; range and version are asked for there."""
    faulty.put("bucket", "a b", b"0123456789")
    faulty.fail(Fault.REDIRECT)

    found = await store.get(ObjectRef(faulty.url, "bucket/a b"), ByteRange(2, 4))

    assert isinstance(found, Found)
    assert found.data == b"23"


@pytest.fixture
def other() -> Generator[FaultyServer]:
    """Run a second server, with the object."""
    with FaultyServer().running() as server:
        server.put("cdn", "moved", b"data")
        yield server


@pytest.fixture
async def stores() -> AsyncGenerator[Stores]:
    """Open the stores."""
    async with Stores(LimitSettings(timeout_s=2, deadline_s=5)) as opened:
        yield opened


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda _, other: f"{other}/cdn/moved",
        lambda _, other: f"{other.removeprefix('http:')}/cdn/moved",
        lambda here, _: f"{here.replace('127.0.0.1', 'localhost')}/data/moved",
        lambda here, _: f"{here.replace('http', 'https')}/data/moved",
        lambda here, _: f"{here}/cdn/moved",
        lambda here, _: f"{here}/data-evil/moved",
        lambda here, _: f"{here}/data/../cdn/moved",
        lambda here, _: f"{here}/data/%2e%2e/cdn/moved",
        lambda here, _: f"{here}/data/..%5Ccdn/moved",
        lambda *_: "../cdn/moved",
        lambda *_: "/\\cdn/moved",
        lambda *_: "//169.254.169.254/latest/meta-data",
        lambda here, _: f"{here.replace('//', '//me:hunter2@')}/data/moved",
    ],
)
async def test_a_redirect_out_of_the_root_is_refused(
    faulty: FaultyServer,
    other: FaultyServer,
    stores: Stores,
    elsewhere: Callable[[str, str], str],
) -> None:
    """A server of data cannot make this one read what only this one reaches."""
    faulty.redirects["/data/key"] = f"{elsewhere(faulty.url, other.url)}?signature=hunter2"
    faulty.put("cdn", "moved", b"data")

    with pytest.raises(StorageRedirectError) as raised:
        await stores.get(stores.open_root(f"{faulty.url}/data").join("key"))

    said = str(raised.value)
    assert said.startswith(f"{faulty.url}/data/key: redirected to ")
    assert "moved" in said or "169.254.169.254/latest" in said
    assert "hunter2" not in said
    assert {seen.path for seen in [*faulty.seen, *other.seen]} == {"/data/key"}


@pytest.mark.parametrize("allowed", ["", "/cdn", "/cdn/"])
async def test_a_root_may_allow_redirects(
    faulty: FaultyServer, other: FaultyServer, stores: Stores, allowed: str
) -> None:
    """Below the URLs that it names, which another root on that server does not name."""
    faulty.redirects["/data/key"] = f"{other.url}/cdn/moved?signature=x"
    faulty.redirects["/data/away"] = f"{faulty.url}/cdn/moved"
    root = stores.open_root(f"{faulty.url}/data", redirects=[f"{other.url}{allowed}"])
    above = stores.open_root(faulty.url)

    assert isinstance(await stores.get(root.join("key")), Found)
    assert other.seen[0].query == "signature=x"
    for ref in root.join("away"), above.join("data/key"):
        with pytest.raises(StorageRedirectError):
            await stores.get(ref)


def test_clients_are_told_where_a_redirect_leads(faulty: FaultyServer) -> None:
    """With 502, which is no absence."""
    faulty.redirects["/data/key"] = "https://cdn.example/key"
    datasets = {
        "closed": DatasetSettings(url=f"{faulty.url}/data"),
        "opened": DatasetSettings(url=f"{faulty.url}/data/", redirects=("https://a.example",)),
    }
    with serving(Settings(datasets=datasets)) as url:
        for name in datasets:
            answer = httpx.get(f"{url}/{name}/key")

            assert answer.status_code == 502
            assert f"{faulty.url}/data/key" in answer.json()["detail"]
            assert "https://cdn.example/key" in answer.json()["detail"]


async def test_a_server_cannot_be_listed(store: HttpStore) -> None:
    """Listing fails with words, not with an empty answer."""
    with pytest.raises(StorageUnavailableError, match="cannot be listed"):
        await anext(store.list(ObjectRef("http://127.0.0.1:1", "")))


@pytest.mark.parametrize("fault", [Fault.DENY, Fault.TEAPOT, Fault.NO_BUCKET])
async def test_any_answer_below_500_reaches(
    faulty: FaultyServer, store: HttpStore, fault: Fault
) -> None:
    """A server that refuses its root works."""
    faulty.fail(fault)

    await store.reach(ObjectRef(faulty.url, ""))


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RESET])
async def test_a_broken_server_is_not_reached(
    faulty: FaultyServer, store: HttpStore, fault: Fault
) -> None:
    """A server that fails does not."""
    faulty.fail(fault)

    with pytest.raises(StorageUnavailableError):
        await store.reach(ObjectRef(faulty.url, ""))


async def test_a_key_that_climbs_is_refused(faulty: FaultyServer, store: HttpStore) -> None:
    """Servers resolve ``..``, so that such a key never is sent."""
    with pytest.raises(StorageDeniedError):
        await store.get(ObjectRef(faulty.url, "bucket/../other/key"))

    assert not faulty.seen
