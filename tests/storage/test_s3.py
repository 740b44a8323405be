"""Features of S3 alone: presigned URLs, buckets, credentials."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.compat import get_current_datetime
from pydantic import SecretStr

from shardgate.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageError,
    StorageSkewError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
)
from shardgate.model import ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT
from shardgate.storage.http1_client import RequestTarget
from shardgate.storage.refusals import HttpMethod
from shardgate.storage.s3 import S3Store
from shardgate.storage.s3_signing import S3Signer
from tests.support.processes import free_ports
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer, timeout_of
from tests.support.storage.listening import Handler, Listener
from tests.support.storage.proxy import Proxy
from tests.support.storage.reading import found

REF = ObjectRef("s3+lab://bucket", "key")


@pytest.fixture
async def store(request: pytest.FixtureRequest, faulty: FaultyServer) -> AsyncGenerator[S3Store]:
    """Open a store of the faulty server with some credentials."""
    faulty.put("bucket", "key", b"data")
    opened = S3Store(faulty.settings(), timeout_s=timeout_of(request))
    yield opened
    await opened.aclose()


@pytest.mark.parametrize("fault", [Fault.EXPIRED, Fault.EXPIRED_TOKEN])
async def test_an_expired_signature_is_renewed_once(
    faulty: FaultyServer, store: S3Store, fault: Fault
) -> None:
    """An expired signature is renewed once; a second refusal raises StorageDeniedError."""
    faulty.fail(fault, nth=[0, 2, 3])

    await found(store, REF)
    with pytest.raises(StorageDeniedError):
        await store.get(REF)
    assert len(faulty.seen) == 4


@pytest.mark.parametrize(
    ("fault", "error"), [(Fault.DENY, StorageDeniedError), (Fault.NO_BUCKET, StorageUnusableError)]
)
async def test_refusal_is_not_repeated(
    faulty: FaultyServer, store: S3Store, fault: Fault, error: type[StorageError]
) -> None:
    """Another refusal takes one request; NoSuchBucket is an error, and not absence."""
    faulty.fail(fault)

    with pytest.raises(error):
        await store.get(REF)

    assert len(faulty.seen) == 1


async def test_an_expired_signature_is_renewed_for_all_its_readers(
    faulty: FaultyServer, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent reads with one expired URL all succeed with a new one."""
    sign = S3Signer.presign

    async def sign_after_a_while(
        signer: S3Signer, method: HttpMethod, ref: ObjectRef
    ) -> RequestTarget:
        await asyncio.sleep(0.05)  # as credentials that are refreshed take
        return await sign(signer, method, ref)

    monkeypatch.setattr(S3Signer, "presign", sign_after_a_while)
    for _ in range(3):
        await store.get(REF)
    assert len({seen.query for seen in faulty.seen}) == 1
    assert "X-Amz-Signature" in faulty.seen[0].query
    faulty.fail(Fault.EXPIRED, query=faulty.seen[0].query)
    await asyncio.sleep(1.1)  # signatures of one second are the same

    await asyncio.gather(*(found(store, REF) for _ in range(10)))


async def test_absence_takes_one_get(faulty: FaultyServer, store: S3Store) -> None:
    """A GET proves absence by its error document; a HEAD is followed by a GET."""
    absent = ObjectRef(REF.bucket, "absent")
    assert await store.get(absent) is None
    assert await store.stat(absent) is None

    assert [seen.method for seen in faulty.seen] == ["GET", "HEAD", "GET"]


async def test_response_without_etag_is_unavailable(faulty: FaultyServer, store: S3Store) -> None:
    """A response without an ETag raises StorageUnavailableError, whatever its status."""
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
        (Fault.NO_BUCKET, StorageUnusableError),
        (Fault.STALL, StorageTimeoutError),
        (Fault.RESET, StorageUnavailableError),
        (Fault.CUT, StorageUnavailableError),
        (Fault.GARBAGE, StorageUnavailableError),
    ],
)
async def test_failed_listing_is_an_error(
    faulty: FaultyServer, store: S3Store, fault: Fault, error: type[Exception]
) -> None:
    """A failed listing raises the error of its fault, and does not end."""
    faulty.fail(fault)

    with pytest.raises(error):
        await anext(store.list(ObjectRef(REF.bucket, "")))


