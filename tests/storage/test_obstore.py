"""Stores that are read by obstore."""

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final
from urllib.parse import urlsplit

import pytest

from shardgate.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageUnavailableError,
    StorageUnusableError,
)
from shardgate.model import ByteRange, ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.obstore import CloudStore
from shardgate.storage.stores import Stores
from tests.support.clouds import Azurite, FakeGcs
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.proxy import Lie, Proxy
from tests.support.storage.ranges import MIDDLE
from tests.support.storage.reading import Remote, az_settings, found, stat_of

REF = ObjectRef("gs://bucket", "key")
DATA = bytes(range(256)) * 1024


@pytest.mark.parametrize("remote", ["gs"], indirect=True)
async def test_key_that_obstore_changes_is_refused(remote: Remote) -> None:
    """A key whose slashes or dots obstore would change is refused without a request."""
    for key in ("", "/key", "a//key", "a/", "a/../key", "./key"):
        with pytest.raises(StorageUnusableError):
            await remote.store.get(ObjectRef("gs://bucket", key))

    assert not remote.server.seen


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd"])
async def test_coded_object_is_read_as_stored(
    azurite: Azurite, fake_gcs: FakeGcs, coding: str
) -> None:
    """An object that was stored with a content coding is not inflated, and has its coding."""
    azurite.put("coded", DATA, coding=coding)
    fake_gcs.put("coded", DATA, coding=coding)
    google = StoreSettings(endpoint_url=fake_gcs.url, anonymous=True)
    for store, bucket in (
        (CloudStore("az", az_settings(azurite)), "az://bucket"),
        (CloudStore("gs", google), "gs://bucket"),
    ):
        ref = ObjectRef(bucket, "coded")
        answer, stat = await found(store, ref, MIDDLE), await stat_of(store, ref)

        assert (answer.data, answer.coding) == (DATA[1000:201_000], coding)
        assert (stat.size, stat.coding) == (len(DATA), coding)


async def test_wrong_or_missing_credentials_are_denied(
    azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong or missing credentials are denied; those of obstore's variables are used."""
    azurite.put("present", b"data")
    wrong = az_settings(azurite).model_dump() | {"secret_access_key": "d3Jvbmc="}
    for settings in (
        StoreSettings.model_validate(wrong),
        StoreSettings(endpoint_url=azurite.url, anonymous=True),
    ):
        store = CloudStore("az", settings)
        for ask in (store.get, store.stat, store.check_reachable):
            for key in ("present", "absent"):
                with pytest.raises(StorageDeniedError):
                    await ask(ObjectRef("az://bucket", key))

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.key)
    store = CloudStore("az", StoreSettings(endpoint_url=azurite.url))
    await found(store, ObjectRef("az://bucket", "present"))


async def test_missing_credentials_are_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a token raises StorageDeniedError."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")
    monkeypatch.setenv("HOME", "/nonexistent")
    store = CloudStore("gs", StoreSettings(), timeout_s=1)

    with pytest.raises(StorageDeniedError, match="no credentials"):
        await store.get(REF)


async def test_missing_azure_account_is_an_error() -> None:
    """An Azure store without an account raises StorageUnusableError, which asks for one."""
    store = CloudStore("az", StoreSettings(), timeout_s=LONGEST_S)

    with pytest.raises(StorageUnusableError, match="Account must be specified"):
        await store.get(ObjectRef("az://bucket", "key"))


async def test_roots_and_prefixes_are_opened(
    stores: Stores, azurite: Azurite, fake_gcs: FakeGcs
) -> None:
    """Roots and prefixes of az:// and gs://, of a named store or not, are read side by side."""
    azurite.put("a/key", b"azure")
    fake_gcs.put("a/key", b"google")
    google = StoreSettings(endpoint_url=fake_gcs.url, anonymous=True)

    roots = {
        stores.open_root("az://bucket/a", az_settings(azurite), "gs"): b"azure",
        stores.open_root("gs://bucket/a/", google): b"google",
        stores.open_prefix("az://bucket/a/", az_settings(azurite), "gs"): b"azure",
        stores.open_prefix("gs://bucket/a", google): b"google",
    }
    assert [root.bucket for root in roots] == [
        *("az+gs://bucket", "gs://bucket", "guarded+az+gs://bucket", "guarded+gs://bucket"),
    ]
    for root, data in roots.items():
        await stores.check_reachable(root)
        assert (await found(stores, root.join("key"))).data == data
    for guarded in list(roots)[2:]:
        with pytest.raises(StorageDeniedError):
            await stores.get(guarded.join("../key"))


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_a_missing_extra_is_named(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str
) -> None:
    """Opening a cloud root without obstore names the extra to install; s3:// still works."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "shardgate.storage.obstore")

    stores.open_root("s3://bucket/key")
    with pytest.raises(ConfigurationError, match=rf"pip install '\.\[{extra}\]'"):
        stores.open_root(f"{scheme}://bucket/key")


ABSENCES: Final = (Lie.PAGE_404, Lie.EMPTY_404, Lie.QUOTED_404)

type BehindProxy = tuple[CloudStore, Proxy, str]


@pytest.fixture(params=["gs", "az"])
async def behind_proxy(request: pytest.FixtureRequest) -> AsyncGenerator[BehindProxy]:
    """Open a store behind a proxy, with an object in its bucket that was read before."""
    is_google, bucket = request.param == "gs", f"{request.param}://bucket"
    server = request.getfixturevalue("fake_gcs" if is_google else "azurite")
    google = StoreSettings(endpoint_url=server.url, anonymous=True)
    settings = google if is_google else az_settings(server)
    for name in ("a/b", "a/b/c", "a/b0", "a/present"):
        server.put(name, DATA)
    with Proxy(server.url).running() as proxy:
        proxy.hides = lambda _method, header: header == "host"
        url = server.url.replace(proxy.upstream, urlsplit(proxy.url).netloc)
        settings = settings.model_copy(update={"endpoint_url": url})
        async with aclosing(CloudStore(request.param, settings)) as store:
            await found(store, ObjectRef(bucket, "a/present"))
            yield store, proxy, bucket


@pytest.mark.parametrize("lie", ABSENCES)
@pytest.mark.parametrize("lasts", [1, 1000])
async def test_404_of_a_proxy_is_no_absence(
    behind_proxy: BehindProxy, lie: Lie, lasts: int
) -> None:
    """A 404 without the service's own document never makes an existing object absent."""
    store, proxy, bucket = behind_proxy
    ref = ObjectRef(bucket, "a/present")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.get(ref),
        lambda: store.get(ref, ByteRange(1, 2)),
        lambda: store.stat(ref),
    ]
    for call in calls:
        proxy.spoil(range(lasts), lie)
        with pytest.raises(StorageUnavailableError):
            await call()


@pytest.mark.parametrize("lie", ABSENCES)
async def test_listing_proves_absence(behind_proxy: BehindProxy, lie: Lie) -> None:
    """An object that is missing in a listing of its folder is absent, whoever answered 404."""
    store, proxy, bucket = behind_proxy
    for key in ("a/absent", "a/b/c0", "x", "z/z"):
        for ask in (store.get, store.stat):
            proxy.spoil([0], lie)
            assert await ask(ObjectRef(bucket, key)) is None
