"""Faults of servers, and the errors of the stores that read over HTTP."""

import asyncio
import itertools
import logging
import ssl
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from shardgate.errors import (
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
    TruncatedReadError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ByteRequest, ETag, ObjectRef, SuffixRange, UnmodifiedSince
from shardgate.settings import StoreSettings
from shardgate.storage.contract import NOT_MODIFIED, Found
from shardgate.storage.http_store import HttpStore
from shardgate.storage.obstore import CloudStore
from shardgate.storage.refusals import Refusal
from shardgate.storage.s3 import S3Store
from shardgate.storage.stores import Stores
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer, etag
from tests.support.storage.http1.scripted import ScriptedServer
from tests.support.storage.ranges import MIDDLE, REQUESTS
from tests.support.storage.reading import DATA, SECRET, Remote, found

SIXTH_OF_JULY = int(datetime(2026, 7, 6, 10, tzinfo=UTC).timestamp())
"""Modification time of the objects of the server."""


async def read(remote: Remote, **pinned: ETag) -> Found:
    """Read the middle of the object, and assert that it exists."""
    async with asyncio.timeout(LONGEST_S):
        return await remote.found(MIDDLE, **pinned)


async def read_at_last(remote: Remote) -> Found:
    """Read the middle of the object, repeatedly if the machine is too slow for the timeout."""
    while True:
        with suppress(StorageTimeoutError):
            return await read(remote)


UNTAGGED = [("http", Fault.NO_ETAG), ("http", Fault.WEAK_ETAG), ("s3", Fault.WEAK_ETAG)]
"""Servers without a strong ETag; S3 always sends one."""
FAILURES = [
    (Fault.DENY, StorageDeniedError),
    (Fault.EXPIRED, StorageDeniedError),
    (Fault.SLOW_DOWN, StorageThrottledError),
    (Fault.TOO_MANY, StorageThrottledError),
    (Fault.ERROR, StorageUnavailableError),
    (Fault.BAD_GATEWAY, StorageUnavailableError),
    (Fault.TEAPOT, StorageUnusableError),
    (Fault.STALL, StorageTimeoutError),
    (Fault.STALL_BODY, StorageTimeoutError),
    (Fault.RESET, StorageUnavailableError),
    (Fault.RESET_BODY, TruncatedReadError),
    (Fault.CUT, TruncatedReadError),
    (Fault.GARBAGE, StorageUnavailableError),
    (Fault.SHORT_LENGTH, TruncatedReadError),
    (Fault.WRONG_RANGE, StorageUnusableError),
    (Fault.BAD_RANGE, StorageUnusableError),
]
OF_TRANSPORT = {
    *(Fault.STALL, Fault.STALL_BODY, Fault.RESET, Fault.RESET_BODY, Fault.CUT, Fault.GARBAGE),
    *(Fault.SHORT_LENGTH, Fault.WRONG_RANGE, Fault.BAD_RANGE),
}
"""Faults that the stores of web servers and of S3 notice by the same client."""
OF_CLOUDS = [(fault, StorageUnusableError) for fault in (Fault.NO_BUCKET, Fault.IGNORE_RANGE)]


@pytest.mark.parametrize(
    ("remote", "fault", "error"),
    [
        *((kind, *failure) for kind in ("http", "gs") for failure in FAILURES),
        *(
            pytest.param(
                "s3", *failure, marks=pytest.mark.soak if failure[0] in OF_TRANSPORT else ()
            )
            for failure in FAILURES
        ),
        *(("gs", *failure) for failure in OF_CLOUDS),
    ],
    indirect=["remote"],
)
async def test_each_fault_has_its_error(
    remote: Remote, *, fault: Fault, error: type[StorageError], caplog: pytest.LogCaptureFixture
) -> None:
    """Each fault raises its own error, in reads and streams, and the next read succeeds.

    No error or log contains a secret.
    """
    remote.server.fail(fault)
    caplog.set_level(logging.DEBUG)
    for library in ("botocore", "aiobotocore"):  # they log at this level what they sign
        caplog.set_level(logging.INFO, library)

    with pytest.raises(StorageError) as raised:
        await read(remote)
    with pytest.raises(StorageError) as in_stream:
        async with (
            asyncio.timeout(LONGEST_S),
            remote.store.stream(remote.ref, MIDDLE, if_match=ETag(etag(DATA))) as pieces,
        ):
            [piece async for piece in pieces]
    logging.getLogger("test").error("failed", exc_info=raised.value)
    remote.server.heal()

    assert type(raised.value) is type(in_stream.value) is error
    if isinstance(remote.store, CloudStore):
        assert remote.server.url not in str(raised.value)
    logged = "".join(logging.Formatter().format(record) for record in caplog.records)
    assert "X-Amz-Signature" not in logged
    assert SECRET not in logged + repr(remote.store)
    assert (await read_at_last(remote)).data == DATA[MIDDLE.start : MIDDLE.stop]


@pytest.mark.parametrize(
    "fault", [Fault.DENY, Fault.ERROR, Fault.TOO_MANY, Fault.STALL, Fault.RESET, Fault.TEAPOT]
)
async def test_failed_stat_is_an_error(remote: Remote, fault: Fault) -> None:
    """A stat that fails raises the error of its fault, and does not return absence."""
    remote.server.fail(fault)

    with pytest.raises(StorageError) as raised:
        await remote.store.stat(remote.ref)
    assert type(raised.value) is dict(FAILURES)[fault]


@pytest.mark.parametrize(
    ("remote", "fault"),
    [
        *UNTAGGED,
        *itertools.product(
            ("http", "s3"),
            (
                Fault.IGNORE_RANGE,
                Fault.RANGE_AS_200,
                Fault.IGNORE_CONDITIONS,
                Fault.REFUSE_LONG_SUFFIX,
            ),
        ),
    ],
    indirect=["remote"],
)
async def test_deviating_server_is_read_correctly(remote: Remote, fault: Fault) -> None:
    """A server that ignores ranges or conditions, or sends weak ETags, is read correctly."""
    remote.server.fail(fault)
    asked: dict[ByteRequest | None, bytes] = {
        ByteRange(5, 9): DATA[5:9],
        SuffixRange(7): DATA[-7:],
        SuffixRange(10**7): DATA,
        None: DATA,
    }
    for request, data in asked.items():
        answer = await remote.found(request)
        assert (answer.data, answer.size) == (data, len(DATA))
        assert await remote.get(request, if_match=answer.etag) == answer


@pytest.mark.parametrize(
    ("remote", "fault"),
    [*UNTAGGED, ("http", Fault.IGNORE_CONDITIONS), ("s3", Fault.IGNORE_CONDITIONS)],
    indirect=["remote"],
)
async def test_version_is_compared_by_the_store(remote: Remote, fault: Fault) -> None:
    """Conditions hold though the server ignores them or sends no strong ETag.

    An ETag that the store derives is not sent.
    """
    remote.server.fail(fault)
    first = await read(remote)
    assert await remote.get(MIDDLE, if_none_match=first.etag) is NOT_MODIFIED
    assert await read(remote, if_match=first.etag) == first
    is_sent = any("If-Match" in seen.headers for seen in remote.server.seen)
    assert is_sent is (fault is Fault.IGNORE_CONDITIONS)
    remote.server.put("bucket", "key", DATA[::-1])

    with pytest.raises(VersionChangedError):
        await read(remote, if_match=first.etag)


async def test_416_without_a_size_takes_a_stat(remote: Remote) -> None:
    """A long suffix that the server refuses with 416 without the size is read after a stat."""
    remote.server.fail(Fault.REFUSE_LONG_SUFFIX)
    remote.server.fail(Fault.NO_SIZE_IN_416)

    assert (await remote.found(SuffixRange(10**7))).data == DATA
    assert [seen.method for seen in remote.server.seen] == ["GET", "HEAD", "GET"]


async def test_an_object_of_unknown_length_is_read_whole(remote: Remote) -> None:
    """A chunked response is read whole, and without ranges a part or its size is an error."""
    remote.server.fail(Fault.CHUNKED)

    answer = await remote.found()

    assert (answer.data, answer.size) == (DATA, len(DATA))
    remote.server.fail(Fault.IGNORE_RANGE)
    for ask in (read(remote), remote.store.stat(remote.ref)):
        with pytest.raises(StorageUnusableError, match="the response has no Content-Length"):
            await ask


async def test_a_plain_read_is_one_request(remote: Remote) -> None:
    """A read is one request for its range, with `If-Match` and without content coding."""
    await read(remote, if_match=ETag(etag(DATA)))

    (seen,) = remote.server.seen
    assert seen.headers["Range"] == "bytes=1000-200999"
    assert seen.headers["If-Match"] == etag(DATA)
    assert seen.headers["Accept-Encoding"] == "identity"


async def expect_from_all(error: type[StorageError], url: str) -> None:
    """Assert *error* from a store of every kind at *url*."""
    settings = StoreSettings(endpoint_url=url, anonymous=True)
    for store, bucket in (
        (HttpStore(timeout_s=LONGEST_S), url),
        (S3Store(settings, timeout_s=LONGEST_S), "s3://bucket"),
        (CloudStore("gs", settings, timeout_s=LONGEST_S), "gs://bucket"),
    ):
        for ask in (store.get, store.check_reachable):
            with pytest.raises(error):
                await ask(ObjectRef(bucket, "key"))
        await store.aclose()


async def test_refused_connection_is_unavailable() -> None:
    """A refused connection raises StorageUnavailableError."""
    await expect_from_all(StorageUnavailableError, "http://127.0.0.1:1")


async def test_untrusted_certificate_is_unusable(tls: ssl.SSLContext) -> None:
    """An untrusted certificate raises StorageUnusableError."""
    async with ScriptedServer([[]]).running(tls) as server:
        await expect_from_all(StorageUnusableError, f"https://127.0.0.1:{server.port}")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "RequestTimeout", StorageUnavailableError),
        (400, "AuthorizationHeaderMalformed", StorageUnusableError),
        (301, "PermanentRedirect", StorageUnusableError),
        (404, "", StorageUnavailableError),
        (404, "NoSuchUpload", StorageUnusableError),
        (405, "", StorageUnusableError),
        (408, "", StorageUnavailableError),
        (425, "", StorageUnavailableError),
        (501, "NotImplemented", StorageUnusableError),
        (505, "", StorageUnusableError),
        (507, "", StorageUnavailableError),
    ],
)
def test_refusal_may_pass_or_last(status: int, code: str, error: type[StorageError]) -> None:
    """A refusal that may pass is StorageUnavailableError; a lasting one, StorageUnusableError."""
    assert type(Refusal("GET", status, code).failure(ObjectRef("s3://b", "k"))) is error


