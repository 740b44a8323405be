"""What only the stores have that obstore reads."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from app.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
)
from app.model import ByteRange, ObjectRef
from app.settings import LimitSettings, StoreSettings
from app.storage.contract import Found
from app.storage.objects import CloudStore
from app.storage.stores import Stores
from tests.clouds import Azurite, FakeGcs
from tests.storage.conftest import az_settings
from tests.storage.faulty import Fault, FaultyServer

DATA = bytes(range(256)) * 1024
MIDDLE = ByteRange(1000, 201_000)
REF = ObjectRef("gs://bucket", "key")


@pytest.fixture
async def store(faulty: FaultyServer) -> AsyncGenerator[CloudStore]:
    """Read the faulty server as if it was Google's."""
    faulty.put("bucket", "key", DATA)
    settings = StoreSettings(endpoint_url=faulty.url, anonymous=True)
    async with aclosing(CloudStore("gs", settings, timeout_s=0.5)) as opened:
        yield opened


FAULTS = [
    (Fault.DENY, StorageDeniedError),
    (Fault.SLOW_DOWN, StorageThrottledError),
    (Fault.TOO_MANY, StorageThrottledError),
    (Fault.ERROR, StorageUnavailableError),
    (Fault.BAD_GATEWAY, StorageUnavailableError),
    (Fault.TEAPOT, StorageUnavailableError),
    (Fault.NO_BUCKET, StorageUnavailableError),
    (Fault.STALL, StorageTimeoutError),
    (Fault.STALL_BODY, StorageTimeoutError),
    (Fault.RESET, StorageUnavailableError),
    (Fault.RESET_BODY, TruncatedReadError),
    (Fault.CUT, TruncatedReadError),
    (Fault.SHORT_LENGTH, TruncatedReadError),
    (Fault.GARBAGE, StorageUnavailableError),
    (Fault.WRONG_RANGE, StorageUnavailableError),
    (Fault.BAD_RANGE, StorageUnavailableError),
    (Fault.IGNORE_RANGE, StorageUnavailableError),
]


@pytest.mark.parametrize(("fault", "error"), FAULTS)
async def test_each_fault_has_its_error(
    faulty: FaultyServer, store: CloudStore, fault: Fault, error: type[StorageError]
) -> None:
    """What obstore only words differently is told apart, and never is absence."""
    faulty.fail(fault)

    with pytest.raises(StorageError) as raised:
        await store.get(REF, MIDDLE)
    with pytest.raises(StorageError) as in_stream:
        async with store.stream(REF, MIDDLE, if_match=None) as pieces:
            assert [piece async for piece in pieces]

    assert type(raised.value) is type(in_stream.value) is error
    assert faulty.url not in str(raised.value)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RESET, Fault.GARBAGE, Fault.WRONG_RANGE])
async def test_a_fault_may_pass(faulty: FaultyServer, store: CloudStore, fault: Fault) -> None:
    """What a server cannot do now it may do in a moment."""
    faulty.fail(fault)

    with pytest.raises(StorageUnavailableError) as raised:
        await store.get(REF, MIDDLE)

    assert not raised.value.lasting


@pytest.mark.parametrize("fault", [Fault.TEAPOT, Fault.NO_BUCKET])
async def test_a_refusal_lasts(faulty: FaultyServer, store: CloudStore, fault: Fault) -> None:
    """What a server will not do now it will not do at once either."""
    faulty.fail(fault)

    with pytest.raises(StorageUnavailableError) as raised:
        await store.get(REF, MIDDLE)

    assert raised.value.lasting


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    """A refused connection may be accepted later."""
    settings = StoreSettings(endpoint_url="http://127.0.0.1:1", anonymous=True)
    store = CloudStore("gs", settings, timeout_s=1)

    with pytest.raises(StorageUnavailableError) as raised:
        await store.reach(REF)

    assert not raised.value.lasting


@pytest.mark.parametrize("key", ["", "/key", "a//key", "a/", "a/../key", "./key"])
async def test_a_name_that_would_be_changed_is_not_asked_for(
    faulty: FaultyServer, store: CloudStore, key: str
) -> None:
    """Obstore strips slashes: another object would answer."""
    with pytest.raises(StorageUnavailableError):
        await store.get(ObjectRef("gs://bucket", key))

    assert not faulty.seen