class _Listing(Handler[list[str]]):
    """Answers with the page whose number is the token."""

    def answer(self) -> None:
        token = re.search("continuation-token=([0-9])", self.path)
        page = self.server.owner[int(token[1]) if token else 0]
        document = f"<ListBucketResult>{page}</ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        self.wfile.write(document.encode())


TRUNCATED = "<IsTruncated>true</IsTruncated>"
NEXT = "<NextContinuationToken>1</NextContinuationToken>"


async def _list(*pages: str) -> list[str]:
    """List a bucket of a server with *pages*."""
    listener = Listener(_Listing, [*pages])
    settings = StoreSettings(endpoint_url=listener.url, anonymous=True)
    with listener.running():
        async with aclosing(S3Store(settings, timeout_s=LONGEST_S)) as store:
            return [each.ref.key async for each in store.list(ObjectRef(REF.bucket, ""))]


async def test_listing_of_two_pages_is_complete() -> None:
    """The next page of a truncated listing is requested by its token."""
    pages = [f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in "ab"]

    names = await _list(TRUNCATED + NEXT + pages[0], f"<IsTruncated>false</IsTruncated>{pages[1]}")

    assert names == ["a", "b"]


async def test_listing_in_the_order_of_folders_is_sorted() -> None:
    """A listing of one page takes one request, also from a server with another order."""
    names = ("a/x/y", "a/x-z", "a-b")
    page = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in names)

    assert await _list(f"<IsTruncated>false</IsTruncated>{page}", "no second one") == sorted(names)


@pytest.mark.parametrize("following", ["", NEXT])
async def test_truncated_listing_without_a_next_page_raises(following: str) -> None:
    """A truncated listing that names no next page, or the same one again, is not taken for all."""
    page = TRUNCATED + following
    with pytest.raises(StorageUnavailableError, match="no next page"):
        await _list(page, page)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("<Contents><Size>1</Size></Contents>", "an entry without Key"),
        ("<CommonPrefixes></CommonPrefixes>", "an entry without Prefix"),
        ("<Contents><Key>a</Key></Contents>", "Size in the listing: expected"),
        ("<Contents><Key>a</Key><Size>-1</Size></Contents>", "found -1"),
        (f"<Contents><Key>a</Key><Size>{2**63}</Size></Contents>", f"found {2**63}"),
        (f"<Contents><Key>a</Key><Size>1{'0' * 4000}</Size></Contents>", "found a longer number"),
    ],
)
async def test_listing_with_an_invalid_entry_raises(entry: str, reason: str) -> None:
    """A listing with an entry that has no name, or no size of 0 to 2^63-1, is not believed."""
    with pytest.raises(StorageUnavailableError, match=reason):
        await _list(f"<IsTruncated>false</IsTruncated>{entry}")


async def test_anonymous_request_is_not_signed(faulty: FaultyServer) -> None:
    """An anonymous URL has no signature; missing credentials are denied before any request."""
    faulty.put("bucket", "a b+c#d", b"data")
    anonymous = S3Store(StoreSettings(endpoint_url=faulty.url, anonymous=True), timeout_s=LONGEST_S)
    async with aclosing(anonymous) as store:
        await found(store, ObjectRef(REF.bucket, "a b+c#d"))
    async with aclosing(
        S3Store(StoreSettings(endpoint_url=faulty.url), timeout_s=LONGEST_S)
    ) as store:
        with pytest.raises(StorageDeniedError, match=r"no credentials .* --anonymous,"):
            await store.get(REF)

    assert [seen.query for seen in faulty.seen] == [""]