@pytest.mark.parametrize("remote", ["http"], indirect=True)
@pytest.mark.parametrize("is_ignored", [False, True])
async def test_times_are_compared_in_whole_seconds(remote: Remote, *, is_ignored: bool) -> None:
    """An object modified in the second of the condition is read, and one a second later is not."""
    if is_ignored:
        remote.server.fail(Fault.IGNORE_CONDITIONS)
    for request in REQUESTS:
        assert await remote.get(request, if_match=UnmodifiedSince(SIXTH_OF_JULY))
        with pytest.raises(VersionChangedError):
            await remote.get(request, if_match=UnmodifiedSince(SIXTH_OF_JULY - 1))

    sent = remote.server.seen[0].headers["If-Unmodified-Since"]
    assert sent == "Mon, 06 Jul 2026 10:00:00 GMT"


@pytest.mark.parametrize("remote", ["http"], indirect=True)
@pytest.mark.parametrize("fault", [Fault.NO_DATE, Fault.BAD_DATE])
async def test_an_unknown_time_meets_no_condition(remote: Remote, fault: Fault) -> None:
    """An object without a valid ``Last-Modified`` fails a condition by time."""
    remote.server.fail(fault)
    for request in REQUESTS:
        with pytest.raises(VersionChangedError):
            await remote.get(request, if_match=UnmodifiedSince(2**33))


