"""Writes to Google Cloud Storage and Azure: versions, large objects, leases and metadata."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from shardgate.errors import (
    BadHeaderError,
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
    TooLargeError,
    UnwritableError,
)
from shardgate.model import ByteRange, ObjectRef, Piece
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT, CONFLICT, ObjectHeaders
from shardgate.storage.http_headers import object_headers
from shardgate.storage.obstore import CloudStore
from shardgate.storage.obstore_client import (
    Client,
    attributes_of,
    failure,
    open_client,
    stored_headers,
)
from shardgate.storage.obstore_write import CloudWriteOptions
from tests.support.clouds import Azurite, FakeGcs
from tests.support.faults.sites import held_up
from tests.support.records import replaced
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.google import ENVIRON, GoogleServer
from tests.support.storage.proxy import Proxy
from tests.support.storage.reading import az_settings, stat_of
from tests.support.storage.written import LARGE_NBYTES, LARGEST_NBYTES, CloudWritten


@pytest.fixture(params=["gs", "az"])
async def written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[CloudWritten]:
    """Open a store of each kind behind a proxy."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    if request.param == "gs":
        server: GoogleServer = request.getfixturevalue("google_server")
        settings = StoreSettings(endpoint_url=server.url)
    else:
        settings = az_settings(request.getfixturevalue("azurite"))
    with Proxy(settings.endpoint_url or "").running() as proxy:
        async with aclosing(CloudWritten(request.param, settings, proxy)) as made:
            yield made


async def test_version_alone_is_not_deleted(written: CloudWritten) -> None:
    """A DELETE of one version is refused: obstore sends no conditions with it."""
    etag = await written.put(b"1")

    assert await written.store.delete(written.ref, expected=etag) is False
    assert await written.seen() == (b"1", etag)


async def test_a_rewrite_of_the_own_version_is_one_request(written: CloudWritten) -> None:
    """An object that this process wrote is replaced without a look at it."""
    etag = await written.create(b"1")
    written.proxy.heal()
    written.notices.clear()

    await written.store.put(written.ref, [ByteRange(0, 1), b"2"], expected=etag)

    assert len(written.proxy.seen) == 1
    assert written.notices == [(2, 0, 0)]


