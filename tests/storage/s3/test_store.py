"""What only S3 has: signatures, buckets, credentials."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.errors import (
    StorageDeniedError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from app.model import ObjectRef
from app.settings import StoreSettings
from app.storage.contract import Found
from app.storage.http1.target import Target
from app.storage.refusals import Method
from app.storage.s3.store import S3Store
from tests.seaweedfs import SeaweedFS
from tests.storage.conftest import s3_settings
from tests.storage.faulty import Fault, FaultyServer

REF = ObjectRef("s3+lab://bucket", "key")


@pytest.fixture
async def store(faulty: FaultyServer) -> AsyncGenerator[S3Store]:
    """Read the faulty server with some credentials."""
    faulty.put("bucket", "key", b"data")
    settings = {
        "endpoint_url": faulty.url,
        "access_key_id": "AKIDEXAMPLE",
        "secret_access_key": "secret",
    }
    opened = S3Store(StoreSettings.model_validate(settings), timeout_s=1)
    yield opened
    await opened.aclose()


async def test_one_signature_serves_many_reads(faulty: FaultyServer, store: S3Store) -> None:
    """An object is presigned once, and read again and again with the same URL."""
    for _ in range(3):
        await store.get(REF)

    assert len({seen.query for seen in faulty.seen}) == 1
    assert "X-Amz-Signature" in faulty.seen[0].query


@pytest.mark.parametrize("fault", [Fault.EXPIRED, Fault.EXPIRED_TOKEN])
async def test_an_expired_signature_is_renewed_once(
    faulty: FaultyServer, store: S3Store, fault: Fault
) -> None:
    """Temporary credentials may die before the URL does."""
    faulty.fail(fault, nth=[0])

    assert isinstance(await store.get(REF), Found)
    assert len(faulty.seen) == 2


async def test_an_expired_signature_is_renewed_for_all_its_readers(
    faulty: FaultyServer, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds the URL dead while others have it signed anew waits for that as well."""
    sign = store._signer._sign

    async def sign_after_a_while(method: Method, ref: ObjectRef) -> Target:
        await asyncio.sleep(0.05)  # as credentials that are refreshed take
        return await sign(method, ref)

    monkeypatch.setattr(store._signer, "_sign", sign_after_a_while)
    await store.get(REF)
    faulty.fail(Fault.EXPIRED, query=faulty.seen[0].query)
    await asyncio.sleep(1.1)  # signatures of one second are the same

    found = await asyncio.gather(*(store.get(REF) for _ in range(10)))

    assert all(isinstance(each, Found) for each in found)


@pytest.mark.parametrize("fault", [Fault.EXPIRED, Fault.EXPIRED_TOKEN])
async def test_a_signature_that_stays_expired_is_denied(
    faulty: FaultyServer, store: S3Store, fault: Fault
) -> None:
    """After one renewal the refusal is believed."""
    faulty.fail(fault)

    with pytest.raises(StorageDeniedError):
        await store.get(REF)

    assert len(faulty.seen) == 2


async def test_a_plain_refusal_is_not_asked_again(faulty: FaultyServer, store: S3Store) -> None:
    """A denied read costs one request."""
    faulty.fail(Fault.DENY)

    with pytest.raises(StorageDeniedError):
        await store.get(REF)

    assert len(faulty.seen) == 1


async def test_a_missing_bucket_is_told_by_the_document(
    faulty: FaultyServer, store: S3Store
) -> None:
    """NoSuchBucket is no absence, though its status is 404."""
    faulty.fail(Fault.NO_BUCKET)

    with pytest.raises(StorageUnavailableError) as raised:
        await store.get(REF)

    assert raised.value.lasting
    assert len(faulty.seen) == 1


async def test_absence_takes_one_get(faulty: FaultyServer, store: S3Store) -> None:
    """The error document of a GET proves it; the answer to a HEAD has none, and a GET follows."""
    absent = ObjectRef(REF.bucket, "absent")
    assert await store.get(absent) is None
    assert await store.stat(absent) is None

    assert [seen.method for seen in faulty.seen] == ["GET", "HEAD", "GET"]


async def test_an_answer_without_etag_is_not_from_s3(faulty: FaultyServer, store: S3Store) -> None:
    """S3 always sends one: what has none is somebody else's page, whatever its status."""
    faulty.fail(Fault.NO_ETAG)

    for read in (store.get, store.stat):
        with pytest.raises(StorageUnavailableError, match="no ETag"):
            await read(REF)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.DENY, StorageDeniedError),
        (Fault.SLOW_DOWN, StorageThrottledError),
        (Fault.ERROR, StorageUnavailableError),
        (Fault.NO_BUCKET, StorageUnavailableError),
        (Fault.STALL, StorageTimeoutError),
        (Fault.RESET, StorageUnavailableError),
        (Fault.CUT, StorageUnavailableError),
        (Fault.GARBAGE, StorageUnavailableError),
    ],
)
async def test_a_failed_listing_is_no_end(
    faulty: FaultyServer, store: S3Store, fault: Fault, error: type[Exception]
) -> None:
    """The exceptions of botocore are told apart as those of reads are."""
    faulty.fail(fault)

    with pytest.raises(error):
        await anext(store.list(ObjectRef(REF.bucket, "")))


async def test_an_anonymous_url_has_no_query(faulty: FaultyServer) -> None:
    """Who sends no credentials signs nothing, and quotes names all the same."""
    faulty.put("bucket", "a b+c#d", b"data")
    store = S3Store(StoreSettings(endpoint_url=faulty.url, anonymous=True), timeout_s=1)

    found = await store.get(ObjectRef(REF.bucket, "a b+c#d"))
    await store.aclose()

    assert isinstance(found, Found)
    assert faulty.seen[0].query == ""


async def test_missing_credentials_are_denied(faulty: FaultyServer) -> None:
    """Without credentials nothing is sent, and the message says so."""
    store = S3Store(StoreSettings(endpoint_url=faulty.url), timeout_s=1)

    with pytest.raises(StorageDeniedError, match="no credentials"):
        await store.get(REF)
    await store.aclose()

    assert not faulty.seen


async def test_the_environment_is_enough(
    seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without settings, botocore's chain names endpoint, region and keys."""
    for name, value in seaweedfs.environ.items():
        monkeypatch.setenv(name, value)
    seaweedfs.put("environment", b"data")
    store = S3Store(None)

    found = await store.get(ObjectRef(f"s3://{seaweedfs.bucket}", "environment"))
    await store.aclose()

    assert isinstance(found, Found)


async def test_a_wrong_secret_is_denied(seaweedfs: SeaweedFS) -> None:
    """A real server refuses a wrong signature, for objects that exist and for others."""
    settings = s3_settings(seaweedfs).model_dump() | {"secret_access_key": "wrong"}
    store = S3Store(StoreSettings.model_validate(settings))

    for ask in (store.get, store.stat, store.reach):
        with pytest.raises(StorageDeniedError):
            await ask(ObjectRef(f"s3://{seaweedfs.bucket}", "key"))
    await store.aclose()