HIDING = [
    *itertools.product(("http", "s3", "gs"), (Fault.DENY, Fault.NO_LISTING)),
    ("http", Fault.FORBIDDEN),
]
"""Refusals that an absent key may get where keys cannot be listed."""
REFUSING = [
    *itertools.product(
        ("http", "s3", "gs"),
        (
            Fault.EXPIRED,
            Fault.EXPIRED_TOKEN,
            Fault.NO_DECRYPTION,
            Fault.WRONG_KEY,
            Fault.WRONG_SECRET,
            Fault.SKEWED,
            Fault.ARCHIVED,
        ),
    ),
    ("s3", Fault.FORBIDDEN),
    ("gs", Fault.FORBIDDEN),
]
"""Refusals that absent and present keys get alike."""


def hiding_root(stores: Stores, faulty: FaultyServer, kind: str) -> ObjectRef:
    """Open a root of *kind* whose store takes 403 for absence."""
    faulty.put("bucket", "key", DATA)
    if kind == "http":
        settings = StoreSettings(forbidden_is_absent=True)
        return stores.open_root(f"{faulty.url}/bucket", settings, "public")
    if kind == "gs":
        settings = StoreSettings(endpoint_url=faulty.url, anonymous=True, forbidden_is_absent=True)
    else:
        settings = faulty.settings(forbidden_is_absent=True)
    return stores.open_root(f"{kind}://bucket", settings, "public")


@pytest.mark.parametrize(("kind", "fault"), HIDING)
async def test_forbidden_object_is_absent_by_setting(
    stores: Stores, faulty: FaultyServer, kind: str, fault: Fault
) -> None:
    """A 403 is absence with `forbidden_is_absent`, except for a known version."""
    root = hiding_root(stores, faulty, kind)
    ref = root.join("key")
    seen = (await found(stores, ref)).etag
    faulty.fail(fault)

    assert await stores.get(ref) is None
    assert await stores.get(ref, MIDDLE) is None
    assert await stores.stat(ref) is None
    await stores.check_reachable(root)
    with pytest.raises(StorageDeniedError):
        await stores.get(ref, MIDDLE, if_match=seen)


@pytest.mark.parametrize(("kind", "fault"), REFUSING)
async def test_wrong_credentials_are_never_absence(
    stores: Stores, faulty: FaultyServer, kind: str, fault: Fault
) -> None:
    """Wrong keys, signatures and clocks are errors, with `forbidden_is_absent` too."""
    root = hiding_root(stores, faulty, kind)
    faulty.fail(fault)

    for read_absent in (stores.get, stores.stat):
        with pytest.raises(StorageError):
            await read_absent(root.join("absent"))