async def test_gzip_is_given_as_it_is(azurite: Azurite, fake_gcs: FakeGcs) -> None:
    """What was stored as gzip is not inflated on the way, and says that it is gzip."""
    azurite.put("gzip", DATA, is_gzip=True)
    fake_gcs.put("gzip", DATA, is_gzip=True)
    google = StoreSettings(endpoint_url=fake_gcs.url, anonymous=True)
    for store, bucket in (
        (CloudStore("az", az_settings(azurite)), "az://bucket"),
        (CloudStore("gs", google), "gs://bucket"),
    ):
        ref = ObjectRef(bucket, "gzip")
        found, stat = await store.get(ref, MIDDLE), await store.stat(ref)

        assert isinstance(found, Found)
        assert stat is not None
        assert (found.data, found.is_gzip) == (DATA[1000:201_000], True)
        assert (stat.size, stat.is_gzip) == (len(DATA), True)


@pytest.mark.parametrize("key", ["present", "absent"])
async def test_a_wrong_key_is_denied(azurite: Azurite, key: str) -> None:
    """A real server refuses a wrong signature, for objects that exist and for others."""
    azurite.put("present", b"data")
    settings = az_settings(azurite).model_dump() | {"secret_access_key": "d3Jvbmc="}
    store = CloudStore("az", StoreSettings.model_validate(settings))

    for ask in (store.get, store.stat, store.reach):
        with pytest.raises(StorageDeniedError):
            await ask(ObjectRef("az://bucket", key))


async def test_no_signature_is_denied(azurite: Azurite) -> None:
    """Who sends no credentials reads what is public, and this is not."""
    azurite.put("present", b"data")
    store = CloudStore("az", StoreSettings(endpoint_url=azurite.url, anonymous=True))

    with pytest.raises(StorageDeniedError):
        await store.get(ObjectRef("az://bucket", "present"))


async def test_credentials_come_from_the_environment(
    azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the settings do not say, obstore's variables do."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.key)
    azurite.put("environment", b"data")
    store = CloudStore("az", StoreSettings(endpoint_url=azurite.url))

    found = await store.get(ObjectRef("az://bucket", "environment"))

    assert isinstance(found, Found)


async def test_missing_credentials_are_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine gives no token, nothing is sent."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")
    monkeypatch.setenv("HOME", "/nonexistent")
    store = CloudStore("gs", StoreSettings(), timeout_s=1)

    with pytest.raises(StorageDeniedError, match="no credentials"):
        await store.get(REF)


async def test_an_account_must_be_known() -> None:
    """Azure's names are of an account, which the message asks for."""
    store = CloudStore("az", StoreSettings(), timeout_s=1)

    with pytest.raises(StorageUnavailableError, match="Account must be specified"):
        await store.get(ObjectRef("az://bucket", "key"))


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("gs", {"access_key_id": "id", "secret_access_key": "secret"}),
        ("gs", {"session_token": "token"}),
        ("az", {"region": "here"}),
    ],
)
def test_settings_without_a_meaning_are_refused(scheme: str, settings: dict[str, str]) -> None:
    """What would be ignored stops the start."""
    with pytest.raises(ConfigurationError, match=f"{scheme}://"):
        CloudStore(scheme, StoreSettings.model_validate(settings))


async def test_roots_and_prefixes_are_opened(azurite: Azurite, fake_gcs: FakeGcs) -> None:
    """Datasets and prefixes, through a named store or without, side by side."""
    azurite.put("a/key", b"azure")
    fake_gcs.put("a/key", b"google")
    google = StoreSettings(endpoint_url=fake_gcs.url, anonymous=True)

    async with Stores(LimitSettings()) as stores:
        roots = {
            stores.open_root("az://bucket/a", az_settings(azurite), "blue"): b"azure",
            stores.open_root("gs://bucket/a/", google): b"google",
            stores.open_prefix("az://bucket/a/", az_settings(azurite), "blue"): b"azure",
            stores.open_prefix("gs://bucket/a", google): b"google",
        }
        assert [root.bucket for root in roots] == [
            "az+blue://bucket",
            "gs://bucket",
            "guarded+az+blue://bucket",
            "guarded+gs://bucket",
        ]
        for root, data in roots.items():
            await stores.reach(root)
            found = await stores.get(root.join("key"))
            assert isinstance(found, Found)
            assert found.data == data
        for guarded in list(roots)[2:]:
            with pytest.raises(StorageDeniedError):
                await stores.get(guarded.join("../key"))


@pytest.mark.parametrize(("url", "extra"), [("gs://b/c", "gcs"), ("az://b/c", "azure")])
def test_a_missing_extra_is_named(url: str, extra: str) -> None:
    """Without obstore the start says what to install, and other schemes work."""
    program = f"""
import sys
sys.modules["obstore"] = None
from app.errors import ConfigurationError
from app.settings import LimitSettings
from app.storage.stores import Stores
stores = Stores(LimitSettings())
stores.open_root("s3://bucket/key")
try:
    stores.open_root("{url}")
except ConfigurationError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert f"shardgate[{extra}]" in told.stdout.decode()