async def test_generation_of_equal_bytes_is_looked_for_after_a_conflict(
    written: CloudWritten,
) -> None:
    """An object that others replaced by the same bytes can be replaced after one conflict."""
    etag = await written.create(b"same")
    await written.put(b"other")
    now = await written.put(b"same")

    outcomes = [await written.store.put(written.ref, [b"new"], expected=etag) for _ in range(2)]

    assert outcomes[0] is CONFLICT
    assert (outcomes[1] is CONFLICT) is (etag != now)


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_a_lost_connection_leaves_time_for_others(
    written: CloudWritten, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt to connect takes a quarter of the time of a write, so that more can follow."""
    opened: list[Client] = []

    def open_and_keep(*args: Any, **options: Any) -> Client:
        opened.append(open_client(*args, **options))
        return opened[-1]

    monkeypatch.setattr("shardgate.storage.obstore_write.open_client", open_and_keep)
    store = CloudStore("gs", written.settings, options=CloudWriteOptions(LONGEST_S))
    await store.put(written.ref, [b"1"], expected=None)

    (client,) = opened
    assert (client.client_options or {})["connect_timeout"] == f"{LONGEST_S / 2:g}s"


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_large_objects_are_sent_in_turns(written: CloudWritten) -> None:
    """While a large object is sent no other is, but small ones are."""
    large = bytes(LARGE_NBYTES + 1)

    async def put(name: str, data: bytes) -> object:
        return await written.store.put(written.root.join(name), [data], expected=ABSENT)

    with held_up(written.proxy, "PUT .*[ab] if") as hold:
        async with asyncio.TaskGroup() as group:
            writes = [group.create_task(put(name, large)) for name in "ab"]
            await asyncio.to_thread(hold.has_arrived.wait, LONGEST_S)
            await put("c", b"1")
            seen = list(written.proxy.seen)
            hold.end()

    assert [request.endswith("c if") for request in seen] == [True]
    assert all(isinstance(each.result(), str) for each in writes)


async def test_turn_of_a_large_object_is_waited_for_until_the_deadline(
    google_server: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large object whose turn does not come raises StorageTimeoutError."""
    monkeypatch.setenv(*next(iter(ENVIRON.items())))
    settings = StoreSettings(endpoint_url=google_server.url)
    large = bytes(LARGE_NBYTES + 1)
    with Proxy(google_server.url).running() as proxy, held_up(proxy, "PUT .*a if") as hold:
        written = CloudWritten("gs", settings, proxy, deadline_s=1)
        puts = (
            written.store.put(written.root.join(name), [large], expected=ABSENT) for name in "ab"
        )
        first = asyncio.create_task(next(puts))
        await asyncio.to_thread(hold.has_arrived.wait, LONGEST_S)

        with pytest.raises(StorageTimeoutError, match="other large objects"):
            await next(puts)

        first.cancel()
        await asyncio.wait([first])
        hold.end()


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_too_large_object_is_refused_before_it_is_read(written: CloudWritten) -> None:
    """An object over the limit is refused without a request, and the reason names both sizes."""
    etag = await written.create(b"1")
    written.proxy.heal()
    pieces: list[Piece] = [bytes(LARGEST_NBYTES), ByteRange(0, 1)]

    with pytest.raises(TooLargeError, match=f"{LARGEST_NBYTES + 1} bytes.*{LARGEST_NBYTES}"):
        await written.store.put(written.ref, pieces, expected=etag)

    assert written.proxy.seen == []


async def test_too_much_metadata_is_refused(written: CloudWritten) -> None:
    """Metadata that get longer than the server keeps are refused, and nothing is stored."""
    headers = ObjectHeaders(metadata=tuple((f"a-{n}.", "%" * 20) for n in range(110)))
    odd = replaced(headers, metadata=(*headers.metadata, ("cachecontrol", "%" * 2500)))

    with pytest.raises(BadHeaderError, match="7680 bytes of metadata"):
        await written.store.put(written.ref, [b"1"], expected=ABSENT, headers=odd)

    assert await written.direct.stat(written.ref) is None


@pytest.mark.parametrize("written", ["az"], indirect=True)
async def test_leased_blob_is_a_conflict_with_its_reason(
    written: CloudWritten, azurite: Azurite
) -> None:
    """Writing or deleting a blob that somebody leases is ConflictError, and no lost race."""
    etag = await written.create(b"1")
    azurite.lease(written.ref.key)

    for expected in (etag, None):
        with pytest.raises(ConflictError, match="lease"):
            await written.store.put(written.ref, [b"2"], expected=expected)
    with pytest.raises(ConflictError, match="lease"):
        await written.store.delete(written.ref, expected=None)
    assert await written.seen() == (b"1", etag)


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_object_of_google_is_not_cached(
    written: CloudWritten, google_server: GoogleServer
) -> None:
    """Objects say that no cache may answer without asking Google, also if they are public."""
    await written.create(b"1")

    assert google_server.objects[written.ref.key].headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_metadata_with_names_of_headers_stay_metadata(
    written: CloudWritten, google_server: GoogleServer
) -> None:
    """User metadata whose names obstore takes for headers are kept, and are no headers."""
    metadata = tuple((name, "gzip") for name in sorted(TAKEN))
    await written.store.put(
        written.ref, [b"1"], expected=ABSENT, headers=ObjectHeaders(metadata=metadata)
    )
    google_server.put("theirs", b"1", {"x-goog-meta-content-encoding": "gzip"})

    stat = await stat_of(written.store, written.ref)
    assert (stat.coding, tuple(sorted(stat.headers.metadata))) == ("", metadata)
    theirs = await stat_of(written.store, ObjectRef("gs://bucket", "theirs"))
    assert theirs.headers == ObjectHeaders(metadata=(("content-encoding", "gzip"),))


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_update_without_a_generation_is_never_sent(
    written: CloudWritten, google_server: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation that a PUT does not tell is looked for; without any, no update is sent."""
    monkeypatch.setattr(google_server, "silent", {"PUT"})
    etag = await written.create(b"1")
    etag_2 = await written.store.put(written.ref, [b"2"], expected=etag)
    assert isinstance(etag_2, str)
    assert await written.store.put(written.ref, [b"3"], expected=etag) is CONFLICT

    monkeypatch.setattr(google_server, "silent", {"PUT", "GET", "HEAD"})
    async with aclosing(CloudStore("gs", written.settings)) as other:
        with pytest.raises(UnwritableError, match="tells no generations"):
            await other.put(written.ref, [b"3"], expected=etag_2)
    assert (await written.seen())[0] == b"2"


@pytest.mark.parametrize("written", ["gs"], indirect=True)
async def test_key_that_obstore_changes_is_not_written(written: CloudWritten) -> None:
    """A key with empty or dot segments is refused without a request."""
    for name in ("a//b", "a/../b", "./a"):
        with pytest.raises(BadKeyError):
            await written.store.put(written.root.join(name), [b"1"], expected=None)
        with pytest.raises(BadKeyError):
            await written.store.delete(written.root.join(name), expected=None)

    assert written.proxy.seen == []


async def test_emulator_without_uploads_of_the_xml_api_is_refused(
    fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fake-gcs-server takes no PUT of an object, which the probe shows before any write."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    settings = StoreSettings(endpoint_url=fake_gcs.url)
    root = ObjectRef("gs://bucket", "root")
    async with aclosing(CloudStore("gs", settings)) as store:
        with pytest.raises(StorageUnusableError, match="answered 400"):
            await store.verify_conditional_writes(root)
        assert [each async for each in store.list(root)] == []


def test_refusal_of_a_token_is_no_refusal_of_the_store() -> None:
    """A server of tokens that answers 404 or 403 is an error of credentials, and no absence."""
    ref = ObjectRef("gs://bucket", "key")
    for status in ("404 Not Found", "403 Forbidden"):
        text = "Error performing token request: Server returned non-2xx status code: "
        error = failure(ref, GenericError(f"{text}{status}: no"))

        assert isinstance(error, StorageDeniedError)
        assert "no credentials to send" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, StorageUnavailableError), (429, StorageUnavailableError), (400, StorageDeniedError)],
)
def test_overload_of_the_server_of_tokens_is_temporary(
    status: int, kind: type[StorageError]
) -> None:
    """A server of tokens that is overloaded is asked again; other refusals are lasting."""
    text = f"Error performing token request: Server returned non-2xx status code: {status}: no"

    assert type(failure(ObjectRef("gs://bucket", "key"), GenericError(text))) is kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, StorageUnavailableError), (429, StorageThrottledError), (403, StorageDeniedError)],
)
def test_part_of_a_batch_is_classified_by_its_status(status: int, kind: type[StorageError]) -> None:
    """A DELETE of Azure, a batch, has the status of its part, whatever the key is."""
    key = "a (code: 200) status code: 404"
    text = f"Generic MicrosoftAzure error: Bulk delete request failed for key {key}: no "
    text += f'(code: {status})\n\nDebug source:\nGeneric {{ path: "{key}", code: "{status}" }}'

    assert type(failure(ObjectRef("az://bucket", key), GenericError(text))) is kind


TAKEN = frozenset(
    {"contenttype", "contentencoding", "contentdisposition", "contentlanguage", "cachecontrol"}
    | {"storageclass", "content-type", "cache-control", "storage-class", "c-ontent-encoding"}
)
"""Names that obstore would send as headers, or that look so."""
NAMES = st.from_regex(r"[a-z0-9!#$%&'*+.^_`|~-]{1,20}", fullmatch=True).filter(
    lambda name: not name.startswith("shardgate-")
)
VALUES = st.from_regex(r"[\x20-\x7e]{0,20}", fullmatch=True)
METADATA = st.dictionaries(
    NAMES | st.sampled_from(sorted(TAKEN | {"shardgate_writes", "shardgate_metadata"})),
    VALUES,
    max_size=30,
)


@given(METADATA, st.sampled_from(["", "gzip", "gzip, br"]), st.sampled_from(["gs", "az"]))
def test_any_metadata_are_returned_as_they_were_sent(
    metadata: dict[str, str], coding: str, scheme: str
) -> None:
    """Headers become attributes of obstore, and again the headers that they were."""
    headers = ObjectHeaders(coding, "text/plain", tuple(sorted(metadata.items())))
    ids = ("0123456789abcdef",)

    attributes = attributes_of(ObjectRef(f"{scheme}://bucket", "key"), headers, ids)
    stored = stored_headers(attributes)

    assert not TAKEN & set(attributes)
    kept = object_headers(stored)
    assert replaced(kept, metadata=tuple(sorted(kept.metadata))) == headers
    assert stored[b"x-amz-meta-shardgate-writes"] == ids[0].encode()