async def test_environment_configures_the_store(
    seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store without settings takes endpoint, region and keys from botocore's variables."""
    for name, value in seaweedfs.environ.items():
        monkeypatch.setenv(name, value)
    seaweedfs.put("environment", b"data")
    async with aclosing(S3Store(None)) as store:
        await found(store, ObjectRef(f"s3://{seaweedfs.bucket}", "environment"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none.pem", "No such file"), ("folder", "Is a directory"), ("garbage.pem", ".*")],
)
def test_unreadable_ca_bundle_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, reason: str
) -> None:
    """A file in AWS_CA_BUNDLE that is missing, a folder or no certificate stops the start.

    The error names the variable and the file.
    """
    (tmp_path / "folder").mkdir()
    (tmp_path / "garbage.pem").write_text("garbage")
    monkeypatch.setenv("AWS_CA_BUNDLE", path := str(tmp_path / name))

    expected = f"AWS_CA_BUNDLE cannot be read: {reason}.*: {path}"
    with pytest.raises(ConfigurationError, match=expected):
        S3Store(None)


@pytest.mark.parametrize(
    ("key_id", "code"), [(None, "SignatureDoesNotMatch"), ("nobody", "InvalidAccessKeyId")]
)
async def test_denial_has_the_code_of_the_store(
    seaweedfs: SeaweedFS, key_id: str | None, code: str
) -> None:
    """The error for a denied HEAD, GET or check of a root has S3's code; a probe is denied too."""
    wrong = {"access_key_id": key_id or seaweedfs.access_key_id}
    settings = seaweedfs.settings.model_copy(
        update={"secret_access_key": SecretStr("wrong"), **wrong}
    )
    ref = ObjectRef(f"s3://{seaweedfs.bucket}", "key")
    async with aclosing(S3Store(settings)) as store:
        for ask in (store.stat, store.get, store.check_reachable):
            with pytest.raises(StorageDeniedError, match=f"the server answered 403 {code}$"):
                await ask(ref)
        with pytest.raises(StorageDeniedError):
            await store.verify_conditional_writes(ref)


async def test_unreachable_endpoint_is_named() -> None:
    """The error of an unreachable server names its endpoint, and no signature."""
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    keys = {"access_key_id": "id", "secret_access_key": SecretStr("secret")}

    async with aclosing(S3Store(StoreSettings(endpoint_url=endpoint, **keys))) as store:

        async def list_all(ref: ObjectRef) -> None:
            async for _ in store.list(ref):
                pass

        for ask in (store.stat, store.get, store.check_reachable, list_all):
            with pytest.raises(StorageUnavailableError, match=f"cannot .* {endpoint}: ") as caught:
                await ask(REF)
            assert "Signature" not in str(caught.value)


async def test_requester_agrees_to_pay_for_every_request(seaweedfs: SeaweedFS) -> None:
    """The agreement of `requester_pays` is signed in each request, in its query or headers."""
    agreed: list[bool] = []

    def note(_: str, header: str) -> bool:
        agreed.append(header == "x-amz-request-payer")
        return False

    root = ObjectRef(f"s3://{seaweedfs.bucket}", "pays")
    with Proxy(seaweedfs.endpoint_url).running() as proxy:
        proxy.hides = note
        settings = {"endpoint_url": proxy.url, "requester_pays": True}
        store = S3Store(seaweedfs.settings.model_copy(update=settings))
        await store.verify_conditional_writes(root)
        etag = await store.put(root.join("key"), [b"data"], expected=ABSENT)
        assert isinstance(etag, str)
        assert (await found(store, root.join("key"))).data == b"data"
        assert [each.size async for each in store.list(root)] == [4]
        await store.check_reachable(root)
        await store.delete(root.join("key"), expected=None)
        await store.aclose()

    in_query = sum("x-amz-request-payer=requester" in request for request in proxy.seen)
    assert in_query
    assert sum(agreed) + in_query == len(proxy.seen)


def shift_clock(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Shift the clock of signatures and of responses by *seconds*."""

    def now() -> datetime:
        return get_current_datetime() + timedelta(seconds=seconds)

    monkeypatch.setattr("botocore.auth.get_current_datetime", now)
    clocked = SimpleNamespace(now=lambda _: now())
    monkeypatch.setattr("shardgate.storage.s3_signing.datetime", clocked)
    clock = SimpleNamespace(time=lambda: time.time() + seconds)
    monkeypatch.setattr("shardgate.storage.http_headers.time", clock)


@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_refusal_of_a_wrong_clock_names_the_difference(
    seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """A server that refuses the time of a signature raises StorageSkewError with the difference."""
    ref = ObjectRef(f"s3://{seaweedfs.bucket}", "skewed")
    seaweedfs.put(ref.key, b"data")
    shift_clock(monkeypatch, seconds)
    side = "ahead of" if seconds > 0 else "behind"
    async with aclosing(S3Store(seaweedfs.settings, timeout_s=LONGEST_S)) as store:
        calls: list[Coroutine[Any, Any, object]] = [
            store.check_reachable(ref),
            store.put(ref, [b"new"], expected=None),
        ]
        calls += [store.get(ref), store.stat(ref)] if seconds < 0 else []  # valid for longer
        for call in calls:
            with pytest.raises(StorageSkewError, match=rf"is (3600|3599|3601) s {side} the server"):
                await call
