"""Servers that support less of HTTP than S3 does."""

from contextlib import aclosing

import httpx
import pytest

from shardgate.errors import (
    RangeNotSatisfiedError,
    StorageDeniedError,
    StorageUnusableError,
    TruncatedReadError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ByteRequest, ObjectRef, SuffixRange
from shardgate.settings import CacheSettings, DatasetSettings, Settings, StoreSettings
from shardgate.storage.contract import NOT_MODIFIED
from shardgate.storage.http_store import HttpStore
from tests.support.formats.zarr.building import build, chunk_bytes
from tests.support.serving import serving
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer, etag
from tests.support.storage.reading import DATA, Remote, found, stat_of


@pytest.mark.parametrize(
    "refusal",
    [*(400, 405, 416, 422, 500, 501), Fault.IGNORE_SUFFIX, Fault.SUFFIX_AS_PREFIX,
     Fault.BAD_SUFFIX],
)  # fmt: skip
async def test_suffix_is_read_by_size_where_the_server_takes_none(
    remote: Remote, refusal: int | Fault
) -> None:
    """A suffix that a server refuses or ignores is read as an absolute range of one version.

    After it, no other suffix is sent to the same bucket.
    """
    if isinstance(refusal, Fault):
        remote.server.fail(refusal)
    else:
        remote.server.suffix_status = refusal
    answer = await remote.found(SuffixRange(7))

    assert (answer.data, answer.size) == (DATA[-7:], len(DATA))
    assert [each.method for each in remote.server.seen] == ["GET", "HEAD", "GET"]
    assert remote.server.seen[-1].headers["If-Match"] == etag(DATA)
    assert (await remote.found(SuffixRange(9))).data == DATA[-9:]
    assert [each.method for each in remote.server.seen[3:]] == ["HEAD", "GET"]
    assert await remote.get(SuffixRange(7), if_match=answer.etag) == answer
    assert await remote.get(SuffixRange(7), if_none_match=answer.etag) is NOT_MODIFIED


@pytest.mark.parametrize("status", [400, 405, 416, 501])
async def test_object_is_absent_where_suffixes_are_refused(remote: Remote, status: int) -> None:
    """An object that a server does not have is absent, even if it refuses the suffix first."""
    remote.server.suffix_status = status
    absent = remote.absent

    assert await remote.store.get(absent, SuffixRange(7)) is None
    with pytest.raises(VersionChangedError):
        await remote.store.get(absent, SuffixRange(7), if_match=(await remote.found()).etag)


@pytest.mark.parametrize(
    ("remote", "faults"),
    [
        ("http", [Fault.SUFFIX_AS_PREFIX, Fault.NO_TOTAL]),
        ("s3", [Fault.SUFFIX_AS_PREFIX, Fault.NO_TOTAL]),
        ("http", [Fault.CLOSE_AT_SUFFIX]),
    ],
    indirect=["remote"],
)
async def test_doubtful_suffix_is_read_by_size(remote: Remote, faults: list[Fault]) -> None:
    """A suffix of unknown total, which may be a prefix, is read by the object's size.

    So is one for which the server closes the connection.
    """
    for fault in faults:
        remote.server.fail(fault)

    assert (await remote.found(SuffixRange(7))).data == DATA[-7:]
    assert "HEAD" in [each.method for each in remote.server.seen]


@pytest.mark.parametrize("fault", [Fault.NO_HEAD, Fault.DENY_HEAD])
async def test_size_is_learnt_from_a_get_without_head(remote: Remote, fault: Fault) -> None:
    """A server without HEAD is asked for the size of an object by GET."""
    remote.server.fail(fault)
    remote.server.fail(Fault.NO_TOTAL)

    stat = await stat_of(remote.store, remote.ref)
    assert stat.size == len(DATA)
    assert (await remote.found(ByteRange(5, 9))).data == DATA[5:9]
    assert await remote.store.stat(remote.absent) is None


async def test_object_replaced_between_size_and_range_is_read_anew(remote: Remote) -> None:
    """A suffix is of one version, though the object is replaced after its size was learnt."""
    remote.server.suffix_status = 400
    remote.server.fail(Fault.REPLACE, nth=[2])

    answer = await remote.found(SuffixRange(3))

    assert (answer.data, answer.size) == (DATA[::-1][-2:] + b"!", len(DATA) + 1)
    remote.server.fail(Fault.REPLACE, nth=[1])
    with pytest.raises(VersionChangedError):
        await remote.get(SuffixRange(3), if_match=answer.etag)


async def test_empty_object_has_no_suffix(remote: Remote) -> None:
    """A suffix of an empty object is not satisfied, however the server refuses it."""
    remote.server.suffix_status = 400
    remote.server.put("bucket", "key", b"")

    with pytest.raises(RangeNotSatisfiedError):
        await remote.get(SuffixRange(3))


@pytest.mark.parametrize(
    ("fault", "error"), [(Fault.TEAPOT, StorageUnusableError), (Fault.DENY, StorageDeniedError)]
)
async def test_refusal_of_every_request_is_an_error(
    remote: Remote, fault: Fault, error: type[Exception]
) -> None:
    """A server that refuses suffix and object raises its error after four requests at most."""
    remote.server.suffix_status = 400
    remote.server.fail(fault, nth=range(1, 100))

    with pytest.raises(error, match=str(fault.value[0])):
        await remote.get(SuffixRange(3))
    assert len(remote.server.seen) <= 4


REQUESTS: dict[ByteRequest, bytes] = {
    ByteRange(5, 9): DATA[5:9],
    ByteRange(0, len(DATA)): DATA,
    ByteRange(100, 10**7): DATA[100:],
    SuffixRange(7): DATA[-7:],
    SuffixRange(10**7): DATA,
}


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
async def test_range_of_unknown_total_is_read(remote: Remote, request_: ByteRequest) -> None:
    """The size that a range response lacks is requested once for each version."""
    remote.server.fail(Fault.NO_TOTAL)

    for _ in range(2):
        answer = await remote.found(request_)
        assert (answer.data, answer.size) == (REQUESTS[request_], len(DATA))
        assert await remote.get(ByteRange(5, 9), if_match=answer.etag) is not None
    assert [each.method for each in remote.server.seen] == ["GET", "HEAD", "GET", "GET", "GET"]


@pytest.mark.parametrize("remote", ["http"], indirect=True)
@pytest.mark.parametrize("fault", [Fault.NO_ETAG, Fault.WEAK_ETAG])
async def test_replaced_object_of_unknown_total_is_detected(remote: Remote, fault: Fault) -> None:
    """A replaced object without a strong ETag is detected by its size, which is requested again."""
    remote.server.fail(Fault.NO_TOTAL)
    remote.server.fail(fault)
    first = await remote.found(ByteRange(0, 9))
    remote.server.put("bucket", "key", DATA + b"!")

    with pytest.raises(VersionChangedError):
        await remote.get(ByteRange(0, 9), if_match=first.etag)


async def test_stream_of_unknown_total_is_read(remote: Remote) -> None:
    """A stream requests the size of the object before its first piece."""
    remote.server.fail(Fault.NO_TOTAL)

    async with remote.store.stream(remote.ref, ByteRange(5, len(DATA)), if_match=None) as pieces:
        assert b"".join([piece async for piece in pieces]) == DATA[5:]


@pytest.mark.parametrize("remote", ["http"], indirect=True)
async def test_alternating_etags_are_explained(remote: Remote) -> None:
    """The error for an unmodified object whose ETag changes names the setting that helps.

    Without a condition a read that needs the size raises it too.
    """
    remote.server.fail(Fault.MIRRORS)
    for _ in range(2):
        tag = (await remote.found(ByteRange(0, 9))).etag
    with pytest.raises(VersionChangedError, match=r'validator.*"last-modified"'):
        await remote.get(ByteRange(0, 9), if_match=tag)

    remote.server.fail(Fault.NO_TOTAL)
    remote.server.suffix_status = 400
    for request in (ByteRange(0, 9), SuffixRange(9)):
        with pytest.raises(VersionChangedError, match=r'validator.*"last-modified"'):
            await remote.get(request)


@pytest.mark.parametrize("remote", ["http"], indirect=True)
async def test_modified_object_is_no_alternation(remote: Remote) -> None:
    """An object whose modification time changes with its ETag was replaced."""
    first = await remote.found(ByteRange(0, 9))
    remote.server.put("bucket", "key", DATA[::-1])
    await remote.found(ByteRange(0, 9))

    with pytest.raises(VersionChangedError, match="replaced while it was being read"):
        await remote.get(ByteRange(0, 9), if_match=first.etag)


async def test_mirrors_are_read_by_modification_time(faulty: FaultyServer) -> None:
    """Mirrors with several ETags are read with the validator last-modified."""
    faulty.put("bucket", "key", DATA)
    faulty.fail(Fault.MIRRORS)
    ref = ObjectRef(faulty.url, "bucket/key")
    async with aclosing(
        HttpStore(StoreSettings(validator="last-modified"), timeout_s=LONGEST_S)
    ) as store:
        first = await found(store, ref, ByteRange(0, 9))
        stat = await stat_of(store, ref)
        assert stat.etag == first.etag
        assert await store.get(ref, ByteRange(0, 9), if_match=first.etag) == first
        assert "If-Match" not in faulty.seen[-1].headers
        assert faulty.seen[-1].headers["If-Unmodified-Since"] == "Mon, 06 Jul 2026 10:00:00 GMT"

        faulty.put("bucket", "key", DATA + b"!")
        with pytest.raises(VersionChangedError):
            await store.get(ref, ByteRange(0, 9), if_match=first.etag)


def test_dataset_names_the_store_of_its_mirrors(faulty: FaultyServer) -> None:
    """A dataset on a web server takes the validator of the store that it names."""
    faulty.put("bucket", "key", DATA)
    faulty.fail(Fault.MIRRORS)
    root = f"{faulty.url}/bucket"
    settings = Settings(
        cache=CacheSettings(ttl_s=0.001),
        stores={"mirrors": StoreSettings(validator="last-modified")},
        datasets={
            "plain": DatasetSettings(url=root),
            "mirrored": DatasetSettings(url=root, store="mirrors"),
        },
    )
    with serving(settings) as url:
        for name, seen in (("plain", 2), ("mirrored", 1)):
            answers = [httpx.get(f"{url}/{name}/key") for _ in range(2)]
            assert [each.content for each in answers] == [DATA, DATA]
            assert len({each.headers["ETag"] for each in answers}) == seen


@pytest.mark.parametrize(
    ("store", "said"), [(None, "the setting validator"), ("dated", "no other")]
)
def test_indistinguishable_mirrors_are_424(
    faulty: FaultyServer, store: str | None, said: str
) -> None:
    """Mirrors whose versions cannot be compared are 424, with the setting that may help."""
    for key, data in build({"c/0/0": chunk_bytes(1)}).items():
        faulty.put("bucket", key, data)
    faulty.fail(Fault.MIRRORS)
    faulty.fail(Fault.NO_DATE if store else Fault.NO_TOTAL)
    settings = Settings(
        stores={"dated": StoreSettings(validator="last-modified")},
        datasets={"em": DatasetSettings(url=f"{faulty.url}/bucket", store=store)},
    )
    with serving(settings) as url:
        answer = httpx.get(f"{url}/em/c/0/0", timeout=LONGEST_S)

    assert answer.status_code == 424
    assert said in answer.json()["detail"]


@pytest.mark.parametrize("remote", ["http", "s3"], indirect=True)
async def test_range_refused_without_a_size_is_compared_with_the_size(remote: Remote) -> None:
    """A range that a server refuses without the size of the object is not satisfied by that."""
    etag = (await remote.found()).etag
    remote.server.fail(Fault.NO_SIZE_IN_416)

    with pytest.raises(RangeNotSatisfiedError) as raised:
        await remote.get(ByteRange(len(DATA), len(DATA) + 1))
    assert raised.value.size == len(DATA)
    with pytest.raises(VersionChangedError):
        await remote.get(ByteRange(len(DATA), len(DATA) + 1), if_match=etag)


async def test_stream_that_ends_early_without_a_length_is_truncated(remote: Remote) -> None:
    """A stream of unannounced length that ends before its range does raises TruncatedReadError."""
    for fault in (Fault.CHUNKED, Fault.RANGE_AS_200, Fault.SHORT_LENGTH):
        remote.server.fail(fault)

    async with remote.store.stream(remote.ref, ByteRange(0, len(DATA)), if_match=None) as pieces:
        with pytest.raises(TruncatedReadError):
            [piece async for piece in pieces]
